"""Mimose's choice: within the budget by its own estimates, as few layers as any choice, more for longer batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.methods import check_methods
from gnomon.methods.mimose import (
    MARGIN,
    ROUND,
    ForwardBytes,
    MimoseSettings,
    RecomputeController,
    Sample,
    estimate,
    peak,
    recomputed,
)
from gnomon.plans import Mesh, Offload, Optimizer, Pass, Plan, Saved, Schedule

PLAN = Plan(schedule=Schedule(num_microbatches=1, passes=(Pass(name="mimose", params=(("budget", "1 GiB"),)),)))
BYTES = st.integers(0, 50).map(float)


@st.composite
def layers(draw: st.DrawFn) -> tuple[ForwardBytes, tuple[int, ...]]:
    """What up to seven layers hold, and those of them that may be recomputed."""
    count = draw(st.integers(1, 7))
    column = st.lists(BYTES, min_size=count, max_size=count)
    left, more, work = draw(column), draw(column), draw(column)
    may = tuple(layer for layer in range(count) if draw(st.booleans()))
    kept = [a + b * (i in may) for i, (a, b) in enumerate(zip(left, more, strict=True))]
    return ForwardBytes(kept_bytes=tuple(kept), left_bytes=tuple(left), work=tuple(work)), may


@given(given_layers=layers(), room=st.integers(0, 400))
def test_the_fewest_layers_that_keep_within_the_room(
    given_layers: tuple[ForwardBytes, tuple[int, ...]], room: int
) -> None:
    held, may = given_layers
    choices = [some for count in range(len(may) + 1) for some in combinations(may, count) if peak(held, some) <= room]
    chosen = recomputed(held, may, room)
    if not choices:
        assert chosen is None
    else:
        assert chosen is not None and peak(held, chosen) <= room
        assert len(chosen) == len(choices[0]) and set(chosen) <= set(may)


def curves(data: st.DataObject, count: int) -> np.ndarray:
    """Of kept, left and work of each layer, coefficients of a polynomial that never falls."""
    whole = st.integers(0, 40)
    left, more, work = (
        np.array([[data.draw(whole) for _ in range(3)] for _ in range(count)], dtype=float) for _ in range(3)
    )
    return np.stack([left + more, left, work])


def sample(of: np.ndarray, tokens: int) -> Sample:
    kept, left, work = (of @ np.array([1.0, tokens, tokens**2])).tolist()
    return Sample(
        tokens=tokens,
        base=100,
        forward_bytes=ForwardBytes(kept_bytes=tuple(kept), left_bytes=tuple(left), work=tuple(work)),
    )


@given(data=st.data(), sizes=st.lists(st.integers(1, 400), min_size=3, max_size=8, unique=True))
def test_estimates_are_never_below_what_was_seen_and_never_fall(data: st.DataObject, sizes: list[int]) -> None:
    """Of any layers, quadratic or not: noise of up to half is added."""
    of = curves(data, 3)
    samples = [sample(of, tokens) for tokens in sizes]
    noisy = [
        replace(
            s,
            forward_bytes=replace(
                s.forward_bytes, work=tuple(x * (1 + data.draw(st.floats(0, 0.5))) for x in s.forward_bytes.work)
            ),
        )
        for s in samples
    ]
    made = estimate(noisy)
    for one in noisy:
        held = made.at(one.tokens)
        for quantity in ("kept_bytes", "left_bytes", "work"):
            for seen, told in zip(getattr(one.forward_bytes, quantity), getattr(held, quantity), strict=True):
                assert told >= seen * (1 - 1e-9)
    grid = [made.at(tokens) for tokens in range(1, 402, 20)]
    for short, long in zip(grid, grid[1:], strict=False):
        assert all(a <= b for q in ("kept_bytes", "left_bytes", "work") for a, b in
                   zip(getattr(short, q), getattr(long, q), strict=True))  # fmt: skip


@given(data=st.data())
def test_quadratic_layers_are_found_exactly(data: st.DataObject) -> None:
    of = curves(data, 2)
    made = estimate([sample(of, tokens) for tokens in (10, 50, 120, 200)])
    assert made.error < 1e-6
    exact = sample(of, 150).forward_bytes
    assert made.at(150).work == pytest.approx(exact.work, rel=1e-6, abs=2)


@given(data=st.data(), extra=st.floats(0.0, 1.5))
def test_the_controller_recomputes_more_for_longer_batches_and_stays_within(data: st.DataObject, extra: float) -> None:
    of, may = curves(data, 5), (1, 2, 3)
    sizes = [16, 64, 200, 320]
    samples = [sample(of, tokens) for tokens in sizes]
    least = max(peak(estimate(samples).at(tokens), may) for tokens in sizes)
    budget = int((100 + least * (1 + extra)) / (1 - MARGIN)) + 2
    controller = RecomputeController(MimoseSettings(budget=budget, collect=4), may)
    for one in samples:
        assert controller.choose(one.tokens) is None
        controller.take(one)
    counts = []
    for tokens in range(1, 321, 7):
        chosen = controller.choose(tokens)
        assert chosen is not None and peak(sample(of, min(tokens, 320)).forward_bytes, chosen) + 100 <= budget
        counts.append(len(chosen))
    assert counts == sorted(counts) and controller.num_made == len(controller.choices) <= 320 // ROUND
    assert controller.choose(321) is None, "longer than all that were measured"


def test_few_sizes_are_taken_as_the_largest() -> None:
    of = np.ones((3, 2, 3))
    made = estimate([sample(of, 10), sample(of, 20), sample(of, 20)])
    assert made.at(1) == made.at(20) == sample(of, 20).forward_bytes


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (replace(PLAN, mesh=Mesh(pp=2)), "use pp = 1"),
        (replace(PLAN, mesh=Mesh(tp=2)), "use data parallelism"),
        (replace(PLAN, optimizer=Optimizer(zero=3)), "use zero <= 2"),
        (replace(PLAN, optimizer=Optimizer(offload=Offload())), "without offload"),
        (replace(PLAN, saved=Saved(preset="full")), "leave saved out"),
        (replace(PLAN, schedule=replace(PLAN.schedule, name="gpipe")), "use one_f_one_b"),
        (replace(PLAN, schedule=replace(PLAN.schedule, passes=(Pass(name="mimose"),))), "needs budget"),
        (
            replace(PLAN, schedule=replace(PLAN.schedule, passes=(Pass(name="mimose", params=(("budget", "0 B"),)),))),
            "must be above 0",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(plan: Plan, says: str) -> None:
    check_methods(PLAN, "run")
    with pytest.raises(PlanError, match=says):
        check_methods(plan, "run")
