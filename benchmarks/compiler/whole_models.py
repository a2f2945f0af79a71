"""Whole models for `table.py`, with random weights: BERT-base, GPT-2, Llama-style of 1 and 16 layers, ViT-B, ResNet-50,
DLRM and Mamba; and silero-vad where its wheel (with trained weights) is installed. Sizes are those of the architecture,
but for the Llama-style model (1,024 units), Mamba (512 units, 2 layers, as Dynamo unrolls its scan) and vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    """Of a batch size."""
    batch: int
    train: int = 2
    """Batch of a training step, 0 for none."""


class First(nn.Module):
    """A model of transformers as a function of one tensor to one tensor."""

    def __init__(self, inner: Any, argument: str) -> None:
        super().__init__()
        self.inner, self.argument = inner, argument

    def forward(self, x: Tensor) -> Any:
        return self.inner(**{self.argument: x}, return_dict=False)[0]


class Dlrm(nn.Module):
    """26 tables, a bottom and a top perceptron, and all dot products between (Naumov et al. 2019)."""

    def __init__(self, tables: int = 26, rows: int = 20_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width)
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        self.register_buffer("below", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack([x, *[table(sparse[:, n]) for n, table in enumerate(self.tables)]], 1)
        dots = every @ every.transpose(1, 2)
        return self.top(torch.cat([x, dots[:, self.below[0], self.below[1]]], -1)).sigmoid()


class Voice(nn.Module):
    """silero-vad of one piece of 512 samples at 16 kHz, from its first state. It is a TorchScript module."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        self.inner.reset_states()
        return self.inner(x, 16_000)


def of_transformers(kind: str, argument: str = "input_ids", **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **sizes)
        config.use_cache = False
        return First(transformers.AutoModel.from_config(config), argument)

    return build


def silero() -> nn.Module:
    import silero_vad  # raises where it is not installed

    return Voice(silero_vad.load_silero_vad(onnx=False))


def tokens(batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(3, 1000, (batch, TOKENS)),)


def images(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, 224, 224),)


def llama(layers: int) -> Callable[[], nn.Module]:
    return of_transformers(
        "llama", hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
        num_hidden_layers=layers, vocab_size=32_000,
    )  # fmt: skip


def models() -> list[Model]:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt_off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return [
        Model(name="BERT-base", build=of_transformers("bert", **off), inputs=tokens, batch=1),
        Model(name="GPT-2", build=of_transformers("gpt2", **gpt_off), inputs=tokens, batch=1),
        Model(name="Llama-style, 1 layer", build=llama(1), inputs=tokens, batch=1),
        Model(name="Llama-style, 16 layers", build=llama(16), inputs=tokens, batch=1),
        Model(name="ViT-B", build=of_transformers("vit", "pixel_values", **off), inputs=images, batch=1, train=1),
        Model(name="ResNet-50", build=of_transformers("resnet", "pixel_values"), inputs=images, batch=1),
        Model(
            name="DLRM",
            build=Dlrm,
            inputs=lambda n: (torch.randn(n, 13), torch.randint(0, 20_000, (n, 26))),
            batch=256,
            train=256,
        ),
        Model(
            name="Mamba",
            build=of_transformers("mamba", hidden_size=512, num_hidden_layers=2, vocab_size=32_000),
            inputs=tokens,
            batch=1,
            train=1,
        ),
        Model(name="silero-vad", build=silero, inputs=lambda n: (torch.randn(n, 512),), batch=1, train=0),
    ]
