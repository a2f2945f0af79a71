"""GPT-2 and GPT-3, and GPT-NeoX (rotary, parallel residual, untied).

`gpt(config)` and `gpt_neox(config)` return a Graph of three blocks: embed, layers (run-length coded), head with loss.
q, k, v come from one linear, as in the public code. Leaves out: GPT-3's sparse attention (counted as dense, as every
published FLOPs figure does).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph
from gnomon.models.parts import (
    BATCH,
    INPUT_IDS,
    LABELS,
    SEQ,
    attention_dims,
    dense_ffn,
    divisible,
    embed_block,
    embed_call,
    head_block,
    head_call,
    positive,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """A GPT decoder with learned positions, biases everywhere and a tied head."""

    name: str
    """Of the model."""
    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Heads; divides hidden_size."""
    vocab_size: int
    """Rows of the embedding, padding included."""
    max_positions: int
    """Rows of the learned position embedding; the longest sequence."""
    ffn_size: int = 0
    """Width of the feed-forward; 0 is 4 × hidden_size."""
    dropout: float = 0.0
    """After the embedding, the attention output and the feed-forward."""
    attention_dropout: float = 0.0
    """Of the attention probabilities."""
    activation: str = "gelu_tanh"
    """Of the feed-forward."""
    tied: bool = True
    """Whether lm_head is the embedding table."""

    def __post_init__(self) -> None:
        positive(num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads)
        positive(vocab_size=self.vocab_size, max_positions=self.max_positions)
        divisible("hidden_size", self.hidden_size, "num_heads", self.num_heads)


def fused_qkv(b: BlockBuilder, path: str, x: str, hidden: Dim, heads: Dim, head_dim: Dim, *, outer: bool) -> list[str]:
    """q, k and v from one linear `path`; outer: three slabs (GPT-2), otherwise three parts in each head (NeoX)."""
    # Where the three lie decides what tensor-parallel ranks can take: heads are contiguous in NeoX's rows, and in
    # GPT-2's only within each slab.
    three = Dim(name="qkv", size=3)
    out = (three, heads, head_dim) if outer else (heads, three, head_dim)
    fused = b.linear(path, x, out=out, contract=(hidden,), bias=True)
    names = [f"{path}.{letter}" for letter in "qkv"]
    dims = (*b.dims(x)[:-1], heads, head_dim)
    return list(b.split(f"{path}.split", fused, {name: dims for name in names}))


