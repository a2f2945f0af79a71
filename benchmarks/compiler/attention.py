"""Attention by the kernels of backend "gnomon" beside ATen's: `python benchmarks/compiler/attention.py`.

Both take turns on the same tensors, laid out as a model's projections give them (positions outside heads); milliseconds
are medians of CPU time on one thread. The bound is one vector instruction a clock of `GHZ` for each 16 products of
float32 or 32 of bfloat16, of what lies below the diagonal where attention is causal. Errors are norms, relative to
doubles: of the output, and the largest of the three gradients. Left out: the trial, which keeps the faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from gnomon.compiler import attention

SHAPES = (
    (2, 12, 128, 64, False),
    (2, 12, 128, 64, True),
    (1, 12, 197, 64, False),
    (2, 12, 512, 64, True),
    (1, 8, 1024, 128, True),
)
"""Batch, heads, positions, size of a head, whether it is causal."""
ROUNDS = 15
GHZ = 3.0


def milliseconds(calls: list[Callable[[], Any]]) -> list[float]:
    """Of each, by turns."""
    took: list[list[float]] = [[] for _ in calls]
    for n in range(ROUNDS + 2):
        for call, times in zip(calls, took, strict=True):
            start = time.thread_time()
            call()
            if n > 1:
                times.append((time.thread_time() - start) * 1e3)
    return [median(times) for times in took]


def apart(made: list[Any], exact: list[Any]) -> float:
    """The largest error of some tensors."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(made, exact, strict=True))


def main() -> None:
    """A table, a line a shape, dtype and direction."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| dtype | batch x heads x positions x size | | ATen ms | gnomon ms | ATen / gnomon | bound ms | errors |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in attention.dtypes():
        for batch, heads, length, depth, causal in SHAPES:
            q, k, v, g = (torch.randn(batch, length, heads, depth).to(dtype).transpose(1, 2) for _ in range(4))
            forward, backward = (
                kind(causal, None, True, dtype) for kind in (attention.Attention, attention.AttentionBackward)
            )
            out = forward.aten(q, k, v)
            wide = [one.double() for one in (g, q, k, v)]
            exact = forward.aten(*wide[1:])
            shape = f"{batch} x {heads} x {length} x {depth}{' causal' if causal else ''}"
            products = batch * heads * length * length * depth / (2 if causal else 1)
            for name, call, given, wanted, count in (
                ("forward", forward, (q, k, v), exact, 2),
                ("backward", backward, (g, q, k, v, *out), backward.aten(*wide, *exact), 5),
            ):
                aten, ours = milliseconds([lambda c=call, x=given: c.aten(*x), lambda c=call, x=given: c.run(*x)])
                bound = count * products / (64 // dtype.itemsize) / GHZ * 1e-6
                errors = " and ".join(f"{apart(f(*given)[:5], wanted):.1e}" for f in (call.aten, call.run))
                figures = [aten, ours, aten / ours, bound]
                row = [str(dtype)[6:], shape, name, *[f"{one:.2f}" for one in figures], errors]
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
