"""The fastest plan for a batch of sequences of several lengths, with or without a method that is made for such batches.

Bounds of the exact search are for sequences of one length. So it is asked about stand-ins: batches of one length that
resemble the batch, of the mean and of the longest length for plans without a method, and what each method names
(`Method.stand_ins`). Its best plans are then predicted on the true lengths, and from the best of these changes of one
field (`reasons.changes`) and the method's variants are followed as long as the step gets shorter. Every plan in the
answer was predicted on the true lengths. It is not shown to be the best of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from gnomon.errors import GnomonError, PlanError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.methods import Method
from gnomon.methods import every as every_method
from gnomon.methods.method import StandIn, mean_and_longest
from gnomon.plans import Goal, Mesh, Plan, Workload
from gnomon.plans.precision import default_precision
from gnomon.prediction import Prediction, fits_within, predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.budget import KeepGoing, always
from gnomon.search.equal.solve import solve
from gnomon.search.refinement.changes import changes
from gnomon.search.requests import check_request
from gnomon.search.results import Result, memory_limit
from gnomon.search.space.points import Limit, make_space, parse_limit, saving_of
from gnomon.software import Stack, proposes
from gnomon.units import show_bytes

STARTS = 8
"""Plans of each stand-in that are predicted on the true lengths, at most."""

DESCENTS = 6
"""Of each method, plans from which changes of one field are followed: the best of each of so many meshes,
since a change of mesh passes through plans that are slower than both."""

SAMPLED = 32
"""Plans that are predicted on the true lengths where none fits a stand-in, about."""

EXTRA_CHOICES = ("async_tp",)
"""Choices beyond the fields of a point that batches of several lengths have a price for."""


@dataclass(frozen=True, kw_only=True)
class Fastest:
    """The fastest plan that was found with one method, or without."""

    method: str
    """Its name; empty: without one."""
    prediction: Prediction | None
    """On the true lengths; None where no plan fits."""
    smallest: Prediction | None = None
    """Where none fits, the plan that was nearest to it."""
    why: str = ""
    """Where no plan can run, the reason of the last that was tried."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What was found for one batch."""

    ways: tuple[Fastest, ...]
    """Without a method, and with each that was asked for; the fastest first, those without a plan last."""
    runners_up: tuple[Plan, ...]
    """The next fastest plans of the best way."""
    stand_ins: int
    """Batches of one length that were searched."""
    covered: int
    """Plans that these searches covered."""
    predicted: int
    """Plans predicted on the true lengths."""
    limit_bytes: int
    """What a rank's peak may be."""
    complete: bool
    """The budget was not spent."""

    @property
    def best(self) -> Prediction:
        """The fastest of all."""
        best = self.ways[0].prediction
        assert best is not None
        return best


def plan_lengths(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    stack: Stack = PLAIN_STACK,
    goal: Goal | None = None,
    *,
    methods: Sequence[Method] = (),
    base: Plan | None = None,
    fixed: Mapping[str, object] | None = None,
    forbid: Iterable[str | Limit] = (),
    extra_choices: Iterable[str] = EXTRA_CHOICES,
    on_progress: Callable[[int], None] | None = None,
    keep_going: KeepGoing = always,
) -> Lengths:
    """The fastest plans for a batch of several lengths; see the module.

    workload: with `lengths`. methods: those that are tried, each with `stand_ins`. fixed, forbid, base, stack, goal: as
    in `search.plan`. on_progress: is called with the number of plans predicted. keep_going: the budget. PlanError for a
    batch of one length, for methods that are not for such batches, and when no plan fits.
    """
    if len(set(workload.sequence_lengths())) < 2:
        raise PlanError("all sequences of this batch have one length; give it as seq_len, with the size of the batch")
    for method in methods:
        if method.stand_ins is None:
            able = ", ".join(entry.name for entry in every_method() if entry.stand_ins is not None)
            raise PlanError(f"{method.name} is not for batches of several lengths; {able} are")
    limits = tuple(parse_limit(limit) if isinstance(limit, str) else limit for limit in forbid)
    question = _LengthsQuestion(
        graph=graph,
        cluster=cluster,
        workload=workload,
        stack=stack,
        goal=goal,
        base=base or Plan(precision=default_precision(cluster)),
        fixed=dict(fixed or {}),
        limits=limits,
        extra_choices=tuple(name for name in extra_choices if name in EXTRA_CHOICES),
        limit_bytes=memory_limit(cluster, goal or Goal()),
        on_progress=on_progress,
        keep_going=keep_going,
    )
    ways = _followed(question, [question.begun(None), *(question.begun(method) for method in methods)])
    # Ways that fit nowhere stand last.
    ways.sort(key=lambda way: (way.prediction is None, way.prediction.step_s if way.prediction else 0.0))
    best = ways[0].prediction
    if best is None:
        raise PlanError(_nothing(question, ways))
    return Lengths(
        ways=tuple(ways),
        runners_up=question.next_best(best),
        stand_ins=question.stand_ins,
        covered=question.covered,
        predicted=len(question.predictions),
        limit_bytes=question.limit_bytes,
        complete=not question.spent,
    )


