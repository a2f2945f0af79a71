"""Plan, workload and stack of a published run.

Each function returns a value with notes on what the row leaves open and how it was filled in; InputError says what is
missing or what no plan can say. Leaves out whether the plan can run, which `plans.check` and `predict` decide, and the
machines (`machines`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from evidence.published import automodel, nanotron, nvidia, settings, torchtitan
from evidence.published.bridge import Recipe, mtp_stages, narrow_calls, recipe
from evidence.published.megatron_ci import expert_slices, optimizer_instances, with_test_options
from evidence.published.model import Config
from evidence.published.notes import NoteFacts
from evidence.published.row import Row
from evidence.published.rules import first, says, sources
from evidence.published.settings import XLA
from gnomon.errors import InputError
from gnomon.formats.job import with_job_fields
from gnomon.formats.nanotron.read import stages_of
from gnomon.models.llama import LlamaConfig
from gnomon.plans import Layout, Mesh, Overlap, Plan, Split, Workload
from gnomon.software import Stack
from gnomon.software import stack as named_stack

Notes = tuple[str, ...]

FRAMEWORKS = (
    (r"^vtrain\b", "vtrain"),
    (r"nanotron", "nanotron"),
    (r"internevo|internlm", "internevo"),
    (r"megatron.*deepspeed|deepspeed.*megatron|neox", "megatron-deepspeed"),
    (r"megatron-bridge", "megatron-bridge"),
    (r"automodel|torchtitan|fsdp2", "torchtitan"),
    (r"nemo", "megatron-bridge"),
    (r"composer|llm-foundry", "llm-foundry"),
    (r"megatron|mindspeed|primus|zero-?bubble", "megatron-lm"),
    (r"deepspeed", "deepspeed"),
    (r"colossal|gemini", "deepspeed"),
    (
        r"pytorch|fsdp|accelerate|hugging|transformers|\bhf\b|lightning|lit-?gpt|torchtune|\bddp\b|fairscale|metaseq"
        r"|\bolmo|\btrl\b|sft_?trainer|\bpeft\b|axolotl|llama-?factory|unsloth|xtuner|ms-?swift|fastchat",
        "pytorch-fsdp",
    ),
)
"""(pattern of frameworks, stack that it is, or that is nearest to it). What matches none is a stack of which nothing is
known."""

SAME = r"^vtrain|nanotron|internevo|megatron-deepspeed|megatron-bridge|torchtitan|composer|^megatron-lm(?: ci)?$"
"""Frameworks that the stack's record is about; for others it is the nearest, and a note says so."""


FITTED = r"megatron-?(?:lm|core|deepspeed|bridge)|megatron\+deepspeed|nemo|nanotron|composer|foundry|^vtrain"
"""Programs whose own runs, or those of what they are made of, are behind the numbers of their stack."""


HUGGING_FACE = (
    r"hugging ?face|transformers|\bhf\b|\btrl\b|sft_?trainer|\bpeft\b|axolotl|llama-?factory|ms-?swift|fastchat"
    r"|deepspeed-?chat"
)
"""Programs whose model is transformers' own code."""

DEEPSPEED_FILES = r"zero[-_ ]?(?:stage[-_ ]?)?[1-3]|ds_|deepspeed"
"""Sharding in words of DeepSpeed's, under which those programs run on it."""

EAGER = {"norm": "unfused", "activation": "unfused", "cross_entropy": "unfused",
         "logits_dtype": "fp32", "optimizer_step": "single"}  # fmt: skip
"""What that code does (huggingface/transformers modeling_llama.py LlamaRMSNorm and eager_attention_forward,
activations.py NewGELUActivation, read 2026-11-21); the update is AdamW a parameter at a time."""

ONEFLOW_LOSS = (
    "Oneflow-Inc/oneflow: sparse_softmax_cross_entropy is one op, which keeps the probabilities; the pass "
    "SplitSparseSoftmaxCrossEntropyOp takes it apart where logits are divided over ranks (read 2026-11-22)"
)
"""Where it is known from that OneFlow's loss is one kernel without tensor parallelism."""

NO_SYNC = (
    "huggingface/transformers#29425: Trainer enters FSDP's no_sync on all microbatches but the last; "
    "huggingface/accelerate docs, concept_guides/gradient_synchronization: it requires additional memory"
)
"""Where it is known from that gradients stay whole between microbatches."""

