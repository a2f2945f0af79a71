"""Losses of each layer's router, and biases that move: as the papers write them on transformers' router logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")
pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from runtime import lengths, router_losses  # noqa: E402
from runtime.lengths import Case, planned  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.models.presets import model  # noqa: E402
from gnomon.plans import Experts, Layout, Mesh, Offload, Optimizer, Plan, Saved, Schedule, Workload  # noqa: E402
from gnomon.plans.experts import under  # noqa: E402
from gnomon.prediction import predict  # noqa: E402
from gnomon.software import own  # noqa: E402

pytestmark = pytest.mark.torch

LAYER = Experts(balance="layer", coefficient=0.3, z_loss=0.02)
SEQUENCE = Experts(balance="sequence", coefficient=0.5)
SINKHORN = Experts(assignment="sinkhorn", z_loss=0.01)
GLOBAL = Experts(balance="global", coefficient=0.4, z_loss=0.01)
SP = Layout(sequence_parallel=True)
ROWS = 2
"""Of a microbatch on a worker."""
MESHES: dict[str, tuple[Mesh, Layout, int]] = {
    "one device": (Mesh(), Layout(), 0),
    "dp, ep": (Mesh(dp_shard=2, ep=2), Layout(), 1),
    "tp": (Mesh(tp=2), SP, 0),
    "cp": (Mesh(cp=2), Layout(context="all_gather"), 0),
    "pp": (Mesh(pp=2), Layout(), 0),
}


def all_of(cases: dict[str, Case], folder: Path, losses: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Of each case the differences on this rank."""
    work = Workload(global_batch_size=router_losses.SEQUENCES, seq_len=router_losses.TOKENS)
    given = router_losses.batch()
    return {name: lengths.against(case, folder, work, given, losses[case.kind]) for name, case in cases.items()}


