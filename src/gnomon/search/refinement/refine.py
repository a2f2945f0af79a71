"""Refinement: the choices that the exact search leaves alone, tried on its best plans by the simulator.

`refine(found)` starts from the best plans, and from faster ones that do not fit, and changes one choice at a time as
long as the step gets shorter and the plan fits (coordinate descent). The result is never slower than the best plan of
the search; it is not shown to be the best of all. Leaves out what the choices are (`search.refinement.choices`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gnomon.errors import GnomonError, PlanError
from gnomon.methods.disco import USUAL
from gnomon.plans import Plan, stage_layers
from gnomon.prediction import Prediction, TimedPlan, fits_within, predict
from gnomon.search.budget import KeepGoing, always
from gnomon.search.refinement.bucket_cuts import Grain, both_ways, cut_of, search, seed, with_grain
from gnomon.search.refinement.choices import CHOICES, Choice, Value, runs_plan, runs_value, shown_grain
from gnomon.search.refinement.choices import choice as named
from gnomon.search.results import FoundPlan, Result
from gnomon.search.space.points import Limit, Point
from gnomon.software import own


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is tried."""

    starts: int
    """Best plans of the search that a descent begins at."""
    large: int
    """Faster ones that do not fit, begun at as well: a choice may make them."""
    tries: int
    """Predictions at most."""
    rounds: int
    """Times that each choice is looked at, at most."""
    gain: float
    """Share of the step by which a change must shorten it: less is no reason to differ from the default."""
    barren: int
    """Plans that fit in which a choice gained nothing, after which it is not tried in further ones."""


THOROUGH = Effort(starts=3, large=3, tries=240, rounds=240, gain=1e-4, barren=240)
"""Until nothing gains any more."""

QUICK = Effort(starts=5, large=3, tries=80, rounds=1, gain=5e-3, barren=2)
"""Each choice once, on the best plans and their alternatives, since one may mean nothing in the first (asynchronous
tensor parallelism without it) or give more to a plan that takes less memory, and on faster ones that do not fit. One
that gains nothing in two plans where it means something is left: it hardly does in the others, which are alike."""


MAY_FIT = 1.05
"""Times the best plan's step that a faster plan which does not fit may take with the choice that makes it fit: others
would have to gain the rest."""

GRAINS = 30
"""Ways to put layers into gradient buckets and actions that are tried beside those that a search begins at, at most."""

FOR_METHODS = 12
"""Plans that each published method is tried on, at most, beside those that a descent begins at."""


@dataclass(frozen=True, kw_only=True)
class KeptChange:
    """A change that was kept."""

    choice: Choice
    """The field or fields that changed."""
    before: Value
    """Its value in the plan before."""
    after: Value
    """Its value now."""
    prediction: Prediction
    """With it, and all changes before it."""


@dataclass(frozen=True, kw_only=True)
class RefinedPlans:
    """What the descents found."""

    start: FoundPlan
    """Where the best one began."""
    steps: tuple[KeptChange, ...]
    """Its changes in order, what is fixed first; none if nothing is gained."""
    best: FoundPlan
    """The best plan."""
    tried: int
    """Predictions made."""
    starts: int
    """Plans that were started from."""
    choices: tuple[Choice, ...]
    """What was open."""
    effort: Effort
    """How much was to be tried."""
    complete: bool
    """Every descent came to its end within the most predictions."""
    idle: tuple[str, ...] = ()
    """Choices that are fixed and mean nothing in the best plan."""


def refine(
    result: Result,
    *,
    choices: Sequence[Choice] = CHOICES,
    forbid: Iterable[Limit] = (),
    fixed: Mapping[str, Value] | None = None,
    effort: Effort = THOROUGH,
    on_progress: Callable[[int, int], None] | None = None,
    keep_going: KeepGoing = always,
) -> RefinedPlans:
    """The best plan that changes of single choices lead to, from the best plans of a search.

    choices: those that are open (`refinement.choices.allowed`). forbid: values that none may take. fixed: choices that
    are made in every plan where they mean something, whatever they cost. effort: how much is tried. on_progress: is
    called with the number of predictions made and of the most. keep_going: the budget. PlanError if what is fixed fits
    in none.
    """
    descent = _Descent(result, choices, tuple(forbid), fixed or {}, effort, on_progress, keep_going)
    near = [candidate for candidate in result.near if candidate.step_s < result.best[0].step_s]
    begins = [*result.best[: effort.starts], *near[: effort.large], *descent.for_methods()]
    descents = [(start, steps, _end(start, steps)) for start in begins if (steps := descent.down(start)) is not None]
    if not descents:
        raise PlanError(f"no plan that was found fits with {', '.join(fixed or {})} as fixed; leave it open")
    start, steps, best_end = min(descents, key=lambda entry: entry[2].step_s)
    steps += descent.regrained(best_end)
    best = start, steps, _end(start, steps)
    return RefinedPlans(
        start=best[0],
        steps=best[1],
        best=best[2],
        tried=descent.tried,
        starts=len(begins),
        choices=tuple(choices),
        effort=effort,
        complete=not descent.cut,
        idle=tuple(name for name, value in (fixed or {}).items() if named(name).of(best[2].plan) != value),
    )


