"""Bamboo on processes that may be lost: the launcher's side.

`run_with_copies(job)` starts a process for each rank. When one is lost, those left are announced at once without it
(`membership`), and its neighbour goes on with its work; another process is started in its place as often as
`job.max_restarts` says, and announced once it has loaded everything. Leaves out what processes do (`takeover`), and
other machines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from gnomon.runtime.checkpoint import newest
from gnomon.runtime.faults import SAID, ended
from gnomon.runtime.membership import Epoch, Membership, announce, joined, noted, say_lost
from gnomon.runtime.processes import FailedError, Failure
from gnomon.runtime.replaceable import LOOK_S, Replaceable, set_up
from gnomon.runtime.takeover import NOBODY_COMES, check_with_copies, train_with_copies
from gnomon.runtime.train import Job, Outcome, corpus_of

SOON_S = 0.005
"""Between two looks whether processes that were announced are going, or a new one is ready."""


def run_with_copies(job: Job, *, threads: int = 1) -> Outcome:
    """Starts the job's processes and returns how it went.

    PlanError as `check_with_copies`. RunError, with the newest checkpoint, where a stage was lost with the copy of it
    and processes are not replaced; SystemExit (130, 143) if a signal ended processes that did not end by themselves.
    """
    check_with_copies(job)
    corpus_of(job)  # text becomes tokens once, before processes wait for each other
    launched = _Launched(job, threads)
    try:
        launched.results()
    except FailedError as failed:
        kept = None if job.checkpoints is None else newest(job.checkpoints)
        raise ended(failed, job.plan.world_size, left=kept, resume_with=job.resume_with) from failed
    outcome: Outcome = launched.outcomes()[0]
    return outcome


class _Launched(Replaceable):
    """The processes of one job."""

    def __init__(self, job: Job, threads: int) -> None:
        super().__init__(_process, job.plan.world_size, job, threads)
        self.rank_of = {process: process for process in range(job.plan.world_size)}

    def _arguments(self, rank: int) -> Sequence[Any]:
        return (*self.args, train_with_copies)

    def outcomes(self) -> list[Outcome]:
        """That of the first rank which is there first."""
        last = self.epochs[-1].members if self.epochs else ()
        found = [self.returned[process] for process in last if self.returned.get(process) is not None]
        return found or super().outcomes()

    def _failure(self, rank: int) -> Failure:
        failure = super()._failure(rank)
        return replace(failure, rank=self.rank_of[rank])

    def _lose(self, process: int, what: str) -> bool:
        """Those left go on, and another comes if that may be."""
        if self._complete():
            return True
        self.left.add(process)
        if not self.restarts and (not self.epochs or not self._there()):
            return False
        assert self.store is not None
        rank, after = self.rank_of[process], "no other one takes its place"
        if self.restarts:
            self.restarts -= 1
            self.rank_of[len(self.ranks)] = rank
            self._start_more(1)
            after = f"another process takes its place ({self.restarts} left)"
        else:
            self.store.set(NOBODY_COMES, "1")
        for epoch in self.epochs[-2:]:  # of the last, some may not have heard yet
            if process in epoch.members:
                say_lost(self.store, epoch)
        whom = f"rank {rank} of {self.world_size} {what}: the others go on without it, and {after}"
        print(f"gnomon: {whom}", file=sys.stderr, flush=True)
        return True

    def _patience_s(self) -> float:
        settled = self.epochs and len(self.epochs[-1].members) == self.world_size
        return LOOK_S if settled else SOON_S

    def _look(self) -> None:
        """Announces the processes that are there, when these are others than before, or all lost touch."""
        assert self.store is not None
        self._end_stopped()
        there = {self.rank_of[p]: p for p in self._there() if joined(self.store, p)}
        now = self.epochs[-1] if self.epochs else None
        if now is None and len(there) < self.world_size:
            return
        members = tuple(there[rank] for rank in sorted(there))
        if now is not None:
            if not members or (members == now.members and len(noted(self.store, "noticed", now)) < len(members)):
                return
            lost = not set(now.members) <= set(members)
            if not lost and members != now.members and len(noted(self.store, "going", now)) < len(now.members):
                return  # a newcomer waits until the others have met
            self._say_who_waited(now)
        epoch = Epoch(number=len(self.epochs) + 1, members=members, placement=tuple(self.rank_of[p] for p in members))
        self.epochs.append(epoch)
        announce(self.store, epoch)

    def _say_who_waited(self, epoch: Epoch) -> None:
        assert self.store is not None
        keys = [f"waited/{epoch.number}/{process}" for process in epoch.members]
        said = [self.store.get(key).decode() for key in keys if self.store.check([key])]
        if said:
            print(f"gnomon: {'; '.join(said[:SAID])}", file=sys.stderr, flush=True)


def _process(
    store: Store,
    number: int,
    world_size: int,
    job: Job,
    threads: int,
    schedules: Sequence[Path],
    train: Any,
) -> Outcome | None:
    """One process, from its start to its end."""
    set_up(threads, schedules)
    outcome: Outcome | None = train(job, Membership(store, number))
    return outcome
