"""What kernels lose to collectives beside them, chosen again without each source: checks `prediction.contention`.

    python -m evidence.fits.fit_contention published_runs.csv [--per-family 40]

Runs under ZeRO 3 of every family are predicted with the rates to which no run of their source was fitted, for each
value of SLOWED and FULL_RATE in GRID. The pair with the least mean |log(predicted / measured)|, every family with the
same weight, is chosen from all families, and again without each one. Prints both, and the errors of the family that
was left out under its pair and under the one on record. Leaves out families with fewer than SMALLEST runs, and what
collectives lose in turn (`contention.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from evidence.fits.stack_fit import spread_evenly
from evidence.folds import folds
from evidence.published import Run, read_runs
from evidence.published.fitted_reading import fitted_reading
from evidence.published.row import COMPOSED
from gnomon.errors import GnomonError
from gnomon.prediction import contention
from gnomon.prediction.measured import predicted_s
from gnomon.prices.fitted import fitted_rates

Pair = tuple[float, float]
"""(SLOWED, FULL_RATE in bytes a second)."""
GRID: tuple[Pair, ...] = tuple(product((0.5, 0.35, 0.2, 0.0, 0.65, 0.8), (200e9, 100e9, 400e9)))
"""Tried, the pair on record first: of equals the first is taken."""
SMALLEST = 5
"""Runs of a family that say something."""


def errors(run: Run) -> Mapping[Pair, float] | None:
    """log(predicted / measured) of a run for each pair; None if it cannot be predicted."""
    numbers = folds().without_source(run.family) or fitted_rates()
    plain = contention.SLOWED, contention.FULL_RATE
    try:
        read, made = fitted_reading(run)
        collected = {}
        for pair in GRID:
            contention.SLOWED, contention.FULL_RATE = pair
            collected[pair] = float(np.log(predicted_s(read, made, numbers) / run.step_s))
        return collected
    except GnomonError:
        return None
    finally:
        contention.SLOWED, contention.FULL_RATE = plain


def best(of_families: Iterable[Sequence[Mapping[Pair, float]]]) -> Pair:
    """The pair with the least mean error, families alike."""
    given = list(of_families)
    return min(GRID, key=lambda pair: round(float(np.mean([np.mean(np.abs([r[pair] for r in f])) for f in given])), 6))


def shown(rows: Sequence[Mapping[Pair, float]], pair: Pair) -> str:
    """The pair, and median and 90th percentile of the absolute error under it."""
    off = np.abs(np.expm1([row[pair] for row in rows]))
    return f"{pair[0]:g}, {pair[1] / 1e9:g} GB/s: {np.median(off):.1%}, {np.percentile(off, 90):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--per-family", type=int, default=40, help="most runs of a family")
    options = parser.parse_args()
    runs = [run for run in read_runs(options.table)[0] if run.plan.optimizer.zero == 3 and run.family != COMPOSED]
    families: dict[str, list[Mapping[Pair, float]]] = {}
    for name in sorted({run.family for run in runs}):
        mine = spread_evenly([run for run in runs if run.family == name], options.per_family)
        collected = [one for one in map(errors, mine) if one is not None]
        if len(collected) >= SMALLEST:
            families[name] = collected
    print(f"from all {len(families)} families: {best(families.values())}", flush=True)
    print("| left out | runs | pair without it: median, p90 | pair on record: median, p90 |\n|---|---:|---|---|")
    for name, rows in families.items():
        pair = best(rest for other, rest in families.items() if other != name)
        print(f"| {name} | {len(rows)} | {shown(rows, pair)} | {shown(rows, GRID[0])} |", flush=True)


if __name__ == "__main__":
    main()
