"""Which zeros of a model's weights make other weights idle: attributes of tensors, propagated forward and backward.

`needed(graph, kept)` takes where each matrix is not zero and returns where it still counts. Forward: an output whose
row is zero wherever its inputs are not is zero itself, and stays so through what maps 0 to 0 (activations, gates,
attention's values, sums of zeros); a column that only meets zeros is idle. Backward: what no later op reads is idle,
through the same ops, and so is the row that makes it. Repeated until nothing changes; a parameter that several calls
share counts where any of them needs it. A block's outputs are all read. Results stay what they are, number by number
(where all numbers are finite). Pure: numpy. Leaves out norms and what mixes places (rotary embeddings, softmax), behind
which everything counts, and experts, whose rows are found at run time.
Source: Zheng et al., SparTA (2022), the propagation of sparsity attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from gnomon.graph.graph import Graph
from gnomon.graph.types import Block
from gnomon.ops.op import Op

Mask = NDArray[np.bool_]
ZERO_TO_ZERO = ("gelu", "gelu_tanh", "gelu_new", "quick_gelu", "relu", "relu2", "silu", "tanh")
"""Activations of which 0 makes 0."""


def columns_read(graph: Graph, kept: Mapping[str, Mask]) -> dict[str, Mask]:
    """Finds the part of each mask that anything reads. kept: full name of a parameter -> where it is not zero,
    (outputs, inputs); of those that are not named everything counts."""
    out = {name: mask.copy() for name, mask in kept.items()}
    # Masks only shrink, and there are finitely many numbers: it ends.
    while True:
        counts = {name: np.zeros_like(mask) for name, mask in out.items()}
        for layer in graph.layers():
            block = graph.block(layer.call.block)
            names = {one.name: layer.call.parameter_name(one.name, layer.index) for one in block.parameters}
            own = {name: out[full] for name, full in names.items() if full in out}
            if not own:
                continue
            for name, mask in _of_block(block, own).items():
                # Or over calls: a shared parameter counts where any of its uses needs it.
                counts[names[name]] |= mask
        if all(np.array_equal(counts[name], out[name]) for name in out):
            return out
        out = counts


def _of_block(block: Block, kept: Mapping[str, Mask]) -> dict[str, Mask]:
    """One pass forward and one backward."""
    live: dict[str, Mask] = {}
    for op in block.ops:
        for name in op.outputs:
            live[name] = _forward(op, block, kept, live)
    read = {name: np.zeros(_size(block, name), np.bool_) for name in live}
    for name in block.outputs:
        if name in read:
            read[name][:] = True
    counts = {name: np.zeros_like(mask) for name, mask in kept.items()}
    for op in reversed(block.ops):
        _backward(op, block, kept, live, read, counts)
    return counts


def _size(block: Block, name: str) -> int:
    """Numbers of a tensor that a position has."""
    return prod(atom.size or 1 for atom in block.tensor(name).atoms)


def _live(name: str, block: Block, live: Mapping[str, Mask]) -> Mask:
    return live[name] if name in live else np.ones(_size(block, name), np.bool_)


def _any(mask: Mask, axis: int) -> Mask:
    return np.asarray(mask.any(axis), np.bool_)


def _weight(op: Op, block: Block, kept: Mapping[str, Mask]) -> str | None:
    """The matrix of a linear that is known; None for another op."""
    if op.kind != "linear" or len(op.inputs) < 2 or op.inputs[1] not in kept:
        return None
    # Another shape is another layout (experts, a view) whose rows and columns would be misread.
    shape = _size(block, op.outputs[0]), _size(block, op.inputs[0])
    return op.inputs[1] if kept[op.inputs[1]].shape == shape else None


def _passes(op: Op, block: Block) -> bool:
    """Whether it maps each place by itself, and zeros to zeros."""
    if len({_size(block, name) for name in (*op.inputs, *op.outputs)}) != 1:
        return False
    if op.kind == "activation":
        return op.attr("fn", "") in ZERO_TO_ZERO
    return op.kind == "add"


def _gates(op: Op, block: Block) -> bool:
    plain = not {"limit", "alpha"} & set(dict(op.attrs))  # GPT-OSS adds 1 to what is gated
    same = len({_size(block, name) for name in (*op.inputs, *op.outputs)}) == 1
    return op.kind == "glu" and plain and same and op.attr("fn", "silu") in ZERO_TO_ZERO


def _groups(op: Op, block: Block) -> int:
    """Heads that share a head of values; 0 for what is no attention with keys and values by heads."""
    if op.kind != "attention" or len(op.inputs) < 3:
        return 0
    out, value = _size(block, op.outputs[0]), _size(block, op.inputs[2])
    return out // value if out % value == 0 else 0


def _by_heads(mask: Mask, op: Op, block: Block) -> Mask:
    """Values' places as they lie in the result: each head as often as it is shared."""
    width = block.tensor(op.outputs[0]).atoms[-1].size or 1
    # [kv heads, head_dim] -> [heads, head_dim]: head h of queries reads head h // groups of values.
    return np.repeat(mask.reshape(-1, width), _groups(op, block), 0).ravel()


def _forward(op: Op, block: Block, kept: Mapping[str, Mask], live: Mapping[str, Mask]) -> Mask:
    """Marks where a result may be other than zero."""
    every = np.ones(_size(block, op.outputs[0]), np.bool_)
    if (weight := _weight(op, block, kept)) is not None:
        # A bias makes every output other than zero.
        return every if len(op.inputs) > 2 else _any(kept[weight][:, _live(op.inputs[0], block, live)], 1)
    if _passes(op, block):
        return _any(np.stack([_live(name, block, live) for name in op.inputs]), 0)
    if _gates(op, block):
        # A product is zero where either factor is.
        return _live(op.inputs[0], block, live) & _live(op.inputs[1], block, live)
    if _groups(op, block):
        return _by_heads(_live(op.inputs[2], block, live), op, block)
    return every


def _backward(
    op: Op, block: Block, kept: Mapping[str, Mask], live: Mapping[str, Mask], read: dict[str, Mask],
    counts: dict[str, Mask],
) -> None:  # fmt: skip
    """Adds what an op reads of its inputs, as far as its own results are read."""

    def reads(name: str, mask: Mask) -> None:
        if name in read:
            read[name] |= mask

    wanted = read[op.outputs[0]]
    if (weight := _weight(op, block, kept)) is not None:
        # Counts: not zero, in a row that is read, and a column that meets something other than zero. [outputs, inputs]
        used = kept[weight] & wanted[:, None] & _live(op.inputs[0], block, live)[None]
        counts[weight] |= used
        reads(op.inputs[0], _any(used, 0))
        return
    if _passes(op, block):
        for name in op.inputs:
            reads(name, wanted)
        return
    if _gates(op, block):
        gate, up = op.inputs
        reads(gate, wanted & _live(up, block, live))
        reads(up, wanted & _live(gate, block, live))
        return
    some = any(read[name].any() for name in op.outputs)
    for number, name in enumerate(op.inputs):
        if number == 2 and _groups(op, block):
            width = block.tensor(op.outputs[0]).atoms[-1].size or 1
            # [kv heads, groups, head_dim]: a value counts where any of the heads that share it is read.
            reads(name, _any(wanted.reshape(-1, _groups(op, block), width), 1).ravel())
        else:
            reads(name, np.full(_size(block, name), some))
        if name in counts:  # a matrix that another op than a linear reads
            counts[name] |= kept[name]
