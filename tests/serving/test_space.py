"""The best of a space of layouts is what playing every candidate finds, and its bound is one."""

from __future__ import annotations

import pytest

from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.serving.forecast import Target, serve
from gnomon.serving.iteration import IterationPrice
from gnomon.serving.requests import closed
from gnomon.serving.space import best, bound, exhaustive, fewest, least_tpot_s, space
from gnomon.software.engine import engine


@pytest.mark.parametrize(("of", "tpot"), [("llama-3.1-8b", 0.008), ("qwen3-30b-a3b", 0.02)])
def test_the_best_is_that_of_brute_force(of: str, tpot: float) -> None:
    graph, cluster = model(of), parse_cluster("4xh100-sxm")
    load = closed(500, 60, 32, 64)
    candidates = space(
        cluster, [engine("vllm")], 1024, weights=("bf16", "fp8"), max_seqs=(16, 256), experts="qwen3" in of
    )
    target = Target(ttft_s=0.5, tpot_s=tpot)
    one, all_of_them = (search(graph, cluster, candidates, load, target) for search in (best, exhaustive))
    assert one.best is not None and all_of_them.best is not None
    assert one.best.value == all_of_them.best.value
    assert one.played <= all_of_them.played
    assert {c.candidate for c in one.front} <= {c.candidate for c in all_of_them.front} or one.unknown
    if not one.unknown:
        assert [c.candidate for c in one.front] == [c.candidate for c in all_of_them.front]
    assert one.played + one.bounded + sum(n for _, n in one.refused) == one.size == len(candidates)


def test_no_replay_exceeds_the_bound() -> None:
    graph, cluster = model("llama-3.1-8b"), parse_cluster("2xh100-sxm")
    for clients, outputs in ((1, 100), (8, 5), (64, 50)):
        load = closed(100, outputs, clients, 3 * clients)
        for candidate in space(cluster, [engine("vllm"), engine("sglang")], 512, weights=("bf16",)):
            price = IterationPrice(graph, cluster, candidate.serving, candidate.engine)
            found = serve(graph, cluster, candidate.serving, candidate.engine, load)
            assert found.output_tokens_per_s / found.devices <= bound(price, load)


def test_the_front_is_that_of_brute_force() -> None:
    """Of the whole space, where it says so; and nobody's further tokens come faster than the bound has it."""
    graph, cluster, load = model("llama-3.1-8b"), parse_cluster("2xh100-sxm"), closed(300, 24, 6, 24)
    candidates = space(
        cluster, [engine("vllm")], 512, weights=("bf16", "fp8"), kv=("bf16",), max_seqs=(2, 64), budgets=(512, 8192),
        fewer=True, pools=True,
    )  # fmt: skip
    found, whole = (
        search(graph, cluster, candidates, load, Target(ttft_s=None, tpot_s=None)) for search in (best, exhaustive)
    )
    assert not found.unknown and found.played < whole.played and len(whole.front) > 1
    assert [(c.value, c.forecast.tpot.p50) for c in found.front] == [
        (c.value, c.forecast.tpot.p50) for c in whole.front
    ]
    for candidate in candidates:
        if candidate.pools is None:
            price = IterationPrice(graph, cluster, candidate.serving, candidate.engine)
            played = serve(graph, cluster, candidate.serving, candidate.engine, load)
            assert least_tpot_s(price, 300) <= played.tpot.p50


def test_no_target_can_be_met_is_an_answer() -> None:
    graph, cluster = model("llama-3.1-8b"), parse_cluster("h100-sxm")
    candidates = space(cluster, [engine("vllm")], 1024, weights=("bf16",))
    found = best(graph, cluster, candidates, closed(100, 10, 1, 2), Target(ttft_s=None, tpot_s=1e-6))
    assert found.best is None and found.size == 1


def test_pools_and_idle_devices_are_in_the_space_and_the_fewest_are_those_of_brute_force() -> None:
    graph, cluster = model("llama-3.1-8b"), parse_cluster("4xh100-sxm")
    load = closed(800, 30, 24, 48)
    candidates = space(
        cluster,
        [engine("vllm")],
        1024,
        weights=("bf16",),
        kv=("bf16", "fp8"),
        max_seqs=(8, 256),
        fewer=True,
        pools=True,
    )
    assert {c.pools is None for c in candidates} == {True, False}
    assert {c.devices for c in candidates} == {1, 2, 4}
    target = Target(ttft_s=0.6, tpot_s=0.011)
    every = exhaustive(graph, cluster, candidates, load, target)
    few = fewest(graph, cluster, candidates, load, target)
    meeting = [
        c
        for c in candidates
        if (found := exhaustive(graph, cluster, [c], load, target)).best is not None and found.best.meets
    ]
    least = min(c.devices for c in meeting)
    assert few.best is not None and few.best.candidate.devices == least
    smallest = exhaustive(graph, cluster, [c for c in meeting if c.devices == least], load, target)
    assert smallest.best is not None and few.best.value == smallest.best.value
    one = best(graph, cluster, candidates, load, target)
    assert one.best is not None and every.best is not None and one.best.value == every.best.value


def test_experts_are_planned_as_the_engine_can_deal_them() -> None:
    """vLLM has a switch for them, over all devices of tp x dp; SGLang a number."""
    cluster = parse_cluster("8xh100-sxm")
    planned = {
        name: {
            (one.serving.tp * one.serving.dp, one.serving.ep)
            for one in space(cluster, [engine(name)], 1024, weights=("bf16",), experts=True)
        }
        for name in ("vllm", "sglang")
    }
    assert {ep in (1, devices) for devices, ep in planned["vllm"]} == {True} and (8, 8) in planned["vllm"]
    assert (8, 2) in planned["sglang"] and planned["vllm"] < planned["sglang"]
