"""Gemma 2: alternating windowed and full layers, four norms a layer, GeGLU, capped scores and logits, tied head.

`gemma2(config)` returns a Graph with one call for each layer, since windows alternate; all are of the family `layers`.
Leaves out: Gemma 1 and 3 (`gnomon.models.decoder`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.errors import GraphError
from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph
from gnomon.models.parts import (
    BATCH,
    SEQ,
    Attention,
    attention_dims,
    embed_block,
    embed_call,
    gated_ffn,
    head_block,
    head_call,
    language_model,
    positive,
    self_attention,
    with_attribute,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config:
    """A Gemma 2 decoder."""

    name: str
    """Of the model."""
    num_layers: int
    """Decoder layers; even ones (0, 2, …) are windowed."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    ffn_size: int
    """Width of the gated feed-forward."""
    query_scalar: float
    """Scores are scaled by query_scalar^(-1/2)."""
    vocab_size: int = 256000
    """Rows of the embedding."""
    window: int = 4096
    """Of the even layers, in tokens."""
    attention_softcap: float = 50.0
    """Cap of the scores; 0 is none."""
    final_softcap: float = 30.0
    """Cap of the logits; 0 is none."""
    tied: bool = True
    """Whether lm_head is the embedding table."""

    def __post_init__(self) -> None:
        positive(num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads)
        positive(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, ffn_size=self.ffn_size)
        positive(vocab_size=self.vocab_size, window=self.window)
        if not self.query_scalar > 0:
            raise GraphError(f"query_scalar = {self.query_scalar} must be above 0: scores are divided by its root")


def layer_block(c: Gemma2Config, name: str, window: int) -> Block:
    """One layer from `x` to `y`: norms before and after both attention and feed-forward."""
    hidden, ffn = Dim(name="hidden", size=c.hidden_size), Dim(name="ffn", size=c.ffn_size)
    heads, kv_heads, head_dim = attention_dims(c.num_heads, c.num_kv_heads, c.head_dim)
    a = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal=True,
        window=window,
        scale=c.query_scalar**-0.5,
        softcap=c.attention_softcap,
    )
    b = BlockBuilder(name)
    x = b.input("x", BATCH, SEQ, hidden)
    out = self_attention(b, b.norm("input_layernorm", x, hidden, fn="rms", bias=False), hidden, a)
    out = b.norm("post_attention_layernorm", out, hidden, fn="rms", bias=False)
    middle = b.add("attention_residual", x, out)
    normed = b.norm("pre_feedforward_layernorm", middle, hidden, fn="rms", bias=False)
    out = gated_ffn(b, normed, hidden, ffn, fn="gelu_tanh")
    out = b.norm("post_feedforward_layernorm", out, hidden, fn="rms", bias=False)
    return b.build(b.add("mlp_residual", middle, out, name="y"))


def gemma2(c: Gemma2Config) -> Graph:
    """The model as a Graph; inputs `input_ids` and `labels`, output `head.loss`."""
    hidden, vocab = Dim(name="hidden", size=c.hidden_size), Dim(name="vocab", size=c.vocab_size)
    blocks = [embed_block(vocab, hidden, scale=c.hidden_size**0.5), layer_block(c, "layer_windowed", c.window)]
    # Every block of a Graph must be called, and a model of one layer has no full one.
    if c.num_layers > 1:
        blocks.append(layer_block(c, "layer_full", 0))
    calls, x = [embed_call()], "embed.x"
    for index in range(c.num_layers):
        name = f"layer_{index}"
        block = "layer_full" if index % 2 else "layer_windowed"
        calls.append(
            Call(block=block, name=name, inputs=(("x", x),), first=index, family="layers", prefix="model.layers")
        )
        x = f"{name}.y"
    calls.append(head_call(x, lm_head="model.embed_tokens.weight" if c.tied else "lm_head.weight"))
    blocks.append(head_block(vocab, hidden, softcap=c.final_softcap))
    return with_attribute(language_model(c.name, blocks, calls), "norm", "wide", True, fn="rms")


def gemma2_2b() -> Gemma2Config:
    """Gemma 2 2B. Source: Gemma Team 2024, table 1, and its config.json (google/gemma-2-2b)."""
    return Gemma2Config(
        name="gemma-2-2b",
        num_layers=26,
        hidden_size=2304,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        ffn_size=9216,
        query_scalar=256,
    )


def gemma2_9b() -> Gemma2Config:
    """Gemma 2 9B. Source: Gemma Team 2024, table 1, and its config.json (google/gemma-2-9b)."""
    return Gemma2Config(
        name="gemma-2-9b",
        num_layers=42,
        hidden_size=3584,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        ffn_size=14336,
        query_scalar=256,
    )


def gemma2_27b() -> Gemma2Config:
    """Gemma 2 27B. Source: Gemma Team 2024, table 1, and its config.json (google/gemma-2-27b)."""
    return Gemma2Config(
        name="gemma-2-27b",
        num_layers=46,
        hidden_size=4608,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        ffn_size=36864,
        # The hidden size over the heads, where the other sizes have the width of a head.
        query_scalar=144,
    )
