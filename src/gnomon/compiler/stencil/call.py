"""Stencils of a graph as calls: `fuse(graph)` puts one in place of each region, tried beside ATen like a group.

A call computes its parts in order, each by the C++ of its pipeline over the tiles that `tile` chose for this machine.
Leaves out what a region is (`find`).
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import kernel_of
from gnomon.compiler.machine import this_machine
from gnomon.compiler.node import Node
from gnomon.compiler.stencil import cpp_rows
from gnomon.compiler.stencil.find import Region, few_channels, regions, stencil
from gnomon.compiler.stencil.lags import Pipeline, parts, pipeline
from gnomon.compiler.stencil.stages import Stencil
from gnomon.compiler.stencil.tile import Tile, block, foretold, sizes, tiled
from gnomon.compiler.tiles.body import UnfitError
from gnomon.compiler.tiles.device import this_device
from gnomon.compiler.tune.tried import TriedKernel

FEWEST = 4096
"""Results from which on a convolution is a stencil; smaller ones are for kernels that begin faster (`thin`)."""
PARALLEL = 1 << 16
"""Points of all stages from which on threads share them."""


@cache
def _kernel(source: str) -> Callable[..., int] | None:
    return kernel_of(source, ctypes.c_void_p, ctypes.c_void_p)


@dataclass(slots=True)
class StencilKernel:
    """One kernel of a stencil."""

    of: Pipeline
    source: str
    numbers: list[Any]
    tile: Tile
    places: dict[Any, int] = field(default_factory=dict)
    """By node: the array that it is."""

    def run(self, arrays_of: dict[Node, Tensor]) -> bool:
        """Whether the kernel ran: from the inputs that are held, to outputs that are held then too."""
        function = _kernel(self.source)
        if function is None:
            return False
        arrays = [arrays_of[node] for node in (*self.of.stencil.inputs, *self.of.stencil.outputs)]
        pointers = (ctypes.c_void_p * len(arrays))(*[one.data_ptr() for one in arrays])
        by_node = dict(zip((*self.of.stencil.inputs, *self.of.stencil.outputs), arrays, strict=True))
        whole = self.of.sizes(self.of.stencil.stages[-1].sizes)
        tasks = [-(-whole[dim] // self.tile.size[dim]) for dim in range(3)]
        points = sum(one.meta["val"].numel() for one in (s.node for s in self.of.stencil.stages))
        written = sum(arrays_of[node].nbytes for node in self.of.stencil.outputs)
        parallel = torch.get_num_threads() > 1 and points >= PARALLEL
        # Results of more than half of the last cache would not be there when they are read.
        past = 2 * written > this_machine().l3_bytes
        host = (tasks[0], self.tile.size[0], tasks[1], self.tile.size[1], tasks[2], self.tile.size[2], parallel, past)
        numbers = [self._number(what, by_node) for what in self.numbers]
        array = (ctypes.c_int64 * (len(host) + len(numbers)))(*map(int, host), *numbers)
        return not function(ctypes.addressof(array), ctypes.addressof(pointers))

    def _number(self, what: tuple[str, Node, int], arrays: dict[Node, Tensor]) -> int:
        kind, node, dim = what
        whole = self.of.stencil.channel is not None
        if kind == "stride":
            tensor = arrays[node]
            return int((list(tensor.stride()) if whole else _kept(tensor.shape, tensor.stride()))[dim])
        shape = [int(size) for size in node.meta["val"].shape]
        return int((shape if whole else _kept(shape, shape))[dim])


def _kept(shape: Sequence[int], what: Sequence[int]) -> list[int]:
    """Keeps the entries of dims with more than one element."""
    return [int(one) for size, one in zip(shape, what, strict=True) if size > 1]


class StencilCall(TriedKernel):
    """A stencil as a function of its inputs, to its one output or several."""

    def __init__(self, of_stencil: Stencil, plain: Callable[..., Any]) -> None:
        """Is not tried yet. plain: the same by ATen."""
        self.made, self.plain = of_stencil, plain
        self.tile, self.tiles = tiled(of_stencil, this_device())
        self.parts = []
        for one in parts(of_stencil, self.tile.depth):
            of = pipeline(one, block(one))
            text, numbers = cpp_rows.text(of)
            best = min((foretold(of, size, this_device(), self.tile.depth) for size in sizes(of, this_device())),
                       key=lambda tile: tile.seconds)  # fmt: skip
            self.parts.append(StencilKernel(of, text, numbers, best))
        self.several = len(of_stencil.outputs) > 1
        source = "".join(f"{part.source}// {part.tile.size}\n" for part in self.parts)
        super().__init__("stencil", source, True)

    @property
    def texts(self) -> list[str]:
        return list(dict.fromkeys(part.source for part in self.parts))

    def run(self, *args: Tensor) -> Any:
        """Runs the kernels on these tensors, or ATen where one does not run."""
        arrays_of = dict(zip(self.made.inputs, args, strict=True))
        for node, one in arrays_of.items():
            if one.dim() and (one.stride(-1) != 1 or one.numel() == 1):
                arrays_of[node] = one.contiguous()
        for part in self.parts:
            for node in part.of.stencil.outputs:
                value = node.meta["val"]
                arrays_of[node] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if not part.run(arrays_of):
                return self.aten(*args)
            # What no later part reads is freed before the next one allocates.
            later = {n for p in self.parts[self.parts.index(part) + 1 :] for n in p.of.stencil.inputs}
            for node in list(arrays_of):
                if node not in later and node not in self.made.outputs:
                    del arrays_of[node]
        results = [arrays_of[node] for node in self.made.outputs]
        return results if self.several else results[0]

    def aten(self, *args: Tensor) -> Any:
        """Runs PyTorch's operations, one after another."""
        results = self.plain(*args)
        return list(results) if self.several else results[0]


