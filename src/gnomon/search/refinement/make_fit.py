"""Plans that fit by choices beyond the exact search: offload, small buckets, parameters that are not gathered ahead.

`Squeeze.fastest_fit` finds a plan where none of the exact search fits, and says which choices it needs and what they
cost; `Squeeze.smaller` makes plans with less memory of one that fits. Leaves out which work is asked about
(`search.questions.goals`, `search.questions.largest`), and choices that only gain time (`search.refinement.refine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gnomon import orders
from gnomon.errors import GnomonError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Plan, Workload
from gnomon.prediction import Prediction, fits_within, predict
from gnomon.search.equal.solve import solve
from gnomon.search.refinement.choices import BUCKETS, Choice, Value
from gnomon.search.results import FoundPlan, memory_limit
from gnomon.search.space.points import Limit, Point, Space, make_space
from gnomon.software import Stack

LEAN: Mapping[str, Value] = {"prefetch": 0, "bucket_bytes": BUCKETS[0], "optimizer_offload": True}
"""Choice -> the value that spares most memory, for choices that the exact search can have in its base plan; the one
that costs most time last."""

HOST = "activation_offload"
"""The choice that spares memory and that the exact search cannot have."""

MESHES = 16
"""Meshes that are tried with their activations on the host, for one size of the work."""

MOST = 8
"""Plans of a search of which one must fit the host's memory too."""


@dataclass(frozen=True, kw_only=True)
class Spare:
    """What may be changed to spare memory."""

    choices: tuple[Choice, ...] = ()
    """The choices that are open (`refinement.choices.allowed`); none leaves everything as the exact search has it."""
    forbid: tuple[Limit, ...] = ()
    """Values that they may not take."""
    on_progress: Callable[[str], None] | None = None
    """A function that is called with the name of the work that is tried next."""


@dataclass(frozen=True, kw_only=True)
class FittingPlan:
    """A plan that fits by such choices."""

    candidate: FoundPlan
    """The plan with the choices, which fits."""
    choices: tuple[tuple[Choice, Value], ...]
    """What it needs: without any one of them it does not fit."""
    without: Prediction
    """The same plan without them, which does not fit."""

    @property
    def cost(self) -> float:
        """Share by which they lengthen the step of that plan."""
        return self.candidate.step_s / self.without.step_s - 1


