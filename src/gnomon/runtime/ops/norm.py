"""`norm`: RMSNorm and LayerNorm over a tensor's last dim, in float32 or wider.

Statistics are kept for backward, which recomputes the normalised values. torch's fused kernels do it where it has them
(LayerNorm; RMSNorm on GPUs), a kernel for each arithmetic step elsewhere. A weight may have more of the last dims, as
that of Mamba-2's norm over each group of channels. Attributes: `fn` (rms, layer), `eps`, and `offset`, which is added
to the weight (Gemma). Where tp divides rows (heads that are normed together, OLMo-2), ranks add up their statistics,
forward and backward. Groups of channels are in `image`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.ops.norm import PARTS_OF_ROWS
from gnomon.runtime.mesh.collectives import all_reduce
from gnomon.runtime.ops.image import group_norm
from gnomon.runtime.ops.site import ALONE, ANCHOR, Axis, Operand, Site, read
from gnomon.runtime.parameters.parameters import Weight


def _fused(x: Tensor, weight: Weight | None, bias: Weight | None, center: bool, offset: float) -> bool:
    """Whether torch has one kernel each for forward and backward, which keeps statistics in float32 or wider."""
    present = [parameter for parameter in (weight, bias) if parameter is not None]
    if offset or any(parameter.matrix.dtype != x.dtype or len(parameter.shape) > 1 for parameter in present):
        return False
    if x.device.type == "cuda":
        return center or (hasattr(torch.ops.aten, "_fused_rms_norm") and bias is None)
    return center and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Weight | None,
        bias: Weight | None,
        center: bool,
        eps: float,
        offset: float,
        anchor: Tensor | None,
    ) -> Tensor:
        last = [x.shape[-1]]
        w, b = (None if parameter is None else parameter.matrix for parameter in (weight, bias))
        out: Tensor
        if center:
            out, *statistics = torch.native_layer_norm(x, last, w, b, eps)
        else:
            out, *statistics = torch.ops.aten._fused_rms_norm(x, last, w, eps)
        ctx.save_for_backward(x, *statistics)
        ctx.weight, ctx.bias = weight, bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *statistics = ctx.saved_tensors
        parameters, last = (ctx.weight, ctx.bias), [x.shape[-1]]
        matrices = [None if parameter is None else parameter.matrix for parameter in parameters]
        needs_grad = [True, *(parameter is not None for parameter in parameters)]
        # LayerNorm keeps mean and 1 / deviation, RMSNorm the latter alone.
        if len(statistics) == 2:
            backward = torch.ops.aten.native_layer_norm_backward
            dx, *vectors = backward(grad.contiguous(), x, last, *statistics, *matrices, needs_grad)
        else:
            backward = torch.ops.aten._fused_rms_norm_backward
            dx, *vectors = backward(grad.contiguous(), x, last, *statistics, matrices[0], needs_grad[:2])
        for parameter, vector in zip(parameters, vectors, strict=False):
            if parameter is not None:
                # Defaults bind this turn's values: the tape may run it after the loop.
                parameter.tape.run(lambda parameter=parameter, vector=vector: parameter.add(vector), vector)
        return dx, None, None, None, None, None, None


def _mean(x: Tensor, over: Axis) -> Tensor:
    """The mean of each row, of which all ranks have parts of one length. Where several have the same part (copies of a
    key-value head) they all count alike: forward each part is there as often as any other, and backward each copy's
    gradient is a term of it."""
    mean = x.mean(-1, keepdim=True)
    if over.group is not None:
        all_reduce(mean, over.group)
        mean /= over.ranks
    return mean


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Weight | None,
        bias: Weight | None,
        center: bool,
        eps: float,
        offset: float,
        anchor: Tensor | None,
        over: Axis,
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = _mean(wide, over) if center else None
        if mean is not None:
            wide = wide - mean
        scale = torch.rsqrt(_mean(wide.square(), over) + eps)
        ctx.over = over
        ctx.save_for_backward(x, scale, *(() if mean is None else (mean,)))
        ctx.weight, ctx.bias, ctx.offset = weight, bias, offset
        normed = wide * scale
        if offset and weight is not None:  # Gemma multiplies before it narrows
            shifted = normed * (weight.value.to(normed.dtype) + offset)
            return (shifted if bias is None else shifted + bias.value.to(normed.dtype)).to(x.dtype)
        out = normed.to(x.dtype)
        if weight is not None:
            out = out * weight.value
        return out if bias is None else out + bias.value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, *mean = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        wide = grad.to(scale.dtype)
        normed = (x.to(scale.dtype) - mean[0] if mean else x.to(scale.dtype)) * scale
        g = wide if weight is None else wide * (weight.value.to(scale.dtype) + ctx.offset)
        # With n = (x - mean) · s and g = the gradient of n: dx = s · (g - n · mean(g · n) - mean(g)), without the last
        # term for RMSNorm. s is multiplied below.
        dx = g - normed * _mean(g * normed, ctx.over)
        if mean:
            dx = dx - _mean(g, ctx.over)
        # at once: what these sums read would be whole tensors put aside
        for parameter, terms in ((weight, wide * normed if weight is not None else wide), (bias, wide)):
            if parameter is not None:
                vector = terms.flatten(0, -1 - len(parameter.shape)).sum(0)
                parameter.tape.run(lambda parameter=parameter, vector=vector: parameter.add(vector), vector)
        return (dx * scale).to(x.dtype), None, None, None, None, None, None, None


def norm(site: Site, x: Operand, *parameters: Weight) -> Tensor:
    """x normed over the op's dim, which is its last; parameters: weight, then bias, as far as it has them."""
    fn, x = site.attr("fn", "rms"), read(x)
    if fn == "group":
        return group_norm(site, x, *parameters)
    if fn not in ("rms", "layer") or site.dims(site.op.inputs[0])[-1] != site.attr("over", ""):
        raise PlanError(f"{site.op.path}: the runtime norms over a tensor's last dim by rms or layer, not by {fn!r}")
    names = [name.rpartition(".")[2] for name in site.op.inputs[1:]]
    by_name = dict(zip(names, parameters, strict=True))
    weight, bias, offset = by_name.get("weight"), by_name.get("bias"), site.attr("offset", 0.0)
    anchor = ANCHOR if any(parameter.trained for parameter in parameters) else None
    eps, center = site.attr("eps", 1e-5), fn == "layer"
    over = site.axis("tp") if site.strategy == PARTS_OF_ROWS else ALONE
    out: Tensor
    if over.group is None and _fused(x, weight, bias, center, offset):
        out = _FusedNorm.apply(x, weight, bias, center, eps, offset, anchor)  # type: ignore[no-untyped-call]
    else:
        out = _Norm.apply(x, weight, bias, center, eps, offset, anchor, over)  # type: ignore[no-untyped-call]
    return out
