"""Training that survives the loss of a rank without a disk: one process's side.

`train_surviving(job, membership)` is one rank of any plan. Every `job.memory_checkpoint_every` steps each rank's state
is copied to another rank (`memory_checkpoint`). When a process is lost, the others find their connections broken and
shut down what is left of them, wait for the process that takes its place, and make all groups again without ending.
The new one is given the lost rank's state by the rank that has it; all go back to the step of the copies and go on.
What a step does depends on the state and its number alone, so the run ends with the bits of an undisturbed one. Where
both places of a state are lost, all go back to the newest checkpoint, or to the beginning. Left out: starting
processes and saying who trains together (`survivors_launch`).
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.methods import partial_reduce
from gnomon.runtime.checkpoint import load
from gnomon.runtime.checkpoint.in_memory import NONE, Held, MemoryCheckpoint, latest, source
from gnomon.runtime.data.own_batches import Batches
from gnomon.runtime.launch.captured_job import random_ops
from gnomon.runtime.launch.elastic import COLUMNS, records_of, table_of
from gnomon.runtime.launch.epochs import InEpochs
from gnomon.runtime.launch.membership import Epoch, Membership, groups_soon_made, loss_noticed
from gnomon.runtime.launch.own_module import OwnModule
from gnomon.runtime.launch.train import (
    Job,
    Loop,
    Outcome,
    Record,
    anyone,
    asked_to_end,
    corpus_of,
    executor_of,
    exported,
    identity_of,
)  # fmt: skip
from gnomon.runtime.parameters.parameters import Slot
from gnomon.runtime.processes.connections import FOLDER, sockets
from gnomon.runtime.step.execute import Executor
from gnomon.runtime.watch.watchdog import where
from gnomon.units import show_bytes


def check_surviving(job: Job) -> None:
    """PlanError for a job that cannot keep its ranks' states in memory."""
    plan = job.plan
    placed = plan.device_of != (*range(plan.world_size),)
    missing = {
        "several ranks": plan.world_size == 1,
        "--max-restarts N, how many lost processes may be replaced": not job.max_restarts,
        "no --timeline": job.measure,
        "--device cpu": job.device != "cpu",
        "a process for each rank (no --processes, no placement)": placed,
        "a plan without partial_reduce": partial_reduce.METHOD.used(plan),
        "optimizer.delay = 0": bool(plan.optimizer.delay),
        "processes that it starts itself, not torchrun": "TORCHELASTIC_RUN_ID" in os.environ,
        "Linux, whose /proc says which sockets are open": not FOLDER.is_dir(),
    }
    if asked := [name for name, given in missing.items() if given]:
        raise PlanError(f"--memory-checkpoint-every needs {', and '.join(asked)}")


def train_surviving(job: Job, membership: Membership) -> Outcome | None:
    """How the job went."""
    with asked_to_end() as asked:
        corpus = corpus_of(job)
        own_module = OwnModule.of(job.code, job.seed) if job.code else None
        gc.freeze()  # modules stay: what looks for garbage after a loss passes them over
        return _Rank(job, own_module, corpus, asked, membership).until_over()


@dataclass(frozen=True, slots=True)
class _Told:
    """What a process tells the others when they meet; one that is new, nothing."""

    held: Held = Held(own=(), kept=())  # noqa: RUF009 (frozen)
    alike: tuple[int, ...] = ()
    ended: int = NONE
    resumed_from: int = 0
    records: int = 0


