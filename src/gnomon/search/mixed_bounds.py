"""What a plan over unlike devices takes at least, in time and memory, from prices of single layers.

`LayerTables.of` prices every layer once for a kind of device, its tensor-parallel ranks and sequences; `least_step_s`
and `stage_bytes` add them up for stages. Each bound has its proof in its docstring; none decides. Leaves out messages,
reductions, updates and launches, which only make a step longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gnomon.graph import BF16, Graph, Setting, graph_work
from gnomon.hardware import Cluster
from gnomon.hardware.kinds import Kind
from gnomon.plans import Mesh, Plan, Saved, Stack, Stage, Workload
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.predict import settle
from gnomon.prediction.stage import StagePrice, stage_prices, width
from gnomon.prediction.step import Pricing
from gnomon.prices.allocator import workspace_bytes
from gnomon.search.space import Recompute
from gnomon.sharding.homes import routed_tensors
from gnomon.sharding.parameters import STATE_TENSORS

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """Sums over the graph's layers before each one, shape (layers + 1), on one kind of device."""

    forward: Doubles
    """Seconds."""
    back: Doubles
    """Seconds of a backward that is one action."""
    drain: Doubles
    """Seconds of its input gradients alone."""
    kept: Doubles
    """Bytes held from forward to backward."""
    dense: Doubles
    """Parameter elements on a rank, each where it is first held."""
    routed: Doubles
    """The same of routed experts."""
    least_layer_s: float
    """Seconds of the fastest of the layers that a pipeline divides, forward and backward."""


class LayerTables:
    """Tables by kind of device, tensor-parallel ranks, sequences of a worker and layout; each is made once."""

    def __init__(
        self, graph: Graph, cluster: Cluster, workload: Workload, stack: Stack, base: Plan, kinds: Sequence[Kind]
    ) -> None:
        self.graph, self.cluster, self.base, self.kinds = graph, cluster, base, kinds
        self.kernels, _, self.stack = settle(stack)
        self.sizes = {"seq": workload.sequence_lengths()[0], **dict(workload.sizes)}
        layers = graph.layers()
        self.counted = [i for i, layer in enumerate(layers) if layer.call.first is not None] or list(range(len(layers)))
        self.num_layers = len(layers)
        self.workspace = [workspace_bytes(kind.node.device, self.stack) for kind in kinds]
        self._tables: dict[tuple[int, int, int, bool, Recompute, int], LayerTable] = {}
        sizes = {"batch": workload.batch_size, **self.sizes}
        work = graph_work(graph, self.kernels, Setting(sizes=sizes, dtypes=BF16, causal_flops="half"))
        self.least_flops = float(work.total.matmul_flops)
        """Of all products of a step, none computed twice."""

    def of(
        self, kind: int, tp: int, batch: int, sequence_parallel: bool, recompute: Recompute, cp: int = 1
    ) -> LayerTable:
        """batch: sequences of a microbatch on one worker."""
        key = kind, tp, batch, sequence_parallel and tp > 1, recompute, cp
        if key not in self._tables:
            self._tables[key] = self._made(*key)
        return self._tables[key]

    def _made(
        self, kind: int, tp: int, batch: int, sequence_parallel: bool, recompute: Recompute, cp: int
    ) -> LayerTable:
        plan = replace(
            self.base,
            mesh=Mesh(),
            stages=(Stage(calls=("*",), mesh=Mesh(tp=tp, cp=cp)),),
            placement=self.kinds[kind].devices[: tp * cp],
            saved=self.base.saved if self.base.saved.rules else Saved(preset=recompute),
            layout=replace(self.base.layout, sequence_parallel=sequence_parallel),
            schedule=replace(self.base.schedule, micro_batch_size=None, num_microbatches=1),
        )
        (stage,) = stage_prices(
            plan,
            self.graph,
            self.cluster,
            0,
            sizes={**self.sizes, "batch": batch},
            kernels=self.kernels,
            attention_kernel=self.stack.attention_kernel,
            cublas=self.stack.cublas,
            dropout_add_fused=self.stack.dropout_add == "fused",
        )
        pricing = Pricing(plan, self.graph, self.cluster, self.stack, (stage,), ((0, -1),), 1)
        once: dict[tuple[str, int], float] = {}

        def each(action: str, price: LayerPrice) -> float:
            if (action, id(price)) not in once:
                once[action, id(price)] = pricing.layer_s(action, 0, price)
            return once[action, id(price)]

        seconds = {action: [each(action, price) for price in stage.order] for action in ("F", "B", "I")}
        both = [f + b for f, b in zip(seconds["F"], seconds["B"], strict=True)]
        dense, routed = _elements(stage)
        return LayerTable(
            forward=_sums(seconds["F"]),
            back=_sums(seconds["B"]),
            drain=_sums(seconds["I"]),
            kept=_sums(stage.kept_bytes),
            dense=_sums(dense),
            routed=_sums(routed),
            least_layer_s=min(both[i] for i in self.counted),
        )

    def edges(self, layers: Sequence[int]) -> tuple[int, ...]:
        """First layer of the graph in each stage, and their number at the end; layers: counted ones of each stage."""
        starts = [self.counted[first] for first in accumulate(layers[:-1])]
        return (0, *starts, self.num_layers)


