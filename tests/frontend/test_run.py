"""A captured model trains under plans as its module does, from the module's weights and back to its names."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from frontend.train import PLANS, SETTINGS, WORKLOAD, batches, mixer, module, run  # noqa: E402
from torch import nn  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.frontend.capture import captured  # noqa: E402
from gnomon.runtime.launch.captured_job import executor  # noqa: E402
from gnomon.runtime.processes.launch import launch  # noqa: E402

pytestmark = pytest.mark.torch


def plain(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay
    )
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_captured_model_trains_as_its_module() -> None:
    model = module().eval()
    wanted = plain(model, batches())
    by_rank = launch(run, 2)
    for name in PLANS:
        losses = [sum(by_rank[rank][name][0][step] for rank in by_rank) for step in range(len(wanted))]
        assert losses == pytest.approx(wanted, rel=1e-12), name
    mixing, batch = mixer()
    wanted_of_mixer = plain(mixing, [batch] * len(wanted))
    for rank in by_rank:
        assert by_rank[rank]["mixer"][0] == pytest.approx(wanted_of_mixer, rel=1e-9)
    for name, of in (("dp", model), ("mixer", mixing)):
        trained = by_rank[0][name][1]
        assert set(trained) == {own for own, _ in of.named_parameters()}
        for own, x in of.named_parameters():
            assert torch.allclose(trained[own].view(x.shape), x, rtol=1e-9, atol=1e-9), own


def test_a_module_without_a_loss_is_not_trained() -> None:
    linear = nn.Linear(8, 8)
    result = captured(linear, (torch.randn(2, 8),))
    with pytest.raises(PlanError, match="returns no loss"):
        executor(linear, result, PLANS["dp"], WORKLOAD)
