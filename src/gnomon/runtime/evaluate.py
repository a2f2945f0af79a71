"""The loss of a batch without training: forwards only, under the same plan.

`evaluate(executor, batch)` returns the mean loss over all tokens on every rank. Each rank runs its stages in their
order, unit by unit; a fully sharded stage is gathered and freed. Not an action of any Program, so it is not predicted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.runtime.execute import Executor, StepResult
from gnomon.runtime.stage import Batch


def evaluate(executor: Executor, batch: Tensor | Batch) -> float:
    """Mean loss over all labels. batch: as of a step, the same on all ranks; all must ask."""
    executor.synchronise()
    executor.feed.take(batch)
    total = forward_loss(executor)
    return executor.total_loss(StepResult(loss=total, grad_norm=total))


def forward_loss(executor: Executor) -> Tensor:
    """This rank's part of the mean loss of the batch that was taken last."""
    total = torch.zeros((), dtype=torch.float64, device=executor.device)
    executor.buffers.blocks = False
    with torch.no_grad():
        for unit in range(executor.feed.num_units):
            given = executor.feed.of_unit(unit)
            for number in sorted(executor.stages):
                y = _forward(executor, number, unit, given)
                if executor.stages[number].last:
                    total += y.double() / executor.feed.counted / executor.groups.mesh.tp
                elif number + 1 in executor.stages:
                    executor.buffers.tensors["X", number + 1, unit] = y
                else:
                    y = y.contiguous()
                    name = ("X", number + 1, unit)
                    executor.buffers.leave(name, y, executor.messages.send(y, name, number, number + 1))
    executor.buffers.wait_sent()
    return total


def _forward(executor: Executor, number: int, unit: int, given: Batch) -> Tensor:
    stage, name = executor.stages[number], ("X", number, unit)
    x = torch.zeros((), device=executor.device)
    if not stage.first:
        if number - 1 not in executor.stages:
            executor.buffers.tensors[name], work = executor.messages.receive(name, number - 1)
            work.wait()
        x = executor.buffers.take(name)
    gathers = stage.zero == 3 and all(held.flat is None for held in stage.held if held.zero)
    if gathers:
        executor.state.unshard((number,))
        executor.state.gathered(number)
    y: Tensor = stage(x, given)
    if gathers:
        executor.state.reshard(number)
    return y
