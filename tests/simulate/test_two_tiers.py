"""Tensors that move between two tiers: cases by hand, what no policy may break, and a real model's step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Workload
from gnomon.prediction import Prediction
from gnomon.prediction.predict import TimedPlan
from gnomon.prediction.tensors import trace_of
from gnomon.simulate.two_tiers import Link, TierTensor, TierTrace, least_recently_used, plan_migration, static

POLICIES = (static, least_recently_used, plan_migration)
SLOW = Link(read=1.0, write=1.0)


def weights(count: int) -> TierTrace:
    """Rows of a second, each of which reads a tensor of its own of one byte."""
    return TierTrace(
        tensors=tuple(TierTensor(name=f"w{i}", nbytes=1.0, carried=True) for i in range(count)),
        seconds=(1.0,) * count,
        uses=tuple((i,) for i in range(count)),
        writes=(frozenset(),) * count,
    )


def test_one_row_is_computed_while_the_next_is_read() -> None:
    trace = weights(6)
    assert plan_migration(trace, SLOW, 2).step_s == 6  # one stays nowhere, each comes behind the one before
    assert least_recently_used(trace, SLOW, 2).step_s == 12  # each was evicted just before its turn
    assert static(trace, SLOW, 2).step_s == 11  # one is pinned
    assert all(policy(trace, SLOW, 6).step_s == 6 for policy in POLICIES)


def test_what_a_forward_keeps_is_written_and_read_once() -> None:
    """Two layers forward and back; there is room for one kept tensor and a half."""
    kept = tuple(TierTensor(name=f"s{i}", nbytes=2.0, carried=False) for i in range(2))
    made = frozenset
    trace = TierTrace(
        tensors=kept, seconds=(4.0,) * 4, uses=((0,), (1,), (1,), (0,)), writes=(made({0}), made({1}), made(), made())
    )
    assert trace.peak_bytes == 4
    result = plan_migration(trace, SLOW, 3)
    assert (result.read_bytes, result.written_bytes) == (2, 2)
    assert result.step_s == 16 + 4  # there is no room for the second while the first is written, nor back
    assert plan_migration(trace, SLOW, 4).step_s == 16


@st.composite
def traces(draw: st.DrawFn) -> TierTrace:
    """Rows of up to three of eight tensors."""
    count = draw(st.integers(1, 8))
    tensors = tuple(
        TierTensor(name=f"t{i}", nbytes=float(draw(st.integers(0, 5))), carried=draw(st.booleans()))
        for i in range(count)
    )
    uses = draw(
        st.lists(st.lists(st.integers(0, count - 1), max_size=3, unique=True).map(tuple), min_size=1, max_size=9)
    )
    return TierTrace(
        tensors=tensors,
        seconds=tuple(float(draw(st.integers(0, 4))) for _ in uses),
        uses=tuple(uses),
        writes=tuple(frozenset(used[: draw(st.integers(0, 3))]) for used in uses),
        inside=float(draw(st.integers(0, 3))),
    )


@given(trace=traces(), share=st.floats(0, 1), speed=st.sampled_from([0.5, 4.0, inf]))
def test_no_policy_is_above_the_capacity_or_faster_than_computing(trace: TierTrace, share: float, speed: float) -> None:
    least = max(trace.bytes_of(used) for used in trace.uses) + trace.inside
    capacity = least + share * (trace.peak_bytes - least)
    computing = sum(trace.seconds)
    for policy in POLICIES:
        result = policy(trace, Link(read=speed, write=speed), capacity)
        assert result.peak_bytes <= capacity + 1e-9
        assert result.step_s >= computing - 1e-9
        if speed == inf:
            assert result.step_s == pytest.approx(computing)
    if share == 1:
        whole = plan_migration(trace, Link(read=speed, write=speed), trace.peak_bytes)
        assert (whole.step_s, whole.read_bytes, whole.written_bytes) == (pytest.approx(computing), 0, 0)


@given(trace=traces())
def test_a_row_that_does_not_fit_is_refused(trace: TierTrace) -> None:
    least = max(trace.bytes_of(used) for used in trace.uses) + trace.inside
    assume(least > 0)
    for policy in POLICIES:
        with pytest.raises(PlanError, match="a row uses .* at once, and the fast tier has"):
            policy(trace, SLOW, least - 0.5)


@cache
def made(clip: bool = False, mesh: Mesh = Mesh()) -> Prediction:  # noqa: B008 (frozen)
    plan = Plan(mesh=mesh, schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(clip=clip))
    work = Workload(global_batch_size=4, seq_len=4096)
    return TimedPlan.of("llama-2-7b", f"{mesh.world_size}xa100-sxm-80gb", plan, work, by_layer=True).prediction()


def test_a_model_s_tensors_are_its_memory() -> None:
    prediction = made()
    trace, by_class = trace_of(prediction), prediction.memory[0].by_class
    named = ("parameters", "gradients", "master", "states", "activations", "logits")
    always = sum(tensor.nbytes for tensor in trace.tensors if tensor.carried)
    assert always == pytest.approx(sum(by_class[name] for name in ("parameters", "master", "states")))
    whole = trace.most_at_once(range(len(trace.tensors)))
    assert whole == pytest.approx(sum(by_class[name] for name in named), rel=0.02)
    assert sum(trace.seconds) == pytest.approx(prediction.step_s)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.7])
def test_at_a_share_of_its_memory_a_model_is_faster_than_with_others(share: float) -> None:
    trace = trace_of(made())
    link, capacity = Link(read=25e9, write=25e9), share * trace.peak_bytes
    results = {policy.__name__: policy(trace, link, capacity) for policy in POLICIES}
    for result in results.values():  # a link that is busy all the time moves no more
        assert result.step_s * 25e9 >= 0.98 * max(result.read_bytes, result.written_bytes)
    steps = {name: result.step_s for name, result in results.items()}
    assert steps["plan_migration"] < min(steps["static"], steps["least_recently_used"])


def test_what_has_no_trace_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan has 2; use one"):
        trace_of(made(mesh=Mesh(dp_replicate=2)))
    prediction = made()
    whole = TimedPlan.of(
        "llama-2-7b", "1xa100-sxm-80gb", prediction.plan, replace(prediction.workload), by_layer=False
    ).prediction()
    with pytest.raises(PlanError, match="a row for each layer"):
        trace_of(whole)
