"""Thresholds that decide how nanotron's jobs were started, from their step times: rebuilds `evidence/readings.toml`.

    python -m evidence.fits.fit_readings published_runs.csv [--write] [--workers N]

Every run of the benchmark on several nodes is predicted in each way that it may have been started: without checks of
collectives, with them, and with polled messages too. Of all combinations of thresholds in GRID, the one with the least
mean |log(predicted / measured)| is taken, of equals the first; and again without each part of the models. Prints both,
with the error of each. Leaves out the numbers of the stack (`fit_stacks`), which stay as they are on record.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from evidence.folds import MODEL_FOLDS, fold_of
from evidence.published import Row, Run, read_runs
from evidence.published.fitted_reading import as_measured, first_prediction
from evidence.published.nanotron import NANOTRON_POLL_S, environment, of_benchmark, unchecked
from evidence.readings import FILE, JobThresholds, ReadingFold, Readings
from gnomon import schema
from gnomon.errors import GnomonError
from gnomon.formats.job import with_job_fields
from gnomon.prediction.measured import predicted_s

DATE = "2026-11-24"
NEVER = 4096
"""A threshold that no job of the source reaches."""
GRID = {
    "polled_nodes": (64, 32, 16, 8, NEVER),
    "polled_tp": (32, 16, 8, NEVER),
    "early_nodes": (32, 16, 8, NEVER),
    "early_params_b": (4.0, 20.0, 2.0, 0.0),
    "early_micro_batch": (2, 4, 8, 1),
}
"""Name -> thresholds that are tried: powers of two, and sizes between those of the models."""
UNUSED = JobThresholds(polled_nodes=NEVER, polled_tp=NEVER, early_nodes=NEVER, early_params_b=0.0, early_micro_batch=1)
"""No job polls, and none without stages checks."""


@dataclass(frozen=True)
class Job:
    """One run of the benchmark, however it was started."""

    row: Row
    log_errors: tuple[float, float, float]
    """log(predicted / measured) without checks, with them, with polls too; the last two are alike without stages."""


def job(run: Run) -> Job | None:
    """A run in each way; None if it cannot be predicted."""
    plain, checked = as_measured(run, UNUSED), run.stack
    polled = with_job_fields(checked, "tried", p2p_poll_s=NANOTRON_POLL_S) if run.plan.mesh.pp > 1 else checked
    errors: list[float] = []
    for stack in (unchecked(checked), checked, polled):
        way = replace(plain, stack=stack)
        try:
            errors.append(float(np.log(predicted_s(way, first_prediction(way)) / run.step_s)))
        except GnomonError:
            return None
    return Job(row=run.row, log_errors=(errors[0], errors[1], errors[2]))


def combinations() -> Iterator[JobThresholds]:
    """All of GRID."""
    for values in product(*GRID.values()):
        yield JobThresholds(**dict(zip(GRID, values, strict=True)))


def signed(jobs: Sequence[Job], known: JobThresholds) -> list[float]:
    """log(predicted / measured) of each job as the thresholds read it."""
    ways = (sum(environment(one.row, known)) for one in jobs)
    return [one.log_errors[way] for one, way in zip(jobs, ways, strict=True)]


def best(jobs: Sequence[Job]) -> JobThresholds:
    """The thresholds with the least mean error."""
    return min(combinations(), key=lambda known: round(float(np.abs(signed(jobs, known)).mean()), 6))


def shown(known: JobThresholds, jobs: Sequence[Job]) -> str:
    """One line: the thresholds and the error of the jobs under them."""
    values = ", ".join(f"{name} {getattr(known, name):g}" for name in GRID)
    return f"{values}: {summary(signed(jobs, known))}"


def summary(log_errors: Sequence[float]) -> str:
    """Number of jobs, and median / mean / 90th percentile of the absolute error."""
    off = np.abs(np.expm1(log_errors))
    return f"{len(off)} jobs, {np.median(off):.1%} / {off.mean():.1%} / {np.percentile(off, 90):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the thresholds on record")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    runs, _ = read_runs(options.table)
    mine = [
        run for run in runs if of_benchmark(run.row) and (run.row.num_devices or 0) > (run.row.devices_per_node or 8)
    ]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        jobs = [entry for entry in pool.map(job, mine, chunksize=16) if entry is not None]
    known = best(jobs)
    for way, name in enumerate(("without checks", "checked", "checked and polled")):
        print(f"all {name}: {summary([one.log_errors[way] for one in jobs])}", flush=True)
    print(f"fitted to all: {shown(known, jobs)}", flush=True)
    folds = []
    for part in range(MODEL_FOLDS):
        kept, held = ([one for one in jobs if (fold_of(one.row.model) == part) is left] for left in (False, True))
        if held:
            folds.append(ReadingFold(left_out=str(part), nanotron=best(kept)))
            models = ", ".join(sorted({one.row.model for one in held}))
            print(f"without {models}, on these: {shown(folds[-1].nanotron, held)}", flush=True)
    if options.write:
        data = f"published_runs.csv: {len(jobs)} runs of {', '.join(sorted({run.family for run in mine}))}"
        made = Readings(nanotron=known, models=tuple(folds), data=data, date=DATE)
        FILE.write_text(schema.dump(made), encoding="utf-8")


if __name__ == "__main__":
    main()
