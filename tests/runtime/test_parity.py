"""Every plan trains as the plain model does: loss, gradient norm and final parameters over two steps in float64.

The plain model is torch's own layers, autograd, AdamW and clipping on one device. One group of processes a world size
runs all its plans.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import jobs, parity  # noqa: E402
from runtime.plain_llama import Llama  # noqa: E402

from gnomon.models.llama import LlamaConfig, llama  # noqa: E402
from gnomon.plans import Plan  # noqa: E402

pytestmark = pytest.mark.torch

CASES = [
    (name, name + suffix)
    for name in parity.PLANS
    for suffix, chosen in (("", parity.PLANS), (", tied", parity.TIED), (", varied", parity.VARIANTS))
    if name in chosen
] + [(name, new) for name, (new, _) in parity.REWRITTEN.items()]
"""(plan, name of the case)."""


def divides(plan: Plan) -> bool:
    """Whether some stage has tensor-parallel ranks."""
    return max(plan.stage_mesh(stage).tp for stage in range(plan.num_stages)) > 1


@cache
def plain(config: LlamaConfig = parity.CONFIG) -> tuple[parity.Curve, dict[str, torch.Tensor]]:
    return parity.plain(config)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_it_trains_as_the_plain_model(name: str, case: str) -> None:
    want, parameters = plain(parity.config_of(case))
    plan = parity.PLANS[name]
    seen = {key: torch.zeros(value.numel(), dtype=torch.bool) for key, value in parameters.items()}
    for rank, results in jobs.results(plan.world_size).items():
        curve, part = results.trained[case]
        np.testing.assert_allclose(curve, want, rtol=1e-9, atol=0, err_msg=f"rank {rank}")
        for key, (start, values) in part.items():
            whole = parameters[key].flatten()
            if divides(plan):  # which elements those are is what apply decides: they must be there, in order
                assert _is_part(whole.numpy(), values), (rank, key)
                continue
            seen[key][start : start + len(values)] = True
            np.testing.assert_allclose(values, whole[start : start + len(values)], rtol=1e-9, atol=1e-12)
    if not divides(plan):
        assert all(bool(entry.all()) for entry in seen.values())


@pytest.mark.parametrize("world_size", sorted({plan.world_size for plan in parity.PLANS.values()}))
def test_a_plan_that_was_left_keeps_no_threads(world_size: int) -> None:
    """Groups have some each, which wake a hundred times a second: a thousand of them once took most of both cores. A
    few are torch's own, and the first plan starts them."""
    for results in jobs.results(world_size).values():
        before, after = results.threads
        assert after - before <= 16


def test_every_schedule_that_trains_is_in_some_plan() -> None:
    assert {plan.schedule.name for plan in parity.PLANS.values()} == parity.SCHEDULES


@pytest.mark.parametrize("name", parity.PLANS)
def test_gradients_in_float32_are_those_of_the_plain_model(name: str) -> None:
    """In the first step, each parameter's to 1e-5 of its norm, against the plain model in float32 from the same start;
    of parts by tp the global norm. With uneven shares no two ranks add up as many terms: twice that.
    Later steps start from parameters that rounding has moved apart, by an amount that depends on the CPU's kernels:
    AdamW divides each gradient by its own size, so one of 1e-7 of the norm that rounding doubles moves its parameter by
    a whole learning rate. There the bound is ten times as wide. (In fp64, where the amplified rounding is still far
    below, every step is held to 1e-9.)"""
    plan = parity.PLANS[name]
    for results in jobs.results(plan.world_size).values():
        for step, (total, grads) in enumerate(plain_gradients()):
            limit = 1e-4 if step else 2e-5 if plan.stages else 1e-5
            norm, part = results.gradients[name][step]
            assert norm == pytest.approx(total, rel=limit)
            for key, (start, values) in part.items() if not divides(plan) else ():
                far = np.abs(values - grads[key][start : start + len(values)]).max()
                assert far <= limit * np.linalg.norm(grads[key]), (step, key)


@cache
def plain_gradients() -> list[tuple[float, dict[str, np.ndarray]]]:
    return parity.plain_gradients()


@pytest.mark.parametrize(("one", "other"), parity.BITWISE)
def test_bit_for_bit_where_additions_are_the_same(one: str, other: str) -> None:
    for results in jobs.results(parity.PLANS[one].world_size).values():
        (curve, part), (same_curve, same_part) = results.trained[one], results.trained[other]
        assert curve == same_curve
        assert all(np.array_equal(part[key][1], same_part[key][1]) for key in part)


def _is_part(whole: np.ndarray, values: np.ndarray) -> bool:
    """Whether each of the values is among the whole's, to 1e-9."""
    ordered = np.sort(whole)
    at = np.clip(np.searchsorted(ordered, values), 1, len(ordered) - 1)
    nearest = np.minimum(np.abs(ordered[at] - values), np.abs(ordered[at - 1] - values))
    return bool((nearest <= 1e-9 * np.maximum(np.abs(values), 1e-3)).all())


def test_the_plain_model_learns_and_has_the_parameters_of_the_graph() -> None:
    model = Llama(parity.CONFIG)
    graph = llama(parity.CONFIG)
    actual = {name: value.numel() for name, value in model.named_parameters()}
    sizes = {name: int(np.prod([dim.size for dim in t.atoms])) for name, t in graph.parameters().items()}
    assert actual == sizes


def test_two_steps_move_the_model_by_more_than_the_tolerance() -> None:
    """Otherwise the comparison of parameters would say nothing."""
    before = Llama(parity.CONFIG, seed=7, dtype=torch.float64).state_dict()
    _, after = plain()
    assert all(float((after[name] - before[name]).abs().max()) > 1e-3 for name in after)
