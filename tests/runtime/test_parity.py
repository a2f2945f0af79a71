"""Every plan trains as the plain model does: loss, gradient norm and final parameters over three steps in float64.

The plain model is torch's own layers, autograd, AdamW and clipping on one device. One group of processes a world size
runs all its plans.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import jobs, parity  # noqa: E402

from gnomon.models.llama import llama  # noqa: E402
from gnomon.runtime import Llama  # noqa: E402

pytestmark = pytest.mark.torch

CASES = [(name, tied) for name in parity.PLANS for tied in (False, True) if not tied or name in parity.TIED]


@cache
def plain(tied: bool) -> tuple[parity.Curve, dict[str, torch.Tensor]]:
    return parity.plain(replace(parity.CONFIG, tied=tied))


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_it_trains_as_the_plain_model(name: str, tied: bool) -> None:
    want, parameters = plain(tied)
    plan = parity.PLANS[name]
    seen = {key: torch.zeros(value.numel(), dtype=torch.bool) for key, value in parameters.items()}
    for rank, results in jobs.results(plan.world_size).items():
        curve, part = results.trained[f"{name}, tied" if tied else name]
        np.testing.assert_allclose(curve, want, rtol=1e-9, atol=0, err_msg=f"rank {rank}")
        for key, (start, values) in part.items():
            whole = parameters[key].flatten()
            if plan.mesh.tp > 1:  # which elements those are is what apply decides: they must be there, in order
                assert _is_part(whole.numpy(), values), (rank, key)
                continue
            seen[key][start : start + len(values)] = True
            np.testing.assert_allclose(values, whole[start : start + len(values)], rtol=1e-9, atol=1e-12)
    if plan.mesh.tp == 1:
        assert all(bool(each.all()) for each in seen.values())


def _is_part(whole: np.ndarray, values: np.ndarray) -> bool:
    """Whether each of the values is among the whole's, to 1e-9."""
    ordered = np.sort(whole)
    at = np.clip(np.searchsorted(ordered, values), 1, len(ordered) - 1)
    nearest = np.minimum(np.abs(ordered[at] - values), np.abs(ordered[at - 1] - values))
    return bool((nearest <= 1e-9 * np.maximum(np.abs(values), 1e-3)).all())


def test_the_plain_model_learns_and_has_the_parameters_of_the_graph() -> None:
    model = Llama(parity.CONFIG)
    graph = llama(parity.CONFIG)
    found = {name: value.numel() for name, value in model.named_parameters()}
    sizes = {name: int(np.prod([dim.size for dim in t.atoms])) for name, t in graph.parameters().items()}
    assert found == sizes


def test_three_steps_move_the_model_by_more_than_the_tolerance() -> None:
    """Otherwise the comparison of parameters would say nothing."""
    before = Llama(parity.CONFIG, seed=7, dtype=torch.float64).state_dict()
    _, after = plain(False)
    assert all(float((after[name] - before[name]).abs().max()) > 1e-3 for name in after)
