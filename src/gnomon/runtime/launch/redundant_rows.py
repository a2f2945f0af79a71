"""What the rows of a step with copies do on one process: computing, messages, sums, updates, and redundant forwards.

`RankExecutor` is one rank's part of the plan without process groups of its own; `RowActions` has a method for each kind
of row, named by it; `StepUnderWay` is what is known of the step under way. What was sent stays until the step is over.
Left out: which rows there are, and going on within a step (`redundancy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.lowering.gradients import TIED
from gnomon.lowering.norm import EVERYONE
from gnomon.methods.bamboo import without
from gnomon.plans import Plan, Workload
from gnomon.runtime.mesh.groups import Groups, coordinates, meshes_of, stage_sets
from gnomon.runtime.mesh.routes import Together, Waits
from gnomon.runtime.optim.update import clip_scale, squares
from gnomon.runtime.parameters.parameters import Parameters
from gnomon.runtime.step.buffers import Buffers, Name
from gnomon.runtime.step.execute import Executor
from gnomon.runtime.step.messages import RankMessages

COMMS = ("dp", "dp_shard", "dp_replicate", "tp", "cp", "kv_copies", EVERYONE, TIED)
GRADIENTS = 1 << 20
"""First tag of gradients on their way to a copy; those of messages between stages are below."""


class RankExecutor(Executor):
    """The part of one rank of the plan, whichever process has it; it has no process groups of its own."""

    def __init__(self, rank: int, graph: Graph, plan: Plan, workload: Workload, **rest: Any) -> None:
        if reason := plan.experts.counts_the_step:
            raise PlanError(f"{reason} counts tokens on the plan's own processes; leave it out here")
        self.number = rank
        super().__init__(graph, without(plan), workload, **rest)
        (self.stage,) = self.stages
        # Which replica it is in: ranks of one position have the stages of one pipeline.
        self.position = stage_sets(self.plan)[self.stage].index(rank)

    def _groups(self) -> Groups:
        here = coordinates(self.plan, self.number)
        mesh = meshes_of(self.plan)[here.pipeline_rank]
        return Groups(mesh=mesh, here=here, by_comm=dict.fromkeys(COMMS))

    @property
    def stage_parameters(self) -> Sequence[Parameters]:
        """The parameters of the stage."""
        return self.stages[self.stage].own_parameters

    def peer(self, stage: int) -> int:
        """The rank of this replica that has another stage."""
        return stage_sets(self.plan)[stage % self.plan.num_stages][self.position]

    def share(self, buffers: Buffers) -> None:
        """Hands over to stages of this process and takes from them, by these buffers."""
        self.buffers = self.compute.buffers = self.state.buffers = self.messages.buffers = buffers


@dataclass(slots=True)
class StepUnderWay:
    """What is known of the step under way."""

    number: int = 0
    rows_done: set[tuple[str, int, int]] = field(default_factory=set)
    """Rows."""
    log: dict[Name, tuple[Tensor, ...]] = field(default_factory=dict)
    """What was made here for another stage, by the name that it has there."""
    inputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Of redundant forwards, by unit."""
    received: set[Name] = field(default_factory=set)
    coming: dict[Name, Waits] = field(default_factory=dict)
    leaving: list[tuple[Waits, tuple[Tensor, ...]]] = field(default_factory=list)
    whole: dict[int, list[Tensor]] = field(default_factory=dict)
    """By stage: gradients before they were added up with the other replicas'."""
    norm: float | None = None
    copied: bool = False
    scaled: set[int] = field(default_factory=set)
    """Stages whose gradients were clipped."""


