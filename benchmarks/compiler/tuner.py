"""The tuner compared with exhaustive search: whether it finds the same tiling, and with how many calls of the kernels.

    python benchmarks/compiler/tuner.py [--rounds 15] [--write]

One thread. Kernels are eight functions at seven sizes each. Exhaustive search calls every candidate `--rounds` times,
in a new order each time, and takes the fastest. Then as many more rounds judge, which nobody has chosen by: a choice
is the same where it takes at most 1.03 of the time that exhaustive search's takes in them. The usual tiling is the
compiler's without measuring; `blind` is the fastest that the tuner finds without the model, from candidates in random
order; `slowest` says how much there is to choose.
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

from gnomon.compiler import backend
from gnomon.compiler.tiles.tiling import Tiling
from gnomon.compiler.tune import tuner

RESULT = Path(__file__).parents[1] / "results" / "compiler_tuner.md"
SAME = 1.03
HEAD = """Times of each choice over that of exhaustive search's, in rounds that nobody chose by. `blind`: the tuner
without its model, from candidates in random order. Where `slowest` is near 1 any choice is right."""
SIZES = ((64, 256), (512, 1024), (2048, 256), (128, 4096), (4096, 64), (37, 777), (1024, 512))
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, y: F.softmax(x, -1),
    "layer norm": lambda x, y: F.layer_norm(x, x.shape[-1:]),
    "add, RMS norm": lambda x, y: F.rms_norm(x + y, x.shape[-1:]),
    "SwiGLU": lambda x, y: F.silu(x) * y,
    "bias, GELU": lambda x, y: F.gelu(x + y[0]),
    "log-softmax": lambda x, y: F.log_softmax(x * 2.0, -1),
    "GEGLU": lambda x, y: F.gelu(x, approximate="tanh") * y,
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


def tuned(subject: tuner.Subject, order: list[Tiling]) -> tuple[Tiling, int]:
    """The tuner's choice of candidates in this order, and its calls of the kernel. It stays with the usual tiling,
    as the compiler does, unless another is faster by more than noise, where that comes first."""
    calls, run = 0, subject.run

    def counted(tile: Tiling) -> Any:
        nonlocal calls
        calls += 1
        return run(tile)

    subject.run, subject.candidates = counted, list(order)
    subject.best, subject.best_s, subject.usual_s = None, float("inf"), float("inf")
    while subject.candidates:
        subject.next()
    subject.run = run
    assert subject.best is not None
    if order[0] != subject.usual:
        return subject.best, calls
    return (subject.best if subject.best_s <= tuner.GAIN * subject.usual_s else subject.usual), calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help=f"to {RESULT}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| kernel | candidates | tuner | blind | usual | slowest | calls: tuner | blind | exhaustive |",
        "|---" * 9 + "|",
    ]
    ratios: dict[str, list[float]] = {"the tuner": [], "blind": [], "the usual tiling": []}
    calls_of = dict.fromkeys(("the tuner", "blind", "exhaustive"), 0)
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("GNOMON_CACHE", cache)
        for name, subject in subjects():
            chosen_by, judged = exhaustive(subject, options.rounds), exhaustive(subject, options.rounds)
            winner = judged[min(chosen_by, key=lambda tile: chosen_by[tile])]
            order, tried = list(subject.candidates), {}
            tried["the tuner"] = tuned(subject, order)
            tried["blind"] = tuned(subject, random.sample(order, len(order)))
            row = {kind: judged[tile] / winner for kind, (tile, _) in tried.items()}
            row["the usual tiling"] = judged[subject.usual] / winner
            for kind, ratio in row.items():
                ratios[kind].append(ratio)
            for kind, (_, calls) in tried.items():
                calls_of[kind] += calls
            calls_of["exhaustive"] += options.rounds * len(judged)
            lines.append(
                f"| {name} | {len(judged)} | {' | '.join(f'{one:.2f}' for one in row.values())} | "
                f"{max(judged.values()) / winner:.2f} | {tried['the tuner'][1]} | {tried['blind'][1]} | "
                f"{options.rounds * len(judged)} |"
            )
            print(lines[-1], flush=True)
    lines.append("")
    for kind, every in ratios.items():
        same = sum(one <= SAME for one in every)
        calls = f", {calls_of[kind] / calls_of['exhaustive']:.0%} of its calls" if kind in calls_of else ""
        lines.append(f"Same as exhaustive search, {kind}: {same} of {len(every)}, at most {max(every):.2f}{calls}.  ")
    print("\n".join(lines[-4:]))
    if options.write:
        what = f"{date.today()}, `python benchmarks/compiler/tuner.py --rounds {options.rounds} --write`, one thread."
        RESULT.write_text("\n".join(["# Measured tilings", "", what, HEAD, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
