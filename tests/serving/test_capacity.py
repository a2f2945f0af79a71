"""KV tokens from given bytes are what engines print; refusals name what starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.errors import InputError
from gnomon.hardware import parse_cluster
from gnomon.models.hybrid import DeltaNet, HybridConfig, HybridMixture, hybrid
from gnomon.models.presets import model
from gnomon.serving.capacity import caching, capacity, changes, kv_tokens, most_model_len, most_of, refusal
from gnomon.serving.layout import Serving, weight_format
from gnomon.serving.scheduler import Scheduler
from gnomon.serving.weights import shape_of
from gnomon.software.engine import engine

GIB = 2**30


def tokens(of: str, serving: Serving, name: str, kv_bytes: float) -> int:
    return kv_tokens(caching(shape_of(model(of), serving), serving), kv_bytes, engine(name), serving.max_model_len)[2]


@pytest.mark.parametrize(
    ("of", "serving", "name", "gib", "said", "slack"),
    [
        # what a log gives in GiB with two digits leaves that many tokens open
        ("deepseek-v3", {"tp": 8}, "sglang", 33.32, 509157, 80),
        ("qwen3-235b-a22b", {"tp": 4}, "sglang", 16.46, 367404, 400),
    ],
)
def test_tokens_from_given_bytes(
    of: str, serving: dict[str, int], name: str, gib: float, said: int, slack: int
) -> None:
    found = tokens(of, Serving(max_model_len=2048, **serving), name, gib * GIB)
    assert abs(found - said) <= slack


def test_layers_of_two_kinds_share_pools_of_equal_pages() -> None:
    """gpt-oss: 18 layers see 128 keys, 18 see all; what vLLM prints changes with max_model_len at equal bytes."""
    later = replace(engine("vllm"), hybrid_tokens="length")  # 0.22
    layers = {
        n: caching(shape_of(model("gpt-oss-120b"), Serving(max_model_len=n)), Serving(max_model_len=n))
        for n in (2068, 9472)
    }
    found = {n: kv_tokens(kinds, 57.24 * GIB, later, n)[2] for n, kinds in layers.items()}
    assert found[2068] == pytest.approx(825_607, rel=2e-4)
    assert found[9472] == pytest.approx(886_768, rel=2e-4)


def test_states_make_pages_of_attention_as_large_and_groups_share_the_blocks() -> None:
    """Qwen3.6-35B-A3B: 30 layers of gated DeltaNet, 10 of attention; a log prints 47.55 GiB, 623,040 tokens."""
    delta = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    experts = HybridMixture(
        num_experts=256, experts_per_token=8, expert_ffn_size=512, shared_ffn_size=512, sigmoid=False
    )
    graph = hybrid(
        HybridConfig(
            name="q", layers=("DE", "DE", "DE", "*E") * 10, hidden_size=2048, vocab_size=248320, num_heads=16,
            num_kv_heads=2, head_dim=256, rotary=True, attention_gate=True, gated=True, activation="silu", delta=delta,
            mixture=experts,
        )
    )  # fmt: skip
    serving = Serving(max_model_len=8192)
    layers = caching(shape_of(graph, serving), serving)
    state = next(kind.state_bytes for kind in layers if kind.state_bytes)
    assert state == 32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert kv_tokens(layers, 47.55 * GIB, engine("vllm"), 8192)[2] == 623_040


def test_a_block_is_all_or_nothing() -> None:
    serving = Serving(max_model_len=2048)
    layers = caching(shape_of(model("llama-3.1-8b"), serving), serving)
    block = 16 * 2 * 8 * 128 * 2 * 32
    for count in (0, 1, 2588):
        assert kv_tokens(layers, count * block, engine("vllm"), 2048)[1:3] == (count, count * 16)
        assert kv_tokens(layers, count * block + block - 1, engine("vllm"), 2048)[1] == count


def test_a_refusal_names_the_largest_that_starts() -> None:
    graph, on, rules = model("llama-3.1-8b"), parse_cluster("rtx4090"), engine("vllm")
    serving = Serving(max_model_len=65_536)
    said = refusal(graph, on, serving, rules)
    most = most_model_len(graph, on, serving, rules)
    assert said is not None and f"starts is {most}" in said
    assert refusal(graph, on, Serving(max_model_len=most), rules) is None
    assert refusal(graph, on, Serving(max_model_len=most + 1), rules) is not None
    helps = changes(graph, on, serving, rules)
    assert helps and all(way.concurrency >= 1 for way in helps)


def test_parts_add_up_and_flags_move_them() -> None:
    graph, on = model("llama-3.1-70b"), parse_cluster("4xh100-sxm")
    held = capacity(graph, on, Serving(max_model_len=4096, tp=4), engine("vllm"))
    spent = held.weights_bytes + held.activation_bytes + held.own_bytes + held.kv_bytes
    assert spent == pytest.approx(held.usable_bytes)
    assert held.weights_bytes == pytest.approx(70.55e9 * 2 / 4, rel=0.01)
    narrow = capacity(graph, on, Serving(max_model_len=4096, tp=4, kv="fp8"), engine("vllm"))
    assert narrow.kv_tokens == pytest.approx(2 * held.kv_tokens, abs=32)


def test_without_chunks_a_prompt_over_the_budget_is_refused_at_the_start_and_by_the_scheduler() -> None:
    graph, on = model("llama-3.1-8b"), parse_cluster("h100-sxm")
    rules = replace(engine("vllm"), chunked_prefill=False, max_batched_tokens=2048)
    said = refusal(graph, on, Serving(max_model_len=4096), rules)
    assert said is not None and "2048 must not be smaller than max_model_len 4096" in said
    with pytest.raises(InputError, match="wait for ever"):
        Scheduler(rules, 1000).step([(0, 3000, 10, 0)], ())


def test_the_largest_batch_that_starts() -> None:
    graph, on = model("llama-3.1-8b"), parse_cluster("rtx-4090")
    rules = replace(engine("vllm"), max_seqs=8192)
    serving = Serving(max_model_len=4096)
    assert refusal(graph, on, serving, rules) is not None
    most = most_of(graph, on, serving, rules, "max_seqs")
    assert refusal(graph, on, serving, replace(rules, max_seqs=most)) is None
    assert refusal(graph, on, serving, replace(rules, max_seqs=most + 1)) is not None


def test_weights_in_groups_of_another_size_have_the_bits_of_their_arrays() -> None:
    """Four bits, and a float16 scale (with a byte of zero) for each group."""
    assert [weight_format(name).bits for name in ("4:16", "2:4-bf16", "4:16-int8")] == [5, 10, 3 + 16 / 4096]
    assert weight_format("4:16-int8").compute_dtype == "int8"
    assert [weight_format(name).bits for name in ("int4-g64", "int4-g32", "int8-g128", "int4-g128-zeros")] == [
        4.25, 4.5, 8.125, 4.1875,
    ]  # fmt: skip
    for name in ("int4-g7", "ternary-g64", "2:24", "int4-g100"):
        with pytest.raises(InputError, match="are not known"):
            weight_format(name)


def test_only_an_engine_that_multiplies_by_sparse_weights_starts_with_them() -> None:
    on, sparse = parse_cluster("cpu-process"), Serving(max_model_len=64, weights="4:16-bf16")
    said = refusal(model("qwen2.5-7b"), on, sparse, engine("openvino"))
    assert said == "openvino does not multiply by weights in 4:16-bf16; of engines on record gnomon does"
    own = refusal(model("qwen2.5-7b"), on, sparse, engine("gnomon"))
    assert own is not None and "5.83 GiB of weights" in own, "only memory is short"


def test_an_engine_that_does_not_run_there_says_so_before_memory_is_counted() -> None:
    said = refusal(model("llama-3.1-8b"), parse_cluster("tpu-v5e"), Serving(max_model_len=64), engine("vllm"))
    assert said == "vllm does not run on a tpu (tpu-v5e); it runs on: gpu, cpu"