FUSED_ADAM = (
    "deepspeedai/DeepSpeed edaa722 deepspeed/runtime/engine.py _configure_basic_optimizer: FusedAdam where a file has "
    "an optimizer section, in place of the program's own"
)
"""Where it is known from that a file's optimizer section takes the place of the eager update."""

LIGER = (
    "huggingface/transformers docs/source/en/trainer.md, use_liger_kernel: Liger's RMSNorm, RoPE, SwiGLU and "
    "FusedLinearCrossEntropy in place of the model's own (linkedin/Liger-Kernel README); read 2026-11-23"
)
"""Where it is known from that Liger's kernels run, whose loss never has whole logits."""

LIGER_KERNELS = {"norm": "fused", "activation": "fused", "cross_entropy": "chunked"}

HELD_OUTPUTS = (
    (
        r"transformers 2\b",
        "examples of huggingface/transformers 2, as scripts made from them still have it (`loss = outputs[0]`, then "
        "`loss.backward()`): `outputs`, a tuple of loss, logits and presents, lives until the next batch (read "
        "2026-11-22)",
    ),
    (
        r"nanogpt",
        "karpathy/nanoGPT train.py (`logits, loss = model(X, Y)`, then `scaler.scale(loss).backward()`): `logits` live "
        "until the next microbatch (read 2026-11-23)",
    ),
)
"""(pattern of programs, where it is known from that their loops hold logits during the backward)."""

COMPILED = {
    **dict.fromkeys(("norm", "activation", "cross_entropy"), "fused"),
    "recompute_stops": True,
}
"""What torch.compile makes one kernel each of, over a layer and over the loss; and of a checkpoint it runs again only
what the backward reads (pytorch/pytorch v2.8.0 torch/_functorch/partitioners.py takes out what no gradient needs)."""

DATA_PARALLEL = (
    r"fsdp|\bddp\b|hugging|transformers|accelerate|\bhf\b|trainer|composer|zero-?[23]|torchtune|\btrl\b|axolotl"
    r"|llama-?factory|lit-?gpt|lightning|nanogpt|llm\.c|unsloth|xtuner|ms-?swift|\bolmo|foundry"
)
"""Programs and shardings without tensor or pipeline parallelism unless they say so."""


MEGATRON = r"megatron(?!.*deepspeed)|nemo|zero-?bubble"
"""Programs that count the embedding and the loss as layers when layers do not divide otherwise (Megatron Core
transformer_config.py account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split; the zero-bubble
fork takes one layer from the first and one from the last stage)."""


SHARD_RANKS = (
    r"(?:shard|fsdp)(?:=(\d+)|(\d\d+)| (\d\d+|[3-9])\b)"
    r"|(?:fsdp_parallelism|fsdp_size)=(\d+)|zero-?1?(?: ?size ?|\.size=|=)(\d+)"
)
"""How many ranks shard, in the words of a row; `fsdp2` is a release."""


