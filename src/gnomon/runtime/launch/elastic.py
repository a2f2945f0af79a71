"""Logical workers on processes that come and go: one process's side.

Each process holds all parameters and optimizer states (`logical_workers`), so the copy of any survivor is what a new
one, or one that is a step behind, is given. A step that was not finished is done again from the same state, so the run
ends with the bits of an undisturbed one. Leaves out the loop (`member`) and who trains (`control`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.runtime.checkpoint.load import load
from gnomon.runtime.checkpoint.pretrained import values_of
from gnomon.runtime.data.own_batches import Batches
from gnomon.runtime.launch.launcher import Scheme
from gnomon.runtime.launch.logical_workers import LogicalWorkers
from gnomon.runtime.launch.member import Member, member
from gnomon.runtime.launch.membership import Epoch, Membership
from gnomon.runtime.launch.train import Loop, Outcome, TrainingJob, identity_of
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.processes import instruction_sets
from gnomon.runtime.processes.connections import sockets
from gnomon.software import own

SPEED_STEPS = 4
"""Steps whose median says how fast a process is."""


def check_elastic(job: TrainingJob) -> None:
    """PlanError for what processes that come and go do not do."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise PlanError("torchrun starts its own processes; run a plan with --processes without it")
    refused = {
        "--timeline": job.measure,
        "--device cuda": job.device != "cpu",
        f"optimizer.kind = {job.plan.optimizer.kind!r}": job.plan.optimizer.kind in own.WHOLE_MATRIX_OPTIMIZERS,
    }
    if unsupported := [name for name, is_set in refused.items() if is_set]:
        raise PlanError(
            f"logical workers on processes that come and go do not do {', '.join(unsupported)} yet; leave it out"
        )


def train_elastic(job: TrainingJob, membership: Membership) -> Outcome | None:
    """How the job went, or None where this process left before its end. Under determinism D2 it first agrees with the
    others on kernels that all have, before torch has chosen its own."""
    if job.determinism == "D2":
        found = instruction_sets.own()
        agreed = membership.agree(found)
        if not instruction_sets.has(found, agreed):
            return None
        instruction_sets.compute_with(agreed)
        job = replace(job, kernels=agreed)
    else:
        membership.say_kind(instruction_sets.kind())
    outcome: Outcome | None = member(_LogicalMember, job, membership)
    return outcome


class _LogicalMember(Member):
    """One process, with some of the plan's workers."""

    def __init__(self, job: TrainingJob, corpus: Batches, signals: list[int], membership: Membership) -> None:
        super().__init__(job, corpus, signals, membership)
        values = None if job.weights is None else values_of(job.weights, job.graph)
        make = partial(LogicalWorkers, seed=job.seed, settings=job.settings, values=values)
        self.executor = make(job.graph, job.plan, job.workload)
        self.executor.pause_s = membership.pause_s
        self.after_loss_s = membership.announced_s
        self.took: list[float] = []
        """Seconds of a worker in each step since the last epoch began."""

    def _at(self) -> str:
        return "in a step"

    def _trained(self) -> tuple[LogicalWorkers, Callable[[Batch], float]]:
        return self.executor, self.executor.evaluate

    def _begin(self, loop: Loop, epoch: Epoch) -> None:
        self.epoch, self.took = epoch, []

    def _step(self, loop: Loop, step: int) -> None:
        """Trains a step; tells the launcher this process's speed now and then, where workers follow speeds."""
        loop.step(step)
        self.took.append(self.executor.worker_s)
        # A median over a few steps: one slow step moves no workers.
        if self.job.follow_speed and len(self.took) % SPEED_STEPS == 0 and self.executor.own:
            self.membership.say_speed(self.epoch, 1 / median(self.took[-SPEED_STEPS:]))

    def _catch_up(self, epoch: Epoch) -> bool:
        """Gives every process the newest state that any has; that of a checkpoint, or the beginning, where none has
        any."""
        self.own_sockets = sockets() - self.before
        counts = [torch.zeros(3, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([self.done, self.ended, len(self.records)]))
        behind = [tuple(count.tolist()) for count in counts]
        newest = max(done for done, _, _ in behind)
        if newest < 0:
            self._load()
        else:
            # All that are this far hold the same bits: the first of them serves.
            source = next(rank for rank, (done, _, _) in enumerate(behind) if done == newest)
            if any(done < newest for done, _, _ in behind):
                self._copy_from(source, records=behind[source][2])
            # What is due after the step is done again unless all that are this far had done it.
            self.done, self.ended = newest, min(ended for done, ended, _ in behind if done == newest)
        self.executor.place(epoch.placement)
        return True

    def _load(self) -> None:
        """Begins from the newest checkpoint, where the job goes on from one."""
        done = 0
        if self.job.checkpoints is not None and self.job.resume:
            identity = identity_of(self.job, self.corpus)
            done = load(self.job.checkpoints, self.executor, identity=identity, override=self.job.override)
        self.done = self.ended = self.resumed_from = done

    def _copy_from(self, source: int, records: int) -> None:
        """Parameters, optimizer states and what was recorded, from the process of that rank, in memory."""
        pairs = list(self.executor.parameters())
        scaler = self.executor.state.loss_scale
        # Updates of each part, steps behind the checkpoint that it began from, and under fp16 the scale and its good
        # steps.
        numbers = torch.tensor(
            [
                *(float(update.steps) for _, update in pairs),
                float(self.resumed_from),
                *((scaler.scale, float(scaler.good_steps)) if scaler is not None else ()),
            ],
            dtype=torch.float64,
        )
        for tensor in (*_tensors(self.executor), numbers):
            # As bytes: exact whatever the dtype.
            dist.broadcast(tensor.view(torch.uint8), source)
        steps = [int(number) for number in numbers[: len(pairs) + 1].tolist()]
        for (_, update), count in zip(pairs, steps, strict=False):
            update.steps = count
        self.resumed_from = steps[-1]
        if scaler is not None:
            scaler.scale, scaler.good_steps = float(numbers[-2]), int(numbers[-1])
        self._share_records(source, records)


def _tensors(executor: LogicalWorkers) -> list[Tensor]:
    """All that lives from one step to the next."""
    tensors = []
    for parameters, update in executor.parameters():
        tensors += [x for x in (parameters.flat, parameters.master, update.first, update.second) if x is not None]
    return [tensor for tensor in tensors if tensor.numel()]


LOGICAL_WORKERS = Scheme(
    controller="logical_workers", check=check_elastic, train=train_elastic, exports="launcher", desk=None
)
"""EasyScale: a plan's data-parallel ranks on any number of processes."""
