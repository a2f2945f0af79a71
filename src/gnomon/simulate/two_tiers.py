"""A step whose tensors do not all fit in the fast tier of memory: what moves when, and what the step then takes.

A row runs once all tensors that it uses are in the fast tier; a link to the slow tier reads and writes at once, both
overlapped with compute. Three policies: `static` pins the tensors that are used most for their size and moves the
others for every use; `least_recently_used` moves on demand; `planned` is Sentinel's: the step is cut into intervals of
rows, and while one computes the tensors of the next are read, in place of those whose next use is farthest. Tensors
that live inside one row never move: they have a pool of their own. Times are of the steady state. Leaves out where a
trace comes from (`prediction.tensors`), and use of a tensor where it lies in the slow tier.

Source: Ren et al. 2021, "Sentinel: Efficient Tensor Migration and Allocation on Heterogeneous Memory Systems for Deep
Learning" (HPCA); eviction by next use is Belady's (1966).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from gnomon.errors import PlanError
from gnomon.units import show_bytes

STEPS = 3
"""The number of steps that are played; the last is measured."""
INTERVALS = (1, 2, 4, 8)
"""Numbers of rows in an interval that are tried."""
AHEAD = (0, 1, 2, 4, 8)
"""Numbers of intervals read ahead that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTensor:
    """A tensor, which moves as one."""

    name: str
    """Name of the tensor."""
    nbytes: float
    """Its bytes."""
    carried: bool
    """Whether it lives from step to step; otherwise from its first use in a step to its last."""


