"""`gnomon.prepare`: a plan in one's own training loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import parity, prepared  # noqa: E402
from runtime.ranks import launch  # noqa: E402

import gnomon  # noqa: E402
from gnomon.errors import PlanError  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Mesh  # noqa: E402

pytestmark = pytest.mark.torch


def test_any_plan_trains_as_one_process_and_gives_whole_parameters(tmp_path: Path) -> None:
    """Losses and state to 1e-9, saved and loaded on the way."""
    want, state = prepared.trained(prepared.ALONE)
    assert state["model.layers.0.self_attn.q_proj.weight"].shape == (16, 16), "as a PyTorch module has it"
    results = launch(prepared.all_plans, 2, tmp_path)
    for rank in results:
        for name, (losses, result) in results[rank].items():
            assert losses == pytest.approx(want, rel=1e-9), name
            assert list(result) == list(state)
            for key, value in result.items():
                torch.testing.assert_close(value, state[key], rtol=1e-9, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    graph = llama(parity.CONFIG)
    with pytest.raises(PlanError, match="the plan has 2 ranks, and 1 process runs; start this script with torchrun"):
        gnomon.prepare(graph, replace(prepared.ALONE, mesh=Mesh(pp=2)), workload=parity.WORKLOAD)
    with pytest.raises(PlanError, match="a Plan says nothing of the batch"):
        gnomon.prepare(graph, prepared.ALONE)
    with gnomon.prepare(graph, prepared.ALONE, workload=parity.WORKLOAD) as job:
        with pytest.raises(PlanError, match="no step was made"):
            job.timeline()
