"""ViT: image patches, a class token, learned positions, an encoder with norms before, a linear classifier.

`vit(config)` returns a Graph of embed, layers and head with the loss. The number of tokens follows from the image size,
so `seq` has a size here; only `batch` is the workload's. Leaves out: the pretraining MLP head, interpolated positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph, Tensor
from gnomon.models.parts import BATCH, attention_dims, dense_ffn, divisible, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig:
    """A vision transformer."""

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
    image_size: int = 224
    """Height and width in pixels; a multiple of patch_size."""
    patch_size: int = 16
    """Height and width of a patch in pixels."""
    num_channels: int = 3
    """Of the image."""
    num_classes: int = 1000
    """Of the classifier."""
    qkv_bias: bool = True
    """Biases on q, k, v."""
    dropout: float = 0.0
    """After embedding, attention output and feed-forward."""
    attention_dropout: float = 0.0
    """Of the attention probabilities."""
    activation: str = "gelu"
    """Of the feed-forward."""

    def __post_init__(self) -> None:
        positive(num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads)
        positive(ffn_size=self.ffn_size, image_size=self.image_size, patch_size=self.patch_size)
        positive(num_channels=self.num_channels, num_classes=self.num_classes)
        divisible("hidden_size", self.hidden_size, "num_heads", self.num_heads)
        divisible("image_size", self.image_size, "patch_size", self.patch_size)

    @property
    def seq(self) -> Dim:
        """Patches and the class token."""
        return Dim(name="seq", size=(self.image_size // self.patch_size) ** 2 + 1)

    @property
    def pixels(self) -> Tensor:
        """Dims of the graph's input: images."""
        side = (Dim(name="image_h", size=self.image_size), Dim(name="image_w", size=self.image_size))
        return Tensor(name="pixel_values", dims=(BATCH, Dim(name="channels", size=self.num_channels), *side))


def embed_block(c: VitConfig) -> Block:
    """Patches through a linear, class token, positions: from `pixel_values` to `x`."""
    hidden, patches = Dim(name="hidden", size=c.hidden_size), Dim(name="patches", size=(c.seq.size or 1) - 1)
    side = (Dim(name="patch_h", size=c.patch_size), Dim(name="patch_w", size=c.patch_size))
    b = BlockBuilder("embed")
    pixels = b.input("pixel_values", *c.pixels.dims)
    patch = (c.pixels.dims[1], *side)
    # The public code's convolution, whose stride is its kernel: cut into patches, it is one linear of each.
    cut = b.op("patchify", "patch_embeddings.patchify", (pixels,), (BATCH, patches, *patch))
    rows = b.linear("patch_embeddings.projection", cut, out=(hidden,), contract=patch, bias=True)
    cls = b.parameter("cls_token", hidden)
    # reverse: the class token, given last, stands first, where the head reads it.
    tokens = b.op("concat", "with_cls", (rows, cls), (BATCH, c.seq, hidden), reverse=True)
    total = b.add("position_sum", tokens, b.parameter("position_embeddings", c.seq, hidden))
    return b.build(b.dropout("dropout", total, c.dropout))


def layer_block(c: VitConfig) -> Block:
    """One encoder layer from `x` to `y`."""
    hidden, ffn = Dim(name="hidden", size=c.hidden_size), Dim(name="ffn", size=c.ffn_size)
    heads, _, head_dim = attention_dims(c.num_heads, c.num_heads, c.hidden_size // c.num_heads)
    b = BlockBuilder("layers")
    x = b.input("x", BATCH, c.seq, hidden)
    normed = b.norm("layernorm_before", x, hidden, fn="layer", bias=True)
    q, k, v = (
        b.linear(f"attention.attention.{part}", normed, out=(heads, head_dim), contract=(hidden,), bias=c.qkv_bias)
        for part in ("query", "key", "value")
    )
    core = b.attention("attention.attention.core", q, k, v, causal=False, dropout=c.attention_dropout)
    out = b.linear("attention.output.dense", core, out=(hidden,), contract=(heads, head_dim), bias=True)
    middle = b.add("attention_residual", x, b.dropout("attention.output.dropout", out, c.dropout))
    normed = b.norm("layernorm_after", middle, hidden, fn="layer", bias=True)
    out = dense_ffn(b, normed, hidden, ffn, fn=c.activation, bias=True, paths=("intermediate.dense", "output.dense"))
    return b.build(b.add("mlp_residual", middle, b.dropout("output.dropout", out, c.dropout), name="y"))


def head_block(c: VitConfig) -> Block:
    """Last norm, class token, classifier, loss: from `x` and `labels` to the scalar `loss`."""
    hidden, classes = Dim(name="hidden", size=c.hidden_size), Dim(name="classes", size=c.num_classes)
    b = BlockBuilder("head")
    x = b.input("x", BATCH, c.seq, hidden)
    labels = b.input("labels", BATCH, dtype="int64")
    normed = b.norm("vit.layernorm", x, hidden, fn="layer", bias=True)
    first = b.op("pool", "first_token", (normed,), (BATCH, hidden), fn="first")
    logits = b.linear("classifier", first, out=(classes,), contract=(hidden,), bias=True)
    return b.build(b.op("cross_entropy", "loss", (logits, labels), (), dtype="fp32"))


def vit(c: VitConfig) -> Graph:
    """The model as a Graph; inputs `pixel_values` and `labels`, output `head.loss`."""
    embed = embed_block(c)
    layers = Call(
        block="layers",
        name="layers",
        inputs=(("x", f"embed.{embed.outputs[0]}"),),
        repeat=c.num_layers,
        chain=(("y", "x"),),
        first=0,
        prefix="vit.encoder.layer",
    )
    return Graph(
        name=c.name,
        inputs=(c.pixels, Tensor(name="labels", dims=(BATCH,), dtype="int64")),
        blocks=(embed, layer_block(c), head_block(c)),
        calls=(
            Call(block="embed", name="embed", inputs=(("pixel_values", "pixel_values"),), prefix="vit.embeddings"),
            layers,
            Call(block="head", name="head", inputs=(("x", "layers.y"), ("labels", "labels")), prefix=""),
        ),
        outputs=("head.loss",),
    )


def vit_b16() -> VitConfig:
    """ViT-B/16 at 224 with 1000 classes. Source: Dosovitskiy et al. 2021, table 1."""
    return VitConfig(name="vit-b-16", num_layers=12, hidden_size=768, num_heads=12, ffn_size=3072)


def vit_l16() -> VitConfig:
    """ViT-L/16 at 224 with 1000 classes. Source: Dosovitskiy et al. 2021, table 1."""
    return VitConfig(name="vit-l-16", num_layers=24, hidden_size=1024, num_heads=16, ffn_size=4096)
