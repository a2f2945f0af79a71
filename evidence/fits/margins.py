"""Would more margin call the jobs that ran out of memory and are said to fit? And how many that ran, wrongly?

    python -m evidence.fits.margins tests/evidence/data [RUNS.csv [N]]    # N: every N-th row

Three margins on top of the predicted peak of the tightest rank: a share of all allocated bytes (what is free in parts
too small grows with all that is allocated), a share of what comes and goes within a step (static tensors leave no
gaps), and so many GiB (workspaces and pools of fixed size). Prints for each how many of the published jobs that ran out
are said not to fit, and how many that ran: jobs of threads, and with RUNS.csv the rows of that table on their first
reading. Prints only: nothing here changes a verdict.
"""

from __future__ import annotations

import csv
import io
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.published import read_runs, to_run
from evidence.published.fitted_reading import first_prediction
from evidence.published.row import read_table
from gnomon.errors import GnomonError
from gnomon.formats.torchtitan.read import read_torchtitan
from gnomon.hardware import parse_cluster
from gnomon.prediction import Prediction, predict

OWN = ("verdict", "stated", "assumed", "lacks")
"""Columns that a table of runs has not."""
STATIC = ("parameters", "gradients", "master", "states")


@dataclass(frozen=True)
class Case:
    """A job, and what is predicted of its tightest rank, in bytes."""

    ran: bool
    peak: float
    allocated: float
    moving: float
    """What of it comes and goes within a step."""
    limit: float


Margin = Callable[[Case, float], float]
MARGINS: dict[str, tuple[Margin, Sequence[float]]] = {
    "share of all that is allocated": (lambda case, x: x * case.allocated, (0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)),
    "share of what comes and goes": (lambda case, x: x * case.moving, (0.1, 0.2, 0.3, 0.5, 0.75, 1.0)),
    "GiB": (lambda case, x: x * 2**30, (1, 2, 4, 6, 8, 10)),
}


def case_of(prediction: Prediction, *, ran: bool) -> Case:
    """What counts of a prediction."""
    rank = prediction.tightest
    static = sum(rank.by_class.get(name, 0) for name in STATIC)
    return Case(ran, rank.peak_bytes, rank.allocated_bytes, rank.allocated_bytes - static, rank.limit_bytes)


def called(cases: Sequence[Case], margin: Margin, size: float) -> tuple[int, int]:
    """(jobs that ran out, jobs that ran) that are said not to fit."""
    beyond = [case for case in cases if case.peak + margin(case, size) > case.limit]
    return sum(not case.ran for case in beyond), sum(case.ran for case in beyond)


def published(folder: Path) -> Iterator[Case]:
    """Jobs of threads and pages, as tests/evidence/test_verdicts.py predicts them."""
    with (folder / "out_of_memory.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for given in rows:
        values = {column: value for column, value in given.items() if column not in OWN}
        text = io.StringIO()
        table = csv.writer(text)
        table.writerow([*values, "family", "metric", "value"])
        table.writerow([*values.values(), "threads", "s_per_step", "1"])
        (row,), _ = read_table(text.getvalue())
        yield case_of(first_prediction(to_run(row)), ran=given["verdict"] == "fits")
    jobs = tomllib.loads((folder / "out_of_memory_jobs.toml").read_text("utf-8"))["cases"]
    for given in jobs:
        cluster = parse_cluster(given["on"])
        job = read_torchtitan(given["file"], devices=cluster.num_devices)
        made = predict(job.graph(), cluster, job.plan, job.workload, job.stack)
        yield case_of(made, ran=given["verdict"] == "fits")


def measured(table: Path, step: int = 1) -> Iterator[Case]:
    """Every `step`-th row of a table, all of which ran; those that are not predicted are left out."""
    for run in read_runs(table)[0][::step]:
        try:
            yield case_of(first_prediction(run), ran=True)
        except GnomonError:
            continue


def main(arguments: Sequence[str]) -> int:
    """Prints the table."""
    cases = list(published(Path(arguments[0])))
    step = int(arguments[2]) if len(arguments) > 2 else 1
    rows = list(measured(Path(arguments[1]), step)) if len(arguments) > 1 else []
    failed, ran = sum(not case.ran for case in cases), sum(case.ran for case in cases)
    print(f"| margin | of {failed} that ran out | of {ran} beside them that ran | of {len(rows)} rows that ran |")
    print("|---" * 4 + "|")
    for name, (margin, sizes) in MARGINS.items():
        for size in sizes:
            right, wrong = called(cases, margin, size)
            _, more = called(rows, margin, size)
            print(f"| {size:g} {name} | {right} ({right / failed:.0%}) | {wrong} | {more} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
