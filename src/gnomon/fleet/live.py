"""The live controller: jobs of a table run as processes of this machine, under the same policies as in the replay.

`Controller(folder, …).run()` starts, preempts (SIGTERM: `gnomon run` writes a checkpoint) and resumes jobs until all
have ended. Everything is in the folder: a journal that is written before anything is done, and a lock for each job that
its own process holds. A controller that was killed is started again: it finds what still runs, loses nothing, and runs
no job twice. Leaves out resizing a job while it runs, and other machines.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gnomon.errors import InputError, RunError
from gnomon.fleet.forecast import Curve
from gnomon.fleet.job import Job
from gnomon.fleet.journal import Journal
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.state import Active, Policy, State
from gnomon.fleet.traces.rows import Rows, need

POLL_S = 0.1
MOST_FAILURES = 3
"""Times that a job may fail before it is given up."""
STOPPED = (130, 143)
"""Exit statuses of a job that was told to stop and did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job of the table: what is scheduled, and the command that does it."""

    job: Job
    command: tuple[str, ...]


def read_tasks(path: str | Path) -> tuple[Task, ...]:
    """The table `job_id, num_gpus, duration_s` and `command`, or `plan` and `steps` for `gnomon run`.

    duration_s is what policies are told. InputError with the line for what cannot be."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise InputError(f"cannot read jobs {str(path)!r}: {reason}") from error
    rows = Rows(str(path))
    commands: dict[str, tuple[str, ...]] = {}
    jobs = []
    for line, row in rows.table(text):
        need(str(path), list(row), ("job_id", "num_gpus", "duration_s"))
        name = row["job_id"].strip()
        if not name or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
            rows.problem(line, f"job_id {name[:32]!r} must be of letters, digits, '.', '_' and '-': it names files")
        command = shlex.split(row.get("command", ""))
        plan = row.get("plan", "").strip()
        if bool(command) == bool(plan):
            rows.problem(line, "give `command`, or `plan` (a plan file for gnomon run), and not both")
        if plan:
            steps = str(rows.count(line, row, "steps"))
            checkpoints = f"{plan}.{name}.checkpoints"
            command = [sys.executable, "-m", "gnomon", "run", plan, "--steps", steps]
            command += ["--checkpoints", checkpoints, "--resume"]
        commands[name] = tuple(command)
        jobs.append(
            Job(
                id=name,
                submit_s=float(rows.number(line, row, "submit_s")) if row.get("submit_s", "").strip() else 0.0,
                work_s=rows.number(line, row, "duration_s"),
                devices=rows.count(line, row, "num_gpus"),
                line=line,
            )
        )
    checked = rows.jobs(jobs)
    if not checked:
        raise InputError(f"{path}: no job")
    return tuple(Task(job=job, command=commands[job.id]) for job in checked)


@dataclass(slots=True)
class Fate:
    """What is known of a job."""

    task: Task
    index: int
    state: str = "queued"
    """queued, running, stopping, done or failed."""
    begun_s: float = 0.0
    served: float = 0.0
    failures: int = 0
    preemptions: int = 0
    starts: int = 0


