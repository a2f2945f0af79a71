"""What methods that change weights or losses while a model trains take beside the plan's own step.

`costs_of(plan)` adds up what its methods say (`Method.costs`); from it follow bytes that stay beside a stage's states,
seconds beside its update, and seconds beside the forward and backward of a microbatch, the forward of a teacher among
them. Leaves out what the methods do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import add

from gnomon.methods import every
from gnomon.methods.method import Costs
from gnomon.methods.trained_weights import is_compressed
from gnomon.plans import Plan
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.stage import StagePrice
from gnomon.prices.curves import curves_for
from gnomon.prices.stream import stream_seconds


@lru_cache(maxsize=256)
def costs_of(plan: Plan) -> Costs:
    """Of all methods of a plan."""
    if not plan.schedule.passes:
        return Costs()
    return reduce(add, (entry.costs(plan) for entry in every() if entry.used(plan)), Costs())


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


def beside_update_s(stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]]) -> float:
    """Seconds of what is done to weights around an update of these layers."""
    moved = costs_of(stage.plan).moved_bytes
    if not moved:
        return 0.0
    return float(stream_seconds(moved * changed_elements(stage, layers), 0, stage.device, curves_for(stage.device)))


def kept_bytes(stage: StagePrice) -> int:
    """Bytes that a rank keeps of a stage's matrices between steps, beside parameters and the optimizer's states."""
    kept = costs_of(stage.plan).kept_bytes
    if not kept:
        return 0
    return int(kept * changed_elements(stage, [(layer, len(labels)) for layer, labels in stage.layers]))
