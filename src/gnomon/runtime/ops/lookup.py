"""`embedding` and `cross_entropy`: rows by integers, whole or divided by vocabulary over tp, and the loss.

A divided table gives zeros for rows of other ranks, and the sum over ranks is the lookup (Shoeybi et al. 2019); the
loss over divided logits takes three all-reduces of a number a token. A label under 0 counts for nothing, as
`ignore_index` in PyTorch. Leaves out mean squared errors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.errors import InputError
from gnomon.runtime.mesh.collectives import all_reduce
from gnomon.runtime.ops.site import ALONE, ANCHOR, Axis, Site
from gnomon.runtime.parameters.parameters import Weight

IGNORED = -100
"""What a label that counts for nothing is to torch."""


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, ids: Tensor, weight: Weight, part: Axis | None, padding: int | None
    ) -> Tensor:
        table = weight.matrix
        local, here = _own(ids, table.shape[0], part) if part is not None else (ids, None)
        # None where every row is trained, so that backward has nothing to multiply with.
        trained = here if padding is None else ids != padding if here is None else here & (ids != padding)
        ctx.save_for_backward(local, *(() if trained is None else (trained,)))
        ctx.weight, ctx.shape = weight, tuple(table.shape)
        out = functional.embedding(local, table)
        return out if here is None else out * here.unsqueeze(-1).to(table.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local, *trained = ctx.saved_tensors  # which rows are: those of this rank, and not the padding token's
        weight: Weight = ctx.weight
        rows = grad * trained[0].unsqueeze(-1).to(grad.dtype) if trained else grad

        def weight_grad() -> None:
            weight.add_rows(local.flatten(), rows.reshape(-1, ctx.shape[1]))

        weight.tape.run(weight_grad, local, rows)
        return None, None, None, None, None


def embedding(site: Site, ids: Tensor, weight: Weight) -> Tensor:
    """(…) ids -> (…, width); a term of it where ranks divide the table. The row of `padding` is not trained."""
    if site.attr("padding_moves", False) and bool((ids == site.attr("padding", -1)).any()):
        raise InputError(
            f"input_ids hold the padding token {site.attr('padding', -1)}, after which this model counts positions "
            f"otherwise than the runtime does; give rows without it (packing, or shorter rows)",
            site.op.path,
        )
    part = site.axis("tp") if site.strategy == "vocab_parallel" else None
    out: Tensor = _Embedding.apply(ANCHOR, ids, weight, part, site.attr("padding", None))  # type: ignore[no-untyped-call]
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, part: Axis) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # log Σ exp(x) - x[label], with the largest taken out before exp and added after log. Three all-reduces of (…)
        # each: largest, sum of exponentials, logit of the label, which one rank has and the others have as 0.
        top = wide.amax(-1)
        if part.group is not None:
            all_reduce(top, part.group, largest=True)
        exp = (wide - top.unsqueeze(-1)).exp_()
        total = _sum(exp.sum(-1), part)
        local, here = _own(labels, logits.shape[-1], part)
        target = _sum(wide.gather(-1, local.unsqueeze(-1)).squeeze(-1) * here.to(wide.dtype), part)
        counts = labels >= 0
        ctx.save_for_backward(exp.div_(total.unsqueeze(-1)), local, here, counts)
        ctx.dtype = logits.dtype
        return ((total.log() + top - target) * counts).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, here, counts = ctx.saved_tensors
        out = probabilities.clone()
        # p - 1 at the label; where the label is another rank's, 0 is taken off row 0.
        out.scatter_add_(-1, local.unsqueeze(-1), -here.unsqueeze(-1).to(out.dtype))
        return (out * (grad * counts.unsqueeze(-1))).to(ctx.dtype), None, None


def cross_entropy(site: Site, logits: Tensor, labels: Tensor) -> Tensor:
    """Softmax cross-entropy summed over tokens, in float32 or wider; the same on every rank of tp. Times `loss_weight`
    where it is one of several losses."""
    part = site.axis("tp") if site.strategy == "vocab_parallel" else ALONE
    if part.ranks == 1:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        counted = torch.where(labels < 0, IGNORED, labels).flatten()
        out = functional.cross_entropy(wide, counted, reduction="sum", ignore_index=IGNORED)
    else:
        out = _CrossEntropy.apply(logits, labels, part)  # type: ignore[no-untyped-call]
    weight = site.attr("loss_weight", 1.0)
    return out if weight == 1.0 else out * weight


def _sum(x: Tensor, part: Axis) -> Tensor:
    if part.group is not None:
        all_reduce(x, part.group)
    return x


def _own(ids: Tensor, rows: int, part: Axis) -> tuple[Tensor, Tensor]:
    """(row in this rank's part, 0 for others; whether it is here)."""
    local = ids - part.index * rows
    here = (local >= 0) & (local < rows)
    return torch.where(here, local, 0), here
