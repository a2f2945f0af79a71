"""Memory that lives inside one action only: gradients inside a layer, what recomputation makes, an update's copies.

`temporaries` says how much during every row of a Program. Leaves out buffers between actions (`memory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.reduced_memory import first_backwards, gradient_bytes, made_each_step
from gnomon.prediction.stage import StagePrice, width
from gnomon.prediction.step import Pricing
from gnomon.prediction.update import inside_update
from gnomon.program import Program, unit_shapes

_NOTHING: Mapping[int, float] = MappingProxyType({})


def temporaries(program: Program, pricing: Pricing, by_row: Mapping[int, float] = _NOTHING) -> NDArray[np.float64]:
    """[rows] bytes alive only inside an action: gradients inside one layer, what recomputation makes again, and
    offloaded tensors on their way. by_row: rows of backwards -> bytes of gradients of parameters that count as there
    from their start, though there is room only once they have the first of them."""
    shapes, shape_of = unit_shapes(program.units)
    tables = np.array([_inside(program, pricing.of(shape)) for shape in shapes])
    largest = tables.max(axis=0)  # for actions of no unit, all shapes say the same
    inside: NDArray[np.float64] = np.where(
        program.unit < 0,
        largest[program.kind, program.stage],
        tables[shape_of[program.unit], program.kind, program.stage],
    )
    for row, nbytes in by_row.items():
        own = pricing.of(shapes[shape_of[program.unit[row]]])
        inside[row] = min(inside[row], _inside_backward(own, int(program.stage[row]), nbytes))
    for row in first_backwards(program) if made_each_step(pricing) else ():
        if pricing.blocks[block := int(program.stage[row])][1] < 0:
            inside[row], _ = _while_gradients_come(pricing.of(shapes[shape_of[program.unit[row]]]), block)
    return inside


def _inside(program: Program, pricing: Pricing) -> NDArray[np.float64]:
    """[kinds, stages] bytes alive only inside an action, for units of one shape."""
    table = np.zeros((len(program.kinds), program.num_stages))
    frees = bool(pricing.stack.gradients.split_backward_frees)
    for block in range(program.num_stages):
        unsaved, before, after = (
            _outputs(pricing, block),
            _inside_forward(pricing, block),
            _inside_backward(pricing, block),
        )
        between = _stage_gradient_bytes(pricing, block)
        update = _inside_update(pricing, block) if pricing.blocks[block][1] <= 0 else 0
        for k, kind in enumerate(program.kinds):
            # Input gradients alone: what weight gradients read stays, and gradients of the stage's sides are there.
            if kind.name == "I":
                gone = 0 if frees else _read_before(pricing, block)
                table[k, block] = _inside_backward(pricing, block, split=frees, gone=gone) + between[0]
            elif kind.name == "B":
                table[k, block] = after + sum(between)
            elif kind.name in ("F", "R"):
                table[k, block] = before
            elif kind.name in ("C", "FRC"):
                table[k, block] = unsaved
            elif kind.name == "OPT":
                table[k, block] = update + inside_update(*pricing.with_parts(block))
            elif (share := pricing.stages[pricing.blocks[block][0]].share) is not None:
                table[k, block] = share.inside(kind.name)
    return table


def _stage_gradient_bytes(pricing: Pricing, block: int) -> tuple[float, float]:
    """Bytes of the gradients that a stage (sends on, has received), during the backward of a layer that is neither
    their first nor their last: as they are there during that of the whole stage. In split backwards the second stay
    until weight gradients have read them."""
    number, index = pricing.blocks[block]
    if not pricing.rows_divide_stages:
        return 0.0, 0.0
    last, sent = pricing.span(block)[1] == len(pricing.stages[number].order), pricing.messages.sent
    pairs = ((number - 1, number), (number, number + 1))
    sizes = [float(pricing.messages.bytes_of(pair)) if pair in sent else 0.0 for pair in pairs]
    return 0.0 if index == 0 else sizes[0], 0.0 if last else sizes[1]


def _read_before(pricing: Pricing, block: int) -> int:
    """Bytes that layers of the stage keep whose input gradients are computed before a layer's. They stay until weight
    gradients have read them, and a row of the whole stage counts what is inside its layers against them."""
    if not pricing.rows_divide_stages:
        return 0
    stage, last = pricing.stages[pricing.blocks[block][0]], pricing.span(block)[1]
    return sum(stage.kept_bytes[last:])


def layers_behind(pricing: Pricing, block: int) -> list[tuple[LayerPrice, int]]:
    """(layer, bytes that it keeps) behind one of the Program's stages, in order."""
    number, index = pricing.blocks[block]
    stage = pricing.stages[number]
    pairs = list(zip(stage.order, stage.kept_bytes, strict=True))
    return pairs[slice(*pricing.span(block))] if index >= 0 else pairs


