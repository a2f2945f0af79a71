"""A plan as the YAML configuration of accelerate 1.15.0 (FSDP2, DDP or one process), read back by `accelerate`.

`draft(asked)` returns the file for `accelerate launch --config_file`. The model, the batch, accumulation, clipping and
the optimizer are the user's script, and are said in `elsewhere`. A plan with pipelines or experts is refused. What the
fields mean was read from huggingface/accelerate at 16cb6eb (2026-07-24). Needs PyYAML only to be read back.
"""

from __future__ import annotations

from gnomon.formats.accelerate.read import read_accelerate
from gnomon.formats.deepspeed.write import recomputed
from gnomon.formats.export import Draft, ExportRequest, need_axes
from gnomon.formats.yaml_file import emit_yaml
from gnomon.plans import Plan, Saved

PROGRAM = "accelerate 1.15.0"

REASONS = (
    ("layout.context", "torch's context parallelism gathers, or passes around as a ring"),
    ("layout.*", "tensor parallelism is the model's own plan (tp_plan)"),
    ("overlap.*", "FSDP2 gathers one block ahead and reduces during backward; DDP has its defaults"),
    ("optimizer.zero", "accelerate divides parameters (ZeRO 3, FSDP2) or nothing (DDP)"),
    ("optimizer.offload*", "fsdp_offload_params moves everything, in one piece"),
    ("optimizer.keep_last_block", "FSDP2 keeps the last block by itself"),
    ("precision.fp8*", "eight-bit products are set by fp8_config, whose libraries differ"),
    ("precision.*", "parameters, gradients and states stay in fp32; products run in mixed_precision"),
)


def draft(request: ExportRequest) -> Draft:
    """Drafts the file. PlanError for pipelines and expert parallelism; InputError for what accelerate refuses."""
    need_axes(request, PROGRAM, "pp", "ep", "etp")
    plan, mesh = request.plan, request.plan.mesh
    sharded = plan.optimizer.zero > 0 or mesh.world_size != mesh.data_ranks
    kind = "FSDP" if sharded else "MULTI_GPU" if mesh.world_size > 1 else "NO"
    values: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": {"bf16": "bf16", "fp16": "fp16"}.get(plan.precision.compute, "no"),
        "num_machines": request.num_nodes,
        "num_processes": mesh.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static" if request.num_nodes == 1 else "c10d",
    }
    if sharded:
        values |= {"fsdp_config": _fsdp(plan), "parallelism_config": _axes(plan)}
    text = emit_yaml(values)
    return Draft(
        program=PROGRAM,
        text=text,
        job=read_accelerate(
            text,
            seq_len=request.workload.seq_len,
            micro_batch_size=request.micro,
            gradient_accumulation_steps=request.microbatches,
            model=request.model,
        ),
        elsewhere=_elsewhere(request, sharded),
        reasons=REASONS,
        code=("saved.*", "optimizer.kind", "optimizer.clip") if not _by_file(plan.saved) else _OPTIMIZER,
    )


_OPTIMIZER = ("optimizer.kind", "optimizer.clip")


def _by_file(saved: Saved) -> bool:
    """Whether fsdp_activation_checkpointing says all of it."""
    return saved in (Saved(), Saved(preset="full"))


def _elsewhere(request: ExportRequest, sharded: bool) -> tuple[str, ...]:
    optimizer, saved = request.plan.optimizer, request.plan.saved
    by_code = recomputed(saved) if not _by_file(saved) or not sharded else ()
    clip = "clip by accelerator.clip_grad_norm_" if optimizer.clip else "do not clip gradients"
    return (
        f"the model is your script's: {request.label}; set fsdp_transformer_layer_cls_to_wrap to its layer",
        f"batches of {request.micro} sequences of {request.workload.seq_len} tokens on a rank",
        f"Accelerator(gradient_accumulation_steps={request.microbatches})",
        f"the optimizer is {optimizer.kind}; {clip}",
        *by_code,
        *(("machine_rank and main_process_ip on each machine",) if request.num_nodes > 1 else ()),
    )


def _fsdp(plan: Plan) -> dict[str, object]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": plan.optimizer.reshard_after_forward,
        "fsdp_activation_checkpointing": plan.saved == Saved(preset="full"),
        "fsdp_offload_params": plan.optimizer.offload is not None or plan.optimizer.offload_parameters,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _axes(plan: Plan) -> dict[str, object]:
    mesh = plan.mesh
    sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp, "cp": mesh.cp}
    fields: dict[str, object] = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    if mesh.cp > 1:
        gathers = plan.layout.context == "all_gather"
        fields["parallelism_config_cp_comm_strategy"] = "allgather" if gathers else "alltoall"
    return fields
