"""A user's own project: a model as nanoGPT's, which returns (logits, loss), and its batches. Named on command lines."""

from __future__ import annotations

import torch
from frontend.models import Layer
from torch import Tensor, nn
from torch.nn import functional

VOCAB, LENGTH, ROWS = 68, 16, 4


class Net(nn.Module):
    """Tied table and head, positions in a buffer, one weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.h = nn.ModuleList(Layer(32, 4) for _ in range(4))
        self.ln_f, self.lm_head = nn.LayerNorm(32), nn.Linear(32, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        self.scale = nn.Parameter(torch.full((32,), 1.25), requires_grad=False)
        self.register_buffer("places", torch.arange(64))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = (self.wte(idx) + self.wpe(self.places[: idx.shape[1]])) * self.scale
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def build() -> Net:
    return Net().double()


def build_float() -> Net:
    return Net()


class Ladder(nn.Module):
    """Layers whose later half adds what the earlier half made, as a U-Net's; each reads a mask of positions and the
    embedding beside."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.turn = nn.Embedding(VOCAB, 32), nn.Parameter(torch.randn(LENGTH, 32))
        self.h = nn.ModuleList(Layer(32, 4) for _ in range(4))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        first = x = self.wte(idx)
        counted = idx != 0
        places = torch.sin(self.turn[: idx.shape[1]])
        made: list[Tensor] = []
        for number, layer in enumerate(self.h):
            x = layer(x * places) * counted.unsqueeze(-1) + 0.5 * first
            if number < 2:
                made.append(x)
            else:
                x = x + torch.tanh(made.pop())
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_ladder() -> Ladder:
    """The table and the first layer are not trained."""
    module = Ladder().double()
    for part in (module.wte, module.h[0]):
        part.requires_grad_(False)
    return module


def build_without_loss() -> nn.Module:
    return nn.Linear(8, 8)


def build_table() -> nn.Module:
    return nn.Embedding(VOCAB, 8)


def batches(step: int) -> dict[str, Tensor]:
    """Of a step; some labels of the first row do not count."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, : 2 * step] = -100
    return {"idx": ids[:, :-1], "targets": labels}


def no_batches(step: int) -> list[int]:
    return [step]
