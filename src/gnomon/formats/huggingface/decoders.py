"""Hugging Face configs of dense decoders that are neither Llama's nor GPT's: one reader for each model_type.

As in `huggingface.read`: absent keys mean what the configuration classes of transformers 4.57 make of them, sizes are
required, and a key that changes the mathematics and is not understood is an error. What is counted otherwise than the
public code computes it (joined projections, ALiBi, norms over all heads, multipliers) is said in a note. They are
Graphs without a config, since neither the runtime nor the job files of other programs say what tells them from Llamas.
Mixtures of experts are in `mixtures`, decoders of GPT's time in `older`.

A reader takes the file's keys, the model's name, the options and the list that notes are added to, and asks for every
key of its configuration class: what is left is unknown. `options.complete` is the Graph that is run; without it the
Graph that is priced leaves out what costs next to nothing (multipliers, layers without rotary angles).
"""

from __future__ import annotations

from typing import Literal

from gnomon.formats.huggingface.model_type import ModelType, class_sizes
from gnomon.formats.huggingface.numerics import GRANITE, LAYER_NORM, Usual
from gnomon.formats.huggingface.parts import (
    ACTIVATIONS,
    HEAD_NORMS,
    Notes,
    ReadOptions,
    biases_of,
    check_layer_types,
    clipped,
    factor,
    free_multipliers,
    only,
    optional_window,
    sizes_of,
)
from gnomon.formats.huggingface.weights import HEAD, TABLES, USUAL, Family
from gnomon.formats.keys import Keys
from gnomon.graph import Graph
from gnomon.models.decoder import DecoderConfig, Mixture, Order, decoder

GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh"}


