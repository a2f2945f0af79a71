"""The model that Megatron-LM's network options describe, as one of our configs.

`model_of(fields, tp, vocab_size)` returns a config, or None when none of ours has that shape; what differs is listed in
`fields.unexpressed`. Defaults are those of NVIDIA/Megatron-LM at commit d98e8a6 (2026-08-22, version 0.20.0):
megatron/core/transformer/transformer_config.py, megatron/training/arguments.py (validate_args, _add_network_size_args),
megatron/core/tokenizers/utils/build_tokenizer.py (vocab_size_with_padding). Leaves out: BERT, T5, Mamba, vision.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gnomon.errors import InputError
from gnomon.formats.job import Fields, ModelConfig, divides
from gnomon.models.deepseek import DeepseekConfig
from gnomon.models.gpt import GptConfig, GptNeoxConfig
from gnomon.models.llama import LlamaConfig
from gnomon.models.mixtral import MixtralConfig

VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Tokenizers whose vocabulary is the same for everybody: GPT-2's merges, Llama 2's model file."""

DEFAULT_TOKENIZER = "GPT2BPETokenizer"
"""Without --tokenizer-type: pretrain_gpt.py's args_defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes that every decoder has."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    gated: bool
    tied: bool


def vocabulary(f: Fields, tp: int, given: int | None) -> int:
    """Rows of the embedding, padded to a multiple of make_vocab_size_divisible_by × tp as Megatron does."""
    tokenizer = f.raw("tokenizer_type") or DEFAULT_TOKENIZER
    size = f.raw("vocab_size") or given or VOCABULARIES.get(str(tokenizer))
    if not isinstance(size, int):
        f.fail(
            "vocab_size",
            f"the size of the vocabulary is in the tokenizer's file ({tokenizer}), not in the job; add --vocab-size to "
            f"its options (in Python give vocab_size=)",
        )
    if f.flag("no_pad_vocab_size", False) or f.flag("disable_pad_vocab_size", False):
        divides("vocab_size", size, "tensor_model_parallel_size", tp)
        return size
    multiple = f.integer("make_vocab_size_divisible_by", 128) * tp
    return f.integer("padded_vocab_size", -(-size // multiple) * multiple)


def shape_of(f: Fields, tp: int, vocab_size: int | None) -> Shape:
    """Sizes, checked as validate_args and TransformerConfig check them."""
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    layers = f.integer("encoder_num_layers") if f.has("encoder_num_layers") else f.integer("num_layers")
    gated = f.flag("swiglu", False) or f.flag("gated_linear_unit", False) or f.flag("quick_geglu", False)
    if not f.has("kv_channels"):
        divides("hidden_size", hidden, "num_attention_heads", heads)
    groups = f.integer("num_query_groups", 1)
    kv_heads = groups if f.flag("group_query_attention", False) else heads
    kv_heads = f.integer("num_key_value_heads", kv_heads)  # Megatron-DeepSpeed's name
    divides("num_attention_heads", heads, "tensor_model_parallel_size", tp)
    if kv_heads % tp and tp % kv_heads:
        legal = min((n for n in range(1, heads + 1) if kv_heads % n == 0), key=lambda n: abs(n - tp))
        raise InputError(
            f"num_query_groups = {kv_heads} is neither a multiple nor a divisor of tensor_model_parallel_size = {tp}; "
            f"the nearest legal size is {legal}"
        )
    ffn = f.integer("ffn_hidden_size", int((4 * hidden * 2 / 3) / 64) * 64 if f.flag("swiglu", False) else 4 * hidden)
    divides("ffn_hidden_size", ffn, "tensor_model_parallel_size", tp)
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=f.integer("kv_channels", hidden // heads),
        ffn=ffn,
        vocab=vocabulary(f, tp, vocab_size),
        max_positions=f.integer("max_position_embeddings"),
        gated=gated,
        tied=not f.flag("untie_embeddings_and_output_weights", False),
    )


def model_of(f: Fields, tp: int, vocab_size: int | None, name: str) -> ModelConfig | None:
    """The config nearest to the options; every difference that remains is reported."""
    s = shape_of(f, tp, vocab_size)
    position = f.text("position_embedding_type", "learned_absolute")
    if f.flag("use_rotary_position_embeddings", False):
        position = "rope"
    rms = f.text("normalization", "LayerNorm") == "RMSNorm"
    bias = not f.flag("disable_bias_linear", False)
    rotary = position in ("rope", "yarn")
    if f.has("num_experts") or f.flag("multi_latent_attention", False):
        return _mixture(f, s, name, rms=rms, bias=bias, rotary=rotary)
    if s.gated and rotary:
        _llama_like(f, rms=rms, bias=bias)
        return LlamaConfig(
            name=name,
            num_layers=s.layers,
            hidden_size=s.hidden,
            num_heads=s.heads,
            num_kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            ffn_size=s.ffn,
            vocab_size=s.vocab,
            tied=s.tied,
            qkv_bias=bias or f.flag("add_qkv_bias", False),
            out_bias=bias,
            ffn_bias=bias,
            qk_norm=f.flag("qk_layernorm", False),
            window=_window(f),
        )
    if (
        not s.gated
        and s.kv_heads == s.heads
        and s.head_dim * s.heads == s.hidden
        and (rotary or position == "learned_absolute")
    ):
        return _gpt(f, s, name, rms=rms, bias=bias, rotary=rotary)
    f.report("position_embedding_type", "with this feed-forward it is a model that none of ours is; give model=")
    f.report("num_query_groups", "grouped queries without a gated feed-forward: none of our models; give model=")
    f.report("swiglu", "a gated feed-forward without rotary embedding: none of our models; give model=")
    return None


def _llama_like(f: Fields, *, rms: bool, bias: bool) -> None:
    """Report what a Llama-like config cannot say."""
    if not rms:
        f.report("normalization", "LayerNorm: read as RMSNorm, which is a little faster and smaller")
    f.report("quick_geglu", "a gated GELU: read as SiLU, which costs the same")
    for key in ("attention_dropout", "hidden_dropout"):
        if f.number(key, 0.1) > 0:
            f.report(
                key, "dropout (0.1 unless set): a Llama-like model has none here; its masks and passes are left out"
            )
            if not f.has(key):
                f.note_default(key, "0.1", "Megatron-LM's default; a Llama-like model has no dropout here")


def _gpt(f: Fields, s: Shape, name: str, *, rms: bool, bias: bool, rotary: bool) -> ModelConfig:
    """GPT-2 or -3, or with rotary embedding GPT-NeoX without its parallel residual."""
    if rms:
        f.report("normalization", "RMSNorm: read as LayerNorm, which is a little slower and larger")
    if not bias:
        f.report("disable_bias_linear", "no biases: read with biases, under 0.1% of the parameters")
    f.report("squared_relu", "read as GELU, which costs a little more")
    dropout, attention = f.number("hidden_dropout", 0.1), f.number("attention_dropout", 0.1)
    if not rotary:
        return GptConfig(
            name=name,
            num_layers=s.layers,
            hidden_size=s.hidden,
            num_heads=s.heads,
            vocab_size=s.vocab,
            max_positions=s.max_positions,
            ffn_size=s.ffn,
            dropout=dropout,
            attention_dropout=attention,
            tied=s.tied,
        )
    for key, value in (("hidden_dropout", dropout), ("attention_dropout", attention)):
        if value > 0:
            f.note_default(
                key, str(value), "dropout, which a GPT-NeoX config has not; its masks and passes are left out"
            )
    return GptNeoxConfig(
        name=name,
        num_layers=s.layers,
        hidden_size=s.hidden,
        num_heads=s.heads,
        ffn_size=s.ffn,
        vocab_size=s.vocab,
        rotary_fraction=f.number("rotary_percent", 1.0),
        parallel_residual=False,
        tied=s.tied,
        activation="gelu_tanh",
    )


def _mixture(f: Fields, s: Shape, name: str, *, rms: bool, bias: bool, rotary: bool) -> ModelConfig | None:
    """Mixtral or DeepSeek-V3."""
    _llama_like(f, rms=rms, bias=bias)
    if not s.gated or not rotary or not f.has("num_experts"):
        f.report("multi_latent_attention", "without experts it is no model of ours; give model=")
        f.report("num_experts", "experts without SwiGLU and rotary embedding are no model of ours; give model=")
        return None
    experts = f.integer("num_experts")
    width = f.integer("moe_ffn_hidden_size", s.ffn)
    topk = f.integer("moe_router_topk", 2)
    dense = _dense_layers(f, s.layers)
    shared = f.integer("moe_shared_expert_intermediate_size", 0, least=0)
    if f.flag("multi_latent_attention", False):
        if shared % width:
            f.report("moe_shared_expert_intermediate_size", f"not a multiple of the experts' {width}; rounded up")
        if bias:
            f.note_default("disable_bias_linear", "not given", "biases in linear layers, which DeepSeek-V3 has not")
        mtp = f.integer("mtp_num_layers", 0, least=0)
        if mtp > 1:
            f.report("mtp_num_layers", "more than one multi-token prediction module; read as one")
        return DeepseekConfig(
            name=name,
            num_layers=s.layers,
            num_dense_layers=dense,
            hidden_size=s.hidden,
            num_heads=s.heads,
            q_rank=f.integer("q_lora_rank", 0, least=0),
            kv_rank=f.integer("kv_lora_rank", 32),
            nope_dim=f.integer("qk_head_dim", 128),
            rope_dim=f.integer("qk_pos_emb_head_dim", 64),
            v_head_dim=f.integer("v_head_dim", 128),
            ffn_size=s.ffn,
            num_experts=experts,
            experts_per_token=topk,
            num_shared_experts=-(-shared // width),
            expert_ffn_size=width,
            vocab_size=s.vocab,
            num_groups=f.integer("moe_router_num_groups", 1),
            groups_per_token=f.integer("moe_router_group_topk", 1),
            mtp_modules=min(mtp, 1),
        )
    if dense:
        f.report("moe_layer_freq", "dense layers among the mixtures: read as mixtures all through, so too large")
    f.report("moe_shared_expert_intermediate_size", "a shared expert without MLA: left out, so too small")
    f.report("mtp_num_layers", "multi-token prediction modules: left out, so too small")
    return MixtralConfig(
        name=name,
        num_layers=s.layers,
        hidden_size=s.hidden,
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        num_experts=experts,
        experts_per_token=topk,
        expert_ffn_size=width,
        vocab_size=s.vocab,
        qk_norm=f.flag("qk_layernorm", False),
        qkv_bias=bias or f.flag("add_qkv_bias", False),
        out_bias=bias,
        window=_window(f),
        tied=s.tied,
    )


def _window(f: Fields) -> int:
    """`--window-size LEFT,RIGHT` in tokens, the query itself counted; 0 without."""
    given = f.raw("window_size")
    if given is None:
        return 0
    f.report("window_attn_skip_freq", "some layers see everything: read as windowed, so too fast")
    words = str(given).strip("()[] ").replace(" ", "").split(",")
    if len(words) == 2 and words[0].isdigit() and words[1] == "0":
        return int(words[0]) + 1
    f.report("window_size", "not a causal window: left out, so too slow")
    return 0


def _dense_layers(f: Fields, layers: int) -> int:
    """How many first layers are dense under --moe-layer-freq; reported when the dense ones are not the first."""
    given = f.raw("moe_layer_freq")
    if given in (None, 1):
        return 0
    if isinstance(given, int):
        pattern = [0 if i % given else 1 for i in range(layers)]
    else:
        try:
            pattern = _pattern(ast.parse(str(given).strip("'\""), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError):
            f.fail("moe_layer_freq", f"moe_layer_freq {given!r} is not an integer or a list like ([0]*3+[1]*58)")
    if len(pattern) != layers:
        f.fail("moe_layer_freq", f"moe_layer_freq lists {len(pattern)} layers, but num_layers is {layers}")
    dense = pattern.count(0)
    if any(pattern[:dense]):
        f.report("moe_layer_freq", "dense layers are not the first ones: read as if they were; the totals are the same")
    return dense


def _pattern(node: ast.expr) -> list[int]:
    """`[0]*3+[1]*58` and the like. ValueError for anything else or over 10,000 layers."""
    match node:
        case ast.List(elts=items) if all(isinstance(i, ast.Constant) and i.value in (0, 1) for i in items):
            return [i.value for i in items]  # type: ignore[attr-defined]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _pattern(left) + _pattern(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))) if 0 <= times <= 10_000:
            if len(part := _pattern(left)) * times <= 10_000:
                return part * times
    raise ValueError
