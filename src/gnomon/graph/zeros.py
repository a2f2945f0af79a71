"""Which zeros of a model's weights make other weights idle: attributes of tensors, propagated forward and backward.

`columns_read(graph, kept, vectors)` takes where each matrix is not zero, and numbers of biases, norms and tables, and
returns where matrices still count. Forward, a place of a tensor is zero, a constant, or unknown: an output whose row is
zero wherever its inputs are not is its bias, a negative constant is zero behind a ReLU, and zeros stay so through what
maps 0 to 0 (activations, gates, norms without a mean, attention's values, views, sums of zeros); a column that only
meets zeros is idle. Backward: what no later op reads is idle, through the same ops, and so is the row that makes it.
Both go from layer to layer as tensors do, and are repeated until nothing changes; a parameter that several calls share
counts where any of them needs it. Results stay what they are, number by number (where all numbers are finite). Pure:
numpy. Leaves out constants that a later bias could take up, what mixes places (rotary embeddings, softmax), behind
which everything counts, and experts, whose rows are found at run time.
Source: Zheng et al., SparTA (2022), the propagation of sparsity attributes (its codes: pruned, constant, kept).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from gnomon.graph.graph import Graph
from gnomon.graph.types import Block, Layer
from gnomon.graph.wiring import reads, writes
from gnomon.ops.op import Op, Zeros

Mask = NDArray[np.bool_]
Values = NDArray[np.float32]
"""What each place of a tensor is for every token: 0, another constant, or NaN, which is any number."""
MOVED: tuple[Zeros, ...] = ("in place", "by names", "cut", "joined")
"""What kinds say whose results are numbers that were there before."""


@dataclass(frozen=True, slots=True)
class _Bits:
    """A mask in one bit a place: all matrices of a model are held at once."""

    packed: NDArray[np.uint8]
    shape: tuple[int, ...]

    @staticmethod
    def of(mask: Mask) -> _Bits:
        return _Bits(np.packbits(mask), mask.shape)

    @property
    def mask(self) -> Mask:
        return np.unpackbits(self.packed, count=prod(self.shape)).astype(np.bool_).reshape(self.shape)

    def joined(self, mask: Mask) -> _Bits:
        return _Bits(self.packed | np.packbits(mask), self.shape)


def columns_read(graph: Graph, masks_given: Mapping[str, Mask], vectors: Mapping[str, Values]) -> dict[str, Mask]:
    """masks_given: full name of a parameter -> where it is not zero, (outputs, inputs), read one at a time; of those
    that are not named everything counts. vectors: numbers of biases and norms; of a table of embeddings 0 for columns
    that are zero, NaN for others; nothing is known of those that are not named. A subset of `masks_given` for each."""
    out = {name: _Bits.of(masks_given[name]) for name in masks_given}
    # Masks only shrink, and there are finitely many numbers: it ends.
    while True:
        counts = _sweep(graph, out, vectors)
        if all(np.array_equal(counts[name].packed, out[name].packed) for name in out):
            return {name: bits.mask for name, bits in out.items()}
        out = counts


@dataclass(frozen=True, slots=True)
class _Site:
    """A layer and what is known of its parameters, by the names that its block has for them."""

    block: Block
    masks: Mapping[str, Mask]
    vectors: Mapping[str, Values]

    def size(self, name: str) -> int:
        """Numbers of a tensor that a token has."""
        return prod(atom.size or 1 for atom in self.block.tensor(name).atoms)

    def matrix(self, op: Op) -> str | None:
        """The matrix of a linear that is known; None for another op."""
        if op.rules.zeros_of(op) != "of the matrix" or len(op.inputs) < 2 or op.inputs[1] not in self.masks:
            return None
        shape = self.size(op.outputs[0]), self.size(op.inputs[0])
        return op.inputs[1] if self.masks[op.inputs[1]].shape == shape else None

    def vector(self, op: Op, at: int, size: int) -> Values:
        """A parameter as it meets each place of a tensor of that size: of a norm over a head's width each head. NaN
        where it is not known, 0 for none."""
        if len(op.inputs) <= at:
            return np.zeros(size, np.float32)
        values = self.vectors.get(op.inputs[at])
        is_dense = op.attr("fn", "") != "group"  # whose channels are no heads, but lie before positions
        if values is None or not values.size or size % values.size or (size > values.size and not is_dense):
            return np.full(size, np.nan, np.float32)
        return np.tile(values.ravel().astype(np.float32), size // values.size)

    def same_size(self, op: Op) -> bool:
        return len({self.size(name) for name in (*op.inputs, *op.outputs)}) == 1


def _site(graph: Graph, layer: Layer, bits: Mapping[str, _Bits], vectors: Mapping[str, Values]) -> _Site:
    block = graph.block(layer.call.block)
    names = {one.name: layer.call.parameter_name(one.name, layer.index) for one in block.parameters}
    masks = {name: bits[full].mask for name, full in names.items() if full in bits}
    return _Site(block, masks, {name: vectors[full] for name, full in names.items() if full in vectors})


def _sweep(graph: Graph, mask_bits: Mapping[str, _Bits], vectors: Mapping[str, Values]) -> dict[str, _Bits]:
    """One pass forward over all layers and one backward."""
    made_values: dict[str, Values] = {}
    read_masks: dict[str, Mask] = {}
    layers = graph.layers()
    for layer in layers:
        values = _values(_site(graph, layer, mask_bits, vectors), layer, made_values)
        for own, name in writes(graph, layer).items():
            # Nothing counts as read until the backward pass meets a reader, or it leaves the graph.
            made_values[name], read_masks[name] = values[own], np.zeros(values[own].size, np.bool_)
    for name in graph.outputs:
        read_masks[name][:] = True
    counts = {name: _Bits(np.zeros_like(bits.packed), bits.shape) for name, bits in mask_bits.items()}
    for layer in reversed(layers):
        site = _site(graph, layer, mask_bits, vectors)
        values = _values(site, layer, made_values)
        read = {name: np.zeros(one.size, np.bool_) for name, one in values.items()}
        for own, name in writes(graph, layer).items():
            read[own] |= read_masks[name]
        used = {name: np.zeros_like(mask) for name, mask in site.masks.items()}
        for op in reversed(site.block.ops):
            _backward(op, site, values, read, used)
        for own, source in reads(layer).items():
            if source in read_masks and own in read:
                read_masks[source] |= read[own]
        for name, mask in used.items():
            full = layer.call.parameter_name(name, layer.index)
            counts[full] = counts[full].joined(mask)  # a shared parameter counts where any of its uses needs it
    return counts


def _values(site: _Site, layer: Layer, made_values: Mapping[str, Values]) -> dict[str, Values]:
    """What is known of a layer's inputs and of all that it makes."""
    out = {
        own: made_values[source] if source in made_values else np.full(site.size(own), np.nan, np.float32)
        for own, source in reads(layer).items()
    }
    for op in site.block.ops:
        out |= zip(op.outputs, _forward(op, site, out), strict=True)
    return out


