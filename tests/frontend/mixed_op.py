"""A module with a custom op: a product, then a running sum over positions, each row and column by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, WIDE = 50, 16, 32


@torch.library.custom_op("gnomon_tests::mix", mutates_args=())
def mix(x: Tensor, weight: Tensor, times: int) -> Tensor:
    """(batch, seq, width) by (width, wide)."""
    return torch.cumsum(x @ weight, 1) * times


@mix.register_fake
def _(x: Tensor, weight: Tensor, times: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.times = inputs[2]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    grad = grad.flip(1).cumsum(1).flip(1) * ctx.times
    return grad @ weight.T, x.flatten(0, 1).T @ grad.flatten(0, 1), None


mix.register_autograd(_backward, setup_context=_setup)


class Mixed(nn.Module):
    """The op between a table and a head, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDE))
        self.down, self.head = nn.Linear(WIDE, WIDTH, bias=False), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.down(mix(self.table(ids), self.weight, 3)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build() -> Mixed:
    return Mixed().double()


def divided(x: Any, weight: Any, times: int, outputs: Any) -> dict[str, Any]:
    """Each row and column by itself: how the op may be divided."""
    return {"independent": {"batch": (x.dim(0), outputs[0].dim(0)), "ffn": (weight.dim(1), outputs[0].dim(2))}}


def batches(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (4, 17), generator=torch.Generator().manual_seed(step))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}
