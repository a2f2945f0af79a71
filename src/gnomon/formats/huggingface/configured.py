"""Hugging Face configs of decoders that have a config of our own: Llama's kin, GPT's, Mixtral's and DeepSeek's.

As in `huggingface.decoders`. Their readers return a config, which job files of other programs are written from too.
Leaves out encoders (`encoders`).
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.formats.huggingface.model_type import ModelType, class_sizes
from gnomon.formats.huggingface.numerics import GPT, LAYER_NORM, SHARED, Usual
from gnomon.formats.huggingface.parts import (
    ACTIVATIONS,
    QUANTISED,
    SILU,
    Notes,
    ReadOptions,
    balance_loss,
    biases_of,
    cap,
    check_layer_types,
    deepseek_of,
    heads_of,
    optional_window,
    sizes_of,
)
from gnomon.formats.huggingface.weights import CONV1D, TABLES, USUAL, Family
from gnomon.formats.keys import Keys
from gnomon.graph import Graph
from gnomon.models import deepseek, gemma, gpt, llama, mixtral


def _llama(k: Keys, name: str, options: ReadOptions, notes: Notes) -> llama.LlamaConfig:
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("pretraining_tp", 1, 2, 4, 8)  # splits matrices to reproduce rounding; same work
    k.ignore("max_position_embeddings")
    return llama.LlamaConfig(
        name=name,
        **sizes_of(k),
        **biases_of(k),
        activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _mistral(k: Keys, name: str, options: ReadOptions, notes: Notes) -> llama.LlamaConfig:
    window = optional_window(k, 4096)
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings")
    return llama.LlamaConfig(
        name=name,
        **sizes_of(k),
        window=window,
        activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _qwen_window(k: Keys, layers: int) -> tuple[int, int]:
    """(window, number of first layers without it) of Qwen2 and Qwen3; unused unless use_sliding_window."""
    used = k.flag("use_sliding_window", False)
    k.ignore("sliding_window", "max_window_layers")
    # Qwen's files give a window although use_sliding_window is false; transformers sets it to None then.
    window = k.integer("sliding_window", 4096) if used else 0
    # The first layers see everything: layer i has a window from max_window_layers on.
    full = k.integer("max_window_layers", 28, least=0) if used else 0
    check_layer_types(k, [("sliding" if used and i >= full else "full") + "_attention" for i in range(layers)])
    return window, full


def _qwen(k: Keys, name: str, options: ReadOptions, notes: Notes, *, third: bool) -> llama.LlamaConfig:
    hidden, layers = k.integer("hidden_size"), k.integer("num_hidden_layers")
    heads = k.integer("num_attention_heads")
    kv_heads = k.integer("num_key_value_heads")
    # Qwen3's class has 128 whatever the width; Qwen2's divides.
    head_dim = k.integer("head_dim", 128) if third else heads_of(k, hidden)[2]
    window, full = _qwen_window(k, layers)
    bias = k.flag("attention_bias", False) if third else False
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings", "use_mrope")
    return llama.LlamaConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=k.integer("intermediate_size"),
        vocab_size=k.integer("vocab_size"),
        tied=k.flag("tie_word_embeddings", False),
        # Qwen2's q, k and v always have biases and its output none; no key says so.
        qkv_bias=bias if third else True,
        out_bias=bias,
        qk_norm=third,
        window=window,
        full_layers=full,
        activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _qwen2(k: Keys, name: str, options: ReadOptions, notes: Notes) -> llama.LlamaConfig:
    return _qwen(k, name, options, notes, third=False)


def _qwen3(k: Keys, name: str, options: ReadOptions, notes: Notes) -> llama.LlamaConfig:
    return _qwen(k, name, options, notes, third=True)


def _gemma2(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    layers = k.integer("num_hidden_layers")
    k.must_be("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.choice("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}, "gelu_pytorch_tanh")
    k.must_be("hidden_act", "gelu_pytorch_tanh")
    k.must_be("use_bidirectional_attention", False)
    # Gemma 2 alternates, a window first.
    check_layer_types(k, [("full" if i % 2 else "sliding") + "_attention" for i in range(layers)])
    k.ignore("max_position_embeddings", "sliding_window_size")
    return gemma.gemma2(
        gemma.Gemma2Config(
            name=name,
            num_layers=layers,
            hidden_size=k.integer("hidden_size"),
            num_heads=k.integer("num_attention_heads"),
            num_kv_heads=k.integer("num_key_value_heads"),
            head_dim=k.integer("head_dim", 256),
            ffn_size=k.integer("intermediate_size"),
            # Scores are scaled by its root and not by the head's width: 27B has 144 at a width of 128.
            query_scalar=k.number("query_pre_attn_scalar", 256),
            vocab_size=k.integer("vocab_size"),
            window=k.integer("sliding_window", 4096),
            attention_softcap=cap(k, "attn_logit_softcapping", 50.0),
            final_softcap=cap(k, "final_logit_softcapping", 30.0),
            tied=k.flag("tie_word_embeddings", True),
        )
    )


def _gpt2(k: Keys, name: str, options: ReadOptions, notes: Notes) -> gpt.GptConfig:
    hidden = k.integer("n_embd")
    dropout, embed_dropout = k.number("resid_pdrop", 0.1), k.number("embd_pdrop", 0.1)
    # Our config has one dropout for all; on or off is what kernels and memory depend on.
    if (dropout > 0) != (embed_dropout > 0):
        k.fail("embd_pdrop", f"embd_pdrop={embed_dropout} but resid_pdrop={dropout}: one on, one off is not described")
    k.must_be("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        k.must_be(key, False)
    k.ignore("n_ctx")
    k.ignore(*(f"summary_{part}" for part in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")))
    return gpt.GptConfig(
        name=name,
        num_layers=k.integer("n_layer"),
        hidden_size=hidden,
        num_heads=k.integer("n_head"),
        vocab_size=k.integer("vocab_size"),
        max_positions=k.integer("n_positions"),
        # null in nearly all files, which GPT-2's class reads as 4 n_embd.
        ffn_size=k.integer("n_inner", 4 * hidden),
        dropout=dropout,
        attention_dropout=k.number("attn_pdrop", 0.1),
        activation=k.choice("activation_function", ACTIVATIONS, "gelu_new"),
        tied=k.flag("tie_word_embeddings", True),
    )


def _gpt_neox(k: Keys, name: str, options: ReadOptions, notes: Notes) -> gpt.GptNeoxConfig:
    k.must_be("attention_bias", True)
    for key in ("attention_dropout", "hidden_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"):
        k.must_be(key, 0.0, 0)
    k.ignore("max_position_embeddings", "rotary_emb_base", "classifier_dropout")
    rotary = k.number("rotary_pct", 0.25)
    k.must_be("partial_rotary_factor", rotary)  # the same by its newer name
    return gpt.GptNeoxConfig(
        name=name,
        num_layers=k.integer("num_hidden_layers"),
        hidden_size=k.integer("hidden_size"),
        num_heads=k.integer("num_attention_heads"),
        ffn_size=k.integer("intermediate_size"),
        vocab_size=k.integer("vocab_size"),
        rotary_fraction=rotary,
        parallel_residual=k.flag("use_parallel_residual", True),
        tied=k.flag("tie_word_embeddings", False),
        activation=k.choice("hidden_act", ACTIVATIONS, "gelu"),
    )


def _mixtral(k: Keys, name: str, options: ReadOptions, notes: Notes) -> mixtral.MixtralConfig:
    hidden = k.integer("hidden_size")
    heads, kv_heads, head_dim = heads_of(k, hidden)
    window = optional_window(k, 0)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("router_jitter_noise", 0.0, 0)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings")
    balance_loss(k, options, notes)
    return mixtral.MixtralConfig(
        name=name,
        num_layers=k.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_experts=k.integer("num_local_experts"),
        experts_per_token=k.integer("num_experts_per_tok"),
        expert_ffn_size=k.integer("intermediate_size"),
        vocab_size=k.integer("vocab_size"),
        window=window,
        tied=k.flag("tie_word_embeddings", False),
    )


def _qwen3_moe(k: Keys, name: str, options: ReadOptions, notes: Notes) -> mixtral.MixtralConfig:
    hidden = k.integer("hidden_size")
    heads, kv_heads, head_dim = heads_of(k, hidden)
    bias = k.flag("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("use_sliding_window", False)
    # Every layer routed: other steps leave dense layers between, which this config cannot say.
    k.must_be("decoder_sparse_step", 1)
    k.must_be("mlp_only_layers", [])
    k.choice("hidden_act", SILU, "silu")
    k.ignore("sliding_window", "max_window_layers", "max_position_embeddings", "intermediate_size")  # no dense layers
    k.ignore("norm_topk_prob")
    balance_loss(k, options, notes)
    return mixtral.MixtralConfig(
        name=name,
        num_layers=k.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_experts=k.integer("num_local_experts" if k.has("num_local_experts") else "num_experts"),  # since 5.0
        experts_per_token=k.integer("num_experts_per_tok"),
        expert_ffn_size=k.integer("moe_intermediate_size"),
        vocab_size=k.integer("vocab_size"),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        tied=k.flag("tie_word_embeddings", False),
        moe_path="mlp",
        expert_paths=("gate_proj", "up_proj", "down_proj"),
    )


def _deepseek_v3(k: Keys, name: str, options: ReadOptions, notes: Notes) -> deepseek.DeepseekConfig:
    k.must_be("num_key_value_heads", k.integer("num_attention_heads"))
    k.must_be("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("moe_layer_freq", 1)
    k.must_be("scoring_func", "sigmoid")
    # V3's choice by biases; V2's methods have a reader of their own.
    k.must_be("topk_method", "noaux_tc")
    k.must_be("tie_word_embeddings", False)
    k.must_be("pretraining_tp", 1)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", "norm_topk_prob", "routed_scaling_factor")
    # Sums of other keys, or names that transformers writes beside them.
    k.ignore("ep_size", "qk_head_dim", "head_dim", "num_experts_per_token")
    balance_loss(k, options, notes, known=False)
    quantised = k.raw("quantization_config")
    if quantised is not None:
        notes.append(QUANTISED)
    predicted = k.raw("num_nextn_predict_layers")
    modules = max(k.integer("mtp_num_layers", 0, least=0), int(options.mtp))
    if predicted and not modules:
        notes.append(
            f"num_nextn_predict_layers={predicted}: the multi-token prediction module is left out, as in "
            f"transformers; add mtp_num_layers = {predicted} for it"
        )
    return replace(
        deepseek_of(k, options, name, num_dense_layers=k.integer("first_k_dense_replace", least=0)),
        num_groups=k.integer("n_group", 8),
        groups_per_token=k.integer("topk_group", 4),
        mtp_modules=modules,
        mtp_loss_factor=k.number("mtp_loss_scaling_factor", 0.1),
    )


CONFIGURED = (
    ModelType(
        name="llama",
        gguf="llama",
        gguf_turned=True,
        llama_layers=True,
        reader=_llama,
        numerics=Usual(),
        weights=USUAL,
        class_sizes=class_sizes(4096, 11008, 32, 32, 32000),
    ),
    ModelType(
        name="mistral",
        gguf="llama",
        gguf_turned=True,
        llama_layers=True,
        reader=_mistral,
        numerics=Usual(),
        weights=USUAL,
        class_sizes=class_sizes(4096, 14336, 32, 32, 32000, 8),
    ),
    ModelType(
        name="qwen2",
        gguf="qwen2",
        llama_layers=True,
        reader=_qwen2,
        numerics=Usual(),
        weights=USUAL,
        inside=(
            "qwen2_vl_text",
            "qwen2_5_vl_text",
        ),
        multimodal_types=(
            "qwen2_vl",
            "qwen2_5_vl",
        ),
        class_sizes=class_sizes(4096, 22016, 32, 32, 151936, 32),
    ),
    ModelType(
        name="qwen3",
        gguf="qwen3",
        llama_layers=True,
        reader=_qwen3,
        numerics=Usual(),
        weights=USUAL,
        inside=("qwen3_vl_text",),
        class_sizes=class_sizes(4096, 22016, 32, 32, 151936, 32),
    ),
    ModelType(
        name="gemma2",
        reader=_gemma2,
        numerics=Usual(offset=1.0, padding=0),
        wide_norm=True,
        weights=USUAL,
        class_sizes=class_sizes(2304, 9216, 26, 8, 256000, 4),
    ),
    ModelType(
        name="gpt2",
        reader=_gpt2,
        numerics=Usual(**GPT),
        weights=Family(rules=CONV1D, ignored=TABLES, copies=(("lm_head.weight", "transformer.wte.weight"),)),
        same_keys=("gpt-sw3",),
    ),
    ModelType(
        name="gpt_neox",
        reader=_gpt_neox,
        numerics=Usual(
            **LAYER_NORM,
            padded=False,
            rotary="part",
            fraction=0.25,
            base_key="rotary_emb_base",
            fraction_key="rotary_pct",
        ),
        weights=USUAL,
    ),
    ModelType(name="mixtral", reader=_mixtral, numerics=Usual(eps=1e-5, base=1_000_000.0), weights=USUAL),
    ModelType(
        name="qwen3_moe",
        reader=_qwen3_moe,
        numerics=Usual(normalised=False, normalised_key="norm_topk_prob"),
        weights=USUAL,
        inside=("qwen3_vl_moe_text",),
    ),
    ModelType(
        name="deepseek_v3",
        reader=_deepseek_v3,
        numerics=Usual(interleaved=True, interleaved_key="rope_interleave", routed=2.5, **SHARED),
        weights=replace(USUAL, predictor=True),
    ),
    ModelType(name="kimi_k2", reader=_deepseek_v3, numerics=None, weights=USUAL),
)
"""Decoders with a config of our own."""
