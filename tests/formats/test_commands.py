"""Commands of trainers around transformers, as bug reports show them, read to the same job as the YAML of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.errors import FormatError, GnomonError
from gnomon.formats import programs
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job

ON = ReadContext(devices=8, model="llama-tiny")


def read(folder: Path, text: str, given: ReadContext = ON, **files: str) -> tuple[str, Job]:
    """(format by what is in it, job) of a script with files beside it; `a__b` in a name is `a.b`."""
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    path = folder / "job.sh"
    path.write_text(text)
    program = programs.recognised(path)
    assert program is not None
    return program.name, program.read(path, given)


def from_yaml(folder: Path, name: str, text: str, given: ReadContext = ON) -> Job:
    path = folder / "job.yaml"
    path.write_text(text)
    return programs.find(name).read(path, given)


def alike(one: Job, other: Job) -> bool:
    """The same plan, batch and software."""
    return one.plan == other.plan and one.workload == other.workload and one.stack == other.stack


FACTORY = """
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: lora
cutoff_len: 4096
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
lora_rank: 8
bf16: true
deepspeed: ds_z3_offload_config.json
"""
FACTORY_FLAGS = """--stage sft --do_train True --finetuning_type lora --cutoff_len 4096 \\
  --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --gradient_accumulation_steps=4 \\
  --lora_rank 8 --bf16 --deepspeed ds_z3_offload_config.json --output_dir out"""


@pytest.mark.parametrize(
    "command",
    [
        f"llamafactory-cli train {FACTORY_FLAGS}",
        f"deepspeed --num_gpus 8 src/train_bash.py {FACTORY_FLAGS}",
        f"torchrun --nproc_per_node 8 src/train.py {FACTORY_FLAGS}",
        f"python -m torch.distributed.run --nproc_per_node 8 src/llamafactory/launcher.py {FACTORY_FLAGS}",
    ],
)
def test_llama_factorys_flags_are_its_yaml(tmp_path: Path, command: str) -> None:
    name, job = read(tmp_path, command)
    assert name == "llama-factory"
    assert alike(job, from_yaml(tmp_path, name, FACTORY))
    assert job.plan.optimizer.offload is not None and job.plan.optimizer.offload_parameters
    assert any("LLaMA-Factory" in line for line in job.assumed)


def test_a_yaml_file_that_a_command_names_is_read_with_what_the_command_changes(tmp_path: Path) -> None:
    _, job = read(tmp_path, "llamafactory-cli train conf.yaml cutoff_len=512", conf__yaml=FACTORY)
    assert job.workload.seq_len == 512 and job.plan.schedule.micro_batch_size == 2
    with pytest.raises(GnomonError, match="takes its fields from 'gone.yaml', which is not here"):
        read(tmp_path, "llamafactory-cli train gone.yaml")


RUN_CLM = """torchrun --nproc_per_node=8 run_clm.py --model_name_or_path x --per_device_train_batch_size 1 \\
  --gradient_accumulation_steps 8 --block_size 512 --bf16 --gradient_checkpointing --fsdp "full_shard auto_wrap" \\
  --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --output_dir o --do_train"""


def test_scripts_of_transformers_shard_as_their_flags_say(tmp_path: Path) -> None:
    name, job = read(tmp_path, RUN_CLM)
    assert name == "transformers"
    assert job.plan.optimizer.zero == 3 and job.plan.saved.preset == "full"
    assert job.plan.precision.param == "fp32" and job.plan.precision.compute == "bf16"
    assert (job.workload.global_batch_size, job.workload.seq_len, job.stated_devices) == (64, 512, 8)
    assert not [field for field in job.unexpressed if "no reader knows" in field.why]


def test_weights_in_bf16_without_mixed_precision_stay_in_bf16(tmp_path: Path) -> None:
    pure = RUN_CLM.replace("--bf16", "--torch_dtype bfloat16")
    assert read(tmp_path, pure)[1].plan.precision.param == "bf16"


FSDP = """
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_offload_params: false
mixed_precision: bf16
num_processes: 8
"""
REWARD = "reward_modeling.py --model_name_or_path x --per_device_train_batch_size 1 --max_length 1024 --optim sgd"


def test_trl_takes_sharding_and_precision_from_accelerate(tmp_path: Path) -> None:
    name, job = read(tmp_path, f"accelerate launch --config_file fsdp.yaml {REWARD}", fsdp__yaml=FSDP)
    assert name == "trl"
    assert job.plan.optimizer.zero == 3 and not job.plan.optimizer.reshard_after_forward
    assert job.plan.optimizer.kind == "sgd" and job.plan.precision.compute == "bf16"
    assert any(field.field == "script" for field in job.unexpressed)  # pairs, scored
    flags = "--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --mixed_precision bf16 --num_processes 8"
    assert alike(job, read(tmp_path, f"accelerate launch {flags} {REWARD}")[1])


def test_the_optimizer_of_the_script_is_wrapped_by_deepspeed(tmp_path: Path) -> None:
    flags = "--use_deepspeed --zero_stage 2 --offload_optimizer_device cpu --mixed_precision bf16"
    _, job = read(tmp_path, f"accelerate launch {flags} sft.py {REWARD.partition(' ')[2]}")
    assert job.plan.optimizer.kind == "sgd"
    assert job.plan.optimizer.zero == 2 and job.plan.optimizer.offload is not None
    assert job.plan.saved.preset == "full" and any("TRL's default" in line for line in job.assumed)


def test_configurations_that_projects_ship_need_not_be_here(tmp_path: Path) -> None:
    _, job = read(tmp_path, f"accelerate launch --config_file recipes/accelerate_configs/zero3.yaml {REWARD}")
    assert job.plan.optimizer.zero == 3 and any("is not here: taken as TRL" in line for line in job.assumed)
    with pytest.raises(GnomonError, match=r"accelerate's configuration is in 'mine.yaml', which is not here"):
        read(tmp_path, f"accelerate launch --config_file mine.yaml {REWARD}")


SWIFT = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --train_type full --max_length 512 --torch_dtype bfloat16"


def test_swift_fills_a_step_to_sixteen_sequences(tmp_path: Path) -> None:
    name, job = read(tmp_path, f"{SWIFT} --deepspeed zero3_offload")
    assert name == "swift"
    assert job.workload.global_batch_size == 16 and job.stated_devices == 8 and job.plan.saved.preset == "full"
    assert job.plan.optimizer.offload is not None and job.plan.optimizer.offload_parameters
    lora = read(tmp_path, SWIFT.replace("--train_type full", ""))[1].graph()
    assert 0 < lora.num_parameters() < lora.num_frozen()


MEGATRON = """NNODES=2 NPROC_PER_NODE=8 megatron sft --load Qwen3-30B-A3B-mcore --tensor_model_parallel_size 2 \\
  --expert_model_parallel_size 4 --micro_batch_size 1 --global_batch_size 16 --packing true --sequence_parallel true \\
  --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --max_length 4096 \\
  --bias_dropout_fusion false --overlap_grad_reduce false"""


def test_megatron_sft_takes_the_network_from_the_hub_and_swifts_defaults(tmp_path: Path) -> None:
    name, job = read(tmp_path, MEGATRON, ReadContext())
    assert name == "swift"
    assert job.plan.mesh.tp == 2 and job.plan.mesh.ep == 4 and job.plan.mesh.etp == 1
    assert job.plan.optimizer.zero == 1 and job.plan.precision.compute == "bf16"  # use_distributed_optimizer
    assert job.workload.seq_len == 4096 and job.devices == 16 and not job.plan.overlap.grad_reduce
    assert job.graph().num_parameters() > 30e9


NEMO = """TP=2
torchrun --nproc_per_node=8 examples/nlp/language_modeling/megatron_llama_pretraining.py \\
  trainer.precision=bf16 trainer.devices=8 trainer.num_nodes=1 model.num_layers=4 model.hidden_size=256 \\
  model.ffn_hidden_size=512 model.num_attention_heads=8 model.num_query_groups=8 model.micro_batch_size=1 \\
  model.global_batch_size=8 model.tensor_model_parallel_size=${TP} model.sequence_parallel=True \\
  model.optim.name=distributed_fused_adam"""


def test_hydras_overrides_of_nemo_are_its_yaml(tmp_path: Path) -> None:
    name, job = read(tmp_path, NEMO, ReadContext(devices=8, vocab_size=32000))
    assert name == "nemo"
    assert job.plan.mesh.tp == 2 and job.plan.layout.sequence_parallel and job.plan.optimizer.zero == 1
    assert any("NeMo's own configuration" in line for line in job.assumed)


@pytest.mark.parametrize("command", [[], ["--from"]])
def test_a_pasted_command_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(RUN_CLM))
    status = main(["predict", *command, "-", "--model", "llama-3.2-1b", "--on", "1x8xa100-sxm-80gb"])
    assert status == 0, capsys.readouterr().err
    assert "ZeRO 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "standard input holds nothing"),
        ("make install", "what was pasted is no model and no job file"),
        (RUN_CLM.replace("--block_size 512", "--block_size many"), "expected an integer of at least 1, got 'many'"),
        (RUN_CLM.replace("size 1", "size 0"), "per_device_train_batch_size"),
        (SWIFT.replace("bfloat16", "half"), "torch_dtype"),
        (SWIFT + " --deepspeed mine.json", "its DeepSpeed settings are in 'mine.json', which is not here"),
    ],
)
def test_mistakes_are_one_line_with_the_files_own_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["predict", "-", "--on", "1x8xa100-sxm-80gb", "--model", "llama-3.2-1b"]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "deepspeed --module openrlhf.cli.train_sft --per_device_train_batch_size 1 --model.model_name_or_path x",
            None,
        ),
        ("torchrun -m verl.trainer.fsdp_sft_trainer data.train_batch_size=8", None),
        ("python fastchat/train/train_mem.py --model_max_length 512 --per_device_train_batch_size 1", "transformers"),
        ("trl dpo --model_name_or_path x --per_device_train_batch_size 1", "trl"),
        ("python -m swift.cli.sft --model x --per_device_train_batch_size 1", "swift"),
        ("python pretrain_gpt.py --micro-batch-size 1 --num-layers 2", "megatron"),
    ],
)
def test_a_command_is_of_one_program_at_most(tmp_path: Path, command: str, expected: str | None) -> None:
    (tmp_path / "run.sh").write_text(command)
    program = programs.recognised(tmp_path / "run.sh")
    assert expected is None or program is not None and program.name == expected


def test_commands_in_branches_on_an_argument(tmp_path: Path) -> None:
    flags = "--model_name_or_path gpt2 --per_device_train_batch_size 1 --max_seq_length 64"
    script = f'if [ "$1" == "plain" ]; then\n  python run_clm.py {flags}\n'
    script += f'elif [ "$1" == "half" ]; then\n  python run_clm.py {flags} --fp16\nfi\n'
    with pytest.raises(FormatError, match=r"by its argument: give one, as in --set args=plain \(plain, half\)"):
        read(tmp_path, script)
    chosen = replace(ON, settings={"args": "half"})
    assert read(tmp_path, script, chosen)[1].plan.precision.compute == "fp16"


def test_a_stage_is_read_from_the_name_with_what_it_keeps_on_the_host(tmp_path: Path) -> None:
    def optimizer(name: str) -> tuple[int, bool, bool]:
        found = from_yaml(tmp_path, "llama-factory", FACTORY.replace("ds_z3_offload_config.json", name)).plan.optimizer
        return found.zero, found.offload is not None, found.offload_parameters

    assert optimizer("conf/my_zero2.json") == (2, False, False)
    assert optimizer("conf/zero2_offload.json") == (2, True, False)
    assert optimizer("conf/stage3_offload.json") == (3, True, True)
    assert optimizer("zero3_bf16_cpuoffload_params.json") == (3, False, True)
    assert optimizer("deepspeed_configs/zero2.json") == (2, True, False)


def test_transformers_modules_are_eager_unless_liger_or_the_compiler_is_asked_for(tmp_path: Path) -> None:
    """LlamaRMSNorm keeps an fp32 row and the normalised one: a stack that fuses norms keeps too little."""
    for flags, norm in (("", "unfused"), (" --use_liger_kernel", "fused"), (" --torch_compile True", "fused")):
        assert read(tmp_path, RUN_CLM + flags)[1].stack.layers.norm == norm
    assert read(tmp_path, SWIFT + " --deepspeed zero2")[1].stack.layers.norm == "unfused"


def test_states_in_eight_bits_are_a_byte_each(tmp_path: Path) -> None:
    for name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"):
        assert read(tmp_path, f"{RUN_CLM} --optim {name}")[1].plan.precision.states == "int8"
    assert read(tmp_path, f"{RUN_CLM} --optim paged_adamw_32bit")[1].plan.precision.states == "fp32"
    by_deepspeed = read(tmp_path, f"{SWIFT} --deepspeed zero2 --optim adamw_bnb_8bit")[1].plan
    assert by_deepspeed.precision.states == "int8" and by_deepspeed.precision.master == "fp32"


def test_expr_is_computed_as_the_shell_computes_it(tmp_path: Path) -> None:
    """`$(expr 16 / $GPUS)`, as ms-swift's examples write their accumulation."""
    for words in ("$(expr 16 / $N)", "`expr 16 / $N`", "$(expr $N \\* 1)"):
        script = f"N=4\n{SWIFT} --deepspeed zero2 --gradient_accumulation_steps {words}\n"
        job = read(tmp_path, script)[1]
        assert job.workload.global_batch_size == 4 * job.plan.mesh.data_ranks * (
            job.plan.schedule.micro_batch_size or 1
        )


