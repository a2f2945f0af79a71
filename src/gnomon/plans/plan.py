"""Plan: every decision about how a job runs, as one frozen value that a person reads and edits.

A plan is written short (one `mesh`, whose equal stages are understood) or in full (`stages`). `resolve` turns the
short form into the full one for a given graph; both mean the same. Returns nothing about speed or memory, and does
not know what the software or the cluster can do: `check` compares a plan with its graph, cluster and workload.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.plans.mesh import Mesh
from gnomon.plans.parts import Experts, Layout, Optimizer, Overlap, Precision, Saved, Schedule, Stage
from gnomon.schema import typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a job runs. The default is one device, mixed precision, AdamW, nothing recomputed."""

    SCHEMA: ClassVar[str] = "gnomon.plan/1"

    mesh: Mesh = Mesh()
    """Axes of the whole job when its stages are equal. With `stages` it stays at its default: each stage has its own
    mesh."""
    stages: tuple[Stage, ...] = ()
    """The stages in order of the graph. Empty: pp × virtual_stages equal ones."""
    schedule: Schedule = Schedule()
    """The order of forwards and backwards."""
    saved: Saved = Saved()
    """What is kept, recomputed or offloaded between forward and backward."""
    layout: Layout = Layout()
    """How tensors lie on the axes."""
    overlap: Overlap = Overlap()
    """What is issued early."""
    optimizer: Optimizer = Optimizer()
    """The update and how its states are divided."""
    precision: Precision = Precision()
    """Dtypes."""
    experts: Experts = Experts()
    """How experts are kept evenly loaded."""
    placement: tuple[int, ...] = ()
    """Device of each rank, in the cluster's order; several ranks may share one (logical workers). Empty: rank r on
    device r."""

    @typed
    def __post_init__(self) -> None:
        if self.stages and self.mesh != Mesh():
            raise PlanError(
                f"a plan has either one mesh or stages with a mesh each, but mesh ({self.mesh.describe()}) and "
                f"{len(self.stages)} stages are given; move the axes into the stages"
            )
        if self.schedule.layers_per_stage and len(self.schedule.layers_per_stage) != self.num_stages:
            raise PlanError(
                f"schedule layers_per_stage lists {len(self.schedule.layers_per_stage)} stages, but the plan has "
                f"{self.num_stages}; list one number for each stage"
            )
        for index, stage in enumerate(self.stages):
            # A stage reads stages before it alone, or the pipeline would have a circle.
            if any(not 0 <= source < index for source in stage.inputs or ()):
                raise PlanError(
                    f"stage {index} has inputs {stage.inputs}, but it can only read stages 0 to {index - 1}"
                )
        if self.placement and len(self.placement) != self.world_size:
            raise PlanError(
                f"placement gives a device to {len(self.placement)} ranks, but the plan has {self.world_size}; "
                f"give one for each rank, or none for rank r on device r"
            )
        if self.placement and min(self.placement) < 0:
            raise PlanError(f"placement names device {min(self.placement)}; devices count from 0")

    @property
    def num_stages(self) -> int:
        """Stages of the graph, virtual ones included."""
        return len(self.stages) or self.mesh.pp * self.schedule.virtual_stages

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage, in the order of its mesh."""
        if not self.stages:
            columns = _of_pipeline_ranks(self.mesh)
            return tuple(columns[rank] for rank in self.pipeline_ranks)
        ranks: list[tuple[int, ...]] = []
        following = 0
        for stage in self.stages:
            ranks.append(stage.ranks or tuple(range(following, following + stage.mesh.world_size)))
            # Stages without ranks take the next ones; those that name theirs may lie anywhere before.
            following = max(ranks[-1]) + 1
        return tuple(ranks)

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each stage: stages on the same ranks are virtual stages of one."""
        if not self.stages:
            return tuple(pipeline_rank(s, self.mesh.pp, self.schedule.placement) for s in range(self.num_stages))
        first_seen: dict[tuple[int, ...], int] = {}
        # Numbered by first appearance, so that listed stages and a uniform mesh agree on who is pipeline rank 0.
        return tuple(first_seen.setdefault(ranks, len(first_seen)) for ranks in self.stage_ranks)

    @property
    def num_pipeline_ranks(self) -> int:
        """Different sets of ranks that hold stages."""
        return max(self.pipeline_ranks) + 1

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return max(max(ranks) for ranks in self.stage_ranks) + 1 if self.stages else self.mesh.world_size

    @property
    def device_of(self) -> tuple[int, ...]:
        """Device of each rank."""
        return self.placement or _in_order(self.world_size)

    @property
    def num_devices(self) -> int:
        """Devices that take part: fewer than ranks where these take turns."""
        return len(set(self.placement)) if self.placement else self.world_size

    def places(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The devices of ranks, in an array of the same shape."""
        return np.array(self.placement, np.int64)[ranks] if self.placement else ranks

    def stage_mesh(self, stage: int) -> Mesh:
        """Mesh of one stage, with pp = 1."""
        return self.stages[stage].mesh if self.stages else _of_stage(self.mesh)


@lru_cache(maxsize=64)
def _in_order(ranks: int) -> tuple[int, ...]:
    """Every rank on the device of its number: one tuple for all plans of a size, which may have thousands."""
    return tuple(range(ranks))


@lru_cache(maxsize=64)
def _of_pipeline_ranks(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Ranks of each pipeline rank of a uniform mesh, in its order: rows of groups("pp") follow the other axes in order,
    so a column is one pipeline rank's."""
    return tuple(map(tuple, mesh.dense.groups("pp").T.tolist()))


@lru_cache(maxsize=1024)
def _of_stage(mesh: Mesh) -> Mesh:
    """One stage of a uniform mesh."""
    return replace(mesh, pp=1)


def pipeline_rank(stage: int, pp: int, placement: str) -> int:
    """Rank that holds `stage` among `pp`: `loop` gives stage mod pp; `v` goes up and down in turn."""
    turn, position = divmod(stage, pp)
    return pp - 1 - position if placement == "v" and turn % 2 else position


def effective_zero(plan: Plan) -> int:
    """The plan's ZeRO stage; 0 when every group that it would divide over has one rank, unless parameters come from the
    host block by block.

    PlanError when only some stages have several shards or several replicas.
    """
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    divided = [mesh.dp_shard * mesh.cp > 1 for mesh in meshes]
    zero = plan.optimizer.zero
    if not zero or not any(divided):
        # With one rank nothing is divided, but parameters that wait on the host still come block by block.
        return 3 if zero == 3 and plan.optimizer.offload_parameters else 0
    if not all(divided):
        raise PlanError(
            f"ZeRO stage {zero} divides over dp_shard x cp, which is 1 in stage {divided.index(False)} and more in "
            f"others; give every stage several, or use optimizer.zero = 0"
        )
    if len({mesh.dp_replicate > 1 for mesh in meshes}) > 1:
        raise PlanError("ZeRO with dp_replicate > 1 in some stages only has no rows yet; make the stages alike")
    return zero
