"""BART and those built like it: encoder and decoder with absolute positions, linears with biases, LayerNorms.

`bart(config)` returns a Graph whose decoder layers read the encoder's output, as T5's do. mBART and M2M100 (NLLB) have
norms before their sublayers and one at the end of each side, BART and Marian after them; Marian, Pegasus and M2M100
have positions that nobody trains. Leaves out: padding masks, and the bias of the logits, which nobody trains either.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph, Tensor
from gnomon.models.parts import BATCH, LABELS, SEQ, divisible, positive
from gnomon.models.t5 import ENC_SEQ

FIRST_PLACE = 2
"""Row of the table of positions that the first token reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig:
    """A BART-like encoder-decoder."""

    name: str
    """Of the model."""
    num_layers: int
    """Encoder layers."""
    num_decoder_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual streams."""
    num_heads: int
    """Heads of the encoder's attention."""
    num_decoder_heads: int
    """Heads of the decoder's."""
    ffn_size: int
    """Width of the encoder's feed-forward."""
    decoder_ffn_size: int
    """Width of the decoder's."""
    vocab_size: int
    """Rows of the embedding, which both sides and the head share."""
    position_rows: int | None
    """Rows of the table of positions of each side, those before the first token's too; None: they are not trained."""
    pre_norm: bool
    """Norms before sublayers, and one after the last layer of each side."""
    embedding_norm: bool
    """A norm after embeddings."""
    scaled: bool
    """Whether embeddings are multiplied by the root of hidden_size."""
    activation: str = "gelu"
    """Of feed-forwards: a `fn` of activations."""
    dropout: float = 0.1
    """On embeddings and before residuals."""
    attention_dropout: float = 0.0
    """On probabilities."""
    activation_dropout: float = 0.0
    """Inside feed-forwards."""

    def __post_init__(self) -> None:
        positive(num_layers=self.num_layers, num_decoder_layers=self.num_decoder_layers, vocab_size=self.vocab_size)
        positive(hidden_size=self.hidden_size, num_heads=self.num_heads, num_decoder_heads=self.num_decoder_heads)
        positive(ffn_size=self.ffn_size, decoder_ffn_size=self.decoder_ffn_size)
        for heads in (self.num_heads, self.num_decoder_heads):
            divisible("hidden_size", self.hidden_size, "num_heads", heads)


