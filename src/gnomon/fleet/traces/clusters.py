"""Traces of clusters that people run: Slurm's accounting (`sacct -P`), and pods or events of Kubernetes.

A job's duration is from its start to its end; jobs that never started, still run, or use no GPU are left out, and
listed. Times are turned into seconds from the first submission. Leaves out steps of a job and containers of a pod.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from gnomon.errors import InputError
from gnomon.fleet.job import Job
from gnomon.fleet.traces.rows import TraceRows, need

_GPU = re.compile(r"gres/gpu(?::(?P<kind>[^=,]+))?=(?P<count>[0-9]+)")
_GRES = re.compile(r"gpu:(?:(?P<kind>[^:,()]+):)?(?P<count>[0-9]+)")
_UNKNOWN = ("", "unknown", "none", "n/a")
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
MIG_RESOURCE = "nvidia.com/mig-"
"""Prefix of the resource of a MIG slice, as in `nvidia.com/mig-3g.20gb`."""


def sacct(rows: TraceRows, text: str) -> Sequence[Job]:
    """`sacct -P -o JobID,User,Submit,Start,End,State,ReqTRES` or AllocTRES; other columns are not read."""
    jobs = []
    for line, row in rows.table(text, "|"):
        need(rows.name, list(row), ("JobID", "Submit", "Start", "End"))
        resources = [row.get(name, "") for name in ("ReqTRES", "AllocTRES", "ReqGRES", "AllocGRES")]
        if not any(name in row for name in ("ReqTRES", "AllocTRES", "ReqGRES", "AllocGRES")):
            need(rows.name, list(row), ("ReqTRES",))
        number = row["JobID"].strip()
        if "." in number:
            rows.leave_out(line, "a step of a job")
            continue
        count, kind = _gpus(resources)
        state = row.get("State", "").strip()
        if count == 0:
            rows.leave_out(line, f"job {number} uses no GPU")
        elif row["Start"].strip().lower() in _UNKNOWN:
            rows.leave_out(line, f"job {number} never started ({state or 'no start'})")
        elif row["End"].strip().lower() in _UNKNOWN:
            rows.leave_out(line, f"job {number} still runs")
        else:
            submit, start, end = (seconds_of(rows, line, name, row[name]) for name in ("Submit", "Start", "End"))
            in_order(rows, line, submit, start, end)
            jobs.append(
                Job(
                    id=number,
                    submit_s=submit,
                    work_s=max(end - start, 0.0),
                    devices=count,
                    device=kind.lower(),
                    user=row.get("User", "").strip(),
                    line=line,
                )
            )
    return from_zero(jobs)


def _gpus(resources: Sequence[str]) -> tuple[int, str]:
    """(GPUs, kind) of the first of the texts that says so: `gres/gpu:a100=8`, `gpu:a100:8`."""
    for text in resources:
        # Slurm writes a total and, where kinds are set up, each kind's count beside it (gres/gpu=8,gres/gpu:a100=8):
        # added up, devices would count twice.
        matches = list(_GPU.finditer(text)) or list(_GRES.finditer(text))
        kinds = [match for match in matches if match["kind"]]
        if matches:
            total = [match for match in matches if not match["kind"]] or kinds
            return sum(int(match["count"]) for match in total), kinds[0]["kind"] if kinds else ""
    return 0, ""


def seconds_of(rows: TraceRows, line: int, what: str, text: str) -> float:
    """Seconds since 1970 of `2024-05-01T12:00:00[Z]`, or of a number of them."""
    text = text.strip()
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        rows.problem(
            line, f"{what} is {text[:32]!r}, not a time such as 2024-05-01T12:00:00" if text else f"{what} is missing"
        )
        return math.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()  # noqa: UP017


def json_of(rows: TraceRows, text: str) -> Any:
    """What a file of JSON holds. InputError with the line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{rows.name}: line {error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{rows.name}: not JSON that can be read: {str(error)[:80]}") from error


def in_order(rows: TraceRows, line: int, submit: float, start: float, end: float) -> None:
    """Note a start before the submission, or an end before the start."""
    if start < submit:
        rows.problem(line, f"it starts {submit - start:g} s before it is submitted")
    if end < start:
        rows.problem(line, f"it ends {start - end:g} s before it starts")


def from_zero(jobs: Sequence[Job]) -> Sequence[Job]:
    """The same jobs with the first submission at 0."""
    first = min((job.submit_s for job in jobs if not math.isnan(job.submit_s)), default=0.0)
    return [replace(job, submit_s=job.submit_s - first) for job in jobs]


def pods(rows: TraceRows, text: str) -> Sequence[Job]:
    """Pods as `kubectl get pods -A -o json` writes them. Their lines are their places in the list, from 1."""
    document = json_of(rows, text)
    items = document.get("items") if isinstance(document, dict) else document
    if not isinstance(items, list):
        raise InputError(f"{rows.name}: no list `items` of pods, as `kubectl get pods -A -o json` writes it")
    jobs = []
    for place, pod in enumerate(items, start=1):
        job = _pod(rows, place, pod)
        if job is not None:
            jobs.append(job)
    return from_zero(jobs)


def _pod(rows: TraceRows, place: int, pod: Any) -> Job | None:
    meta, spec, status = (_mapping(pod, key) for key in ("metadata", "spec", "status"))
    name = f"{meta.get('namespace', 'default')}/{meta.get('name', '')}"
    if not meta.get("name"):
        rows.problem(place, "a pod without metadata.name")
        return None
    count, profile = 0, ""
    containers = spec.get("containers")
    for container in containers if isinstance(containers, list) else []:
        resources = _mapping(container, "resources")
        # Kubernetes has a GPU's request equal to its limit: one of them is read, or it would count twice.
        limits = _mapping(resources, "limits") or _mapping(resources, "requests")
        for key, value in limits.items():
            if key in GPU_RESOURCES or key.startswith(MIG_RESOURCE):
                number = rows.value(place, key, str(value))
                count += 0 if math.isnan(number) else int(number)
                profile = key.removeprefix(MIG_RESOURCE) if key.startswith(MIG_RESOURCE) else profile
    if count == 0:
        rows.leave_out(place, f"pod {name} uses no GPU")
        return None
    begun = status.get("startTime")
    ends = [
        end
        for container in status.get("containerStatuses") or []
        if (end := _mapping(_mapping(container, "state"), "terminated").get("finishedAt"))
    ]
    if not begun or not ends:
        rows.leave_out(place, f"pod {name} {'still runs' if begun else 'never started'}")
        return None
    submit = seconds_of(rows, place, "creationTimestamp", str(meta.get("creationTimestamp") or ""))
    start = seconds_of(rows, place, "startTime", str(begun))
    # The pod holds its devices until its last container has ended.
    end = max(seconds_of(rows, place, "finishedAt", str(stamp)) for stamp in ends)
    in_order(rows, place, submit, start, end)
    # A slice such as 1g.5gb: the first digit counts its seventh parts of a GPU's compute.
    compute = int(profile[0]) if profile[:1].isdigit() else 1
    return Job(
        id=name,
        submit_s=submit,
        work_s=max(end - start, 0.0),
        devices=count * compute,
        slice=profile,
        user=str(meta.get("namespace", "")),
        line=place,
    )


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def events(rows: TraceRows, text: str) -> Sequence[Job]:
    """A table of events: `time, pod, event, gpus` with events created, started and finished (or Created, Started,
    Completed, Killed, Failed). A pod that starts again before it finished is a mistake: its times overlap."""
    created: dict[str, tuple[int, float, int]] = {}
    started: dict[str, float] = {}
    jobs = []
    for line, row in rows.table(text):
        need(rows.name, list(row), ("time", "pod", "event", "gpus"))
        pod, event = row["pod"].strip(), row["event"].strip().lower()
        moment = seconds_of(rows, line, "time", row["time"])
        if event in ("created", "submitted"):
            if pod in created:
                rows.problem(line, f"pod {pod!r} is created again, first in line {created[pod][0]}")
                continue
            created[pod] = line, moment, rows.count(line, row, "gpus")
        elif event == "started":
            if pod in started:
                rows.problem(line, f"pod {pod!r} starts while it already runs: the two overlap")
            elif pod not in created:
                rows.problem(line, f"pod {pod!r} starts, but was not created")
            else:
                started[pod] = moment
        elif event in ("finished", "completed", "killed", "failed"):
            if pod not in started:
                rows.problem(line, f"pod {pod!r} ends, but did not start")
                continue
            at, submit, gpus = created.pop(pod)
            start = started.pop(pod)
            in_order(rows, line, submit, start, moment)
            if gpus == 0:
                rows.leave_out(at, f"pod {pod} uses no GPU")
            else:
                jobs.append(Job(id=pod, submit_s=submit, work_s=max(moment - start, 0.0), devices=gpus, line=at))
        elif event not in ("scheduled", "pulled", "pulling"):
            rows.problem(line, f"event {event[:32]!r} is none of created, scheduled, started, finished, failed")
    for pod, (line, _, _) in created.items():
        rows.leave_out(line, f"pod {pod} {'still runs' if pod in started else 'never started'}")
    return from_zero(jobs)


def openb(rows: TraceRows, text: str) -> Sequence[Job]:
    """Pods of the Alibaba GPU-sharing trace (2023): `name, num_gpu, gpu_milli, creation_time, scheduled_time,
    deletion_time`. Pods that use no GPU are left out, and those that share one where `rows` does not keep
    them."""
    jobs = []
    for line, row in rows.table(text):
        need(rows.name, list(row), ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time"))
        count = rows.count(line, row, "num_gpu")
        name = row["name"].strip()
        milli = rows.count(line, row, "gpu_milli") if count == 1 and row["gpu_milli"].strip() else 1000
        if not 0 < milli <= 1000:
            rows.problem(line, f"gpu_milli is {row['gpu_milli'].strip()[:32]!r}, not from 1 to 1000")
            continue
        if count == 0 or (milli < 1000 and not rows.parts):
            rows.leave_out(line, f"pod {name} uses {'no GPU' if count == 0 else 'a part of a GPU (--gpu-sharing)'}")
        elif not row["scheduled_time"].strip():
            rows.leave_out(line, f"pod {name} never started")
        else:
            submit, start, end = (rows.number(line, row, f"{n}_time") for n in ("creation", "scheduled", "deletion"))
            in_order(rows, line, submit, start, end)
            jobs.append(
                Job(
                    id=name,
                    submit_s=submit,
                    work_s=max(end - start, 0.0),
                    devices=count,
                    share=milli / 1000,
                    user=row.get("qos", ""),
                    line=line,
                )
            )
    return from_zero(jobs)
