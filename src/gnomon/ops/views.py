"""Kinds that lay elements out anew: views (`reshape`, `split`, `rename`) and copies (`concat`, `repeat`).

A view's output looks into the memory of its input. Leaves out views of captured models that hold ATen ops, whose kind
is `reshape` too, with `captured`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gnomon.ops.bases import MOVES_BYTES
from gnomon.ops.curve import once
from gnomon.ops.divided import AXES
from gnomon.ops.op import Op, Problem, Tensors
from gnomon.ops.rules import (
    as_many,
    cannot_write,
    changed_dim,
    extent,
    no_work,
    passed_on,
    per_element,
    per_element_back,
)
from gnomon.ops.strategy import Division, Strategy
from gnomon.tensors.dims import Dim
from gnomon.tensors.names import HEAD_DIMS


def _reshape_dims(op: Op, block: Tensors) -> Problem:
    """The same factors, in another order or otherwise joined; of a captured view any, as it was captured."""
    x, out = block.tensor(op.inputs[0]), block.tensor(op.outputs[0])
    # By name: two dims of the same size do not stand for each other, and a size may be known only with the workload.
    if op.captured is not None or sorted(a.name for a in x.atoms) == sorted(a.name for a in out.atoms):
        return None
    return cannot_write(op, block)


def _split_dims(op: Op, block: Tensors) -> Problem:
    """Parts that lack one dim, as many as that is long; or parts of one dim, one after the other."""
    x, parts = block.tensor(op.inputs[0]).dims, [block.tensor(name).dims for name in op.outputs]
    if all(len(part) == len(x) - 1 for part in parts):
        # Places of x that, left out, give the dims of every part. Such a dim is as long as there are parts.
        ways = [at for at in range(len(x)) if all(part == x[:at] + x[at + 1 :] for part in parts)]
        return None if any(extent(x[at : at + 1]) in (None, len(parts)) for at in ways) else cannot_write(op, block)
    # A part that equals x, or differs from it in several dims, gives None here.
    places = {changed_dim(x, part) for part in parts}
    if len(places) != 1 or None in places:
        return cannot_write(op, block)
    at = next(place for place in places if place is not None)
    return None if _add_up(x[at], [part[at] for part in parts]) else cannot_write(op, block)


def _add_up(whole: Dim, parts: Sequence[Dim]) -> bool:
    """Whether parts are as long as the whole, as far as their sizes are known."""
    sizes, total = [extent((part,)) for part in parts], extent((whole,))
    return total is None or None in sizes or sum(size or 0 for size in sizes) == total


def _rename_dims(op: Op, block: Tensors) -> Problem:
    """Checks that dims match place by place, but for dims of one element that the result leaves out."""
    x, out = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    return None if as_many(x, out) and len(out) <= len(x) else cannot_write(op, block)


def _concat_dims(op: Op, block: Tensors) -> Problem:
    """Parts that differ from the result in one dim, which is as long as theirs together; a part may lack dims of the
    result, over which it is spread (along the joined dim: it is one element long)."""
    parts, out = [block.tensor(name).dims for name in op.inputs], block.tensor(op.outputs[0]).dims
    # Only a part with all dims says along which one is joined; without such a part the set is empty, which is refused
    # too.
    places = {changed_dim(part, out) for part in parts if len(part) == len(out)}
    if len(places) != 1 or None in places:
        return cannot_write(op, block)
    at = next(place for place in places if place is not None)
    rest = {dim.name for place, dim in enumerate(out) if place != at}
    lengths = list[Dim]()
    for part in parts:
        own = [dim for dim in part if dim.name not in rest]
        if len(own) > 1:
            return cannot_write(op, block)
        # A part without the joined dim adds one element to it.
        lengths.append(own[0] if own else Dim(name="one", size=1))
    return None if _add_up(out[at], lengths) else cannot_write(op, block)


def _repeat_dims(op: Op, block: Tensors) -> Problem:
    """One dim is as long several times, or none (a copy)."""
    x, out = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    if x == out:
        return None
    at = changed_dim(x, out)
    if at is None:
        return cannot_write(op, block)
    before, after = extent(x[at : at + 1]), extent(out[at : at + 1])
    return None if before is None or after is None or after % before == 0 else cannot_write(op, block)


def _renamed(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Divided where both tensors are, in the same place; else every rank has all of it."""
    home_in, home_out = setting.home(op.inputs[0]), setting.home(op.outputs[0])
    places = [
        {atom.name: place for place, dim in enumerate(setting.block.tensor(name).dims) for atom in dim.atoms}
        for name in (op.inputs[0], op.outputs[0])
    ]
    for axis in AXES:
        before, after = home_in.dim_of(axis), home_out.dim_of(axis)
        if before is None or after is None or places[0][before] != places[1][after]:
            home_in, home_out = home_in.without(axis), home_out.without(axis)
    return (Strategy(name="local", inputs=(home_in,), outputs=(home_out,), grad_partial=((),)),)


RESHAPE = replace(
    MOVES_BYTES,
    name="reshape",
    served="free",
    signature="x -> a view of x in other dims",
    dims=_reshape_dims,
    memory="view",
    saves="nothing",
    forward=no_work,
    backward=passed_on,
    price="free",
    grad_price="free",
    gradient="passed on",
    zeros="by names",
    torch="views:reshape",
)

SPLIT = replace(
    MOVES_BYTES,
    name="split",
    served="free",
    signature="x -> views of its parts along one dim, or of each of its slices",
    dims=_split_dims,
    memory="part",
    saves="nothing",
    forward=no_work,
    backward=passed_on,
    price="free",
    grad_price="free",
    gradient="passed on",
    zeros="cut",
    torch="views:split",
)

RENAME = replace(
    MOVES_BYTES,
    name="rename",
    served="free",
    signature="x -> x with other names for its dims",
    dims=_rename_dims,
    memory="view",
    saves="nothing",
    forward=no_work,
    backward=passed_on,
    price="free",
    grad_price="free",
    gradient="passed on",
    strategies=_renamed,
    zeros="in place",
    torch="views:rename",
)

CONCAT = replace(
    MOVES_BYTES,
    name="concat",
    served="free",
    signature="a, b, … -> one after another along a dim",
    dims=_concat_dims,
    saves="nothing",
    forward=per_element(0),
    backward=per_element_back(0),
    zeros="joined",
    torch="views:concat",
)

REPEAT = replace(
    MOVES_BYTES,
    name="repeat",
    served="free",
    signature="x -> copies along a dim (kv_heads -> heads)",
    dims=_repeat_dims,
    saves="nothing",
    forward=per_element(0),
    backward=per_element_back(0),
    grad_price=once("reduce"),
    together=HEAD_DIMS,
    zeros="unknown",
    torch="lowered",
)

KINDS = (RESHAPE, SPLIT, RENAME, CONCAT, REPEAT)