class _Side:
    """Encoder or decoder: its dims and the layers' parts."""

    def __init__(self, c: BartConfig, *, decoder: bool) -> None:
        self.c, self.decoder = c, decoder
        self.name, self.seq = ("decoder", SEQ) if decoder else ("encoder", ENC_SEQ)
        count = c.num_decoder_heads if decoder else c.num_heads
        self.hidden = Dim(name="hidden", size=c.hidden_size)
        self.heads, self.head_dim = Dim(name="heads", size=count), Dim(name="head_dim", size=c.hidden_size // count)
        self.ffn = Dim(name="ffn", size=c.decoder_ffn_size if decoder else c.ffn_size)

    def norm(self, b: BlockBuilder, path: str, x: str, name: str = "") -> str:
        return b.norm(path, x, self.hidden, fn="layer", bias=True, name=name)

    def attention(self, b: BlockBuilder, path: str, x: str, memory: str, *, causal: bool) -> str:
        """q from x, k and v from memory."""
        out = (self.heads, self.head_dim)
        q, k, v = (
            b.linear(f"{path}.{part}_proj", of, out=out, contract=(self.hidden,), bias=True)
            for part, of in (("q", x), ("k", memory), ("v", memory))
        )
        core = b.attention(f"{path}.core", q, k, v, causal=causal, dropout=self.c.attention_dropout)
        return b.linear(f"{path}.out_proj", core, out=(self.hidden,), contract=out, bias=True)

    def feed_forward(self, b: BlockBuilder, x: str) -> str:
        up = b.linear("fc1", x, out=(self.ffn,), contract=(self.hidden,), bias=True)
        act = b.dropout(
            "act.dropout", b.op("activation", "act", (up,), fn=self.c.activation), self.c.activation_dropout
        )
        return b.linear("fc2", act, out=(self.hidden,), contract=(self.ffn,), bias=True)

    def layer(self) -> Block:
        """One layer from `x` (and `memory` in the decoder) to `y`."""
        b, c = BlockBuilder(f"{self.name}_layers"), self.c
        x = b.input("x", BATCH, self.seq, self.hidden)
        parts = [("self_attn", "self_attn_layer_norm")]
        if self.decoder:
            memory = b.input("memory", BATCH, ENC_SEQ, self.hidden)
            parts.append(("encoder_attn", "encoder_attn_layer_norm"))
        parts.append(("ffn", "final_layer_norm"))
        for path, norm in parts:
            last = path == "ffn"
            read = self.norm(b, norm, x) if c.pre_norm else x
            if last:
                out = self.feed_forward(b, read)
            elif path == "self_attn":
                out = self.attention(b, path, read, read, causal=self.decoder)
            else:
                out = self.attention(b, path, read, memory, causal=False)
            end = "y" if last else f"after_{path}"
            dropped = b.dropout(f"{path}.dropout", out, c.dropout)
            if c.pre_norm:
                x = b.add(f"{path}.residual", x, dropped, name=end)
            else:
                x = self.norm(b, norm, b.add(f"{path}.residual", x, dropped), end)
        return b.build(x)

    def embed(self) -> Block:
        """Shared embedding, positions, norm and dropout."""
        b, c = BlockBuilder(f"{self.name}_embed"), self.c
        x = b.embedding("shared", b.input("ids", BATCH, self.seq, dtype="int64"),
                        Dim(name="vocab", size=c.vocab_size), self.hidden)  # fmt: skip
        if c.scaled:
            x = b.op("scale", "scale", (x,), factor=float(c.hidden_size**0.5))
        if c.position_rows is None:
            places = b.state("positions", self.seq, self.hidden, dtype="fp32", lifetime="job")
        else:
            at = b.state("position_ids", self.seq, dtype="int64", lifetime="job")
            table = b.parameter("embed_positions.weight", Dim(name="positions", size=c.position_rows), self.hidden)
            places = b.op("embedding", "embed_positions", (at, table), (self.seq, self.hidden), first=FIRST_PLACE)
        x = b.add("position_sum", x, places)
        if c.embedding_norm:
            x = self.norm(b, "layernorm_embedding", x)
        return b.build(b.dropout("dropout", x, c.dropout))

    def end(self) -> Block:
        """The encoder's last norm: from `x` to `memory`."""
        b = BlockBuilder("encoder_norm")
        return b.build(self.norm(b, "layer_norm", b.input("x", BATCH, self.seq, self.hidden), "memory"))

    def calls(self, source: str, count: int, memory: str = "") -> tuple[Call, Call]:
        """The calls of the embedding and of the layers."""
        own, x = f"{self.name}_embed", self.embed().outputs[0]
        embed = Call(
            block=own, name=own, inputs=(("ids", source),), prefix=f"model.{self.name}",
            params=(("shared.weight", "model.shared.weight"),),
        )  # fmt: skip
        layers = Call(
            block=f"{self.name}_layers",
            name=f"{self.name}_layers",
            inputs=(("x", f"{own}.{x}"), *((("memory", memory),) if memory else ())),
            repeat=count,
            chain=(("y", "x"),),
            first=0,
            prefix=f"model.{self.name}.layers",
        )
        return embed, layers

    def head(self) -> Block:
        """The decoder's last norm where norms go before, head, loss: from `x` and `labels` to the scalar `loss`."""
        b = BlockBuilder("head")
        x = b.input("x", BATCH, self.seq, self.hidden)
        labels = b.input("labels", BATCH, self.seq, dtype="int64")
        if self.c.pre_norm:
            x = self.norm(b, "layer_norm", x)
        logits = b.linear("lm_head", x, out=(Dim(name="vocab", size=self.c.vocab_size),), contract=(self.hidden,),
                          bias=False)  # fmt: skip
        return b.build(b.op("cross_entropy", "loss", (logits, labels), (), dtype="fp32"))


def bart(c: BartConfig) -> Graph:
    """The model as a Graph; inputs `input_ids`, `decoder_input_ids`, `labels`; output `head.loss`."""
    encoder, decoder = _Side(c, decoder=False), _Side(c, decoder=True)
    memory = "encoder_norm.memory" if c.pre_norm else "encoder_layers.y"
    norm = Call(block="encoder_norm", name="encoder_norm", inputs=(("x", "encoder_layers.y"),), prefix="model.encoder")
    head = Call(
        block="head", name="head", inputs=(("x", "decoder_layers.y"), ("labels", "labels")), prefix="model.decoder",
        params=(("lm_head.weight", "model.shared.weight"),),
    )  # fmt: skip
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
            *((encoder.end(),) if c.pre_norm else ()),
            decoder.embed(),
            decoder.layer(),
            decoder.head(),
        ),
        calls=(
            *encoder.calls("input_ids", c.num_layers),
            *((norm,) if c.pre_norm else ()),
            *decoder.calls("decoder_input_ids", c.num_decoder_layers, memory),
            head,
        ),
        outputs=("head.loss",),
    )
