"""The tile that is constructed for a matmul compared with every tile that fits in the registers, in two orders, all
measured.

    python benchmarks/compiler/matmul_tiles.py [--shapes 30] [--seed 0] [--any] [--write]

One thread, CPU time; all take turns in a new order each round, `--seconds` a shape, and the least and the median of
each are compared. The kernel is cpp/linear.cpp. Orders: all weights are turned first and a block of rows goes over all
of them, or all rows go over one panel of weights after another; the kernel's own choice of the two counts for the
constructed tile. `ATen` is torch.mm. `--any`: sizes are any numbers (m from 8 to 1,500, n from 32, k from 32 to 1,200)
in place of those of a list. Constructing takes no measurement and no compilation but that of the tile which is taken.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import time
from collections.abc import Callable
from datetime import date
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch

from gnomon.compiler.build import kernel_of
from gnomon.compiler.kernels.linear import LinearCall, LinearForm, linear, of_rows, source
from gnomon.compiler.tiles.device import this_device
from gnomon.compiler.tiles.matmul_tile import MatmulTile, constructed, fits

RESULT = Path(__file__).parents[1] / "results" / "compiler_matmul_tiles.md"
M, N, K = (16, 49, 64, 128, 196, 256, 512, 1000), (48, 96, 192, 256, 512, 768, 1000), (64, 96, 256, 384, 768)


Variant: TypeAlias = tuple[MatmulTile, str]
"""A tile and an order: `first` (all weights are turned first), `panel` (one panel after another), `own` (as the kernel
chooses)."""
ORDERS = {
    "own": "",
    "first": "#define TURNED ((int64_t)1 << 40)\n",
    "panel": "#define TURNED 0\n",
}


def kernels(tiles: list[MatmulTile]) -> dict[Variant, Callable[[Any], int]]:
    """The kernel of each variant."""
    out = {}
    for order, defined in ORDERS.items():
        for tile in tiles:
            function = kernel_of(defined + source(LinearForm(tile)), ctypes.POINTER(LinearCall))
            assert function is not None
            out[tile, order] = function
    return out


def measured(
    m: int, n: int, k: int, every: dict[Variant, Callable[[Any], int]], seconds: float
) -> tuple[dict[Variant, list[float]], list[float]]:
    """CPU seconds of each variant's calls, and of ATen's."""
    x, w, out = torch.randn(m, k), torch.randn(n, k), torch.empty(m, n)
    call = of_rows(x, w, relu=False)
    assert call is not None
    call.threads, call.x, call.w, call.out = 1, x.data_ptr(), w.data_ptr(), out.data_ptr()
    at, aten, took = ctypes.byref(call), [], {variant: [] for variant in every}
    order, end = list(every), time.perf_counter() + seconds
    while time.perf_counter() < end or len(aten) < 7:
        random.shuffle(order)
        for variant in order:
            function = every[variant]
            began = time.thread_time()
            function(at)
            took[variant].append(time.thread_time() - began)
        began = time.thread_time()
        torch.mm(x, w.t(), out=out)
        aten.append(time.thread_time() - began)
    return took, aten


def sizes(rng: random.Random, of_a_list: bool) -> tuple[int, int, int]:
    """Of a shape."""
    if of_a_list:
        return rng.choice(M), rng.choice(N), rng.choice(K)
    m, n, k = (int(exp(rng.uniform(log(low), log(high)))) for low, high in ((8, 1500), (32, 1500), (32, 1200)))
    return m, n, k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--any", action="store_true", help="sizes are any numbers")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a shape")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = this_device()
    tiles = [MatmulTile(r, v) for v in (1, 2, 3, 4) for r in range(2, 30) if fits(MatmulTile(r, v), device)]
    x, w = torch.randn(40, 64), torch.randn(100, 64)
    for tile in tiles:
        made = linear(x, w, form=LinearForm(tile))
        assert made is not None
        torch.testing.assert_close(made, x @ w.t())
    every = kernels(tiles)
    rng, rows, spent = random.Random(options.seed), [], []
    ratios: dict[str, list[float]] = {"least": [], "median": []}
    for _ in range(options.shapes):
        m, n, k = sizes(rng, not options.any)
        began = time.perf_counter()
        first = constructed(m, n, k, device)[0]
        spent.append(time.perf_counter() - began)
        # Only the constructed tile is measured in the kernel's own order: that is one of the two.
        of = {variant: f for variant, f in every.items() if variant[1] != "own" or variant[0] == first}
        took, aten = measured(m, n, k, of, options.seconds)
        mine = took.pop((first, "own"))
        for name, kind in (("least", min), ("median", median)):
            ratios[name].append(kind(mine) / min(kind(one) for one in took.values()))
        best, order = min(took, key=lambda one: median(took[one]))
        rows.append(
            f"| {m} x {n} x {k} | {first.rows} x {first.vectors} | {best.rows} x {best.vectors}, {order} | "
            f"{ratios['median'][-1]:.2f} | {ratios['least'][-1]:.2f} | {median(aten) / median(mine):.2f} |"
        )
        print(rows[-1], flush=True)
    least, mid = ratios["least"], ratios["median"]
    text = [
        "# Tiles of matmuls, constructed",
        "",
        f"{date.today()}, `python benchmarks/compiler/matmul_tiles.py {' '.join(sys.argv[1:])}`,",
        f"torch {torch.__version__}. {len(tiles)} tiles fit in the registers, in two orders: {len(took)} measured.",
        "",
        "| compared | mean (geometric) | at most | within 1.1 |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {exp(sum(map(log, of)) / len(of)):.3f} | {max(of):.2f} | "
            f"{sum(one <= 1.1 for one in of)} of {len(of)} |"
            for name, of in (("medians", mid), ("least", least))
        ),
        "",
        f"Constructing takes {max(spent) * 1e3:.1f} ms at most.",
        "",
        "| m x n x k | constructed (rows x vectors) | best of all | "
        "constructed / best, medians | least | ATen / constructed |",
        "|---|---|---|---:|---:|---:|",
        *rows,
    ]
    print("\n".join(text[:12]))
    if options.write:
        RESULT.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
