"""The live controller: jobs of a table run as processes of this machine, under the same policies as in the replay.

`Controller(folder, …).run()` starts, preempts (SIGTERM: `gnomon run` writes a checkpoint), resumes and resizes jobs
until all have ended. To resize is to stop and to start again on other devices from the checkpoint. Everything is in the
folder: a journal that is written before anything is done, and a lock for each job that its own process holds. A
controller that was killed is started again: it finds what still runs, loses nothing, and runs no job twice. Leaves out
other machines.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gnomon.errors import InputError, RunError
from gnomon.fleet.fates import ENDED, LIVE, Fate
from gnomon.fleet.forecast import Curve
from gnomon.fleet.journal import Journal
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.processes import LocalProcesses, Processes
from gnomon.fleet.state import Active, Decision, Policy, State, devices_of
from gnomon.fleet.tasks import Task, TaskForecasts

POLL_S = 0.1
STOPPED = (130, 143)
"""Exit statuses of a job that was told to stop and did."""


@dataclass(slots=True)
class Controller:
    """Drives the jobs of a folder."""

    folder: Path
    """Where the journal, and the jobs' outputs, are."""
    tasks: Sequence[Task]
    """The jobs, by submission."""
    devices: int
    """Devices of this machine that jobs may have."""
    policy: Policy
    """What decides who has them."""
    every_s: float | None = None
    """Seconds between two decisions while nothing happens, for policies that change running jobs; None for the
    policy's own."""
    log: Callable[[str], None] = field(default=lambda text: None)
    """Takes a line of what happened."""
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""
    wait: Callable[[float], None] = time.sleep
    """Sleeps for so many seconds."""
    journal_of: Callable[[Path], Journal] = Journal
    processes: Processes = field(init=False)
    fates: dict[str, Fate] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    """Jobs whose last process this controller started, and not one before it."""
    began_s: float = 0.0
    decided_s: float = 0.0
    submitted: int = 0
    """Jobs that had been submitted when the policy was last asked."""
    dirty: bool = True
    """Something happened since, or something that it decided could not be done yet."""
    machines: Machines = field(init=False)
    forecasts: TaskForecasts = field(init=False)
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        self.processes = LocalProcesses(self.folder)
        self.machines = Machines((Pool(name="local", device="cpu-process", nodes=1, per_node=self.devices),))
        self.forecasts = TaskForecasts({task.job.id: task for task in self.tasks}, Curve(self.machines))
        if self.policy.slices or self.policy.shares or self.policy.parts:
            raise InputError(
                f"policy {self.policy.name} has jobs share devices, which is not done live; choose another --policy"
            )
        for task in self.tasks:
            if task.job.fewest > self.devices or (not task.job.elastic and task.job.devices > self.devices):
                raise InputError(
                    f"line {task.job.line}: job {task.job.id!r} wants {task.job.fewest} of {self.devices} devices"
                )

    def run(self) -> dict[str, Fate]:
        """Runs until every job is done or has failed. RunError if another controller drives the folder."""
        with self._lock():
            while any(fate.state not in ENDED for fate in self.fates.values()):
                self._collect()
                self._decide()
                self.wait(POLL_S)
        return self.fates

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """The only controller of the folder, which knows what its journal and its locks say."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "controller.lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"another controller drives {self.folder}; stop it first") from error
            self.journal = self.journal_of(self.folder / "journal.jsonl")
            try:
                self._open()
                yield
            finally:
                self.journal.close()

    def _open(self) -> None:
        self.fates = {task.job.id: Fate(task=task, index=index) for index, task in enumerate(self.tasks)}
        for event in self.journal.events:
            if event["job"] in self.fates:
                self.fates[event["job"]].apply(event)
        gone = sorted({event["job"] for event in self.journal.events} - {"", *self.fates})
        for name in gone:
            if self.processes.alive(name):
                raise RunError(
                    f"job {name!r} of {self.folder} still runs and is not in the table; put its row back, or stop it"
                )
        # Submissions count from when the folder was first opened, so that a controller that starts again goes on in the
        # same time.
        opened = [event["at"] for event in self.journal.events if event["event"] == "opened"]
        self.began_s = float(opened[0]) if opened else self.clock()
        self.journal.write("opened", "", at=self.clock())
        for name, fate in self.fates.items():
            if fate.state in LIVE:
                alive = self.processes.alive(name)
                self.log(f"{name}: {'still runs' if alive else 'ended'} since the controller was last here")

    def _note(self, kind: str, name: str, **fields: object) -> None:
        self.journal.write(kind, name, at=self.clock(), **fields)
        self.fates[name].apply(self.journal.events[-1])
        on = (
            f" on {len(self.fates[name].devices)}"
            if kind == "starting"
            else f" to {fields.get('target')}"
            if kind == "resizing"
            else ""
        )
        self.log(f"{name}: {kind}{on}")

    def _collect(self) -> None:
        """Jobs whose process has ended; those that are to stop are told so."""
        for name, fate in self.fates.items():
            if fate.state not in LIVE:
                continue
            if self.processes.alive(name):
                if fate.state != "running":
                    self.processes.stop(name)
                continue
            self.dirty = True
            target = fate.target
            self._settle(name, fate)
            if target and fate.state == "queued" and target <= self.free:
                self._start(name, target)

    def _settle(self, name: str, fate: Fate) -> None:
        """Write down how a job's process ended."""
        began, ended = self.processes.began(name), self.processes.last_end(name)
        attempt, kind, counts = 0, "lost", name in self.started
        # Attempts are numbered: an end of one that the journal has settled already is no news.
        if ended is not None and ended[0] > fate.settled:
            attempt, counts = ended[0], True
            kind = "done" if ended[1] == 0 else "failed"
            if ended[1] in STOPPED:
                kind = "resized" if fate.state == "resizing" else "preempted"
        elif began > fate.settled:
            attempt, counts = began, True
        self.started.discard(name)
        self._note(kind, name, attempt=attempt, counts=counts, done_s=self._done_s(fate, kind))

    def _done_s(self, fate: Fate, kind: str) -> float:
        """Work that a job has done when its process has ended: what its checkpoint says; of a command that was told to
        stop, all that it had time for."""
        job = fate.task.job
        if kind == "done":
            return job.work_s
        if fate.task.planner is not None:
            return fate.task.saved_s()
        return self._reached(fate) if kind in ("preempted", "resized") else 0.0

    def _rate(self, fate: Fate) -> float:
        """Seconds of work a second, as foretold."""
        return self.forecasts.phase(fate.task.job, fate.done_s, ((0, len(fate.devices)),))[0]

    def _reached(self, fate: Fate) -> float:
        """Work that a job that runs has done by now, as foretold."""
        ran = max(self.clock() - fate.begun_s, 0.0)
        return min(fate.done_s + self._rate(fate) * ran, fate.task.job.work_s)

    @property
    def free(self) -> int:
        """Devices that no job has or waits for."""
        return self.devices - sum(fate.reserved for fate in self.fates.values())

    def _decide(self) -> None:
        """Ask the policy, if anything may have changed, and do what it says."""
        now = self.clock()
        submitted = sum(fate.task.job.submit_s <= now - self.began_s for fate in self.fates.values())
        every = self.policy.interval_s if self.every_s is None else self.every_s
        state = self._state(now - self.began_s)
        self.dirty = self.dirty or submitted > self.submitted
        again = (self.policy.adapts and state.running) or (self.policy.always and state.queue)
        due = self.dirty or (again and now >= self.decided_s + every)
        if not due or not (state.queue or (self.policy.adapts and state.running)):
            return
        self.submitted, self.decided_s, self.dirty = submitted, now, False
        for decision in self.policy.decide(state, self.forecasts):
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        """Stop, resize or start a job; what needs devices that are not free yet is decided again."""
        name, fate = decision.job, self.fates[decision.job]
        num_wanted = fate.task.on(devices_of(decision.allocation)) if decision.allocation else 0
        if fate.state == "running":
            if not decision.allocation:
                self._note("stopping", name)
            elif num_wanted and num_wanted != len(fate.devices):
                if num_wanted - len(fate.devices) <= self.free:
                    self._note("resizing", name, target=num_wanted)
                else:
                    self.dirty = True
        elif fate.state == "queued" and num_wanted:
            if num_wanted <= self.free:
                self._start(name, num_wanted)
            else:
                self.dirty = True

    def _state(self, now: float) -> State:
        """What the policy sees: devices of jobs that stop or are resized are neither free nor anyone's."""
        queue, running = [], []
        for fate in self.fates.values():
            job = fate.task.job
            active = Active(
                job=job,
                index=fate.index,
                done_s=fate.done_s,
                since_s=now,
                served=fate.served,
                turns=[(when - self.began_s, before, devices) for when, before, devices in fate.turns],
                pools=[0] * len(fate.turns),
                peak=fate.peak,
                first_s=fate.first_s - self.began_s if fate.first_s >= 0 else -1.0,
                held_s=fate.begun_s - self.began_s,
                preemptions=fate.preemptions,
                resizes=fate.resizes,
                failures=fate.failures,
            )
            if fate.state == "queued" and job.submit_s <= now:
                queue.append(active)
            elif fate.state == "running":
                active.allocation = ((0, len(fate.devices)),)
                active.done_s, active.rate = self._reached(fate), self._rate(fate)
                active.served += max(now + self.began_s - fate.begun_s, 0.0) * len(fate.devices)
                running.append(active)
        return State(now=now, machines=self.machines, queue=tuple(queue), running=tuple(running), free=(self.free,))

    def _start(self, name: str, count: int) -> None:
        """Starts a job on the free devices with the lowest numbers."""
        fate = self.fates[name]
        devices_used = {number for other in self.fates.values() for number in other.devices}
        devices_free = [number for number in range(self.devices) if number not in devices_used][:count]
        command = fate.task.command_on(count, self.folder)
        # Written before the process is there: a controller that dies in between finds in the journal that one may run.
        self._note("starting", name, devices=devices_free)
        self.processes.start(name, fate.attempt, fate.settled, command, devices_free)
        self.started.add(name)