def biases(case: Case, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Of each router its bias before a step and after, of a run with nothing else to learn."""
    return lengths.before_and_after(
        case,
        folder,
        Workload(global_batch_size=router_losses.SEQUENCES, seq_len=router_losses.TOKENS),
        router_losses.batch(),
        ".e_score_correction_bias",
    )


@pytest.mark.parametrize("size", [1, 2])
def test_losses_and_gradients_are_those_of_the_papers(size: int, tmp_path: Path) -> None:
    losses = {
        kind: router_losses.prepared(kind, tmp_path, experts, ROWS)[0]
        for kind, experts in (("mixtral", LAYER), ("deepseek_v3", SEQUENCE))
    }
    cases = {
        f"{kind}, {name}": Case(
            kind=kind, plan=replace(planned(mesh, size=ROWS, layout=layout, zero=zero), experts=experts)
        )
        for kind, experts in (("mixtral", LAYER), ("deepseek_v3", SEQUENCE))
        for name, (mesh, layout, zero) in MESHES.items()
        if Plan(mesh=mesh).world_size == size
    }
    for rank, found in launch(all_of, size, cases, tmp_path, losses).items():
        for name, (loss, gradient) in found.items():
            assert loss < 1e-9 and gradient < 1e-9, (rank, name, loss, gradient)


@pytest.mark.parametrize("size", [1, 2])
def test_shares_of_a_global_batch_are_those_of_all_ranks_and_microbatches_so_far(size: int, tmp_path: Path) -> None:
    """Two microbatches and four: later ones have the choices of earlier ones in their loss."""
    plain, losses = Saved(), dict[str, float]()
    chosen: dict[str, tuple[Mesh, Layout, int, Saved]] = {
        name: (mesh, layout, zero, plain) for name, (mesh, layout, zero) in MESHES.items()
    }
    chosen["recomputed"] = Mesh(), Layout(), 0, Saved(preset="full")
    chosen["pp, recomputed"] = Mesh(pp=2), Layout(), 0, Saved(preset="full")  # others' forwards come in between
    for workers in (1, 2) if size == 2 else (1,):
        own = tmp_path / str(workers)
        losses["mixtral"] = router_losses.prepared("mixtral", own, GLOBAL, 1, workers=workers)[0]
        cases = {
            name: Case(
                kind="mixtral",
                plan=replace(planned(mesh, size=1, layout=layout, zero=zero), experts=GLOBAL, saved=saved),
            )
            for name, (mesh, layout, zero, saved) in chosen.items()
            if Plan(mesh=mesh).world_size == size and mesh.data_ranks == workers
        }
        for rank, found in launch(all_of, size, cases, own, losses).items():
            for name, (loss, gradient) in found.items():
                assert loss < 1e-9 and gradient < 1e-9, (rank, name, loss, gradient)


@pytest.mark.parametrize("size", [1, 2])
def test_sinkhorn_is_that_of_a_microbatch_wherever_its_tokens_are(size: int, tmp_path: Path) -> None:
    """Ranks of tp and cp have parts of the tokens, and choose as one process does."""
    losses = {"mixtral": router_losses.prepared("mixtral", tmp_path, SINKHORN, ROWS)[0]}
    cases = {
        name: Case(kind="mixtral", plan=replace(planned(mesh, size=ROWS, layout=layout, zero=zero), experts=SINKHORN))
        for name, (mesh, layout, zero) in MESHES.items()
        if Plan(mesh=mesh).world_size == size
    }
    for rank, found in launch(all_of, size, cases, tmp_path, losses).items():
        for name, (loss, gradient) in found.items():
            assert loss < 1e-9 and gradient < 1e-9, (rank, name, loss, gradient)


def test_biases_move_towards_experts_that_few_tokens_chose(tmp_path: Path) -> None:
    experts = Experts(bias_rate=0.01)
    _, moved = router_losses.prepared("deepseek_v3", tmp_path, experts, ROWS)
    for mesh, zero in ((Mesh(dp_shard=2, ep=2), 1), (Mesh(pp=2), 0)):
        case = Case(kind="deepseek_v3", plan=replace(planned(mesh, size=ROWS, zero=zero), experts=experts))
        found: dict[str, Any] = {}
        for one in launch(biases, 2, case, tmp_path).values():
            found |= one
        assert len(found) == len(moved)
        for name, expected in moved.items():
            before, after = next(pair for own_name, pair in found.items() if name.partition(".mlp")[0] in own_name)
            assert torch.equal(torch.sign(after - before), torch.sign(expected)), name
            assert torch.allclose(after - before, expected, atol=1e-12)


def test_they_are_predicted_and_what_cannot_be_is_said() -> None:
    mixtral, work = model("mixtral-8x7b"), Workload(global_batch_size=8, seq_len=512)
    plan = Plan(schedule=Schedule(micro_batch_size=1))
    plain = predict(mixtral, "1xh200-sxm", plan, work).step_s
    assert plain < predict(mixtral, "1xh200-sxm", replace(plan, experts=LAYER), work).step_s < 1.05 * plain
    wide = predict(mixtral, "1xh200-sxm", replace(plan, experts=Experts(router_dtype="fp64")), work).step_s
    even = predict(mixtral, "1xh200-sxm", replace(plan, experts=SINKHORN), work).step_s
    assert plain < wide < 1.05 * plain < even < 1.5 * plain  # iterations are launches, in each layer
    spread = Plan(mesh=Mesh(dp_shard=16), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=1))
    work16 = replace(work, global_batch_size=32)
    layer = predict(mixtral, "2xdgx-h100", replace(spread, experts=replace(GLOBAL, balance="layer")), work16)
    everywhere = predict(mixtral, "2xdgx-h100", replace(spread, experts=GLOBAL), work16)
    sums = 2 * 32 * 10e-6  # of 8 numbers over two machines, in each of 32 layers of two microbatches
    assert layer.step_s + sums < everywhere.step_s < 1.05 * layer.step_s
    with pytest.raises(PlanError, match="has no routers"):
        under(model("llama-3.2-1b"), replace(plan, experts=LAYER))
    with pytest.raises(PlanError, match="moves the biases of routers, and mixtral-8x7b has none"):
        under(mixtral, replace(plan, experts=Experts(bias_rate=0.1)))
    with pytest.raises(PlanError, match="give both, or neither"):
        Experts(coefficient=0.1)
    with pytest.raises(PlanError, match="'sinkhorn' balances experts by itself"):
        Experts(assignment="sinkhorn", balance="layer", coefficient=0.1)
    with pytest.raises(PlanError, match="router_dtype = 'fp64' is about routers, and llama-3.2-1b has none"):
        under(model("llama-3.2-1b"), replace(plan, experts=Experts(router_dtype="fp64")))
    with pytest.raises(PlanError, match="the routers of deepseek-v3 have biases of experts"):
        under(model("deepseek-v3"), replace(plan, experts=SINKHORN))
    host = replace(plan, experts=Experts(bias_rate=0.1), optimizer=Optimizer(offload=Offload()))
    assert "experts.bias_rate with optimizer.offload" in str(own.plan_reason(host))
