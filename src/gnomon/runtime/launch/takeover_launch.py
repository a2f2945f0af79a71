"""Bamboo on processes that may be lost: the launcher's side.

`run_with_copies(job)` starts a process for each rank. When one is lost, those left are announced at once without it
(`membership`), and its neighbour goes on with its work; another process is started in its place as often as
`job.max_restarts` says, and announced once it has loaded everything. Leaves out what processes do (`takeover`), and
other machines.
"""

from __future__ import annotations

import sys

from gnomon.runtime.launch.exported_checkpoint import exported, keeping
from gnomon.runtime.launch.membership import say_lost
from gnomon.runtime.launch.replaceable import LOOK_S
from gnomon.runtime.launch.replaceable_ranks import SOON_S, ReplaceableRanks
from gnomon.runtime.launch.takeover import NOBODY_COMES, check_with_copies, train_with_copies
from gnomon.runtime.launch.train import Job, Outcome, corpus_of
from gnomon.runtime.module.apply import check_before


def run_with_copies(job: Job, *, threads: int = 1) -> Outcome:
    """Starts the job's processes and returns how it went.

    PlanError as `check_with_copies`. RunError, with the newest checkpoint, where a stage was lost with the copy of it
    and processes are not replaced; SystemExit (130, 143) if a signal ended processes that did not end by themselves.
    """
    check_before(job.graph, job.plan)
    check_with_copies(job)
    corpus_of(job)  # text becomes tokens once, before processes wait for each other
    return exported(job, _Launched(keeping(job), threads, train_with_copies).outcome())


class _Launched(ReplaceableRanks):
    """The processes of one job."""

    controller = "takeover"

    def outcomes(self) -> list[Outcome]:
        """That of the first rank which is there first."""
        last = self.epochs[-1].members if self.epochs else ()
        found = [self.returned[process] for process in last if self.returned.get(process) is not None]
        return found or super().outcomes()

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
        self._end_silent()
        if (decision := self._decide(self._seen())) is not None:
            if self.epochs:
                self._say_who_waited(self.epochs[-1])
            self._announce_epoch(decision.members, tuple(self.rank_of[process] for process in decision.members))