def _end(start: FoundPlan, steps: tuple[KeptChange, ...]) -> FoundPlan:
    if not steps:
        return start
    last = steps[-1].prediction
    return FoundPlan(point=start.point, plan=last.plan, prediction=last)


class _Descent:
    """Descents over one search's machines and work; plans are predicted once."""

    def __init__(
        self,
        result: Result,
        choices: Sequence[Choice],
        forbid: tuple[Limit, ...],
        fixed: Mapping[str, Value],
        effort: Effort,
        on_progress: Callable[[int, int], None] | None,
        keep_going: KeepGoing,
    ) -> None:
        self.keep_going = keep_going
        self.result, self.choices, self.forbid, self.effort, self.on_progress = (
            result,
            choices,
            forbid,
            effort,
            on_progress,
        )
        self.fixed = tuple((named(name), value) for name, value in fixed.items())
        self.tried = 0
        self.cut = False
        """Whether something was not predicted, for want of tries or of time."""
        self.best_s = result.best[0].step_s if result.best and not fixed else float("inf")
        """Step of the best plan so far."""
        self.known: dict[Plan, Prediction | None] = {}
        self.slow: dict[Plan, float] = {}
        """Plans of which only the step was asked, with it: no faster than what they were to be."""
        self.barren: Counter[str] = Counter()
        """Choice -> plans that fit in which it gained nothing."""

    def down(self, start: FoundPlan) -> tuple[KeptChange, ...] | None:
        """Changes from a plan on, each of which shortens the step (or makes the plan fit), until none does. None if it
        does not fit in the end, or cannot run with what is fixed."""
        plan, prediction, steps = start.plan, start.prediction, list[KeptChange]()
        for choice, value in self.fixed:
            before = choice.of(plan)
            if value == before or not choice.values(plan, self.result.graph, self.result.cluster):
                continue
            fixed = self._predicted(choice, plan, value)
            if fixed is None:
                return None
            plan, prediction = fixed.plan, fixed
            steps.append(KeptChange(choice=choice, before=before, after=value, prediction=fixed))
        best = prediction.step_s
        if not self._fits(prediction):  # of all choices the one with which it fits and is fastest
            than_s = self.best_s * MAY_FIT
            able = [found for choice in self.choices if (found := self._best_of(choice, plan, than_s)) is not None]
            if not able:
                return None
            first = min(able, key=lambda step: step.prediction.step_s)
            best, plan = first.prediction.step_s, first.prediction.plan
            steps.append(first)
        for _ in range(self.effort.rounds):
            moved = False
            for choice in self.choices:
                if self.barren[choice.name] >= self.effort.barren:
                    continue
                found = self._best_of(choice, plan, best * (1 - self.effort.gain))
                if found is not None:
                    best, plan, moved = found.prediction.step_s, found.prediction.plan, True
                    steps.append(found)
                elif self._open(choice, plan, choice.of(plan)):
                    self.barren[choice.name] += 1
            if not moved:
                break
        self.best_s = min(self.best_s, best)
        return tuple(steps)

    def regrained(self, found: FoundPlan) -> tuple[KeptChange, ...]:
        """Gradient buckets and actions of unequal sizes for the best plan, where Gnomon's runtime runs it (other
        programs have one size); none if they gain nothing."""
        of, plan, result = named("buckets"), found.plan, self.result
        open_ = {choice.name for choice in self.choices} >= {"buckets", "bucket_bytes"}
        fixed = {choice.name for choice, _ in self.fixed} & {"buckets", "bucket_bytes"}
        if not open_ or fixed or result.stack.name != own.NAME or plan.mesh.data_ranks == 1:
            return ()
        if not of.values(plan, result.graph, result.cluster) or any(limit.field == of.name for limit in self.forbid):
            return ()

        def predicted(grain: Grain) -> Prediction | None:
            regrained_plan = self._predicted(of, plan, shown_grain(with_grain(plan, grain)))
            return regrained_plan if regrained_plan is not None and self._fits(regrained_plan) else None

        def seconds(grain: Grain) -> float | None:
            return None if (regrained_plan := predicted(grain)) is None else regrained_plan.step_s

        layers = [len(part) for part in stage_layers(plan, result.graph)]
        cuts = [
            # With one byte a bucket, every layer has a bucket of its own: the finest cut.
            cut_of(replace(plan, overlap=replace(plan.overlap, bucket_bytes=size, buckets=(), fused=())), result.graph)
            for size in (1, plan.overlap.bucket_bytes or USUAL)
        ]
        finest = self._predicted(of, plan, shown_grain(with_grain(plan, Grain(cuts[0], cuts[0]))))
        cuts += [seed(finest)] if finest is not None else []
        regrained_plan = predicted(search(both_ways([*cuts, tuple(layers)]), layers, seconds, tries=GRAINS))
        if regrained_plan is None or regrained_plan.step_s >= found.step_s * (1 - self.effort.gain):
            return ()
        return (KeptChange(choice=of, before=of.of(plan), after=of.of(regrained_plan.plan), prediction=regrained_plan),)

    def for_methods(self) -> Iterator[FoundPlan]:
        """Finds for each published method that is open the plan which it makes fastest: one of the best two under any
        schedule that the method rewrites, FOR_METHODS plans at most. Which of these plans are among the best by
        themselves depends on the memory that they take without it."""
        space, best = self.result.space, self.result.best[:2]
        points = dict.fromkeys(
            candidate.point._replace(schedule=name, virtual_stages=virtual, recompute=space.recompute[0])
            for candidate in best
            for name, virtual in space.pipelines(candidate.point.pp)
        )
        for choice in self.choices:
            able: list[tuple[float, int, Point, Plan]] = []
            for point in list(points)[:FOR_METHODS] if choice.rewrites else ():
                plan = space.plan(point)
                if not choice.values(plan, self.result.graph, self.result.cluster):
                    continue
                predicted = self._predicted(choice, plan, True, within=False)
                if predicted is not None and self._fits(predicted):
                    # len(able) decides between equal steps, so that points and plans are never compared.
                    able.append((predicted.step_s, len(able), point, plan))
            if able:
                _, _, point, plan = min(able)
                prediction = predict(
                    self.result.graph, self.result.cluster, plan, self.result.workload, self.result.stack
                )
                yield FoundPlan(point=point, plan=plan, prediction=prediction)

    def _best_of(self, choice: Choice, plan: Plan, than_s: float = float("inf")) -> KeptChange | None:
        """The value of a choice with which the plan fits, is fastest and below `than_s`; None without one."""
        before = choice.of(plan)
        tried = [
            (value, self._predicted(choice, plan, value, than_s=than_s)) for value in self._open(choice, plan, before)
        ]
        able = [(value, prediction) for value, prediction in tried if prediction is not None and self._fits(prediction)]
        if not able:
            return None
        value, prediction = min(able, key=lambda pair: pair[1].step_s)
        return KeptChange(choice=choice, before=before, after=value, prediction=prediction)

    def _open(self, choice: Choice, plan: Plan, before: Value) -> list[Value]:
        values = choice.values(plan, self.result.graph, self.result.cluster)
        values = tuple(value for value in values if runs_value(self.result.stack, choice, value))
        mine = [limit for limit in self.forbid if limit.field == choice.name]
        return [value for value in values if value != before and not any(limit.forbids(value) for limit in mine)]

    def _predicted(
        self, choice: Choice, plan: Plan, value: Value, *, within: bool = True, than_s: float = float("inf")
    ) -> Prediction | None:
        """None for a plan that cannot run or takes `than_s` or more, and when no predictions (`within` their number)
        or no time is left. Memory is half of what a prediction costs, and asked only of plans that are fast enough."""
        result = self.result
        try:
            changed = choice.make(plan, result.graph, value)
            if not runs_plan(result.stack, changed):
                return None
            # A slow plan is timed again only where more seconds are allowed than it takes.
            if self.slow.get(changed, 0.0) >= than_s:
                return None
            if changed not in self.known:
                # The first plan is tried even when no time is left.
                if (within and self.tried >= self.effort.tries) or (self.tried and not self.keep_going()):
                    self.cut = True
                    return None
                self.tried += 1
                if self.on_progress is not None:
                    self.on_progress(self.tried, self.effort.tries)
                # Stays where the plan raises an error, so that it is not tried again.
                self.known[changed] = None
                timed = TimedPlan.of(result.graph, result.cluster, changed, result.workload, result.stack)
                if timed.step_s >= than_s:
                    del self.known[changed]
                    self.slow[changed] = timed.step_s
                    return None
                self.known[changed] = timed.prediction()
        except GnomonError:
            return None
        predicted = self.known[changed]
        return predicted if predicted is not None and predicted.step_s < than_s else None

    def _fits(self, prediction: Prediction) -> bool:
        return fits_within(prediction, self.result.limit_bytes)
