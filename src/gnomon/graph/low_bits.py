"""Which tensors need few bits because of their neighbours: bits of stored weights, propagated forward and backward.

`bits_needed(graph, products, tables)` gives the activations that can be stored in fewer bits than they are computed in,
with the same results: backward, one that only products with weights in few bits read, which round it to `products` bits
themselves (a scale for each row and group, so that rounding it earlier, or twice, is the same); forward, rows of a
table of few bits. Both pass through views that leave a row in its order, and through no other op: behind a maximum or
an activation a row's largest number, and so its scale, is another. Pure. Leaves out states, and what crosses layers,
which residual streams add to.
Source: Zheng et al., SparTA (2022), whose attribute has bits beside zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.graph.graph import Graph
from gnomon.graph.types import Block, Layer
from gnomon.ops.op import Op


def bits_needed(graph: Graph, bits_of_matmuls: Mapping[str, int], tables: Mapping[str, int]) -> dict[str, int]:
    """`layer.tensor` -> bits, of activations that a block makes and that are known to need few. bits_of_matmuls: full
    name of a linear's matrix -> bits that its kernel rounds activations to. tables: the same of a table of embeddings
    -> bits of its numbers."""
    out = {}
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        backward, forward = _read_in(block, layer, bits_of_matmuls), _made_in(block, layer, tables)
        for op in block.ops:
            for name in op.outputs:
                if bits := [found[name] for found in (backward, forward) if name in found]:
                    out[f"{layer.label}.{name}"] = min(bits)
    return out


def _is_same_row(op: Op, block: Block) -> bool:
    """Whether the result has the same numbers in the same order."""
    how = op.rules.zeros_of(op)
    if not op.rules.is_view or how not in ("in place", "by names") or op.captured is not None:
        return False
    before, after = ([atom.name for atom in block.tensor(name).atoms] for name in (op.inputs[0], op.outputs[0]))
    return how == "in place" or before == after


def _read_in(block: Block, layer: Layer, bits_of_matmuls: Mapping[str, int]) -> dict[str, int]:
    """Bits that the readers of a tensor need; those that need all are left out."""
    needed: dict[str, int] = {}
    whole = set(block.outputs)
    # Readers come after what they read: from the end backwards all readers of a tensor are known before the op that
    # makes it.
    for op in reversed(block.ops):
        for at, name in enumerate(op.inputs):
            bits = None
            if op.is_dense_linear and at == 0:
                bits = bits_of_matmuls.get(layer.call.parameter_name(op.inputs[1], layer.index))
            elif _is_same_row(op, block) and op.outputs[0] not in whole:
                bits = needed.get(op.outputs[0])
            if bits is None:
                whole.add(name)
            else:
                needed[name] = max(bits, needed.get(name, 0))
    return {name: bits for name, bits in needed.items() if name not in whole}


def _made_in(block: Block, layer: Layer, tables: Mapping[str, int]) -> dict[str, int]:
    """Bits that hold what a tensor is made of."""
    bits_made: dict[str, int] = {}
    for op in block.ops:
        bits = None
        if op.does == "looks up" and len(op.inputs) > 1:
            bits = tables.get(layer.call.parameter_name(op.inputs[1], layer.index))
        elif _is_same_row(op, block):
            bits = bits_made.get(op.inputs[0])
        if bits is not None:
            bits_made[op.outputs[0]] = bits
    return bits_made
