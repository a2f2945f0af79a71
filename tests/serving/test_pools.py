"""Two pools: times that a hand counts, nothing lost, and more engines never slower."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from gnomon.errors import InputError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.pools import EnginePool, decoding, replay_pools
from gnomon.serving.requests import Load, Request, closed
from gnomon.serving.scheduler import Batch, PromptPiece
from gnomon.software.engine import engine


@cache
def price(name: str = "vllm", *, decodes: bool = False) -> IterationPrice:
    rules = engine(name)
    rules = decoding(rules) if decodes else rules
    return IterationPrice(model("qwen2.5-0.5b"), parse_cluster("h100-sxm"), Serving(max_model_len=4096), rules)


def pools(first: int = 1, last: int = 1, name: str = "vllm") -> tuple[EnginePool, EnginePool]:
    return (
        EnginePool(price=price(name), blocks=4000, count=first),
        EnginePool(price=price(name, decodes=True), blocks=4000, count=last),
    )


def sent(tokens: int) -> float:
    return 0.002 + tokens * 1e-6


def test_a_request_alone_is_its_prompt_the_way_and_its_decodes() -> None:
    load = Load(requests=(Request(arrival_s=0.0, input_len=100, output_len=4),))
    prefill, decode = pools()
    played = replay_pools(load, prefill, decode, sent)
    rules = prefill.price.engine
    wait = round((rules.request_s + 100 * rules.request_token_s) * TICKS_PER_S)
    prompt = prefill.price.batch_ticks(Batch((PromptPiece(0, 0, 100, True),), 0, 0, ()))
    second = decode.price.batch_ticks(Batch((PromptPiece(0, 100, 1, True),), 0, 0, ()))
    rest = sum(decode.price.decode_ticks(1, keys) for keys in (102, 103))
    way = round(sent(100) * TICKS_PER_S)
    assert played.first_s[0] == (wait + prompt) / TICKS_PER_S
    assert played.second_s[0] == (wait + prompt + way + second) / TICKS_PER_S
    assert played.end_s[0] == (wait + prompt + way + second + rest) / TICKS_PER_S


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt-llm"])
def test_every_request_is_answered_whole_and_in_order(name: str) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        made = sorted(
            (
                Request(arrival_s=rng.random(), input_len=rng.randint(1, 900), output_len=rng.choice((1, 2, 60)))
                for _ in range(40)
            ),
            key=lambda r: r.arrival_s,
        )
        load = Load(requests=tuple(made), concurrency=rng.choice((None, 7)))
        engines = pools(rng.randint(1, 3), rng.randint(1, 3), name)
        blocks = rng.choice((1100 // price(name).engine.block_tokens, 4000))  # few: requests lose theirs
        engines = (replace(engines[0], blocks=4000), replace(engines[1], blocks=blocks))
        played, singly = (replay_pools(load, *engines, sent, one_by_one=one) for one in (False, True))
        for column in ("arrival_s", "begun_s", "first_s", "second_s", "end_s"):
            assert np.array_equal(getattr(played, column), getattr(singly, column), equal_nan=True), (seed, column)
        assert (played.iterations, played.preemptions) == (singly.iterations, singly.preemptions)
        assert played.mean_running == pytest.approx(singly.mean_running)
        assert (played.begun_s >= played.arrival_s).all()
        assert (played.first_s > played.begun_s).all()
        more = played.output_len > 1
        assert (played.second_s[more] > played.first_s[more] + 0.002).all()
        assert (played.end_s[more] >= played.second_s[more]).all()
        assert int(played.itl_count.sum()) == int((played.output_len - 1).sum())
        gaps = float((played.itl_s * played.itl_count).sum())
        assert gaps <= float((played.end_s - played.first_s).sum()) + 1e-9


def test_more_engines_do_not_slow_anybody_and_prompts_do_not_disturb_decodes() -> None:
    load = closed(2000, 60, 32, 96)
    few, many = (replay_pools(load, *pools(n, n), sent) for n in (1, 4))
    assert many.span_s < few.span_s
    each = [float(np.median((p.end_s - p.second_s) / (p.output_len - 2))) for p in (few, many)]
    alone = price(decodes=True).decode_ticks(32, 32 * 2100) / TICKS_PER_S
    assert each[1] <= each[0] < 1.6 * alone


def test_a_pool_of_none_is_refused() -> None:
    with pytest.raises(InputError, match="pool of 0 engines"):
        pools(0)
