"""`nm_linear` by torch: a product with N of each M elements of a weight's rows.

`torch.ops.gnomon.nm_linear(x, weight, n, m)` is the same for people's modules, which `gnomon` captures as this kind.
Source: Zhou et al. 2021 (straight-through gradients of the dense weight). Leaves out kernels made for 2:4.
Shapes: x (…, in), weight (out, in), result (…, out).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.runtime.ops.site import Operand, Site, read


def n_of_m(weight: Tensor, n: int, m: int) -> Tensor:
    """The weight with zeros but for the n largest of each m elements along its last dim; of equal ones the first."""
    groups = weight.unflatten(-1, (-1, m))
    order = groups.abs().argsort(dim=-1, descending=True, stable=True)
    nonzero = torch.zeros_like(groups, dtype=torch.bool).scatter(-1, order[..., :n], True)
    return (groups * nonzero).flatten(-2)


@torch.library.custom_op("gnomon::nm_linear", mutates_args=())
def _nm_linear(x: Tensor, weight: Tensor, n: int, m: int) -> Tensor:
    return functional.linear(x, n_of_m(weight, n, m))


@_nm_linear.register_fake
def _(x: Tensor, weight: Tensor, n: int, m: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.n, ctx.m = inputs
    # the weight and not what is chosen of it, which would be a tensor of its own until backward
    ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight = ctx.saved_tensors
    of_x = None if weight is None else grad @ n_of_m(weight, ctx.n, ctx.m)
    of_weight = None if x is None else grad.flatten(0, -2).T @ x.flatten(0, -2)
    return of_x, of_weight, None, None


_nm_linear.register_autograd(_backward, setup_context=_setup)


def nm_linear(site: Site, x: Tensor, weight: Operand) -> Tensor:
    """x · (weight with n of each m elements)ᵀ."""
    n, m = site.attr("n", 0), site.attr("m", 0)
    dense = read(weight)
    rows = x.flatten(x.dim() - (dense.dim() - site.weight_rows)) if dense.dim() > 2 else x
    out: Tensor = _nm_linear(rows, dense.flatten(0, site.weight_rows - 1).flatten(1), n, m)
    return out.unflatten(-1, dense.shape[: site.weight_rows]) if site.weight_rows > 1 else out
