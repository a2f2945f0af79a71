"""torchtune's YAML files.

What a key means was read from pytorch/torchtune at commit bd2a0fc7c314 (2025-07): recipes/{full,lora}_finetune_
distributed.py, torchtune/training/_distributed.py, torchtune/models/. Leaves out rollouts of reinforcement learning,
teachers and reference models; keys that ask for them are reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.errors import InputError, PlanError, nearest
from gnomon.formats.export import Draft, ExportRequest
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import GIVE_MODEL, SEQ_LEN, Network, ReadContext
from gnomon.formats.hub import network_called
from gnomon.formats.job import Fields, Job, flatten, read_source, with_job_fields
from gnomon.formats.references import resolved
from gnomon.formats.trainer_optimizers import Update, update_of
from gnomon.formats.trainer_words import flag, names_of
from gnomon.formats.trainer_write import drafted, tuning
from gnomon.formats.trainers import BF16, FP32, Training, adapted, job_of
from gnomon.formats.yaml_file import emit_yaml, read_yaml
from gnomon.models.lora import parse_adapters
from gnomon.plans import Layout
from gnomon.search.fit.terms import Change, Setting, Terms
from gnomon.software import stack

IRRELEVANT = frozenset(
    """
    output_dir tokenizer* dataset* seed shuffle checkpointer* resume_from_checkpoint epochs max_steps_per_epoch
    optimizer.lr optimizer.weight_decay optimizer.betas optimizer.eps optimizer.fused lr_scheduler* loss* device
    metric_logger* log_* profiler* run_val_every_n_steps batch_size_val save_adapter_weights_only model.lora_alpha
    model.lora_dropout model.apply_lora_to_output name collate_fn cudnn_deterministic_mode enable_async_checkpointing
    reset_position_ids keep_last_n_checkpoints save_* data_parallel_* tensor_parallel_plan* model.max_seq_len inter_op_*
    intra_op_* custom_sharded_layers use_flex* kd_ratio
    """.split()
)
"""Patterns of keys that do not change what a step takes."""

INEXPRESSIBLE = {
    "quantizer*": "fake quantisation in training",
    "teacher_*": "a teacher is run forward, which is not priced",
    "kd_loss*": "a teacher is run forward, which is not priced",
    "ref_*": "a reference model is run forward, which is not priced",
    "grpo_*": "generation and rewards are not priced",
    "ac_mode": "which activations are kept",
    "ac_option": "which activations are kept",
    "model.*_trainable": "parts of the network are frozen",
    "fp8_*": "eight-bit products; read as bf16, so too slow",
    "enable_fp8_training": "eight-bit products; read as bf16, so too slow",
}
"""Pattern of keys that change a step in ways that are not priced -> what they do, as the report says it."""

LOSSES: Mapping[str, str] = {
    "LinearCrossEntropyLoss": "chunked",
    "CEWithChunkedOutputLoss": "in_place",
    "CrossEntropyLoss": "unfused",
}
"""torchtune's loss -> `Kernels.cross_entropy`: together with the head, so that logits are never whole; over whole
logits, widened to fp32 chunk by chunk; torch's over all of them."""

OTHER_LOSSES = """
    DPOLoss RSOLoss SimPOLoss GRPOLoss GRPOSimpleLoss PPOLoss ForwardKLLoss ForwardKLWithChunkedOutputLoss
    ReverseKLLoss SymmetricKLLoss NLLLoss MSELoss
    """.split()
"""Losses of preference learning and distillation, which are known and not priced."""

OPTIMIZERS = "AdamW Adam SGD Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD Adafactor LBFGS Muon".split()
"""Classes of torch.optim."""

LINEARS = {"output_proj": "o_proj"}
"""torchtune's name of a linear -> ours, where they differ."""
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
"""Linears that `apply_lora_to_mlp` adds adapters to."""


def _looks(sample: Sample) -> bool:
    """Whether a file's model is one of torchtune's components."""
    component = sample.get("model._component_")
    return isinstance(component, str) and component.startswith("torchtune.")


