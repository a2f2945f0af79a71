"""What a plan over heterogeneous devices takes at least, in time and memory, from prices of single layers.

`LayerTables.of` prices every layer once for a kind of device and the axes of its workers, at all numbers of sequences
and ways of recomputing together; `least_step_s` and `held_bytes` add them up for pipeline ranks. Each bound has its
proof in its docstring; none decides. Leaves out messages, reductions, updates and launches, which only make a step
longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

from gnomon import orders
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.hardware.kinds import DeviceKind
from gnomon.plans import Mesh, Plan, Saved, Workload
from gnomon.plans.replicas import least_busiest
from gnomon.plans.stages import dependencies
from gnomon.prediction import Prediction
from gnomon.prediction.software_kernels import kernels_of, on_cpu
from gnomon.prediction.stage import stage_links, width
from gnomon.prices.allocator import workspace_bytes
from gnomon.prices.collectives import CollectiveKind, collective_seconds
from gnomon.prices.curves import curves_for
from gnomon.prices.fitted import fitted_rates
from gnomon.prices.links import AxisLink, axis_link
from gnomon.prices.optimizer import optimizer_seconds
from gnomon.search.bounds.bare_schedule import play, skeleton
from gnomon.search.bounds.families import GRID_S, TOKEN_AXES, Actions, halves, partly_split
from gnomon.search.bounds.in_flight import under_way
from gnomon.search.bounds.layer_tables import PRESETS, CommonPrices, Kinds, KindTable, kind_tables
from gnomon.search.mixed.space import LARGEST_SHARE, MixedBlock, MixedPoint, Shape, stages_of_ranks
from gnomon.search.space.points import divisors
from gnomon.sharding.homes import routed_tensors
from gnomon.sharding.parameters import least_state_bytes
from gnomon.software import Stack

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]

SLACK = 1e-9
"""The share by which bounds are lowered, because sums of floats are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # a key of what is kept of it
class LayerTable:
    """Prefix sums over the graph's layers, on one kind of device: shape (layers + 1), or (layers + 1, sizes)
    of many sizes of a worker's microbatch."""

    forward: Doubles
    """Seconds of the forward."""
    back: Doubles
    """Seconds of a backward that is one action."""
    drain: Doubles
    """Seconds of its input gradients alone."""
    weight: Doubles
    """Seconds of its weight gradients alone."""
    kept_bytes: Doubles
    """Bytes held from forward to backward, at least."""
    inside: Doubles
    """[layers] bytes that a layer's backward needs on top of what is kept."""
    dense: Doubles
    """[layers + 1] parameter elements on a rank, each where it is first held."""
    routed: Doubles
    """[layers + 1] parameter elements of routed experts on a rank, counted as `dense` is."""
    least: Doubles
    """[6, …] least value over the layers that a pipeline divides: forward, back, drain, forward and back together,
    dense elements, and bytes kept."""

    def at(self, column: int) -> LayerTable:
        """The table of one size."""
        names = ("forward", "back", "drain", "weight", "kept_bytes", "inside", "least")
        some = {name: getattr(self, name)[:, column] for name in names}
        return replace(self, **some)


