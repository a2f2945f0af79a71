"""The changes of who trains, written beside checkpoints while a job runs, for `gnomon scale`: `Changes`.

Each has its cause, when the others noticed a loss, and when all went on. Leaves out the files (`request.scale`) and
deciding (`control`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from time import time

from torch._C._distributed_c10d import Store

from gnomon.request.scale import Change, JobFolder, JobState
from gnomon.runtime.launch.membership import Epoch, noted


class Changes:
    """Requested and made changes of one job's processes."""

    def __init__(self, folder: JobFolder | None, workers: int) -> None:
        """Takes the folder through which changes are requested (None where there is no folder for checkpoints) and the
        number of logical workers."""
        self.folder, self.workers = folder, workers
        self.changes: list[Change] = []
        self.why = "started"
        """Of the next one."""

    def requested_processes(self) -> int | None:
        """Processes that somebody asks for, at least 1 and at most the workers; None where nobody does."""
        if self.folder is None or (target := self.folder.requested_processes()) is None:
            return None
        # A process beyond the workers would have none to run.
        return min(max(target, 1), self.workers)

    def add(self, epoch: Epoch) -> None:
        """An epoch is announced."""
        self.changes.append(Change(epoch=epoch.number, at=time(), why=self.why, placement=epoch.placement))
        self.why = "another process joined"

    def follow(self, store: Store, epochs: Sequence[Epoch]) -> bool:
        """Fills in when the processes of the last change noticed it, and when they went on; whether anything is new.
        epochs: all so far."""
        if not self.changes or self.changes[-1].going_at is not None:
            return False
        going = noted(store, "going", epochs[-1])
        if len(going) < len(epochs[-1].members):
            return False
        # A loss is noticed in the epoch that it ended, and work goes on in the next.
        noticed = noted(store, "noticed", epochs[-2]) if len(epochs) > 1 else {}
        last = max(noticed.values(), default=None)
        self.changes[-1] = replace(self.changes[-1], noticed_at=last, going_at=max(going.values()))
        return True

    def write(self, target: int) -> None:
        """What the job stands on. target: processes that are wanted."""
        if self.folder is not None:
            changes = tuple(self.changes)
            self.folder.write(JobState(pid=os.getpid(), workers=self.workers, asked=target, changes=changes))

    def close(self) -> None:
        """The job is over."""
        if self.folder is not None:
            self.folder.close()
