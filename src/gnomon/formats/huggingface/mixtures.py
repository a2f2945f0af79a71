"""Hugging Face configs of mixtures of experts beside Mixtral's, Qwen 3's and DeepSeek-V3's.

As in `huggingface.decoders`. Leaves out mixtures whose layers differ in kind (hybrids).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gnomon.formats.huggingface.model_type import ModelType
from gnomon.formats.huggingface.numerics import GRANITE, SHARED, Usual
from gnomon.formats.huggingface.parts import (
    HEAD_NORMS,
    QUANTISED,
    SILU,
    Notes,
    ReadOptions,
    balance_loss,
    check_layer_types,
    clipped,
    deepseek_of,
    factor,
    free_multipliers,
    inner,
    optional_window,
    sizes_of,
)
from gnomon.formats.huggingface.pieces import alternating, experts_transposed, half, led
from gnomon.formats.huggingface.weights import EXPERTS, HEAD, TABLES, USUAL, Family
from gnomon.formats.keys import Keys
from gnomon.graph import Graph
from gnomon.models import deepseek, mixtral
from gnomon.models.decoder import DecoderConfig, Mixture, decoder

ROUTER_KEYS = ("norm_topk_prob", "routed_scaling_factor")


def _olmoe(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("attention_bias", False)
    k.choice("hidden_act", SILU, "silu")
    clipped(k, options, notes)
    k.ignore("max_position_embeddings", *ROUTER_KEYS)
    balance_loss(k, options, notes, usual=0.01)
    if not options.complete:
        notes.append(HEAD_NORMS)
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            qk_norm=True,
            joined_qk_norm=options.complete,
            mixture=Mixture(
                num_experts=k.integer("num_experts"),
                experts_per_token=k.integer("num_experts_per_tok"),
                expert_ffn_size=k.integer("intermediate_size"),
            ),
        )
    )


def _gpt_oss(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    layers, window = k.integer("num_hidden_layers"), k.integer("sliding_window", 128)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("attention_bias", True)
    k.choice("hidden_act", SILU, "silu")
    # Layers 0, 2, … have the window: windowed_every below.
    check_layer_types(k, [("full" if i % 2 else "sliding") + "_attention" for i in range(layers)])
    k.ignore(
        "max_position_embeddings",
        "initial_context_length",
        "experts_per_token",
        *ROUTER_KEYS,
    )
    balance_loss(k, options, notes)
    if k.raw("quantization_config") is not None:
        notes.append(QUANTISED)
    limit, alpha = k.number("swiglu_limit", 7.0), k.number("swiglu_alpha", 1.702)
    if not options.complete:
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
        expert_limit=limit if options.complete else 0.0,
        expert_alpha=alpha,
        rotary_factor=True,
        tied=k.flag("tie_word_embeddings", False),
        moe_path="mlp",
    )
    return mixtral.mixtral(config)


def _deepseek_v2(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    k.must_be("num_key_value_heads", k.integer("num_attention_heads"))
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        k.must_be(key, False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("moe_layer_freq", 1)
    k.must_be("scoring_func", "softmax")
    k.must_be("topk_method", "greedy", "group_limited_greedy")
    # Files of greedy routers have n_group and topk_group too, which their code does not look at.
    grouped = k.raw("topk_method") == "group_limited_greedy"
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", "pretraining_tp", "ep_size", "head_dim", "qk_head_dim")
    if k.raw("norm_topk_prob") is True:
        notes.append("norm_topk_prob=True: weights of experts are not divided by their sum, as in transformers")
    k.ignore("n_group", "topk_group", *ROUTER_KEYS)
    balance_loss(k, options, notes, known=False)
    config = replace(
        deepseek_of(k, options, name, num_dense_layers=k.integer("first_k_dense_replace", 0, least=0)),
        num_groups=k.integer("n_group") if grouped else 1,
        groups_per_token=k.integer("topk_group") if grouped else 1,
        router="softmax",
    )
    k.ignore("q_lora_rank")
    return deepseek.deepseek_v3(config)


def _qwen2_moe(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("use_sliding_window", False)
    k.must_be("decoder_sparse_step", 1)
    k.must_be("mlp_only_layers", [])
    k.must_be("qkv_bias", True)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", "sliding_window", "max_window_layers", "layer_types", *ROUTER_KEYS)
    balance_loss(k, options, notes)
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
                shared_gate=True,
            ),
        )
    )


def _glm4_moe(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    k.must_be("attention_dropout", 0.0, 0)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", "partial_rotary_factor", *ROUTER_KEYS)
    balance_loss(k, options, notes, known=False)
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


def _dots1(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    layers = k.integer("num_hidden_layers")
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("use_sliding_window", False)
    k.must_be("scoring_func", "noaux_tc", "sigmoid")
    k.must_be("topk_method", "noaux_tc")
    k.must_be("moe_layer_freq", 1)
    check_layer_types(k, ["full_attention"] * layers)
    k.choice("hidden_act", SILU, "silu")
    windowed = k.raw("sliding_window") is not None and k.integer("max_window_layers", 62, least=0) < layers
    if options.complete and windowed:
        k.fail("sliding_window", "layers from max_window_layers on have a window, which is not described; it is null")
    k.ignore("max_position_embeddings", "sliding_window", "max_window_layers", "pretraining_tp", "ep_size")
    k.ignore(*ROUTER_KEYS)
    balance_loss(k, options, notes)
    bias, expert = k.flag("attention_bias", False), k.integer("moe_intermediate_size")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            mixture=Mixture(
                num_experts=k.integer("n_routed_experts"),
                experts_per_token=k.integer("num_experts_per_tok"),
                expert_ffn_size=expert,
                router="sigmoid",
                router_bias=True,
                groups=k.integer("n_group", 1),
                groups_per_token=k.integer("topk_group", 1),
                shared_ffn_size=expert * k.integer("n_shared_experts", least=0),
                num_dense_layers=k.integer("first_k_dense_replace", 0, least=0),
            ),
        )
    )


def _minimax_m2(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    layers = k.integer("num_hidden_layers")
    for key in ("attention_dropout", "router_jitter_noise"):
        k.must_be(key, 0.0, 0)
    k.must_be("scoring_func", "sigmoid")
    k.must_be("shared_intermediate_size", 0)
    k.must_be("qk_norm_type", "per_layer")
    k.must_be("use_qk_norm", True)
    k.must_be("attn_type_list", [1] * layers)
    k.choice("hidden_act", SILU, "silu")
    if k.flag("use_mtp", False):
        notes.append("its multi-token prediction modules are left out")
    k.ignore("num_mtp_modules", "mtp_transformer_layers", "use_routing_bias", "rotary_dim", "partial_rotary_factor")
    k.ignore("max_position_embeddings", "layernorm_full_attention_beta", "layernorm_linear_attention_beta")
    k.ignore("layernorm_mlp_beta", *ROUTER_KEYS)
    balance_loss(k, options, notes)
    if k.raw("quantization_config") is not None:
        notes.append(QUANTISED)
    if not options.complete:
        notes.append(HEAD_NORMS)
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            qk_norm=True,
            joined_qk_norm=options.complete,
            mixture=_same_width(k, router="sigmoid", router_bias=True),
        )
    )


def _same_width(k: Keys, **extra: Any) -> Mixture:
    """Experts as Mixtral's files say them, whose width is intermediate_size. extra: further fields."""
    return Mixture(
        num_experts=k.integer("num_local_experts"),
        experts_per_token=k.integer("num_experts_per_tok"),
        expert_ffn_size=k.integer("intermediate_size"),
        **extra,
    )


