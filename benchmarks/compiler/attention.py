"""Attention by the kernels of backend "gnomon" beside ATen's: `python benchmarks/compiler/attention.py [--written]`.

Both take turns on the same tensors, laid out as a model's projections give them (positions outside heads); milliseconds
are medians of CPU time on one thread. The bound is one vector instruction a clock of `GHZ` for each 16 products of
float32 or 32 of bfloat16, of what lies below the diagonal where attention is causal. Errors are norms, relative to
doubles: of the output, and the largest of the three gradients. Left out: the trial, which keeps the faster.
`--written`: attention as a model writes it, two matrix products with a scale, a mask and a softmax between, of float32:
eager, compiled with the products and the softmax apart, and as one kernel.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from gnomon.compiler import backend
from gnomon.compiler.kernels import attention

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


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As BERT's eager attention: the output with positions outside heads."""
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    return torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2).contiguous()


def written() -> None:
    """A table, a line a shape."""
    print("| batch x heads x positions x size | eager ms | apart ms | one kernel ms | eager / one | apart / one |")
    print("|---|---|---|---|---|---|")
    found = attention._fuse_written
    for batch, heads, length, depth, _ in SHAPES:
        q, k, v = (torch.randn(batch, length, heads, depth).transpose(1, 2) for _ in range(3))
        mask = torch.zeros(batch, 1, 1, length).masked_fill(torch.rand(batch, 1, 1, length) < 0.1, -1e9)
        calls: list[Callable[[], Any]] = [lambda x=(q, k, v, mask): eager(*x)]
        for how in (lambda _: [], found):
            attention._fuse_written = how
            torch._dynamo.reset()
            fast = torch.compile(eager, backend="gnomon")
            for _ in range(3):
                fast(q, k, v, mask)
            calls.append(lambda fast=fast, x=(q, k, v, mask): fast(*x))
        kept = [one.kept for report in backend.reports for one in report.attention][-1]
        first, apart_ms, one = milliseconds(calls)
        figures = [f"{x:.2f}" for x in (first, apart_ms, one, first / one, apart_ms / one)]
        shape = f"{batch} x {heads} x {length} x {depth}{'' if kept else ' (given back)'}"
        print(f"| {' | '.join([shape, *figures])} |", flush=True)
    attention._fuse_written = found


def main() -> None:
    """A table, a line a shape, dtype and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--written", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if asked.written:
        with torch.no_grad():
            written()
        return
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
