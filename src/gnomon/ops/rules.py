"""Rules that several families share: dims of elementwise ops, operands that a backward reads.

Each has the signature of the field of `OpKind` that it is for. Leaves out rules of one family, which are in its file.
"""

from __future__ import annotations

from collections.abc import Collection

from gnomon.ops.op import Op, Problem, Tensors


def first_dims(op: Op, block: Tensors) -> Problem:
    """Writes the dims of the first input; other inputs have some of them and are spread over the rest."""
    left, out = block.tensor(op.inputs[0]), block.tensor(op.outputs[0])
    if left.dims != out.dims:
        return f"{op.kind} reads {left} but writes {out}; their dims must agree"
    for name in op.inputs[1:]:
        extra = [d.name for d in block.tensor(name).atoms if d not in left.atoms]
        if extra:
            return f"{block.tensor(name)} has dims {extra} that {left} has not"
    return None


def cannot_write(op: Op, block: Tensors) -> str:
    """What to say of an op whose output does not follow from its first two inputs."""
    left, right, out = (block.tensor(name) for name in (*op.inputs[:2], op.outputs[0]))
    return f"{op.kind} of {left} and {right} cannot write {out}"


def contracted_dims(op: Op, block: Tensors, without: Collection[str] = ()) -> Problem:
    """Each contracted dim is in both operands, and the output has all other dims of the two but `without`."""
    left, right, out = (block.tensor(n) for n in (op.inputs[0], op.inputs[1], op.outputs[0]))
    for name in op.contracts:
        for side in (left, right):
            if name not in [d.name for d in side.atoms]:
                return f"contracts {name!r}, which is not a dim of {side}"
    rest = {d.name for d in (*left.atoms, *right.atoms)} - set(op.contracts) - set(without)
    if {d.name for d in out.atoms} != rest:
        return f"writes {out}, but {left} × {right} over {op.contracts} gives dims {sorted(rest)}"
    return None


def saves_operands(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Of a product: each operand, where the other one wants a gradient."""
    left = op.inputs[:1] if op.inputs[1] in needs_grad else ()
    return (*left, *(op.inputs[1:2] if op.inputs[0] in needs_grad else ()))


def saves_inputs(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """All that it reads."""
    return op.inputs


def saves_output(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """What it wrote."""
    return op.outputs[:1]