def _granitemoe(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    bias = k.flag("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", *ROUTER_KEYS)
    balance_loss(k, options, notes)
    if not options.complete:
        free_multipliers(k, notes)
    k.ignore("residual_multiplier", "logits_scaling")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            qkv_bias=bias,
            out_bias=bias,
            embed_scale=factor(k, options, "embedding_multiplier"),
            query_scale=factor(k, options, "attention_multiplier"),
            mixture=_same_width(k),
        )
    )


def _phimoe(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    bias = k.flag("attention_bias", False)
    for key in ("attention_dropout", "hidden_dropout"):
        k.must_be(key, 0.0, 0)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", "original_max_position_embeddings", "router_jitter_noise")
    k.ignore("input_jitter_noise", *ROUTER_KEYS)
    balance_loss(k, options, notes)
    notes.append("its router, which chooses by SparseMixer, is counted as a softmax")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            norm="layer",
            norm_bias=True,
            qkv_bias=bias,
            out_bias=bias,
            head_bias=k.flag("lm_head_bias", False),
            windows=(optional_window(k, 0),),
            mixture=_same_width(k),
        )
    )


def _ernie_moe(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    layers = k.integer("num_hidden_layers")
    k.must_be("use_bias", False)
    k.must_be("moe_layer_interval", 1)
    k.must_be("moe_layer_end_index", -1, layers - 1)
    k.choice("hidden_act", SILU, "silu")
    k.ignore("max_position_embeddings", "moe_norm_min", *ROUTER_KEYS)
    balance_loss(k, options, notes)
    expert = k.integer("moe_intermediate_size")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k, tied=True),
            mixture=Mixture(
                num_experts=k.integer("moe_num_experts"),
                experts_per_token=k.integer("moe_k"),
                expert_ffn_size=expert,
                router_bias=True,
                shared_ffn_size=expert * k.integer("moe_num_shared_experts", 2, least=0),
                num_dense_layers=k.integer("moe_layer_start_index", 1, least=0),
            ),
        )
    )


