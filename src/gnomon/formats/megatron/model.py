"""The network that Megatron-LM's options describe, as one of our configs.

`model_of(fields, tp, vocab_size)` returns a config; what differs is listed in `fields.unexpressed`. Defaults are those
of NVIDIA/Megatron-LM at commit d98e8a6 (2026-08-22, version 0.20.0): megatron/core/transformer/transformer_config.py,
megatron/training/arguments.py (validate_args, _add_network_size_args), megatron/core/tokenizers/utils/
build_tokenizer.py (vocab_size_with_padding); of Megatron-DeepSpeed 4efb479d53 megatron/model/transformer.py
(get_num_experts_per_layer). Leaves out: BERT, T5, Mamba, vision (`families`), how many tokens a tokenizer has
(`formats.tokenizers`).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from gnomon.errors import CatalogueError, InputError
from gnomon.formats.given import GIVE_MODEL, Network
from gnomon.formats.job import Fields, ModelConfig, divides
from gnomon.formats.shell import unknown
from gnomon.formats.tokenizers import rows_of, rows_of_type
from gnomon.models.decoder import DecoderConfig, Mixture
from gnomon.models.deepseek import DeepseekConfig
from gnomon.models.gpt import GptConfig, GptNeoxConfig
from gnomon.models.llama import LlamaConfig
from gnomon.models.mixtral import MixtralConfig
from gnomon.models.presets import CONFIGS, known_name

DEFAULT_TOKENIZER = "GPT2BPETokenizer"
"""Without --tokenizer-type: pretrain_gpt.py's args_defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronShape:
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
    position: str
    rms: bool
    bias: bool