class RowActions:
    """The actions of one process. `own` is its rank's part, `copy` that of the next rank."""

    own: RankExecutor
    copy: RankExecutor
    plays: dict[int, RankExecutor]
    """Stages whose work this process does."""
    plan: Plan
    buffers: Buffers
    now: StepUnderWay
    places: tuple[int, ...]
    """Place in the process group of the process that does each rank's work."""
    keepers: Mapping[int, int]
    """Rank -> place of the process that keeps a copy of its state."""
    groups: Mapping[int, ProcessGroup]
    """By stage: the processes that have it, one a replica."""

    def _load(self, stage: int, unit: int) -> None:
        """Ids are in memory."""

    def _f(self, stage: int, unit: int) -> None:
        part = self.plays[stage]
        if stage:
            self._arrive(("X", stage, unit))
        part.compute._forward(stage, unit)
        self._note(("X", stage + 1, unit))

    def _b(self, stage: int, unit: int) -> None:
        part = self.plays[stage]
        if part.stages[stage].leaves:
            self._arrive(("DY", stage, unit))
        if (stage, unit) not in part.compute.saved:  # let go: once more from its input
            if stage:
                self.buffers.tensors["X", stage, unit] = tuple(x.detach() for x in self.now.inputs[unit])
            part.compute._forward_again(stage, unit)
        part.compute._whole_backward(stage, unit)
        name = ("DY", stage - 1, unit)
        self._note(name)
        if ("B", stage - 1, unit) in self.now.rows_done:  # the rank before had it from the one that is lost
            self.buffers.tensors.pop(name, None)

    def _note(self, name: Name) -> None:
        """Keeps what was just made for another stage."""
        if name in self.buffers.tensors:
            self.now.log[name] = tuple(x.detach() for x in self.buffers.tensors[name])

    def _send_f(self, stage: int, unit: int) -> None:
        self._send(stage, ("X", stage + 1, unit), stage + 1)

    def _send_b(self, stage: int, unit: int) -> None:
        self._send(stage, ("DY", stage - 1, unit), stage - 1)

    def _send(self, stage: int, name: Name, to: int) -> None:
        self.buffers.tensors.pop(name, None)
        part = self.plays[stage]
        part.messages.send(self.now.log[name], name, stage, to)

    def _recv_f(self, stage: int, unit: int) -> None:
        self._receive(stage, ("X", stage, unit), stage - 1)

    def _recv_b(self, stage: int, unit: int) -> None:
        self._receive(stage, ("DY", stage, unit), stage + 1)

    def _receive(self, stage: int, name: Name, source: int) -> None:
        self.buffers.tensors[name], self.now.coming[name] = self.plays[stage].messages.receive(name, source)

    def _arrive(self, name: Name) -> None:
        """Waits until a message is there."""
        if (work := self.now.coming.get(name)) is not None:
            work.wait()
            self.now.coming.pop(name)
            self.now.received.add(name)

    def _frc(self, stage: int, unit: int) -> None:
        """Runs the redundant forward: what leaves the copy's stage stays here, unless the rank is lost."""
        entered = ("X", stage, unit)
        if stage:
            self.now.inputs[unit] = self.now.log[entered]
            self.buffers.tensors[entered] = tuple(x.detach() for x in self.now.log[entered])
        name = ("X", stage + 1, unit)
        # The stage after the copy's may be waiting under this name for what the living rank sends; the redundant output
        # must not take its place.
        before = self.buffers.tensors.pop(name, None)
        self.copy.compute._forward(stage, unit)
        if (gradients := self.buffers.tensors.pop(name, None)) is not None:
            self.now.log[name] = gradients
        if before is not None:
            self.buffers.tensors[name] = before

    def _forget(self, stage: int, unit: int) -> None:
        self.copy.compute.saved.pop((stage, unit), None)
        self.now.log.pop(("X", stage + 1, unit), None)

    def _ar(self, stage: int, unit: int) -> None:
        """The sum over replicas; what it adds up stays, so that it can be done again."""
        group = self.groups.get(stage)
        if group is None:
            return
        part = self.plays[stage]
        # Kept as they were before the first sum: an all-reduce is in place, and one that was cut off may have spoilt
        # its terms.
        if stage not in self.now.whole:
            self.now.whole[stage] = [parameters.whole_grad() for parameters in part.stage_parameters]
        for parameters, whole in zip(part.stage_parameters, self.now.whole[stage], strict=True):
            if parameters.grad is whole:
                parameters.grad = whole.clone()
                parameters.begun.update(parameters.by_name)
            assert parameters.grad is not None
            parameters.grad.copy_(whole)
            dist.all_reduce(parameters.grad, group=group)
        self.now.scaled.discard(stage)

    def _norm(self, stage: int, unit: int) -> None:
        """All meet here, and whoever is past it knows that all gradients were added up."""
        terms = torch.zeros(self.plan.world_size, dtype=torch.float64)
        for part in self.plays.values():
            # By rank, and added up as exact sums: the norm has the same bits whoever does a rank's work.
            terms[part.number] = math.fsum(
                x for parameters in part.stage_parameters for x in squares(parameters).tolist()
            )
        dist.all_reduce(terms)
        self.now.norm = math.sqrt(math.fsum(terms.tolist()))

    def _clip(self, part: RankExecutor) -> None:
        """Gradients become what updates read, and what copies are sent."""
        assert self.now.norm is not None
        if self.plan.optimizer.clip and part.stage not in self.now.scaled:
            # In fp64, as the norm is: the factor is then the same number in every process.
            by = clip_scale(torch.tensor(self.now.norm, dtype=torch.float64), part.state.settings.clip_norm)
            for parameters in part.stage_parameters:
                grad = parameters.whole_grad()
                grad.mul_(by.to(grad.dtype))
        self.now.scaled.add(part.stage)

    def _recv_copy(self, stage: int, unit: int) -> None:
        source = self.places[self.copy.number]
        for number, parameters in enumerate(self.copy.stage_parameters):
            room = parameters.whole_grad()
            self.now.coming["GC", number, 0] = _work(dist.irecv(room, source, tag=GRADIENTS + number))

    def _send_copy(self, stage: int, unit: int) -> None:
        part = self.plays[stage]
        keeper = self.keepers[part.number]
        self._clip(part)
        for number, parameters in enumerate(part.stage_parameters):
            grad = parameters.whole_grad()
            self.now.leaving.append((_work(dist.isend(grad, keeper, tag=GRADIENTS + number)), (grad,)))

    def _opt(self, stage: int, unit: int) -> None:
        part = self.plays[stage]
        self._clip(part)
        part.state.scale = 1.0
        part.state.update(stage)

    def _opt_copy(self, stage: int, unit: int) -> None:
        if not self.now.copied:
            for number in range(len(self.copy.stage_parameters)):
                self._arrive(("GC", number, 0))
            self.now.copied = True
        for parameters in self.copy.stage_parameters:
            parameters.begun.update(parameters.by_name)
        self.copy.state.scale = 1.0
        self.copy.state.update(stage)


