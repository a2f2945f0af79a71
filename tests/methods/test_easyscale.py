"""EasyScale: the sum does not depend on the devices, which is its whole point."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.lowering.edit import rows_of, with_rows
from gnomon.methods.easyscale import Observation, additions, easyscale, move_workers, place_workers
from gnomon.plans import Mesh, Plan
from gnomon.program import issue_order_peak, validate


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, ...]:
    """Workers on devices 0 … n-1, each device with at least one."""
    devices = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, devices - 1), max_size=4))
    return tuple(draw(st.permutations([*range(devices), *more])))


@settings(max_examples=60, deadline=None)
@given(placements())
def test_sums_are_in_the_order_of_the_workers_on_any_devices(devices: tuple[int, ...]) -> None:
    structure = validate(easyscale(devices))
    assert additions(structure) == (tuple(range(len(devices))),) * (max(devices) + 1)
    hops = sum(a != b for a, b in zip(devices, devices[1:], strict=False))
    sends = [row for rows in rows_of(structure.program) for row in rows if row.kind in ("SEND_G", "SEND_T")]
    assert len(sends) == hops + max(devices)


def test_an_order_that_depends_on_the_device_shows() -> None:
    """Adding worker 1 before worker 0 is a valid Program with another sum."""
    program = easyscale((0, 0))
    rows = {str(row): row for row in rows_of(program)[0]}
    order = ("0F0", "0B0", "0F1", "0B1", "0RED1", "0RED0", "0OPT")
    assert additions(validate(with_rows(program, [[rows[name] for name in order]]))) == ((1, 0),)


def test_memory_does_not_grow_with_the_number_of_workers() -> None:
    """One worker's activations (4), one parked gradient (1) and the sum (1) at a time, besides the parameters (1)."""
    sizes = {"S": 4, "DP": 1, "G": 1, "P": 1}
    peaks = []
    for count in (2, 4, 16):
        structure = validate(easyscale((0,) * count))
        peaks.append(issue_order_peak(structure.program, structure.deps, sizes)[0].bytes)
    assert peaks == [1 + 4 + 1 + 1] * 3


def test_devices_without_workers_are_refused() -> None:
    with pytest.raises(PlanError, match=r"\(0, 2\); number the devices from 0"):
        easyscale((0, 2))
    with pytest.raises(PlanError, match="each with a worker"):
        easyscale(())


def slowest(shares: tuple[int, ...], speeds: tuple[float, ...]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.lists(st.floats(0.1, 10), min_size=1, max_size=5).map(tuple))
def test_workers_are_shared_out_by_speed_as_well_as_can_be(workers: int, speeds: tuple[float, ...]) -> None:
    observed = Observation(processes=len(speeds), speeds=speeds)
    plan = place_workers(Plan(mesh=Mesh(dp_replicate=workers)), observed)
    count = min(workers, len(speeds))
    assert sorted(plan.placement) == list(plan.placement) and set(plan.placement) == set(range(count))
    cuts = [(0, *inner, workers) for inner in combinations(range(1, workers), count - 1)]
    best = min(slowest(tuple(b - a for a, b in zip(c, c[1:], strict=False)), speeds[:count]) for c in cuts)
    assert slowest(tuple(map(plan.placement.count, range(count))), speeds[:count]) == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.floats(0.1, 10), min_size=1, max_size=5).map(tuple))
def test_workers_move_at_most_once_while_speeds_stay(workers: int, speeds: tuple[float, ...]) -> None:
    plan = place_workers(Plan(mesh=Mesh(dp_replicate=workers)), Observation(processes=len(speeds)))
    once = move_workers(plan, Observation(processes=len(speeds), speeds=speeds))
    assert move_workers(once, Observation(processes=len(speeds), speeds=speeds)) == once
    alike = Observation(processes=len(speeds), speeds=(1.0,) * len(speeds))
    assert move_workers(plan, alike) == plan


@pytest.mark.parametrize(
    ("observed", "says"),
    [
        (Observation(processes=0), "4 logical workers cannot run on 0 processes; give at least 1"),
        (Observation(processes=2, speeds=(1.0,)), "must give each of 2 processes a positive number"),
        (Observation(processes=2, speeds=(1.0, 0.0)), "must give each of 2 processes a positive number"),
    ],
)
def test_processes_that_cannot_be_are_refused(observed: Observation, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        place_workers(Plan(mesh=Mesh(dp_replicate=4)), observed)
