"""Process groups of one rank: which other ranks it meets, for each communicator that a Program names.

`Groups.of(plan)` makes them after `torch.distributed` is initialised; every rank makes all groups, in one order, as
`new_group` wants. A group of one rank is None: nothing is communicated. Returns nothing about links. Left out: expert
and context parallelism, and stages whose meshes differ, which are PlanErrors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from gnomon.errors import PlanError
from gnomon.plans import Mesh, Plan
from gnomon.runtime.arrivals import Channel

AXES = {"dp": ("dp_replicate", "dp_shard"), "dp_shard": ("dp_shard",), "dp_replicate": ("dp_replicate",), "tp": ("tp",)}
"""Communicator of a Program -> mesh axes over which it goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a rank stands."""

    rank: int
    """In the job."""
    pipeline_rank: int
    """Which rank class of the Program it belongs to."""
    position: int
    """Its place within its stages' mesh: it exchanges messages with the same place of other stages."""
    tp: int
    """Along `tp`."""
    shard: int
    """Along `dp_shard`."""
    data: int
    """Among the ranks that take different sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups that one rank is a member of."""

    mesh: Mesh
    """Of each stage: pp is 1."""
    here: Coordinates
    """This rank."""
    by_comm: dict[str, ProcessGroup | None]
    """dp, dp_shard, dp_replicate, tp, kv_copies, norm (all ranks), embedding, and two ranks for each channel."""

    @staticmethod
    def of(plan: Plan, *, kv_copies: int = 1, tied: Sequence[int] = (), channels: Sequence[Channel] = ()) -> Groups:
        """The groups of this process. kv_copies: neighbouring tp ranks that hold one key-value head. tied: stages that
        share the embedding table. channels: of messages. PlanError when the number of processes is not the plan's."""
        mesh = common_mesh(plan)
        if dist.get_world_size() != plan.world_size:
            raise PlanError(f"the plan has {plan.world_size} ranks, but {dist.get_world_size()} processes run")
        here = coordinates(plan, dist.get_rank())
        stages = stage_sets(plan)
        found: dict[str, ProcessGroup | None] = {}
        for comm, axes in AXES.items():
            rows = [[ranks[i] for i in row] for ranks in stages for row in mesh.dense.groups(*axes).tolist()]
            found[comm] = _mine(rows, here.rank)
        runs = [row[i : i + kv_copies] for row in _tp_rows(mesh, stages) for i in range(0, len(row), kv_copies)]
        found["kv_copies"] = _mine(runs, here.rank)
        holders = list(dict.fromkeys(plan.stage_ranks[stage] for stage in tied))
        found["embedding"] = _mine([list(pair) for pair in zip(*holders, strict=True)], here.rank)
        found["norm"] = _mine([list(range(plan.world_size))], here.rank)
        for channel in channels:
            ends = zip(stages[channel[0]], stages[channel[1]], strict=True)
            found[channel_name(channel)] = _mine([list(pair) for pair in ends], here.rank)
        return Groups(mesh=mesh, here=here, by_comm=found)


def channel_name(channel: Channel) -> str:
    """`0>1 X`."""
    source, destination, buffer = channel
    return f"{source}>{destination} {buffer}"


def common_mesh(plan: Plan) -> Mesh:
    """The mesh that all stages have. PlanError where they differ, or have axes that the runtime does not run."""
    meshes = {plan.stage_mesh(stage) for stage in range(plan.num_stages)}
    if len(meshes) > 1:
        raise PlanError("the runtime runs stages on equal meshes only; give every stage the same axes")
    (mesh,) = meshes
    for axis in ("cp", "ep", "etp"):
        if getattr(mesh, axis) > 1:
            raise PlanError(f"the runtime does not run {axis} = {getattr(mesh, axis)} yet; use 1")
    return mesh


def stage_sets(plan: Plan) -> list[tuple[int, ...]]:
    """Ranks of each pipeline rank, each in the order of its mesh."""
    by_rank = dict(zip(plan.pipeline_ranks, plan.stage_ranks, strict=True))
    return [by_rank[r] for r in range(plan.num_pipeline_ranks)]


def coordinates(plan: Plan, rank: int) -> Coordinates:
    """Where `rank` stands under the plan."""
    mesh = common_mesh(plan)
    stage_rank, ranks = next((i, ranks) for i, ranks in enumerate(stage_sets(plan)) if rank in ranks)
    position = ranks.index(rank)
    view = mesh.dense
    return Coordinates(
        rank=rank,
        pipeline_rank=stage_rank,
        position=position,
        tp=view.coordinate(position, "tp"),
        shard=view.coordinate(position, "dp_shard"),
        data=view.coordinate(position, "dp"),
    )


def _tp_rows(mesh: Mesh, stages: Iterable[Sequence[int]]) -> list[list[int]]:
    return [[ranks[i] for i in row] for ranks in stages for row in mesh.dense.groups("tp").tolist()]


def _mine(rows: Iterable[Sequence[int]], rank: int) -> ProcessGroup | None:
    """Makes a group of each row (all ranks do so, in this order) and returns the one with `rank`."""
    mine: ProcessGroup | None = None
    for row in rows:
        if len(row) > 1:
            made = dist.new_group(list(row))
            mine = made if rank in row else mine
    return mine