def vocabulary(f: Fields, tp: int, vocab_size: int | None, default: str = DEFAULT_TOKENIZER) -> int:
    """Rows of the embedding, padded to a multiple of make_vocab_size_divisible_by × tp as Megatron does. A tokenizer
    named by a model of the hub has as many as that model. default: the program's tokenizer where none is given."""
    f.ignore("vocab_size")
    if vocab_size is None and f.has("padded_vocab_size"):
        return f.integer("padded_vocab_size")
    kind = str(f.raw("tokenizer_type") or default)
    size = vocab_size or f.raw("vocab_size") or rows_of_type(kind)
    for key in ("tokenizer_model", "tokenizer_name_or_path", "hf_checkpoint"):
        if size is None and isinstance(name := f.peek(key), str) and unknown(name.rpartition("/")[2]) is None:
            # A tokenizer on disk is named by its folder; the Hub's last word is usually kept.
            plain = name.rpartition("/")[2] if unknown(name) is not None else name  # the folder does not matter
            size = rows_of(plain) or vocabulary_of(plain)
            if size is not None:
                f.note_default(f"vocab_size by {key}", plain, f"{size} tokens, those of the tokenizer of this name")
    if not isinstance(size, int):
        f.fail(
            "vocab_size",
            f"the size of the vocabulary is in the tokenizer's file ({kind}), not in the job; give --vocab-size",
        )
    # Only that tokenizer adds --vocab-extra-ids to its own size in Megatron-LM (T5's sentinels).
    if kind.startswith("BertWordPiece") and vocab_size is None:
        size += f.integer("vocab_extra_ids", 0, least=0)
    if f.has("extra_vocab_size"):  # Pai-Megatron-Patch: no other padding
        return size + f.integer("extra_vocab_size", least=0)
    if f.flag("no_pad_vocab_size", False) or f.flag("disable_pad_vocab_size", False):
        divides("vocab_size", size, "tensor_model_parallel_size", tp)
        return size
    # As _vocab_size_with_padding: padded up so that every tp rank has as many rows, and these a multiple of 128.
    multiple = f.integer("make_vocab_size_divisible_by", 128) * tp
    return -(-size // multiple) * multiple


def vocabulary_of(name: str) -> int | None:
    """Rows of the embedding of a model of the hub whose name ends as a path does; None where none is known."""
    try:
        config = CONFIGS.get(known_name("/".join(name.rstrip("/").split("/")[-2:])))
    except CatalogueError:
        try:
            config = CONFIGS.get(known_name(name.rstrip("/").split("/")[-1]))
        except CatalogueError:
            return None
    return None if config is None else config().vocab_size


def shape_of(f: Fields, tp: int, vocab_size: int | None, tokenizer: str = DEFAULT_TOKENIZER) -> MegatronShape:
    """Sizes, checked as validate_args and TransformerConfig check them."""
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    layers = layers_stated(f)
    gated = f.flag("swiglu", False) or f.flag("gated_linear_unit", False) or f.flag("quick_geglu", False)
    if not f.has("kv_channels"):
        divides("hidden_size", hidden, "num_attention_heads", heads)
    groups = f.integer("num_query_groups", 1)
    # --num-query-groups alone says nothing: core_transformer_config_from_args leaves it at None without the flag.
    kv_heads = groups if f.flag("group_query_attention", False) else heads
    kv_heads = f.integer("num_key_value_heads", kv_heads)  # Megatron-DeepSpeed's name
    divides("num_attention_heads", heads, "tensor_model_parallel_size", tp)
    # With more tp ranks than groups, neighbours hold copies of a group.
    if kv_heads % tp and tp % kv_heads:
        legal = min((n for n in range(1, heads + 1) if kv_heads % n == 0), key=lambda n: abs(n - tp))
        raise InputError(
            f"num_query_groups = {kv_heads} is neither a multiple nor a divisor of tensor_model_parallel_size = {tp}; "
            f"the nearest legal size is {legal}"
        )
    # Two thirds of 4h, rounded down to 64, so that three matrices of SwiGLU are as large as two (validate_args).
    ffn = f.integer("ffn_hidden_size", int((4 * hidden * 2 / 3) / 64) * 64 if f.flag("swiglu", False) else 4 * hidden)
    divides("ffn_hidden_size", ffn, "tensor_model_parallel_size", tp)
    return MegatronShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=f.integer("kv_channels", hidden // heads),
        ffn=ffn,
        vocab=vocabulary(f, tp, vocab_size, tokenizer),
        max_positions=f.integer("max_position_embeddings", f.integer("seq_length", 1)),
        gated=gated,
        tied=not f.flag("untie_embeddings_and_output_weights", False),
        position=position_of(f),
        rms=f.text("normalization", "LayerNorm").lower() == "rmsnorm",
        bias=not f.flag("disable_bias_linear", False),
    )


def layers_stated(f: Fields) -> int:
    """Layers of the decoder, or of the encoder that comes before one; those of a hybrid's pattern where nothing else
    says so many."""
    if f.has("encoder_num_layers") and not f.has("num_layers"):
        return f.integer("encoder_num_layers")
    # Behind `/` are the layers of multi-token prediction; `|` only marks pipeline stages.
    if not f.has("num_layers") and isinstance(pattern := f.peek("hybrid_layer_pattern"), str):
        return len(pattern.partition("/")[0].replace("|", ""))
    f.ignore("encoder_num_layers")
    return f.integer("num_layers")


def position_of(f: Fields) -> str:
    """learned, rope, alibi or none."""
    if f.flag("use_rotary_position_embeddings", False) or f.flag("use_llama2_rotary_position_embeddings", False):
        return "rope"
    # Scaled angles cost what plain ones do, so yarn and mrope are read as rope.
    names = {"learned_absolute": "learned", "absolute": "learned", "rope": "rope", "rotary": "rope", "yarn": "rope"}
    names |= {"mrope": "rope", "alibi": "alibi", "none": "none"}
    return f.choice("position_embedding_type", names, "learned_absolute")


def model_of(f: Fields, tp: int, vocab_size: int | None, name: str) -> Network:
    """The network of the options; what it leaves out of them is reported."""
    s = shape_of(f, tp, vocab_size)
    latent, experts = f.flag("multi_latent_attention", False), _experts(f)
    if latent:
        return _latent(f, s, name, experts)
    rotary = s.position == "rope"
    plain = f.peek("embed_layernorm") is None and s.rms
    if experts:
        simple = plain and s.gated and rotary and not f.peek("moe_shared_expert_intermediate_size")
        simple = simple and scores_of(f) == "softmax" and f.peek("moe_router_enable_expert_bias") is not True
        # Every layer routed and nothing beside the experts: this is Mixtral, whose graph is also the one with HF
        # weights.
        if simple and not f.has("expert_interval") and f.peek("moe_layer_freq") in (None, 1):
            return _mixtral(f, s, name, experts)
        return _decoder(f, s, name, experts)
    if plain and s.gated and rotary:
        _llama_like(f)
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
            qkv_bias=s.bias or f.flag("add_qkv_bias", False),
            out_bias=s.bias,
            ffn_bias=s.bias,
            qk_norm=f.flag("qk_layernorm", False),
            window=_window(f),
        )
    # A config of GPT-2 or GPT-NeoX has no field for any of these.
    same = s.kv_heads == s.heads and s.head_dim * s.heads == s.hidden and not f.flag("squared_relu", False)
    if same and not s.gated and not s.rms and s.bias and s.position == "learned" and not f.peek("embed_layernorm"):
        return _gpt(f, s, name)
    if same and not s.gated and not s.rms and s.bias and rotary and not f.peek("embed_layernorm"):
        return _neox(f, s, name)
    return _decoder(f, s, name, 0)


