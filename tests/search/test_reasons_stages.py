"""Neighbours of plans that list their stages: they differ by what they say, and keep all layers and sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search.spaces import model

from gnomon.errors import GnomonError
from gnomon.hardware import parse_cluster
from gnomon.plans import Mesh, Plan, Schedule, Stage, Workload, batch, check, stage_layers
from gnomon.prediction import predict
from gnomon.report.reasons import reasons_mapping, reasons_text
from gnomon.search.fit.advice import advice
from gnomon.search.questions.reasons import explain
from gnomon.search.questions.stage_changes import evened, stage_changes

MIXED = parse_cluster("1x2xh100-sxm+1x2xa100-sxm-80gb")
WORK = Workload(global_batch_size=16, seq_len=512)
GRAPH = model("llama", 6)
LAYERS = sum(layer.call.first is not None for layer in GRAPH.layers())
PIPELINE = Plan(
    stages=(
        Stage(calls=("embed", f"layers[0:{LAYERS - 1}]"), mesh=Mesh(dp_shard=2), devices="0:2"),
        Stage(calls=(f"layers[{LAYERS - 1}:{LAYERS}]", "head"), mesh=Mesh(tp=2), devices="2:4"),
    ),
    schedule=Schedule(num_microbatches=4),
)
SHARED = Plan(stages=(Stage(calls=("*",), mesh=Mesh(dp_shard=4), shares=(3, 3, 1, 1)),))
SHARED = replace(SHARED, schedule=Schedule(num_microbatches=2))


@pytest.mark.parametrize("plan", [PIPELINE, SHARED], ids=["pipeline", "shares"])
def test_every_neighbour_has_all_layers_and_sequences(plan: Plan) -> None:
    whole = [layer.label for layer in GRAPH.layers()]
    actual = [*stage_changes(plan, GRAPH, MIXED, WORK), *evened(plan, GRAPH, WORK)]
    assert len({what for what, _ in actual}) == len(actual) and len({entry for _, entry in actual}) == len(actual)
    for what, entry in actual:
        assert entry != plan, what
        assert [layer.label for part in stage_layers(entry, GRAPH) for layer in part] == whole, what
        count, size = batch(entry, WORK)
        assert count * size == WORK.batch_size, what
        assert all(sum(stage.shares) in (0, size) for stage in entry.stages), what


def test_what_changes() -> None:
    named = dict(stage_changes(PIPELINE, GRAPH, MIXED, WORK))
    moved = stage_layers(named["a layer from stage 0 to 1"], GRAPH)
    assert [sum(layer.call.first is not None for layer in part) for part in moved] == [LAYERS - 2, 2]
    assert "a layer from stage 1 to 0" not in named  # it has only one
    assert named["microbatches 4 -> 8"].schedule.num_microbatches == 8
    named = dict(stage_changes(SHARED, GRAPH, MIXED, WORK))
    assert named["a sequence from h100-sxm-80gb to a100-sxm-80gb"].stages[0].shares == (2, 3, 2, 1)
    assert "a sequence from a100-sxm-80gb to h100-sxm-80gb" not in named  # its workers have one each
    assert "microbatches 2 -> 4" not in named and named["microbatches 2 -> 1"].stages[0].shares == (6, 6, 2, 2)
    (what, even), *_ = evened(SHARED, GRAPH, WORK)
    assert what == "uneven shares" and even.stages[0].shares == ()


@pytest.mark.parametrize("plan", [PIPELINE, SHARED], ids=["pipeline", "shares"])
def test_the_numbers_are_those_of_predict(plan: Plan) -> None:
    check(plan, GRAPH, MIXED, WORK)
    prediction = predict(GRAPH, MIXED, plan, WORK)
    result = explain(prediction, runners_up=(SHARED, PIPELINE))
    named = dict(stage_changes(plan, GRAPH, MIXED, WORK))
    assert [neighbour.what for neighbour in result.neighbours] == list(named)
    for neighbour in result.neighbours:
        if neighbour.prediction is None:
            with pytest.raises(GnomonError):
                predict(GRAPH, MIXED, named[neighbour.what], WORK)
        else:
            assert neighbour.prediction.step_s == predict(GRAPH, MIXED, named[neighbour.what], WORK).step_s
    assert {line.what for line in result.sensitivities} >= {"network 2x", "network half", "links inside a node 2x"}
    assert all(len(line) <= 80 for line in reasons_text(result, advice=advice(prediction)))
    assert len(reasons_mapping(result)["runners_up"]) == 2
