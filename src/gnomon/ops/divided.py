"""The way that most ops run on divided tensors: each axis divides the work along one dim.

`plain_strategy` is where every kind begins; `own_collective` makes a collective of an op's own algorithm. Leaves out
what kinds do otherwise, which is in their files.
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.errors import PlanError
from gnomon.ops.op import Op
from gnomon.ops.strategy import Division, Strategy
from gnomon.tensors.dims import Number
from gnomon.tensors.layout import Collective, CollectiveKind, Phase, Sharding
from gnomon.tensors.names import base, is_sequence
from gnomon.tensors.tensor import Tensor

AXES = ("cp", "tp", "etp")
"""Axes that divide work inside a block. `ep` divides experts' weights and moves rows; data-parallel axes divide
nothing here."""

BOTH: tuple[Phase, ...] = ("forward", "backward")


def plain_strategy(op: Op, setting: Division) -> Strategy:
    """Divides an op by the dims of its tensors, or by what capture found of it."""
    return _captured(op, setting) if op.captured is not None else _plain(op, setting)


def _owner(op: Op, setting: Division, axis: str) -> str | None:
    """The dim of the op's work that `axis` divides: that of its weight, else of its outputs, else of its inputs; a
    sequence only if nothing else."""
    if setting.scene.ranks(axis) == 1:
        return None
    names = (
        (*op.inputs[1:2], *op.outputs, *op.inputs)
        if op.contracts or op.does == "looks up"
        else (*op.outputs, *op.inputs)
    )
    # In order: the weight decides how a matmul is divided (column or row), whatever its input was divided by before.
    dims = [dim for name in names if (dim := setting.home(name).dim_of(axis)) is not None]
    # A rank of tp with part of the heads works on all positions, which are gathered before.
    return next((dim for dim in dims if not is_sequence(dim)), dims[0] if dims else None)


def _agrees(op: Op, dim: str | None, owner: str | None) -> bool:
    """Whether a tensor divided along `dim` fits work divided along `owner`: the same dim; query and key heads
    together; positions before and after (pixels and patches, queries and keys), of which a rank has the same part."""
    if dim is None or owner is None or dim == owner:
        return dim == owner
    if is_sequence(dim) and is_sequence(owner):
        return True
    return base(dim) in op.rules.together and base(owner) in op.rules.together


def _plain(op: Op, setting: Division) -> Strategy:
    """Each axis divides the op along one dim: tensors that have it are divided, the others whole, and what was summed
    over is partial."""
    inputs = [setting.home(name) for name in op.inputs]
    outputs = [setting.home(name) for name in op.outputs]
    grads: list[list[str]] = [[] for _ in inputs]
    for axis in AXES:
        owner = _owner(op, setting, axis)
        if owner is None:
            continue
        inputs = [_along(op, n, s, axis, owner, setting) for n, s in zip(op.inputs, inputs, strict=True)]
        outputs = [_along(op, n, s, axis, owner, setting) for n, s in zip(op.outputs, outputs, strict=True)]
        # The output is divided: an input that is whole gets only this rank's term of its gradient.
        if any(s.dim_of(axis) for s in outputs):
            if op.does == "multiplies rows":
                continue  # dispatch adds up the rows' gradients; an expert's weights are no replicas on these axes
            for index, sharding in enumerate(inputs):
                if sharding.dim_of(axis) is None:
                    grads[index].append(axis)
        elif axis == "etp" and op.does == "multiplies rows":
            continue  # `combine` adds the parts up while it scatters the rows
        # The divided dim is summed over, so each rank has a term of the sum.
        elif op.contracts or op.rules.sums:
            outputs = [s.with_partial(axis) for s in outputs]
        else:
            raise PlanError(
                f"{op.path}: no known way to run {op.kind} when {axis} divides {owner!r}, which its "
                f"output has not; use "
                f"{axis} = 1, or a layout rule that keeps {owner!r} whole"
            )
    name = "local"
    if (tp := _owner(op, setting, "tp")) is not None and op.contracts and not is_sequence(tp):
        name = "row" if tp in op.contracts else "column"
    elif op.does == "looks up" and any("tp" in s.partial for s in outputs):
        name = "vocab_parallel"  # the rows are divided, not the columns
    return Strategy(
        name=name, inputs=tuple(inputs), outputs=tuple(outputs), grad_partial=tuple(tuple(g) for g in grads)
    )


def _along(op: Op, name: str, home: Sharding, axis: str, owner: str, setting: Division) -> Sharding:
    """What a tensor must be where `axis` divides the op along `owner`: at home if that fits; of a matmul, divided
    along `owner` where it has that and lies divided along another dim; else whole."""
    dim = home.dim_of(axis)
    if _agrees(op, dim, owner):
        return home
    has_it = dim is not None and any(atom.name == owner for atom in setting.block.tensor(name).atoms)
    # An all-to-all in place of a gather, where the tensor has the dim.
    return home.without(axis).with_shard(axis, owner) if op.contracts and has_it else home.without(axis)


def _captured(op: Op, setting: Division) -> Strategy:
    """A captured op is divided along a dim only if all its outputs have it and its code does not look across it;
    otherwise every rank runs all of it."""
    assert op.captured is not None, "of captured ops only"
    inputs = [setting.home(name) for name in op.inputs]
    outputs = [setting.home(name) for name in op.outputs]
    grads: list[list[str]] = [[] for _ in inputs]
    for axis in AXES:
        owner = _owner(op, setting, axis)
        if owner is None:
            continue
        if owner in op.captured.summed and not any(s.dim_of(axis) for s in outputs):
            inputs = [s if _agrees(op, s.dim_of(axis), owner) else s.without(axis) for s in inputs]
            outputs = [s.with_partial(axis) for s in outputs]
            continue
        made_here = not any(s.dim_of(axis) for s in inputs)  # counts positions, or cuts them out of a longer table
        free = not {owner, "*"} & set(op.captured.whole) and not made_here
        if free and all(_agrees(op, s.dim_of(axis), owner) for s in outputs):
            inputs = [s if _agrees(op, s.dim_of(axis), owner) else s.without(axis) for s in inputs]
            for index, sharding in enumerate(inputs):
                if sharding.dim_of(axis) is None:
                    grads[index].append(axis)
        else:
            inputs, outputs = [s.without(axis) for s in inputs], [s.without(axis) for s in outputs]
    return Strategy(
        name="local", inputs=tuple(inputs), outputs=tuple(outputs), grad_partial=tuple(tuple(g) for g in grads)
    )


def own_collective(
    op: Op,
    setting: Division,
    kind: CollectiveKind,
    axis: str,
    size: Number,
    phase: Phase,
    tensor: str,
    *,
    steps: int = 1,
) -> Collective:
    """One that an op runs inside, over the ranks of an axis, `steps` times for its `size` bytes each."""
    return Collective(
        kind=kind,
        axis=axis,
        ranks=setting.scene.ranks(axis),
        bytes=size,
        phase=phase,
        path=op.path,
        tensor=tensor,
        inside=True,
        steps=steps,
    )


def with_inside(
    plain: Strategy, name: str, inside: tuple[Collective, ...], sizes: Mapping[str, Number] | None = None
) -> Strategy:
    return Strategy(
        name=name,
        inputs=plain.inputs,
        outputs=plain.outputs,
        grad_partial=plain.grad_partial,
        inside=inside,
        sizes=sizes or {},
    )


def row_elements(op: Op, setting: Division, sharding: Sharding, over: str) -> Number:
    """Rows of the first input on one rank: its elements without the dim `over`, at one byte each."""
    tensor = setting.block.tensor(op.inputs[0])
    # int8 counts elements: callers multiply by the bytes of their statistics.
    dims = tuple(dim for dim in tensor.dims if dim.name != over)
    return setting.scene.bytes(Tensor(name=tensor.name, dims=dims, dtype="int8"), sharding)
