"""Subgraphs of a model on two kinds of device at once (DUET): which run where, by predicted seconds.

`subgraphs(graph, setting)` cuts a model coarsely: at ops that every path crosses a phase ends, and inside a phase
each branch that shares no op with another is one subgraph. `makespan(…)` plays an assignment: each device runs one
subgraph at a time, and what crosses goes over a lane of its own. `corrected(…)` begins with each subgraph on its
faster device and flips one, or two that follow each other, while the makespan falls; `choose(…)` tries all where they
are few, and keeps one device where two gain less than 5 %. Seconds are rooflines of ops with a launch each, or
measured ones that are given. Leaves out running it: this machine has one kind of device.
Source: Zhang, Hu and Li 2021 (DUET, IPDPS), sections IV and V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.graph.work import forward_work
from gnomon.hardware.types import Device
from gnomon.ops.work import Setting, nbytes

FEW = 12
"""The number of subgraphs up to which all assignments are tried."""
GAIN = 0.05
"""The share of one device's time that two must save."""
LAUNCH_S = {"gpu": 5e-6, "tpu": 5e-6, "cpu": 1e-6}
"""Seconds of a launch of an op, by kind of device: an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraph:
    """Some ops that run on one device."""

    name: str
    """The name of its only op, or those of its first and its last."""
    seconds: tuple[float, float]
    """Seconds on the first device and on the second."""
    reads: tuple[tuple[int, str, float], ...]
    """(subgraph before it, name of a tensor that it reads of it, bytes of that tensor)."""
    ops: int
    """The number of its ops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DuetLane:
    """The link between the two devices; one transfer at a time, whichever way it goes."""

    bytes_per_s: float
    """Bandwidth, one direction."""
    latency_s: float
    """Seconds of a transfer, however few its bytes."""

    def seconds(self, count: float) -> float:
        """Seconds of a transfer of so many bytes."""
        return self.latency_s + count / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DuetAssignment:
    """An assignment of subgraphs to devices."""

    places: tuple[int, ...]
    """The device of each subgraph: 0 for the first, 1 for the second."""
    seconds: float
    """Seconds of one pass of all subgraphs."""
    alone_s: tuple[float, float]
    """Seconds of all on the first device, and of all on the second."""
    exact: bool
    """Whether all assignments were tried."""


def op_seconds(device: Device, dtype: str) -> Callable[[float, float, float], float]:
    """Returns the function (matmul FLOPs, other FLOPs, bytes moved) -> seconds of an op: a launch, and the roofline of
    the device's peaks. dtype: of matmuls; other arithmetic is taken in fp32."""
    peak, vector = device.flops_per_s(dtype), device.flops_per_s("fp32")
    launch = LAUNCH_S[device.kind]
    return lambda matrix, other, moved: launch + max(
        matrix / peak, other / vector, moved / device.memory_bytes_per_s
    )  # fmt: skip


@dataclass(slots=True)
class _Op:
    """One op of one layer."""

    name: str
    """Its layer's label and its path."""
    seconds: tuple[float, float]
    """Seconds on the first device and on the second."""
    reads: dict[tuple[int, str], float]
    """(op before it, name of a tensor of that op) -> bytes of that tensor."""


def _ops(graph: Graph, setting: Setting, prices: Sequence[Callable[[float, float, float], float]]) -> list[_Op]:
    """Lists the ops of all layers, in an order in which they can run. prices: those of `op_seconds`, by device."""
    # Names that calls read -> (op, its tensor, bytes): `call.output`, or `call#index.output` of one layer of several.
    producers: dict[str, tuple[int, str, float]] = {}
    found: list[_Op] = []
    for layer in graph.layers():
        block, call = graph.block(layer.call.block), layer.call
        own: dict[str, tuple[int, str, float]] = {}
        before = f"{call.name}#{layer.index - 1}" if layer.index else ""
        chained = {inside: f"{before}.{out}" for out, inside in call.chain} if layer.index else {}
        for name, source in call.inputs:
            if (full := chained.get(name, source)) in producers:
                own[name] = producers[full]
        for op in block.ops:
            work = forward_work(op, block, setting)
            matrix = float(work.matmul_flops) + float(work.extra_matmul_flops)
            moved = float(work.read_bytes) + float(work.write_bytes)
            reads = {(at, tensor): count for at, tensor, count in (own[name] for name in op.inputs if name in own)}
            each = tuple(price(matrix, float(work.vector_flops), moved) for price in prices)
            found.append(_Op(f"{layer.label}.{op.path}", (each[0], each[1]), reads))
            for name in op.outputs:
                own[name] = len(found) - 1, name, float(nbytes(block.tensor(name), setting.sizes, setting.dtypes))
        for name in block.outputs:
            if name in own:
                producers[f"{call.name}#{layer.index}.{name}"] = own[name]
                if layer.index == call.repeat - 1:
                    producers[f"{call.name}.{name}"] = own[name]
    return found


def subgraphs(
    graph: Graph, setting: Setting, prices: Sequence[Callable[[float, float, float], float]]
) -> tuple[Subgraph, ...]:
    """Cuts a model into subgraphs. prices: of an op on each of the two devices, as `op_seconds` makes them."""
    return _coarse(_ops(graph, setting, prices))


