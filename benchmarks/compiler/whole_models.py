"""Whole models for `table.py`, with random weights: BERT-base, GPT-2, Llama-style of 1 and 16 layers, ViT-B, ResNet-50,
DLRM, Mamba and a NASNet cell, without dropout but for a BERT of its own; and silero-vad with the trained weights of its
wheel, where that is installed. Sizes are those of the architecture, but for the Llama-style model (1,024 units), Mamba
(512 units, 2 layers, as Dynamo unrolls its scan) and vocabularies.
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
    """Of inference, 0 for none."""
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


class Separable(nn.Module):
    """ReLU, a convolution of each channel, one of single pixels and a batch norm, twice."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.steps = nn.Sequential(*(one for _ in range(2) for one in (
            nn.ReLU(), nn.Conv2d(width, width, size, padding=size // 2, groups=width, bias=False),
            nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width),
        )))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)


class NasnetCell(nn.Module):
    """The normal cell of NASNet-A (Zoph et al. 2018), in mobile's sizes: five blocks of two branches each."""

    def __init__(self, width: int = 44) -> None:
        super().__init__()
        self.before, self.now = (
            nn.Sequential(nn.ReLU(), nn.Conv2d(6 * width, width, 1, bias=False), nn.BatchNorm2d(width)) for _ in "ab"
        )
        self.branches = nn.ModuleList(Separable(width, size) for size in (3, 3, 5, 5, 3))

    def forward(self, before: Tensor, now: Tensor) -> Tensor:
        p, h = self.before(before), self.now(now)
        first, second, third, fourth, fifth = self.branches

        def mean(x: Tensor) -> Tensor:
            return nn.functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)

        blocks = (first(h) + h, second(p) + third(h), mean(h) + p, mean(p) + mean(p), fourth(p) + fifth(p))
        return torch.cat([p, *blocks], 1)


class Voice(nn.Module):
    """The network of silero-vad at 16 kHz for pieces of 512 samples, from its first state: magnitudes of a short-time
    Fourier transform, four convolutions, an LSTM cell. Its wheel has TorchScript, of which Dynamo makes no graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", torch.empty(258, 1, 256))
        sizes = ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        self.encoder = nn.ModuleList(nn.Conv1d(a, b, 3, stride, 1) for a, b, stride in sizes)
        self.cell, self.out = nn.LSTMCell(128, 128), nn.Conv1d(128, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(torch.cat([x.new_zeros(x.shape[0], 64), x], 1), (0, 64), mode="reflect")
        real, imaginary = nn.functional.conv1d(x[:, None], self.basis, stride=128).chunk(2, 1)
        y = (real.square() + imaginary.square()).sqrt()
        for layer in self.encoder:
            y = layer(y).relu()
        h, _ = self.cell(y.squeeze(-1))
        return self.out(h[..., None].relu()).sigmoid().squeeze(1).mean(1, keepdim=True)


def of_transformers(kind: str, argument: str = "input_ids", **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **sizes)
        config.use_cache = False
        return First(transformers.AutoModel.from_config(config), argument)

    return build


def silero() -> nn.Module:
    """With the trained weights of its wheel; raises where that is not installed, or gives other numbers."""
    import silero_vad

    trained = silero_vad.load_silero_vad(onnx=False)
    names = {
        "_model.stft.forward_basis_buffer": "basis", "_model.decoder.rnn.": "cell.",
        "_model.decoder.decoder.2.": "out.", **{f"_model.encoder.{n}.reparam_conv.": f"encoder.{n}." for n in range(4)},
    }  # fmt: skip
    made, weights = Voice(), {}
    for name, tensor in trained.state_dict().items():
        for start, ours in names.items():
            if name.startswith(start):
                weights[ours + name.removeprefix(start)] = tensor.detach().clone()
    made.load_state_dict(weights)
    x = torch.randn(2, 512)
    trained.reset_states()
    with torch.no_grad():
        torch.testing.assert_close(made(x), trained(x, 16_000))
    return made


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
        Model(name="BERT-base with dropout", build=of_transformers("bert"), inputs=tokens, batch=0),
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
        Model(
            name="NASNet cell",
            build=NasnetCell,
            inputs=lambda n: (torch.randn(n, 264, 28, 28), torch.randn(n, 264, 28, 28)),
            batch=1,
            train=0,
        ),
        Model(name="silero-vad", build=silero, inputs=lambda n: (torch.randn(n, 512),), batch=1, train=0),
    ]
