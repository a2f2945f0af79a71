"""Layers of a stage as autograd functions over `Weight` handles, with tensor and sequence parallelism written out.

Each multiplies by this rank's part of a parameter and runs the collectives that room `sharding` says, no others:
f and g of Megatron-LM (Shoeybi et al. 2019), and gather and scatter along the sequence (Korthikanti et al. 2022).
Weight gradients go through the stage's `Tape`. Left out: which layer holds what (`apply`).
Shapes: B sequences, T tokens (t of them on one rank under sequence parallelism), C hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from gnomon.runtime.collectives import all_gather, all_reduce, reduce_scatter
from gnomon.runtime.parameters import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAxis:
    """The tensor-parallel group as layers see it."""

    group: ProcessGroup | None
    """None for one rank."""
    ranks: int = 1
    """Ranks in the group."""
    index: int = 0
    """This rank's place."""
    sequence: bool = False
    """Sequence parallelism between the parallel regions."""
    keep_gathered: bool = False
    """Keep gathered inputs for backward rather than gathering them again."""

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce, in place."""
        if self.group is not None:
            all_reduce(x, self.group)
        return x

    def enter(self, x: Tensor) -> Tensor:
        """What a parallel region reads: (B, t, C) -> (B, T, C) under sequence parallelism."""
        if self.group is None or not self.sequence:
            return x
        tBC = x.movedim(1, 0).contiguous()
        out = torch.empty((tBC.shape[0] * self.ranks, *tBC.shape[1:]), dtype=x.dtype, device=x.device)
        all_gather(out, tBC, self.group)
        return out.movedim(0, 1)

    def leave(self, x: Tensor) -> Tensor:
        """Adds up the parts of (B, T, C): each rank gets all of it, or its tokens under sequence parallelism."""
        if self.group is None or not self.sequence:
            return self.sum(x)
        TBC = x.movedim(1, 0).contiguous()
        out = torch.empty((TBC.shape[0] // self.ranks, *TBC.shape[1:]), dtype=x.dtype, device=x.device)
        reduce_scatter(out, TBC, self.group)
        return out.movedim(0, 1)


class _Columns(torch.autograd.Function):
    """Several linears on one input, each divided by its outputs: the input is gathered and its gradient summed once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: tuple[Weight, ...], biases: tuple[Weight, ...], axis: TensorAxis
    ) -> tuple[Tensor, ...]:
        whole = axis.enter(x)
        ctx.save_for_backward(whole if axis.keep_gathered else x)
        ctx.weights, ctx.biases, ctx.axis = weights, biases, axis
        vectors: list[Tensor | None] = [bias.matrix for bias in biases] if biases else [None] * len(weights)
        return tuple(functional.linear(whole, w.matrix, b) for w, b in zip(weights, vectors, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors[0].detach()  # or a weight gradient that is put aside holds the graph, and the input
        axis: TensorAxis = ctx.axis
        weights: tuple[Weight, ...] = ctx.weights
        biases: tuple[Weight, ...] = ctx.biases
        parts = [grad @ w.matrix for grad, w in zip(grads, weights, strict=True)]
        dx = parts[0]
        for part in parts[1:]:
            dx += part

        def weight_grad() -> None:
            whole = kept if axis.keep_gathered else axis.enter(kept)
            for grad, w in zip(grads, weights, strict=True):
                w.add(grad.flatten(0, 1).T @ whole.flatten(0, 1))
            for grad, b in zip(grads, biases, strict=False):
                b.add(grad.flatten(0, 1).sum(0))

        weights[0].tape.run(weight_grad, kept, *grads)
        return axis.leave(dx), None, None, None


def columns(x: Tensor, weights: tuple[Weight, ...], axis: TensorAxis, biases: tuple[Weight, ...] = ()) -> Any:
    """The linears' outputs, a tuple of (B, T, out of this rank). biases: none, or one for each."""
    return _Columns.apply(x, weights, biases, axis)  # type: ignore[no-untyped-call]


class _Row(torch.autograd.Function):
    """A linear divided by its inputs, whose partial outputs are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, axis: TensorAxis) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.axis = weight, axis
        return axis.leave(functional.linear(x, weight.matrix))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach()
        weight: Weight = ctx.weight
        whole = ctx.axis.enter(grad)
        weight.tape.run(lambda: weight.add(whole.flatten(0, 1).T @ x.flatten(0, 1)), whole, x)
        return whole @ weight.matrix, None, None


def row(x: Tensor, weight: Weight, axis: TensorAxis) -> Tensor:
    """(B, T, in of this rank) -> (B, T, C), or (B, t, C)."""
    out: Tensor = _Row.apply(x, weight, axis)  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    """RMSNorm over the last dim, in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return (wide * scale).to(x.dtype) * weight.matrix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        weight: Weight = ctx.weight
        normed = x.to(scale.dtype) * scale
        wide = grad.to(scale.dtype)
        g = wide * weight.matrix.to(scale.dtype)
        dx = scale * (g - normed * (g * normed).mean(-1, keepdim=True))
        vector = (wide * normed).flatten(0, -2).sum(0)  # at once: what it reads would be two whole tensors put aside
        weight.tape.run(lambda: weight.add(vector), vector)
        return dx.to(x.dtype), None, None


def norm(x: Tensor, weight: Weight, eps: float) -> Tensor:
    """RMSNorm; each rank norms the tokens (or heads) that it holds."""
    out: Tensor = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _Embedding(torch.autograd.Function):
    """A table divided by vocabulary: rows of other ranks are 0 here, and the sum over ranks is the lookup."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, weight: Weight, axis: TensorAxis) -> Tensor:
        table = weight.matrix
        local, here = _own(ids, table.shape[0], axis)
        ctx.save_for_backward(local, here)
        ctx.weight, ctx.axis, ctx.shape = weight, axis, tuple(table.shape)
        return axis.leave(functional.embedding(local, table) * here.unsqueeze(-1).to(table.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local, here = ctx.saved_tensors
        weight: Weight = ctx.weight
        whole = ctx.axis.enter(grad) * here.unsqueeze(-1).to(grad.dtype)

        def weight_grad() -> None:
            table = torch.zeros(ctx.shape, dtype=whole.dtype, device=whole.device)
            weight.add(table.index_add_(0, local.flatten(), whole.flatten(0, 1)))

        weight.tape.run(weight_grad, local, whole)
        return None, None, None, None


def embedding(anchor: Tensor, ids: Tensor, weight: Weight, axis: TensorAxis) -> Tensor:
    """(B, T) ids -> (B, T, C), or (B, t, C). anchor: any tensor that requires a gradient, so that backward comes
    here."""
    out: Tensor = _Embedding.apply(anchor, ids, weight, axis)  # type: ignore[no-untyped-call]
    return out


class _CrossEntropy(torch.autograd.Function):
    """Softmax cross-entropy on logits divided by vocabulary: three all-reduces of a number a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: TensorAxis) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = wide.amax(-1)
        if axis.group is not None:
            all_reduce(top, axis.group, largest=True)
        exp = (wide - top.unsqueeze(-1)).exp_()
        total = axis.sum(exp.sum(-1))
        local, here = _own(labels, logits.shape[-1], axis)
        target = axis.sum(wide.gather(-1, local.unsqueeze(-1)).squeeze(-1) * here.to(wide.dtype))
        ctx.save_for_backward(exp.div_(total.unsqueeze(-1)), local, here)
        ctx.dtype = logits.dtype
        return (total.log() + top - target).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, here = ctx.saved_tensors
        out = probabilities.clone()
        out.scatter_add_(-1, local.unsqueeze(-1), -here.unsqueeze(-1).to(out.dtype))
        return (out * grad).to(ctx.dtype), None, None


def cross_entropy(logits: Tensor, labels: Tensor, axis: TensorAxis) -> Tensor:
    """(B, T, vocabulary of this rank), (B, T) -> the sum over tokens, on every rank."""
    out: Tensor = _CrossEntropy.apply(logits, labels, axis)  # type: ignore[no-untyped-call]
    return out


def _own(ids: Tensor, rows: int, axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """(row in this rank's part, 0 for others; whether it is here)."""
    local = ids - axis.index * rows
    here = (local >= 0) & (local < rows)
    return torch.where(here, local, 0), here