def peers() -> tuple[Method, ...]:
    """What every search for such batches tries: sequences packed by tokens, sorted by length, and padded."""
    return tuple(entry for entry in every_method() if entry.searched and entry.stand_ins is not None)


def plain_stand_ins(lengths: Sequence[int]) -> Iterator[StandIn]:
    """Workloads in place of one of many lengths, for plans without a method: as many sequences, of the longest length
    and of the mean."""
    for seq_len in mean_and_longest(lengths):
        yield StandIn(seq_len=seq_len, batch=len(lengths))


def _nothing(question: _LengthsQuestion, ways: Sequence[Fastest]) -> str:
    """Why there is no plan at all."""
    smallest = [way.smallest for way in ways if way.smallest is not None]
    sentence = f"no plan of {question.graph.name} on {question.cluster.name} was found that fits these lengths"
    if not smallest:
        why = next((way.why for way in ways if way.why), "the budget was spent before one was predicted (--budget)")
        return f"{sentence}: {why}"
    least = min(smallest, key=lambda prediction: prediction.tightest.peak_bytes)
    return (
        f"{sentence} in {show_bytes(question.limit_bytes)} a device; the smallest that was predicted takes "
        f"{show_bytes(least.tightest.peak_bytes)}: use more devices, or --methods chunkflow for long sequences"
    )


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """Plans with one method, or without, from which changes are followed."""

    method: Method | None
    starts: tuple[Prediction, ...]
    """The best of each mesh, the best first."""
    why: str
    """Why the last plan that could not run cannot."""


def _followed(question: _LengthsQuestion, begun: Sequence[_Begun]) -> list[Fastest]:
    """The fastest plan of each way: changes are followed from the best start of every way first, so that a budget that
    is spent is spent on all of them."""
    ends: list[list[Prediction]] = [list(way.starts) for way in begun]
    for turn in range(DESCENTS):
        for way, reached in zip(begun, ends, strict=True):
            if turn < len(way.starts):
                reached.append(question.descended(way.starts[turn], way.method))
    ways = []
    for way, reached in zip(begun, ends, strict=True):
        best = min(reached, key=question.rank, default=None)
        fits = best is not None and question.fits(best)
        ways.append(
            Fastest(
                method="" if way.method is None else way.method.name,
                prediction=best if fits else None,
                smallest=None if fits else best,
                why="" if best is not None else way.why,
            )
        )
    return ways


