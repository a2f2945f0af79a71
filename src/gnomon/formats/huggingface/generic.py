"""Decoders that Hugging Face configs describe by keys alone: one path for the model types that have no reader.

A `GenericShape` states what no key of a model type says (where its norms stand, their kind, gates, biases that are
always there); everything else is read by the keys that transformers' configs share, under any of their spellings. Types
are in SHAPES only if parameters counted so are those of transformers 5.23 for the class's own config, to the last
(`python benchmarks/formats/model_types.py`). Leaves out every part that is no kind of `models.decoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gnomon.formats.huggingface.model_type import ModelType
from gnomon.formats.huggingface.parts import ACTIVATIONS, Notes, ReadOptions, free_multipliers
from gnomon.formats.huggingface.weights import USUAL
from gnomon.formats.keys import Keys
from gnomon.graph import Graph
from gnomon.models.decoder import DecoderConfig, Mixture, Order, decoder

KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "d_model", "n_embd", "dim"),
    "heads": ("num_attention_heads", "attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim"),
    "activation": ("hidden_act", "hidden_activation", "activation_function", "afn"),
    "attention_bias": ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias", "bias"),
    "dropout": ("hidden_dropout_prob", "dropout", "resid_pdrop"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "shared": ("n_shared_experts", "num_shared_experts"),
    "softcap": ("final_logit_softcapping",),
}
"""What is read -> its spellings; the first that a file has counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericShape:
    """What a model type's keys leave to its code."""

    order: Order = "pre"
    norm: Literal["rms", "layer"] = "rms"
    gated: bool = True
    activation: str = "silu"
    """Where no key says it."""
    bias: bool = False
    """Biases of all linears, whether or not a key says so."""
    wide_norm: bool = False
    """As `ModelType.wide_norm`."""
    qk_norm: bool = False
    joined_qk_norm: bool = False
    rotary: bool = True
    extra_positions: int | None = None
    """Rows of a learned position embedding beyond max_position_embeddings; None without one."""
    scaled_embedding: bool = False
    """The embedding times the root of the width."""
    tied: bool = False
    """Where no key says it."""
    window_every: tuple[int, int] | None = None
    """(n, k): of n layers the first k have the window, where `layer_types` is not given."""
    sigmoid: bool = False
    """The router's scores."""
    dense_first: str = ""
    """Key of how many first layers are dense."""
    notes: tuple[str, ...] = ()
    """What is counted otherwise than the code computes it."""


CAPS = "the caps of its scores are counted as free"

SHAPES: Mapping[str, GenericShape] = {
    "helium": GenericShape(wide_norm=True),
    "internlm3": GenericShape(),
    "iquestcoder": GenericShape(),
    "cwm": GenericShape(window_every=(4, 4)),
    "jais2": GenericShape(norm="layer", gated=False, activation="relu2", bias=True),
    "hyperclovax": GenericShape(order="both"),
    "vaultgemma": GenericShape(
        wide_norm=True, activation="gelu_tanh", tied=True, scaled_embedding=True, window_every=(2, 1), notes=(CAPS,)
    ),
    "xglm": GenericShape(norm="layer", gated=False, bias=True, rotary=False, scaled_embedding=True, tied=True),
    "biogpt": GenericShape(
        norm="layer", gated=False, bias=True, rotary=False, scaled_embedding=True, tied=True, extra_positions=2
    ),
    "mellum": GenericShape(qk_norm=True, window_every=(4, 3)),
    "exaone_moe": GenericShape(qk_norm=True, window_every=(4, 3), sigmoid=True, dense_first="first_k_dense_replace"),
    "solar_open": GenericShape(sigmoid=True),
    "flex_olmo": GenericShape(wide_norm=True, order="post", qk_norm=True, joined_qk_norm=True),
    "granitemoeshared": GenericShape(),
    "hunyuan_v1_dense": GenericShape(qk_norm=True),
}
"""model_type -> what its code adds to its keys."""

RELU = {**ACTIVATIONS, "relu2": "relu2"}


def _key(k: Keys, what: str) -> str:
    """The spelling that the file has, or the usual one."""
    spelled = KEYS[what]
    name = next((key for key in spelled if k.has(key)), spelled[0])
    # One spelling was read: others that the file has too are neither unknown keys nor another value.
    k.ignore(*spelled[1:])
    return name


