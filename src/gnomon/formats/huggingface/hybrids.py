"""Hugging Face configs of models whose layers differ: hybrids with Mamba-2 (nemotron_h, mamba2, bamba,
granitemoehybrid), and Llama 4, of which some layers are mixtures.

As in `huggingface.decoders`. Leaves out falcon_h1, whose layers run attention and Mamba side by side, and Jamba
and Zamba, whose Mamba is the first version or shared between layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.formats.huggingface.model_type import ModelType
from gnomon.formats.huggingface.numerics import GPT, GRANITE, SHARED, Usual
from gnomon.formats.huggingface.parts import (
    ACTIVATIONS,
    Notes,
    ReadOptions,
    balance_loss,
    factor,
    free_multipliers,
    heads_of,
    only,
)
from gnomon.formats.huggingface.pieces import flat, half
from gnomon.formats.huggingface.weights import EXPERTS, HEAD, TABLES, USUAL, Family
from gnomon.formats.keys import Keys
from gnomon.graph import Graph
from gnomon.models.hybrid import PARTS, HybridConfig, HybridMixture, Mamba2, hybrid

HYBRID_ACTIVATIONS = {**ACTIVATIONS, "relu2": "relu2"}
LAYER_TYPES = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E", "full_attention": "*", "linear_attention": "M"}
"""Names of layers in `layers_block_type` and `layer_types` -> letters of parts."""
STEP_KEYS = (
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "time_step_limit",
    "time_step_rank",
    "rescale_prenorm_residual",
)
"""How dt begins and between what it stays."""


def _mamba(k: Keys, names: Mapping[str, str]) -> Mamba2:
    """The mixer, by the family's own keys for each of our fields."""
    k.must_be(names["proj_bias"], False)
    return Mamba2(
        num_heads=k.integer(names["heads"]),
        head_dim=k.integer(names["head_dim"]),
        num_groups=k.integer(names["groups"]),
        state_size=k.integer(names["state"]),
        conv_kernel=k.integer(names["kernel"], 4),
        chunk=k.integer(names["chunk"], 256),
        conv_bias=k.flag(names["conv_bias"], True),
    )


def _block_types(k: Keys, key: str) -> tuple[str, ...]:
    """Letters of the layers that a list of names gives."""
    layer_types = k.raw(key)
    if not isinstance(layer_types, list) or not layer_types or any(kind not in LAYER_TYPES for kind in layer_types):
        k.fail(key, f"expected a list of {', '.join(LAYER_TYPES)}, got {layer_types!r}")
    return tuple(LAYER_TYPES[kind] for kind in layer_types)


