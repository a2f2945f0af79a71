"""Numbers from own runs: what was slowed down is found again, and nothing moves without data."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from prediction.jobs import gpt_model

from gnomon import schema
from gnomon.errors import InputError
from gnomon.hardware import parse_cluster
from gnomon.plans import Mesh, Plan, Schedule, Workload
from gnomon.prediction import predict
from gnomon.prediction.measured import MeasuredRun
from gnomon.prices.fitted import rates
from gnomon.report.own_runs import SPREADS, fit_own
from gnomon.software import OwnNumber, OwnRuns, Stack

SIZES = [(24, 1024, 1, 4), (24, 2048, 2, 2), (16, 4096, 4, 4), (24, 512, 1, 1), (32, 2048, 8, 2), (12, 1024, 2, 1)]
"""Layers, hidden, tp, micro batch."""


def run(i: int, layers: int, hidden: int, tp: int, micro: int, pp: int = 1) -> MeasuredRun:
    """GPT on eight A100, with ZeRO 0 and sequences of 2048."""
    return MeasuredRun(
        id=f"r{i}",
        graph=gpt_model(layers, hidden, 16),
        plan=Plan(
            mesh=Mesh(tp=tp, pp=pp, dp_replicate=8 // (tp * pp)),
            schedule=Schedule(name="one_f_one_b", micro_batch_size=micro),
        ),
        workload=Workload(global_batch_size=64, seq_len=2048),
        stack=Stack(name="Somebody's", version=""),
        cluster=parse_cluster("1x8xa100-sxm-80gb"),
        step_s=1.0,
    )


@cache
def runs() -> tuple[MeasuredRun, ...]:
    return tuple(run(i, *sizes) for i, sizes in enumerate(SIZES))


def predicted(run: MeasuredRun, stack: Stack) -> float:
    return predict(run.graph, run.cluster, run.plan, run.workload, stack).step_s


def measured(kernels: float, host: float) -> list[MeasuredRun]:
    """The runs as a stack would run whose kernels and host take so many times as long."""
    known = rates(runs()[0].stack, runs()[0].cluster.devices[0])
    assert known.host_kernel_s is not None
    own = OwnRuns(
        numbers=(
            OwnNumber(name="compute", value=known.compute / kernels),
            OwnNumber(name="host_kernel_s", value=known.host_kernel_s * host),
            OwnNumber(name="host_collective_s", value=known.host_collective_s * host),
        ),
        runs=1,
        data="a test",
        date="2026-11-21",
        error="none",
        range="this test",
    )
    return [replace(run, step_s=predicted(run, replace(run.stack, own=own))) for run in runs()]


def test_runs_as_predicted_move_nothing() -> None:
    result = fit_own(measured(1.0, 1.0), source="mine.csv", date="2026-11-21")
    assert [factor for _, factor in result.factors] == pytest.approx([1.0] * len(SPREADS), abs=1e-3)
    assert max(map(abs, result.before)) < 1e-6 and max(map(abs, result.after)) < 1e-3


def test_slow_kernels_and_a_slow_host_are_told_apart() -> None:
    slow = fit_own(measured(1.2, 1.0), source="mine.csv", date="2026-11-21")
    late = fit_own(measured(1.0, 1.6), source="mine.csv", date="2026-11-21")
    kernels, host = dict(slow.factors)["kernels"], dict(late.factors)["host"]
    assert 1.05 < kernels <= 1.2 and 1.3 < host <= 1.6
    assert dict(slow.factors)["host"] < host and dict(late.factors)["kernels"] < kernels
    for entry in (slow, late):
        assert np.median(np.abs(entry.after)) < np.median(np.abs(entry.before)) / 2
        assert np.median(np.abs(entry.left_out)) < np.median(np.abs(entry.before))


def test_one_run_moves_less_than_many() -> None:
    """Shrinkage: with less data the factors stay nearer to 1."""
    every = measured(1.2, 1.0)
    few, many = (dict(fit_own(part, source="m", date="d").factors)["kernels"] for part in (every[2:3], every[:3]))
    assert 1.0 < few <= many + 1e-6 < 1.2


def test_the_stack_file_is_the_stack_and_predicts_as_fitted() -> None:
    result = fit_own(measured(1.2, 1.0), source="mine.csv", date="2026-11-21")
    again = schema.load(Stack, schema.dump(result.stack))
    assert again == result.stack
    assert again.own is not None and again.own.runs == len(runs()) and "before" in again.own.error
    run, after = result.runs[0], result.after[0]
    assert predicted(run, again) / run.step_s - 1 == pytest.approx(after, abs=1e-6)


def test_runs_of_several_stacks_are_refused() -> None:
    first, second, *_ = measured(1.0, 1.0)
    with pytest.raises(InputError, match="2 stacks, .*one at a time"):
        fit_own([first, replace(second, stack=Stack(name="other", version=""))], source="mine.csv", date="2026-11-21")


def test_a_run_that_cannot_be_predicted_is_named() -> None:
    given = [runs()[0], run(1, 1, 2048, 2, 2, pp=4), *runs()[2:]]
    fit = fit_own(given, source="mine.csv", date="2026-11-21")
    assert [gone.id for gone in fit.refused] == ["r1"] and len(fit.runs) == len(given) - 1
    with pytest.raises(InputError, match="no run of mine.csv can be predicted"):
        fit_own([given[1]], source="mine.csv", date="2026-11-21")
