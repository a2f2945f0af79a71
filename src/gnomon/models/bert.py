"""BERT: a bidirectional encoder, norms after the residuals, learned positions and token types.

`bert(config)` returns a Graph of embed, layers and a head: the pooler of the bare model, the masked-language-model
head with its loss, or a classifier of whole sequences, to be served. Leaves out: next-sentence prediction, padding
masks (sequences are taken as full), the loss of classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph
from gnomon.models.parts import BATCH, INPUT_IDS, LABELS, SEQ, attention_dims, dense_ffn, divisible, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """A BERT encoder."""

    name: str
    """Of the model."""
    num_layers: int
    """Encoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Heads; divides hidden_size."""
    ffn_size: int
    """Width of the feed-forward."""
    vocab_size: int
    """Rows of the token embedding."""
    max_positions: int = 512
    """Rows of the position embedding."""
    num_token_types: int = 2
    """Rows of the token-type embedding."""
    dropout: float = 0.1
    """After embedding, attention output and feed-forward."""
    attention_dropout: float = 0.1
    """Of the attention probabilities."""
    activation: str = "gelu"
    """Of the feed-forward."""
    head_activation: str = ""
    """Of the mlm head; "" for that of the feed-forward."""
    head: Literal["pooler", "mlm", "classifier"] = "pooler"
    """pooler: the first token through a linear and tanh, no loss. mlm: masked-language-model loss, no pooler.
    classifier: the pooler's output through a linear to classes, no loss."""
    num_classes: int = 1
    """Of the classifier."""

    def __post_init__(self) -> None:
        positive(num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads)
        positive(ffn_size=self.ffn_size, vocab_size=self.vocab_size, max_positions=self.max_positions)
        positive(num_token_types=self.num_token_types, num_classes=self.num_classes)
        divisible("hidden_size", self.hidden_size, "num_heads", self.num_heads)


def embed_block(c: BertConfig) -> Block:
    """Sum of three embeddings, norm, dropout: from `input_ids` and `token_type_ids` to `x`."""
    hidden = Dim(name="hidden", size=c.hidden_size)
    b = BlockBuilder("embed")
    ids = b.input("input_ids", BATCH, SEQ, dtype="int64")
    types = b.input("token_type_ids", BATCH, SEQ, dtype="int64")
    places = b.state("position_ids", SEQ, dtype="int64", lifetime="job")
    words = b.embedding("word_embeddings", ids, Dim(name="vocab", size=c.vocab_size), hidden)
    kinds = b.embedding("token_type_embeddings", types, Dim(name="token_types", size=c.num_token_types), hidden)
    positions = b.embedding("position_embeddings", places, Dim(name="positions", size=c.max_positions), hidden)
    total = b.add("position_sum", b.add("type_sum", words, kinds), positions)
    return b.build(b.dropout("dropout", b.norm("LayerNorm", total, hidden, fn="layer", bias=True), c.dropout))


