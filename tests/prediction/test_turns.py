"""Logical workers that share a device: a step is their turns, and memory hardly grows with their number."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from gnomon.plans import Mesh, Plan, Schedule, Workload
from gnomon.prediction import Prediction, predict

WORK = Workload(global_batch_size=16, seq_len=1024)
PLAN = Plan(mesh=Mesh(dp_replicate=8), schedule=Schedule(micro_batch_size=1))


def on(*placement: int, plan: Plan = PLAN) -> Prediction:
    return predict("llama-3.2-1b", "8xh100-sxm", replace(plan, placement=placement), WORK)


def spent_s(prediction: Prediction) -> Counter[str]:
    """Seconds of each kind of action on the priced device."""
    program, busy = prediction.structure.program, prediction.durations.busy
    total: Counter[str] = Counter()
    for at in program.key.tolist():
        total[program.keys[at].kind] += float(busy[at])
    return total


def test_turns_on_a_device_add_up() -> None:
    """Eight workers on one device: eight times the computing of one, seven switches, one update, no exchange."""
    spread, together = spent_s(on(*range(8))), spent_s(on(*[0] * 8))
    for kind in ("F", "B"):
        assert together[kind] == pytest.approx(8 * spread[kind], rel=1e-9)
    assert together["OPT"] == spread["OPT"] and "AR" in spread and "AR" not in together
    one_gradient = 1_235_814_400 * 4
    assert together["SWITCH"] >= 7 * 3 * one_gradient / 3.35e12
    assert together["SWITCH"] < 0.1 * together["B"]


def test_two_workers_a_device_take_half_the_devices_and_twice_the_time() -> None:
    spread = replace(PLAN, overlap=replace(PLAN.overlap, grad_reduce=False))
    plain, pairs, apart = (on(*p, plan=spread) for p in (range(8), (0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2, 3) * 2))
    assert 1.7 * plain.step_s < pairs.step_s < 2.1 * plain.step_s
    assert pairs.to_mapping()["devices"] == 4
    # workers that are not next to each other in the tree of sums send two in place of one
    assert spent_s(apart)["AR"] == pytest.approx(1.5 * spent_s(pairs)["AR"])
    assert spent_s(apart)["SWITCH"] == 0


def test_the_device_with_most_workers_sets_the_step() -> None:
    uneven = on(0, 0, 0, 0, 0, 1, 2, 3)
    assert spent_s(uneven)["F"] == pytest.approx(5 * spent_s(on(*range(8)))["F"])


def test_memory_is_one_workers_and_parked_gradients() -> None:
    """The paper's flat memory (4.86 GB for 16 workers where packing adds 4.8 GB for each): here a tree of sums holds
    one gradient more each time that the workers double."""
    peaks = [on(*placement).memory[0].by_class for placement in ((0, 1, 2, 3, 4, 5, 6, 7), [0] * 8)]
    one_gradient = 1_235_814_400 * 4
    assert peaks[1]["gradients"] - peaks[0]["gradients"] == 3 * one_gradient
    assert peaks[1]["activations"] == peaks[0]["activations"]
    assert peaks[1]["states"] == peaks[0]["states"]
