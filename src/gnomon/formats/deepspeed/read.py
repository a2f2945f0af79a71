"""DeepSpeed's JSON configuration to a Job.

`read_deepspeed(source, devices=…, seq_len=…)` takes a file or its text. The file says nothing of the model, the
sequence length or the number of devices, and may leave sizes to `"auto"`: those are arguments. What a field means was
read from deepspeedai/DeepSpeed at commit edaa7221267243c7be7fb49c5d5f5c4fb97b4641 (2026-08-22, version 0.19.6):
deepspeed/runtime/{config,constants,engine}.py, deepspeed/runtime/zero/{config,offload_config}.py. Leaves out: pipeline
engines (their stages are code), sparse attention, compression, autotuning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

from gnomon.errors import InputError
from gnomon.formats.given import NOTHING, SEQ_LEN, Network, ReadContext
from gnomon.formats.job import Fields, Job, divides, flatten, microbatches, read_source, with_job_fields
from gnomon.formats.keys import read_json
from gnomon.formats.trainer_terms import DEEPSPEED
from gnomon.plans import DType, Mesh, Offload, Optimizer, Overlap, Plan, Precision, Saved, Schedule, Workload
from gnomon.software import stack

IRRELEVANT = frozenset(
    """
    scheduler scheduler.* optimizer.params optimizer.params.* optimizer.legacy_fusion steps_per_print dump_state
    wall_clock_breakdown memory_breakdown
    flops_profiler.* tensorboard.* wandb.* csv_monitor.* comet.* comms_logger.* checkpoint.* fp16.loss_scale*
    fp16.initial_scale_power fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale bf16.check_overflow
    prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer aio.* autotuning.* log_level
    zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint nebula.* dataloader_drop_last
    zero_optimization.gather_16bit_weights_on_model_save zero_optimization.stage3_gather_16bit_weights_on_model_save
    zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.ignore_unused_parameters
    zero_optimization.log_trace_cache_warnings zero_optimization.pipeline_loading_checkpoint vocabulary_size
    zero_optimization.override_module_apply zero_optimization.offload_*.pin_memory zero_optimization.offload_*.fast_init
    zero_optimization.cpu_offload_use_pin_memory zero_force_ds_cpu_optimizer gradient_allreduce_op
    zero_optimization.enable_sanity_checks zero_optimization.legacy_stage1 zero_optimization.allgather_partitions
    zero_optimization.reduce_scatter zero_optimization.round_robin_gradients zero_optimization.memory_efficient_linear
    """.split()
)

INEXPRESSIBLE = {
    "zero_optimization.offload_param.*": "how parameters on NVMe move",
    "zero_optimization.offload_optimizer.*": "how the offloaded optimizer moves its data",
    "zero_optimization.zenflow*": "ZenFlow: part of the gradients is applied at once",
    "zero_optimization.stage3_param_persistence_threshold": "smaller parameters are never divided",
    "zero_optimization.param_persistence_threshold": "smaller parameters are never divided",
    "zero_optimization.stage3_*": "when gathered parameters are fetched and freed; read as one block ahead",
    "zero_optimization.prefetch_bucket_size": "how far ahead parameters are gathered; read as one block",
    "zero_optimization.max_*": "when gathered parameters are freed",
    "zero_optimization.model_persistence_threshold": "parameters that are never divided",
    "zero_optimization.module_granularity_threshold": "small modules are gathered together",
    "zero_optimization.sub_group_size": "parameters updated together at stage 3",
    "zero_optimization.allgather_bucket_size": "parameters gathered together after the update",
    "zero_optimization.use_multi_rank_bucket_allreduce": "how gradients of several owners travel",
    "zero_optimization.zero_hpz_partition_size": "ZeRO++: a second copy of the parameters within the node",
    "zero_optimization.zero_quantized_*": "ZeRO++: eight-bit transfers; a prediction without them is too slow",
    "zero_optimization.zeropp_loco_param*": "ZeRO++: error feedback",
    "zero_optimization.mics_hierarchical_params_gather": "gathers in two levels",
    "zero_optimization.use_all_reduce_for_fetch_params": "gathers by all-reduce",
    "zero_optimization.allgather_sequential": "gathers parameter by parameter",
    "activation_checkpointing.*": "settings of checkpointing; whether the model's code uses it is the argument saved=",
    "fp16.auto_cast": "inputs are cast",
    "torch_autocast.*": "mixed precision by torch.autocast",
    "amp.*": "mixed precision by Apex",
    "sparse_attention.*": "sparse attention",
    "sparse_gradients": "sparse gradients of embeddings",
    "progressive_layer_drop.*": "layers are left out at random: less work than computed here",
    "eigenvalue.*": "eigenvalues for quantisation",
    "curriculum_learning.*": "shorter sequences at first",
    "data_efficiency.*": "shorter sequences or fewer tokens",
    "elasticity.*": "the batch follows the number of devices",
    "compression_training.*": "compression during training",
    "hybrid_engine.*": "inference in between",
    "pipeline.*": "a pipeline engine, whose stages are in the model's code",
    "compile.*": "DeepCompile",
    "tensor_parallel.*": "tensor parallelism by AutoTP",
    "graph_harvesting": "CUDA graphs",
    "disable_allgather": "broadcasts in place of gathers",
    "managed_gradient_accumulation": "accumulation is left to the user's code",
    "bf16.immediate_grad_update": "gradients are added during backward",
    "seq_parallel_communication_data_type": "the dtype of Ulysses' exchanges",
    "data_types.*": "dtypes by hand",
    "moe.*": "mixture-of-experts settings",
}

PRECISION_KEYS = {"bf16.enabled": "bf16", "fp16.enabled": "fp16"}
"""Switches that trainers set by their own mixed precision."""

OPTIMIZERS = {
    "Adam": "adam",
    "AdamW": "adamw",
    "FusedAdam": "adamw",
    "DeepSpeedCPUAdam": "adamw",
    "SGD": "sgd",
    "Lion": "lion",
    "Muon": "muon",
}

OTHER_OPTIMIZERS = {
    "Lamb": "priced as AdamW: a norm of each layer's update besides",
    "FusedLamb": "priced as AdamW: a norm of each layer's update besides",
    "Adagrad": "priced as AdamW, which has one state more: memory is too large",
    "OneBitAdam": "priced as AdamW, as in its first steps: later ones send one bit a gradient, so too slow",
    "ZeroOneAdam": "priced as AdamW: it sends one bit a gradient, and not in every step, so too slow",
    "OneBitLamb": "priced as AdamW, as in its first steps: later ones send one bit a gradient, so too slow",
}
"""Updates that no plan says -> how a prediction with AdamW errs."""


def read_deepspeed(
    source: str | Path,
    *,
    devices: int | None = None,
    seq_len: int | None = None,
    model: Network | str | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None,
    saved: Saved | None = None,
    context: ReadContext = NOTHING,
) -> Job:
    """The job of a configuration file (a Path, or its text) around a model of its own.

    devices: all of them data-parallel ranks. micro_batch_size, gradient_accumulation_steps, mixed_precision: in place
    of `"auto"`. saved: what the model's code recomputes. given: the same, for what is not among the arguments. What is
    left open is taken as usual, and listed. Raises InputError for what is missing or refused, with the fix.
    """
    text, file = read_source(source)
    context = replace(
        context,
        devices=devices or context.devices,
        seq_len=seq_len or context.seq_len,
        model=model or context.model,
        micro_batch_size=micro_batch_size or context.micro_batch_size,
    )
    precisions: Mapping[str, Literal["no", "bf16", "fp16"]] = {
        "fp32": "no",
        "fp8": "bf16",
        "bf16": "bf16",
        "fp16": "fp16",
    }
    # fp8 is no precision of DeepSpeed's: what it stores and sends is bf16.
    if mixed_precision is None and context.precision is not None:
        mixed_precision = precisions[context.precision]
    return job_of(
        read_json(text, file),
        file,
        context=context,
        steps=gradient_accumulation_steps,
        mixed_precision=mixed_precision,
        saved=saved or Saved(),
    )


def _refuse_lists(flat: Mapping[str, object], file: str) -> None:
    """InputError for a field with several values: what the autotuner tries, each of which is a job."""
    several = [
        key for key, value in flat.items() if isinstance(value, list) and key.startswith(TUNED) and len(value) > 1
    ]
    if several:
        key = several[0]
        values = cast(list[object], flat[key])
        raise InputError(
            f"{file}: {key} = {values}: DeepSpeed's autotuner tries each of them, and each is a job: --set "
            f"{key}={values[0]}, and so on",
            f"$.{key}",
        )


TUNED = ("train_", "gradient_accumulation_steps", "zero_optimization.")
"""Beginnings of the fields that the autotuner takes lists of (deepspeed/autotuning/config_templates)."""


def job_of(
    values: Mapping[str, object],
    file: str,
    *,
    context: ReadContext,
    steps: int | None = None,
    mixed_precision: str | None,
    saved: Saved,
) -> Job:
    """A job from a configuration's values. steps: microbatches that are accumulated, in place of the file's."""
    flat = {**flatten(values), **context.values()}
    if context.devices is None:
        raise InputError(f"{file} does not say how many devices it runs on; give --on CLUSTER (in Python devices=)")
    assumed: list[str] = []
    _refuse_lists(flat, file)
    # Hugging Face's Trainer and accelerate fill these in: from their own arguments, or from the model's hidden size.
    auto = [key for key, value in flat.items() if value == "auto"]
    switches = [key for key in auto if key in PRECISION_KEYS]
    if switches and not mixed_precision:
        mixed_precision = "fp16" if switches == ["fp16.enabled"] and "bf16.enabled" in flat else "bf16"
        assumed.append(f"{switches[0]} is left to the trainer: {mixed_precision} (--precision)")
    flat = {key: value for key, value in flat.items() if key not in auto}
    # A file may leave both switches open, of which one is on.
    flat |= {key: mixed_precision == PRECISION_KEYS[key] for key in switches}
    sizes = {"train_micro_batch_size_per_gpu": context.micro_batch_size, "gradient_accumulation_steps": steps}
    flat |= {key: value for key, value in sizes.items() if value is not None}
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(flat) and context.global_batch is None:
        flat["train_micro_batch_size_per_gpu"] = 1
        assumed.append("the file does not say the batch: 1 sequence on each rank (--micro-batch-size)")
    # Settings are in `flat` by now; given again, each would be told as unknown to the reader of fields.
    f = Fields(flat, file, replace(context, settings={}))
    for key in auto:
        matters = not any(fnmatchcase(key, pattern) for pattern in IRRELEVANT)
        if matters and key not in flat and key not in sizes and key != "train_batch_size":
            f.note_default(key, "auto", "filled in by the trainer; DeepSpeed's own default is taken here")
    mesh = mesh_of(f, context.devices)
    # In place of all three of the file's, which may contradict it.
    if context.global_batch is not None:
        f.ignore("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
        micro = f.integer("train_micro_batch_size_per_gpu", 1)
        total = context.global_batch
        microbatches(total, micro, mesh.data_ranks, ("--global-batch", "train_micro_batch_size_per_gpu"))
    else:
        total, micro = batch_of(f, mesh.data_ranks)
    seq_len = context.seq_len
    if seq_len is None:
        seq_len = SEQ_LEN
        assumed.append(f"the file does not say the sequence length: {SEQ_LEN} tokens (--seq-len)")
    precision = precision_of(f)
    optimizer = optimizer_of(f)
    overlap = overlap_of(f, optimizer.zero, precision.reduce)
    record = stack("deepspeed")
    # DeepSpeedCPUAdam is one C++ loop over all elements, with AVX: a fused step.
    if optimizer.offload is not None:
        record = with_job_fields(record, "offload_optimizer (DeepSpeedCPUAdam)", optimizer_step="fused")
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    plan = Plan(
        mesh=mesh,
        schedule=Schedule(micro_batch_size=micro),
        saved=saved,
        overlap=overlap,
        optimizer=optimizer,
        precision=precision,
    )
    return Job(
        model=context.model,
        plan=plan,
        workload=Workload(global_batch_size=total, seq_len=seq_len),
        stack=record,
        devices=context.devices,
        notes=tuple(f.notes),
        unexpressed=tuple(f.unexpressed),
        assumed=tuple(assumed),
        terms=DEEPSPEED,
    )


def mesh_of(f: Fields, devices: int) -> Mesh:
    """All ranks are data-parallel; MiCS shards within groups of mics_shard_size."""
    group = f.integer("zero_optimization.mics_shard_size", -1, least=-1)
    # 0 is AutoTP's off.
    tp = f.integer("tensor_parallel.autotp_size", 1, least=0) or 1
    divides("devices", devices, "tensor_parallel.autotp_size", tp)
    data = devices // tp
    # MiCS: ZeRO 3 within a group, copies of it across groups (Zhang et al. 2022).
    if group > 0:
        divides("data-parallel ranks", data, "mics_shard_size", group)
        return Mesh(dp_replicate=data // group, dp_shard=group, tp=tp)
    return Mesh(dp_shard=data, tp=tp)


def batch_of(f: Fields, ranks: int) -> tuple[int, int]:
    """Reads (global batch, microbatch): two of the three sizes give the third, as in _set_batch_related_parameters."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (f.integer(name) if f.has(name) else None for name in names)
    f.ignore(*names)
    if total is None and micro is None:
        f.fail(
            names[1],
            f"neither {names[0]} nor {names[1]} is given (or both are 'auto'); give --micro-batch-size (in Python "
            f"micro_batch_size=)",
        )
    if micro is None and total is not None:
        divisor = ranks * (steps or 1)
        if total % divisor:
            legal = max(1, round(total / divisor)) * divisor
            raise InputError(
                f"train_batch_size = {total} is not a multiple of data-parallel ranks x gradient_accumulation_steps = "
                f"{ranks} x {steps or 1} = {divisor}; the nearest legal one is {legal}"
            )
        micro = total // (ranks * (steps or 1))
    assert micro is not None
    if steps is None:
        steps = max(1, total // (micro * ranks)) if total is not None else 1
    divisor = micro * steps * ranks
    if total is not None and total != divisor:
        raise InputError(
            f"train_batch_size = {total} is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x "
            f"data-parallel ranks = {micro} x {steps} x {ranks} = {divisor}; set it to {divisor} (--set "
            f"train_batch_size={divisor}), or leave it out; {devices_for(total, micro * steps)}"
        )
    return divisor, micro


def devices_for(total: int, per_rank: int) -> str:
    """Says for which number of ranks a batch is."""
    if total % per_rank:
        return f"no number of ranks gives {total}"
    return f"the nearest number of devices is {total // per_rank}, which it is for"


def precision_of(f: Fields) -> Precision:
    """bf16 and fp16 keep an fp32 copy; gradients stay in the parameters' dtype unless data_types says otherwise."""
    bf16 = f.flag("bf16.enabled", False) or f.flag("bfloat16.enabled", False)
    fp16 = f.flag("fp16.enabled", False)
    if bf16 and fp16:
        f.fail("fp16.enabled", "bf16 and fp16 are both enabled; keep one")
    param: DType = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    names = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
    stage = f.integer("zero_optimization.stage", 0, least=0)
    # Without ZeRO, bf16 gradients are accumulated in fp32 (engine.get_data_types).
    grad = f.choice("data_types.grad_accum_dtype", names, "fp32" if bf16 and stage == 0 else param)
    reduce = f.choice("communication_data_type", names, param)
    # Half-precision optimizers keep fp32 copies, with ZeRO or without.
    master = "none" if param == "fp32" else "fp32"
    if f.flag("bf16.bf16_master_weights_and_grads", False) or f.flag("fp16.fp16_master_weights_and_grads", False):
        master = param
    states = "bf16" if f.flag("bf16.bf16_optimizer_states", False) else "fp32"
    return Precision(
        param=param,
        compute=param,
        grad=grad,  # type: ignore[arg-type]
        reduce=reduce,  # type: ignore[arg-type]
        master=master,  # type: ignore[arg-type]
        states=states,  # type: ignore[arg-type]
    )


def optimizer_of(f: Fields) -> Optimizer:
    """Stage, offload and kind."""
    stage = f.integer("zero_optimization.stage", 0, least=0)
    if stage > 3:
        f.fail("zero_optimization.stage", f"{stage}: ZeRO has stages 0 to 3")
    name = f.text("optimizer.type", "AdamW")
    if name not in OPTIMIZERS and name in OTHER_OPTIMIZERS:
        f.report("optimizer.type", OTHER_OPTIMIZERS[name])
        kind = "adamw"
    else:
        # "Adam" is AdamW unless adam_w_mode is false; both cost the same.
        kind = f.choice("optimizer.type", OPTIMIZERS, "AdamW")
    if not f.has("optimizer.type"):
        f.notes.append("optimizer.type: not given, so the optimizer is the model code's; AdamW is assumed")
    # cpu_offload is the older name of the same switch.
    device = f.raw("zero_optimization.offload_optimizer.device")
    offload = None
    if device == "cpu" or f.flag("zero_optimization.cpu_offload", False):
        if stage == 0:
            f.fail(
                "zero_optimization.offload_optimizer.device", "the optimizer is offloaded at stages 1 to 3; raise stage"
            )
        # ZeRO-Offload++'s twin flow: the rest of the states is updated on the device.
        offload = Offload(fraction=f.number("zero_optimization.offload_optimizer.ratio", 1.0))
    elif device not in (None, "none"):
        f.report(
            "zero_optimization.offload_optimizer.device", "states on NVMe; read as on the device: too fast, too large"
        )
    f.ignore("zero_optimization.offload_optimizer.ratio", "zero_optimization.contiguous_gradients")
    f.ignore("zero_optimization.offload_optimizer", "zero_optimization.offload_param", "zero_optimization")
    return Optimizer(
        kind=kind,  # type: ignore[arg-type]
        zero=stage,  # type: ignore[arg-type]
        offload=offload,
        **_away(f, stage),
        clip=f.number("gradient_clipping", 1.0) > 0,
    )


def _away(f: Fields, stage: int) -> dict[str, Any]:
    """Says where parameters wait, which is at stage 3 only."""
    key = "zero_optimization.offload_param.device"
    device = f.raw(key)
    if f.flag("zero_optimization.cpu_offload_param", False):
        device = device or "cpu"
    if device in (None, "none"):
        return {}
    if stage != 3:
        f.notes.append(f"{key} = {device}: has an effect at stage 3 only, and this is stage {stage}")
        return {}
    return {"offload_parameters": True, "parameter_tier": "host" if device == "cpu" else "disk"}


def overlap_of(f: Fields, stage: int, reduce: str) -> Overlap:
    """overlap_comm is on by default at stage 3 only; buckets are counted in elements."""
    together = f.flag("zero_optimization.overlap_comm", stage == 3)
    if stage == 3 and not together:
        why = "gradients are reduced beside backward here all the same, parameters gathered when needed: too fast"
        f.note_default("zero_optimization.overlap_comm", "false", why)
    elements = int(f.number("zero_optimization.reduce_bucket_size", 5e8))
    size = {"fp32": 4, "bf16": 2, "fp16": 2}[reduce]
    return Overlap(
        grad_reduce=together or stage == 3,
        param_gather=together and stage == 3,
        # overlap_comm at stage 3 is what lets gathers run ahead on a stream of their own.
        prefetch=0 if stage == 3 and not together else Overlap().prefetch,
        # Stage 3 reduces by the bucket too, but as each block's backward ends, which a plan has as one bucket a block.
        bucket_bytes=max(1, elements * size) if stage in (1, 2) else None,
    )
