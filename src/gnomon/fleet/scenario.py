"""What is tried on a trace that its file does not say: elastic jobs, failures of nodes, the load of inference.

Each function is pure: what is drawn at random follows from a seed. `read_demand` reads a table of load by time. Leaves
out the policies.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from gnomon.errors import InputError
from gnomon.fleet.job import Trace
from gnomon.fleet.machines import PARTS, Machines
from gnomon.fleet.rules import Failure
from gnomon.fleet.traces.rows import TraceRows, need

DAY_S = 86400.0
PEAK_H = 14.0
"""Hour of the day at which a diurnal load is highest."""


def in_parts(trace: Trace) -> Trace:
    """The trace with devices counted in PARTS, for machines whose devices are shared."""
    jobs = tuple(
        replace(
            job,
            devices=max(round(job.share * PARTS), 1) if job.share < 1 else job.devices * PARTS,
            min_devices=0,
            max_devices=0,
        )
        for job in trace.jobs
    )
    return replace(trace, jobs=jobs)


def with_elastic(trace: Trace, share: float, seed: int = 0) -> Trace:
    """The trace with a share of its jobs on several devices made elastic, from half to twice what they asked for."""
    if not share:
        return trace
    drawn = np.random.default_rng(seed).random(len(trace.jobs)) < share
    jobs = tuple(
        replace(job, min_devices=max(1, job.devices // 2), max_devices=2 * job.devices)
        if chosen and job.devices > 1 and not job.elastic and not job.slice
        else job
        for job, chosen in zip(trace.jobs, drawn, strict=True)
    )
    count = sum(job.elastic for job in jobs)
    return replace(trace, jobs=jobs, notes=(*trace.notes, f"{count:,} jobs were made elastic (--elastic {share:g})"))


def random_failures(
    machines: Machines, *, mtbf_s: float, repair_s: float, until_s: float, seed: int = 0
) -> tuple[Failure, ...]:
    """Failures of every node at exponential intervals."""
    if mtbf_s <= 0:
        raise InputError("the mean time between failures must be over 0")
    random = np.random.default_rng(seed)
    out = []
    for node in range(len(machines.capacity)):
        time = float(random.exponential(mtbf_s))
        while time < until_s:
            out.append(Failure(at_s=time, node=node, for_s=repair_s))
            time += repair_s + float(random.exponential(mtbf_s))
    return tuple(sorted(out, key=lambda failure: (failure.at_s, failure.node)))


def read_demand(path: str | Path) -> tuple[tuple[float, float], ...]:
    """(from when, load) of a table `bin_start_s,relative_load`. InputError with the line for what cannot be."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise InputError(f"cannot read load {str(path)!r}: {reason}") from error
    rows = TraceRows(str(path))
    out: list[tuple[float, float]] = []
    for line, row in rows.table(text):
        need(str(path), list(row), ("bin_start_s", "relative_load"))
        at, load = rows.number(line, row, "bin_start_s"), rows.number(line, row, "relative_load")
        if load > 1:
            rows.problem(line, f"relative_load is {load:g}; it is a share of the inference nodes, from 0 to 1")
        if out and at <= out[-1][0]:
            rows.problem(line, f"bin_start_s is {at:g}, not after the row before")
        out.append((at, load))
    rows.jobs(())  # raises what was found wrong
    if len(out) < 2:
        raise InputError(f"{path}: a load needs two rows or more")
    return tuple(out)


def repeated(demand: tuple[tuple[float, float], ...], until_s: float) -> tuple[tuple[float, float], ...]:
    """A load over and over again, day by day where it covers most of a day, up to a time."""
    step = demand[-1][0] - demand[-2][0]
    period = demand[-1][0] + step
    if period < DAY_S <= period * 1.2:
        period = DAY_S  # 22 hours are a day of which the end is missing: the last load holds on
    out = []
    start = 0.0
    while start < until_s:
        out += [(start + at, load) for at, load in demand if start + at < until_s]
        start += period
    return tuple(out)


def diurnal(
    low: float, high: float, until_s: float, *, every_s: float = 300.0, noise: float = 0.0, seed: int = 0
) -> tuple[tuple[float, float], ...]:
    """A load that swings like a sine over a day, lowest and highest as given."""
    times = np.arange(0.0, until_s, every_s)
    swing = np.cos((times / 3600.0 - PEAK_H) * 2 * np.pi / 24.0)
    load = (low + high) / 2 + (high - low) / 2 * swing
    load = load + noise * np.random.default_rng(seed).standard_normal(len(times))
    return tuple(zip(times.tolist(), np.clip(load, 0.0, 1.0).tolist(), strict=True))
