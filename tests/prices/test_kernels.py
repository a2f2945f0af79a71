"""The price of each op kind: which products a gradient is, what is free, and that whole models have prices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gnomon.errors import UnpricedError
from gnomon.graph import (
    BF16,
    FUSED,
    UNFUSED,
    BackwardBlock,
    Block,
    BlockBuilder,
    Dim,
    Dtypes,
    GradOp,
    Kernels,
    Op,
    Setting,
    backward,
    call_backward,
    forward_work,
    grad_work,
)
from gnomon.hardware import catalogue
from gnomon.models.gpt import GptConfig, gpt
from gnomon.models.presets import PRESETS, model
from gnomon.prices import (
    FREE,
    OpPrice,
    attention_seconds,
    cast_weight_seconds,
    curves_for,
    gemm_seconds,
    grad_seconds,
    op_seconds,
    stream_seconds,
)
from gnomon.prices.kernels import (
    GROUPED_SHARE,
    MXFP8_TIME,
    ODD_ROWS_SHARE,
    Cast,
    Experts,
    Low,
    fused_dropout_seconds,
)

H100, A100 = catalogue.device("h100-sxm-80gb"), catalogue.device("a100-sxm-80gb")
CURVES = curves_for(H100, attention="flash3")
BATCH, SEQ = Dim(name="batch"), Dim(name="seq")
SIZES = {"batch": 2, "seq": 1024}
SETTING = Setting(sizes=SIZES, dtypes=BF16, causal_flops="half")
HIDDEN, FFN = Dim(name="hidden", size=4096), Dim(name="ffn", size=14336)


def gemm(m: int, n: int, k: int, batch: int = 1, moved: int | None = None) -> float:
    price = gemm_seconds(m, n, k, batch, dtype="bf16", device=H100, curves=CURVES, moved_bytes=moved)
    assert isinstance(price, float)
    return price


def one_linear(bias: bool = False) -> BackwardBlock:
    b = BlockBuilder("one")
    x = b.input("x", BATCH, SEQ, HIDDEN)
    return backward(b.build(b.linear("up", x, out=(FFN,), contract=(HIDDEN,), bias=bias)), FUSED, BF16)


def forward_of(block: Block, path: str, setting: Setting = SETTING) -> OpPrice:
    return op_seconds(block.op(path), block, setting, H100, CURVES)


def step(back: BackwardBlock, phase: str) -> GradOp:
    return next(grad for grad in back.ops if grad.phase == phase)


def test_a_linear_is_three_products_of_the_same_work() -> None:
    """2048 tokens, 4096 -> 14336: y = x Wᵀ, dx = dy W, dW = dyᵀ x."""
    back = one_linear()
    block = back.forward
    assert forward_of(block, "up") == OpPrice(device_s=gemm(2048, 14336, 4096), kernels=1)
    for phase, shape in (("input_grad", (2048, 4096, 14336)), ("weight_grad", (14336, 4096, 2048))):
        assert grad_seconds(step(back, phase), block, SETTING, H100, CURVES) == OpPrice(
            device_s=gemm(*shape), kernels=1
        )


def test_a_vocabulary_of_an_odd_number_of_rows_halves_the_speed_of_all_three_products() -> None:
    """GPT-2's 50257, and 50258 beside it."""

    def prices(vocab: int) -> list[float]:
        b = BlockBuilder("head")
        x = b.input("x", BATCH, SEQ, HIDDEN)
        back = backward(
            b.build(b.linear("up", x, out=(Dim(name="vocab", size=vocab),), contract=(HIDDEN,), bias=False)),
            FUSED,
            BF16,
        )
        grads = [
            grad_seconds(step(back, p), back.forward, SETTING, H100, CURVES) for p in ("input_grad", "weight_grad")
        ]
        return [float(price.device_s) for price in (forward_of(back.forward, "up"), *grads)]

    for odd, even in zip(prices(50257), prices(50258), strict=True):
        assert odd * ODD_ROWS_SHARE == pytest.approx(even, rel=1e-3)