@dataclass(kw_only=True)
class _LengthsQuestion:
    """The question, and every plan that was predicted on the true lengths."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    stack: Stack
    goal: Goal | None
    base: Plan
    fixed: dict[str, object]
    limits: tuple[Limit, ...]
    extra_choices: tuple[str, ...]
    limit_bytes: int
    on_progress: Callable[[int], None] | None
    keep_going: KeepGoing
    predictions: dict[Plan, Prediction | str] = field(default_factory=dict)
    """Plan -> its prediction, or why it cannot run."""
    solved: dict[object, Result] = field(default_factory=dict)
    """Searches of stand-ins."""
    stand_ins: int = 0
    covered: int = 0
    spent: bool = False

    def begun(self, method: Method | None) -> _Begun:
        """The best plans of each stand-in, on the true lengths."""
        lengths, devices = self.workload.sequence_lengths(), self.cluster.num_devices
        stand_ins = plain_stand_ins(lengths)
        if method is not None:
            assert method.stand_ins is not None
            stand_ins = method.stand_ins(lengths, devices)
        why, able = "on these lengths it has nothing to do", list[Prediction]()
        for stand_in in stand_ins:
            try:
                plans = self.searched(stand_in)
            except PlanError as error:
                why = str(error)
                continue
            tried = [self.predicted(plan) for plan in plans]
            able += [prediction for prediction in tried if isinstance(prediction, Prediction)]
            why = next((reason for reason in tried if isinstance(reason, str) and reason), why)
        # In order of rank, so setdefault keeps the best of each mesh.
        starts: dict[Mesh, Prediction] = {}
        for start in sorted(able, key=self.rank):
            starts.setdefault(_mesh(start.plan), start)
        return _Begun(method=method, starts=tuple(starts.values())[:DESCENTS], why=why)

    def searched(self, stand_in: StandIn) -> list[Plan]:
        """The best plans of a stand-in, as plans for the true batch. PlanError when there is none."""
        clash = [name for name, value in stand_in.fixed.items() if self.fixed.get(name, value) != value]
        if clash:
            name = clash[0]
            raise PlanError(f"it needs {name} = {stand_in.fixed[name]}, and {name} = {self.fixed[name]} is fixed")
        if not self.keep_going():
            self.spent = True
            return []
        work = replace(self.workload, lengths=(), global_batch_size=stand_in.batch, seq_len=stand_in.seq_len)
        fixed = {**self.fixed, **stand_in.fixed}
        limits = (*self.limits, *map(parse_limit, stand_in.forbid))
        check_request(self.graph, self.cluster, work, self.base, fixed, self.cluster.num_devices)
        space = make_space(
            self.graph, self.cluster, work, base=self.base, fixed=fixed, limits=limits, stack=self.stack,
            extra_choices=self.extra_choices,
        )  # fmt: skip
        # All that the search depends on; `passes` are put on its plans afterwards.
        key = stand_in.seq_len, stand_in.batch, tuple(stand_in.fixed.items()), stand_in.forbid
        if key not in self.solved:  # methods that order sequences alone have the same stand-ins
            self.solved[key] = solve(
                self.graph,
                self.cluster,
                work,
                space,
                self.stack,
                self.goal,
                top=STARTS,
                diverse=True,
                keep_going=self.keep_going,
            )
            self.covered += self.solved[key].counts.covered
            self.stand_ins += 1
        result = self.solved[key]
        near = [*result.best, *result.near[:STARTS], *([result.smallest] if result.smallest else [])]
        plans = dict.fromkeys(entry.plan for entry in near)
        if not plans:  # nothing fits the stand-in: begin anywhere, the true lengths may be kinder
            plans = dict.fromkeys(map(space.plan, islice(space.points(), 0, None, max(1, space.size // SAMPLED))))
        return [replace(plan, schedule=replace(plan.schedule, passes=stand_in.passes)) for plan in plans]

    def predicted(self, plan: Plan) -> Prediction | str:
        """Predicts a plan on the true lengths, once; why it cannot run; empty when the budget is spent."""
        if plan not in self.predictions:
            if self.predictions and not self.keep_going():
                self.spent = True
                return ""
            try:
                self.predictions[plan] = predict(self.graph, self.cluster, plan, self.workload, self.stack)
            except GnomonError as error:
                self.predictions[plan] = str(error)
            if self.on_progress is not None:
                self.on_progress(len(self.predictions))
        return self.predictions[plan]

    def fits(self, prediction: Prediction) -> bool:
        """Whether every rank stays within the limit, and the host too."""
        return fits_within(prediction, self.limit_bytes)

    def rank(self, prediction: Prediction) -> tuple[bool, float]:
        """What is better comes first: plans that fit by their step, the others by their peak."""
        if self.fits(prediction):
            return False, prediction.step_s
        return True, float(max(rank.peak_bytes for rank in prediction.memory))

    def descended(self, start: Prediction, method: Method | None) -> Prediction:
        """Goes from one plan to the first better one that is one change away, as long as there is one."""
        best, moved = start, True
        while moved:
            moved = False
            for plan in self.neighbours(best.plan, method):
                near = self.predicted(plan)
                if isinstance(near, Prediction) and self.rank(near) < self.rank(best):
                    best, moved = near, True
                    break
        return best

    def neighbours(self, plan: Plan, method: Method | None) -> Iterator[Plan]:
        """Plans one change away that are allowed: another value of a field, or of the method's parameters."""
        experts = any(block.does("routes") for block in self.graph.blocks)
        near = [changed for _, changed in changes(plan, experts=experts)]
        if method is not None:
            near += method.variants(plan)
            if plan.schedule.passes:
                near += method.variants(replace(plan, schedule=replace(plan.schedule, passes=())))
        for changed in near:
            if (method is None or method.refusal(changed) is None) and self.allows(changed):
                if proposes(self.stack, plan, changed):
                    yield changed

    def allows(self, plan: Plan) -> bool:
        """Whether a plan keeps to what is fixed and forbidden."""
        values = fields_of(plan)
        fixed_fits = all(values.get(name, value) == value for name, value in self.fixed.items())
        return fixed_fits and not any(
            limit.forbids(values[limit.field]) for limit in self.limits if limit.field in values
        )

    def next_best(self, best: Prediction) -> tuple[Plan, ...]:
        """The next fastest plans that fit; of those that run alike (a ZeRO stage over one rank) one."""
        able = [entry for entry in self.predictions.values() if isinstance(entry, Prediction) and self.fits(entry)]
        able.sort(key=self.rank)
        # From the slowest on, so that of equal entries the first in `able` stays; the order is turned back below.
        alike = {(entry.step_s, entry.tightest.peak_bytes): entry.plan for entry in reversed(able)}
        alike.pop((best.step_s, best.tightest.peak_bytes), None)
        return tuple(reversed(alike.values()))[:STARTS]


def _mesh(plan: Plan) -> Mesh:
    """Its mesh, whatever the data-parallel ranks are divided into."""
    return replace(plan.mesh, dp_replicate=1, dp_shard=plan.mesh.data_ranks)


def fields_of(plan: Plan) -> dict[str, object]:
    """Field of a `Point` -> its value in a plan with one mesh."""
    mesh, schedule, layout = plan.mesh, plan.schedule, plan.layout
    return {
        **{name: getattr(mesh, name) for name in ("tp", "cp", "ep", "pp", "dp_replicate", "dp_shard")},
        "schedule": schedule.name,
        "virtual_stages": schedule.virtual_stages,
        "micro_batch_size": schedule.micro_batch_size,
        "sequence_parallel": layout.sequence_parallel,
        "keep_gathered": layout.keep_gathered,
        "context": layout.context,
        "recompute": saving_of(plan.saved),
        "zero": plan.optimizer.zero,
        "overlap": plan.overlap.grad_reduce,
    }
