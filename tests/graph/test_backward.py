"""The derived backward against published closed forms and cases worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from graph.of_blocks import block_work, recompute_work, saved_bytes
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import GraphError
from gnomon.graph import (
    BF16,
    EAGER,
    FUSED,
    UNFUSED,
    BlockBuilder,
    Call,
    Dim,
    Dtypes,
    Graph,
    Setting,
    Tensor,
    attention_pairs_x2,
    backward,
    graph_saved_bytes,
    graph_work,
    saved,
    storages,
)
from gnomon.models.bert import bert, bert_base
from gnomon.models.gpt import GptConfig, gpt, gpt3_175b, gpt_layer
from gnomon.models.llama import layer_block, llama, llama_mini
from gnomon.models.mixtral import layer_block as mixture_block
from gnomon.models.mixtral import mixtral_8x7b
from gnomon.models.unet import unet, unet_tiny


def setting(b: int, s: int, convention: str = "full") -> Setting:
    return Setting(sizes={"batch": b, "seq": s}, dtypes=BF16, causal_flops=convention)  # type: ignore[arg-type]


def small_gpt(h: int, a: int) -> GptConfig:
    return GptConfig(
        name="g",
        num_layers=3,
        hidden_size=h,
        num_heads=a,
        vocab_size=100,
        max_positions=64,
        dropout=0.1,
        attention_dropout=0.1,
    )


# Korthikanti et al. 2022 leave the statistics of the two layer norms out as small: mean and 1/std in fp32 for each.
def norm_statistics(b: int, s: int) -> int:
    return 2 * 2 * 4 * s * b


@given(b=st.integers(1, 4), s=st.integers(1, 64), a=st.integers(1, 4), d=st.integers(1, 16))
def test_gpt_layer_keeps_what_korthikanti_counts(b: int, s: int, a: int, d: int) -> None:
    h = a * d
    back = backward(gpt_layer(small_gpt(h, a)), UNFUSED, BF16)
    kept = saved_bytes(back, setting(b, s), {})
    assert kept == 34 * s * b * h + 5 * a * s * s * b + norm_statistics(b, s)


@given(b=st.integers(1, 4), s=st.integers(1, 64), a=st.integers(1, 4), d=st.integers(1, 16))
def test_selective_and_full_recompute(b: int, s: int, a: int, d: int) -> None:
    h = a * d
    back = backward(gpt_layer(small_gpt(h, a)), UNFUSED, BF16)
    core = {"attn.core:*": "recompute"}
    assert saved_bytes(back, setting(b, s), core) == 34 * s * b * h + norm_statistics(b, s)  # type: ignore[arg-type]
    assert saved_bytes(back, setting(b, s), {"*": "recompute"}) == 2 * s * b * h


def test_selective_recompute_runs_only_the_attention_core_again() -> None:
    back = backward(gpt_layer(small_gpt(8, 2)), UNFUSED, BF16)
    again = saved(back, {"attn.core:*": "recompute"}, BF16)
    assert again.recompute_ops == ("attn.core:scores", "attn.core:probs", "attn.core:dropped")
    assert {s.tensor.name for s in again.recomputed} == {"attn.core:probs", "attn.core:mask", "attn.core:dropped"}


def test_work_of_recomputing() -> None:
    b, s, h = 2, 16, 8
    back = backward(gpt_layer(small_gpt(h, 2)), UNFUSED, BF16)
    core = recompute_work(back, setting(b, s), {"attn.core:*": "recompute"})
    assert core.matmul_flops == 2 * b * s * s * h  # q·kᵀ; the product with v is kept
    assert recompute_work(back, setting(b, s), {}).matmul_flops == 0
    everything = recompute_work(back, setting(b, s), {"*": "recompute"})
    assert everything.matmul_flops == 24 * b * s * h * h + 4 * b * s * s * h  # the last dropout makes its mask again
    dry = backward(gpt_layer(replace(small_gpt(h, 2), dropout=0.0)), UNFUSED, BF16)
    all_but_last = recompute_work(dry, setting(b, s), {"*": "recompute"})
    assert all_but_last.matmul_flops == 16 * b * s * h * h + 4 * b * s * s * h  # no need of the last linear, 8bsh²


def test_full_recompute_does_not_run_the_last_sum() -> None:
    back = backward(gpt_layer(small_gpt(8, 2)), UNFUSED, BF16)
    again = saved(back, {"*": "recompute"}, BF16)
    assert [s.tensor.name for s in again.on_device] == ["x"]
    assert again.recompute_ops[0] == "ln_1" and again.recompute_ops[-1] == "mlp.dropout"


def test_gpt3_activations_of_the_published_example() -> None:
    # Korthikanti et al.: s=2048, h=12288, a=96 give 5as/h = 80, so 114·sbh a layer.
    b, s, h = 1, 2048, 12288
    back = backward(gpt_layer(gpt3_175b()), UNFUSED, BF16)
    assert saved_bytes(back, setting(b, s), {}) == 114 * s * b * h + norm_statistics(b, s)


@given(b=st.integers(1, 4), s=st.integers(1, 64), a=st.integers(1, 4), d=st.integers(1, 16))
def test_gpt_layer_flops(b: int, s: int, a: int, d: int) -> None:
    h = a * d
    for kernels in (FUSED, UNFUSED):
        work = block_work(gpt_layer(small_gpt(h, a)), kernels, setting(b, s))
        forward = 24 * b * s * h * h + 4 * b * s * s * h
        assert work.forward.matmul_flops == forward
        assert work.input_grad.matmul_flops + work.weight_grad.matmul_flops == 2 * forward
        assert work.weight_grad.matmul_flops == 24 * b * s * h * h  # attention has no weights


def test_whole_gpt_flops_by_the_megatron_formula() -> None:
    # 72·b·s·L·h²·(1 + s/(6h) + V/(12hL)), multiplied out to stay in integers.
    b, s, h, layers, v = 3, 32, 8, 3, 100
    total = graph_work(gpt(small_gpt(h, 2)), UNFUSED, setting(b, s)).total.matmul_flops
    assert total == 72 * b * s * layers * h * h + 12 * b * s * s * layers * h + 6 * b * s * h * v


@given(
    b=st.integers(1, 3),
    s=st.integers(1, 64),
    kv=st.integers(1, 3),
    groups=st.integers(1, 3),
    d=st.integers(1, 8),
    f=st.integers(1, 64),
)
def test_llama_layer_by_hand(b: int, s: int, kv: int, groups: int, d: int, f: int) -> None:
    a = kv * groups
    h = 2 * d  # heads × head_dim need not be the hidden size
    c = replace(llama_mini(), hidden_size=h, num_heads=a, num_kv_heads=kv, head_dim=d, ffn_size=f)
    block = layer_block(c, "layer", 0)
    work = block_work(block, FUSED, setting(b, s))
    linears = 2 * b * s * h * (2 * a * d + 2 * kv * d + 3 * f)
    assert work.forward.matmul_flops == linears + 4 * b * s * s * a * d
    assert work.weight_grad.matmul_flops == linears
    assert work.input_grad.matmul_flops == linears + 8 * b * s * s * a * d
    assert work.input_grad.extra_matmul_flops == 2 * b * s * s * a * d  # flash makes q·kᵀ again
    # x, its norm, q, k (rotated), v, out, log-sum-exp, middle, its norm, gate, up, product; 1/rms of two norms
    kept = 2 * b * s * (4 * h + 2 * a * d + 2 * kv * d + 3 * f) + 4 * b * a * s + 2 * 4 * b * s
    assert saved_bytes(backward(block, FUSED, BF16), setting(b, s), {}) == kept


def test_flash_attention_keeps_q_k_v_out_and_lse() -> None:
    back = backward(layer_block(llama_mini(), "layer", 0), FUSED, BF16)
    core = [s.tensor.name for s in back.saved if "self_attn.core" in s.needed_by]
    assert core == [
        "self_attn.q_rotary",
        "self_attn.k_rotary",
        "self_attn.v_proj",
        "self_attn.core",
        "self_attn.core:lse",
    ]


def test_a_tensor_read_by_three_linears_is_kept_once() -> None:
    back = backward(layer_block(llama_mini(), "layer", 0), FUSED, BF16)
    (entry,) = (s for s in back.saved if s.tensor.name == "input_layernorm")
    assert entry.needed_by == ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def test_unfused_steps_of_eager_code_keep_more() -> None:
    block = layer_block(llama_mini(), "layer", 0)
    eager = {s.tensor.name for s in backward(block, UNFUSED, BF16).saved}
    assert {"input_layernorm:fp32", "input_layernorm:normed", "mlp.act:activated", "self_attn.core:k_repeated"} <= eager
    for field in ("attention", "norm", "glu"):
        kernels = replace(FUSED, **{field: "unfused"})
        more = saved_bytes(backward(block, kernels, BF16), setting(2, 32), {})
        assert more > saved_bytes(backward(block, FUSED, BF16), setting(2, 32), {})


def test_an_eager_llama_layer_keeps_what_torch_keeps() -> None:
    # Measured with torch 2.13 saved_tensors_hooks, by storage, on the layer as transformers writes it, without dropout:
    # batch 2, seq 32, hidden 64, 4 heads of 16 over 2, ffn 96. The model's head keeps a scalar of 4 bytes more there.
    c = replace(llama_mini(), hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96, vocab_size=200)
    assert saved_bytes(backward(layer_block(c, "layer", 0), EAGER, BF16), setting(2, 32), {}) == 197_120
    assert saved_bytes(backward(llama(c).block("head"), EAGER, BF16), setting(2, 32), {}) == 84_740 - 4


def test_other_layers_keep_what_torch_keeps() -> None:
    # Measured as above in fp32: BERT (batch 2, seq 16, hidden 64, 4 heads) with flash attention; a U-Net residual block
    # (8 to 16 channels at 4 × 4, 4 groups, time 32), also without dropout.
    fp32 = Dtypes(compute="fp32", param="fp32")
    c = replace(bert_base(), hidden_size=64, num_heads=4, ffn_size=256, dropout=0.0, attention_dropout=0.0)
    sizes = Setting(sizes={"batch": 2, "seq": 16}, dtypes=fp32, causal_flops="full")
    assert saved_bytes(backward(bert(c).block("layers"), FUSED, fp32), sizes, {}) == 132_096
    u = unet(replace(unet_tiny(), attention_levels=()))
    assert saved_bytes(backward(u.block("down_1_0"), FUSED, fp32), sizes, {}) == 9_856


def test_in_fp32_the_casts_of_an_eager_norm_are_views() -> None:
    dtypes = Dtypes(compute="fp32", param="fp32")
    block = backward(layer_block(llama_mini(), "layer", 0), UNFUSED, dtypes).forward
    assert storages(block, dtypes)["input_layernorm:fp32"] == "x"
    assert storages(block, BF16)["input_layernorm:fp32"] == "input_layernorm:fp32"


def test_a_view_keeps_its_whole_storage_once() -> None:
    back = backward(gpt_layer(small_gpt(8, 2)), FUSED, BF16)
    assert [s.tensor.name for s in back.saved if "attn.core" in s.needed_by][0] == "attn.c_attn"
    assert not any(s.tensor.name.startswith("attn.c_attn.") and s.tensor.name[-1] in "qkv" for s in back.saved)


def test_cross_entropy_keeps_logits_in_16_or_log_probabilities_in_32_bits() -> None:
    b, s, v, h = 2, 8, 256, 64
    head = llama(llama_mini()).block("head")
    fused = saved_bytes(backward(head, FUSED, BF16), setting(b, s), {})
    eager = saved_bytes(backward(head, replace(FUSED, cross_entropy="unfused"), BF16), setting(b, s), {})
    common = 2 * 2 * b * s * h + 4 * b * s + 8 * b * s  # x, its norm, 1/rms, labels
    assert fused == common + 2 * b * s * v + 4 * b * s
    assert eager == common + 4 * b * s * v


def test_offloaded_tensors_leave_the_device() -> None:
    back = backward(layer_block(llama_mini(), "layer", 0), FUSED, BF16)
    s = setting(2, 32)
    moved = saved(back, {"mlp.gate_proj": "offload"}, BF16)
    assert [e.tensor.name for e in moved.offloaded] == ["mlp.gate_proj"]
    without = saved_bytes(back, s, {}) - 2 * 2 * 32 * 128
    assert saved_bytes(back, s, {"mlp.gate_proj": "offload"}) == without


def test_recompute_stops_at_a_tensor_that_is_kept_for_it() -> None:
    back = backward(layer_block(llama_mini(), "layer", 0), FUSED, BF16)
    free = saved(back, {"self_attn.q_rotary": "recompute"}, BF16)
    assert free.recompute_ops == ("self_attn.q_proj", "self_attn.q_rotary")
    stopped = saved(back, {"self_attn.q_rotary": "recompute", "self_attn.q_proj": "keep"}, BF16)
    assert stopped.recompute_ops == ("self_attn.q_rotary",)
    assert "self_attn.q_proj" in {s.tensor.name for s in stopped.on_device}


def test_policies_that_cannot_be_followed_are_refused() -> None:
    back = backward(layer_block(llama_mini(), "layer", 0), FUSED, BF16)
    with pytest.raises(GraphError, match="'mlp.gat_proj' matches no tensor.*did you mean 'mlp.gate_proj'"):
        saved(back, {"mlp.gat_proj": "recompute"}, BF16)
    with pytest.raises(GraphError, match="input 'x' cannot be recomputed"):
        saved(back, {"x": "recompute"}, BF16)
    with pytest.raises(GraphError, match="use keep, recompute or offload"):
        saved(back, {"*": "forget"}, BF16)  # type: ignore[dict-item]


@given(data=st.data())
def test_any_policy_can_be_followed(data: st.DataObject) -> None:
    """Whatever is marked: nothing that backward reads is lost, and recomputing starts from tensors that exist."""
    block = layer_block(llama_mini(), "layer", 0)
    back = backward(block, data.draw(st.sampled_from([FUSED, UNFUSED, EAGER])), BF16)
    names = [t.name for t in back.forward.tensors if t.kind == "activation" and t.name not in block.inputs]
    marked = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(["keep", "recompute", "offload"])))
    made = saved(back, marked, BF16)  # type: ignore[arg-type]
    held = {s.tensor.name for s in (*made.on_device, *made.offloaded)}
    roots = storages(back.forward, BF16)
    ready = set(held)
    for path in made.recompute_ops:
        op = back.forward.op(path)
        for name in op.inputs:
            assert back.forward.tensor(roots[name]).kind != "activation" or roots[name] in ready
        ready |= set(op.outputs)
    assert {s.tensor.name for s in back.saved} <= ready


def test_frozen_weights_need_neither_gradient_nor_input() -> None:
    b = BlockBuilder("b")
    n, m, t = Dim(name="n", size=4), Dim(name="m", size=4), Dim(name="t", size=2)
    h = b.linear("up", b.input("x", t, n), out=(m,), contract=(n,), bias=False)
    block = b.build(b.linear("down", h, out=(n,), contract=(m,), bias=True))
    full = backward(block, FUSED, BF16)
    assert [(g.phase, g.path) for g in full.ops] == [
        ("input_grad", "down"),
        ("weight_grad", "down"),
        ("input_grad", "up"),
        ("weight_grad", "up"),
    ]
    frozen = backward(block, FUSED, BF16, frozen=("up.weight",))
    assert [s.tensor.name for s in frozen.saved] == ["up"]
    nothing = backward(block, FUSED, BF16, frozen=("up.weight",), no_grad_inputs=("x",))
    assert [(g.phase, g.path) for g in nothing.ops] == [("weight_grad", "down")]
    only_bias = block_work(block, FUSED, Setting(sizes={}, dtypes=BF16, causal_flops="full")).weight_grad
    bias = backward(block, FUSED, BF16, frozen=("up.weight", "down.weight"), no_grad_inputs=("x",))
    assert [(g.phase, g.reads) for g in bias.ops] == [("weight_grad", ())]
    assert only_bias.matmul_flops == 2 * 2 * (2 * 4 * 4)


@pytest.mark.parametrize("learned", [False, True])
def test_what_is_made_of_the_inputs_alone_wants_no_gradient_in_the_next_block(learned: bool) -> None:
    """As features of a graph's nodes that are averaged before the first linear."""
    rows, width, wide = Dim(name="batch"), Dim(name="width", size=6), Dim(name="wide", size=10)
    first, then = BlockBuilder("first"), BlockBuilder("then")
    x = first.input("x", rows, width)
    made = first.norm("norm", x, width, fn="rms", bias=False, affine=learned)
    out = then.linear("up", then.input("x", rows, width), out=(wide,), contract=(width,), bias=False)
    graph = Graph(
        name="features",
        inputs=(Tensor(name="x", dims=(rows, width)),),
        blocks=(first.build(made), then.build(out)),
        calls=(
            Call(block="first", name="first", inputs=(("x", "x"),)),
            Call(block="then", name="then", inputs=(("x", f"first.{made}"),)),
        ),
        outputs=(f"then.{out}",),
    )
    work = graph_work(graph, FUSED, Setting(sizes={"batch": 3}, dtypes=BF16, causal_flops="full"))
    product = 2 * 3 * 6 * 10
    assert (work.forward.matmul_flops, work.weight_grad.matmul_flops) == (product, product)
    assert work.input_grad.matmul_flops == (product if learned else 0)


