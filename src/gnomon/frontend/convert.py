"""What a trace's values are in a graph: classes of axes, dims, dtypes, and the steps that a kind of the graph says.

`Converter` knows the axes of every value and the kind of every step. Leaves out writing blocks (`write`) and which
steps make one (`blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gnomon import ops
from gnomon.errors import CaptureError
from gnomon.frontend.axes import Axes
from gnomon.frontend.call_rules import CallKind
from gnomon.frontend.custom_ops import Count, Division, TensorShape, cost_of, division_of, has_price, has_sharding
from gnomon.frontend.kinds import kind_of, link_kind
from gnomon.frontend.records import AtenNode as Traced
from gnomon.frontend.records import ForwardTrace, Ref, Step
from gnomon.frontend.rules import base_name, link
from gnomon.frontend.sizes import Extent, Sizes
from gnomon.graph import Cost, Dim

DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int32", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "bool", torch.complex64: "fp64", torch.complex128: "fp64",
    torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2",
}  # fmt: skip
"""Of complex numbers only the bytes are right (of complex128 half)."""


class Converter:
    """A trace with classes of axes, ready to be written as blocks."""

    def __init__(
        self, trace: ForwardTrace, sizes: Sizes, live: Sequence[Step], names: Mapping[int, Sequence[str]]
    ) -> None:
        """live: the steps that matter. names: declared dims of an input value."""
        self.trace, self.sizes, self.axes = trace, sizes, Axes()
        self.readers: dict[int, set[int]] = {}
        self.divisions: dict[int, Division] = {}
        self.notes: list[str] = []
        for step in live:
            for node in step.nodes:
                for ref in refs(node):
                    self.readers.setdefault(ref, set()).add(id(step))
        other = sizes.other.values if sizes.other is not None else trace.values
        self.rows = [
            [self.axes.new(sizes.extent(x, y, v.name or "")) for x, y in zip(v.shape, w.shape, strict=False)]
            for v, w in zip(trace.values, other, strict=False)
        ]
        for index, declared in names.items():
            for axis, name in zip(self.rows[index], declared, strict=False):
                if name and not name.isdigit():
                    self.axes.role(axis, name)
        self.main = _main_dtype(trace)
        self.kinds: dict[int, CallKind] = {}
        for step in live:
            # A call is its kind only if nobody reads what is inside it: a softmax whose scores are printed stays op by
            # op.
            kind = kind_of(step, trace)
            inner = {out for node in step.nodes for out in node.outs if out is not None}
            if kind is not None and all(out == kind.out or self.readers.get(out, set()) <= {id(step)} for out in inner):
                self.kinds[id(step)] = kind
                link_kind(kind, self.rows, self.axes)
                continue
            for node in step.nodes:
                if has_sharding(node.target):
                    self._divide(node)
                else:
                    link(node, trace, self.rows, self.axes)
        self.live = self._without_turned(live)
        self._roles(live)
        self.others = self._second(trace, sizes)

    def _without_turned(self, live: Sequence[Step]) -> list[Step]:
        """The steps but those that transpose a weight for products which have it as it is."""
        turned = {kind.transposed_view: set[int]() for kind in self.kinds.values() if kind.transposed_view is not None}
        for step, kind in self.kinds.items():
            if kind.transposed_view is not None:
                turned[kind.transposed_view].add(step)
        # A transposed view that others read too stays.
        free = {value for value, matmuls in turned.items() if self.readers[value] <= matmuls}
        outputs = {id(step): {out for node in step.nodes for out in node.outs if out is not None} for step in live}
        return [step for step in live if not outputs[id(step)] or not outputs[id(step)] <= free]

    def _divide(self, node: Traced) -> None:
        """Axes of a custom op, as its author says."""
        shapes = [self.shape(index, symbols=False) for index in node.outs if index is not None]
        arguments, named = self.arguments(node, symbols=False)
        division = self.divisions[id(node)] = division_of(node.target, arguments, named, shapes)
        for group in (*division.independent, *division.summed):
            for axis in group[1:]:
                self.axes.same(group[0], axis)
        for axis, word in division.words.items():
            self.axes.role(axis, word)

    def arguments(self, node: Traced, *, symbols: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a node was called with, for a rule of its author. symbols: whether sizes are."""
        args, kwargs = tree_map(
            lambda x: self.shape(x.index, symbols=symbols) if isinstance(x, Ref) else x, (node.args, node.kwargs)
        )
        return tuple(args), dict(kwargs)

    def shape(self, index: int, *, symbols: bool) -> TensorShape:
        """A value among the arguments of such a rule."""
        value, row = self.trace.values[index], self.rows[index]
        sizes = [Count({(dim,): 1.0}) for dim in self.dims(index)] if symbols else value.shape
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorShape(shape=tuple(sizes), itemsize=value.dtype.itemsize, dtype=dtype, axes=tuple(row))

    def cost(self, node: Traced) -> Cost | None:
        """What its author says that a custom op costs; None for others."""
        if not has_price(node.target):
            return None
        symbols, numbers = self.arguments(node, symbols=True), self.arguments(node, symbols=False)
        cost, note = cost_of(node.target, symbols, numbers)
        if note and note not in self.notes:
            self.notes.append(note)
        return cost

    def _second(self, trace: ForwardTrace, sizes: Sizes) -> dict[int, Traced]:
        """Each node's twin in the other trace."""
        if sizes.other is None:
            return {}
        return {
            id(a): b
            for s, t in zip(trace.steps, sizes.other.steps, strict=True)
            for a, b in zip(s.nodes, t.nodes, strict=True)
        }

    def _roles(self, live: Sequence[Step]) -> None:
        """Names classes of axes: tables and widths of embeddings, and what a feed-forward widens to."""
        tables = self._tables(live)
        for place, table in enumerate(tables):
            rows = self.rows[table]
            # The longest table is the vocabulary; others hold positions or types, whose rows no tensor parallelism
            # divides.
            self.axes.role(rows[0], "vocab" if place == 0 else "rows")
            self.axes.role(rows[1], "hidden")
        normed = {
            self.axes.find(self.rows[k.operands[0]][-1])
            for k in self.kinds.values()
            if ops.find(k.kind).does == "normalises"
        }
        linears = [k for k in self.kinds.values() if ops.find(k.kind).does == "multiplies"]
        # A head may have the vocabulary's size without sharing its table, and is divided like it.
        vocab = self.trace.values[tables[0]].shape[0] if tables else 0
        for layer in linears:
            vocab_row, _ = layer.weight_of(self.trace.values[layer.operands[1]].shape)
            if vocab_row == vocab and vocab:
                self.axes.role(layer.weight_of(self.rows[layer.operands[1]])[0], "vocab")
        ends = [i for i, v in enumerate(self.trace.values) if v.origin == "input"] + list(self.trace.outputs)
        streams = {self.axes.find(self.rows[i][-1]) for i in ends if self.rows[i]}  # what the module takes and returns
        read = {self.axes.find(self.rows[k.operands[0]][-1]) for k in linears}
        for projection in linears:
            out, inner = projection.weight_of(self.rows[projection.operands[1]])
            root = self.axes.find(out)
            wide, _ = projection.weight_of(self.trace.values[projection.operands[1]].shape)
            # What one linear widens to and another reads at once, without a norm between and not split into heads: a
            # feed-forward.
            if root in read - normed - streams and root not in self.axes.factors and root != self.axes.find(inner):
                if self.axes.roles.get(root) is None and wide != self._width(tables):
                    self.axes.role(out, "ffn")
        for index, value in enumerate(self.trace.values):
            # Experts in one tensor, as transformers 5 has them; nothing but the name tells them from a stack of heads.
            if value.origin == "parameter" and len(value.shape) == 3 and "expert" in value.name:
                self.axes.role(self.rows[index][0], "experts")

    def _tables(self, live: Sequence[Step]) -> list[int]:
        """Values that rows are looked up in, the longest first; those that are not trained too."""
        nodes = (node for step in live for node in step.nodes if base_name(node.target) == "embedding")
        tables = {node.args[0].index for node in nodes if isinstance(node.args[0], Ref)}
        tables = {index for index in tables if len(self.trace.values[index].shape) == 2}
        return sorted(tables, key=lambda index: (-self.trace.values[index].shape[0], index))

    def _width(self, tables: Sequence[int]) -> int:
        return self.trace.values[tables[0]].shape[1] if tables else 0

    # --- tensors

    def dims(self, index: int) -> tuple[Dim, ...]:
        """Dims of a value."""
        return self.axes.dims(self.rows[index])

    def dtype(self, index: int) -> str:
        """The dtype of an activation, `compute` where it is the model's main one."""
        dtype = self.trace.values[index].dtype
        if dtype == self.main:
            return "compute"
        if dtype not in DTYPES:
            raise CaptureError(f"a tensor of {dtype} has no place in a graph; use an ordinary dtype")
        return DTYPES[dtype]

    def extents(self, index: int) -> Sequence[Extent]:
        """Sizes of a value, dim by dim."""
        return [self.axes.extents[axis] for axis in self.rows[index]]


def refs(node: Traced) -> list[int]:
    """Values that a node reads."""
    indices: list[int] = []

    def walk(x: Any) -> None:
        if isinstance(x, Ref):
            indices.append(x.index)
        elif isinstance(x, (list, tuple)):
            for inner in x:
                walk(inner)
        elif isinstance(x, dict):
            for inner in x.values():
                walk(inner)

    walk(node.args)
    walk(node.kwargs)
    return indices


def _main_dtype(trace: ForwardTrace) -> torch.dtype:
    """The dtype that most bytes of parameters have."""
    sizes: dict[torch.dtype, int] = {}
    for value in trace.values:
        if value.origin in ("parameter", "input") and value.dtype.is_floating_point:
            # Inputs count nothing but make their dtype known, for a module without parameters.
            weight = torch.Size(value.shape).numel() if value.origin == "parameter" else 0
            sizes[value.dtype] = sizes.get(value.dtype, 0) + weight
    return max(sizes, key=lambda d: sizes[d]) if sizes else torch.float32
