"""Lower bounds on the time of a plan's step, had before it is lowered and played.

Each bound has its proof in its docstring and a property test; none decides. `SearchJob` holds what all points of a
space share; `Family` the points of one arrangement of axes, layout and recompute, which differ in how they are
pipelined, sharded and cut into microbatches. Leaves out what only the simulator knows: waiting for messages beyond the
chains named here, and what a collective hides of another. Seconds throughout; arrays are [stages, columns], a column
for each microbatch size of the space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gnomon import orders
from gnomon.graph import Graph
from gnomon.hardware import Cluster, Device
from gnomon.plans import Layout, Mesh, Plan, Saved, Schedule, Workload, shared_parameters, transfers
from gnomon.plans.mesh import DENSE_AXES
from gnomon.plans.plan import pipeline_rank
from gnomon.plans.replicas import least_busiest
from gnomon.prediction.software_kernels import kernels_of, on_cpu
from gnomon.prediction.stage import stage_links
from gnomon.prices.collectives import collective_seconds, p2p_seconds
from gnomon.prices.fitted import fitted_rates
from gnomon.prices.links import AxisLink, axis_link
from gnomon.search.bounds.layer_tables import CommonPrices, Kinds, KindTable, Split, kind_tables, split
from gnomon.search.space.points import Space
from gnomon.sharding.homes import routed_tensors
from gnomon.software import Stack
from gnomon.tensors.dims import numel

Doubles = NDArray[np.float64]

GRID_S = 2.0**-36
"""The grid, in seconds, to which the simulator rounds durations. Each is at most half of it below its price; bounds
take off a whole one."""

TOKEN_AXES = ("cp", "tp", "ep", "etp")
"""The axes that collectives inside layers run over."""

PipelineName = tuple[int, int, bool]
"""(pipeline ranks, virtual stages, V placement): a key that tells a job's pipelines apart."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model cut into stages on pipeline ranks."""

    name: PipelineName
    """Its key among the job's pipelines."""
    split: Split
    """The layers of each stage."""
    rank_of: NDArray[np.int64]
    """[stages] the pipeline rank of each stage."""
    linked: NDArray[np.bool_]
    """[stages - 1] whether stage s + 1 reads from stage s."""
    sent: tuple[tuple[tuple[int, str], ...], ...]
    """[stages - 1] (kind, tensor) that a stage sends to the next."""
    own: Doubles
    """[stages] 0 where a stage shares a parameter with another one on its rank, which updates it for both; else 1."""

    @cached_property
    def on_rank(self) -> Doubles:
        """[ranks, stages] 1 where a rank has a stage, else 0: `on_rank @ values` sums over the stages of each rank."""
        ranks = np.arange(int(self.rank_of.max()) + 1)
        mask: Doubles = (ranks[:, None] == self.rank_of).astype(float)
        return mask

    @cached_property
    def lowest(self) -> NDArray[np.int64]:
        """[ranks] the first stage of each rank."""
        first: NDArray[np.int64] = np.argmax(self.on_rank, axis=1)
        return first

    @cached_property
    def distinct(self) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]:
        """Groups stages that have the same layers: (kinds of its layers in order, stages that have just these)."""
        by_order: dict[bytes, list[int]] = {}
        for stage, order in enumerate(self.split.order):
            by_order.setdefault(order.tobytes(), []).append(stage)
        return tuple((self.split.order[stages[0]], np.array(stages, np.int64)) for stages in by_order.values())

    def most_of_rank(self, values: Doubles) -> Doubles:
        """[ranks, …] the largest of a rank's stages."""
        order, starts = self._by_rank
        most: Doubles = np.maximum.reduceat(values[order], starts, axis=0)
        return most

    def least_of_rank(self, values: Doubles) -> Doubles:
        """[ranks, …] the smallest of a rank's stages."""
        order, starts = self._by_rank
        least: Doubles = np.minimum.reduceat(values[order], starts, axis=0)
        return least

    @cached_property
    def _by_rank(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(order, starts): stages sorted by rank, and the place in that order of each rank's first; `reduceat` over
        these starts reduces the stages of each rank."""
        order = np.argsort(self.rank_of, kind="stable")
        return order, np.searchsorted(self.rank_of[order], np.arange(len(self.on_rank)))

    @cached_property
    def root(self) -> NDArray[np.int64]:
        """[stages] the first stage of the linked run that a stage is in."""
        # A stage begins a run if it does not read from the one before it. Its root is the last such beginning up to it:
        # a running maximum of the starts' indices.
        starts = np.append(True, ~self.linked)
        return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))

    @cached_property
    def last(self) -> NDArray[np.int64]:
        """[stages] the last stage of the linked run that a stage is in."""
        # The same from the other end: a running minimum of the runs' last stages.
        ends = np.append(~self.linked, True)
        stages = np.arange(len(ends))
        return np.minimum.accumulate(np.where(ends, stages, len(ends))[::-1])[::-1]


class SearchJob:
    """A model, machines and a batch: what all points of a space have in common."""

    def __init__(self, graph: Graph, cluster: Cluster, workload: Workload, stack: Stack, space: Space) -> None:
        self.graph, self.cluster, self.workload, self.space = graph, cluster, workload, space
        kernels, _, self.stack = kernels_of(stack, cpu=on_cpu(cluster))
        away: dict[str, Saved] = {name: space.saved(name) for name in space.recompute if name == "offload"}
        # Activations that go to the host are a further way of saving, next to the three presets.
        self.kinds = Kinds(graph, space.base, kernels, away)
        self.devices = tuple(dict.fromkeys(group.node.device for group in cluster.groups))
        self.uniform = len(cluster.groups) == 1
        self.numbers = fitted_rates()
        self.priced = CommonPrices(
            kinds=self.kinds,
            cluster=cluster,
            stack=self.stack,
            kernels=kernels,
            # Sequences of many lengths are bounded at the first of them.
            sizes={"seq": workload.sequence_lengths()[0], **dict(workload.sizes)},
            numbers=self.numbers,
            prices={},
        )
        self.experts = max((d.size or 0 for b in graph.blocks for d in b.dims if _is(d.name, "experts")), default=0)
        self._pipelines: dict[PipelineName, Pipeline] = {}
        self._tables: dict[object, dict[str, KindTable]] = {}
        self._links: dict[object, dict[str, AxisLink]] = {}
        self.updates: dict[tuple[int, int, Device], float] = {}
        """(elements, tensors, device) -> seconds of an update, at least; filled by who bounds updates."""

    @cached_property
    def elements(self) -> Doubles:
        """[dense, routed] elements of the parameters that are trained; those that several layers hold count once."""
        counts, seen = np.zeros(2), set[str]()
        for layer in self.kinds.layers:
            block = self.graph.block(layer.call.block)
            routed = routed_tensors(block)
            for tensor in block.parameters:
                name = layer.call.parameter_name(tensor.name, layer.index)
                if name not in seen:
                    seen.add(name)
                    counts[int(tensor.name in routed)] += numel(tensor.dims, {})
        return counts

    def pipeline(self, pp: int, virtual: int, v_placed: bool) -> Pipeline:
        """The model cut into `virtual` stages on each of pp pipeline ranks, equally as `Plan` cuts it."""
        key = pp, virtual, v_placed
        if key not in self._pipelines:
            placement = "v" if v_placed else "loop"
            schedule = Schedule(virtual_stages=virtual, placement=placement)  # type: ignore[arg-type]
            plan = Plan(mesh=Mesh(pp=pp), schedule=schedule)
            self._pipelines[key] = self._cut(key, plan, split(self.kinds, plan), placement)
        return self._pipelines[key]

    def _cut(self, name: PipelineName, plan: Plan, parts: Split, placement: str) -> Pipeline:
        """Makes the pipeline of a plan's stages. parts: the layers of each; placement: `loop` or `v`."""
        stages = plan.num_stages
        sent: list[tuple[tuple[int, str], ...]] = [()] * (stages - 1)
        for move in transfers(plan, self.graph) if stages > 1 else ():
            if move.target == move.source + 1:
                sent[move.source] = tuple((self.kinds.kind_of[label], tensor) for label, tensor in move.tensors)
        ranks = np.array([pipeline_rank(s, plan.mesh.pp, placement) for s in range(stages)], np.int64)
        # Two stages of a rank that hold one parameter update it once; the bound counts that update for neither.
        own = np.ones(stages)
        for holders in shared_parameters(plan, self.graph).values() if self.kinds.shared else ():
            for stage in holders:
                if (ranks[list(holders)] == ranks[stage]).sum() > 1:
                    own[stage] = 0.0
        return Pipeline(
            name=name,
            split=parts,
            own=own,
            rank_of=ranks,
            linked=np.array([bool(message) for message in sent], bool),
            sent=tuple(sent),
        )

    def load(self, ep: int) -> float:
        """Rows of the busiest expert-parallel rank over the mean of all, at least; 1 without experts."""
        return least_busiest(self.workload.router, self.space.base.experts, self.experts, ep) if self.experts else 1.0

    def links(self, mesh: Mesh) -> dict[str, AxisLink]:
        """Maps each mesh axis to the link that its groups on the first stage communicate over."""
        if mesh not in self._links:
            plan = Plan(mesh=mesh)
            ranks = range(mesh.world_size // mesh.pp)
            self._links[mesh] = stage_links(plan, self.cluster, replace(mesh, pp=1), ranks, experts=bool(self.experts))
        return self._links[mesh]

    @cached_property
    def node_size(self) -> int:
        """Counts the devices of a node."""
        return self.cluster.groups[0].node.count

    @cached_property
    def meeting_s(self) -> float:
        """Seconds of an all-reduce of one number over all ranks: the gradient norm's."""
        # 8 bytes: one number in double precision.
        ranks = np.arange(self.space.devices, dtype=np.int64)
        if len(ranks) < 2:
            return 0.0
        return float(collective_seconds("all_reduce", 8, axis_link(self.cluster, ranks[None, :])))

    def alike_on_nodes(self, ranks: int) -> bool:
        """Whether stages of so many ranks all lie alike on nodes, so that the first one's links are every one's."""
        # Stages start at multiples of `ranks`. If that divides a node, or is made of whole nodes, no stage straddles a
        # node border in another way than the first one.
        whole = ranks % self.node_size == 0 or self.node_size % ranks == 0
        return self.uniform and whole and self.space.base.mesh.order == DENSE_AXES

    def slower(self, link: AxisLink) -> float:
        """Measured over priced seconds on a link, fitted over published runs."""
        return self.numbers.link_factor(link.across_name or link.inside_name)


def _is(name: str, what: str) -> bool:
    """Whether the last part of a dim's scoped name (`encoder.experts`) is `what`."""
    return name.rpartition(".")[2] == what


@dataclass(frozen=True)
class Family:
    """Points that share axes inside a stage, layout and recompute: their layers cost the same."""

    job: SearchJob
    """The search that it is of."""
    tp: int
    """Tensor-parallel ranks."""
    cp: int
    """Context-parallel ranks."""
    ep: int
    """Expert-parallel ranks."""
    pp: int
    """Pipeline ranks."""
    dp: int
    """Data-parallel ranks, however they are divided into replicas."""
    layout: Layout
    """How tensors lie on the axes."""
    recompute: str
    """What becomes of activations between forward and backward."""
    micro: tuple[int, ...]
    """The microbatch sizes of the space, which are the columns of arrays."""

    @cached_property
    def mesh(self) -> Mesh:
        """Its mesh with all data-parallel ranks in dp_shard: how they are divided into replicas and shards changes
        nothing inside a layer."""
        base = self.job.space.base.mesh
        return replace(base, tp=self.tp, cp=self.cp, ep=self.ep, pp=self.pp, dp_replicate=1, dp_shard=self.dp)

    @cached_property
    def table(self) -> KindTable:
        """Prices of layers by kind; one table for all families that differ only in what layers do not see."""
        job = self.job
        links = job.links(self.mesh)
        inside = {axis: links[axis] for axis in TOKEN_AXES if axis in links}
        # Layers see neither the number of pipeline ranks nor ZeRO: families that differ only there share one table.
        key = (self.tp, self.cp, self.ep, self.layout, tuple(inside.items()))
        if key not in job._tables:
            job._tables[key] = self._priced(inside)
        return job._tables[key][self.recompute]

    def _priced(self, inside: Mapping[str, AxisLink]) -> dict[str, KindTable]:
        """Recompute preset -> prices of layers. inside: the links of the axes that layers communicate over."""
        job, base = self.job, self.job.space.base
        mesh = replace(self.mesh, pp=1)
        splits = job.space.splits(self.tp, sequence_parallel=self.layout.sequence_parallel)
        plan = replace(base, mesh=mesh, layout=self.layout, overlap=replace(base.overlap, splits=splits))
        tables = [
            kind_tables(job.priced, plan, device, inside, self.micro, job.load(self.ep), job.space.recompute)
            for device in job.devices
        ]
        # Where stages lie differently on nodes, or devices differ, each number is the least over devices: below all of
        # them.
        if job.alike_on_nodes(mesh.world_size):
            return tables[0]
        return {name: _least([table[name] for table in tables]) for name in tables[0]}


def _least(tables: list[KindTable]) -> KindTable:
    """A table with the least of several devices' seconds, entry by entry: below each of them."""
    first = tables[0]

    def least(name: str) -> Doubles:
        smallest: Doubles = np.minimum.reduce([getattr(table, name) for table in tables])
        return smallest

    host = tuple(np.minimum.reduce([table.host_s[i] for table in tables]) for i in range(3))
    names = ("forward_s", "input_s", "weight_s")
    return replace(first, host_s=host, **{name: least(name) for name in names})  # type: ignore[arg-type]


ACTIONS = ("forward", "whole", "input", "weight")
"""The fields of `Actions`."""


@dataclass(frozen=True)
class Actions:
    """Seconds of the actions of every stage, [stages] or [stages, microbatch sizes]."""

    forward: Doubles
    """Seconds of a forward."""
    whole: Doubles
    """Seconds of a backward that is one action (B)."""
    input: Doubles
    """Seconds of a backward's input gradients as an action of their own (I)."""
    weight: Doubles
    """Seconds of a backward's weight gradients as an action of their own (W)."""


def actions(
    table: KindTable,
    counts: Doubles,
    adding: Doubles,
    unsharding: Doubles,
    *,
    by_layer: bool,
    column: int | None = None,
) -> Actions:
    """Bounds from below how long each stage's actions last: [stages, microbatch sizes], or [stages, 1] of `column`.

    counts: [stages, kinds] layers of each kind. adding: [kinds] seconds that weight gradients take to be added up;
    unsharding: [kinds] seconds of copying gathered parameters. An action lasts at least as long as its kernels and
    collectives with the idle time of layers that are launched slower than they run, as its launches, and as the copies
    of its activations over the host link; under ZeRO 3 (`by_layer`) that holds for each layer by itself. What is left
    out (launches of the additions) only makes it longer.
    """
    unit = table.rates.host_unit_s
    # Of layers of one kind either kernels or launches are the longer throughout: the maximum of both sums is the bound.
    mixed = ((counts > 0).sum(axis=1) > 1)[:, None]

    def longest(device: Doubles, extra: Doubles | float, host: Doubles, away: Doubles | float = 0.0) -> Doubles:
        """[stages, columns] seconds of an action. By kind of layer: device: kernels and collectives; extra: what adds
        to them; host: launches; away: copies over the host link."""
        # ZeRO 3 waits at every layer (its gather, its reduction), so each layer takes the longest of device, host and
        # copies. Otherwise the host runs ahead over a whole action, and the maximum is taken over the sum of its
        # layers.
        if by_layer:
            return counts @ np.maximum(np.maximum(np.maximum(device + extra, host + unit), away) - GRID_S, 0.0)
        # Layers of one kind that are launched slower than they run leave the device idle, which later layers do not
        # make good.
        spent = counts @ (device + extra) + mixed * (counts @ np.maximum(host - device, 0.0))
        busy = np.maximum(spent, counts @ host + unit)
        if np.ndim(away):
            busy = np.maximum(busy, counts @ away)
        seconds: Doubles = np.maximum(busy - GRID_S, 0.0)
        return seconds

    chosen = slice(None) if column is None else slice(column, column + 1)
    # `adding` and `unsharding` are seconds of kernels alone; the table's are as the stack runs them, slower by its
    # rate.
    f, i, w = (host[:, chosen] for host in table.host_s)
    extra, copied = adding[:, None] / table.rates.compute, unsharding[:, None] / table.rates.compute
    input_s, weight_s, away = table.input_s[:, chosen], table.weight_s[:, chosen], table.copied_s[:, chosen]
    return Actions(
        forward=longest(table.forward_s[:, chosen], copied, f, away),
        whole=longest(input_s + weight_s, extra + copied, i + w, away),
        input=longest(input_s, 0.0, i, away),
        weight=longest(weight_s, extra, w),
    )


def halves(act: Actions) -> Actions:
    """The same actions with weight gradients at most as long as a whole backward is beyond its input gradients, for
    schedules in which some backwards are split: input + weight is then a bound of either."""
    return replace(act, weight=np.minimum(act.weight, np.maximum(act.whole - act.input, 0.0)))


def weight_at_most(table: KindTable, counts: Doubles, adding: Doubles, column: int) -> Doubles:
    """[stages] an upper bound on the seconds of weight gradients: all kernels and launches one after another, with a
    launch for adding up each tensor."""
    host = table.host_s[2][:, column] + table.launch_s * (table.tensors + 1)
    device = table.weight_s[:, column] + adding / table.rates.compute
    seconds: Doubles = counts @ (device + host) + table.rates.host_unit_s + GRID_S
    return seconds


def layer_seconds(table: KindTable, adding: Doubles, unsharding: Doubles, column: int) -> dict[str, list[float]]:
    """Kind of row (F, C, B, I, W) -> [kinds] seconds of one layer of each kind as an action by itself, as under ZeRO 3:
    see `actions`."""
    one = np.eye(len(table.tensors))
    act = actions(table, one, adding, unsharding, by_layer=True, column=column)
    by_kind = {"F": act.forward, "C": act.forward, "B": act.whole, "I": act.input, "W": act.weight}
    return {kind: seconds[:, 0].tolist() for kind, seconds in by_kind.items()}


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Seconds of what begins and ends a step, around the gradient norm for which all ranks meet. Arrays are [stages, 1
    or columns]."""

    update: Doubles
    """The optimizer's update of a stage's parameters."""
    head: Doubles
    """From the norm to the first forward of a stage that waits for no other stage: all updates of its rank hold the
    compute stream; its parameters are gathered after its own update, or after all where the same stream gathers."""
    norm: Doubles
    """[1 or columns] the norm, as long as that of the slowest rank."""
    reduce: Doubles
    """Reduction of gradients after the last backward."""
    microbatch_reduce: Doubles
    """Reduction of every microbatch's gradients, between one backward and the next (ZeRO 2)."""
    blocked: Doubles
    """Reductions that hold the compute stream, one stage after another, because they may not overlap."""


ENDS = ("update", "head", "norm", "reduce", "microbatch_reduce", "blocked")
"""The fields of `Ends`."""


def no_ends(stages: int) -> Ends:
    """Zeros: a bound without what begins and ends a step holds too."""
    zero = np.zeros((stages, 1))
    return Ends(update=zero, head=zero, norm=zero[0], reduce=zero, microbatch_reduce=zero, blocked=zero)


def time_bound(
    pipeline: Pipeline,
    act: Actions,
    sends: Doubles,
    count: Doubles | int,
    ends: Ends,
    *,
    split_backward: bool,
    clip: bool,
    most: NDArray[np.int64] | None = None,
) -> Doubles:
    """[columns] seconds that a step takes at least.

    sends: [stages - 1, columns] seconds of a message to the next stage. count: microbatches, for each column or all.
    clip: whether the step ends with a gradient norm of all ranks. most: [stages, columns] units that may be between the
    start of their forward and the end of their input gradient on a stage; None: not bounded.

    Without a common norm (`clip` False) a step takes at least the work of its busiest rank: actions of one stream do
    not overlap. With it, all ranks meet once a step, so the period is at least the longest chain from one meeting to
    the next. Chains, for a pipeline rank r whose lowest stage is s (the first forward on r is that of s, because every
    higher stage's forward follows one of s; likewise the last input gradient on r is one of s):
    - meeting, updates of the first rank (and the gather of stage 0), forwards of stages 0 … s-1 with their messages,
      all forwards and backwards of r one after another, input gradients of stages s-1 … 0 with their messages, the
      weight gradient and the reduction of stage 0, meeting. Where backwards are split, the weight gradients of r may
      come after the way back, so the chain is taken either without them, or without the way back.
    - With at most k = `most` units between the start of their forward on stage s and the end of their input gradient
      there: a unit needs L, all forwards from s to the last stage and back, so the m units need m·L of such time, of
      which at most k pass at once: m·L/k between the way to s and the way back (Little's law).
    - ZeRO 2 reduces the gradients of each unit before the next one's backward adds to them: a stage needs m times a
      backward and a reduction; and a rank's reductions follow each other on one stream.
    - Reductions that may not overlap follow all backwards of the rank, one after another.
    A stage that does not read from the one before it begins a chain of its own, with an update and a reduction of its
    own. The times of actions are lower bounds themselves, and may be put in place of the true ones: a longer action
    hides more of a collective beside it, but by at most as much as it is longer, and every chain that has the rest of
    the collective has the action: the sum of a chain does not fall where an action is longer.
    """
    # back: what a unit's way back takes on each stage; busy: all that a stage computes for one unit.
    back = act.input if split_backward else act.whole
    busy = act.forward + (act.input + act.weight if split_backward else act.whole)
    # [ranks, columns] work of a rank on all its stages and units, on one compute stream.
    load = pipeline.on_rank @ busy * count
    bound: Doubles = (load + pipeline.on_rank @ ends.update).max(axis=0)
    if not clip:
        return bound
    # before: from the step's start to a stage's first forward; behind: from its last input gradient to the root's;
    # length: one unit from its forward there to the end of its input gradient.
    before, behind, length = ways(pipeline, act.forward, back, sends)
    low, root = pipeline.lowest, pipeline.root
    head = ends.head[root]
    tail = (ends.reduce + (act.weight if split_backward else 0.0))[root]
    if split_backward:
        # Split: either the way back follows the last input gradient, or all weight gradients are done; the step takes
        # the longer.
        there_and_back = pipeline.on_rank @ (act.forward + act.input) * count + behind[low] + tail[low]
        through = np.maximum(there_and_back, load + pipeline.least_of_rank(ends.reduce))
    else:
        through = load + behind[low] + tail[low]
    through = np.maximum(through, load + pipeline.on_rank @ ends.blocked)
    bound = np.maximum(bound, (head[low] + before[low] + through).max(axis=0))
    if most is not None:
        # Little's law: `count` units that each stay for `length`, at most `most` at a time.
        passing = head + before + count * length / np.maximum(most, 1) + behind + tail
        bound = np.maximum(bound, passing.max(axis=0))
    if ends.microbatch_reduce.any():
        # ZeRO 2: the next microbatch may not add to gradients that are being reduced.
        own = act.weight if split_backward else act.whole
        bound = np.maximum(bound, (count * (own + ends.microbatch_reduce)).max(axis=0))
        bound = np.maximum(bound, (pipeline.on_rank @ ends.microbatch_reduce * count).max(axis=0))
    return bound + ends.norm


def idle_bound(pipeline: Pipeline, act: Actions, sends: Doubles, ends: Ends, *, split_backward: bool) -> Doubles:
    """[ranks, columns] seconds between two meetings in which a rank does none of its own forwards and backwards, at
    least: the chains of `time_bound` without what the rank computes."""
    low, root = pipeline.lowest, pipeline.root
    before = way(pipeline, act.forward, sends)
    behind = way(pipeline, act.input if split_backward else act.whole, sends)
    after = pipeline.least_of_rank(ends.reduce) if split_backward else behind[low] + ends.reduce[root][low]
    seconds: Doubles = ends.head[root][low] + before[low] + after + ends.norm
    return seconds


def ways(pipeline: Pipeline, forward: Doubles, back: Doubles, sends: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    """[stages, columns] each: seconds from the step's start to the first forward of a stage; from its last input
    gradient to that of its run's root; and from the start of a unit's forward on it to the end of the unit's input
    gradient there, through all later stages of the run. Sums over a run are differences of sums over all stages."""
    if len(forward) == 1:
        return np.zeros_like(forward), np.zeros_like(back), forward + back
    both, last = forward + back, pipeline.last
    # A unit passes every link of its run twice, forward and back.
    round_trip = _summed(both[:-1] + 2 * sends)
    length = round_trip[last] - round_trip + both[last]
    return way(pipeline, forward, sends), way(pipeline, back, sends), length


def way(pipeline: Pipeline, act: Doubles, sends: Doubles) -> Doubles:
    """[stages, columns] seconds from the root of a stage's run to the stage: one action on each stage before it, and
    the messages between."""
    if len(act) == 1:
        return np.zeros_like(act)
    sums = _summed(act[:-1] + sends)
    return sums - sums[pipeline.root]


def _summed(rows: Doubles) -> Doubles:
    """[rows + 1, columns] sums of the first 0, 1, … rows."""
    out = np.zeros((len(rows) + 1, rows.shape[1]))
    np.cumsum(rows, axis=0, out=out[1:])
    return out


class Sends:
    """Bounds messages between neighbouring stages from below, in seconds."""

    def __init__(self, job: SearchJob) -> None:
        self.job = job
        self._hops: dict[tuple[int, int, int], AxisLink | None] = {}
        self._kinds: dict[tuple[int, PipelineName], tuple[tuple[_Hop, ...], NDArray[np.int64]]] = {}
        self._known: dict[object, Doubles] = {}

    def of(self, family: Family, pipeline: Pipeline) -> Doubles:
        """[stages - 1, microbatch sizes] seconds; 0 where it is not known which link is taken."""
        key = family.tp, family.cp, family.ep, family.layout, pipeline.name
        if key not in self._known:
            hops, which = self._of_stages(family.pp, pipeline)
            width = len(family.micro)
            seconds = [np.zeros(width), *(np.broadcast_to(self._seconds(family, hop), (width,)) for hop in hops)]
            self._known[key] = np.stack(seconds)[which]
        return self._known[key]

    def _seconds(self, family: Family, hop: _Hop) -> Doubles:
        """[microbatch sizes] the least seconds of one message. A program that sends parts of it, to be gathered, takes
        no less than a part."""
        tensors, link = hop
        size: Doubles | float = sum(
            np.asarray(family.table.prices[kind].sharded.local_bytes[tensor], float) for kind, tensor in tensors
        )
        # Megatron-LM scatters a replicated activation over tensor ranks before it sends it, and gathers it after.
        if self.job.stack.messages.p2p_partitioned and not family.layout.sequence_parallel:
            size = size / family.tp
        seconds = np.asarray(p2p_seconds(size, link), float) * self.job.slower(link)
        shortest: Doubles = np.maximum(seconds - GRID_S, 0.0)
        return shortest

    def _of_stages(self, pp: int, pipeline: Pipeline) -> tuple[tuple[_Hop, ...], NDArray[np.int64]]:
        """(kinds of messages, [stages - 1] which of them a stage sends: 0 for none, else one more than its index)."""
        key = pp, pipeline.name
        if key not in self._kinds:
            hops: dict[_Hop, int] = {}
            which = np.zeros(len(pipeline.sent), np.int64)
            ranks = self.job.space.devices // pp
            for s, tensors in enumerate(pipeline.sent if self.job.alike_on_nodes(ranks) else ()):
                a, b = int(pipeline.rank_of[s]), int(pipeline.rank_of[s + 1])
                link = self._hop(ranks, a, b) if a != b and tensors else None
                if link is not None:
                    which[s] = hops.setdefault((tensors, link), len(hops) + 1)
            self._kinds[key] = tuple(hops), which
        return self._kinds[key]

    def _hop(self, ranks: int, a: int, b: int) -> AxisLink | None:
        """The link between pipeline ranks a and b, of `ranks` ranks each."""
        key = ranks, a, b
        if key not in self._hops:
            # [ranks, 2] every rank of a with its partner in b; the slowest pair is the message's link.
            own = np.arange(ranks, dtype=np.int64)
            self._hops[key] = axis_link(self.job.cluster, np.stack([own + a * ranks, own + b * ranks], axis=1))
        return self._hops[key]


_Hop = tuple[tuple[tuple[int, str], ...], AxisLink]
"""(tensors that are sent, as in `Pipeline.sent`; what they run over)."""


def is_split(schedule: str) -> bool:
    """Whether weight gradients are actions of their own in a schedule."""
    return orders.find(schedule).split


def partly_split(schedule: str) -> bool:
    """Whether some weight gradients are actions of their own, and others are in one action with their input
    gradients."""
    return orders.find(schedule).backward == "both"


def v_placed(schedule: str) -> bool:
    """Whether a schedule's stages turn at the last rank (V placement)."""
    return orders.find(schedule).placement == "v"
