"""Processes that come, go and are lost while a job runs: the one launcher of them, `Launcher`.

A `Scheme` says how its processes are used: which controller of `control` decides who trains, and what each of them
does. The launcher starts processes, sees which are there, ready, stopped, lost or apart, asks the controller, and
announces its decisions (`membership`); processes carry them out (`member`). `run_scheme(job, scheme)` is a whole run.
Leaves out which scheme a job has (`run`), processes that all stay until the end (there too), and other machines.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Protocol

import torch
from torch._C._distributed_c10d import Store

from gnomon import orders
from gnomon.control import CONTROLLERS, Decision, JobProcesses, Recorder, surplus
from gnomon.errors import NoMemoryError, PeerError
from gnomon.request.scale import JobFolder
from gnomon.runtime.checkpoint.record import newest
from gnomon.runtime.launch.changes import Changes
from gnomon.runtime.launch.exported_checkpoint import exported, keeping
from gnomon.runtime.launch.kernels import Kernels
from gnomon.runtime.launch.membership import (
    Epoch,
    Membership,
    announce,
    is_ready,
    noted,
    say_lost,
    say_nobody_comes,
    who_waited,
)
from gnomon.runtime.launch.train import Outcome, TrainingJob, corpus_of, preload_of
from gnomon.runtime.module.apply import check_before
from gnomon.runtime.processes.faults import SAID, failure_of
from gnomon.runtime.processes.local import FAILED_S, SIGNALS, FailedError, Failure, Processes
from gnomon.runtime.watch.watchdog import SILENT_S

LOOK_S = 0.1
"""Between two looks at what is asked; the end of a process is seen at once."""
SOON_S = 0.005
"""Between two looks while processes wait for one that is to join them."""
Train = Callable[[TrainingJob, Membership], Any]
"""What each process does, importable by name: how the job went, or None where it left before the end."""


class Desk(Protocol):
    """The launcher's side of messages that processes send while they train: it answers them."""

    def hear(self, message: bytes) -> Mapping[int, bytes]:
        """Replies to processes, by number. RunError where training cannot go on."""

    def outcome(self, first: Any) -> Outcome:
        """How the job went. first: what one of its processes returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a job's processes are used, where they may come, go, be lost or be slow."""

    controller: str
    """Of `control.CONTROLLERS`, which decides who trains."""
    check: Callable[[TrainingJob], None]
    """PlanError for a job that cannot be run so."""
    train: Train
    """What each process does."""
    exports: Literal["processes", "launcher"]
    """Who writes the weights at the end: the processes, or the launcher from their last checkpoint."""
    desk: Callable[[TrainingJob], Desk] | None
    """What answers messages of processes; None where they send none."""


def run_scheme(job: TrainingJob, scheme: Scheme, *, threads: int = 1, pause_s: Sequence[float] = ()) -> Outcome:
    """Starts the job's processes and returns how it went.

    threads: of torch in each. pause_s: seconds that each of the first processes sleeps in a worker's step, in place of
    a slower processor. PlanError as the scheme checks. PeerError or RunError, with the newest checkpoint, where more
    was lost than can be gone on without; SystemExit (130, 143) if a signal ended processes that did not end by
    themselves.
    """
    return start(job, scheme, threads=threads, pause_s=pause_s).run()


def start(job: TrainingJob, scheme: Scheme, *, threads: int = 1, pause_s: Sequence[float] = ()) -> Launcher:
    """The launcher of a job that was checked; `run` starts its processes. As `run_scheme`."""
    check_before(job.graph, job.plan)
    scheme.check(job)
    corpus_of(job)  # text becomes tokens once, before processes wait for each other
    return Launcher(job, scheme, threads=threads, pause_s=pause_s)


