"""The jobs of `gnomon fleet run`: what is scheduled, the command that does it, and what the planner foretells of it.

`read_tasks(path)` reads the table. A task is a command, or a plan file for `gnomon run`; of a plan the rate on other
numbers of devices is predicted, and the plan resized to them. `TaskForecasts` is what policies are told. Leaves out
starting anything (`processes`) and deciding (`live`).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import GnomonError, InputError
from gnomon.fleet.forecast import NEVER, Curve
from gnomon.fleet.job import Job
from gnomon.fleet.planned import Forecast, Planner
from gnomon.fleet.state import Allocation, PhaseForecasts, devices_of
from gnomon.fleet.traces.rows import TraceRows, need
from gnomon.graph import Graph
from gnomon.hardware import catalogue, parse_cluster
from gnomon.plans import PlanFile, load_plan_file, save_plan_file
from gnomon.request.runnable import read_runnable_model
from gnomon.software import stack

PLACE = "{devices}"
"""Stands in a command for the number of devices that it gets."""
_STEP = re.compile(r"step-(\d{6,})")
_CLUSTER = re.compile(r"(?:[0-9]+x){0,2}(?P<device>[a-z][a-z0-9._-]*)")

Read = Callable[[str], tuple[Graph, tuple[str, ...]]]
"""(Graph, notes) of a model by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job of the table."""

    job: Job
    """What is scheduled."""
    command: tuple[str, ...] = ()
    """What does it, if no plan does."""
    plan_path: Path | None = None
    """Plan file for `gnomon run`."""
    file: PlanFile | None = None
    """What is in it."""
    planner: Planner | None = None
    """Its forecasts."""
    steps: int = 0
    """Of training, under a plan."""
    options: tuple[str, ...] = ()
    """More words for `gnomon run`."""

    def on(self, devices: int) -> int:
        """Most devices up to so many that the task can run on; 0 for none."""
        if self.planner is None:
            return devices if self.job.fewest <= devices <= self.job.most else 0
        for count in range(min(devices, self.job.most), self.job.fewest - 1, -1):
            if self.planner.possible(count):
                return count
        return 0

    def command_on(self, devices: int, folder: Path) -> tuple[str, ...]:
        """The command on so many devices. A plan that is resized to them is written into the folder."""
        if self.plan_path is None or self.file is None or self.planner is None:
            return tuple(word.replace(PLACE, str(devices)) for word in self.command)
        path = self.plan_path
        if devices != self.file.plan.world_size:
            forecast = self.planner.possible(devices)
            assert forecast is not None, "on() was asked first"
            path = folder / f"{self.job.id}.{devices}.toml"
            resized = PlanFile(
                model=self.file.model,
                on=cluster_of(self.file.on, devices),
                stack=self.file.stack,
                workload=self.file.workload,
                plan=forecast.plan,
            )
            save_plan_file(resized, path)
        words = ("run", str(path), "--steps", str(self.steps), "--checkpoints", str(self.checkpoints), "--resume")
        return (sys.executable, "-m", "gnomon", *words, *self.options)

    @property
    def checkpoints(self) -> Path:
        """Folder of them, under a plan."""
        return Path(f"{self.plan_path}.{self.job.id}.checkpoints")

    def saved_s(self) -> float:
        """Work that the newest checkpoint has, in seconds on the devices asked for; 0 where nothing is known."""
        if self.plan_path is None or not self.checkpoints.is_dir():
            return 0.0
        names = (_STEP.fullmatch(path.name) for path in self.checkpoints.iterdir())
        step = max((int(match[1]) for match in names if match), default=0)
        return self.job.work_s * min(step / self.steps, 1.0)


def read_tasks(path: str | Path, read: Read = read_runnable_model) -> tuple[Task, ...]:
    """The table `job_id` and `num_gpus, duration_s, command`, or `plan, steps` for `gnomon run`, with any of `submit_s,
    min_gpus, max_gpus, options`.

    duration_s is what policies are told; of a plan it is predicted where it is not given. read: a plan's model by its
    name. InputError with the line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise InputError(f"cannot read jobs {str(path)!r}: {reason}") from error
    rows = TraceRows(str(path), advice="mend the rows")
    tasks: dict[int, Task] = {}
    for line, row in rows.table(text):
        need(str(path), list(row), ("job_id",))
        if (task := _task(rows, line, {key: value.strip() for key, value in row.items()}, read)) is not None:
            tasks[line] = task
    jobs = rows.jobs([task.job for task in tasks.values()])
    if not jobs:
        raise InputError(f"{path}: no job")
    # `jobs` are in order of submission, and without the rows that were refused.
    return tuple(tasks[job.line] for job in jobs)


