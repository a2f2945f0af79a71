"""After the search for equal stages: the same plans with layers cut unevenly, and recomputation stage by stage.

`uneven(found)` takes the best plans of a search, those that were faster but did not fit, and plans one change away, and
gives each the best cut (`cut`) with the least recomputation that fits (`recompute`). It returns the best plan of all,
why it is better, and what was tried: the search before it is exact, this pass is not (which plans it takes is a choice;
of one plan, the cut is the best where `Cuts.proven`). Leaves out stages with other numbers of ranks (`dapple`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnomon.errors import GnomonError, PlanError, ProgramError
from gnomon.graph import Graph
from gnomon.plans import Plan, Saved, layer_presets, stage_layers
from gnomon.prediction import Prediction, predict
from gnomon.search.budget import KeepGoing, always
from gnomon.search.refinement.changes import changes
from gnomon.search.refinement.neighbours import allowed, point_of, unsaved
from gnomon.search.results import FoundPlan, Result
from gnomon.search.space.points import Point
from gnomon.search.stages.cut import Cut, Cuts, balanced, best_split, can_cut, equal, plainest
from gnomon.search.stages.recompute import Least, Unit, unit_of
from gnomon.search.stages.repredict import Trial, Trials

ROWS = 60_000
"""The number of rows of Programs that may be played for one plan: a second or so."""

PLANS = 4
"""The number of plans that are cut in each round, at most."""

BARREN = 2
"""The number of plans cut one after the other without a gain, after which a round ends."""

ROUNDS = 3
"""The number of rounds: the first over the search's best plans, then, as long as that finds a better one, over plans
one change away from it."""

_TIE = 1e-3
"""The share of the step by which a cut may be slower than the best one if its stages are nearer to equal."""

_WORTH = 5e-3
"""The share of the step by which an uneven plan must be better: less is no reason to leave equal stages."""


@dataclass(frozen=True, kw_only=True)
class UnevenAttempt:
    """One plan that was given other stages."""

    point: Point
    """The point of the exact search whose layers were cut anew."""
    equal_s: float
    """Seconds of its step with equal stages and one preset for all layers, whether it fits or not."""
    step_s: float | None
    """Seconds of its step with the best cut; None where none fits."""
    cuts: Cuts
    """How many ways to cut its layers were looked at; all zero where its plan cannot be cut."""


@dataclass(frozen=True, kw_only=True)
class Uneven:
    """What the pass found."""

    best: FoundPlan | None
    """The best plan, if it is better than the best of the search."""
    exact_s: float | None
    """Seconds of the step of the best plan of the search; None where none fitted."""
    tried: tuple[UnevenAttempt, ...]
    """Every plan that was given other stages, in the order in which they were tried."""
    reasons: tuple[str, ...] = ()
    """What differs from equal stages, and why: `stage 3 holds the head: 6 layers fewer`."""

    @property
    def gain(self) -> float:
        """Share of the step saved; 0 where nothing was."""
        if self.best is None or self.exact_s is None:
            return 0.0
        return 1 - self.best.step_s / self.exact_s

    def merged(self, result: Result) -> Result:
        """The search's result with this plan before the others, its counts as they are."""
        return result.led_by(self.best)


def uneven(
    result: Result,
    *,
    cut: Cut | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    keep_going: KeepGoing = always,
) -> Uneven:
    """The best plan with uneven stages, or recomputation that differs by stage; see the module.

    cut: layers of each stage, which then every plan has, be it faster or not. PlanError when none of the search's plans
    can have it. on_progress: is called with (plans begun, plans at most) before each that is cut. keep_going: the
    budget, asked before each plan; a cut that the user gives is made all the same.
    """
    exact = result.best[0].step_s if result.best else None
    if not _applies(result):
        if cut is not None:
            raise PlanError("layers_per_stage is for devices of one kind and a base plan that recomputes nothing")
        return Uneven(best=None, exact_s=exact, tried=())
    if cut is not None and (sum(cut) != result.space.num_layers or min(cut) < 1):
        raise PlanError(
            f"layers_per_stage {cut} adds up to {sum(cut)} layers, but the graph has {result.space.num_layers}; give "
            f"each stage at least one, and all of them together"
        )
    run = _Pass(result, cut, on_progress, keep_going if cut is None else always)
    first = run.round([(candidate.point, candidate.prediction) for candidate in (*result.best, *result.near)])
    if cut is not None and run.best is None:
        raise PlanError(f"no plan of the search fits with layers_per_stage {cut}; leave it open, or allow more memory")
    # A given cut is a wish, not a search: it is applied to the plans there are and no neighbours are tried.
    for _ in range(ROUNDS - 1 if cut is None and (first or not result.best) else 0):
        leader = run.best[1] if run.best is not None else result.best[0] if result.best else None
        if leader is None or not run.round(list(run.neighbours(leader))):
            break
    if run.best is None:
        return Uneven(best=None, exact_s=exact, tried=tuple(run.tried))
    best = run.best[1]
    return Uneven(best=best, exact_s=exact, tried=tuple(run.tried), reasons=reasons(best.prediction))


