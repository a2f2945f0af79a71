"""Requests that no plan can meet: found before a search, or explained after one, with what would be possible.

`check_request` raises PlanError for fields that contradict the model, the machines or each other. `explain_illegal` and
`explain_too_large` say why a search found nothing. Leaves out wishes that a search can weigh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from math import ceil
from typing import get_args, get_type_hints

from gnomon import orders
from gnomon.errors import PlanError, nearest
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.lowering.chunked import chunk_pass
from gnomon.lowering.packed import skrull_pass
from gnomon.plans import Mesh, Plan, Schedule, Workload
from gnomon.plans.check import fixed_batch, problems
from gnomon.search.results import FoundPlan, Result
from gnomon.search.space.points import Point, count_layers
from gnomon.units import show_bytes

AXES = ("tp", "cp", "pp", "dp_replicate", "dp_shard")
"""Fields whose product is the number of devices."""

OPEN = ("experts_need_sequence_parallel", "batch", "virtual_stages", "v_placement", "interleaved", "world_size")
"""Problems that a field which is left open can still avoid, or that are looked at here."""

SAMPLED = 64
"""Points looked at for the one that is nearest to running."""

MOST_NODES = 64
"""How many times more nodes are tried, doubling, for a model that is too large."""

Again = Callable[[Cluster, int | None], Result | None]
"""The same search with another limit in bytes, among plans that take the least (`LEAST`); without one, on other
machines, among plans that spare memory (`SPARING`). None if the request has no plans there."""

SPARING: Mapping[str, object] = {
    "recompute": "full",
    "micro_batch_size": 1,
    "schedule": orders.DEFAULT,
    "overlap": True,
}
"""What is fixed to find, soon, machines that are large enough, unless the request says otherwise."""


LEAST: Mapping[str, object] = {"recompute": "full", "micro_batch_size": 1}
"""What is fixed to find the least memory that a plan takes, unless the request says otherwise."""


def with_fixed_batch(graph: Graph, fixed: Mapping[str, object] | None) -> Mapping[str, object]:
    """What is fixed, and microbatches of the one size that a graph holds for. PlanError where another is asked for."""
    only, fixed_values = fixed_batch(graph), dict(fixed or {})
    if only is not None and fixed_values.setdefault("micro_batch_size", only) != only:
        raise PlanError(
            f"{graph.name} was captured at a batch of {only} and does something else at others: micro_batch_size = "
            f"{fixed_values['micro_batch_size']} cannot be; use {only}, or capture it at another"
        )
    return fixed_values


def check_request(
    graph: Graph, cluster: Cluster, workload: Workload, base: Plan, fixed: Mapping[str, object], devices: int
) -> None:
    """PlanError for what is fixed and cannot be, with the nearest value that can. devices: ranks of every plan."""
    if len(lengths := set(workload.sequence_lengths())) > 1:
        raise PlanError(
            f"a search is for batches of one sequence length, but this workload has {len(lengths)} from {min(lengths)} "
            f"to {max(lengths)}; predict such plans one by one"
        )
    if chunk_pass(base.schedule) or skrull_pass(base.schedule):
        raise PlanError("a search does not know how many microbatches a method makes; predict such plans one by one")
    _fields(fixed)
    _precision(cluster, base)
    sizes = {name: value for name, value in fixed.items() if isinstance(value, int)}
    _pipeline(graph, sizes, fixed.get("schedule"))
    ep = sizes.get("ep", 1)
    mesh = Mesh(tp=sizes.get("tp", 1), cp=sizes.get("cp", 1), ep=ep, dp_shard=ep)
    rows = fixed_batch(graph) or 1
    plan = Plan(mesh=mesh, precision=base.precision, schedule=Schedule(micro_batch_size=rows))
    one = Workload(
        global_batch_size=rows,
        seq_len=max(workload.sequence_lengths(), default=1),
        sizes=workload.sizes,
        router=workload.router,
    )
    for problem in problems(plan, graph, None, one):
        if problem.severity == "error" and problem.name not in OPEN:
            raise PlanError(problem.message)
    _axes(cluster, sizes, devices)
    _batch(workload, sizes, devices)


def _fields(fixed: Mapping[str, object]) -> None:
    """PlanError for a field that no point has, or a value that is none of that field's."""
    hints = get_type_hints(Point)
    for name, value in fixed.items():
        if name not in hints:
            raise PlanError(
                f"fixed names {str(name)[:40]!r}, which no plan has{nearest(str(name), hints)}; fields are "
                f"{', '.join(hints)}"
            )
        shown = f"fixed {name} = {value!r:.40}"
        if words := get_args(hints[name]):
            if value not in words:
                raise PlanError(f"{shown} is none of {', '.join(words)}{nearest(str(value), words)}")
        elif type(value) is not hints[name]:
            raise PlanError(f"{shown} is no {'whole number' if hints[name] is int else 'True or False'}")
        elif hints[name] is int and value < (0 if name == "zero" else 1):  # type: ignore[operator]
            raise PlanError(f"{shown} is below {0 if name == 'zero' else 1}")


