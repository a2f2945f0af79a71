"""Predictions with the vocabulary divided over the pipeline: work and parameters conserved, exchanges by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.errors import PlanError
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Plan, Schedule, Vocabulary, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prediction.traffic import traffic
from gnomon.report.prediction import describe
from gnomon.search import plan as search

GRAPH = gpt(
    GptConfig(
        name="wide",
        num_layers=8,
        hidden_size=512,
        num_heads=8,
        vocab_size=65536,
        max_positions=256,
        tied=False,
        dropout=0,
    )
)
WORKLOAD = Workload(global_batch_size=16, seq_len=256)
HOWS: tuple[Vocabulary, ...] = ("vocab_1", "vocab_2", "interlaced")
TOKENS, HIDDEN, ROWS = 256, 512, 65536


def predicted(how: Vocabulary, *, turned: bool = False, pp: int = 4) -> Prediction:
    schedule = Schedule(micro_batch_size=1, vocabulary=how)
    if turned:
        schedule = replace(schedule, name="v_half", virtual_stages=2, placement="v")
    return predict(GRAPH, f"1x{pp}xa100-sxm-80gb", Plan(mesh=Mesh(pp=pp), schedule=schedule), WORKLOAD)


@pytest.mark.parametrize("how", HOWS)
def test_every_parameter_is_held_once(how: Vocabulary) -> None:
    whole, divided = predicted("ends"), predicted(how)
    parameters = [sum(sum(stage.elements) for stage in made.pricing.stages) for made in (whole, divided)]
    assert parameters[0] == parameters[1]
    share = [sum(stage.elements) for stage in divided.pricing.stages]
    assert max(share) - min(share) < 0.01 * max(share) + 256 * HIDDEN  # positions are on the first rank alone


@pytest.mark.parametrize("how", HOWS)
def test_ranks_share_the_heads_work(how: Vocabulary) -> None:
    made = predicted(how)
    flops = 0.0
    for key in made.structure.program.keys:
        if key.kind in ("S", "T"):
            flops += made.pricing.amounts(key)[1]
    assert flops == 3 * 2 * TOKENS * HIDDEN * ROWS


def test_a_heavy_head_is_faster_divided() -> None:
    wide = gpt(
        GptConfig(
            name="wider",
            num_layers=8,
            hidden_size=2048,
            num_heads=16,
            vocab_size=262144,
            max_positions=2048,
            tied=False,
        )
    )
    step_s = {}
    for how in ("ends", *HOWS):
        plan = Plan(mesh=Mesh(pp=4), schedule=Schedule(micro_batch_size=1, vocabulary=how))  # type: ignore[arg-type]
        step_s[how] = predict(wide, "1x4xa100-sxm-80gb", plan, Workload(global_batch_size=16, seq_len=2048)).step_s
    assert all(step_s[how] < 0.6 * step_s["ends"] for how in HOWS)


def test_a_barrier_more_holds_a_microbatch_more() -> None:
    one, two = predicted("vocab_2"), predicted("vocab_1")
    kept = one.sizes["0S"]
    more = [b.by_class["activations"] - a.by_class["activations"] for a, b in zip(one.memory, two.memory, strict=True)]
    assert all(kept <= entry <= kept + 4 * TOKENS * HIDDEN for entry in more)


def test_what_ranks_exchange() -> None:
    share = predicted("vocab_2").pricing.stages[0].share
    assert share is not None
    hidden = 2 * TOKENS * HIDDEN
    assert share.exchanged("CAST_H") == [("broadcast", 4 * TOKENS * HIDDEN + 4 * TOKENS)]
    assert share.exchanged("SUM_V") == [*[("all_reduce", 4 * TOKENS)] * 3, ("all_reduce", hidden)]
    assert share.exchanged("SUM_E") == [("all_reduce", hidden)]
    assert share.exchanged("CAST_E") == [("broadcast", hidden)]
    assert not share.exchanged("S") and not share.exchanged("T")


def test_traffic_has_the_exchanges() -> None:
    sent = {entry.axes: entry.sent_bytes for entry in traffic(predicted("vocab_1"))}
    whole = {entry.axes: entry.sent_bytes for entry in traffic(predicted("ends"))}
    assert sent["pp"] > whole["pp"] + 16 * (4 + 2 + 2 + 2) * TOKENS * HIDDEN


def test_parts_of_the_step_add_up() -> None:
    made = predicted("vocab_1")
    assert {"S", "T", "EMBED", "EGRAD"} <= set(made.breakdown)
    assert sum(made.breakdown.values()) == pytest.approx(made.step_s, rel=1e-12)
    assert made.timeline().memory is not None
    assert "one_f_one_b, vocabulary vocab_1, 16 microbatches" in describe(made.plan, WORKLOAD)


def test_the_search_says_that_it_does_not_try_it() -> None:
    base = Plan(schedule=Schedule(vocabulary="vocab_1"))
    with pytest.raises(PlanError, match="not among what the search tries"):
        search(GRAPH, "1x4xa100-sxm-80gb", WORKLOAD, base=base)
