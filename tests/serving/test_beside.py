"""Guesses that are checked, adapters, an encoder of images: each costs and gives what a hand counts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from gnomon.errors import InputError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.serving.capacity import capacity
from gnomon.serving.forecast import Disaggregated, serve, serve_pools
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice, SideModels
from gnomon.serving.layout import Serving
from gnomon.serving.requests import closed
from gnomon.serving.scheduler import Batch, PromptPiece
from gnomon.software.engine import engine

PLAIN = Serving(max_model_len=4096)
ON = "h100-sxm"


@cache
def price(serving: Serving = PLAIN, beside: SideModels | None = None) -> IterationPrice:
    return IterationPrice(model("llama-3.1-8b"), parse_cluster(ON), serving, engine("vllm"), beside)


def step(serving: Serving, beside: SideModels | None = None, decodes: int = 8) -> float:
    return price(serving, beside).decode_ticks(decodes, decodes * 1000) / TICKS_PER_S


def guessing(acceptance: float, tokens: int = 3) -> Serving:
    return replace(PLAIN, draft="ngram", draft_tokens=tokens, acceptance=acceptance)


def test_a_check_makes_as_many_tokens_as_guesses_hold() -> None:
    assert guessing(1.0).tokens_a_check == 4
    assert guessing(0.5).tokens_a_check == 1 + 0.5 + 0.25 + 0.125
    assert PLAIN.tokens_a_check == 1


def test_guesses_at_no_cost_pay_where_memory_is_the_limit_and_not_where_rows_are() -> None:
    alone = step(PLAIN, decodes=1)
    assert alone / 4 < step(guessing(1.0), decodes=1) < alone / 3.2  # four rows read the weights once
    assert step(guessing(0.5), decodes=1) > step(guessing(0.9), decodes=1)
    assert step(guessing(0.1), decodes=512) > step(PLAIN, decodes=512)


def test_a_draft_model_costs_its_own_steps_and_its_memory() -> None:
    small = model("llama-3.2-1b")
    beside = SideModels(draft=small, vision=None, image_tokens=0)
    with_model = replace(guessing(0.7), draft="model")
    rules = replace(engine("vllm"), host_step_s=0.0, host_sequence_s=0.0)
    graph, on = model("llama-3.1-8b"), parse_cluster(ON)
    free = IterationPrice(graph, on, guessing(0.7), rules).decode_ticks(8, 8000)
    paid = IterationPrice(graph, on, with_model, rules, beside).decode_ticks(8, 8000)
    own = IterationPrice(small, on, PLAIN, rules).decode_ticks(8, 8000)
    assert paid - free == pytest.approx(3 * own / with_model.tokens_a_check, rel=1e-6)
    with pytest.raises(InputError, match="give both or neither"):
        price(with_model)


def test_runs_of_decodes_sum_to_the_bit_with_guesses() -> None:
    rules = price(guessing(0.7))
    for decodes, keys, count in ((1, 100, 300), (40, 4000, 77), (200, 100_000, 500)):
        steps = sum(rules.decode_ticks(decodes, keys + i * decodes) for i in range(count))
        assert rules.decode_ticks(decodes, keys, count) == steps


def test_adapters_take_their_bytes_and_their_kernels() -> None:
    with_adapters = replace(PLAIN, lora_rank=16, lora_slots=4)
    graph, on = model("llama-3.1-8b"), parse_cluster(ON)
    more = (
        capacity(graph, on, with_adapters, engine("vllm")).weights_bytes
        - capacity(graph, on, PLAIN, engine("vllm")).weights_bytes
    )
    joined = 32 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)  # q k v together, gate and up together
    assert more == 4 * 16 * joined * 2
    assert step(with_adapters) > step(PLAIN)


def test_an_image_is_encoded_once_in_the_first_piece_of_its_prompt() -> None:
    beside = SideModels(draft=None, vision=model("vit-l-16"), image_tokens=576)
    rules, plain = price(PLAIN, beside), price()
    first, later = Batch((PromptPiece(0, 0, 600, False),), 0, 0, ()), Batch((PromptPiece(0, 600, 400, True),), 0, 0, ())
    encoder = rules.batch_ticks(first) - plain.batch_ticks(first)
    flops = 2 * 304e6 * 576
    assert 1 < encoder / TICKS_PER_S / (flops / 989e12) < 40
    assert rules.batch_ticks(later) == plain.batch_ticks(later)


def test_pools_need_their_devices_and_keep_decodes_from_prompts() -> None:
    graph, on, load = model("llama-3.1-8b"), parse_cluster("4xh100-sxm"), closed(3000, 60, 32, 96)
    pools = Disaggregated(prefill=PLAIN, prefill_count=2, decode_count=2)
    found = serve_pools(graph, on, PLAIN, engine("vllm"), pools, load)
    mixed = serve(graph, on, replace(PLAIN, replicas=4), engine("vllm"), load)
    assert found.devices == 4 and found.itl.p99 < mixed.itl.p99
    assert any("nvlink4" in line for line in found.assumed)
    with pytest.raises(InputError, match="need 5 devices"):
        serve_pools(graph, on, PLAIN, engine("vllm"), replace(pools, decode_count=3), load)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"draft": "mtp"}, "say both who guesses"),
        ({"draft": "ngram", "draft_tokens": 2}, "acceptance is not said"),
        ({"draft": "ngram", "draft_tokens": 2, "acceptance": 1.5}, "from 0 to 1"),
        ({"lora_rank": 8}, "give both above 0"),
        ({"weights": "q4_k:x"}, "bits of a weight"),
    ],
)
def test_what_cannot_be_is_one_line(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        replace(PLAIN, **fields)  # type: ignore[arg-type]
