"""Training on processes that come and go: the launcher's side.

`run_elastic(job)` starts as many processes as the plan's placement names and announces who trains together
(`membership`). When one is lost the others go on with its workers at once, and it is replaced as often as
`job.max_restarts` says; one that was stopped for too long is killed, and so lost. `gnomon scale` asks for more or fewer
(`request.scale`). Where workers run is decided by `methods.easyscale.placed` alone. Leaves out what processes do
(`elastic`), and other machines.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, time

import torch
from torch._C._distributed_c10d import Store

from gnomon import orders
from gnomon.errors import PeerError, PlanError
from gnomon.methods.easyscale import Observation, placed
from gnomon.request.scale import Change, JobFolder, JobState
from gnomon.runtime.checkpoint import newest
from gnomon.runtime.elastic import check_elastic, train_elastic
from gnomon.runtime.faults import ended
from gnomon.runtime.membership import Epoch, Membership, announce, joined, noted
from gnomon.runtime.processes import FAILED_S, SIGNALS, FailedError, Processes
from gnomon.runtime.train import Job, Outcome, corpus_of, preload_of
from gnomon.runtime.watchdog import SILENT_S

LOOK_S = 0.1
"""Between two looks at what is asked; the end of a process is seen at once."""


def run_elastic(job: Job, *, threads: int = 1) -> Outcome:
    """Starts the job's processes and returns how it went. job.plan.placement: where its logical workers begin.

    PeerError where no process is left, with the newest checkpoint; PlanError for a plan whose ranks cannot be logical
    workers; SystemExit (130, 143) if a signal ended processes that did not end by themselves.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise PlanError("torchrun starts its own processes; run a plan with --processes without it")
    check_elastic(job)
    start = placed(job.plan, Observation(processes=max(job.plan.device_of) + 1))
    corpus_of(job)  # text becomes tokens once, before processes wait for each other
    folder = None if job.checkpoints is None else JobFolder(job.checkpoints)
    launched = _Launched(replace(job, plan=start), folder, threads)
    try:
        launched.results()
    except FailedError as failed:
        kept = None if job.checkpoints is None else newest(job.checkpoints)
        raise ended(failed, launched.asked, left=kept, resume_with=job.resume_with) from failed
    finally:
        if folder is not None:
            folder.close()
    return launched.outcomes()[0]


class _Launched(Processes):
    """The processes of one job, while they come and go. A process's number is never given again."""

    def __init__(self, job: Job, folder: JobFolder | None, threads: int) -> None:
        processes = max(job.plan.placement) + 1
        super().__init__(
            _process,
            processes,
            (job, threads, orders.added()),
            start_method="forkserver",
            grace_s=job.grace_s,
            preload=preload_of(job),
        )
        self.job, self.folder, self.threads = job, folder, threads
        self.asked, self.restarts = processes, job.max_restarts
        self.epochs: list[Epoch] = []
        self.changes: list[Change] = []
        self.left: set[int] = set()
        """Processes that were told to end, or are lost."""
        self.lost: list[int] = []
        self.why = "started"
        self.stopped_since: dict[int, float] = {}

    def outcomes(self) -> list[Outcome]:
        """Of processes that trained to the end."""
        return [outcome for _, outcome in sorted(self.returned.items()) if outcome is not None]

    def _complete(self) -> bool:
        return bool(self.outcomes())

    def _wait(self) -> list[int]:
        """Until the job is over; processes that ended it."""
        fatal: list[int] = []
        self._tell()
        while self._running():
            for process in self._just_failed(LOOK_S):
                failure = self._failure(process)
                if failure.kind and failure.error is not PeerError:
                    fatal.append(process)
                elif process not in self.left and not self.stopped:
                    self._replace(process, failure.describe())
            if fatal or self._complete():
                self.until = min(self.until, monotonic() + FAILED_S)
            else:
                self._look()
            if monotonic() > self.until:
                break
        return fatal or ([] if self._complete() or self.stopped else self.lost)

    def _replace(self, process: int, what: str) -> None:
        """One was lost: another is started, if that may be, or the job goes on with fewer."""
        self.left.add(process)
        self.lost.append(process)
        self.why = f"process {process} {what}"
        if self.restarts:
            self.restarts -= 1
            self._start_more(1)
            then = f"another is started ({self.restarts} left)"
        else:
            self.asked = max(1, self.asked - 1)
            then = "its workers stay with the others"
        others = len(self._there())
        if not self.job.quiet:
            goes_on = f"{others} others go on with its workers" if others else "none is left"
            print(f"gnomon: {self.why}: {goes_on}; {then}", file=sys.stderr, flush=True)

    def _start_more(self, count: int) -> None:
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

    def _there(self) -> list[int]:
        """Processes that run and are to stay."""
        return [process for process in self._running() if process not in self.left and process not in self.returned]

    def _look(self) -> None:
        """Whether somebody asks for another number, a process was stopped, or others can train now."""
        assert self.store is not None
        if self.folder is not None and (asked := self.folder.asked()) is not None:
            self._scale(asked)
        self._end_stopped()
        self._follow()
        there = self._there()
        ready = [process for process in there if joined(self.store, process)]
        members, now = tuple(ready[: self.asked]), self.epochs[-1].members if self.epochs else ()
        for process in set(ready[self.asked :]) - set(now):  # it waits for an epoch that will not come
            self.left.add(process)
            self.ranks[process].process.kill()
        broken = not set(now) <= set(there)
        if members and members != now and (broken or len(ready) == len(there)):
            self._announce(members)

    def _scale(self, asked: int) -> None:
        asked = min(max(asked, 1), self.job.plan.world_size)
        self.why, self.asked = f"asked for {asked} processes", asked
        missing = asked - len(self._there())
        if missing > 0:
            self._start_more(missing)
        self._tell()

    def _announce(self, members: tuple[int, ...]) -> None:
        """From the next step on, or where one was lost at once, these train together."""
        assert self.store is not None
        plan = placed(self.job.plan, Observation(processes=len(members)))
        epoch = Epoch(number=len(self.epochs) + 1, members=members, placement=plan.placement)
        if self.epochs:
            self.left |= set(self.epochs[-1].members) - set(members)
        self.epochs.append(epoch)
        self.changes.append(Change(epoch=epoch.number, at=time(), why=self.why, placement=epoch.placement))
        self.why = "another process joined"
        announce(self.store, epoch)
        self._tell()

    def _follow(self) -> None:
        """Fills in when the processes of the last change noticed it, and when they went on."""
        if not self.changes or self.changes[-1].going_at is not None:
            return
        assert self.store is not None
        going = noted(self.store, "going", self.epochs[-1])
        if len(going) < len(self.epochs[-1].members):
            return
        noticed = noted(self.store, "noticed", self.epochs[-2]) if len(self.epochs) > 1 else {}
        last = max(noticed.values(), default=None)
        self.changes[-1] = replace(self.changes[-1], noticed_at=last, going_at=max(going.values()))
        self._tell()

    def _tell(self) -> None:
        """Writes what the job stands on, for those who ask."""
        if self.folder is not None:
            workers = self.job.plan.world_size
            state = JobState(pid=os.getpid(), workers=workers, asked=self.asked, changes=tuple(self.changes))
            self.folder.write(state)

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


def _process(
    store: Store, number: int, world_size: int, job: Job, threads: int, schedules: Sequence[Path]
) -> Outcome | None:
    """One process, from its start to its end."""
    for path in schedules:
        orders.add(path)
    for one in SIGNALS:
        signal.signal(one, lambda number, frame: os._exit(128 + number))
    torch.set_num_threads(threads)
    return train_elastic(job, Membership(store, number))
