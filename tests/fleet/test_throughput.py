"""The throughput model of Pollux, fitted to timed steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import InputError
from gnomon.fleet.throughput import ACROSS, FREE, Point, Throughput, fit

SHAPES = ((1, 1), (1, 2), (1, 4), (2, 8))


def step_s(model: Throughput, shapes: Sequence[tuple[int, int]], local: int) -> list[float]:
    nodes, replicas = np.array(shapes).T
    return [float(s) for s in model.step_s(nodes, replicas, model.compute_s(np.full(len(shapes), local)))]


def timed(model: Throughput, shapes: Sequence[tuple[int, int]], *locals_: int) -> tuple[Point, ...]:
    """Steps of a job that behaves as the model says."""
    points = []
    for local in locals_:
        compute = float(model.compute_s(np.array([local]))[0])
        for shape, whole in zip(shapes, step_s(model, shapes, local), strict=True):
            points.append(Point(*shape, local, whole, whole - compute))
    return tuple(points)


def job(**changes: float) -> Throughput:
    values = dict(
        start_s=0.1, example_s=0.01, across_s=0.2, across_more_s=0.02, within_s=0.05, within_more_s=0.001, overlap=1.0
    )
    return Throughput(**(values | changes))


@given(
    start=st.floats(0.01, 1.0), example=st.floats(0.001, 0.1), within=st.floats(0.01, 0.5), across=st.floats(0.01, 0.5)
)
@settings(max_examples=15, deadline=None)
def test_it_finds_the_job_that_made_the_points(start: float, example: float, within: float, across: float) -> None:
    true = job(start_s=start, example_s=example, within_s=within, across_s=across, across_more_s=across / 10)
    found = fit(timed(true, SHAPES, 8, 32))
    for local in (16, 64):
        assert step_s(found, SHAPES, local) == pytest.approx(step_s(true, SHAPES, local), rel=0.02)


def test_what_was_not_timed_is_free() -> None:
    one = fit(timed(job(), [(1, 1)], 16))
    assert one.start_s == pytest.approx(0.13) and one.example_s * 16 == pytest.approx(0.13)  # half of 0.1 + 0.16 each
    assert step_s(one, [(1, 1), (1, 4), (4, 16)], 16) == pytest.approx([0.26] * 3, rel=1e-6)
    two = fit(timed(job(), [(1, 1), (1, 2)], 16))
    assert two.within_s == pytest.approx(0.05, rel=1e-3)
    assert two.across_s == pytest.approx(ACROSS * two.within_s) and two.within_more_s == FREE


def test_a_step_with_overlap_is_between_its_longer_part_and_the_sum() -> None:
    for overlap in (1.0, 2.0, 10.0):
        whole = step_s(job(overlap=overlap), [(2, 2)], 10)[0]  # 0.2 of each
        assert whole == pytest.approx(0.2 * 2 ** (1 / overlap))


def test_no_points_are_refused() -> None:
    with pytest.raises(InputError, match="needs a timed step"):
        fit(())
