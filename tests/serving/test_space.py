"""The best of a space of layouts is what playing every candidate finds, and its bound is one."""

from __future__ import annotations

import pytest

from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.serving.forecast import Target, serve
from gnomon.serving.iteration import IterationPrice
from gnomon.serving.requests import closed
from gnomon.serving.space import best, bound, exhaustive, space
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
    assert one.played < all_of_them.played
    assert one.played + one.bounded + sum(n for _, n in one.refused) == one.size == len(candidates)


def test_no_replay_exceeds_the_bound() -> None:
    graph, cluster = model("llama-3.1-8b"), parse_cluster("2xh100-sxm")
    for clients, outputs in ((1, 100), (8, 5), (64, 50)):
        load = closed(100, outputs, clients, 3 * clients)
        for candidate in space(cluster, [engine("vllm"), engine("sglang")], 512, weights=("bf16",)):
            price = IterationPrice(graph, cluster, candidate.serving, candidate.engine)
            found = serve(graph, cluster, candidate.serving, candidate.engine, load)
            assert found.output_tokens_per_s / found.devices <= bound(price, load)


def test_no_target_can_be_met_is_an_answer() -> None:
    graph, cluster = model("llama-3.1-8b"), parse_cluster("h100-sxm")
    candidates = space(cluster, [engine("vllm")], 1024, weights=("bf16",))
    found = best(graph, cluster, candidates, closed(100, 10, 1, 2), Target(ttft_s=None, tpot_s=1e-6))
    assert found.best is None and found.size == 1
