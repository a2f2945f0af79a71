"""Hybrids of Mamba-2 and other layers: published counts of parameters, work by hand, layouts, memory, time."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

import gnomon
from gnomon.errors import GraphError, PlanError
from gnomon.graph import BF16, Setting, forward_work
from gnomon.graph.backward import backward
from gnomon.graph.kernels import lower
from gnomon.models import hybrid
from gnomon.ops.kernels import FUSED
from gnomon.ops.state_space import Scan
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Schedule, Workload
from gnomon.sharding import shard_block

SMALL = hybrid.HybridConfig(
    name="small",
    layers=("M", "E", "*", "-"),
    hidden_size=64,
    vocab_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    mamba=hybrid.Mamba2(num_heads=8, head_dim=16, num_groups=4, state_size=32, chunk=16),
    mixture=hybrid.HybridMixture(
        num_experts=8, experts_per_token=2, expert_ffn_size=48, shared_ffn_size=80, latent_size=32
    ),
)


@pytest.mark.parametrize(
    ("make", "billions"),
    [
        (hybrid.nemotron_3_nano, 31.578),  # 31.6 B and 120.6 B on the models' pages, 550 B in Ultra's name
        (hybrid.nemotron_3_super, 120.669),
        (hybrid.nemotron_3_ultra, 549.309),
        (hybrid.nemotron_h_8b, 8.101),
        (hybrid.mamba2_2_7b, 2.7026),
    ],
)
def test_published_sizes(make: object, billions: float) -> None:
    assert callable(make)
    graph = hybrid.hybrid(make())
    assert graph.num_parameters() / 1e9 == pytest.approx(billions, rel=2e-4)


def test_parameters_of_a_mixer_by_hand() -> None:
    block = hybrid.layer_block(SMALL, "M")
    projection = 2 * 128 + 2 * 4 * 32 + 8
    convolution = (128 + 2 * 4 * 32) * (4 + 1)
    result = sum(prod(dim.size or 0 for dim in parameter.atoms) for parameter in block.parameters)
    assert result == 64 * projection + convolution + 3 * 8 + 128 + 128 * 64 + 64


def test_work_and_what_is_kept() -> None:
    block = lower(hybrid.layer_block(SMALL, "M"), FUSED)
    op = block.op("mamba.scan")
    setting = Setting(sizes={"batch": 2, "seq": 64}, dtypes=BF16, causal_flops="full")
    work = forward_work(op, block, setting)
    # 128 tokens, width 128, state 32, chunks of 16, 4 groups
    assert work.matmul_flops == 4 * 128 * 128 * 32 + 2 * 128 * 16 * (4 * 32 + 128)
    kept = {s.tensor.name for s in backward(hybrid.layer_block(SMALL, "M"), FUSED, BF16).saved}
    assert {"mamba.in_proj", "mamba.scan", "mamba.scan:ungated", "mamba.norm"} <= kept


def test_tensor_parallel_ranks_have_groups_of_heads() -> None:
    block = hybrid.layer_block(SMALL, "M")
    sharded = shard_block(block, Layout(sequence_parallel=True), Mesh(tp=4), {"batch": 1, "seq": 64}, BF16)
    scan = Scan.of(block.op("mamba.scan"), block, sharded.sizes("mamba.scan"))
    assert (scan.groups, scan.heads, scan.width, scan.tokens, scan.state) == (1, 2, 32, 64, 32)
    assert [(c.kind, c.axis) for c in sharded.forward] == [("all_gather", "tp"), ("reduce_scatter", "tp")]
    with pytest.raises(PlanError, match="does not divide"):
        shard_block(block, Layout(), Mesh(tp=8), {"batch": 1, "seq": 64}, BF16)


def test_context_parallel_ranks_exchange_positions_for_groups() -> None:
    block = hybrid.layer_block(SMALL, "M")
    sharded = shard_block(block, Layout(), Mesh(cp=2), {"batch": 1, "seq": 64}, BF16)
    scan = Scan.of(block.op("mamba.scan"), block, sharded.sizes("mamba.scan"))
    assert (scan.groups, scan.heads, scan.tokens) == (2, 4, 64)
    assert [c.kind for c in sharded.forward] == ["all_to_all", "all_to_all"]
    with pytest.raises(PlanError, match="lower cp"):
        shard_block(block, Layout(), Mesh(cp=8), {"batch": 1, "seq": 64}, BF16)


def test_latent_rows_travel_narrow() -> None:
    block = hybrid.layer_block(SMALL, "E")
    assert [d.size for d in block.tensor("moe.dispatch").dims][-2:] == [2, 32]
    assert block.tensor("moe.experts.up_proj.weight").dims[-1].size == 32


def test_the_second_prediction_runs_twice_with_one_set_of_weights() -> None:
    once = hybrid.hybrid(replace(SMALL, mtp_layers=("*", "E"), mtp_depth=1))
    twice = hybrid.hybrid(replace(SMALL, mtp_layers=("*", "E"), mtp_depth=2))
    assert once.num_parameters() == twice.num_parameters() > hybrid.hybrid(SMALL).num_parameters()
    assert twice.outputs == ("head.loss", "mtp_1.loss", "mtp_2.loss")


def test_predicted_and_longer_sequences_cost_a_mamba_in_proportion() -> None:
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=3))
    times = [
        gnomon.predict("mamba2-2.7b", "1x8xh100-sxm", plan, Workload(global_batch_size=8, seq_len=length)).step_s
        for length in (8192, 16384)
    ]
    assert 1.7 < times[1] / times[0] < 2.1


def test_a_plan_is_found_and_those_that_cut_a_group_are_not_tried() -> None:
    batch = Workload(global_batch_size=16, seq_len=2048)
    best = gnomon.plan(hybrid.hybrid(SMALL), "1x8xh100-sxm", batch).best[0]
    again = gnomon.predict(hybrid.hybrid(SMALL), "1x8xh100-sxm", best.plan, batch)
    assert again.fits and again.step_s == pytest.approx(best.step_s)
    cut = replace(best.plan, mesh=Mesh(dp_shard=1, tp=4, cp=2))
    with pytest.raises(PlanError, match="tp x cp = 8 does not divide ssm_groups = 4"):
        gnomon.predict(hybrid.hybrid(SMALL), "1x8xh100-sxm", cut, batch)


@pytest.mark.parametrize(
    "changes",
    [{"layers": ("X",)}, {"mamba": None}, {"mixture": None}, {"mtp_depth": 1}, {"layers": ("M", "")}],
)
def test_refused(changes: dict[str, object]) -> None:
    with pytest.raises(GraphError):
        replace(SMALL, **changes)  # type: ignore[arg-type]