def test_attention_op_by_op_loses_tensor_cores_with_heads_that_are_not_of_eight_elements() -> None:
    """BLOOM tried heads of 108 (13824 / 128): the batched products are as slow as fp32's."""

    def products(head_dim: int) -> float:
        sizes = {"num_layers": 1, "num_heads": 8, "hidden_size": 8 * head_dim, "ffn_size": 32 * head_dim}
        made = gpt(GptConfig(name="g", **sizes, vocab_size=512, max_positions=1024))
        block = next(b for b in made.blocks if any(op.kind == "attention" for op in b.ops))
        back = backward(block, UNFUSED, BF16)
        steps = [op for op in back.forward.ops if op.kind == "matmul"]
        setting = Setting(sizes={"batch": 4, "seq": 1024}, dtypes=BF16, causal_flops="half")
        return sum(float(op_seconds(op, back.forward, setting, H100, CURVES).device_s) for op in steps)

    assert products(108) > 4 * products(104)
    assert products(104) < products(112) < 1.2 * products(104)


def test_a_bias_costs_nothing_forward_and_a_sum_over_rows_backward() -> None:
    plain, biased = one_linear(), one_linear(bias=True)
    assert forward_of(biased.forward, "up").kernels == 1
    weight = grad_seconds(step(biased, "weight_grad"), biased.forward, SETTING, H100, CURVES)
    without = grad_seconds(step(plain, "weight_grad"), plain.forward, SETTING, H100, CURVES)
    summed = stream_seconds(2048 * 14336 * 2, 0, H100, CURVES, kind="reduce")
    assert weight.kernels == 2
    assert weight.device_s == pytest.approx(without.device_s + summed, rel=1e-3)


def test_a_softmax_fused_with_a_causal_mask_reads_half_of_the_scores() -> None:
    """16 heads of 128, two sequences of 1024: 2 x 16 x 1024² scores of 2 bytes, read up to the diagonal, all written;
    backward the same of probabilities and of their gradients."""
    width, heads = Dim(name="head_dim", size=128), Dim(name="heads", size=16)
    size = 2 * 16 * 1024**2 * 2
    for causal, share in ((True, 0.5), (False, 1.0)):
        b = BlockBuilder("one")
        q, k, v = (b.input(name, BATCH, SEQ, heads, width) for name in "qkv")
        back = backward(b.build(b.attention("core", q, k, v, causal=causal)), UNFUSED, BF16)
        result = forward_of(back.forward, "core:probs").device_s
        assert result == pytest.approx(stream_seconds(share * size, size, H100, CURVES, kind="reduce"), rel=1e-3)
        grad = next(g for g in back.ops if g.path == "core:probs")
        result = grad_seconds(grad, back.forward, SETTING, H100, CURVES).device_s
        assert result == pytest.approx(stream_seconds(share * 2 * size, size, H100, CURVES, kind="reduce"), rel=1e-3)


def test_a_dropout_fused_with_the_addition_after_it_writes_its_mask_and_no_more() -> None:
    b = BlockBuilder("one")
    x = b.input("x", BATCH, SEQ, HIDDEN)
    block = backward(b.build(b.add("sum", x, b.dropout("drop", x, 0.1))), FUSED, BF16).forward
    result = fused_dropout_seconds(block.op("drop"), block, SETTING, H100, CURVES)
    assert result.kernels == 0
    assert 2048 * 4096 / H100.memory_bytes_per_s <= result.device_s < forward_of(block, "drop").device_s / 3


def test_fp8_halves_large_products_and_adds_casts() -> None:
    back = one_linear()
    block, op = back.forward, back.forward.op("up")
    low = op_seconds(op, block, SETTING, H100, CURVES, fp8=True)
    product = gemm_seconds(2048, 14336, 4096, dtype="fp8", device=H100, curves=CURVES)
    cast = stream_seconds(2048 * 4096 * 2, 2048 * 4096 * 2, H100, CURVES, kernels=2)
    assert low.kernels == 3
    assert low.device_s == pytest.approx(product + cast)
    assert low.device_s < 0.75 * forward_of(block, "up").device_s
    weight = cast_weight_seconds(op, block, SETTING, H100, CURVES, rowwise=False)
    assert weight.device_s == stream_seconds(14336 * 4096 * 2, 14336 * 4096 * 2, H100, CURVES, kernels=2)
    with pytest.raises(UnpricedError, match="no peak for 'fp8'"):
        op_seconds(op, block, SETTING, A100, curves_for(A100), fp8=True)