def _precision(cluster: Cluster, base: Plan) -> None:
    compute = base.precision.compute
    for device in {group.node.device for group in cluster.groups}:
        if device.kind == "gpu" and getattr(device.dense_peak, compute, None) is None:
            has = [name for name in ("bf16", "fp16", "fp32") if getattr(device.dense_peak, name) is not None]
            raise PlanError(
                f"precision {compute} is asked for, and {device.name} has none; use --precision {' or '.join(has)}, or "
                f"devices with {compute}"
            )
    if base.precision.fp8 is None:
        return
    lacking = sorted({g.node.device.name for g in cluster.groups if g.node.device.dense_peak.fp8 is None})
    if lacking:
        raise PlanError(f"precision fp8 is asked for, and {', '.join(lacking)} has none; use bf16, or devices with fp8")


def _pipeline(graph: Graph, sizes: Mapping[str, int], schedule: object) -> None:
    layers, virtual = count_layers(graph), sizes.get("virtual_stages", 1)
    pp = sizes.get("pp", 2 if virtual > 1 else 1)
    if pp > layers:
        raise PlanError(f"pp = {pp} is more than the {layers} layers of {graph.name}; use pp = {layers} or less")
    if virtual > 1 and pp == 1:
        raise PlanError(f"virtual_stages = {virtual} with pp = 1: one rank has no pipeline; use pp = 2 or more")
    if pp * virtual > layers:
        least = f"the nearest is virtual_stages = {layers // pp}" if layers >= pp else f"{graph.name} has too few"
        raise PlanError(
            f"virtual_stages = {virtual} on pp = {pp} ranks are {pp * virtual} stages, and {graph.name} has {layers} "
            f"layers; {least}"
        )
    if "virtual_stages" in sizes and isinstance(schedule, str):
        order = orders.find(schedule)
        if not order.takes(virtual):
            raise PlanError(
                f"schedule {schedule} takes {order.stages_text} virtual stages on a rank, not {virtual}; leave one open"
            )


def _axes(cluster: Cluster, sizes: Mapping[str, int], devices: int) -> None:
    axes = {name: sizes[name] for name in AXES if name in sizes}
    num_ranks = 1
    for size in axes.values():
        num_ranks *= size
    words = " x ".join(f"{name}={size}" for name, size in axes.items())
    if devices % num_ranks == 0 and (num_ranks == devices or len(axes) < len(AXES)):
        return
    lower = max(d for d in range(1, devices + 1) if devices % d == 0 and d <= num_ranks)
    if num_ranks > devices:
        what = f"but {cluster.name} has {devices}; use axes whose product is at most {devices}, or {num_ranks} devices"
    elif devices % num_ranks:
        whole_devices = -(-devices // num_ranks) * num_ranks
        what = (
            f"which does not divide the {devices} of {cluster.name}; the nearest product that does is {lower}, the "
            f"nearest number of devices {whole_devices}"
        )
    else:
        what = f"and {cluster.name} has {devices}; leave dp_shard open, or use {num_ranks} devices"
    raise PlanError(f"{words} is {num_ranks} ranks, {what}")


def _batch(workload: Workload, sizes: Mapping[str, int], devices: int) -> None:
    """Whether the batch divides, where the number of data-parallel ranks is settled."""
    if all(name in sizes for name in ("dp_replicate", "dp_shard")):
        ranks, how = sizes["dp_replicate"] * sizes["dp_shard"], "dp_replicate x dp_shard"
    elif all(name in sizes for name in ("tp", "cp", "pp")):
        ranks, how = devices // (sizes["tp"] * sizes["cp"] * sizes["pp"]), "devices / (tp x cp x pp)"
    else:
        ranks, how = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1), "dp_replicate x dp_shard at least"
    divisor = ranks * sizes.get("micro_batch_size", 1)
    batch = workload.batch_size
    if batch % divisor:
        size = f" of micro_batch_size {sizes['micro_batch_size']}" if "micro_batch_size" in sizes else ""
        raise PlanError(
            f"a global batch of {batch} sequences does not divide over {ranks} ({how}){size}; the nearest legal global "
            f"batch is {max(1, round(batch / divisor)) * divisor}"
        )


