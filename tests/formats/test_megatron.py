"""Megatron-LM and Megatron-Bridge: scripts with known settings give the plans and parameter counts of their models.

The scripts in `fixtures/megatron` hold the settings of public ones. Refusals are those of Megatron-LM's own
validate_args, TransformerConfig and schedules (named in the reader).
"""

from __future__ import annotations

import shlex
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import FormatError, GnomonError, InputError
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job
from gnomon.formats.megatron.read import DISPATCHERS, read_megatron
from gnomon.formats.megatron.recompute import module_rules
from gnomon.formats.megatron_bridge.read import read_megatron_bridge
from gnomon.models.decoder import DecoderConfig
from gnomon.models.deepseek import DeepseekConfig, deepseek_v3_671b
from gnomon.models.gpt import GptConfig, gpt2
from gnomon.models.llama import LlamaConfig, llama3_1_70b
from gnomon.models.mixtral import mixtral_8x7b
from gnomon.models.presets import build
from gnomon.plans import Experts, Plan, Saved, SavedRule, check
from gnomon.prediction import predict

SCRIPTS = Path(__file__).parent / "fixtures/megatron"
GPT: dict[str, Any] = {
    "num-layers": 24,
    "hidden-size": 1024,
    "num-attention-heads": 16,
    "seq-length": 1024,
    "max-position-embeddings": 1024,
    "micro-batch-size": 2,
    "global-batch-size": 64,
    "vocab-size": 50257,
    "bf16": True,
}
LLAMA = {
    **GPT,
    "swiglu": True,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "ffn-hidden-size": 2816,
    "group-query-attention": True,
    "num-query-groups": 8,
}


def words(options: dict[str, Any], **changes: Any) -> list[str]:
    """Arguments; True is a switch, None leaves out, names take `_` for `-`."""
    chosen = {**options, **{key.replace("_", "-"): value for key, value in changes.items()}}
    spelled = [(f"--{key}", value) for key, value in chosen.items() if value is not None and value is not False]
    return [w for key, value in spelled for w in ([key] if value is True else [key, *str(value).split()])]


def job(options: dict[str, Any] = GPT, devices: int = 8, **changes: Any) -> Job:
    return read_megatron(words(options, **changes), devices=devices)


def test_the_llama_example() -> None:
    result = read_megatron(SCRIPTS / "llama3_8b.sh")
    assert result.graph().num_parameters() == 8_030_261_248
    assert result.devices == 8 and result.plan.mesh.dp_shard == 8
    assert (result.workload.global_batch_size, result.workload.seq_len) == (128, 8192)
    assert result.plan.optimizer.zero == 1 and result.plan.overlap.grad_reduce and result.plan.overlap.param_gather
    assert result.plan.precision.grad == "bf16" and result.plan.precision.master == "fp32"
    assert result.plan.precision.fp8 is not None and result.plan.precision.fp8.recipe == "delayed"
    assert result.plan.overlap.bucket_bytes == 40_000_000 * 2
    assert result.stack.loss.cross_entropy == "fused" and result.stack.layers.attention == "flash"
    assert not result.plan.layout.sequence_parallel and any("sequence_parallel" in note for note in result.notes)
    assert result.unexpressed == ()
    check(result.plan, result.graph(), None, result.workload)


def test_the_175b_row_of_korthikanti() -> None:
    env = {"BATCH": "64", "VOCAB": "v.json"}
    result = read_megatron(SCRIPTS / "gpt3_175b.sh", devices=64, env=env)
    plan = result.plan
    assert (plan.mesh.tp, plan.mesh.pp, plan.mesh.dp_shard) == (8, 8, 1)
    assert (plan.schedule.name, plan.schedule.virtual_stages) == ("interleaved_one_f_one_b", 3)
    assert plan.saved == Saved(preset="selective") and plan.layout.sequence_parallel
    assert plan.precision.param == "fp16" and plan.precision.grad == "fp16"
    assert plan.overlap.pipeline_sends
    # 12 l h² (1 + 13 / 12h) + (V + s) h + 2h, with V = 50257 padded to 51200 (a multiple of 128 x 8).
    h, layers, vocab = 12288, 96, 51200
    assert result.graph().num_parameters() == layers * (12 * h * h + 13 * h) + (vocab + 2048) * h + 2 * h
    with pytest.raises(InputError, match="= 8 microbatches, but the global batch gives 4; .* of 128 gives 8"):
        read_megatron(SCRIPTS / "gpt3_175b.sh", devices=1024, env=env)
    with pytest.raises(InputError, match="'BATCH', which the script does not set"):
        read_megatron(SCRIPTS / "gpt3_175b.sh", devices=64)