def _outputs(pricing: Pricing, block: int) -> int:
    # The output, and two copies of what is on its way to the host.
    return max(layer.output_bytes + 2 * layer.offloaded_bytes for layer, _ in layers_behind(pricing, block))


def _inside_forward(pricing: Pricing, block: int) -> int:
    """The worst layer, where all that the layers keep counts from the start: of captured layers, what is there during
    them and what those before keep, less that."""
    layers = layers_behind(pricing, block)
    if not any(layer.forward_bytes for layer, _ in layers):
        return _outputs(pricing, block)
    # A captured layer's peak counts all it holds; what it and others keep is counted elsewhere, so it is taken off.
    open_bytes, most, total, handed = 0, 0, sum(saved for _, saved in layers), 0
    for layer, saved in layers:
        inside = saved + layer.output_bytes
        if layer.forward_bytes:
            inside = layer.forward_bytes + saved - sum(one.bytes for one in layer.saved)  # what others keep counts once
            passing = layer.input_bytes - sum(one.bytes for one in layer.saved if one.is_input)
            inside -= max(min(passing, handed), 0)
        most = max(most, open_bytes + inside + 2 * layer.offloaded_bytes - total)
        open_bytes += saved
        handed = sum(one.bytes for one in layer.saved if one.tensor in layer.sharded.block.outputs)
    return most


def _inside_backward(
    pricing: Pricing, block: int, made_bytes: float = 0.0, *, split: bool = False, gone: int = 0
) -> float:
    """The worst layer, the last first: its gradients and what is recomputed for it (for its whole run of layers), less
    what the layers after it have let go. made_bytes: as `by_row` of `temporaries`. split: only input
    gradients, so that what weight gradients will read stays. gone: of layers after these, that have let go."""
    parts = layers_behind(pricing, block)
    again = sum(1 for layer, _ in parts if layer.remade_bytes)
    run = min(pricing.plan.saved.every, again)
    most = 0.0
    # Walking back from the last layer: `gone` is what later layers have let go of.
    for place, (layer, saved) in enumerate(reversed(parts)):
        remade_bytes = run * layer.remade_bytes + max(run - 1, 0) * layer.input_bytes if layer.remade_bytes else 0
        remade_bytes += _returned(pricing, layer)
        gradients: float = layer.transient_bytes
        if made_bytes and not place and layer.sharded.block.parameters:
            gradients = max(layer.early_bytes - made_bytes, layer.late_bytes)
        most = max(most, gradients + 2 * layer.offloaded_bytes + remade_bytes - gone)
        gone += saved - (layer.deferred_bytes if split else 0)
    return most


def unmade_gradients(program: Program, pricing: Pricing) -> dict[int, float]:
    """Row -> bytes of the gradients that come in it and are not there yet when most is alive, which `temporaries`
    leaves out of what is inside the row."""
    if not made_each_step(pricing):
        return {}
    shapes, shape_of = unit_shapes(program.units)
    rows = (row for row in first_backwards(program) if pricing.blocks[int(program.stage[row])][1] < 0)
    return {
        row: _while_gradients_come(pricing.of(shapes[shape_of[program.unit[row]]]), int(program.stage[row]))[1]
        for row in rows
    }


