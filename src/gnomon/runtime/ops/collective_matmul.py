"""Linears cut along their tokens, so that a ring of messages runs beside their products (`overlap.splits`).

Under sequence parallelism the linears that open a region of tensor parallelism read tokens that ranks have gathered,
and the one that closes it gives terms that are added up and scattered. `gathered_linears` multiplies a rank's own
tokens while the next rank's arrive; `scattered_linear` sends its sum on while the next tokens are multiplied. One part
for each rank, forward and backward. Communicates the bytes of the whole collective, (ranks - 1) / ranks of a tensor.
Leaves out which linears are cut (`blocks`). Source: Wang et al. 2023, "Overlap communication with dependent
computation via decomposition".
Shapes: tokens (…, tokens of a rank, width) at home, (…, tokens, width) whole; `dim` is that of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.runtime.mesh.collectives import arrived, pass_on
from gnomon.runtime.ops.site import ANCHOR, Axis
from gnomon.runtime.parameters.parameters import Weight


@dataclass(frozen=True, slots=True)
class TokenWeight:
    """A weight that tokens are multiplied with."""

    weight: Weight
    bias: Weight | None
    inner_first: bool
    """Whether the weight is (in, out)."""

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix (out, in)."""
        return self.weight.matrix.T if self.inner_first else self.weight.matrix

    @property
    def trained(self) -> bool:
        """Whether anything of it is."""
        return self.weight.trained or (self.bias is not None and self.bias.trained)

    def add(self, grad: Tensor, read: Tensor) -> None:
        """Adds gradients of weight and bias. grad: (…, out); read: (…, in), of the same tokens."""
        rows, x = grad.flatten(0, -2), read.flatten(0, -2)
        if self.weight.trained:
            self.weight.add_matmul(*((x, rows) if self.inner_first else (rows, x)))
        if self.bias is not None and self.bias.trained:
            self.bias.add(rows.sum(0))


@dataclass(frozen=True, slots=True)
class TokenCut:
    """How tokens are divided."""

    axis: Axis
    dim: int

    def gathered(self, home: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first token, tokens) of each rank in turn, the own ones first; the next ones arrive meanwhile."""
        axis, piece = self.axis, home.contiguous()
        assert axis.group is not None
        for step in range(axis.ranks):
            following = pass_on(piece, axis.group) if step + 1 < axis.ranks else None
            # The piece came from the rank `step` places before: its tokens begin there.
            yield (axis.index - step) % axis.ranks * home.shape[self.dim], piece
            if following is not None:
                piece = arrived(*following)

    def scattered(self, tokens: int, term: Callable[[int, int], Tensor]) -> Tensor:
        """This rank's tokens of the sum of all ranks' terms. term: (first token, how many) -> a new tensor; asked for
        while the sum so far is on its way."""
        axis, size = self.axis, tokens // self.axis.ranks
        assert axis.group is not None
        coming = None
        for step in range(axis.ranks):
            # The tokens of the rank before come first, whose sum has the whole ring to go; a rank's own come last, and
            # their sum stays here.
            mine = term((axis.index - 1 - step) % axis.ranks * size, size)
            if coming is not None:
                mine += arrived(*coming)
            if step + 1 < axis.ranks:
                coming = pass_on(mine, axis.group)
        return mine

    def room(self, part: Tensor, ranks: int) -> Tensor:
        """An empty tensor for the parts of all ranks."""
        shape = list(part.shape)
        shape[self.dim] *= ranks
        return part.new_empty(shape)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, home: Tensor, anchor: Tensor, cut: TokenCut, weights: tuple[TokenWeight, ...], keep: bool
    ) -> tuple[Tensor, ...]:
        outs: list[Tensor] = []
        whole = cut.room(home, cut.axis.ranks) if keep else home
        for first, piece in cut.gathered(home):
            if keep:
                whole.narrow(cut.dim, first, piece.shape[cut.dim]).copy_(piece)
            for at, weight in enumerate(weights):
                bias = None if weight.bias is None else weight.bias.matrix
                part = functional.linear(piece, weight.matrix, bias)
                if at == len(outs):
                    outs.append(cut.room(part, cut.axis.ranks))
                outs[at].narrow(cut.dim, first, part.shape[cut.dim]).copy_(part)
        if any(weight.trained for weight in weights):
            ctx.save_for_backward(whole)
        ctx.cut, ctx.products, ctx.keep = cut, weights, keep
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cut, weights, keep = ctx.cut, ctx.products, ctx.keep

        def term(first: int, size: int) -> Tensor:
            parts = (grad.narrow(cut.dim, first, size) @ p.matrix for grad, p in zip(grads, weights, strict=True))
            total = next(parts)
            for part in parts:
                total += part
            return total

        dx = cut.scattered(grads[0].shape[cut.dim], term) if ctx.needs_input_grad[0] else None
        saved = ctx.saved_tensors  # asked for once: what is computed again is handed out once
        if saved:
            saved_piece = saved[0].detach()  # or a weight gradient that is put aside holds the graph, and the input

            def weight_grads() -> None:
                for first, piece in ((0, saved_piece),) if keep else cut.gathered(saved_piece):
                    for grad, weight in zip(grads, weights, strict=True):
                        weight.add(grad.narrow(cut.dim, first, piece.shape[cut.dim]), piece)

            weights[0].weight.tape.run(weight_grads, saved_piece, *grads)
        return dx, None, None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, cut: TokenCut, weight: TokenWeight) -> Tensor:
        def term(first: int, size: int) -> Tensor:
            return functional.linear(x.narrow(cut.dim, first, size), weight.matrix)

        if weight.trained:
            ctx.save_for_backward(x)
        ctx.cut, ctx.product = cut, weight
        out = cut.scattered(x.shape[cut.dim], term)
        # After the sum, or every rank would add it.
        return out if weight.bias is None else out.add_(weight.bias.matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cut, weight = ctx.cut, ctx.product
        saved, dx = ctx.saved_tensors, None
        whole = cut.room(grad, cut.axis.ranks) if saved else None
        for first, piece in cut.gathered(grad):
            if whole is not None:
                whole.narrow(cut.dim, first, piece.shape[cut.dim]).copy_(piece)
            if ctx.needs_input_grad[0]:
                part = piece @ weight.matrix
                dx = cut.room(part, cut.axis.ranks) if dx is None else dx
                dx.narrow(cut.dim, first, part.shape[cut.dim]).copy_(part)
        if whole is not None:
            read = saved[0].detach()
            weight.weight.tape.run(lambda: weight.add(whole, read), read, whole)
        return dx, None, None, None


def gathered_linears(home: Tensor, cut: TokenCut, weights: Sequence[TokenWeight], *, keep: bool) -> tuple[Tensor, ...]:
    """The tokens of all ranks times each weight, plus its bias. keep: whether what was gathered is kept for backward;
    otherwise it is gathered again."""
    out: tuple[Tensor, ...] = _Gathered.apply(home, ANCHOR, cut, tuple(weights), keep)  # type: ignore[no-untyped-call]
    return out


def scattered_linear(x: Tensor, cut: TokenCut, weight: TokenWeight) -> Tensor:
    """This rank's tokens of the sum over ranks of x times a weight, plus the bias once."""
    out: Tensor = _Scattered.apply(x, ANCHOR, cut, weight)  # type: ignore[no-untyped-call]
    return out
