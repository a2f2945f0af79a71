"""torchtitan's keys for changes of a job, as its TOML has them.

`TERMS` has the table and the key of each. Leaves out what they do (`search.fit.options`).
"""

from __future__ import annotations

from gnomon.search.fit.terms import Change, Setting, Terms


def _recompute(change: Change) -> list[Setting]:
    return [("activation_checkpoint.mode", "full" if change.after.saved.preset == "full" else "selective")]


def _axes(change: Change) -> list[Setting]:
    mesh = change.after.mesh
    names = {"tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree"}
    changed: list[Setting] = [
        (f"parallelism.{name}", getattr(mesh, axis))
        for axis, name in names.items()
        if getattr(mesh, axis) != getattr(change.before.mesh, axis)
    ]
    return [*changed, ("parallelism.data_parallel_shard_degree", mesh.dp_shard), *_batch(change)]


def _batch(change: Change) -> list[Setting]:
    """Sets the same sequences a step. A rank with pipeline stages takes its share of them at once, in microbatches,
    which are of one sequence where nothing says otherwise."""
    total = change.workload.global_batch_size
    out: list[Setting] = [] if total is None else [("training.global_batch_size", total)]
    if change.after.mesh.pp == 1:
        return out
    # Its default gathers parameters again for the backward without pipeline stages only.
    again = change.after.optimizer.reshard_after_forward
    resharded: list[Setting] = [("parallelism.fsdp_reshard_after_forward", "always")] if again else []
    return [
        ("training.local_batch_size", change.micro * change.microbatches),
        ("parallelism.pipeline_parallel_microbatch_size", change.micro),
        *resharded,
        *out,
    ]


TERMS = Terms(
    style="toml",
    words={
        "micro_batch_size": lambda change: [("training.local_batch_size", change.micro), *_batch(change)],
        "global_batch": lambda change: [("training.global_batch_size", change.workload.global_batch_size)],
        "recompute": _recompute,
        "reshard_after_forward": lambda change: [("parallelism.fsdp_reshard_after_forward", "always")],
        "zero": _axes,
        "cpu_offload": lambda change: [("training.enable_cpu_offload", True)],
        "tp": _axes,
        "pp": _axes,
        "cp": _axes,
    },
)
