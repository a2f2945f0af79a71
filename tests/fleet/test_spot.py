"""Losses of machines in simulated time: numbers by hand, and what must hold of every list of losses."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import InputError
from gnomon.fleet.spot import MachineShape, SpotCosts, System, losses_at, replay

SHAPE = MachineShape(stages=4, pipelines=2)
COSTS = SpotCosts(
    step_s=1.0, copied_step_s=1.25, taken_step_s=2.0, takeover_s=1.0, come_s=40.0, start_s=30.0, checkpoint_every=10
)
SYSTEMS: tuple[System, ...] = get_args(System)


def test_one_loss_by_hand() -> None:
    """Machine 2 is lost after 105 s and another one comes at 145 s; all is over at 200 s.

    Bamboo: 105 / 1.25 = 84 steps, 1 s, 39 s of 2 s a step, 1 s, 54 s at 1.25. Restart: 105 steps fall to 100, it waits
    until 145 and starts until 175, 25 steps. Elastic: 100; starts until 135 with one pipeline of two, 5 steps in 10 s;
    at 145 it falls from 105 to 100 and starts until 175: 25 steps.
    """
    told = {system: replay([(105.0, 2)], SHAPE, COSTS, system, 200.0) for system in SYSTEMS}
    assert told["bamboo"].steps == pytest.approx(84 + 39 / 2 + 54 / 1.25)
    assert (told["bamboo"].redone, told["bamboo"].stopped_s, told["bamboo"].starts) == (0, 2, 0)
    assert (told["restart"].steps, told["restart"].redone, told["restart"].stopped_s) == (125, 5, 70)
    assert (told["elastic"].steps, told["elastic"].redone, told["elastic"].stopped_s) == (125, 10, 60)
    assert (told["restart"].starts, told["elastic"].starts) == (1, 2)


def test_a_stage_lost_with_its_copy_goes_back_to_the_checkpoint() -> None:
    """0 has the copy of 1, and 3 that of 0; 3 and 4 are of two pipelines."""
    apart = replay([(105.0, 1), (105.0, 3), (105.0, 4)], SHAPE, COSTS, "bamboo", 200.0)
    assert (apart.redone, apart.starts) == (0, 0)
    for pair in ((0, 1), (1, 0), (0, 3), (4, 7)):
        both = replay([(105.0, one) for one in pair], SHAPE, COSTS, "bamboo", 200.0)
        assert (both.redone, both.starts) == (4, 1)
        assert both.steps == pytest.approx(80 + 25 / 1.25)


def test_copies_in_memory_by_hand() -> None:
    """Machine 2 is lost after 105.5 s, and back at 145.5 s: one second later all go on from step 105, or from 104 where
    copies are two steps apart. Lost with the next rank (stage 2, replica 1: machine 6), all begin from step 100."""
    costs = replace(COSTS, memory_step_s=1.0)
    one = replay([(105.5, 2)], SHAPE, costs, "memory", 200.0)
    assert (one.steps, one.redone, one.starts) == (pytest.approx(105 + 53.5), 0.5, 0)
    two = replay([(105.5, 2)], SHAPE, replace(costs, memory_every=2), "memory", 200.0)
    assert (two.steps, two.redone) == (pytest.approx(104 + 53.5), 1.5)
    both = replay([(105.5, 2), (105.5, 6)], SHAPE, costs, "memory", 200.0)
    assert (both.steps, both.starts) == (pytest.approx(100 + 24.5), 1)
    apart = replay([(105.5, 2), (105.5, 3)], SHAPE, costs, "memory", 200.0)
    assert (apart.steps, apart.starts) == (pytest.approx(105 + 53.5), 0), "their copies are with 6 and 7"
    alike = replace(costs, alike=True)
    assert replay([(105.5, 2), (105.5, 3)], SHAPE, alike, "memory", 200.0).starts == 0
    assert replay([(105.5, 2), (105.5, 6)], SHAPE, alike, "memory", 200.0).starts == 1, "both replicas of a stage"


@settings(max_examples=60, deadline=None)
@given(rate=st.floats(0, 20), seed=st.integers(0, 99), bulk=st.floats(0, 1), system=st.sampled_from(SYSTEMS))
def test_time_is_accounted_for_and_slower_costs_never_gain(rate: float, seed: int, bulk: float, system: System) -> None:
    losses = losses_at(rate, SHAPE, 3600.0, seed=seed, bulk=bulk)
    told = replay(losses, SHAPE, COSTS, system, 3600.0)
    fastest = COSTS.copied_step_s if system == "bamboo" else COSTS.step_s
    assert 0 <= told.steps <= (3600 - told.stopped_s) / fastest + 1e-6
    assert 0 <= told.stopped_s <= 3600
    if not losses:
        assert told.steps == pytest.approx(3600 / fastest)
    if system == "restart":
        assert told.steps + told.redone == pytest.approx((3600 - told.stopped_s) / fastest)


def test_steps_take_time() -> None:
    with pytest.raises(InputError, match="steps take time"):
        replace(COSTS, taken_step_s=0.0)