def layer_block(c: BertConfig) -> Block:
    """One encoder layer from `x` to `y`."""
    hidden, ffn = Dim(name="hidden", size=c.hidden_size), Dim(name="ffn", size=c.ffn_size)
    heads, _, head_dim = attention_dims(c.num_heads, c.num_heads, c.hidden_size // c.num_heads)
    b = BlockBuilder("layers")
    x = b.input("x", BATCH, SEQ, hidden)
    q, k, v = (
        b.linear(f"attention.self.{part}", x, out=(heads, head_dim), contract=(hidden,), bias=True)
        for part in ("query", "key", "value")
    )
    core = b.attention("attention.self.core", q, k, v, causal=False, dropout=c.attention_dropout)
    out = b.linear("attention.output.dense", core, out=(hidden,), contract=(heads, head_dim), bias=True)
    total = b.add("attention_residual", b.dropout("attention.output.dropout", out, c.dropout), x)
    middle = b.norm("attention.output.LayerNorm", total, hidden, fn="layer", bias=True)
    out = dense_ffn(b, middle, hidden, ffn, fn=c.activation, bias=True, paths=("intermediate.dense", "output.dense"))
    total = b.add("mlp_residual", b.dropout("output.dropout", out, c.dropout), middle)
    return b.build(b.norm("output.LayerNorm", total, hidden, fn="layer", bias=True, name="y"))


def pooler_block(c: BertConfig) -> Block:
    """tanh of a linear of the first token: from `x` to `pooled`."""
    hidden, pooled = Dim(name="hidden", size=c.hidden_size), Dim(name="pooled", size=c.hidden_size)
    b = BlockBuilder("head")
    first = b.op("pool", "first_token", (b.input("x", BATCH, SEQ, hidden),), (BATCH, hidden), fn="first")
    out = b.linear("dense", first, out=(pooled,), contract=(hidden,), bias=True)
    return b.build(b.op("activation", "activation", (out,), name="pooled_output", fn="tanh"))


def classifier_block(c: BertConfig) -> Block:
    """tanh of a linear of the first token, and a linear to classes: from `x` to `logits`."""
    hidden, pooled = Dim(name="hidden", size=c.hidden_size), Dim(name="pooled", size=c.hidden_size)
    b = BlockBuilder("head")
    first = b.op("pool", "first_token", (b.input("x", BATCH, SEQ, hidden),), (BATCH, hidden), fn="first")
    out = b.linear("classify.dense", first, out=(pooled,), contract=(hidden,), bias=True)
    out = b.op("activation", "activation", (out,), fn="tanh")
    classes = Dim(name="classes", size=c.num_classes)
    return b.build(b.linear("classify.out", out, out=(classes,), contract=(pooled,), bias=True, name="logits"))


def mlm_block(c: BertConfig) -> Block:
    """Transform, tied decoder and loss: from `x` and `labels` to the scalar `loss`. Every token gets logits."""
    hidden, same = Dim(name="hidden", size=c.hidden_size), Dim(name="transformed", size=c.hidden_size)
    vocab = Dim(name="vocab", size=c.vocab_size)
    b = BlockBuilder("head")
    x = b.input("x", BATCH, SEQ, hidden)
    labels = b.input("labels", BATCH, SEQ, dtype="int64")
    out = b.linear("transform.dense", x, out=(same,), contract=(hidden,), bias=True)
    out = b.op("activation", "transform.act", (out,), fn=c.head_activation or c.activation)
    out = b.norm("transform.LayerNorm", out, same, fn="layer", bias=True)
    # The decoder is the embedding table, whose rows are of `hidden`: the transformed width is called that again.
    back = b.op("rename", "transform.out", (out,), (BATCH, SEQ, hidden))
    logits = b.linear("decoder", back, out=(vocab,), contract=(hidden,), bias=True)
    return b.build(b.op("cross_entropy", "loss", (logits, labels), (), dtype="fp32"))


def bert(c: BertConfig) -> Graph:
    """The model as a Graph; output `head.pooled_output`, `head.loss` with the MLM head, `head.logits` of classes."""
    embed, mlm = embed_block(c), c.head == "mlm"
    token_types = INPUT_IDS.renamed("token_type_ids")
    ids = (("input_ids", "input_ids"), ("token_type_ids", "token_type_ids"))
    layers = Call(
        block="layers",
        name="layers",
        inputs=(("x", f"embed.{embed.outputs[0]}"),),
        repeat=c.num_layers,
        chain=(("y", "x"),),
        first=0,
        prefix="bert.encoder.layer",
    )
    if mlm:
        tied = (("decoder.weight", "bert.embeddings.word_embeddings.weight"), ("decoder.bias", "cls.predictions.bias"))
        head_inputs = (("x", "layers.y"), ("labels", "labels"))
        head = Call(block="head", name="head", inputs=head_inputs, prefix="cls.predictions", params=tied)
    else:
        prefix = "bert.pooler" if c.head == "pooler" else ""
        head = Call(block="head", name="head", inputs=(("x", "layers.y"),), prefix=prefix)
    make, loss_out = {
        "mlm": (mlm_block, "head.loss"),
        "pooler": (pooler_block, "head.pooled_output"),
        "classifier": (classifier_block, "head.logits"),
    }[c.head]
    return Graph(
        name=c.name,
        inputs=(INPUT_IDS, token_types, *((LABELS,) if mlm else ())),
        blocks=(embed, layer_block(c), make(c)),
        calls=(Call(block="embed", name="embed", inputs=ids, prefix="bert.embeddings"), layers, head),
        outputs=(loss_out,),
    )


def bert_base() -> BertConfig:
    """BERT base, uncased. Source: Devlin et al. 2019 and its config.json (google-bert/bert-base-uncased)."""
    return BertConfig(name="bert-base", num_layers=12, hidden_size=768, num_heads=12, ffn_size=3072, vocab_size=30522)


def bert_large() -> BertConfig:
    """BERT large, uncased. Source: Devlin et al. 2019 and its config.json (google-bert/bert-large-uncased)."""
    return BertConfig(name="bert-large", num_layers=24, hidden_size=1024, num_heads=16, ffn_size=4096, vocab_size=30522)
