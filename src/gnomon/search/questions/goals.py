"""Other questions than the fastest plan, each answered by searches: fronts, fewest or cheapest machines, longest
sequences.

`pareto`, `fewest_devices`, `among` and `longest` return `Case`s: machines and work with the best plan there, and what
they cost. They are as exact as `solve` is, for the space that it searches; what is assumed beside that stands with
each. Leaves out printing, sweeps (`search.questions.sweep`) and models of several sizes (`search.questions.largest`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import product
from math import prod
from typing import Literal

from gnomon.errors import PlanError, UnpricedError
from gnomon.graph import BF16, FUSED, Graph, Setting, graph_work
from gnomon.hardware import Cluster, Rent, rent
from gnomon.hardware.kinds import is_mixed, kinds_of
from gnomon.plans import Goal, Plan, Workload
from gnomon.search.budget import always
from gnomon.search.equal.solve import solve
from gnomon.search.mixed.devices import TRIES, Large
from gnomon.search.mixed.plan_mixed import NOT_TRIED, SPENT, fitting, memory_limits, plan_mixed
from gnomon.search.mixed.results import MixedFound
from gnomon.search.refinement.make_fit import FittingPlan, Spare, Squeeze
from gnomon.search.requests import check_request
from gnomon.search.results import FoundPlan, Result
from gnomon.search.space.points import Limit, make_space
from gnomon.software import Stack
from gnomon.units import show_bytes, show_seconds

FASTEST_NODES = 2000
"""Partial pipelines over kinds that are looked at for the fastest plan of the longest sequence or largest model. There
nearly every plan is too large, which bounds on memory show of each pipeline but not of the first ranks of one: the
search would take minutes."""

MOST_CHOICES = 64
"""Choices of whole nodes of several kinds that are searched for one question."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Machines and work, and the best plan there."""

    label: str
    """What was varied, as in `seq_len=4096`."""
    cluster: Cluster
    """The machines of this case."""
    workload: Workload
    """The batch of a step of this case."""
    best: FoundPlan | MixedFound | None
    """None where nothing runs or fits; a `MixedFound` on machines of several kinds."""
    why: str = ""
    """Why there is none."""
    rent: Rent | None = None
    """What the machines cost; None where no price is known."""
    num_unseen: int = 0
    """Plans of its search that were not looked at before the budget was spent."""
    fit: FittingPlan | None = None
    """By which choices beyond the exact search `best` fits, where no plan of that does."""

    @property
    def tokens(self) -> float | None:
        """Tokens of a step; samples where the model has no sequences."""
        return None if self.best is None else tokens_of(self.best)

    @property
    def dollars_per_step(self) -> float | None:
        """Rent of a step's time; None without a plan or a price."""
        if self.best is None or self.rent is None:
            return None
        return self.rent.dollars_per_hour / 3600 * self.best.step_s

    @property
    def dollars_per_token(self) -> float | None:
        """The same over the tokens of a step."""
        dollars, tokens = self.dollars_per_step, self.tokens
        return None if dollars is None or tokens is None else dollars / tokens


