"""What methods that change what is learnt take beside the plan's own step, in seconds and bytes.

`costs_of(plan)` adds up what they say (`methods.learnt.costs`). Leaves out the forward of a teacher, whose model the
caller has (`PricedStages.teacher_s`), and what the methods do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import add

from gnomon.graph import Graph
from gnomon.methods import used
from gnomon.methods.learnt.costs import MethodCosts
from gnomon.methods.learnt.trained_weights import is_compressed
from gnomon.plans import Plan
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.stage import StagePrice
from gnomon.prices.curves import curves_for
from gnomon.prices.stream import stream_seconds


@lru_cache(maxsize=256)
def costs_of(plan: Plan, graph: Graph) -> MethodCosts:
    """Adds up what all methods of a plan cost."""
    return reduce(add, (entry.costs(plan, graph) for entry in used(plan) if entry.costs is not None), MethodCosts())


def changed_elements(stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]]) -> int:
    """Numbers of the matrices among these layers that such methods are about."""
    repeated = {price for price, alike in stage.layers if alike[0].call.first is not None}
    return sum(
        times * int(price.sharded.local_elements[tensor.name])
        for price, times in layers
        if price in repeated
        for tensor in price.sharded.block.parameters
        if is_compressed(price.sharded.block, tensor.name)
    )


def weight_passes_s(costs: MethodCosts, stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]]) -> float:
    """Seconds of what is done to weights around an update of these layers."""
    size = costs.moved_bytes * changed_elements(stage, layers) + costs.update_bytes
    return float(stream_seconds(size, 0, stage.device, curves_for(stage.device))) if size else 0.0


def kept_bytes(costs: MethodCosts, stage: StagePrice) -> int:
    """Bytes that a rank keeps of a stage's matrices between steps, beside parameters and the optimizer's states."""
    return int(costs.kept_bytes * changed_elements(stage, [(layer, len(labels)) for layer, labels in stage.layers]))