def _windows(k: Keys, shape: GenericShape, layers: int) -> tuple[int, ...]:
    """The window of each layer, from `layer_types` or every so many layers."""
    window = k.integer("sliding_window", 0, least=0)
    kinds = k.raw("layer_types")
    k.ignore("sliding_window_pattern", "use_sliding_window", "max_window_layers")
    if not window or k.raw("use_sliding_window") is False:
        return (0,)
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(0 if kind == "full_attention" else window for kind in kinds)
    if shape.window_every is None:
        k.fail("sliding_window", f"sliding_window={window} and no layer_types: which layers have it is not known")
    every, first = shape.window_every
    # One period; DecoderConfig repeats it over the layers.
    return tuple(window if i % every < first else 0 for i in range(every))


def _mixture(k: Keys, shape: GenericShape, layers: int) -> Mixture | None:
    if not k.has(experts := _key(k, "experts")):
        return None
    width = k.integer("moe_intermediate_size") if k.has("moe_intermediate_size") else k.integer(_key(k, "ffn"))
    shared = k.integer(_key(k, "shared"), 0, least=0) * width
    shared = shared or k.integer("shared_intermediate_size", 0, least=0)
    dense = k.integer(shape.dense_first, 0, least=0) if shape.dense_first else 0
    k.ignore("mlp_layer_types", "norm_topk_prob", "routed_scaling_factor", "output_router_logits")
    k.ignore("router_aux_loss_coef", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    return Mixture(
        num_experts=k.integer(experts),
        experts_per_token=k.integer("num_experts_per_tok"),
        expert_ffn_size=width,
        router="sigmoid" if shape.sigmoid else "softmax",
        groups=k.integer("n_group", 1),
        groups_per_token=k.integer("topk_group", 1),
        shared_ffn_size=shared,
        num_dense_layers=min(dense, layers),
    )


def generic_decoder(k: Keys, name: str, options: ReadOptions, notes: Notes, shape: GenericShape) -> Graph:
    """The decoder that a config's keys describe, with what its type's code adds. InputError for a key that is missing
    or changes the mathematics."""
    layers, hidden = k.integer(_key(k, "layers")), k.integer(_key(k, "hidden"))
    heads = k.integer(_key(k, "heads"))
    kv_heads = k.integer(_key(k, "kv_heads"), heads)
    head_dim = k.integer("head_dim", max(1, hidden // heads))
    activation = k.choice(_key(k, "activation"), RELU, next(n for n, ours in RELU.items() if ours == shape.activation))
    bias = k.flag(_key(k, "attention_bias"), shape.bias)
    mlp_bias = k.flag("mlp_bias", shape.bias)
    k.ignore("max_position_embeddings", "pretraining_tp", "layerdrop", "init_std", "activation_dropout")
    k.ignore("scale_embedding", "attn_logit_softcapping", "residual_multiplier", "logits_scaling")
    free_multipliers(k, notes)
    order = shape.order
    if order == "both" and not k.flag("use_post_norm", True):
        order = "pre"
    mixture = _mixture(k, shape, layers)
    ffn = k.integer(_key(k, "ffn"), 4 * hidden if mixture is None else mixture.expert_ffn_size)
    # Gemma's key says what stands under the root: scores are divided by its square root, and 0 leaves the width of a
    # head there.
    scale = k.number("query_pre_attn_scalar", 0.0)
    notes += shape.notes
    return decoder(
        DecoderConfig(
            name=name,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=ffn,
            vocab_size=k.integer("vocab_size"),
            tied=k.flag("tie_word_embeddings", shape.tied),
            order=order,
            norm=shape.norm,
            norm_bias=shape.norm == "layer",
            gated=shape.gated,
            activation=activation,
            qkv_bias=bias,
            out_bias=bias,
            ffn_bias=mlp_bias,
            qk_norm=shape.qk_norm,
            joined_qk_norm=shape.joined_qk_norm,
            rotary=shape.rotary,
            position_rows=0
            if shape.extra_positions is None
            else k.integer("max_position_embeddings") + shape.extra_positions,
            softcap=k.number(_key(k, "softcap"), 0.0),
            embed_scale=hidden**0.5 if shape.scaled_embedding else 0.0,
            query_scale=scale**-0.5 if scale else 0.0,
            windows=_windows(k, shape, layers),
            dropout=k.number(_key(k, "dropout"), 0.0),
            attention_dropout=k.number(_key(k, "attention_dropout"), 0.0),
            mixture=mixture,
        )
    )


GENERIC = tuple(
    ModelType(
        name=name,
        reader=partial(generic_decoder, shape=shape),
        numerics=None,
        weights=USUAL,
        by_keys=True,
        wide_norm=shape.wide_norm,
    )
    for name, shape in SHAPES.items()
)
"""Types that their keys describe: predicted, and not run."""
