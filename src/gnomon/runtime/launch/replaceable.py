"""Processes of a job that goes on when some of them are lost: `Replaceable`, the launcher's side.

Others can be started while the job runs, a process that was stopped for too long is killed, and what the loss of one
means is its subclass's. Leaves out who trains together (`membership`), and the processes' side.
"""

from __future__ import annotations

import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from gnomon import orders
from gnomon.control import CONTROLLERS, Decision, Recorder, Seen
from gnomon.errors import NoMemoryError, PeerError
from gnomon.runtime.launch.membership import Epoch, announce, joined, noted
from gnomon.runtime.launch.train import Job, preload_of
from gnomon.runtime.processes.local import FAILED_S, SIGNALS, Processes
from gnomon.runtime.watch.watchdog import SILENT_S

LOOK_S = 0.1
"""Between two looks at what is asked; the end of a process is seen at once."""


class Replaceable(Processes, ABC):
    """A process's number is never given again."""

    controller: str
    """Of `control.CONTROLLERS`, which decides who trains."""

    def __init__(self, function: Any, processes: int, job: Job, threads: int) -> None:
        """function(store, number, world_size, job, threads, schedules) is called in each process."""
        super().__init__(
            function,
            processes,
            (job, threads, orders.added()),
            start_method="forkserver",
            grace_s=job.grace_s,
            preload=preload_of(job),
        )
        self.job, self.threads, self.restarts = job, threads, job.max_restarts
        self.epochs: list[Epoch] = []
        self.left: set[int] = set()
        """Processes that were told to end, or are lost."""
        self.stopped_since: dict[int, float] = {}
        self.unmet_since: dict[int, float] = {}
        """Of an epoch: when it was seen that some of its members had not met the others."""
        self.absent: set[int] = set()
        """Those that were killed for it."""
        self.plan = job.plan
        """In force: its placement is the last decision's."""
        self.lost_ranks: tuple[int, ...] = ()
        """Whose state was in no memory at the last decision."""
        self.recorder = (
            None
            if job.decisions is None
            else Recorder(job.decisions, controller=self.controller, plan=job.plan, restarts=job.max_restarts)
        )

    def outcomes(self) -> list[Any]:
        """Of processes that trained to the end."""
        return [outcome for _, outcome in sorted(self.returned.items()) if outcome is not None]

    def _complete(self) -> bool:
        return bool(self.outcomes())

    def _wait(self) -> list[int]:
        """Until the job is over; processes that ended it."""
        fatal: list[int] = []
        self._tell()
        while self._running():
            for process in self._just_failed(self._patience_s()):
                failure = self._failure(process)
                mistake = failure.kind and failure.error not in (PeerError, NoMemoryError)
                if mistake or (process not in self.left and not self._lose(process, failure.describe())):
                    fatal.append(process)
            if fatal or self._complete():
                self.until = min(self.until, monotonic() + FAILED_S)
            else:
                self._look()
            if monotonic() > self.until:
                break
        return fatal or self._ended_by()

    def _patience_s(self) -> float:
        """Between two looks."""
        return LOOK_S

    @abstractmethod
    def _lose(self, process: int, what: str) -> bool:
        """What follows from the loss of one; whether the job can go on."""

    @abstractmethod
    def _look(self) -> None:
        """What is to be done now and then."""

    def _seen(self) -> Seen:
        """What the controller is told."""
        assert self.store is not None
        there = tuple(self._there())
        ready = tuple(process for process in there if joined(self.store, process))
        members = self.epochs[-1].members if self.epochs else ()
        return Seen(there=there, ready=ready, members=members, lost=self.lost_ranks)

    def _decide(self, seen: Seen) -> Decision | None:
        """What the controller says, recorded."""
        decision = CONTROLLERS[self.controller](self.plan, seen)
        if self.recorder is not None:
            self.recorder.look(seen, decision)
        if decision is not None:
            self.plan, self.lost_ranks = decision.plan, decision.lost
        return decision

    def _announce_epoch(self, members: tuple[int, ...], placement: tuple[int, ...]) -> None:
        """To the processes. placement: as `Epoch` has it."""
        assert self.store is not None
        epoch = Epoch(number=len(self.epochs) + 1, members=members, placement=placement)
        self.epochs.append(epoch)
        announce(self.store, epoch)

    def _ended_by(self) -> list[int]:
        """Processes whose loss ended the job, where no mistake did."""
        return []

    def _tell(self) -> None:
        """Says what the job stands on, to those who ask."""

    def _start_more(self, count: int) -> None:
        """So many processes beside those that there are."""
        assert self.place is not None
        if self.epochs:  # what there is to go on from is this run's own
            job = replace(self.job, resume=self.job.checkpoints is not None)
            self.args = (job, self.threads, orders.added())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for _ in range(count):
                self._start_one(*self.place)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _there(self) -> Sequence[int]:
        """Processes that run and are to stay."""
        return [process for process in self._running() if process not in self.left and process not in self.returned]

    def _end_silent(self) -> None:
        """Kills processes that the others would wait for: stopped ones, and those that have not come."""
        self._end_stopped()
        self._end_absent()

    def _end_absent(self) -> None:
        """Kills members of an epoch that say nothing for meet_s after others gave up meeting them."""
        if not self.epochs:
            return
        assert self.store is not None
        epoch, meet_s = self.epochs[-1], self.job.meet_s
        given_up = noted(self.store, "unmet", epoch)
        if not given_up or monotonic() - self.unmet_since.setdefault(epoch.number, monotonic()) < meet_s:
            return
        came = given_up.keys() | noted(self.store, "noticed", epoch).keys() | noted(self.store, "going", epoch).keys()
        for process in set(self._there()) & set(epoch.members) - came - self.absent:
            self.absent.add(process)
            what = f"process {process} has not met the others within {meet_s:g} s (--meet-within), nor since"
            print(f"gnomon: {what}: it is killed", file=sys.stderr, flush=True)
            self.ranks[process].process.kill()

    def _end_stopped(self) -> None:
        """Kills a process that has been stopped (SIGSTOP) for SILENT_S: the others wait for it."""
        for process in self._there():
            if not _is_stopped(self.ranks[process].process.pid or 0):
                self.stopped_since.pop(process, None)
            elif monotonic() - self.stopped_since.setdefault(process, monotonic()) >= SILENT_S:
                what = f"process {process} was stopped for {SILENT_S:.0f} s: it is killed"
                print(f"gnomon: {what}", file=sys.stderr, flush=True)
                self.ranks[process].process.kill()


def _is_stopped(pid: int) -> bool:
    """Whether a signal stopped the process; False where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def set_up(threads: int, schedules: Sequence[Path]) -> None:
    """What each process does first. threads: of torch. schedules: files of orders that the launcher has added."""
    for path in schedules:
        orders.add(path)
    for one in SIGNALS:
        signal.signal(one, lambda number, frame: os._exit(128 + number))
    torch.set_num_threads(threads)
