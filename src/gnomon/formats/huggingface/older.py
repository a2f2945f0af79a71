"""Hugging Face configs of decoders of GPT's time: LayerNorms, a feed-forward without a gate, positions of many kinds.

As in `huggingface.decoders`. Leaves out GPT-2 and GPT-NeoX, which have configs of their own (read).
"""

from __future__ import annotations

from typing import Literal, TypedDict

from gnomon.formats.huggingface.model_type import ModelType
from gnomon.formats.huggingface.numerics import GPT, LAYER_NORM, Usual
from gnomon.formats.huggingface.parts import (
    ACTIVATIONS,
    DecoderConfigSizes,
    Notes,
    ReadOptions,
    clipped,
    inner,
    only,
    optional_window,
    sizes_of,
)
from gnomon.formats.huggingface.pieces import of_each_group, of_each_head, two_norms
from gnomon.formats.huggingface.weights import HEAD, TABLES, USUAL, Family
from gnomon.formats.keys import Keys
from gnomon.graph import Graph
from gnomon.models.decoder import DecoderConfig, Order, decoder

ALIBI = "ALiBi is counted as attention without positions: its slopes are no kernel of their own"
EMBED_DROPOUT = "dropout of the embedding is left out"
SUMMARY = tuple(f"summary_{part}" for part in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"))
"""Keys of heads that choose and classify."""


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
    k: Keys,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    *,
    kv_heads: int = 0,
    heads_key: str = "num_attention_heads",
    tied: bool = True,
) -> DecoderConfigSizes:
    """Reads sizes of files that give no width of a head. kv_heads: 0 for as many as heads. heads_key: the key that
    gave the heads. tied: where the file does not say."""
    if hidden % heads:
        k.fail(heads_key, f"hidden_size={hidden} is not a multiple of {heads} heads")
    return DecoderConfigSizes(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        ffn_size=ffn,
        vocab_size=k.integer("vocab_size"),
        tied=k.flag("tie_word_embeddings", tied),
    )