def _phi3(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads Phi-3 and Phi-4: a Llama with joined projections and, in some, a window."""
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


def _smollm3(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads SmolLM3: a Llama some of whose layers have no rotary positions."""
    layers = k.integer("num_hidden_layers")
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("use_sliding_window", False)
    check_layer_types(k, ["full_attention"] * layers)
    k.ignore("max_position_embeddings", "sliding_window", "pretraining_tp")
    rope_layers, every = k.raw("no_rope_layers"), k.integer("no_rope_layer_interval", 4)
    # NoPE: every fourth layer, or those with a 0 in no_rope_layers, has no rotary positions.
    rotated = tuple((i + 1) % every != 0 for i in range(layers))
    if isinstance(rope_layers, list) and len(rope_layers) == layers:
        rotated = tuple(bool(one) for one in rope_layers)
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k, tied=True),
            **biases_of(k),
            rotated=rotated if options.complete else (True,),  # rotating q and k takes the least of a layer's time
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _granite(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads Granite: a Llama with multipliers of embeddings, scores, residuals and logits."""
    if k.number("attention_dropout", 0.0):
        notes.append("attention_dropout is left out")
    k.ignore("max_position_embeddings")
    if not options.complete:
        free_multipliers(k, notes)
    k.ignore("residual_multiplier", "logits_scaling")  # of a model that is run, read by its `numerics`
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            **biases_of(k),
            embed_scale=factor(k, options, "embedding_multiplier"),
            query_scale=factor(k, options, "attention_multiplier"),
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _olmo2(k: Keys, name: str, options: ReadOptions, notes: Notes, *, windows: tuple[int, ...] = (0,)) -> Graph:
    """Reads OLMo 2: norms after attention and feed-forward, and of q and k over all heads at once. windows: repeated
    over the layers, 0 for none."""
    bias = k.flag("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings")
    if not options.complete:
        notes.append(HEAD_NORMS)
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            order="post",
            qk_norm=True,
            joined_qk_norm=options.complete,
            qkv_bias=bias,
            out_bias=bias,
            windows=windows,
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _olmo3(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads OLMo 3: OLMo 2 with a window in three layers of four."""
    window, layers = k.integer("sliding_window", 4096), k.integer("num_hidden_layers")
    check_layer_types(k, [("sliding" if (i + 1) % 4 else "full") + "_attention" for i in range(layers)])
    return _olmo2(k, name, options, notes, windows=(window, window, window, 0))


def _stablelm(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads StableLM: layer norms with biases, attention and feed-forward side by side in some."""
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


def _gemma(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads Gemma: embeddings times the root of the hidden size, GELU gates, tied weights."""
    sizes = sizes_of(k, tied=True, head_dim=256)
    k.must_be("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("use_bidirectional_attention", False)
    k.choice("hidden_activation", GELU_TANH, "gelu_pytorch_tanh")
    k.ignore("max_position_embeddings")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes,
            # Gemma's first files say gelu and were trained with its tanh form, which transformers computes.
            activation=k.choice("hidden_act", {**ACTIVATIONS, "gelu": "gelu_tanh"}, "gelu_pytorch_tanh"),
            embed_scale=sizes["hidden_size"] ** 0.5,
        )
    )


def _gemma3(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads the text part of Gemma 3: norms before and after, norms of q and k, a window in all layers but every
    sixth."""
    sizes = sizes_of(k, tied=True, head_dim=256)
    k.must_be("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("attn_logit_softcapping")
    k.must_be("final_logit_softcapping")
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
            query_scale=_query_scale(k),
        )
    )


def _query_scale(k: Keys) -> float:
    """The factor of scores, query_pre_attn_scalar to the power of -1/2. InputError for 0."""
    scalar = k.number("query_pre_attn_scalar", 256)
    if not scalar:
        k.fail("query_pre_attn_scalar", "scores are divided by its root; it is over 0")
    return float(scalar**-0.5)


def _cohere(
    k: Keys, name: str, options: ReadOptions, notes: Notes, *, windows: tuple[int, ...] = (0,), second: bool = False
) -> Graph:
    """Reads Command R: one norm before attention and feed-forward, which run side by side. second: only layers with a
    window have rotary positions."""
    k.must_be("attention_dropout", 0.0, 0)
    bias = k.flag("attention_bias", False)
    k.ignore("max_position_embeddings", "use_parallel_block", "use_embedding_sharing", "use_gated_activation")
    k.ignore("model_max_length", "logit_scale", "rotary_pct", "position_embedding_type")
    if not options.complete:
        notes.append("the factor of its logits is counted as free")
    only(k, options, "use_qk_norm", False)
    if normed := k.flag("use_qk_norm", False):
        notes.append("its norms of q and k, which have weights for every head, are counted with one head's weights")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k, tied=True),
            order="parallel",
            norm="layer",
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=normed,
            windows=windows,
            rotated=tuple(bool(w) for w in windows) if options.complete and second else (True,),
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _cohere2(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads Command R7B and A: Command R with a window, and rotary positions, in three layers of four."""
    layers, window, every = k.integer("num_hidden_layers"), k.integer("sliding_window", 4096), _pattern(k, 4)
    check_layer_types(k, [("sliding" if (i + 1) % every else "full") + "_attention" for i in range(layers)])
    k.must_be("use_qk_norm", False)
    k.ignore("order_of_interleaved_layers", "layer_switch", "cache_implementation")
    return _cohere(k, name, options, notes, windows=(*(window,) * (every - 1), 0), second=True)


def _pattern(k: Keys, absent: int) -> int:
    """The period of layers of which the last has no window: sliding_window_pattern, a number or letters as in LLLG."""
    pattern = k.raw("sliding_window_pattern")
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        return len(pattern)
    return k.integer("sliding_window_pattern", absent)


def _glm(k: Keys, name: str, options: ReadOptions, notes: Notes, *, order: Order = "pre") -> Graph:
    """Reads GLM: a Llama with biases of q, k and v, and half of each head rotated."""
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings", "partial_rotary_factor")
    notes.append("its joined projections (gate and up) are counted as products of their own")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k, head_dim=128),
            order=order,
            qkv_bias=k.flag("attention_bias", True),
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _glm4(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads GLM-4: GLM with norms before and after attention and feed-forward."""
    return _glm(k, name, options, notes, order="both")


def _seed_oss(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads Seed-OSS: a Llama with biases of q, k and v, and with dropout."""
    k.ignore("max_position_embeddings", "pretraining_tp")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k, head_dim=128),
            qkv_bias=k.flag("attention_bias", True),
            out_bias=k.flag("attention_out_bias", False),
            ffn_bias=k.flag("mlp_bias", False),
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
            dropout=k.number("residual_dropout", 0.1),
            attention_dropout=k.number("attention_dropout", 0.1),
        )
    )