def _dbrx(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    a, f = inner(k, "attn_config"), inner(k, "ffn_config")
    hidden, heads = k.integer("d_model"), k.integer("n_heads")
    for keys, key in ((a, "attn_pdrop"), (k, "emb_pdrop"), (k, "resid_pdrop")):
        keys.must_be(key, 0.0, 0)
    clipped(a, options, notes)
    k.ignore("max_seq_len", "num_key_value_heads", *ROUTER_KEYS)
    balance_loss(k, options, notes)
    f.must_be("hidden_size", hidden)
    f.must_be("ffn_act_fn", {"name": "silu"})
    f.ignore("moe_jitter_eps", "moe_loss_weight", "moe_normalize_expert_weights", "uniform_expert_assignment")
    if hidden % heads:
        k.fail("n_heads", f"d_model={hidden} is not a multiple of {heads} heads")
    width = f.integer("ffn_hidden_size")
    return decoder(
        DecoderConfig(
            name=name,
            num_layers=k.integer("n_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=a.integer("kv_n_heads"),
            head_dim=hidden // heads,
            ffn_size=width,
            vocab_size=k.integer("vocab_size"),
            tied=k.flag("tie_word_embeddings", False),
            norm="layer",
            mixture=Mixture(
                num_experts=f.integer("moe_num_experts"),
                experts_per_token=f.integer("moe_top_k"),
                expert_ffn_size=width,
            ),
        )
    )


MIXTURES = (
    ModelType(
        name="olmoe",
        reader=_olmoe,
        numerics=Usual(eps=1e-5, padding=1, normalised=False, normalised_key="norm_topk_prob"),
        weights=USUAL,
    ),
    ModelType(
        name="gpt_oss",
        reader=_gpt_oss,
        numerics=Usual(eps=1e-5, base=150_000.0, block_needed="YaRN with a factor of 32"),
        weights=Family(
            names=(
                (r"\.mlp\.gate\.", ".mlp.router."),
                (r"\.experts\.w[13]\.weight$", ".experts.gate_up_proj"),
                (r"\.experts\.w[13]\.bias$", ".experts.gate_up_proj_bias"),
                (r"\.experts\.w2\.weight$", ".experts.down_proj"),
                (r"\.experts\.w2\.bias$", ".experts.down_proj_bias"),
            ),
            rules=(
                # gate_up_proj has columns of the gate and of up in turn.
                (r"\.experts\.w1\.", alternating(0)),
                (r"\.experts\.w3\.", alternating(1)),
                (r"\.experts\.w2\.weight", experts_transposed),
            ),
            ignored=TABLES,
        ),
    ),
    ModelType(
        name="deepseek_v2",
        reader=_deepseek_v2,
        numerics=Usual(interleaved=True, normalised=False, group_top=1, routed_key="routed_scaling_factor"),
        weights=USUAL,
    ),
    ModelType(
        name="qwen2_moe",
        reader=_qwen2_moe,
        numerics=Usual(normalised=False, normalised_key="norm_topk_prob"),
        weights=Family(names=((r"\.shared_experts\.", ".shared_expert."),), rules=EXPERTS, ignored=TABLES, copies=HEAD),
    ),
    ModelType(
        name="glm4_moe",
        reader=_glm4_moe,
        numerics=Usual(eps=1e-5, rotary="part", fraction=0.5, **SHARED),
        weights=replace(USUAL, predictor=True),
    ),
    ModelType(name="dots1", reader=_dots1, numerics=Usual(normalised=False, **SHARED), weights=USUAL),
    ModelType(
        name="minimax_m2",
        reader=_minimax_m2,
        numerics=Usual(base=5_000_000.0, rotary="part", fraction_from="rotary_dim"),
        weights=Family(
            names=(
                # First, as files have the bias beside the gate and not in it; the next rule renames what is left.
                (r"\.mlp\.gate\.e_score", ".block_sparse_moe.e_score"),
                (r"\.mlp\.", ".block_sparse_moe."),
                (r"\.gate_proj\.", ".w1."),
                (r"\.up_proj\.", ".w3."),
                (r"\.down_proj\.", ".w2."),
            ),
            rules=EXPERTS,
            ignored=TABLES,
            copies=HEAD,
        ),
    ),
    ModelType(
        name="granitemoe",
        reader=_granitemoe,
        numerics=Usual(**GRANITE),
        weights=Family(
            names=(
                (r"\.mlp\.gate\.", ".block_sparse_moe.router.layer."),
                (r"\.mlp\.experts\.(gate|up)_proj\.", ".block_sparse_moe.input_linear."),
                (r"\.mlp\.experts\.down_proj\.", ".block_sparse_moe.output_linear."),
            ),
            # input_linear has all rows of the gate, then those of up.
            rules=((r"\.gate_proj\.", half(0)), (r"\.up_proj\.", half(1))),
            ignored=TABLES,
            copies=HEAD,
        ),
    ),
    ModelType(name="phimoe", reader=_phimoe, numerics=None, weights=USUAL),
    ModelType(
        name="ernie4_5_moe",
        reader=_ernie_moe,
        numerics=Usual(eps=1e-5, padding=0, base=500_000.0, interleaved=True, least_sum_key="moe_norm_min"),
        weights=Family(
            names=((r"\.mlp\.gate\.e_score", ".mlp.moe_statics.e_score"),),
            # Stored as (1, experts).
            rules=((r"e_score_correction_bias$", led(1)), *EXPERTS),
            ignored=TABLES,
            copies=HEAD,
        ),
    ),
    ModelType(name="dbrx", reader=_dbrx, numerics=None, weights=USUAL),
)
"""Mixtures of experts, but for those of `configured`."""
