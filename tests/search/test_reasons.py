"""Reasons of a plan: neighbours, machines, and answers that a reader can check."""

from __future__ import annotations

from functools import cache

import pytest

from gnomon.errors import PlanError
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Schedule, Stage, Workload
from gnomon.prediction import Prediction, predict
from gnomon.report.reasons import bounded_by, network, reasons_text, sharding
from gnomon.search.reasons import Reasons, changes, explain, faster

PLAN = Plan(
    mesh=Mesh(pp=2, dp_shard=4, tp=2),
    schedule=Schedule(micro_batch_size=1),
    optimizer=Optimizer(zero=1),
    layout=Layout(sequence_parallel=True),
)


@cache
def predicted() -> Prediction:
    return predict("llama-3.2-1b", "2x8xh100-sxm", PLAN, Workload(global_batch_size=32, seq_len=2048))


@cache
def reasons() -> Reasons:
    return explain(predicted())


def test_every_change_is_one_and_keeps_the_devices() -> None:
    names = [what for what, _ in changes(PLAN)]
    assert len(set(names)) == len(names)
    assert all(plan != PLAN and plan.world_size == PLAN.world_size for _, plan in changes(PLAN))
    assert {"tp 2 -> 4", "tp 2 -> 1", "pp 2 -> 1", "ZeRO 1 -> 3", "recompute full", "microbatch 1 -> 2"} <= {*names}


def test_neighbours_are_predictions() -> None:
    found = {each.what: each for each in reasons().neighbours}
    full = found["recompute full"].prediction
    assert full is not None and full.plan.saved.preset == "full"
    assert full.step_s > predicted().step_s and full.tightest.peak_bytes < predicted().tightest.peak_bytes


def test_faster_links_never_lose() -> None:
    for each in reasons().sensitivities:
        assert each.step_s <= predicted().step_s, each
    machines = faster(predicted().pricing.cluster, "nic")
    assert machines.nodes[0].nic is not None and predicted().pricing.cluster.nodes[0].nic is not None
    assert machines.nodes[0].nic.bytes_per_s == 2 * predicted().pricing.cluster.nodes[0].nic.bytes_per_s


def test_the_text_names_what_bounds_and_the_memory_of_each_stage() -> None:
    found = reasons()
    largest = max(predicted().breakdown, key=lambda part: predicted().breakdown[part])
    words = {"F": "forward", "B": "backward", "launch": "kernels waiting for the host"}
    assert words[largest] in bounded_by(found).split(",")[0]
    assert network(found).split("? ")[1].startswith(("yes", "partly", "no"))
    assert [zero for zero, _ in found.zero] == [0, 1, 2, 3]
    assert "by ZeRO stage" in sharding(found)
    assert all(len(line) <= 80 for line in reasons_text(found))


def test_plans_of_listed_stages_are_refused() -> None:
    stages = (Stage(calls=("embed", "layers[0:8]"), mesh=Mesh()), Stage(calls=("layers[8:16]", "head"), mesh=Mesh()))
    plan = Plan(stages=stages, schedule=Schedule(num_microbatches=4))
    work = Workload(global_batch_size=4, seq_len=512)
    with pytest.raises(PlanError, match="lists its stages"):
        explain(predict("llama-3.2-1b", "1x2xh100-sxm", plan, work))