def _starcoder2(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
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


def _phi(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
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


def _falcon(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    layers, hidden, heads = (k.integer(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    newer, several = k.flag("new_decoder_architecture", False), k.flag("multi_query", True)
    # Before the newer architecture all heads share one key head, or each has its own, whatever num_kv_heads says.
    shared = 1 if several else heads
    kv_heads = k.integer("num_kv_heads", heads) if newer else shared
    if not newer:
        k.ignore("num_kv_heads")
    bias, parallel = k.flag("bias", False), newer or k.flag("parallel_attn", True)
    norms = k.integer("num_ln_in_parallel_attn", 2 if newer else 1)
    alibi = k.flag("alibi", False)
    only(k, options, "alibi", False)
    if alibi:
        notes.append(ALIBI)
    k.ignore("max_position_embeddings", "parallel_attn", "num_ln_in_parallel_attn")
    # Attention and feed-forward read one residual: each through a norm of its own, or both through one.
    parallel_order: Order = "parallel_two" if norms == 2 else "parallel"
    return decoder(
        DecoderConfig(
            name=name,
            **_older_sizes(k, layers, hidden, heads, k.integer("ffn_hidden_size", 4 * hidden), kv_heads=kv_heads),
            order=parallel_order if parallel else "pre",
            **_older(bias),
            activation=k.choice("activation", ACTIVATIONS, "gelu"),
            rotary=not alibi,
            dropout=k.number("hidden_dropout", 0.0),
            attention_dropout=k.number("attention_dropout", 0.0),
        )
    )


def _opt(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
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


def _bloom(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    def either(*keys: str) -> int:
        sizes_given = {key: k.integer(key) for key in keys if k.has(key)}
        if len(set(sizes_given.values())) > 1:
            k.fail(keys[1], f"{sizes_given} are names of one size; keep one of them")
        return next(iter(sizes_given.values())) if sizes_given else k.integer(keys[0])

    hidden, heads = either("hidden_size", "n_embed"), either("n_head", "num_attention_heads")
    k.must_be("apply_residual_connection_post_layernorm", False)
    if k.integer("pretraining_tp", 1) > 1:  # its products are then sums of slices, without biases
        only(k, options, "slow_but_exact", False)
    k.ignore("n_embed", "num_attention_heads", "num_hidden_layers", "pretraining_tp", "slow_but_exact", "seq_length")
    k.ignore("offset_alibi", "bias_dropout_fusion", "masked_softmax_fusion", "attention_softmax_in_fp32")
    k.ignore("skip_bias_add", "skip_bias_add_qkv", "unk_token_id")
    if not options.complete:
        notes.append(ALIBI)
    return decoder(
        DecoderConfig(
            name=name,
            **_older_sizes(k, either("n_layer", "num_hidden_layers"), hidden, heads, 4 * hidden, heads_key="n_head"),
            **_older(True),
            activation="gelu_tanh",
            rotary=False,
            embed_norm=True,
            alibi=options.complete,
            dropout=k.number("hidden_dropout", 0.0),
            attention_dropout=k.number("attention_dropout", 0.0),
        )
    )


def _gptj(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads GPT-J and CodeGen: one norm before attention and feed-forward, which run side by side; a bias of the
    head."""
    hidden = k.integer("n_embd")
    k.must_be("embd_pdrop", 0.0, 0)
    for key in ("scale_attn_weights", "rotary"):
        k.must_be(key, True)
    k.ignore("rotary_dim", "n_positions", "n_ctx", *SUMMARY)
    ffn, heads = k.integer("n_inner", 4 * hidden), k.integer("n_head")
    return decoder(
        DecoderConfig(
            name=name,
            **_older_sizes(k, k.integer("n_layer"), hidden, heads, ffn, heads_key="n_head", tied=False),
            order="parallel",
            norm="layer",
            norm_bias=True,
            gated=False,
            ffn_bias=True,
            head_bias=True,
            activation=k.choice("activation_function", ACTIVATIONS, "gelu_new"),
            dropout=k.number("resid_pdrop", 0.0),
            attention_dropout=k.number("attn_pdrop", 0.0),
        )
    )


def _gpt_bigcode(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads StarCoder 1: GPT-2 whose heads share one key and one value."""
    hidden, heads = k.integer("n_embd"), k.integer("n_head")
    shared = k.flag("multi_query", True)
    k.must_be("num_key_value_heads", 1 if shared else heads)
    k.must_be("scale_attn_weights", True)
    if k.number("embd_pdrop", 0.1):
        notes.append(EMBED_DROPOUT)
    k.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "pad_key_length")
    k.ignore("max_batch_size", "max_sequence_length", "pre_allocate_kv_cache", "validate_runner_input", *SUMMARY)
    ffn = k.integer("n_inner", 4 * hidden)
    return decoder(
        DecoderConfig(
            name=name,
            **_older_sizes(
                k, k.integer("n_layer"), hidden, heads, ffn, kv_heads=1 if shared else heads, heads_key="n_head"
            ),
            **_older(True),
            rotary=False,
            position_rows=k.integer("n_positions"),
            activation=k.choice("activation_function", ACTIVATIONS, "gelu_pytorch_tanh"),
            dropout=k.number("resid_pdrop", 0.1),
            attention_dropout=k.number("attn_pdrop", 0.1),
        )
    )


def _attention_types(k: Keys, layers: int) -> list[str]:
    """Each layer's, from pairs of (names, times), as in [[["global", "local"], 12]]."""
    types = k.raw("attention_types")
    pairs = [[["global", "local"], layers // 2]] if types is None else types
    kinds: list[str] = []
    for pair in pairs if isinstance(pairs, list) else []:
        match pair:
            case [[*names], int(times)] if 0 <= times <= layers and set(names) <= {"global", "local"}:
                kinds += names * times
            case _:
                break
    if len(kinds) != layers:
        k.fail(
            "attention_types", f"expected pairs such as [['global', 'local'], 12] of {layers} layers, got {types!r:.80}"
        )
    return kinds


def _gpt_neo(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Attention of every second layer is within a window; scores are not scaled."""
    hidden, layers = k.integer("hidden_size"), k.integer("num_layers")
    kinds = _attention_types(k, layers)
    k.must_be("attention_layers", kinds)
    window = k.integer("window_size", 256)
    if k.number("embed_dropout", 0.0):
        notes.append(EMBED_DROPOUT)
    k.ignore("classifier_dropout", *SUMMARY)
    ffn, heads = k.integer("intermediate_size", 4 * hidden), k.integer("num_heads")
    return decoder(
        DecoderConfig(
            name=name,
            **_older_sizes(k, layers, hidden, heads, ffn, heads_key="num_heads"),
            norm="layer",
            norm_bias=True,
            gated=False,
            out_bias=True,
            ffn_bias=True,
            rotary=False,
            position_rows=k.integer("max_position_embeddings"),
            windows=tuple(window if kind == "local" else 0 for kind in kinds),
            # 0 would stand for 1/√head_dim.
            query_scale=1.0,
            activation=k.choice("activation_function", ACTIVATIONS, "gelu_new"),
            dropout=k.number("resid_dropout", 0.0),
            attention_dropout=k.number("attention_dropout", 0.0),
        )
    )


def _mpt(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    hidden, ratio = k.integer("d_model"), k.integer("expansion_ratio", 4)
    a = inner(k, "attn_config")
    a.must_be("attn_type", "multihead_attention")
    a.must_be("alibi", True)
    for key in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        a.must_be(key, False)
    clipped(a, options, notes)
    a.ignore("attn_impl", "alibi_bias_max")  # its class in transformers has 8, whatever the file says
    scale = a.number("softmax_scale", 0.0)
    if a.raw("softmax_scale") == 0:
        a.fail("softmax_scale", "scores times 0 attend to nothing; null is the root of 1 over a head's width")
    k.must_be("no_bias", True)
    k.must_be("norm_type", "low_precision_layernorm")
    k.must_be("embedding_fraction", 1.0, 1)
    k.must_be("logit_scale", 0)
    if k.number("emb_pdrop", 0.0):
        notes.append(EMBED_DROPOUT)
    k.ignore("max_seq_len", "learned_pos_emb", "init_config", "init_device", "tokenizer_name", "verbose")
    if not options.complete:
        notes.append(ALIBI)
    return decoder(
        DecoderConfig(
            name=name,
            **_older_sizes(k, k.integer("n_layers"), hidden, k.integer("n_heads"), ratio * hidden, heads_key="n_heads"),
            norm="layer",
            gated=False,
            activation="gelu",
            rotary=False,
            query_scale=scale if options.complete else 0.0,
            alibi=options.complete,
            dropout=k.number("resid_pdrop", 0.0),
            attention_dropout=a.number("attn_pdrop", 0.0),
        )
    )


OLDER = (
    ModelType(
        name="phi",
        reader=_phi,
        numerics=Usual(**LAYER_NORM, rotary="part", fraction=0.5),
        weights=Family(
            names=(
                (r"\.o_proj\.", ".dense."),
                (r"\.up_proj\.", ".fc1."),
                (r"\.down_proj\.", ".fc2."),
                (r"^model\.norm\.", "model.final_layernorm."),
            ),
            ignored=TABLES,
        ),
    ),
    ModelType(
        name="starcoder2",
        reader=_starcoder2,
        numerics=Usual(eps=1e-5, eps_key="norm_epsilon"),
        weights=Family(names=((r"\.up_proj\.", ".c_fc."), (r"\.down_proj\.", ".c_proj.")), ignored=TABLES, copies=HEAD),
    ),
    ModelType(
        name="falcon",
        reader=_falcon,
        numerics=Usual(eps=1e-5, eps_key="layer_norm_epsilon", padded=False),
        weights=Family(
            names=(
                (r"\.embed_tokens\.", ".word_embeddings."),
                (r"^model\.norm\.", "transformer.ln_f."),
                (r"^model\.", "transformer."),
                (r"\.layers\.", ".h."),
                (r"\.self_attn\.o_proj\.", ".self_attention.dense."),
                (r"\.self_attn\.", ".self_attention."),
                (r"\.up_proj\.", ".dense_h_to_4h."),
                (r"\.down_proj\.", ".dense_4h_to_h."),
            ),
            together=(of_each_group("q_proj k_proj v_proj", "query_key_value"), two_norms),
            copies=HEAD,
        ),
    ),
    ModelType(
        name="opt",
        reader=_opt,
        numerics=Usual(eps=1e-5, eps_key="", rotary="", first_position=2, padding=1),
        weights=Family(
            names=(
                (r"^model\.norm\.", "model.final_layer_norm."),
                (r"^model\.", "model.decoder."),
                (r"\.o_proj\.", ".out_proj."),
                (r"\.input_layernorm\.", ".self_attn_layer_norm."),
                # OPT calls the norm before each feed-forward final_layer_norm, as it does the one behind all layers.
                (r"\.post_attention_layernorm\.", ".final_layer_norm."),
                (r"\.mlp\.up_proj\.", ".fc1."),
                (r"\.mlp\.down_proj\.", ".fc2."),
            ),
            copies=HEAD,
        ),
    ),
    ModelType(
        name="bloom",
        attention="op_by_op",
        reader=_bloom,
        numerics=Usual(**GPT),
        weights=Family(
            names=(
                (r"\.embed_tokens\.", ".word_embeddings."),
                (r"\.embed_layernorm\.", ".word_embeddings_layernorm."),
                (r"^model\.norm\.", "transformer.ln_f."),
                (r"^model\.", "transformer."),
                (r"\.layers\.", ".h."),
                (r"\.self_attn\.o_proj\.", ".self_attention.dense."),
                (r"\.self_attn\.[qkv]_proj\.", ".self_attention.query_key_value."),
                (r"\.up_proj\.", ".dense_h_to_4h."),
                (r"\.down_proj\.", ".dense_4h_to_h."),
            ),
            rules=tuple((rf"\.{letter}_proj\.", of_each_head(index)) for index, letter in enumerate("qkv")),
            copies=HEAD,
        ),
    ),
    ModelType(
        name="gptj",
        attention="by_flash",
        reader=_gptj,
        numerics=Usual(**GPT | {"rotary": "fixed"}, interleaved=True),
        weights=Family(
            names=(
                (r"\.embed_tokens\.", ".wte."),
                (r"^model\.", "transformer."),
                (r"\.layers\.", ".h."),
                (r"\.self_attn\.o_proj\.", ".attn.out_proj."),
                (r"\.self_attn\.", ".attn."),
                (r"\.input_layernorm\.", ".ln_1."),
                (r"\.up_proj\.", ".fc_in."),
                (r"\.down_proj\.", ".fc_out."),
                (r"^transformer\.norm\.", "transformer.ln_f."),
            ),
            ignored=TABLES,
        ),
    ),
    ModelType(name="codegen", attention="op_by_op", reader=_gptj, numerics=None, weights=USUAL),
    ModelType(
        name="gpt_bigcode",
        reader=_gpt_bigcode,
        numerics=Usual(**GPT),
        weights=Family(
            names=(
                (r"\.embed_tokens\.", ".wte."),
                (r"\.embed_positions\.", ".wpe."),
                (r"^model\.", "transformer."),
                (r"\.layers\.", ".h."),
                (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
                (r"\.self_attn\.c_attn\.", ".attn.c_attn."),
                (r"\.input_layernorm\.", ".ln_1."),
                (r"\.post_attention_layernorm\.", ".ln_2."),
                (r"\.up_proj\.", ".c_fc."),
                (r"\.down_proj\.", ".c_proj."),
                (r"^transformer\.norm\.", "transformer.ln_f."),
            ),
            together=(of_each_group("q_proj k_proj v_proj", "c_attn"),),
            ignored=TABLES,
            copies=(("lm_head.weight", "model.embed_tokens.weight"),),
        ),
    ),
    ModelType(
        name="gpt_neo",
        attention="by_flash",
        reader=_gpt_neo,
        numerics=Usual(**GPT),
        weights=Family(
            names=(
                (r"\.embed_tokens\.", ".wte."),
                (r"\.embed_positions\.", ".wpe."),
                (r"^model\.", "transformer."),
                (r"\.layers\.", ".h."),
                (r"\.self_attn\.o_proj\.", ".attn.attention.out_proj."),
                (r"\.self_attn\.", ".attn.attention."),
                (r"\.input_layernorm\.", ".ln_1."),
                (r"\.post_attention_layernorm\.", ".ln_2."),
                (r"\.up_proj\.", ".c_fc."),
                (r"\.down_proj\.", ".c_proj."),
                (r"^transformer\.norm\.", "transformer.ln_f."),
            ),
            ignored=TABLES,
            copies=(("lm_head.weight", "model.embed_tokens.weight"),),
        ),
    ),
    ModelType(
        name="mpt",
        reader=_mpt,
        numerics=Usual(**GPT),
        weights=Family(
            names=(
                (r"\.embed_tokens\.", ".wte."),
                (r"^model\.norm\.", "transformer.norm_f."),
                (r"^model\.", "transformer."),
                (r"\.layers\.", ".blocks."),
                (r"\.self_attn\.o_proj\.", ".attn.out_proj."),
                (r"\.self_attn\.", ".attn."),
                (r"\.input_layernorm\.", ".norm_1."),
                (r"\.post_attention_layernorm\.", ".norm_2."),
                (r"\.mlp\.", ".ffn."),
            ),
            fused_linears={"q_proj k_proj v_proj": "Wqkv"},
            copies=HEAD,
        ),
    ),
)
"""Of GPT's time."""