def _sums(values: Sequence[float]) -> Doubles:
    return np.concatenate([[0.0], np.cumsum(np.array(values, float))])


def _elements(stage: StagePrice) -> tuple[list[int], list[int]]:
    """(dense, routed experts') elements that each layer is the first to hold."""
    seen: set[str] = set()
    dense, routed = [], []
    for layer, price in zip(stage.in_order, stage.order, strict=True):
        experts, found = routed_tensors(price.sharded.block), [0, 0]
        for tensor in price.sharded.block.parameters:
            name = layer.call.parameter_name(tensor.name, layer.index)
            if name not in seen:
                seen.add(name)
                found[tensor.name in experts] += int(price.sharded.local_elements[tensor.name])
        dense.append(found[0])
        routed.append(found[1])
    return dense, routed


def least_step_s(
    forward: Sequence[float],
    back: Sequence[float],
    drain: Sequence[float],
    microbatches: int,
    *,
    split: bool,
    clip: bool,
) -> float:
    """Seconds of a step of a pipeline at least. All are of stages, in order.

    split: weight gradients are actions of their own; `drain` is the rest of a backward. Proof: a stage computes every
    microbatch forward and backward, one after the other. That is all where ranks need not meet. With clipping all meet
    once a step, in the norm's sum; then the first forward of a stage comes after one of every earlier stage, and after
    its last backward that microbatch still goes back through all of them before the next meeting. Where weight
    gradients wait, they may be the last of a stage: the way back then begins after its last input gradient.
    """
    most = ahead = behind = 0.0
    for f, b, d in zip(forward, back, drain, strict=True):
        if split:
            most = max(most, ahead + microbatches * (f + b), ahead + microbatches * (f + d) + behind)
        else:
            most = max(most, ahead + microbatches * (f + b) + behind)
        if clip:
            ahead += f
            behind += d if split else b
    return most


def in_flight(schedule: str, stage: int, pp: int, microbatches: int) -> int:
    """Microbatches that a stage holds at once, at least."""
    return microbatches if schedule == "gpipe" else min(pp - stage, microbatches)


def static_bytes(dense: float, routed: float, plan: Plan, zero: int, workers: int, tp: int, stack: Stack) -> float:
    """Bytes of parameters, gradients and states that are there all the time, at least: routed experts are divided over
    tensor-parallel ranks too. Gradients that come and go with the step are left out."""
    precision = plan.precision
    states = 0 if plan.optimizer.offload else STATE_TENSORS[plan.optimizer.kind] * width(precision.states)
    master = 0 if precision.master == "none" or plan.optimizer.offload else width(precision.master)
    grads = 0 if stack.bucketed is False else width(precision.grad)
    total = 0.0
    for elements, ways in ((dense, workers), (routed, workers * tp)):
        for size, first in ((width(precision.param), 3), (grads, 2), (master + states, 1)):
            total += elements * size / (ways if zero >= first else 1)
    return total