def _task(rows: TraceRows, line: int, row: dict[str, str], read: Read) -> Task | None:
    """Reads a task from a row; None, with the problem noted, if it is none."""
    name = row["job_id"]
    if not name or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
        rows.problem(line, f"job_id {name[:32]!r} must be of letters, digits, '.', '_' and '-': it names files")
        return None
    words, plan = {}, row.get("plan", "")
    try:
        words = {key: tuple(shlex.split(row.get(key, ""))) for key in ("command", "options")}
    except ValueError as error:
        rows.problem(line, f"a command or options cannot be split into words: {error}")
        return None
    if bool(words["command"]) == bool(plan):
        rows.problem(line, "give `command`, or `plan` (a plan file for gnomon run), and not both")
        return None
    submit_s = rows.number(line, row, "submit_s") if row.get("submit_s") else 0.0
    least, most = (rows.count(line, row, key) if row.get(key) else 0 for key in ("min_gpus", "max_gpus"))
    if plan:
        return _planned(rows, line, row, Path(plan), words["options"], submit_s, (least, most), read)
    if words["options"]:
        rows.problem(line, "`options` are of gnomon run, for a `plan`; a `command` has its own")
    job = Job(
        id=name,
        submit_s=submit_s,
        work_s=rows.number(line, row, "duration_s"),
        devices=rows.count(line, row, "num_gpus"),
        min_devices=least,
        max_devices=most,
        line=line,
    )
    if job.elastic and not any(PLACE in word for word in words["command"]):
        rows.problem(line, f"a command that can run on several numbers of devices says where: {PLACE}")
    return Task(job=job, command=words["command"])


def _planned(
    rows: TraceRows, line: int, row: dict[str, str], path: Path, options: tuple[str, ...], submit_s: float,
    bounds: tuple[int, int], read: Read,
) -> Task | None:  # fmt: skip
    """A task of a plan file."""
    steps = rows.count(line, row, "steps")
    if steps == 0:
        rows.problem(line, "steps is 0; at least 1 is needed")
    try:
        file = load_plan_file(path)
        graph, _ = read(file.model)
        own = file.plan.world_size
        devices = rows.count(line, row, "num_gpus") if row.get("num_gpus") else own
        most = max(own, devices, *bounds)
        # The plan's own cluster, which may be several machines or a file, serves only where the job never has other
        # numbers of devices.
        on = file.on if {devices, *filter(None, bounds)} == {own} else cluster_of(file.on, most)
        planner = Planner(
            graph=graph, cluster=parse_cluster(on), plan=file.plan, workload=file.workload, stack=stack("gnomon")
        )
    except GnomonError as error:
        rows.problem(line, f"plan {str(path)!r}: {error}")
        return None
    forecast = planner.forecast(devices)
    if not isinstance(forecast, Forecast):
        rows.problem(line, f"plan {str(path)!r} on {devices} devices: {forecast.reason}")
        return None
    if not forecast.fits:
        rows.problem(
            line,
            f"plan {str(path)!r} does not fit on {devices} devices: {forecast.peak_bytes / 2**30:,.1f} GiB on the "
            f"fullest; gnomon fit {path} says what makes it fit",
        )
        return None
    duration = row.get("duration_s")
    work_s = rows.number(line, row, "duration_s") if duration else steps * float(forecast.step_s)
    job = Job(
        id=row["job_id"],
        submit_s=submit_s,
        work_s=work_s,
        devices=devices,
        min_devices=bounds[0],
        max_devices=bounds[1],
        line=line,
    )
    return Task(job=job, plan_path=path, file=file, planner=planner, steps=steps, options=options)


def cluster_of(on: str, devices: int) -> str:
    """One machine with so many devices of the kind that a spec names. InputError for a file or a mix."""
    text = on.strip().lower()
    if text.partition(":")[0] == "local":
        return f"local:{devices}"
    match = _CLUSTER.fullmatch(text)
    if match is None or catalogue.find_device(match["device"]) is None:
        raise InputError(
            f"{on!r} cannot be written for {devices} devices; give a plan for DEVICESxDEVICE or `local`, or as many "
            "devices as it has"
        )
    return f"{devices}x{match['device']}"


@dataclass(frozen=True)
class TaskForecasts(PhaseForecasts):
    """What is foretold of tasks: by the planner where they have a plan, else by the stated curve."""

    tasks: Mapping[str, Task]
    """Name -> what was submitted."""
    curve: Curve
    """What is taken for those without a plan."""

    def phase(self, job: Job, done_s: float, allocation: Allocation) -> tuple[float, float]:
        """Returns (rate, until) as `Forecasts` does; rate 0 on numbers of devices that a plan cannot use or does not
        fit."""
        planner = self.tasks[job.id].planner
        if planner is None:
            return self.curve.phase(job, done_s, allocation)
        requested_plan, allocated_plan = planner.possible(job.devices), planner.possible(devices_of(allocation))
        if requested_plan is None or allocated_plan is None:
            return 0.0, NEVER
        # A job's work is in seconds on the devices that it asked for, which is rate 1.
        return requested_plan.step_s / allocated_plan.step_s, NEVER

    def limits(self, job: Job) -> tuple[int, int]:
        """Returns the limits that the curve gives."""
        return self.curve.limits(job)

    def memory_bytes(self, job: Job, devices: int) -> float:
        """Returns the peak memory of the plan forecast for so many devices."""
        planner = self.tasks[job.id].planner
        forecast = planner.forecast(devices) if planner is not None else None
        return float(forecast.peak_bytes) if isinstance(forecast, Forecast) else self.curve.memory_bytes(job, devices)

    def resize_s(self, job: Job, devices: int) -> float:
        """Returns the seconds of a resize that the curve gives."""
        return self.curve.resize_s(job, devices)

    def speed_share(self, job: Job, other: Job) -> float:
        """Returns the share of speed that the curve gives."""
        return self.curve.speed_share(job, other)
