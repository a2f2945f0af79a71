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
"""Logarithms at the knots of a line."""

FADE = 4.0
"""Times the largest size measured, or a part of the least: where the formula stands alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bend:
    """What measured times of one system are over the formula: lines in logarithms between a few sizes."""

    at_bytes: tuple[float, ...]
    """The sizes, ascending."""
    over: tuple[tuple[float, ...], ...]
    """The factor at each: one list for all sizes of group, or one for each."""

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
        log_n, known = math.log2(n), np.log2(ranks)
        lists = np.log(self.over)
        factors = lists[0] if len(lists) == 1 else np.array([np.interp(log_n, known, column) for column in lists.T])
        sizes = np.log(self.at_bytes)
        ends = [above or self.at_bytes[0] / FADE, up_to if up_to < math.inf else self.at_bytes[-1] * FADE]
        low, high = np.log(ends).tolist()
        if low >= high:
            return (low,), (0.0,)
        inner = (sizes > low) & (sizes < high)
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
    """As in InsideFit."""
    share: tuple[float, ...]
    """As in InsideFit."""
    ramp: tuple[float, ...]
    """As in InsideFit."""
    bend: Bend | None = None
    """As in InsideFit."""

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
    """Those that the row is for."""
    ranks: tuple[int, ...]
    """Sizes of group, ascending; between them constants are interpolated over log2, beyond them `start_s` goes on with
    its last slope and the others stay."""
    start_s: tuple[Seconds, ...]
    """Of an empty collective."""
    share: tuple[float, ...]
    """Of the least traffic's peak, for large messages."""
    ramp: tuple[float, ...]
    """Weight of sqrt(start·wire)."""
    provenance: Provenance
    """Of this row."""
    bend: Bend | None = None
    """What the formula leaves; None: nothing was measured, or is left."""
    small: SmallFit | None = None
    """Small buffers; None: one protocol for all."""
    arch: str = ""
    """Only this generation of devices; empty: all."""

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
    """As in AcrossFit."""
    step_s: Seconds
    """As in AcrossFit."""
    inside_step_s: Seconds
    """As in AcrossFit."""
    share: float
    """As in AcrossFit."""
    ramp: float
    """As in AcrossFit."""

    def __post_init__(self) -> None:
        _check("small buffers", (self.start_s, self.step_s, self.inside_step_s), (self.share,), (self.ramp,))
        if not self.up_to_bytes > 0:
            raise InputError(f"small buffers: up_to_bytes must be positive, got {self.up_to_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcrossFit:
    """What one algorithm reaches of a network between nodes."""

    link: str
    """As in InsideFit."""
    collectives: tuple[CollectiveKind, ...]
    """Those that the row is for."""
    algorithm: Literal["tree", "ring", "direct"]
    """tree: double binary tree over nodes. ring: through all ranks. direct: every rank to every other."""
    start_s: Seconds
    """Of an empty collective in one node."""
    step_s: Seconds
    """More for each doubling of nodes (tree) or each node after the first (ring: in each direction)."""
    inside_step_s: Seconds
    """More for each rank that is not the first of its node (ring only)."""
    share: float
    """Of what a group's ports carry, for large messages."""
    ramp: float
    """Weight of sqrt(start·wire)."""
    provenance: Provenance
    """Of this row."""
    small: SmallAcrossFit | None = None
    """Small buffers; None: one protocol for all."""
    arch: str = ""
    """As in InsideFit."""

    def __post_init__(self) -> None:
        what = f"{self.link} {self.algorithm} {', '.join(self.collectives)}"
        _check(what, (self.start_s, self.step_s, self.inside_step_s), (self.share,), (self.ramp,))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFit:
    """What copies between host and device reach of the host link."""

    link: str
    """As in InsideFit."""
    start_s: Seconds
    """Of an empty copy."""
    share: float
    """Of the peak, from pinned memory."""
    ramp: float
    """Weight of sqrt(start·wire)."""
    provenance: Provenance
    """Of this row."""

    def __post_init__(self) -> None:
        _check(f"copies over {self.link}", (self.start_s,), (self.share,), (self.ramp,))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFile:
    """The file of collective prices: all its rows."""

    SCHEMA: ClassVar[str] = "gnomon.collectives/1"

    inside: tuple[InsideFit, ...]
    """Within a node."""
    across: tuple[AcrossFit, ...]
    """Between nodes."""
    copies: tuple[CopyFit, ...]
    """Between host and device."""


@cache
def collective_fits() -> CollectiveFile:
    """The rows of `collectives.toml`."""
    return schema.load_packaged(CollectiveFile, Path(__file__).with_name("collectives.toml"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One algorithm on one link: seconds of `nbytes`."""

    start_s: float
    """Of an empty collective."""
    s_per_byte: float
    """Wire time of each byte."""
    ramp: float
    """Weight of sqrt(start·wire)."""
    floor_s_per_byte: float = 0.0
    """Wire time of each byte on another link that works at the same time."""
    bend: Bent | None = None
    """What measured times are over this."""
    small: Cost | None = None
    """Of buffers up to `small_bytes`."""
    small_bytes: float = 0.0
    """Where the switch is; larger buffers never take less than those of this size."""

    def straight(self, size: Any) -> Any:
        """Seconds by the formula alone."""
        wire = size * self.s_per_byte
        seconds = self.start_s + wire + self.ramp * (self.start_s * wire) ** 0.5
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
        least = self.small.seconds(self.small_bytes)
        if isinstance(size, float):
            return max(seconds, least)
        return np.where(size <= self.small_bytes, self.small.seconds(size), np.maximum(seconds, least))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bent:
    """A bend of one cost: no larger buffer takes less, and none takes less than the link's peak."""

    logs: Line
    """Of sizes; between them and beyond them follows what holds there."""
    at_zero: Line
    """Of the line of log factors over log sizes: its value at 0."""
    slope: Line
    """And its slope."""
    least_s: tuple[Seconds, ...]
    """No larger buffer takes less than those of the sizes before."""
    peak_s_per_byte: float
    """Least seconds of each byte."""

    @classmethod
    def of(cls, line: tuple[Line, Line], cost: Cost, peak_s_per_byte: float) -> Bent:
        """line: logs of sizes and of factors. Between two sizes seconds are convex in logarithms, so the most that
        they have come to is at one of both."""
        logs, over = (np.array(values) for values in line)
        slope = np.concatenate([[0.0], np.diff(over) / np.diff(logs), [0.0]])
        at_zero = np.concatenate([over[:1], over]) - slope * np.concatenate([logs[:1], logs])
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


def _copy_cost(node: Node) -> Cost:
    rows = [row for row in collective_fits().copies if row.link in (node.host.name, node.host.kind)]
    if not rows:
        raise UnpricedError(f"no price for copies over {node.host.name!r} ({node.host.kind}) of node {node.name!r}")
    row = min(rows, key=lambda r: r.link != node.host.name)
    rate = node.host.bytes_per_s / node.devices_per_host_link
    start = max(row.start_s, node.host.latency_s)
    return Cost(start_s=start, s_per_byte=1 / (rate * row.share), ramp=row.ramp)


@cache
def algorithm_costs(kind: str, link: AxisLink) -> tuple[Cost, ...]:
    """The algorithms that a collective may run as on a link."""
    known = _known(kind)
    if link.nodes == 1:
        return (inside_cost(_rows(collective_fits().inside, known, link)[0], known, link),)
    rows = _rows(collective_fits().across, known, link)
    return tuple(across_cost(row, known, link) for row in rows)


def inside_cost(row: InsideFit, kind: CollectiveKind, link: AxisLink) -> Cost:
    """A group within one node, by the constants of a row."""
    ranks = 2 if kind == "send_recv" else link.ranks
    least = _passes(kind) * math.ceil(math.log2(ranks)) * link.inside_latency_s
    peak = _inside_traffic(kind, link) / _rate(kind, link)
    start, share, ramp = row.at(ranks)
    cost = Cost(start_s=max(start, least), s_per_byte=peak / share, ramp=ramp)
    some = row.small_at(ranks)
    up_to = some[0] if some else 0.0
    if row.bend:
        cost = replace(cost, bend=Bent.of(row.bend.logs(row.ranks, ranks, up_to, math.inf), cost, peak))
    if some is None or row.small is None:
        return cost
    _, start, share, ramp = some
    small = Cost(start_s=max(start, least), s_per_byte=peak / share, ramp=ramp)
    if row.small.bend:
        small = replace(small, bend=Bent.of(row.small.bend.logs(row.ranks, ranks, 0.0, up_to), small, peak))
    return replace(cost, small=small, small_bytes=up_to)


def across_cost(row: AcrossFit, kind: CollectiveKind, link: AxisLink) -> Cost:
    """One algorithm between nodes, on a link that spans several.

    Of an all-reduce's bytes, a ring sends 2(n−1)/n out of each node; a tree all of them twice, or once where there are
    but two nodes.
    """
    cost = _across_cost(row, row, kind, link)
    if row.small is None:
        return cost
    small = _across_cost(row, row.small, kind, link)
    return replace(cost, small=small, small_bytes=float(row.small.up_to_bytes * link.ranks))


def _across_cost(row: AcrossFit, by: AcrossFit | SmallAcrossFit, kind: CollectiveKind, link: AxisLink) -> Cost:
    """Prices by the constants of the row itself, or by those of its small buffers."""
    passes, outer = _passes(kind), link.nodes - 1
    step = max(by.step_s, link.across_latency_s)
    if row.algorithm == "tree":
        traffic = (1.0 if link.nodes == 2 else 2.0) * passes / 2
        start = by.start_s + math.ceil(math.log2(link.nodes)) * step
    elif row.algorithm == "ring":
        traffic = 1.0 if kind == "broadcast" else passes * (link.ranks - 1) / link.ranks
        start = by.start_s + passes * (outer * step + (link.ranks - link.nodes) * by.inside_step_s)
    else:
        traffic = _least_out(kind, link)
        start = by.start_s + (outer if kind == "all_to_all" else 1) * step
    return Cost(
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
        traffic = _inside_traffic(kind, replace(link, ranks=k))
    elif row.algorithm == "ring":
        inner = "all_gather" if kind == "all_reduce" else kind
        traffic = 1.0 if kind == "broadcast" else _passes(kind) * (link.ranks - 1) / link.ranks
    else:
        traffic = (k - 1) / link.ranks
    _, share, _ = _rows(collective_fits().inside, inner, link)[0].at(k)
    return traffic / (link.inside_bytes_per_s * share)


def _inside_traffic(kind: CollectiveKind, link: AxisLink) -> float:
    """Bytes that each device sends, for each byte of the buffer.

    Where switches add up, an all-reduce reads each byte once and writes a shard of the sum to all: (n+1)/n.
    """
    n = link.ranks
    if kind == "all_reduce":
        ring = 2 * (n - 1) / n
        return min(ring, (n + 1) / n) if link.switch_sums else ring
    return 1.0 if kind in ("broadcast", "send_recv") else (n - 1) / n


def _least_out(kind: CollectiveKind, link: AxisLink) -> float:
    """Bytes that must leave a node, for each byte of the buffer."""
    n, nodes, k = link.ranks, link.nodes, link.ranks_per_node
    if kind == "all_to_all":
        return k * (n - k) / n
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
    for wanted in (name, family):
        for arch in (link.arch, ""):
            matching = tuple(row for row in fits if (row.link, row.arch) == (wanted, arch) and kind in row.collectives)
            if matching:
                return matching
    known = ", ".join(sorted({row.link for row in fits}))
    raise UnpricedError(f"no price for {kind} over link {name!r} of kind {family!r}; there are rows for {known}")
