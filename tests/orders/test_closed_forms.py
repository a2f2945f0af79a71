"""Every schedule against its closed forms: makespan, bubble and activations, with stages alike and messages free.

p ranks, m microbatches, f and b the times of a rank's forward and backward of one microbatch. Numbers are multiples of
a quarter, so all are exact.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.lowering import (
    Rows,
    dualpipe_v,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    with_messages,
    with_optimizer,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from gnomon.program import issue_order_peak, validate
from gnomon.simulate import Clock, durations, period, play

SIZES = {"S": 1, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0}
RANKS = st.integers(1, 6)
MICROBATCHES = st.integers(1, 12)
TIMES = st.integers(1, 12).map(lambda quarters: quarters / 4)


def timed(rows: Rows, **seconds: float) -> tuple[float, tuple[int, ...]]:
    """(makespan, most activations of each rank in issue order)."""
    program = with_messages(with_optimizer(rows)).program()
    structure = validate(program)
    used = {key.name or key.kind for key in program.keys}
    busy = {name.replace("_and_", "&"): value for name, value in seconds.items()}
    times = play(Clock.of(structure, durations(program, {"*": 0.0, **{k: v for k, v in busy.items() if k in used}})))
    peaks = issue_order_peak(program, structure.deps, SIZES)
    return float(times.end.max()), tuple(int(peak.bytes) for peak in peaks)


def steady(rows: Rows, **seconds: float) -> float:
    """The period."""
    structure = validate(with_messages(with_optimizer(rows)).program())
    return period(structure, durations(structure.program, {"*": 0.0, **seconds})).seconds


@given(p=RANKS, m=MICROBATCHES, f=TIMES, b=TIMES)
@settings(max_examples=60)
def test_one_f_one_b(p: int, m: int, f: float, b: float) -> None:
    makespan, held = timed(one_f_one_b(p, m), F=f, B=b)
    assert makespan == (m + p - 1) * (f + b)
    bubble = makespan - m * (f + b)
    assert bubble * (m + p - 1) == makespan * (p - 1)
    assert held == tuple(min(p - r, m) for r in range(p))


@given(p=RANKS, m=MICROBATCHES, f=TIMES, b=TIMES)
@settings(max_examples=60)
def test_gpipe(p: int, m: int, f: float, b: float) -> None:
    makespan, held = timed(gpipe(p, m), F=f, B=b)
    assert makespan == (m + p - 1) * (f + b)
    assert held == (m,) * p


@given(p=st.integers(2, 5), rounds=st.integers(1, 3), v=st.integers(2, 4), f=TIMES, b=TIMES)
@settings(max_examples=60)
def test_interleaved(p: int, rounds: int, v: int, f: float, b: float) -> None:
    """A stage takes 1/v of the rank's f and b: here f and b are the stage's, and v·f, v·b the rank's."""
    m = p * rounds
    makespan, held = timed(interleaved_one_f_one_b(p, m, v), F=f, B=b)
    assert makespan == m * v * (f + b) + (p - 1) * (f + b)
    bubble = makespan - m * v * (f + b)
    assert bubble * (v * m + p - 1) == makespan * (p - 1)
    assert held == tuple(min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v) for r in range(p))


@given(p=st.integers(2, 5), rounds=st.integers(1, 3), v=st.integers(2, 4), f=TIMES, b=TIMES)
@settings(max_examples=40)
def test_looped_breadth_first(p: int, rounds: int, v: int, f: float, b: float) -> None:
    m = p * rounds
    makespan, held = timed(looped_bfs(p, m, v), F=f, B=b)
    assert makespan == m * v * (f + b) + (p - 1) * (f + b)
    assert held == (m * v,) * p


@given(p=RANKS, more=st.integers(0, 8), f=TIMES, i=TIMES, w=TIMES)
@settings(max_examples=80)
def test_zero_bubble_h1(p: int, more: int, f: float, i: float, w: float) -> None:
    """The closed form holds while a weight gradient fits where it is put: W <= F and W <= I."""
    m, w = p + more, min(f, i, w)
    makespan, held = timed(zero_bubble_h1(p, m), F=f, I=i, W=w)
    assert makespan == m * (f + i + w) + (p - 1) * (f + i - w)
    assert held == (min(p, m),) * p


