"""The fastest plan for a cluster of heterogeneous devices, and what it gains over equal shares or fewer devices.

`plan_mixed` searches the plans over several kinds of device (`mixed.devices`), the same with equal shares and
layers, and each kind of device alone, by the search for equal devices. Leaves out what `mixed.space` leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster
from gnomon.hardware.kinds import DeviceKind
from gnomon.models.presets import model as preset
from gnomon.plans import Goal, Plan, Workload
from gnomon.plans.precision import default_precision
from gnomon.prediction import Prediction, predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.best_first import Ended, OnProgress, Search
from gnomon.search.budget import KeepGoing, always
from gnomon.search.equal.solve import solve
from gnomon.search.mixed import by_speed
from gnomon.search.mixed.bounds import LayerTables
from gnomon.search.mixed.candidates import roots
from gnomon.search.mixed.devices import TRIES, Large, MixedDevices
from gnomon.search.mixed.first_fit import FIT_TRIES, RoomyFirst, first_fit, roomiest
from gnomon.search.mixed.results import MixedFound, fits
from gnomon.search.mixed.space import MixedSpace, make_mixed_space
from gnomon.search.requests import SPARING, check_request, with_fixed_batch
from gnomon.search.results import Counts, pick_diverse
from gnomon.search.shortlist import Fastest
from gnomon.search.space.points import Limit, divisors, make_space, parse_limit
from gnomon.software import Stack

SPENT = "the time allowed is spent"
"""The reason that a stopped search gives."""
NOT_TRIED = f"not looked at: {SPENT}"
"""The reason that a case gives whose plans nobody looked for."""


@dataclass(frozen=True, kw_only=True)
class MixedResult:
    """What a search of a mixed cluster found."""

    graph: Graph
    """The model."""
    cluster: Cluster
    """The machines, of several kinds."""
    workload: Workload
    """The batch of a step."""
    stack: Stack
    """The program that runs the plans."""
    space: MixedSpace
    """The plans that were searched."""
    best: tuple[MixedFound, ...]
    """The fastest plans that fit, the best first."""
    counts: Counts
    """Counts the plans over several kinds; those on one kind alone are left out."""
    bound_s: float
    """No plan of the space is faster than this; the best one's step where that is proved."""
    equal: MixedFound | None
    """The best plan with equal shares and equal layers on all kinds; None if none fits."""
    best_of_kinds: tuple[tuple[DeviceKind, MixedFound | None], ...]
    """The best plan on each kind by itself; None if none fits, or of those `unfinished` if none was found in time."""
    predicted: int
    """Counts the predictions of all searches together."""
    end_reason: Ended = ""
    """Says what ended the search over several kinds before it was proved that nothing is faster."""
    unfinished: tuple[str, ...] = ()
    """What it is compared with and the budget cut short: names of kinds, `equal` for equal shares and layers."""

    @property
    def proved(self) -> bool:
        """Whether nothing in the space is faster than the best."""
        return self.bound_s >= self.best[0].step_s


BY_SPEED = 8
"""Counts the plans with shares by speed that are predicted however short the budget is."""


def _by_speed(devices: MixedDevices, tables: LayerTables, keep_going: KeepGoing) -> Iterator[MixedFound]:
    """Yields plans of data parallelism with shares by speed that run and fit, while there is time; BY_SPEED in any
    case."""
    for tried, point in enumerate(by_speed.points(devices.space, tables)):
        if tried >= BY_SPEED and not keep_going():
            return
        predicted = devices.predicted(point)
        if not isinstance(predicted, str) and fits(predicted, devices.space.kinds, devices.limits):
            yield MixedFound(
                point=point, plan=predicted.plan, prediction=predicted, kinds=tuple(sorted(set(point.kinds)))
            )


def search_mixed(
    devices: MixedDevices,
    *,
    top: int = 1,
    known: Sequence[MixedFound] = (),
    on_progress: OnProgress | None = None,
) -> Search[MixedFound]:
    """The search for the fastest plan of a space over kinds, ended. top: plans that are kept, the next being those met
    on the way. known: plans that were predicted already."""
    shortlist = Fastest[MixedFound](top)
    for candidate in known:
        shortlist.add(candidate)
    devices.know(known)
    search = Search(devices, shortlist, on_progress)
    search.run(roots(devices))
    return search