def test_devices_come_from_slurm_when_the_launcher_is_srun() -> None:
    result = read_megatron(SCRIPTS / "gpt3_175b.sh", env={"BATCH": "1024"})
    assert result.devices == 1024 and result.plan.mesh.dp_shard == 16


def test_defaults_are_those_of_the_program() -> None:
    plan = job().plan
    assert plan.optimizer.zero == 0 and not plan.overlap.grad_reduce and not plan.overlap.param_gather
    assert plan.precision.grad == "fp32" and plan.precision.reduce == "fp32"  # bf16 accumulates in fp32
    assert job(global_batch_size=None).workload.global_batch_size == 2 * 8
    assert job(bf16=None).plan.precision.param == "fp32"
    # GPT-2 medium, with 50257 padded to 50304.
    assert job().graph().num_parameters() == 354_823_168 + (50304 - 50257) * 1024


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({"recompute_activations": True}, Saved(preset="selective")),
        ({"recompute_granularity": "selective"}, Saved(preset="selective")),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
            Saved(preset="full", every=2),
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
            Saved(rules=(SavedRule(preset="full", first_per_stage=3),)),
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": "core_attn layernorm"},
            Saved(preset="selective", rules=(SavedRule(tensors=("ln_1*", "ln_2*"), action="recompute"),)),
        ),
    ],
)
def test_recomputation(changes: dict[str, Any], saved: Saved) -> None:
    result = job(**changes)
    assert result.plan.saved == saved
    check(result.plan, result.graph())