def spellings(component: str) -> list[str]:
    """Names of networks that a component may stand for, in turn: an underscore between digits is a decimal point or
    parts two numbers, so that `qwen2_5_7b_instruct` gives `qwen2-5.7b` and `qwen2.5-7b`."""
    plain = re.sub(r"^(q?lora|dora|qat)_", "", component.rpartition(".")[2]).removesuffix("_instruct")
    plain = re.sub(r"_(base|reward|classifier).*$", "", plain)
    match = re.fullmatch(r"([a-z]+)(\d*)((?:_\d+)*?)_(\d+(?:_\d+)?)b", plain)
    if match is None:
        return [plain.replace("_", "-")]
    family, major, minor, size = match.groups()
    parts = [part for part in (*minor.split("_"), *size.split("_")) if part]
    versions = []
    for cut in range(len(parts)):
        version = ".".join([major, *parts[:cut]]) if major else ""
        join = "" if family == "qwen" else "-"
        versions.append(f"{family}{join if version else ''}{version}-{'.'.join(parts[cut:])}b")
    return versions


def _model(f: Fields, context: ReadContext, assumed: list[str]) -> Network | str:
    """The network of the component, or the context's, with its adapters. assumed: takes notes. InputError for a
    component whose sizes are not known."""
    component = f.text("model._component_")
    model = context.model
    for name in spellings(component) if model is None else ():
        try:
            model, note = network_called(name)
        except InputError:
            continue
        assumed += [note] if note else []
        break
    if model is None:
        f.fail("model._component_", f"the sizes of {component} are not known here; {GIVE_MODEL}")
    last = component.rpartition(".")[2]
    if not re.match(r"q?lora_|dora_", last):
        return model
    targets = [LINEARS.get(name, name) for name in names_of(f.raw("model.lora_attn_modules"))]
    targets += FEED_FORWARD if flag(f, "model.apply_lora_to_mlp") else ()
    four = last.startswith("qlora") or flag(f, "model.quantize_base")
    return adapted(
        f,
        model,
        f.integer("model.lora_rank", 8),
        targets,
        four_bits=four,
        named="model.lora_attn_modules",
        magnitudes=last.startswith("dora_"),
    )