def _moves(op: Op, site: _Site) -> list[tuple[str, NDArray[np.intp], str, NDArray[np.intp]]]:
    """(input, its places, output, places of the same numbers there) of a view; nothing for what is none."""
    block = site.block
    how = op.rules.zeros_of(op)
    if how not in MOVED or op.captured is not None:
        return []
    if how in ("cut", "joined"):
        return list(_parts(op, site))
    x, out = op.inputs[0], op.outputs[0]
    if site.size(x) != site.size(out):
        return []
    places = np.arange(site.size(x))
    if how == "by names":
        names, out_names = ([atom.name for atom in block.tensor(name).atoms] for name in (x, out))
        if sorted(names) != sorted(out_names) or len({*names}) < len(names):
            return []
        sizes = [atom.size or 1 for atom in block.tensor(x).atoms]
        # Place k of the result is place places[k] of the input.
        places = places.reshape(sizes).transpose([names.index(name) for name in out_names]).ravel()
    return [(x, places, out, np.arange(site.size(out)))]


def _parts(op: Op, site: _Site) -> Iterator[tuple[str, NDArray[np.intp], str, NDArray[np.intp]]]:
    """Lists the parts of a whole: cut from it, or one after the other in it."""
    cut = op.rules.zeros_of(op) == "cut"
    whole, parts = (op.inputs[0], op.outputs) if cut else (op.outputs[0], op.inputs)
    if not cut and op.attr("reverse", False):
        parts = parts[::-1]
    dims = site.block.tensor(whole).dims
    sizes = [prod(atom.size or 1 for atom in dim.atoms) for dim in dims]
    # Numbered in the order of the whole: taking a range of a dim gives the places of a part in it.
    places, begin = np.arange(prod(sizes)).reshape(sizes), 0
    found: list[NDArray[np.intp]] = []
    for part in (site.block.tensor(name).dims for name in parts):
        if len(part) == len(dims) - 1:
            at = next((i for i in range(len(dims)) if part == dims[:i] + dims[i + 1 :]), None)
            if at is None or begin >= sizes[at]:
                return
            found.append(np.asarray(places.take(begin, at)))
            begin += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(dims, part, strict=False)) if a != b), None)
        if len(part) != len(dims) or at is None:
            return
        long = prod(atom.size or 1 for atom in part[at].atoms)
        found.append(places.take(np.arange(begin, min(begin + long, sizes[at])), at))
        begin += long
    if sum(one.size for one in found) != places.size:  # along a dim whose size is not known, or over others
        return
    if any(site.size(name) != own.size for name, own in zip(parts, found, strict=True)):
        return
    for name, own in zip(parts, found, strict=True):
        every = np.arange(own.size)
        yield (whole, own.ravel(), name, every) if cut else (name, every, whole, own.ravel())


