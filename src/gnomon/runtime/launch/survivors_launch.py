"""Training that survives the loss of a rank without a disk: the launcher's side.

`run_surviving(job)` starts a process for each rank. When one is lost another is started in its place, as often as
`job.max_restarts` says, and once it has loaded everything the same ranks are announced anew with it (`membership`);
the others stay. Leaves out what processes do (`survivors`), and other machines.
"""

from __future__ import annotations

import sys

from gnomon.runtime.launch.membership import say_lost
from gnomon.runtime.launch.replaceable import LOOK_S
from gnomon.runtime.launch.replaceable_ranks import SOON_S, ReplaceableRanks, Train
from gnomon.runtime.launch.survivors import check_surviving, train_surviving
from gnomon.runtime.launch.train import Job, Outcome, corpus_of
from gnomon.runtime.module.apply import check_before


def run_surviving(job: Job, *, threads: int = 1) -> Outcome:
    """Starts the job's processes and returns how it went.

    PlanError as `check_surviving`. PeerError, with the newest checkpoint, where more processes were lost than may be
    replaced; SystemExit (130, 143) if a signal ended processes that did not end by themselves.
    """
    check_before(job.graph, job.plan)
    check_surviving(job)
    corpus_of(job)  # text becomes tokens once, before processes wait for each other
    return _Launched(job, threads, train_surviving).outcome()


class _Launched(ReplaceableRanks):
    """The processes of one job."""

    controller = "same_ranks"

    def __init__(self, job: Job, threads: int, train: Train) -> None:
        super().__init__(job, threads, train)
        self.members = list(range(job.plan.world_size))
        """Process of each rank."""

    def outcomes(self) -> list[Outcome]:
        return [self.returned[process] for process in self.members if self.returned.get(process) is not None]

    def _lose(self, process: int, what: str) -> bool:
        """Another takes its place, if that may be."""
        if self._complete():
            return True
        if not self.restarts:
            return False
        self.left.add(process)
        if self.epochs:
            assert self.store is not None
            say_lost(self.store, self.epochs[-1])
        self.restarts -= 1
        rank, number = self.rank_of[process], len(self.ranks)
        self.members[rank] = number
        self.rank_of[number] = rank
        self._start_more(1)
        print(
            f"gnomon: rank {rank} of {self.world_size} {what}: the others stay, and another process takes its place "
            f"({self.restarts} left)",
            file=sys.stderr,
            flush=True,
        )
        return True

    def _patience_s(self) -> float:
        """Less while others wait for a process that takes another's place."""
        waited_for = self.epochs and self.epochs[-1].members != tuple(self.members)
        return SOON_S if waited_for else LOOK_S

    def _look(self) -> None:
        """Announces the ranks' processes, once all are ready and some are new, or all lost touch with each other."""
        self._end_silent()
        if (decision := self._decide(self._seen())) is not None:
            if self.epochs:
                self._say_who_waited(self.epochs[-1])
            self._announce_epoch(decision.members, tuple(range(len(decision.members))))