def test_stages_of_unequal_size() -> None:
    pipeline = {"pipeline_model_parallel_size": 4}
    ends = {"decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 3}
    assert job(**pipeline, **ends).plan.schedule.layers_per_stage == (5, 8, 8, 3)
    counted = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert job(num_layers=26, **pipeline, **counted).plan.schedule.layers_per_stage == (6, 7, 7, 6)


def test_a_layout_string() -> None:
    result = job(num_layers=5, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t|tt|tL")
    assert result.plan.schedule.layers_per_stage == (1, 1, 2, 1) and result.plan.schedule.virtual_stages == 2
    repeated = job(num_layers=6, pipeline_model_parallel_size=4, pipeline_model_parallel_layout="E|(tt|)*2,t*2,L")
    assert repeated.plan.schedule.layers_per_stage == (0, 2, 2, 2)


def test_a_deepseek_shape() -> None:
    result = job(
        LLAMA,
        devices=16,
        num_layers=8,
        group_query_attention=None,
        multi_latent_attention=True,
        q_lora_rank=512,
        kv_lora_rank=128,
        num_experts=16,
        moe_ffn_hidden_size=256,
        moe_router_topk=4,
        moe_shared_expert_intermediate_size=512,
        moe_layer_freq="([0]*2+[1]*6)",
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall",
        mtp_num_layers=1,
    )
    model = result.model
    assert isinstance(model, DeepseekConfig)
    assert (model.num_dense_layers, model.num_shared_experts, model.mtp_modules) == (2, 2, 1)
    assert (result.plan.mesh.ep, result.plan.mesh.etp, result.plan.layout.dispatch) == (8, 1, "all_to_all")
    assert result.unexpressed == ()


@pytest.mark.parametrize(
    ("model", "modules", "calls"),
    [
        (deepseek_v3_671b(), ("mla_up_proj", "mlp", "moe_act"), ("*", "layers[0:3]", "*")),
        (mixtral_8x7b(), ("mla_up_proj", "mlp", "moe_act"), ("*",)),
        (gpt2(), ("mla_up_proj", "mlp", "layernorm"), ("*", "*")),
        (deepseek_v3_671b(), ("moe", "shared_experts"), ("layers[3:61]", "*")),
        (mixtral_8x7b(), ("moe", "shared_experts"), ("*",)),
    ],
)
def test_modules_that_are_made_again(model: Any, modules: tuple[str, ...], calls: tuple[str, ...]) -> None:
    """`mlp` is a dense feed-forward, `moe_act` an expert's; a module that a model lacks changes nothing."""
    rules, unknown = module_rules((*modules, "shared_mlp"), model)
    assert tuple(rule.calls for rule in rules) == calls and unknown == ("shared_mlp",)
    graph = build(model)
    check(Plan(saved=Saved(rules=rules)), graph)
    names = {tensor.name for block in graph.blocks for tensor in block.tensors}
    assert all(any(fnmatchcase(name, p) for name in names) for rule in rules for p in rule.tensors)


def test_fused_experts_and_dispatch_beside_another_microbatch() -> None:
    result = job(
        num_experts=8,
        moe_router_topk=2,
        expert_model_parallel_size=4,
        moe_token_dispatcher_type="flex",
        use_transformer_engine_op_fuser=True,
        overlap_moe_expert_parallel_comm=True,
        fp8_format="e4m3",
        fp8_recipe="mxfp8",
        fp8_dot_product_attention=True,
    )
    assert (result.plan.layout.dispatch, result.stack.experts.moe_experts) == ("fused", "fused")
    assert result.plan.overlap.experts and result.plan.precision.fp8 is not None and result.plan.precision.fp8.attention
    assert not {u.field for u in result.unexpressed} & {"overlap_moe_expert_parallel_comm", "fp8_dot_product_attention"}


@pytest.mark.parametrize("written", DISPATCHERS.values())
def test_how_tokens_get_to_experts_and_how_experts_run(written: tuple[str, str | None]) -> None:
    kind, backend = written
    more = {} if backend is None else {"moe_flex_dispatcher_backend": backend}
    asked: dict[str, Any] = {
        "num_experts": 8,
        "moe_router_topk": 2,
        "expert_model_parallel_size": 4,
        "moe_token_dispatcher_type": kind,
    }
    grouped, alone = job(**asked, **more, moe_grouped_gemm=True), job(**asked, **more)
    dispatch = grouped.plan.layout.dispatch
    assert dispatch is not None and DISPATCHERS[dispatch] == written
    assert [one.stack.experts.moe_experts for one in (grouped, alone)] == ["looped", "sequential"]
    assert any("moe_grouped_gemm" in note for note in grouped.notes)
    steps = [predict(one.graph(), "1x8xh100-sxm", one.plan, one.workload, one.stack) for one in (grouped, alone)]
    assert steps[1].step_s > steps[0].step_s
    said = [any("--moe-grouped-gemm" in line for line in one.assumptions) for one in steps]
    assert said == [False, True]


def test_the_gate_of_a_shared_expert_is_one_number_a_token() -> None:
    """A matrix of hidden x 1 in every layer that routes (megatron/core/transformer/moe/shared_experts.py)."""
    shared = dict(num_experts=8, moe_router_topk=2, moe_shared_expert_intermediate_size=512)
    gated, plain = job(LLAMA, **shared, moe_shared_expert_gate=True), job(LLAMA, **shared)
    added = gated.graph().num_parameters() - plain.graph().num_parameters()
    assert added == int(LLAMA["num-layers"]) * int(LLAMA["hidden-size"])
    assert "moe_shared_expert_gate" not in {u.field for u in gated.unexpressed}


def test_deterministic_mode_is_the_stacks() -> None:
    result = job(deterministic_mode=True)
    assert result.stack.layers.deterministic and not any(u.field == "deterministic_mode" for u in result.unexpressed)
    assert job().stack.layers.deterministic is None


def test_megatron_deepspeed() -> None:
    result = job(deepspeed=True, zero_stage=2, deepspeed_config="ds.json", train_tokens=10**9, use_flash_attn_v2=True)
    assert result.plan.optimizer.zero == 2
    assert (result.stack.name, result.stack.layers.attention) == ("megatron-deepspeed", "flash")
    assert [u.field for u in result.unexpressed] == ["deepspeed_config"]
    ulysses = job(deepspeed=True, ds_sequence_parallel_size=4).plan
    assert (ulysses.mesh.cp, ulysses.mesh.dp_shard, ulysses.layout.context) == (4, 2, "ulysses")
    assert job(deepspeed=True).stack.layers.attention == "unfused"
    old = job(deepspeed=True, checkpoint_activations=True, pipeline_model_parallel_size=2, enable_zbh1_pipeline=True)
    assert old.plan.saved == Saved(preset="full") and old.plan.schedule.name == "zero_bubble_h1"
    grouped = job({**LLAMA, "group-query-attention": None, "num-query-groups": None}, num_key_value_heads=4)
    assert isinstance(grouped.model, LlamaConfig) and grouped.model.num_kv_heads == 4


def test_what_has_no_place_is_reported() -> None:
    result = job(
        LLAMA, tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True, fp32_residual_connection=True
    )
    assert {u.field for u in result.unexpressed} == {"tp_comm_overlap", "fp32_residual_connection"}
    dropout = job(LLAMA, hidden_dropout=None, attention_dropout=None)  # 0.1 each unless given
    assert {u.field for u in dropout.unexpressed} == {"hidden_dropout", "attention_dropout"}
    [ramp] = job(rampup_batch_size="16 16 100").unexpressed
    assert ramp.field == "rampup_batch_size" and "final global batch, 64" in ramp.why
    [unknown] = job(tensor_model_paralel_size=2).unexpressed
    assert unknown.value == "2" and "did you mean 'tensor_model_parallel_size'" in unknown.why


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"squared_relu": True, "group_query_attention": True, "num_query_groups": 4}, {"activation": "relu2"}),
        ({"position_embedding_type": "alibi", "embed_layernorm": True}, {"rotary": False, "embed_norm": True}),
        ({"swiglu": True}, {"gated": True, "position_rows": 1024, "norm": "layer"}),
        ({"normalization": "RMSNorm", "disable_bias_linear": True}, {"norm": "rms", "ffn_bias": False}),
        ({"num_experts": 8, "moe_layer_freq": 2}, {"gated": False, "position_rows": 1024}),
    ],
)
def test_other_decoders_are_put_together_of_their_parts(changes: dict[str, Any], parts: dict[str, Any]) -> None:
    result = job(**changes)
    assert isinstance(result.model, DecoderConfig) and result.unexpressed == ()
    assert {name: getattr(result.model, name) for name in parts} == parts
    check(result.plan, result.graph(), None, result.workload)


