"""T5: encoder and decoder with relative position biases; relu feed-forward (v1.0) or gated gelu (v1.1, Flan).

`t5(config)` returns a Graph that is a DAG: every decoder layer reads the encoder's output. Encoder tokens are the dim
`enc_seq`, decoder tokens `seq`. One bias table a side, made once and read by all its layers, as in the public code.
Leaves out: padding masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph, Tensor, kv_dim
from gnomon.models.parts import BATCH, LABELS, SEQ, positive

ENC_SEQ = Dim(name="enc_seq")
"""Tokens that the encoder reads; the workload gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config:
    """A T5 encoder-decoder."""

    name: str
    """Of the model."""
    num_layers: int
    """Encoder layers."""
    num_decoder_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual streams."""
    num_heads: int
    """Heads of every attention."""
    head_dim: int
    """Width of a head (d_kv); heads × head_dim need not be hidden_size."""
    ffn_size: int
    """Width of the feed-forward."""
    vocab_size: int
    """Rows of the embedding, which encoder and decoder share."""
    gated: bool
    """Gated gelu feed-forward with two input linears (v1.1), rather than relu with one (v1.0)."""
    tied: bool
    """Whether the head is the embedding table (v1.0), with the output scaled by hidden^(-1/2)."""
    scaled: bool | None = None
    """Whether what the head reads is scaled by hidden^(-1/2); None: where it is tied."""
    buckets: int = 32
    """Rows of the relative position bias."""
    max_distance: int = 128
    """Tokens from which on distances share the last row."""
    dropout: float = 0.1
    """On embeddings, probabilities, inside feed-forwards and before residuals and the head."""

    def __post_init__(self) -> None:
        positive(num_layers=self.num_layers, num_decoder_layers=self.num_decoder_layers, buckets=self.buckets)
        positive(hidden_size=self.hidden_size, num_heads=self.num_heads, head_dim=self.head_dim)
        positive(ffn_size=self.ffn_size, vocab_size=self.vocab_size)


class _Side:
    """Encoder or decoder: its dims and the layers' parts."""

    def __init__(self, c: T5Config, *, decoder: bool) -> None:
        self.c, self.decoder = c, decoder
        self.seq = SEQ if decoder else ENC_SEQ
        self.hidden = Dim(name="hidden", size=c.hidden_size)
        self.heads, self.head_dim = Dim(name="heads", size=c.num_heads), Dim(name="head_dim", size=c.head_dim)
        self.bias_dims = (self.seq, kv_dim(self.seq), self.heads)
        self.name = "decoder" if decoder else "encoder"

    def sublayer(self, b: BlockBuilder, path: str, x: str, out: str, name: str) -> str:
        """x plus the dropped-out result of a sublayer."""
        return b.add(f"{path}.residual", x, b.dropout(f"{path}.dropout", out, self.c.dropout), name=name)

    def attention(self, b: BlockBuilder, path: str, x: str, memory: str, *, bias: str, causal: bool) -> str:
        """q from x, k and v from memory; T5 does not scale scores."""
        out = (self.heads, self.head_dim)
        q = b.linear(f"{path}.q", x, out=out, contract=(self.hidden,), bias=False)
        k = b.linear(f"{path}.k", memory, out=out, contract=(self.hidden,), bias=False)
        v = b.linear(f"{path}.v", memory, out=out, contract=(self.hidden,), bias=False)
        core = b.attention(f"{path}.core", q, k, v, causal=causal, bias=bias, scale=1.0, dropout=self.c.dropout)
        return b.linear(f"{path}.o", core, out=(self.hidden,), contract=out, bias=False)

    def ffn(self, b: BlockBuilder, path: str, x: str) -> str:
        """relu or gated gelu, with dropout inside."""
        ffn = Dim(name="ffn", size=self.c.ffn_size)
        inner = f"{path}.DenseReluDense"
        if self.c.gated:
            gate = b.linear(f"{inner}.wi_0", x, out=(ffn,), contract=(self.hidden,), bias=False)
            up = b.linear(f"{inner}.wi_1", x, out=(ffn,), contract=(self.hidden,), bias=False)
            act = b.op("glu", f"{inner}.act", (gate, up), fn="gelu_tanh")
        else:
            up = b.linear(f"{inner}.wi", x, out=(ffn,), contract=(self.hidden,), bias=False)
            act = b.op("activation", f"{inner}.act", (up,), fn="relu")
        act = b.dropout(f"{inner}.dropout", act, self.c.dropout)
        return b.linear(f"{inner}.wo", act, out=(self.hidden,), contract=(ffn,), bias=False)

    def layer(self) -> Block:
        """One layer from `x` (and `memory` in the decoder) and `bias` to `y`."""
        b = BlockBuilder(f"{self.name}_layers")
        x = b.input("x", BATCH, self.seq, self.hidden)
        bias = b.input("bias", *self.bias_dims)
        normed = b.norm("layer.0.layer_norm", x, self.hidden, fn="rms", bias=False)
        out = self.attention(b, "layer.0.SelfAttention", normed, normed, bias=bias, causal=self.decoder)
        x = self.sublayer(b, "layer.0", x, out, "after_self_attention")
        last = "layer.1"
        if self.decoder:
            memory = b.input("memory", BATCH, ENC_SEQ, self.hidden)
            normed = b.norm("layer.1.layer_norm", x, self.hidden, fn="rms", bias=False)
            # Distances between tokens of two sequences mean nothing: cross-attention has no relative bias, and no mask
            # of later tokens.
            out = self.attention(b, "layer.1.EncDecAttention", normed, memory, bias="", causal=False)
            x = self.sublayer(b, "layer.1", x, out, "after_cross_attention")
            last = "layer.2"
        normed = b.norm(f"{last}.layer_norm", x, self.hidden, fn="rms", bias=False)
        return b.build(self.sublayer(b, last, x, self.ffn(b, last, normed), "y"))

    def embed(self) -> Block:
        """Shared embedding and dropout, and the bias of this side's self-attention."""
        b = BlockBuilder(f"{self.name}_embed")
        ids = b.input("ids", BATCH, self.seq, dtype="int64")
        rows = b.embedding("shared", ids, Dim(name="vocab", size=self.c.vocab_size), self.hidden)
        x = b.dropout("dropout", rows, self.c.dropout)
        distance = b.state("bucket", *self.bias_dims[:2], dtype="int64", lifetime="job")
        path = "relative_attention_bias"
        table = b.parameter(f"{path}.weight", Dim(name="buckets", size=self.c.buckets), self.heads)
        # A decoder only looks back, and all rows of its table are for that; an encoder's are halved between back and
        # ahead.
        options: dict[str, Any] = {"max_distance": self.c.max_distance, "two_sided": not self.decoder}
        bias = b.op("embedding", path, (distance, table), self.bias_dims, name="bias", **options)
        return b.build(x, bias)

    def calls(self, source: str, count: int) -> tuple[Call, Call]:
        """The calls of the embedding and of the layers."""
        own = f"{self.name}_embed"
        # Public checkpoints hold the table in the side's first layer, though all its layers read it.
        table = f"{self.name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        params = (("shared.weight", "shared.weight"), ("relative_attention_bias.weight", table))
        x = self.embed().outputs[0]
        inputs = [("x", f"{own}.{x}"), ("bias", f"{own}.bias")]
        if self.decoder:
            inputs.append(("memory", "encoder_norm.memory"))
        embed = Call(block=own, name=own, inputs=(("ids", source),), params=params, prefix="")
        layers = Call(
            block=f"{self.name}_layers",
            name=f"{self.name}_layers",
            inputs=tuple(inputs),
            repeat=count,
            chain=(("y", "x"),),
            first=0,
            prefix=f"{self.name}.block",
        )
        return embed, layers