def _ernie(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads the dense ERNIE 4.5: a Llama whose linears all have biases, or none."""
    bias = k.flag("use_bias", False)
    k.ignore("max_position_embeddings")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k, tied=True, head_dim=128),
            qkv_bias=bias,
            out_bias=bias,
            ffn_bias=bias,
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _exaone4(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads EXAONE 4: norms after attention and feed-forward, norms of q and k; where there is a window, all layers but
    every fourth have it, and only these have rotary positions."""
    layers, window = k.integer("num_hidden_layers"), optional_window(k, 4096)
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings")
    windows: tuple[int, ...] = (0,)
    if window:
        every = _pattern(k, 4)
        windows = (*(window,) * (every - 1), 0)
    else:
        k.ignore("sliding_window_pattern")
    check_layer_types(k, [("sliding" if windows[i % len(windows)] else "full") + "_attention" for i in range(layers)])
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            order="post",
            qk_norm=True,
            windows=windows,
            rotated=tuple(bool(w) for w in windows) if options.complete and window else (True,),
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _ungated(k: Keys, name: str, options: ReadOptions, notes: Notes, *, norm: Literal["rms", "layer"] = "rms") -> Graph:
    """Reads Arcee: a Llama without gates, whose activation is the square of a ReLU."""
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings", "partial_rotary_factor", "rope_percent", "rope_percentage", "norm_eps")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            **biases_of(k),
            norm=norm,
            norm_bias=norm == "layer",
            gated=False,
            activation=k.choice("hidden_act", {**ACTIVATIONS, "relu2": "relu2"}, "relu2"),
        )
    )


