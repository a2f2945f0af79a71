"""Traces that are one row a job: the plain table of this project, Philly's, Tiresias's, Pollux's and Sia's, Gavel's.

Each function takes rows and the text of a file and returns its jobs. The plain table has `job_id, submit_s, duration_s,
num_gpus` and any of `min_gpus, max_gpus, device, model, batch_size, slice, memory_gib, deadline_s, weight,
plan, steps, seq_len, vc | user`; Philly's is one.
Pollux and Gavel say how much work a job is, not how long it takes: durations come from measured points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from gnomon.errors import GnomonError, InputError
from gnomon.fleet.job import Job
from gnomon.fleet.traces.rows import TraceRows, need

Duration = Callable[[str, int, int, float], float]
"""(model, devices, batch size, steps or 0) -> seconds; NaN where no points are known."""

StepSeconds = Callable[[Job], float]
"""Job -> seconds of one of its steps, predicted. InputError where it does not say what it trains, or no plan fits."""

PLAIN = ("job_id", "submit_s", "duration_s", "num_gpus")
TIRESIAS = ("job_id", "num_gpu", "submit_time", "iterations", "model_name", "duration")
POLLUX = ("name", "application", "num_replicas", "batch_size")
GAVEL_CELLS = (6, 7, 9, 10)
"""Cells of a line of a Gavel trace. 7: job type, command, name of the option of steps, whether it needs the data's
folder, steps, arrival, scale factor (traces/msr); 6 are older, without the folder. 9 end in steps, scale factor,
weight, SLO (times the duration; none below 0), arrival; 10 say the working directory too."""


def plain(rows: TraceRows, text: str, step_s: StepSeconds) -> Sequence[Job]:
    """Reads the plain table. Jobs of no device are left out. step_s: of a job whose row says `steps` and no
    duration."""
    jobs = []
    for line, row in rows.table(text):
        need(rows.name, list(row), PLAIN)
        devices = rows.count(line, row, "num_gpus")
        least, most, batch = (_count(rows, line, row, name) for name in ("min_gpus", "max_gpus", "batch_size"))
        memory = rows.number(line, row, "memory_gib") if row.get("memory_gib", "").strip() else 0.0
        submit = rows.number(line, row, "submit_s")
        plan, seq_len = row.get("plan", "").strip(), _count(rows, line, row, "seq_len")
        steps = 0 if row["duration_s"].strip() else _count(rows, line, row, "steps")
        work = 0.0 if steps else rows.number(line, row, "duration_s")
        due = rows.number(line, row, "deadline_s") if row.get("deadline_s", "").strip() else math.inf
        weight = rows.number(line, row, "weight") if row.get("weight", "").strip() else 1.0
        # After all cells are read: what is wrong with them is said also where the row is left out.
        if devices == 0:
            rows.leave_out(line, "asks for no device")
            continue
        job = Job(
            id=row["job_id"].strip(),
            submit_s=submit,
            work_s=work,
            devices=devices,
            min_devices=least,
            max_devices=most,
            device=row.get("device", "").strip().lower(),
            model=row.get("model", "").strip(),
            batch_size=batch,
            plan=plan,
            seq_len=seq_len,
            slice=row.get("slice", "").strip(),
            deadline_s=due,
            weight=weight,
            memory_bytes=0 if math.isnan(memory) else round(memory * 2**30),
            user=(row.get("vc") or row.get("user") or "").strip(),
            line=line,
        )
        if steps > 0 and min(devices, batch) >= 0:
            try:
                job = replace(job, work_s=steps * step_s(job))
            except GnomonError as error:
                rows.problem(line, str(error))
        jobs.append(job)
    return jobs


def _count(rows: TraceRows, line: int, row: dict[str, str], column: str) -> int:
    """Reads a whole number; 0 where the column or the cell is not there."""
    return rows.count(line, row, column) if row.get(column, "").strip() else 0


def tiresias(rows: TraceRows, text: str) -> Sequence[Job]:
    """The table of Tiresias's simulator."""
    jobs = []
    for line, row in rows.table(text):
        need(rows.name, list(row), TIRESIAS)
        devices = rows.count(line, row, "num_gpu")
        if devices == 0:
            rows.leave_out(line, "asks for no device")
            continue
        jobs.append(
            Job(
                id=row["job_id"].strip(),
                submit_s=rows.number(line, row, "submit_time"),
                work_s=rows.number(line, row, "duration"),
                devices=devices,
                model=row["model_name"].strip(),
                line=line,
            )
        )
    return jobs


