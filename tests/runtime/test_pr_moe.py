"""PR-MoE trained by plans against a plain PyTorch loop written from the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.parity import FP64  # noqa: E402
from runtime.pr_moe import COEFFICIENT, CONFIG, differences  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.errors import GraphError  # noqa: E402
from gnomon.models.pr_moe import pr_moe, pr_moe_350m, pyramid, student  # noqa: E402
from gnomon.models.presets import model  # noqa: E402
from gnomon.plans import Experts, Layout, Mesh, Optimizer, Plan, Saved, Schedule  # noqa: E402

pytestmark = pytest.mark.torch

ALONE = Plan(schedule=Schedule(num_microbatches=1), precision=FP64)
BALANCED = replace(ALONE, experts=Experts(balance="layer", coefficient=COEFFICIENT))
DIVIDED = replace(ALONE, mesh=Mesh(dp_shard=2, ep=2), optimizer=Optimizer(zero=1), saved=Saved(preset="full"))
COPIED = replace(ALONE, mesh=Mesh(dp_shard=2, ep=2), experts=Experts(replicas=2, rebalance_every=1))
SLICED = replace(ALONE, mesh=Mesh(tp=2, ep=2), layout=Layout(sequence_parallel=True))
STAGES = replace(ALONE, mesh=Mesh(pp=2), schedule=Schedule(num_microbatches=2))


@pytest.mark.parametrize(("ranks", "plans"), [(1, (ALONE, BALANCED)), (2, (DIVIDED, COPIED, SLICED, STAGES))])
def test_it_trains_as_the_paper_says(ranks: int, plans: tuple[Plan, ...]) -> None:
    """Pyramid and residual together: losses and parameters after three updates."""
    for plan, (loss, parameters) in zip(plans, launch(differences, ranks, plans)[0], strict=True):
        assert loss < 1e-9 and parameters < 1e-9, (plan, loss, parameters)


def test_sizes_are_those_of_the_papers_table() -> None:
    assert round(model("pr-moe-350m").num_parameters() / 1e9) == 4
    assert round(model("pr-moe-1.3b").num_parameters() / 1e9) == 31
    assert round(model("mos-350m").num_parameters() / 1e9, 1) == 3.5
    assert pyramid(6, 2, 4) == (0, 2, 0, 4, 0, 4)
    half = student(pr_moe_350m(), 12, "half")
    assert half.experts == pyramid(12, 32, 64)
    for wrong in ((0, 4, 0), (0, 1, 0, 4)):
        with pytest.raises(GraphError):
            replace(CONFIG, experts=wrong)
    kinds = {op.kind for block in pr_moe(replace(CONFIG, residual=False)).blocks for op in block.ops}
    assert "combine" in kinds and "blend" not in kinds
