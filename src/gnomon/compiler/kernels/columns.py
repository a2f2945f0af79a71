"""Embedding columns: hundreds of lookups that are concatenated become one call of one kernel (RECom).

`fuse(graph)` looks for `cat`s (or stacks) whose parts are rows of tables, chosen by numbers that are hashed
(`remainder`), clamped or bucketized on the way and pooled by a sum or a mean, as `nn.Embedding` and
`nn.EmbeddingBag` give. Such a node becomes a call of a `Columns`, which reads the columns from a table, so that
the kernel (cpp/columns.cpp) is compiled once, whatever their number. It is tried like any group (`gate`): equal
to ATen and not slower, or given back. All tables of a call are float32, or all bfloat16. Leaves out gradients, which
stay ATen's.
Source: Pan et al., RECom (ASPLOS 2023).
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import fx

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.node import Node
from gnomon.compiler.tiles.sizes import equal, size_of
from gnomon.compiler.tune.gate import Trial
from gnomon.compiler.tune.tried import MEMORY, text_of

aten = torch.ops.aten
FEWEST = 4
"""The fewest lookups that are worth a kernel of their own."""
PARALLEL = 1 << 15
"""Floats of the output from which on several threads write them."""

KINDS = {torch.int64: 0, torch.int32: 1, torch.float32: 2, torch.bfloat16: 3}
COPY, LOOKUP = 0, 1
POOLS = {"one": 0, "sum": 1, "mean": 2}
REMAINDER, MULTIPLY, ADD, LEAST, MOST, AND, XOR = range(7)
SCALAR = {
    aten.remainder.Scalar: REMAINDER,
    aten.mul.Tensor: MULTIPLY,
    aten.mul.Scalar: MULTIPLY,
    aten.add.Tensor: ADD,
    aten.add.Scalar: ADD,
    aten.clamp_min.default: LEAST,
    aten.clamp_max.default: MOST,
    aten.bitwise_and.Scalar: AND,
    aten.bitwise_xor.Scalar: XOR,
}
"""Maps operations on whole numbers with one constant to their codes."""
BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
FLATTENS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default)


@dataclass(slots=True)
class Numbers:
    """Says where the numbers of a column lie: elements of a tensor along a dim of rows, and of several in a row."""

    node: Node
    first: list[int]
    """The position that was selected of each dim of the tensor; 0 of the others."""
    row_dim: int
    inner_dim: int = -1
    """The dim of several numbers a row; -1: one number a row."""
    code: list[tuple[int, int]] = field(default_factory=list)
    """(operation, operand) of each step on every number."""
    boundaries: Node | None = None
    right: bool = False


@dataclass(slots=True)
class Column:
    """A part of the concatenation."""

    numbers: Numbers
    dim: int
    """Floats of a row."""
    table: Node | None = None
    """The table of the lookup; None: floats that are copied."""
    pool: str = "one"
    offsets: Node | None = None
    """The first number of each bag; None: bags are as long as the inner dim."""


def fuse(graph: fx.Graph) -> list[Columns]:
    """Puts a `Columns` in place of every node that is worth one; returns them. Nothing where a tensor is written."""
    # Lookups move to the place of the concatenation: a write before it, which they came before, would be seen by them.
    if any(_writes(node) for node in graph.nodes):
        return []
    calls = []
    for node in list(graph.nodes):
        for part, columns in _runs(node):
            call = Columns(part, columns)
            with graph.inserting_before(node):
                new = graph.call_function(call, tuple(call.arguments))
            new.meta.update(part.meta)
            part.replace_all_uses_with(new)
            calls.append(call)
    if calls:
        # Lookups and the arithmetic before them have no reader any more.
        graph.eliminate_dead_code()
    return calls


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    dense = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided
    return value if dense else None


def _runs(node: Node) -> list[tuple[Node, list[Column]]]:
    """Finds concatenations along the last dim, or stacks of rows, whose parts are all columns: the node itself, or new
    nodes of those of its parts that follow each other."""
    out = _value(node)
    if node.op != "call_function" or node.target not in (aten.cat.default, aten.stack.default):
        return []
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    # Along dim 1 of [rows, floats] (cat) or of [rows, parts, floats] (stack).
    if out is None or out.dtype not in MEMORY or out.dim() > 3 or dim % out.dim() != 1 or not parts:
        return []
    columns = [_lookup(part) or _copied(part) if _value_is(part, out.dtype) else None for part in parts]
    if node.target is aten.stack.default:
        return [(node, columns)] if out.dim() == 3 and all(columns) and _worth(columns) else []  # type: ignore[list-item]
    # The whole cat, or else runs of neighbouring columns inside it: those become a cat of their own.
    if all(columns):
        return [(node, columns)] if _worth(columns) else []  # type: ignore[list-item]
    runs, ungrouped = [], []
    for is_column, run in groupby(zip(parts, columns, strict=True), key=lambda pair: pair[1] is not None):
        some, own = zip(*run, strict=True)
        if is_column and _worth(own):
            with node.graph.inserting_before(node):
                part = node.graph.call_function(aten.cat.default, (list(some), 1))
            part.meta["val"] = torch.cat([one.meta["val"] for one in some], 1)
            runs.append((part, list(own)))
            ungrouped.append(part)
        else:
            ungrouped += some
    if runs:
        node.args = (ungrouped, 1)
    return runs


def _worth(columns: Sequence[Column | None]) -> bool:
    return sum(column is not None and column.table is not None for column in columns) >= FEWEST


def _value_is(node: Node, dtype: torch.dtype) -> bool:
    value = _value(node)
    return value is not None and value.dtype == dtype


def _copied(node: Node) -> Column | None:
    value = _value(node)
    if value is None or value.dim() != 2 or not isinstance(value.shape[1], int):
        return None
    return Column(Numbers(node, [0, 0], 0, 1), value.shape[1])


def _lookup(node: Node) -> Column | None:
    """Reads rows of a table, pooled or not, as a column; None where it is none."""
    if node.target is operator.getitem and node.args[1] == 0:
        return _bag(node.args[0])
    pool = {aten.sum.dim_IntList: "sum", aten.mean.dim: "mean"}.get(node.target, "one")
    rows = node
    if pool != "one":
        if list(node.args[1]) not in ([1], [-2]) or len(node.args) > 2 or node.kwargs:
            return None
        rows = node.args[0]
    if not isinstance(rows, fx.Node) or rows.target is not aten.embedding.default:
        return None
    table, numbers = _table(rows.args[0]), _numbers(rows.args[1])
    if table is None or numbers is None or (numbers.inner_dim < 0) != (pool == "one"):
        return None
    return Column(numbers, table.shape[1], rows.args[0], pool)


def _table(node: Any) -> torch.Tensor | None:
    """The tensor of a table of floats whose rows lie one after the other; None where it is none."""
    value = _value(node)
    if value is None or value.dim() != 2 or value.dtype not in MEMORY:
        return None
    fixed = all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    return value if fixed and value.stride() == (value.shape[1], 1) else None


def _bag(node: Any) -> Column | None:
    """Reads an `nn.EmbeddingBag` as a column, None where it is none: of equal bags, or of bags that begin at
    offsets."""
    if not isinstance(node, fx.Node) or node.target not in BAGS or node.kwargs:
        return None
    weight, indices, offsets, _, mode, _, sample_weights, last, padding = _filled(node.args)
    table = _table(weight)
    if table is None or mode not in (0, 1) or sample_weights is not None or last or padding != -1:
        return None
    pool = "sum" if mode == 0 else "mean"
    equal = _equal_bags(indices, offsets)
    if equal is not None:
        return Column(equal, table.shape[1], weight, pool)
    numbers, starts = _numbers(indices), _value(offsets)
    flat = numbers is not None and numbers.inner_dim < 0 and numbers.row_dim == 0
    if not flat or starts is None or starts.dtype != torch.int64 or not starts.is_contiguous():
        return None
    if _value(numbers.node).dim() != 1:  # type: ignore[union-attr]
        return None
    return Column(numbers, table.shape[1], weight, pool, offsets)  # type: ignore[arg-type]


def _filled(args: Sequence[Any]) -> list[Any]:
    """Fills in the defaults: (weight, indices, offsets, scale_grad, mode, sparse, per_sample_weights,
    include_last_offset, padding_idx)."""
    defaults = [None, None, None, False, 0, False, None, False, -1]
    return [*args, *defaults[len(args) :]]


def _equal_bags(indices: Any, offsets: Any) -> Numbers | None:
    """Finds the numbers of (rows, numbers) that were flattened for bags of equal length: offsets are 0, length, 2
    length …"""
    if not isinstance(offsets, fx.Node) or offsets.target is not aten.arange.start_step or offsets.args[0] != 0:
        return None
    node, length = indices, offsets.args[2] if len(offsets.args) > 2 else 1
    while isinstance(node, fx.Node) and node.target in FLATTENS:
        value = _value(node.args[0])
        if value is None or value.dtype not in KINDS:
            return None
        node = node.args[0]
        if value.dim() == 2 and _same(value.shape[1], length):
            return _numbers(node)
    return None


def _same(size: Any, node: Any) -> bool:
    """Whether a size and an argument of the graph are the same number, whatever the sizes are."""
    other = node.meta.get("val") if isinstance(node, fx.Node) else node
    return isinstance(other, (int, torch.SymInt)) and equal(size_of(size), size_of(other))


def _numbers(node: Any) -> Numbers | None:
    """Reads the numbers of a tensor of one or two dims, followed back through arithmetic and selected positions."""
    value = _value(node)
    if value is None or value.dim() not in (1, 2) or value.dtype not in (torch.int64, torch.int32):
        return None
    code: list[tuple[int, int]] = []
    # Walk back through arithmetic: the last operation is met first, so steps are put in front.
    while step := _arithmetic(node):
        code = [*step[1], *code]
        node = step[0]
    boundaries, right = None, False
    if node.target is aten.bucketize.Tensor:
        indices, floats = _value(node.args[1]), _value(node.args[0])
        same = indices is not None and floats is not None and indices.dtype == floats.dtype and indices.dtype in MEMORY
        wide = not node.kwargs.get("out_int32", False)
        if same and indices.is_contiguous() and indices.dim() == 1 and wide:  # type: ignore[union-attr]
            boundaries, right, node = node.args[1], bool(node.kwargs.get("right", False)), node.args[0]
    read = _value(node)
    if read is None or read.dtype not in KINDS or (read.dtype in MEMORY) != (boundaries is not None):
        return None
    numbers = _selected(node, read.dim())
    numbers.code, numbers.boundaries, numbers.right = code, boundaries, right
    return numbers


def _arithmetic(node: Any) -> tuple[Node, list[tuple[int, int]]] | None:
    """Reads (operand, operations) of one node of arithmetic on int64."""
    value = _value(node)
    if value is None or value.dtype != torch.int64 or node.op != "call_function" or node.kwargs:
        return None
    source = _value(node.args[0]) if node.args else None
    if source is None or source.dtype != torch.int64 or source.shape != value.shape:
        return None
    if node.target is aten.clamp.default:
        limits = [*node.args[1:], None][:2]
        if all(limit is None or _whole(limit) for limit in limits):
            steps = zip((LEAST, MOST), limits, strict=True)
            return node.args[0], [(kind, limit) for kind, limit in steps if limit is not None]
        return None
    kind = SCALAR.get(node.target)
    if kind is None or len(node.args) != 2 or not _whole(node.args[1]) or (kind == REMAINDER and not node.args[1]):
        return None
    return node.args[0], [(kind, node.args[1])]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _selected(node: Node, dims: int) -> Numbers:
    """Goes back through `x[:, i]`: the tensor that is read, and the positions that were selected."""
    picks: list[tuple[int, int]] = []
    while node.target in (aten.select.int, aten.slice.Tensor):
        source = _value(node.args[0])
        if source is None or source.dim() > 3:
            break
        if node.target is aten.slice.Tensor:
            defaults = (0, 0, 2**63 - 1, 1)
            bounds: tuple[Any, ...] = tuple(node.args[1:])
            dim, start, end, step = bounds + defaults[len(bounds) :]
            # Only a slice that takes everything, which is what the `:` of `x[:, i]` leaves in a graph.
            if (start, step) != (0, 1) or end != 2**63 - 1:
                break
        else:
            dim, at = node.args[1], node.args[2]
            if not (isinstance(dim, int) and isinstance(at, int)):
                break
            # Counted from the end, which has to be a number now.
            if at < 0:
                size = source.shape[dim]
                if not isinstance(size, int):
                    break
                at += size
            picks.append((dim % source.dim(), at))
        node = node.args[0]
    whole = _value(node)
    assert whole is not None
    # sizes: dims of the whole tensor that remain after each selection; `picks` has the last selection first.
    sizes, first = list(range(whole.dim())), [0] * whole.dim()
    for dim, at in reversed(picks):
        first[sizes[dim]] = at
        del sizes[dim]
    assert len(sizes) == dims
    return Numbers(node, first, sizes[0], sizes[1] if dims == 2 else -1)


# ---- running
FORMULA = CPP / "columns.cpp"


@cache
def _kernel(dtype: torch.dtype) -> Any:
    """Compiles the kernel for one dtype; None where it does not compile."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kinds = (pointer, number, pointer, pointer, pointer, pointer, number, number, number)
    return kernel_of(text_of(FORMULA, dtype), *kinds)