def encoder_norm(side: _Side) -> Block:
    """The encoder's last norm and dropout: from `x` to `memory`."""
    b = BlockBuilder("encoder_norm")
    x = b.input("x", BATCH, ENC_SEQ, side.hidden)
    p = side.c.dropout
    normed = b.norm("final_layer_norm", x, side.hidden, fn="rms", bias=False, name="normed" if p else "memory")
    return b.build(b.op("dropout", "dropout", (normed,), name="memory", p=p) if p else normed)


def head_block(side: _Side) -> Block:
    """Last norm, dropout, scaling if tied, head, loss: from `x` and `labels` to the scalar `loss`."""
    b = BlockBuilder("head")
    x = b.input("x", BATCH, SEQ, side.hidden)
    labels = b.input("labels", BATCH, SEQ, dtype="int64")
    x = b.dropout("dropout", b.norm("final_layer_norm", x, side.hidden, fn="rms", bias=False), side.c.dropout)
    if side.c.tied if side.c.scaled is None else side.c.scaled:
        x = b.op("scale", "scale", (x,), factor=side.c.hidden_size**-0.5)
    vocab = Dim(name="vocab", size=side.c.vocab_size)
    logits = b.linear("lm_head", x, out=(vocab,), contract=(side.hidden,), bias=False)
    return b.build(b.op("cross_entropy", "loss", (logits, labels), (), dtype="fp32"))


