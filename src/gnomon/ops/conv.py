"""Convolutions and what changes the size of images: `conv2d`, `upsample`, `pool`, `patchify`.

Images are (batch, channels, height, width); stride follows from the sizes. Leaves out the short convolution of a
Mamba-2 mixer, which is part of `state_space`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.ops.bases import CONTRACTION, MOVES_BYTES
from gnomon.ops.curve import Matmul, once
from gnomon.ops.divided import BOTH, own_collective, with_inside
from gnomon.ops.op import Op, Problem, Tensors
from gnomon.ops.rules import as_many, cannot_write, per_element, per_element_back
from gnomon.ops.strategy import Division, Strategy
from gnomon.tensors.dims import Dim
from gnomon.tensors.names import TOKEN_DIMS, base
from gnomon.tensors.tensor import Tensor


def _conv_dims(op: Op, block: Tensors) -> Problem:
    """(batch, in, height, width) and (out, in, kernel, kernel) give (batch, out, height / stride, width / stride)."""
    image, weight, out = (block.tensor(name).dims for name in (*op.inputs[:2], op.outputs[0]))
    bias = [block.tensor(name).dims for name in op.inputs[2:]]
    if (len(image), len(weight), len(out)) != (4, 4, 4) or any(dims != weight[:1] for dims in bias):
        return cannot_write(op, block)
    summed = (weight[1].name, weight[2].name, weight[3].name)
    fits = image[1] == weight[1] and op.contracts == summed and out[:2] == (image[0], weight[0])
    return None if fits and _stride(image, out) is not None else cannot_write(op, block)


def _stride(large: Sequence[Dim], small: Sequence[Dim]) -> int | None:
    """How many times as high and as wide one image is as another; None where that is no whole number, or two."""
    # Height and width must shrink alike: one stride is carried by the op, not two.
    ratios = set[int]()
    for one, other in zip(large[2:], small[2:], strict=True):
        if one.size is None or other.size is None or one.size % other.size:
            return None
        ratios.add(one.size // other.size)
    return ratios.pop() if len(ratios) == 1 else None


def _upsample_dims(op: Op, block: Tensors) -> Problem:
    image, out = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    fits = len(image) == len(out) == 4 and image[:2] == out[:2]
    return None if fits and _stride(out, image) is not None else cannot_write(op, block)


def _pool_dims(op: Op, block: Tensors) -> Problem:
    """All dims but one of those over positions."""
    x, out = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    # The output may lack any one dim of positions; of an image, say, its height.
    ways = [x[:at] + x[at + 1 :] for at, dim in enumerate(x) if base(dim.name) in TOKEN_DIMS]
    return None if out in ways else cannot_write(op, block)


def _patchify_dims(op: Op, block: Tensors) -> Problem:
    """(batch, channels, height, width) and (batch, patches, channels, height, width of a patch), either way."""
    image, patches = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    if len(image) > len(patches):
        image, patches = patches, image
    fits = (len(image), len(patches)) == (4, 5) and image[0] == patches[0] and image[1] == patches[2]
    return None if fits and as_many(image, patches) else cannot_write(op, block)


def _saves_indices(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Saves where the maxima were, of a pool that returns indices."""
    return op.outputs[1:]


def _convolution(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Ranks that hold bands of an image send the rows at their edges to both neighbours: (kernel-1)/2 rows each way."""
    height = plain.inputs[0].dim_of("cp")
    if height is None:
        return (plain,)
    kernel = _kernel_height(op, setting)
    # A kernel of one row reads no row of a neighbour.
    if kernel == 1:
        return (plain,)
    image = setting.block.tensor(op.inputs[0])
    row = Tensor(name=image.name, dims=tuple(d for d in image.dims if d.name != height), dtype=image.dtype)
    # A row of the image has all its dims but the height.
    size = setting.scene.bytes(row, plain.inputs[0]) * ((kernel - 1) // 2)
    inside = tuple(own_collective(op, setting, "send_recv", "cp", size, p, op.inputs[0], steps=2) for p in BOTH)
    return (with_inside(plain, "halo", inside),)


def _kernel_height(op: Op, setting: Division) -> int:
    """Rows of the kernel: the contracted dim of the weight that is named for it."""
    for dim in setting.block.tensor(op.inputs[1]).dims:
        if base(dim.name) == "kernel_h" and dim.size is not None:
            return dim.size
    raise PlanError(f"{op.path}: its weight has no dim 'kernel_h', so the halo over cp is unknown; use cp = 1")


CONV2D = replace(
    CONTRACTION,
    name="conv2d",
    signature="image, weight (out, in, height, width), bias -> image",
    dims=_conv_dims,
    price=Matmul("pixels", narrow=False),
    grad_price=Matmul("pixels", narrow=False),
    strategies=_convolution,
    does="convolves",
    served="kernel",
    torch="image:conv2d",
)

UPSAMPLE = replace(
    MOVES_BYTES,
    name="upsample",
    signature="image -> larger image, each pixel repeated",
    dims=_upsample_dims,
    saves="nothing",
    forward=per_element(0),
    backward=per_element_back(1),
    zeros="unknown",
    torch="image:upsample",
)

POOL = replace(
    MOVES_BYTES,
    name="pool",
    signature="x -> x over fewer positions; fn: max | mean | first",
    dims=_pool_dims,
    saves=_saves_indices,
    forward=per_element(1),
    backward=per_element_back(1),
    price=once("reduce"),
    grad_price=once("reduce"),
    sums=True,
    zeros="all",
    torch="views:pool",
)

PATCHIFY = replace(
    MOVES_BYTES,
    name="patchify",
    signature="image -> patches, or patches -> image",
    dims=_patchify_dims,
    saves="nothing",
    forward=per_element(0),
    backward=per_element_back(0),
    price=once("reduce"),
    grad_price=once("reduce"),
    zeros="unknown",
    torch="views:patchify",
)

KINDS = (CONV2D, UPSAMPLE, POOL, PATCHIFY)
