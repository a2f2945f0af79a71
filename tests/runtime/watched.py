"""Training loops that are watched, one rank each: a slow rank in DDP and in FSDP2."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gnomon.runtime.watch.watch import Watch, watch

SLOW_S = 0.08
STEPS = 14
"""Enough for one window, and for the ranks to hear of it."""


class Sleeper(nn.Module):
    """A layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.layer(x)


def loop(wrap: str, slow: int, steps: int = STEPS) -> tuple[list[dict[str, Any]], bool]:
    """(records of this rank, whether torch is as it was). slow: rank that sleeps in each forward."""
    torch.manual_seed(0)
    before = dist.Work.wait
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), Sleeper(SLOW_S if dist.get_rank() == slow else 0.0))
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    records: list[dict[str, Any]] = []
    with watch(model, optimizer, records=records.append, out=None) as watching:
        run(model, optimizer, steps)
        heard(watching)
        run(model, optimizer, 1)
    return records, dist.Work.wait is before


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()


def heard(watching: Watch) -> None:
    """Waits until the ranks' parts have come, which a loop never does."""
    until = time.monotonic() + 60
    while watching._pending and not watching._pending[0][0].is_completed() and time.monotonic() < until:
        time.sleep(0.01)


def loops() -> dict[tuple[str, int], tuple[list[dict[str, Any]], bool]]:
    """Of each way to divide a model, with rank 1 slow."""
    return {(wrap, slow): loop(wrap, slow) for wrap, slow in (("ddp", 1), ("fsdp2", 1))}
