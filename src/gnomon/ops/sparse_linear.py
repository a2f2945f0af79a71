"""`nm_linear`: a linear whose weight has N of each M elements of a row, chosen by size each time that it runs.

The dense weight is what is trained: its gradient is that of the chosen elements' product, passed straight through to
all (Zhou et al. 2021, "Learning N:M fine-grained structured sparse neural networks from scratch"). M elements lie one
after another along the contracted dim, so what divides that leaves whole groups. The mathematics needs N/M of a
linear's forward and input gradient; a kernel that is not made for the pattern multiplies by the zeros too, and that is
how it is priced; the choice is made again in backward, so that only the dense weight is kept. Leaves out weights that
are stored by their chosen elements alone, and a bias.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.ops.bases import CONTRACTION
from gnomon.ops.curve import Matmul
from gnomon.ops.op import Op, Problem, Tensors, TorchCall
from gnomon.ops.rules import Flops, contracted_dims, elementwise_work, flops_of_matmul, moved_back
from gnomon.ops.strategy import Division, Strategy
from gnomon.ops.work import GradOp, Setting, Work
from gnomon.tensors.dims import Number
from gnomon.tensors.layout import local_size


def _pattern(op: Op) -> tuple[int, int]:
    n, m = op.attr("n", 0), op.attr("m", 0)
    assert isinstance(n, int) and isinstance(m, int)
    return n, m


def _dims(op: Op, block: Tensors) -> Problem:
    weight, (n, m) = block.tensor(op.inputs[1]), _pattern(op)
    if problem := contracted_dims(op, block):
        return problem
    if not 0 < n <= m:
        return f"keeps n = {n} of each m = {m} elements; give 0 < n <= m"
    inner = weight.dims[-1]
    if inner.atoms[-1].name not in op.contracts or len(op.inputs) > 2:
        return f"reads x and a weight (out, in) and no bias, not {weight}; its groups lie along the contracted dim"
    if inner.atoms[-1].size is not None and inner.atoms[-1].size % m:
        return f"groups of m = {m} do not divide {inner.atoms[-1]} of {weight}"
    return None


def _flops(whole: Number, op: Op) -> Flops:
    n, m = _pattern(op)
    return whole * n // m, whole - whole * n // m


def _work(op: Op, block: Tensors, setting: Setting) -> Work:
    return elementwise_work(op, block, setting, flops=_flops(flops_of_matmul(op, block, setting), op))


def _work_back(op: Op, block: Tensors, setting: Setting, grad: GradOp) -> Work:
    """The input gradient needs the chosen elements; that of the weight is of all."""
    whole = flops_of_matmul(op, block, setting)
    inputs = _flops(whole, op) if op.inputs[0] in grad.grads_out else (0, 0)
    weight = whole if op.inputs[1] in grad.grads_out else 0
    return moved_back(op, block, setting, grad, flops=(inputs[0] + weight, inputs[1]))


def _strategies(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Divides it as a linear where ranks have whole groups of M. PlanError where they have not."""
    _, m = _pattern(op)
    dim = setting.block.tensor(op.inputs[1]).atoms[-1]
    local = local_size(dim, plain.inputs[1], setting.scene.axis_sizes, setting.scene.sizes)
    if plain.inputs[1].axes_of(dim.name) and isinstance(local, int) and local % m:
        raise PlanError(f"{op.path}: ranks have {local} of {dim}, which are no whole groups of m = {m}; lower tp")
    return (plain,)


NM_LINEAR = replace(
    CONTRACTION,
    name="nm_linear",
    signature="x, weight (out, in) -> x · (weight with n of each m elements along in)ᵀ; n, m",
    dims=_dims,
    forward=_work,
    backward=_work_back,
    weight_grad="together",
    price=Matmul("tokens", narrow=False),
    grad_price=Matmul("tokens", narrow=False),
    strategies=_strategies,
    calls=(TorchCall(function="gnomon::nm_linear", operands=("x", "weight"), numbers=("n", "m"), axes="a linear's"),),
    torch="sparse_linear:nm_linear",
)

KINDS = (NM_LINEAR,)
