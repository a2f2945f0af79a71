"""A captured model under a plan: an `Executor` that begins with the module's own weights, and gives them back by name.

`executor(module, found, plan, workload)` runs in every process of a job; `weights_of(executor)` is the way back. Leaves
out data, which the caller gives by the names of the module's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnomon.errors import GraphError, PlanError
from gnomon.frontend.capture import CapturedModule
from gnomon.frontend.records import is_trained
from gnomon.graph import Graph
from gnomon.graph.text_inputs import labels_of
from gnomon.plans import Plan, Workload
from gnomon.runtime.ops.captured import random_draws
from gnomon.runtime.optim.update import AdamWSettings
from gnomon.runtime.parameters.parameters import Parameters, Slot, Values
from gnomon.runtime.step.execute import Executor


def executor(
    module: nn.Module,
    captured: CapturedModule,
    plan: Plan,
    workload: Workload,
    *,
    settings: AdamWSettings = AdamWSettings(),  # noqa: B008 (frozen)
) -> Executor:
    """The rank's part of a job on the module, whose loss is the mean over the labels of a whole step. PlanError where
    the module's forward returns no loss, or the plan asks for what the runtime does not do."""
    check_trainable(captured.graph)
    return Executor(
        captured.graph,
        plan,
        workload,
        settings=settings,
        values=values_of(dict(module.named_parameters())),
        states=states_of(module, captured),
    )


def check_trainable(graph: Graph) -> None:
    """PlanError for a model without a loss of its own labels."""
    try:
        labels_of(graph)
    except GraphError as error:
        raise PlanError(str(error)) from None


def random_ops(graph: Graph) -> tuple[str, ...]:
    """What of a captured graph draws random numbers, ATen ops and `dropout`, each once."""
    return tuple(dict.fromkeys(target for block in graph.blocks for op in block.ops for target in random_draws(op)))


def randomness(graph: Graph) -> tuple[str, ...]:
    """What a run does about dropout and other random numbers of a model, said."""
    notes = []
    names = random_ops(graph)
    ops = [op for block in graph.blocks for op in block.ops]
    if any(op.attr("dropout", 0.0) or (op.does == "drops" and not op.attr("drawn", False)) for op in ops):
        notes.append("the model has dropout (of a captured one: in attention), and the runtime trains without it")
    if names:
        notes.append(f"the module draws random numbers ({', '.join(names)}): other plans draw others")
    return tuple(notes)


def states_of(module: nn.Module, captured: CapturedModule) -> dict[str, Tensor]:
    """What a module's forward reads beside its inputs and what is trained, by name."""
    states = {**{name: x.clone() for name, x in module.named_buffers()}, **captured.constants}
    return states | {name: x.detach() for name, x in module.named_parameters() if not is_trained(x)}


def values_of(trained: Mapping[str, Tensor]) -> Values:
    """This rank's parts of named tensors."""

    def values(slot: Slot) -> Tensor | None:
        whole = trained.get(slot.name)
        if whole is None or not whole.numel():  # of one without elements the graph has a size of 1
            return None
        return slot.part(whole.detach().to(torch.float64).reshape(slot.whole))

    return values


def weights_of(job: Executor) -> dict[str, Tensor]:
    """The parameters of this rank's stages, by the module's names; those of which ranks of tp and ep hold parts are put
    together on every rank, so all must call it. PlanError under ZeRO, where a rank updates a part and gathers the
    others in the next step."""
    if job.plan.optimizer.zero:
        raise PlanError("weights are given back of plans whose ranks update all of what they hold: ZeRO 0")
    named_values = [
        (slot, parameters.value(slot.name)) for parameters in _parameters_of(job) for slot in parameters.slots
    ]
    in_parts = {slot.name for slot, _ in named_values if slot.shape != slot.whole or slot.experts is not None}
    weights = {slot.name: value.clone() for slot, value in named_values if slot.name not in in_parts}
    parts = {
        slot.name: [(one.offset, part.cpu()) for one, part in slot.experts_of(value)]
        for slot, value in named_values
        if slot.name in in_parts
    }
    if job.groups.mesh.tp * job.groups.mesh.ep * job.groups.mesh.etp == 1:
        return weights
    every: list[dict[str, list[tuple[tuple[int, ...], Tensor]]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, parts)
    for slot, value in named_values:
        if slot.name in parts:
            whole = torch.empty(slot.whole, dtype=value.dtype)
            for offset, part in (one for found in every for one in found.get(slot.name, ())):
                whole[tuple(slice(first, first + size) for first, size in zip(offset, part.shape, strict=True))] = part
            weights[slot.name] = whole.to(value.device)
    return weights


def _parameters_of(job: Executor) -> list[Parameters]:
    return [parameters for stage in job.stages.values() for parameters in stage.own_parameters]
