"""Kernels beside collectives: slower, within the bound, settled, and only where something runs beside them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prediction.jobs import small

from gnomon.hardware import parse_cluster
from gnomon.hardware.scaled import scaled
from gnomon.plans import Mesh, Optimizer, Overlap, Plan, Schedule
from gnomon.prediction import contention
from gnomon.prediction.compute_time import PHASES
from gnomon.prediction.contention import FULL_RATE, SLOWED, TRANSFERS, contended, weight
from gnomon.simulate import Durations, period
from gnomon.simulate.overlap_times import OverlapTimes, covered
from gnomon.units import quantise


@settings(max_examples=15, deadline=None)
@given(nodes=st.sampled_from((1, 2, 4)), micro=st.sampled_from((1, 2, 4)), prefetch=st.integers(0, 2))
def test_rounds_climb_and_stay_under_their_bound(nodes: int, micro: int, prefetch: int) -> None:
    plan = Plan(
        mesh=Mesh(dp_shard=8 * nodes),
        schedule=Schedule(micro_batch_size=micro),
        optimizer=Optimizer(zero=3),
        overlap=Overlap(prefetch=prefetch),
    )
    result = small(plan, f"{nodes}x8xa100-sxm-80gb", batch=64 * nodes)
    alone, now = result.pricing.durations(result.structure.program), result.durations
    kernels = np.array([key.kind in PHASES for key in result.structure.program.keys])
    assert (now.busy >= alone.busy).all()
    assert (now.busy[~kernels] == alone.busy[~kernels]).all()
    assert (now.busy <= alone.busy / (1 - SLOWED) * (1 + 1e-9) + 1e-9).all()
    assert result.step_s >= period(result.structure, alone).seconds
    assert (contended(result.structure, result.pricing)[0].busy == now.busy).all()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nodes=st.sampled_from((1, 2)), back=st.sampled_from((0.1, 0.25, 0.5)), pp=st.sampled_from((1, 2)))
def test_the_way_back_only_climbs(monkeypatch: pytest.MonkeyPatch, nodes: int, back: float, pp: int) -> None:
    """Collectives that lose to kernels are never shorter, nor the step, within their bound, and the same each time."""
    plan = Plan(
        mesh=Mesh(pp=pp, dp_shard=8 * nodes // pp),
        schedule=Schedule(micro_batch_size=2),
        optimizer=Optimizer(zero=3),
    )
    result = small(plan, f"{nodes}x8xa100-sxm-80gb", batch=32 * nodes)
    durations, before = result.pricing.durations(result.structure.program), result.durations.busy
    alone = durations.busy
    with monkeypatch.context() as patched:
        patched.setattr(contention, "BACK", back)
        now, after = contended(result.structure, result.pricing)
        again, _ = contended(result.structure, result.pricing)
    moved = np.array([key.kind in TRANSFERS for key in result.structure.program.keys])
    assert (now.busy == again.busy).all()
    assert (now.busy[moved] >= before[moved]).all() and (now.busy[moved] > before[moved]).any()
    assert (now.busy[moved] <= alone[moved] / (1 - back) * (1 + 1e-9) + 1e-9).all()
    assert period(result.structure, now).seconds >= period(result.structure, durations).seconds
    assert period(result.structure, now, after).seconds == period(result.structure, now).seconds


def test_nothing_beside_nothing_slower() -> None:
    """One device; whole stages, whose reductions are priced with the backward beside them."""
    for plan in (
        Plan(schedule=Schedule(micro_batch_size=2)),
        Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=2), optimizer=Optimizer(zero=1)),
    ):
        result = small(plan, f"1x{plan.world_size}xa100-sxm-80gb")
        assert (result.durations.busy == result.pricing.durations(result.structure.program).busy).all()


def test_seconds_beside() -> None:
    """No more than a kernel lasts; nothing beside reductions that take no time; more beside longer ones."""
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=2), optimizer=Optimizer(zero=3))
    result = small(plan, "1x8xa100-sxm-80gb")
    keys, alone = result.structure.program.keys, result.pricing.durations(result.structure.program)
    ours = np.array([key.kind == "B" for key in keys])
    others = np.array([float(key.kind == "REDUCE_GRAD") for key in keys])
    found_s = []
    for factor in (0.0, 1.0, 4.0):
        busy = quantise(np.where(others, alone.busy * factor, alone.busy))
        covered = OverlapTimes(result.structure, ours, others).seconds(Durations(busy=busy))
        assert (covered[~ours] == 0).all() and (covered <= alone.busy * (1 + 1e-9)).all()
        found_s.append(covered.sum())
        half = OverlapTimes(result.structure, ours, others / 2).seconds(Durations(busy=busy))
        assert (half <= covered * (1 + 1e-9)).all() and (half >= covered / 2 * (1 - 1e-9)).all()
    assert 0.0 == found_s[0] < found_s[1] < found_s[2]


@settings(max_examples=20, deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 9), st.sampled_from((0.25, 0.5, 1.0))), min_size=1, max_size=8
    )
)
def test_weights_of_intervals_add_up_to_one_at_most(spans: list[tuple[int, int, float]]) -> None:
    """Against a sum over whole seconds."""
    begins = np.array([float(begin) for begin, _, _ in spans])
    ends = begins + np.array([float(length) for _, length, _ in spans])
    weights = np.array([weight for _, _, weight in spans])
    at, busy = covered(begins, ends, weights)
    for second in range(30):
        running = sum(w for b, e, w in zip(begins, ends, weights, strict=True) if b <= second < e)
        got = np.interp(second + 1, at, busy) - np.interp(second, at, busy)
        assert np.isclose(got, min(1.0, running))


def test_slow_networks_take_less() -> None:
    """Kernels lose in proportion to the rate, and all from the rate of the runs that the number was chosen on."""
    plan = Plan(mesh=Mesh(dp_shard=32), schedule=Schedule(micro_batch_size=8), optimizer=Optimizer(zero=3))
    shares = []
    for factor in (0.25, 0.5, 2.0):
        result = small(plan, scaled(parse_cluster("4x8xa100-sxm-80gb"), network=factor), batch=256)
        alone = result.pricing.durations(result.structure.program).busy
        key = next(k for k in result.structure.program.keys if k.kind == "REDUCE_GRAD")
        (link,) = {link for _, link in result.pricing.carried(key)}
        shares.append((weight(result.pricing, key, 1.0), link.across_bytes_per_s / FULL_RATE))
        assert (result.durations.busy >= alone).all()
    assert [share for share, _ in shares] == [min(1.0, rate) for _, rate in shares]
    assert shares[0][0] < 1.0 == shares[-1][0]