def test_latent_attention_without_experts() -> None:
    result = job(LLAMA, group_query_attention=None, multi_latent_attention=True, kv_lora_rank=128)
    assert isinstance(result.model, DeepseekConfig) and result.model.num_dense_layers == 24
    assert not [dim for block in result.graph().blocks for dim in block.dims if dim.name == "experts"]


@pytest.mark.parametrize(
    ("layers", "pp", "method", "split"),
    [(70, 12, "type:transformer|embedding", (5, *[6] * 10, 5)), (24, 4, None, ()), (30, 4, None, (8, 8, 7, 7))],
)
def test_stages_of_megatron_deepspeed(layers: int, pp: int, method: str | None, split: tuple[int, ...]) -> None:
    """The first is BLOOM 176B's; the last what DeepSpeed's partition_balanced gives."""
    changes = {"pipeline_model_parallel_size": pp, "pp_partition_method": method, "global_batch_size": 2 * pp}
    assert job(devices=pp, deepspeed=True, num_layers=layers, **changes).plan.schedule.layers_per_stage == split


def test_what_a_script_leaves_open_is_given_by_one_rule() -> None:
    """Options and variables alike, by --set; what a message says to give is taken when it is given."""
    text = " ".join(["python pretrain_gpt.py", *words(GPT, vocab_size=None), "--tensor-model-parallel-size $TP $MORE"])
    with pytest.raises(InputError, match="'TP', which the script does not set; .* or give --set TP="):
        read_megatron(text, devices=8)
    settings = {"TP": "2", "seq_length": "512", "--num-layers": "12", "MORE": "--swiglu --sequence-parallel"}
    result = read_megatron(text, devices=8, context=ReadContext(settings=settings, vocab_size=1000))
    assert (result.plan.mesh.tp, result.workload.seq_len, result.plan.layout.sequence_parallel) == (2, 512, True)
    assert isinstance(result.model, DecoderConfig) and (result.model.num_layers, result.model.vocab_size) == (12, 1024)
    with pytest.raises(InputError, match=r"uses no variable 'PT'.*did you mean 'TP'"):
        read_megatron(text, devices=8, context=ReadContext(settings={"PT": "2"}))
    other = read_megatron(text, devices=8, context=ReadContext(settings={"TP": "2"}, model=llama3_1_70b()))
    assert other.graph().num_parameters() == build(llama3_1_70b()).num_parameters()
    assert {u.field for u in other.unexpressed} == {"$MORE"}
    with pytest.raises(InputError, match="--model NAME"):
        read_megatron("torchrun pretrain_ict.py --num-layers 24", devices=8)