def _while_gradients_come(pricing: Pricing, block: int) -> tuple[float, float]:
    """(as `_inside_backward`, less the gradients of parameters that are not there yet at the worst moment; these) of a
    whole stage whose gradients all count from the start, and come layer by layer, the last first."""
    stage = pricing.stages[pricing.blocks[block][0]]
    parts = layers_behind(pricing, block)
    unmade = float(stage.static_bytes()["gradients"])
    run = min(pricing.plan.saved.every, sum(1 for layer, _ in parts if layer.remade_bytes))
    moments, gone = list[tuple[float, float]](), 0.0
    for index in range(len(parts) - 1, -1, -1):
        layer, saved_bytes = parts[index]
        again = run * layer.remade_bytes + max(run - 1, 0) * layer.input_bytes if layer.remade_bytes else 0
        again += _returned(pricing, layer) + 2 * layer.offloaded_bytes
        # Two moments of a layer: until the first gradient of its parameters is made, and from then on.
        moments.append((again - gone + layer.early_bytes - unmade, unmade))
        unmade = max(unmade - gradient_bytes(stage, index)[1], 0.0)
        moments.append((again - gone + layer.late_bytes - unmade, unmade))
        gone += saved_bytes
    return max(moments)


def _returned(pricing: Pricing, layer: LayerPrice) -> int:
    """Logits that the training loop, or the backward of a loss divided by vocabulary, holds besides what an unfused
    loss keeps of them, in fp32."""
    stack = pricing.stack
    if stack.loss.cross_entropy not in ("unfused", None):
        return 0
    held_bytes = 0
    if stack.loss.outputs_held:
        held_bytes += 4 if stack.loss.logits_dtype == "fp32" else width(pricing.plan.precision.compute)
    if stack.loss.divided_loss_copies and pricing.plan.mesh.tp > 1 and stack.launch.launch_mode != "compiled":
        held_bytes += 4 * (stack.loss.divided_loss_copies - 3)
    return sum(tensor.bytes for tensor in layer.saved if tensor.is_logits) * held_bytes // 4


def _inside_update(pricing: Pricing, block: int) -> int:
    """What the optimizer makes on its way: an fp32 copy of gradients that are narrower, and, where it is not one
    kernel, roots of second moments: of all parameters at once, or two for the largest at a time (DeepSpeed's partition
    is one parameter, under ZeRO 3 each part of it). DeepSpeed copies gradients together first, and under ZeRO 1 and 2
    lets them go once they are fp32."""
    stage, stack = pricing.stages[pricing.blocks[block][0]], pricing.stack
    precision, updated, zero = stage.plan.precision, stage.updated_elements(), pricing.plan.optimizer.zero
    if pricing.plan.optimizer.offload is not None:
        return 0
    parts = zero == 3 and stack.update.update_elements is not None
    if parts:
        updated = min(updated, stack.update.update_elements or 0)
    narrow = precision.master != "none" and width(precision.grad) < width(precision.master)
    size = updated * width(precision.master) if narrow else 0
    freed = (
        stage.static_bytes()["gradients"] if narrow and zero in (1, 2) and stack.update.update_frees_gradients else 0
    )
    joined = updated * width(precision.grad) if narrow and (parts or freed) else 0
    roots = 0
    if width(precision.states) < 2:  # one kernel widens, updates and rounds a block of moments
        pass
    elif stack.update.optimizer_step == "foreach":
        roots = updated * width(precision.states)
    elif stack.update.optimizer_step == "single":
        flat = parts or (zero in (1, 2) and stack.gradients.grad_buffers == "contiguous")
        roots = 2 * (updated if flat else min(updated, _largest_parameter(stage))) * width(precision.states)
    return size + max(joined, roots - freed)


def _largest_parameter(stage: StagePrice) -> int:
    return max(
        (
            int(price.sharded.local_elements[tensor.name])
            for price, _ in stage.held_layers
            for tensor in price.sharded.block.parameters
        ),
        default=0,
    )
