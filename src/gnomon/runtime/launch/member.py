"""One process of a job whose processes come, go and are lost: the one loop of them, `Member`.

It trains in one epoch after the other. In an epoch it meets the others, is brought to where they are, and trains steps
until the last, or until a newer epoch was announced. When another process is lost it says what it waited for, ends its
connections, and waits for the next epoch; a step that was not finished is done again, or gone on with. What differs is
its subclasses': `elastic` (logical workers), `survivors` (copies in memory), `takeover` (Bamboo) and `partial_reduce`.
Leaves out who is in an epoch (`membership`), and starting processes (`launcher`).
"""

from __future__ import annotations

import gc
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from gnomon.errors import PeerError
from gnomon.runtime.data.own_batches import Batches
from gnomon.runtime.launch.membership import Epoch, Membership, loss_noticed, part, say_waited
from gnomon.runtime.launch.train import Loop, Outcome, Record, TrainingJob, corpus_of, largest_of_ranks, signals_noted
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.processes.connections import Sockets, shut, sockets
from gnomon.runtime.processes.faults import plain

NONE = -1
"""Steps behind a process that has no state."""


class Member(ABC):
    """What a process knows between two epochs."""

    after_loss_s = math.inf
    """In which the launcher must have announced an epoch after a loss."""

    def __init__(self, job: TrainingJob, corpus: Batches, signals: list[int], membership: Membership) -> None:
        """Takes signals, those that ask this process to end."""
        self.job, self.corpus, self.signals, self.membership = job, corpus, signals, membership
        clone: Any = membership.store
        self.watched: Store = clone.clone()
        """A connection to the store that no group uses."""
        self.before: Sockets = frozenset()
        """Sockets that there were before this epoch."""
        self.own_sockets: Sockets = frozenset()
        """Those of its groups, once all are made."""
        self.done = self.ended = NONE
        """Steps that were trained, and those after which all that is due was done; NONE before it has any state."""
        self.resumed_from = 0
        self.records: list[Record] = []
        self.waits: list[float] = []

    # --- epochs

    def until_over(self) -> Any:
        """How the job went; None where this process left before its end."""
        gc.freeze()  # what is loaded stays: what looks for garbage after a loss passes it over
        self.membership.join()
        epoch = self.membership.next(0)
        while epoch is not None:
            self.before, self.own_sockets = sockets(), frozenset()
            patience_s = math.inf
            try:
                if (outcome := self._in_epoch(epoch)) is not None:
                    return outcome
            except Exception as error:
                self._lost(error, epoch)
                patience_s = self.after_loss_s
            finally:
                part()
            epoch = self.membership.next(epoch.number, patience_s=patience_s)
        return None

    def _in_epoch(self, epoch: Epoch) -> Any:
        """The outcome, if the job ended in this epoch; None when there is a newer one."""
        with loss_noticed(self.watched, epoch, self._shut):
            if not self.membership.meet(epoch):
                return None
            goes_on = self._catch_up(epoch)
            self.membership.note("going", epoch)
            return self._train(epoch) if goes_on else None

    @abstractmethod
    def _catch_up(self, epoch: Epoch) -> bool:
        """All members are brought to one state, that `done` and `ended` speak of. Whether they can train; if not, all
        wait for a newer epoch."""

    @abstractmethod
    def _at(self) -> str:
        """Says at which point of a step this process stands, for messages."""

    def _lost(self, error: Exception, epoch: Epoch) -> None:
        """Says what this process waited for, and ends its connections. Raises what is no loss of another process."""
        process = self.membership.process
        number = epoch.ranks[epoch.members.index(process)] if epoch.ranks else process
        lost = plain(error, number, self._at())
        if not isinstance(lost, PeerError):
            raise lost from error
        say_waited(self.membership.store, epoch, process, str(lost))
        self.membership.note("noticed", epoch)
        self._shut()

    def _shut(self) -> None:
        """Ends the connections of this epoch's groups, and that to the store which these were made by."""
        # While groups are still being made: all that was opened since the epoch began.
        shut(self.own_sockets or sockets() - self.before)

    # --- steps

    def _train(self, epoch: Epoch) -> Any:
        """Steps until the last, or a newer epoch: the outcome, or None."""
        loop, last = self._loop(), self.done == self.job.steps
        try:
            self._begin(loop, epoch)
            # `ended` is one step behind `done` where a member was lost after the step and before what is due after it
            # (a checkpoint, held-out loss): that is made up for before another step.
            while self.ended < self.done or not last:
                if self.ended == self.done:
                    self._step(loop, self.done + 1)
                    self.done += 1
                busy = loop.saver is not None and loop.saver.busy
                latest = self.membership.latest() if dist.get_rank() == 0 else 0
                # one member alone may have been sent a signal, or have seen the epoch: all must end the step alike
                sent, is_busy, newest = largest_of_ranks([max(self.signals, default=0), int(busy), latest])
                self._met()
                last = loop.ends(self.done, sent, busy=bool(is_busy))
                self.ended = self.done
                # `newest` is a maximum over ranks, so all leave the epoch after the same step.
                if newest > epoch.number and not last:
                    if loop.saver is not None:
                        loop.saver.finish()
                    return None
        finally:
            if loop.saver is not None:
                loop.saver.close()
        return self._outcome(loop)

    @abstractmethod
    def _trained(self) -> tuple[Any, Callable[[Batch], float] | None]:
        """What is trained, as checkpoints and `Loop` ask an executor for it; and the loss of a batch without training,
        None for the executor's own."""

    def _begin(self, loop: Loop, epoch: Epoch) -> None:  # noqa: B027 (not all have any)
        """What is done before the first step of an epoch."""

    def _step(self, loop: Loop, step: int) -> None:
        """Trains one step, and records it."""
        loop.step(step)

    def _met(self) -> None:  # noqa: B027 (not all have anything to do)
        """All members have trained the step."""

    def _outcome(self, loop: Loop) -> Outcome:
        """The job has ended."""
        return loop.outcome()

    def _loop(self) -> Loop:
        """The training loop of this epoch, in which place 0 may be another process than before."""
        folder = self.job.checkpoints
        if dist.get_rank() == 0 and folder is not None and folder.is_dir():
            for partial in folder.glob(".step-*.partial"):  # of an epoch that was cut off
                shutil.rmtree(partial, ignore_errors=True)
        # Nobody writes a partial checkpoint again before the old one is gone.
        dist.barrier()
        executor, evaluate = self._trained()
        loop = Loop(self.job, executor, self.corpus, self.resumed_from, evaluate=evaluate)
        loop.records, loop.waits = self.records, self.waits
        return loop

    def _share_records(self, source: int, count: int) -> None:
        """Gives all members the first `count` records that the one at place `source` has, in place of their own."""
        table, waits = torch.zeros(count, COLUMNS, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        if dist.get_rank() == source:
            table, waits = table_of(self.records[:count]), torch.tensor(self.waits[:count], dtype=torch.float64)
        for tensor in (table, waits) if count else ():
            dist.broadcast(tensor, source)
        self.records[:], self.waits[:] = records_of(table), waits.tolist()


def member(
    make: Callable[[TrainingJob, Batches, list[int], Membership], Member], job: TrainingJob, membership: Membership
) -> Any:
    """One process, from its start to its end: how the job went, None where it left before that. make: what it is."""
    with signals_noted() as signals:
        return make(job, corpus_of(job), signals, membership).until_over()


COLUMNS = 5
"""Numbers of a record."""


def table_of(records: Sequence[Record]) -> Tensor:
    """A row of COLUMNS numbers for each record, in fp64; NaN for no loss on held-out text."""
    # fp64 holds step numbers and seconds to the bit, so that one table serves all columns.
    rows = [
        [r.step, r.loss, r.grad_norm, r.step_s, math.nan if r.validation_loss is None else r.validation_loss]
        for r in records
    ]
    return torch.tensor(rows, dtype=torch.float64).view(-1, COLUMNS)


def records_of(table: Tensor) -> list[Record]:
    """The records of a table."""
    return [
        replace(
            Record(step=int(step), loss=loss, grad_norm=norm, step_s=took),
            validation_loss=None if math.isnan(held_out) else held_out,
        )
        for step, loss, norm, took, held_out in table.tolist()
    ]
