"""Messages between stages: activations forward, their gradients backward, each rank to those that want its rows.

`Messages` has a function for each such kind of action. X of stage s + 1 is what stage s sends forward, and DY of s - 1
what it sends backward. Left out: what is in them (`compute`), and when they are waited for (`buffers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.plans import Plan
from gnomon.runtime.buffers import Buffers, Name
from gnomon.runtime.mesh import Groups, channel_name
from gnomon.runtime.routes import Route, Together, Waits, of_rank, routes, started
from gnomon.runtime.rows import Action


class Messages:
    """What one rank sends and receives."""

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        buffers: Buffers,
        plan_stage: Sequence[int],
        *,
        rows: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """plan_stage: of each stage of the Program. rows: of a microbatch, on all ranks. shape: an activation here."""
        self.plan, self.groups, self.buffers, self.plan_stage = plan, groups, buffers, plan_stage
        self.rows, self.shape, self.dtype, self.device = rows, shape, dtype, device
        self._found: dict[tuple[int, int], tuple[Route, ...]] = {}

    def actions(self) -> Mapping[str, Action]:
        """By kind."""
        return {
            "SEND_F": lambda stage, unit: self._send(("X", stage + 1, unit), stage, stage + 1),
            "RECV_F": lambda stage, unit: self._receive(("X", stage, unit), stage - 1),
            "SEND_B": lambda stage, unit: self._send(("DY", stage - 1, unit), stage, stage - 1),
            "RECV_B": lambda stage, unit: self._receive(("DY", stage, unit), stage + 1),
        }

    def send(self, tensor: Tensor, name: Name, source: int, to: int) -> Waits:
        """Starts sending a buffer of stage `source` to the ranks that have stage `to`, each its rows; the tensor must
        live until it is done."""
        mine, home = self.groups.here, self._home(to)
        return Together(
            tuple(
                started(
                    dist.isend(
                        tensor[route.out : route.out + route.rows],
                        route.target,
                        group=self._channel(mine.pipeline_rank, home, name, route),
                        tag=self._tag(name),
                    )
                )
                for route in self._routes(source, to)
                if route.source == mine.rank
            )
        )

    def receive(self, name: Name, source: int) -> tuple[Tensor, Waits]:
        """Starts receiving a buffer from the ranks that have stage `source`."""
        mine, home = self.groups.here, self._home(source)
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        parts = tuple(
            started(
                dist.irecv(
                    tensor[route.into : route.into + route.rows],
                    route.source,
                    group=self._channel(home, mine.pipeline_rank, name, route),
                    tag=self._tag(name),
                )
            )
            for route in self._routes(source, name[1])
            if route.target == mine.rank
        )
        return tensor, Together(parts)

    def _send(self, name: Name, source: int, to: int) -> None:
        tensor = self.buffers.take(name).contiguous()
        self.buffers.leave(name, tensor, self.send(tensor, name, source, to))

    def _receive(self, name: Name, source: int) -> None:
        tensor, work = self.receive(name, source)
        self.buffers.tensors[name] = tensor
        self.buffers.start(name, work, tensor.nbytes)

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

    def _tag(self, name: Name) -> int:
        """Every message of a step has a tag of its own, so that messages cannot be mistaken for each other."""
        buffer, stage, unit = name
        return (unit * len(self.plan_stage) + stage) * 2 + (buffer == "DY")
