"""Prices between measured points: exact at them, never falling, growing as the work does beyond, never too fast."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import UnpricedError
from gnomon.hardware import Axis, Measured, Table, measured_cluster, parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.plans.parts import Offload
from gnomon.prediction import Prediction, predict
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.links import axis_link
from gnomon.prices.measured import attention_points, matmul_seconds, stream_points, table_seconds
from gnomon.software import stack

SIZES = (32, 128, 512)


def of(*tables: Table) -> Measured:
    return Measured(host="box", date="2026-11-21", software="torch", processes=2, threads=1, tables=tables)


def grid(what: str, direction: str, names: str, seconds: tuple[float, ...], sizes: tuple[int, ...] = SIZES) -> Table:
    axes = tuple(Axis(name=name, sizes=sizes) for name in names.split())
    spread = (0.05,) * len(seconds)
    dtype = "" if what in ("all_reduce", "send_recv") else "fp32"
    return Table(what=what, dtype=dtype, direction=direction, axes=axes, seconds=seconds, alone_s=(), spread=spread)


def products(rate: float, start_s: float = 0.0) -> tuple[float, ...]:
    return tuple(start_s + 2 * m * n * k / rate for m in SIZES for n in SIZES for k in SIZES)


points = st.lists(st.floats(1e-7, 1.0), min_size=27, max_size=27).map(tuple)
size = st.floats(1, 1e5)


@given(points)
def test_points_that_rise_are_exact(raw: tuple[float, ...]) -> None:
    values = np.array(raw).reshape(3, 3, 3)
    for axis in range(3):
        values = np.maximum.accumulate(values, axis)
    machine = of(grid("matmul", "forward", "m n k", tuple(values.ravel().tolist())))
    for i, j, h in product(range(3), repeat=3):
        m, n, k = SIZES[i], SIZES[j], SIZES[h]
        assert table_seconds(machine, "matmul", "fp32", "forward", m=m, n=n, k=k) == pytest.approx(values[i, j, h])


@given(points, size, size, size, st.floats(1, 100), st.sampled_from("mnk"))
def test_never_falls_with_size_however_noisy_the_points(
    raw: tuple[float, ...], m: float, n: float, k: float, more: float, axis: str
) -> None:
    machine = of(grid("matmul", "forward", "m n k", raw))
    sizes = {"m": m, "n": n, "k": k}
    small = table_seconds(machine, "matmul", "fp32", "forward", **sizes)
    large = table_seconds(machine, "matmul", "fp32", "forward", **{**sizes, axis: sizes[axis] * more})
    assert large >= small * (1 - 1e-9)


@given(size, size, size, st.floats(1e8, 1e12))
def test_no_product_is_faster_than_the_fastest_seen(m: float, n: float, k: float, rate: float) -> None:
    machine = of(grid("matmul", "forward", "m n k", products(rate, 1e-6)))
    result = matmul_seconds(machine, m, n, k, 1, dtype="fp32", role="forward", peak=rate)
    assert result >= 2 * m * n * k / rate * (1 - 1e-9)


def test_a_machine_of_one_rate_has_that_rate_between_and_beyond_the_points() -> None:
    machine = of(grid("matmul", "forward", "m n k", products(1e11)))
    for m, n, k in ((200, 100, 300), (64, 64, 64), (4096, 512, 2048)):
        result = matmul_seconds(machine, m, n, k, 3, dtype="fp32", role="forward", peak=1e11)
        assert result == pytest.approx(3 * 2 * m * n * k / 1e11)


def test_attention_grows_with_the_square_of_the_sequence_beyond_the_longest() -> None:
    axes = (Axis(name="heads", sizes=(2, 8)), Axis(name="seq", sizes=(64, 128)), Axis(name="head_dim", sizes=(32,)))
    seconds = tuple(1e-9 * h * s * s for h in (2, 8) for s in (64, 128))
    one = Table(
        what="attention", dtype="fp32", direction="forward", axes=axes, seconds=seconds, alone_s=(), spread=(0.0,) * 4
    )
    result = attention_points(of(one), 8, 1024 * 1024, 32, dtype="fp32", backward=False)
    assert result == pytest.approx(1e-9 * 8 * 1024 * 1024)
    assert attention_points(of(one), 4, 96 * 96, 32, dtype="fp32", backward=False) == pytest.approx(1e-9 * 4 * 96 * 96)


def test_arrays_of_sizes_give_arrays() -> None:
    machine = of(grid("add", "forward", "elements", (1e-6, 2e-6, 9e-6)))
    result = stream_points(machine, np.array([12 * 32, 12 * 128, 12 * 512]))
    assert np.allclose(result, [1e-6, 2e-6, 9e-6])
    assert stream_points(machine, 12 * 32 * 4, kernels=4) == pytest.approx(4e-6)


def test_what_was_not_measured_is_refused_by_name() -> None:
    machine = of(grid("add", "forward", "elements", (1e-6, 2e-6, 9e-6)))
    with pytest.raises(UnpricedError, match="matmul fp16 forward was not measured on box"):
        matmul_seconds(machine, 8, 8, 8, 1, dtype="fp16", role="forward", peak=1e9)
    with pytest.raises(UnpricedError, match="at least 1"):
        table_seconds(machine, "add", "fp32", "forward", elements=0.5)


def machine_of(factor: float = 1.0, processes: int = 2) -> Measured:
    """10 GFLOP/s products, everything else 1 ns an element; 1 GB/s between processes, 100 us an empty message."""
    ways = ("forward", "input_grad", "weight_grad")
    tables = [grid("matmul", way, "m n k", tuple(s * factor for s in products(1e10))) for way in ways]
    tables += [grid("add", "forward", "elements", tuple(1e-9 * s * factor for s in SIZES))]
    axes = (Axis(name="heads", sizes=(2, 8)), Axis(name="seq", sizes=(64, 128)), Axis(name="head_dim", sizes=(32,)))
    seconds = tuple(factor * 1e-9 * h * s * s for h in (2, 8) for s in (64, 128))
    for way in ("forward", "backward"):
        given = {"axes": axes, "seconds": seconds, "alone_s": (), "spread": (0.0,) * 4}
        tables.append(Table(what="attention", dtype="fp32", direction=way, **given))  # type: ignore[arg-type]
    for kind in ("all_reduce", "send_recv"):
        axes = (Axis(name="bytes", sizes=(8, 1 << 20)),)
        axes = axes if kind == "send_recv" else (Axis(name="ranks", sizes=(2,)), *axes)
        given = {"axes": axes, "seconds": (1e-4, 1e-4 + 1e-9 * (1 << 20)), "alone_s": (), "spread": (0.0, 0.0)}
        tables.append(Table(what=kind, dtype="", direction="", **given))  # type: ignore[arg-type]
    return replace(of(*tables), processes=processes)


def test_collectives_of_a_measured_machine_are_those_measured() -> None:
    link = axis_link(measured_cluster(machine_of(), 1 << 34), np.array([[0, 1]]))
    assert collective_seconds("all_reduce", 8, link) == pytest.approx(1e-4)
    assert collective_seconds("send_recv", 1 << 20, link) == pytest.approx(1e-4 + 1e-9 * (1 << 20))
    assert collective_seconds("all_to_all", 1 << 20, link) > 0  # by the curves, on the measured link


FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")


def step_s(machine: Measured) -> float:
    plan = Plan(mesh=Mesh(dp_replicate=2), schedule=Schedule(num_microbatches=2), precision=FP32)
    work = Workload(global_batch_size=8, seq_len=64)
    return predict(model("llama-tiny"), measured_cluster(machine, 1 << 34), plan, work, stack("gnomon")).step_s


def test_predictions_follow_the_machine() -> None:
    """A machine half as fast in everything that is computed takes longer, at most twice as long."""
    whole, half = step_s(machine_of()), step_s(machine_of(2.0))
    assert 1.5 < half / whole <= 2.0


def test_predictions_say_what_was_measured_where_and_when() -> None:
    plan = Plan(mesh=Mesh(dp_replicate=2), schedule=Schedule(num_microbatches=2), precision=FP32)
    work = Workload(global_batch_size=8, seq_len=64)
    prediction = predict(model("llama-tiny"), measured_cluster(machine_of(), 1 << 34), plan, work, stack("gnomon"))
    assert [line for line in prediction.assumptions if "measured on box, 2026-11-21" in line]
    assert not [line for line in prediction.assumptions if "no kernel data" in line or "burst" in line]
    assert math.isfinite(prediction.step_s)


def test_the_catalogue_measures_nothing() -> None:
    assert all(device.measured is None for device in parse_cluster("8xh100-sxm").devices)


def test_gradients_of_a_measured_machine_are_reduced_at_once_after_the_backward() -> None:
    """Gnomon's runtime has one row for it, whatever the overlap of other software: all its bytes are in the step."""
    plan = Plan(mesh=Mesh(dp_replicate=2), schedule=Schedule(num_microbatches=2), precision=FP32)
    work = Workload(global_batch_size=8, seq_len=64)
    graph = model("llama-tiny")
    prediction = predict(graph, measured_cluster(machine_of(), 1 << 34), plan, work, stack("gnomon"))
    size = 4 * sum(math.prod(dim.size or 0 for dim in t.atoms) for t in graph.parameters().values())
    assert prediction.breakdown["dp communication"] == pytest.approx(1e-4 + 1e-9 * size, rel=0.1)


