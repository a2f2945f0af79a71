"""What processes of the tests of survivors run: ranks that kill themselves at a row, and copies in memory by hand."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from runtime import training

from gnomon.lowering.edit import Row as ProgramRow
from gnomon.models.llama import llama
from gnomon.plans import Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.runtime import Executor, Outcome, TrainingJob
from gnomon.runtime.checkpoint.in_memory import MemoryCheckpoint, latest
from gnomon.runtime.launch import takeover
from gnomon.runtime.launch.membership import Membership
from gnomon.runtime.launch.redundancy import ProcessWork
from gnomon.runtime.launch.survivors import train_surviving
from gnomon.runtime.step.rows import RankRow

KILLS = "GNOMON_TEST_KILLS"
"""Variable: `process step row` of each process that is to die, with `;` between them; further numbers are of processes
that die with it, before it."""
MARKS = "GNOMON_TEST_MARKS"
"""Variable: the folder in which each process that was started leaves its number and pid."""
FP16 = Precision(param="fp16", compute="fp16", grad="fp32", reduce="fp32", master="fp32", states="fp32")
HELD = {
    "fp16, zero 1": replace(training.ALONE, mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=1), precision=FP16),
    "bf16, zero 3": replace(training.ALONE, mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=3), precision=Precision()),
    "tp, muon": replace(training.PLANS["tp"], optimizer=Optimizer(kind="muon")),
    "replicas": replace(training.ALONE, mesh=Mesh(dp_replicate=2)),
    "zero 2, adafactor": replace(training.ALONE, mesh=Mesh(dp_shard=2), optimizer=Optimizer(kind="adafactor", zero=2)),
    "pp": replace(training.PLANS["pp"], schedule=Schedule(name="one_f_one_b", num_microbatches=2)),
}
WORK = Workload(global_batch_size=4, seq_len=16)


def train(job: TrainingJob, membership: Membership) -> Outcome | None:
    """`train_surviving`, in a process that may be one to die."""
    (Path(os.environ[MARKS]) / f"{membership.process} {os.getpid()}").touch()
    for kill in os.environ[KILLS].split(";"):
        process, step, row, *others = map(int, kill.split())
        if process == membership.process:
            _dies(step, row, others)
    return train_surviving(job, membership)


def absent(job: TrainingJob, membership: Membership) -> Outcome | None:
    """`train_surviving`, but process 1 says that it comes and does not, and process 2, which takes its place, has no
    memory left in its second step."""
    (Path(os.environ[MARKS]) / f"{membership.process} {os.getpid()}").touch()
    if membership.process == 1:
        membership.join()
        epoch = membership.next(0)
        assert epoch is not None
        membership.store.set(f"ready/{epoch.number}/1", "1")
        threading.Event().wait()
    do, rows = Executor._do, [0]

    def done(self: Executor, one: RankRow) -> None:
        rows[0] += one is self.rows[1]
        if rows[0] == 2 and one is self.rows[1]:
            torch.empty(1 << 50)
        do(self, one)

    if membership.process == 2:
        Executor._do = done  # type: ignore[method-assign]
    return train_surviving(job, membership)


def _dies(step: int, row: int, others: Sequence[int]) -> None:
    do, steps = Executor._do, [0]

    def done(self: Executor, one: RankRow) -> None:
        steps[0] += one is self.rows[0]
        if steps[0] == step and one is self.rows[row % len(self.rows)]:
            pids = dict(path.name.split() for path in Path(os.environ[MARKS]).iterdir())
            for other in others:
                os.kill(int(pids[str(other)]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        do(self, one)

    Executor._do = done  # type: ignore[method-assign]


def train_with_copies(job: TrainingJob, membership: Membership) -> Outcome | None:
    """`takeover.train_with_copies`, in a process that may be one to die."""
    process, step, row = map(int, os.environ[KILLS].split())
    if process == membership.process:
        do = ProcessWork.row

        def done(self: ProcessWork, one: ProgramRow) -> None:
            if self.now.number == step and one is self.rows[min(row, len(self.rows) - 1)]:
                os.kill(os.getpid(), signal.SIGKILL)
            do(self, one)

        ProcessWork.row = done  # type: ignore[method-assign]
    return takeover.train_with_copies(job, membership)


def copies(names: list[str]) -> dict[str, list[list[tuple[float, float, float]]]]:
    """Of each plan: loss, norm and a random number of two steps after a copy was taken, and again from the copy; then
    from the one that the other rank had, the own one and the state being lost."""
    return {name: _told(HELD[name]) for name in names}


def _told(plan: Plan) -> list[list[tuple[float, float, float]]]:
    executor = Executor(llama(training.CONFIG), plan, WORK)
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 256, (4, 17), generator=generator) for _ in range(3)]

    def steps() -> list[tuple[float, float, float]]:
        told = []
        for batch in batches[1:]:
            result = executor.step(batch)
            told.append((executor.total_loss(result), float(result.grad_norm), float(torch.rand(()))))
        return told

    held = MemoryCheckpoint()
    held.attach(executor)
    executor.step(batches[0])
    held.take(1)
    dist.barrier()
    held.commit()
    results = [steps()]
    held.restore()
    results.append(steps())
    if dist.get_rank() == 1:
        held.own.room(0)
        for part, rule in executor.parameters():
            for tensor in (part.flat, part.resident, part.master, rule.first, rule.second):
                if tensor is not None:
                    tensor.fill_(float("nan"))
            rule.steps = 99
            rule.factored.clear()
    everyone = [held.steps_held()] * 2
    dist.all_gather_object(everyone, held.steps_held())
    assert latest(everyone, held.alike) == 1
    assert held.share(1, everyone, held.alike) > 0
    alone = plan.mesh.dp_replicate == 1
    assert held.alike == ((0, 1) if alone else (0, 0))
    assert (held.sent > 0, held.neighbour.data.numel() > 0) == (alone, alone), "what another rank has is not sent"
    held.restore()
    results.append(steps())
    return results
