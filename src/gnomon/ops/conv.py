"""Convolutions and what changes the size of images: `conv2d`, `upsample`, `pool`, `patchify`.

Images are (batch, channels, height, width); stride follows from the sizes. Leaves out the short convolution of a
Mamba-2 mixer, which is part of `state_space`.
"""

from __future__ import annotations

from collections.abc import Collection

from gnomon.errors import PlanError
from gnomon.ops.curve import Product, once
from gnomon.ops.divided import BOTH, own_collective, with_inside
from gnomon.ops.op import Op, OpKind, Problem, Tensors
from gnomon.ops.rules import cannot_write, multiplied, multiplied_back, per_element, per_element_back, saves_operands
from gnomon.ops.strategy import Division, Strategy
from gnomon.tensors.names import base
from gnomon.tensors.tensor import Tensor


def _conv_dims(op: Op, block: Tensors) -> Problem:
    image, weight = block.tensor(op.inputs[0]), block.tensor(op.inputs[1])
    fits = op.contracts[0] in [d.name for d in image.dims] and set(op.contracts) <= {d.name for d in weight.dims}
    return None if fits else cannot_write(op, block)


def _saves_indices(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Where the maxima were, of a pool that says so."""
    return op.outputs[1:]


def _convolution(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Ranks that hold bands of an image send the rows at their edges to both neighbours: (kernel-1)/2 rows each way."""
    height = plain.inputs[0].dim_of("cp")
    if height is None:
        return (plain,)
    kernel = _kernel_height(op, setting)
    if kernel == 1:
        return (plain,)
    image = setting.block.tensor(op.inputs[0])
    row = Tensor(name=image.name, dims=tuple(d for d in image.dims if d.name != height), dtype=image.dtype)
    size = setting.scene.bytes(row, plain.inputs[0]) * ((kernel - 1) // 2)
    inside = tuple(own_collective(op, setting, "send_recv", "cp", size, p, op.inputs[0], steps=2) for p in BOTH)
    return (with_inside(plain, "halo", inside),)


def _kernel_height(op: Op, setting: Division) -> int:
    """Rows of the kernel: the contracted dim of the weight that is named for it."""
    for dim in setting.block.tensor(op.inputs[1]).dims:
        if base(dim.name) == "kernel_h" and dim.size is not None:
            return dim.size
    raise PlanError(f"{op.path}: its weight has no dim 'kernel_h', so the halo over cp is unknown; use cp = 1")


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
    strategies=_convolution,
    sums=False,
    together=(),
    does="convolves",
    calls="none",
    documents=False,
    torch="image:conv2d",
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
    strategies="plain",
    sums=False,
    together=(),
    does="computes",
    calls="none",
    documents=False,
    torch="image:upsample",
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
    strategies="plain",
    sums=True,
    together=(),
    does="computes",
    calls="none",
    documents=False,
    torch="views:pool",
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
    strategies="plain",
    sums=False,
    together=(),
    does="computes",
    calls="none",
    documents=False,
    torch="views:patchify",
)

KINDS = (CONV2D, UPSAMPLE, POOL, PATCHIFY)