def _coarse(ops: Sequence[_Op]) -> tuple[Subgraph, ...]:
    """Makes subgraphs of ops: one for each branch where a region between two cuts has several, and one for each stretch
    of cuts and regions with a single branch between such regions."""
    groups: list[list[int]] = []
    chain: list[int] = []
    for region, cut in _regions(ops):
        branches = _branches(ops, region)
        if len(branches) > 1:
            groups += [chain] if chain else []
            groups += branches
            chain = []
        else:
            chain += region
        chain += [cut] if cut is not None else []
    groups += [chain] if chain else []
    number = {at: index for index, members in enumerate(groups) for at in members}
    parts_joined = []
    for index, members in enumerate(groups):
        # A tensor that several of its ops read counts once.
        reads = {
            (number[source], f"{ops[source].name} {tensor}"): count
            for at in members
            for (source, tensor), count in ops[at].reads.items()
            if number[source] != index
        }
        first, last = ops[members[0]].name, ops[members[-1]].name
        parts_joined.append(
            Subgraph(
                name=first if len(members) == 1 else f"{first} … {last}",
                seconds=(sum(ops[at].seconds[0] for at in members), sum(ops[at].seconds[1] for at in members)),
                reads=tuple((source, tensor, count) for (source, tensor), count in sorted(reads.items())),
                ops=len(members),
            )
        )
    return tuple(parts_joined)


def _regions(ops: Sequence[_Op]) -> Iterator[tuple[list[int], int | None]]:
    """Yields (region, cut): an op that every path crosses, and the ops between the cut before it and this one; at last
    (region, None) where ops follow the last cut."""
    farthest = [-1] * len(ops)  # index of the last reader
    for at, op in enumerate(ops):
        for source, _ in op.reads:
            farthest[source] = at
    sources_after = [0] * (len(ops) + 1)  # ops from here on that read nothing before them
    for at in range(len(ops) - 1, -1, -1):
        sources_after[at] = sources_after[at + 1] + (not ops[at].reads)
    passing, unread, region = -1, False, list[int]()
    for at in range(len(ops)):
        # A cut: no edge passes it by; all ops before lead to it, since each has a reader, and none behind it; all ops
        # after come from it, since each reads something, and nothing from before it.
        if passing <= at and not unread and not sources_after[at + 1]:
            yield region, at
            region = []
        else:
            region.append(at)
        passing = max(passing, farthest[at])
        unread = unread or farthest[at] < 0
    if region:
        yield region, None


def _branches(ops: Sequence[_Op], region: Sequence[int]) -> list[list[int]]:
    """Groups the ops of a region into its connected parts, ordered by their first op."""
    root = {at: at for at in region}

    def find(at: int) -> int:
        """The root of an op's part: union-find without ranks, since regions are small. The smaller index becomes the
        root, so that branches keep their order."""
        while root[at] != at:
            at = root[at]
        return at

    for at in region:
        for source, _ in ops[at].reads:
            if source in root:
                one, other = sorted((find(at), find(source)))
                root[other] = one
    by_root: dict[int, list[int]] = {}
    for at in region:
        by_root.setdefault(find(at), []).append(at)
    return [by_root[one] for one in sorted(by_root)]


def makespan(parts: Sequence[Subgraph], places: Sequence[int], lane: DuetLane) -> float:
    """Returns the seconds until all subgraphs have run.

    parts: in an order in which they can run; a device runs its own in that order, one at a time. places: the device
    (0 or 1) of each. A transfer begins when its subgraph has ended and the lane is free.
    """
    free, sent_until, end = [0.0, 0.0], 0.0, [0.0] * len(parts)
    arrived: dict[tuple[int, str, int], float] = {}  # (subgraph, its tensor, device) -> when it is there
    for index, part in enumerate(parts):
        place, ready = places[index], 0.0
        for source, tensor, count in part.reads:
            if places[source] == place:
                ready = max(ready, end[source])
                continue
            if (source, tensor, place) not in arrived:  # what has crossed once is there
                sent_until = max(sent_until, end[source]) + lane.seconds(count)
                arrived[source, tensor, place] = sent_until
            ready = max(ready, arrived[source, tensor, place])
        begin = max(free[place], ready)
        end[index] = free[place] = begin + part.seconds[place]
    return max(end, default=0.0)


def corrected(parts: Sequence[Subgraph], lane: DuetLane) -> tuple[tuple[int, ...], float]:
    """Returns (places, makespan) of a local search: each subgraph on its faster device at first, then the flip of one
    subgraph, or of a subgraph and one that it reads, that shortens the makespan most, while any does."""
    places = [int(part.seconds[1] < part.seconds[0]) for part in parts]
    best = makespan(parts, places, lane)
    pairs = [
        (source, index)
        for index, part in enumerate(parts)
        for source in dict.fromkeys(source for source, _, _ in part.reads)
    ]
    flips = [*((index,) for index in range(len(parts))), *pairs]
    while True:
        tried = []
        for flip in flips:
            other = [1 - place if index in flip else place for index, place in enumerate(places)]
            tried.append((makespan(parts, other, lane), other))
        least = min(tried, key=lambda one: one[0], default=(best, places))
        if least[0] >= best:
            return tuple(places), best
        best, places = least


def choose(parts: Sequence[Subgraph], lane: DuetLane) -> DuetAssignment:
    """Returns the best of all assignments where there are at most FEW subgraphs, else that of `corrected`; one device
    where two save less than the share GAIN. InputError for a model without ops."""
    if not parts:
        raise InputError("a model without ops has no subgraph to place")
    on_one_device = (makespan(parts, [0] * len(parts), lane), makespan(parts, [1] * len(parts), lane))
    exact = len(parts) <= FEW
    places, best = corrected(parts, lane)
    if exact:
        best, places = min((makespan(parts, one, lane), one) for one in product((0, 1), repeat=len(parts)))
    if best > (1 - GAIN) * min(on_one_device):
        faster = int(on_one_device[1] < on_one_device[0])
        places, best = (faster,) * len(parts), on_one_device[faster]
    return DuetAssignment(places=tuple(places), seconds=best, alone_s=on_one_device, exact=exact)