def tokens_of(candidate: FoundPlan | MixedFound) -> float:
    """Tokens of a step, all devices together."""
    prediction = candidate.prediction
    return round(prediction.tokens_per_s_per_device * prediction.plan.num_devices * candidate.step_s)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A search with machines, work and memory left open."""

    graph: Graph
    """The model."""
    stack: Stack
    """The program that runs it."""
    base: Plan
    """The plan whose other fields every plan takes over."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Field of a plan -> its only value."""
    limits: tuple[Limit, ...] = ()
    """Conditions that no plan may meet."""
    goal: Goal = field(default_factory=Goal)
    """How much of a device's memory may be filled."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Dollars of a device-hour, as `hardware.rent` takes them."""
    improve: Callable[[Result], FoundPlan] | None = None
    """A plan made of a search's, no slower: `search.refinement.refine`. None: the search's best as it is."""
    tries: int = TRIES
    """Predictions of a search over several kinds of devices, at most; its answer may then not be the best."""
    extra_choices: tuple[str, ...] = ()
    """Choices that the exact search has too, as `make_space` takes them, on devices of one kind."""
    spare: Spare = field(default_factory=Spare)
    """Choices that make further work fit, and plans of a front with less memory, on devices of one kind."""
    keep_going: Callable[[], bool] = always
    """The budget, asked before and during each search. Once it is spent, what was found until then is the answer, and
    cases say what was not looked at."""
    on_progress: Callable[[str], None] | None = None
    """Is called by `longest` and `largest` with the case that is tried next."""

    def best(
        self,
        cluster: Cluster,
        workload: Workload,
        *,
        label: str = "",
        memory_bytes: int | None = None,
        known: Sequence[MixedFound] = (),
        most_nodes: int | None = None,
    ) -> Case:
        """Finds the fastest plan; without one, the reason. memory_bytes: a limit in place of the goal's. known,
        most_nodes: of a search over several kinds, as `plan_mixed` takes them."""
        goal = self.goal if memory_bytes is None else replace(self.goal, memory_bytes=memory_bytes)
        case = Case(label=label, cluster=cluster, workload=workload, best=None, rent=rent(cluster, self.prices))
        if is_mixed(cluster):
            return self._over_kinds(case, memory_bytes, known, most_nodes)
        try:
            check_request(self.graph, cluster, workload, self.base, self.fixed, cluster.num_devices)
            space = make_space(
                self.graph,
                cluster,
                workload,
                base=self.base,
                fixed=self.fixed,
                limits=self.limits,
                stack=self.stack,
                extra_choices=self.extra_choices,
            )
        except PlanError as error:
            return replace(case, why=str(error))
        try:
            result = solve(self.graph, cluster, workload, space, self.stack, goal, top=1, keep_going=self.keep_going)
        except UnpricedError as error:  # a kind of device that lacks the precision
            return replace(case, why=str(error))
        case = replace(case, num_unseen=result.counts.num_unseen)
        if result.best:
            try:
                return replace(case, best=result.best[0] if self.improve is None else self.improve(result))
            except PlanError as error:  # what is fixed beyond the search fits in none
                return replace(case, why=str(error))
        if case.num_unseen:
            return replace(case, why=NOT_TRIED)
        large = result.counts.too_large or result.counts.num_predicted
        return replace(case, why="nothing fits in memory" if large else "nothing can run")

    def _over_kinds(
        self, case: Case, memory_bytes: int | None, known: Sequence[MixedFound], most_nodes: int | None
    ) -> Case:
        """The case with the best plan over its machines' kinds, or on one of them."""
        try:
            result = plan_mixed(
                self.graph,
                case.cluster,
                case.workload,
                self.stack,
                self.goal,
                base=self.base,
                fixed=self.fixed,
                forbid=self.limits,
                top=1,
                tries=self.tries,
                most_bytes=memory_bytes,
                known=known,
                most_nodes=most_nodes,
                keep_going=self.keep_going,
            )
        except (PlanError, UnpricedError) as error:
            return replace(case, why=str(error))
        return replace(case, best=result.best[0])

    def fitting(
        self,
        cluster: Cluster,
        workload: Workload,
        *,
        label: str,
        like: Sequence[Case] = (),
        only: bool = False,
        large: Large | None = None,
    ) -> Case:
        """A plan that fits; without one, the reason. On machines of several kinds not the fastest, which takes longer
        to find: `like` are cases whose plans are tried first, and with `only` no others. large: what need not be looked
        at."""
        case = Case(label=label, cluster=cluster, workload=workload, best=None, rent=rent(cluster, self.prices))
        if not self.keep_going():
            return replace(case, why=NOT_TRIED)
        if self.on_progress is not None:
            self.on_progress(label)
        if not is_mixed(cluster):
            return replace(self, improve=None).best(cluster, workload, label=label)
        known = tuple(other.best for other in like if isinstance(other.best, MixedFound))
        try:
            candidate = fitting(
                self.graph,
                cluster,
                workload,
                self.stack,
                self.goal,
                base=self.base,
                fixed=self.fixed,
                forbid=self.limits,
                like=known,
                only=only,
                large=large,
                keep_going=self.keep_going,
            )
        except (PlanError, UnpricedError) as error:
            return replace(case, why=str(error))
        return replace(case, best=candidate)

    def fastest(self, case: Case) -> Case:
        """The same case with the fastest plan, where `fitting` or `squeezed` has found another; over
        several kinds the best of `FASTEST_NODES` partial pipelines. As it is when the time allowed is spent."""
        if not self.keep_going():
            return case
        if case.fit is not None:
            better = self.squeeze(case.cluster, case.workload).fastest_fit([case.fit.candidate.point])
            slower = better is None or better.candidate.step_s >= case.fit.candidate.step_s
            return case if better is None or slower else replace(case, best=better.candidate, fit=better)
        if self.improve is None and not is_mixed(case.cluster):
            return case
        known = (case.best,) if isinstance(case.best, MixedFound) else ()
        best = self.best(case.cluster, case.workload, label=case.label, known=known, most_nodes=FASTEST_NODES)
        if self.spares and isinstance(best.best, FoundPlan):  # activations on the host in place of recompute
            others = (best.best, *self.squeeze(case.cluster, case.workload).smaller(best.best))
            best = replace(best, best=min(others, key=lambda candidate: candidate.step_s))
        if best.best is None or (case.best is not None and case.best.step_s <= best.best.step_s):
            return case
        return best

    @property
    def spares(self) -> bool:
        """Whether choices are open that may make further work fit."""
        return bool(self.spare.choices)

    def squeeze(self, cluster: Cluster, workload: Workload) -> Squeeze:
        """What makes plans fit by choices beyond the exact search."""
        return Squeeze(
            graph=self.graph,
            cluster=cluster,
            workload=workload,
            stack=self.stack,
            base=self.base,
            fixed=self.fixed,
            limits=self.limits,
            goal=self.goal,
            spare=self.spare,
        )

    def squeezed(self, case: Case, like: Iterable[Case]) -> Case:
        """A case without a plan, with one that fits by choices beyond the exact search, if one is found. like: cases of
        smaller work, whose plans are tried first."""
        if is_mixed(case.cluster) or not self.spares or case.best is not None:
            return case
        if not self.keep_going():
            return replace(case, why=f"{case.why}; choices beyond the exact search not tried: {SPENT}")
        if self.spare.on_progress is not None:
            self.spare.on_progress(case.label)
        try:
            check_request(self.graph, case.cluster, case.workload, self.base, self.fixed, case.cluster.num_devices)
        except PlanError:
            return case
        known = [*like]
        squeeze = self.squeeze(case.cluster, case.workload)
        fitted = next((f for other in known if other.fit and (f := squeeze.alike(other.fit))), None)
        fitted = fitted or squeeze.fastest_fit(other.best.point for other in known if isinstance(other.best, FoundPlan))
        return case if fitted is None else replace(case, best=fitted.candidate, why="", fit=fitted)


