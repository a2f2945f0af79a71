"""Strategies that differ from layer to layer, on heterogeneous devices (HeteroG): what a step under one takes.

A `LayerChoice` says, of one layer, which devices compute it, how many sequences each takes, and how its gradient is
added up (ring, one device that gathers and sends back, or parts of it everywhere as under ZeRO 3). `LayerPlay.step_s`
plays a step: one queue a device, one for each way in and out of a node (each pair inside one), one for all collectives.
Sequences that the next layer computes elsewhere are sent there. Prices are those of predictions: `LayerTables`, links,
collectives, the update. Leaves out clipping, contention, tensor parallelism, and which ones are tried (`heterog`).
Source: Yi et al. 2020 (HeteroG, CoNEXT), whose simulator has these queues; there groups of operations choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.prediction.stage import width
from gnomon.prices.collectives import CollectiveKind, collective_seconds
from gnomon.prices.links import AxisLink, axis_link
from gnomon.search.mixed.bounds import LayerTables, static_bytes
from gnomon.search.mixed.space import LARGEST_SHARE, MixedBlock, Shape

Sync = Literal["ring", "gathered", "sharded"]
"""How a gradient is added up: an all-reduce, one device that sums and sends parameters back (a parameter server), or
reduce-scatter with parameters gathered for forward and backward."""


class LayerChoice(NamedTuple):
    """The strategy of one layer."""

    devices: tuple[int, ...]
    """Device indices of the cluster, ascending."""
    shares: tuple[int, ...]
    """Sequences of a microbatch that each takes, in order; 1 at least."""
    sync: Sync = "ring"


Strategy = tuple[LayerChoice, ...]
"""One choice for every layer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCosts:
    """Prices of every layer on every kind of device."""

    tables: LayerTables
    """Seconds and bytes of each layer."""
    sequences: int
    """Sequences of a microbatch."""
    microbatches: int
    """Microbatches of a step."""
    recompute: str
    """What becomes of activations between forward and backward."""
    crossing_bytes: tuple[float, ...]
    """Bytes of one sequence's output of each layer."""

    @cached_property
    def kind_of(self) -> Mapping[int, int]:
        """Kind of each device."""
        return {device: k for k, kind in enumerate(self.tables.kinds) for device in kind.devices}

    @cached_property
    def node_of(self) -> Mapping[int, int]:
        """Node of each device."""
        nodes = [node for group in self.tables.cluster.groups for node in [group.node.count] * group.count]
        return dict(enumerate(number for number, count in enumerate(nodes) for _ in range(count)))

    @cached_property
    def layers(self) -> tuple[tuple[NDArray[np.float64], ...], ...]:
        """[kinds] (forward seconds, backward seconds, bytes kept), each [layers, sequences + 1]; elements come last."""
        return tuple(self._of_kind(kind) for kind in range(len(self.tables.kinds)))

    def _of_kind(self, kind: int) -> tuple[NDArray[np.float64], ...]:
        block = MixedBlock(Shape("replicas", (kind,), (1,), 1, 1, (1,), 1, False), 1, False, "none", "ring")
        table = self.tables.every(block, 0, self.recompute)
        column = self.tables.column
        seconds_of_kind = []
        for sums in (table.forward, table.back, table.kept_bytes):
            each, seconds = np.diff(sums, axis=0), np.zeros((self.tables.num_layers, self.sequences + 1))
            # seconds[:, n] = a whole part of at most LARGEST_SHARE and the rest, one after the other.
            for n in range(1, self.sequences + 1):  # larger shares go in parts, as those of the mixed search
                part = min(n, LARGEST_SHARE)
                seconds[:, n] = each[:, column[part]] + seconds[:, n - part]
            seconds_of_kind.append(seconds)
        return *seconds_of_kind, np.diff(table.dense + table.routed)

    @cached_property
    def elements(self) -> NDArray[np.float64]:
        """[layers] parameters, each where it is first held."""
        return self.layers[0][3]

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """Finds for each layer the first that holds one of its parameters: what shares some has one strategy."""
        seen, first = dict[str, int](), list[int]()
        graph = self.tables.graph
        # The first layer that holds any parameter of this one: equal numbers mean one strategy.
        for number, layer in enumerate(graph.layers()):
            names = [layer.call.parameter_name(t.name, layer.index) for t in graph.block(layer.call.block).parameters]
            first.append(min([number, *(first[seen[name]] for name in names if name in seen)]))
            for name in names:
                seen.setdefault(name, number)
        return tuple(first)

    def speed(self, device: int, sequences: int) -> float:
        """Sequences a second, forward and backward, of so many at once."""
        forward, back, *_ = self.layers[self.kind_of[device]]
        return sequences / float(forward[:, sequences].sum() + back[:, sequences].sum())