# ---- in a graph of ATen's
def fuse(graph: fx.Graph) -> list[StencilCall]:
    """Puts a `StencilCall` in place of each stencil; returns all of the graph."""
    before = [node.target for node in graph.nodes if isinstance(node.target, StencilCall)]
    return before + [one for _, one in replaced(graph, StencilCall)]


def replaced(graph: fx.Graph, make: Callable[[Stencil, Callable[..., Any]], Any]) -> Iterator[tuple[Region, Any]]:
    """Puts what `make` makes of a stencil, and of the same by ATen, in place of each of a CPU's."""
    for region in regions(graph):
        try:
            found = stencil(region)
            small = max(prod(one.sizes) for one in found.stages) < FEWEST
            if small and any(few_channels(node) for node in region.members):
                continue
            if not worth(found) or any(node.meta["val"].device.type != "cpu" for node in found.outputs):
                continue
            built = make(found, _alone(region, found))
        except (UnfitError, ValueError):  # ValueError: shifts and sizes of unequal numbers of dims
            continue
        _place(graph, region, found, built)
        yield region, built


def worth(found: Stencil) -> bool:
    """Whether a stencil is more than a group of pointwise operations: neighbours of what it computes itself are read,
    or weights."""
    inner_fields = {one.node for one in found.stages}
    chained = any(any(read.shift) and read.field in inner_fields for one in found.stages for read in one.reads())
    edges = any(read.outside is not None for one in found.stages for read in one.reads())
    weighted = any(not hasattr(source, "shift") for one in found.stages for _, source in one.slots())
    boxed = any(one.box is not None for one in found.stages)
    shifted = sum(len({read.shift for read in one.reads()}) > 1 for one in found.stages)
    return bool(shifted) and (chained or edges or weighted or boxed)


def _alone(region: Region, found: Stencil) -> Callable[..., Any]:
    """The region's nodes as a function of the stencil's inputs."""
    graph = fx.Graph()
    places: dict[Node, Node] = {node: graph.placeholder(f"x{n}") for n, node in enumerate(found.inputs)}

    def of(node: Node) -> Node:
        if node not in places:
            if node.op in ("placeholder", "get_attr"):
                raise UnfitError("an input that is not read")
            places[node] = graph.node_copy(node, of)
        return places[node]

    members = set(region.members)
    needed: set[Node] = set()
    waiting = list(found.outputs)
    while waiting:
        node = waiting.pop()
        if node in needed or node in places:
            continue
        needed.add(node)
        waiting += node.all_input_nodes
    for node in sorted(needed, key=lambda n: n._sort_key):
        if node not in members and node.op != "call_function":
            raise UnfitError("an input that is not read")
        of(node)
    graph.output(tuple(places[node] for node in found.outputs))
    return fx.GraphModule(torch.nn.Module(), graph).forward  # type: ignore[no-any-return]


def _place(graph: fx.Graph, region: Region, found: Stencil, call: Any) -> None:
    """Has the call compute the outputs; what the region leaves unread goes, and who reads it comes after it."""
    order = {node: n for n, node in enumerate(graph.nodes)}
    last = max(
        (node for node in graph.nodes if node.op == "placeholder" or node in found.inputs), key=order.__getitem__
    )
    with graph.inserting_after(last):
        new = graph.call_function(call, tuple(found.inputs))
    results = [new]
    if call.several:
        new.meta["val"] = [node.meta["val"] for node in found.outputs]
        with graph.inserting_after(new):
            results = [graph.call_function(operator.getitem, (new, n)) for n in range(len(found.outputs))]
    for result, node in zip(results, found.outputs, strict=True):
        result.meta.update(node.meta)
        node.replace_all_uses_with(result)
    for node in reversed(region.members):
        if not node.users:
            graph.erase_node(node)
    # The call stands behind its last input. Whoever reads a result and stands before it is moved behind the results, in
    # the order that they had.
    end, late = max(results, key=lambda node: node._sort_key), set(results)
    for node in list(graph.nodes):
        if node is new:
            break
        if any(arg in late for arg in node.all_input_nodes):
            end.append(node)
            end = node
            late.add(node)
