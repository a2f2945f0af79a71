"""What a few own runs are worth: stacks taken as unknown, fitted to 3, 5 and 10 of their runs, judged on others.

    python -m evidence.fits.calibrate_from published_runs.csv [--draws 8]

For each family the numbers on record are those without it, and its stack has no record. Runs are drawn by a fixed seed;
errors are of runs that were not drawn. Prints median / mean / p90 of the absolute error, and how many fall in the band
of 80%, with its width, before and after. Leaves out rows that `fit_stacks` leaves out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from evidence.fits.fit_stacks import usable
from evidence.fits.stack_fit import cases, spread_evenly
from evidence.folds import folds
from evidence.published import Run, read_runs
from gnomon.prediction.band import band_of
from gnomon.prediction.evidence import Evidence, evidence
from gnomon.prediction.measured import predicted_s
from gnomon.prices.fitted import FittedRates
from gnomon.report.own_runs import fit_own

FAMILIES = ("mosaic-llmfoundry", "vtrain-micro24", "nemo-24.07")
JUDGED = 40
"""Runs of a family."""
COUNTS = (3, 5, 10)


def unknown(family: str, stack: str) -> FittedRates:
    """The numbers of somebody who never saw the source or its stack."""
    known = folds().without_source(family)
    assert known is not None
    return replace(known, stacks=tuple(record for record in known.stacks if record.stack != stack))


def drawn(family: str, runs: Sequence[Run], draws: int) -> Iterator[tuple[int, float, Evidence]]:
    """(own runs, log(measured / predicted), what the prediction rests on) of every run that was not drawn."""
    given = cases(spread_evenly([run for run in runs if run.family == family and usable(run)], JUDGED))
    stack = given[0].run.stack.name
    given = [case for case in given if case.run.stack.name == stack]
    base = unknown(family, stack)
    random = np.random.default_rng(0)
    for count in (0, *COUNTS):
        for _ in range(draws if count else 1):
            mine = set(random.choice(len(given), min(count, len(given) // 2), replace=False).tolist())
            some = [given[i].run for i in sorted(mine)]
            own = fit_own(some, source=family, date="-", numbers=base, check=False) if some else None
            for case in (case for i, case in enumerate(given) if i not in mine):
                fitted = replace(case.made.pricing.stack, own=own.stack.own if own else None)
                seconds = predicted_s(case.run, case.made, base, stack=fitted)
                result = evidence(case.made.pricing.with_numbers(base, fitted), seconds)
                yield count, float(np.log(case.run.step_s / seconds)), result


def judge(family: str, runs: Sequence[Run], draws: int) -> Iterator[str]:
    """Lines of one family."""
    rows = list(drawn(family, runs, draws))
    for count in (0, *COUNTS):
        part = [(ratio, band_of(row)) for n, ratio, row in rows if n == count]
        errors = np.expm1([-ratio for ratio, _ in part])
        size = np.abs(errors)
        inside = np.mean([band.low <= np.exp(ratio) <= band.high for ratio, band in part])
        width = np.median([band.high - band.low for _, band in part])
        yield (
            f"| {family} | {count} | {np.median(size):.1%} / {size.mean():.1%} / {np.percentile(size, 90):.1%}, "
            f"{np.median(errors):+.1%} | {inside:.0%} | {width:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args()
    runs, _ = read_runs(options.table)
    print("| family, taken as unknown | own runs | error | in band | width |\n|---|---:|---|---:|---:|")
    for family in FAMILIES:
        print("\n".join(judge(family, runs, options.draws)), flush=True)


if __name__ == "__main__":
    main()
