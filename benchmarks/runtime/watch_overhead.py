"""What `gnomon.watch` costs a step of a training loop: the same tiny loop watched and not, taking turns, one thread.

    OMP_NUM_THREADS=1 python benchmarks/runtime/watch_overhead.py [--rounds 200]

A linear layer of 8 x 8 with SGD, so that a step is little but Python's own calls: what the hooks add shows whole. Each
round runs 20 steps of each kind; the least and the median over the rounds are printed, as Markdown. Leaves out ranks
telling each other their parts, once in eight steps and without waiting.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn

from gnomon.runtime.watch.watch import watch

STEPS = 20


class Loop:
    """One copy of the loop. kind: whether it is watched, and where its records go."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.ones(4, 8)
        if kind != "plain":
            records = folder / "watch.jsonl" if kind == "watched, records in a file" else None
            self.watch = watch(self.model, self.optimizer, records=records, out=None)

    def seconds(self) -> float:
        began = perf_counter()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
        return (perf_counter() - began) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    kinds = ("plain", "watched", "watched, records in a file")
    with tempfile.TemporaryDirectory() as folder:
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        loops = {kind: Loop(kind, Path(folder)) for kind in kinds}
        for kind in kinds:
            loops[kind].seconds()
        for _ in range(rounds):
            for kind in kinds:
                taken[kind].append(loops[kind].seconds())
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, one thread, {rounds} rounds of {STEPS} steps each\n")
    print("| loop | least, µs a step | median, µs a step | added, least | added, median |\n|---|---|---|---|---|")
    least, middle = min(taken["plain"]), median(taken["plain"])
    for kind, seconds in taken.items():
        low, mid = min(seconds), median(seconds)
        print(
            f"| {kind} | {1e6 * low:.0f} | {1e6 * mid:.0f} | {1e6 * (low - least):.0f} | {1e6 * (mid - middle):.0f} |"
        )


if __name__ == "__main__":
    main()
