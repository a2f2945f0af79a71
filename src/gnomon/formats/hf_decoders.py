"""Hugging Face configs of decoders that are neither Llama's, GPT's nor DeepSeek-V3's: one reader for each model_type.

As in `gnomon.formats.hf`: absent keys mean what the configuration classes of transformers 4.57 make of them, sizes are
required, and a key that changes the mathematics and is not understood is an error. What is counted otherwise than the
public code computes it (joined projections, ALiBi, norms over all heads, multipliers) is said in a note. They are
Graphs without a config, since neither the runtime nor the job files of other programs say what tells them from Llamas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypedDict

from gnomon.formats.hf_parts import (
    ACTIVATIONS,
    SILU,
    Notes,
    Reader,
    Sizes,
    Wanted,
    biases_of,
    check_layer_types,
    deepseek_of,
    optional_window,
    sizes_of,
)
from gnomon.formats.keys import Keys
from gnomon.graph import Graph
from gnomon.models import deepseek, mixtral
from gnomon.models.decoder import DecoderConfig, Mixture, Order, decoder

ALIBI = "ALiBi is counted as attention without positions: its slopes are no kernel of their own"
HEAD_NORMS = "its norms over all heads of q and k are counted as norms of each head"
GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh"}
ROUTER_KEYS = ("norm_topk_prob", "output_router_logits", "router_aux_loss_coef", "routed_scaling_factor")


class Older(TypedDict):
    """What decoders of GPT's time have in common, by the names of our configs."""

    norm: Literal["layer"]
    norm_bias: bool
    gated: bool
    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool


def _older(bias: bool) -> Older:
    """LayerNorms, a feed-forward without a gate, and biases of all its linears or of none."""
    return Older(norm="layer", norm_bias=True, gated=False, qkv_bias=bias, out_bias=bias, ffn_bias=bias)


def _older_sizes(
    k: Keys, layers: int, hidden: int, heads: int, ffn: int, *, kv_heads: int = 0, said: str = "num_attention_heads"
) -> Sizes:
    """Of files that give no width of a head. kv_heads: 0 for as many as heads. said: the key that gave the heads."""
    if hidden % heads:
        k.fail(said, f"hidden_size={hidden} is not a multiple of {heads} heads")
    return Sizes(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        ffn_size=ffn,
        vocab_size=k.integer("vocab_size"),
        tied=k.flag("tie_word_embeddings", True),
    )


def _phi3(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    for key in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
        k.must_be(key, 0.0, 0)
    k.must_be("attention_bias", False)
    k.ignore("max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor")
    notes.append("its joined projections (q, k, v; gate and up) are counted as products of their own")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            windows=(optional_window(k, 0),),
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _smollm3(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    layers = k.integer("num_hidden_layers")
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("use_sliding_window", False)
    check_layer_types(k, ["full_attention"] * layers)
    k.ignore("max_position_embeddings", "sliding_window", "pretraining_tp")
    k.ignore("no_rope_layers", "no_rope_layer_interval")  # rotating q and k or not: the least of a layer
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k, tied=True),
            **biases_of(k),
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _granite(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    if k.number("attention_dropout", 0.0):
        notes.append("attention_dropout is left out")
    k.ignore("max_position_embeddings")
    multipliers = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    if any(k.number(key, 1.0) != 1.0 for key in multipliers):
        notes.append("its multipliers of embedding, residuals, scores and logits are counted as free")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            **biases_of(k),
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _olmo2(k: Keys, name: str, wanted: Wanted, notes: Notes, *, windows: tuple[int, ...] = (0,)) -> Graph:
    bias = k.flag("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings")
    notes.append(HEAD_NORMS)
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            order="post",
            qk_norm=True,
            qkv_bias=bias,
            out_bias=bias,
            windows=windows,
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _olmo3(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    window, layers = k.integer("sliding_window", 4096), k.integer("num_hidden_layers")
    check_layer_types(k, [("sliding" if (i + 1) % 4 else "full") + "_attention" for i in range(layers)])
    return _olmo2(k, name, wanted, notes, windows=(window, window, window, 0))


def _olmoe(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("attention_bias", False)
    k.choice("hidden_act", SILU, "silu")
    if k.number("clip_qkv", 0.0):
        notes.append("clip_qkv, which cuts q, k and v off, is counted as free")
    k.ignore("max_position_embeddings", *ROUTER_KEYS)
    notes.append(HEAD_NORMS)
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            qk_norm=True,
            mixture=Mixture(
                num_experts=k.integer("num_experts"),
                experts_per_token=k.integer("num_experts_per_tok"),
                expert_ffn_size=k.integer("intermediate_size"),
            ),
        )
    )


def _stablelm(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    for key in ("attention_dropout", "hidden_dropout"):
        k.must_be(key, 0.0, 0)
    k.must_be("qk_layernorm", False)
    k.ignore("max_position_embeddings", "partial_rotary_factor")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            order="parallel" if k.flag("use_parallel_residual", False) else "pre",
            norm="layer",
            norm_bias=True,
            qkv_bias=k.flag("use_qkv_bias", False),
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _starcoder2(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    bias = k.flag("use_bias", True)
    k.must_be("embedding_dropout", 0.0, 0)
    k.must_be("mlp_type", "default")
    k.must_be("norm_type", "layer_norm")
    k.ignore("max_position_embeddings", "norm_epsilon")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k, tied=True),
            **_older(bias),
            activation=k.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
            windows=(optional_window(k, 0),),
            dropout=k.number("residual_dropout", 0.0),
            attention_dropout=k.number("attention_dropout", 0.0),
        )
    )


def _phi(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    k.must_be("qk_layernorm", False)
    k.must_be("embd_pdrop", 0.0, 0)
    k.ignore("max_position_embeddings", "partial_rotary_factor")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            order="parallel",
            **_older(True),
            activation=k.choice("hidden_act", ACTIVATIONS, "gelu_new"),
            head_bias=True,
            dropout=k.number("resid_pdrop", 0.0),
            attention_dropout=k.number("attention_dropout", 0.0),
        )
    )