def test_gradients_that_meet_are_added_up() -> None:
    back = backward(layer_block(llama_mini(), "layer", 0), FUSED, BF16)
    sums = {g.path: len(g.reads) for g in back.ops if g.phase == "accumulate"}
    assert sums == {"x": 2, "input_layernorm": 3, "attention_residual": 2, "post_attention_layernorm": 2}


@pytest.mark.parametrize(("q", "kv", "window"), [(5, 5, 0), (3, 9, 0), (5, 5, 2), (3, 9, 4), (4, 9, 7), (1, 1, 1)])
def test_causal_pairs_are_the_area_under_the_mask(q: int, kv: int, window: int) -> None:
    half = attention_pairs_x2(q, kv, causal=True, window=window, convention="half")
    positions = np.linspace(kv - q, kv, 10001)
    seen = np.minimum(positions, window) if window else positions
    area = float(np.sum((seen[1:] + seen[:-1]) / 2) * (positions[1] - positions[0]))
    assert half == pytest.approx(2 * area, rel=1e-6)
    assert attention_pairs_x2(q, kv, causal=True, window=window, convention="full") == 2 * q * kv


def test_half_of_a_causal_square_and_a_chunk_with_a_prefix() -> None:
    assert attention_pairs_x2(7, 7, causal=True, window=0, convention="half") == 49
    assert attention_pairs_x2(2, 6, causal=True, window=0, convention="half") == 36 - 16
    with pytest.raises(GraphError, match="keys include the queries' own"):
        attention_pairs_x2(6, 2, causal=True, window=0, convention="half")


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=6))
def test_pairs_of_arrays_agree_with_integers(cases: list[tuple[int, int, int]]) -> None:
    window = cases[0][2]
    q, kv = np.array([float(a) for a, _, _ in cases]), np.array([float(a + p) for a, p, _ in cases])
    for causal in (True, False):
        many = attention_pairs_x2(q, kv, causal=causal, window=window, convention="half")
        one = [attention_pairs_x2(a, a + p, causal=causal, window=window, convention="half") for a, p, _ in cases]
        assert np.asarray(many).tolist() == one