@dataclass(frozen=True, kw_only=True)
class TierTrace:
    """What one step uses: rows that run one after the other, and tensors."""

    tensors: tuple[TierTensor, ...]
    """The tensors that rows use."""
    seconds: tuple[float, ...]
    """Seconds of each row, with everything in the fast tier."""
    uses: tuple[tuple[int, ...], ...]
    """Indices of the tensors that each row uses, each once."""
    writes: tuple[frozenset[int], ...]
    """The tensors among them that the row makes or changes."""
    inside: float = 0.0
    """Bytes of the pool for tensors that live inside one row."""

    @cached_property
    def rows_of(self) -> tuple[tuple[int, ...], ...]:
        """Maps each tensor to the rows that use it, in order."""
        rows: list[list[int]] = [[] for _ in self.tensors]
        for row, used in enumerate(self.uses):
            for tensor in used:
                rows[tensor].append(row)
        return tuple(map(tuple, rows))

    @cached_property
    def peak_bytes(self) -> float:
        """The most bytes that live at once: what the fast tier needs for nothing to move."""
        return self.most_at_once(range(len(self.tensors))) + self.inside

    def next_use(self, tensor: int, after: int) -> int:
        """Rows from row `after` until the tensor is used again, in the next step if need be."""
        # `bisect_right`: a use in row `after` itself is over.
        rows = self.rows_of[tensor]
        place = bisect_right(rows, after)
        return rows[0] + len(self.seconds) - after if place == len(rows) else rows[place] - after

    def most_at_once(self, chosen: Collection[int]) -> float:
        """The most bytes of these tensors that live at once."""
        # A sweep over rows: bytes are added at a tensor's first use and taken off after its last.
        change, always = [0.0] * (len(self.seconds) + 1), 0.0
        for tensor in chosen:
            rows, nbytes = self.rows_of[tensor], self.tensors[tensor].nbytes
            if self.tensors[tensor].carried:
                always += nbytes
            elif rows:
                change[rows[0]] += nbytes
                change[rows[-1] + 1] -= nbytes
        return always + max(accumulate(change))

    def bytes_of(self, tensors: Iterable[int]) -> float:
        """Sums the bytes of some tensors."""
        return sum(self.tensors[tensor].nbytes for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bandwidth between the two tiers, in bytes a second."""

    read: float
    """From the slow tier to the fast one."""
    write: float
    """From the fast tier to the slow one."""


class TierMove(NamedTuple):
    """What is begun before a row."""

    row: int
    """The row's number in all steps that are played, from 0."""
    what: Literal["make", "read", "write", "drop"]
    """What happens: make it in the fast tier, read it into it, write it out, or leave it: its copy in the slow tier is
    as good."""
    tensor: int
    """Index of the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """What a step takes under a policy."""

    step_s: float
    """Seconds of a step."""
    read_bytes: float
    """Bytes read into the fast tier in a step."""
    written_bytes: float
    """Bytes written out of it in a step."""
    peak_bytes: float
    """The most bytes in the fast tier, the pool included."""
    interval: int = 1
    """Rows of an interval, under `planned`."""
    ahead: int = 0
    """Intervals that are read ahead, under `planned`."""

    moves: tuple[TierMove, ...] = field(default=(), repr=False)
    """The moves of all STEPS, in order, but for tensors that die."""

    @property
    def moved_bytes(self) -> float:
        """Bytes moved between the tiers, both ways."""
        return self.read_bytes + self.written_bytes


class _Fast:
    """The fast tier, and the two directions of the link, while steps are played."""

    def __init__(self, trace: TierTrace, link: Link, capacity: float) -> None:
        self.trace, self.link, self.room = trace, link, capacity - trace.inside
        largest = max((trace.bytes_of(used) for used in trace.uses), default=0.0)
        if largest > self.room:
            raise PlanError(
                f"a row uses {show_bytes(largest + trace.inside)} at once, and the fast tier has "
                f"{show_bytes(capacity)}; give it more, or take smaller microbatches"
            )
        self.there: dict[int, float] = {}
        """Maps a tensor in the fast tier to when it is there; the one used longest ago comes first."""
        self.changed: set[int] = set()
        """The tensors whose copy in the slow tier is old, or is none."""
        # Tensors that have contents: carried ones from the start, others from their first use in a step to their last.
        # What is not born is made in the fast tier and needs no read.
        self.born: set[int] = {number for number, tensor in enumerate(trace.tensors) if tensor.carried}
        self.used = self.most = 0.0
        self.reads_until = self.writes_until = self.room_at = 0.0
        self.written: dict[int, float] = {}
        self.moves: list[TierMove] = []
        self.row = 0
        """The row before which moves are begun."""
        self.read_bytes = self.written_bytes = 0.0

    def leave(self, tensor: int, now: float) -> None:
        """Gives its room up, which is there once it is written, if it must be."""
        nbytes = self.trace.tensors[tensor].nbytes
        del self.there[tensor]
        self.used -= nbytes
        self.moves.append(TierMove(self.row, "write" if tensor in self.changed else "drop", tensor))
        if tensor in self.changed:
            self.changed.discard(tensor)
            # Writes follow each other on their direction of the link; whoever takes the room waits for the last of
            # them.
            self.writes_until = max(self.writes_until, now) + nbytes / self.link.write
            self.written[tensor] = self.room_at = self.writes_until
            self.written_bytes += nbytes

    def make_room(self, nbytes: float, now: float, locked: Collection[int], key: Callable[[int], float]) -> bool:
        """Evicts those of the largest key until so many bytes are free, if that can be; whether they are."""
        others = [tensor for tensor in self.there if tensor not in locked]
        # Even with all evictable tensors gone there would be no room.
        if self.used - self.trace.bytes_of(others) + nbytes > self.room:
            return False
        for tensor in sorted(others, key=key, reverse=True) if self.used + nbytes > self.room else ():
            self.leave(tensor, now)
            if self.used + nbytes <= self.room:
                break
        return True

    def enter(self, tensor: int, now: float) -> None:
        """Reads it, or makes it, where room is free or will be."""
        nbytes = self.trace.tensors[tensor].nbytes
        self.used += nbytes
        self.most = max(self.most, self.used)
        self.moves.append(TierMove(self.row, "read" if tensor in self.born else "make", tensor))
        if tensor not in self.born:
            self.born.add(tensor)
            # Made anew it needs no read, but its room may still be on its way out.
            self.there[tensor] = max(now, self.room_at)
            return
        # A read waits for the link, for room that is being written out, and for its own copy to be written.
        start = max(now, self.reads_until, self.room_at, self.written.get(tensor, 0.0))
        self.reads_until = self.there[tensor] = start + nbytes / self.link.read
        self.read_bytes += nbytes

    def finish_row(self, row: int) -> None:
        """A row is over: what it changed, and what dies with it."""
        for tensor in self.trace.uses[row]:
            if not self.trace.tensors[tensor].carried and self.trace.rows_of[tensor][-1] == row:
                self.used -= self.trace.tensors[tensor].nbytes
                del self.there[tensor]
                self.changed.discard(tensor)
                self.born.discard(tensor)
                self.written.pop(tensor, None)
            else:
                # Dictionaries keep the order of insertion: popping and adding puts it last, so the first is the least
                # recently used.
                self.there[tensor] = self.there.pop(tensor)  # used last
                if tensor in self.trace.writes[row]:
                    self.changed.add(tensor)

    def migration(self, step_s: float, before: tuple[float, float], interval: int = 1, ahead: int = 0) -> Migration:
        """Sums up the step since `before`, the bytes (read, written) then."""
        return Migration(
            step_s=step_s,
            read_bytes=self.read_bytes - before[0],
            written_bytes=self.written_bytes - before[1],
            peak_bytes=self.most + self.trace.inside,
            interval=interval,
            ahead=ahead,
            moves=tuple(self.moves),
        )


def least_recently_used(trace: TierTrace, link: Link, capacity: float) -> Migration:
    """Tensors are read when a row asks for them, in place of those that were used longest ago. PlanError where a row
    alone does not fit."""
    return _on_demand(trace, link, capacity, frozenset())


def static(trace: TierTrace, link: Link, capacity: float) -> Migration:
    """Plans a migration in which some tensors stay; the others come for each use and go after it. PlanError where a row
    alone does not fit."""
    # Moves that pinning saves: one read a use (but the first of what is made anew) and one write for each row that
    # changes it.
    moves = [len(rows) - (not tensor.carried) + sum(number in trace.writes[row] for row in rows)
             for number, (tensor, rows) in enumerate(zip(trace.tensors, trace.rows_of, strict=True))]  # fmt: skip
    pinned: set[int] = set()
    room = capacity - trace.inside
    for tensor in sorted(range(len(trace.tensors)), key=lambda tensor: -moves[tensor]):
        several = pinned | {tensor}
        # What is not pinned must fit row by row next to what is.
        staged = max(trace.bytes_of(t for t in used if t not in several) for used in trace.uses)
        if trace.most_at_once(several) + staged <= room:
            pinned = several
    return _on_demand(trace, link, capacity, frozenset(range(len(trace.tensors))) - pinned)


def _on_demand(trace: TierTrace, link: Link, capacity: float, passing: Collection[int]) -> Migration:
    """Plays a migration in which tensors come when they are used. passing: those that go after each use."""
    fast, now, began, before = _Fast(trace, link, capacity), 0.0, 0.0, (0.0, 0.0)
    for step in range(STEPS):
        if step == STEPS - 1:
            began, before = now, (fast.read_bytes, fast.written_bytes)
        for row, used in enumerate(trace.uses):
            fast.row = step * len(trace.uses) + row
            # Larger age: used longer ago, evicted first.
            age = {tensor: -place for place, tensor in enumerate(fast.there)}
            for tensor in used:
                if tensor not in fast.there:
                    # This cannot fail: all that a row uses fits together (`_Fast` has checked), and everything else may
                    # go.
                    fast.make_room(trace.tensors[tensor].nbytes, now, used, age.__getitem__)
                    fast.enter(tensor, now)
            now = max([now, *(fast.there[tensor] for tensor in used)]) + trace.seconds[row]
            fast.finish_row(row)
            # What leaves after a row is a move before the next one.
            fast.row += 1
            for tensor in used:
                if tensor in passing and tensor in fast.there:
                    fast.leave(tensor, now)
    return fast.migration(now - began, before)


def plan_migration(
    trace: TierTrace, link: Link, capacity: float, intervals: Sequence[int] = INTERVALS, ahead: Sequence[int] = AHEAD
) -> Migration:
    """Sentinel's migration by the intervals, of those given, under which the step is shortest. intervals: rows of one.
    ahead: how many are read ahead; 0: each when it begins. PlanError where a row alone does not fit."""
    tried = [_by_intervals(trace, link, capacity, rows, count) for rows in intervals for count in ahead]
    return min((one for one in tried if one is not None), key=lambda one: (round(one.step_s, 9), one.moved_bytes))


def _by_intervals(trace: TierTrace, link: Link, capacity: float, length: int, ahead: int) -> Migration | None:
    """None where the tensors of an interval do not fit at once; of one row they do."""
    rows = [range(first, min(first + length, len(trace.uses))) for first in range(0, len(trace.uses), length)]
    needs = [tuple(dict.fromkeys(tensor for row in part for tensor in trace.uses[row])) for part in rows]
    fast, now, began, before = _Fast(trace, link, capacity), 0.0, 0.0, (0.0, 0.0)
    if max(map(trace.bytes_of, needs)) > fast.room:
        return None
    for step in range(STEPS):
        if step == STEPS - 1:
            began, before = now, (fast.read_bytes, fast.written_bytes)
        for number, part in enumerate(rows):
            fast.row = step * len(trace.uses) + part[0]
            # Belady: evict what is used farthest in the future, counted from the row before this interval.
            _bring(fast, needs[number], (), now, part[0] - 1)
            now = max([now, *(fast.there[tensor] for tensor in needs[number])])
            busy = set(needs[number])
            # Reading ahead stops at the first interval without room, and never comes round to this interval itself.
            for later in range(number + 1, min(number + 1 + ahead, number + len(rows))):
                needed = needs[later % len(rows)]
                if not _bring(fast, needed, busy, now, part[-1]):
                    break
                busy.update(needed)
            now += sum(trace.seconds[row] for row in part)
            for row in part:
                fast.finish_row(row)
    return fast.migration(now - began, before, length, ahead)


def _bring(fast: _Fast, needed: Sequence[int], busy: Collection[int], now: float, row: int) -> bool:
    """Reads what is wanted, in order, as far as there is room next to what is busy; returns whether all of it had room.
    row: the last one before."""
    locked = {*needed, *busy}
    for tensor in needed:
        if tensor in fast.there:
            continue
        # Only next uses after `row` count: those of the interval that is being filled are locked anyway.
        if not fast.make_room(
            fast.trace.tensors[tensor].nbytes, now, locked, lambda other: fast.trace.next_use(other, row)
        ):
            return False
        fast.enter(tensor, now)
    return True
