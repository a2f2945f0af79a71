"""What processes of the elastic tests run: steps of logical workers, wherever they are, and of ordinary ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
from runtime import training
from torch import Tensor

from gnomon.methods.easyscale import Observation, place_workers
from gnomon.models.llama import llama
from gnomon.plans import Mesh, Plan, Schedule, Workload
from gnomon.runtime import Executor
from gnomon.runtime.launch.logical_workers import LogicalWorkers
from gnomon.runtime.mesh import ordered_sums

WORK = Workload(global_batch_size=16, seq_len=16)
PLAN = replace(training.ALONE, mesh=Mesh(dp_replicate=4), schedule=Schedule(num_microbatches=2))
TWO = replace(PLAN, mesh=Mesh(dp_replicate=2))
SETTINGS = replace(training.AdamWSettings(), lr=1e-2)
Told = tuple[list[tuple[float, float]], list[Tensor]]
"""Loss and norm of each step, and the parameters after the last."""


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (16, 17), generator=generator) for _ in range(steps)]


def on(plan: Plan, processes: int) -> tuple[int, ...]:
    return place_workers(plan, Observation(processes=processes)).placement


def logical(plan: Plan, placements: Sequence[Sequence[int]]) -> Told:
    """One step with the workers at each of these placements, and the loss of a batch without training."""
    workers = LogicalWorkers(llama(training.CONFIG), plan, WORK, settings=SETTINGS)
    losses = []
    with patch.object(ordered_sums, "CHUNK", 1000):  # so that there are several, the last of another size
        for placement, batch in zip(placements, batches(len(placements)), strict=True):
            workers.place(placement)
            result = workers.step(batch)
            losses.append((workers.total_loss(result), float(result.grad_norm)))
        losses.append((workers.evaluate(batches(1)[0]), 0.0))
    return losses, [held.shard.clone() for held, _ in workers.parameters()]


def ordinary(plan: Plan, steps: int) -> Told:
    executor = Executor(llama(training.CONFIG), plan, WORK, settings=SETTINGS)
    losses = []
    for batch in batches(steps):
        result = executor.step(batch)
        losses.append((executor.total_loss(result), float(result.grad_norm)))
    return losses, [held.shard.clone() for held, _ in executor.parameters()]