def test_half_convention_halves_attention_only() -> None:
    b, s, c = 1, 32, small_gpt(8, 2)
    half = block_work(gpt_layer(c), FUSED, setting(b, s, "half")).forward.matmul_flops
    assert half == 24 * b * s * 8 * 8 + 2 * b * s * s * 8
    eager = block_work(gpt_layer(c), UNFUSED, setting(b, s, "half")).forward
    assert eager.matmul_flops == half and eager.extra_matmul_flops == 2 * b * s * s * 8  # computed, then masked


def test_many_shapes_at_once() -> None:
    graph = llama(replace(llama_mini(), window=16))
    seqs = [8, 16, 64]
    for kernels in (FUSED, UNFUSED):
        many = Setting(sizes={"batch": 2, "seq": np.array(seqs)}, dtypes=BF16, causal_flops="half")
        total = graph_work(graph, kernels, many).total
        kept = graph_saved_bytes(graph, kernels, many, {})
        for i, s in enumerate(seqs):
            one = graph_work(graph, kernels, setting(2, s, "half")).total
            for field in ("matmul_flops", "extra_matmul_flops", "vector_flops", "read_bytes", "write_bytes"):
                assert np.asarray(getattr(total, field))[i] == getattr(one, field)
            assert np.asarray(kept)[i] == graph_saved_bytes(graph, kernels, setting(2, s, "half"), {})


