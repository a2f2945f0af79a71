"""Sparsity that a call shows: a padded batch, experts' rows, columns that a ReLU left zero.

    python benchmarks/lowbit/dynamic.py [--only ragged,experts,columns] [--layers 4] [--rounds 7] [--write]

One thread; milliseconds of CPU of a call, in turn in one process: median (least-most), and times the first column's.
`padded` is the same model compiled without the option; `nested` is eager PyTorch on jagged nested tensors with the same
weights, whose rows have no padding at all. Lengths of a batch of 16: log-normal, at most 128.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernels import measured
from torch import nn
from torch.nn import functional as F

from gnomon.compiler import backend
from gnomon.compiler.machine import this_machine

RESULT = Path(__file__).parents[1] / "results" / "lowbit_dynamic.md"
HIDDEN, HEADS, POSITIONS, BATCH = 768, 12, 128, 16


class Layer(nn.Module):
    """BERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        at = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = self.first(x + self.o(at))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask[:, None, None, :].bool().expand(-1, -1, x.shape[1], -1)
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def nested(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, None)
        return x


def settled(function: Callable[[], Any]) -> Callable[[], Any]:
    """Called until trials are over."""
    for _ in range(5):
        function()
    return function


def ragged(layers: int, dtype: torch.dtype) -> tuple[str, dict[str, Callable[[], Any]]]:
    model = Encoder(layers).eval().to(dtype)
    lengths = torch.empty(BATCH).log_normal_(3.7, 0.7).round().clamp(4, POSITIONS).long()
    lengths[0] = POSITIONS
    x = torch.randn(BATCH, POSITIONS, HIDDEN).to(dtype)
    there = (torch.arange(POSITIONS) < lengths[:, None]).long()
    jagged = torch.nested.nested_tensor([x[i, :n] for i, n in enumerate(lengths.tolist())], layout=torch.jagged)
    fast = torch.compile(model, backend="gnomon", options={"ragged": "attention_mask"})
    padded = torch.compile(model, backend="gnomon")
    calls: dict[str, Callable[[], Any]] = {
        "padded": settled(partial(padded, x, there)),
        "eager, padded": partial(model, x, there),
        "eager, nested": partial(model.nested, jagged),
        "ragged": settled(partial(fast, x, there)),
    }
    apart = (calls["ragged"]() - calls["eager, padded"]())[there.bool()].abs().max()
    share = float(there.float().mean())
    name = f"BERT-base, {layers} layers, {str(dtype).removeprefix('torch.')}, {BATCH} texts"
    return f"{name}, {100 * share:.0f} % there (results {float(apart):.1g} apart)", calls


def experts(tokens: int) -> tuple[str, dict[str, Callable[[], Any]]]:
    many, top, inner, outer = 64, 8, 2048, 1536
    weights = (torch.randn(many, outer, inner) * 0.02).bfloat16()
    chosen = torch.stack([torch.randperm(many)[:top] for _ in range(tokens)])
    x = torch.randn(tokens, inner).bfloat16()

    def grouped(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=many).cumsum(0).to(torch.int32)
        return torch._grouped_mm(x[order // top], weights.mT, offs=ends)

    def loop() -> torch.Tensor:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        rows, parts, at = x[order // top], [], 0
        for expert, count in enumerate(torch.bincount(flat, minlength=many).tolist()):
            parts.append(F.linear(rows[at : at + count], weights[expert]))
            at += count
        return torch.cat(parts)

    fast = torch.compile(grouped, backend="gnomon", dynamic=False)
    return f"64 experts of {inner} x {outer}, bf16, {tokens} tokens of 8", {
        "loop": loop,
        "torch._grouped_mm": partial(grouped, x, chosen, weights),
        "gnomon": settled(partial(fast, x, chosen, weights)),
    }


def columns(rows: int, zero: float, dtype: torch.dtype) -> tuple[str, dict[str, Callable[[], Any]]]:
    inner, outer = 14336, 4096
    second = nn.Linear(inner, outer, bias=False).to(dtype)
    shift = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(zero)).item()
    x = (torch.randn(rows, inner) - shift).to(dtype)
    turned = second.weight.detach().t().contiguous()

    def product(x: torch.Tensor) -> torch.Tensor:
        return second(torch.relu(x))

    def gather() -> torch.Tensor:
        y = torch.relu(x)
        live = (y != 0).any(0).nonzero().view(-1)
        return y.index_select(1, live) @ turned.index_select(0, live)

    fast = torch.compile(product, backend="gnomon", options={"frozen": True}, dynamic=False)
    plain = torch.compile(product, backend="gnomon", dynamic=False)
    kind = str(dtype).removeprefix("torch.")
    name = f"second linear of {inner} -> {outer}, {kind}, {rows} rows, {100 * zero:.0f} % zero"
    return name, {
        "whole": settled(partial(plain, x)),
        "eager": partial(product, x),
        "eager, gathered": gather,
        "columns": settled(partial(fast, x)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="ragged,experts,columns")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    makers: list[partial[tuple[str, dict[str, Callable[[], Any]]]]] = [
        *[partial(ragged, options.layers, dtype) for dtype in (torch.float32, torch.bfloat16)],
        *[partial(experts, tokens) for tokens in (1, 8, 64)],
        *[partial(columns, *case, dtype) for dtype in (torch.float32, torch.bfloat16)
          for case in ((1, 0.9), (4, 0.97), (1, 0.5))],
    ]  # fmt: skip
    makers = [make for make in makers if make.func.__name__ in options.only.split(",")]
    lines = [
        "# Sparsity that a call shows\n",
        f"{date.today()}, `python {' '.join(['benchmarks/lowbit/dynamic.py', *sys.argv[1:]])}`, "
        f"{this_machine().model}, one thread, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}. "
        "Milliseconds of CPU of a call: median (least-most), and how many times as fast as the first.\n",
    ]
    with torch.inference_mode():
        for make in makers:
            torch._dynamo.reset()
            backend.reports.clear()
            name, calls = make()
            took = measured(calls, options.rounds, 0.02)
            first = next(iter(took))
            lines += ["", f"| {name} | ms | times {first} |", "|---|---|---|"]
            for call, times in took.items():
                ratio = median(b / a for a, b in zip(times, took[first], strict=True))
                lines.append(f"| {call} | {median(times):.2f} ({min(times):.2f}-{max(times):.2f}) | {ratio:.2f} |")
            print("\n".join(lines[-2 - len(took) :]), flush=True)
    if options.write:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