@given(p=RANKS, more=st.integers(0, 8), cell=TIMES)
@settings(max_examples=40)
def test_zero_bubble_h2(p: int, more: int, cell: float) -> None:
    """No bubble in the steady state for nearly twice 1F1B's activations."""
    m = 2 * p - 1 + more
    rows = zero_bubble_h2(p, m)
    makespan, held = timed(rows, F=cell, I=cell, W=cell)
    assert makespan == (3 * m + p - 1) * cell
    assert steady(rows, F=cell, I=cell, W=cell) == 3 * m * cell
    assert held == (2 * p - 1,) * p


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_interleaved_zero_bubble_is_shorter_than_interleaved_one_f_one_b(p: int, m: int) -> None:
    """Two stages a rank, F = I = W = 1: what fills and drains the pipeline is p - 1 cells instead of 3(p - 1)."""
    makespan, held = timed(interleaved_zero_bubble(p, m, 2), F=1, I=1, W=1)
    assert makespan == 6 * m + (p - 1)
    assert timed(interleaved_one_f_one_b(p, m, 2), F=1, B=2)[0] == 6 * m + 3 * (p - 1)
    assert max(held) == 2 * p


@given(p=st.integers(1, 6), more=st.integers(0, 6), cell=TIMES)
@settings(max_examples=40)
def test_zero_bubble_v(p: int, more: int, cell: float) -> None:
    """No bubble in the steady state, and the activations of 1F1B's rank 0 (2p of half the size) on every rank."""
    m = 2 * p - 1 + more
    rows = zero_bubble_v(p, m)
    makespan, held = timed(rows, F=cell, I=cell, W=cell)
    assert makespan == (6 * m + p - 1) * cell
    assert steady(rows, F=cell, I=cell, W=cell) == 6 * m * cell
    assert max(held) <= 2 * p


@pytest.mark.parametrize("p", range(2, 13))
def test_v_half(p: int) -> None:
    """Half of 1F1B's bubble of 6(p - 1) cells, half of its activations and three more."""
    m = 3 * p
    makespan, held = timed(v_half(p, m), F=1, I=1, W=1)
    assert makespan - 6 * m == (3 * p - 3 if p % 2 else 3 * p - 4)
    assert max(held) == p + 3


@pytest.mark.parametrize("p", range(2, 13))
def test_v_min(p: int) -> None:
    """Two thirds of 1F1B's bubble and one more, a third of its activations and three more."""
    m = 3 * p
    makespan, held = timed(v_min(p, m), F=1, I=1, W=1)
    assert makespan - 6 * m == 4 * p - 5
    assert max(held) <= 2 * p / 3 + 3


@given(p=st.integers(1, 6), more=st.integers(0, 6), f=TIMES)
@settings(max_examples=40)
def test_dualpipe_v(p: int, more: int, f: float) -> None:
    """Rank 0 waits (p - 1)(F&B + B - 3W), DeepSeek-V3's (PP/2 - 1)(…) with PP = 2p, when F = I = W."""
    m = 2 * p + more
    makespan, held = timed(dualpipe_v(p, m), F=f, I=f, W=f, B=2 * f, F_and_B=3 * f)
    assert makespan - 6 * m * f == (p - 1) * (3 * f + 2 * f - 3 * f)
    assert held == (2 * p + 1,) * p


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32)])
def test_the_family_in_one_table(p: int, m: int) -> None:
    """Bubbles against 1F1B's, with F = I = W: ZB-H1 a third, V-Half half, V-Min two thirds."""
    one = timed(one_f_one_b(p, m), F=2, B=4)[0] - 6 * m
    assert one == 6 * (p - 1)
    assert timed(v_half(p, m), F=1, I=1, W=1)[0] - 6 * m <= one / 2
    assert timed(v_min(p, m), F=1, I=1, W=1)[0] - 6 * m <= one * 2 / 3
    assert timed(zero_bubble_h1(p, m), F=2, I=2, W=2)[0] - 6 * m == one / 3