@dataclass(frozen=True, kw_only=True)
class Squeeze:
    """Machines and work, and what may be changed."""

    graph: Graph
    """The model."""
    cluster: Cluster
    """The machines."""
    workload: Workload
    """The batch of a step."""
    stack: Stack
    """The program that runs it."""
    base: Plan
    """The plan whose other fields every plan takes over."""
    fixed: Mapping[str, object]
    """Field of a plan -> its only value."""
    limits: tuple[Limit, ...]
    """Conditions that no plan may meet."""
    goal: Goal
    """How much of a device's memory may be filled."""
    spare: Spare
    """The choices that may be made to have it fit."""

    def fastest_fit(self, like: Iterable[Point] = ()) -> FittingPlan | None:
        """The fastest of the plans tried that fit, where no plan of the exact search does; None where none does.

        Tried are: the exact search's over a base plan with the values of `LEAN`, without and with the optimizer on the
        host; and plans without recompute, all of whose activations wait on the host, on up to `MESHES` meshes, those of
        `like` (points that fit smaller work) and those that divide sequences most first.
        """
        bases = self._bases()
        able = [searched for base in bases[1:] if (searched := self._searched(base)) is not None]
        able += self._on_host(bases[-1], like)
        for candidate in sorted(able, key=lambda candidate: candidate.step_s):
            if trimmed := self._trimmed(candidate):
                return trimmed
        return None

    def alike(self, other: FittingPlan) -> FittingPlan | None:
        """A plan that fits by the point and choices of a plan for other work; None where it does not. Quicker than
        `fastest_fit`, and not the fastest plan."""
        point = other.candidate.point
        try:
            plan = self._space(self.base).plan(point)
        except GnomonError:
            return None
        for choice, value in other.choices:
            layers = self._layers(plan) if choice.name == HOST else ()
            plan = choice.make(plan, self.graph, max(layers, default=value))
        predicted = self._predicted(plan)
        if predicted is None or not self._fits(predicted):
            return None
        return self._trimmed(FoundPlan(point=point, plan=plan, prediction=predicted))

    def smaller(self, candidate: FoundPlan) -> Iterator[FoundPlan]:
        """Yields plans with less memory than one that fits: with each value of LEAN alone, with all of them, and with
        these and activations on the host; where it recomputes, also the same without recompute."""
        tried: dict[Plan, Point] = {}
        for plan, point in self._starts(candidate):
            every = plan
            for name, value in LEAN.items():
                if (changed := self._with(plan, name, value)) is not None:
                    tried.setdefault(changed, point)
                    every = self._with(every, name, value) or every
            tried.setdefault(every, point)
            for layers in sorted(self._layers(plan)):
                for start in (plan, every):
                    if (changed := self._with(start, HOST, layers)) is not None:
                        tried.setdefault(changed, point)
        for plan, point in tried.items():
            prediction = None if plan == candidate.plan else self._predicted(plan)
            if prediction is not None and self._fits(prediction):
                yield FoundPlan(point=point, plan=plan, prediction=prediction)

    def _starts(self, candidate: FoundPlan) -> tuple[tuple[Plan, Point], ...]:
        """The candidate, and where it recomputes and may keep everything, the same without recompute."""
        plain = (candidate.plan, candidate.point)
        if candidate.point.recompute == "none" or not self._recomputes_nothing():
            return (plain,)
        other = replace(candidate.plan, saved=replace(candidate.plan.saved, preset="none"))
        return plain, (other, candidate.point._replace(recompute="none"))

    def _recomputes_nothing(self) -> bool:
        """Whether the space has plans without recompute."""
        try:
            return "none" in self._space(self.base).recompute
        except GnomonError:
            return False

    def _space(self, base: Plan) -> Space:
        return make_space(
            self.graph,
            self.cluster,
            self.workload,
            base=base,
            fixed=self.fixed,
            limits=self.limits,
            stack=self.stack,
        )

    def _bases(self) -> list[Plan]:
        """The base plan; the base plan with the values of `LEAN` that are open but the optimizer's offload, if there
        are any; and with that too, unless gradients are clipped: that choice is tried without clipping only."""
        lean, bases = self.base, [self.base]
        for name, value in LEAN.items():
            choice = self._open(name, value)
            if choice is None or (name == "optimizer_offload" and lean.optimizer.clip):
                continue
            changed = choice.make(lean, self.graph, value)
            if name == "optimizer_offload" and lean != self.base:
                bases.append(lean)
            lean = changed
        return bases if lean == bases[-1] else [*bases, lean]

    def _open(self, name: str, value: Value) -> Choice | None:
        """The choice, if it is open and may take the value."""
        for choice in self.spare.choices:
            if choice.name == name:
                mine = (limit for limit in self.spare.forbid if limit.field == name)
                return None if any(limit.forbids(value) for limit in mine) else choice
        return None

    def _with(self, plan: Plan, name: str, value: Value) -> Plan | None:
        """The plan with a value of a choice; None where it means nothing, is not open or is there already."""
        choice = self._open(name, value)
        if choice is None or choice.of(plan) == value or not choice.values(plan, self.graph, self.cluster):
            return None
        return choice.make(plan, self.graph, value)

    def _layers(self, plan: Plan) -> tuple[int, ...]:
        """The numbers of a stage's layers whose activations may wait on the host, over 0; () where none may."""
        for choice in self.spare.choices:
            if choice.name == HOST:
                return tuple(int(value) for value in choice.values(plan, self.graph, self.cluster) if value)
        return ()

    def _searched(self, base: Plan) -> FoundPlan | None:
        """The fastest of the exact search's plans over a base plan that fits the host too."""
        try:
            result = solve(self.graph, self.cluster, self.workload, self._space(base), self.stack, self.goal, top=MOST)
        except GnomonError:
            return None
        return next((candidate for candidate in result.best if self._fits(candidate.prediction)), None)

    def _on_host(self, base: Plan, like: Iterable[Point]) -> Iterator[FoundPlan]:
        """Yields the plans that fit with all their activations on the host, over a base plan; at most MESHES tried."""
        tried = 0
        for point in self._points(base, like):
            if tried >= MESHES:
                break
            plan = self._space(base).plan(point)
            layers = self._layers(plan)
            offloaded = self._with(plan, HOST, max(layers)) if layers else None
            predicted = None if offloaded is None else self._predicted(offloaded)
            if predicted is not None:  # one that cannot run costs nothing
                tried += 1
                if self._fits(predicted):
                    yield FoundPlan(point=point, plan=predicted.plan, prediction=predicted)

    def _points(self, base: Plan, like: Iterable[Point]) -> Iterator[Point]:
        """Yields points without recompute: those of `like`, then all with the smallest microbatch, sequence parallelism
        and the highest ZeRO stage that there is; those whose tensor parallelism stays inside a node first, and of these
        those that divide a sequence's activations over most ranks (tp x cp)."""
        if self._open(HOST, 1) is None:
            return
        try:
            space = self._space(base)
        except GnomonError:
            return
        if "none" not in space.recompute:
            return
        yield from dict.fromkeys(point._replace(recompute="none") for point in like)
        usual = orders.DEFAULT if orders.DEFAULT in space.schedule else space.schedule[0]
        few = replace(
            space,
            schedule=(usual,),
            micro_batch_size=space.micro_batch_size[:1],
            sequence_parallel=space.sequence_parallel[-1:],
            keep_gathered=space.keep_gathered[:1],
            context=space.context[:1],
            recompute=("none",),
            zero=space.zero[-1:],
            overlap=space.overlap[:1],
        )
        node = min(group.node.count for group in self.cluster.groups)
        # Points that stand for one plan are tried once.
        every = {few.canonical(point) for point in few.points()}
        yield from sorted(every, key=lambda p: (p.tp > node, -p.tp * p.cp, p.pp, -p.dp_shard, p.tp, -p.ep))

    def _trimmed(self, candidate: FoundPlan) -> FittingPlan | None:
        """The plan with only those choices that it needs. None if it needs none, or cannot run without them.

        Choices go back to their values in the base plan one after the other, while the plan fits: the one that costs
        most time first, activations on the host last and layer by layer.
        """
        needed: list[tuple[Choice, Value]] = []
        # LEAN has what costs most last, so in reverse that goes back first.
        names = (*reversed(tuple(LEAN)), HOST)
        for choice in sorted(
            self.spare.choices, key=lambda option: names.index(option.name) if option.name in names else -1
        ):
            usual, now = choice.of(self.base), choice.of(candidate.plan)
            if choice.name not in names or now == usual:
                continue
            fewer = [n for n in sorted(self._layers(candidate.plan)) if n < int(now)] if choice.name == HOST else []
            # Without the choice first, then with as few layers as may do; the first value that fits stays.
            for value in (usual, *(n for n in fewer if self._open(HOST, n))):
                other = self._predicted(choice.make(candidate.plan, self.graph, value))
                if other is not None and self._fits(other):
                    candidate, now = replace(candidate, plan=other.plan, prediction=other), value
                    break
            needed += [] if now == usual else [(choice, now)]
        plan = candidate.plan
        for choice, _ in needed:
            plan = choice.make(plan, self.graph, choice.of(self.base))
        without = self._predicted(plan) if needed else None
        return None if without is None else FittingPlan(candidate=candidate, choices=tuple(needed), without=without)

    def _predicted(self, plan: Plan) -> Prediction | None:
        """Predicts a plan; None for one that cannot run."""
        try:
            return predict(self.graph, self.cluster, plan, self.workload, self.stack)
        except GnomonError:
            return None

    def _fits(self, prediction: Prediction) -> bool:
        """Whether every rank's peak is within the goal's limit, and the host's memory holds what waits there."""
        return fits_within(prediction, memory_limit(self.cluster, self.goal))