class Lines(RankMessages):
    """Messages of a rank's stage to whichever process has the other end."""

    def __init__(self, part: RankExecutor, work: RowActions) -> None:
        # All that the part's messages know; only whom they go to differs.
        vars(self).update(vars(part.messages))
        self.part, self.work = part, work

    def send(self, tensors: Sequence[Tensor], name: Name, source: int, to: int) -> Waits:
        """Sends tensors as `RankMessages.send` does, to whichever process plays the rank."""
        place = self.work.places[self.part.peer(to)]
        tensors = tuple(x.contiguous() for x in tensors)
        if place == dist.get_rank():
            self.buffers.tensors[name] = tensors
            return Together(())
        works = [_work(dist.isend(x, place, tag=self._tag(name, i))) for i, x in enumerate(tensors)]
        sent = Together(tuple(works))
        self.work.now.leaving.append((sent, tensors))
        return sent

    def receive(self, name: Name, source: int) -> tuple[tuple[Tensor, ...], Waits]:
        """Receives tensors as `RankMessages.receive` does, from whichever process plays the rank."""
        place = self.work.places[self.part.peer(source)]
        if place == dist.get_rank():
            return self.buffers.tensors[name], Together(())
        shapes = [self._shape(crossing, (), name[2]) for crossing in self.crossings[name[0], name[1]]]
        tensors = tuple(torch.empty(shape.sizes, dtype=shape.dtype) for shape in shapes)
        works = [_work(dist.irecv(x, place, tag=self._tag(name, i))) for i, x in enumerate(tensors)]
        return tensors, Together(tuple(works))


def _work(work: dist.Work | None) -> Waits:
    assert work is not None
    return work