def _read(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    f = Fields(flatten(resolved(read_yaml(text, file))), file, context)
    return read_fields(f, context, single="single_device" in path.name)


def _update(f: Fields) -> Update:
    """The optimizer; with optimizer_in_bwd each gradient is applied and freed within the backward."""
    update = update_of(f, "optimizer._component_", "torch.optim.AdamW")
    return replace(update, key="optimizer_in_bwd", in_backward=True) if flag(f, "optimizer_in_bwd") else update


def read_fields(f: Fields, context: ReadContext, *, single: bool) -> Job:
    """Makes a job of a file's fields. single: whether the recipe is one for a single device. InputError for a loss or
    an optimizer that there is not, and for offloaded activations without checkpointing."""
    assumed: list[str] = []
    if flag(f, "enable_activation_offloading") and not flag(f, "enable_activation_checkpointing"):
        key = "enable_activation_offloading"
        f.fail(key, "torchtune takes it only beside enable_activation_checkpointing: True")
    length = f.raw("tokenizer.max_seq_len")
    if length is None and context.seq_len is None:
        assumed.append(f"the file does not say the sequence length: {SEQ_LEN} tokens (--seq-len)")
    seq_len = f.integer("tokenizer.max_seq_len", SEQ_LEN) if isinstance(length, int) else SEQ_LEN
    if not flag(f, "dataset.packed"):
        f.note_unpacked("dataset.packed", "false", seq_len)
    record = stack("pytorch-fsdp")
    record = with_job_fields(
        record, "torchtune", choices=(*record.runs.choices, "eight_bit_states", "paged_states", "input_offload")
    )
    if flag(f, "compile"):
        record = with_job_fields(record, "compile", launch_mode="compiled", norm="fused", activation="fused")
    loss_path = str(f.raw("loss._component_") or "")
    loss = loss_path.rpartition(".")[2]
    if loss_path.startswith(("torchtune.", "torch.nn.")) and loss not in (*LOSSES, *OTHER_LOSSES):
        f.fail("loss._component_", f"there is no {loss_path}{nearest(loss, (*LOSSES, *OTHER_LOSSES))}")
    optim_path = str(f.raw("optimizer._component_") or "")
    optim = optim_path.rpartition(".")[2]
    if optim_path.startswith("torch.optim.") and optim not in OPTIMIZERS:
        f.fail("optimizer._component_", f"there is no {optim_path}{nearest(optim, OPTIMIZERS)}")
    if loss in LOSSES:
        record = with_job_fields(record, "loss", cross_entropy=LOSSES[loss])
    clip = f.raw("clip_grad_norm")
    training = Training(
        model=_model(f, context, assumed),
        micro=f.integer("batch_size", 1),
        steps=f.integer("gradient_accumulation_steps", 1),
        seq_len=seq_len,
        # 2 stands for parameters that stay gathered between forward and backward.
        zero=0 if single else 3 if flag(f, "fsdp_reshard_after_forward", True) else 2,
        replicas=f.integer("data_parallel_replicate_dim", 1),
        tp=f.integer("tensor_parallel_dim", 1),
        cp=f.integer("context_parallel_dim", 1),
        layout=Layout(sequence_parallel=f.integer("tensor_parallel_dim", 1) > 1),
        offload=flag(f, "fsdp_cpu_offload"),
        recompute=flag(f, "enable_activation_checkpointing"),
        activations_away=flag(f, "enable_activation_offloading"),
        precision=BF16 if f.choice("dtype", {"bf16": "bf16", "fp32": "fp32"}, "bf16") == "bf16" else FP32,
        update=_update(f),
        clip=clip not in (None, "null"),
        loads="each_rank",
        stack=record,
    )
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    return replace(job_of(f, context, training, assumed, 1 if single else None), terms=TERMS)


def _bits(change: Change) -> int:
    """Bits of the optimizer's states after a change, as bitsandbytes' class names have them."""
    return 8 if change.after.precision.states == "int8" else 32


def _steps(change: Change) -> list[Setting]:
    """The accumulation that keeps the sequences of a step as they are on fewer data-parallel ranks."""
    return [("gradient_accumulation_steps", change.microbatches)]


def _recompute(change: Change) -> list[Setting] | None:
    """torchtune recomputes whole layers or nothing: None for selective recompute, which it cannot say."""
    preset = change.after.saved.preset
    return None if preset == "selective" else [("enable_activation_checkpointing", preset == "full")]


TERMS = Terms(
    style="yaml",
    words={
        "micro_batch_size": lambda change: [
            ("batch_size", change.micro),
            ("gradient_accumulation_steps", change.microbatches),
        ],
        "recompute": _recompute,
        "input_offload": lambda change: [("enable_activation_offloading", True)],
        "eight_bit_states": lambda change: [("optimizer._component_", "bitsandbytes.optim.AdamW8bit")],
        "paged_states": lambda change: [("optimizer._component_", f"bitsandbytes.optim.PagedAdamW{_bits(change)}bit")],
        "cpu_offload": lambda change: [("fsdp_cpu_offload", True)],
        "tp": lambda change: [("tensor_parallel_dim", change.after.mesh.tp), *_steps(change)],
        "cp": lambda change: [("context_parallel_dim", change.after.mesh.cp), *_steps(change)],
    },
    # bitsandbytes' own class keeps states of embeddings in 8 bits; transformers' Trainer asks it for 32.
    plan_of=lambda change: replace(change.after, precision=replace(change.after.precision, wide_tables=False)),
)
"""The keys and values of a torchtune file that make each change to a plan."""


def _finetune_draft(request: ExportRequest) -> Draft:
    """Writes a plan as the YAML of `tune run full_finetune_distributed`, or of the recipe with LoRA. PlanError for a
    model without a component, and for eight-bit frozen weights."""
    t = tuning(request, PROGRAM, axes=("pp", "ep", "etp"))
    base = parse_adapters(request.graph.name)[0]
    component = next((name for name in COMPONENTS if base in spellings(name.rpartition(".")[2])), None)
    if component is None:
        raise PlanError(
            f"torchtune names its models by components, and {base} is none of those written here; export to axolotl, "
            f"llama-factory, swift or trl, which load any model by its name"
        )
    folder, _, name = component.rpartition(".")
    if t.bits == 8:
        raise PlanError("torchtune has no frozen weights in eight bits; use NF4 (+qlora16), or export to axolotl")
    kind = "" if t.adapters is None else "qlora_" if t.bits else "lora_"
    model: dict[str, object] = {"_component_": f"{folder}.{kind}{name}"}
    if t.adapters is not None:
        targets = t.targets or ["q_proj", "k_proj", "v_proj", "o_proj", *FEED_FORWARD]
        back = {ours: theirs for theirs, ours in LINEARS.items()}
        model["lora_attn_modules"] = ",".join(back.get(one, one) for one in targets if one not in FEED_FORWARD)
        model |= {"use_dora": True} if t.adapters.magnitudes else {}
        model |= {"apply_lora_to_mlp": set(FEED_FORWARD) <= set(targets), "lora_rank": t.adapters.rank}
    losses = {ours: theirs for theirs, ours in LOSSES.items()}
    values: dict[str, object] = {
        "model": model,
        "tokenizer": {"max_seq_len": t.seq_len},
        "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "packed": True},
        "batch_size": t.micro,
        "gradient_accumulation_steps": t.steps,
        "optimizer": {"_component_": _component(t.optim)},
        "enable_activation_checkpointing": t.recompute,
        "enable_activation_offloading": t.away,
        "dtype": "bf16" if t.half else "fp32",
        "compile": t.compiled,
        "clip_grad_norm": t.clip or None,
        "output_dir": "out",
    }
    if t.loss in losses:
        values["loss"] = {"_component_": f"torchtune.modules.loss.{losses[t.loss]}"}
    if request.plan.optimizer.offload_parameters:
        values["fsdp_cpu_offload"] = True
    if request.plan.optimizer.zero == 3 and not request.plan.optimizer.reshard_after_forward:
        values["fsdp_reshard_after_forward"] = False
    mesh = request.plan.mesh
    for key, size in (("data_parallel_replicate", mesh.dp_replicate), ("tensor_parallel", mesh.tp)):
        values |= {f"{key}_dim": size} if size > 1 else {}
    values |= {"context_parallel_dim": mesh.cp} if mesh.cp > 1 else {}
    text = emit_yaml(values)

    def read(context: ReadContext) -> Job:
        return read_fields(Fields(flatten(read_yaml(text, "<export>")), "<export>", context), context, single=False)

    recipe = "full_finetune_distributed" if t.adapters is None else "lora_finetune_distributed"
    start = f"tune run --nproc_per_node {request.processes_per_node} {recipe} --config FILE"
    return drafted(request, t, text, read, program=PROGRAM, start=start)


def _component(optim: str) -> str:
    """The class of an optimizer by transformers' name of it; AdamW of torch for others."""
    names = {
        "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
        "lion_8bit": "bitsandbytes.optim.Lion8bit",
        "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit",
        "paged_adamw_32bit": "bitsandbytes.optim.PagedAdamW32bit",
        "lion_32bit": "bitsandbytes.optim.Lion32bit",
        "sgd": "torch.optim.SGD",
    }
    return names.get(optim, "torch.optim.AdamW")


COMPONENTS = (
    "torchtune.models.llama2.llama2_7b", "torchtune.models.llama2.llama2_13b", "torchtune.models.llama2.llama2_70b",
    "torchtune.models.llama3_1.llama3_1_8b", "torchtune.models.llama3_1.llama3_1_70b",
    "torchtune.models.llama3_1.llama3_1_405b", "torchtune.models.llama3_2.llama3_2_1b",
    "torchtune.models.llama3_2.llama3_2_3b", "torchtune.models.mistral.mistral_7b",
    "torchtune.models.qwen2_5.qwen2_5_7b_base", "torchtune.models.qwen2_5.qwen2_5_14b_base",
    "torchtune.models.qwen2_5.qwen2_5_32b_base", "torchtune.models.qwen2_5.qwen2_5_72b_base",
)  # fmt: skip
"""Builders of models that an export names."""

PROGRAM = "torchtune bd2a0fc"


FORMAT = Format(
    name="torchtune",
    program="pytorch/torchtune bd2a0fc",
    files="YAML of `tune run`",
    looks=_looks,
    read=_read,
    finetune_draft=_finetune_draft,
)
