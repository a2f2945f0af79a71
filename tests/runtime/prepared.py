"""A job in one's own loop, as its processes run it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from runtime import parity
from torch import Tensor

import gnomon
from gnomon.models.llama import llama
from gnomon.plans import Mesh, Optimizer, Plan, Schedule

ALONE = Plan(schedule=Schedule(num_microbatches=4), precision=parity.FP64)
PLANS = {
    "pp": replace(ALONE, mesh=Mesh(pp=2)),
    "tp": replace(ALONE, mesh=Mesh(tp=2)),
    "zero 3": replace(ALONE, mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=3)),
}


def trained(plan: Plan, folder: Path | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps, and the parameters after them; between them the job is saved and loaded again."""
    losses = []
    with gnomon.prepare(llama(parity.CONFIG), plan, workload=parity.WORKLOAD, seed=7) as job:
        losses.append(job.step(parity.batch(0)))
        if folder is not None:
            job.save(folder)
    with gnomon.prepare(llama(parity.CONFIG), plan, workload=parity.WORKLOAD, seed=7) as job:
        if folder is not None:
            assert job.load(folder) == 1
        else:
            job.step(parity.batch(0))
        losses.append(job.step(parity.batch(1)))
        timeline = job.timeline()
        assert len(timeline.workers) == plan.num_stages or plan.num_stages == 1
        assert timeline.makespan_s > 0
        return losses, job.state_dict()


def all_plans(folder: Path) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Those of two processes."""
    torch.set_num_threads(1)
    return {name: trained(plan, folder / name) for name, plan in PLANS.items()}
