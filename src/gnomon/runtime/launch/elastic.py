"""Training on processes that come and go: one process's side.

`train_elastic(job, membership)` trains logical workers (`logical_workers`) epoch by epoch. At the end of a step all
agree on whether a newer epoch was announced, and go over to it. When a process is lost, the others find their
connection broken, make a new group and go on in the same processes: each holds all parameters and optimizer states, so
the copy of any survivor is what a new one, or one that is a step behind, is given. A step that was not finished is done
again, from the same state, so the run ends with the bits of an undisturbed one. Left out: who is in an epoch
(`elastic_launch`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.errors import PeerError, PlanError
from gnomon.runtime.checkpoint import load
from gnomon.runtime.checkpoint.pretrained import values_of
from gnomon.runtime.data.own_batches import Batches
from gnomon.runtime.launch.logical_workers import LogicalWorkers
from gnomon.runtime.launch.membership import Epoch, Membership, part
from gnomon.runtime.launch.train import Job, Loop, Outcome, Record, anyone, asked_to_end, corpus_of, identity_of
from gnomon.runtime.processes.faults import plain
from gnomon.software import own

SPEED_STEPS = 4
"""Steps whose median says how fast a process is."""


def check_elastic(job: Job) -> None:
    """PlanError for what processes that come and go do not do."""
    refused = {
        "--timeline": job.measure,
        "--device cuda": job.device != "cpu",
        f"optimizer.kind = {job.plan.optimizer.kind!r}": job.plan.optimizer.kind in own.WHOLE_MATRIX_OPTIMIZERS,
    }
    if asked := [name for name, given in refused.items() if given]:
        raise PlanError(f"logical workers on processes that come and go do not do {', '.join(asked)} yet; leave it out")


def train_elastic(job: Job, membership: Membership, *, pause_s: float = 0.0) -> Outcome | None:
    """How the job went, or None where this process left before its end. pause_s: that each of its workers sleeps in
    a step, in place of a slower processor."""
    with asked_to_end() as asked:
        corpus = corpus_of(job)
        values = None if job.weights is None else values_of(job.weights, job.graph)
        executor = LogicalWorkers(
            job.graph, job.plan, job.workload, seed=job.seed, settings=job.settings, values=values
        )
        executor.pause_s = pause_s
        return _Training(job, executor, corpus, asked, membership).until_over()


class _Training:
    """What a process knows between two epochs."""

    def __init__(
        self, job: Job, executor: LogicalWorkers, corpus: Batches, asked: list[int], membership: Membership
    ) -> None:
        self.job, self.executor, self.corpus = job, executor, corpus
        self.asked, self.membership = asked, membership
        self.done = self.ended = -1
        """Steps that were trained, and those after which all that is due was done; -1 before it has any state."""
        self.resumed_from = 0
        self.records: list[Record] = []
        self.waits: list[float] = []

    def until_over(self) -> Outcome | None:
        """Trains in one epoch after the other."""
        self.membership.join()
        epoch = self.membership.next(0)
        while epoch is not None:
            try:
                if (outcome := self._in_epoch(epoch)) is not None:
                    return outcome
                patience_s = math.inf
            except Exception as error:
                lost = plain(error, self.membership.process, "in a step")
                if not isinstance(lost, PeerError):
                    raise lost from error
                self.membership.note("noticed", epoch)
                patience_s = self.membership.announced_s
            finally:
                part()
            epoch = self.membership.next(epoch.number, patience_s=patience_s)
        return None

    def _in_epoch(self, epoch: Epoch) -> Outcome | None:
        """The outcome, if the job ended in this epoch; None when there is a newer one."""
        if not self.membership.meet(epoch):
            return None
        self._share_state()
        self.executor.place(epoch.placement)
        self.membership.note("going", epoch)
        loop, took = self._loop(), list[float]()
        try:
            while True:
                if self.ended == self.done:
                    if self.done == self.job.steps:
                        return loop.outcome()
                    loop.step(self.done + 1)
                    self.done += 1
                    took.append(self.executor.worker_s)
                    if self.job.follow_speed and len(took) % SPEED_STEPS == 0 and self.executor.own:
                        self.membership.say_speed(epoch, 1 / median(took[-SPEED_STEPS:]))
                busy = loop.saver is not None and loop.saver.busy
                latest = self.membership.latest() if dist.get_rank() == 0 else 0
                sent, is_busy, newest = anyone([max(self.asked, default=0), int(busy), latest])
                last = loop.ends(self.done, sent, busy=bool(is_busy))
                self.ended = self.done
                if last:
                    return loop.outcome()
                if newest > epoch.number:
                    if loop.saver is not None:
                        loop.saver.finish()
                    return None
        finally:
            if loop.saver is not None:
                loop.saver.close()

    def _loop(self) -> Loop:
        """Of this epoch: rank 0 may be another process than before."""
        folder = self.job.checkpoints
        if dist.get_rank() == 0 and folder is not None and folder.is_dir():
            for partial in folder.glob(".step-*.partial"):  # of an epoch that was cut off
                shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        loop = Loop(self.job, self.executor, self.corpus, self.resumed_from, evaluate=self.executor.evaluate)
        loop.records, loop.waits = self.records, self.waits
        return loop

    def _share_state(self) -> None:
        """Gives every process the newest state that any has; that of a checkpoint, or the beginning, where none has
        any."""
        counts = [torch.zeros(3, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([self.done, self.ended, len(self.records)]))
        behind = [tuple(count.tolist()) for count in counts]
        newest = max(done for done, _, _ in behind)
        if newest < 0:
            self._begin()
            return
        source = next(rank for rank, (done, _, _) in enumerate(behind) if done == newest)
        have = [ended for done, ended, _ in behind if done == newest]
        if any(done < newest for done, _, _ in behind):
            self._copy_from(source, records=behind[source][2])
        self.done, self.ended = newest, min(have)

    def _begin(self) -> None:
        done = 0
        if self.job.checkpoints is not None and self.job.resume:
            done = load(
                self.job.checkpoints,
                self.executor,
                identity=identity_of(self.job, self.corpus),
                override=self.job.override,
            )
        self.done = self.ended = self.resumed_from = done

    def _copy_from(self, source: int, records: int) -> None:
        """Parameters, optimizer states and what was recorded, from the process of that rank, in memory."""
        held = list(self.executor.parameters())
        scaler = self.executor.state.loss_scale
        numbers = torch.tensor(
            [
                *(float(update.steps) for _, update in held),
                float(self.resumed_from),
                *((scaler.scale, float(scaler.good_steps)) if scaler is not None else ()),
            ],
            dtype=torch.float64,
        )
        table = table_of(self.records) if len(self.records) == records else torch.zeros(records, COLUMNS).double()
        waits = torch.tensor(self.waits if len(self.waits) == records else [math.nan] * records).double()
        for tensor in (*_tensors(self.executor), numbers, table, waits):
            dist.broadcast(tensor.view(torch.uint8), source)
        steps = [int(number) for number in numbers[: len(held) + 1].tolist()]
        for (_, update), count in zip(held, steps, strict=False):
            update.steps = count
        self.resumed_from = steps[-1]
        if scaler is not None:
            scaler.scale, scaler.good_steps = float(numbers[-2]), int(numbers[-1])
        self.records[:], self.waits[:] = records_of(table), waits.tolist()


def _tensors(executor: LogicalWorkers) -> list[Tensor]:
    """All that lives from one step to the next."""
    tensors = []
    for held, update in executor.parameters():
        tensors += [x for x in (held.flat, held.master, update.first, update.second) if x is not None]
    return [tensor for tensor in tensors if tensor.numel()]


COLUMNS = 5
"""Numbers of a record."""


def table_of(records: Sequence[Record]) -> Tensor:
    """A row of COLUMNS numbers for each record."""
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