def _falcon(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    layers, hidden, heads = (k.integer(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    newer, several = k.flag("new_decoder_architecture", False), k.flag("multi_query", True)
    shared = 1 if several else heads
    kv_heads = k.integer("num_kv_heads", heads) if newer else shared
    if not newer:
        k.ignore("num_kv_heads")
    bias, parallel = k.flag("bias", False), newer or k.flag("parallel_attn", True)
    norms = k.integer("num_ln_in_parallel_attn", 2 if newer else 1)
    alibi = k.flag("alibi", False)
    if alibi:
        notes.append(ALIBI)
    k.ignore("max_position_embeddings", "parallel_attn", "num_ln_in_parallel_attn")
    beside: Order = "parallel_two" if norms == 2 else "parallel"
    return decoder(
        DecoderConfig(
            name=name,
            **_older_sizes(k, layers, hidden, heads, k.integer("ffn_hidden_size", 4 * hidden), kv_heads=kv_heads),
            order=beside if parallel else "pre",
            **_older(bias),
            activation=k.choice("activation", ACTIVATIONS, "gelu"),
            rotary=not alibi,
            dropout=k.number("hidden_dropout", 0.0),
            attention_dropout=k.number("attention_dropout", 0.0),
        )
    )


def _opt(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    hidden, heads = k.integer("hidden_size"), k.integer("num_attention_heads")
    k.must_be("word_embed_proj_dim", hidden)
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        k.must_be(key, True)
    k.must_be("_remove_final_layer_norm", False)
    for key in ("layerdrop", "activation_dropout"):
        k.must_be(key, 0.0, 0)
    bias = k.flag("enable_bias", True)
    k.ignore("init_std")
    return decoder(
        DecoderConfig(
            name=name,
            **_older_sizes(k, k.integer("num_hidden_layers"), hidden, heads, k.integer("ffn_dim")),
            **_older(bias),
            activation=k.choice("activation_function", ACTIVATIONS, "relu"),
            rotary=False,
            position_rows=k.integer("max_position_embeddings") + 2,  # its table begins two rows early
            dropout=k.number("dropout", 0.1),
            attention_dropout=k.number("attention_dropout", 0.0),
        )
    )


def _bloom(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    def either(*keys: str) -> int:
        return k.integer(next((key for key in keys if k.has(key)), keys[0]))

    hidden, heads = either("hidden_size", "n_embed"), either("n_head", "num_attention_heads")
    k.must_be("apply_residual_connection_post_layernorm", False)
    k.ignore("n_embed", "num_attention_heads", "num_hidden_layers", "pretraining_tp", "slow_but_exact", "seq_length")
    k.ignore("offset_alibi", "bias_dropout_fusion", "masked_softmax_fusion", "attention_softmax_in_fp32")
    k.ignore("skip_bias_add", "skip_bias_add_qkv", "unk_token_id")
    notes.append(ALIBI)
    return decoder(
        DecoderConfig(
            name=name,
            **_older_sizes(k, either("n_layer", "num_hidden_layers"), hidden, heads, 4 * hidden, said="n_head"),
            **_older(True),
            activation="gelu_tanh",
            rotary=False,
            embed_norm=True,
            dropout=k.number("hidden_dropout", 0.0),
            attention_dropout=k.number("attention_dropout", 0.0),
        )
    )


def _gemma(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    sizes = sizes_of(k, tied=True, head_dim=256)
    k.must_be("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.choice("hidden_activation", GELU_TANH, "gelu_pytorch_tanh")
    k.ignore("hidden_act", "max_position_embeddings")  # hidden_act says gelu in old files and is not what runs
    return decoder(
        DecoderConfig(
            name=name,
            **sizes,
            activation="gelu_tanh",
            embed_scale=sizes["hidden_size"] ** 0.5,
        )
    )


def _gemma3(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    sizes = sizes_of(k, tied=True, head_dim=256)
    k.must_be("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("attn_logit_softcapping", 0.0, 0)
    k.must_be("final_logit_softcapping", 0.0, 0)
    k.must_be("use_bidirectional_attention", False)
    k.choice("hidden_activation", GELU_TANH, "gelu_pytorch_tanh")
    every, window = k.integer("sliding_window_pattern", 6), k.integer("sliding_window", 4096)
    types = [("sliding" if (i + 1) % every else "full") + "_attention" for i in range(sizes["num_layers"])]
    check_layer_types(k, types)
    k.ignore("max_position_embeddings", "rope_local_base_freq", "_sliding_window_pattern")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes,
            order="both",
            qk_norm=True,
            activation="gelu_tanh",
            embed_scale=sizes["hidden_size"] ** 0.5,
            windows=(*(window,) * (every - 1), 0),
            query_scale=k.number("query_pre_attn_scalar", 256) ** -0.5,
        )
    )


def _gpt_oss(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    layers, window = k.integer("num_hidden_layers"), k.integer("sliding_window", 128)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("attention_bias", True)
    k.choice("hidden_act", SILU, "silu")
    check_layer_types(k, [("full" if i % 2 else "sliding") + "_attention" for i in range(layers)])
    k.ignore("max_position_embeddings", "initial_context_length", "swiglu_limit", "experts_per_token", *ROUTER_KEYS)
    if k.raw("quantization_config") is not None:
        notes.append("quantization_config says how the checkpoint is stored; the plan's precision decides what runs")
    notes.append("parameters of sinks, of the router's and the experts' biases (0.03 % in all) are left out")
    config = mixtral.MixtralConfig(
        name=name,
        num_layers=layers,
        hidden_size=k.integer("hidden_size"),
        num_heads=k.integer("num_attention_heads"),
        num_kv_heads=k.integer("num_key_value_heads"),
        head_dim=k.integer("head_dim", 64),
        num_experts=k.integer("num_local_experts"),
        experts_per_token=k.integer("num_experts_per_tok"),
        expert_ffn_size=k.integer("intermediate_size"),
        vocab_size=k.integer("vocab_size"),
        window=window,
        windowed_every=2,
        qkv_bias=True,
        out_bias=True,
        expert_bias=True,
        rotary_factor=True,
        tied=k.flag("tie_word_embeddings", False),
        moe_path="mlp",
    )
    return mixtral.mixtral(config)


def _deepseek_v2(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    k.must_be("num_key_value_heads", k.integer("num_attention_heads"))
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        k.must_be(key, False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("moe_layer_freq", 1)
    k.must_be("scoring_func", "softmax")
    k.must_be("topk_method", "greedy", "group_limited_greedy")
    grouped = k.raw("topk_method") == "group_limited_greedy"
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", "pretraining_tp", "aux_loss_alpha", "seq_aux", "ep_size", "head_dim")
    k.ignore("n_group", "topk_group", *ROUTER_KEYS)
    config = replace(
        deepseek_of(k, name, num_dense_layers=k.integer("first_k_dense_replace", 0, least=0)),
        num_groups=k.integer("n_group") if grouped else 1,
        groups_per_token=k.integer("topk_group") if grouped else 1,
        router="softmax",
    )
    k.ignore("q_lora_rank")
    return deepseek.deepseek_v3(config)


def _qwen2_moe(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("use_sliding_window", False)
    k.must_be("decoder_sparse_step", 1)
    k.must_be("mlp_only_layers", [])
    k.must_be("qkv_bias", True)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", "sliding_window", "max_window_layers", "layer_types", *ROUTER_KEYS)
    notes.append("the shared expert's gate (one number a token) is left out")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            qkv_bias=True,
            mixture=Mixture(
                num_experts=k.integer("num_experts"),
                experts_per_token=k.integer("num_experts_per_tok"),
                expert_ffn_size=k.integer("moe_intermediate_size"),
                shared_ffn_size=k.integer("shared_expert_intermediate_size"),
            ),
        )
    )


def _glm4_moe(k: Keys, name: str, wanted: Wanted, notes: Notes) -> Graph:
    k.must_be("attention_dropout", 0.0, 0)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", "partial_rotary_factor", *ROUTER_KEYS)
    if predicted := k.raw("num_nextn_predict_layers"):
        notes.append(f"num_nextn_predict_layers={predicted}: the multi-token prediction module is left out")
    expert = k.integer("moe_intermediate_size")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            qkv_bias=k.flag("attention_bias", False),
            qk_norm=k.flag("use_qk_norm", False),
            mixture=Mixture(
                num_experts=k.integer("n_routed_experts"),
                experts_per_token=k.integer("num_experts_per_tok"),
                expert_ffn_size=expert,
                router="sigmoid",
                router_bias=True,
                groups=k.integer("n_group", 1),
                groups_per_token=k.integer("topk_group", 1),
                shared_ffn_size=expert * k.integer("n_shared_experts", least=0),
                num_dense_layers=k.integer("first_k_dense_replace", least=0),
            ),
        )
    )


DECODERS: Mapping[str, Reader] = {
    "phi3": _phi3,
    "phi": _phi,
    "smollm3": _smollm3,
    "granite": _granite,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "falcon": _falcon,
    "opt": _opt,
    "bloom": _bloom,
    "gemma": _gemma,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "qwen2_moe": _qwen2_moe,
    "glm4_moe": _glm4_moe,
}
"""model_type -> reader."""
