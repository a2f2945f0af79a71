"""What the readers of Hugging Face configs share: names of activations, heads, windows, and the type of a reader.

A reader takes its keys from `Keys` and returns a decoder's config or a Graph. Leaves out the readers (read,
decoders, mixtures, older, hybrids).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

from gnomon.formats.huggingface.numerics import latent_score_factor
from gnomon.formats.keys import Keys
from gnomon.graph import Graph
from gnomon.models.deepseek import DeepseekConfig
from gnomon.models.presets import Config

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
"""Their names of activations -> ours."""

SILU = {"silu": "silu", "swish": "silu"}
"""Those of experts."""


HEAD_NORMS = "its norms over all heads of q and k are counted as norms of each head"
QUANTISED = "quantization_config says how the checkpoint is stored; the plan's precision decides what runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a config.json does not decide."""

    bert_head: Literal["pooler", "mlm", "classifier"] = "pooler"
    """Which BERT: the bare model with its pooler, the masked-language-model head with a loss, or a classifier."""
    mtp: bool = False
    """Whether DeepSeek-V3's multi-token prediction module is part of the model."""
    complete: bool = False
    """Whether the Graph has everything that changes results, to be run, or leaves out what costs next to nothing and
    would be a kernel of its own only here: sinks, biases of experts, multipliers, layers without rotary angles."""


class Notes(list[str]):
    """What a file says that the graph leaves out."""

    balance: float | None = None
    """Coefficient of the loss that balances experts, which any model's graph is given (`models.balance`); None where
    the file adds none."""


