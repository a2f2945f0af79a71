"""Linear layers with what surrounds them, and linear layers behind each other, beside the same operations apart.

    python benchmarks/compiler/chains.py [--rounds 15] [--only LoRA] [--write]

One thread, CPU time, by turns; the least of a row's rounds. `apart` is the compiler without chains, `error` the largest
difference from eager in double, of the largest number. All chains are tried, those too that the traffic model would not
look at, and one that is slower is left out of the graph, as in use.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gnomon.compiler import backend
from gnomon.compiler.kernels import chains
from gnomon.compiler.tiles.device import this_device

RESULT = Path(__file__).parents[1] / "results" / "compiler_chains.md"


class Lora(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base, self.down = nn.Linear(width, width), nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base(x) + 2.0 * self.up(self.down(x))


class Adapter(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.LayerNorm(width), nn.Linear(width, rank), nn.Linear(rank, width)

    def forward(self, x: Any) -> Any:
        return x + self.up(F.gelu(self.down(self.norm(x))))


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.one, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.two = nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        return self.two(F.silu(self.gate(x)) * self.one(x))


def layers(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    parts = [part for a, b in zip(widths, widths[1:], strict=False) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*parts[:-1])


def norm_gelu(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU())


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norm, linear, GELU: BERT-base": (lambda: norm_gelu(768, 3072), (128, 768)),
    "norm, linear, GELU: Swin, first stage": (lambda: norm_gelu(96, 384), (25088, 96)),
    "norm, linear, GELU: Swin, second stage": (lambda: norm_gelu(192, 768), (6272, 192)),
    "norm, linear, GELU: MLP-Mixer, tokens": (lambda: norm_gelu(196, 384), (6144, 196)),
    "norm, linear, GELU: 128 to 512": (lambda: norm_gelu(128, 512), (1024, 128)),
    "norm, linear, GELU: 256 to 1024": (lambda: norm_gelu(256, 1024), (512, 256)),
    "MLP of a Swin block": (lambda: nn.Sequential(nn.LayerNorm(96), layers(96, 384, 96, act=nn.GELU)), (25088, 96)),
    "MLP 128, 512, 128": (lambda: layers(128, 512, 128, act=nn.GELU), (4096, 128)),
    "LoRA of rank 16, 768": (lambda: Lora(768, 16), (512, 768)),
    "LoRA of rank 8, 320": (lambda: Lora(320, 8), (4096, 320)),
    "low rank 1024, 32, 1024": (lambda: layers(1024, 32, 1024, act=nn.Identity), (1024, 1024)),
    "adapter 768, 64, 768": (lambda: Adapter(768, 64), (1024, 768)),
    "radiance field 63, 64, 64, 64, 4": (lambda: layers(63, 64, 64, 64, 4), (65536, 63)),
    "DLRM, below 13, 512, 256, 64": (lambda: layers(13, 512, 256, 64), (2048, 13)),
    "autoencoder 784, 128, 32, 128, 784": (lambda: layers(784, 128, 32, 128, 784), (2048, 784)),
    "SwiGLU 64, 128": (lambda: Gated(64, 128), (4096, 64)),
}


def compiled(model: nn.Module) -> Callable[..., Any]:
    """Through a function of its own, so that no other's compilation serves it."""
    scope: dict[str, Any] = {"model": model}
    exec("def forward(x): return model(x)", scope)
    return torch.compile(scope["forward"], backend="gnomon")


def row(name: str, rounds: int) -> tuple[str, float]:
    made, shape = CASES[name]
    torch._dynamo.reset()
    model, x = made().eval(), torch.randn(shape)
    gain, chains.GAIN = chains.GAIN, 0.0
    began = time.perf_counter()
    fused = compiled(model)
    fused(x)
    first_s = time.perf_counter() - began
    report = backend.reports[-1]
    chains.GAIN = math.inf
    apart = compiled(copy.deepcopy(model))
    for one in (fused, apart, apart, apart):
        one(x)
    chains.GAIN = gain
    right = copy.deepcopy(model).double()(x.double())
    error = float((fused(x) - right).abs().max() / right.abs().max())
    best = [math.inf] * 3
    for _ in range(rounds):
        for n, one in enumerate((fused, apart, model)):
            start = time.thread_time()
            one(x)
            best[n] = min(best[n], time.thread_time() - start)
    tried = [chain for chain in report.chains if chain.kept]
    text = "; ".join(dict.fromkeys(" + ".join(chain.names) for chain in tried)) or "none"
    products = sum(m * n * k for m, n, k in report.chains[0].sizes) if report.chains else 0
    bound_ms = 1e3 * products / (this_device().vectors.lanes * this_device().vectors.rate)
    gained = best[1] / best[0]
    cells = [name, *(f"{1e3 * one:.2f}" for one in (best[2], best[1], best[0])), f"{gained:.2f}", f"{bound_ms:.2f}"]
    return "| " + " | ".join([*cells, f"{error:.0e}", f"{first_s:.1f}", text]) + " |", gained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="part of the names of rows")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = [name for name in CASES if options.only in name]
    rows, gains = [], []
    with torch.no_grad():
        for name in names:
            text, gained = row(name, options.rounds)
            print(text, flush=True)
            rows.append(text)
            gains.append(gained)
    mean = math.prod(gains) ** (1 / len(gains))
    command = f"`python benchmarks/compiler/chains.py --rounds {options.rounds} --write`"
    text = f"""# Linear layers with what surrounds them as one kernel

{date.today()}, {command}, torch {torch.__version__}, one thread
of an AMD EPYC with AVX-512, other work on the machine; CPU milliseconds, the least of {options.rounds} rounds by turns.
`apart`: the same compiler without chains; `products`: the multiplications of the chain that was tried first, at the
core's rate of vector instructions; `error`: from eager in double. All chains are tried, and those kept that take at
most 0.98 of their time apart.

| | eager | apart | with chains | apart / chains | products | error | first call s | kept |
|---|---:|---:|---:|---:|---:|---:|---:|---|
{chr(10).join(rows)}

Geometric mean of apart / chains: {mean:.2f}.
"""
    if options.write:
        RESULT.write_text(text)
    print(text.rsplit("\n\n", 1)[-1])


if __name__ == "__main__":
    main()
