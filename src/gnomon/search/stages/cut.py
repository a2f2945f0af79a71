"""The best cut of a plan's layers into stages: balanced by a dynamic programme, then decided by the simulator.

Equal numbers of layers are unequal work where a stage also holds the embedding or the head, or layers of several kinds.
`balanced` is the cut with the shortest longest stage, exactly, by prices of single layers. `best_split` starts there
and from equal numbers, and predicts every cut that a bound does not exclude, as long as there are few; where there are
many, it predicts neighbours of the best until none is better, and says so (`Cuts.proven`). Each cut is taken with the
least recomputation that fits (`recompute`). Leaves out the axes: those are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import comb

import numpy as np
from numpy.typing import NDArray

from gnomon import orders
from gnomon.errors import PlanError
from gnomon.search.budget import KeepGoing, always
from gnomon.search.stages.recompute import Least
from gnomon.search.stages.repredict import Trial, Trials

Doubles = NDArray[np.float64]
Cut = tuple[int, ...]
"""The number of counted layers of each stage."""

SLACK = 1e-9
"""The share by which bounds are lowered, because sums of floats are rounded."""

MOST_CUTS = 3000
"""The number of cuts that are listed before they are predicted; beyond it only neighbours of the best are looked at."""

MANY_CUTS = 100_000
"""The number of cuts of several stages on a rank that are too many to list."""


@dataclass(kw_only=True)
class Cuts:
    """How many cuts went which way. They add up to all of them where `proven`."""

    every: int = 0
    """Ways to cut so many layers into so many stages of at least one."""
    predicted: int = 0
    """Cuts whose steps were predicted."""
    too_large: int = 0
    """Cuts that were looked at and that no recomputation makes fit."""
    proven: bool = False
    """Whether every cut was predicted, does not fit, or cannot be faster by a bound."""

    @property
    def too_slow(self) -> int:
        """Cuts that were not predicted, as a bound shows them slower than the best; 0 where that was not shown of all
        the others."""
        return self.every - self.predicted - self.too_large if self.proven else 0

    @property
    def num_open(self) -> int:
        """Cuts that were neither predicted nor shown slower."""
        return self.every - self.predicted - self.too_large - self.too_slow


@dataclass(frozen=True, kw_only=True)
class BestCut:
    """The best cut that was found."""

    counts: Cut
    """Layers of each stage."""
    trial: Trial
    """The plan with it."""
    cuts: Cuts = field(repr=False)
    """How many ways to cut were looked at."""
    fits: tuple[tuple[float, Cut], ...] = field(default=(), repr=False)
    """(seconds of a step, cut) of every cut that was predicted and fits."""


def balanced(weights: Sequence[float], spans: Sequence[tuple[int, int]], stages: int) -> Cut:
    """Layers of each stage such that the longest stage is as short as possible, and then the squares add up to least.

    weights: seconds of every layer, in order. spans: (first weight, one past the last) of each counted layer, what
    stands between two of them included. Exact: both are dynamic programmes over the end of each stage.
    """
    n = len(spans)
    if stages > n:
        raise PlanError(f"{stages} stages need as many layers, but there are {n}; use fewer stages")
    # begin[i]: seconds of everything before counted layer i; the first stage takes what is before the first one, the
    # last stage what is behind the last.
    total = np.concatenate([[0.0], np.cumsum(weights)])
    begin = np.array([0, *(total[a] for a, _ in spans[1:]), total[-1]])
    work = begin[None, :] - begin[:, None]  # [first, last): of counted layers, with what stands around them
    # Ranges must not be empty: first < last, all others cost infinity.
    longest = np.where(np.tri(n + 1, k=0, dtype=bool), np.inf, work)
    best = longest[0].copy()
    # First programme: best[j] is the least possible longest stage over cuts of layers [0, j) into so many stages.
    for _ in range(stages - 1):
        best = np.maximum(best[:, None], longest).min(axis=0)
    # Second programme: among cuts whose stages all stay within that limit, the least sum of squares, so the other
    # stages are as equal as the longest one allows. The tolerance keeps cuts that differ by rounding.
    limit = best[n] * (1 + 1e-12)
    squares = np.where(longest <= limit, longest**2, np.inf)
    costs, choices = squares[0].copy(), []
    for _ in range(stages - 1):
        table = costs[:, None] + squares
        choices.append(table.argmin(axis=0))
        costs = table.min(axis=0)
    # Walk back from the end: choices[k][j] is where the stage that ends at j begins.
    ends = [n]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    ends.append(0)
    return tuple(b - a for b, a in zip(ends, ends[1:], strict=False))[::-1]


def equal(layers: int, stages: int) -> Cut:
    """The layers of each stage, as equal as possible, the first stages taking one more."""
    per_stage, remainder = divmod(layers, stages)
    return tuple(per_stage + (stage < remainder) for stage in range(stages))


class Bounds:
    """Bounds on the step of a cut of which nothing is recomputed, linear in the seconds of stages' actions.

    Proof. A rank computes its actions one after the other, so a step is no shorter than all of them together. Where all
    ranks meet once a step (clipping by the global norm), every action of a step lies between two meetings. Then
    whatever runs before the i-th action of a rank because that action needs it (a forward: forwards of the stages
    before; a backward: those of all stages and backwards of the stages after), the actions from the i-th to the j-th,
    and whatever needs the j-th and cannot begin before (backwards of the stages before it) come one after the other.
    Recomputing only makes actions longer.
    """

    def __init__(self, trials: Trials) -> None:
        plan, program = trials.plan, trials.prediction.structure.program
        names = [kind.name for kind in program.kinds]
        self.kinds = tuple(name for name in ("F", "B", "I", "W") if np.isin(program.kind, names.index(name)).any())
        """The kinds of actions that stages compute."""
        self.trials, self.num_stages = trials, plan.num_stages
        self._stages: dict[tuple[int, int, int], tuple[float, ...]] = {}
        # Composites and rewritten orders have no single chain of actions, so no bound is made (rows stay empty, `of` is
        # 0).
        grouped = orders.find(plan.schedule.name).composite or bool(plan.schedule.passes)
        chained = len(trials.prediction.pricing.messages.sent) == plan.num_stages - 1
        meet = plan.optimizer.clip and plan.optimizer.offload is None and chained
        rows = [] if grouped else list(self._rows(meet=meet))
        self.rows: Doubles = np.array(rows).reshape(len(rows), -1)
        """[bounds, stages x kinds] how often each action is counted."""

    def of(self, counts: Sequence[int]) -> float:
        """Seconds that a step of the cut takes at least; 0 where no bound is known."""
        if not len(self.rows):
            return 0.0
        return float((self.rows @ np.array(self.seconds(counts)).ravel()).max()) * (1 - SLACK)

    def seconds(self, counts: Sequence[int]) -> list[tuple[float, ...]]:
        """[stages][kinds] seconds of the stages' actions."""
        ends, last = np.cumsum((0, *counts)).tolist(), self.num_stages - 1
        return [self.stage(s, a, b) for s, (a, b) in enumerate(zip(ends, ends[1:], strict=False)) if s <= last]

    def stage(self, stage: int, first: int, last: int) -> tuple[float, ...]:
        """Seconds of each kind of action of a stage of the counted layers [first, last)."""
        at = stage, first, last
        if at not in self._stages:
            self._stages[at] = self.trials.seconds(stage, first, last, self.kinds, ends=stage == self.num_stages - 1)
        return self._stages[at]

    @cached_property
    def count(self) -> int:
        """Counts the microbatches of a step."""
        return self.trials.prediction.pricing.count

    def work(self, stage: int, first: int, last: int) -> float:
        """Seconds that a stage of the counted layers [first, last) computes in a step at least."""
        if last <= first:
            return 0.0
        seconds = dict(zip(self.kinds, self.stage(stage, first, last), strict=True))
        # Where a schedule has both whole and split backwards, the shorter way is a bound for each.
        ways = [seconds[kind] for kind in ("B",) if kind in seconds]
        ways += [seconds["I"] + seconds["W"]] if "I" in seconds else []
        return self.count * (seconds["F"] + min(ways)) * (1 - SLACK)

    def _rows(self, *, meet: bool) -> Iterator[Doubles]:
        """Bounds of every rank: from its first action or its first backward, to its last action or last backward."""
        program, column = self.trials.prediction.structure.program, {k: i for i, k in enumerate(self.kinds)}
        chain = column.get("I", column.get("B"))  # the shorter where some backwards are in two parts
        for cls in range(program.num_classes):
            low, high = int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])
            named = [program.kinds[k].name for k in program.kind[low:high].tolist()]
            actions = [(name, int(s)) for name, s in zip(named, program.stage[low:high], strict=True) if name in column]
            # A bound starts at the rank's first action or its first backward, and ends at its last action or its last
            # backward.
            backs = [i for i, (name, _) in enumerate(actions) if name in ("B", "I")]
            for first in dict.fromkeys((0, backs[0])):
                for last in dict.fromkeys((len(actions) - 1, backs[-1])):
                    counts = np.zeros((self.num_stages, len(self.kinds)))
                    # The actions of the rank between the two, one after another.
                    for name, stage in actions[first : last + 1]:
                        counts[stage, column[name]] += 1
                    if meet:
                        # What must come before the first of them: forwards of the stages before it, or all forwards and
                        # the backwards behind it.
                        name, stage = actions[first]
                        counts[: stage if name == "F" else None, column["F"]] += 1
                        if name in ("B", "I"):
                            counts[stage + 1 :, chain] += 1
                        # What must come after the last of them: backwards of the stages before it.
                        name, stage = actions[last]
                        if name in ("B", "I"):
                            counts[:stage, chain] += 1
                    yield counts