def _experts(f: Fields) -> int:
    """Experts of a layer; 0 for none, and for the one that Megatron-DeepSpeed counts in a dense layer."""
    experts_value = f.raw("num_experts")
    counts = experts_value if isinstance(experts_value, tuple) else (experts_value,)
    # Megatron-DeepSpeed's --num-experts defaults to [1], which is a dense feed-forward.
    if experts_value is None or (set(counts) == {1} and f.flag("deepspeed", False)):
        f.ignore("expert_interval", "topk", "mlp_type")
        return 0
    count = counts[0]
    if len(set(counts)) > 1 or not isinstance(count, int) or count < 1:
        f.fail("num_experts", f"{experts_value!r}: experts that differ by layer are no network here; {GIVE_MODEL}")
    return count


def _decoder(f: Fields, s: MegatronShape, name: str, experts: int) -> DecoderConfig:
    """Describes any other decoder, part by part."""
    activation = "relu2" if f.flag("squared_relu", False) else "silu" if s.gated else "gelu"
    if s.gated and f.flag("quick_geglu", False):
        f.report("quick_geglu", "a gated GELU: read as SiLU, which costs the same")
    mixture = None
    if experts:
        width = f.integer("moe_ffn_hidden_size", s.ffn)
        pattern = _pattern_of(f, s.layers)
        # First dense layers are a number in our configs (DeepSeek's), anything more regular a pattern behind them.
        dense = next((i for i, routed in enumerate(pattern) if routed), len(pattern))
        rest = pattern[dense:]
        if f.text("mlp_type", "standard") == "residual":
            f.fail(
                "mlp_type",
                f"residual experts (a dense feed-forward beside the routed one) are no network here; {GIVE_MODEL}",
            )
        mixture = Mixture(
            num_experts=experts,
            experts_per_token=f.integer("topk", 1) if f.flag("deepspeed", False) else f.integer("moe_router_topk", 2),
            expert_ffn_size=width,
            router=scores_of(f),
            router_bias=f.peek("moe_router_enable_expert_bias") is True,
            shared_ffn_size=f.integer("moe_shared_expert_intermediate_size", 0, least=0),
            shared_gate=f.flag("moe_shared_expert_gate", False),
            num_dense_layers=dense,
            pattern=() if all(rest) else rest,
            gated=s.gated,
            activation=activation,
        )
        f.report("mtp_num_layers", "multi-token prediction modules: left out, so too small")
    return DecoderConfig(
        name=name,
        num_layers=s.layers,
        hidden_size=s.hidden,
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        ffn_size=s.ffn,
        vocab_size=s.vocab,
        tied=s.tied,
        norm="rms" if s.rms else "layer",
        norm_bias=not s.rms,
        gated=s.gated,
        activation=activation,
        qkv_bias=s.bias or f.flag("add_qkv_bias", False),
        out_bias=s.bias,
        ffn_bias=s.bias,
        qk_norm=f.flag("qk_layernorm", False),
        rotary=s.position == "rope",
        position_rows=s.max_positions if s.position == "learned" else 0,
        embed_norm=f.flag("embed_layernorm", False),
        windows=(_window(f),),
        dropout=f.number("hidden_dropout", 0.1),
        attention_dropout=f.number("attention_dropout", 0.1),
        mixture=mixture,
    )