def explain_illegal(result: Result) -> str:
    """Why none of a space's points can run: what the one with the fewest problems breaks."""
    space = result.space
    least: tuple[str, ...] | None = None
    for point in islice(space.points(), 0, None, max(1, space.size // SAMPLED)):
        wrong = problems(space.plan(point), result.graph, result.cluster, result.workload)
        errors = tuple(problem.message for problem in wrong if problem.severity == "error")
        if errors and (least is None or len(errors) < len(least)):
            least = errors
    rules = ", ".join(f"{name} ({points:,})" for name, points in list(result.why_illegal.items())[:3])
    nearest = f"; the nearest: {'; '.join(least)}" if least else "; fix fewer fields"
    return f"none of the {result.counts.space:,} plans can run on {result.cluster.name}: they break {rules}{nearest}"


def explain_too_large(result: Result, again: Again) -> str:
    """Says why nothing fits: the least that is needed, and the nearest plan, limit or number of nodes that would do."""
    limit = show_bytes(result.limit_bytes)
    sentence = f"no plan of {result.graph.name} on {result.cluster.name} fits in {limit} a device"
    if (
        result.least_bytes is not None and result.least_bytes > result.limit_bytes
    ):  # else no reason: a bound below the limit
        sentence += f": every one holds {show_bytes(result.least_bytes)} or more on some rank"
    device = min(group.node.device.memory_bytes for group in result.cluster.groups)
    if nearest := least_memory(result, again, device):
        need = ceil(nearest.prediction.tightest.peak_bytes / 2**20)
        return f"{sentence}; a plan that does takes {need:,} MiB ({_words(nearest)}): --memory {need}MiB"
    if more_nodes := _more_nodes(result, again):
        best = more_nodes.best[0]
        return (
            f"{sentence}; a plan that spares memory fits on {more_nodes.cluster.num_devices} devices ({_words(best)}, "
            f"{show_bytes(best.prediction.tightest.peak_bytes)} each)"
        )
    return f"{sentence}; use more devices, or devices with more memory"


def least_memory(result: Result, again: Again, most_bytes: int) -> FoundPlan | None:
    """A plan that takes little memory, up to `most_bytes` a device: the limit is raised in steps of a tenth from what
    every plan holds at least, so the least of all is at most a tenth below."""
    limit = max(result.limit_bytes, result.least_bytes or 0, 1)
    while limit < most_bytes:
        limit = min(most_bytes, limit + max(limit // 10, 1))
        other = again(result.cluster, limit)
        if other is not None and other.best:
            return min(other.best, key=lambda candidate: candidate.prediction.tightest.peak_bytes)
    return None


def _more_nodes(result: Result, again: Again) -> Result | None:
    """The search on twice the nodes, four times …, until something fits; after two of them on as many as are ever
    tried, so that a hopeless request is answered soon."""

    def on(times: int) -> Result | None:
        groups = tuple(replace(group, count=group.count * times) for group in result.cluster.groups)
        other = again(replace(result.cluster, name=f"{times} x {result.cluster.name}", groups=groups), None)
        return other if other is not None and other.best else None

    for times in (2, 4):
        if nearest := on(times):
            return nearest
    if (most := on(MOST_NODES)) is None:
        return None
    halves = (MOST_NODES >> n for n in range(1, MOST_NODES.bit_length() - 3))
    for times in halves:
        if (fewer := on(times)) is None:
            break
        most = fewer
    return most


def _words(candidate: FoundPlan) -> str:
    plan = candidate.plan
    again = "" if plan.saved.preset == "none" else f", recompute {plan.saved.preset}"
    return (
        f"{plan.mesh.describe()}, ZeRO {plan.optimizer.zero}, microbatches of {candidate.point.micro_batch_size}{again}"
    )
