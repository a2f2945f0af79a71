"""Graphs of branches (a NASNet cell, towers) on two threads: backend "gnomon" by two workers beside eager and Inductor.

    python benchmarks/compiler/two_workers.py [--rounds 200] [--write]

Peers take turns. Wall milliseconds are the tenth percentile and the median; CPU milliseconds a call are of the whole
process, so that threads which look for work are seen. `one worker`: the same compiled graph with its steps one after
another. The load of the machine is said before and after.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compiler.whole_models import NasnetCell  # noqa: E402
from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.tasks import steps  # noqa: E402

RESULT = Path(__file__).parents[1] / "results" / "compiler_two_workers.md"
WARM = 6


class Towers(nn.Module):
    """Perceptrons of one input that do not wait for each other, as a recommender's towers."""

    def __init__(self, towers: int = 4, width: int = 256) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width))
            for _ in range(towers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([tower(x) for tower in self.towers], -1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "NASNet cell, 28 x 28 x 44": (NasnetCell, lambda: (torch.randn(1, 264, 28, 28), torch.randn(1, 264, 28, 28))),
    "NASNet cell, 14 x 14 x 88": (
        lambda: NasnetCell(88),
        lambda: (torch.randn(1, 528, 14, 14), torch.randn(1, 528, 14, 14)),
    ),
    "4 towers, 32 rows": (Towers, lambda: (torch.randn(32, 256),)),
}


def row(name: str, rounds: int) -> list[str]:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x = build().eval(), inputs()
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: model(*x)}
    backend.reports.clear()
    for peer in ("inductor", "gnomon"):
        torch._dynamo.reset()
        fast = torch.compile(model, backend=peer)
        for _ in range(WARM):
            fast(*x)
        calls[peer] = lambda fast=fast: fast(*x)
    made = [run for report in backend.reports for run in report.runs if run.two_workers is not None]

    def one_by_one() -> None:
        for run in made:
            assert run.two_workers is not None and run.two_workers.trial is not None
            run.two_workers.trial.kept, kept = False, run.two_workers.trial.kept
        calls["gnomon"]()
        for run in made:
            assert run.two_workers is not None and run.two_workers.trial is not None
            run.two_workers.trial.kept = kept

    if any(run.two_kept for run in made):
        calls["one worker"] = one_by_one
    wall: dict[str, list[float]] = {peer: [] for peer in calls}
    cpu = dict.fromkeys(calls, 0.0)
    for _ in range(rounds):
        for peer, call in calls.items():
            spent, began = time.process_time(), time.perf_counter()
            call()
            wall[peer].append(time.perf_counter() - began)
            cpu[peer] += time.process_time() - spent
    cells = []
    for peer in ("eager", "inductor", "one worker", "gnomon"):
        if peer not in wall:
            cells.append("-")
            continue
        tenths = quantiles(wall[peer], n=10)
        cells.append(f"{tenths[0] * 1e3:.2f}, {tenths[4] * 1e3:.2f}; {cpu[peer] / rounds * 1e3:.2f}")
    tenth = {peer: quantiles(each, n=10) for peer, each in wall.items()}
    ratios = [f"{tenth['inductor'][at] / tenth['gnomon'][at]:.2f}" for at in (0, 4)]
    ratios.append(f"{cpu['inductor'] / cpu['gnomon']:.2f}")
    lists = "; ".join(
        " + ".join(str(len(each)) for each in run.two_workers.schedule.lists) for run in made if run.two_kept
    )
    return [name, *cells, ", ".join(ratios), lists or "-"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--write", action="store_true", help=f"to {RESULT}")
    options = parser.parse_args()
    assert steps._library() is not None, "needs a C++ compiler"
    torch.set_num_threads(2)
    before = os.getloadavg()[0]
    with torch.no_grad():
        rows = [row(name, options.rounds) for name in MODELS]
    heads = ["graph", "eager", "inductor", "one worker", "gnomon", "Inductor / gnomon", "steps of each worker"]
    lines = [
        "# Graphs of branches by two workers", "",
        f"{date.today()}, `python benchmarks/compiler/two_workers.py --rounds {options.rounds} --write`, torch "
        f"{torch.__version__}, two threads, {os.cpu_count()} cores, load average {before:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after.",
        "Milliseconds a call, peers by turns: wall, tenth percentile and median; CPU of the process. Ratios in that "
        "order.",
        "",
        f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(cells)} |" for cells in rows),
    ]  # fmt: skip
    print("\n".join(lines))
    if options.write:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