def _llama_like(f: Fields) -> None:
    """Report what a Llama-like config cannot say."""
    f.report("quick_geglu", "a gated GELU: read as SiLU, which costs the same")
    for key in ("attention_dropout", "hidden_dropout"):
        if f.number(key, 0.1) > 0:
            f.report(
                key, "dropout (0.1 unless set): a Llama-like model has none here; its masks and passes are left out"
            )
            if not f.has(key):
                f.note_default(key, "0.1", "Megatron-LM's default; a Llama-like model has no dropout here")


def _gpt(f: Fields, s: MegatronShape, name: str) -> GptConfig:
    """Describes GPT-2 or GPT-3."""
    return GptConfig(
        name=name,
        num_layers=s.layers,
        hidden_size=s.hidden,
        num_heads=s.heads,
        vocab_size=s.vocab,
        max_positions=s.max_positions,
        ffn_size=s.ffn,
        dropout=f.number("hidden_dropout", 0.1),
        attention_dropout=f.number("attention_dropout", 0.1),
        tied=s.tied,
    )


def _neox(f: Fields, s: MegatronShape, name: str) -> ModelConfig:
    """GPT-NeoX without its parallel residual."""
    for key in ("hidden_dropout", "attention_dropout"):
        if (value := f.number(key, 0.1)) > 0:
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


def scores_of(f: Fields) -> Literal["softmax", "sigmoid"]:
    """How a router's scores are made; Megatron-LM's default is a softmax."""
    f.report_unless(
        "moe_router_score_function", (None, "softmax", "sigmoid"), "no score function here: read as softmax"
    )
    return "sigmoid" if f.peek("moe_router_score_function") == "sigmoid" else "softmax"


def _latent_scores(f: Fields) -> Literal["softmax", "sigmoid"]:
    """The same for DeepSeek's: V3's sigmoids have biases, V2's softmax has none."""
    scores, biased = scores_of(f), f.peek("moe_router_enable_expert_bias") is True
    if biased and scores == "softmax":
        f.report("moe_router_enable_expert_bias", "a softmax router with biases is not described here: left out")
    # DeepSeek-V3's builder has biases with sigmoids. They cost nothing that a step would show.
    if not biased and scores == "sigmoid":
        f.note_default("moe_router_enable_expert_bias", "not given", "biases of routers, which DeepSeek-V3 has")
    return scores


