"""Searches under skewed routing against predicting every plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from search.spaces import model

from gnomon.cli import main
from gnomon.errors import GnomonError, PlanError
from gnomon.hardware import parse_cluster
from gnomon.models.mixtral import mixtral, mixtral_8x7b
from gnomon.plans import Goal, Plan, RouterLoad, Workload
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import make_space, plan, solve

CLUSTER = parse_cluster("1x4xh100-sxm")
GRAPH = model("mixtral", 2)
FIXED = {"pp": 1, "schedule": "one_f_one_b", "sequence_parallel": True, "keep_gathered": False, "overlap": True}


@pytest.mark.parametrize(
    "router",
    [
        RouterLoad(kind="zipf", s=0.6),
        RouterLoad(kind="histogram", counts=(3.0, 1.0, 2.0, 2.0), capacity=1.25),
        RouterLoad(kind="zipf", s=0.6, capacity=1.5, padded=True),
    ],
)
def test_the_best_plan_is_that_of_predicting_all(router: RouterLoad) -> None:
    work = Workload(global_batch_size=8, seq_len=512, router=router)
    space = make_space(GRAPH, CLUSTER, work, base=Plan(), fixed=FIXED)
    steps = []
    for point in space.points():
        try:
            steps.append((predict(GRAPH, CLUSTER, space.plan(point), work, PLAIN_STACK).step_s, point))
        except GnomonError:
            continue
    result = solve(GRAPH, CLUSTER, work, space, goal=Goal(memory_fraction=1.0))
    assert len(steps) > 30 and result.best[0].step_s == min(steps)[0]


def test_skew_takes_experts_off_their_own_ranks() -> None:
    """Where experts are divided, the busiest rank holds the others up, and holds more; whole on every rank, they do
    not mind."""
    wide = mixtral(replace(mixtral_8x7b(), num_layers=2))
    work = Workload(global_batch_size=8, seq_len=2048)
    big = replace(work, router=RouterLoad(kind="histogram", counts=(4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)))
    fixed = {**FIXED, "recompute": "none", "tp": 1, "zero": 3, "micro_batch_size": 2}
    actual = {
        (ep, load.router.kind): plan(wide, CLUSTER, load, fixed={**fixed, "ep": ep}, top=1).best[0]
        for ep in (1, 4)
        for load in (work, big)
    }
    assert actual[1, "balanced"].step_s == actual[1, "histogram"].step_s
    even, skewed = actual[4, "balanced"], actual[4, "histogram"]
    assert skewed.step_s > 1.1 * even.step_s
    assert skewed.prediction.tightest.by_class["activations"] > even.prediction.tightest.by_class["activations"]


def test_a_load_that_cannot_be_is_said_before_the_search() -> None:
    work = Workload(global_batch_size=8, seq_len=512, router=RouterLoad(kind="zipf", s=3.0))
    with pytest.raises(PlanError, match="none gets more than 1/2"):
        plan(GRAPH, CLUSTER, work)


def test_a_histogram_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps([30, 10, 10, 10, 10, 10, 10, 10]))
    asked = ["predict", "mixtral-8x7b", "--on", "8xh100-sxm", "--ep", "8", "--zero", "3", "--json"]
    assert main([*asked, "--router", str(path), "--capacity", "1.25"]) in (0, 1)
    document = json.loads(capsys.readouterr().out)
    assert document["workload"]["router"] == {
        "kind": "histogram",
        "counts": [30, 10, 10, 10, 10, 10, 10, 10],
        "capacity": 1.25,
    }
    assert any("capacity 1.25 drops 14.4%" in note for note in document["notes"])
    path.write_text("{}")
    assert main([*asked, "--router", str(path)]) == 2
    assert main([*asked, "--router", "pareto"]) == 2
    assert main([*asked, "--router", "zipf:x"]) == 2
    output = capsys.readouterr().err
    assert "is no list of numbers" in output and "is no load" in output and "has no exponent" in output