def mesh(row: Row) -> tuple[Mesh, Notes]:
    """Axes. InputError when an axis is not given, or the product is not the number of devices."""
    missing = [c for c in ("tp", "pp") if getattr(row, c) is None]
    notes: Notes = ()
    alone = row.num_devices is not None and row.num_devices in (1, row.dp)
    if missing and (alone or re.search(DATA_PARALLEL, f"{row.framework} {row.zero_or_fsdp or ''}".lower())):
        missing = []
        notes = ("tp, pp not given: 1, as programs that only divide data leave them",)
    if missing and re.search(XLA, row.framework.lower()):
        notes = (f"{', '.join(missing)} not given: 1, as {row.framework} leaves axes that a recipe does not name",)
    elif missing:
        raise InputError(f"{', '.join(missing)} not given")
    devices, tp, pp, cp, ep = (getattr(row, c) or 1 for c in ("num_devices", "tp", "pp", "cp", "ep"))
    cp = _context_by_recipe(row) if row.cp is None else cp
    if devices % (tp * pp * cp):
        raise InputError(f"{devices} devices are not a multiple of tp x pp x cp = {tp} x {pp} x {cp}")
    dp = devices // (tp * pp * cp)
    if row.dp is not None and row.dp != dp:
        raise InputError(f"dp = {row.dp}, but {devices} devices / (tp {tp} x pp {pp} x cp {cp}) = {dp}")
    shard = dp // optimizer_instances(row)
    match = re.search(SHARD_RANKS, (row.zero_or_fsdp or "").lower())
    ranks = int(next(filter(None, match.groups()))) if match else 0
    if ranks and not (ranks == 1 and re.search(XLA, row.framework.lower())):
        shard = min(ranks, dp)
    elif re.search(r"hsdp|hybrid[-_ ]?shard|^hybrid", (row.zero_or_fsdp or "").lower()):
        shard = min(row.devices_per_node or 8, dp)
    elif (divided := _divided_by_recipe(row) or nvidia.sharding_ranks(row)) and dp % divided == 0:
        shard = divided
    elif (slices := re.search(r"\b(\d+) slices? of", row.notes)) and dp % int(slices[1]) == 0:
        shard = dp // int(slices[1])  # MaxText divides within a slice and replicates over slices
    if dp % shard:
        raise InputError(f"{dp} data-parallel ranks are not a multiple of the {shard} that shard")
    etp = max(expert_slices(row, tp), nvidia.expert_slices(row))
    return Mesh(pp=pp, dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp, ep=ep, etp=etp), notes


def _context_by_recipe(row: Row) -> int:
    longer, chips = first(row, "chips_of_long", (0, 1))
    return chips if (row.seq_len or 0) > longer else 1


def _divided_by_recipe(row: Row) -> int:
    chips: int = first(row, "chips_that_shard", 0)
    return chips


def plan(row: Row, facts: NoteFacts) -> tuple[Plan, Notes]:
    """Every decision of the run."""
    axes, notes = mesh(row)
    precision, more = settings.precision(row)
    precision = automodel.precision(row, precision)
    saved, again, _ = settings.saved(row)
    micro, guessed = _micro_batch(row, axes)
    schedule = settings.schedule(row, facts, axes.pp, micro)
    optimizer, divided = settings.optimizer(row)
    if facts.without_optimizer and axes.world_size == 1:  # as NeuSight measures: there is none, and so no state
        optimizer = replace(optimizer, kind="sgd", clip=False)
    if re.search(r"^vtrain\b", row.framework.lower()):  # no norm of gradients (src/trainer.py train_step)
        optimizer = replace(optimizer, clip=False)
    sequence, assumed = _sequence_parallel(row)
    set_by = recipe(row, facts.release) if re.search(r"megatron-bridge", row.framework.lower()) else Recipe()
    if set_by.narrow_attention and precision.fp8 is not None:
        precision = replace(precision, fp8=replace(precision.fp8, attention=True))
    if precision.fp8 is not None:
        precision = replace(precision, fp8=torchtitan.narrow(row, precision.fp8))
    if precision.fp8 is not None and (narrow := narrow_calls(row)):
        precision = replace(precision, fp8=replace(precision.fp8, calls=narrow))
    overlap = Overlap() if optimizer.zero == 3 else _overlap(row)
    if facts.method and schedule.name == "one_f_one_b":
        # sail-sg/VocabularyParallelism 6191c3b megatron/core/pipeline_parallel: all of them refuse overlap_p2p_comm
        overlap = replace(overlap, pipeline_sends=False)
    # MaxText configs/base.yml context_parallel_strategy; benchmarks on GPUs say cp themselves
    gathers_context = axes.cp > 1 and bool(re.search(r"maxtext", row.framework.lower()))
    cut = facts.async_tp or _decomposed(row)
    splits = (Split(op="*", dim="seq", parts=axes.tp),) if cut and axes.tp > 1 else ()
    made = Plan(
        mesh=axes,
        schedule=schedule,
        saved=saved,
        layout=Layout(sequence_parallel=sequence, context="all_gather" if gathers_context else _exchange(row, axes)),
        overlap=replace(overlap, splits=splits, experts=set_by.overlap),
        optimizer=optimizer,
        precision=precision,
    )
    return made, (*notes, *more, *again, *guessed, *divided, *assumed)


