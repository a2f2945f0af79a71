"""The loss of a batch without training: forwards only, under the same plan.

`evaluate(executor, batch)` returns the mean loss over all tokens on every rank. Each rank runs its stages in their
order, unit by unit; a fully sharded stage is gathered and freed. Not an action of any Program, so it is not predicted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon.runtime.module.stage import Batch
from gnomon.runtime.step.execute import Executor, StepResult


def evaluate(executor: Executor, batch: Tensor | Batch) -> float:
    """Mean loss over all labels. batch: as of a step, the same on all ranks; all must ask."""
    executor.synchronise()
    executor.take(batch)
    total = forward_loss(executor)
    return executor.total_loss(StepResult(loss=total, grad_norm=total))


def forward_loss(executor: Executor) -> Tensor:
    """This rank's part of the mean loss of the batch that was taken last."""
    total = torch.zeros((), dtype=torch.float64, device=executor.device)
    # No row runs here, so none holds the compute stream until its communication is over.
    executor.buffers.blocks = False
    with torch.no_grad():
        for unit in range(executor.feed.num_units):
            batch = executor.feed.of_unit(unit)
            if (heads := executor.heads) is not None:
                heads.hand_embedded(unit, batch)
            for number in sorted(executor.stages):
                outputs, stage = _forward(executor, number, unit, batch), executor.stages[number]
                for result in stage.results:
                    total += outputs[result].double() / executor.feed.counted / stage.copies[result]
                for hop in stage.leaves:
                    name = (hop.buffer, hop.target, unit)
                    handed = tuple(outputs[crossing.name].contiguous() for crossing in hop.crossings)
                    if hop.target in executor.stages:
                        executor.buffers.tensors[name] = handed
                    else:
                        work = executor.messages.send(handed, name, number, hop.target)
                        executor.buffers.leave(name, handed, work)
            if heads is not None:
                total += heads.share(heads.loss(heads.last_hidden(unit), batch))
    executor.buffers.wait_sent()
    return total


def _forward(executor: Executor, number: int, unit: int, batch: Batch) -> dict[str, Tensor]:
    stage, entered = executor.stages[number], dict[str, Tensor]()
    for hop in stage.enters:
        name = (hop.buffer, number, unit)
        if hop.source not in executor.stages:
            executor.buffers.tensors[name], work = executor.messages.receive(name, hop.source)
            work.wait()
        names = (crossing.name for crossing in hop.crossings)
        entered.update(zip(names, executor.buffers.take(name), strict=True))
    gathers = stage.zero == 3 and all(parameters.flat is None for parameters in stage.parts if parameters.zero)
    if gathers:
        executor.state.unshard((number,))
        executor.state.gathered(number)
    outputs: dict[str, Tensor] = stage(entered, batch, executor.feed.packing_of(unit))
    if gathers:
        executor.state.reshard(number)
    return outputs
