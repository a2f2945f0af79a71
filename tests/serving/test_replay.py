"""The replay is the same in jumps and in single iterations, its times are what a hand counts, its rules hold."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from gnomon.errors import FormatError, InputError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.serving.forecast import Spread, Target, serve
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.replay import PlayedLoad, replay
from gnomon.serving.requests import Load, Request, at_rate, closed, from_csv, poisson
from gnomon.serving.scheduler import Batch, PromptPiece
from gnomon.serving.weights import shape_of
from gnomon.software.engine import engine, engines

TIMES = ("arrival_s", "begun_s", "first_s", "second_s", "end_s")


@cache
def price(name: str, of: str = "qwen2.5-0.5b", on: str = "h100-sxm", **limits: int) -> IterationPrice:
    rules = replace(engine(name), devices=("gpu", "cpu"), **limits)
    return IterationPrice(model(of), parse_cluster(on), Serving(max_model_len=4096), rules)


def random_load(rng: random.Random) -> Load:
    count = rng.randint(1, 40)
    made = [
        Request(
            arrival_s=rng.random() * rng.choice((0.01, 0.3, 3.0)),
            input_len=rng.randint(1, 300),
            output_len=rng.choice((1, 2, rng.randint(1, 200))),
        )
        for _ in range(count)
    ]
    made.sort(key=lambda r: r.arrival_s)
    clients = rng.choice((None, None, rng.randint(1, 12)))
    return Load(requests=tuple(made), concurrency=clients)


def same(one: PlayedLoad, two: PlayedLoad) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(two, name), equal_nan=True) for name in TIMES)


@pytest.mark.parametrize("name", engines())
def test_jumps_give_the_times_of_single_iterations_to_the_bit(name: str) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        limits = {"max_batched_tokens": rng.choice((32, 256)), "max_seqs": rng.choice((2, 16)), "block_tokens": 16}
        limits |= {"poll_steps": rng.choice((1, 7))}
        rules = price(name, **limits)
        load = random_load(rng)
        blocks = rng.choice((40, 400))
        one, many = replay(load, rules, blocks, one_by_one=True), replay(load, rules, blocks)
        assert same(one, many), seed
        assert (one.iterations, one.preemptions, one.busy_s) == (many.iterations, many.preemptions, many.busy_s)
        assert one.mean_running == pytest.approx(many.mean_running)
        gaps = [float((p.itl_s * p.itl_count).sum()) for p in (one, many)]
        assert gaps[0] == pytest.approx(gaps[1], rel=1e-9)


def test_windows_and_the_host_bend_the_price_and_sums_stay_exact() -> None:
    for of in ("gemma-2-2b", "qwen2.5-0.5b"):
        rules = price("vllm", of)
        rng = random.Random(0)
        for _ in range(60):
            decodes, count = rng.randint(1, 64), rng.randint(1, 900)
            keys = decodes * rng.randint(1, 5000)
            steps = sum(rules.decode_ticks(decodes, keys + i * decodes) for i in range(count))
            assert rules.decode_ticks(decodes, keys, count) == steps


def test_a_request_alone_is_its_prompt_and_its_decodes() -> None:
    rules = price("vllm")
    load = Load(requests=(Request(arrival_s=0.0, input_len=100, output_len=4),))
    played = replay(load, rules, 1000)
    prompt = rules.batch_ticks(Batch((PromptPiece(0, 0, 100, True),), 0, 0, ()))
    decodes = sum(rules.decode_ticks(1, keys) for keys in (101, 102, 103))
    wait = round((rules.engine.request_s + 100 * rules.engine.request_token_s) * TICKS_PER_S)
    assert played.first_s[0] == (wait + prompt) / TICKS_PER_S
    assert played.end_s[0] == (wait + prompt + decodes) / TICKS_PER_S
    assert played.iterations == 4


def test_preempted_requests_have_their_second_token_between_the_first_and_the_last() -> None:
    """A request that lost its blocks gets its next token from its prompt, computed again; no time between is lost."""
    rules = price("vllm", max_batched_tokens=64, max_seqs=16, block_tokens=16)
    preempted = 0
    for seed in range(40):
        rng = random.Random(seed)
        lengths = [(rng.randint(1, 60), rng.choice((1, 2, 2, 3, 40))) for _ in range(20)]
        requests = tuple(Request(arrival_s=0.001 * i, input_len=a, output_len=b) for i, (a, b) in enumerate(lengths))
        played = replay(Load(requests=requests), rules, 12)
        preempted += played.preemptions
        one, two = played.output_len == 1, played.output_len == 2
        assert np.isnan(played.second_s[one]).all() and (played.second_s[two] == played.end_s[two]).all()
        assert (played.first_s[~one] < played.second_s[~one]).all() and (played.second_s <= played.end_s)[~one].all()
        assert played.itl_count.sum() == (played.output_len - 1).sum()
        assert (played.itl_s * played.itl_count).sum() == pytest.approx((played.end_s - played.first_s).sum())
    assert preempted


@pytest.mark.parametrize("of", ["t5-base", "flan-t5-base"])
@pytest.mark.parametrize("name", ["tensorrt-llm", "gnomon"])
def test_what_an_encoder_read_is_priced_as_the_program_and_jumps_change_nothing(name: str, of: str) -> None:
    rules = price(name, of, block_tokens=16)
    rng = random.Random(2)
    for _ in range(20):
        texts = [rng.randint(1, 1500) for _ in range(rng.randint(0, 3))]
        pieces = tuple(PromptPiece(i, 0, 1, True, tokens) for i, tokens in enumerate(texts))
        decodes = rng.randint(0 if pieces else 1, 250)
        batch = Batch(pieces, decodes, decodes * rng.randint(1, 500), (), decodes * rng.randint(1, 2000))
        assert rules.batch_ticks(batch) / TICKS_PER_S == pytest.approx(rules.program_s(batch), rel=0.01)
        keys, count = decodes * rng.randint(1, 500), rng.randint(1, 300)
        steps = sum(rules.decode_ticks(decodes, keys + i * decodes, 1, batch.sources) for i in range(count))
        assert not decodes or rules.decode_ticks(decodes, keys, count, batch.sources) == steps
    for seed in range(12):
        rules = price(name, of, max_batched_tokens=256, max_seqs=6, block_tokens=16)
        load = random_load(random.Random(seed))
        one, many = (replay(load, rules, 60, one_by_one=single) for single in (True, False))
        assert same(one, many) and one.preemptions == many.preemptions, seed


def test_what_an_encoder_reads_is_paid_once_and_its_keys_by_every_token() -> None:
    """Twice the text: more for the first token, and as much more for each later one as its keys are read in."""
    rules = price("tensorrt-llm", "t5-base")
    first, each = [], []
    for tokens in (300, 600):
        played = replay(Load(requests=(Request(arrival_s=0.0, input_len=tokens, output_len=4),)), rules, 1000)
        first.append(played.first_s[0])
        each.append(played.end_s[0] - played.second_s[0])
    assert first[1] > first[0]
    per_key = sum(key.per_key_s for key in rules.crossed)
    assert rules.decode_ticks(1, 2, 1, 600) - rules.decode_ticks(1, 2, 1, 300) <= round(301 * per_key * TICKS_PER_S)
    assert each[1] >= each[0]
    # of 12 layers, 12 heads of 64 for keys and for values, in 16 bits; a request holds those of both texts
    shape = rules.shape
    assert [(a.kv_elements, n) for a, n in shape.crossed] == [(2 * 12 * 64, 12)] == [
        (a.kv_elements, n) for a, n in shape.attentions
    ]  # fmt: skip
    with pytest.raises(InputError, match="needs 6 KV blocks of 32, and there are 5"):
        replay(Load(requests=(Request(arrival_s=0.0, input_len=129, output_len=20),)), rules, 5)


def test_weights_of_encoders_with_a_decoder_are_those_of_the_model() -> None:
    """Tables that encoder, decoder and head share are held once."""
    for of in ("t5-small", "t5-base", "flan-t5-base", "gpt2", "llama-3.1-8b", "qwen2.5-0.5b"):
        graph = model(of)
        held = shape_of(graph, Serving(max_model_len=64)).weight_bytes / 2
        assert held == pytest.approx(graph.num_parameters(), rel=1e-12), of


@pytest.mark.parametrize("of", ["llama-3.1-8b", "qwen3-30b-a3b", "gemma-2-2b", "nemotron-3-nano", "deepseek-v2-lite"])
def test_tables_are_within_one_per_cent_of_the_program(of: str) -> None:
    rules = price("vllm", of)
    rng = random.Random(1)
    for _ in range(40):
        pieces = tuple(
            PromptPiece(i, rng.choice((0, rng.randint(1, 8000))), rng.randint(1, 2500), rng.random() < 0.5)
            for i in range(rng.randint(0, 3))
        )
        decodes = rng.randint(0 if pieces else 1, 250)
        batch = Batch(pieces, decodes, decodes * rng.randint(1, 4000), ())
        assert rules.batch_ticks(batch) / TICKS_PER_S == pytest.approx(rules.program_s(batch), rel=0.01)


def test_more_work_never_takes_less() -> None:
    rules = price("vllm", "llama-3.1-8b")
    decodes = [rules.decode_ticks(n, n * 1000) for n in range(1, 600)]
    assert decodes == sorted(decodes)
    pieces = [rules.batch_ticks(Batch((PromptPiece(0, 0, n, True),), 0, 0, ())) for n in range(1, 8000, 7)]
    assert all(b >= a * 0.995 for a, b in zip(pieces, pieces[1:], strict=False))


def test_more_devices_and_narrower_weights_are_faster() -> None:
    graph = model("llama-3.1-70b")
    load = closed(500, 50, 16, 48)
    tpot = {}
    for tp, weights in ((2, "bf16"), (4, "bf16"), (4, "fp8"), (4, "int4-wo")):
        serving = Serving(max_model_len=1000, tp=tp, weights=weights)
        tpot[tp, weights] = serve(graph, parse_cluster("8xh200-sxm"), serving, engine("vllm"), load).tpot.p50
    assert tpot[2, "bf16"] > tpot[4, "bf16"] > tpot[4, "fp8"] > tpot[4, "int4-wo"]


def test_percentiles_are_the_least_value_that_so_many_do_not_exceed() -> None:
    spread = Spread.of(np.arange(1.0, 101.0))
    assert (spread.p50, spread.p90, spread.p99, spread.mean) == (50, 90, 99, 50.5)
    assert Spread.of(np.array([1.0, 5.0]), np.array([9, 1])).p90 == 1.0


def test_goodput_counts_those_within_both_limits() -> None:
    graph, cluster = model("llama-3.1-8b"), parse_cluster("h100-sxm")
    load = poisson(2000, 100, 20, 200)
    serving = Serving(max_model_len=4096)
    shares = [
        serve(graph, cluster, serving, engine("vllm"), load, Target(ttft_s=s, tpot_s=None)).goodput
        for s in (1e-3, 0.2, 1e3)
    ]
    assert shares[0] == 0 and shares[2] == 1 and shares == sorted(shares)


def test_a_trace_is_read_and_a_bad_row_is_named() -> None:
    load = from_csv("arrival_s,input_len,output_len\n5,10,3\n4,20,1\n")
    assert [(r.arrival_s, r.input_len) for r in load.requests] == [(0.0, 20), (1.0, 10)]
    azure = from_csv("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5,8,9\n2023-11-17 00:00:01.0,7,5\n")
    assert [r.arrival_s for r in azure.requests] == [0.0, 1.5]
    assert at_rate(load, 4.0).requests[1].arrival_s == 0.25
    for rows, said in (
        ("1,x,3", "line 2: input_len is 'x'"),
        ("1,0,3", "line 2: a request of 0 input"),
        ("1,2", "line 2 has 2 columns"),
        ("nan,2,3", "line 2: arrival_s"),
        ("-1,2,3", "line 2: arrival_s"),
        ("1,2.5,3", "line 2: input_len is '2.5'"),
    ):
        with pytest.raises(FormatError, match=said):
            from_csv(f"arrival_s,input_len,output_len\n{rows}\n")
    with pytest.raises(FormatError, match="no column"):
        from_csv("arrival_s,tokens\n1,2\n")


@pytest.mark.parametrize(
    ("of", "on", "change", "said"),
    [
        ("llama-3.1-8b", "4xh100-sxm", {"tp": 3}, "tp 3 does not divide the 32 heads; the nearest that does is 2"),
        ("llama-3.1-8b", "h100-sxm", {"tp": 2}, "needs 2 devices"),
        ("llama-3.1-8b", "2xh100-sxm", {"tp": 2, "ep": 2}, "has none"),
        ("bert-base", "h100-sxm", {}, "makes no tokens one after another"),
        ("t5-base", "h100-sxm", {}, "vllm 0.19 serves no encoder with a decoder .* on record: gnomon, tensorrt-llm"),
        ("llama-3.1-8b", "h100-sxm", {"max_model_len": 100}, "longer than max_model_len 100"),
        ("llama-3.1-70b", "h100-sxm", {}, "would not start"),
        ("gpt2", "h100-sxm", {}, "longer than the 1024 positions"),
    ],
)
def test_what_cannot_be_served_is_said(of: str, on: str, change: dict[str, int], said: str) -> None:
    serving = Serving(**{"max_model_len": 2000, **change})
    with pytest.raises(InputError, match=said):
        serve(model(of), parse_cluster(on), serving, engine("vllm"), closed(1000, 500, 4, 8))


def test_an_engine_says_which_devices_it_runs_on() -> None:
    with pytest.raises(InputError, match="tensorrt-llm does not run on a cpu"):
        cpu = parse_cluster("local:1")
        serve(model("qwen2.5-0.5b"), cpu, Serving(max_model_len=99), engine("trtllm"), closed(9, 9, 1, 1))


def test_how_many_decodes_fill_a_time_is_what_counting_gives() -> None:
    for name, of in (("vllm", "qwen2.5-0.5b"), ("vllm", "gemma-2-2b"), ("gnomon", "t5-base")):
        rules, rng = price(name, of), random.Random(4)
        for _ in range(60):
            decodes, most = rng.randint(1, 40), rng.randint(1, 300)
            keys, sources = decodes * rng.randint(1, 3000), rng.choice((0, 500)) if of == "t5-base" else 0
            whole = rules.decode_ticks(decodes, keys, most, sources)
            room = rng.choice((0, 1, rng.randint(1, whole), whole, whole + 1))
            counted = next((n for n in range(1, most) if rules.decode_ticks(decodes, keys, n, sources) >= room), most)
            assert rules.decodes_until(room, most, decodes, keys, sources) == counted