class Columns:
    """The columns of one concatenation, as a function of the tensors that they read."""

    def __init__(self, node: Node, columns: Sequence[Column]) -> None:
        self.__name__, self.__module__ = "embedding_columns", __name__  # what fx calls a node
        self.arguments: list[Node] = []
        places: dict[Node, int] = {}

        def place(read: Node | None) -> int:
            if read is None:
                return -1
            if read not in places:
                places[read] = len(self.arguments)
                self.arguments.append(read)
            return places[read]

        self.layouts: list[int] = []
        """Indices of arguments whose sizes and strides are asked for in every call."""
        rows: list[int] = []
        code: list[tuple[int, int]] = []
        target = 0
        for column in columns:
            numbers, ids = column.numbers, place(column.numbers.node)
            if ids not in self.layouts:
                self.layouts.append(ids)
            table = _value(column.table)
            bounds = _value(numbers.boundaries)
            # One row of the table is a column, in the order in which columns.cpp reads it.
            rows += [
                COPY if table is None else LOOKUP, place(column.table), table.shape[0] if table is not None else 0,
                column.dim, ids, self.layouts.index(ids), *[*numbers.first, 0, 0][:3], numbers.row_dim,
                numbers.inner_dim, KINDS[numbers.node.meta["val"].dtype], POOLS[column.pool], place(column.offsets),
                len(code), len(numbers.code), place(numbers.boundaries), bounds.shape[0] if bounds is not None else 0,
                int(numbers.right), target,
            ]  # fmt: skip
            code += numbers.code
            target += column.dim
        self.columns = tuple(columns)
        self.count, self.width = len(columns), target
        self.stacked, self.dtype = node.meta["val"].dim() == 3, node.meta["val"].dtype
        self.table = (ctypes.c_int64 * len(rows))(*rows)
        self.code = (ctypes.c_int64 * max(1, 2 * len(code)))(*[number for pair in code for number in pair])
        rowed = next((c for c in columns if c.offsets is None), columns[0])
        # The number of rows is that of a column without offsets, or of the offsets themselves.
        self.batch_of = (place(rowed.offsets or rowed.numbers.node), 0 if rowed.offsets else rowed.numbers.row_dim)
        self.aten = _extracted(node, self.arguments)
        self.text = text_of(FORMULA, self.dtype)
        self.trial = Trial(f"{self.text}// {rows} {code} {self.stacked}", self._run, self.aten)
        self.first = True

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        """Returns the concatenation: tried on its first inputs, then by the kernel or by ATen."""
        if not self.first:
            return (self._run if self.trial.kept else self.aten)(*args)[0]
        if _kernel(self.dtype) is None:
            return self.aten(*args)[0]
        result = self.trial(*args)[0]
        self.first = self.trial.kept is None
        return result

    def settled(self) -> Callable[..., torch.Tensor] | None:
        """What is called from now on, without asking which, once the trial is over."""
        if self.trial.kept is None:
            return None
        call = self._run if self.trial.kept else self.aten
        return lambda *args: call(*args)[0]

    def _run(self, *args: torch.Tensor) -> tuple[torch.Tensor]:
        """Runs the kernel, or ATen, which says why, where a number is outside its table."""
        where, dim = self.batch_of
        batch = args[where].shape[dim]
        shape = (batch, self.count, self.width // self.count) if self.stacked else (batch, self.width)
        out = torch.empty(shape, dtype=self.dtype, device="cpu")
        layouts: list[int] = []
        for place in self.layouts:
            one = args[place]
            empty = [0] * (3 - one.dim())
            # Three sizes, then three strides, of each tensor.
            layouts += [*one.shape, *empty, *one.stride(), *empty]
        pointers = (ctypes.c_void_p * len(args))(*[one.data_ptr() for one in args])
        sizes = (ctypes.c_int64 * len(layouts))(*layouts)
        parallel = int(batch * self.width >= PARALLEL)
        table, code = ctypes.addressof(self.table), ctypes.addressof(self.code)
        place_of = ctypes.addressof
        bad = _kernel(self.dtype)(
            table, self.count, code, place_of(pointers), place_of(sizes), out.data_ptr(), batch, self.width, parallel
        )
        return self.aten(*args) if bad else (out,)


def _extracted(node: Node, arguments: Sequence[Node]) -> Callable[..., tuple[torch.Tensor]]:
    """The node as a function of the tensors that the kernel reads, by ATen. Sizes are read off these tensors."""
    graph = fx.Graph()
    copies: dict[Node, Node] = {}
    for number, argument in enumerate(arguments):
        copies[argument] = graph.placeholder(f"a{number}")
    symbols: dict[str, Node] = {}
    for argument in arguments:
        for dim, size in enumerate(argument.meta["val"].shape):
            if not isinstance(size, int) and str(size) not in symbols:
                symbols[str(size)] = graph.call_function(aten.sym_size.int, (copies[argument], dim))

    def copied(one: Node) -> Node:
        if one not in copies:
            value = one.meta.get("val")
            if isinstance(value, torch.SymInt) and str(value) in symbols:
                copies[one] = symbols[str(value)]
            else:
                for source in one.all_input_nodes:
                    copied(source)
                copies[one] = graph.node_copy(one, lambda source: copies[source])
        return copies[one]

    waiting = [node]
    while waiting:  # without recursion over long chains
        one = waiting[-1]
        missing = [source for source in one.all_input_nodes if source not in copies and source.op != "placeholder"]
        if missing and one not in copies:
            waiting += missing
            continue
        copied(waiting.pop())
    graph.output((copies[node],))
    module = fx.GraphModule(torch.nn.Module(), graph)
    function: Callable[..., tuple[torch.Tensor]] = module.forward
    return function