def pareto(question: Question, cluster: Cluster, workload: Workload, *, resolution_bytes: int = 1) -> tuple[Case, ...]:
    """Plans that no other beats in both time and peak memory, the fastest first.

    Each search allows `resolution_bytes` less than the plan before it takes. With 1 the front is the whole one: a plan
    of it that is slower than one found takes less memory, so the next search allows it, and returns it or one between.
    With more, plans may be left out that save less than so many bytes on the one before; none is shown that is beaten
    by a plan shown. With choices that spare memory (`Question.spare`), what `Squeeze.smaller` makes of these plans is
    added where none beats it; what these choices could do for other plans is not known. PlanError when nothing fits.
    """
    cases: list[Case] = []
    limit, why = max(memory_limits(kinds_of(cluster), question.goal)), ""
    while limit > 0:
        case = question.best(cluster, workload, memory_bytes=limit)
        if case.best is None:
            why = case.why
            break
        # The next search must find less memory than this plan takes.
        peak = _peak_bytes(case.best)
        while cases and cases[-1].best is not None and cases[-1].best.step_s >= case.best.step_s:
            cases.pop()  # as fast, with more memory
        cases.append(replace(case, label=show_bytes(limit)))
        limit = peak - resolution_bytes
    if not cases:
        advice = "; allow more (--memory), use more devices or a smaller batch" if "memory" in why else ""
        raise PlanError(f"there is no front of {question.graph.name} on {cluster.name}: {why}{advice}")
    if is_mixed(cluster) or not question.spares:
        return tuple(cases)
    return _front_of([*cases, *_smaller(question, cases)], resolution_bytes)


