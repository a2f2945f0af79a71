"""Rules that several families share: dims of elementwise ops, operands that a backward reads, bytes moved.

Each has the signature of the field of `OpKind` that it is for. Leaves out rules of one family, which are in its file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from math import prod

from gnomon.ops.op import Op, Problem, Tensors
from gnomon.ops.work import GradOp, Setting, Work, nbytes
from gnomon.tensors.dims import Dim, Number, numel


def first_dims(op: Op, block: Tensors) -> Problem:
    """Writes the dims of the first input; other inputs have some of them and are spread over the rest."""
    lhs, out = block.tensor(op.inputs[0]), block.tensor(op.outputs[0])
    if lhs.dims != out.dims:
        return f"{op.kind} reads {lhs} but writes {out}; their dims must agree"
    for name in op.inputs[1:]:
        # Whole dims are compared: one of the same name and another size is no dim of the first input either.
        extra = [d.name for d in block.tensor(name).atoms if d not in lhs.atoms]
        if extra:
            return f"{block.tensor(name)} has dims {extra} that {lhs} has not"
    return None


def extent(dims: Iterable[Dim]) -> int | None:
    """Elements of a shape; None where the workload gives a size. A dim that is the same as another (`kv_seq` of `seq`)
    is of no known size here."""
    atoms = [atom.size for dim in dims for atom in dim.atoms]
    return None if None in atoms else prod(size for size in atoms if size is not None)


def as_many(before: Iterable[Dim], after: Iterable[Dim]) -> bool:
    """Whether two shapes may have as many elements: they do, or the workload says how many."""
    one, other = extent(before), extent(after)
    return one is None or other is None or one == other


def changed_dim(before: Sequence[Dim], after: Sequence[Dim]) -> int | None:
    """The place of the one dim in which two shapes of as many dims differ; None where none or several do."""
    if len(before) != len(after):
        return None
    places = [place for place, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    return places[0] if len(places) == 1 else None


def cannot_write(op: Op, block: Tensors) -> str:
    """What to say of an op whose outputs do not follow from its inputs."""
    inputs, outputs = ([str(block.tensor(name)) for name in names] for names in (op.inputs, op.outputs))
    return (
        f"{op.kind} of {' and '.join(inputs)} cannot write {' and '.join(outputs)}; its dims are: {op.rules.signature}"
    )


def contracted_dims(op: Op, block: Tensors, without: Collection[str] = ()) -> Problem:
    """Each contracted dim is in both operands, and the output has all other dims of the two but `without`."""
    lhs, right, out = (block.tensor(n) for n in (op.inputs[0], op.inputs[1], op.outputs[0]))
    for name in op.contracts:
        for side in (lhs, right):
            if name not in [d.name for d in side.atoms]:
                return f"contracts {name!r}, which is not a dim of {side}"
    rest = {d.name for d in (*lhs.atoms, *right.atoms)} - set(op.contracts) - set(without)
    if {d.name for d in out.atoms} != rest:
        return f"writes {out}, but {lhs} × {right} over {op.contracts} gives dims {sorted(rest)}"
    return None


def saves_operands(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Saves each operand of a matmul where the other one wants a gradient."""
    # y = a b: da = dy bᵀ reads b, and db = aᵀ dy reads a.
    saved_lhs = op.inputs[:1] if op.inputs[1] in needs_grad else ()
    return (*saved_lhs, *(op.inputs[1:2] if op.inputs[0] in needs_grad else ()))


