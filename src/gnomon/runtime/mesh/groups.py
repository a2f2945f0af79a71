"""Process groups of one rank: which other ranks it meets, for each communicator that a Program names.

`Groups.of(plan)` makes them after `torch.distributed` is initialised; every rank makes all groups, in one order, as
`new_group` wants. A group of one rank is None: nothing is communicated. Experts have groups of their own, of the same
ranks refolded. Pipeline ranks may have other meshes than each other. Returns nothing about links. Left out: what only
equal meshes have (cp, sequence parallelism with unlike tp, tied weights), which are PlanErrors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from gnomon.errors import PlanError
from gnomon.lowering.gradients import TIED
from gnomon.lowering.norm import EVERYONE
from gnomon.plans import Mesh, Plan
from gnomon.plans.mesh import EXPERT_AXES as FOLDED
from gnomon.plans.select import format_ranks
from gnomon.runtime.mesh.arrivals import Channel
from gnomon.runtime.mesh.routes import Route, routes

AXES = {
    "dp": ("dp_replicate", "dp_shard", "cp"),
    "dp_shard": ("dp_shard", "cp"),
    "dp_replicate": ("dp_replicate",),
    "tp": ("tp",),
    "cp": ("cp",),
}
"""Communicator -> mesh axes over which it goes. Ranks of one context-parallel group hold the same parameters."""

EXPERT_AXES = {
    "experts.dp": ("dp_replicate", "edp"),
    "experts.dp_shard": ("edp",),
    "ep": ("ep",),
    "etp": ("etp",),
}
"""The same of experts, over the axes that they refold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The coordinates of a rank: its stage's ranks, and its place along each axis."""

    rank: int
    """In the job."""
    pipeline_rank: int
    """Which rank class of the Program it belongs to."""
    position: int
    """Its place within its stages' mesh."""
    along: Mapping[str, int]
    """Along each axis by name: `cp tp edp ep etp`."""
    shard: int
    """Among the ranks that ZeRO divides over, dp_shard x cp."""
    data: int
    """Among the ranks that take different sequences."""

    @property
    def places(self) -> Mapping[str, int]:
        """Its place among the members of each communicator whose members hold, or are given, different parts. Of the
        others only sums are asked."""
        experts = {"ep": "ep", "etp": "etp", "experts.dp_shard": "edp"}
        return {
            "dp_shard": self.shard,
            "vocabulary": self.pipeline_rank,
            **{axis: self.along[axis] for axis in ("cp", "tp")},
            **{comm: self.along[axis] for comm, axis in experts.items() if axis in self.along},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups that one rank is a member of."""

    mesh: Mesh
    """Of this rank's stages: pp is 1."""
    here: Coordinates
    """This rank."""
    by_comm: dict[str, ProcessGroup | None]
    """dp, dp_shard, dp_replicate, tp, cp, kv_copies, norm (all ranks), embedding, vocabulary, those of experts, balance
    (as dp, of routers' choices), and the two ends of each channel."""

    @staticmethod
    def of(
        plan: Plan,
        *,
        kv_heads: int = 0,
        experts: bool = False,
        tied: Sequence[Sequence[int]] = (),
        channels: Sequence[Channel] = (),
        size: int = 0,
        vocabulary: bool = False,
    ) -> Groups:
        """The groups of this process. kv_heads: of the model; neighbouring tp ranks beyond them hold one together.
        experts: whether the model has routed ones.
        tied: sets of stages that share parameters. channels: of messages. size: sequences of a microbatch, 0 for what
        all stages divide. vocabulary: whether pipeline ranks divide embedding and head. PlanError when the number of
        processes is not the plan's."""
        meshes = meshes_of(plan, tied=sorted({stage for stages in tied for stage in stages}))
        if dist.get_world_size() != plan.world_size:
            raise PlanError(f"the plan has {plan.world_size} ranks, but {dist.get_world_size()} processes run")
        here = coordinates(plan, dist.get_rank(), experts=experts)
        stages = list(zip(stage_sets(plan), meshes, strict=True))
        groups: dict[str, ProcessGroup | None] = {}
        # `new_group` is collective over the whole job: every rank makes every row, in this order, or the job hangs.
        for comm, axes in AXES.items():
            rows = [[ranks[i] for i in row] for ranks, mesh in stages for row in mesh.dense.groups(*axes).tolist()]
            groups[comm] = _mine(comm, rows, here)
        for comm, axes in EXPERT_AXES.items() if experts else ():
            rows = [[ranks[i] for i in row] for ranks, mesh in stages for row in mesh.experts.groups(*axes).tolist()]
            groups[comm] = _mine(comm, rows, here)
        runs = []
        for ranks, mesh in stages:
            # With more tp ranks than K/V heads, neighbours hold copies of one head, whose gradients are to be added up.
            copies = max(1, mesh.tp // kv_heads) if kv_heads else 1
            rows = [[ranks[i] for i in row] for row in mesh.dense.groups("tp").tolist()]
            runs += [row[i : i + copies] for row in rows for i in range(0, len(row), copies)]
        groups["kv_copies"] = _mine("kv_copies", runs, here)
        holders = tied_holders(plan, tied)
        # Under ZeRO stages cut a shared parameter at other places, so all ranks that shard it meet; without it each
        # position meets the same one of the other holders.
        alike = (
            meshes[0].dense.groups("dp_shard", "cp").tolist()
            if plan.optimizer.zero
            else [[i] for i in range(len(stages[0][0]))]
        )
        rows = [[ranks[i] for ranks in holders for i in row] for row in alike] if len(holders) > 1 else []
        groups[TIED] = _mine(TIED, rows, here)
        rows = [list(row) for row in zip(*stage_sets(plan), strict=True)] if vocabulary else []
        groups["vocabulary"] = _mine("vocabulary", rows, here)
        if plan.experts.balance == "global":  # met in forwards, while gradients of others may be on their way
            rows = [[r[i] for i in row] for r, mesh in stages for row in mesh.dense.groups(*AXES["dp"]).tolist()]
            groups["balance"] = _mine("balance", rows, here)
        groups[EVERYONE] = _mine(EVERYONE, [list(range(plan.world_size))], here)
        # From the last to the first, so that a rank of several stages stands for its first.
        stage_of_rank = {rank: stage for stage, rank in reversed(list(enumerate(plan.pipeline_ranks)))}
        # Only who meets whom matters here: the least microbatch that every stage can divide shows all pairs.
        size = size or math.lcm(*(mesh.data_ranks for mesh in meshes))
        for source, target, buffer in channels:
            for route in routes(plan, stage_of_rank[source], stage_of_rank[target], size):
                name = channel_name((source, target, buffer), route)
                group_of_route = _mine(name, [[route.source, route.target]], here)
                if here.rank in (route.source, route.target):
                    groups[name] = group_of_route
        return Groups(mesh=meshes[here.pipeline_rank], here=here, by_comm=groups)

    def leave(self) -> None:
        """Ends the groups, each of which has threads that wake a hundred times a second. Every rank must call it."""
        dist.barrier()  # before that, another rank may still be told something in one
        for group in self.by_comm.values():
            if group is not None:
                dist.destroy_process_group(group)
        self.by_comm.clear()  # what still holds these groups would hold their threads


def tied_holders(plan: Plan, tied: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Ranks of each pipeline rank that holds a parameter which another one holds too; none where every set of stages
    lies on one. PlanError for sets on unlike pipeline ranks, whose sums would be of other parameters on each."""
    sets = {tuple(dict.fromkeys(plan.stage_ranks[stage] for stage in stages)) for stages in tied}
    apart = sorted(holders for holders in sets if len(holders) > 1)
    if len(apart) > 1:
        stages_text = " and ".join(str(list(stages)) for stages in dict.fromkeys(map(tuple, tied)))
        raise PlanError(
            f"stages {stages_text} share other parameters each, on other pipeline ranks, whose gradients the "
            "runtime adds up "
            f"for one set only; give layers that share parameters to the same stages (layers_per_stage), or use pp = 1"
        )
    return apart[0] if apart else ()


def channel_name(channel: Channel, route: Route) -> str:
    """The name of the channel of one kind of message between two ranks: `0>1 X 3>5` is from rank 3 to rank 5."""
    source, destination, buffer = channel
    return f"{source}>{destination} {buffer} {route.source}>{route.target}"


def meshes_of(plan: Plan, *, tied: Sequence[int] = ()) -> list[Mesh]:
    """The mesh of each pipeline rank. tied: stages that share a table. PlanError for stages on the same ranks in other
    meshes, for axes that the runtime does not run, and for what it runs on equal meshes only."""
    by_rank: dict[int, Mesh] = {}
    for stage, pipeline_rank in enumerate(plan.pipeline_ranks):
        mesh, ranks = plan.stage_mesh(stage), plan.stage_ranks[stage]
        if list(ranks) != sorted(ranks):
            raise PlanError(
                f"stage {stage} lists its ranks as {format_ranks(ranks)}, but processes of a group are numbered in "
                f"ascending order; list them so, and choose the device of each rank by placement"
            )
        if by_rank.setdefault(pipeline_rank, mesh) != mesh:
            raise PlanError(
                f"stage {stage} has axes {mesh.describe()} on ranks that hold another stage as "
                f"{by_rank[pipeline_rank].describe()}; give stages on the same ranks the same axes"
            )
    meshes = [by_rank[rank] for rank in range(plan.num_pipeline_ranks)]
    if len({mesh.cp for mesh in meshes}) > 1:
        raise PlanError(
            f"stages have cp = {[mesh.cp for mesh in meshes]}, and so divide sequences differently, which the runtime "
            f"does not do; give every stage the same cp"
        )
    if len(set(meshes)) > 1 and tied:
        raise PlanError(
            f"stages {', '.join(map(str, tied))} share a tied table, which the runtime runs on equal meshes only; give "
            f"every stage the same axes, or take a model with tied = false"
        )
    if len({mesh.tp for mesh in meshes}) > 1 and plan.layout.sequence_parallel:
        raise PlanError(
            f"stages have tp = {[mesh.tp for mesh in meshes]} under sequence_parallel, and so divide sequences "
            f"differently, which the runtime does not do; give every stage the same tp, or leave it out"
        )
    return meshes


def stage_sets(plan: Plan) -> list[tuple[int, ...]]:
    """Ranks of each pipeline rank, each in the order of its mesh."""
    by_rank = dict(zip(plan.pipeline_ranks, plan.stage_ranks, strict=True))
    return [by_rank[r] for r in range(plan.num_pipeline_ranks)]


def coordinates(plan: Plan, rank: int, *, experts: bool = False) -> Coordinates:
    """The coordinates of `rank` under the plan. experts: along their axes too."""
    meshes = meshes_of(plan)
    stage_rank, ranks = next((i, ranks) for i, ranks in enumerate(stage_sets(plan)) if rank in ranks)
    position = ranks.index(rank)
    view = meshes[stage_rank].dense
    return Coordinates(
        rank=rank,
        pipeline_rank=stage_rank,
        position=position,
        along={axis: view.coordinate(position, axis) for axis in ("cp", "tp")}
        | {axis: meshes[stage_rank].experts.coordinate(position, axis) for axis in FOLDED if experts},
        shard=view.coordinate(position, "fsdp"),
        data=view.coordinate(position, "dp"),
    )


def _mine(comm: str, rows: Iterable[Sequence[int]], here: Coordinates) -> ProcessGroup | None:
    """Makes a group of each row (all ranks do so, in this order) and returns the one with this rank.

    torch numbers the members of a group by their ranks of the job, whatever the order in which they are named: where
    that is not their order on the mesh, members would take each other's parts. PlanError then, on every rank.
    """
    mine: ProcessGroup | None = None
    for row in rows:
        if len(row) < 2:
            continue
        if comm in here.places and list(row) != sorted(row):
            raise PlanError(
                f"the members of a group of {comm} are ranks {format_ranks(row)} in the order of the plan's mesh, but "
                f"processes of a group are numbered in ascending order; order stages' devices so that ranks ascend, "
                f"and choose the device of each by placement"
            )
        group = dist.new_group(sorted(row))
        if here.rank in row:
            place, mine = here.places.get(comm), group
            # The shard that a rank takes follows its place on the mesh, the exchange its number in the group: one of
            # them wrong would mix up parts without an error.
            assert place is None or dist.get_rank(group) == place, f"{comm}: {dist.get_rank(group)}, not {place}"
    return mine
