"""What the graphs of the families are made of: wiring, shapes and FLOPs that a reader can check by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph.of_blocks import block_work

from gnomon.errors import CatalogueError, GraphError
from gnomon.graph import BF16, FUSED, UNFUSED, Setting, backward, graph_saved_bytes, graph_work, nbytes
from gnomon.models import bert, deepseek, dit, gemma, gpt, llama, mixtral, t5, unet, vit
from gnomon.models.presets import PRESETS, model


def setting(**sizes: int) -> Setting:
    return Setting(sizes=sizes, dtypes=BF16, causal_flops="full")


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("kernels", [FUSED, UNFUSED], ids=["fused", "unfused"])
def test_every_preset_has_a_backward_of_about_twice_its_forward(name: str, kernels: object) -> None:
    graph = model(name)
    assert graph.name == name
    work = graph_work(graph, kernels, setting(batch=2, seq=128, enc_seq=128))  # type: ignore[arg-type]
    forward = work.forward.matmul_flops
    assert 1.97 * forward < work.input_grad.matmul_flops + work.weight_grad.matmul_flops <= 2 * forward  # type: ignore[operator]
    assert graph_saved_bytes(graph, kernels, setting(batch=2, seq=128, enc_seq=128), {}) > 0  # type: ignore[arg-type]


def test_an_unknown_model_is_named_with_the_nearest() -> None:
    with pytest.raises(CatalogueError, match="unknown model 'llama-3.1-9b'.*'llama-3.1-8b'"):
        model("llama-3.1-9b")


def test_llama_8b_linear_flops_per_token_are_twice_its_matrices() -> None:
    graph = llama.llama(llama.llama3_1_8b())
    matrices = sum(
        tensor.dims[0].size * tensor.dims[1].size * (tensor.dims[2].size if len(tensor.dims) > 2 else 1)  # type: ignore[operator,misc]
        for name, tensor in graph.parameters().items()
        if len(tensor.dims) > 1 and "embed_tokens" not in name
    )
    s = 256
    forward = graph_work(graph, FUSED, setting(batch=1, seq=s)).forward.matmul_flops
    assert forward == 2 * matrices * s + 32 * 4 * s * s * 4096


def test_grouped_heads_have_their_own_dim_and_full_heads_share_one() -> None:
    grouped = llama.llama(llama.llama3_1_8b()).block("layers")
    assert [d.name for d in grouped.tensor("self_attn.k_proj.weight").dims] == ["kv_heads", "head_dim", "hidden"]
    full = llama.llama(llama.llama2_7b()).block("layers")
    assert [d.name for d in full.tensor("self_attn.k_proj.weight").dims] == ["heads", "head_dim", "hidden"]


def test_windows_start_where_qwen2_says() -> None:
    c = replace(llama.llama_mini(), window=8, full_layers=1)
    graph = llama.llama(c)
    assert [layer.label for layer in graph.layers()] == ["embed", "layers[0]", "layers[1]", "head"]
    windows = [graph.block(call.block).op("self_attn.core").attr("window", 0) for call in graph.calls[1:-1]]
    assert windows == [0, 8]
    assert graph.num_parameters() == llama.llama(llama.llama_mini()).num_parameters()


def test_gemma_alternates_windows_and_ties() -> None:
    graph = gemma.gemma2(gemma.gemma2_2b())
    windows = [graph.block(call.block).op("self_attn.core").attr("window", 0) for call in graph.calls[1:5]]
    assert windows == [4096, 0, 4096, 0]
    assert [layer.label for layer in graph.layers()][1:3] == ["layers[0]", "layers[1]"]
    assert "lm_head.weight" not in graph.parameters()
    core = graph.block("layer_full").op("self_attn.core")
    assert core.attr("softcap", 0.0) == 50.0 and core.attr("scale", 0.0) == 256**-0.5


def test_gemma_4_reads_keys_as_values_where_it_sees_all_tokens() -> None:
    graph = model("gemma-4-31b")
    windows = [graph.block(layer.call.block).op("self_attn.core").attr("window", 0) for layer in graph.layers()[1:13]]
    assert windows == [*[1024] * 5, 0] * 2
    full, windowed = graph.block("layers"), graph.block("layers_windowed")
    values = [any(tensor.name == "self_attn.v_proj.weight" for tensor in b.tensors) for b in (full, windowed)]
    assert values == [False, True]
    query, key, value = full.op("self_attn.core").inputs
    assert value == full.op("self_attn.k_norm").inputs[0] and query != key != value
    shapes = [[d.size for d in b.tensor("self_attn.k_proj.weight").dims] for b in (full, windowed)]
    assert shapes == [[4, 512, 5376], [16, 256, 5376]]


def test_gemma_4_adds_experts_to_a_dense_feed_forward() -> None:
    block = model("gemma-4-26b-a4b").block("layers_moe")
    assert [d.size for d in block.tensor("mlp.shared_experts.up_proj.weight").dims] == [2112, 2816]
    assert block.op("mlp.sum").inputs[1].startswith("mlp.shared_experts")


def test_mixtral_routes_each_token_to_two_experts() -> None:
    c = mixtral.mixtral_8x7b()
    block = mixtral.layer_block(c)
    b, s, h, f = 2, 16, 4096, 14336
    attention = 2 * b * s * h * (2 * h + 2 * 8 * 128) + 4 * b * s * s * h
    routed = 2 * b * s * h * 8 + 3 * 2 * b * s * 2 * h * f
    assert block_work(block, FUSED, setting(batch=b, seq=s)).forward.matmul_flops == attention + routed
    weight = block.tensor("block_sparse_moe.experts.w1.weight")
    assert [d.name for d in weight.dims] == ["experts", "expert_ffn", "hidden"]


def test_deepseek_layers_by_hand() -> None:
    graph = deepseek.deepseek_v3(deepseek.deepseek_v3_671b())
    assert [(c.name, c.repeat, c.first) for c in graph.calls[1:3]] == [("dense_layers", 3, 0), ("moe_layers", 58, 3)]
    h, s, a = 7168, 8, 128
    mla = h * 1536 + 1536 * a * 192 + h * 576 + 512 * a * 256 + a * 128 * h
    scores = 2 * a * s * s * (192 + 128)
    moe = 256 * h + (8 + 1) * 3 * h * 2048
    work = block_work(graph.block("moe_layers"), FUSED, setting(batch=1, seq=s))
    assert work.forward.matmul_flops == 2 * s * (mla + moe) + scores
    dense = block_work(graph.block("dense_layers"), FUSED, setting(batch=1, seq=s))
    assert dense.forward.matmul_flops == 2 * s * (mla + 3 * h * 18432) + scores


def test_deepseeks_choosing_bias_gets_no_gradient() -> None:
    block = deepseek.deepseek_v3(deepseek.deepseek_v3_671b()).block("moe_layers")
    written = {name for grad in backward(block, FUSED, BF16).ops for name in grad.grads_out}
    assert "mlp.gate.e_score_correction_bias" not in written
    assert "mlp.gate.weight" in written


def test_multi_token_prediction_shares_embedding_and_head() -> None:
    graph = deepseek.deepseek_v3(deepseek.deepseek_v3_671b(mtp_modules=1))
    assert graph.outputs == ("head.loss", "mtp.loss")
    assert "model.layers.61.eh_proj.weight" in graph.parameters()
    assert not any(name.endswith("shared_head.head.weight") for name in graph.parameters())


def test_t5_decoder_layers_all_read_the_encoder_which_is_kept_once() -> None:
    graph = t5.t5(t5.t5_base())
    decoder = graph.call("decoder_layers")
    assert dict(decoder.inputs)["memory"] == "encoder_norm.memory"
    assert dict(decoder.chain) == {"y": "x"}
    s = setting(batch=1, seq=16, enc_seq=64)
    kept = backward(graph.block("decoder_layers"), FUSED, BF16).saved
    assert {"x", "memory", "bias"} == {e.tensor.name for e in kept if e.where == "input"}
    own = sum(nbytes(e.tensor, s.sizes, BF16) for e in kept if e.tensor.name not in ("memory", "bias"))
    eleven = t5.t5(replace(t5.t5_base(), num_decoder_layers=11))
    one_more = graph_saved_bytes(graph, FUSED, s, {}) - graph_saved_bytes(eleven, FUSED, s, {})
    assert one_more == own  # the twelfth layer reads the same memory and bias as the others


def test_t5_cross_attention_flops_use_both_lengths() -> None:
    c = replace(t5.t5_small(), dropout=0.0)
    block = t5.t5(c).block("decoder_layers")
    s, e, h, f = 8, 32, 512, 2048
    own = 2 * s * 4 * h * h + 4 * s * s * h
    cross = 2 * s * 2 * h * h + 2 * e * 2 * h * h + 4 * s * e * h
    ffn = 2 * s * 2 * h * f
    for kernels in (FUSED, UNFUSED):
        work = block_work(block, kernels, setting(batch=1, seq=s, enc_seq=e))
        assert work.forward.matmul_flops == own + cross + ffn


def test_bert_and_vit_attend_in_both_directions() -> None:
    for block in (bert.bert(bert.bert_base()).block("layers"), vit.vit(vit.vit_b16()).block("layers")):
        (core,) = (op for op in block.ops if op.kind == "attention")
        assert core.attr("causal", True) is False


def test_vit_tokens_follow_from_the_image() -> None:
    assert vit.vit_b16().seq.size == 197
    with pytest.raises(GraphError, match="image_size=225 is not a multiple of patch_size=16: the nearest is 224"):
        replace(vit.vit_b16(), image_size=225)


def test_vit_b16_multiply_adds() -> None:
    # torchvision lists 17.56 G multiply-adds for vit_b_16 at 224: 197 tokens, 12 layers of 768.
    n, h = 197, 768
    expected = 196 * h * 768 + 12 * (12 * n * h * h + 2 * n * n * h) + h * 1000
    work = graph_work(vit.vit(vit.vit_b16()), FUSED, setting(batch=1))
    assert work.forward.matmul_flops == 2 * expected
    assert round(expected / 1e9, 2) == 17.56


def test_dit_multiply_adds_of_the_paper() -> None:
    # Peebles and Xie 2023, table 1 (thousand-class, 256): DiT-XL/2 118.64, DiT-B/4 5.56 "Gflops", as multiply-adds.
    for config, published in ((dit.dit_xl_2(), 118.64), (dit.dit_b_4(), 5.56)):
        flops = graph_work(dit.dit(config), FUSED, setting(batch=1)).forward.matmul_flops
        assert flops / 2e9 == pytest.approx(published, rel=2e-3)  # type: ignore[operator]


def test_unet_skips_lead_from_down_to_up() -> None:
    graph = unet.unet(unet.ddpm_cifar10())
    skips = {c.name: dict(c.inputs)["skip"] for c in graph.calls if "skip" in dict(c.inputs)}
    assert len(skips) == 12  # three a level
    assert skips["up_3_0"] == "down_3_1.y" and skips["up_0_2"] == "conv_in.y"
    assert graph.block("down_0_0").op("conv1").contracts == ("channels.conv_in", "kernel_h.3", "kernel_w.3")


def test_a_convolution_by_hand() -> None:
    c = unet.unet_tiny()
    (block,) = (b for b in unet.unet(c).blocks if b.name == "conv_in")
    work = block_work(block, FUSED, setting(batch=2), no_grad_inputs=("image",))
    assert work.forward.matmul_flops == 2 * 2 * 8 * 8 * 8 * 3 * 9
    assert work.weight_grad.matmul_flops == work.forward.matmul_flops
    assert work.input_grad.matmul_flops == 0  # no gradient into the image


def test_neox_reads_one_residual_twice() -> None:
    parallel = gpt.gpt_neox_layer(gpt.pythia_1_4b())
    assert parallel.op("post_attention_layernorm").inputs[0] == "x"
    after = gpt.gpt_neox_layer(replace(gpt.pythia_1_4b(), parallel_residual=False))
    assert after.op("post_attention_layernorm").inputs[0] == "attention_residual"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"head_dim": True}, "head_dim is True"),
    ],
)
def test_impossible_configs_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        llama.llama(replace(llama.llama_mini(), **change))  # type: ignore[arg-type]


def test_windows_of_a_mixture_alternate() -> None:
    """GPT-OSS: the first of every two layers sees 128 tokens; parameters are those without windows."""
    config = replace(mixtral.mixtral_8x7b(), num_layers=5, window=128, windowed_every=2)
    graph = mixtral.mixtral(config)
    windows = [
        next(op for op in graph.block(layer.call.block).ops if op.kind == "attention").attr("window", 0)
        for layer in graph.layers()
        if layer.call.family == "layers"
    ]
    assert windows == [128, 0, 128, 0, 128]
    plain = mixtral.mixtral(replace(config, window=0))
    assert len(plain.layers()) == len(graph.layers())
