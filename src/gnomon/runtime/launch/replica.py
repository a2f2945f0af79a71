"""A process that holds the whole model and trains a share of the batch by itself, whoever else there is.

`Replica` is an `Executor` without a group: what it does with other processes is its user's (`logical_workers`,
`partial_reduce`). Checkpoints name the plan and batch of the whole job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.lowering.gradients import TIED
from gnomon.lowering.norm import EVERYONE
from gnomon.plans import Mesh, Plan, Workload
from gnomon.plans import batch as batch_of
from gnomon.runtime.data.packing import batch_of_ids
from gnomon.runtime.mesh.groups import AXES, EXPERT_AXES, Coordinates, Groups
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.optim.update import AdamWSettings
from gnomon.runtime.parameters.parameters import Slot
from gnomon.runtime.step.execute import Executor


class Replica(Executor):
    """One of the plan's data-parallel workers, or several in turn."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        workload: Workload,
        *,
        seed: int = 0,
        settings: AdamWSettings = AdamWSettings(),  # noqa: B008 (frozen)
        values: Callable[[Slot], Tensor | None] | None = None,
    ) -> None:
        """Takes what `Executor` takes, on processors. plan, workload: of the whole job; its ranks all hold the whole
        model."""
        if reason := plan.experts.counts_the_step:
            raise PlanError(f"{reason} counts tokens on the plan's own processes; leave it out here")
        self.workers = plan.world_size
        units, rows = batch_of(plan, workload)
        schedule = replace(plan.schedule, num_microbatches=units, micro_batch_size=None, passes=())
        one_stage = replace(plan, mesh=Mesh(), stages=(), placement=(), schedule=schedule)
        part = replace(workload, global_batch_size=workload.global_batch_size // self.workers)
        super().__init__(graph, one_stage, part, seed=seed, settings=settings, values=values)
        self.plan, self.workload = plan, workload  # of the whole job, as checkpoints name it
        self.units, self.unit_rows = units, rows // self.workers

    def _groups(self) -> Groups:
        here = Coordinates(
            rank=0,
            pipeline_rank=0,
            position=0,
            along=dict.fromkeys(("cp", "tp", "edp", "ep", "etp"), 0),
            shard=0,
            data=0,
        )
        names = (*AXES, *EXPERT_AXES, "kv_copies", TIED, EVERYONE)
        return Groups(mesh=Mesh(), here=here, by_comm=dict.fromkeys(names, None))

    def rows_of(self, batch: Batch, worker: int) -> dict[str, Tensor]:
        """Those of a worker: its part of every microbatch, as its own rank would take it."""
        # As `Feed` deals rows: microbatch after microbatch, and in each worker after worker.
        return {
            name: tensor.unflatten(0, (self.units, self.workers, self.unit_rows))[:, worker].flatten(0, 1)
            for name, tensor in batch.items()
        }


def inputs_by_name(batch: Tensor | Batch) -> Mapping[str, Tensor]:
    """A batch as the graph's inputs by name."""
    return batch_of_ids(batch) if isinstance(batch, Tensor) else batch
