"""Products of chosen pairs of vectors that are rows of tables: a recommender's lookups and interactions as one kernel.

DLRM looks a row up in each of its tables, stacks them with a dense vector (`columns`), and multiplies them by each
other (`pairs`). What is stacked, (batch, vectors, depth), is larger than anything else that it makes, and is written
only to be read once. `fuse(graph)` puts a `TablePairs` in the place of the two where nobody else reads the stack: its
kernel (cpp/table_pairs.cpp) brings a sample's rows together in the first cache and multiplies them there, and asks for
the rows of later samples meanwhile. It is tried beside the two kernels, each of which was tried beside ATen. Float32
and bfloat16 on a CPU. Leaves out indices that are hashed or bucketized, bags, and training, in which a backward
reads the stack.
Source: Naumov et al., DLRM (2019); Pan et al., RECom (ASPLOS 2023).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import CPP, address_of, kernel_of
from gnomon.compiler.kernels.columns import Column, Columns
from gnomon.compiler.kernels.pairs import PARALLEL, Pairs, PairsCall
from gnomon.compiler.node import Node
from gnomon.compiler.tasks.steps import KernelCall
from gnomon.compiler.tune.tried import TriedKernel, text_of

aten = torch.ops.aten
FORMULA = CPP / "table_pairs.cpp"
MOST, MOST_NUMBERS = 64, 4
"""Vectors of a sample, and tensors of indices: of cpp/table_pairs.cpp."""
TURNED: dict[Any, tuple[tuple[Any, ...], ...]] = {
    aten.transpose.int: ((1, 2), (2, 1), (-1, -2), (-2, -1)),
    aten.permute.default: (([0, 2, 1],),),
}
"""What turns (batch, vectors, depth) into (batch, depth, vectors), with its arguments."""


class _TableCall(ctypes.Structure):
    """The struct `TableCall` of cpp/table_pairs.cpp, field by field."""

    _fields_ = [
        *PairsCall._fields_,
        ("vectors", ctypes.c_void_p),
        *[(f"numbers{n}", ctypes.c_void_p) for n in range(MOST_NUMBERS)],
        *[(f"source{n}", ctypes.c_void_p) for n in range(MOST)],
    ]


@cache
def kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(text_of(FORMULA, dtype), ctypes.POINTER(_TableCall))


class TablePairs(TriedKernel):
    """Chosen dot products of a sample's vectors, as a function of what `Columns` reads, the pairs' rows and columns,
    and what comes before the products in each row where there is something."""

    def __init__(self, stack: Columns, products: Pairs, fixed: bool) -> None:
        """Is not tried yet. stack: what makes the vectors. products: what multiplies them."""
        self.stack, self.products = stack, products
        self.text = text_of(FORMULA, stack.dtype)
        super().__init__("table_pairs", f"{self.text}// {products.joined} {stack.trial.source}", fixed)
        arguments = {node: place for place, node in enumerate(stack.arguments)}
        self.sources = [arguments[one.table or one.numbers.node] for one in stack.columns]
        """Places among the arguments of each vector's table, or of the rows themselves."""
        looked_up = [one for one in stack.columns if one.table is not None]
        self.numbers = list(dict.fromkeys(arguments[one.numbers.node] for one in looked_up))
        """Places of the tensors of indices."""
        self.depth = stack.columns[0].dim
        self.kept_alive: list[Any] = []
        """What structs of steps point to."""

    def __call__(self, *args: Tensor) -> Tensor:
        """Returns the products; the two kernels have their trials before it has its own beside them."""
        if not self.trials:
            self.aten(*args)
        out: Tensor = super().__call__(*args)
        return out

    def aten(self, *args: Tensor) -> Tensor:
        """Runs the two kernels, or PyTorch's operations in the place of each that was given back."""
        count = len(self.stack.arguments)
        every = self.stack(*args[:count])
        out: Tensor = self.products(every, every.mT, *args[count:])
        return out

    def described(self, args: Sequence[Tensor]) -> ctypes.Array[Any]:
        """The struct `Vector` of cpp/table_pairs.cpp of each vector. args: as they lie, with or without memory."""
        words: list[int] = []
        for one, source in zip(self.stack.columns, self.sources, strict=True):
            by = args[source].stride()
            if one.table is None:
                words += [0, by[one.numbers.row_dim], 0, 0, 0, 0]
                continue
            place = self.stack.arguments.index(one.numbers.node)
            strides, first = args[place].stride(), one.numbers.first
            begin = sum(at * step for at, step in zip(first, strides, strict=False))
            narrow = int(args[place].dtype == torch.int32)
            # Rows of the table (0 above: what is there already), floats from row to row, which tensor of indices, where
            # in it the first one is, how far the next, and whether they have 32 bits.
            words += [len(args[source]), by[0], self.numbers.index(place), begin, strides[one.numbers.row_dim], narrow]
        return (ctypes.c_int64 * len(words))(*words)

    def filled(self, args: Sequence[Tensor], vectors: ctypes.Array[Any]) -> _TableCall:
        """The struct without addresses of tensors."""
        i, j, *first = args[len(self.stack.arguments) :]
        where, dim = self.stack.batch_of
        batch, rows = args[where].shape[dim], len(self.stack.columns)
        work = batch * rows * rows * self.depth
        return _TableCall(
            batch=batch, rows=rows, columns=rows, depth=self.depth, count=i.shape[0],
            before=first[0].shape[1] if first else 0, parallel=int(torch.get_num_threads() > 1 and work >= PARALLEL),
            i_step=i.stride(0), j_step=j.stride(0), first_row=first[0].stride(0) if first else 0,
            vectors=ctypes.addressof(vectors),
        )  # fmt: skip

    def fields(self, args: Sequence[Any]) -> list[tuple[str, Any]]:
        """Fields of addresses, each with the argument that it is the address of."""
        i, j, *first = args[len(self.stack.arguments) :]
        out = [(f"source{n}", args[place]) for n, place in enumerate(self.sources)]
        out += [(f"numbers{n}", args[place]) for n, place in enumerate(self.numbers)]
        return [*out, ("i", i), ("j", j), *(("first", one) for one in first)]

    def readable(self, args: Sequence[Tensor]) -> bool:
        """Whether numbers of a row lie beside each other in every tensor whose rows are copied as they are."""
        rows = [(args[place], one.table is None) for place, one in zip(self.sources, self.stack.columns, strict=True)]
        beside = all(one.stride(1) == 1 for one, is_dense in rows if is_dense)
        first = args[len(self.stack.arguments) + 2 :]
        return beside and all(one.stride(1) == 1 for one in first)

    def run(self, *args: Tensor) -> Tensor:
        """Runs the kernel on these tensors, or what `aten` says where it cannot."""
        function = kernel(self.stack.dtype)
        if function is None or not self.readable(args):
            return self.aten(*args)
        vectors = self.described(args)
        call = self.filled(args, vectors)
        for name, tensor in self.fields(args):
            setattr(call, name, tensor.data_ptr())
        out = torch.empty((call.batch, call.before + call.count), dtype=self.stack.dtype)
        call.out = out.data_ptr()
        return self.aten(*args) if function(call) else out

    def step(self, node: Node) -> list[KernelCall] | None:
        """What C++ calls in a node's place, where the kernel is kept and no size changes."""
        trial, function = self.trials.get(()), kernel(self.stack.dtype)
        if not self.fixed or trial is None or not trial.kept or function is None:
            return None
        values = [one.meta["val"] for one in node.args]
        if not self.readable(values) or not node.meta["val"].is_contiguous():
            return None
        vectors = self.described(values)
        # The struct has only the address of it.
        self.kept_alive.append(vectors)
        call = self.filled(values, vectors)
        inputs = tuple(self.fields(node.args))
        return [KernelCall(function=address_of(function), filled=call, inputs=inputs, outputs=(("out", node),))]


