"""Kernels around those of a stage's layers: what a forward or backward launches besides the layers' own.

`around(kind, …)` returns their device seconds and launches: weight gradients added to their buffer, gathered parameters
copied into place, weights cast to eight bits, the loss computed again for metrics. `other_host_s(kind, …)`: what the
host does besides launches, for each gradient and for each expert. Leaves out the update (`update`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gnomon.graph import DTYPE_BITS, numel, size_of
from gnomon.prediction.layer import parameter_elements
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.stage import StagePrice
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.curves import curves_for
from gnomon.prices.kernels import OpPrice
from gnomon.prices.optimizer import accumulate_seconds, gradient_seconds
from gnomon.prices.stream import stream_seconds
from gnomon.prices.tpu import devices_of
from gnomon.sharding.parameters import shard_ranks
from gnomon.software import Stack

NOTHING = OpPrice(device_s=0.0, kernels=0)


def around(
    kind: str, stage: StagePrice, layers: Iterable[tuple[LayerPrice, int]], stack: Stack, microbatches: int
) -> OpPrice:
    """Counts the kernels of an action of this kind (`F`, `B` …) over layers of a stage, each so many times."""
    zero3, total = stage.plan.optimizer.zero == 3, NOTHING
    for layer, times in layers:
        if kind in ("B", "W"):
            total = total + _accumulate(stage, layer, stack, microbatches) * times
        if zero3 and kind in ("F", "B"):
            total = total + _copy_out(stage, layer, "before_backward" if kind == "B" else "before_forward") * times
        if zero3 and (kind == "F" or (kind == "B" and layer.recompute.flops)):  # matmuls that run again cast again
            total = total + _weight_cast(stage, layer) * times
        if stack.loss.loss_metrics and kind == "F":
            total = total + _loss_again(stage, layer) * (times * stack.loss.loss_metrics)
    return total


def other_host_s(kind: str, stage: StagePrice, layers: Iterable[tuple[LayerPrice, int]], stack: Stack) -> float:
    """Host seconds of an action of this kind over layers of a stage besides launches: each weight of each expert that
    is gathered by itself when it runs, and what Python runs as each gradient is there."""
    zero, each, hook = stage.plan.optimizer.zero, stack.experts.expert_gather_s, stack.gradients.gradient_hook_s
    total = 0.0
    for layer, times in layers if stage.is_sharded and zero >= 2 else ():
        if each is not None and zero == 3 and stack.experts.moe_experts == "eager" and kind in ("F", "B", "R"):
            # A backward that recomputes goes over the experts twice.
            passes = 1 + (kind == "B" and bool(layer.recompute.flops))
            total += times * passes * _expert_gathers_s(stage, layer, each)
        if hook is not None and kind in ("B", "W"):
            total += times * hook * _tensors_as_modules(layer, stack)
    return total


def _expert_gathers_s(stage: StagePrice, layer: LayerPrice, each_s: float) -> float:
    """Seconds of one pass over a layer's experts, whose weights are gathered one by one; the host waits for each."""
    block, total = layer.sharded.block, 0.0
    for name, experts, size in _expert_weights(layer):
        link = stage.links["edp"]
        width = layer.sharded.dtypes.bits(block.tensor(name).dtype) / 8
        total += experts * (each_s + float(collective_seconds("all_gather", size / experts * width, link)))
    return total


def _expert_weights(layer: LayerPrice) -> tuple[tuple[str, int, float], ...]:
    """(weight, experts of a rank, elements of all of them) of the products of experts, adapters' among them."""
    block, found = layer.sharded.block, []
    for op in block.ops:
        if op.does == "multiplies rows":
            dims = block.tensor(op.inputs[1]).dims
            sizes = layer.sharded.sizes(op.path)
            found.append((op.inputs[1], int(size_of(dims[0], sizes)), float(numel(dims, sizes))))
    return tuple(found)


def _tensors_as_modules(layer: LayerPrice, stack: Stack) -> int:
    """Trained parameters of a layer, each expert's by itself where experts are modules."""
    trained = {tensor.name for tensor in layer.sharded.block.parameters}
    if stack.experts.moe_experts != "eager":
        return len(trained)
    # Each weight of experts is in `trained` once already.
    return len(trained) + sum(experts - 1 for name, experts, _ in _expert_weights(layer) if name in trained)


def _weight_cast(stage: StagePrice, layer: LayerPrice) -> OpPrice:
    """Gathered weights cast to eight bits; where they are gathered in eight bits, each rank casts its part."""
    fp8, cast = stage.plan.precision.fp8, layer.weight_cast
    if fp8 is not None and fp8.gather:
        return replace(cast, device_s=cast.device_s / shard_ranks(stage.mesh, experts=False))
    return replace(cast, device_s=cast.device_s * devices_of(stage.device))


def _loss_again(stage: StagePrice, layer: LayerPrice) -> OpPrice:
    """The layer's loss op by op: logits cast to fp32, their log-softmax, and what it says of the labels, which is
    little."""
    total, device, curves = NOTHING, stage.device, curves_for(stage.device)
    for op in layer.sharded.block.ops:
        if op.does == "compares labels":
            elements = float(layer.sharded.local_elements[op.inputs[0]])
            narrow = elements * DTYPE_BITS[stage.plan.precision.compute] / 8
            seconds = stream_seconds(narrow, 4 * elements, device, curves, kernels=1)
            seconds += stream_seconds(4 * elements, 4 * elements, device, curves, kind="reduce", kernels=1)
            total = total + OpPrice(device_s=float(seconds), kernels=3)
    return total


def _accumulate(stage: StagePrice, layer: LayerPrice, stack: Stack, microbatches: int) -> OpPrice:
    """Weight gradients added to their buffer, or under ZeRO 2 and 3 copied to where they are reduced."""
    precision, device, optimizer = stage.plan.precision, stage.device, stage.plan.optimizer
    elements, tensors = parameter_elements(layer), len(layer.sharded.block.parameters)
    if not elements:
        return NOTHING
    to_reduce = optimizer.zero >= 2 and stage.is_sharded
    own = gradient_seconds(elements, precision, device, begins=1.0 if to_reduce else 1 / microbatches)
    if own is not None:
        return own
    if to_reduce:
        elements = elements * devices_of(device)
        moved = (elements * (DTYPE_BITS[precision.compute] // 8), elements * (DTYPE_BITS[precision.reduce] // 8))
        return OpPrice(device_s=float(stream_seconds(*moved, device, curves_for(device), kernels=1)), kernels=1)
    if precision.grad == precision.compute and microbatches == 1:
        return NOTHING  # the matmul writes where the gradient stays
    fused = bool(stack.gradients.grad_accumulation_fused)
    added = accumulate_seconds(elements, precision, device, curves_for(device), fused=fused, tensors=tensors)
    # In a buffer of the compute dtype the first microbatch's matmul writes the gradient, and only the others add to it.
    share = 1.0 if precision.grad != precision.compute else (microbatches - 1) / microbatches
    return OpPrice(device_s=float(added.device_s) * share, kernels=round(added.kernels * share))


def _copy_out(stage: StagePrice, layer: LayerPrice, phase: str) -> OpPrice:
    """Gathered parameters copied into place."""
    size = sum(c.bytes for c in stage.collectives(layer) if c.when == phase)
    if not size:
        return NOTHING
    size = size * devices_of(stage.device)
    return OpPrice(device_s=float(stream_seconds(size, size, stage.device, curves_for(stage.device))), kernels=1)