def test_a_forks_options_are_read_by_their_families() -> None:
    slime = job(
        LLAMA,
        seq_length=None,
        micro_batch_size=None,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=2048,
        max_position_embeddings=None,
        rollout_batch_size=32,
        actor_num_nodes=1,
        actor_num_gpus_per_node=8,
    )
    assert slime.workload.seq_len == 2048 and slime.stated_devices == 8
    assert [u.field for u in slime.unexpressed] == ["use_dynamic_batch_size"]
    pai = job(LLAMA, extra_vocab_size=421, patch_tokenizer_type="Qwen2Tokenizer", vocab_size=None)
    with pytest.raises(InputError, match="--vocab-size"):
        job(LLAMA, extra_vocab_size=421, tokenizer_type="Qwen2Tokenizer", vocab_size=None)
    assert isinstance(pai.model, LlamaConfig) and pai.model.vocab_size == 50257 + 421


def test_without_a_tokenizer_it_is_that_of_pretrain_gpt() -> None:
    """GPT-2's 50,257 tokens in multiples of 128 x tp, as in Megatron-LM's own example of GPT-3."""
    result = job(GPT, vocab_size=None, tensor_model_parallel_size=8)
    assert isinstance(result.model, GptConfig) and result.model.vocab_size == 51200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_model_parallel_size": 3},
            "8 devices are not a multiple of .* = 3; the nearest number of devices is 9",
        ),
        ({"global_batch_size": 65}, "global_batch_size = 65 is not a multiple of .* = 2 x 8 = 16; .* is 64"),
        ({"pipeline_model_parallel_size": 8, "num_layers": 20}, "num_layers .* = 20 is not divisible"),
        ({"num_attention_heads": 12, "tensor_model_parallel_size": 8, "hidden_size": 768}, "heads = 12 .* is 6"),
        ({"num_attention_heads": 7}, "hidden_size = 1024 is not divisible by num_attention_heads = 7"),
        ({"max_position_embeddings": 512}, "512 positions for seq_length = 1024"),
        ({"context_parallel_size": 2, "seq_length": 1022}, "2 x context_parallel_size = 4"),
        ({"overlap_param_gather": True}, "needs --use-distributed-optimizer"),
        ({"overlap_param_gather": True, "use_distributed_optimizer": True}, "needs --overlap-grad-reduce"),
        ({"tp_comm_overlap": True}, "needs --sequence-parallel"),
        ({"fp16": True}, "keep one"),
        ({"expert_model_parallel_size": 2}, "without --num-experts"),
        ({"recompute_granularity": "full"}, "uniform or block"),
        ({"recompute_granularity": "selective", "recompute_method": "uniform"}, "takes no method"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "at least 2 pipeline ranks"),
        ({"step_batch_size_schedule": "0:16"}, "keep one of them"),
        (
            {"vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer"},
            "tokenizer's file .HuggingFaceTokenizer., .* --vocab-size",
        ),
        ({"micro_batch_size": "two"}, "expected an integer"),
        ({"optimizer": "adam2"}, "understood are adam"),
    ],
)
def test_what_the_program_refuses_is_refused_with_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**changes)


def test_interleaving_needs_enough_microbatches() -> None:
    stages = {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2}
    assert job(**stages).plan.schedule.virtual_stages == 2  # 64 / (2 x 2) = 16 microbatches
    with pytest.raises(
        InputError, match="multiple of .* = 4 microbatches, but .* gives 6; .* of 32 gives 8|of 16 gives 4"
    ):
        job(**stages, global_batch_size=24)


def test_a_script_without_one_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="starts no Python program"):
        read_megatron("echo hello")
    with pytest.raises(FormatError, match="2 different trainings, on lines 1, 2"):
        read_megatron("python a.py --num-layers 1\npython a.py --num-layers 2")
    with pytest.raises(InputError, match="trains a ict model"):
        read_megatron("torchrun pretrain_ict.py --num-layers 24", devices=8)
    with pytest.raises(InputError, match="cannot read"):
        read_megatron(tmp_path / "none.sh")
    huge = tmp_path / "huge.sh"
    huge.write_bytes(b"x" * (2**23 + 1))
    with pytest.raises(InputError, match="limit"):
        read_megatron(huge)
    huge.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_megatron(huge)