def experts_block() -> BackwardBlock:
    """1024 rows over 8 experts, 4096 -> 14336."""
    b = BlockBuilder("experts")
    rows = b.input("rows", BATCH, SEQ, Dim(name="topk", size=2), HIDDEN)
    out = b.experts("up", rows, experts=Dim(name="experts", size=8), out=FFN, contract=HIDDEN)
    return backward(b.build(out), FUSED, BF16)


def test_experts_are_a_batch_of_products_over_their_rows() -> None:
    """4096 rows of 2048 tokens: 512 for each of 8 experts. A load of 2 is 1024 rows each."""
    back = experts_block()
    block, op = back.forward, back.forward.op("up")
    moved = 2 * (4096 * 4096 + 8 * 4096 * 14336 + 4096 * 14336)
    alone = gemm(512, 14336, 4096, 8, moved)
    assert forward_of(block, "up").device_s == pytest.approx(alone / GROUPED_SHARE)
    busy = op_seconds(op, block, SETTING, H100, CURVES, load=2.0)
    assert busy.device_s == pytest.approx(2 * forward_of(block, "up").device_s, rel=0.1)
    weight = grad_seconds(step(back, "weight_grad"), block, SETTING, H100, CURVES)
    assert weight.device_s == pytest.approx(gemm(14336, 4096, 512, 8, moved) / GROUPED_SHARE)


def test_experts_in_a_loop_take_as_long_as_each_by_itself() -> None:
    """Eight products of 512 rows, one after another. Transformer Engine 2.7 on H100 (pull request 2045, 2025): 16
    experts of 2048 rows, 768 by 2048, at 554 TFLOP/s, 8 of 4096 at 628."""
    back = experts_block()
    moved = 2 * (512 * 4096 + 4096 * 14336 + 512 * 14336)
    looped = op_seconds(back.forward.op("up"), back.forward, SETTING, H100, CURVES, experts="looped")
    assert looped.device_s == pytest.approx(8 * gemm(512, 14336, 4096, 1, moved))
    for experts, rows, tflops in ((8, 4096, 627.9), (16, 2048, 553.9)):
        assert 2 * rows * 768 * 2048 / gemm(rows, 768, 2048) / 1e12 == pytest.approx(tflops, rel=0.05), experts


def test_a_scale_for_32_numbers_makes_products_of_a_library_longer_and_not_those_of_fused_experts() -> None:
    """1.05 times one scale a tensor; casts are the same."""
    b200, block = catalogue.device("b200-sxm-180gb"), experts_block().forward
    curves, known = curves_for(b200), Cast(again=True)

    def seconds(experts: Experts, low: Low) -> float:
        result = op_seconds(block.op("up"), block, SETTING, b200, curves, fp8=low, cast=known, experts=experts)
        return float(result.device_s)

    assert seconds("looped", "mxfp8") == pytest.approx(MXFP8_TIME * seconds("looped", "fp8"))
    assert seconds("fused", "mxfp8") == pytest.approx(seconds("fused", "fp8"))


def test_one_expert_is_an_ordinary_product() -> None:
    """2048 tokens, each once to the only expert of this rank."""
    b = BlockBuilder("experts")
    rows = b.input("rows", BATCH, SEQ, Dim(name="topk", size=1), HIDDEN)
    out = b.experts("up", rows, experts=Dim(name="experts", size=1), out=FFN, contract=HIDDEN)
    block = backward(b.build(out), FUSED, BF16).forward
    moved = 2 * (2048 * 4096 + 4096 * 14336 + 2048 * 14336)
    assert forward_of(block, "up").device_s == pytest.approx(gemm(2048, 14336, 4096, 1, moved))


def attention_block(kernels: Kernels = FUSED) -> BackwardBlock:
    b = BlockBuilder("core")
    heads, kv_heads, width = Dim(name="heads", size=32), Dim(name="kv_heads", size=8), Dim(name="head_dim", size=128)
    q = b.input("q", BATCH, SEQ, heads, width)
    k, v = (b.input(name, BATCH, SEQ, kv_heads, width) for name in "kv")
    return backward(b.build(b.attention("core", q, k, v, causal=True)), kernels, BF16)