def test_local_sizes_give_the_local_work() -> None:
    block = layer_block(llama_mini(), "layer", 0)
    whole = block_work(block, FUSED, setting(1, 16)).forward.matmul_flops
    sizes = {"batch": 1, "seq": 16, "heads": 2, "kv_heads": 1, "ffn": 64}  # tensor parallel over two ranks
    local = block_work(block, FUSED, Setting(sizes=sizes, dtypes=BF16, causal_flops="full")).forward.matmul_flops
    assert 2 * local == whole


def test_a_skip_is_kept_once_though_two_blocks_read_it() -> None:
    graph = unet(unet_tiny())
    s = Setting(sizes={"batch": 1}, dtypes=BF16, causal_flops="full")
    apart = sum(
        saved_bytes(backward(graph.block(c.block), FUSED, BF16), s, {}) * c.repeat
        for c in graph.calls  # type: ignore[misc]
    )
    together = graph_saved_bytes(graph, FUSED, s, {})
    time_embed = 2 * 32  # read by seven residual blocks
    assert apart - together >= 6 * time_embed


def test_bytes_of_a_linear() -> None:
    b = BlockBuilder("b")
    t, n, m = Dim(name="t", size=3), Dim(name="n", size=5), Dim(name="m", size=7)
    block = b.build(b.linear("up", b.input("x", t, n), out=(m,), contract=(n,), bias=False))
    work = block_work(block, FUSED, Setting(sizes={}, dtypes=BF16, causal_flops="full"))
    assert work.forward.read_bytes == 2 * (15 + 35) and work.forward.write_bytes == 2 * 21
    assert work.input_grad.read_bytes == 2 * (21 + 35) and work.input_grad.write_bytes == 2 * 15
    assert work.weight_grad.read_bytes == 2 * (21 + 15) and work.weight_grad.write_bytes == 2 * 35