def _smaller(question: Question, cases: Sequence[Case]) -> Iterator[Case]:
    """Plans with less memory than those of the cases, by choices beyond the exact search."""
    for case in cases:
        if question.spare.on_progress is not None:
            question.spare.on_progress(case.label)
        if isinstance(case.best, FoundPlan):
            for candidate in question.squeeze(case.cluster, case.workload).smaller(case.best):
                yield replace(case, label=show_bytes(_peak_bytes(candidate)), best=candidate)


def _front_of(cases: Iterable[Case], resolution_bytes: int) -> tuple[Case, ...]:
    """Those that no other beats, the fastest first, each with so much less memory than the one before."""
    able = [(case.best.step_s, _peak_bytes(case.best), case) for case in cases if case.best is not None]
    front: list[Case] = []
    last = float("inf")
    for _, peak, case in sorted(able, key=lambda entry: entry[:2]):
        if peak <= last - resolution_bytes:
            front.append(case)
            last = peak
    return tuple(front)


def _peak_bytes(candidate: FoundPlan | MixedFound) -> int:
    return max(rank.peak_bytes for rank in candidate.prediction.memory)


def fewest_devices(
    question: Question, clusters: Iterable[Cluster], workload: Workload, max_step_s: float
) -> tuple[Case, ...]:
    """Clusters in the order given, up to the first on which a step takes no longer than `max_step_s`; the last one is
    the answer, if its plan is that fast. See `fast_enough`."""
    cases: list[Case] = []
    for case in fast_enough(question, clusters, workload, max_step_s):
        cases.append(case)
        if case.best is not None and case.best.step_s <= max_step_s:
            break
    return tuple(cases)


def fast_enough(
    question: Question, clusters: Iterable[Cluster], workload: Workload, max_step_s: float
) -> Iterator[Case]:
    """The best plan on each cluster. One on which the peak of all devices would not reach `max_step_s` is not searched:
    a kernel takes its FLOPs over its device's peak or longer, and a causal mask halves attention at most."""
    for cluster in clusters:
        label = f"devices={cluster.num_devices}"
        least = peak_step_s(question, cluster, workload)
        if least > max_step_s:
            why = f"even at the peak of every device a step takes {show_seconds(least)}"
            yield Case(
                label=label,
                cluster=cluster,
                workload=workload,
                best=None,
                why=why,
                rent=rent(cluster, question.prices),
            )
        else:
            yield question.best(cluster, workload, label=label)


def peak_step_s(question: Question, cluster: Cluster, workload: Workload) -> float:
    """Seconds of a step if every device ran at its peak all the time, nothing were recomputed or waited for."""
    lengths = workload.sequence_lengths()
    sizes = {"batch": len(lengths), "seq": max(lengths), **dict(workload.sizes)}
    work = graph_work(question.graph, FUSED, Setting(sizes=sizes, dtypes=BF16, causal_flops="half"))
    low = question.base.precision.fp8
    dtype = question.base.precision.compute if low is None else "fp4" if low.recipe == "nvfp4" else "fp8"
    rates = (g.node.device.flops_per_s(dtype) * g.node.count * g.count for g in cluster.groups)
    return float(work.total.matmul_flops) / sum(rates)