class _Rank(InEpochs):
    """What a process knows between two epochs."""

    def __init__(
        self, job: Job, own_module: OwnModule | None, corpus: Batches, asked: list[int], membership: Membership
    ) -> None:
        super().__init__(membership)
        self.job, self.own_module, self.corpus, self.asked = job, own_module, corpus, asked
        self.copies = MemoryCheckpoint()
        self.executor: Executor | None = None
        self.in_step = False
        self.done = self.ended = NONE
        """Steps that were trained, and those after which all that is due was done; NONE before it has any state."""
        self.resumed_from = 0
        self.records: list[Record] = []
        self.waits: list[float] = []
        self.came_back: list[int] = []
        """Steps to which all went back."""

    def _at(self) -> str:
        """Where in a step this rank stands."""
        if self.executor is None:
            return "while groups were made"
        return f"at {where(self.executor.program, self.executor.buffers.row)}" if self.in_step else "between steps"

    def _in_epoch(self, epoch: Epoch) -> Outcome | None:
        """The outcome, if the job ended in this epoch; None when there is a newer one already."""
        with loss_noticed(self.watched, epoch, self._shut):
            if not self.membership.meet(epoch):
                return None
            self._go_back(epoch)
        executor = self.executor
        assert executor is not None
        self.copies.take(self.done)
        dist.barrier()
        self.copies.commit()
        self.membership.note("going", epoch)
        loop = self._loop(executor)
        try:
            if epoch.number == 1:
                loop.ask_the_machine()
            self._train(loop)
        finally:
            if loop.saver is not None:
                loop.saver.close()
        executor.settle()
        exported(self.job, executor, self.own_module, stopped=bool(loop.stopped))
        executor.leave()
        outcome = loop.outcome()
        return replace(outcome, notes=(*outcome.notes, self._said()))

    def _train(self, loop: Loop) -> None:
        """Steps until the last."""
        every, last = self.job.memory_checkpoint_every, self.done == self.job.steps
        while self.ended < self.done or not last:
            if self.ended == self.done:
                self.in_step = True
                loop.step(self.done + 1)
                self.done, self.in_step = self.done + 1, False
                if self.done % every == 0:
                    self.copies.take(self.done)
            busy = loop.saver is not None and loop.saver.busy
            sent, is_busy = anyone([max(self.asked, default=0), int(busy)])
            self.copies.commit()
            last = loop.ends(self.done, sent, busy=bool(is_busy))
            self.ended = self.done

    def _loop(self, executor: Executor) -> Loop:
        """Of this epoch: rank 0 may be another process than before."""
        folder = self.job.checkpoints
        if dist.get_rank() == 0 and folder is not None and folder.is_dir():
            for partial in folder.glob(".step-*.partial"):  # of an epoch that was cut off
                shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        loop = Loop(self.job, executor, self.corpus, self.resumed_from)
        loop.records, loop.waits = self.records, self.waits
        return loop

    def _go_back(self, epoch: Epoch) -> None:
        """Makes this rank's part again, with the newest state that is in memory of every rank."""
        everyone: list[_Told] = [_Told()] * dist.get_world_size()
        mine = _Told(self.copies.held(), self.copies.alike, self.ended, self.resumed_from, len(self.records))
        dist.all_gather_object(everyone, mine)
        there = [one for one in everyone if one.ended != NONE]
        held = [one.held for one in everyone]
        alike, step, moved = there[0].alike if there else (), None, 0
        if alike and (step := latest(held, alike)) is not None:
            moved = self.copies.share(step, held, alike)
        self._leave()
        dist.barrier()  # so that groups are made at one time
        with groups_soon_made(self.job.meet_s):
            values = None if step is None else _blank(self.job)
            self.executor = executor_of(self.job, self.own_module, values=values)
        self.made = sockets() - self.before
        self.copies.attach(self.executor, draws=bool(random_ops(self.executor.graph)))
        if step is None:
            self._begin(self.executor, again=epoch.number > 1)
        else:
            self.copies.restore()
            self.done = step
        if there:
            self._tell_records(everyone.index(there[0]), there[0])
            self.came_back.append(self.done)
        else:
            self.resumed_from = self.done
        self.ended = self.done if all(one.ended >= self.done for one in there) else self.done - 1
        if there and not self.job.quiet:
            self._say(step, held, alike, moved)

    def _leave(self) -> None:
        """Gives up what the broken groups were for."""
        self.copies.detach()
        self.in_step = False
        if self.executor is None:
            return
        self.executor.host.close()
        self.executor.rows.clear()
        groups = [group for group in self.executor.groups.by_comm.values() if group is not None]
        self.executor = None
        gc.collect()  # what refers to itself would hold its memory
        # each group's destructor takes 0.1 s
        threading.Thread(target=groups.clear, name="gnomon groups", daemon=True).start()

    def _begin(self, executor: Executor, *, again: bool) -> None:
        """From a checkpoint, or step 0. again: there may be one of this run's own."""
        self.done = 0
        if self.job.checkpoints is not None and (self.job.resume or again):
            identity = identity_of(self.job, self.corpus)
            self.done = load(self.job.checkpoints, executor, identity=identity, override=self.job.override)

    def _tell_records(self, has: int, told: _Told) -> None:
        """Gives all ranks the records that one has of the steps behind them, and forgets those of others."""
        self.resumed_from = min(told.resumed_from, self.done)
        count = min(told.records, self.done - self.resumed_from)
        table, waits = torch.zeros(count, COLUMNS, dtype=torch.float64), torch.full((count,), math.nan).double()
        if dist.get_rank() == has:
            table, waits = table_of(self.records[:count]), torch.tensor(self.waits[:count], dtype=torch.float64)
        for tensor in (table, waits) if count else ():
            dist.broadcast(tensor, has)
        self.records[:], self.waits[:] = records_of(table), waits.tolist()

    def _say(self, step: int | None, held: Sequence[Held], alike: Sequence[int], moved: int) -> None:
        """What the ranks went back to; each that was given its state says so."""
        rank = dist.get_rank()
        if step is None and rank == 0:
            print(
                f"gnomon: a rank's state is in no memory any more: all go back to step {self.done}"
                f"{', its newest checkpoint' if self.done else ', the beginning'}",
                file=sys.stderr,
                flush=True,
            )
        elif step is not None and step not in held[rank].own:
            has = source(rank, step, held, alike)
            print(
                f"gnomon: all go back to step {step}, rank {rank} to the copy that rank {has} has "
                f"({show_bytes(moved)})",
                file=sys.stderr,
                flush=True,
            )

    def _said(self) -> str:
        """What copies cost, and what they were good for."""
        copies = self.copies
        back = f"; went back to step {', '.join(map(str, self.came_back))}" if self.came_back else ""
        return (
            f"checkpoints in memory: rank 0 sent {show_bytes(copies.sent)} in {copies.taken} copies, "
            f"{copies.took_s:.3f} s, and holds {show_bytes(copies.nbytes)}{back}"
        )


def _blank(job: Job) -> Callable[[Slot], Tensor | None] | None:
    """Values in place of those of step 0, where all that a rank holds is in its copy."""
    if job.code or job.weights is not None or any(block.frozen for block in job.graph.blocks):
        return None
    return lambda slot: torch.zeros(()).expand(slot.shape)
