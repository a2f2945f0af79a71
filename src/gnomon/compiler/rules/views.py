"""Views of values inside a group: the same elements under other dims, without memory being moved.

A rule gives a `Tensor` on the same value. `VIEWS` are all operations whose result shares its input's memory:
where such a node's input lies in memory, groups read through it by its strides and it costs nothing. Leaves out
slices of values that are not in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gnomon.compiler.tiles.body import Tensor, UnfitError
from gnomon.compiler.tiles.lowering import Lowering
from gnomon.compiler.tiles.sizes import equal, sizes_of

aten = torch.ops.aten


def _inside(node: Lowering, source: Any) -> Tensor:
    tensor = node.made(source)
    if tensor is None:
        raise UnfitError("a view of memory")
    return tensor


def reshape(node: Lowering, self: Any, *_: Any, **__: Any) -> Tensor:
    return node.body.reshape(_inside(node, self), sizes_of(node.out.shape))


def permute(node: Lowering, self: Any, dims: Any) -> Tensor:
    tensor = _inside(node, self)
    order = [d % len(dims) for d in dims]
    return replace(tensor, sizes=tuple(tensor.sizes[d] for d in order), dims=tuple(tensor.dims[d] for d in order))


def transpose(node: Lowering, self: Any, dim0: int, dim1: int) -> Tensor:
    rank = len(_inside(node, self).sizes)
    order = list(range(rank))
    if rank:
        order[dim0 % rank], order[dim1 % rank] = order[dim1 % rank], order[dim0 % rank]
    return permute(node, self, order)


def t(node: Lowering, self: Any) -> Tensor:
    return permute(node, self, range(len(_inside(node, self).sizes))[::-1])


def unsqueeze(node: Lowering, self: Any, dim: int) -> Tensor:
    # Read once more: `dims_of` may have divided axes of this tensor, whose dims are then others.
    tensor = _inside(node, self)
    # There is one place more than there are dims: -1 is behind the last.
    at = dim % (len(tensor.sizes) + 1)
    return replace(
        tensor,
        sizes=(*tensor.sizes[:at], 1, *tensor.sizes[at:]),
        dims=(*tensor.dims[:at], (), *tensor.dims[at:]),
    )


def expand(node: Lowering, self: Any, size: Any, **_: Any) -> Tensor:
    """Broadcast dims get the axes that the body has for them."""
    tensor = _inside(node, self)
    shape = sizes_of(node.out.shape)
    dims = node.dims_of(shape, [self])
    tensor = _inside(node, self)
    return replace(tensor, sizes=shape, dims=dims)


def squeeze(node: Lowering, self: Any, *_: Any) -> Tensor:
    tensor = _inside(node, self)
    shape = sizes_of(node.out.shape)
    if sum(not equal(s, 1) for s in tensor.sizes) != sum(not equal(s, 1) for s in shape):
        raise UnfitError("a squeeze that drops elements")
    return node.body.reshape(tensor, shape)


def same(node: Lowering, self: Any, *_: Any, **__: Any) -> Tensor:
    return _inside(node, self)


RULES: dict[Any, Callable[..., Any]] = {
    aten.view.default: reshape,
    aten._unsafe_view.default: reshape,
    aten.reshape.default: reshape,
    aten.permute.default: permute,
    aten.transpose.int: transpose,
    aten.t.default: t,
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.default: squeeze,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.expand.default: expand,
    aten.alias.default: same,
    aten.detach.default: same,
}

VIEWS = {
    *RULES,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.chunk.default,
    aten.as_strided.default,
    aten.diagonal.default,
    aten.narrow.default,
    aten.unfold.default,
}


UNSAFE = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
"""Operations that give views without saying so, which autograd is not to know -> the same that say so."""


def say_views(graph: torch.fx.Graph) -> None:
    """Puts what says that it gives views in the place of what does not, where all sizes are fixed: a graph of ATen's is
    behind autograd."""
    for node in graph.nodes:
        if node.target not in UNSAFE or node.kwargs:
            continue
        above = node.args[0].meta.get("val")
        sizes = [*above.shape, *above.stride()] if isinstance(above, torch.Tensor) else [None]
        if not all(isinstance(size, int) for size in sizes) or not isinstance(above, FakeTensor):
            continue
        node.target = UNSAFE[node.target]
        # Run in fake mode so that the parts share the storage of `above`: whether a node is a view is read off the
        # storages.
        with above.fake_mode:
            parts = node.target(above, *node.args[1:])
        node.meta["val"] = list(parts)
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["val"] = parts[user.args[1]]