def among(question: Question, clusters: Iterable[Cluster], workload: Workload) -> tuple[Case, ...]:
    """The best plan on each of several clusters."""
    return tuple(
        question.best(cluster, workload, label=f"{cluster.name}, {cluster.num_devices} devices") for cluster in clusters
    )


def best_case(cases: Iterable[Case], by: Literal["step", "cost"], max_step_s: float = float("inf")) -> Case | None:
    """The case with the shortest step or the cheapest token, of those whose step is no longer than `max_step_s`; of
    equal ones that with fewer devices. PlanError for the cheapest where machines have no price."""
    able = [case for case in cases if case.best is not None and case.best.step_s <= max_step_s]
    if by == "cost" and (unknown := [case for case in able if case.rent is None]):
        raise PlanError(
            f"no price of {unknown[0].cluster.name} is known; give dollars of a device-hour with --price 2.5, or "
            f"--price DEVICE=2.5 for each kind"
        )

    def key(case: Case) -> tuple[float, int]:
        assert case.best is not None
        value = case.best.step_s if by == "step" else case.dollars_per_token
        return value or 0.0, case.cluster.num_devices

    return min(able, key=key, default=None)


def longest(
    question: Question, cluster: Cluster, workload: Workload, *, multiple: int, most: int = 1 << 24
) -> tuple[Case, ...]:
    """Lengths tried, the last case the longest with a plan that fits: a multiple of `multiple` tokens.

    Doubled until nothing fits, then halved in. Taken for granted: where a length fits, so does a shorter multiple,
    which holds when `multiple` divides into what every axis needs. Beyond that length, the same is done with plans that
    fit by choices beyond the exact search (`Question.squeezed`). PlanError when not even one `multiple` fits.
    """
    tried: dict[int, Case] = {}
    large: dict[int, Large] = {}

    def fits(count: int, *, known: bool = False) -> bool:
        """Whether a plan does, or with `known` one that fits a shorter length."""
        length = count * multiple
        work = replace(workload, seq_len=length)
        shown = large_of(large, count)
        case = question.fitting(cluster, work, label=f"seq_len={length}", like=like_of(tried), only=known, large=shown)
        if case.best is not None or not known:
            tried[count] = case
        return case.best is not None

    def squeezes(count: int) -> bool:
        if count * multiple > most:
            return False
        length = count * multiple
        case = Case(
            label=f"seq_len={length}",
            cluster=cluster,
            workload=replace(workload, seq_len=length),
            best=None,
            why="nothing fits in memory",
            rent=rent(cluster, question.prices),
        )
        tried[count] = question.squeezed(tried.get(count, case), like_of(tried))
        return tried[count].best is not None

    low = int(fits(1))
    if is_mixed(cluster):
        low = by_known(fits, low, most // multiple) if low else 0
    else:
        while low and low * 2 * multiple <= most and fits(low * 2):
            low *= 2
        # From here on `low` fits and `high` does not, if it was tried. Where doubling ended at `most`, it was not, and
        # there is nothing to halve.
        high = low * 2
        while high - low > 1 and high in tried and question.keep_going():
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    if question.spares and not is_mixed(cluster):
        low = further(squeezes, low)
    if not low:
        why = tried[1].why
        if SPENT in why:
            raise PlanError(f"no plan was found with {multiple} tokens: {why}; allow more time (--budget)")
        if "memory" not in why:
            raise PlanError(f"no plan runs with {multiple} tokens: {why}")
        raise PlanError(f"no plan fits with {multiple} tokens: {why}; use more devices or a smaller multiple")
    return (*others(tried, low), question.fastest(tried[low]))


def by_known(fits: Callable[..., bool], low: int, most: int) -> int:
    """The greatest count that fits, from one on that does: as far as a known plan goes, which is quick to see, then one
    further by any plan, and so on. So only one count is shown to fit nowhere, which takes longest."""
    while True:
        gap = 1
        while low + gap <= most and fits(low + gap, known=True):
            low, gap = low + gap, gap * 2
        while gap > 1:
            gap //= 2
            low = low + gap if low + gap <= most and fits(low + gap, known=True) else low
        if low >= most or not fits(low + 1):
            return low
        low += 1


def large_of(shown: dict[int, Large], count: int) -> Large:
    """What need not be looked at of a count, since it is too large at a smaller one; what is found is added."""
    shown[count] = Large(
        known_too_large=frozenset().union(*(large.added for less, large in shown.items() if less < count))
    )
    return shown[count]


def like_of(tried: Mapping[int, Case]) -> list[Case]:
    """The largest cases that fit, whose plans may fit others."""
    return [case for _, case in sorted(tried.items(), reverse=True) if case.best is not None][:4]


def others(tried: Mapping[int, Case], low: int) -> Iterator[Case]:
    """The other cases than the answer, in order. Those below it without a plan are left out: only the exact search was
    asked for one."""
    return (case for count, case in sorted(tried.items()) if count > low or (count < low and case.best is not None))


def further(fits: Callable[[int], bool], low: int) -> int:
    """The greatest count from `low` on that fits, by steps that are doubled, then halved; `low` if the next does not.
    Taken for granted: where a count fits, so does every one between `low` and it."""
    gap = 1
    while fits(low + gap):
        low, gap = low + gap, gap * 2
    while gap > 1:
        gap //= 2
        low = low + gap if fits(low + gap) else low
    return low


def of_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """So many nodes of a cluster's one kind. PlanError for a cluster of several kinds."""
    if len(cluster.groups) != 1:
        raise PlanError(
            f"{cluster.name} has several kinds of nodes, so a number of them does not say which; write the choices, as "
            f"in --vary on=1x8xh100-sxm+1x8xa100-sxm-80gb,1x8xh100-sxm, or ask --max-devices, --deadline or --max-step"
        )
    (group,) = cluster.groups
    return replace(cluster, name=f"{nodes} nodes of {cluster.name}", groups=(replace(group, count=nodes),))


def up_to(cluster: Cluster, most: int | None = None) -> tuple[Cluster, ...]:
    """Whole nodes of a cluster, fewer devices first, with at most `most` devices; of several kinds every number of each
    of them, of as many devices the faster first. PlanError if not even one node has so few, or for too many choices."""
    # The smallest node decides whether anything has so few devices.
    least = min(group.node.count for group in cluster.groups)
    if most is not None and least > most:
        raise PlanError(
            f"at most {most} devices, but a node of {cluster.name} has {least}; allow {least}, or name parts"
        )
    if len(cluster.groups) == 1:
        (group,) = cluster.groups
        able = range(1, group.count + 1) if most is None else range(1, min(group.count, most // least) + 1)
        return tuple(of_nodes(cluster, n) for n in able)
    choices = prod(group.count + 1 for group in cluster.groups) - 1
    if choices > MOST_CHOICES:
        raise PlanError(
            f"{cluster.name} has {choices} choices of whole nodes, and up to {MOST_CHOICES} are searched; name those "
            f"to choose among with --vary on=SPEC,SPEC,…"
        )
    clusters = []
    for counts in product(*(range(group.count + 1) for group in cluster.groups)):
        groups = tuple(replace(g, count=n) for g, n in zip(cluster.groups, counts, strict=True) if n)
        if groups:
            name = "+".join(f"{g.count}x{g.node.count}x{g.node.device.name}" for g in groups)
            clusters.append(replace(cluster, name=name, groups=groups))
    fit = [choice for choice in clusters if most is None or choice.num_devices <= most]
    return tuple(sorted(fit, key=lambda choice: (choice.num_devices, -_peak(choice))))


def _peak(cluster: Cluster) -> float:
    """FLOP/s of all devices in the format in which each is fastest."""
    return float(sum(max(rate for rate in astuple(device.dense_peak) if rate) for device in cluster.devices))