def _latent(f: Fields, s: MegatronShape, name: str, experts: int) -> DeepseekConfig:
    """DeepSeek-V3, with or without experts."""
    _llama_like(f)
    if not s.gated or s.position != "rope" or not s.rms:
        f.fail(
            "multi_latent_attention",
            f"latent attention is described with SwiGLU, RMSNorm and rotary embedding only; {GIVE_MODEL}",
        )
    width = f.integer("moe_ffn_hidden_size", s.ffn)
    shared = f.integer("moe_shared_expert_intermediate_size", 0, least=0)
    if experts and shared % width:
        f.report("moe_shared_expert_intermediate_size", f"not a multiple of the experts' {width}; rounded up")
    if s.bias:
        f.note_default("disable_bias_linear", "not given", "biases in linear layers, which DeepSeek-V3 has not")
    mtp = f.integer("mtp_num_layers", 0, least=0)
    if mtp > 1:
        f.report("mtp_num_layers", "more than one multi-token prediction module; read as one")
    return DeepseekConfig(
        name=name,
        num_layers=s.layers,
        num_dense_layers=_dense_layers(f, s.layers) if experts else s.layers,
        hidden_size=s.hidden,
        num_heads=s.heads,
        q_rank=f.integer("q_lora_rank", 0, least=0),
        kv_rank=f.integer("kv_lora_rank", 32),
        nope_dim=f.integer("qk_head_dim", 128),
        rope_dim=f.integer("qk_pos_emb_head_dim", 64),
        v_head_dim=f.integer("v_head_dim", 128),
        ffn_size=s.ffn,
        num_experts=experts or 1,
        experts_per_token=f.integer("moe_router_topk", 2) if experts else 1,
        num_shared_experts=-(-shared // width) if experts else 0,
        expert_ffn_size=width,
        vocab_size=s.vocab,
        router=_latent_scores(f) if experts else "sigmoid",
        num_groups=f.integer("moe_router_num_groups", 1),
        groups_per_token=f.integer("moe_router_group_topk", 1),
        mtp_modules=min(mtp, 1) if experts else 0,
    )


def _mixtral(f: Fields, s: MegatronShape, name: str, experts: int) -> MixtralConfig:
    """Experts in every layer, none of them shared."""
    _llama_like(f)
    f.report("mtp_num_layers", "multi-token prediction modules: left out, so too small")
    return MixtralConfig(
        name=name,
        num_layers=s.layers,
        hidden_size=s.hidden,
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        num_experts=experts,
        experts_per_token=f.integer("moe_router_topk", 2),
        expert_ffn_size=f.integer("moe_ffn_hidden_size", s.ffn),
        vocab_size=s.vocab,
        qk_norm=f.flag("qk_layernorm", False),
        qkv_bias=s.bias or f.flag("add_qkv_bias", False),
        out_bias=s.bias,
        window=_window(f),
        tied=s.tied,
    )


def _window(f: Fields) -> int:
    """`--window-size LEFT,RIGHT` in tokens, the query itself counted; 0 without."""
    window = f.raw("window_size")
    if window is None:
        return 0
    f.report("window_attn_skip_freq", "some layers see everything: read as windowed, so too fast")
    words = str(window).strip("()[] ").replace(" ", "").split(",")
    if len(words) == 2 and words[0].isdigit() and words[1] == "0":
        return int(words[0]) + 1
    f.report("window_size", "not a causal window: left out, so too slow")
    return 0


def _dense_layers(f: Fields, layers: int) -> int:
    """How many first layers are dense under --moe-layer-freq; reported when the dense ones are not the first."""
    pattern = _pattern_of(f, layers)
    dense = pattern.count(False)
    if any(pattern[:dense]):
        f.report("moe_layer_freq", "dense layers are not the first ones: read as if they were; the totals are the same")
    return dense


def _pattern_of(f: Fields, layers: int) -> tuple[bool, ...]:
    """Says which layers are mixtures: --moe-layer-freq, or every expert_interval-th of Megatron-DeepSpeed."""
    if f.flag("deepspeed", False):
        every = f.integer("expert_interval", 2)
        return tuple((i + 1) % every == 0 for i in range(layers))
    frequency = f.raw("moe_layer_freq")
    if frequency in (None, 1):
        return (True,) * layers
    if isinstance(frequency, int):
        pattern = [0 if i % frequency else 1 for i in range(layers)]
    else:
        try:
            pattern = _pattern(ast.parse(str(frequency).strip("'\""), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError):
            f.fail("moe_layer_freq", f"moe_layer_freq {frequency!r} is not an integer or a list like ([0]*3+[1]*58)")
    if len(pattern) != layers:
        f.fail("moe_layer_freq", f"moe_layer_freq lists {len(pattern)} layers, but num_layers is {layers}")
    return tuple(map(bool, pattern))


def _pattern(node: ast.expr) -> list[int]:
    """`[0]*3+[1]*58` and the like. ValueError for anything else or over 10,000 layers."""
    match node:
        case ast.List(elts=items) if all(isinstance(i, ast.Constant) and i.value in (0, 1) for i in items):
            return [i.value for i in items]  # type: ignore[attr-defined]
        case ast.BinOp(left=left_operand, op=ast.Add(), right=right):
            return _pattern(left_operand) + _pattern(right)
        case ast.BinOp(left=left_operand, op=ast.Mult(), right=ast.Constant(value=int(times))) if 0 <= times <= 10_000:
            if len(part := _pattern(left_operand)) * times <= 10_000:
                return part * times
    raise ValueError
