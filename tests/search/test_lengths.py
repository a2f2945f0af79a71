"""Plans for batches of sequences of several lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import GnomonError, PlanError
from gnomon.hardware import parse_cluster
from gnomon.methods import check_methods, method
from gnomon.methods import every as every_method
from gnomon.models.presets import model
from gnomon.plans import Layout, Mesh, Optimizer, Overlap, Pass, Plan, Saved, Schedule, Split, Workload
from gnomon.prediction import predict
from gnomon.search.questions.lengths import Lengths, fields_of, plan_lengths
from gnomon.search.questions.reasons import without
from gnomon.search.refinement.changes import changes

LENGTHS = (16384, 4096, 4096, *(1024,) * 5)
GRAPH = model("llama-3.2-1b")
NODE = parse_cluster("1x2xa100-sxm-80gb")
MADE_FOR_LENGTHS = tuple(entry for entry in every_method() if entry.stand_ins is not None)


@pytest.fixture(scope="module")
def searched() -> Lengths:
    return plan_lengths(GRAPH, NODE, Workload(lengths=LENGTHS), methods=MADE_FOR_LENGTHS)


def test_every_way_is_predicted_on_the_true_lengths_and_fits(searched: Lengths) -> None:
    assert {way.method for way in searched.ways} == {"", *(entry.name for entry in MADE_FOR_LENGTHS)}
    steps = []
    for way in searched.ways:
        assert way.prediction is not None
        again = predict(GRAPH, NODE, way.prediction.plan, Workload(lengths=LENGTHS))
        assert again.step_s == way.prediction.step_s
        assert max(rank.peak_bytes for rank in again.memory) <= searched.limit_bytes
        assert [given.name for given in again.plan.schedule.passes][-1:] == ([way.method] if way.method else [])
        check_methods(again.plan)
        for near in method(way.method).variants(again.plan) if way.method else ():
            assert [given.name for given in near.schedule.passes][-1] == way.method
        steps.append(again.step_s)
    assert steps == sorted(steps)
    assert searched.best.step_s == steps[0]


def test_it_is_at_most_2_percent_slower_than_the_best_of_many_plans(searched: Lengths) -> None:
    """All meshes of two devices, ZeRO stages, microbatches and presets without a method."""
    work, limit = Workload(lengths=LENGTHS), searched.limit_bytes
    best = float("inf")
    for (tp, cp, pp), zero, micro, preset in product(
        ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)),
        (0, 1, 2, 3),
        (1, 2, 4, 8),
        ("none", "full"),
    ):
        plan = Plan(
            mesh=Mesh(tp=tp, cp=cp, pp=pp, dp_shard=2 // (tp * cp * pp)),
            schedule=Schedule(micro_batch_size=micro),
            layout=Layout(sequence_parallel=tp > 1, keep_gathered=tp > 1),
            optimizer=Optimizer(zero=zero),
            saved=Saved(preset=preset),
        )
        try:
            prediction = predict(GRAPH, NODE, plan, work)
        except GnomonError:
            continue
        if max(rank.peak_bytes for rank in prediction.memory) <= limit:
            best = min(best, prediction.step_s)
    without = next(way.prediction for way in searched.ways if not way.method)
    assert without is not None
    assert without.step_s <= best * 1.02


def test_what_is_fixed_and_forbidden_holds() -> None:
    made = plan_lengths(
        GRAPH,
        NODE,
        Workload(lengths=LENGTHS),
        methods=(method("chunkflow"), method("skrull")),
        fixed={"tp": 2, "cp": 1},
        forbid=("zero>1", "recompute=full"),
    )
    for way in made.ways:
        if way.prediction is not None:
            values = fields_of(way.prediction.plan)
            assert values["tp"] == 2 and values["cp"] == 1
            assert values["zero"] in (0, 1) and values["recompute"] != "full"
    skrull = next(way for way in made.ways if way.method == "skrull")
    assert skrull.prediction is None
    assert "cp = 1 is fixed" in skrull.why


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200_000), min_size=2, max_size=40),
    devices=st.sampled_from((1, 2, 6, 8, 64)),
)
def test_stand_ins_hold_all_tokens_and_divide_over_the_devices(lengths: list[int], devices: int) -> None:
    for entry in MADE_FOR_LENGTHS:
        assert entry.stand_ins is not None
        for stand_in in entry.stand_ins(lengths, devices):
            assert stand_in.seq_len * stand_in.batch >= sum(lengths)
            assert stand_in.batch % devices == 0 or stand_in.batch == len(lengths)
            assert [given.name for given in stand_in.passes] == [entry.name]


def test_a_budget_that_is_spent_says_so() -> None:
    asked = iter([True] * 4)
    made = plan_lengths(GRAPH, NODE, Workload(lengths=LENGTHS), keep_going=lambda: next(asked, False))
    assert not made.complete
    assert made.best.step_s > 0


def test_clear_refusals() -> None:
    with pytest.raises(PlanError, match="one length"):
        plan_lengths(GRAPH, NODE, Workload(lengths=(4096, 4096)))
    with pytest.raises(PlanError, match="mario is not for batches of several lengths; chunkflow, .*, skrull are"):
        plan_lengths(GRAPH, NODE, Workload(lengths=LENGTHS), methods=(method("mario"),))
    small = parse_cluster("1xv100-sxm-16gb")
    with pytest.raises(PlanError, match="the smallest that was predicted takes"):
        plan_lengths(model("llama-3.1-8b"), small, Workload(lengths=(65536, 1024)))


def test_a_changed_tp_takes_its_cut_matmuls_along() -> None:

    plan = Plan(
        mesh=Mesh(tp=4, dp_shard=4),
        layout=Layout(sequence_parallel=True),
        overlap=Overlap(splits=(Split(op="*", dim="seq", parts=4),)),
    )
    named = dict(changes(plan))
    assert named["tp 4 -> 8"].overlap.splits[0].parts == 8
    assert named["tp 4 -> 2"].overlap.splits[0].parts == 2
    one = dict(
        changes(
            replace(
                plan,
                mesh=Mesh(tp=2, dp_shard=4),
                overlap=replace(plan.overlap, splits=(Split(op="*", dim="seq", parts=2),)),
            )
        )
    )
    assert one["tp 2 -> 1"].overlap.splits == ()


def test_a_plan_is_compared_with_itself_without_its_methods() -> None:
    passes = (Pass(name="group_by_length"), Pass(name="padding"))
    plan = Plan(mesh=Mesh(cp=2), schedule=Schedule(micro_batch_size=2, passes=passes))
    rest = {what: [given.name for given in changed.schedule.passes] for what, changed in without(plan)}
    assert rest == {
        "cp 2": ["group_by_length", "padding"],
        "group_by_length": ["padding"],
        "padding": ["group_by_length"],
    }