def t5(c: T5Config) -> Graph:
    """The model as a Graph; inputs `input_ids`, `decoder_input_ids`, `labels`; output `head.loss`."""
    encoder, decoder = _Side(c, decoder=False), _Side(c, decoder=True)
    norm = Call(block="encoder_norm", name="encoder_norm", inputs=(("x", "encoder_layers.y"),), prefix="encoder")
    head = Call(
        block="head",
        name="head",
        inputs=(("x", "decoder_layers.y"), ("labels", "labels")),
        prefix="",
        params=(
            ("final_layer_norm.weight", "decoder.final_layer_norm.weight"),
            ("lm_head.weight", "shared.weight" if c.tied else "lm_head.weight"),
        ),
    )
    return Graph(
        name=c.name,
        inputs=(
            Tensor(name="input_ids", dims=(BATCH, ENC_SEQ), dtype="int64"),
            Tensor(name="decoder_input_ids", dims=(BATCH, SEQ), dtype="int64"),
            LABELS,
        ),
        blocks=(
            encoder.embed(),
            encoder.layer(),
            encoder_norm(encoder),
            decoder.embed(),
            decoder.layer(),
            head_block(decoder),
        ),
        calls=(
            *encoder.calls("input_ids", c.num_layers),
            norm,
            *decoder.calls("decoder_input_ids", c.num_decoder_layers),
            head,
        ),
        outputs=("head.loss",),
    )


def _t5(name: str, layers: int, hidden: int, heads: int, ffn: int, *, gated: bool) -> T5Config:
    return T5Config(
        name=name,
        num_layers=layers,
        num_decoder_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        head_dim=64,
        ffn_size=ffn,
        vocab_size=32128,
        gated=gated,
        tied=not gated,
    )


def t5_small() -> T5Config:
    """T5 small (v1.0). Source: Raffel et al. 2020 and its config.json (google-t5/t5-small)."""
    return _t5("t5-small", 6, 512, 8, 2048, gated=False)


def t5_base() -> T5Config:
    """T5 base (v1.0). Source: Raffel et al. 2020 and its config.json (google-t5/t5-base)."""
    return _t5("t5-base", 12, 768, 12, 3072, gated=False)


def flan_t5_base() -> T5Config:
    """Flan-T5 base (v1.1 shapes: gated, untied). Source: its config.json (google/flan-t5-base)."""
    return _t5("flan-t5-base", 12, 768, 12, 2048, gated=True)
