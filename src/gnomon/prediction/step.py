"""One step of a plan: its Program with a duration for every price key and a size for every buffer.

`step(plan, graph, cluster, …)` lowers the plan, prices every stage and returns what the simulator plays. A stage's
forward lasts as long as its kernels and the collectives they wait for, or as its launches if the host is slower.
Leaves out: the clock (room `simulate`) and what a person reads (`predict`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.graph import DTYPE_BITS, Graph
from gnomon.hardware import Cluster
from gnomon.plans import Plan, Stack, Workload, shared_parameters, transfers
from gnomon.prediction.layer import LayerPrice, Phase, parameter_elements
from gnomon.prediction.stage import GROUPS, StagePrice
from gnomon.prices.collectives import collective_seconds, p2p_seconds
from gnomon.prices.curves import curves_for
from gnomon.prices.host import host_cost
from gnomon.prices.links import AxisLink, axis_link
from gnomon.prices.optimizer import optimizer_seconds
from gnomon.prices.stream import stream_seconds
from gnomon.program import Key, Program
from gnomon.sharding import ParameterCollective
from gnomon.simulate import Durations
from gnomon.units import quantise

TIED = "embedding"
"""Price name of the all-reduce of tied parameters (`schedules.gradients`)."""

HOST_ADAM_S = 0.7e-9
"""Seconds a parameter of a vectorised Adam on all cores of a server: 8.2 s for 11.6 billion (DeepSpeed's figure)."""

FREE_KINDS = frozenset({"RECV_F", "RECV_B", "RECV_SKIP", "RECV_SKIP_GRAD", "RESHARD", "LOAD"})
"""Actions that only mark a moment: a receive ends when its send does."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A Program and its prices."""

    program: Program
    durations: Durations
    sizes: Mapping[str, float]
    stages: tuple[StagePrice, ...]
    blocks: tuple[tuple[int, int], ...]
    """(stage, layer in it) of each of the Program's stages when those are layers; (stage, -1) when whole stages."""


class Pricing:
    """Seconds of every action of a Program under one plan."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        cluster: Cluster,
        stack: Stack,
        stages: tuple[StagePrice, ...],
        blocks: tuple[tuple[int, int], ...],
    ) -> None:
        self.plan, self.graph, self.cluster, self.stack = plan, graph, cluster, stack
        self.stages, self.blocks = stages, blocks
        self.sent = {(t.source, t.target): t.tensors for t in transfers(plan, graph)}
        self.launch_s = [host_cost(stack, stage.device).per_kernel_s for stage in stages]
        self._memo: dict[tuple[str, int, str], float] = {}

    def durations(self, program: Program) -> Durations:
        """Seconds of each price key, on the grid."""
        return Durations(busy=quantise(np.array([self.seconds(key) for key in program.keys], float)))

    def seconds(self, key: Key) -> float:
        """Seconds that an action holds its stream."""
        at = (key.kind, key.stage, key.name)
        if at not in self._memo:
            self._memo[at] = self._seconds(key)
        return self._memo[at]

    def _seconds(self, key: Key) -> float:
        kind, stage = key.kind, key.stage
        if "&" in key.name:
            return sum(self._compute(part, stage) for part in key.name.split("&"))
        if kind in FREE_KINDS:
            return 0.0
        if kind in ("F", "C", "R", "B", "I", "W"):
            return self._compute(kind, stage)
        if kind in ("SEND_F", "SEND_B"):
            here = self.blocks[stage][0]
            other = here + (1 if kind == "SEND_F" else -1)
            return self._send(min(here, other), max(here, other))
        if kind in ("SEND_SKIP", "SEND_SKIP_GRAD"):
            return self._skip(self.blocks[stage][0], forward=kind == "SEND_SKIP")
        if key.name == TIED:
            return self._tied(self.blocks[stage][0])
        if kind in ("AR", "REDUCE_GRAD", "UNSHARD"):
            return self._parameters(kind, stage)
        if kind == "OPT":
            return self._update(stage)
        if kind == "NORM":
            return self._norm(self.blocks[stage][0])
        if kind in ("D2H", "H2D", "HOST_OPT"):
            return self._on_host(kind, stage)
        raise UnpricedError(f"action {key.label} has no price; add a rule for {kind} to gnomon.prediction.step")

    def _layers(self, block: int) -> tuple[StagePrice, list[tuple[LayerPrice, int]]]:
        """The stage and the (price, times) of the layers behind one of the Program's stages."""
        stage, index = self.blocks[block]
        price = self.stages[stage]
        if index >= 0:
            return price, [(price.order[index], 1)]
        return price, [(layer, len(labels)) for layer, labels in price.layers]

    def phase(self, name: str, block: int) -> Phase:
        """A phase of one of the Program's stages."""
        total = Phase()
        for layer, times in self._layers(block)[1]:
            total = total + getattr(layer, name) * times
        return total

    def _compute(self, kind: str, block: int) -> float:
        names = {
            "F": ("forward",),
            "C": ("forward",),
            "R": ("recompute",),
            "B": ("recompute", "input_grad", "weight_grad"),
            "I": ("recompute", "input_grad"),
            "W": ("weight_grad",),
        }[kind]
        launch = self.launch_s[self.blocks[block][0]]
        phases = [self.phase(name, block) for name in names]
        return max(sum(p.device_s for p in phases), launch * sum(p.kernels for p in phases))

    def _send(self, source: int, target: int) -> float:
        """Wire time of what one stage sends another for a microbatch (its gradient takes as long)."""
        if (source, target) not in self.sent:
            raise UnpricedError(
                f"stage {source} sends to stage {target}, but nothing travels between them in the graph"
            )
        devices = self.plan.device_of
        ranks = zip(self.stages[source].ranks, self.stages[target].ranks, strict=False)
        ends = np.array([(devices[a], devices[b]) for a, b in ranks if devices[a] != devices[b]]).reshape(-1, 2)
        return (
            float(p2p_seconds(self.message_bytes((source, target)), axis_link(self.cluster, ends)))
            if len(ends)
            else 0.0
        )

    def _skip(self, stage: int, *, forward: bool) -> float:
        """The longest message of a stage to (or its gradient from) one that is not its neighbour."""
        mine = [pair for pair in self.sent if pair[0 if forward else 1] == stage and pair[1] != pair[0] + 1]
        return max(self._send(*pair) for pair in mine)

    def _tied(self, stage: int) -> float:
        """All-reduce of the gradient of a parameter that other stages hold too."""
        width = DTYPE_BITS[self.plan.precision.reduce] // 8
        total = 0.0
        for name, holders in shared_parameters(self.plan, self.graph).items():
            if stage in holders:
                elements = self._local_elements(stage, name)
                ends = np.array([[self.plan.device_of[self.stages[s].ranks[0]] for s in holders]])
                if len(set(ends[0].tolist())) > 1:
                    total += float(collective_seconds("all_reduce", elements * width, axis_link(self.cluster, ends)))
        return total

    def _local_elements(self, stage: int, name: str) -> int:
        for price, layers in self.stages[stage].layers:
            for layer in layers:
                for tensor in price.sharded.block.parameters:
                    if layer.call.parameter_name(tensor.name, layer.index) == name:
                        return int(price.sharded.local_elements[tensor.name])
        raise UnpricedError(f"stage {stage} does not hold parameter {name!r}")

    def _norm(self, stage: int) -> float:
        """Reading this rank's gradients, and an all-reduce of one number over all ranks."""
        price = self.stages[stage]
        size = price.updated_elements() * (DTYPE_BITS[self.plan.precision.grad] // 8)
        own = float(stream_seconds(size, 0, price.device, curves_for(price.device), kind="reduce"))
        devices = np.unique(self.plan.device_of)
        if len(devices) < 2:
            return own
        return own + float(collective_seconds("all_reduce", 8, axis_link(self.cluster, devices[None, :])))

    def _on_host(self, kind: str, block: int) -> float:
        """Copies over the host link, and the update on the host's cores."""
        stage, layers = self._layers(block)
        elements = sum(n * parameter_elements(layer) for layer, n in layers)
        share = stage.updated_elements() / max(sum(stage.elements), 1)
        node = next(node for node in self.cluster.nodes if node.device.name == stage.device.name)
        if kind == "HOST_OPT":
            return elements * share * HOST_ADAM_S
        dtype = self.plan.precision.grad if kind == "D2H" else self.plan.precision.param
        rate = node.host.bytes_per_s / node.devices_per_host_link
        return node.host.latency_s + elements * share * (DTYPE_BITS[dtype] // 8) / rate

    def message_bytes(self, pair: tuple[int, int]) -> int:
        """Bytes that one rank of the source sends a rank of the target for one microbatch."""
        source = self.stages[pair[0]]
        by_label = {layer.label: price for price, layers in source.layers for layer in layers}
        total = 0
        for label, tensor in self.sent[pair]:
            maker = by_label.get(label)
            if maker is None:  # passes through: it lies as its maker made it
                maker = next(
                    price
                    for stage in self.stages
                    for price, layers in stage.layers
                    if any(layer.label == label for layer in layers)
                )
            total += int(maker.sharded.local_bytes[tensor])
        return total

    def _parameters(self, kind: str, block: int) -> float:
        stage, layers = self._layers(block)
        wanted = {
            "AR": ("all_reduce", ("after_backward",)),
            "REDUCE_GRAD": ("reduce_scatter", ("after_backward",)),
            "UNSHARD": ("all_gather", ("before_forward", "after_step")),
        }[kind]
        groups: dict[tuple[str, ...], list[tuple[ParameterCollective, int]]] = {}
        for layer, times in layers:
            for found in stage.collectives(layer):
                if found.kind == wanted[0] and found.when in wanted[1]:
                    groups.setdefault(found.axes, []).append((found, times))
        return sum(
            float(collective_seconds(wanted[0], sum(c.bytes * n for c, n in members), self._link(stage, axes)))
            for axes, members in groups.items()
        )

    def _link(self, stage: StagePrice, axes: tuple[str, ...]) -> AxisLink:
        name = "+".join(axes)
        if name not in stage.links:
            raise UnpricedError(f"no link for groups over {name} of stage {stage.stage}; known are {', '.join(GROUPS)}")
        return stage.links[name]

    def _update(self, block: int) -> float:
        stage, layers = self._layers(block)
        whole = self.blocks[block][1] < 0
        share = 1.0
        if not whole:
            mine = sum(len(p.sharded.block.parameters) for p, _ in layers)
            share = mine / max(stage.num_tensors, 1)
            elements = sum(parameter_elements(price) * times for price, times in layers)
            total = sum(stage.elements)
            updated = stage.updated_elements() * elements // max(total, 1)
        else:
            updated = stage.updated_elements()
        price = optimizer_seconds(
            max(updated, 1),
            self.plan.optimizer,
            self.plan.precision,
            stage.device,
            curves_for(stage.device),
            self.stack,
            tensors=max(1, round(stage.num_tensors * share)),
        )
        before = 0.0
        for layer, times in layers:
            for found in stage.collectives(layer):
                if found.when == "before_step":
                    before += times * float(collective_seconds(found.kind, found.bytes, stage.links["tp"]))
        return max(float(price.device_s), price.kernels * self.launch_s[stage.stage]) + before


def local_sizes(workload: Workload, microbatch: int, data_ranks: int) -> dict[str, int]:
    """Sizes of the graph's open dims on one data-parallel rank, for sequences of one length."""
    lengths = set(workload.sequence_lengths())
    if len(lengths) > 1:
        raise UnpricedError(
            f"prediction prices batches of one sequence length, but this workload has {len(lengths)} lengths from "
            f"{min(lengths)} to {max(lengths)}; give seq_len"
        )
    return {"batch": -(-microbatch // data_ranks), "seq": lengths.pop(), **dict(workload.sizes)}