def pollux(rows: TraceRows, text: str, duration: Duration, workload: int | None) -> Sequence[Job]:
    """A workload of Pollux or Sia: by application and batch size. `submit_s` or `time` is the arrival; a file with a
    column `workload` holds several, of which one is read."""
    jobs = []
    several: set[int] = set()
    for line, row in rows.table(text):
        arrival = "submit_s" if "submit_s" in row else "time"
        need(rows.name, list(row), (*POLLUX, arrival))
        if "workload" in row:
            number = rows.count(line, row, "workload")
            several.add(number)
            if workload is not None and number != workload:
                continue
        model = row["application"].strip()
        devices, batch = rows.count(line, row, "num_replicas"), rows.count(line, row, "batch_size")
        submit = rows.number(line, row, arrival)
        seconds = duration(model, devices, batch, 0.0) if min(devices, batch) > 0 else math.nan
        if min(devices, batch) > 0 and math.isnan(seconds):
            raise InputError(
                f"{rows.name}: line {line}: how long {model!r} takes on {devices} devices with a batch of {batch} is "
                "not in the trace; give measured points with --points (a folder with pollux_validation.csv, "
                "pollux_placements.csv and pollux_scalability.csv)"
            )
        jobs.append(
            Job(
                id=row["name"].strip(),
                submit_s=submit,
                work_s=seconds,
                devices=devices,
                model=model,
                batch_size=batch,
                line=line,
            )
        )
    if len(several) > 1 and workload is None:
        raise InputError(
            f"{rows.name}: it holds workloads {min(several)} to {max(several)}; say which with --workload N"
        )
    if several and workload is not None and workload not in several:
        raise InputError(f"{rows.name}: no workload {workload}; it holds {min(several)} to {max(several)}")
    return jobs


def gavel(rows: TraceRows, text: str, duration: Duration) -> Sequence[Job]:
    """A trace of Gavel: tabs, no heading; steps and a scale factor. Jobs are numbered by line."""
    jobs = []
    for line, full in enumerate(text.splitlines(), start=1):
        if not full.strip():
            continue
        cells = full.split("\t")
        if len(cells) not in GAVEL_CELLS:
            rows.problem(line, f"{len(cells)} cells, but a line of a Gavel trace has 6, 7, 9 or 10")
            continue
        model = cells[0].strip()
        # Counted from the end, as the optional cells (the data's folder, the working directory) come before.
        values = (cells[-3], cells[-1], cells[-2]) if len(cells) < 9 else (cells[-5], cells[-4], cells[-1])
        names = ("total_steps", "scale_factor", "arrival_time")
        steps, scale, submit = (rows.value(line, what, cell) for what, cell in zip(names, values, strict=True))
        slo = cells[-2].strip() if len(cells) >= 9 else ""
        due = rows.value(line, "SLO", slo) if slo and not slo.startswith("-") else math.inf
        weight = rows.value(line, "priority_weight", cells[-3]) if len(cells) >= 9 else 1.0
        if scale == 0:
            rows.leave_out(line, "asks for no device")
            continue
        seconds = math.nan if math.isnan(steps + scale) else duration(model, int(scale), 0, steps)
        if math.isnan(seconds) and not math.isnan(steps + scale):
            raise InputError(
                f"{rows.name}: line {line}: steps a second of {model!r} on {int(scale)} devices are not in the trace; "
                "give measured points with --points (a table of job_type, scale_factor, gpu, steps_per_s)"
            )
        jobs.append(
            Job(
                id=f"job-{line}",
                submit_s=submit,
                work_s=seconds,
                devices=-1 if math.isnan(scale) else int(scale),
                model=model,
                deadline_s=math.inf if due == math.inf else submit + due * seconds,
                weight=weight,
                line=line,
            )
        )
    return jobs
