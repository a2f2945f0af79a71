"""Traces as their authors publish them: Philly's job log, Helios, Acme, PAI 2020, Alibaba's DLRM, Pollux's philly.csv.

Each function takes rows and the text of a file and returns its jobs, or lists a row that is none with its reason. A
job's duration is from its start to its end; times are turned into seconds from the first submission. Leaves out the
tables beside them (utilisation, machines). Sources: github.com/msr-fiddle/philly-traces, S-Lab-System-Group/HeliosData,
InternLM/AcmeTrace, alibaba/clusterdata (cluster-trace-gpu-v2020 and -v2025), petuum/adaptdl (simulator/traces).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gnomon.fleet.job import Job
from gnomon.fleet.traces.clusters import from_zero, in_order, json_of, seconds_of
from gnomon.fleet.traces.rows import TraceRows, need

CLUSTER_LOG = ("job_id", "gpu_num", "submit_time", "start_time", "end_time")
"""Columns of Helios' cluster_log.csv and of Acme's trace_seren.csv and trace_kalos.csv."""
TIMESTAMPS = ("timestamp", "duration", "num_gpus")
"""Columns of the philly.csv from which Pollux, Sia and ElasticFlow draw their workloads."""
DLRM = ("instance_sn", "role", "gpu_request", "creation_time", "scheduled_time", "deletion_time")
"""Columns of Alibaba's disaggregated_DLRM_trace.csv."""
PAI = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu",
    "gpu_type",
)  # fmt: skip
"""Columns of pai_task_table.csv, which has no heading."""
PAI_STATES = ("Terminated", "Failed", "Running", "Waiting")
_NOTHING = ("", "none", "nan", "nat", "null", "unknown")


def missing(text: str) -> bool:
    """Whether a cell says that nothing is known."""
    return text.strip().lower() in _NOTHING


def is_pai(first: str) -> bool:
    """Whether a line is one of PAI's table of tasks."""
    cells = first.split(",")
    return len(cells) == len(PAI) and cells[3].strip() in PAI_STATES


def philly_log(rows: TraceRows, text: str) -> Sequence[Job]:
    """Reads Philly's cluster_job_log: a list of jobs, each with its attempts. Lines are places in the list, from 1.

    How long a job ran is the sum of its attempts, as in the tables that others made of it; how many GPUs, the most of
    any attempt.
    """
    document = json_of(rows, text)
    jobs = []
    for place, entry in enumerate(document if isinstance(document, list) else [], start=1):
        if not isinstance(entry, dict) or not entry.get("jobid"):
            rows.problem(place, "a job without jobid")
            continue
        job = _of_attempts(rows, place, entry)
        if job is not None:
            jobs.append(job)
    return from_zero(jobs)


def _of_attempts(rows: TraceRows, place: int, entry: Mapping[str, Any]) -> Job | None:
    name, attempts = str(entry["jobid"]), entry.get("attempts")
    if not isinstance(attempts, list) or not all(isinstance(one, dict) for one in attempts):
        rows.problem(place, f"job {name!r}: attempts is no list of attempts")
        return None
    spans = [(str(one.get("start_time") or ""), str(one.get("end_time") or "")) for one in attempts]
    counts = [_gpus(one.get("detail")) for one in attempts]
    if -1 in counts:
        rows.problem(place, f"job {name!r}: detail of an attempt is no list of machines with their gpus")
        return None
    if not spans or missing(spans[0][0]):
        rows.leave_out(place, f"job {name} never started")
    elif any(missing(start) or missing(end) for start, end in spans):
        rows.leave_out(place, f"job {name} still runs, or the end of an attempt is not known")
    elif not max(counts):
        rows.leave_out(place, f"job {name} uses no GPU")
    else:
        submit = seconds_of(rows, place, "submitted_time", str(entry.get("submitted_time") or ""))
        total, at = 0.0, submit
        for start, end in spans:
            begin, done = seconds_of(rows, place, "start_time", start), seconds_of(rows, place, "end_time", end)
            in_order(rows, place, at, begin, done)
            # Attempts may overlap in the logs: the next one may not begin before this one began, but before it ended.
            total, at = total + max(done - begin, 0.0), begin
        user = str(entry.get("vc") or entry.get("user") or "")
        return Job(id=name, submit_s=submit, work_s=total, devices=max(counts), user=user, line=place)
    return None


def _gpus(detail: Any) -> int:
    """GPUs of an attempt; -1 where it does not say."""
    if not isinstance(detail, list) or not all(isinstance(one, dict) for one in detail):
        return -1
    lists = [one.get("gpus") for one in detail]
    return sum(len(one) for one in lists) if all(isinstance(one, list) for one in lists) else -1


def cluster_log(rows: TraceRows, text: str) -> Sequence[Job]:
    """Reads the logs of Helios and Acme: Slurm's jobs with submission, start and end."""
    jobs = []
    for line, row in rows.table(text):
        need(rows.name, list(row), CLUSTER_LOG)
        name, count = row["job_id"].strip(), rows.count(line, row, "gpu_num")
        if count == 0:
            rows.leave_out(line, f"job {name} uses no GPU")
        elif missing(row["start_time"]):
            rows.leave_out(line, f"job {name} never started")
        elif missing(row["end_time"]):
            rows.leave_out(line, f"job {name} still runs")
        else:
            times = [seconds_of(rows, line, key, row[key]) for key in ("submit_time", "start_time", "end_time")]
            jobs.append(_job(rows, line, name, count, times, (row.get("vc") or row.get("user") or "").strip()))
    return from_zero(jobs)