CLM = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 1 --gradient_accumulation_steps 1 --bf16 "


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        ("--lora_enable True --bits 4 --lora_r 16", "+qlora16:q_proj,v_proj"),
        ("--lora_enable True --bits 16 --lora_r 16", "+lora16:q_proj,v_proj"),
        ("--model_name_or_path unsloth/llama-3-8b-bnb-4bit --use_peft", "+qlora8:q_proj,v_proj"),
        ("--use_qlora 1", "+qlora8:q_proj,v_proj"),
        ("--model_name_or_path gpt2 --use_lora", "+lora8:c_attn"),
        ("--model_name_or_path EleutherAI/pythia-1b --use_lora", "+lora8:query_key_value"),
    ],
)
def test_adapters_are_on_what_the_script_and_the_name_of_the_weights_say(
    flags: str, model: str, tmp_path: Path
) -> None:
    named = "" if "--model_name" in flags else "--model_name_or_path meta-llama/Llama-2-7b-hf "
    name, job = read(tmp_path, CLM + named + flags, ReadContext(devices=8))
    assert name == "transformers" and job.graph().name.endswith(model)


def test_arguments_in_json_are_a_file_of_the_same_script(tmp_path: Path) -> None:
    path = tmp_path / "qlora.json"
    path.write_text(
        '{"model_name_or_path": "meta-llama/Llama-2-13b-hf", "train_file": "d.jsonl", "lora_rank": 64, "fp16": true,'
        ' "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "max_seq_length": 1024}'
    )
    program = programs.recognised(path)
    assert program is not None and program.name == "transformers"
    assert "+lora64" in program.read(path, ReadContext(devices=8)).graph().name


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("colossalai run --nproc_per_node 8 train.py --tp_degree 2", r"train\.py is not known here.*--model"),
        ("colossalai run --nproc_per_node 8 train.py -c 7b", "no flag says its batch"),
        ("colossalai run --nproc_per_node 8 train_sft.py --pretrain $NONE --plugin zero2", "--pretrain has no name"),
        (CLM + "--model_name_or_path the path of a model", "takes one name, not 'the path of a model'"),
        (CLM + "--bits 3 --model_name_or_path meta-llama/Llama-2-7b-hf", "3 bits.*`\\$.bits`"),
        (CLM + "--model_name_or_path meta-llama/Llama-2-7b-hf --deepspeed $DS", "deepspeed takes 'DS', which the"),
    ],
)
def test_what_a_command_leaves_open_is_asked_for_by_its_flag(command: str, said: str, tmp_path: Path) -> None:
    text = command.replace("$NONE", "$PRETRAINED")
    with pytest.raises(GnomonError, match=said):
        read(tmp_path, f'PRETRAINED=""\n{text}', ReadContext(devices=8))


def test_a_script_with_an_empty_name_is_read_with_the_model_that_is_given_and_says_what_it_learns(
    tmp_path: Path,
) -> None:
    text = 'PRETRAINED=""\ncolossalai run --nproc_per_node 8 train_dpo.py --pretrain $PRETRAINED --plugin zero2\n'
    _, job = read(tmp_path, text)
    assert any(one.value == "train_dpo" and "reference model" in one.why for one in job.unexpressed)


def test_an_optimizer_a_parameter_of_swift_steps_after_backward(tmp_path: Path) -> None:
    text = (
        SWIFT + " --train_type full --use_galore true --galore_optim_per_parameter true --gradient_accumulation_steps 4"
    )
    _, job = read(tmp_path, text)
    assert job.plan.optimizer.low_rank is not None