def fuse(graph: fx.Graph) -> list[TablePairs]:
    """Puts a `TablePairs` in place of every product of pairs of what a `Columns` stacked; returns them."""
    made = []
    for node in list(graph.nodes):
        if not isinstance(node.target, Pairs):
            continue
        stack, turned, *rest = node.args
        if not _only(stack, turned, node) or not _fits(stack.target, rest[0].meta["val"].shape[0]):
            continue
        given = (*stack.args, *rest)
        fixed = all(isinstance(size, int) for one in given for size in one.meta["val"].shape)
        call = TablePairs(stack.target, node.target, fixed)
        with graph.inserting_before(node):
            new = graph.call_function(call, given)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        for one in (node, turned, stack):
            graph.erase_node(one)
        made.append(call)
    return made


def _only(stack: Node, turned: Node, pairs: Node) -> bool:
    """Whether a product is of a stack by itself, turned, and nobody else reads either."""
    if not isinstance(getattr(stack, "target", None), Columns) or not isinstance(turned, fx.Node):
        return False
    is_turned = turned.args[0] is stack and tuple(turned.args[1:]) in TURNED.get(turned.target, ())
    return is_turned and set(stack.users) == {turned, pairs} and set(turned.users) == {pairs}


def _fits(stack: Any, count: Any) -> bool:
    """Whether the kernel takes such vectors: of one width, each a row of a table that a plain index says, or there."""
    numbers = {one.numbers.node for one in stack.columns if one.table is not None}
    sized = isinstance(count, int) and len(stack.columns) <= MOST and len(numbers) <= MOST_NUMBERS
    return sized and stack.stacked and all(_plain(one) for one in stack.columns)


def _plain(one: Column) -> bool:
    if one.table is None:
        return one.numbers.node.meta["val"].dim() == 2 and not any(one.numbers.first)
    simple = one.pool == "one" and one.offsets is None and one.numbers.boundaries is None and not one.numbers.code
    return simple and one.numbers.inner_dim < 0
