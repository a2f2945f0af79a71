"""The largest microbatch, or the longest sequence, that a plan holds: as it is, and with changes that spare memory.

`largest(found, what)` yields a `Most` for the plan as it is, for each change alone, and for changes added one after the
other as long as each of them allows more. Taken for granted: where a size fits, a smaller one does too. Leaves out
larger models (`search.questions.largest`) and other plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gnomon.plans import Plan, Workload, batch
from gnomon.search.fit.ladder import Fitting, Rung
from gnomon.search.fit.options import Option

What = Literal["batch", "seq-len"]

UNIT = 1024
"""Tokens: sequences are multiples of it, shorter ones of an eighth of it."""
MOST = 1 << 24
"""Largest size that is tried."""


@dataclass(frozen=True, kw_only=True)
class Most:
    """The largest size with some changes."""

    changes: tuple[str, ...]
    """In words; none is the plan as it is."""
    size: int
    """Sequences of a microbatch, or tokens of a sequence; 0 where not even the smallest fits."""
    rung: Rung
    """The prediction at that size, or of the plan as it is where nothing fits."""
    added: bool = False
    """Whether the changes were added one after the other."""

    @property
    def what(self) -> str:
        """The changes in a line."""
        return " + ".join(self.changes) or "as it is"


def largest(fitting: Fitting, what: What) -> Iterator[Most]:
    """The plan as it is, then each option at its strongest, then the one that allows most with others added to it, each
    the one that allows most, as long as that is more."""
    base = fitting.base.plan
    first = _most(fitting, what, base, ())
    yield first
    able = [o for o in fitting.options if not (o.name == "micro_batch_size" and what == "batch")]
    most_of = {o.name: most for o in able if (most := _with(fitting, what, [o])) is not None}
    yield from most_of.values()
    best, chosen = first, list[Option]()
    while fitting.keep_going():
        tried = [(o, most_of.get(o.name) if not chosen else _with(fitting, what, [*chosen, o])) for o in able]
        able = [o for o, most in tried if most is not None and o not in chosen]
        option, best_most = max(((o, most) for o, most in tried if most is not None), key=_size, default=(None, None))
        if option is None or best_most is None or best_most.size <= best.size:
            return
        best, chosen = best_most, [*chosen, option]
        able.remove(option)
        if len(chosen) > 1:
            yield replace(best_most, added=True)


def _size(option_and_most: tuple[Option, Most]) -> int:
    return option_and_most[1].size


def _with(fitting: Fitting, what: What, chosen: list[Option]) -> Most | None:
    together = fitting.together(sorted(chosen, key=fitting.options.index))
    return None if together is None else _most(fitting, what, together[1], together[0])


def _most(fitting: Fitting, what: What, plan: Plan, changes: tuple[str, ...]) -> Most:
    """Searches by doubling or halving, and then by bisection."""
    work = fitting.base.workload
    start = max(work.sequence_lengths()) if what == "seq-len" else max(1, _micro_batch(plan, work))
    unit = 1 if what == "batch" else UNIT if start >= 4 * UNIT else UNIT // 8
    tried: dict[int, Rung] = {}

    def fits(count: int) -> bool:
        if count not in tried:
            sized, base_size = _sized(fitting, what, plan, count * unit)
            tried[count] = fitting.rung((), changes, sized, base_size)
        return tried[count].fits

    low, high = 0, max(1, start // unit)
    while high <= MOST // unit and fits(high):
        low, high = high, high * 2
    # Here low fits (or is 0) and high does not, or is beyond MOST.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    shown = tried[low] if low else tried[min(tried)]
    return Most(changes=changes, size=low * unit, rung=shown)


def _sized(fitting: Fitting, what: What, plan: Plan, size: int) -> tuple[Plan, Workload]:
    """(plan, work) with microbatches or sequences of a size; the number of microbatches stays."""
    work = fitting.base.workload
    if what == "seq-len":
        return plan, replace(work, seq_len=size)
    count = batch(fitting.base.plan, work)[0]
    schedule = replace(plan.schedule, micro_batch_size=size, num_microbatches=None)
    ranks = plan.stage_mesh(0).data_ranks
    return replace(plan, schedule=schedule), replace(work, global_batch_size=size * ranks * count)


def _micro_batch(plan: Plan, work: Workload) -> int:
    if plan.schedule.micro_batch_size is not None:
        return plan.schedule.micro_batch_size
    return max(1, work.batch_size // (plan.schedule.num_microbatches or 1) // plan.stage_mesh(0).data_ranks)