class Launcher(Processes):
    """The processes of one job. A process's number is never given again."""

    def __init__(self, job: TrainingJob, scheme: Scheme, *, threads: int, pause_s: Sequence[float]) -> None:
        """Takes what `run_scheme` takes."""
        self.scheme, self.controller = scheme, CONTROLLERS[scheme.controller]
        self.job_given = job
        self.plan, processes = self.controller.begin(job.plan)
        """In force: its placement is the last decision's."""
        job = replace(keeping(job) if scheme.exports == "launcher" else job, plan=self.plan)
        super().__init__(
            _process,
            processes,
            (job, threads, orders.added(), scheme.train),
            start_method="forkserver",
            grace_s=job.grace_s,
            preload=preload_of(job),
        )
        self.job, self.threads, self.pause_s, self.restarts = job, threads, tuple(pause_s), job.max_restarts
        self.epochs: list[Epoch] = []
        self.gone: set[int] = set()
        """Processes that were told to end, or are lost."""
        self.lost: list[int] = []
        self.lost_ranks: tuple[int, ...] = ()
        """Whose state was in no memory at the last decision."""
        self.rank_of: dict[int, int] = {one: one for one in range(processes)} if self.controller.ranked else {}
        """Rank that each process was started for; none where processes are alike."""
        self.requested = 0 if self.controller.ranked else processes
        """Processes that are wanted; 0 where the plan says it."""
        self.kernels = None if self.controller.ranked else Kernels(agreed=job.determinism == "D2")
        alike = not self.controller.ranked and job.checkpoints is not None
        self.changes = Changes(JobFolder(job.checkpoints) if alike and job.checkpoints else None, job.plan.world_size)
        self.stopped_since: dict[int, float] = {}
        self.unmet_since: dict[int, float] = {}
        """Of an epoch: when it was seen that some of its members had not met the others."""
        self.absent: set[int] = set()
        """Those that were killed for it."""
        self.desk = None if scheme.desk is None else scheme.desk(job)
        self.recorder = (
            None
            if job.decisions is None
            else Recorder(job.decisions, controller=scheme.controller, plan=self.plan, restarts=job.max_restarts)
        )

    # --- a run

    def run(self) -> Outcome:
        """How the job went. Errors as `faults.failure_of` tells them, with the newest checkpoint."""
        job = self.job_given
        try:
            self.results()
        except FailedError as failed:
            last_checkpoint = None if job.checkpoints is None else newest(job.checkpoints)
            size = self.requested or self.world_size
            raise failure_of(failed, size, last_checkpoint=last_checkpoint, resume_with=job.resume_with) from failed
        finally:
            self.changes.close()
        first = self.outcomes()[0]
        outcome: Outcome = first if self.desk is None else self.desk.outcome(first)
        if self.scheme.exports == "launcher":
            outcome = exported(job, outcome)
        differing = "" if self.kernels is None else self.kernels.differing
        return replace(outcome, notes=(*outcome.notes, differing)) if differing else outcome

    def outcomes(self) -> list[Any]:
        """Results of the processes that trained to the end: those of the last epoch in its order, then others."""
        last = self.epochs[-1].members if self.epochs else ()
        ordered = dict.fromkeys((*last, *sorted(self.returned)))
        return [self.returned[one] for one in ordered if self.returned.get(one) is not None]

    def _complete(self) -> bool:
        return bool(self.outcomes())

    def _wait(self) -> list[int]:
        """Waits until the job is over; returns the processes that ended it."""
        fatal: list[int] = []
        self.changes.write(self.requested)
        while self._running():
            for process in self._just_failed(self._patience_s()):
                failure = self._failure(process)
                # An exception of the job's own would come again in whoever took its place. A PeerError only follows
                # from another's loss, and memory may be short once.
                mistake = failure.kind and failure.error not in (PeerError, NoMemoryError)
                if mistake or (process not in self.gone and not self._lose(process, failure.describe())):
                    fatal.append(process)
            if fatal or self._complete():
                # The others end by themselves meanwhile, and say why; what is left then is killed.
                self.until = min(self.until, monotonic() + FAILED_S)
            else:
                self._look()
            if monotonic() > self.until:
                break
        # Nobody is left and nobody has trained to the end: what was lost ended the job, though each loss alone could be
        # borne.
        return fatal or ([] if self._complete() or self.stopped else self.lost)

    def _patience_s(self) -> float:
        """Seconds between two looks at the processes: fewer while a process that was started is to join the others."""
        return SOON_S if self.epochs and set(self._there()) - set(self.epochs[-1].members) else LOOK_S

    # --- what is seen, and what follows

    def _there(self) -> Sequence[int]:
        """Processes that run and are to stay."""
        return [process for process in self._running() if process not in self.gone and process not in self.returned]

    def _seen(self) -> JobProcesses:
        """What the controller is told."""
        assert self.store is not None
        there = tuple(self._there())
        seen = JobProcesses(
            there=there,
            ready=tuple(process for process in there if is_ready(self.store, process)),
            asked=self.requested,
            ranks=tuple(self.rank_of[process] for process in there) if self.rank_of else (),
            lost=self.lost_ranks,
        )
        if not self.epochs:
            return seen
        now = self.epochs[-1]
        # Every member must have said so: one that has not noticed a loss yet still waits in the old group, and one that
        # is not going yet may still be lost in meeting.
        parted, met = (len(noted(self.store, what, now)) == len(now.members) for what in ("noticed", "going"))
        speeds = noted(self.store, "speed", now) if self.job.follow_speed else {}
        # Speeds of some members alone would move workers for no reason.
        known = tuple(speeds[one] for one in now.members) if len(speeds) == len(now.members) else ()
        return replace(seen, members=now.members, speeds=known, parted=parted, met=met)

    def _look(self) -> None:
        """Whether somebody asks for another number, a process is silent, or others are to train now."""
        assert self.store is not None
        if (target := self.changes.requested_processes()) is not None:
            self._scale(target)
        self._end_stopped()
        self._end_absent()
        if self.changes.follow(self.store, self.epochs):
            self.changes.write(self.requested)
        if self.kernels is not None:
            self._look_at_kernels(self.kernels)
        seen = self._seen()
        for process in surplus(seen):  # it waits for an epoch that will not come
            self.gone.add(process)
            self.ranks[process].process.kill()
        decision = self.controller.decide(self.plan, seen)
        if self.recorder is not None:
            self.recorder.look(seen, decision)
        if decision is not None:
            self._say_why(seen, decision)
            self._announce(decision)

    def _announce(self, decision: Decision) -> None:
        """Announces a new epoch: its members train together from the next step on, or at once where one was lost."""
        assert self.store is not None
        if self.epochs:
            # Who is left out ends by itself, and its end is then no loss.
            self.gone |= set(self.epochs[-1].members) - set(decision.members)
        self.plan, self.lost_ranks = decision.plan, decision.lost
        ranks = tuple(self.rank_of[one] for one in decision.members) if self.rank_of else ()
        number, placement = len(self.epochs) + 1, decision.plan.placement
        self.epochs.append(Epoch(number=number, members=decision.members, placement=placement, ranks=ranks))
        announce(self.store, self.epochs[-1])
        self.changes.add(self.epochs[-1])
        self.changes.write(self.requested)

    def _say_why(self, seen: JobProcesses, decision: Decision) -> None:
        """What has led to a decision, where the loss of a process has not said it."""
        assert self.store is not None
        if self.controller.ranked:
            if self.epochs and (waits := who_waited(self.store, self.epochs[-1])):
                self._say_always("; ".join(waits[:SAID]))
        elif decision.members == seen.members:
            if seen.parted:
                self.changes.why = (
                    f"processes did not meet within {self.job.meet_s:g} s: they try again (--meet-within)"
                )
                self._say(self.changes.why)
            else:
                speeds = ", ".join(f"{speed:.3g}" for speed in seen.speeds)
                self.changes.why = f"workers moved by measured speeds {speeds}"

    def _lose(self, process: int, what: str) -> bool:
        """What follows from the loss of a process; whether the job can go on. what: happened to it."""
        if self._complete() or (self.stopped and not self.controller.ranked):
            return True
        assert self.store is not None
        self.gone.add(process)
        # The lost process is in `gone` already, so that the controller does not see it.
        after = self.controller.after_loss(self._seen(), self.restarts)
        if not after.goes_on:
            return False
        self.lost.append(process)
        self.restarts, self.requested = after.restarts, after.wanted
        for epoch in self.epochs[-2:]:  # of the last, some may not have heard yet
            if process in epoch.members:
                say_lost(self.store, epoch)
        who = f"process {process}"
        if self.rank_of:
            rank = self.rank_of[process]
            who = f"rank {rank} of {self.world_size}"
            # Processes are numbered in the order of their starts, so these are the numbers that `_start_more` gives.
            for number in range(len(self.ranks), len(self.ranks) + after.starts):
                self.rank_of[number] = rank
        if not after.starts:
            say_nobody_comes(self.store)
        self._start_more(after.starts)
        self.changes.why = f"{who} {what}"
        (self._say_always if self.rank_of else self._say)(f"{who} {what}: {after.message}")
        return True

    def _scale(self, processes: int) -> None:
        """Somebody asks for another number of processes."""
        self.changes.why, self.requested = f"asked for {processes} processes", processes
        self._start_more(max(0, processes - len(self._there())))
        self.changes.write(self.requested)

    def _look_at_kernels(self, kernels: Kernels) -> None:
        """Says where processes compute with different kernels, and leaves out those that cannot have the agreed."""
        assert self.store is not None
        lines, lacking = kernels.look(self.store, set(range(len(self.ranks))) - self.gone, self._there())
        for line in lines:
            self._say(line)
        if lacking:
            self.gone.update(lacking)
            self.requested = max(1, len(self._there()))
            self.changes.write(self.requested)

    def _say(self, line: str) -> None:
        if not self.job.quiet:
            self._say_always(line)

    def _say_always(self, line: str) -> None:
        print(f"gnomon: {line}", file=sys.stderr, flush=True)

    # --- processes

    def _arguments(self, rank: int) -> Sequence[Any]:
        line = None
        if self.desk is not None:
            here, line = Pipe()
            self.listened[here] = rank
        return (*self.args, self.pause_s[rank] if rank < len(self.pause_s) else 0.0, line)

    def _heard(self, line: Connection) -> None:
        """A process has said something, or its end of the line is closed."""
        assert self.desk is not None
        try:
            message = line.recv_bytes()
        except (EOFError, OSError):  # it ended
            del self.listened[line]
            return
        replies, lines = self.desk.hear(message), {process: one for one, process in self.listened.items()}
        for process, reply in replies.items():
            # One that has ended meanwhile needs no answer.
            if process in lines:
                lines[process].send_bytes(reply)

    def _failure(self, rank: int) -> Failure:
        return replace(super()._failure(rank), rank=self.rank_of.get(rank, rank))

    def _start_more(self, count: int) -> None:
        """So many processes more."""
        assert self.place is not None
        if self.epochs:  # what there is to go on from is this run's own
            job = replace(self.job, resume=self.job.checkpoints is not None)
            self.args = (job, self.threads, orders.added(), self.scheme.train)
        # A signal between a start and its being noted would leave a process that nobody ends.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for _ in range(count):
                self._start_one(*self.place)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end_absent(self) -> None:
        """Kills members of an epoch that say nothing for meet_s after others gave up meeting them."""
        if not self.epochs:
            return
        assert self.store is not None
        epoch, meet_s = self.epochs[-1], self.job.meet_s
        given_up = noted(self.store, "unmet", epoch)
        # Those that gave up meeting say so after meet_s; a member that is merely slow has as long again to come.
        if not given_up or monotonic() - self.unmet_since.setdefault(epoch.number, monotonic()) < meet_s:
            return
        came = given_up.keys() | noted(self.store, "noticed", epoch).keys() | noted(self.store, "going", epoch).keys()
        for process in set(self._there()) & set(epoch.members) - came - self.absent:
            self.absent.add(process)
            what = f"process {process} has not met the others within {meet_s:g} s (--meet-within), nor since"
            self._say_always(f"{what}: it is killed")
            self.ranks[process].process.kill()

    def _end_stopped(self) -> None:
        """Kills a process that has been stopped (SIGSTOP) for SILENT_S: the others wait for it."""
        for process in self._there():
            if not _is_stopped(self.ranks[process].process.pid or 0):
                self.stopped_since.pop(process, None)
            elif monotonic() - self.stopped_since.setdefault(process, monotonic()) >= SILENT_S:
                self._say_always(f"process {process} was stopped for {SILENT_S:.0f} s: it is killed")
                self.ranks[process].process.kill()


def _is_stopped(pid: int) -> bool:
    """Whether a signal stopped the process; False where the system does not say."""
    try:
        # The state is the first field after the command's name, which is in brackets and may itself hold spaces and
        # brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _process(
    store: Store,
    number: int,
    world_size: int,
    job: TrainingJob,
    threads: int,
    schedules: Sequence[Path],
    train: Train,
    pause_s: float,
    line: Connection | None,
) -> Any:
    """One process, from its start to its end. threads: of torch. schedules: files of orders that the launcher has
    added. line: to the launcher's desk."""
    for path in schedules:
        orders.add(path)
    for one in SIGNALS:
        signal.signal(one, lambda number, frame: os._exit(128 + number))
    torch.set_num_threads(threads)
    return train(job, Membership(store, number, meet_s=job.meet_s, pause_s=pause_s, launcher=line))
