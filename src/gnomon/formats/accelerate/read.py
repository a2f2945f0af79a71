"""accelerate's YAML configuration (FSDP, FSDP2, DDP, or DeepSpeed by its deepspeed_config) to a Job.

`read_accelerate(source, seq_len=…, micro_batch_size=…)` takes a file or its text. The file says nothing of the model or
the batch: those are arguments. What a field means was read from huggingface/accelerate at commit
16cb6eb80dd9aa8b4df1a63ef57863e455d53b83 (2026-07-24, version 1.15.0.dev0): src/accelerate/parallelism_config.py,
src/accelerate/utils/{dataclasses,fsdp_utils}.py, src/accelerate/commands/config/config_args.py. Leaves out: DeepSpeed's
own file and Megatron-LM sections (they have readers of their own), SageMaker, TPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.errors import InputError
from gnomon.formats.deepspeed.read import job_of, read_deepspeed
from gnomon.formats.given import NOTHING, SEQ_LEN, Network, ReadContext
from gnomon.formats.job import Fields, Job, divides, flatten, read_source, with_job_fields
from gnomon.formats.yaml_file import read_yaml, said_twice
from gnomon.plans import DType, Layout, Mesh, Offload, Optimizer, Overlap, Plan, Precision, Saved, Schedule, Workload
from gnomon.search.fit.terms import Terms
from gnomon.software import stack

IRRELEVANT = frozenset(
    """
    compute_environment debug machine_rank main_process_ip main_process_port main_training_function rdzv_backend
    same_network gpu_ids enable_cpu_affinity use_cpu tpu_* commands command_file mpirun_config downcast_bf16
    fsdp_config.fsdp_state_dict_type fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_cpu_ram_efficient_loading
    fsdp_config.fsdp_use_orig_params fsdp_config.fsdp_transformer_layer_cls_to_wrap
    parallelism_config.parallelism_config_cp_backend parallelism_config.parallelism_config_sp_backend
    parallelism_config.parallelism_config_sp_seq_length* dynamo_config.dynamo_use_fullgraph
    dynamo_config.dynamo_use_dynamic dynamo_config.dynamo_use_regional_compilation
    """.split()
)

DEEPSPEED_IRRELEVANT = frozenset(
    """
    deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model deepspeed_config.offload_*_nvme_path
    deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile
    deepspeed_config.deepspeed_inclusion_filter deepspeed_config.deepspeed_exclusion_filter
    deepspeed_config.deepspeed_moe_layer_cls_names
    """.split()
)

INEXPRESSIBLE = {
    "fsdp_config.fsdp_forward_prefetch": "gathers one block further ahead in forward",
    "fsdp_config.fsdp_ignored_modules": "modules that are not divided",
    "fsdp_config.fsdp_min_num_params": "modules are gathered by size, not block by block",
    "dynamo_config.*": "how torch.compile is set",
    "fp8_config.*": "eight-bit products of one of three libraries",
    "parallelism_config.parallelism_config_sp_*": "DeepSpeed's sequence parallelism",
}

STRATEGIES = {
    "FULL_SHARD": (3, True, False),
    "SHARD_GRAD_OP": (3, False, False),
    "NO_SHARD": (0, True, False),
    "HYBRID_SHARD": (3, True, True),
    "HYBRID_SHARD_ZERO2": (3, False, True),
}
"""FSDP1's strategy -> (ZeRO stage, parameters freed after forward, replicated over machines). SHARD_GRAD_OP keeps what
it gathered until backward is over, and divides parameters between steps."""

NO_SYNC = "accelerate docs, concept_guides/gradient_synchronization: no_sync on all microbatches but the last"
"""Where it is known from that gradients stay whole between microbatches."""


def read_accelerate(
    source: str | Path,
    *,
    seq_len: int | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    devices: int | None = None,
    model: Network | str | None = None,
    context: ReadContext = NOTHING,
) -> Job:
    """The job of a configuration file (a Path, or its text) around a script of its own.

    seq_len: tokens; micro_batch_size: sequences on one rank; gradient_accumulation_steps: 1, or what a deepspeed_config
    says; devices: in place of num_processes.
    given: the same, for what is not among the arguments. What is left open is taken as usual, and listed. Raises
    InputError for what is missing or refused, with the fix.
    """
    text, file = read_source(source)
    twice: list[str] = []
    f = Fields(flatten(read_yaml(text, file, twice)), file, context)
    assumed = said_twice(twice)
    seq_len, micro_batch_size = seq_len or context.seq_len, micro_batch_size or context.micro_batch_size
    model, devices = model or context.model, devices or context.devices
    # accelerate launches any script: neither the model nor the data are in its file.
    if seq_len is None:
        seq_len = SEQ_LEN
        assumed.append(f"the file does not say the sequence length: {SEQ_LEN} tokens (--seq-len)")
    if micro_batch_size is None:
        micro_batch_size = 1
        assumed.append("the file does not say the micro batch: 1 sequence on each rank (--micro-batch-size)")
    stated = f.integer("num_processes") if f.has("num_processes") else None
    kind = f.choice("distributed_type", {k: k for k in ("FSDP", "MULTI_GPU", "NO", "DEEPSPEED", "MEGATRON_LM")})
    if kind == "MEGATRON_LM":
        f.fail("distributed_type", f"{kind}: read Megatron-LM's own script, --from megatron (in Python read_megatron)")
    if kind == "DEEPSPEED":
        context = replace(
            context, devices=devices or f.integer("num_processes"), seq_len=seq_len, model=model, settings={}
        )
        context = replace(context, micro_batch_size=micro_batch_size)
        folder = source.resolve().parent if isinstance(source, Path) else None
        job = _by_deepspeed(f, file, context, gradient_accumulation_steps, folder)
        return replace(job, assumed=(*assumed, *job.assumed), stated_devices=stated)
    # num_processes is of all machines together, unlike torchrun's.
    devices = 1 if kind == "NO" else devices or f.integer("num_processes")
    f.ignore("num_processes")
    axes, optimizer = sharding_of(f, devices, kind == "FSDP")
    record = stack("pytorch-fsdp")
    # accelerate's no_sync, which FSDP answers by keeping whole gradients until the last microbatch.
    if kind == "FSDP":
        record = with_job_fields(record, NO_SYNC, unsharded_accumulation=True)
    backend = f.raw("dynamo_config.dynamo_backend")
    if backend is not None and str(backend).upper() not in ("NO", "EAGER"):
        record = with_job_fields(record, "dynamo_backend", launch_mode="compiled", norm="fused", activation="fused")
    f.ignore("dynamo_config.dynamo_backend")
    checkpoint = f.flag("fsdp_config.fsdp_activation_checkpointing", False)
    plan = Plan(
        mesh=axes,
        schedule=Schedule(micro_batch_size=micro_batch_size),
        saved=Saved(preset="full" if checkpoint else "none"),
        layout=layout_of(f),
        overlap=overlap_of(f),
        optimizer=optimizer,
        precision=precision_of(f, kind == "FSDP"),
    )
    # Only empty ones: a section that is filled in and not used is a sign of a mistake, and is reported.
    for section in ("fsdp_config", "dynamo_config", "fp8_config", "deepspeed_config", "megatron_lm_config"):
        if f.peek(section) in (None, {}):  # accelerate itself writes the sections that it does not use as empty
            f.ignore(section)
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    return Job(
        model=model,
        plan=plan,
        workload=Workload(
            global_batch_size=context.global_batch
            or micro_batch_size * (gradient_accumulation_steps or 1) * axes.data_ranks,
            seq_len=seq_len,
        ),
        stack=record,
        devices=devices,
        notes=tuple(f.notes),
        unexpressed=tuple(f.unexpressed),
        assumed=tuple(assumed),
        stated_devices=1 if kind == "NO" else stated,
        terms=FSDP if kind == "FSDP" else None,
    )


FSDP = Terms(
    style="yaml",
    words={
        "cpu_offload": lambda change: [("fsdp_config.fsdp_offload_params", True)],
        "recompute": lambda change: [
            ("fsdp_config.fsdp_activation_checkpointing", change.after.saved.preset == "full")
        ],
        "reshard_after_forward": lambda change: [("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD")],
        "micro_batch_size": lambda change: [
            ("", f"in the script: a batch of {change.micro} on each device, {change.microbatches} of them a step")
        ],
    },
)
"""Its words for changes."""


def _by_deepspeed(f: Fields, file: str, context: ReadContext, steps: int | None, folder: Path | None) -> Job:
    """The job of a deepspeed_config, as DeepSpeedPlugin writes DeepSpeed's configuration from it; or of the file that
    it names, where that lies beside it or in the working folder."""
    own = f.raw("deepspeed_config.deepspeed_config_file")
    if own is not None:
        places = [folder / str(own)] if folder is not None else []
        path = next((place for place in (*places, Path(str(own))) if place.is_file()), None)
        if path is None:
            f.fail(
                "deepspeed_config.deepspeed_config_file",
                f"the settings are in that file, which is not here; read it: gnomon predict --from deepspeed {own}",
            )
        mixed = f.raw("mixed_precision")
        f.ignore("num_processes", "num_machines", "distributed_type")
        f.account(IRRELEVANT | DEEPSPEED_IRRELEVANT, INEXPRESSIBLE, ("*",))
        job = read_deepspeed(
            path,
            context=context,
            gradient_accumulation_steps=steps,
            mixed_precision=mixed if mixed in ("no", "bf16", "fp16") else None,
        )
        return replace(job, notes=(*f.notes, *job.notes), unexpressed=(*f.unexpressed, *job.unexpressed))
    # DeepSpeedPlugin's default stage is 2, DeepSpeed's own 0.
    zero: dict[str, object] = {"stage": f.integer("deepspeed_config.zero_stage", 2, least=0)}
    for part in ("offload_optimizer", "offload_param"):
        device = f.raw(f"deepspeed_config.{part}_device")
        if device not in (None, "none"):
            zero[part] = {"device": device}
    values: dict[str, object] = {"zero_optimization": zero}
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        value = f.raw(f"deepspeed_config.{key}")
        if value not in (None, "none"):
            values[key] = value
    mixed = f.choice("mixed_precision", {"no": "no", "bf16": "bf16", "fp16": "fp16"}, "no")
    values |= {} if mixed == "no" else {mixed: {"enabled": True}}
    f.ignore("num_processes", "num_machines", "distributed_type")
    for section in ("fsdp_config", "dynamo_config", "fp8_config", "megatron_lm_config"):
        if f.peek(section) in (None, {}):
            f.ignore(section)
    f.account(IRRELEVANT | DEEPSPEED_IRRELEVANT, INEXPRESSIBLE, ())
    job = job_of(values, file, context=context, steps=steps, mixed_precision=mixed, saved=Saved())
    return replace(job, notes=(*f.notes, *job.notes), unexpressed=(*f.unexpressed, *job.unexpressed))


def sharding_of(f: Fields, devices: int, fsdp: bool) -> tuple[Mesh, Optimizer]:
    """Axes and ZeRO stage."""
    sizes = {
        axis: f.integer(f"parallelism_config.parallelism_config_{axis}_size", 1)
        for axis in ("dp_replicate", "tp", "cp")
    }
    machines = f.integer("num_machines", 1)
    rest = sizes["dp_replicate"] * sizes["tp"] * sizes["cp"]
    if devices % rest:
        raise InputError(
            f"num_processes = {devices} is not a multiple of dp_replicate x tp x cp = {rest}; the nearest is "
            f"{max(1, round(devices / rest)) * rest}"
        )
    remaining = devices // rest
    shard = f.integer("parallelism_config.parallelism_config_dp_shard_size", remaining)
    if shard != remaining:
        raise InputError(
            f"parallelism_config sizes multiply to {shard * rest}, but num_processes is {devices}; set its "
            f"dp_shard_size to {remaining}"
        )
    # DDP leaves clipping to the script, and accelerate's file says nothing of it.
    if not fsdp:
        return mesh(remaining, sizes), Optimizer(clip=False)
    stage, reshard, hybrid = strategy_of(f)
    # FSDP1's hybrid strategies shard within a machine and replicate across (their default process groups).
    if hybrid and sizes["dp_replicate"] == 1:
        divides("num_processes", remaining, "num_machines", machines)
        sizes["dp_replicate"], remaining = machines, remaining // machines
    offload = None
    if f.flag("fsdp_config.fsdp_offload_params", False):
        offload = Offload()
    f.notes.append("gradient clipping: the script's own; assumed to be on")
    clip = True
    optimizer = Optimizer(
        zero=stage,  # type: ignore[arg-type]
        reshard_after_forward=reshard,
        offload=offload,
        offload_parameters=stage == 3 and offload is not None,
        clip=clip,
    )
    return mesh(remaining, sizes), optimizer


def mesh(shard: int, sizes: Mapping[str, int]) -> Mesh:
    """The axes by name."""
    return Mesh(dp_replicate=sizes["dp_replicate"], dp_shard=shard, cp=sizes["cp"], tp=sizes["tp"])


def strategy_of(f: Fields) -> tuple[int, bool, bool]:
    """(ZeRO stage, freed after forward, hybrid), by version 1's strategy or version 2's flag."""
    version = f.integer("fsdp_config.fsdp_version", 1)
    again = f.raw("fsdp_config.fsdp_reshard_after_forward")
    if version == 2:
        f.ignore("fsdp_config.fsdp_sharding_strategy")
        if again is not None and not isinstance(again, bool):
            f.fail("fsdp_config.fsdp_reshard_after_forward", f"{again!r}: with fsdp_version 2 it is true or false")
        return 3, again is not False, False
    if isinstance(again, bool):
        f.fail("fsdp_config.fsdp_reshard_after_forward", "with fsdp_version 1 it names a strategy, as in FULL_SHARD")
    strategy_value = f.raw("fsdp_config.fsdp_sharding_strategy")
    spelled = strategy_value if strategy_value is not None else again if again is not None else "FULL_SHARD"
    # `accelerate config` writes numbers, its documentation names; numbers count from 1 as torch's enum does.
    name = list(STRATEGIES)[spelled - 1] if isinstance(spelled, int) and 1 <= spelled <= 5 else str(spelled).upper()
    if name not in STRATEGIES:
        f.fail("fsdp_config.fsdp_sharding_strategy", f"{spelled!r} is not one of {', '.join(STRATEGIES)} (or 1 to 5)")
    return STRATEGIES[name]


def overlap_of(f: Fields) -> Overlap:
    """FSDP1 prefetches in backward as it is told, FSDP2 by itself; blocks are gathered by the wrap policy."""
    # BACKWARD_POST gathers the next block only after this one's gradients: nothing is ahead.
    names = {"BACKWARD_PRE": "1", "BACKWARD_POST": "0", "NO_PREFETCH": "0", "1": "1", "2": "0"}
    keys = ("fsdp_config.fsdp_backward_prefetch", "fsdp_config.fsdp_backward_prefetch_policy")
    ahead = 1
    for key in keys:
        if f.has(key):
            ahead = int(f.choice(key, names))
    f.ignore(*keys)
    policy = str(f.raw("fsdp_config.fsdp_auto_wrap_policy") or "TRANSFORMER_BASED_WRAP")
    # Without wrapping by layers FSDP gathers the whole model at once.
    if policy != "TRANSFORMER_BASED_WRAP":
        f.report(
            "fsdp_config.fsdp_auto_wrap_policy", "the model is not gathered block by block: memory is too small here"
        )
    return Overlap(prefetch=ahead)


def layout_of(f: Fields) -> Layout:
    """Context parallelism of torch; tensor parallelism by the model's own plan."""
    kinds = {"allgather": "all_gather", "alltoall": "ring"}
    kind = f.choice("parallelism_config.parallelism_config_cp_comm_strategy", kinds, "allgather")
    return Layout(context=kind)  # type: ignore[arg-type]


def precision_of(f: Fields, fsdp: bool) -> Precision:
    """FSDP keeps parameters, gradients and states in fp32 and computes and reduces in the mixed precision; DDP with
    autocast reduces in fp32."""
    names = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
    compute: DType = f.choice("mixed_precision", names, "no")  # type: ignore[assignment]
    if f.raw("mixed_precision") == "fp8":
        f.report("mixed_precision", "eight-bit products; read as bf16, so too slow")
    reduce: DType = compute if fsdp else "fp32"
    return Precision(param="fp32", compute=compute, grad="fp32", reduce=reduce, master="none", states="fp32")
