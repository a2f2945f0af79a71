"""`plan`: the best plan for a model, machines and a batch, as one call.

Fills in the space (`make_space`), searches it (`solve`), and returns the `Result`. `loss` says what a runner-up loses
and where. Leaves out printing and files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gnomon.errors import PlanError
from gnomon.graph import Graph, with_dispatch
from gnomon.hardware import Cluster, parse_cluster
from gnomon.models.presets import graph_of
from gnomon.plans import Goal, Offload, Optimizer, Plan, Workload
from gnomon.plans.precision import default_precision
from gnomon.prediction import Prediction
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.bounds.families import SearchJob
from gnomon.search.budget import KeepGoing, always, until
from gnomon.search.equal.solve import solve
from gnomon.search.refinement.choices import runs
from gnomon.search.refinement.neighbours import climb
from gnomon.search.requests import (
    LEAST,
    SPARING,
    check_request,
    explain_illegal,
    explain_too_large,
    with_fixed_batch,
)
from gnomon.search.results import FoundPlan, Result
from gnomon.search.space.points import EXTRA_CHOICES, Limit, Space, has_disks, make_space, parse_limit
from gnomon.software import Stack
from gnomon.units import show_bytes, show_seconds

ON_HOST_S = 3.0
"""Processor time for each look whether a plan fits with its update on the host, where none fits without."""


def plan(
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
    extra_choices: Container[str] | None = None,
    on_progress: Callable[[int, int, float | None], None] | None = None,
    keep_going: KeepGoing = always,
) -> Result:
    """The fastest plan that fits, and the next `top` - 1; with `diverse`, alternatives to it
    (`shortlist.Diverse`).

    model, cluster: as for `predict`. base: what the search does not vary; left out, the default plan, in a precision
    that the devices have. fixed: field of `Point` -> value. forbid: conditions such as `pp>1`. extra_choices: choices
    of `space.points.EXTRA_CHOICES` that are searched too; left out, those that the stack runs. (Where gradients are not
    clipped, points count again with the optimizer on the host, and those of ZeRO 3 once more with the parameters there;
    where every node says how fast its disk is, those of ZeRO 3 again with the parameters on a disk.) on_progress: is
    called with the number of points covered, of all points, and the best step so far. keep_going: the budget, as
    `budget.until(60)`; what is found once it is spent is the result, and `Result.open_s` bounds the rest. PlanError
    when nothing can run or nothing fits, with what is nearest.
    """
    graph = graph_of(model)
    machines = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    limits = [parse_limit(limit) if isinstance(limit, str) else limit for limit in forbid]
    base = base or Plan(precision=default_precision(machines))
    fixed = with_fixed_batch(graph, fixed)
    routed = with_dispatch(graph)
    if routed is not graph and fixed.get("ep", 1) != 1:
        graph = routed
    extra_choices = [name for name in EXTRA_CHOICES if runs(stack, name)] if extra_choices is None else extra_choices
    check_request(graph, machines, workload, base, fixed, machines.num_devices)
    space = make_space(
        graph, machines, workload, base=base, fixed=fixed, limits=limits, stack=stack, extra_choices=extra_choices
    )
    size = space.size
    progress = None if on_progress is None else lambda done, best: on_progress(done, size, best)
    result = solve(
        graph,
        machines,
        workload,
        space,
        stack,
        goal,
        top=top,
        diverse=diverse,
        on_progress=progress,
        keep_going=keep_going,
    )
    others = [(graph, away) for away in _away(space, machines, extra_choices)]
    if routed is not graph and "ep" not in fixed:
        others += [
            (routed, other) for other in _divided(routed, machines, workload, base, fixed, limits, stack, extra_choices)
        ]
    # One after the other, each with the best plans so far: their steps bound what the next has to look at.
    for of, other in others:
        moved = solve(
            of,
            machines,
            workload,
            other,
            stack,
            goal,
            top=top,
            diverse=diverse,
            known=result.best,
            keep_going=keep_going,
        )
        open_bounds = [outcome.open_s for outcome in (result, moved) if outcome.open_s is not None]
        result = replace(
            result,
            best=moved.best,
            counts=result.counts + moved.counts,
            open_s=min(open_bounds) if open_bounds else None,
        )
    # An exact search leaves nothing for a climb to find; one cut short does.
    if result.best and result.counts.num_unseen:
        climbed = climb(result, result.best[0])
        result = replace(result.led_by(climbed.best if climbed.steps else None), neighbours=climbed.tried)
    if result.best:
        return result
    if result.counts.num_unseen:
        raise PlanError(_spent(result) + _on_host(result, fixed, limits))
    if not result.counts.num_predicted and not result.counts.too_large:
        raise PlanError(explain_illegal(result))

    jobs: dict[str, SearchJob] = {}

    def again(other: Cluster, limit_bytes: int | None) -> Result | None:
        wider = None
        for memory_fixed in (SPARING,) if limit_bytes is None else (LEAST, {}):
            try:
                fixed_values = {**memory_fixed, **fixed}
                wider = make_space(graph, other, workload, base=base, fixed=fixed_values, limits=limits, stack=stack)
                break
            except PlanError:
                continue
        if wider is None:
            return None
        if other.name not in jobs:
            jobs[other.name] = SearchJob(graph, other, workload, stack, wider)
        limit = goal if limit_bytes is None else Goal(memory_bytes=limit_bytes)
        return solve(graph, other, workload, wider, stack, limit, top=1, job=jobs[other.name])

    raise PlanError(explain_too_large(result, again) + _on_host(result, fixed, limits))


def _spent(result: Result) -> str:
    """The error that a budget was spent before a plan was found that fits, and how near the nearest came."""
    sentence = (
        f"no plan of {result.graph.name} on {result.cluster.name} was found that fits in "
        f"{show_bytes(result.limit_bytes)} a device; the budget was spent with {result.counts.num_unseen:,} of "
        f"{result.counts.space:,} plans not looked at (--budget)"
    )
    if result.smallest is None:
        return f"{sentence}; fix a field, as in --zero 3"
    peak = show_bytes(result.smallest.prediction.tightest.peak_bytes)
    return f"{sentence}; the smallest that was predicted takes {peak}: use more devices"


def _away(space: Space, cluster: Cluster, extra_choices: Container[str]) -> Iterator[Space]:
    """The space with the update on the host, where gradients are not clipped, and with the parameters there too; with
    the parameters on a disk, with and without the update on the host."""
    here = space.base.optimizer
    hosts = not here.clip and here.offload is None and "optimizer_offload" in extra_choices
    moves = 3 in space.zero and not here.offload_parameters
    disks = moves and "parameter_disk" in extra_choices and has_disks(cluster)
    on_host, on_disk = replace(here, offload=Offload()), replace(here, offload_parameters=True, parameter_tier="disk")
    if hosts:
        yield replace(space, base=replace(space.base, optimizer=on_host))
    if hosts and moves and "parameter_offload" in extra_choices:
        yield _by_layer(space, replace(on_host, offload_parameters=True))
    if disks:
        yield _by_layer(space, on_disk)
    if disks and hosts:
        yield _by_layer(space, replace(on_disk, offload=Offload()))


def _divided(
    routed: Graph,
    cluster: Cluster,
    workload: Workload,
    base: Plan,
    fixed: Mapping[str, object],
    limits: Iterable[Limit],
    stack: Stack,
    extra_choices: Container[str],
) -> Iterator[Space]:
    """The spaces in which ranks divide the experts of a captured model, if any is left. routed: the graph that such
    plans run (`plans.experts.under`)."""
    whole = Limit(field="ep", op="=", value=1, why="whole experts are searched apart")
    try:
        space = make_space(
            routed,
            cluster,
            workload,
            base=base,
            fixed=fixed,
            limits=[*limits, whole],
            stack=stack,
            extra_choices=extra_choices,
        )
    except PlanError:
        return
    yield space
    yield from _away(space, cluster, extra_choices)


def _by_layer(space: Space, optimizer: Optimizer) -> Space:
    return replace(space, base=replace(space.base, optimizer=replace(optimizer, zero=3)), zero=(3,))


def _on_host(result: Result, fixed: Mapping[str, object], limits: Iterable[Limit]) -> str:
    """Says that a plan that spares memory fits with the optimizer on the host, or the parameters too, if one does and
    the stack runs it."""
    base, graph, cluster = result.space.base, result.graph, result.cluster
    if base.optimizer.offload is not None or not runs(result.stack, "optimizer_offload"):
        return ""
    memory_fixed = {**SPARING, **fixed}
    ways = [("the optimizer", "--fix optimizer_offload=yes", False)]
    if runs(result.stack, "parameter_offload") and fixed.get("zero", 3) == 3:
        flags_both = "--fix optimizer_offload=yes --fix parameter_offload=yes"
        ways.append(("optimizer and parameters", flags_both, True))
    for what, flag, too in ways:
        moved = replace(base.optimizer, offload=Offload(), offload_parameters=too, clip=False)
        away, only = replace(base, optimizer=moved), {"zero": 3} if too else {}
        try:
            space = make_space(
                graph,
                cluster,
                result.workload,
                base=away,
                fixed={**memory_fixed, **only},
                limits=limits,
                stack=result.stack,
            )
        except PlanError:
            continue
        budget = until(ON_HOST_S)
        best = solve(graph, cluster, result.workload, space, result.stack, result.goal, top=1, keep_going=budget).best
        if best:  # what a search returns is within devices and hosts
            return (
                f"; with {what} on the host and gradients not clipped one fits, {show_seconds(best[0].step_s)} a step: "
                f"--no-clip {flag}"
            )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a plan takes longer than another."""

    seconds: float
    """In all."""
    part: str
    """The part of the step that grows most, as in `Prediction.breakdown`."""
    part_s: float
    """By how much."""


def loss(best: FoundPlan, other: FoundPlan) -> Loss:
    """What `other` loses against `best`, and where most."""
    return loss_between(best.prediction, other.prediction)


def loss_between(best: Prediction, other: Prediction) -> Loss:
    """The same of predictions."""
    ours, theirs = best.breakdown, other.breakdown
    grown = {part: theirs.get(part, 0.0) - ours.get(part, 0.0) for part in {*ours, *theirs}}
    part = max(sorted(grown), key=lambda name: grown[name])
    return Loss(seconds=other.step_s - best.step_s, part=part, part_s=grown[part])
