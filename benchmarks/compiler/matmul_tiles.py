"""The tile that is constructed for a matrix product beside every tile that fits in the registers, all measured.

    python benchmarks/compiler/matmul_tiles.py [--shapes 30] [--write]

One thread, CPU time, the least of 7 calls in turn. The kernel is cpp/linear.cpp; `ATen` is torch.mm. Constructing takes
no measurement and no compilation but that of the tile which is taken.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from datetime import date
from math import exp, log
from pathlib import Path

import torch

from gnomon.compiler.device import this_device
from gnomon.compiler.linear import LinearForm, linear
from gnomon.compiler.matmul_tile import MatmulTile, constructed, fits

RESULT = Path(__file__).parents[1] / "results" / "compiler_matmul_tiles.md"
M, N, K = (16, 49, 64, 128, 196, 256, 512, 1000), (48, 96, 192, 256, 512, 768, 1000), (64, 96, 256, 384, 768)


def measured(x: torch.Tensor, w: torch.Tensor, tiles: list[MatmulTile]) -> tuple[dict[MatmulTile, float], float]:
    """CPU seconds of each tile's kernel, and of ATen's."""
    best, aten = dict.fromkeys(tiles, float("inf")), float("inf")
    for _ in range(7):
        for tile in tiles:
            began = time.thread_time()
            linear(x, w, form=LinearForm(tile))
            best[tile] = min(best[tile], time.thread_time() - began)
        began = time.thread_time()
        torch.mm(x, w.t())
        aten = min(aten, time.thread_time() - began)
    return best, aten


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=30)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = this_device()
    every = [MatmulTile(r, v) for v in (1, 2, 3, 4) for r in range(2, 30) if fits(MatmulTile(r, v), device)]
    x, w = torch.randn(40, 64), torch.randn(100, 64)
    for tile in every:
        made = linear(x, w, form=LinearForm(tile))
        assert made is not None
        torch.testing.assert_close(made, x @ w.t())
    rng, rows, ratios, spent = random.Random(0), [], [], []
    for _ in range(options.shapes):
        m, n, k = rng.choice(M), rng.choice(N), rng.choice(K)
        began = time.perf_counter()
        first = constructed(m, n, k, device)[0]
        spent.append(time.perf_counter() - began)
        found, aten = measured(torch.randn(m, k), torch.randn(n, k), every)
        best = min(found, key=lambda tile: found[tile])
        ratios.append(found[first] / found[best])
        rows.append(
            f"| {m} x {n} x {k} | {first.rows} x {first.vectors} | {best.rows} x {best.vectors} | {ratios[-1]:.2f} | "
            f"{aten / found[first]:.2f} |"
        )
        print(rows[-1], flush=True)
    mean = exp(sum(log(one) for one in ratios) / len(ratios))
    near = sum(one <= 1.1 for one in ratios)
    text = [
        "# Tiles of matrix products, constructed",
        "",
        f"{date.today()}, `python benchmarks/compiler/matmul_tiles.py {' '.join(sys.argv[1:])}`, one thread of an AMD",
        f"EPYC with AVX-512, torch {torch.__version__}, other work on the machine. {len(every)} tiles fit in the",
        f"registers; all were measured. The constructed first choice takes {mean:.3f} of the best's time (geometric",
        f"mean), at most {max(ratios):.2f}, and within 1.1 in {near} of {len(ratios)};",
        f"it is constructed in {max(spent) * 1e3:.1f} ms at most.",
        "",
        "| m x n x k | constructed (rows x vectors) | best of all | constructed / best | ATen / constructed |",
        "|---|---|---|---:|---:|",
        *rows,
    ]
    print("\n".join(text[:6]))
    if options.write:
        RESULT.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