def on_host(offload: Optimizer, *, lost_beside: float = 1.0, disk: float | None = None) -> Prediction:
    """A step of one process, whose only core is its device and its host."""
    machine = replace(machine_of(processes=1), lost_beside=lost_beside)
    if disk is not None:
        axes = (Axis(name="bytes", sizes=(1 << 20,)),)
        given = {"axes": axes, "seconds": ((1 << 20) / disk,), "alone_s": (), "spread": (0.0,)}
        tables = [Table(what=w, dtype="", direction="", **given) for w in ("disk_read", "disk_write")]  # type: ignore[arg-type]
        machine = replace(machine, tables=(*machine.tables, *tables))
    plan = Plan(schedule=Schedule(num_microbatches=2), precision=FP32, optimizer=offload)
    work = Workload(global_batch_size=8, seq_len=64)
    return predict(model("llama-tiny"), measured_cluster(machine, 1 << 34), plan, work, stack("gnomon"))


def test_copies_to_the_host_take_the_core_that_computes() -> None:
    """Gradients of two microbatches go down at 12 bytes a nanosecond, and are added and updated: all of it where
    computing loses what they take, nothing where it loses none; a late update has a thread of its own."""
    host = Optimizer(clip=False, offload=Offload())
    moved, idle, late = on_host(host), on_host(host, lost_beside=0.0), on_host(replace(host, delay=1))
    copies = 1e-9 * sum(moved.pricing.stages[0].elements) * 2 * 8 / 12
    assert copies < moved.step_s - idle.step_s < 3 * copies
    assert late.step_s < moved.step_s


def test_a_disk_that_was_measured_is_priced() -> None:
    disk = Optimizer(zero=3, offload_parameters=True, parameter_tier="disk")
    slow, fast = (on_host(disk, disk=rate) for rate in (1e6, 1e9))
    size = 4 * sum(slow.pricing.stages[0].elements)
    assert 2.5 * size / 1e6 < slow.step_s < 8 * size / 1e6
    assert fast.step_s < slow.step_s / 10


def test_a_table_by_sizes_that_nobody_asks_for_is_an_error() -> None:
    """As a calibration of another version, or one that was edited, has it."""
    axes = (Axis(name="measured", sizes=(1, 2)),)
    odd = Table(what="norm", dtype="fp32", direction="", axes=axes, seconds=(1e-6, 2e-6), alone_s=(), spread=(0.0, 0.0))
    machine = Measured(
        host="here", date="2026-11-29T00:00:00Z", software="torch", processes=1, threads=1, tables=(odd,)
    )
    with pytest.raises(UnpricedError, match="goes by 'measured', and is asked for by rows, width"):
        table_seconds(machine, "norm", "fp32", rows=4, width=4)
