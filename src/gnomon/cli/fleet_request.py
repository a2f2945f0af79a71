"""What the options of `gnomon fleet replay` and `what-if` ask for: a trace, machines, rules and forecasts.

`asked(options)` returns it with notes on what was left out and assumed. Leaves out playing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gnomon.cli.options.fleet import TraceOptions
from gnomon.errors import InputError
from gnomon.fleet.costs import Costs
from gnomon.fleet.forecast import Curve
from gnomon.fleet.goodput import Profiled, Profiles
from gnomon.fleet.job import Job, Trace, between
from gnomon.fleet.machines import Machines, machines, without_larger
from gnomon.fleet.points import MeasuredPoints, Points, of_pools, read_pairs, read_points
from gnomon.fleet.predicted import PredictedForecasts, Predictions
from gnomon.fleet.rules import Failure, Rules
from gnomon.fleet.scenario import DAY_S, in_parts, random_failures, read_demand, repeated, with_elastic
from gnomon.fleet.traces import Reading, nothing_known, read_trace
from gnomon.fleet.traces.tables import Duration

LISTED = 5
"""Rows that were left out, of which the reason is printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRequest:
    """A trace and the cluster that it is played on."""

    trace: Trace
    """The jobs."""
    machines: Machines
    """The cluster."""
    rules: Rules
    """How the cluster behaves, apart from its policy."""
    forecasts: Curve | MeasuredPoints | Profiled | PredictedForecasts | None
    """Forecasts; None for the curve that is assumed anyway, which leaves the fast way open."""
    notes: tuple[str, ...]
    """What a reader must know: what was left out, what was assumed."""
    learned: bool = False
    """Whether the jobs of policies that adapt learn their speeds as they run."""


def request_of(options: TraceOptions, *, record: bool = False, on: str | None = None) -> FleetRequest:
    """What the options of a replay say. InputError for what cannot be read or replayed."""
    known, points_notes = _points(options)
    duration: Duration = nothing_known
    if isinstance(known, Profiles):
        duration = known.duration_s
    elif known is not None:
        first = machines(on or options.on)
        known = of_pools(known, first)
        duration = MeasuredPoints(known, Curve(first), _reference(known, first)).duration_s
    predictions = Predictions(machines(on or options.on))
    reading = Reading(
        format=options.format or "",
        workload=options.workload,
        skip_bad=options.skip_bad,
        parts=options.gpu_sharing,
        duration=duration,
        step_s=lambda job: _step_s(predictions, job),
    )
    trace = read_trace(options.file, reading)
    if options.start_day or options.days is not None:
        start = options.start_day * DAY_S
        trace = between(trace, start, start + options.days * DAY_S if options.days is not None else float("inf"))
    cluster = machines(on or options.on, inference=options.inference or "", mig=options.mig, parts=options.gpu_sharing)
    if options.gpu_sharing:
        if options.mig or options.inference or options.elastic or known is not None:
            raise InputError("--gpu-sharing is for itself: leave --mig, --inference, --elastic and --points out")
        trace = in_parts(trace)
    notes = [*trace.notes, *points_notes]
    if trace.left_out:
        notes.append(_left_out(trace))
    before = len(trace.notes)
    trace = with_elastic(trace, options.elastic, options.seed)
    notes += trace.notes[before:]
    curve = Curve(cluster, serial=options.serial, sharing=options.sharing, memory=options.memory * 2**30)
    rules, more_notes = _rules(options, trace, cluster, record)
    if options.pairs and (known is None or isinstance(known, Profiles)):
        raise InputError("--pairs are speeds of two models together; give their speeds alone with --points TABLE")
    if options.learned and not isinstance(known, Profiles):
        raise InputError("--learned is of jobs whose steps were timed; give a folder of Pollux's tables with --points")
    throughputs: Curve | MeasuredPoints | Profiled | PredictedForecasts | None = (
        curve if curve != Curve(cluster) else None
    )
    if isinstance(known, Profiles):
        throughputs = Profiled(known)
        notes.append("speeds by placement and batch are those of --points")
        if options.learned:
            notes.append("under Pollux and Sia jobs learn their speeds as they run, from steps that they timed")
    elif known is not None:
        pairs = of_pools(read_pairs(options.pairs), cluster) if options.pairs else {}
        throughputs = MeasuredPoints(known, curve, _reference(known, cluster), pairs=pairs)
        models = {model for model, _ in known}
        without = {job.model for job in trace.jobs} - models
        notes.append(f"speeds of {len(models)} models are those of --points; {len(without)} models have none")
        lacking = sorted({pool.device for pool in cluster.pools} - {device for _, device in known})
        if lacking:
            notes.append(f"no point is of {', '.join(lacking)}: there jobs scale as is stated of jobs without a model")
    if known is None and any(predictions.knows(job) for job in trace.jobs):
        throughputs = PredictedForecasts(cluster, predictions, curve)
        trace, trace_notes = _possible(trace, throughputs, leave_out=options.skip_larger)
        notes += trace_notes
    if options.skip_larger:
        trace, larger = without_larger(trace, cluster, (throughputs or curve).memory_bytes)
        if larger:
            names = ", ".join(f"{job.id} (line {job.line}, {job.fewest} devices)" for job in larger[:LISTED])
            trace_notes = f" and {len(larger) - LISTED:,} more" if len(larger) > LISTED else ""
            notes.append(
                f"{len(larger):,} jobs larger than the cluster or its memory were left out: {names}{trace_notes}"
            )
    stated = () if isinstance(known, Profiles) else (curve.assumption(),)
    every = (*notes, *stated, *more_notes)
    return FleetRequest(
        trace=trace, machines=cluster, rules=rules, forecasts=throughputs, notes=every, learned=options.learned
    )


