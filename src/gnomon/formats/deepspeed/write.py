"""A plan as the JSON configuration of DeepSpeed 0.19.6 (deepspeedai/DeepSpeed edaa722, 2026-08-22), read back by
`deepspeed`.

`draft(asked)` returns the file. The model, the length of sequences and what is recomputed are the user's code, and are
said in `elsewhere`. DeepSpeed's pipelines and experts are code too: a plan with them is refused. JSON has no comments.
"""

from __future__ import annotations

import json

from gnomon.errors import PlanError
from gnomon.formats.deepspeed.read import OPTIMIZERS, read_deepspeed
from gnomon.formats.export import Draft, ExportRequest, half_of, need_axes
from gnomon.plans import Optimizer, Precision, Saved

PROGRAM = "DeepSpeed 0.19.6"

HALVES = ("bf16", "fp16")

NVME_PATH = "/local_nvme"
"""A folder to be changed."""

REASONS = (
    ("mesh.dp_*", "DeepSpeed divides over all data-parallel ranks"),
    ("layout.*", "AutoTP decides how tensors lie"),
    ("overlap.param_gather", "overlap_comm gathers ahead at ZeRO 3 only"),
    ("overlap.bucket_bytes", "reduce_bucket_size is in elements; it has a default (500,000,000) and no blocks"),
    ("overlap.*", "DeepSpeed has one switch, overlap_comm"),
    ("optimizer.kind", "DeepSpeed has Adam, AdamW, SGD, Lion and Muon"),
    ("optimizer.offload_parameters", "offload_param has an effect at ZeRO 3 only"),
    ("optimizer.parameter_tier", "offload_param has an effect at ZeRO 3 only"),
    ("optimizer.offload*", "the whole update is offloaded, or at ZeRO 3 a share of it; in pieces of its own"),
    ("optimizer.*", "ZeRO 3 gathers and frees by its own trace of the model"),
    ("precision.fp8*", "the configuration has no eight-bit products"),
    ("precision.*", "parameters are bf16 or fp16 with an fp32 copy and states, or fp32"),
)


def draft(request: ExportRequest) -> Draft:
    """Drafts the file. PlanError for pipelines, context and expert parallelism and groups of shards; InputError for
    what DeepSpeed refuses."""
    need_axes(request, "DeepSpeed's configuration", "pp", "cp", "ep", "etp")
    plan = request.plan
    if plan.optimizer.zero == 3 and plan.mesh.dp_replicate > 1:
        raise PlanError(
            f"DeepSpeed shards over all data-parallel ranks, and its groups of them (mics_shard_size) are gone from "
            f"current releases, so dp_replicate = {plan.mesh.dp_replicate} has no place at ZeRO 3; give a plan with "
            f"dp_replicate = 1, or export it to torchtitan or accelerate, which shard within groups"
        )
    values: dict[str, object] = {
        "train_batch_size": request.workload.batch_size,
        "train_micro_batch_size_per_gpu": request.micro,
        "gradient_accumulation_steps": request.microbatches,
        "gradient_clipping": 1.0 if plan.optimizer.clip else 0.0,
        "optimizer": {"type": _kind(plan.optimizer), "params": {"lr": 3e-4}},
        "zero_optimization": _zero(request),
        **_precision(plan.precision),
    }
    if plan.mesh.tp > 1:
        values["tensor_parallel"] = {"autotp_size": plan.mesh.tp}
    text = json.dumps(values, indent=2) + "\n"
    return Draft(
        program=PROGRAM,
        text=text,
        job=read_deepspeed(
            text,
            devices=plan.mesh.world_size,
            seq_len=request.workload.seq_len,
            model=request.model,
            saved=plan.saved,
        ),
        comment="",
        elsewhere=(
            f"the model is your code's: {request.label}",
            f"sequences of {request.workload.seq_len} tokens",
            *recomputed(plan.saved),
            f"start it on {plan.mesh.world_size} devices, as in deepspeed --num_nodes {request.num_nodes} --num_gpus "
            f"{request.processes_per_node} train.py; lr = 3e-4 is a placeholder",
        ),
        reasons=REASONS,
        code=("saved.*",),
    )


def recomputed(saved: Saved) -> tuple[str, ...]:
    """What the user's code must wrap in torch.utils.checkpoint."""
    if saved == Saved():
        return ()
    parts = {
        "none": [],
        "selective": ["the core of attention of each layer"],
        "full": ["each layer" if saved.every == 1 else f"each run of {saved.every} layers"],
    }[saved.preset]
    for rule in saved.rules:
        where = f" in the first {rule.first_per_stage} of a stage" if rule.first_per_stage is not None else ""
        where += f" in stage {', '.join(map(str, rule.stages))}" if rule.stages else ""
        what = f"{rule.action} {', '.join(rule.tensors)} of" if rule.preset is None else f"preset {rule.preset} for"
        parts.append(f"{what} {rule.calls}{where}")
    return (f"recompute (torch.utils.checkpoint) in the model's code: {'; '.join(parts)}",)


def _kind(optimizer: Optimizer) -> str:
    # FusedAdam and DeepSpeedCPUAdam are kernels of AdamW; of several other names of a kind the first would stay, since
    # a later entry of a dict replaces an earlier one.
    names = {kind: name for name, kind in reversed(OPTIMIZERS.items()) if name[:5] not in ("Fused", "DeepS")}
    return names.get(optimizer.kind, "AdamW")


def _zero(request: ExportRequest) -> dict[str, object]:
    plan = request.plan
    optimizer, overlap = plan.optimizer, plan.overlap
    together = overlap.param_gather if optimizer.zero == 3 else overlap.grad_reduce
    table: dict[str, object] = {"stage": optimizer.zero, "overlap_comm": together}
    if optimizer.zero in (1, 2) and overlap.bucket_bytes is not None:
        # DeepSpeed counts elements, of the dtype in which gradients are reduced.
        table["reduce_bucket_size"] = max(1, overlap.bucket_bytes // (2 if _reduce(plan.precision) in HALVES else 4))
    if optimizer.offload is not None and optimizer.zero > 0:
        ratio = {"ratio": optimizer.offload.fraction} if optimizer.zero == 3 else {}
        table["offload_optimizer"] = {"device": "cpu", **ratio}
    if optimizer.offload_parameters:
        on_disk = optimizer.parameter_tier == "disk"
        table["offload_param"] = {"device": "nvme", "nvme_path": NVME_PATH} if on_disk else {"device": "cpu"}
    return table


def _reduce(precision: Precision) -> str:
    return precision.reduce if precision.reduce in ("fp32", *HALVES) else "fp32"


def _precision(precision: Precision) -> dict[str, object]:
    half = half_of(precision)
    grad = precision.grad if precision.grad in ("fp32", *HALVES) else "fp32"
    config: dict[str, object] = {
        "communication_data_type": _reduce(precision),
        "data_types": {"grad_accum_dtype": grad},
    }
    if half is not None:
        table: dict[str, object] = {"enabled": True}
        if precision.master == half:
            table[f"{half}_master_weights_and_grads"] = True
        if half == "bf16" and precision.states == "bf16":
            table["bf16_optimizer_states"] = True
        config[half] = table
    return config