def test_flash_attention_is_one_kernel_forward_and_three_backward() -> None:
    back = attention_block()
    for is_backward, price, kernels in (
        (False, forward_of(back.forward, "core"), 1),
        (True, grad_seconds(step(back, "input_grad"), back.forward, SETTING, H100, CURVES), 3),
    ):
        seconds = attention_seconds(
            2, 1024, 1024, 32, 8, 128, causal=True, backward=is_backward, device=H100, curves=CURVES
        )
        assert price == OpPrice(device_s=seconds, kernels=kernels)


def test_a_narrow_backward_skips_no_window() -> None:
    """GB200, 256 sequences x heads of 64 and length 4096 in MXFP8: 2.08 ms, over four times what bf16 takes, where a
    window of 128 keys is most of the work saved (NVIDIA/cudnn-frontend, results of gpt_oss)."""
    gb200 = catalogue.device("gb200-nvl72")
    curves, setting = (
        curves_for(gb200, attention="cudnn"),
        Setting(sizes={"batch": 2, "seq": 4096}, dtypes=BF16, causal_flops="half"),
    )
    b = BlockBuilder("windowed")
    q, k, v = (b.input(n, BATCH, SEQ, Dim(name="heads", size=128), Dim(name="head_dim", size=64)) for n in "qkv")
    back = backward(b.build(b.attention("core", q, k, v, causal=True, window=128)), FUSED, BF16)
    wide, narrow = (
        grad_seconds(step(back, "input_grad"), back.forward, setting, gb200, curves, fp8=low).device_s
        for low in (False, True)
    )
    assert wide == pytest.approx(0.465e-3, rel=0.1) and narrow == pytest.approx(2.08e-3, rel=0.1)


def test_a_context_parallel_rank_works_on_its_share() -> None:
    """cp = 4, zigzag: a quarter of the pairs of 32k tokens; the last quarter of the queries sees 7/16 of them."""
    block = attention_block().forward
    sizes = {"batch": 1, "seq": 8192, "kv_seq": 32768}
    setting = replace(SETTING, sizes=sizes)
    zigzag = op_seconds(block.op("core"), block, setting, H100, CURVES, causal_share=0.25)
    last = op_seconds(block.op("core"), block, setting, H100, CURVES)
    assert last.device_s / zigzag.device_s == pytest.approx(7 / 4, rel=0.02)


def test_unfused_attention_costs_more_the_longer_the_sequence() -> None:
    """Scores of s² elements are written and read again."""
    ratios = []
    for seq in (1024, 8192):
        setting = replace(SETTING, sizes={"batch": 1, "seq": seq})
        unfused = attention_block(UNFUSED).forward
        total = sum((op_seconds(op, unfused, setting, H100, CURVES) for op in unfused.ops), FREE)
        ratios.append(total.device_s / forward_of(attention_block().forward, "core", setting).device_s)
    assert 2 < ratios[0] < ratios[1]


def test_views_and_casts_to_the_same_dtype_are_free() -> None:
    b = BlockBuilder("views")
    x = b.input("x", BATCH, SEQ, HIDDEN)
    half = {name: (BATCH, SEQ, Dim(name=f"{name}_half", size=2048)) for name in ("left", "right")}
    left, right = b.split("halves", x, half)
    same = b.op("cast", "same", (left,))
    wide = b.op("cast", "wide", (right,), dtype="fp32")
    block = b.build(same, wide)
    assert forward_of(block, "halves") == forward_of(block, "same") == FREE
    assert forward_of(block, "wide").device_s == stream_seconds(2048 * 2048 * 2, 2048 * 2048 * 4, H100, CURVES)


def test_three_readers_of_a_tensor_are_two_sums() -> None:
    b = BlockBuilder("readers")
    x = b.input("x", BATCH, SEQ, HIDDEN)
    back = backward(b.build(*(b.op("activation", f"a{i}", (x,), fn="gelu") for i in range(3))), FUSED, BF16)
    price = grad_seconds(step(back, "accumulate"), back.forward, SETTING, H100, CURVES)
    size = 2048 * 4096 * 2
    assert price == OpPrice(device_s=stream_seconds(4 * size, 2 * size, H100, CURVES, kernels=2), kernels=2)