def timestamps(rows: TraceRows, text: str) -> Sequence[Job]:
    """The philly.csv of Pollux, Sia and ElasticFlow: jobs without a name, numbered by line."""
    jobs = []
    for line, row in rows.table(text):
        need(rows.name, list(row), TIMESTAMPS)
        count = rows.count(line, row, "num_gpus")
        if count == 0:
            rows.leave_out(line, "asks for no device")
            continue
        submit = seconds_of(rows, line, "timestamp", row["timestamp"])
        work, user = rows.number(line, row, "duration"), (row.get("cluster") or row.get("vc") or "").strip()
        jobs.append(Job(id=f"job-{line}", submit_s=submit, work_s=work, devices=count, user=user, line=line))
    return from_zero(jobs)


def dlrm(rows: TraceRows, text: str) -> Sequence[Job]:
    """Instances of Alibaba's recommenders (2025). One that was there before the trace is submitted at its start; one
    that outlives it still runs."""
    jobs = []
    for line, row in rows.table(text):
        need(rows.name, list(row), DLRM)
        name, count = row["instance_sn"].strip(), rows.count(line, row, "gpu_request")
        if count == 0:
            rows.leave_out(line, f"instance {name} uses no GPU")
        elif missing(row["deletion_time"]):
            rows.leave_out(line, f"instance {name} still runs at the end of the trace")
        elif missing(row["scheduled_time"]) and not missing(row["creation_time"]):
            rows.leave_out(line, f"instance {name} never started")
        else:
            times = [
                0.0 if missing(row[key]) else rows.number(line, row, key)
                for key in ("creation_time", "scheduled_time", "deletion_time")
            ]
            jobs.append(_job(rows, line, name, count, times, row.get("app_name", "").strip()))
    return jobs


def pai(rows: TraceRows, text: str) -> Sequence[Job]:
    """PAI's table of tasks (2020): a job is all its tasks, from the first that is launched to the last that ends.

    GPUs are asked for in hundredths by each of `inst_num` instances. One that is a part of a GPU is kept where `rows`
    keeps parts; jobs of several such instances are left out.
    """
    tasks: dict[str, list[tuple[int, Mapping[str, str]]]] = {}
    for line, row in _pai_rows(rows, text):
        tasks.setdefault(row["job_name"].strip(), []).append((line, row))
    jobs = []
    for name, group in tasks.items():
        job = _of_tasks(rows, name, group)
        if job is not None:
            jobs.append(job)
    return from_zero(jobs)


def _of_tasks(rows: TraceRows, name: str, group: Sequence[tuple[int, Mapping[str, str]]]) -> Job | None:
    first = group[0][0]
    requests: list[tuple[int, float, int]] = []  # (instances, hundredths of a GPU each, line)
    for line, row in group:
        each = 0.0 if missing(row["plan_gpu"]) else rows.value(line, "plan_gpu", row["plan_gpu"])
        count = rows.value(line, "inst_num", row["inst_num"]) if each else 0.0
        if math.isnan(each + count) or count != int(count):
            if not math.isnan(each + count):
                rows.problem(line, f"inst_num is {row['inst_num'].strip()[:32]!r}, not a whole number")
            return None
        if each and count:
            requests.append((int(count), each, line))
    if not requests:
        rows.leave_out(first, f"job {name} uses no GPU")
        return None
    if any(missing(row["start_time"]) for _, row in group):
        rows.leave_out(first, f"job {name} never started")
        return None
    if any(missing(row["end_time"]) for _, row in group):
        rows.leave_out(first, f"job {name} still runs")
        return None
    begin = min(rows.value(line, "start_time", row["start_time"]) for line, row in group)
    end = max(rows.value(line, "end_time", row["end_time"]) for line, row in group)
    parts = [(count, each) for count, each, _ in requests if each % 100]
    share = 1.0
    if parts:
        if len(requests) > 1 or parts[0][0] > 1 or parts[0][1] > 100 or not rows.parts:
            several = "parts of several GPUs" if len(requests) > 1 or parts[0][0] > 1 or parts[0][1] > 100 else ""
            rows.leave_out(first, f"job {name} uses {several or 'a part of a GPU (--gpu-sharing)'}")
            return None
        share = parts[0][1] / 100
    devices = 1 if parts else round(sum(count * each for count, each, _ in requests) / 100)
    in_order(rows, first, begin, begin, end)
    return Job(id=name, submit_s=begin, work_s=max(end - begin, 0.0), devices=devices, share=share, line=first)


def _pai_rows(rows: TraceRows, text: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    if text.split("\n", 1)[0].startswith("job_name,"):
        for line, row in rows.table(text):
            need(rows.name, list(row), PAI[:6])
            yield line, {**dict.fromkeys(PAI, ""), **row}
        return
    for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        if len(cells) != len(PAI):
            if cells:
                rows.problem(line, f"{len(cells)} cells, but a line of pai_task_table has {len(PAI)}")
            continue
        yield line, dict(zip(PAI, cells, strict=True))


def _job(rows: TraceRows, line: int, name: str, count: int, times: Sequence[float], user: str) -> Job:
    """A job of (submission, start, end)."""
    submit, start, end = times
    in_order(rows, line, submit, start, end)
    return Job(id=name, submit_s=submit, work_s=max(end - start, 0.0), devices=count, user=user, line=line)
