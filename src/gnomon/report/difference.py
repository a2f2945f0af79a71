"""What `gnomon compare` says: where two Timelines of one Program differ, and which price is the most wrong.

`compare(predicted, measured)` returns a `Comparison` whose rows of each worker add up to the difference of the steps
to the bit; `comparison_text` prints it. A price is what one action was expected to take: the time that holds a stream,
or that is waited for because of a communication. Bubbles and launches follow from others and are no prices. Left out:
which single spans moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnomon.errors import InputError
from gnomon.report.prediction import WORDS
from gnomon.report.tables import Column, number, signed, table, wrapped
from gnomon.timeline import (
    ROLES,
    Timeline,
    memory_curve,
    of_buffers,
    peaks,
    seen_buffers,
)
from gnomon.timeline.difference import Difference, MemoryChange, TimeChange, difference

ROWS = 12
"""Rows shown of a worker; the smallest changes are added up in one more."""

SAME = 0.01
"""Share of a step below which two steps are the same: no price is then said to be wrong."""

SHOWN = 0.001
"""Share below which a difference would be shown as 0.0 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One kind of action on one worker, in both timelines."""

    worker: str
    """As in `class 0`."""
    action: str
    """Kind of action."""
    waits: bool
    """Another stream has it, and this is the waiting for it."""
    count: int
    """Times a step."""
    predicted_s: float
    """Seconds of all of them."""
    measured_s: float
    """Likewise."""

    @property
    def seconds(self) -> float:
        """Seconds that were measured beyond those predicted."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two timelines of one Program and the places where they differ."""

    names: tuple[str, str]
    """What the two are called: predicted and measured, or their files."""
    difference: Difference
    """Change by change."""
    peak_bytes: Mapping[str, tuple[float, float]]
    """Worker -> peak in both, of the classes that both tell of; empty where one has no memory."""
    left_out: Mapping[str, tuple[float, float]]
    """Class of memory that only one of the two tells of -> its most bytes on any worker in both."""
    prices: tuple[Price, ...]
    """Most wrong first."""

    @property
    def largest(self) -> Price | None:
        """The price that is most wrong; None when the steps agree to SAME."""
        wrong = [price for price in self.prices if abs(price.seconds) > SAME * self.difference.after_s]
        return wrong[0] if wrong else None

    @property
    def sentence(self) -> str:
        """The largest wrong price, for a stranger."""
        price = self.largest
        if price is None:
            return f"no price is wrong by more than {SAME:.0%} of the step"
        count = max(1, price.count)
        before, after = number(price.predicted_s / count * 1e3), number(price.measured_s / count * 1e3)
        what = f"waiting for {price.action}" if price.waits else price.action
        word = WORDS.get(price.action)
        named = f"{what} ({word})" if word else what
        gap = self.difference.seconds
        # A share of the gap is only said where the price explains it: one of the other sign, or far larger, is made up
        # for by others.
        if 0 < price.seconds / gap <= 1.5 if gap else False:
            share = f"{price.seconds / gap:.0%} of the gap"
        else:
            share = f"{abs(price.seconds) / self.difference.after_s:.0%} of the step, which others make up for"
        of_them = f"{count} of them" if count > 1 else "one of them"
        return (
            f"{named} on {price.worker}: {after} ms each {self.names[1]}, {before} {self.names[0]}; {of_them} a step: "
            f"{share}"
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        d = self.difference
        return {
            "schema": "gnomon.comparison/1",
            "names": list(self.names),
            "step_s": [d.before_s, d.after_s],
            "difference_s": d.seconds,
            "largest": self.sentence,
            "changes": [
                {
                    "worker": c.worker,
                    "part": c.part,
                    "busy": c.busy,
                    "action": c.action,
                    "op": c.path,
                    "s": [c.before_s, c.after_s],
                }
                for c in d.changes
            ],
            "peak_bytes": {worker: list(pair) for worker, pair in self.peak_bytes.items()},
            "memory": [
                {"worker": m.worker, "class": m.buffer, "bytes": [m.before_bytes, m.after_bytes]} for m in d.memory
            ],
            "memory_left_out": {name: list(pair) for name, pair in self.left_out.items()},
        }


def compare(one: Timeline, two: Timeline, names: tuple[str, str] = ("first", "second")) -> Comparison:
    """Compares two timelines of one Program; a prediction comes first, whichever is given first.

    names: what to call them, if both are predicted or both measured. InputError if they are of different Programs:
    other workers, other actions.
    """
    if one.clock != two.clock:
        one, two = (one, two) if one.clock == "predicted" else (two, one)
        names = ("predicted", "measured")
    _check_same(one, two)
    pairs_of_class: dict[str, tuple[float, float]] = {}
    left_out: dict[str, tuple[float, float]] = {}
    if one.memory is not None and two.memory is not None:
        both = set(seen_buffers(one)) & set(seen_buffers(two))
        for name in dict.fromkeys((*one.buffers, *two.buffers)):
            most = _most(one, name), _most(two, name)
            if name not in both and any(most):
                left_out[name] = most
        one, two = of_buffers(one, both), of_buffers(two, both)
        pairs = zip(peaks(one), peaks(two), strict=True)
        pairs_of_class = {before.worker: (before.bytes, after.bytes) for before, after in pairs}
    compared = difference(one, two)
    return Comparison(
        names=names, difference=compared, peak_bytes=pairs_of_class, left_out=left_out, prices=_prices(one, compared)
    )


def _most(timeline: Timeline, buffer: str) -> float:
    """Most bytes of a class on any worker; 0 where it is not named."""
    if buffer not in timeline.buffers:
        return 0.0
    return max(float(memory_curve(timeline, worker.name, buffer).bytes.max()) for worker in timeline.workers)


def _actions(timeline: Timeline) -> dict[tuple[str, str], int]:
    """(worker, kind) -> number of spans of computing. What is priced at nothing (RESHARD) still takes time when run."""
    s = timeline.spans
    # A span with a path is an op within an action; without (-1) it is the action.
    chosen = np.flatnonzero((s.role == ROLES.index("compute")) & (s.path < 0))
    counts: dict[tuple[str, str], int] = {}
    for worker, kind in zip(s.worker[chosen].tolist(), s.kind[chosen].tolist(), strict=True):
        key = (timeline.workers[worker].name, timeline.kinds[kind])
        counts[key] = counts.get(key, 0) + 1
    return counts


def _check_same(one: Timeline, two: Timeline) -> None:
    before, after = ({w.name: w.count for w in t.workers} for t in (one, two))
    if before != after:
        a, b = (", ".join(f"{name} ({count})" for name, count in counts.items()) for counts in (before, after))
        raise InputError(f"these are not of one plan: the first has workers {a}, the second {b} (ranks of each)")
    first, second = _actions(one), _actions(two)
    for worker, kind in sorted(first.keys() | second.keys()):
        of_one, of_two = first.get((worker, kind), 0), second.get((worker, kind), 0)
        if of_one != of_two:
            raise InputError(
                f"these are not of one plan: {worker} has {of_one} x {kind} in the first and {of_two} in the second; "
                f"compare timelines of the same plan and batch"
            )


def _prices(one: Timeline, compared: Difference) -> tuple[Price, ...]:
    sums: dict[tuple[str, str, bool], list[float]] = {}
    for change in compared.changes:
        # Other idle time is no price: it follows from the prices of what is waited for.
        if change.busy or change.part == "communication":
            total = sums.setdefault((change.worker, change.action, not change.busy), [0.0, 0.0])
            total[0] += change.before_s
            total[1] += change.after_s
    s = one.spans
    prices = []
    for (worker, action, waits), (before, after) in sums.items():
        rank = [w.name for w in one.workers].index(worker)
        kind = one.kinds.index(action) if action in one.kinds else -1
        count = int(((s.worker == rank) & (s.kind == kind) & (s.path < 0)).sum())
        prices.append(
            Price(worker=worker, action=action, waits=waits, count=count, predicted_s=before, measured_s=after)
        )
    return tuple(sorted(prices, key=lambda price: -abs(price.seconds)))


def comparison_text(comparison: Comparison) -> tuple[str, ...]:
    """Writes the lines: the steps, the largest wrong price, where time differs, where memory does."""
    d = comparison.difference
    one, two = comparison.names
    lines = [f"step: {number(d.before_s)} s {one}, {number(d.after_s)} s {two}: {_percent(d.before_s, d.after_s)}", ""]
    lines += wrapped(comparison.sentence, indent="", bullet="largest wrong price: ")
    worker = comparison.largest.worker if comparison.largest else d.changes[0].worker if d.changes else ""
    if worker:
        lines += ["", *_time(comparison, worker)]
    others = [name for name in dict.fromkeys(change.worker for change in d.changes) if name != worker]
    for name in others[:ROWS]:
        top = d.of(name)[0]
        lines += wrapped(f"{name}: most in {change_name(top)}, {signed(top.seconds)} s", indent="")
    if worker in comparison.peak_bytes:
        lines += ["", *_memory(comparison, worker)]
    elif not comparison.peak_bytes:
        lines += ["", "one of the two has no memory: only times are compared"]
    return tuple(lines)


def _time(comparison: Comparison, worker: str) -> tuple[str, ...]:
    d = comparison.difference
    changes = d.of(worker)
    rows = [(change_name(c), number(c.before_s), number(c.after_s), signed(c.seconds)) for c in changes[:ROWS]]
    if rest := changes[ROWS:]:
        before, after = sum(c.before_s for c in rest), sum(c.after_s for c in rest)
        rows.append((f"{len(rest)} more", number(before), number(after), signed(after - before)))
    # Changes leave out what did not change, and all that a worker does adds up to its step.
    same = d.before_s - sum(c.before_s for c in changes)
    if same > 0:
        rows.append(("what did not change", number(same), number(same), "0"))
    rows.append(("step", number(d.before_s), number(d.after_s), signed(d.seconds)))
    columns = (Column(name=f"{worker}, s", align="left"), *(Column(name=n) for n in (*comparison.names, "difference")))
    return table(columns, rows)


def _memory(comparison: Comparison, worker: str) -> tuple[str, ...]:
    changes = [change for change in comparison.difference.memory if change.worker == worker]
    before, after = comparison.peak_bytes[worker]
    columns = (
        Column(name=f"{worker}, MiB at the peak", align="left"),
        *(Column(name=n) for n in (*comparison.names, "difference")),
    )
    rows = [_memory_row(change.buffer, change.before_bytes, change.after_bytes) for change in changes[:ROWS]]
    lines = table(columns, [*rows, *_unchanged(changes, before), _memory_row("peak of these", before, after)])
    if not comparison.left_out:
        return tuple(lines)
    classes_text = ", ".join(f"{name} ({number(max(pair) / 2**20)})" for name, pair in comparison.left_out.items())
    whose = comparison.names[0] if all(pair[0] for pair in comparison.left_out.values()) else "one of the two"
    return (*lines, *wrapped(f"only {whose} has, at its most on a rank: {classes_text}", indent=""))


def _unchanged(changes: Sequence[MemoryChange], peak: float) -> tuple[tuple[str, ...], ...]:
    same = peak - sum(change.before_bytes for change in changes)
    return (_memory_row("what did not change", same, same),) if same > 0 else ()


def _memory_row(name: str, before: float, after: float) -> tuple[str, ...]:
    return (name, number(before / 2**20), number(after / 2**20), signed((after - before) / 2**20))


_IDLE = {
    "bubble": "waiting for {} of another stage",
    "communication": "waiting for {}",
    "copy": "waiting for {}",
    "host": "before {}: the host",
    "ahead": "another rank sets the pace",
    "compute": "waiting for {}",
}


def change_name(change: TimeChange) -> str:
    """What people call a change: its action, or what is waited for."""
    action = f"{change.action} {change.path}".rstrip()
    return action if change.busy else _IDLE[change.part].format(action)


def _percent(before: float, after: float) -> str:
    if not after:
        return "nothing was measured"
    if before == after:
        return "equal"
    off = abs(before / after - 1)
    if off < SHOWN:
        return f"equal to {SHOWN:.1%}"
    return f"the prediction is {off:.1%} too {'short' if before < after else 'long'}"