@given(b=st.integers(1, 4), s=st.integers(1, 64), h=st.integers(1, 16))
def test_gelu_new_runs_in_steps_where_activations_do(b: int, s: int, h: int) -> None:
    """0.5 x, tanh and 1 + tanh beside what a fused one keeps: three tensors of 4h in two bytes."""
    layer = gpt_layer(replace(small_gpt(h, 1), activation="gelu_new"))
    steps, one = (
        saved_bytes(backward(layer, replace(UNFUSED, glu=how), BF16), setting(b, s), {})
        for how in (UNFUSED.glu, FUSED.glu)
    )
    assert steps - one == 3 * 2 * s * b * 4 * h


def test_a_squared_relu_is_two_ops_where_activations_are() -> None:
    """Both keep one tensor: its input fused, the ReLU's output in steps, which the square reads too."""
    layer = gpt_layer(replace(small_gpt(4, 1), activation="relu2"))
    steps, one = (backward(layer, replace(UNFUSED, glu=how), BF16) for how in (UNFUSED.glu, FUSED.glu))
    assert len(steps.forward.ops) == len(one.forward.ops) + 1
    assert saved_bytes(steps, setting(1, 8), {}) == saved_bytes(one, setting(1, 8), {})


@pytest.mark.parametrize("gated", [True, False])
@given(b=st.integers(1, 4), s=st.integers(1, 64))
def test_weighted_activations_keep_nothing_of_what_experts_put_out(gated: bool, b: int, s: int) -> None:
    """2 experts a token, 4096 wide, 14336 inside, bf16. A gate's product is weighted in its own kernel; another
    activation in one after it, which reads it unweighted once more in backward."""
    block = mixture_block(replace(mixtral_8x7b(), gated=gated))
    later, early = (backward(block, replace(FUSED, expert_weights=where), BF16) for where in ("output", "activation"))
    kept = [saved_bytes(back, setting(b, s), {}) for back in (later, early)]
    rows = 2 * s * b
    assert kept[0] - kept[1] == 2 * rows * (4096 - (0 if gated else 14336))
