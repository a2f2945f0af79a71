"""What ATen ops do to axes, and which matrix products are in them.

`link(node, …)` says which axes of a node's outputs are axes of its operands; `products(node, …)` lists its products.
`POINTWISE`, `MOVES` name the ops that can be divided along any dim. An op that is in no table keeps axes of the same
place and size. Leaves out calls of the torch API that a kind of the graph stands for (`kinds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from gnomon.frontend.axes import Axes, Axis
from gnomon.frontend.records import AtenNode, ForwardTrace, Ref
from gnomon.frontend.sizes import Extent
from gnomon.graph import Size

POINTWISE = frozenset(
    "abs add sub mul div neg exp expm1 log log1p sqrt rsqrt reciprocal pow square sin cos tanh sigmoid silu gelu relu "
    "leaky_relu elu selu celu softplus hardswish hardsigmoid hardtanh mish clamp clamp_min clamp_max maximum minimum "
    "where masked_fill eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not "
    "_to_copy clone copy to contiguous detach alias floor ceil round sign erf native_dropout bernoulli rsub addcmul "
    "addcdiv lerp isnan isinf isfinite zeros_like ones_like full_like empty_like rand_like randn_like fill "
    "sgn atan2 fmod remainder floor_divide true_divide xlogy threshold lift_fresh lift_fresh_copy nan_to_num".split()
)
MOVES = frozenset("view _unsafe_view reshape t transpose permute unsqueeze squeeze expand alias detach".split())
"""Views that look at no axis in particular."""
ALONG = {"slice": 1, "select": 1, "split": 2, "split_with_sizes": 2, "unbind": 1, "cat": 1, "stack": 1,
         "softmax": 1, "_softmax": 1, "_log_softmax": 1, "narrow": 1, "cumsum": 1, "flip": 1, "roll": 2}  # fmt: skip
"""Ops that look along one axis: the place of its number among their operands."""

Row = list[Axis]
"""Axes of one value."""


def base_name(target: str) -> str:
    """The name of an ATen op without namespace, overload and the mark of in-place ops: `aten.add_.Tensor` is `add`."""
    name = target.split(".")[1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def link(node: AtenNode, trace: ForwardTrace, rows: Sequence[Row], axes: Axes) -> None:
    """Joins axes of the outputs of a node with axes of its operands."""
    name = base_name(node.target)
    outs = [rows[index] for index in node.outs if index is not None]
    ins = [rows[x.index] for x in node.args if isinstance(x, Ref)]
    if not outs:
        return
    # A rule wants operands: a factory (zeros, arange) has none, and its axes are its own.
    rule = _RULES.get(name)
    if rule is not None and ins:
        rule(node, ins, outs, axes)
        return
    if name == "cat" or name == "stack":
        ins = [rows[x.index] for x in node.args[0] if isinstance(x, Ref)]
        where = _axis(node, 1, len(outs[0]))
        for row in ins:
            # A stacked operand has not the new axis, so it is given the output's there.
            if name == "stack":
                row = [*row[:where], outs[0][where], *row[where:]]
            for i, (a, b) in enumerate(zip(row, outs[0], strict=False)):
                if i != where:
                    axes.same(a, b)
        return
    for out in outs:
        for row in ins:
            if len(row) == len(out) or name in POINTWISE:
                _aligned(row, out, axes)


def _aligned(row: Row, out: Row, axes: Axes) -> None:
    for a, b in zip(reversed(row), reversed(out), strict=False):
        # An extent of 1 is broadcast: joining it would make every such axis the same.
        if axes.extents[a] != 1:
            axes.same(a, b)


def _axis(node: AtenNode, place: int, count: int) -> int:
    axis_argument = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    return int(axis_argument) % count if count and isinstance(axis_argument, int) else 0


def _transpose(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    order = list(range(len(ins[0])))
    if order:
        a, b = (0, -1) if base_name(node.target) == "t" else (node.args[1], node.args[2])
        order[a], order[b] = order[b], order[a]
    for i, j in enumerate(order):
        axes.same(ins[0][j], outs[0][i])


def _permute(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    for i, j in enumerate(node.args[1]):
        axes.same(ins[0][j], outs[0][i])


def _matmul(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    lhs, right = ins[-2:]
    out = outs[0]
    if len(lhs) < 2 or len(right) < 2 or len(out) < 2:
        return
    for a, b in ((lhs[-1], right[-2]), (lhs[-2], out[-2]), (right[-1], out[-1])):
        axes.same(a, b)
    if len(lhs) == 3:
        axes.same(lhs[0], out[0])
        axes.same(right[0], out[0])


def _view(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    """Groups of axes of equal product: one to one the same, one to many a product."""
    old, new = ins[0], outs[0]
    i = j = 0
    while i < len(old) and j < len(new):
        a, b = [old[i]], [new[j]]
        i, j = i + 1, j + 1
        while (old_total := _total(a, axes)) != (right := _total(b, axes)):
            if _under(old_total, right) and i < len(old):
                a.append(old[i])
                i += 1
            elif j < len(new):
                b.append(new[j])
                j += 1
            elif i < len(old):
                a.append(old[i])
                i += 1
            else:
                return
        a, b = ([x for x in side if axes.extents[x] != 1] for side in (a, b))
        if len(a) == 1 and len(b) == 1:
            axes.same(a[0], b[0])
        elif len(a) == 1 and len(b) > 1:
            axes.product(a[0], b)
        elif len(b) == 1 and len(a) > 1:
            axes.product(b[0], a)


def _total(row: Sequence[Axis], axes: Axes) -> tuple[int, tuple[str, ...]]:
    """Product of extents as a number and the names in it."""
    factor, names = 1, list[str]()
    for axis in row:
        extent = axes.extents[axis]
        if isinstance(extent, Size):
            factor, names = factor * extent.factor + extent.plus, names + list(extent.names)
        else:
            factor *= extent
    return factor, tuple(sorted(names))


def _under(a: tuple[int, tuple[str, ...]], b: tuple[int, tuple[str, ...]]) -> bool:
    return len(a[1]) < len(b[1]) or (len(a[1]) == len(b[1]) and a[0] < b[0])


def _unsqueeze(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    where = int(node.args[1]) % len(outs[0])
    for i, axis in enumerate(ins[0]):
        axes.same(axis, outs[0][i + (i >= where)])


def _squeeze(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    remaining = [axis for axis in ins[0] if axes.extents[axis] != 1]
    for a, b in zip(remaining, [axis for axis in outs[0] if axes.extents[axis] != 1], strict=False):
        axes.same(a, b)


def _select(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    where = _axis(node, 1, len(ins[0]))
    remaining = [axis for i, axis in enumerate(ins[0]) if i != where]
    for out in outs:
        for a, b in zip(remaining, out, strict=False):
            axes.same(a, b)


def _parts(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    for out in outs:
        for a, b in zip(ins[0], out, strict=False):
            axes.same(a, b)


def _convolution(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    axes.same(ins[0][0], outs[0][0])
    axes.same(ins[1][0], outs[0][1])
    axes.role(outs[0][1], "channels")


def _embedding(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    table, ids = ins[0], ins[1]
    for a, b in zip([*ids, table[-1]], outs[0], strict=False):
        axes.same(a, b)


def _expand(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    _aligned(ins[0], outs[0], axes)


def _reduced(node: AtenNode, ins: list[Row], outs: list[Row], axes: Axes) -> None:
    """Sums over axes, which are kept with length one or left out."""
    gone = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if gone is None:
        return
    count = len(ins[0])
    places = {int(g) % count for g in (gone if isinstance(gone, (list, tuple)) else [gone])}
    for out in outs:
        if len(out) == count:
            remaining = [(a, b) for i, (a, b) in enumerate(zip(ins[0], out, strict=True)) if i not in places]
        else:
            remaining = list(zip([a for i, a in enumerate(ins[0]) if i not in places], out, strict=False))
        for a, b in remaining:
            axes.same(a, b)


Rule = Callable[[AtenNode, list[Row], list[Row], Axes], None]
_RULES: dict[str, Rule] = {
    "t": _transpose, "transpose": _transpose, "permute": _permute, "mm": _matmul, "addmm": _matmul, "bmm": _matmul,
    "baddbmm": _matmul, "view": _view, "_unsafe_view": _view, "reshape": _view, "unsqueeze": _unsqueeze,
    "squeeze": _squeeze, "select": _select, "unbind": _select, "split": _parts, "split_with_sizes": _parts,
    "slice": _parts, "convolution": _convolution, "embedding": _embedding, "expand": _expand, "mean": _reduced,
    "sum": _reduced, "amax": _reduced, "amin": _reduced, "max": _reduced, "argmax": _reduced, "var": _reduced,
    "logsumexp": _reduced, "topk": _parts, "sort": _parts,
}  # fmt: skip


Shape = tuple[Any, Any, Any, Any]
Extents = Callable[[int], Sequence[Extent]]


def times(*extents: Extent) -> Extent:
    """The product of extents; of several lengths, some of which are longer than a product, without that."""
    lengths = [e for e in extents if isinstance(e, Size)]
    if len(lengths) == 1:
        others = prod(e for e in extents if not isinstance(e, Size))
        return Size(lengths[0].factor * others, lengths[0].names, lengths[0].plus * others)
    factor = prod(e.factor if isinstance(e, Size) else e for e in extents)
    names = tuple(name for e in extents if isinstance(e, Size) for name in e.names)
    return Size(factor, names) if names else factor


def matmul_shapes(node: AtenNode, extents: Extents) -> tuple[tuple[Shape, ...], tuple[int, int] | None]:
    """((batch, rows, columns, depth) of each product, the two operands whose gradients are products)."""
    name = base_name(node.target)
    if name == "mkldnn_rnn_layer":
        x, w, h = (extents(node.args[i].index) for i in (0, 1, 2))
        rows = times(*x[:-1])
        return ((1, rows, w[0], w[1]), (1, rows, h[0], h[1])), (node.args[0].index, node.args[1].index)
    places = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "convolution": (0, 1),
              "_grouped_mm": (0, 1), "_scaled_dot_product_flash_attention_for_cpu": (0, 1),
              "_scaled_dot_product_efficient_attention": (0, 1)}.get(name)  # fmt: skip
    if places is None:
        return (), None
    lhs, right = (node.args[i].index for i in places)
    a, b = extents(lhs), extents(right)
    if name == "convolution":
        out = extents(node.outs[0] or 0)
        groups = int(node.args[8])
        transposed = bool(node.args[6])
        positions = times(a[0], *(a if transposed else out)[2:])
        per_group = b[1] if transposed else times(b[0]) if groups == 1 else _divided(b[0], groups)
        depth = times(_divided(b[0], groups) if transposed else b[1], *b[2:])
        return ((groups, positions, per_group, depth),), (lhs, right)
    if name.startswith("_scaled"):
        v = extents(node.args[2].index)
        outer = times(*a[:-2])
        return ((outer, a[-2], b[-2], a[-1]), (outer, a[-2], v[-1], b[-2])), (lhs, right)
    if len(a) == 3 and len(b) == 3 and name != "_grouped_mm":
        return ((a[0], a[1], b[2], a[2]),), (lhs, right)
    return ((1, times(*a[:-1]), b[-1], a[-1]),), (lhs, right)


def _divided(extent: Extent, by: int) -> Extent:
    return extent // by if isinstance(extent, int) else extent
