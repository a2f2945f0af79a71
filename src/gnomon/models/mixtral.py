"""Mixtures of experts with a softmax router: Mixtral and Qwen3-MoE.

`mixtral(config)` returns a Graph of embed, layers and head; every layer routes. No token is dropped and none is padded:
an expert's load comes from the workload's router, not from here. Leaves out: the loss that balances experts
(`balance.with_balance_loss` adds it) and capacity factors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gnomon.errors import GraphError
from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph
from gnomon.models.parts import (
    BATCH,
    SEQ,
    DecoderSizes,
    Experts,
    embed_block,
    embed_call,
    head_block,
    head_call,
    language_model,
    layers_call,
    moe_ffn,
    positive,
    self_attention,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(DecoderSizes):
    """A decoder whose every feed-forward is a mixture of experts."""

    num_experts: int
    """Experts of a layer."""
    experts_per_token: int
    """Experts that a token visits."""
    expert_ffn_size: int
    """Width of one expert."""
    window: int = 0
    """Sliding window in tokens; 0 is none."""
    windowed_every: int = 1
    """Of every so many layers the first is windowed, the rest see all (GPT-OSS: 2)."""
    expert_bias: bool = False
    """Experts with biases and a clamped gate (GPT-OSS)."""
    expert_limit: float = 0.0
    """Of that clamp; with it the Graph has sinks, the router's bias and the experts' biases too (0.03 % of GPT-OSS),
    and without it they are left out."""
    expert_alpha: float = 1.702
    """Of that gate."""
    rotary_factor: bool = False
    """YaRN, whose sines and cosines have a factor (GPT-OSS)."""
    moe_path: str = "block_sparse_moe"
    """Module path of the mixture: `block_sparse_moe` (Mixtral) or `mlp` (Qwen3)."""
    dropout: float = 0.0
    """After the attention output and the feed-forward."""
    attention_dropout: float = 0.0
    """Of the attention probabilities."""
    gated: bool = True
    """Gated experts (SwiGLU); otherwise up, GELU and down, as GPT's feed-forward."""
    expert_paths: tuple[str, str, str] = ("w1", "w3", "w2")
    """Names of an expert's gate, up and down linears."""

    def __post_init__(self) -> None:
        DecoderSizes.__post_init__(self)
        positive(expert_ffn_size=self.expert_ffn_size)
        positive(num_experts=self.num_experts, experts_per_token=self.experts_per_token)
        if self.experts_per_token > self.num_experts:
            raise GraphError(f"experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")


def layer_block(c: MixtralConfig, name: str = "layers", window: int | None = None) -> Block:
    """One layer from `x` to `y`. window: in place of the model's."""
    hidden = Dim(name="hidden", size=c.hidden_size)
    a = replace(
        c.attention(window=c.window if window is None else window),
        rotary_factor=c.rotary_factor,
        sinks=c.expert_limit > 0,
        dropout=c.attention_dropout,
    )
    e = Experts(
        experts=Dim(name="experts", size=c.num_experts),
        topk=Dim(name="topk", size=c.experts_per_token),
        ffn=Dim(name="expert_ffn", size=c.expert_ffn_size),
        router="softmax",
        paths=c.expert_paths,
        gated=c.gated,
        biased=c.expert_bias,
        limit=c.expert_limit,
        alpha=c.expert_alpha,
    )
    b = BlockBuilder(name)
    x = b.input("x", BATCH, SEQ, hidden)
    normed = b.norm("input_layernorm", x, hidden, fn="rms", bias=False)
    out = self_attention(b, normed, hidden, a)
    middle = b.add("attention_residual", x, b.dropout("attention_dropout", out, c.dropout))
    normed = b.norm("post_attention_layernorm", middle, hidden, fn="rms", bias=False)
    out = moe_ffn(b, normed, hidden, e, c.moe_path)
    return b.build(b.add("mlp_residual", middle, b.dropout("mlp_dropout", out, c.dropout), name="y"))


def mixtral(c: MixtralConfig) -> Graph:
    """The model as a Graph; inputs `input_ids` and `labels`, output `head.loss`."""
    hidden, vocab = Dim(name="hidden", size=c.hidden_size), Dim(name="vocab", size=c.vocab_size)
    if c.window and c.windowed_every > 1:
        return _alternating(c, hidden, vocab)
    layers = layers_call("layers", "embed.x", first=0, repeat=c.num_layers)
    return language_model(
        c.name,
        (embed_block(vocab, hidden), layer_block(c), head_block(vocab, hidden)),
        (embed_call(), layers, head_call("layers.y", lm_head=c.head_weight)),
    )


def _alternating(c: MixtralConfig, hidden: Dim, vocab: Dim) -> Graph:
    """The same with one call for each layer, since windows alternate; all are of the family `layers`."""
    calls, x = [embed_call()], "embed.x"
    for index in range(c.num_layers):
        block, name = "layer_full" if index % c.windowed_every else "layer_windowed", f"layer_{index}"
        calls.append(
            Call(block=block, name=name, inputs=(("x", x),), first=index, family="layers", prefix="model.layers")
        )
        x = f"{name}.y"
    blocks = [embed_block(vocab, hidden), layer_block(c, "layer_windowed")]
    # Every block of a Graph must be called, and a model of one layer has no full one.
    if c.num_layers > 1:
        blocks.append(layer_block(c, "layer_full", 0))
    blocks.append(head_block(vocab, hidden))
    return language_model(c.name, blocks, (*calls, head_call(x, lm_head=c.head_weight)))


def mixtral_8x7b() -> MixtralConfig:
    """Mixtral 8x7B. Source: Jiang et al. 2024, table 1."""
    return MixtralConfig(
        name="mixtral-8x7b",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        num_experts=8,
        experts_per_token=2,
        expert_ffn_size=14336,
        vocab_size=32000,
    )


def mixtral_8x22b() -> MixtralConfig:
    """Mixtral 8x22B v0.1. Source: its config.json (mistralai/Mixtral-8x22B-v0.1)."""
    return MixtralConfig(
        name="mixtral-8x22b",
        num_layers=56,
        hidden_size=6144,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        num_experts=8,
        experts_per_token=2,
        expert_ffn_size=16384,
        vocab_size=32000,
    )


def _qwen3_moe(name: str, layers: int, hidden: int, heads: int, expert_ffn: int) -> MixtralConfig:
    """Qwen3 MoE: 128 experts of which 8, 4 key heads of 128."""
    return MixtralConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        experts_per_token=8,
        expert_ffn_size=expert_ffn,
        vocab_size=151936,
        qk_norm=True,
        moe_path="mlp",
        expert_paths=("gate_proj", "up_proj", "down_proj"),
    )


def qwen3_30b_a3b() -> MixtralConfig:
    """Qwen3 30B-A3B. Source: its config.json (Qwen/Qwen3-30B-A3B)."""
    return _qwen3_moe("qwen3-30b-a3b", 48, 2048, 32, 768)


def qwen3_235b_a22b() -> MixtralConfig:
    """Qwen3 235B-A22B. Source: its config.json (Qwen/Qwen3-235B-A22B)."""
    return _qwen3_moe("qwen3-235b-a22b", 94, 4096, 64, 1536)
