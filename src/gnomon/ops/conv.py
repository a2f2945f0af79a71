"""Convolutions and what changes the size of images: `conv2d`, `upsample`, `pool`, `patchify`.

Images are (batch, channels, height, width); stride follows from the sizes. Leaves out the short convolution of a
Mamba-2 mixer, which is part of `state_space`.
"""

from __future__ import annotations

from collections.abc import Collection

from gnomon.ops.curve import Product, once
from gnomon.ops.op import Op, OpKind, Problem, Tensors
from gnomon.ops.rules import cannot_write, multiplied, multiplied_back, per_element, per_element_back, saves_operands


def _conv_dims(op: Op, block: Tensors) -> Problem:
    image, weight = block.tensor(op.inputs[0]), block.tensor(op.inputs[1])
    fits = op.contracts[0] in [d.name for d in image.dims] and set(op.contracts) <= {d.name for d in weight.dims}
    return None if fits else cannot_write(op, block)


def _saves_indices(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Where the maxima were, of a pool that says so."""
    return op.outputs[1:]


CONV2D = OpKind(
    name="conv2d",
    signature="image, weight (out, in, height, width), bias -> image",
    contracts=True,
    dims=_conv_dims,
    memory="own",
    saves=saves_operands,
    forward=multiplied,
    backward=multiplied_back,
    steps="one kernel",
    fused_by="every stack",
    weight_grad="apart",
    ungraded=(),
    decay=(1,),
    price=Product("pixels", narrow=False),
    grad_price=Product("pixels", narrow=False),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    does="convolves",
    runs="function",
)

UPSAMPLE = OpKind(
    name="upsample",
    signature="image -> larger image, each pixel repeated",
    contracts=False,
    dims="open",
    memory="own",
    saves="nothing",
    forward=per_element(0),
    backward=per_element_back(1),
    steps="one kernel",
    fused_by="every stack",
    weight_grad="together",
    ungraded=(),
    decay="none",
    price=once(),
    grad_price=once(),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    does="computes",
    runs="function",
)

POOL = OpKind(
    name="pool",
    signature="x -> x over fewer positions; fn: max | mean | first",
    contracts=False,
    dims="open",
    memory="own",
    saves=_saves_indices,
    forward=per_element(1),
    backward=per_element_back(1),
    steps="one kernel",
    fused_by="every stack",
    weight_grad="together",
    ungraded=(),
    decay="none",
    price=once("reduce"),
    grad_price=once("reduce"),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    does="computes",
    runs="function",
)

PATCHIFY = OpKind(
    name="patchify",
    signature="image -> patches, or patches -> image",
    contracts=False,
    dims="open",
    memory="own",
    saves="nothing",
    forward=per_element(0),
    backward=per_element_back(0),
    steps="one kernel",
    fused_by="every stack",
    weight_grad="together",
    ungraded=(),
    decay="none",
    price=once("reduce"),
    grad_price=once("reduce"),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    does="computes",
    runs="function",
)

KINDS = (CONV2D, UPSAMPLE, POOL, PATCHIFY)