def heads_of(k: Keys, hidden: int) -> tuple[int, int, int]:
    """(heads, kv heads, head_dim) with the usual defaults."""
    heads = k.integer("num_attention_heads")
    kv_heads = k.integer("num_key_value_heads", heads)
    if not k.has("head_dim") and hidden % heads:
        k.fail("num_attention_heads", f"hidden_size={hidden} is not a multiple of {heads} heads; give head_dim")
    return heads, kv_heads, k.integer("head_dim", hidden // heads)


class DecoderConfigSizes(TypedDict):
    """What every decoder's config has, by the names of our configs."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool


def sizes_of(k: Keys, *, tied: bool = False, head_dim: int = 0) -> DecoderConfigSizes:
    """The sizes by their usual keys. tied, head_dim: where the file does not say; 0 is hidden_size / heads."""
    hidden = k.integer("hidden_size")
    if head_dim:
        heads, kv_heads = k.integer("num_attention_heads"), k.integer("num_key_value_heads")
        head_dim = k.integer("head_dim", head_dim)
    else:
        heads, kv_heads, head_dim = heads_of(k, hidden)
    return DecoderConfigSizes(
        num_layers=k.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=k.integer("intermediate_size"),
        vocab_size=k.integer("vocab_size"),
        tied=k.flag("tie_word_embeddings", tied),
    )


class Biases(TypedDict):
    """Biases of a layer's linears, by the names of our configs."""

    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool


def biases_of(k: Keys) -> Biases:
    """Reads which linears have biases, as Llama's files say it."""
    attention = k.flag("attention_bias", False)
    return Biases(qkv_bias=attention, out_bias=attention, ffn_bias=k.flag("mlp_bias", False))


def only(k: Keys, options: ReadOptions, key: str, *allowed: object) -> None:
    """A key that a prediction counts as free, and that a model that runs must have at one of these values, or not at
    all."""
    if options.complete:
        k.must_be(key, *allowed)
    else:
        k.ignore(key)


def clipped(k: Keys, options: ReadOptions, notes: Notes) -> None:
    """clip_qkv, which cuts q, k and v off, be it at 0: null is none."""
    only(k, options, "clip_qkv")
    if k.raw("clip_qkv") is not None:
        notes.append("clip_qkv, which cuts q, k and v off, is counted as free")


def factor(k: Keys, options: ReadOptions, key: str) -> float:
    """Reads a factor of the embedding or of scores: 1 where the file does not say, and never 0, which nothing could be
    trained with. A prediction counts it as free."""
    value = k.number(key, 1.0)
    if not value:
        k.fail(key, f"{key}=0 multiplies everything away; give another factor")
    return value if options.complete else 0.0


def balance_loss(k: Keys, options: ReadOptions, notes: Notes, *, known: bool = True, usual: float = 0.001) -> None:
    """The loss of transformers that keeps experts evenly loaded, which it adds where output_router_logits is on. known:
    whether its class has one. usual: its factor where the file does not say. DeepSeek's own loss (`aux_loss_alpha`),
    which no class of transformers computes, is said."""
    key, alpha, by_sequence = "router_aux_loss_coef", k.raw("aux_loss_alpha"), k.raw("seq_aux") is not False
    if isinstance(alpha, int | float) and alpha > 0:
        balance = "sequence" if by_sequence else "layer"
        notes.append(
            f"aux_loss_alpha={alpha} adds nothing: transformers has no such loss; a plan has it as "
            f"experts.balance = '{balance}' with coefficient = {alpha}"
        )
    if known and k.flag("output_router_logits", False):
        notes.balance = k.number(key, usual)
        return
    if not known:
        k.ignore("output_router_logits")
    coefficient = k.raw(key)
    if options.complete and coefficient:
        why = "output_router_logits is off" if known else "its class has no such loss"
        notes.append(
            f"{key}={coefficient} adds nothing: {why}, so transformers does not balance experts by a loss either"
        )


def cap(k: Keys, key: str, absent: float) -> float:
    """Reads a soft cap: null is none, leaving it out is the class's default `absent`, and 0 is a mistake: scores and
    logits are divided by it."""
    if k.raw(key) == 0:
        k.fail(key, f"{key} is 0, which scores are divided by; null is no cap")
    return k.number(key, absent if not k.is_given(key) else 0.0)


def deepseek_of(k: Keys, options: ReadOptions, name: str, *, num_dense_layers: int) -> DeepseekConfig:
    """What the files of DeepSeek-V2 and V3 say by the same keys; groups of experts and the router are the caller's."""
    factor = latent_score_factor({key: k.raw(key) for key in ("rope_scaling", "rope_parameters")})
    nope, rope = k.integer("qk_nope_head_dim"), k.integer("qk_rope_head_dim")
    return DeepseekConfig(
        name=name,
        query_scale=factor * (nope + rope) ** -0.5 if options.complete and factor != 1.0 else 0.0,
        num_layers=k.integer("num_hidden_layers"),
        num_dense_layers=num_dense_layers,
        hidden_size=k.integer("hidden_size"),
        num_heads=k.integer("num_attention_heads"),
        q_rank=k.integer("q_lora_rank") if k.has("q_lora_rank") else 0,
        kv_rank=k.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        v_head_dim=k.integer("v_head_dim"),
        ffn_size=k.integer("intermediate_size"),
        num_experts=k.integer("n_routed_experts"),
        experts_per_token=k.integer("num_experts_per_tok"),
        num_shared_experts=k.integer("n_shared_experts", least=0),
        expert_ffn_size=k.integer("moe_intermediate_size"),
        vocab_size=k.integer("vocab_size"),
    )


def check_layer_types(k: Keys, expected: list[str]) -> None:
    """Newer files list each layer's attention; it must say what the other keys say."""
    layer_types = k.raw("layer_types")
    if layer_types is not None and layer_types != expected:
        k.fail("layer_types", f"layer_types disagrees with the window keys, which give {expected[:4]} …")


def inner(k: Keys, key: str) -> Keys:
    """A config inside another; transformers writes keys of its base class there too."""
    keys = k.inside(key)
    keys.must_be("is_encoder_decoder", False)
    keys.must_be("chunk_size_feed_forward", 0)
    return keys


def free_multipliers(k: Keys, notes: Notes) -> None:
    """Granite's factors of embedding, residuals, scores and logits."""
    multipliers = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    if any(k.number(key, 1.0) != 1.0 for key in multipliers):
        notes.append("its multipliers of embedding, residuals, scores and logits are counted as free")


def optional_window(k: Keys, absent: int) -> int:
    """Reads sliding_window: null is none, leaving it out is the class's default `absent`; 0 would see nothing."""
    if k.raw("sliding_window") == 0:
        k.fail("sliding_window", "a window of 0 tokens sees nothing; null is no window")
    return k.integer("sliding_window", absent if not k.is_given("sliding_window") else 0, least=0)


Reader = Callable[[Keys, str, ReadOptions, Notes], Graph | Config]
"""(keys, name, what the file does not decide, notes to add to) -> the model."""
