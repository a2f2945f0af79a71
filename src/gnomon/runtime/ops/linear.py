"""Products with weights: `linear`, in two halves of a backward.

A linear's weight gradient goes through the weight's tape, so that a schedule can compute it later than the input
gradient; what it reads is the input as it lies between ops, gathered again where ranks divide it. Leaves out rows of
experts (`routing`), convolutions and products of two activations.
Shapes: x (…, contracted dims), weight (out dims, contracted dims) or the other way round (`Site.inner_first`), result
(…, out dims).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.runtime.ops.site import ANCHOR, Site
from gnomon.runtime.parameters.parameters import Weight

Change = Callable[[Tensor], Tensor]
"""From one layout of a tensor to another."""


WIDER = {"fp32": torch.float32, "fp64": torch.float64}
"""Attribute `dtype` of a linear -> in what it computes, unless its input is as wide."""


def _same(x: Tensor) -> Tensor:
    return x


NO_GRADIENTS = (None,) * 9
"""Of what `_Linear` is given beside x."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        home: Tensor,
        weight: Weight,
        bias: Weight | None,
        gather: Change,
        leave: Change,
        enter: Change,
        anchor: Tensor,
        inner_first: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """Runs the linear's forward. x: (…, in) as it is multiplied. home: the same as it lies between ops, which is
        what is kept. gather: from home to x. leave: of the result, from partial sums to its home; enter: of its
        gradient, back. inner_first: the weight is (in, out). dtype: in which the matmul is computed, and that of the
        result; None: that of x."""
        if weight.trained or (bias is not None and bias.trained):
            ctx.save_for_backward(home)
        ctx.weight, ctx.bias, ctx.gather, ctx.enter, ctx.inner_first = weight, bias, gather, enter, inner_first
        ctx.dtypes = None if dtype is None else (x.dtype, dtype)
        if dtype is not None:
            matrix = (weight.matrix.T if inner_first else weight.matrix).to(dtype)
            out = leave(functional.linear(x.to(dtype), matrix))
            return out if bias is None else out + bias.matrix.to(dtype)
        whole = leave is _same  # partial sums want their bias once, after they were added up
        matrix = weight.matrix.T if inner_first else weight.matrix
        out = functional.linear(x, matrix, bias.matrix if bias is not None and whole else None)
        if whole:
            return out
        out = leave(out)
        return out if bias is None else out.add_(bias.matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, gather, inner_first = ctx.weight, ctx.bias, ctx.gather, ctx.inner_first
        grad = ctx.enter(grad)
        wide: Change = _same if ctx.dtypes is None else lambda x: x.to(ctx.dtypes[1])
        dx = grad @ wide(weight.matrix.T if inner_first else weight.matrix) if ctx.needs_input_grad[0] else None
        dx = dx if dx is None or ctx.dtypes is None else dx.to(ctx.dtypes[0])
        saved = ctx.saved_tensors  # asked for once: what is computed again is handed out once
        if not saved:  # frozen
            return dx, *NO_GRADIENTS
        home = saved[0].detach()  # or a weight gradient that is put aside holds the graph, and the input

        def weight_grad() -> None:
            rows = grad.flatten(0, -2)
            read = wide(gather(home)).flatten(0, -2)
            weight.add_matmul(*((read, rows) if inner_first else (rows, read)))
            if bias is not None:
                bias.add(rows.sum(0))

        weight.tape.run(weight_grad, home, grad)
        return dx, *NO_GRADIENTS


def operand_of(site: Site, x: Tensor) -> Tensor:
    """(…, contracted dims) -> (…, in)."""
    rows = site.weight_rows
    inner = rows if site.inner_first else len(site.block.tensor(site.op.inputs[1]).dims) - rows
    return x.flatten(-inner) if inner > 1 else x


def result_of(site: Site, out: Tensor, weight: Weight) -> Tensor:
    """(…, out) -> (…, out dims), times the op's factor."""
    if (factor := site.attr("factor", 1.0)) != 1.0:
        out = out * factor
    rows = weight.shape[site.weight_rows :] if site.inner_first else weight.shape[: site.weight_rows]
    return out.unflatten(-1, rows) if len(rows) > 1 else out


def linear(
    site: Site,
    x: Tensor,
    weight: Weight,
    bias: Weight | None = None,
    *,
    home: Tensor | None = None,
    gather: Change = _same,
    leave: Change = _same,
    enter: Change = _same,
) -> Tensor:
    """x times a weight, plus a bias: as `_Linear` says."""
    flat = operand_of(site, x)
    operand = flat if home is None else operand_of(site, home)
    dtype = WIDER.get(site.attr("dtype", ""))
    if dtype is not None and torch.promote_types(dtype, flat.dtype) == flat.dtype:
        dtype = None
    out: Tensor = _Linear.apply(flat, operand, weight, bias, gather, leave, enter, ANCHOR, site.inner_first, dtype)  # type: ignore[no-untyped-call]
    return result_of(site, out, weight)
