"""Weights that bitsandbytes has quantised, in a folder in Hugging Face's layout: which tensors make one.

A weight `w` in NF4 is its codes under `w`, and beside them `w.absmax` (scales of blocks), `w.quant_map` (the codes'
values), `w.nested_absmax` and `w.nested_quant_map` where scales are quantised too, and
`w.quant_state.bitsandbytes__nf4`, JSON as bytes. `with_blocks` puts these in place of whole weights in a `Layout`;
`state_of` reads the JSON. Pure: no tensors (`gnomon.runtime.parameters.weights`). Source: bitsandbytes 0.50,
QuantState.as_dict.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

from gnomon.errors import InputError
from gnomon.formats.huggingface.pieces import Shape, TensorPiece
from gnomon.formats.huggingface.weights import Layout
from gnomon.storage.tables import NF4_BLOCK, NF4_GROUP

STATE = ".quant_state.bitsandbytes__nf4"
OTHER_STATES = (".quant_state.bitsandbytes__fp4", ".SCB")
"""Tensors that stand beside weights in fp4, and in eight bits."""
CODES, SCALES, GROUPS = "", ".absmax", ".nested_absmax"
MAP, NESTED_MAP = ".quant_map", ".nested_quant_map"
"""What four bits of a code stand for, and eight bits of a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightState:
    """What the JSON beside a weight says."""

    shape: Shape
    """Of the weight."""
    dtype: str
    """That it had: float32, bfloat16, float16."""
    mean: float
    """Of the scales; 0 where they are not quantised."""


def with_blocks(layout: Layout, shapes: Mapping[str, Shape], where: str) -> Layout:
    """The layout for a folder with tensors of these shapes: the same where nothing is in four bits. InputError for
    what is not read, naming the folder `where`."""
    for name in shapes:
        if name.endswith(OTHER_STATES):
            raise InputError(f"{where}: {name} says fp4 or eight bits; of quantised weights only NF4 is read")
    pieces, found = dict(layout.pieces), dict[str, Shape]()
    for name, tensor_pieces in layout.pieces.items():
        states = [piece.tensor for piece in tensor_pieces if f"{piece.tensor}{STATE}" in shapes]
        if not states:
            continue
        (tensor, *_), whole = states, tensor_pieces[0]
        if len(tensor_pieces) > 1 or whole.pick or whole.order:
            raise InputError(
                f"{where}: {name} is part of {tensor}, which is in four bits; only weights with a tensor of their own "
                f"are read so; give the folder that it was made from, which is quantised as it is read"
            )
        found[name] = whole.shape
        pieces[name] = tuple(_pieces(tensor, prod(whole.shape), shapes))
    return replace(layout, pieces=pieces, four_bits=found) if found else layout


def _pieces(tensor: str, elements: int, shapes: Mapping[str, Shape]) -> list[TensorPiece]:
    # Blocks run through the weight as one row of numbers, so that one may end inside a row of the matrix.
    blocks = -(-elements // NF4_BLOCK)
    sizes = {SCALES: (blocks,), MAP: (2**4,), STATE: shapes[f"{tensor}{STATE}"]}
    if f"{tensor}{GROUPS}" in shapes:
        sizes |= {GROUPS: (-(-blocks // NF4_GROUP),), NESTED_MAP: (2**8,)}
    # Two codes a byte, in a column: that is the shape in the file.
    sizes |= {CODES: (-(-elements // 2), 1)}
    return [TensorPiece(tensor=f"{tensor}{what}", shape=shape, view=shape) for what, shape in sizes.items()]


def state_of(text: str, tensor: str, shape: Shape) -> WeightState:
    """What the JSON beside `tensor` says. InputError for other blocks than of 64, groups than of 256, another shape."""
    try:
        record = json.loads(text)
        shape_said = tuple(int(size) for size in record["shape"])
        state = WeightState(shape=shape_said, dtype=str(record["dtype"]), mean=float(record.get("nested_offset", 0.0)))
        sizes = record["blocksize"], record.get("nested_blocksize", NF4_GROUP)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{tensor}{STATE} cannot be read: {error}") from error
    if sizes != (NF4_BLOCK, NF4_GROUP):
        raise InputError(
            f"{tensor} has a scale for {sizes[0]} weights and one of these for {sizes[1]} scales; only {NF4_BLOCK} "
            f"weights and {NF4_GROUP} scales are read"
        )
    if state.shape != shape:
        raise InputError(f"{tensor} was quantised as {list(state.shape)}, and the config.json says {list(shape)}")
    return state


def check_same(layout: Layout, names: Collection[str], where: str) -> None:
    """InputError where a folder has other weights in four bits than the model (`names`); nothing where it has none."""
    if layout.four_bits and (differing := sorted(set(layout.four_bits).symmetric_difference(names))):
        if not names:
            raise InputError(f"{where} has {differing[0]} in four bits; name the model with +qlora16 to train adapters")
        has, wants = ("in four bits", "whole") if differing[0] in layout.four_bits else ("whole", "in four bits")
        raise InputError(
            f"{where} has {differing[0]} {has}, and the model has it {wants}; give the folder that it was made from, "
            f"which is quantised as it is read"
        )
