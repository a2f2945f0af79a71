"""Loops and branches through backend "gnomon" beside eager: a step's cost, and compile time by the number of steps.

    python benchmarks/compiler/loops.py [--seconds 3] [--write]

One thread. `eager` is the loop in Python that gives the same; peers take turns, microseconds of CPU time of a whole
call, medians.
First calls begin with empty caches of Dynamo's, and kernels compiled (they are the same for each number of steps).
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import scan, while_loop

RESULT = Path(__file__).parents[1] / "results" / "compiler_loops.md"


def cell(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """A recurrent cell whose numbers decide what it does."""
    z = torch.tanh(h @ w + x)
    return torch.cond(z.sum() > 0, lambda z: z * 0.9, lambda z: (z - 0.1).sin(), (z,))


def cell_in_eager(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    z = torch.tanh(h @ w + x)
    return z * 0.9 if z.sum() > 0 else (z - 0.1).sin()


def scanned(xs: Tensor, w: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        new = cell(h, x, w)
        return new, new.sum(-1)

    return scan(step, torch.zeros_like(xs[0]), xs)


def scanned_in_eager(xs: Tensor, w: Tensor) -> Any:
    h, sums = torch.zeros_like(xs[0]), []
    for x in xs:
        h = cell_in_eager(h, x, w)
        sums.append(h.sum(-1))
    return h, torch.stack(sums)


def smoothed(xs: Tensor, _: Tensor) -> Any:
    """An exponential mean that starts again where it is far off."""

    def step(m: Tensor, x: Tensor) -> Any:
        new = torch.where((x - m).abs() > 2.0, x, 0.9 * m + 0.1 * x)
        return new, new.clone()

    return scan(step, torch.zeros_like(xs[0]), xs)


def smoothed_in_eager(xs: Tensor, _: Tensor) -> Any:
    m, every = torch.zeros_like(xs[0]), []
    for x in xs:
        m = torch.where((x - m).abs() > 2.0, x, 0.9 * m + 0.1 * x)
        every.append(m)
    return m, torch.stack(every)


def halved(xs: Tensor, w: Tensor) -> Any:
    """Until it is small: as many steps as there are rows."""
    count = torch.tensor(xs.shape[0])
    return while_loop(lambda n, x: n < count, lambda n, x: (n + 1, (x @ w).tanh() * 0.5 + x), (torch.tensor(0), xs[0]))


def halved_in_eager(xs: Tensor, w: Tensor) -> Any:
    n, x = torch.tensor(0), xs[0]
    while n < xs.shape[0]:
        n, x = n + 1, (x @ w).tanh() * 0.5 + x
    return n, x


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "scan, recurrent cell with a branch": (scanned, scanned_in_eager, 16),
    "scan, exponential mean": (smoothed, smoothed_in_eager, 16),
    "while_loop, product and tanh": (halved, halved_in_eager, 16),
}


def row(name: str, steps: int, seconds: float) -> str:
    function, eager, width = CASES[name]
    torch.manual_seed(0)
    xs, w = torch.randn(steps, 4, width), torch.randn(width, width) / width
    torch._dynamo.reset()
    fast = torch.compile(function, backend="gnomon")
    start = time.perf_counter()
    fast(xs, w)
    first_s = time.perf_counter() - start
    for _ in range(2):
        torch.testing.assert_close(fast(xs, w), eager(xs, w), rtol=1e-3, atol=1e-4)
    times: dict[str, list[float]] = {"eager": [], "gnomon": []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["eager"]) < 3:
        for peer, call in (("eager", eager), ("gnomon", fast)):
            for _ in range(1 if peer == "eager" else 5):
                start = time.thread_time()
                call(xs, w)
                times[peer].append(time.thread_time() - start)
    a, b = median(times["eager"]), median(times["gnomon"])
    return f"| {name} | {steps} | {a * 1e6:,.0f} | {b * 1e6:,.0f} | {a / b:.1f} | {first_s:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a row")
    parser.add_argument("--write", action="store_true", help=f"to {RESULT}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = ["| loop | steps | eager us | gnomon us | eager / gnomon | first call s |", "|---" * 6 + "|"]
    print("\n".join(lines))
    with torch.no_grad():
        for name in CASES:
            row(name, 3, 0.1)  # kernels are compiled
            for steps in (10, 100, 1000):
                lines.append(row(name, steps, options.seconds))
                print(lines[-1], flush=True)
    if options.write:
        what = f"{date.today()}, `python benchmarks/compiler/loops.py --seconds {options.seconds:g} --write`, "
        head = ["# Loops as one call", "", f"{what}torch {torch.__version__}, one thread.", ""]
        RESULT.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