def _passes(op: Op, site: _Site) -> bool:
    """Whether it maps each place by itself, and zeros to zeros."""
    return op.rules.zeros_of(op) == "all" and site.same_size(op)


def _gates(op: Op, site: _Site) -> bool:
    """Returns whether an op multiplies two tensors elementwise, so that a zero of either is one of the result."""
    return op.rules.zeros_of(op) == "either" and site.same_size(op) and len(op.inputs) == 2


def _groups(op: Op, site: _Site) -> int:
    """Heads that share a head of values; 0 for what is no attention with keys and values by heads."""
    if op.rules.zeros_of(op) != "of the values" or len(op.inputs) < 3:
        return 0
    out, value = site.size(op.outputs[0]), site.size(op.inputs[2])
    # Of grouped queries: the output has query heads x width, the values key-value heads x width.
    return out // value if out % value == 0 else 0


def _forward(op: Op, site: _Site, values: Mapping[str, Values]) -> list[Values]:
    """What is known of an op's results."""
    out = {name: np.full(site.size(name), np.nan, np.float32) for name in op.outputs}
    operand_values = [values.get(name, np.full(site.size(name), np.nan, np.float32)) for name in op.inputs]
    first = op.outputs[0]
    if moves := _moves(op, site):
        for source, places, target, to in moves:
            x = values.get(source)
            if x is not None:
                out[target][to] = x[places] if op.does != "drops" else np.where(x[places] == 0, 0, np.nan)
    elif (weight := site.matrix(op)) is not None:
        # An output all of whose weights are zero, or meet zeros, is its bias for every token.
        bias = site.vector(op, 2, site.size(first))
        if op.attr("factor", 1.0) != 1.0:  # which multiplies the bias too, and rounds it
            bias = np.where(bias == 0, bias, np.float32(np.nan))
        # NaN != 0, so columns that meet unknown numbers count. A row without a weight in any of those is its bias.
        out[first] = np.where(site.masks[weight][:, operand_values[0] != 0].any(1), np.float32(np.nan), bias)
    elif _passes(op, site):
        out[first] = _passed(op, operand_values)
    elif _gates(op, site):
        out[first] = np.where((operand_values[0] == 0) | (operand_values[1] == 0), 0, np.nan)
    elif op.rules.zeros_of(op) == "of the weight":
        out[first] = _normed(op, site, operand_values[0])
    elif op.rules.zeros_of(op) == "of the table" and len(op.inputs) == 2:
        out[first] = np.where(site.vector(op, 1, site.size(first)) == 0, 0, np.nan)
    elif groups := _groups(op, site):
        width = site.block.tensor(first).atoms[-1].size or 1
        # Value head h serves the query heads h x groups to h x groups + groups - 1: each row is repeated that often.
        every = np.repeat(operand_values[2].reshape(-1, width), groups, 0).ravel()
        out[first] = np.where(every == 0, 0, np.nan)
    return [out[name].astype(np.float32) for name in op.outputs]


