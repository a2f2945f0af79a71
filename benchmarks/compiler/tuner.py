"""The tuner beside exhaustive search: whether it finds the same tiling, and with how many calls of the kernels.

    python benchmarks/compiler/tuner.py [--rounds 15] [--write]

One thread. Kernels are seven functions at seven sizes each. Exhaustive search calls every candidate `--rounds` times,
in a new order each time, and takes the fastest; the tuner's choice is the same where it takes at most 1.03 of the
fastest by those times. The usual tiling is the compiler's without measuring.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from gnomon.compiler import backend, tuner
from gnomon.compiler.tiles import Tiling

RESULT = Path(__file__).parents[1] / "results" / "compiler_tuner.md"
SAME = 1.03
SIZES = ((64, 256), (512, 1024), (2048, 256), (128, 4096), (4096, 64), (37, 777), (1024, 512))
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, y: F.softmax(x, -1),
    "layer norm": lambda x, y: F.layer_norm(x, x.shape[-1:]),
    "add, RMS norm": lambda x, y: F.rms_norm(x + y, x.shape[-1:]),
    "SwiGLU": lambda x, y: F.silu(x) * y,
    "bias, GELU": lambda x, y: F.gelu(x + y[0]),
    "log-softmax": lambda x, y: F.log_softmax(x * 2.0, -1),
    "four outputs": lambda x, y: (x + y, x * y, (x - y).exp(), x.sigmoid()),
}


def subjects() -> list[tuple[str, tuner.Subject]]:
    """The first kernel of each function at each size."""
    out = []
    for name, function in FUNCTIONS.items():
        for rows, points in SIZES:
            torch._dynamo.reset()
            backend.reports.clear()
            torch.compile(function, backend="gnomon", dynamic=False)(
                torch.randn(rows, points), torch.randn(rows, points)
            )
            planned = backend.reports[-1].program.groups
            found = tuner.subject_of(planned[0]) if planned else None
            if found is not None:
                out.append((f"{name}, {rows} x {points}", found))
    return out


def exhaustive(subject: tuner.Subject, rounds: int) -> dict[Tiling, float]:
    """Seconds of each candidate."""
    best = dict.fromkeys(subject.candidates, float("inf"))
    order = list(best)
    for _ in range(rounds):
        random.shuffle(order)
        for tile in order:
            start = time.thread_time()
            subject.run(tile)
            best[tile] = min(best[tile], time.thread_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help=f"to {RESULT}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| kernel | candidates | tuner / best | usual / best | calls, tuner | calls, exhaustive |",
        "|---" * 6 + "|",
    ]
    same = usual_same = asked = every = 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("GNOMON_CACHE", cache)
        for name, subject in subjects():
            calls = 0
            run = subject.run

            def counted(tile: Tiling, run: Any = run) -> Any:
                nonlocal calls
                calls += 1
                return run(tile)

            took = exhaustive(subject, options.rounds)
            subject.run = counted
            while subject.candidates:
                subject.next()
            best = min(took.values())
            assert subject.best is not None
            chosen = subject.best if subject.best_s <= tuner.GAIN * subject.usual_s else subject.usual
            ours, usual = took[chosen] / best, took[subject.usual] / best
            same, usual_same = same + (ours <= SAME), usual_same + (usual <= SAME)
            asked, every = asked + calls, every + options.rounds * len(took)
            lines.append(
                f"| {name} | {len(took)} | {ours:.2f} | {usual:.2f} | {calls} | {options.rounds * len(took)} |"
            )
    count = len(lines) - 2
    lines += ["", f"Within {SAME} of the best: the tuner {same} of {count}, the usual tiling {usual_same} of {count}."]
    lines += [f"Calls: {asked:,} of {every:,} ({asked / every:.0%})."]
    print("\n".join(lines))
    if options.write:
        what = f"{date.today()}, `python benchmarks/compiler/tuner.py --rounds {options.rounds} --write`, one thread."
        RESULT.write_text("\n".join(["# Measured tilings", "", what, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