class LayerPlay:
    """Plays steps under strategies, on one cluster."""

    def __init__(self, costs: LayerCosts, limits: Sequence[int]) -> None:
        """Takes the limits, bytes that a device of each kind may hold. PlanError for a graph that is no chain."""
        if not costs.tables.chain:
            raise PlanError(f"{costs.tables.graph.name} is no chain of layers; per-layer strategies are of chains")
        self.costs, self.limits = costs, limits
        self._links: dict[tuple[int, ...], AxisLink] = {}
        self._known: dict[tuple[str, float, tuple[int, ...]], float] = {}

    def step_s(self, strategy: Strategy) -> float:
        """Seconds of a step from rest; infinite where a device would hold too much."""
        if not self.fits(strategy):
            return float("inf")
        return _Step(self, strategy).seconds()

    def fits(self, strategy: Strategy) -> bool:
        """Whether parameters, gradients, states and what forwards keep fit each device."""
        costs, base, held_bytes = self.costs, self.costs.tables.base, dict.fromkeys(self.costs.kind_of, 0.0)
        for number, choice in enumerate(strategy):
            # "sharded" is ZeRO 3 over the layer's devices: parameters, gradients and states are divided by their
            # number.
            ways = len(choice.devices) if choice.sync == "sharded" else 1
            own = static_bytes(costs.elements[number], 0.0, base, 3 if ways > 1 else 0, (ways, 1), costs.tables.stack)
            for device, share in zip(choice.devices, choice.shares, strict=True):
                held_bytes[device] += float(own) + float(costs.layers[costs.kind_of[device]][2][number, share])
        return all(nbytes <= self.limits[costs.kind_of[device]] for device, nbytes in held_bytes.items())

    def wire_s(self, kind: CollectiveKind, nbytes: float, devices: tuple[int, ...]) -> float:
        """Seconds of a collective, or of a message between two."""
        if len(devices) < 2 or not nbytes:
            return 0.0
        key = kind, nbytes, devices
        if key not in self._known:
            if devices not in self._links:
                self._links[devices] = axis_link(self.costs.tables.cluster, np.array([devices]))
            link = self._links[devices]
            slower = self.costs.tables.link_factor(link)
            self._known[key] = float(collective_seconds(kind, nbytes, link)) * slower
        return self._known[key]

    def route(self, source: int, target: int) -> tuple[tuple[str, int, int], ...]:
        """Queues that a message waits for."""
        a, b = self.costs.node_of[source], self.costs.node_of[target]
        # Inside a node every pair has its own link. Between nodes a message waits for the sender's way out and the
        # receiver's way in, which all devices of a node share.
        return (("inside", source, target),) if a == b else (("out", a, -1), ("in", b, -1))


