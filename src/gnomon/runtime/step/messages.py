"""Messages between stages: activations forward, their gradients backward, each rank to those that want its rows.

`RankMessages` has a function for each such kind of action. X of stage s + 1 is what stage s sends forward, and DY of s
- 1 what it sends backward; skips to and from stages that are no neighbours have names of their own. A message is one
tensor or several (`crossings`). Left out: what computes them (`compute`), and when they are waited for (`buffers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.errors import PlanError
from gnomon.plans import Plan
from gnomon.program import Program
from gnomon.runtime.mesh.groups import Groups, channel_name
from gnomon.runtime.mesh.routes import Route, Together, Waits, member_work, of_rank, routes
from gnomon.runtime.module.crossings import Crossing, Hop, ReceivedShape, Shapes
from gnomon.runtime.step.buffers import Buffers, Name
from gnomon.runtime.step.rows import Action


class RankMessages:
    """What one rank sends and receives."""

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        buffers: Buffers,
        program: Program,
        plan_stage: Sequence[int],
        hops: Sequence[Hop],
        *,
        rows: int,
        shapes: Shapes,
        sizes: Callable[[int], Mapping[str, int]],
        device: torch.device,
    ) -> None:
        """Takes plan_stage of each stage of the Program, the hops of all ranks, the rows of a microbatch on all ranks,
        the shapes of tensors here, and the sizes of the open dims of a unit here."""
        self.plan, self.groups, self.buffers, self.plan_stage = plan, groups, buffers, plan_stage
        self.program, self.rows, self.shapes, self.device = program, rows, shapes, device
        self.sizes = sizes
        self.crossings: dict[tuple[str, int], tuple[Crossing, ...]] = {}
        """Of each buffer at the stage that gets it."""
        for hop in hops:
            self.crossings[hop.buffer, hop.target] = hop.crossings
            # Backward, only tensors that have gradients cross.
            self.crossings[hop.gradient, hop.source] = hop.trained
        self.most = max((len(hop.crossings) for hop in hops), default=1)
        self._found: dict[tuple[int, int], tuple[Route, ...]] = {}
        self._shapes: dict[tuple[str, int, int], ReceivedShape] = {}

    def actions(self) -> Mapping[str, Action]:
        """Maps each kind of row to what does it."""
        return {
            "SEND_F": lambda stage, unit: self._send(("X", stage + 1, unit), stage, stage + 1),
            "RECV_F": lambda stage, unit: self._receive(("X", stage, unit), stage - 1),
            "SEND_B": lambda stage, unit: self._send(("DY", stage - 1, unit), stage, stage - 1),
            "RECV_B": lambda stage, unit: self._receive(("DY", stage, unit), stage + 1),
            **dict.fromkeys(("SEND_SKIP", "SEND_SKIP_GRAD"), self._send_skip),
            **dict.fromkeys(("RECV_SKIP", "RECV_SKIP_GRAD"), self._receive_skip),
        }

    def send(self, tensors: Sequence[Tensor], name: Name, source: int, to: int) -> Waits:
        """Starts sending a buffer of stage `source` to the ranks that have stage `to`, each its rows; the tensors must
        be contiguous and live until it is done. PlanError for one that is not as the Graph says."""
        mine, home = self.groups.here, self._home(to)
        sent = [route for route in self._routes(source, to) if route.source == mine.rank]
        parts = []
        for place, (crossing, tensor) in enumerate(zip(self.crossings[name[0], name[1]], tensors, strict=True)):
            shape = self._shape(crossing, sent, name[2])
            if tensor.shape != shape.sizes or tensor.dtype != shape.dtype:
                raise PlanError(
                    f"{crossing.name} is {tuple(tensor.shape)} of {tensor.dtype}, and was to cross stages as "
                    f"{shape.sizes} of {shape.dtype}; use pp = 1"
                )
            for route in sent:
                group = self._channel(mine.pipeline_rank, home, name, route)
                part = _rows(tensor, shape, route.out, route.rows)
                parts.append(member_work(dist.isend(part, route.target, group=group, tag=self._tag(name, place))))
        return Together(tuple(parts))

    def receive(self, name: Name, source: int) -> tuple[tuple[Tensor, ...], Waits]:
        """Starts receiving a buffer from the ranks that have stage `source`."""
        mine, home = self.groups.here, self._home(source)
        comes = [route for route in self._routes(source, name[1]) if route.target == mine.rank]
        tensors, parts = [], []
        for place, crossing in enumerate(self.crossings[name[0], name[1]]):
            shape = self._shape(crossing, comes, name[2])
            tensors.append(torch.empty(shape.sizes, dtype=shape.dtype, device=self.device))
            for route in comes:
                group = self._channel(home, mine.pipeline_rank, name, route)
                part = _rows(tensors[-1], shape, route.into, route.rows)
                parts.append(member_work(dist.irecv(part, route.source, group=group, tag=self._tag(name, place))))
        return tuple(tensors), Together(tuple(parts))

    def _shape(self, crossing: Crossing, ends: Sequence[Route], unit: int) -> ReceivedShape:
        """What a tensor of a unit looks like here. PlanError for one without rows that stages divide among them."""
        sizes = self.sizes(unit)
        key = crossing.name, sizes["batch"], sizes["seq"]
        if key not in self._shapes:
            self._shapes[key] = self.shapes.of(crossing, sizes)
        shape = self._shapes[key]
        # One without rows (a shared table) cannot be taken apart for ranks with other parts of the batch.
        if not shape.rows and len(ends) > 1:
            raise PlanError(
                f"{crossing.name} has no rows of its own, and crosses stages that divide the batch otherwise; give "
                f"them the same axes"
            )
        return shape

    def _send(self, name: Name, source: int, to: int) -> None:
        # The backend sends memory as it lies.
        tensors = tuple(tensor.contiguous() for tensor in self.buffers.take(name))
        self.buffers.leave(name, tensors, self.send(tensors, name, source, to))

    def _receive(self, name: Name, source: int) -> None:
        tensors, work = self.receive(name, source)
        self.buffers.tensors[name] = tensors
        self.buffers.start(name, work, sum(tensor.nbytes for tensor in tensors))

    def _send_skip(self, stage: int, unit: int) -> None:
        buffer, peer = self._skip()
        self._send((buffer, peer, unit), stage, peer)

    def _receive_skip(self, stage: int, unit: int) -> None:
        buffer, peer = self._skip()
        self._receive((buffer, stage, unit), peer)

    def _skip(self) -> tuple[str, int]:
        """(buffer, stage at the other end) of the row that runs."""
        override = self.program.overrides[self.buffers.row]
        assert override.peer is not None, "rows of skips name the other end"
        return override.name, override.peer

    def _home(self, stage: int) -> int:
        """The rank class that has a stage of the Program."""
        return self.plan.pipeline_ranks[self.plan_stage[stage]]

    def _routes(self, source: int, target: int) -> tuple[Route, ...]:
        """Messages of a unit between two stages of the Program that this rank sends or receives."""
        key = self.plan_stage[source], self.plan_stage[target]
        if key not in self._found:
            self._found[key] = of_rank(routes(self.plan, *key, self.rows), self.groups.here.rank)
        return self._found[key]

    def _channel(self, source: int, destination: int, name: Name, route: Route) -> ProcessGroup | None:
        """Messages of one kind from one rank to another have a group of their own: on NCCL that is a stream on which
        nothing else can stand before them."""
        return self.groups.by_comm[channel_name((source, destination, name[0]), route)]

    def _tag(self, name: Name, place: int) -> int:
        """Every tensor of a step that goes through one channel has a tag of its own, so that messages cannot be
        mistaken for each other."""
        buffer, stage, unit = name
        # A mixed-radix number: unit, stage, direction, place.
        return ((unit * len(self.plan_stage) + stage) * 2 + buffer.startswith("D")) * self.most + place


def _rows(tensor: Tensor, shape: ReceivedShape, first: int, count: int) -> Tensor:
    """Its part for some sequences; all of one that has none."""
    return tensor[first * shape.rows : (first + count) * shape.rows] if shape.rows else tensor