def _applies(result: Result) -> bool:
    """Whether devices are of one kind, and what is recomputed was left to the search."""
    kinds = {group.node.device.name for group in result.cluster.groups}
    return len(kinds) == 1 and result.space.base.saved == Saved() and not result.space.base.stages


class _Pass:
    """The state of the pass: the best plan so far, and what was tried."""

    def __init__(
        self, result: Result, cut: Cut | None, on_progress: Callable[[int, int], None] | None, keep_going: KeepGoing
    ) -> None:
        self.keep_going = keep_going
        self.result, self.space, self.cut, self.on_progress = result, result.space, cut, on_progress
        # Stage by stage recomputation needs both ends of the scale to be open.
        free = {"none", "full"} <= set(result.space.recompute)
        self.unit: Unit = unit_of(result.stack) if free else "none"
        self.best: tuple[float, FoundPlan] | None = None
        self.tried: list[UnevenAttempt] = []
        self.done: set[Plan] = set()
        self.exact = result.best[0].step_s if result.best and cut is None else float("inf")

    @property
    def worst(self) -> float:
        """The step, in seconds, that a plan must be faster than."""
        return (self.best[0] if self.best is not None else self.exact) * (1 - _WORTH)

    def round(self, plans: Sequence[tuple[Point, Prediction]]) -> bool:
        """Cuts the most promising plans, and says whether one is the best so far."""
        promising: list[tuple[float, int, Point, Trials]] = []
        for index, (point, prediction) in enumerate(plans):
            # Plans that differ only in recomputation are one plan here: each cut gets the least that fits.
            shape = unsaved(prediction.plan)
            if shape in self.done or not self.keep_going():
                continue
            self.done.add(shape)
            if (
                point.recompute == "offload"
            ):  # what is on the host is not divided further: the same plan, all of it kept
                point = point._replace(recompute="none")
                prediction = predict(
                    self.result.graph, self.result.cluster, shape, self.result.workload, self.result.stack
                )
            trials = Trials(prediction)
            hope = self._hope(trials)
            if hope < self.worst:
                promising.append((hope, index, point, trials))
        better, barren = False, 0
        # The index decides ties, so that points, which have no order, are never compared.
        for hope, _, point, trials in sorted(promising, key=lambda entry: entry[:2])[:PLANS]:
            if hope < self.worst and barren < BARREN and self.keep_going():
                gained = self._cut(point, trials)
                better, barren = better or gained, 0 if gained else barren + 1
        return better

    def _hope(self, trials: Trials) -> float:
        """Seconds of the plan if its longest stage were as short as layers allow, and memory without limit."""
        plan, step = trials.plan, trials.prediction.step_s
        if self.cut is not None:
            return step if len(self.cut) == trials.num_stages else float("inf")
        parts = trials.prediction.breakdown
        # The least recomputation may be none, so what is exposed of it now is hoped away.
        if self.unit != "none":
            step -= sum(seconds for part, seconds in parts.items() if part == "R")
        if can_cut(trials) or self._own_rule():
            return step if plan.saved.preset != "none" or not trials.prediction.fits else float("inf")
        weights = [trials.layer_seconds(i) for i in range(len(trials.layers))]
        ranks = plan.pipeline_ranks
        start = _longest(weights, trials, equal(len(trials.counted), plan.num_stages))
        # One stage a rank: the balanced cut is the ideal. Several: a rank may hold any set of layers, so the mean is.
        if len(ranks) == max(ranks) + 1:
            ideal = _longest(weights, trials, balanced(weights, [(i, i + 1) for i in trials.counted], len(ranks)))
        else:
            ideal = sum(weights) / (max(ranks) + 1)
        # Computing shrinks in proportion to the longest stage; the rest of the step is left as it is.
        return step * min(ideal / start, 1.0)

    def _own_rule(self) -> bool:
        return self.result.stack.runs.own_cut is True

    def _cut(self, point: Point, trials: Trials) -> bool:
        """Gives one plan its best cut; whether it is the best plan so far."""
        if self.on_progress is not None:
            self.on_progress(len(self.tried) + 1, PLANS * ROUNDS)
        least = Least(trials, self.result.limit_bytes, self.unit)
        # A play costs about as much as the Program has rows, so long Programs get fewer of them.
        budget = max(8, min(120, ROWS // trials.prediction.structure.program.num_rows))
        trial: Trial | None
        try:
            # Some stacks cut by a rule of their own: then only recomputation is chosen.
            if self.cut is not None or can_cut(trials) or self._own_rule():
                trial = least.fit(self.cut or equal(len(trials.counted), trials.num_stages))
                cuts = Cuts(every=1)
                cuts.predicted, cuts.too_large = int(trial is not None), int(trial is None)
            else:
                split = best_split(trials, least, budget=budget, keep_going=self.keep_going)
                trial, cuts = (plainest(split, least, _TIE), split.cuts) if split is not None else (None, Cuts())
        except (PlanError, ProgramError):
            trial, cuts = None, Cuts()
        step = None if trial is None else trial.step_s
        self.tried.append(UnevenAttempt(point=point, equal_s=trials.prediction.step_s, step_s=step, cuts=cuts))
        if trial is None or trial.step_s >= self.worst:
            return False
        # The trial's numbers come from a shortened replay: the plan is predicted in full before it is reported.
        predicted = predict(self.result.graph, self.result.cluster, trial.plan, self.result.workload, self.result.stack)
        self.best = predicted.step_s, FoundPlan(point=point, plan=trial.plan, prediction=predicted)
        return True

    def neighbours(self, leader: FoundPlan) -> Iterator[tuple[Point, Prediction]]:
        """Plans one change of axes, microbatch or schedule away that the search was free to take, predicted."""
        own = "none" if leader.point.recompute == "offload" else leader.point.recompute
        saved = Saved(preset=own if self.unit == "none" else "none")
        plain = replace(unsaved(leader.plan), saved=saved)
        for what, plan in changes(plain):
            point = point_of(plan, leader.point)
            keeps_structure = what.split(" ")[0] in ("tp", "pp", "microbatch", "schedule")
            if not keeps_structure or not allowed(point, self.space, recompute=False):
                continue
            if unsaved(plan) in self.done or not self.keep_going():
                continue
            try:
                prediction = predict(
                    self.result.graph, self.result.cluster, plan, self.result.workload, self.result.stack
                )
            except GnomonError:
                continue
            yield point, prediction


def _longest(weights: Sequence[float], trials: Trials, cut: Cut) -> float:
    """Seconds of the rank with the most work."""
    total = np.concatenate([[0.0], np.cumsum(weights)])
    ranks = trials.plan.pipeline_ranks
    busy = [0.0] * (max(ranks) + 1)
    for rank, (a, b) in zip(ranks, trials.recut.bounds(cut), strict=True):
        busy[rank] += float(total[b] - total[a])
    return max(busy)


def reasons(prediction: Prediction) -> tuple[str, ...]:
    """How a plan's stages differ from equal ones, and why, a line each."""
    plan, graph = prediction.plan, prediction.pricing.graph
    lines = []
    if plan.schedule.layers_per_stage:
        lines += list(_moved(plan, graph))
    presets = layer_presets(plan, graph)
    if plan.saved.rules:
        activations = [rank.by_class.get("activations", 0) for rank in prediction.memory]
        for stage, part in enumerate(stage_layers(plan, graph)):
            here = [presets[layer.label] for layer in part if layer.label in presets]
            words = [f"{here.count(name)} {name}" for name in ("full", "selective") if name in here]
            of_rank = activations[plan.pipeline_ranks[stage]]
            if words:
                again = " and ".join(words)
                lines.append(f"stage {stage} recomputes {again} of {len(here)} layers ({of_rank / 2**30:.1f} GiB kept)")
        if len(lines) > 8:
            lines = [*lines[:7], f"and {len(lines) - 7} stages more"]
    return tuple(lines)


def _moved(plan: Plan, graph: Graph) -> Iterator[str]:
    """Stages with other numbers of layers than equal ones would have."""
    parts = stage_layers(plan, graph)
    counts = plan.schedule.layers_per_stage
    mean = equal(sum(counts), len(counts))
    for stage, (part, count, usual) in enumerate(zip(parts, counts, mean, strict=True)):
        others = [layer.call.name for layer in part if layer.call.first is None]
        if count != usual:
            why = f" holds {', '.join(others)}:" if others else ":"
            extra_layers = count - usual
            layers = f"{abs(extra_layers)} layer{'s' * (abs(extra_layers) > 1)}"
            yield f"stage {stage}{why} {layers} {'more' if extra_layers > 0 else 'fewer'}"