def _nemotron(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads Nemotron: Arcee's feed-forward, with layer norms."""
    return _ungated(k, name, options, notes, norm="layer")


def _ministral(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads Ministral: a Llama with a window in all layers, or in those that layer_types names."""
    layers, window = k.integer("num_hidden_layers"), optional_window(k, 4096)
    layer_types = k.raw("layer_types")
    windows: tuple[int, ...] = (window,)
    if (
        isinstance(layer_types, list)
        and len(layer_types) == layers
        and set(layer_types) <= {"sliding_attention", "full_attention"}
    ):
        windows = tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)
    elif layer_types is not None:
        k.fail("layer_types", f"expected {layers} of sliding_attention and full_attention, got {layer_types!r:.80}")
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            windows=windows,
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _ministral3(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads Ministral 3: a Llama, in some with one window in all layers."""
    k.must_be("attention_dropout", 0.0, 0)
    k.ignore("max_position_embeddings")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k, head_dim=128),
            windows=(optional_window(k, 0),),
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _olmo(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads OLMo: a Llama with layer norms that have no weights."""
    bias = k.flag("attention_bias", False)
    k.must_be("attention_dropout", 0.0, 0)
    clipped(k, options, notes)
    k.ignore("max_position_embeddings")
    if not options.complete:
        notes.append("its norms, which have no weights, are counted with weights (0.004 % of a 7B's)")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes_of(k),
            norm="layer",
            norm_weight=not options.complete,
            qkv_bias=bias,
            out_bias=bias,
            activation=k.choice("hidden_act", ACTIVATIONS, "silu"),
        )
    )


def _gemma4(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Gemma 4 without an embedding in every layer: its 31B, and its 26B with experts beside the feed-forward."""
    sizes = sizes_of(k, tied=True, head_dim=256)
    count = sizes["num_layers"]
    for key in ("attention_bias", "use_double_wide_mlp"):
        k.must_be(key, False)
    k.must_be("attention_dropout", 0.0, 0)
    k.must_be("attention_k_eq_v", True)
    k.must_be("use_bidirectional_attention", "vision")  # of images only
    k.must_be("hidden_size_per_layer_input", 0)
    if not (k.has("hidden_size_per_layer_input") and k.has("attention_k_eq_v")):
        k.fail(
            "hidden_size_per_layer_input",
            "needs hidden_size_per_layer_input 0 and attention_k_eq_v: other sizes of "
            "Gemma 4 add an embedding in every layer, which is not described",
        )
    k.must_be("num_kv_shared_layers", 0)
    k.choice("hidden_activation", GELU_TANH, "gelu_pytorch_tanh")
    types = [("sliding" if (i + 1) % 6 else "full") + "_attention" for i in range(count)]
    check_layer_types(k, types)
    k.ignore("max_position_embeddings", "vocab_size_per_layer_input")
    if k.number("final_logit_softcapping", 0.0):
        notes.append("the cap of its logits is left out")
    window = k.integer("sliding_window", 512)
    mixture = None
    if k.flag("enable_moe_block", False):
        mixture = Mixture(
            num_experts=k.integer("num_experts"),
            experts_per_token=k.integer("top_k_experts"),
            expert_ffn_size=k.integer("moe_intermediate_size"),
            shared_ffn_size=sizes["ffn_size"],
        )
        notes.append("norms beside its experts, and factors of its router, are left out")
    k.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    return decoder(
        DecoderConfig(
            name=name,
            **sizes,
            order="both",
            qk_norm=True,
            activation="gelu_tanh",
            embed_scale=sizes["hidden_size"] ** 0.5,
            windows=(*(window,) * 5, 0),
            full_heads=_full_heads(k, [str(i) for i, kind in enumerate(types) if kind == "full_attention"]),
            # Scores are not scaled; 0 would stand for 1/√head_dim.
            query_scale=1.0,
            mixture=mixture,
        )
    )


def _full_heads(k: Keys, layers: list[str]) -> tuple[int, int]:
    """(key heads, width of a head) of Gemma 4's full layers: by keys of their own, or layer by layer since 5.20."""
    if not k.has("per_layer_config"):
        return k.integer("num_global_key_value_heads"), k.integer("global_head_dim", 512)
    by_layer = k.inside("per_layer_config")
    inner = [by_layer.inside(key if by_layer.has(key) else key.zfill(2)) for key in layers]
    sizes = {(one.integer("num_key_value_heads"), one.integer("head_dim")) for one in inner}
    if len(sizes) != 1:
        k.fail("per_layer_config", f"full layers differ in heads: {sorted(sizes)}")
    return sizes.pop()


DECODERS = (
    ModelType(
        name="phi3",
        reader=_phi3,
        numerics=Usual(eps=1e-5, padding=32_000, rotary="part", only_longrope=True),
        weights=Family(
            fused_linears={"q_proj k_proj v_proj": "qkv_proj", "gate_proj up_proj": "gate_up_proj"},
            ignored=TABLES,
            copies=HEAD,
        ),
    ),
    ModelType(name="smollm3", reader=_smollm3, numerics=Usual(base=2_000_000.0, padding=128_004), weights=USUAL),
    ModelType(name="granite", reader=_granite, numerics=Usual(**GRANITE), weights=USUAL),
    ModelType(
        name="olmo", layer_norm="wide", reader=_olmo, numerics=Usual(eps=1e-5, eps_key="", padding=1), weights=USUAL
    ),
    ModelType(name="olmo2", reader=_olmo2, numerics=Usual(eps=1e-5, padding=1), wide_norm=True, weights=USUAL),
    ModelType(
        name="olmo3",
        reader=_olmo3,
        numerics=Usual(eps=1e-5, padding=1, rotary="layered", base=500_000.0, windowed_base=500_000.0),
        wide_norm=True,
        weights=USUAL,
    ),
    ModelType(
        name="stablelm", reader=_stablelm, numerics=Usual(**LAYER_NORM, rotary="part", fraction=0.25), weights=USUAL
    ),
    ModelType(
        name="gemma",
        reader=_gemma,
        numerics=Usual(offset=1.0, padding=0),
        wide_norm=True,
        weights=USUAL,
        class_sizes=class_sizes(3072, 24576, 28, 16, 256000, 16),
    ),
    ModelType(
        name="gemma3_text",
        reader=_gemma3,
        numerics=Usual(
            offset=1.0, padding=0, rotary="layered", base=1_000_000.0, windowed_base_key="rope_local_base_freq"
        ),
        wide_norm=True,
        weights=USUAL,
        class_sizes=class_sizes(2304, 9216, 26, 8, 262208, 4),
    ),
    ModelType(name="gemma4_text", reader=_gemma4, numerics=None, weights=USUAL),
    ModelType(
        name="cohere",
        layer_norm="steps",
        reader=_cohere,
        numerics=Usual(
            **LAYER_NORM, padding=0, base=500_000.0, interleaved=True, logits="logit_scale", logits_usual=0.0625
        ),
        weights=USUAL,
    ),
    ModelType(
        name="cohere2",
        layer_norm="steps",
        reader=_cohere2,
        numerics=Usual(**LAYER_NORM, padding=0, interleaved=True, logits="logit_scale", logits_usual=0.0625),
        weights=USUAL,
    ),
    ModelType(
        name="glm",
        reader=_glm,
        numerics=Usual(eps=1.5625e-7, padding=151_329, rotary="part", fraction=0.5, interleaved=True),
        weights=Family(fused_linears={"gate_proj up_proj": "gate_up_proj"}, ignored=TABLES, copies=HEAD),
    ),
    ModelType(
        name="glm4",
        reader=_glm4,
        numerics=Usual(eps=1.5625e-7, padding=151_329, rotary="part", fraction=0.5, interleaved=True),
        weights=Family(
            names=(
                # Rules follow each other on one name: theirs of the second is ours of the first, so that these two must
                # not change places.
                (r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
                (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
                (r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
            ),
            fused_linears={"gate_proj up_proj": "gate_up_proj"},
            ignored=TABLES,
            copies=HEAD,
        ),
        same_keys=(
            "glm4v_text",
            "glm_image_text",
        ),
    ),
    ModelType(name="seed_oss", reader=_seed_oss, numerics=Usual(padding=1), weights=USUAL),
    ModelType(
        name="ernie4_5",
        reader=_ernie,
        numerics=Usual(eps=1e-5, padding=0, base=500_000.0, interleaved=True),
        weights=USUAL,
    ),
    ModelType(name="exaone4", reader=_exaone4, numerics=Usual(eps=1e-5), weights=USUAL),
    ModelType(name="arcee", reader=_ungated, numerics=Usual(eps=1e-5), weights=USUAL),
    ModelType(
        name="nemotron",
        reader=_nemotron,
        numerics=Usual(eps=1e-5, eps_key="norm_eps", offset=1.0, rotary="part", fraction=0.5),
        weights=USUAL,
    ),
    ModelType(name="ministral", reader=_ministral, numerics=Usual(), weights=USUAL),
    ModelType(name="ministral3", reader=_ministral3, numerics=None, weights=USUAL),
)
"""The model types of this file: how each is read, what its mathematics takes (`numerics`; None: it is priced and not
run), and how its weights are named."""