def memory_limits(kinds: tuple[DeviceKind, ...], goal: Goal) -> tuple[int, ...]:
    """Bytes that a device of each kind may hold: the goal's, or its share of that device."""
    own = [kind.node.device.memory_bytes for kind in kinds]
    if goal.memory_bytes:
        return tuple(min(nbytes, goal.memory_bytes) for nbytes in own)
    return tuple(int(nbytes * goal.memory_fraction) for nbytes in own)


def plan_mixed(
    model: Graph | str,
    cluster: Cluster | str,
    workload: Workload,
    stack: Stack = PLAIN_STACK,
    goal: Goal | None = None,
    *,
    base: Plan | None = None,
    fixed: Mapping[str, object] | None = None,
    forbid: Iterable[str | Limit] = (),
    top: int = 5,
    diverse: bool = False,
    tries: int = TRIES,
    most_bytes: int | None = None,
    known: Sequence[MixedFound] = (),
    most_nodes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    keep_going: KeepGoing = always,
    first: KeepGoing | None = None,
) -> MixedResult:
    """The fastest plan that fits, over all kinds of a mixed cluster or some of them, and the next `top` - 1.

    Arguments as for `plan`; `fixed` and `forbid` may name the fields in `mixed.space.OPEN_FIELDS`, of which `pp` is the
    number of stages. tries: predictions after which the search over kinds stops; so many more go to plans with equal
    shares, which the result is compared with. diverse: of the plans that were predicted, the next that are unlike
    (`results.diverse`). most_bytes: what any device may hold, below what the goal allows it.
    known: plans of this work that fit; slower ones are not looked for. most_nodes: partial pipelines over kinds that
    each search looks at, at most. keep_going: the budget; what it leaves is counted. first: the part of it that goes to
    what the search over kinds is compared with (each kind alone, equal shares); left out, all of it. PlanError
    for a cluster of one kind, and when nothing fits.
    """
    graph = preset(model) if isinstance(model, str) else model
    machines = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    limits = [parse_limit(limit) if isinstance(limit, str) else limit for limit in forbid]
    base, goal = base or Plan(precision=default_precision(machines)), goal or Goal()
    fixed = with_fixed_batch(graph, fixed)
    space, even_space, tables = _prepared(
        graph, machines, workload, stack, base, tuple(sorted(fixed.items())), tuple(limits)
    )
    if len(space.kinds) < 2:
        raise PlanError(f"cluster {machines.name!r} has devices of one kind; gnomon.plan searches it")
    allowed = memory_limits(space.kinds, goal)
    if most_bytes is not None:
        allowed = tuple(min(nbytes, most_bytes) for nbytes in allowed)
    alone_request = _AloneRequest(
        graph=graph, cluster=machines, workload=workload, stack=stack, base=base, fixed=fixed, limits=limits
    )
    first = first or keep_going
    # What the result is compared with comes first: these plans are also the first incumbents of the search over kinds,
    # so a tight budget still ends with a plan that is no worse than the best kind alone.
    each_alone, predicted, unfinished = _each_alone(alone_request, space.kinds, allowed, first)
    even = search_mixed(
        MixedDevices(tables, workload, stack, even_space, allowed, tries=tries, most_nodes=most_nodes, keep_going=first)
    )
    size = space.size
    progress: OnProgress | None = None if on_progress is None else lambda done, _: on_progress(done, size)
    whole = MixedDevices(
        tables, workload, stack, space, allowed, tries=tries, most_nodes=most_nodes, keep_going=keep_going
    )
    # Shares by speed are the plan most people would write by hand. A good incumbent early prunes more than a good
    # order.
    plain = list(_by_speed(whole, tables, keep_going))
    every = [
        candidate for candidate in (*(f for _, f in each_alone), *even.best, *plain, *known) if candidate is not None
    ]
    # One plan may be found by two searches (equal shares are a case of all shares); a plan is kept once.
    begin = list({candidate.plan: candidate for candidate in every}.values())
    # `diverse` chooses among all that were predicted, so nothing may be dropped for being slower than the `top` best.
    search = search_mixed(whole, top=tries if diverse else top, known=begin, on_progress=progress)
    if not search.best:
        raise PlanError(_nothing_fits(graph, machines, space, search))
    best = tuple(search.best)
    if diverse:
        best = tuple(best[i] for i in pick_diverse([candidate.plan for candidate in best], top))
    return MixedResult(
        graph=graph,
        cluster=machines,
        workload=workload,
        stack=stack,
        space=space,
        best=best,
        counts=search.counts,
        # While candidates are open, nothing is proved below the least of their bounds.
        bound_s=min(search.open_s, best[0].step_s),
        equal=even.best[0] if even.best else None,
        best_of_kinds=each_alone,
        predicted=predicted + even.counts.num_predicted + search.counts.num_predicted,
        end_reason=search.ended,
        unfinished=(*unfinished, *(["equal"] if even.ended == "budget" else [])),
    )