def _step_s(predictions: Predictions, job: Job) -> float:
    if not predictions.knows(job):
        raise InputError(
            f"duration_s is missing, and job {job.id!r} gives neither a plan file (`plan`) nor a model that is known "
            "with its batch (`model, batch_size`), from which `steps` could be predicted"
        )
    return predictions.step_s(job)


def _possible(trace: Trace, forecasts: PredictedForecasts, *, leave_out: bool) -> tuple[Trace, Sequence[str]]:
    """The trace without jobs of which no plan runs here, and notes. InputError for them unless they are left out."""
    why = forecasts.impossible(trace.jobs)
    if why and not leave_out:
        job = next(job for job in trace.jobs if job.id in why)
        raise InputError(f"{trace.name}: line {job.line}: {why[job.id]}; or leave such jobs out with --skip-larger")
    notes = [f"left out: {reason}" for reason in list(why.values())[:LISTED]]
    possible = replace(trace, jobs=tuple(job for job in trace.jobs if job.id not in why)) if why else trace
    count = sum(forecasts.knows(job) for job in possible.jobs)
    found = " (without one: the fastest plan on the devices that it asks for)"
    notes.append(f"rates and memory of {count:,} jobs are predicted, from their plan or model and batch{found}")
    return possible, notes


def _points(options: TraceOptions) -> tuple[Points | Profiles | None, tuple[str, ...]]:
    """Reads measured points: a folder of Pollux's tables, or one table of steps a second."""
    if not options.points:
        return None, ()
    if Path(options.points).is_dir():
        return Profiles.read(options.points), ()
    return read_points(options.points)


def _reference(points: Points, cluster: Machines) -> str:
    """The device that durations are of: the cluster's, if it was measured, else the first that was."""
    kinds = [device for _, device in points]
    return cluster.pools[0].device if cluster.pools[0].device in kinds else kinds[0]


def _left_out(trace: Trace) -> str:
    first = "; ".join(f"line {row.line}: {row.reason}" for row in trace.left_out[:LISTED])
    ellipsis = "; …" if len(trace.left_out) > LISTED else ""
    return f"{len(trace.left_out):,} rows of {trace.name} are no jobs of the replay: {first}{ellipsis}"


def _rules(options: TraceOptions, trace: Trace, cluster: Machines, record: bool) -> tuple[Rules, tuple[str, ...]]:
    costs = Costs(
        restart_s=options.restart,
        resize_s=options.resize,
        checkpoint_every_s=options.checkpoint_every,
        saves_when_preempted=not options.no_notice,
    )
    notes = [
        f"a job that is stopped {'loses the work since its last checkpoint' if options.no_notice else 'saves first'}, "
        f"and takes {options.restart:g} s to start again; a resize takes {options.resize:g} s"
    ]
    # Failures and load are drawn for as long as a replay may take: all work one job after another is the longest.
    work = sum(job.work_s * job.devices for job in trace.jobs) / max(1, cluster.devices)
    until = trace.jobs[-1].submit_s + max(2 * work, max(job.work_s for job in trace.jobs) * 4) + DAY_S
    failures: tuple[Failure, ...] = ()
    if options.node_mtbf:
        failures = random_failures(
            cluster,
            mtbf_s=options.node_mtbf * DAY_S,
            repair_s=options.repair * 3600,
            until_s=until,
            seed=options.seed,
        )
        notes.append(f"a node fails every {options.node_mtbf:g} days on average, for {options.repair:g} h")
    demand: tuple[tuple[float, float], ...] = ()
    if options.inference:
        if not options.demand:
            raise InputError("--inference needs the load of its machines: --demand FILE (bin_start_s,relative_load)")
        demand = repeated(read_demand(options.demand), until)
        notes.append("inference has the first claim on its machines; its load is repeated day by day")
    elif options.demand:
        raise InputError("--demand is the load of machines that serve inference; add them with --inference CLUSTER")
    return (
        Rules(
            costs=costs,
            spread=not options.pack,
            failures=failures,
            demand=demand,
            headroom=options.headroom,
            record=record,
        ),
        tuple(notes),
    )