def saves_inputs(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """All that it reads."""
    return op.inputs


def saves_output(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Saves what the op wrote."""
    return op.outputs[:1]


Flops = tuple[Number, Number]
"""(of the mathematics, further ones of the kernel)."""


def bytes_of(names: Collection[str], block: Tensors, setting: Setting) -> Number:
    """Bytes of tensors, each once."""
    total: Number = 0
    for name in dict.fromkeys(names):
        total = total + nbytes(block.tensor(name), setting.sizes, setting.dtypes)
    return total


def flops_of_matmul(op: Op, block: Tensors, setting: Setting) -> Number:
    """FLOPs of one matmul of a contraction: two for each element of its result and of the dims it sums over."""
    out = block.tensor(op.outputs[0])
    # By name, as both operands have each contracted dim and it counts once.
    inner = {a.name: a for t in op.inputs[:2] for a in block.tensor(t).atoms}
    return 2 * numel(out.dims, setting.sizes) * numel((inner[name] for name in op.contracts), setting.sizes)


def vectors(op: Op, block: Tensors, setting: Setting, per_element: int) -> Number:
    """Vector FLOPs, so many for each element of the first input."""
    return numel(block.tensor(op.inputs[0]).dims, setting.sizes) * per_element if per_element else 0


def elementwise_work(op: Op, block: Tensors, setting: Setting, *, flops: Flops = (0, 0), per_element: int = 0) -> Work:
    """Reads its inputs and writes its outputs, each once."""
    return Work(
        matmul_flops=flops[0],
        extra_matmul_flops=flops[1],
        vector_flops=vectors(op, block, setting, per_element),
        read_bytes=bytes_of(op.inputs, block, setting),
        write_bytes=bytes_of(op.outputs, block, setting),
    )


def moved_back(
    op: Op, block: Tensors, setting: Setting, grad: GradOp, *, flops: Flops = (0, 0), per_element: int = 0
) -> Work:
    """Reads incoming gradients and what was kept, and writes gradients."""
    return Work(
        matmul_flops=flops[0],
        extra_matmul_flops=flops[1],
        # A backward may have a step for the weight's gradient too: the arithmetic of an element counts in one of them.
        vector_flops=vectors(op, block, setting, per_element) if grad.phase == "input_grad" else 0,
        read_bytes=bytes_of(grad.grads_in, block, setting) + bytes_of(grad.reads, block, setting),
        write_bytes=bytes_of(grad.grads_out, block, setting),
    )


def per_element(flops: int) -> Callable[[Op, Tensors, Setting], Work]:
    """The forward of a kind that does so many vector FLOPs for each element of its first input."""
    return lambda op, block, setting: elementwise_work(op, block, setting, per_element=flops)


def per_element_back(flops: int) -> Callable[[Op, Tensors, Setting, GradOp], Work]:
    """The backward of such a kind."""
    return lambda op, block, setting, grad: moved_back(op, block, setting, grad, per_element=flops)


def widened_bytes(op: Op, block: Tensors, setting: Setting) -> Number:
    """Bytes of the wider copies that a matmul makes of its operands where it computes in a dtype of its own: each is
    written and read once."""
    dtype = str(op.attr("dtype", ""))
    if not dtype:
        return 0
    total: Number = 0
    for tensor in map(block.tensor, op.inputs[:2]):
        if setting.dtypes.bits(tensor.dtype) < setting.dtypes.bits(dtype):
            total = total + nbytes(replace(tensor, dtype=dtype), setting.sizes, setting.dtypes)
    return total


def multiplied(op: Op, block: Tensors, setting: Setting) -> Work:
    """The forward of a contraction."""
    work = elementwise_work(op, block, setting, flops=(flops_of_matmul(op, block, setting), 0))
    wide = widened_bytes(op, block, setting)
    return replace(work, read_bytes=work.read_bytes + wide, write_bytes=work.write_bytes + wide)


def multiplied_back(op: Op, block: Tensors, setting: Setting, grad: GradOp) -> Work:
    """One step of its backward: a matmul, where an operand is read (a bias wants the incoming gradient alone)."""
    flops = flops_of_matmul(op, block, setting) if grad.reads else 0
    work = moved_back(op, block, setting, grad, flops=(flops, 0))
    wide = widened_bytes(op, block, setting) if grad.reads else 0
    return replace(work, read_bytes=work.read_bytes + wide, write_bytes=work.write_bytes + wide)


def no_work(op: Op, block: Tensors, setting: Setting) -> Work:
    """Costs nothing: a view moves no bytes."""
    return Work()


def passed_on(op: Op, block: Tensors, setting: Setting, grad: GradOp) -> Work:
    """The gradient is the incoming one, or a view of it; sums over several readers are steps of their own."""
    return Work()