@given(
    st.lists(
        st.sampled_from([*words(LLAMA), "--num-layers", "-1", "0", "1e9", "tp", "--a", "--tensor-model-parallel-size"])
    )
)
def test_any_arguments_are_read_or_refused(arguments: list[str]) -> None:
    try:
        result = read_megatron(arguments, devices=8)
    except GnomonError as error:
        assert str(error)
    else:
        assert result.plan.world_size == result.devices == 8 and result.stack.name == "megatron-lm"


BRIDGE = "model.tensor_model_parallel_size=4 model.pipeline_model_parallel_size=2 model.seq_length=4096"


def test_bridge_overrides_lie_over_what_recipes_share() -> None:
    result = read_megatron_bridge(
        f"{BRIDGE} model.sequence_parallel=true optimizer.lr=1e-4", model=llama3_1_70b(), devices=16
    )
    assert (result.workload.global_batch_size, result.plan.schedule.micro_batch_size) == (32, 2)
    assert result.plan.optimizer.zero == 1 and result.plan.overlap.param_gather and result.plan.layout.sequence_parallel
    assert result.stack.name == "megatron-bridge" and isinstance(result.model, LlamaConfig)
    fp8 = read_megatron_bridge(
        f"{BRIDGE} mixed_precision=bf16_with_fp8_current_scaling_mixed ++ddp.overlap_param_gather=false",
        model=llama3_1_70b(),
        devices=16,
    )
    assert fp8.plan.precision.fp8 is not None and fp8.plan.precision.fp8.recipe == "tensorwise"
    assert not fp8.plan.overlap.param_gather
    assert {u.field for u in fp8.unexpressed} == {"first_last_layers_bf16"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("model.seq_length=4096", "tensor_model_parallel_size is not among the overrides"),
        (f"{BRIDGE} model.tensor_model_paralel_size=4", "did you mean 'tensor_model_parallel_size'"),
        (f"{BRIDGE} modell.x=4", "in no section that is known .did you mean 'model'"),
        (f"{BRIDGE} mixed_precision=bf17_mixed", "did you mean 'bf16_mixed'"),
        (f"{BRIDGE} train.global_batch_size=33", "the nearest legal global_batch_size is 32"),
        (f"{BRIDGE} what", "is not section.field=value"),
    ],
)
def test_bridge_refusals(overrides: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_megatron_bridge(overrides, model=llama3_1_70b(), devices=16, context=ReadContext(strict=True))


@pytest.mark.parametrize(
    ("asked", "wanted", "reported"),
    [
        ("--moe-aux-loss-coeff 1e-2", Experts(balance="layer", coefficient=1e-2), ()),
        (
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-z-loss-coeff 1e-3",
            Experts(balance="sequence", coefficient=1e-4, z_loss=1e-3),
            (),
        ),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2", Experts(), ()),
        ("--moe-expert-capacity-factor 1.5", Experts(drop="probs"), ()),
        ("--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position", Experts(), ()),
        (
            "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2",
            Experts(balance="global", coefficient=1e-2),
            (),
        ),
        ("--moe-router-load-balancing-type sinkhorn", Experts(assignment="sinkhorn"), ()),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-4",
            Experts(),
            ("moe_router_load_balancing_type",),
        ),
        ("--moe-router-dtype fp64", Experts(router_dtype="fp64"), ()),
        ("--moe-router-dtype fp32", Experts(router_dtype="fp32"), ()),
        ("--moe-router-score-function sqrtsoftplus", Experts(), ("moe_router_score_function",)),
    ],
)
def test_what_keeps_experts_evenly_loaded_is_of_the_plan(
    asked: str, wanted: Experts, reported: tuple[str, ...]
) -> None:
    network = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --max-position-embeddings 64 "
        "--seq-length 32 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 --micro-batch-size 1 "
        "--global-batch-size 4 --vocab-size 128"
    )
    job = read_megatron(shlex.split(f"{network} {asked}"), devices=1)
    assert job.plan.experts == wanted
    told = {one.field for one in job.unexpressed}
    assert set(reported) <= told and not {name for name in told if name.startswith("moe_")} - set(reported)