@dataclass(slots=True)
class Controller:
    """Drives the jobs of a folder."""

    folder: Path
    tasks: Sequence[Task]
    devices: int
    policy: Policy
    told: Callable[[str], None] = field(default=lambda text: None)
    clock: Callable[[], float] = time.time
    fates: dict[str, Fate] = field(default_factory=dict)
    began_s: float = 0.0
    machines: Machines = field(init=False)
    journal: Journal = field(init=False)
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self) -> dict[str, Fate]:
        """Until every job is done or has failed. RunError if another controller drives the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "controller.lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"another controller drives {self.folder}; stop it first") from error
            self._open()
            try:
                while any(fate.state not in ("done", "failed") for fate in self.fates.values()):
                    self._collect()
                    self._decide()
                    time.sleep(POLL_S)
            finally:
                self.journal.close()
        return self.fates

    def _open(self) -> None:
        """What the journal and the locks say."""
        pool = Pool(name="local", device="cpu-process", nodes=1, per_node=self.devices)
        self.machines = Machines((pool,))
        large = [task.job for task in self.tasks if task.job.devices > self.devices]
        if large:
            raise InputError(
                f"line {large[0].line}: job {large[0].id!r} wants {large[0].devices} of {self.devices} devices"
            )
        self.fates = {task.job.id: Fate(task=task, index=i) for i, task in enumerate(self.tasks)}
        self.journal = Journal(self.folder / "journal.jsonl")
        for event in self.journal.events:
            self._replay(event["event"], str(event["job"]), event.get("at", 0.0))
        first = [event["at"] for event in self.journal.events if event["event"] == "opened"]
        self.began_s = float(first[0]) if first else self.clock()
        self.journal.write("opened", "", at=self.clock())
        for name, fate in self.fates.items():
            if fate.state == "starting":
                fate.state = "running"  # whether it came to that is for its lock to say
            if fate.state in ("running", "stopping"):
                alive = self._alive(name)
                self.told(f"{name}: {'still runs' if alive else 'ended'} since the controller was last here")

    def _replay(self, kind: str, name: str, at: float) -> None:
        fate = self.fates.get(name)
        if fate is None:
            return
        fate.served += (at - fate.begun_s) * fate.task.job.devices if kind in ("preempted", "failed", "lost") else 0.0
        match kind:
            case "starting":
                fate.state, fate.begun_s = "starting", at
                fate.starts += 1
            case "stopping":
                fate.state = "stopping"
            case "preempted":
                fate.state = "queued"
                fate.preemptions += 1
            case "lost" | "failed":
                fate.failures += 1
                fate.state = "failed" if fate.failures >= MOST_FAILURES else "queued"
            case "done":
                fate.state = "done"

    def _note(self, kind: str, name: str) -> None:
        at = self.clock()
        self.journal.write(kind, name, at=at)
        self._replay(kind, name, at)
        self.told(f"{name}: {kind}")

    def _alive(self, name: str) -> bool:
        """Whether a process holds the job's lock."""
        path = self.folder / f"{name}.lock"
        if not path.exists():
            return False
        with open(path, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            return False

    def _collect(self) -> None:
        """Jobs whose process has ended."""
        for name, fate in self.fates.items():
            if fate.state not in ("starting", "running", "stopping"):
                continue
            child = self.children.get(name)
            if (child is not None and child.poll() is None) or self._alive(name):
                continue
            self.children.pop(name, None)
            status = self._status(name)
            if status == 0:
                self._note("done", name)
            elif status in STOPPED:
                self._note("preempted", name)
            else:
                self._note("failed" if status is not None else "lost", name)

    def _status(self, name: str) -> int | None:
        """How a job ended; None if its process was killed before it could say."""
        path = self.folder / f"{name}.rc"
        return int(path.read_text()) if path.exists() else None

    def _decide(self) -> None:
        """Ask the policy, stop what it stops, start what it starts as soon as devices are free."""
        state = self._state()
        if not state.queue:
            return
        for decision in self.policy.decide(state, Curve(self.machines)):
            fate = self.fates[decision.job]
            if not decision.allocation and fate.state == "running":
                self._note("stopping", decision.job)
                self._signal(decision.job)
            elif decision.allocation and fate.state == "queued":
                used = sum(
                    other.task.job.devices for other in self.fates.values() if other.state in ("running", "stopping")
                )
                if used + fate.task.job.devices <= self.devices:
                    self._start(decision.job)

    def _state(self) -> State:
        now = self.clock() - self.began_s
        queue, running = [], []
        free = self.devices
        for fate in self.fates.values():
            job = fate.task.job
            active = Active(job=job, index=fate.index, served=fate.served, since_s=now)
            if fate.state == "queued" and job.submit_s <= now:
                queue.append(active)
            elif fate.state in ("running", "stopping"):
                free -= job.devices
                if fate.state == "running":
                    ran = max(now + self.began_s - fate.begun_s, 0.0)
                    active.allocation = ((0, job.devices),)
                    active.done_s = min(ran, job.work_s)
                    active.served += ran * job.devices
                    active.rate = 1.0
                    active.first_s = 0.0
                    running.append(active)
        return State(now=now, machines=self.machines, queue=tuple(queue), running=tuple(running), free=(free,))

    def _start(self, name: str) -> None:
        (self.folder / f"{name}.rc").unlink(missing_ok=True)
        self._note("starting", name)
        command = [sys.executable, "-m", "gnomon.fleet.child", str(self.folder), name, "--"]
        self.children[name] = subprocess.Popen(
            [*command, *self.fates[name].task.command], start_new_session=True, stdin=subprocess.DEVNULL
        )
        self.fates[name].state = "running"

    def _signal(self, name: str) -> None:
        path = self.folder / f"{name}.pid"
        for _ in range(50):  # the process may not have come so far as to write its number
            if path.exists() and self._alive(name):
                os.kill(int(path.read_text()), signal.SIGTERM)
                return
            time.sleep(POLL_S)
