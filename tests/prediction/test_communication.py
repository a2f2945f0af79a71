"""What a stack does with its communication: whole gradients, collectives beside products, hops between nodes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from prediction.jobs import gpt_model, plan

from gnomon.graph import DTYPE_BITS
from gnomon.plans import Layout, Optimizer, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.curves import Provenance
from gnomon.prices.fitted import FittedRates, LinkNumber
from gnomon.program import Key
from gnomon.software import Fact, Stack

SOURCE = Provenance(data="made up", date="2026-11-22", error="none", range="this test")
HOP_S = 4e-4


def stack_with(*fields: str) -> Stack:
    """A stack of which these facts hold, and nothing else is known."""
    facts = tuple(Fact(field=name, source="this test", date="2026-11-22") for name in fields)
    return Stack(name="test", version="1").with_values(facts, **dict.fromkeys(fields, True))


@cache
def run(stack: Stack, *, nodes: int = 2, tp: int = 1, zero: int = 1, micro: int = 2) -> Prediction:
    """A GPT on nodes of four ranks, data-parallel over what tensor parallelism leaves."""
    job = replace(
        plan(dp_shard=4 * nodes // tp, tp=tp, micro=micro),
        layout=Layout(sequence_parallel=tp > 1),
        optimizer=Optimizer(zero=zero),  # type: ignore[arg-type]
    )
    workload = Workload(global_batch_size=micro * 16, seq_len=1024)
    return predict(gpt_model(8, 2048, 16, dropout=0.0), f"{nodes}x4xh100-sxm-80gb", job, workload, stack)


def seconds(result: Prediction, kind: str) -> float:
    key = next(key for key in result.structure.program.keys if key.kind == kind)
    return result.pricing.seconds(key)


def test_whole_gradients_are_summed_at_once_after_the_backward() -> None:
    actual, usual = run(stack_with("whole_gradients")), run(stack_with())
    key = next(key for key in actual.structure.program.keys if key.kind == "REDUCE_GRAD")
    size = actual.pricing.amounts(key)[0]
    at_once = float(collective_seconds("all_reduce", size, actual.pricing.stages[0].links["dp_shard+cp"]))
    assert seconds(actual, "REDUCE_GRAD") == pytest.approx(at_once)
    assert seconds(usual, "REDUCE_GRAD") < at_once / 2  # a part, most of it beside the backward


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_tied_head_travels_with_the_embedding_beside_it(zero: int) -> None:
    outcome = run(stack_with(), zero=zero)
    stage = outcome.pricing.stages[0]
    sent = {"REDUCE_GRAD" if zero else "AR": DTYPE_BITS[outcome.plan.precision.reduce]}
    if zero:
        sent["UNSHARD"] = DTYPE_BITS[outcome.plan.precision.compute]
    for kind, bits in sent.items():
        key = next(key for key in outcome.structure.program.keys if key.kind == kind)
        assert outcome.pricing.amounts(key)[0] == sum(stage.elements) * bits // 8


def test_without_zero_gradients_are_summed_whole_anyway() -> None:
    assert run(stack_with("whole_gradients"), zero=0).step_s == run(stack_with(), zero=0).step_s


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_backward_collectives_hide_under_products(micro: int) -> None:
    """Of the backward, what hides is at most two of three collectives, and never more than the products take."""
    apart, beside = (run(stack_with(*names), nodes=1, tp=4, micro=micro) for names in ((), ("backward_overlap",)))
    key = Key(rank_class=0, kind="B", stage=0, shape="", name="")
    waits, waits_less = (entry.pricing.compute.parts("B", key.stage)["tp"] for entry in (apart, beside))
    assert waits / 4 < waits_less < waits
    products = beside.pricing.compute.parts("B", key.stage)["compute"]
    assert waits - waits_less < products
    assert apart.pricing.compute.parts("F", 0) == beside.pricing.compute.parts("F", 0)


def test_a_tensor_parallel_group_passes_through_its_nodes() -> None:
    """Two nodes are one hop, four are three; a group inside a node has none, and other axes have none."""
    for nodes, tp in ((1, 4), (2, 4), (2, 8), (4, 16)):
        pricing = run(stack_with(), nodes=nodes, tp=tp).pricing
        link = pricing.stages[0].links["tp"]
        name = link.across_name or "none"
        slow = FittedRates(links=(LinkNumber(link=name, factor=1.0, hop_s=HOP_S, provenance=SOURCE),))
        count = pricing.compute.phase("forward", 0).collectives["tp"]
        more = (
            pricing.with_numbers(slow).compute.parts("F", 0)["tp"]
            - pricing.with_numbers(FittedRates()).compute.parts("F", 0)["tp"]
        )
        assert more == pytest.approx(count * HOP_S * (max(tp // 4, 1) - 1))
        reduce = next(key for key in run(stack_with(), nodes=nodes, tp=tp).structure.program.keys if key.kind == "OPT")
        assert pricing.with_numbers(slow).seconds(reduce) == pricing.with_numbers(FittedRates()).seconds(reduce)


def test_a_network_that_is_slower_in_training_is_so_outside_layers_only() -> None:
    pricing = run(stack_with(), nodes=2, tp=8).pricing
    name = pricing.stages[0].links["tp"].across_name
    slow = pricing.with_numbers(FittedRates(links=(LinkNumber(link=name, factor=3.0, provenance=SOURCE),)))
    assert slow.compute.parts("F", 0) == pricing.with_numbers(FittedRates()).compute.parts("F", 0)
    data = run(stack_with("whole_gradients"), nodes=2).pricing
    key = next(k for k in run(stack_with("whole_gradients"), nodes=2).structure.program.keys if k.kind == "REDUCE_GRAD")
    assert data.with_numbers(FittedRates(links=slow.numbers.links)).seconds(key) == pytest.approx(
        3 * data.with_numbers(FittedRates()).seconds(key)
    )
