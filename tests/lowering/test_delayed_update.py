"""Delayed updates: the exact period although the clocks take long to repeat, and what the pass refuses."""

from __future__ import annotations

import numpy as np
import pytest

from gnomon.errors import PlanError
from gnomon.lowering.delayed_update import delay_update
from gnomon.lowering.norm import with_norm
from gnomon.lowering.offload import offload_optimizer
from gnomon.program import Program, issue_order_peak, parse_program, validate
from gnomon.program.rows import Rows
from gnomon.simulate import Clock, Times, base_from, durations, period, play

BLOCKS = """\
gnomon.program/1
stages 4
units 1
class 0
  0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 0OPT 1OPT 2OPT 3OPT
"""


def delayed() -> Program:
    return delay_update(offload_optimizer(parse_program(BLOCKS)))


def steps_until_repeat(program: Program, update: float, most: int) -> int:
    """Steps from rest before the first that the next one repeats, every start later by the same time."""
    structure = validate(program)
    seconds = durations(program, {"F": 1, "B": 1, "D2H": 0.5, "HOST_OPT": update, "H2D": 0.5})
    clock = Clock.of(structure, seconds)
    before: Times = play(clock)
    for step in range(2, most):
        times = play(clock, np.maximum(base_from(structure.order, [before]), 0.0))
        shift = times.start - before.start
        if (shift == shift[0]).all():
            return step - 2
        before = times
    raise AssertionError(f"not within {most} steps")


@pytest.mark.parametrize(("update", "steps"), [(2.0, 6), (2.1, 27), (2.12, 126), (2.1245, 1252)])
def test_the_host_drifts_ahead_by_two_and_a_half_before_steps_repeat(update: float, steps: int) -> None:
    # Host tile 3 of the next step may start once its gradient is down, 3 before that step's forward; from rest it is
    # .5 ahead, and it gains 8.5 - 4 * update a step: 2.5 / .5 = 5 steps, 25, 125, 1250.
    program = delayed()
    assert steps_until_repeat(program, update, 1300) == steps
    seconds = durations(program, {"F": 1, "B": 1, "D2H": 0.5, "HOST_OPT": update, "H2D": 0.5})
    assert period(validate(program), seconds).seconds == 8.5


def test_tiles_of_several_blocks_stay_in_step() -> None:
    program = delay_update(offload_optimizer(parse_program(BLOCKS), tiles=2))
    structure = validate(program)
    tile = {"D2H": 1.0, "HOST_OPT": 4.0, "H2D": 1.0}
    busy = {"F": 1.0, "B": 1.0, **{f"{a}.{kind}": t for a in ("0..1", "2..3") for kind, t in tile.items()}}
    assert period(structure, durations(program, busy)).seconds == 9  # 8 of compute and the last tile, 1
    sizes = {"P": 2, "G": 2, "GH": 0, "PH": 0, "S": 0, "X": 0, "Y": 0, "DX": 0, "DY": 0}
    assert issue_order_peak(program, structure.deps, sizes)[0].bytes == 12


def test_an_update_on_the_device_stays_in_its_step_and_cannot_share_a_norm_with_a_late_one() -> None:
    with pytest.raises(PlanError, match="offload the optimizer, all of it where gradients are clipped"):
        delay_update(parse_program(BLOCKS))
    half = offload_optimizer(parse_program(BLOCKS), stages=(2, 3))
    tokens = [delay_update(half).token(row) for row in range(half.num_rows)]
    assert tokens[:2] == ["3HOST_OPT", "2HOST_OPT"] and tokens[-2:] == ["0OPT", "1OPT"]
    measured = with_norm(Rows.of(half), buffer="G").like(half)
    with pytest.raises(PlanError, match="its norm is of gradients of the step before"):
        delay_update(measured)
