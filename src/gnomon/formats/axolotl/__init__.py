"""axolotl's YAML files.

What a key means was read from axolotl-ai-cloud/axolotl at commit 067b021c8b87 (2026-08): src/axolotl/utils/schemas/
{config,training,peft,model,fsdp}.py, src/axolotl/loaders/model.py. Leaves out the reward models and rollouts of
preference and reinforcement learning, which are listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.errors import nearest
from gnomon.formats.axolotl.rules import refuse, without_plugins
from gnomon.formats.export import Draft, ExportRequest
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext
from gnomon.formats.job import Fields, Job, divides, flatten, read_source
from gnomon.formats.learnt import Learnt
from gnomon.formats.trainer_optimizers import update_of
from gnomon.formats.trainer_terms import TrainerTerms, trainer_terms
from gnomon.formats.trainer_words import flag, names_of, switched
from gnomon.formats.trainer_write import as_yaml, drafted, tuning
from gnomon.formats.trainers import (
    AUTOCAST,
    BF16,
    FP16,
    FP32,
    Training,
    adapted,
    by_deepspeed,
    either_half,
    in_part,
    inline,
    job_of,
    model_of,
    modules_of,
    own_engine,
    usual_targets,
    whole_in_bits,
)
from gnomon.formats.training_arguments import INEXPRESSIBLE as TRAINER
from gnomon.formats.training_arguments import IRRELEVANT, in_tf32, sharded
from gnomon.formats.yaml_file import read_yaml, said_twice
from gnomon.models.trained import Trained
from gnomon.plans import Layout, Precision

NEUTRAL = IRRELEVANT | frozenset(
    """
    datasets* test_datasets* pretraining_dataset* shuffle_* val_set_size lr_scheduler special_tokens* tokens eot_tokens
    type_of_model tokenizer_* processor_type model_type lora_model_dir lora_alpha lora_dropout
    peft peft_use_rslora peft_init_lora_weights peft_autocast_adapter_dtype
    lora_fan_in_fan_out train_on_inputs loss_watchdog_* max_grad_norm debug deepspeed_* local_rank hub_model_id
    plugins sample_packing_* eval_sample_packing skip_prepare_dataset gptq* noisy_embedding_alpha cosine_*
    saves_per_epoch evals_per_epoch auto_resume_from_checkpoints base_model_config base_model_ignore_patterns
    is_*_derived_model overrides_of_model_config.rope_scaling* chat_template_jinja default_system_message val_file
    is_file low_cpu_mem_usage dataset_prepared_path revision_of_model field_messages message_* torchdistx_path rl_beta
    unfrozen_parameters_lr
    """.split()
)

INEXPRESSIBLE = {
    **TRAINER,
    "rl": "preference or reinforcement learning: the reference model and generation are not priced, pairs count once",
    "reward_model": "a reward model's head",
    "lora_*_kernel": "fused kernels of adapters: a prediction without is too slow",
    "flash_attn_rms_norm": "a fused kernel of flash-attn: a prediction without is too slow",
    "flash_attn_fuse_*": "fused kernels of flash-attn: a prediction without is too slow",
    "flash_attention": "which attention kernel",
    "xformers_attention": "which attention kernel",
    "sdp_attention": "which attention kernel",
    "flex_attention": "which attention kernel",
    "qat*": "fake quantisation in training",
    "quantize_moe_experts": "experts in four bits; read in the compute dtype",
    "fp8*": "eight-bit products; read as bf16, so too slow",
    "s2_attention": "shifted sparse attention",
    "lora_target_parameters*": "adapters on experts' tensors, which are left out",
    "peft_layers_*": "adapters on some layers alone; read as on all of them",
    "peft_trainable_token_indices": "rows of the embedding that are trained too; not counted",
    "relora*": "adapters merged now and then",
    "use_*kernels": "kernels of its own",
}


AWAY = ("offload", "offload_disk", "unsloth")
"""Words of gradient_checkpointing under which the inputs of layers wait on the host."""


def _looks(sample: Sample) -> bool:
    return sample.has("base_model") and any(
        sample.has(key) for key in ("micro_batch_size", "sequence_len", "gradient_accumulation_steps")
    )


ADAPTERS = ("lora", "qlora", "llama-adapter", "oft", "dora", "vera")


def _precision(f: Fields, adapter: bool) -> Precision:
    """bf16 (true, auto, full) loads the model in bf16 and trains it so; fp16 is autocast."""
    bf16 = f.raw("bf16")
    half = bf16 in ("auto", "full") or flag(f, "bf16") or flag(f, "bfloat16")
    either_half(f, half and bf16 != "auto", flag(f, "fp16") or flag(f, "float16"))
    if half:
        return BF16
    f.ignore("tf32")
    # Without either word a network beside adapters is computed in bf16 by autocast, its adapters being fp32.
    return FP16 if flag(f, "fp16") or flag(f, "float16") else AUTOCAST if adapter else in_tf32(f, FP32)


def _model(f: Fields, context: ReadContext, folder: Path, assumed: list[str]) -> Network | str:
    model = model_of(f, "base_model", context, folder, assumed)
    adapter = f.raw("adapter")
    four = flag(f, "load_in_4bit")
    if adapter in (None, ""):
        # A network in few bits without adapters cannot be trained, and axolotl refuses it.
        whole_in_bits(f, "load_in_4bit", "load_in_8bit")
        f.ignore(*(name for name in f.names() if name.startswith(("lora_", "load_in_"))))
        return _in_part(f, model)
    if f.peek("lora_r") is None:
        assumed.append("lora_r is not in the file, and axolotl has no default: rank 8 (--set lora_r=…)")
    rank = f.integer("lora_r", 8)
    everything = flag(f, "lora_target_linear")
    targets = () if everything else names_of(f.raw("lora_target_modules"))
    if str(adapter) not in ADAPTERS:
        f.fail("adapter", f"{adapter!r} is no adapter{nearest(str(adapter), ADAPTERS)}: {', '.join(ADAPTERS)}")
    if adapter not in ("lora", "qlora", "dora"):
        f.report("adapter", "adapters of another form; read as LoRA of the same rank")
    # axolotl asks for load_in_4bit with qlora too.
    if adapter == "qlora" and not flag(f, "load_in_4bit", True):
        f.fail("load_in_4bit", "adapter: qlora is beside a network in four bits; switch it on, or give adapter: lora")
    if not everything and not targets:
        targets = usual_targets(model)
    f.ignore("lora_target_modules", "lora_target_linear")
    return adapted(
        f,
        model,
        rank,
        targets,
        four_bits=four or adapter == "qlora",
        eight_bits=flag(f, "load_in_8bit"),
        named="lora_target_modules",
        magnitudes=adapter == "dora",
    )


def _in_part(f: Fields, model: Network | str) -> Network | str:
    """The network of which `unfrozen_parameters` are trained: expressions that match from a name's start, where a point
    is a point; rows behind them (`[:32000]`) are trained alone, by gradients of the others that are set to zero
    (src/axolotl/utils/freeze.py)."""
    unfrozen = f.raw("unfrozen_parameters")
    if not unfrozen:
        return model
    texts = (
        [unfrozen]
        if isinstance(unfrozen, str)
        else [str(one) for one in unfrozen]
        if isinstance(unfrozen, list)
        else []
    )
    plain = [re.sub(r"\[\d*(:\d*)?\]$", "", text) for text in texts]
    # Points of names become points; `.+` stays an expression.
    patterns = tuple("^" + re.sub(r"\.(?!\+)", r"\\.", text).removeprefix("^") for text in plain)
    return in_part(f, "unfrozen_parameters", model, Trained(patterns=patterns))


def _read(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    twice: list[str] = []
    job = _job(flatten(read_yaml(text, file, twice)), file, path.resolve().parent, context)
    return replace(job, assumed=(*said_twice(twice), *job.assumed))


def _job(values: Mapping[str, object], file: str, folder: Path, context: ReadContext) -> Job:
    """The job of a file's values."""
    there, off = without_plugins({**values, **context.values()})
    fields = Fields(there, file, context)
    fields.unexpressed += off
    return read_fields(fields, folder, context)