def _passed(op: Op, operand_values: list[Values]) -> Values:
    # Zeros alone are certain: a NaN here is any number, and two of them may or may not add up to 0.
    zero = np.stack(operand_values) == 0
    if len(operand_values) == 1 and op.attr("fn", "") == "relu":  # of a NaN nothing is known
        return np.where(operand_values[0] <= 0, np.float32(0), operand_values[0])
    if op.does == "adds" and len(operand_values) == 2 and op.attr("factor", 1.0) == 1.0:
        return np.where(zero[0], operand_values[1], np.where(zero[1], operand_values[0], np.float32(np.nan)))
    return np.where(zero.all(0), np.float32(0), np.float32(np.nan))


def _normed(op: Op, site: _Site, x: Values) -> Values:
    """A norm's result is its weight's zero, and without a mean its input's."""
    size, fn = x.size, op.attr("fn", "rms")
    weight, bias = (site.vector(op, at, size) for at in (1, 2))
    # Layer norm subtracts the mean of all places, so that a place that is 0 is none after it.
    zero = (x == 0) & (fn == "rms")
    if len(op.inputs) > 1 and not op.attr("offset", 0.0):
        zero |= weight == 0
    return np.where(zero, bias, np.float32(np.nan))


def _backward(op: Op, site: _Site, values: Mapping[str, Values], read: dict[str, Mask], used: dict[str, Mask]) -> None:
    """Adds what an op reads of its inputs, as far as its own results are read."""

    def reads_of(name: str, mask: Mask) -> None:
        if name in read:
            read[name] |= mask

    def live(name: str) -> Mask:
        return values[name] != 0 if name in values else np.ones(site.size(name), np.bool_)

    out_mask = read[op.outputs[0]]
    if moves := _moves(op, site):
        for source, places, target, to in moves:
            if source in read:
                read[source][places] |= read[target][to]
        return
    if (weight := site.matrix(op)) is not None:
        # A weight counts if it is not zero, its output is read and its input is not always zero.
        now = site.masks[weight] & out_mask[:, None] & live(op.inputs[0])[None]
        used[weight] |= now
        reads_of(op.inputs[0], np.asarray(now.any(0), np.bool_))
        return
    if _passes(op, site):
        for name in op.inputs:
            reads_of(name, out_mask)
        return
    if _gates(op, site):
        gate, up = op.inputs
        # Where the other factor is always zero, whatever this one is changes nothing.
        reads_of(gate, out_mask & live(up))
        reads_of(up, out_mask & live(gate))
        return
    some = any(read[name].any() for name in op.outputs)
    for number, name in enumerate(op.inputs):
        if number == 2 and (groups := _groups(op, site)):
            width = site.block.tensor(op.outputs[0]).atoms[-1].size or 1
            # A head of values is read if any of the query heads that share it is.
            reads_of(name, np.asarray(out_mask.reshape(-1, groups, width).any(1), np.bool_).ravel())
        else:
            reads_of(name, np.full(site.size(name), some))
        if name in used:  # a matrix that another op than a linear reads
            used[name] |= site.masks[name]