def _exchange(row: Row, axes: Mesh) -> Literal["ring", "ulysses"]:
    """How ranks that share a sequence exchange it."""
    text = f"{row.framework} {row.sequence_parallel or ''} {row.notes}".lower()
    return "ulysses" if axes.cp > 1 and re.search(r"ulysses|all.?to.?all sequence|deepspeed sp\b", text) else "ring"


def _decomposed(row: Row) -> bool:
    """Whether XLA cuts products to overlap with what tensor-parallel ranks exchange, as it does on TPUs (Wang et al.,
    ASPLOS 2023: in production since)."""
    return bool(re.search(XLA, row.framework.lower()) and "tpu" in row.device.lower())


def _micro_batch(row: Row, axes: Mesh) -> tuple[int, Notes]:
    """Sequences of a microbatch. Not given: all that a rank gets where nothing is accumulated by custom (programs
    compiled by XLA), one where sequences are divided or stages wait for them; otherwise a refusal."""
    if row.micro_batch is not None:
        return row.micro_batch, ()
    if row.global_batch is not None and re.search(XLA, row.framework.lower()) and axes.pp == 1:
        share = max(1, row.global_batch // axes.data_ranks)
        return share, (f"micro_batch not given: all {share} sequences of a rank at once, as {row.framework} does",)
    if axes.cp > 1 or axes.pp > 1:
        return 1, ("micro_batch not given: taken as 1",)
    raise InputError("micro_batch not given")


def redistributed(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Layers of each stage with the least work on the longest, the last of which has a head of `head` layers' FLOPs:
    Redis of the vocabulary-parallel paper (Yeung et al., arXiv 2411.05288). With the head that `redis_head` counts, the
    last stages are those of all eight settings in artifact/exp_one_host.csv of sail-sg/VocabularyParallelism 6191c3b
    (layers_last). Late stages get one more, as in get_num_layers_to_build of its transformer_block.py."""

    def longest(last: int) -> float:
        return max(last + head, -(-(layers - last) // (stages - 1)))

    last = min(range(layers // stages, -1, -1), key=longest)
    share, more = divmod(layers - last, stages - 1)
    return (*(share + (stage >= stages - 1 - more) for stage in range(stages - 1)), last)


def redis_head(vocab_size: int, hidden: int, seq_len: int) -> float:
    """A head's FLOPs in layers, as Redis counts them: by the formula of Narayanan et al. (SC21), in which layers run a
    second time in backward (96 h² + 16 h s for each token, the head 6 h V), though these runs recompute nothing.
    Without it, one of the eight settings would have another last stage, and four runs be 10 to 17% too short."""
    return 6 * vocab_size / (96 * hidden + 16 * seq_len)


def libai_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage as LiBai cuts them: where they divide evenly among four stages and more, it counts up to one
    more for each but the first, and the last gets what is left. Source: Oneflow-Inc/libai libai/utils/distributed.py
    distributed.py _init_placement_group (the commit of its benchmark; middle stages contain more layers), read
    2026-11-22. Empty where stages are even."""
    if stages < 4 or layers < 8 or layers % stages:
        return ()
    share, more = divmod(layers + min(stages - 1, layers // stages), stages)
    counts = [share + (stage >= stages - more) for stage in range(stages - 1)]
    return (*counts, layers - sum(counts)) if sum(counts) < layers else ()


def with_stages(made: Plan, row: Row, config: Config, facts: NoteFacts) -> tuple[Plan, Notes]:
    """The plan with the stages that the program cuts, where it does not divide layers evenly."""
    stages, layers = made.num_stages, getattr(config, "num_layers", 0)
    if facts.method == "redis" and stages > 1 and row.hidden and row.seq_len:
        head = redis_head(config.vocab_size, row.hidden, row.seq_len)
        counts = redistributed(layers, stages, head)
        listed = " ".join(map(str, counts))
        note = f"stages of {listed} layers: the longest with the fewest FLOPs, the head as {head:.1f} layers"
        return replace(made, schedule=replace(made.schedule, layers_per_stage=counts)), (note,)
    if getattr(config, "mtp_modules", 0) and (counts := mtp_stages(row, stages)):
        note = f"stages of {' '.join(map(str, counts))} layers: the recipe leaves room for the second prediction"
        return replace(made, schedule=replace(made.schedule, layers_per_stage=counts)), (note,)
    if re.search(r"libai", row.framework.lower()) and (counts := libai_stages(layers, stages)):
        note = f"stages of {' '.join(map(str, counts))} layers: LiBai gives those in the middle more"
        return replace(made, schedule=replace(made.schedule, layers_per_stage=counts)), (note,)
    if stages > 1 and layers % stages and (layers + 2) % stages == 0 and re.search(MEGATRON, row.framework.lower()):
        share = (layers + 2) // stages
        note = f"stages of {share} layers, the first and the last one fewer: they have the embedding and the head"
        counts = (share - 1, *[share] * (stages - 2), share - 1)
        return replace(made, schedule=replace(made.schedule, layers_per_stage=counts)), (note,)
    if not re.search(r"nanotron", row.framework.lower()) or not isinstance(config, LlamaConfig):
        return made, ()
    counts = stages_of(config, made.mesh.pp, tie_ends_stage=not nanotron.of_benchmark(row))
    if not counts:
        return made, ()
    listed = " ".join(map(str, counts))
    note = f"stages of {listed} layers: nanotron balances weights, the head's with them"
    return replace(made, schedule=replace(made.schedule, layers_per_stage=counts)), (note,)


def workload(row: Row) -> Workload:
    """The global batch."""
    missing = [c for c in ("global_batch", "seq_len") if getattr(row, c) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not given")
    return Workload(global_batch_size=row.global_batch or 0, seq_len=row.seq_len or 0)


EARLY = r"bigscience|2104\.04473|\(2021|v1\.0"
"""Runs (by program and source) of Megatron-LM of 2021 and its forks, whose backward waits for its collectives
(bigscience-workshop/Megatron-DeepSpeed 119a0d2 megatron/mpu/layers.py ColumnParallelLinear, read 2026-11-22)."""

BEFORE_CORE = r"^megatron-lm\b.*(2104\.04473|2205\.05198|\(2021|oneflow-inc/libai)"
"""Runs (by program and source) of Megatron-LM between February 2021 and its pipeline's move to Megatron Core."""

PARTED_MESSAGES = (
    "NVIDIA/Megatron-LM 27fc468 (2021-02-09) to 3c92fa9 (2023-03-23) megatron/p2p_communication.py: scatter-gather is "
    "on unless --no-scatter-gather-tensors-in-pipeline is given; read 2026-11-23"
)

UPDATE_IN_PASSES = (
    "NVIDIA/Megatron-LM 0076441 megatron/optimizer/optimizer.py FP16OptimizerWithFP16Params.step: "
    "_copy_model_grads_to_main_grads, _unscale_main_grads_and_check_for_nan, _copy_main_params_to_model_params; read "
    "2026-11-23"
)
ADDED_GRADIENTS = (
    "NVIDIA/Megatron-LM 01d65bd megatron/model/distributed.py param_hook: main_grad.add_; no product of megatron/mpu/"
    "layers.py (02bb1f5, 2022) adds into it yet; read 2026-11-23"
)

EARLY_FOUNDRY = "mosaicml/llm-foundry 1ef7b4d scripts/train/benchmarking/sweep.sh (May 2023): torch 1.13.1"
"""Where it is known from that MosaicML's A100 runs in pure bf16 precede torch 2.1: the table of that commit has them,
those of b2a43a1 (October 2023) and 5e85bd6 (January 2024) add the others on torch 2.1.0. Read 2026-11-22."""

FOUNDRY_KERNELS = (
    "mosaicml/llm-foundry b2a43a1 and 5e85bd6 scripts/train/benchmarking: --attn_impl of submit_benchmarks.py is "
    "triton unless sweep.py says flash; its image is torch 2.1.0 on CUDA 12.1; read 2026-11-22"
)
FOUNDRY_FLASH = r"(-| )(1|3|7|70)b$"
"""Models that sweep.py (January 2024: the large-scale table on H100) runs with FlashAttention-2."""

XLA_ATTENTION = (
    "MaxText's attention=cudnn_flash_te, Paxml's NVTE_FUSED_ATTN=1 (NVIDIA/dgxc-benchmarking v25.02.02 maxtext, "
    "v24.11.1 paxml configure.sh; read 2026-11-22)"
)
MAXTEXT_ROWS = (
    "AI-Hypercomputer/maxtext e591f30 src/maxtext/layers/moe.py permute, unpermute, _sort_activations; read 2026-11-23"
)
PAXML_TE = "NVIDIA/dgxc-benchmarking v24.11.1 paxml/configure.sh: ENABLE_TE=1; read 2026-11-23"
CORE_13 = "v25.08"
BEFORE_CORE_13 = (
    "NVIDIA/dgxc-benchmarking: releases before v25.08 run NeMo 25.04 and older, on Megatron Core up to 0.12"
)
"""Where router weights multiply what experts put out."""
FP8_SUMS = (
    "NVIDIA/dgxc-benchmarking v24.11.1 llama3.1/configure.sh: fp8_buf of proj_fprop and fc2_fprop; NVIDIA/NeMo 0594a70 "
    "nemo/collections/llm/recipes/tp_overlap_configs/userbuffers.py; read 2026-11-22"
)
BRIDGE_RECIPES = "NVIDIA-NeMo/Megatron-Bridge, performance recipes of the release (evidence.published.bridge)"


KERNELS = (
    (r"\bfa-?1\b|flash\w*[- _]?(?:attn|attention)?[- _]?v?1\b", "flash1"),
    (r"\bfa-?2\b|flash\w*[- _]?(?:attn|attention)?[- _]?v?2\b", "flash2"),
    (r"\bfa-?3\b|flash\w*[- _]?(?:attn|attention)?[- _]?v?3\b", "flash3"),
    (r"^cudnn|[( ]cudnn\)?$", "cudnn"),
    (r"triton", "triton"),
)
"""(pattern of `flash_attention`, kernel) where a row says which kernel ran."""

UNFUSED_WORDS = r"(?:no|false|off|0|none|eager|math|naive|unfused|standard|without)(?![a-z])"
MEMORY_EFFICIENT_WORDS = r"xformers|mem(?:ory)?[-_ ]?eff"
YES = r"(?:yes|true|on|1|enabled|y|sp|megatron)(?![a-z0-9])"


def _attention(message: str) -> str | None:
    """Which attention a row's `flash_attention` is."""
    if not message:
        return None
    if re.match(UNFUSED_WORDS, message):
        return "unfused"
    return "memory_efficient" if re.search(MEMORY_EFFICIENT_WORDS, message) else "flash"


def stack(row: Row, facts: NoteFacts) -> tuple[Stack, Notes]:
    """What the program does, with what the row says about it."""
    program = row.framework.lower()
    name = next((name for pattern, name in FRAMEWORKS if re.search(pattern, program)), None)
    if name == "pytorch-fsdp" and re.search(HUGGING_FACE, program) and _on_deepspeed(row):
        name = "deepspeed"
    notes: Notes = ()
    if name is None:
        notes = (f"no record of what {row.framework} does",)
    elif not re.search(SAME, program):
        notes = (f"{row.framework} taken as the stack {name}",)
    text = (row.flash_attention or "").lower()
    attention = _attention(text)
    other = name is not None and not re.search(FITTED, program)
    kernel = next((kernel for pattern, kernel in KERNELS if re.search(pattern, text)), None)
    eager = bool(re.search(HUGGING_FACE, program)) and not facts.compiled
    wide = eager and re.search(r"llama|mistral|mixtral|qwen", row.model.lower())
    if attention == "unfused" and (wide or (name == "pytorch-fsdp" and "amp" in (row.precision or "").lower())):
        attention = "unfused_fp32_softmax"  # so does that model's code, or autocast (pytorch docs amp.rst: softmax)
    launch = "compiled" if facts.compiled or re.search(XLA, program) else None
    base = Stack(name=row.framework, version="") if name is None else named_stack(name)
    told = {"attention": attention, "launch_mode": launch, "attention_kernel": kernel}
    result = with_job_fields(base, f"published runs, {row.family}", **told)
    if other:
        result = with_job_fields(result, f"published runs: {row.framework} is read as the nearest stack", nearest=True)
    result = _as_launched(result, row, facts, program, eager=eager)
    if held := next((why for pattern, why in HELD_OUTPUTS if re.search(pattern, program)), None):
        result = with_job_fields(result, held, outputs_held=True)
    if re.search(r"oneflow", program) and (row.tp or 1) == 1:
        result = with_job_fields(result, ONEFLOW_LOSS, cross_entropy="fused")
    if re.search(HUGGING_FACE, program) and "fsdp" in (row.zero_or_fsdp or "").lower():
        result = with_job_fields(result, NO_SYNC, unsharded_accumulation=True)
    if re.search(r"v100", row.device.lower()) and re.search(r"megatron", program):
        result = with_job_fields(result, "CUDA before 11.7 loads every kernel with the context", preloaded_kernels=True)
    result = _before_core(result, f"{program} {row.source or ''}".lower())
    if name == "llm-foundry" and re.search(r"a100.*pure", f"{row.device} {row.precision}".lower()):
        result = with_job_fields(result, EARLY_FOUNDRY, recompute_stops=False)
    if name == "llm-foundry" and re.search(r"scripts/train/benchmarking", row.source or ""):
        flash = re.search(r"large scale", (row.section or "").lower()) and re.search(FOUNDRY_FLASH, row.model.lower())
        result = with_job_fields(
            result, FOUNDRY_KERNELS, attention_kernel="flash2" if flash else "triton", cublas="12.1"
        )
    if re.search(r"deepep|hybridep", row.notes.lower()):
        result = with_job_fields(result, f"published runs, {row.family}: DeepEP", moe_dispatch="fused")
    result = _as_recipes_set(result, row, facts, program)
    if name == "nanotron":
        result = nanotron.as_started(result, row)
    return with_test_options(result, row), notes


def _as_launched(result: Stack, row: Row, facts: NoteFacts, program: str, *, eager: bool) -> Stack:
    """Compiled by torch or XLA, or the eager code of transformers."""
    if facts.compiled and not re.search(XLA, program):
        result = with_job_fields(result, "torch.compile fuses what lies between products", **COMPILED)
    if re.search(XLA, program):
        loss = "chunked" if settings.tiled(row) else "fused"
        result = with_job_fields(result, "XLA fuses what lies between products", cross_entropy=loss)
        if _attention((row.flash_attention or "").lower()) != "unfused":
            result = with_job_fields(result, XLA_ATTENTION, attention="flash", attention_kernel="cudnn")
    if row.experts and re.search(r"maxtext", program) and not says(row, "drops_tokens"):
        result = with_job_fields(result, MAXTEXT_ROWS, moe_rows="sorted")
    if re.search(r"paxml", program):
        result = with_job_fields(result, PAXML_TE, transformer_engine=True)
    if eager:
        result = with_job_fields(result, "the eager code of transformers", **EAGER)
        if re.search(r"fusedadam", program):
            result = with_job_fields(result, FUSED_ADAM, optimizer_step="fused")
        if re.search(r"liger", program):
            result = with_job_fields(result, LIGER, **LIGER_KERNELS)
    return result


def _as_recipes_set(result: Stack, row: Row, facts: NoteFacts, program: str) -> Stack:
    """As the recipe or script of the row's program and release has it."""
    if re.search(r"megatron-bridge", program):
        set_by = recipe(row, facts.release)
        result = with_job_fields(
            result,
            BRIDGE_RECIPES,
            moe_dispatch="hybrid_ep" if set_by.hybrid_ep else "fused" if set_by.one_copy else None,
            moe_experts="fused" if set_by.fused else None,
            launch_mode="cuda_graph" if set_by.graphs else None,
        )
    if re.search(r"nemo|megatron-bridge", program) and _sums_in_fp8(row, facts.release):
        result = with_job_fields(result, FP8_SUMS, tp_reduce_dtype="fp8")
    if nvidia.eager_activation(row):
        result = with_job_fields(result, sources("eager_activation"), activation="unfused")
    if nvidia.local_attention(row):
        result = with_job_fields(result, nvidia.LOCAL_ATTENTION, attention="unfused")
    if nvidia.without_cudnn(row):
        result = with_job_fields(result, sources("without_cudnn"), attention_kernel="flash2")
    if result.layers.attention_kernel == "cudnn":
        result = with_job_fields(result, sources("cudnn"), cudnn=nvidia.cudnn(row, facts.release))
    if of_date := torchtitan.kernels(row, facts.compiled):
        result = with_job_fields(result, torchtitan.SOURCE, **of_date)
    if of_recipe := automodel.kernels(row):
        result = with_job_fields(result, automodel.SOURCE, **of_recipe)
    if program == "nemo" and nvidia.unfused_loss(row):
        result = with_job_fields(result, nvidia.UNFUSED_LOSS, cross_entropy="in_place")
    if program == "nemo" and row.experts and facts.release < CORE_13:
        result = with_job_fields(result, BEFORE_CORE_13, moe_weights="output")
    return result


def _on_deepspeed(row: Row) -> bool:
    text = (row.zero_or_fsdp or "").lower()
    return re.search(DEEPSPEED_FILES, text) is not None and "fsdp" not in text


def _before_core(base: Stack, message: str) -> Stack:
    """Megatron-LM, and its forks, as they were before Megatron Core. said: program and source."""
    if base.layers.backward_overlap and re.search(EARLY, message):
        base = with_job_fields(base, "Megatron-LM of 2021", backward_overlap=False)
    if base.gradients.grad_accumulation_fused and re.search(EARLY, message):
        base = with_job_fields(base, ADDED_GRADIENTS, grad_accumulation_fused=False)
    if re.search(BEFORE_CORE, message):
        base = with_job_fields(base, PARTED_MESSAGES, p2p_partitioned=True)
        base = with_job_fields(base, UPDATE_IN_PASSES, update_in_passes=True)
    return base


def _sums_in_fp8(row: Row, release: str) -> bool:
    """Whether a recipe for H100 reduces the forward's partial sums in eight bits: Llama's of 405B, and of 70B since
    NeMo 2."""
    named = row.model.lower()
    if not re.search(r"h100.*fp8", f"{row.device} {row.precision}".lower()) or "llama" not in named:
        return False
    return "405b" in named or ("70b" in named and not re.match(r"v24|v25\.0[123]", release))


def _overlap(row: Row) -> Overlap:
    """What the program overlaps unless told otherwise: the pipeline engines reduce and gather at the end of a step, and
    Megatron-LM does without --overlap-grad-reduce and --overlap-param-gather, which its papers' runs precede. OneFlow
    with tensor parallelism, LiBai also with stages, has NCCL on the stream that computes
    (Oneflow-Inc/OneFlow-Benchmark LanguageModeling/GPT/oneflow_gpt/training.py nccl_use_compute_stream;
    Oneflow-Inc/libai 9fc504c libai/models/utils/graph_base.py; read 2026-11-22)."""
    program = row.framework.lower()
    if re.search(r"nanotron", program):  # DDP's buckets of 25 MiB in bf16, reduced in fp32; gathers after the update
        return Overlap(bucket_bytes=50 * 2**20, param_gather=False, pipeline_sends=False)
    if re.search(r"internevo|internlm", program):  # configs/7B_sft.py: buckets of 512 Mi elements; p2p.py waits
        return Overlap(bucket_bytes=2**30, param_gather=False, pipeline_sends=False)
    if re.search(r"^vtrain\b", program):  # messages are gaps behind a stage's last kernel (src/predictor.py)
        return Overlap(grad_reduce=False, param_gather=False, pipeline_sends=False)
    if re.search(r"megatron-deepspeed|megatron\+deepspeed|megatron-lm", program):
        return Overlap(grad_reduce=False, param_gather=False)
    if re.search(r"oneflow", program) and ((row.tp or 1) > 1 or "libai" in program and (row.pp or 1) > 1):
        return Overlap(grad_reduce=False, param_gather=False)
    return Overlap()


def _sequence_parallel(row: Row) -> tuple[bool, Notes]:
    if row.sequence_parallel is not None:
        return re.match(YES, row.sequence_parallel.lower()) is not None and (row.tp or 1) > 1, ()
    tp = row.tp or 1
    if (
        re.search(XLA, row.framework.lower()) and tp > 1 and (row.seq_len or 0) % tp == 0
    ):  # MaxText: logical_axis_rules activation_embed
        return True, ("the residual stream is divided over tp, as MaxText's rules have it",)
    if re.search(r"megatron-bridge", row.framework.lower()) and tp > 1:
        return True, (f"sequence parallelism not given: {row.framework}'s recipes have it wherever tp is above 1",)
    if "REDUCE_SCATTER" in row.notes and (row.tp or 1) > 1:
        return True, ("sequence parallelism assumed: the benchmark script's last setting",)
    return False, ()
