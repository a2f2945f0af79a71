"""Seconds of a collective over one group of ranks, of a message between two, and of a copy between host and device.

Each algorithm costs `start + wire + ramp·sqrt(start·wire)`: start is launches and empty steps, wire is the bytes that
cross the slowest link over the share of its peak that large messages reach, and the last term is pipelining that builds
up with size. The fastest algorithm of those known for a link counts, as NCCL's own tuning chooses. `nbytes` is what
nccl-tests calls size: the whole buffer of one rank. Systems within a node that were measured bend the formula: by a
factor at every second power of two, fading beyond the sizes measured (`Bend`). Every price grows with bytes, falls with
bandwidth, and is never under `bound_seconds`; links in a machine that was measured have their own figures. Constants
are rows of `collectives.toml`, fitted by `evidence/fits/fit_collectives`; each says from what. Continuous in size but
for one named switch: where NCCL's tuning turns from its low-latency protocols to Simple, measured times jump up (within
nodes, and of rings over EFA). Leaves out contention with compute, and such jumps over other networks.
Source of forms: Thakur, Rabenseifner, Gropp 2005; NCCL's src/graph/tuning.cc.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np

from gnomon import schema
from gnomon.errors import InputError, UnpricedError, nearest
from gnomon.hardware import Node
from gnomon.prices.curves import Provenance, Time
from gnomon.prices.links import AxisLink
from gnomon.prices.measured import communication_seconds
from gnomon.units import Bytes, Seconds

CollectiveKind: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"
]
KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)


def _check(what: str, starts: Iterable[float], shares: Iterable[float], ramps: Iterable[float]) -> None:
    if not all(0 <= s < 1 for s in starts):
        raise InputError(f"{what}: starts and steps must be from 0 to 1 s")
    if not all(0 < s <= 1 for s in shares):
        raise InputError(f"{what}: a share of the link's peak is above 0 and at most 1")
    if not all(0 <= r < 100 for r in ramps):
        raise InputError(f"{what}: ramp must be from 0 to 100")


Line: TypeAlias = tuple[float, ...]
"""Natural logarithms at the knots of a piecewise linear line."""

FADE = 4.0
"""The factor beyond the largest size measured (or below the least) at which the formula stands alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bend:
    """What measured times of one system are over the formula: lines in logarithms between a few sizes."""

    at_bytes: tuple[float, ...]
    """The sizes in bytes, ascending."""
    over: tuple[tuple[float, ...], ...]
    """The factor at each size: one list for all sizes of group, or one for each."""

    def __post_init__(self) -> None:
        if not self.at_bytes or list(self.at_bytes) != sorted(set(self.at_bytes)) or not self.at_bytes[0] > 0:
            raise InputError(f"bend: at_bytes must ascend from above 0, got {self.at_bytes}")
        if not self.over or any(len(factors) != len(self.at_bytes) for factors in self.over):
            raise InputError("bend: over has a factor for each of at_bytes")
        if not all(0.5 < factor < 2 for factors in self.over for factor in factors):
            raise InputError("bend: factors must be from 0.5 to 2")

    def logs(self, ranks: tuple[int, ...], n: int, above: float, up_to: float) -> tuple[Line, Line]:
        """(logs of sizes, logs of factors) for a group of n, above and up to given sizes (0 and inf: no limit). Where
        there is none the factor fades to 1; of large buffers only from above 1, so that a byte gets no dearer."""
        # Factors are kept as logarithms, so that lines between them multiply instead of add.
        log_n, known = math.log2(n), np.log2(ranks)
        lists = np.log(self.over)
        # One list of factors holds for all groups; several are interpolated over log2 of the group's size, size by
        # size.
        factors = lists[0] if len(lists) == 1 else np.array([np.interp(log_n, known, column) for column in lists.T])
        sizes = np.log(self.at_bytes)
        # Where the formula of one protocol ends (`above`, `up_to`) the bend ends with it; elsewhere it fades to factor
        # 1 at FADE times the measured range.
        ends = [above or self.at_bytes[0] / FADE, up_to if up_to < math.inf else self.at_bytes[-1] * FADE]
        low, high = np.log(ends).tolist()
        if low >= high:
            return (low,), (0.0,)
        # Knots at or beyond an end are replaced by the end itself.
        inner = (sizes > low) & (sizes < high)
        # At an open end of large buffers min(0, …): the factor may fade down to 1 but not up, or a byte more would take
        # less.
        first = float(np.interp(low, sizes, factors)) if above else 0.0
        last = float(np.interp(high, sizes, factors)) if up_to < math.inf else min(0.0, float(factors[-1]))
        return (low, *sizes[inner].tolist(), high), (first, *factors[inner].tolist(), last)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFit:
    """The same constants for NCCL's low-latency protocols (LL, LL128), which small buffers take."""

    up_to_bytes: tuple[float, ...]
    """Largest buffer of each size of group that takes them, by NCCL's own tuning: it need not be where Simple is as
    fast. Between and beyond sizes of group as in InsideFit."""
    start_s: tuple[Seconds, ...]
    """Seconds of an empty collective, as in InsideFit."""
    share: tuple[float, ...]
    """Share of the least traffic's peak for large messages, as in InsideFit."""
    ramp: tuple[float, ...]
    """Weight of sqrt(start·wire), as in InsideFit."""
    bend: Bend | None = None
    """What the formula leaves, as in InsideFit."""

    def __post_init__(self) -> None:
        _check("small buffers", self.start_s, self.share, self.ramp)
        if not all(size > 0 for size in self.up_to_bytes):
            raise InputError(f"small buffers: up_to_bytes must be positive, got {self.up_to_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideFit:
    """What groups within one node reach of its link, by size of the group."""

    link: str
    """Name of the link in the catalogue, or its kind: rows for a name come before those for a kind."""
    collectives: tuple[CollectiveKind, ...]
    """The collectives that the row is for."""
    ranks: tuple[int, ...]
    """Sizes of group, ascending; between them constants are interpolated over log2, beyond them `start_s` goes on with
    its last slope and the others stay."""
    start_s: tuple[Seconds, ...]
    """Seconds of an empty collective, for each size of group."""
    share: tuple[float, ...]
    """Share of the least traffic's peak that large messages reach, for each size of group."""
    ramp: tuple[float, ...]
    """Weight of sqrt(start·wire), for each size of group."""
    provenance: Provenance
    """Where the row's constants are known from."""
    bend: Bend | None = None
    """What the formula leaves of measured times; None: nothing was measured, or is left."""
    small: SmallFit | None = None
    """Constants of small buffers; None: one protocol for all."""
    arch: str = ""
    """The generation of devices that the row is for; empty: all."""

    def __post_init__(self) -> None:
        what = f"{self.link} {', '.join(self.collectives)}"
        _check(what, self.start_s, self.share, self.ramp)
        some = self.small
        lists = [self.start_s, self.share, self.ramp]
        lists += [some.up_to_bytes, some.start_s, some.share, some.ramp] if some else []
        if not self.ranks or any(len(values) != len(self.ranks) for values in lists):
            raise InputError(f"{what}: ranks, start_s, share and ramp (and small's) must be equally long")
        bends = [fit.bend for fit in (self, some) if fit and fit.bend]
        if any(len(bend.over) not in (1, len(self.ranks)) for bend in bends):
            raise InputError(f"{what}: a bend has one list for all ranks or one for each")
        if list(self.ranks) != sorted(set(self.ranks)) or self.ranks[0] < 2:
            raise InputError(f"{what}: ranks must ascend from 2 or more, got {self.ranks}")

    def at(self, ranks: int) -> tuple[float, float, float]:
        """(start, share, ramp) for a group of that size."""
        return self._start(ranks, self.start_s), self._between(ranks, self.share), self._between(ranks, self.ramp)

    def small_at(self, ranks: int) -> tuple[float, float, float, float] | None:
        """(largest size, start, share, ramp) of small buffers, for a group of that size."""
        some = self.small
        if some is None:
            return None
        shape = (self._between(ranks, some.share), self._between(ranks, some.ramp))
        return self._between(ranks, some.up_to_bytes), self._start(ranks, some.start_s), *shape

    def _between(self, ranks: int, values: tuple[float, ...]) -> float:
        return float(np.interp(math.log2(ranks), np.log2(self.ranks), values))

    def _start(self, ranks: int, starts: tuple[float, ...]) -> float:
        # Beyond the largest group measured the start grows with its last slope per doubling, never falls: a larger ring
        # or tree has more steps.
        x, known = math.log2(ranks), np.log2(self.ranks)
        start = self._between(ranks, starts)
        if x > known[-1] and len(known) > 1:
            slope = (starts[-1] - starts[-2]) / (known[-1] - known[-2])
            start += max(0.0, slope) * (x - float(known[-1]))
        return start


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallAcrossFit:
    """The same constants of a ring for NCCL's low-latency protocols, which small buffers take."""

    up_to_bytes: Bytes
    """Largest buffer that takes them, for each rank of the group: by NCCL's own tuning it grows with the steps that
    they shorten."""
    start_s: Seconds
    """Seconds of an empty collective in one node, as in AcrossFit."""
    step_s: Seconds
    """Seconds more for each step between nodes, as in AcrossFit."""
    inside_step_s: Seconds
    """Seconds more for each rank that is not the first of its node, as in AcrossFit."""
    share: float
    """Share of what a group's ports carry, as in AcrossFit."""
    ramp: float
    """Weight of sqrt(start·wire), as in AcrossFit."""

    def __post_init__(self) -> None:
        _check("small buffers", (self.start_s, self.step_s, self.inside_step_s), (self.share,), (self.ramp,))
        if not self.up_to_bytes > 0:
            raise InputError(f"small buffers: up_to_bytes must be positive, got {self.up_to_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcrossFit:
    """What one algorithm reaches of a network between nodes."""

    link: str
    """Name of the link in the catalogue, or its kind, as in InsideFit."""
    collectives: tuple[CollectiveKind, ...]
    """The collectives that the row is for."""
    algorithm: Literal["tree", "ring", "direct"]
    """The algorithm: a double binary tree over nodes, a ring through all ranks, or every rank to every other
    (direct)."""
    start_s: Seconds
    """Seconds of an empty collective in one node."""
    step_s: Seconds
    """Seconds more for each doubling of nodes (tree) or each node after the first (ring: in each direction)."""
    inside_step_s: Seconds
    """Seconds more for each rank that is not the first of its node (ring only)."""
    share: float
    """Share of what a group's ports carry that large messages reach."""
    ramp: float
    """Weight of sqrt(start·wire) in the price."""
    provenance: Provenance
    """Where the row's constants are known from."""
    small: SmallAcrossFit | None = None
    """Constants of small buffers; None: one protocol for all."""
    arch: str = ""
    """The generation of devices that the row is for; empty: all."""

    def __post_init__(self) -> None:
        what = f"{self.link} {self.algorithm} {', '.join(self.collectives)}"
        _check(what, (self.start_s, self.step_s, self.inside_step_s), (self.share,), (self.ramp,))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFit:
    """What copies between host and device reach of the host link."""

    link: str
    """Name of the host link in the catalogue, or its kind."""
    start_s: Seconds
    """Seconds of an empty copy."""
    share: float
    """Share of the link's peak that copies from pinned memory reach."""
    ramp: float
    """Weight of sqrt(start·wire) in the price."""
    provenance: Provenance
    """Where the row's constants are known from."""

    def __post_init__(self) -> None:
        _check(f"copies over {self.link}", (self.start_s,), (self.share,), (self.ramp,))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFile:
    """The file of collective prices: all its rows."""

    SCHEMA: ClassVar[str] = "gnomon.collectives/1"

    inside: tuple[InsideFit, ...]
    """Rows of groups within a node."""
    across: tuple[AcrossFit, ...]
    """Rows of groups over several nodes."""
    copies: tuple[CopyFit, ...]
    """Rows of copies between host and device."""


@cache
def collective_fits() -> CollectiveFile:
    """Reads the rows of `collectives.toml`, once."""
    return schema.load_packaged(CollectiveFile, Path(__file__).with_name("collectives.toml"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmCost:
    """One algorithm on one link: seconds of `nbytes`."""

    start_s: float
    """Seconds of an empty collective."""
    s_per_byte: float
    """Wire seconds of each byte."""
    ramp: float
    """Weight of sqrt(start·wire)."""
    floor_s_per_byte: float = 0.0
    """Wire seconds of each byte on another link that works at the same time."""
    bend: Bent | None = None
    """What measured times are over this price."""
    small: AlgorithmCost | None = None
    """The cost of buffers up to `small_bytes`."""
    small_bytes: float = 0.0
    """Bytes at which the switch is; larger buffers never take less than those of this size."""

    def straight(self, size: Any) -> Any:
        """Seconds by the formula alone."""
        # start + wire + ramp·sqrt(start·wire): the cross term is pipelining that builds up while start still matters.
        wire = size * self.s_per_byte
        seconds = self.start_s + wire + self.ramp * (self.start_s * wire) ** 0.5
        # The other link (inside the nodes) works alongside: the slower of the two sets the time.
        if self.floor_s_per_byte:
            seconds = np.maximum(seconds, self.start_s + size * self.floor_s_per_byte)
        return seconds

    def seconds(self, size: Any) -> Any:
        """Seconds of `size` bytes, a float or an array."""
        if self.small is not None and isinstance(size, float) and size <= self.small_bytes:
            return self.small.seconds(size)
        seconds = self.straight(size)
        if self.bend is not None:
            seconds = self.bend.seconds(size, seconds)
        if self.small is None:
            return seconds
        # NCCL's switch between protocols is a jump: a larger buffer must not take less than the largest small one.
        least = self.small.seconds(self.small_bytes)
        if isinstance(size, float):
            return max(seconds, least)
        return np.where(size <= self.small_bytes, self.small.seconds(size), np.maximum(seconds, least))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bent:
    """A bend of one cost: no larger buffer takes less, and none takes less than the link's peak."""

    logs: Line
    """Logs of sizes; between them and beyond them what follows holds."""
    at_zero: Line
    """The value at 0 of the line of log factors over log sizes."""
    slope: Line
    """The slope of that line."""
    least_s: tuple[Seconds, ...]
    """Seconds of the sizes before, which no larger buffer takes less than."""
    peak_s_per_byte: float
    """Least seconds of each byte, at the link's peak."""

    @classmethod
    def of(cls, line: tuple[Line, Line], cost: AlgorithmCost, peak_s_per_byte: float) -> Bent:
        """line: logs of sizes and of factors. Between two sizes seconds are convex in logarithms, so the most that
        they have come to is at one of both."""
        # Piece i is log factor = at_zero[i] + slope[i]·log size, with flat pieces (slope 0) before the first and after
        # the last knot.
        logs, over = (np.array(values) for values in line)
        slope = np.concatenate([[0.0], np.diff(over) / np.diff(logs), [0.0]])
        at_zero = np.concatenate([over[:1], over]) - slope * np.concatenate([logs[:1], logs])
        # Running maximum over the knots: the price never falls as buffers grow.
        most = np.maximum.accumulate(cost.straight(np.exp(logs)) * np.exp(over))
        return cls(
            logs=tuple(logs.tolist()),
            at_zero=tuple(at_zero.tolist()),
            slope=tuple(slope.tolist()),
            least_s=(0.0, *most.tolist()),
            peak_s_per_byte=peak_s_per_byte,
        )

    def seconds(self, size: Any, straight: Any) -> Any:
        """Seconds of `size` bytes that take `straight` by the formula."""
        if isinstance(size, float):  # the search asks one at a time
            log = math.log(max(size, 1.0))
            i = bisect_right(self.logs, log)
            factor = math.exp(self.at_zero[i] + self.slope[i] * log)
            return max(straight * factor, self.least_s[i], size * self.peak_s_per_byte)
        logs = np.log(np.maximum(size, 1.0))
        at = np.searchsorted(self.logs, logs, side="right")
        factors = np.exp(np.take(self.at_zero, at) + np.take(self.slope, at) * logs)
        return np.maximum(np.maximum(straight * factors, np.take(self.least_s, at)), size * self.peak_s_per_byte)


def collective_seconds(kind: str, nbytes: Any, link: AxisLink) -> Any:
    """Seconds of one collective: a float, or an array as `nbytes` is one.

    kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv. nbytes: the whole buffer on one
    rank, in bytes: what is reduced or gathered (all shards together), what one rank scatters or sends.
    UnpricedError for another kind, or a link without bandwidth or constants; InputError for negative sizes.
    """
    size = np.asarray(nbytes, float) if np.ndim(nbytes) else float(nbytes)
    if np.size(size) and not np.min(size) >= 0:
        raise InputError(f"a collective cannot move {np.min(size):g} bytes")
    if link.measured is not None:
        own = communication_seconds(link.measured, _known(kind), link.ranks, nbytes)
        if own is not None:
            return own
    # Each algorithm has a price; NCCL's tuning takes the fastest for every size, so the minimum does.
    costs = algorithm_costs(kind, link)
    seconds = costs[0].seconds(size)
    for cost in costs[1:]:
        seconds = np.minimum(seconds, cost.seconds(size))
    return seconds if np.ndim(nbytes) else float(seconds)


def p2p_seconds(nbytes: Any, link: AxisLink) -> Any:
    """Seconds of one message between two ranks of the group. Errors as `collective_seconds`."""
    return collective_seconds("send_recv", nbytes, link)


def bound_seconds(kind: str, nbytes: Any, link: AxisLink) -> Any:
    """Least seconds that any algorithm needs at the links' peaks: no price is under it.

    A group in one node: bytes that each device must send (half of them where switches add up). Between nodes: bytes
    that must leave a node.
    What moves inside the nodes meanwhile can hide next to that.
    """
    known = _known(kind)
    traffic = _inside_traffic(known, link) if link.nodes == 1 else _least_out(known, link)
    return nbytes * traffic / _rate(known, link)


def copy_seconds(nbytes: Any, node: Node) -> Time:
    """Seconds of a copy between a device and pinned host memory, all devices of the node copying at once."""
    seconds = _copy_cost(node).seconds(np.asarray(nbytes, float))
    return seconds if np.ndim(nbytes) else float(seconds)


def copy_s_per_byte(node: Node) -> float:
    """Seconds a byte of such a copy, without what begins it: no copy is faster."""
    return _copy_cost(node).s_per_byte


def _copy_cost(node: Node) -> AlgorithmCost:
    rows = [row for row in collective_fits().copies if row.link in (node.host.name, node.host.kind)]
    if not rows:
        raise UnpricedError(f"no price for copies over {node.host.name!r} ({node.host.kind}) of node {node.name!r}")
    # A row for the link by name goes before one for its kind (False sorts first).
    row = min(rows, key=lambda r: r.link != node.host.name)
    # Several devices may share one host link (PCIe switch): all copy at once.
    rate = node.host.bytes_per_s / node.devices_per_host_link
    start = max(row.start_s, node.host.latency_s)
    return AlgorithmCost(start_s=start, s_per_byte=1 / (rate * row.share), ramp=row.ramp)


@cache
def algorithm_costs(kind: str, link: AxisLink) -> tuple[AlgorithmCost, ...]:
    """The algorithms that a collective may run as on a link."""
    known = _known(kind)
    if link.nodes == 1:
        return (inside_cost(_rows(collective_fits().inside, known, link)[0], known, link),)
    rows = _rows(collective_fits().across, known, link)
    return tuple(across_cost(row, known, link) for row in rows)


def inside_cost(row: InsideFit, kind: CollectiveKind, link: AxisLink) -> AlgorithmCost:
    """A group within one node, by the constants of a row."""
    ranks = 2 if kind == "send_recv" else link.ranks
    # Latency alone: a tree of ceil(log2 n) hops, twice for an all-reduce (reduce, then broadcast). A fitted start is
    # never below it.
    least = _passes(kind) * math.ceil(math.log2(ranks)) * link.inside_latency_s
    peak = _inside_traffic(kind, link) / _rate(kind, link)
    start, share, ramp = row.at(ranks)
    cost = AlgorithmCost(start_s=max(start, least), s_per_byte=peak / share, ramp=ramp)
    some = row.small_at(ranks)
    up_to = some[0] if some else 0.0
    if row.bend:
        # The bend of large buffers begins where small ones end.
        cost = replace(cost, bend=Bent.of(row.bend.logs(row.ranks, ranks, up_to, math.inf), cost, peak))
    if some is None or row.small is None:
        return cost
    _, start, share, ramp = some
    small = AlgorithmCost(start_s=max(start, least), s_per_byte=peak / share, ramp=ramp)
    if row.small.bend:
        small = replace(small, bend=Bent.of(row.small.bend.logs(row.ranks, ranks, 0.0, up_to), small, peak))
    return replace(cost, small=small, small_bytes=up_to)


def across_cost(row: AcrossFit, kind: CollectiveKind, link: AxisLink) -> AlgorithmCost:
    """One algorithm between nodes, on a link that spans several.

    Of an all-reduce's bytes, a ring sends 2(n−1)/n out of each node; a tree all of them twice, or once where there are
    but two nodes.
    """
    cost = _across_cost(row, row, kind, link)
    if row.small is None:
        return cost
    small = _across_cost(row, row.small, kind, link)
    return replace(cost, small=small, small_bytes=float(row.small.up_to_bytes * link.ranks))


def _across_cost(row: AcrossFit, by: AcrossFit | SmallAcrossFit, kind: CollectiveKind, link: AxisLink) -> AlgorithmCost:
    """Prices by the constants of the row itself, or by those of its small buffers."""
    passes, outer = _passes(kind), link.nodes - 1
    # A fitted step is never below the network's own latency.
    step = max(by.step_s, link.across_latency_s)
    if row.algorithm == "tree":
        # Double binary tree: each node sends all bytes up and down, half of them in each tree; with two nodes one
        # direction is enough.
        traffic = (1.0 if link.nodes == 2 else 2.0) * passes / 2
        start = by.start_s + math.ceil(math.log2(link.nodes)) * step
    elif row.algorithm == "ring":
        # Ring: each rank sends (n - 1)/n of the buffer once (all-gather, reduce-scatter) or twice (all-reduce).
        traffic = 1.0 if kind == "broadcast" else passes * (link.ranks - 1) / link.ranks
        # Steps of a ring: nodes - 1 hops over the network, and one inside a node for every rank that is not the first
        # there.
        start = by.start_s + passes * (outer * step + (link.ranks - link.nodes) * by.inside_step_s)
    else:
        traffic = _least_out(kind, link)
        # Direct: one step to each other node if the bytes differ by peer (all-to-all), one in all otherwise.
        start = by.start_s + (outer if kind == "all_to_all" else 1) * step
    return AlgorithmCost(
        start_s=start,
        s_per_byte=traffic / (_rate(kind, link) * by.share),
        ramp=by.ramp,
        floor_s_per_byte=_inside_s_per_byte(row, kind, link),
    )


def _inside_s_per_byte(row: AcrossFit, kind: CollectiveKind, link: AxisLink) -> float:
    """Wire time within nodes of each byte of a collective between them.

    A tree adds up within a node as a lone node would; a ring passes all bytes on, and reaches what an all-gather does.
    """
    k = link.ranks_per_node
    if k < 2 or kind == "send_recv":
        return 0.0
    inner: CollectiveKind = kind
    if row.algorithm == "tree":
        # A tree reduces inside each node as a collective of its k ranks would.
        traffic = _inside_traffic(kind, replace(link, ranks=k))
    elif row.algorithm == "ring":
        # A ring passes everything through every rank, so the inside link carries the ring's traffic too.
        inner = "all_gather" if kind == "all_reduce" else kind
        traffic = 1.0 if kind == "broadcast" else _passes(kind) * (link.ranks - 1) / link.ranks
    else:
        # Direct: of a rank's buffer the parts for the k - 1 peers of its node stay inside.
        traffic = (k - 1) / link.ranks
    # Only the share of the peak: start and ramp are those of the algorithm between nodes.
    _, share, _ = _rows(collective_fits().inside, inner, link)[0].at(k)
    return traffic / (link.inside_bytes_per_s * share)


def _inside_traffic(kind: CollectiveKind, link: AxisLink) -> float:
    """Bytes that each device sends, for each byte of the buffer.

    Where switches add up, an all-reduce reads each byte once and writes a shard of the sum to all: (n+1)/n.
    """
    n = link.ranks
    if kind == "all_reduce":
        # Ring all-reduce: reduce-scatter and all-gather, (n - 1)/n of the buffer each.
        ring = 2 * (n - 1) / n
        # With 2 ranks the ring sends less than the switch, (n + 1)/n, and is taken.
        return min(ring, (n + 1) / n) if link.switch_sums else ring
    return 1.0 if kind in ("broadcast", "send_recv") else (n - 1) / n


def _least_out(kind: CollectiveKind, link: AxisLink) -> float:
    """Bytes that must leave a node, for each byte of the buffer."""
    n, nodes, k = link.ranks, link.nodes, link.ranks_per_node
    # k ranks of a node each send the shares of the n - k ranks elsewhere.
    if kind == "all_to_all":
        return k * (n - k) / n
    # Hierarchically, only one copy of the buffer leaves a node: (nodes - 1)/nodes of it, twice for an all-reduce.
    return 1.0 if kind in ("broadcast", "send_recv") else _passes(kind) * (nodes - 1) / nodes


def _passes(kind: CollectiveKind) -> int:
    return 2 if kind == "all_reduce" else 1


def _known(kind: str) -> CollectiveKind:
    for known in KINDS:
        if kind == known:
            return known
    raise UnpricedError(f"no price for collective {kind!r}{nearest(kind, KINDS)}; known are {', '.join(KINDS)}")


def _rate(kind: CollectiveKind, link: AxisLink) -> float:
    """Peak of what bounds the collective: between nodes if it spans any, for a message what one rank can send."""
    across = link.nodes > 1
    rate = link.across_bytes_per_s if across else link.inside_bytes_per_s
    if kind == "send_recv":
        rate = link.pair_bytes_per_s
    if not rate > 0:
        name = link.across_name if across else link.inside_name
        raise UnpricedError(f"link {name!r} has no bandwidth; give bytes_per_s in the cluster")
    return rate


F = TypeVar("F", InsideFit, AcrossFit)


def _rows(fits: tuple[F, ...], kind: CollectiveKind, link: AxisLink) -> tuple[F, ...]:
    """Rows for the link by its name, else by its kind; those for its generation before those for all."""
    across = isinstance(fits[0], AcrossFit)
    name, family = (link.across_name, link.across_kind) if across else (link.inside_name, link.inside_kind)
    # The first pair with any row wins; rows of several pairs are never mixed.
    for link_name in (name, family):
        for arch in (link.arch, ""):
            matching = tuple(
                row for row in fits if (row.link, row.arch) == (link_name, arch) and kind in row.collectives
            )
            if matching:
                return matching
    known = ", ".join(sorted({row.link for row in fits}))
    raise UnpricedError(f"no price for {kind} over link {name!r} of kind {family!r}; there are rows for {known}")
