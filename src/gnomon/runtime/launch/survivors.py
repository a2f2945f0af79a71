"""Training that survives the loss of a rank without a disk: one process's side.

A process is one rank of any plan. Every `job.memory_checkpoint_every` steps each rank's state is copied to another rank
(`checkpoint.in_memory`). When a process is lost, the others wait for the one that takes its place, and make all groups
again without ending. The new one is given the lost rank's state by the rank that has it; all go back to the step of the
copies and go on. What a step does depends on the state and its number alone, so the run ends with the bits of an
undisturbed one. Where both places of a state are lost, all go back to the newest checkpoint, or to the beginning.
Leaves out the loop (`member`) and who trains (`control`).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.methods import partial_reduce
from gnomon.runtime.checkpoint.in_memory import NONE, HeldSteps, MemoryCheckpoint, latest, source
from gnomon.runtime.checkpoint.load import load
from gnomon.runtime.data.own_batches import Batches
from gnomon.runtime.launch.captured_job import random_ops
from gnomon.runtime.launch.launcher import Scheme
from gnomon.runtime.launch.member import Member, member
from gnomon.runtime.launch.membership import Epoch, Membership, groups_soon_made
from gnomon.runtime.launch.own_module import OwnModule
from gnomon.runtime.launch.train import Loop, Outcome, TrainingJob, executor_of, exported, identity_of
from gnomon.runtime.parameters.parameters import Slot
from gnomon.runtime.processes.connections import FOLDER, sockets
from gnomon.runtime.step.execute import Executor
from gnomon.runtime.watch.watchdog import where
from gnomon.units import show_bytes


def check_surviving(job: TrainingJob) -> None:
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
    if missing_options := [name for name, is_set in missing.items() if is_set]:
        raise PlanError(f"--memory-checkpoint-every needs {', and '.join(missing_options)}")


def train_surviving(job: TrainingJob, membership: Membership) -> Outcome | None:
    """How the job went."""
    outcome: Outcome | None = member(_Rank, job, membership)
    return outcome


@dataclass(frozen=True, slots=True)
class _StateReport:
    """What a process tells the others when they meet; one that is new, nothing."""

    held_steps: HeldSteps = HeldSteps(own=(), of_neighbour=())  # noqa: RUF009 (frozen)
    alike: tuple[int, ...] = ()
    ended: int = NONE
    resumed_from: int = 0
    records: int = 0


class _Rank(Member):
    """One rank of the plan, with a copy of another's state."""

    def __init__(self, job: TrainingJob, corpus: Batches, signals: list[int], membership: Membership) -> None:
        super().__init__(job, corpus, signals, membership)
        self.own_module = OwnModule.of(job.code, job.seed) if job.code else None
        self.copies = MemoryCheckpoint()
        self.executor: Executor | None = None
        self.in_step = False
        self.came_back: list[int] = []
        """Steps to which all went back."""

    def _at(self) -> str:
        if self.executor is None:
            return "while groups were made"
        return f"at {where(self.executor.program, self.executor.buffers.row)}" if self.in_step else "between steps"

    def _trained(self) -> tuple[Executor, None]:
        assert self.executor is not None
        return self.executor, None

    def _catch_up(self, epoch: Epoch) -> bool:
        self._go_back(epoch)
        # Two phases: copies count once all ranks have theirs, so that a loss in between leaves the older ones in force
        # everywhere.
        self.copies.take(self.done)
        dist.barrier()
        self.copies.commit()
        return True

    def _begin(self, loop: Loop, epoch: Epoch) -> None:
        if epoch.number == 1:
            loop.measure_slowdown()

    def _step(self, loop: Loop, step: int) -> None:
        # An error leaves it set, so that `_at` can say which row this rank waited in.
        self.in_step = True
        loop.step(step)
        self.in_step = False
        if step % self.job.memory_checkpoint_every == 0:
            self.copies.take(step)

    def _met(self) -> None:
        self.copies.commit()  # all have sent and received theirs

    def _outcome(self, loop: Loop) -> Outcome:
        executor = self.executor
        assert executor is not None
        executor.settle()
        exported(self.job, executor, self.own_module, stopped=bool(loop.stopped))
        executor.leave()
        outcome = loop.outcome()
        return replace(outcome, notes=(*outcome.notes, self._copies_text()))

    def _go_back(self, epoch: Epoch) -> None:
        """Makes this rank's part again, with the newest state that is in memory of every rank."""
        everyone: list[_StateReport] = [_StateReport()] * dist.get_world_size()
        mine = _StateReport(
            self.copies.steps_held(), self.copies.alike, self.ended, self.resumed_from, len(self.records)
        )
        dist.all_gather_object(everyone, mine)
        there = [one for one in everyone if one.ended != NONE]
        held_steps = [one.held_steps for one in everyone]
        alike, step, moved = there[0].alike if there else (), None, 0
        # The newest step of which every rank's state is somewhere in memory, its own or a copy.
        if alike and (step := latest(held_steps, alike)) is not None:
            moved = self.copies.share(step, held_steps, alike)
        self._leave()
        dist.barrier()  # so that groups are made at one time
        with groups_soon_made(self.job.meet_s):
            values = None if step is None else _blank(self.job)
            # All that a rank holds is in its copy, so values are not made only to be overwritten.
            self.executor = executor_of(self.job, self.own_module, values=values)
        self.own_sockets = sockets() - self.before
        self.copies.attach(self.executor, draws=bool(random_ops(self.executor.graph)))
        if step is None:
            self._load(self.executor, again=epoch.number > 1)
        else:
            self.copies.restore()
            self.done = step
        if there:
            self.resumed_from = min(there[0].resumed_from, self.done)
            # Survivors agree on what was recorded, so the first of them stands for all.
            count = min(there[0].records, self.done - self.resumed_from)  # those of steps that are done again go
            self._share_records(everyone.index(there[0]), count)
            self.came_back.append(self.done)
        else:
            self.resumed_from = self.done
        # What is due after the step is done again unless every survivor had done it.
        self.ended = self.done if all(one.ended >= self.done for one in there) else self.done - 1
        if there and not self.job.quiet:
            self._say(step, held_steps, alike, moved)

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

    def _load(self, executor: Executor, *, again: bool) -> None:
        """Loads a checkpoint, or begins at step 0. again: there may be one of this run's own."""
        self.done = 0
        if self.job.checkpoints is not None and (self.job.resume or again):
            identity = identity_of(self.job, self.corpus)
            self.done = load(self.job.checkpoints, executor, identity=identity, override=self.job.override)

    def _say(self, step: int | None, held_steps: Sequence[HeldSteps], alike: Sequence[int], moved: int) -> None:
        """What the ranks went back to; each that was given its state says so."""
        rank = dist.get_rank()
        if step is None and rank == 0:
            print(
                f"gnomon: a rank's state is in no memory any more: all go back to step {self.done}"
                f"{', its newest checkpoint' if self.done else ', the beginning'}",
                file=sys.stderr,
                flush=True,
            )
        elif step is not None and step not in held_steps[rank].own:
            has = source(rank, step, held_steps, alike)
            print(
                f"gnomon: all go back to step {step}, rank {rank} to the copy that rank {has} has "
                f"({show_bytes(moved)})",
                file=sys.stderr,
                flush=True,
            )

    def _copies_text(self) -> str:
        """What copies cost, and what they were good for."""
        copies = self.copies
        back = f"; went back to step {', '.join(map(str, self.came_back))}" if self.came_back else ""
        return (
            f"checkpoints in memory: rank 0 sent {show_bytes(copies.sent)} in {copies.num_copies} copies, "
            f"{copies.took_s:.3f} s, and holds {show_bytes(copies.nbytes)}{back}"
        )


def _blank(job: TrainingJob) -> Callable[[Slot], Tensor | None] | None:
    """Values in place of those of step 0, where all that a rank holds is in its copy."""
    if job.code or job.weights is not None or any(block.frozen for block in job.graph.blocks):
        return None
    return lambda slot: torch.zeros(()).expand(slot.shape)


SURVIVORS = Scheme(
    controller="same_ranks", check=check_surviving, train=train_surviving, exports="processes", desk=None
)
"""Checkpoints in memory: a lost rank's place is taken by another process, the others stay."""
