"""Memory and traffic of gradients that stream to an optimizer on the host (`lowering.streaming`).

`is_streamed(pricing)` says whether the Program does so; `gradient_sizes` are the bytes of its gradient buffers, and
`on_device` the share of the parameters whose update stays on the device. Leaves out seconds (`update`).
"""

from __future__ import annotations

import numpy as np

from gnomon.graph import DTYPE_BITS
from gnomon.plans import Plan
from gnomon.plans.stages import held_by_several
from gnomon.prediction.layer import parameter_elements
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.stage import StagePrice, width
from gnomon.prediction.step import Pricing
from gnomon.program import Program
from gnomon.sharding.parameters import shard_ranks
from gnomon.software import own

IN_FLIGHT = 2
"""Gradients of a layer that a device holds: one on its way, one that is made."""


def in_flight(stage: StagePrice) -> int:
    """One where a processor is device and host: it copies each before it makes the next."""
    return 1 if stage.device.kind == "cpu" else IN_FLIGHT


def is_streamed(pricing: Pricing) -> bool:
    """Whether gradients leave the device layer by layer: not where layers share parameters, whose gradients meet
    first."""
    if pricing.plan.optimizer.offload is None or not any(index >= 0 for _, index in pricing.blocks):
        return False
    if pricing.stack.name == own.NAME and own.by_layer(pricing.plan):  # buckets, which go down once they are reduced
        return False
    return not held_by_several(pricing.graph, [(layer,) for layer in pricing.graph.layers()])


def down_bytes(plan: Plan, *, reduced: bool) -> int:
    """Bytes of a gradient's element on its way to the host: as the backward makes it, or as ranks have added it up."""
    return DTYPE_BITS[plan.precision.grad if reduced else _narrower(plan)] // 8


def _narrower(plan: Plan) -> str:
    precision = plan.precision
    return min((precision.param, precision.grad), key=lambda dtype: DTYPE_BITS[dtype])


def gradient_sizes(
    pricing: Pricing, stage: StagePrice, layer: LayerPrice, reduced_bytes: int, *, is_saved: bool
) -> tuple[float, float]:
    """Bytes of (whole gradients, their shard) of a layer. reduced_bytes: of what its ranks reduce and scatter; 0 for a
    rank that has none to do it with. is_saved: its update is on the device."""
    precision, zero = pricing.plan.precision, pricing.plan.optimizer.zero
    offload = pricing.plan.optimizer.offload
    summed = offload is not None and offload.accumulate == "device"
    if reduced_bytes and not (zero == 1 and summed):
        whole = float(reduced_bytes if zero == 3 else in_flight(stage) * reduced_bytes)
        return whole, float(-(-reduced_bytes // shard_ranks(stage.mesh, experts=False)))
    elements = parameter_elements(layer)
    if is_saved or summed:
        return float(elements * width(precision.grad)), 0.0
    return float(in_flight(stage) * elements * down_bytes(pricing.plan, reduced=False)), 0.0


def blocks_on_device(program: Program) -> frozenset[int]:
    """The Program's stages whose update is on the device."""
    updates = [i for i, kind in enumerate(program.kinds) if kind.name == "OPT"]
    return frozenset(program.stage[np.isin(program.kind, updates)].tolist())


def on_device(pricing: Pricing, number: int, device_blocks: frozenset[int]) -> float:
    """Share of a stage's parameters whose update is on the device. kept: `blocks_on_device`."""
    stage, own, total = pricing.stages[number], 0, 0
    for block, (of, index) in enumerate(pricing.blocks):
        if of == number:
            elements = sum(map(parameter_elements, stage.order[index : pricing.span(block)[1]]))
            total += elements
            own += elements if block in device_blocks else 0
    return own / total if total else 0.0
