"""Exchanges of experts as rows: parts of layers add up to the layers, and the clock hides what it can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Mesh, Overlap, Plan, Schedule, Workload
from gnomon.plans.expert_rows import taken_apart
from gnomon.prediction import Prediction, predict
from gnomon.prediction.predict import stages_of

CLUSTER = parse_cluster("2x8xh100-sxm")
PLAN = Plan(mesh=Mesh(dp_shard=16, ep=8), schedule=Schedule(micro_batch_size=1))
WORK = Workload(global_batch_size=64, seq_len=4096)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_parts_add_up_to_the_layer(name: str) -> None:
    graph = model(name)
    apart = taken_apart(PLAN, graph)
    (whole,), (parts,) = stages_of(graph, CLUSTER, PLAN, WORK), stages_of(apart.graph, CLUSTER, apart.plan, WORK)
    for phase in ("forward", "input_grad", "weight_grad"):
        one, sum_of = whole.phase(phase), parts.phase(phase)
        assert sum_of.compute_s == pytest.approx(one.compute_s, rel=1e-12)
        assert sum_of.comm_s == pytest.approx(one.comm_s, rel=1e-12)
        assert (sum_of.kernels, sum_of.flops, sum_of.collectives) == (one.kernels, one.flops, one.collectives)
    assert sum(parts.kept_bytes) == sum(whole.kept_bytes)
    assert parts.static_bytes() == whole.static_bytes()


def predicted(experts: bool, **changed: object) -> Prediction:
    plan = replace(PLAN, overlap=Overlap(experts=experts), **changed)  # type: ignore[arg-type]
    return predict("mixtral-8x7b", CLUSTER, plan, WORK)


def test_another_microbatch_hides_the_exchanges() -> None:
    plain, beside = predicted(False), predicted(True)
    sent = plain.breakdown["ep communication"]
    kernels = plain.step_s - sent
    assert kernels < beside.step_s < plain.step_s
    assert beside.breakdown["ep communication"] < 0.5 * sent
    timeline = beside.timeline()
    assert {"DISPATCH", "COMBINE", "DISPATCH_B", "COMBINE_B"} <= set(timeline.kinds)


def test_one_microbatch_has_nothing_to_hide_behind() -> None:
    """Rows then only say what a layer's price said."""
    schedule, work = Schedule(num_microbatches=1), replace(WORK, global_batch_size=16)
    plain, rows = (
        predict("mixtral-8x7b", CLUSTER, replace(PLAN, schedule=schedule, overlap=Overlap(experts=on)), work)
        for on in (False, True)
    )
    assert rows.step_s == pytest.approx(plain.step_s, rel=0.02)


def test_kernels_that_are_fused_across_a_cut_are_not_asked_for() -> None:
    """A plan without exchanges (one rank of experts) is predicted as it was."""
    mesh = Mesh(dp_shard=16)
    assert predicted(True, mesh=mesh).step_s == predicted(False, mesh=mesh).step_s
