"""Traces of jobs that others write, one reader a format; which format a file has is seen from its first line.

`read_trace(path)` returns a Trace: every row is a job, or is listed in `left_out` with its line and reason, or is an
error with its line. `FORMATS` names the formats. Leaves out traces of requests and of utilisation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import InputError
from gnomon.fleet.job import Job, Trace
from gnomon.fleet.traces import clusters, published, tables
from gnomon.fleet.traces.rows import MAX_BYTES, TraceRows
from gnomon.fleet.traces.tables import Duration, StepSeconds

FORMATS: Mapping[str, str] = {
    "philly": "job_id,submit_s,duration_s,num_gpus and more: Microsoft's Philly, or a table of your own",
    "tiresias": "job_id,num_gpu,submit_time,iterations,model_name,duration",
    "pollux": "name,time,application,num_replicas,batch_size: workloads of Pollux and Sia; needs --points",
    "gavel": "tabs, no heading: traces of Gavel; needs --points",
    "sacct": "sacct -P -o JobID,User,Submit,Start,End,State,ReqTRES",
    "pods": "kubectl get pods -A -o json",
    "events": "time,pod,event,gpus: events of Kubernetes",
    "openb": "name,num_gpu,gpu_milli,creation_time,…: pods of Alibaba's GPU-sharing trace",
    "philly-log": "cluster_job_log: JSON of Philly as published",
    "cluster-log": "job_id,gpu_num,submit_time,start_time,end_time,…: Helios and Acme",
    "philly-times": "timestamp,duration,num_gpus,…: the philly.csv of Pollux, Sia and ElasticFlow",
    "pai": "pai_task_table.csv of Alibaba's PAI (2020), with or without a heading",
    "dlrm": "instance_sn,role,gpu_request,…: disaggregated_DLRM_trace.csv of Alibaba (2025)",
}
"""Name of a format -> what a file of it looks like."""


def nothing_known(model: str, devices: int, batch_size: int, steps: float) -> float:
    """The duration where no measured points are given: not known."""
    return math.nan


def no_prediction(job: Job) -> float:
    """Raises the error for a row without a duration where nothing is predicted."""
    raise InputError("duration_s is missing, and nothing here predicts how long `steps` take")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read a trace."""

    format: str = ""
    """Name of the format; empty to see it from the file."""
    workload: int | None = None
    """Which workload of a file that holds several."""
    parts: bool = False
    """Keep jobs that take a part of a device."""
    skip_bad: bool = False
    """Leave rows with a mistake out and list them, in place of an error."""
    step_s: StepSeconds = no_prediction
    """Seconds of a step of a job whose row says `steps` in place of a duration."""
    duration: Duration = nothing_known
    """How long a job takes whose trace says only what it trains."""


def read_trace(path: str | Path, how: Reading | None = None) -> Trace:
    """The jobs of a file. InputError with the line for what cannot be read."""
    try:
        size = Path(path).stat().st_size
        if size > MAX_BYTES:
            raise InputError(f"{str(path)!r} has {size:,} bytes; the limit of a trace is {MAX_BYTES:,}")
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise InputError(f"cannot read trace {str(path)!r}: {reason}") from error
    return parse_trace(text, str(path), how)


def parse_trace(text: str, name: str, how: Reading | None = None) -> Trace:
    """Parses a text as `read_trace` parses a file."""
    how = how or Reading()
    kind = how.format or recognise(text, name)
    rows = TraceRows(name, keep_going=how.skip_bad, parts=how.parts)
    match kind:
        case "philly":
            listed = tables.plain(rows, text, how.step_s)
        case "tiresias":
            listed = tables.tiresias(rows, text)
        case "pollux":
            listed = tables.pollux(rows, text, how.duration, how.workload)
        case "gavel":
            listed = tables.gavel(rows, text, how.duration)
        case "sacct":
            listed = clusters.sacct(rows, text)
        case "pods":
            listed = clusters.pods(rows, text)
        case "events":
            listed = clusters.events(rows, text)
        case "openb":
            listed = clusters.openb(rows, text)
        case "philly-log":
            listed = published.philly_log(rows, text)
        case "cluster-log":
            listed = published.cluster_log(rows, text)
        case "philly-times":
            listed = published.timestamps(rows, text)
        case "pai":
            listed = published.pai(rows, text)
        case "dlrm":
            listed = published.dlrm(rows, text)
        case _:
            raise InputError(f"unknown format {kind!r} of a trace; known are {', '.join(FORMATS)}")
    jobs = rows.jobs(listed)
    return Trace(name=name, format=kind, jobs=jobs, left_out=tuple(rows.left_out))


def recognise(text: str, name: str) -> str:
    """Recognises the format of a text. InputError where its first line is of none."""
    first = text.lstrip("\ufeff").lstrip().split("\n", 1)[0].strip()
    if not first:
        raise InputError(f"{name}: it is empty; a trace has a heading and a row a job, or is JSON")
    if first[:1] in ("{", "["):
        return "philly-log" if '"attempts"' in text[:100_000] and '"jobid"' in text[:100_000] else "pods"
    if published.is_pai(first):
        return "pai"
    if "JobID" in first and "|" in first:
        return "sacct"
    if first.count("\t") + 1 in tables.GAVEL_CELLS:
        return "gavel"
    head = {cell.strip() for cell in first.split(",")}
    for kind, columns in (
        ("philly", tables.PLAIN),
        ("tiresias", tables.TIRESIAS),
        ("pollux", tables.POLLUX),
        ("events", ("time", "pod", "event", "gpus")),
        ("cluster-log", published.CLUSTER_LOG),
        ("philly-times", published.TIMESTAMPS),
        ("dlrm", published.DLRM),
        ("pai", published.PAI[:6]),
        ("openb", ("name", "num_gpu", "gpu_milli", "creation_time")),
    ):
        if head.issuperset(columns):
            return kind
    raise InputError(
        f"{name}: its first line {first[:80]!r} is of no trace that is known; formats are {', '.join(FORMATS)}: name "
        "one with --format, or write job_id,submit_s,duration_s,num_gpus"
    )
