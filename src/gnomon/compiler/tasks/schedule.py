"""Steps of a graph for two workers, each with a list of its own: who does what, in which order, and what waits for it.

`scheduled(costs, needs)` is list scheduling by the longest way to the end: of the steps that are ready the one that
most seconds depend on goes to the worker that ends it first, with half of the threads; a step that is alone may have
all threads, while the other worker waits. Nothing is decided when the graph runs: a step waits until the other worker
has done so many of its own, so that a counter a worker is all that they share. Leaves out how steps are measured and
run (`steps`).
Source: Rammer (OSDI 2020), whose tasks and processing units these are; HEFT (Topcuoglu 2002) for the order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

SYNC_S = 1e-6
"""To see that the other worker has done what a step waits for."""
BEGIN_S = 15e-6
"""To wake the other worker."""
WIDE_S = 200e-6
"""What all threads must save of a step that is alone: they are OpenMP's, and go on looking for work on the other
worker's core for about a millisecond after it."""
WORTH = 0.9
"""Of the seconds of all steps one after another that a schedule may take; more is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step with half of the threads, and with all."""

    half_s: float
    whole_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTask:
    """A step of one worker's list. others: how many steps of the other's list are done before it begins."""

    step: int
    """Number of the step."""
    others: int
    """Steps of the other list that are done before it begins."""
    begin_s: float
    """When it begins, as foretold."""
    end_s: float
    """As foretold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    lists: tuple[tuple[StepTask, ...], tuple[StepTask, ...]]
    """Steps of each half of the threads, in order."""
    wide: frozenset[int]
    """Steps that have all threads."""
    predicted_s: float
    """Seconds until the last step has ended, as foretold."""
    before: tuple[int, ...]
    """Of each step, those that are over when it begins, whatever the workers' speeds: a bit a step."""

    def ordered(self, one: int, other: int) -> bool:
        """Whether a step is over when another begins."""
        return bool(self.before[other] >> one & 1)


def scheduled(
    costs: Sequence[StepCost], needs: Sequence[Collection[int]], first: Collection[int] = ()
) -> StepSchedule | None:
    """The schedule, None where it would not take less than `WORTH` of all steps one after another with all threads.

    needs: of each step, earlier ones that it waits for. first: steps of the first worker, which the caller is.
    """
    one_after_another_s = sum(cost.whole_s for cost in costs)
    schedule = _lists(costs, needs, first)
    return schedule if schedule.predicted_s <= WORTH * one_after_another_s and all(schedule.lists) else None


def _longest_s(costs: Sequence[StepCost], needs: Sequence[Collection[int]]) -> list[float]:
    """Returns, for each step, the seconds from its beginning to the end of all that waits for it, with enough
    workers."""
    # `needs` only has earlier steps, so in reverse order what waits for a step is final before the step is looked at.
    out = [cost.half_s for cost in costs]
    for n in reversed(range(len(costs))):
        for one in needs[n]:
            out[one] = max(out[one], costs[one].half_s + out[n])
    return out


def _lists(costs: Sequence[StepCost], needs: Sequence[Collection[int]], first: Collection[int]) -> StepSchedule:
    rank = _longest_s(costs, needs)
    lists: tuple[list[StepTask], list[StepTask]] = ([], [])
    # `free[worker]`: when it can begin its next step; the second has to be woken first. `where[step]`: its worker and
    # its place in that worker's list.
    free, ends, where, wide = [0.0, BEGIN_S], [0.0] * len(costs), [(0, 0)] * len(costs), set()
    # Bit sets as Python integers: bit m of `before[n]` says that step m is over when step n begins.
    before = [0] * len(costs)
    waiting = set(range(len(costs)))
    while waiting:
        ready = [n for n in waiting if not any(one in waiting for one in needs[n])]
        step = max(ready, key=lambda n: (rank[n], -n))

        def begins(worker: int, step: int = step) -> float:
            come = [ends[n] + SYNC_S * (where[n][0] != worker) for n in needs[step]]
            return max([free[worker], *come])

        # Of equal ends the tuple's second number decides for worker 0, the caller, who need not be woken.
        half = min([(begins(w) + costs[step].half_s, w) for w in ((0,) if step in first else (0, 1))])
        whole_s = max(begins(0), free[1] if lists[1] else 0.0) + costs[step].whole_s
        if len(ready) == 1 and whole_s + WIDE_S < half[0]:  # the other worker would wait anyway
            wide.add(step)
            end, worker = whole_s, 0
            needed = {*needs[step], *([lists[1][-1].step] if lists[1] else [])}
            begin, free[1] = whole_s - costs[step].whole_s, whole_s
        else:
            (end, worker), needed = half, {*needs[step]}
            begin = end - costs[step].half_s
            if worker == 1:  # it rests while a step has all threads
                needed |= {task.step for task in lists[0] if task.step in wide}
        # A step waits for a count of the other's list, not for steps of it: the count that covers all that it needs. It
        # never falls along a list, so a step may wait for more than it needs, never for less.
        mine, others = lists[worker], lists[1 - worker]
        count = max([where[n][1] + 1 for n in needed if where[n][0] != worker], default=0)
        count = max(count, mine[-1].others if mine else 0)
        # Over are the step before in its own list and the last of the other's that it waits for, with all that was over
        # for these. Earlier ones of either list are among that, as each step's set holds the one before it.
        over = 0
        for task in ([mine[-1]] if mine else []) + ([others[count - 1]] if count else []):
            over |= before[task.step] | 1 << task.step
        before[step] = over
        where[step], ends[step], free[worker] = (worker, len(mine)), end, end
        mine.append(StepTask(step=step, others=count, begin_s=begin, end_s=end))
        waiting.discard(step)
    return StepSchedule(
        lists=(tuple(lists[0]), tuple(lists[1])), wide=frozenset(wide), predicted_s=max(ends, default=0.0),
        before=tuple(before),
    )  # fmt: skip