class Search:
    """Looks for the best cut of one plan."""

    def __init__(self, trials: Trials, least: Least, *, budget: int, keep_going: KeepGoing = always) -> None:
        """Takes the budget, cuts that may be played (one that needs a whole `predict` counts for three more), and
        keep_going, the time."""
        self.trials, self.least, self.budget, self.keep_going = trials, least, budget, keep_going
        self.layers, self.stages = len(trials.counted), trials.num_stages
        self.cuts = Cuts(every=comb(self.layers - 1, self.stages - 1))
        self.best: tuple[float, Cut, Trial] | None = None
        self.seen: set[Cut] = set()
        self.fits: list[tuple[float, Cut]] = []
        self.spent = 0
        self.bounds = Bounds(trials)
        self._rooms: dict[tuple[int, int], int] = {}
        """Maps (stage, layers before it) to the most layers that it can have, while the best is the same."""

    def run(self) -> BestCut | None:
        """Finds the best cut; None where none fits."""
        start = equal(self.layers, self.stages)
        self._try(start)
        for cut in self._starts():
            self._try(cut)
        if self.best is None:
            return None
        if len(self.seen) == self.cuts.every:  # as with a layer a stage
            self.cuts.proven = True
            _, counts, trial = self.best
            return BestCut(counts=counts, trial=trial, cuts=self.cuts, fits=tuple(self.fits))
        listed = self._listed() if len(self.bounds.rows) else None
        if listed is None:
            self._walk()
        else:
            self._sweep(listed)
        _, counts, trial = self.best
        return BestCut(counts=counts, trial=trial, cuts=self.cuts, fits=tuple(self.fits))

    @property
    def worst(self) -> float:
        """The step, in seconds, that a cut must be faster than."""
        return self.best[0] if self.best is not None else float("inf")

    def _try(self, cut: Cut) -> bool:
        """Predicts a cut that was not predicted yet, and says whether it is the best so far."""
        if cut in self.seen:
            return False
        self.seen.add(cut)
        before = self.trials.predicted
        slow = self.best is not None and self.least.least_s(cut) >= self.worst  # whether it fits does not matter
        trial = None if slow else self.least.fit(cut)
        # A cut that changes recomputation too may need a whole prediction, which costs about four plays.
        self.spent += 1 + 3 * (self.trials.predicted - before)
        if slow:
            self.cuts.predicted += 1
            return False
        if trial is None:
            self.cuts.too_large += 1
            return False
        self.cuts.predicted += 1
        self.fits.append((trial.step_s, cut))
        if trial.step_s < self.worst:
            self.best = trial.step_s, cut, trial
            return True
        return False

    def _starts(self) -> Iterator[Cut]:
        """Yields the balanced cut; with several stages on a rank, ranks of as much work with stages as equal as can
        be."""
        weights, spans = self._weights()
        ranks = self.trials.plan.pipeline_ranks
        if self.stages == max(ranks) + 1:
            yield balanced(weights, spans, self.stages)
            return
        of_rank = self._shares(weights, spans, ranks)
        uncut = list(of_rank)
        cut = []
        # Deal each rank's layers over its stages: ceil(left / stages left) to the next.
        for stage, rank in enumerate(ranks):
            mine = [s for s in range(stage, self.stages) if ranks[s] == rank]
            cut.append(-(-uncut[rank] // len(mine)))
            uncut[rank] -= cut[-1]
        if min(cut) > 0:
            yield tuple(cut)

    def _shares(self, weights: Sequence[float], spans: Sequence[tuple[int, int]], ranks: Sequence[int]) -> list[int]:
        """Layers of each rank: one after the other to the rank with the least work, embedding and head counted."""
        around = {0: sum(weights[: spans[0][0]]), self.stages - 1: sum(weights[spans[-1][1] :])}
        load = [0.0] * (max(ranks) + 1)
        for stage, seconds in around.items():
            load[ranks[stage]] += seconds
        mean = sum(weights[a] for a, _ in spans) / len(spans)
        counts = [ranks.count(rank) for rank in range(len(load))]  # at least one a stage
        load = [seconds + mean * n for seconds, n in zip(load, counts, strict=True)]
        for _ in range(self.layers - sum(counts)):
            rank = int(np.argmin(load))
            counts[rank], load[rank] = counts[rank] + 1, load[rank] + mean
        return counts

    def _weights(self) -> tuple[list[float], list[tuple[int, int]]]:
        """Seconds of every layer, forward and backward, and where each counted layer is."""
        weights = [self.trials.layer_seconds(i) for i in range(len(self.trials.layers))]
        return weights, [(i, i + 1) for i in self.trials.counted]

    def _listed(self) -> list[tuple[float, Cut]] | None:
        """Cuts whose bound is below the best, the least first; None where there are too many to list.

        A rank's own work alone excludes most: stage by stage, ranges of layers are tried as long as the work of their
        rank stays below the best step.
        """
        if self.stages > self.trials.plan.num_pipeline_ranks and self.cuts.every > MANY_CUTS:
            return None  # the work of one stage of several on a rank excludes too little
        self._rooms.clear()
        cuts: list[tuple[float, Cut]] = []
        ranks, nodes = self.trials.plan.pipeline_ranks, 0
        # Depth first over (layers of the first stages, layers taken, busy seconds of each rank).
        stack: list[tuple[Cut, int, tuple[float, ...]]] = [((), 0, (0.0,) * (max(ranks) + 1))]
        while stack:
            cut, done, busy = stack.pop()
            stage = len(cut)
            nodes += 1
            if nodes > 4 * MOST_CUTS or len(cuts) > MOST_CUTS:
                return None
            if stage == self.stages:
                bound = self.bounds.of(cut)
                if bound < self.worst and cut not in self.seen:
                    cuts.append((bound, cut))
                continue
            after = self.stages - stage - 1
            # The last stage takes what is left; others leave a layer to each stage after them.
            for count in range(1, self.layers - done - after + 1) if after else (self.layers - done,):
                work = self.bounds.work(stage, done, done + count)
                # More layers only take longer, so no larger count can pass either.
                if busy[ranks[stage]] + work >= self.worst:
                    break
                if self._coverable(stage + 1, done + count):
                    mine = tuple(b + work * (r == ranks[stage]) for r, b in enumerate(busy))
                    stack.append(((*cut, count), done + count, mine))
        return sorted(cuts)

    def _coverable(self, stage: int, done: int) -> bool:
        """Whether the stages from `stage` on can hold the layers from `done` on, each below the best step by itself."""
        for later in range(stage, self.stages):
            done += self._room(later, done)
        return done >= self.layers

    def _room(self, stage: int, done: int) -> int:
        """Most layers from `done` on that a stage can have below the best step, by halving: more take longer."""
        if (stage, done) not in self._rooms:
            self._rooms[stage, done] = self._most(stage, done)
        return self._rooms[stage, done]

    def _most(self, stage: int, done: int) -> int:
        if stage == self.stages - 1:
            return self.layers - done if done < self.layers and self._below(stage, done, self.layers) else 0
        # Bisection: the largest number of layers whose work stays below the best step.
        low, high = 0, self.layers - done
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._below(stage, done, done + middle) else (low, middle - 1)
        return low

    def _below(self, stage: int, first: int, last: int) -> bool:
        return self.bounds.work(stage, first, last) < self.worst

    def _is_over(self) -> bool:
        return self.spent >= self.budget or not self.keep_going()

    def _sweep(self, listed: Sequence[tuple[float, Cut]]) -> None:
        """Predicts the listed cuts, the least bound first, until none can be better."""
        for bound, cut in listed:
            if bound >= self.worst:
                break
            if self._is_over():
                # The budget ends the proof: from here on only neighbours of the best are tried.
                self._walk()
                return
            self._try(cut)
        self.cuts.proven = True

    def _walk(self) -> None:
        """Moves one layer from a stage to another as long as that is faster, within the budget."""
        while self.best is not None and not self._is_over():
            cut = self.best[1]
            # Neighbours by their bounds, the least first: the first that is better becomes the next centre.
            moves = sorted((self.bounds.of(near), near) for near in neighbours(cut) if near not in self.seen)
            if not self._first_better(moves):
                return

    def _first_better(self, moves: Sequence[tuple[float, Cut]]) -> bool:
        for bound, near in moves:
            if bound >= self.worst or self._is_over():
                return False
            if self._try(near):
                return True
        return False


def neighbours(cut: Cut) -> Iterator[Cut]:
    """Yields the cuts with one layer moved from any stage to any other."""
    for source, count in enumerate(cut):
        for target in range(len(cut)) if count > 1 else ():
            if target != source:
                yield tuple(n - (s == source) + (s == target) for s, n in enumerate(cut))


def plainest(split: BestCut, least: Least, tie: float, most: int = 64) -> Trial:
    """Finds, among cuts that take no longer than the best by a share `tie` of its step, the one nearest to equal stages
    that is found: among those that fit, then by moving layers towards equal stages as long as the step stays within
    that. `most`: cuts predicted for it, at most."""
    limit = split.trial.step_s * (1 + tie)
    usual = equal(sum(split.counts), len(split.counts))

    # The squared distance from equal stages.
    def uneven(cut: Cut) -> int:
        return sum((a - b) ** 2 for a, b in zip(cut, usual, strict=True))

    _, _, cut = min((uneven(cut), step_s, cut) for step_s, cut in split.fits if step_s <= limit)
    trial, tries_left = least.fit(cut), most
    while trial is not None and tries_left:
        for near in sorted((other for other in neighbours(cut) if uneven(other) < uneven(cut)), key=uneven)[
            :tries_left
        ]:
            tries_left -= 1
            if least.least_s(near) <= limit and (fitted := least.fit(near)) is not None and fitted.step_s <= limit:
                # Greedy descent towards equal stages as long as the step stays within the tolerance.
                cut, trial = near, fitted
                break
        else:
            break
    assert trial is not None, "a cut that fits was predicted before"
    return trial


def can_cut(trials: Trials) -> str:
    """Why the plan's layers cannot be cut otherwise; empty if they can."""
    plan = trials.plan
    if plan.num_stages == 1:
        return "one stage"
    if plan.stages:
        return "the plan lists its stages"
    if plan.optimizer.zero == 3:
        return "ZeRO 3 in a pipeline"
    if len(trials.counted) < plan.num_stages:
        return "as many stages as layers"
    return ""


def best_split(trials: Trials, least: Least, *, budget: int = 40, keep_going: KeepGoing = always) -> BestCut | None:
    """The best cut of a plan's layers, each with the least recomputation that fits; None where none fits. budget: cuts
    that may be predicted. PlanError for a plan whose layers cannot be cut otherwise."""
    if why := can_cut(trials):
        raise PlanError(f"the layers of this plan cannot be divided otherwise: {why}; give one with several stages")
    return Search(trials, least, budget=budget, keep_going=keep_going).run()
