"""Processes of a plan's ranks that may be lost and replaced: `ReplaceableRanks`, the launcher's side.

A process that comes in the place of a lost one has its rank. Leaves out what a loss means and who is announced
(`survivors_launch`, `takeover_launch`).
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from gnomon.control import Seen
from gnomon.runtime.checkpoint import newest
from gnomon.runtime.launch.membership import Epoch, Membership, noted
from gnomon.runtime.launch.replaceable import Replaceable, set_up
from gnomon.runtime.launch.train import Job, Outcome
from gnomon.runtime.processes.faults import SAID, ended
from gnomon.runtime.processes.local import FailedError, Failure

SOON_S = 0.005
"""Between two looks while processes wait for others."""
Train = Callable[[Job, Membership], Outcome | None]


class ReplaceableRanks(Replaceable, ABC):
    """The processes of one job."""

    def __init__(self, job: Job, threads: int, train: Train) -> None:
        """train: what each process does, importable by name."""
        self.train = train
        super().__init__(_process, job.plan.world_size, job, threads)
        self.rank_of = {process: process for process in range(job.plan.world_size)}

    def outcome(self) -> Outcome:
        """How the job went. Errors as `faults.ended` tells them, with the newest checkpoint."""
        try:
            self.results()
        except FailedError as failed:
            kept = None if self.job.checkpoints is None else newest(self.job.checkpoints)
            raise ended(failed, self.world_size, left=kept, resume_with=self.job.resume_with) from failed
        outcome: Outcome = self.outcomes()[0]
        return outcome

    def _arguments(self, rank: int) -> Sequence[Any]:
        return (*self.args, self.train)

    def _failure(self, rank: int) -> Failure:
        failure = super()._failure(rank)
        return replace(failure, rank=self.rank_of[rank])

    def _seen(self) -> Seen:
        assert self.store is not None
        seen = super()._seen()
        ranks = tuple(self.rank_of[process] for process in seen.there)
        if not self.epochs:
            return replace(seen, ranks=ranks)
        now = self.epochs[-1]
        parted, met = (len(noted(self.store, what, now)) == len(now.members) for what in ("noticed", "going"))
        return replace(seen, ranks=ranks, parted=parted, met=met)

    def _say_who_waited(self, epoch: Epoch) -> None:
        assert self.store is not None
        keys = [f"waited/{epoch.number}/{process}" for process in epoch.members]
        said = [self.store.get(key).decode() for key in keys if self.store.check([key])]
        if said:
            print(f"gnomon: {'; '.join(said[:SAID])}", file=sys.stderr, flush=True)


def _process(
    store: Store, number: int, world_size: int, job: Job, threads: int, schedules: Sequence[Path], train: Train
) -> Outcome | None:
    """One process, from its start to its end."""
    set_up(threads, schedules)
    return train(job, Membership(store, number, meet_s=job.meet_s))