class LayerTables:
    """Tables by kind of device, axes of a worker and layout, of all sizes of a worker's microbatch at once."""

    def __init__(
        self, graph: Graph, cluster: Cluster, workload: Workload, stack: Stack, base: Plan, kinds: Sequence[DeviceKind]
    ) -> None:
        self.graph, self.cluster, self.workload, self.base, self.kinds = graph, cluster, workload, base, kinds
        kernels, _, self.stack = kernels_of(stack, cpu=on_cpu(cluster))
        layers = graph.layers()
        # A stage is cut between the counted layers; embedding and head (no `first`) go with the stage that they border.
        self.counted = [i for i, layer in enumerate(layers) if layer.call.first is not None] or list(range(len(layers)))
        self.num_layers = len(layers)
        self.workspace = [workspace_bytes(kind.node.device, self.stack) for kind in kinds]
        self.micro = _worker_sizes(workload.batch_size, [len(kind.devices) for kind in kinds])
        self.column = {size: i for i, size in enumerate(self.micro)}
        # Preset recomputation is a choice of the space and has a table each; rules of the plan's own are the only
        # choice.
        plain = base if base.saved.rules else replace(base, saved=Saved())
        self.layer_kinds = Kinds(graph, plain, kernels)
        self.order = np.array([self.layer_kinds.kind_of[layer.label] for layer in layers], np.int64)
        self._base, self._numbers = plain, fitted_rates()
        self._priced = CommonPrices(
            kinds=self.layer_kinds,
            cluster=cluster,
            stack=self.stack,
            kernels=kernels,
            sizes={"seq": workload.sequence_lengths()[0], **dict(workload.sizes)},
            numbers=self._numbers,
            prices={},
        )
        self._links: dict[object, AxisLink] = {}
        self._all: dict[object, dict[str, LayerTable]] = {}
        self._tables: dict[object, LayerTable] = {}
        self._roomiest: dict[object, tuple[float, float, float]] = {}
        self.predicted: dict[MixedPoint, Prediction | str] = {}
        """What searches of this work have predicted: of a point that cannot run, why."""
        place = {layer.label: i for i, layer in enumerate(layers)}
        # Layer i reads layer i - 1 for every i > 0: then each stage waits for the one before it, which `played_s`
        # relies on.
        chained = {place[reader] for reader, maker, _ in dependencies(graph) if place[reader] - place[maker] == 1}
        self.chain = len(chained) == len(layers) - 1
        """Every layer reads from the one before it, so that every stage does."""
        experts = [d.size for b in graph.blocks for d in b.dims if d.name.rpartition(".")[2] == "experts" and d.size]
        self._experts = max(experts, default=0)

    @property
    def divided_bytes(self) -> float:
        """Bytes of all parameters, gradients and states of one copy of the model, at least. Divided over every device
        they are no less: ranks that ZeRO or an axis does not divide hold the same twice."""
        elements = float(self.graph.num_parameters())
        return float(static_bytes(elements, 0.0, self.base, 0, (1, 1), self.stack))

    def of(self, block: MixedBlock, entry: int, batch: int, recompute: str | None = None) -> LayerTable:
        """The table of one entry of a block's kinds. batch: sequences of a microbatch on one worker. recompute: in
        place of the block's."""
        key = block.shape, entry, batch, block.sequence_parallel, block.context, recompute or block.recompute
        if key not in self._tables:
            self._tables[key] = self.every(block, entry, recompute).at(self.column[batch])
        return self._tables[key]

    def every(self, block: MixedBlock, entry: int, recompute: str | None = None) -> LayerTable:
        """The table of one entry for every size in `micro` at once."""
        shape = block.shape
        tables = self._of_axes(shape.kinds[entry], shape.tp[entry], shape.cp, shape.ep[entry], block)
        return tables[recompute or block.recompute] if len(tables) > 1 else next(iter(tables.values()))

    def _of_axes(self, kind: int, tp: int, cp: int, ep: int, block: MixedBlock) -> dict[str, LayerTable]:
        """The tables by way of recomputing."""
        key = kind, tp, cp, ep, *_layout(block, tp, cp)
        if key not in self._all:
            self._all[key] = self._tables_of(kind, tp, cp, ep, block)
        return self._all[key]

    def roomiest(
        self, kind: int, tp: int, cp: int, ep: int, blocks: Sequence[MixedBlock]
    ) -> tuple[float, float, float]:
        """(dense elements of a layer, bytes that it keeps, bytes that the backward of the last layer needs), the least
        of all sizes and ways of recomputing, and of the layouts that some blocks have with a kind and axes."""
        layouts = {_layout(block, tp, cp) for block in blocks}
        key = kind, tp, cp, ep, tuple(sorted(layouts))
        if key not in self._roomiest:
            tables = [
                table
                for layout in layouts
                for block in [next(b for b in blocks if _layout(b, tp, cp) == layout)]
                for table in self._of_axes(kind, tp, cp, ep, block).values()
            ]
            self._roomiest[key] = (
                min(float(table.least[4].min()) for table in tables),
                min(float(table.least[5].min()) for table in tables),
                min(float(table.inside[-1].min()) for table in tables),
            )
        return self._roomiest[key]

    def _tables_of(self, kind: int, tp: int, cp: int, ep: int, block: MixedBlock) -> dict[str, LayerTable]:
        # The smallest mesh with these axes: ep ranks are drawn from dp_shard x tp x cp, so dp_shard is what ep needs
        # beyond the two others.
        mesh = Mesh(dp_shard=ep // gcd(ep, tp * cp), tp=tp, cp=cp, ep=ep)
        layout = replace(self.base.layout, sequence_parallel=block.sequence_parallel and tp > 1, context=block.context)
        plan = replace(
            self._base, mesh=mesh, layout=layout, placement=self.kinds[kind].devices[: mesh.world_size], stages=()
        )
        links = stage_links(plan, self.cluster, mesh, range(mesh.world_size), experts=bool(self._experts))
        tables = kind_tables(
            self._priced,
            plan,
            self.kinds[kind].node.device,
            {axis: links[axis] for axis in TOKEN_AXES if axis in links},
            self.micro,
            least_busiest(self.workload.router, plan.experts, self._experts, ep) if self._experts else 1.0,
            (plan.saved.preset,) if plan.saved.rules or plan.saved.every > 1 else PRESETS,
        )
        return {name: self._sums(table) for name, table in tables.items()}

    def _sums(self, table: KindTable) -> LayerTable:
        """Prefix sums in the graph's order."""
        # The host launches a layer's kernels while the device computes: a layer takes the longer of the two, per
        # action.
        host = table.host_s
        forward = np.maximum(table.forward_s, host[0])
        back = np.maximum(table.input_s + table.weight_s, host[1] + host[2])
        drain = np.maximum(table.input_s, host[1])
        # sums[b] - sums[a] is the value of layers a … b - 1: every stage, whatever its cut, costs one subtraction.
        dense, routed = self._elements(table)
        counted = self.order[self.counted]
        least = [seconds[counted].min(axis=0) for seconds in (forward, back, drain, forward + back)]
        # Parameters are as many for every size of a microbatch: one value in all columns, so that `least` is one array.
        own = np.full(len(self.micro), np.array(dense)[self.counted].min())
        return LayerTable(
            forward=_cumulated(forward[self.order]),
            back=_cumulated(back[self.order]),
            drain=_cumulated(drain[self.order]),
            weight=_cumulated(np.maximum(table.weight_s, host[2])[self.order]),
            kept_bytes=_cumulated(table.kept_bytes[self.order]),
            inside=table.inside_bytes[self.order],
            dense=_cumulated(np.array(dense)),
            routed=_cumulated(np.array(routed)),
            least=np.array([*least, own, table.kept_bytes[counted].min(axis=0)]),
        )

    def _elements(self, table: KindTable) -> tuple[list[float], list[float]]:
        """(dense, routed experts') elements that each layer is the first to hold."""
        seen: set[str] = set()
        # Tied tensors are counted where they are first held; a later stage that holds them again holds no less.
        dense, routed = [], []
        for layer, kind in zip(self.graph.layers(), self.order.tolist(), strict=True):
            # Without tied tensors every layer of a kind holds the same number.
            if not self.layer_kinds.shared:
                own = table.elements[kind]
            else:
                sharded, own = table.prices[kind].sharded, np.zeros(2)
                experts = routed_tensors(sharded.block)
                for tensor in sharded.block.parameters:
                    name = layer.call.parameter_name(tensor.name, layer.index)
                    if name not in seen:
                        seen.add(name)
                        own[int(tensor.name in experts)] += float(sharded.local_elements[tensor.name])
            dense.append(float(own[0]))
            routed.append(float(own[1]))
        return dense, routed

    def update_s(self, kind: int, elements: Doubles | float, ways: int) -> Doubles:
        """Seconds in which a device of a kind updates so many parameter elements, divided over `ways` ranks, at
        least."""
        optimizer, device = self.base.optimizer, self.kinds[kind].node.device
        # floor: a rank that owns fewer elements than the others bounds the update from below.
        owned = np.floor(np.asarray(elements, float) / ways)
        # Other optimizers and offloaded updates have no closed price that is proved below the simulator's.
        if optimizer.offload is not None or optimizer.kind != "adamw":
            return np.zeros_like(owned)
        curves = curves_for(device)
        price = optimizer_seconds(owned, optimizer, self.base.precision, device, curves, self.stack)
        # The timeline rounds every action to its grid, so each price may shrink by one step of it.
        return np.maximum(np.asarray(price.device_s, float) - GRID_S, 0.0)

    def reduced_s(self, kind: CollectiveKind, elements: Doubles, devices: tuple[int, ...], mesh: Mesh) -> Doubles:
        """Seconds in which the gradients of so many elements are added up over all data and context ranks of a mesh on
        these devices, in one piece: more pieces take no less."""
        if mesh.dp_shard * mesh.cp == 1:
            return np.zeros_like(elements)
        key = devices, mesh
        if key not in self._links:
            # The groups that add gradients up are those of dp_shard and cp together; each row of the array is one
            # group's devices.
            self._links[key] = axis_link(self.cluster, np.array(devices)[mesh.dense.groups("dp_shard", "cp")])
        link = self._links[key]
        size = elements * width(self.base.precision.reduce)
        seconds = np.asarray(collective_seconds(kind, size, link), float)
        slower = self._numbers.link_factor(link.across_name or link.inside_name)
        return np.where(size > 0, np.maximum(seconds * slower - GRID_S, 0.0), 0.0)

    def link_factor(self, link: AxisLink) -> float:
        """How much longer a network takes than its price, as training runs show it."""
        return self._numbers.link_factor(link.across_name or link.inside_name)

    def edges(self, layers: Longs) -> list[Longs]:
        """[points] first layer of the graph in each stage, and their number at the end. layers: [points, stages]
        counted ones."""
        # layers[:, s] counts layers of stage s, so the running sum is the first counted layer of stage s + 1.
        starts = np.array(self.counted)[np.cumsum(layers[:, :-1], axis=1)]
        first, last = np.zeros(len(layers), np.int64), np.full(len(layers), self.num_layers)
        # Layers before the first counted one go with stage 0, those after the last one with the last stage.
        return [first, *starts.T, last]


def _layout(block: MixedBlock, tp: int, cp: int) -> tuple[bool, str]:
    """What the layers of a worker with so many ranks see of a block's layout."""
    return block.sequence_parallel and tp > 1, block.context if cp > 1 else ""


def _worker_sizes(total: int, devices: Sequence[int]) -> tuple[int, ...]:
    """Sequences of a microbatch that a worker may have: shares, and equal parts of a microbatch."""
    # A microbatch of `size` sequences over n workers gives the fullest ceil(size / n): -(-size // n).
    shares = {*range(1, min(total, LARGEST_SHARE) + 1)}
    parts = {-(-size // n) for size in divisors(total) for count in devices for n in divisors(count) if n <= size}
    return tuple(sorted(shares | parts))


def _cumulated(values: Doubles) -> Doubles:
    return np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])


def least_of_ranks(act: Actions, shape: Shape) -> list[RankSeconds]:
    """Sums the actions of every stage ([stages, points]) as `least_step_s` adds them up."""
    ranks = []
    for stages in map(list, stages_of_ranks(shape)):
        first = stages[0]
        ranks.append(
            RankSeconds(
                forward=act.forward[stages].sum(axis=0),
                back=act.whole[stages].sum(axis=0),
                drain=act.input[stages].sum(axis=0),
                first_forward=act.forward[first],
                first_back=act.whole[first],
                first_drain=act.input[first],
            )
        )
    return ranks


def played_s(act: Actions, shape: Shape, schedule: str, microbatches: int) -> tuple[Doubles, Doubles]:
    """Seconds from the first action of a step to the last ([points]) and to that of each rank ([ranks, points]), where
    a stage waits for no message: what the schedule's order alone makes of actions that are no longer than those of the
    Program. With clipping all ranks meet once a step, after its last actions and before its update, so a step takes no
    less. PlanError for a schedule that has no rows for these numbers."""
    if partly_split(schedule):
        act = halves(act)
    zero = np.zeros_like(act.forward)
    skeleton_ = skeleton(schedule, shape.pp, shape.virtual, microbatches)
    # Messages and hand-overs take zero seconds here, which only makes the play shorter.
    ends, finals, _ = play(skeleton_, act, zero, zero, zero[1:], zero)
    # Each level of the skeleton rounds its begin and end to the grid once.
    rounding = 2 * GRID_S * len(skeleton_.levels)
    return np.maximum(ends.max(axis=0), finals.max(axis=0)) - rounding, finals - rounding


def tails_s(reduced: Doubles, act: Actions, shape: Shape, *, split: bool) -> Doubles:
    """[ranks, points] seconds from the last action of each rank to the end of its reductions, at least. reduced:
    [stages, points] seconds in which a stage's gradients are added up, nothing beside it.

    Proof: some stage has the last action of the rank, and gradients of all its layers are complete no sooner than in
    that action: what it does not take beside the reduction is left.
    """
    exposed_s = np.maximum(reduced - (act.weight if split else act.whole), 0.0)
    return np.stack([exposed_s[list(stages)].min(axis=0) for stages in stages_of_ranks(shape)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Seconds of one microbatch on one pipeline rank, or arrays of them."""

    forward: Doubles | float
    """All its stages."""
    back: Doubles | float
    first_forward: Doubles | float
    """Its first stage."""
    first_back: Doubles | float
    first_drain: Doubles | float
    drain: Doubles | float


def least_step_s(
    ranks: Sequence[RankSeconds], microbatches: int, *, split: bool, clip: bool, tails: Doubles | None = None
) -> Doubles:
    """Seconds of a step of a pipeline at least, ranks in order of their first stages. tails: of each rank, what comes
    after its last action, where all meet.

    split: weight gradients are actions of their own; `drain` is the rest of a backward. Proof: a rank computes every
    microbatch forward and backward through its stages, one after the other. That is all where ranks need not meet. With
    clipping all meet once a step, in the norm's sum; then the first forward of a rank, of its first stage, comes after
    one of every earlier stage, which are first stages too, and after its last backward, again of its first stage, that
    microbatch still goes back through all of them before the next meeting. Where weight gradients wait, they may be the
    last of a rank: the way back then begins after its last input gradient.
    """
    # ahead: what earlier ranks must compute before this one's first forward. behind: what they must compute after its
    # last backward. Both grow only where all ranks meet (clip), otherwise a rank's own work is the bound.
    most = ahead = behind = np.zeros(())
    for i, rank in enumerate(ranks):
        tail = 0.0 if tails is None or not clip else tails[i]
        own = microbatches * (rank.forward + rank.back)
        if split:
            drained = ahead + microbatches * (rank.forward + rank.drain) + behind
            # Split backward: the rank ends with weight gradients (own), or with the way back after its last input
            # gradient.
            most = np.maximum(most, np.maximum(ahead + own + tail, drained))
        else:
            most = np.maximum(most, ahead + own + np.maximum(behind, tail))
        if clip:
            ahead = ahead + rank.first_forward
            behind = behind + (rank.first_drain if split else rank.first_back)
    return most


@lru_cache(maxsize=4096)
def in_flight(schedules: tuple[str, ...], rank: int, pp: int, microbatches: int) -> int:
    """Microbatches that a rank of one stage holds at once, at least, under any of the schedules."""
    counts = [orders.find(name).least_in_flight(rank, pp, microbatches, 1) for name in schedules]
    return min(counts, default=microbatches)


def held_bytes(
    saved_bytes: Sequence[Doubles],
    inside: Doubles | float,
    schedules: tuple[str, ...],
    rank: int,
    pp: int,
    microbatches: int,
) -> Doubles:
    """Bytes of activations on a pipeline rank at its peak, at least. saved_bytes: of one microbatch in each of its
    stages. inside: what the backward of its last layer needs beside that.

    schedules: any of them. When the first input gradient reaches a rank, that microbatch has been through all of its
    stages, and its last layer is the first to need room; where it has one stage, and the most microbatches are under
    way (`in_flight`), the next input gradient finds as many. On the first rank more are under way at some moment
    (`in_flight.under_way`), each in some stage.
    """
    # One stage a rank: the peak is (microbatches in flight) x kept + what the running backward needs.
    if len(saved_bytes) == 1:
        return in_flight(schedules, rank, pp, microbatches) * saved_bytes[0] + inside
    every: Doubles = np.sum(saved_bytes, axis=0) + inside
    # Several stages on the first rank: `units` (stage, microbatch) pairs are alive, each at least the smallest stage.
    if not rank:
        units = min(under_way(schedule, pp, len(saved_bytes), microbatches) for schedule in schedules)
        every = np.maximum(every, units * np.min(saved_bytes, axis=0))
    return every


def static_bytes(
    dense: Doubles | float, routed: Doubles | float, plan: Plan, zero: int, ways: tuple[int, int], stack: Stack
) -> Doubles | float:
    """Bytes of parameters, gradients and states that are there all the time, at least. ways: ranks over which ZeRO
    divides dense parameters, and routed experts'. Gradients that come and go with the step are left out."""
    precision = plan.precision
    states = least_state_bytes(plan.optimizer, precision)
    master = 0 if precision.master == "none" or plan.optimizer.offload else width(precision.master)
    param = 0 if plan.optimizer.offload_parameters else width(precision.param)
    grads = 0 if stack.gradients.bucketed is False or plan.optimizer.offload else width(precision.grad)
    total: Doubles | float = 0.0
    for elements, parts in zip((dense, routed), ways, strict=True):
        # ZeRO 1 divides master weights and states, ZeRO 2 gradients as well, ZeRO 3 parameters as well (Rajbhandari et
        # al. 2020).
        for size, first in ((param, 3), (grads, 2), (master + states, 1)):
            total = total + elements * size / (parts if zero >= first else 1)
    return total