def _with_attention(
    k: Keys,
    name: str,
    layers: tuple[str, ...],
    *,
    ffn_size: int,
    activation: str,
    mamba: Mamba2 | None,
    mixture: HybridMixture | None = None,
    rotary: bool = False,
    gated: bool = False,
    scales: tuple[float, float] = (0.0, 0.0),
) -> Graph:
    """Makes the model; its widths and heads are under the same keys in all families whose layers may be attention.
    scales: of the embedding and of scores, as `HybridConfig` has them."""
    heads, kv_heads, head_dim = heads_of(k, k.integer("hidden_size"))
    return hybrid(
        HybridConfig(
            name=name,
            layers=layers,
            hidden_size=k.integer("hidden_size"),
            vocab_size=k.integer("vocab_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary=rotary,
            ffn_size=ffn_size,
            gated=gated,
            activation=activation,
            mamba=mamba,
            mixture=mixture,
            tied=k.flag("tie_word_embeddings", False),
            embed_scale=scales[0],
            query_scale=scales[1],
        )
    )


def _nemotron_h(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    pattern = k.raw("hybrid_override_pattern")
    if isinstance(pattern, str):
        k.ignore("layers_block_type")
        layers = tuple(pattern)
    else:
        layers = _block_types(k, "layers_block_type")
    if not set(layers) <= PARTS.keys():
        k.fail("hybrid_override_pattern", f"layers are of the letters {' '.join(PARTS)}, not {pattern!r}")
    # Released files have both, and the pattern is what the class builds.
    k.ignore("num_hidden_layers")  # the length of the pattern
    for key in ("use_bias", "mlp_bias", "attention_bias"):
        k.must_be(key, False)
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings", "partial_rotary_factor", "expand", "use_mamba_kernels", "num_logits_to_keep")
    k.ignore("residual_in_fp32", "sliding_window", "mamba_ssm_cache_dtype")
    only(k, options, "mamba_hidden_act", "silu", "swish")
    only(k, options, "hidden_dropout", 0.0, 0)
    only(k, options, "n_group", 1)
    only(k, options, "tie_word_embeddings", False)  # its class ties nothing
    k.ignore(
        "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "moe_shared_expert_overlap", *STEP_KEYS
    )
    balance_loss(k, options, notes, known=False)
    k.ignore(
        "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
        "mlp_hidden_act_scale",
    )
    if predicted := k.raw("num_nextn_predict_layers"):
        notes.append(f"num_nextn_predict_layers={predicted}: the multi-token prediction module is left out")
    mixture = None
    if "E" in layers:
        mixture = HybridMixture(
            num_experts=k.integer("n_routed_experts"),
            experts_per_token=k.integer("num_experts_per_tok"),
            expert_ffn_size=k.integer("moe_intermediate_size"),
            # Several shared experts are one of their widths together: the same matmuls.
            shared_ffn_size=k.integer("moe_shared_expert_intermediate_size")
            * k.integer("n_shared_experts", 1, least=0),
            latent_size=k.integer("moe_latent_size") if k.has("moe_latent_size") else 0,
        )
    else:
        k.ignore("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
        k.ignore("moe_shared_expert_intermediate_size", "moe_latent_size")
    # Four families spell the mixer's sizes in four ways; each maps its keys to ours.
    of = {"heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "groups": "n_groups", "state": "ssm_state_size"}
    of |= {"kernel": "conv_kernel", "chunk": "chunk_size", "conv_bias": "use_conv_bias", "proj_bias": "mamba_proj_bias"}
    return _with_attention(
        k,
        name,
        layers,
        ffn_size=k.integer("intermediate_size", 21504),
        activation=k.choice("mlp_hidden_act", HYBRID_ACTIVATIONS, "relu2"),
        mamba=_mamba(k, of) if "M" in layers else None,
        mixture=mixture,
    )


def _mamba2(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    k.choice("hidden_act", {"silu": "silu"}, "silu")
    k.must_be("rms_norm", True)
    k.ignore("expand", "residual_in_fp32", *STEP_KEYS)
    of = {"heads": "num_heads", "head_dim": "head_dim", "groups": "n_groups", "state": "state_size"}
    of |= {"kernel": "conv_kernel", "chunk": "chunk_size", "conv_bias": "use_conv_bias", "proj_bias": "use_bias"}
    return hybrid(
        HybridConfig(
            name=name,
            layers=("M",) * k.integer("num_hidden_layers"),
            hidden_size=k.integer("hidden_size"),
            vocab_size=k.integer("vocab_size"),
            mamba=_mamba(k, of),
            tied=k.flag("tie_word_embeddings", False),
        )
    )


_BAMBA = {"heads": "mamba_n_heads", "head_dim": "mamba_d_head", "groups": "mamba_n_groups", "state": "mamba_d_state"}
_BAMBA |= {"kernel": "mamba_d_conv", "chunk": "mamba_chunk_size"}
_BAMBA |= {"conv_bias": "mamba_conv_bias", "proj_bias": "mamba_proj_bias"}


def _bamba(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    k.must_be("attention_bias", False)
    k.must_be("mlp_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings", "mamba_expand", "num_logits_to_keep", "partial_rotary_factor")
    only(k, options, "z_loss_coefficient", 0.0, 0)
    only(k, options, "hidden_act", "silu", "swish")  # the convolution's too
    k.ignore(*STEP_KEYS)
    count = k.integer("num_hidden_layers")
    attends = k.raw("attn_layer_indices") or []
    if not isinstance(attends, list) or not all(isinstance(i, int) and 0 <= i < count for i in attends):
        k.fail("attn_layer_indices", f"expected indices of {count} layers, got {attends!r}")
    return _with_attention(
        k,
        name,
        # Two letters a layer: mixer, then feed-forward, which Nemotron-H has as layers of their own.
        tuple("*-" if index in attends else "M-" for index in range(count)),
        rotary=True,
        ffn_size=k.integer("intermediate_size"),
        gated=True,
        activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        mamba=_mamba(k, _BAMBA),
    )


def _granite_hybrid(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Every layer has a feed-forward for all tokens, which is the shared expert where there are routed ones."""
    k.must_be("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings", "mamba_expand", "num_hidden_layers")
    balance_loss(k, options, notes)
    k.ignore("normalization_function", "init_method", "shared_intermediate_size_scale", *STEP_KEYS)
    scales = 0.0, 0.0
    if options.complete:
        scales = factor(k, options, "embedding_multiplier"), factor(k, options, "attention_multiplier")
    else:
        free_multipliers(k, notes)
    k.ignore("residual_multiplier", "logits_scaling")
    experts = k.integer("num_local_experts", 0, least=0)
    shared, expert = k.integer("shared_intermediate_size"), k.integer("intermediate_size")
    chosen = k.integer("num_experts_per_tok", 2, least=0)
    layers = tuple(letter + ("E" if experts else "-") for letter in _block_types(k, "layer_types"))
    routed = {"num_experts": experts, "experts_per_token": chosen, "expert_ffn_size": expert}
    has_mamba = any("M" in layer for layer in layers)
    if has_mamba:
        only(k, options, "hidden_act", "silu", "swish")  # the convolution's too
    if not has_mamba:
        k.ignore(*_BAMBA.values())
    return _with_attention(
        k,
        name,
        layers,
        rotary=k.choice("position_embedding_type", {"nope": "nope", "rope": "rope"}, "nope") == "rope",
        ffn_size=shared,
        gated=True,
        activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        mamba=_mamba(k, _BAMBA) if has_mamba else None,
        mixture=HybridMixture(**routed, shared_ffn_size=shared, sigmoid=False) if experts else None,
        scales=scales,
    )


def _llama4(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Every `interleave_moe_layer_step`-th layer is a mixture with a shared expert as wide as its others."""
    count, step = k.integer("num_hidden_layers"), k.integer("interleave_moe_layer_step", 1)
    k.must_be("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("router_jitter_noise", 0.0, 0)
    # Written out in some files; another list would be another model.
    k.must_be("moe_layers", list(range(step - 1, count, step)))
    k.ignore("max_position_embeddings", "output_router_logits", "router_aux_loss_coef", "for_llm_compressor")
    k.ignore("no_rope_layers", "no_rope_layer_interval", "layer_types", "attn_temperature_tuning", "floor_scale")
    k.ignore("attn_scale", "pretraining_tp")
    if k.flag("use_qk_norm", True):
        notes.append("its norm of q and k, which has no weights, is left out")
    chunk = k.integer("attention_chunk_size", 8192)
    notes.append(f"attention within {chunk} tokens is counted as over all: the same for sequences up to that length")
    expert = k.integer("intermediate_size")
    return _with_attention(
        k,
        name,
        # Scout has experts in every layer (step 1), Maverick in every second.
        tuple("*-" if (index + 1) % step else "*E" for index in range(count)),
        rotary=True,
        ffn_size=k.integer("intermediate_size_mlp"),
        gated=True,
        activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        mamba=None,
        mixture=HybridMixture(
            num_experts=k.integer("num_local_experts"),
            experts_per_token=k.integer("num_experts_per_tok", 1),
            expert_ffn_size=expert,
            shared_ffn_size=expert,
            # Llama 4 scales a token by its score before its expert, which costs what a weight after it does.
            sigmoid=False,  # it is one, but no bias chooses
        ),
    )


HYBRIDS = (
    ModelType(
        name="nemotron_h",
        reader=_nemotron_h,
        numerics=Usual(**GPT, step_min_key="time_step_min", **SHARED),
        weights=Family(
            names=(
                (r"\.(mamba|self_attn|mlp|moe)_norm\.", ".norm."),
                (r"\.(mamba|self_attn|mlp|moe)\.", ".mixer."),
                (r"\.embed_tokens\.", ".embeddings."),
                (r"^model\.norm\.", "model.norm_f."),
                (r"^model\.", "backbone."),
            ),
            rules=((r"\.mamba\.norm\.weight$", flat), *EXPERTS),
            ignored=(*TABLES, r"^mtp\."),
            copies=HEAD,
        ),
    ),
    ModelType(
        name="mamba2",
        reader=_mamba2,
        numerics=Usual(**GPT, step_limit_key="time_step_limit"),
        weights=Family(
            names=(
                (r"\.mamba_norm\.", ".norm."),
                (r"\.mamba\.", ".mixer."),
                (r"\.embed_tokens\.", ".embeddings."),
                (r"^model\.norm\.", "model.norm_f."),
                (r"^model\.", "backbone."),
            ),
            rules=((r"\.mamba\.norm\.weight$", flat),),
            copies=HEAD,
        ),
    ),
    ModelType(
        name="bamba",
        reader=_bamba,
        numerics=Usual(
            eps=1e-5, padding=0, rotary="part", fraction=0.5, fraction_key="", step_limit_key="time_step_limit"
        ),
        weights=Family(
            names=(
                (r"\.(mamba|self_attn)_norm\.", ".input_layernorm."),
                (r"\.mlp_norm\.", ".pre_ff_layernorm."),
                (r"\.mlp\.", ".feed_forward."),
                (r"^model\.norm\.", "model.final_layernorm."),
            ),
            rules=((r"\.mamba\.norm\.weight$", flat),),
            ignored=TABLES,
            copies=HEAD,
        ),
    ),
    ModelType(
        name="granitemoehybrid",
        reader=_granite_hybrid,
        numerics=Usual(**GRANITE, step_limit_key="time_step_limit"),
        weights=Family(
            names=(
                (r"\.(mamba|self_attn)_norm\.", ".input_layernorm."),
                (r"\.(mlp|moe)_norm\.", ".post_attention_layernorm."),
                (r"\.moe\.gate\.", ".block_sparse_moe.router.layer."),
                (r"\.moe\.experts\.(gate|up)_proj\.", ".block_sparse_moe.input_linear."),
                (r"\.moe\.experts\.down_proj\.", ".block_sparse_moe.output_linear."),
                (r"\.(mlp|moe\.shared_experts)\.(gate|up)_proj\.", ".shared_mlp.input_linear."),
                (r"\.(mlp|moe\.shared_experts)\.down_proj\.", ".shared_mlp.output_linear."),
            ),
            rules=((r"\.mamba\.norm\.weight$", flat), (r"\.gate_proj\.", half(0)), (r"\.up_proj\.", half(1))),
            ignored=TABLES,
            copies=HEAD,
        ),
    ),
    ModelType(name="llama4_text", reader=_llama4, numerics=None, weights=USUAL),
)
"""Of layers that differ."""
