"""A calibration of this very machine, small, and a prediction with it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

import torch.distributed as dist  # noqa: E402
from runtime import parity  # noqa: E402

from gnomon.errors import InputError  # noqa: E402
from gnomon.hardware import measured_cluster  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Mesh, Optimizer, Plan, Schedule  # noqa: E402
from gnomon.prediction import predict  # noqa: E402
from gnomon.runtime.calibrate.calibrate import (  # noqa: E402
    Budget,
    _of_all_ranks,
    calibrate,
    memory_bytes,
    physical_cores,
    relative_iqr,
)
from gnomon.runtime.calibrate.cases import Case  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

TINY = Budget(seconds=0.1, fine=False, rounds=1, dtypes=("fp32",))


def test_two_processes_are_measured_and_predicted_with() -> None:
    calibrated = calibrate(2, TINY)
    what = {table.key for table in calibrated.tables}
    assert {("matmul", "fp32", way) for way in ("forward", "input_grad", "weight_grad")} <= what
    assert {("attention", "fp32", "backward"), ("adamw", "fp32", ""), ("all_reduce", "", "")} <= what
    assert all(len(t.alone_s) == (0 if t.dtype == "" else len(t.seconds)) for t in calibrated.tables)
    plan = Plan(mesh=Mesh(dp_replicate=2), schedule=Schedule(num_microbatches=2), precision=parity.FP32)
    cluster = measured_cluster(calibrated, memory_bytes())
    predicted = predict(llama(parity.CONFIG), cluster, plan, parity.WORKLOAD, stack("gnomon"))
    assert 0 < predicted.step_s < math.inf
    assert calibrated.note in predicted.assumptions


def test_computing_loses_to_collectives_beside_it_what_was_measured() -> None:
    """Under ZeRO 3 of this runtime, whose gathers run ahead; not where all communication follows the backward."""
    machine = calibrate(2, TINY)
    assert machine.lost_beside is not None and machine.lost_beside >= 0

    def step_s(lost: float | None, zero: Literal[0, 3]) -> float:
        cluster = measured_cluster(replace(machine, lost_beside=lost), memory_bytes())
        mesh = Mesh(dp_shard=2) if zero else Mesh(dp_replicate=2)
        plan = Plan(mesh=mesh, schedule=Schedule(num_microbatches=2), precision=parity.FP32)
        plan = replace(plan, optimizer=Optimizer(zero=zero))
        return predict(llama(parity.CONFIG), cluster, plan, parity.WORKLOAD, stack("gnomon")).step_s

    assert step_s(None, 3) == step_s(0.0, 3) < step_s(0.5, 3) < step_s(1.0, 3)
    assert step_s(None, 0) == step_s(1.0, 0)
    with pytest.raises(InputError, match="lost_beside must be 0 or more"):
        replace(machine, lost_beside=-1.0)


def test_cases_are_those_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has a kernel more than the others would measure it alone, and they would wait for it."""
    own = [Case(what="stored_linear", dtype=form, direction="", axes=(), build=print) for form in ("bf16", "int4")]
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def gathered(everyone: list[object], mine: object) -> None:
        everyone[:] = [mine, {("stored_linear", "bf16")}]

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    assert [case.dtype for case in _of_all_ranks(own)] == ["bf16"]


def test_the_machine_has_cores_and_memory() -> None:
    assert physical_cores() >= 1
    assert memory_bytes() > 1 << 28


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert relative_iqr([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert relative_iqr([2.0, 2.0, 2.0]) == 0