@lru_cache(maxsize=4)
def _prepared(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    stack: Stack,
    base: Plan,
    fixed: tuple[tuple[str, object], ...],
    limits: tuple[Limit, ...],
) -> tuple[MixedSpace, MixedSpace, LayerTables]:
    """The space, the same with equal shares and layers, and prices: what searches under several memory limits share."""
    space = make_mixed_space(graph, cluster, workload, base=base, fixed=dict(fixed), limits=limits, stack=stack)
    return space, _even(space), LayerTables(graph, cluster, workload, stack, space.base, space.kinds)


@lru_cache(maxsize=4)
def _even(space: MixedSpace) -> MixedSpace:
    return replace(space, equal=True)


def fitting(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    stack: Stack,
    goal: Goal,
    *,
    base: Plan,
    fixed: Mapping[str, object],
    forbid: Iterable[Limit],
    like: Sequence[MixedFound] = (),
    tries: int = FIT_TRIES,
    only: bool = False,
    large: Large | None = None,
    keep_going: KeepGoing = always,
) -> MixedFound:
    """A plan over the kinds of a cluster, or on one of them, that fits: not the fastest.

    like: plans that fit at other work, tried first, and with `only` no others. tries: predictions after which the
    search over kinds gives up. large: what was shown too large at less work, and what is here. keep_going: whether to
    go on. PlanError when none fits, which says whether all were looked at.
    """
    limits = tuple(forbid)
    space, _, tables = _prepared(graph, cluster, workload, stack, base, tuple(sorted(fixed.items())), limits)
    allowed = memory_limits(space.kinds, goal)
    # Less work never needs more memory, but more work may: a plan that fitted there is predicted again here.
    for candidate in like:
        try:
            again = predict(graph, cluster, candidate.plan, workload, stack)
        except PlanError:
            continue
        if fits(again, space.kinds, allowed):
            return replace(candidate, prediction=again)

    if only:
        raise PlanError("none of the known plans fits")
    # A kind is tried alone only if one copy of the model, divided over all of its devices, could fit: nothing divides
    # it further.
    able = [
        index for index, kind in enumerate(space.kinds) if tables.divided_bytes / len(kind.devices) <= allowed[index]
    ]

    # The roomiest kind first: the first that fits is the answer.
    able.sort(key=lambda index: -allowed[index] * len(space.kinds[index].devices))

    alone_request = _AloneRequest(
        graph=graph, cluster=cluster, workload=workload, stack=stack, base=base, fixed=fixed, limits=limits
    )

    def found_alone(quick: bool) -> MixedFound | None:
        for index in able:
            try:
                own, _ = _best_of_kind(alone_request, space.kinds[index], allowed[index], quick=quick)
            except PlanError:
                continue
            return _of_kind(own, index)
        return None

    # From cheap to dear: plans that spare memory on one kind, then pipelines over kinds, then all plans of one kind.
    if quick := found_alone(True):
        return quick
    search = first_fit(
        RoomyFirst(tables, workload, stack, space, allowed, tries=tries, large=large, keep_going=keep_going)
    )
    if search.best:
        return search.best[0]
    unseen_text = (
        f"; {search.counts.num_unseen:,} plans over several kinds were not looked at"
        if search.counts.num_unseen
        else ""
    )
    if not keep_going():
        raise PlanError(f"nothing that fits in memory was found{unseen_text}; {SPENT}")
    if found := found_alone(False):
        return found
    raise PlanError(f"nothing fits in memory{unseen_text}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AloneRequest:
    """What is searched on each kind by itself."""

    graph: Graph
    cluster: Cluster
    """Of all kinds."""
    workload: Workload
    stack: Stack
    base: Plan
    fixed: Mapping[str, object]
    limits: Sequence[Limit]


def _each_alone(
    alone_request: _AloneRequest, kinds: tuple[DeviceKind, ...], allowed: tuple[int, ...], keep_going: KeepGoing
) -> tuple[tuple[tuple[DeviceKind, MixedFound | None], ...], int, tuple[str, ...]]:
    """The best on each kind by itself (None where it is too small for the model or has no plan that is asked for), how
    many plans were predicted, and the names of kinds whose search the budget ended. allowed: bytes that a device of
    each kind may hold."""
    best: list[tuple[DeviceKind, MixedFound | None]] = []
    predicted, unfinished = 0, list[str]()
    for index, (kind, limit) in enumerate(zip(kinds, allowed, strict=True)):
        try:
            own, counts = _best_of_kind(alone_request, kind, limit, keep_going=keep_going)
        except PlanError:
            best.append((kind, None))
            if not keep_going():
                unfinished.append(kind.name)
            continue
        best.append((kind, _of_kind(own, index)))
        predicted += counts.num_predicted
        if counts.num_unseen:
            unfinished.append(kind.name)
    return tuple(best), predicted, tuple(unfinished)


def _of_kind(own: Prediction, index: int) -> MixedFound:
    return MixedFound(point=None, plan=own.plan, prediction=own, kinds=(index,))


def _best_of_kind(
    request: _AloneRequest, kind: DeviceKind, limit_bytes: int, *, quick: bool = False, keep_going: KeepGoing = always
) -> tuple[Prediction, Counts]:
    """The best plan on one kind, and how many were predicted. PlanError where nothing fits or runs there, or none was
    found in time. quick: not the fastest, but one of those that spare memory, with much room."""
    graph, workload, stack, base = request.graph, request.workload, request.stack, request.base
    there, own = part_of(request.cluster, kind), Goal(memory_bytes=limit_bytes)
    # SPARING comes first so that what the user fixed wins over it.
    fixed = {**SPARING, **request.fixed} if quick else request.fixed
    check_request(graph, there, workload, base, fixed, there.num_devices)
    space = make_space(graph, there, workload, base=base, fixed=fixed, limits=request.limits, stack=stack)
    if quick:
        best, counts = roomiest(graph, there, workload, space, stack, limit_bytes), Counts()
    else:
        result = solve(graph, there, workload, space, stack, own, top=1, keep_going=keep_going)
        best, counts = result.best[0] if result.best else None, result.counts
    if best is None:
        raise PlanError(f"nothing fits on {there.name}")
    whole = () if len(kind.devices) == request.cluster.num_devices else kind.devices
    # The plan was made for a cluster of this kind alone; on the whole cluster its ranks stand on that kind's devices,
    # and the prediction is made there so that all results share one cluster.
    placed = replace(best.plan, placement=whole)
    return predict(graph, request.cluster, placed, workload, stack), counts


def part_of(cluster: Cluster, kind: DeviceKind) -> Cluster:
    """The cluster's devices of one kind."""
    groups, first = [], 0
    for group in cluster.groups:
        if first in kind.devices:
            groups.append(group)
        first += group.count * group.node.count
    return replace(cluster, name=f"{kind.name} of {cluster.name}", groups=tuple(groups))


def _nothing_fits(graph: Graph, cluster: Cluster, space: MixedSpace, search: Search[MixedFound]) -> str:
    counts = search.counts
    if not counts.space:
        sizes = " and ".join(f"{kind.node.count} of {kind.name}" for kind in space.kinds)
        return (
            f"no plan over the kinds of {cluster.name} has what is asked, and none fits on one kind alone: tp x cp "
            f"must divide the devices of a node, {sizes}; {_nearest_axes(space)}"
        )
    why = f"{counts.too_large:,} of {counts.space:,} plans over its kinds are too large, {counts.illegal:,} cannot run"
    if counts.why:
        most = max(counts.why, key=lambda name: counts.why[name])
        why += f" (most often: {most})"
    return (
        f"no plan of {graph.name} fits on {cluster.name}, nor on one kind of it alone: {why}, {counts.num_predicted:,} "
        f"were predicted; use devices with more memory, more of them, a smaller batch or shorter sequences, or allow "
        f"more of each device (--memory)"
    )


def _nearest_axes(space: MixedSpace) -> str:
    """What to ask for in place of a tp x cp that nodes cannot hold."""
    # tp x cp must divide the devices of a node of every kind, so of their greatest common divisor.
    able = divisors(gcd(*(kind.node.count for kind in space.kinds)))
    degree = min(space.tp) * min(space.cp)
    if degree in able:
        return "ask for less of other axes, or leave them open"
    return f"the nearest tp x cp that does is {min(able, key=lambda n: abs(n - degree))}"