class _Step:
    """The state of one step while it is played: clocks of devices and queues, in seconds."""

    def __init__(self, play: LayerPlay, strategy: Strategy) -> None:
        self.play, self.costs, self.strategy = play, play.costs, strategy
        self.clock = dict.fromkeys(self.costs.kind_of, 0.0)
        self.busy: dict[tuple[str, int, int], float] = {}
        self.collectives = 0.0
        precision = self.costs.tables.base.precision
        self.param_width, self.grad_width = width(precision.param), width(precision.reduce)

    def seconds(self) -> float:
        """Plays the step and returns the end of the last update, in seconds."""
        reduced: dict[int, list[tuple[float, LayerChoice]]] = {}
        # Only the last microbatch adds gradients up, unless parameters are sharded: those add up after each.
        for unit in range(self.costs.microbatches):
            ends = self._forward()
            reduced = self._backward(ends, last=unit == self.costs.microbatches - 1)
        return self._updates(reduced)

    def _forward(self) -> dict[int, float]:
        """Returns when each device of the last layer has its forward."""
        ends: dict[int, float] = {}
        for number in range(len(self.strategy)):
            ends = self._layer(number, number - 1, ends, 0)
        return ends

    def _backward(self, ends: dict[int, float], *, last: bool) -> dict[int, list[tuple[float, LayerChoice]]]:
        """Returns when gradients of each layer are added up, with the layer's strategy."""
        reduced: dict[int, list[tuple[float, LayerChoice]]] = {}
        for number in reversed(range(len(self.strategy))):
            after = number + 1 if number + 1 < len(self.strategy) else -1
            ends = self._layer(number, after, ends, 1)
            if last or self.strategy[number].sync == "sharded":
                reduced[number] = [(self._added_up(number, max(ends.values())), self.strategy[number])]
        return reduced

    def _layer(self, number: int, before: int, arrive: Mapping[int, float], way: int) -> dict[int, float]:
        """When each device has done a layer. before: the layer whose output (way 0) or gradient (way 1) it reads."""
        choice = self.strategy[number]
        ready = dict.fromkeys(choice.devices, 0.0)
        if before >= 0:
            # What crosses has the size of the earlier layer's output: forward it is `before`'s, backward its
            # gradient's, so the smaller number.
            size = self.costs.crossing_bytes[min(number, before)]
            for source, target, count in resharded(self.strategy[before], choice):
                there = arrive[source] if source == target else self._send(source, target, count * size, arrive[source])
                ready[target] = max(ready[target], there)
        # Parameters of a sharded layer are asked for at time 0, so the queue of collectives prefetches them in order.
        gathered = self._gather(number, choice) if choice.sync == "sharded" else 0.0
        ends = {}
        for device, share in zip(choice.devices, choice.shares, strict=True):
            seconds = float(self.costs.layers[self.costs.kind_of[device]][way][number, share])
            self.clock[device] = max(self.clock[device], ready[device], gathered) + seconds
            ends[device] = self.clock[device]
        return ends

    def _send(self, source: int, target: int, nbytes: float, ready: float) -> float:
        queues = self.play.route(source, target)
        begin = max(ready, *(self.busy.get(queue, 0.0) for queue in queues))
        end = begin + self.play.wire_s("send_recv", nbytes, (min(source, target), max(source, target)))
        self.busy.update(dict.fromkeys(queues, end))
        return end

    def _collective(self, kind: CollectiveKind, nbytes: float, devices: tuple[int, ...], ready: float) -> float:
        self.collectives = max(self.collectives, ready) + self.play.wire_s(kind, nbytes, devices)
        return self.collectives

    def _gather(self, number: int, choice: LayerChoice) -> float:
        """When a layer's parameters are there: asked for as soon as the queue is free."""
        return self._collective("all_gather", self.costs.elements[number] * self.param_width, choice.devices, 0.0)

    def _added_up(self, number: int, ready: float) -> float:
        """When a layer's gradient is added up on the devices that update it."""
        choice, nbytes = self.strategy[number], float(self.costs.elements[number] * self.grad_width)
        if len(choice.devices) == 1:
            return ready
        if choice.sync == "gathered":
            # Homes rotate over the devices, so that no device serves every layer.
            home = choice.devices[number % len(choice.devices)]
            return max(self._send(other, home, nbytes, ready) for other in choice.devices if other != home)
        kind: CollectiveKind = "all_reduce" if choice.sync == "ring" else "reduce_scatter"
        return self._collective(kind, nbytes, choice.devices, ready)

    def _updates(self, reduced: Mapping[int, list[tuple[float, LayerChoice]]]) -> float:
        """The end of the last update, and of sending back what one device updated for others."""
        held_elements, ready = dict.fromkeys(self.clock, 0.0), dict(self.clock)
        homes = list[tuple[int, int]]()
        for number, of_layer in reduced.items():
            for end, choice in of_layer:
                elements = float(self.costs.elements[number])
                own = choice.devices
                if choice.sync == "gathered" and len(own) > 1:
                    own = (own[number % len(own)],)
                    homes.append((number, own[0]))
                for device in own:
                    held_elements[device] += elements / (len(own) if choice.sync == "sharded" else 1)
                    ready[device] = max(ready[device], end)
        for device, elements in held_elements.items():
            ready[device] += float(self.costs.tables.update_s(self.costs.kind_of[device], elements, 1))
        back = [
            self._send(home, other, float(self.costs.elements[number] * self.param_width), ready[home])
            for number, home in homes
            for other in self.strategy[number].devices
            if other != home
        ]
        return max(*ready.values(), *back)


def resharded(before: LayerChoice, after: LayerChoice) -> list[tuple[int, int, int]]:
    """(from, to, sequences) of a microbatch whose sequences lie on devices in order, before and after."""
    out, left_share, right = list[tuple[int, int, int]](), list(before.shares), list(after.shares)
    # Two-pointer walk over the microbatch: both sides list sequences in the same order, so each piece is an overlap of
    # one holder before and one after.
    i = j = 0
    while i < len(left_share) and j < len(right):
        count = min(left_share[i], right[j])
        out.append((before.devices[i], after.devices[j], count))
        left_share[i] -= count
        right[j] -= count
        i, j = i + (not left_share[i]), j + (not right[j])
    return out
