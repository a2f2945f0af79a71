"""Host time of a kernel: by the way of launching, with its source, and said when assumed."""

from __future__ import annotations

import pytest

from gnomon.hardware import catalogue
from gnomon.prices import host_cost, sustained
from gnomon.prices.fitted import FittedRates
from gnomon.software import Fact, Stack

H100 = catalogue.device("h100-sxm-80gb")


def stack(launch: str) -> Stack:
    fact = Fact(field="launch_mode", source="test", date="2026-11-21")
    return Stack(name="test", version="0").with_values((fact,), launch_mode=launch)


def test_eager_costs_most_and_replay_next_to_nothing() -> None:
    ways = ("eager", "compiled", "cuda_graph")
    eager, compiled, graph = (host_cost(stack(way), H100, FittedRates()).per_kernel_s for way in ways)
    assert 5e-6 <= eager <= 10e-6
    assert eager > compiled > 10 * graph > 0
    slow = [
        host_cost(stack(way), H100).per_kernel_s for way in ways
    ]  # as whole runs show it: slower, in the same proportion
    assert slow[0] > eager
    assert [cost / slow[0] for cost in slow] == pytest.approx([1.0, compiled / eager, graph / eager])


def test_a_stack_that_does_not_say_is_eager_and_the_cost_says_so() -> None:
    cost = host_cost(Stack(name="bare", version="0"), H100)
    assert cost.per_kernel_s == host_cost(stack("eager"), H100).per_kernel_s
    assert "'bare' does not say how it launches" in cost.assumption
    assert host_cost(stack("eager"), H100).assumption == ""


def test_devices_without_launches() -> None:
    for name in ("tpu-v5p", "cpu-process"):
        assert host_cost(stack("eager"), catalogue.device(name)).per_kernel_s == 0.0


def test_kernels_run_slower_for_minutes_than_in_a_burst() -> None:
    known = sustained(stack("eager"), H100)
    assert 0.7 < known.factor < 1.0
    assert "numbers of all stacks" in known.note
    nobody = catalogue.device("mi210-64gb")
    assert sustained(stack("eager"), nobody).factor == 1.0
    assert "no runs fitted for 'test' on mi210-64gb" in sustained(stack("eager"), nobody).note