def attention_sublayer(b: BlockBuilder, c: GptConfig, x: str, hidden: Dim) -> str:
    """GPT-2's attention with the norm before it and the residual after it."""
    heads, _, head_dim = attention_dims(c.num_heads, c.num_heads, c.hidden_size // c.num_heads)
    q, k, v = fused_qkv(
        b, "attn.c_attn", b.norm("ln_1", x, hidden, fn="layer", bias=True), hidden, heads, head_dim, outer=True
    )
    core = b.attention("attn.core", q, k, v, causal=True, dropout=c.attention_dropout)
    out = b.linear("attn.c_proj", core, out=(hidden,), contract=(heads, head_dim), bias=True)
    return b.add("attention_residual", x, b.dropout("attn.resid_dropout", out, c.dropout))


def gpt_layer(c: GptConfig) -> Block:
    """One GPT-2 layer from `x` to `y`."""
    hidden, ffn = Dim(name="hidden", size=c.hidden_size), Dim(name="ffn", size=c.ffn_size or 4 * c.hidden_size)
    b = BlockBuilder("layers")
    x = b.input("x", BATCH, SEQ, hidden)
    middle = attention_sublayer(b, c, x, hidden)
    normed = b.norm("ln_2", middle, hidden, fn="layer", bias=True)
    out = dense_ffn(b, normed, hidden, ffn, fn=c.activation, bias=True, paths=("mlp.c_fc", "mlp.c_proj"))
    return b.build(b.add("mlp_residual", middle, b.dropout("mlp.dropout", out, c.dropout), name="y"))


def gpt_embed(c: GptConfig) -> Block:
    """Token and position embedding, then dropout: from `input_ids` to `x`."""
    hidden = Dim(name="hidden", size=c.hidden_size)
    b = BlockBuilder("embed")
    ids = b.input("input_ids", BATCH, SEQ, dtype="int64")
    places = b.state("position_ids", SEQ, dtype="int64", lifetime="job")
    words = b.embedding("wte", ids, Dim(name="vocab", size=c.vocab_size), hidden)
    positions = b.embedding("wpe", places, Dim(name="positions", size=c.max_positions), hidden)
    return b.build(b.dropout("drop", b.add("embed_sum", words, positions), c.dropout))


def gpt(c: GptConfig) -> Graph:
    """The model as a Graph; inputs `input_ids` and `labels`, output `head.loss`."""
    hidden, vocab = Dim(name="hidden", size=c.hidden_size), Dim(name="vocab", size=c.vocab_size)
    embed = gpt_embed(c)
    layers = Call(
        block="layers",
        name="layers",
        inputs=(("x", f"embed.{embed.outputs[0]}"),),
        repeat=c.num_layers,
        chain=(("y", "x"),),
        first=0,
        prefix="transformer.h",
    )
    table = "transformer.wte.weight" if c.tied else "lm_head.weight"
    return Graph(
        name=c.name,
        inputs=(INPUT_IDS, LABELS),
        blocks=(embed, gpt_layer(c), head_block(vocab, hidden, fn="layer", bias=True)),
        calls=(
            embed_call("transformer"),
            layers,
            head_call("layers.y", norm="transformer.ln_f", lm_head=table, bias=True),
        ),
        outputs=("head.loss",),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GptNeoxConfig:
    """The sizes of a GPT-NeoX decoder: rotary on part of each head, biases, untied head."""

    name: str
    """Of the model."""
    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Heads; divides hidden_size."""
    ffn_size: int
    """Width of the feed-forward."""
    vocab_size: int
    """Rows of the embedding, padding included."""
    rotary_fraction: float = 0.25
    """Part of each head that is rotated."""
    parallel_residual: bool = True
    """Whether attention and feed-forward read the same residual (two norms of x), rather than one after the other."""
    tied: bool = False
    """Whether the output head is the embedding table."""
    activation: str = "gelu"
    """Of the feed-forward."""

    def __post_init__(self) -> None:
        positive(num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads)
        positive(ffn_size=self.ffn_size, vocab_size=self.vocab_size)
        divisible("hidden_size", self.hidden_size, "num_heads", self.num_heads)


def gpt_neox_layer(c: GptNeoxConfig) -> Block:
    """One GPT-NeoX layer from `x` to `y`."""
    hidden, ffn = Dim(name="hidden", size=c.hidden_size), Dim(name="ffn", size=c.ffn_size)
    heads, _, head_dim = attention_dims(c.num_heads, c.num_heads, c.hidden_size // c.num_heads)
    b = BlockBuilder("layers")
    x = b.input("x", BATCH, SEQ, hidden)
    normed = b.norm("input_layernorm", x, hidden, fn="layer", bias=True)
    q, k, v = fused_qkv(b, "attention.query_key_value", normed, hidden, heads, head_dim, outer=False)
    q = b.op("rotary", "attention.q_rotary", (q,), fraction=c.rotary_fraction)
    k = b.op("rotary", "attention.k_rotary", (k,), fraction=c.rotary_fraction)
    core = b.attention("attention.core", q, k, v, causal=True)
    attended = b.linear("attention.dense", core, out=(hidden,), contract=(heads, head_dim), bias=True)
    # Parallel: y = x + attention(norm(x)) + ffn(norm'(x)), summed as (ffn + attention) + x; otherwise each reads what
    # came before.
    source = x if c.parallel_residual else b.add("attention_residual", x, attended)
    normed = b.norm("post_attention_layernorm", source, hidden, fn="layer", bias=True)
    paths = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    out = dense_ffn(b, normed, hidden, ffn, fn=c.activation, bias=True, paths=paths)
    if c.parallel_residual:
        out = b.add("parallel_sum", out, attended)
    return b.build(b.add("mlp_residual", source, out, name="y"))


def gpt_neox(c: GptNeoxConfig) -> Graph:
    """The model as a Graph; inputs `input_ids` and `labels`, output `head.loss`."""
    hidden, vocab = Dim(name="hidden", size=c.hidden_size), Dim(name="vocab", size=c.vocab_size)
    layers = Call(
        block="layers",
        name="layers",
        inputs=(("x", "embed.x"),),
        repeat=c.num_layers,
        chain=(("y", "x"),),
        first=0,
        prefix="gpt_neox.layers",
    )
    table = "gpt_neox.embed_in.weight" if c.tied else "embed_out.weight"
    return Graph(
        name=c.name,
        inputs=(INPUT_IDS, LABELS),
        blocks=(
            embed_block(vocab, hidden, path="embed_in"),
            gpt_neox_layer(c),
            head_block(vocab, hidden, fn="layer", bias=True),
        ),
        calls=(
            embed_call("gpt_neox"),
            layers,
            head_call("layers.y", norm="gpt_neox.final_layer_norm", lm_head=table, bias=True),
        ),
        outputs=("head.loss",),
    )


def _gpt(name: str, layers: int, hidden: int, heads: int, *, positions: int) -> GptConfig:
    return GptConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        vocab_size=50257,
        max_positions=positions,
        dropout=0.1,
        attention_dropout=0.1,
    )


def gpt2() -> GptConfig:
    """GPT-2 124M. Source: Radford et al. 2019 and its config.json (openai-community/gpt2)."""
    return replace(_gpt("gpt2", 12, 768, 12, positions=1024), activation="gelu_new")


def gpt2_xl() -> GptConfig:
    """GPT-2 1.5B. Source: Radford et al. 2019 and its config.json (openai-community/gpt2-xl)."""
    return replace(_gpt("gpt2-xl", 48, 1600, 25, positions=1024), activation="gelu_new")


def gpt3_175b() -> GptConfig:
    """GPT-3 175B, with GPT-2's vocabulary and dropout 0.1. Source: Brown et al. 2020, table 2.1."""
    return _gpt("gpt3-175b", 96, 12288, 96, positions=2048)


def _neox(name: str, layers: int, hidden: int, heads: int, vocab: int) -> GptNeoxConfig:
    return GptNeoxConfig(
        name=name, num_layers=layers, hidden_size=hidden, num_heads=heads, ffn_size=4 * hidden, vocab_size=vocab
    )


def gpt_neox_20b() -> GptNeoxConfig:
    """GPT-NeoX-20B. Source: Black et al. 2022, table 1, and its config.json."""
    return _neox("gpt-neox-20b", 44, 6144, 64, 50432)


def pythia_1_4b() -> GptNeoxConfig:
    """Pythia 1.4B. Source: Biderman et al. 2023, table 1, and its config.json."""
    return _neox("pythia-1.4b", 24, 2048, 16, 50304)