def prices_of(name: str, kernels: Kernels, setting: Setting) -> list[tuple[Op | GradOp, OpPrice, float]]:
    """Each op and gradient step of a model, its price, and the FLOPs of products that it must do."""
    graph = model(name)
    priced: list[tuple[Op | GradOp, OpPrice, float]] = []
    for call in graph.calls:
        back = call_backward(graph, call, kernels, setting)
        for op in back.forward.ops:
            work = forward_work(op, back.forward, setting)
            priced.append((op, op_seconds(op, back.forward, setting, H100, CURVES), work.matmul_flops))  # type: ignore[arg-type]
        for grad in back.ops:
            work = grad_work(grad, back.forward, setting)
            priced.append((grad, grad_seconds(grad, back.forward, setting, H100, CURVES), work.matmul_flops))  # type: ignore[arg-type]
    return priced


def sizes_of(name: str) -> dict[str, int]:
    graph = model(name)
    open_dims = {atom.name for block in graph.blocks for atom in block.dims if atom.size is None and not atom.same_as}
    return {dim: 1 if dim == "batch" else 64 if "image" in dim or "latent" in dim else 512 for dim in open_dims}


@pytest.mark.parametrize("kernels", [FUSED, UNFUSED], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_op_of_every_model_has_a_price_over_its_roofline(name: str, kernels: Kernels) -> None:
    setting = Setting(sizes=sizes_of(name), dtypes=BF16, causal_flops="half")
    peak = H100.flops_per_s("bf16")
    for op, price, flops in prices_of(name, kernels, setting):
        assert flops / peak <= price.device_s < 60, op
        assert (price.device_s > 0) == (price.kernels > 0), op


def test_arrays_of_sizes_price_many_contexts_at_once() -> None:
    name = "llama-3.1-8b"
    lengths = np.array([128, 4096, 8192])
    many = prices_of(name, FUSED, replace(SETTING, sizes={"batch": 1, "seq": lengths}))
    for i, seq in enumerate(lengths.tolist()):
        one = prices_of(name, FUSED, replace(SETTING, sizes={"batch": 1, "seq": seq}))
        for (op, price, _), (_, expected, _) in zip(many, one, strict=True):
            value = np.broadcast_to(price.device_s, lengths.shape)[i]
            assert value == pytest.approx(expected.device_s, rel=1e-9), op
            assert price.kernels == expected.kernels


def test_fp32_products_run_at_fp32_rates() -> None:
    back = one_linear()
    fp32 = replace(SETTING, dtypes=Dtypes(compute="fp32", param="fp32"))
    work = 2 * 2048 * 4096 * 14336
    assert op_seconds(back.forward.op("up"), back.forward, fp32, H100, CURVES).device_s > work / 66.9e12


def test_load_stretches_the_rows_of_experts_only() -> None:
    """Mixtral: the experts' activation works on rows, the norm before them does not."""
    graph = model("mixtral-8x7b")
    block = call_backward(graph, next(c for c in graph.calls if c.name == "layers"), FUSED, SETTING).forward
    for kind, ratio in (("glu", 3.0), ("norm", 1.0)):
        op = next(op for op in block.ops if op.kind == kind)
        plain, loaded = (op_seconds(op, block, SETTING, H100, CURVES, load=load).device_s for load in (1.0, 3.0))
        assert loaded / plain == pytest.approx(ratio, rel=0.05)


def test_a_table_of_embeddings_gets_zeros_and_the_rows_that_were_read() -> None:
    """A table four times as large costs the writing of the rest, nothing more; twice the tokens cost twice the rows."""

    def gradient(rows: int, tokens: int) -> float:
        made = gpt(GptConfig(name="g", num_layers=1, num_heads=8, hidden_size=1024, vocab_size=rows, max_positions=64))
        block = next(b for b in made.blocks if any(op.kind == "embedding" for op in b.ops))
        back = backward(block, FUSED, BF16)
        setting = Setting(sizes={"batch": tokens // 64, "seq": 64}, dtypes=BF16, causal_flops="half")
        grads = [g for g in back.ops if g.phase == "weight_grad" and block.op(g.path).kind == "embedding"]
        return sum(float(grad_seconds(g, back.forward, setting, H100, CURVES).device_s) for g in grads)

    written = stream_seconds(0, 1024 * 2 * (400_000 - 100_000), H100, CURVES)
    assert gradient(400_000, 8192) - gradient(100_000, 8192) == pytest.approx(written, rel=0.02)
    assert gradient(100_000, 16384) < 2 * gradient(100_000, 8192)
    assert gradient(100_000, 16384) - gradient(100_000, 8192) > 0.5 * gradient(8192, 8192)