def read_fields(f: Fields, folder: Path, context: ReadContext) -> Job:
    """The job of fields that are read."""
    assumed = list[str]()
    refuse(f)
    seq_len = f.integer("sequence_len", 512)
    if f.peek("sequence_len") is None and context.seq_len is None:
        assumed.append("sequence_len is not in the file: 512, axolotl's default (--seq-len)")
    # Rows are then as long as their batch's longest sample; the price of full rows is an upper bound.
    if not flag(f, "sample_packing") and not flag(f, "pad_to_sequence_len"):
        f.note_unpacked("sample_packing", "false", seq_len)
    f.ignore("sample_packing", "pad_to_sequence_len", "max_packed_sequence_len")
    model = _model(f, context, folder, assumed)
    training = Training(
        model=model,
        micro=f.integer("micro_batch_size", 1),
        steps=f.integer("gradient_accumulation_steps", 1),
        seq_len=seq_len,
        tp=f.integer("tensor_parallel_size", 1),
        cp=f.integer("context_parallel_size", f.integer("sequence_parallel_degree", 1)),
        recompute=flag(f, "gradient_checkpointing"),
        activations_away=flag(f, "activation_offloading") or f.peek("gradient_checkpointing") in AWAY,
        precision=_precision(f, f.has("adapter")),
        update=update_of(f, "optimizer", "adamw_torch", model),
        layout=Layout(context="ring"),
        clip=f.number("max_grad_norm", 1.0) > 0,
        modules=modules_of(f),
        loads="each_rank",
    )
    if "disk" in (f.peek("activation_offloading"), str(f.peek("gradient_checkpointing")).rpartition("_")[2]):
        f.report("gradient_checkpointing", "checkpoints go on to a disk; read as waiting on the host")
    # It stands in for gradient_accumulation_steps, of which axolotl takes one or the other.
    if f.raw("batch_size"):  # of a rank: it is multiplied by the ranks
        batch = f.integer("batch_size")
        divides("batch_size", batch, "micro_batch_size", training.micro)
        training = replace(training, steps=batch // training.micro)
    ep = f.integer("expert_parallel_size", 1)
    if ep > 1:
        f.report("expert_parallel_size", "experts on ranks of their own; read as sharded")
    replicas, f_shard = f.integer("dp_replicate_size", 1), f.raw("dp_shard_size")
    training = sharded(f, replace(training, replicas=replicas))
    # dp_shard_size without `fsdp` is read as FSDP2 too.
    if f_shard is not None and not training.zero:
        training = replace(training, zero=3)
    by_file = inline(f, "deepspeed")
    f.ignore("deepspeed")
    f.account(NEUTRAL, INEXPRESSIBLE, ())
    if by_file is not None:
        job = by_deepspeed(f, context, training, "deepspeed", folder, assumed)
        own, table = own_engine("deepspeed", by_file, folder), isinstance(by_file, Mapping)
        engine, named = None if own is None else own[0], "" if own is not None else str(by_file)
        terms = trainer_terms(SPELLED, by="deepspeed", engine=engine, table=table, named=named)
        return replace(job, terms=terms)
    job = job_of(f, context, training, assumed)
    return replace(job, terms=trainer_terms(SPELLED, by="fsdp" if training.zero else ""))


SPELLED = TrainerTerms(
    adapters=(("adapter", "lora"), ("lora_r", 16), ("lora_target_linear", True)),
    quantised=(("adapter", "qlora"), ("load_in_4bit", True)),
    micro="micro_batch_size",
    chunked_loss=(
        ("plugins", "[axolotl.integrations.liger.LigerPlugin]"),
        ("liger_fused_linear_cross_entropy", True),
    ),
    all_of_liger=False,
    optim="optimizer",
    deepspeed={
        (1, False, False): "deepspeed_configs/zero1.json",
        (2, True, False): "deepspeed_configs/zero2.json",
        (3, False, False): "deepspeed_configs/zero3_bf16.json",
        (3, False, True): "deepspeed_configs/zero3_bf16_cpuoffload_params.json",
        (3, True, True): "deepspeed_configs/zero3_bf16_cpuoffload_all.json",
    },
    fsdp_host=lambda change: (("fsdp_config.offload_params", True),),
    away=(("activation_offloading", True),),
    fsdp=(("fsdp", "[full_shard, auto_wrap]"),),
    further={
        "cp": lambda change: [
            ("context_parallel_size", change.after.mesh.cp),
            ("gradient_accumulation_steps", change.microbatches),
        ]
    },
)
"""Its words for changes."""


def _finetune_draft(request: ExportRequest) -> Draft:
    """A plan as its YAML."""
    t = tuning(request, PROGRAM, axes=("pp", "ep", "etp"))
    values: dict[str, object] = {
        "base_model": t.model_id,
        "datasets": [{"path": "your_dataset", "type": "chat_template"}],
        "sequence_len": t.seq_len,
        "sample_packing": True,
        "micro_batch_size": t.micro,
        "gradient_accumulation_steps": t.steps,
        "gradient_checkpointing": t.recompute,
        **({"activation_offloading": True} if t.away else {}),
        "optimizer": t.optim,
        "max_grad_norm": t.clip,
        "bf16": t.half == "bf16",
        "fp16": t.half == "fp16",
        "output_dir": "out",
    }
    if t.adapters is not None:
        values |= {"adapter": "qlora" if t.bits == 4 else "lora", "load_in_4bit": t.bits == 4}
        values |= {"load_in_8bit": True} if t.bits == 8 else {}
        values["lora_r"] = t.adapters.rank
        values |= {"peft_use_dora": True} if t.adapters.magnitudes else {}
        values |= {"lora_target_modules": t.targets} if t.targets else {"lora_target_linear": True}
    if t.fused or t.loss in ("chunked", "fused"):
        values["plugins"] = ["axolotl.integrations.liger.LigerPlugin"]
        values |= {"liger_rms_norm": True, "liger_glu_activation": True} if t.fused else {}
        values |= {"liger_fused_linear_cross_entropy": True} if t.loss == "chunked" else {}
        values |= {"liger_cross_entropy": True} if t.loss == "fused" else {}
    values |= {"torch_compile": True} if t.compiled else {}
    values |= {"experts_implementation": t.experts} if t.experts else {}
    for axis, key in (("tp", "tensor_parallel_size"), ("cp", "context_parallel_size")):
        if (size := getattr(request.plan.mesh, axis)) > 1:
            values[key] = size
    sharding = t.sharding()
    if t.fsdp:
        sharding = {"fsdp": t.fsdp.split()}
    text = as_yaml(values | sharding)

    def read(context: ReadContext) -> Job:
        return _job(flatten(read_yaml(text, "<export>")), "<export>", Path(), context)

    return drafted(request, t, text, read, program=PROGRAM, start="axolotl train FILE")


PROGRAM = "axolotl 067b021"


def _learnt(values: Mapping[str, object]) -> Learnt:
    """What the assistant says, with the end of its turn (`train_on_eos: turn`, the default of chat_template)."""
    if switched(values, "train_on_inputs"):
        return Learnt(learn="all")
    after = "what a chat template writes after an answer's end-of-turn token is learnt too, as a new line"
    sets = values.get("datasets")
    tables = [values, *(one for one in (sets if isinstance(sets, list) else ()) if isinstance(one, Mapping))]
    label_settings = {
        key: table[key] for table in tables for key in LABELS if table.get(key) not in (None, *LABELS[key])
    }
    others = (
        f"{key} = {str(value)[:60]}: what the assistant says is learnt, with the end of its turn"
        for key, value in label_settings.items()
    )
    return Learnt(learn="answers", differences=(after, *others))


LABELS: Mapping[str, tuple[object, ...]] = {
    "roles_to_train": (["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"], []),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "message_field_training": (),
    "message_field_training_detail": (),
}
"""Settings of a data set, or of all, that choose what is learnt of conversations -> what is learnt here anyway."""


FORMAT = Format(
    name="axolotl",
    program="axolotl-ai-cloud/axolotl 067b021",
    files="YAML of `axolotl train`",
    looks=_looks,
    read=_read,
    finetune_draft=_finetune_draft,
    learnt=_learnt,
)
