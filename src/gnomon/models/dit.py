"""DiT: a transformer that denoises image latents, conditioned by modulation (adaLN-Zero).

`dit(config)` returns a Graph of embed, layers and head with a squared-error loss. Tokens follow from the latent's size,
so `seq` has a size here; only `batch` is the workload's. Leaves out: the image autoencoder, the variational term for
the learned variance (its output channels are there), classifier-free dropping of labels (its extra row is there).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph, Tensor
from gnomon.models.gpt import fused_qkv
from gnomon.models.parts import BATCH, attention_dims, dense_ffn, divisible, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DitConfig:
    """A diffusion transformer."""

    name: str
    """Of the model."""
    num_layers: int
    """Blocks."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Heads; divides hidden_size."""
    patch_size: int
    """Height and width of a patch of the latent."""
    latent_size: int = 32
    """Height and width of the latent: 32 for images of 256, 64 for 512."""
    latent_channels: int = 4
    """Channels of the latent."""
    ffn_ratio: int = 4
    """Feed-forward width over hidden_size."""
    num_classes: int = 1000
    """Labels; the table has one more row, for no label."""
    frequencies: int = 256
    """Width of the sinusoidal features of time."""
    learned_variance: bool = True
    """Whether the output has twice the latent's channels."""

    def __post_init__(self) -> None:
        positive(num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads)
        positive(patch_size=self.patch_size, latent_size=self.latent_size, latent_channels=self.latent_channels)
        positive(ffn_ratio=self.ffn_ratio, num_classes=self.num_classes, frequencies=self.frequencies)
        divisible("hidden_size", self.hidden_size, "num_heads", self.num_heads)
        divisible("latent_size", self.latent_size, "patch_size", self.patch_size)

    @property
    def hidden(self) -> Dim:
        """Dims of the residual stream."""
        return Dim(name="hidden", size=self.hidden_size)

    @property
    def cond(self) -> Dim:
        """The conditioning vector, as wide as the residual stream."""
        return Dim(name="cond", size=self.hidden_size)

    @property
    def seq(self) -> Dim:
        """The dim of patches, the sequence of the transformer."""
        return Dim(name="seq", size=(self.latent_size // self.patch_size) ** 2)

    @property
    def patch(self) -> tuple[Dim, Dim]:
        """Height and width of a patch."""
        return Dim(name="patch_h", size=self.patch_size), Dim(name="patch_w", size=self.patch_size)

    @property
    def latent(self) -> Tensor:
        """The graph input: noisy latents."""
        side = (Dim(name="image_h", size=self.latent_size), Dim(name="image_w", size=self.latent_size))
        return Tensor(name="latent", dims=(BATCH, Dim(name="channels", size=self.latent_channels), *side))

    @property
    def target(self) -> Tensor:
        """The graph input to compare with: one row of output channels for each patch."""
        out = Dim(name="out_channels", size=self.latent_channels * (2 if self.learned_variance else 1))
        return Tensor(name="target", dims=(BATCH, self.seq, *self.patch, out))


def embed_block(c: DitConfig) -> Block:
    """Builds the block that makes tokens `x` and the conditioning vector `cond` of `latent`, `time` and `label`."""
    b = BlockBuilder("embed")
    latent = b.input("latent", *c.latent.dims)
    time = b.input("time", BATCH, dtype="fp32")
    label = b.input("label", BATCH, dtype="int64")
    patch = (c.latent.dims[1], *c.patch)
    cut = b.op("patchify", "x_embedder.patchify", (latent,), (BATCH, c.seq, *patch))
    rows = b.linear("x_embedder.proj", cut, out=(c.hidden,), contract=patch, bias=True)
    places = b.state("pos_embed", c.seq, c.hidden, dtype="param", lifetime="job")
    x = b.op("add", "position_sum", (rows, places), name="x", sines=True)
    waves, inner = Dim(name="frequencies", size=c.frequencies), Dim(name="time_hidden", size=c.hidden_size)
    features = b.op("timestep", "t_embedder.features", (time,), (BATCH, waves))
    up = b.linear("t_embedder.mlp.0", features, out=(inner,), contract=(waves,), bias=True)
    act = b.op("activation", "t_embedder.mlp.1", (up,), fn="silu")
    moment = b.linear("t_embedder.mlp.2", act, out=(c.cond,), contract=(inner,), bias=True)
    rows_of_labels = Dim(name="labels_and_none", size=c.num_classes + 1)
    kind = b.embedding("y_embedder.embedding_table", label, rows_of_labels, c.cond)
    return b.build(x, b.add("cond_sum", moment, kind, name="cond"))


def modulation(b: BlockBuilder, cond: str, c: DitConfig, count: int) -> tuple[str, ...]:
    """`count` vectors of width hidden made from the conditioning vector: shifts, scales and gates."""
    which = Dim(name="modulations", size=count)
    act = b.op("activation", "adaLN_modulation.0", (cond,), fn="silu")
    modulated = b.linear("adaLN_modulation.1", act, out=(which, c.hidden), contract=(c.cond,), bias=True)
    parts = {f"adaLN_modulation.part_{i}": (BATCH, c.hidden) for i in range(count)}
    return b.split("adaLN_modulation.split", modulated, parts)


def layer_block(c: DitConfig) -> Block:
    """One block from `x` and `cond` to `y`."""
    heads, _, head_dim = attention_dims(c.num_heads, c.num_heads, c.hidden_size // c.num_heads)
    ffn = Dim(name="ffn", size=c.ffn_ratio * c.hidden_size)
    b = BlockBuilder("layers")
    x = b.input("x", BATCH, c.seq, c.hidden)
    cond = b.input("cond", BATCH, c.cond)
    # In the order of the public code (adaLN-Zero, Peebles and Xie 2023): attention's three, then the feed-forward's.
    # Norms have no scale and shift of their own, as these are theirs.
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation(b, cond, c, 6)
    normed = b.norm("norm1", x, c.hidden, fn="layer", bias=False, affine=False)
    shifted = b.op("modulate", "modulate1", (normed, shift_a, scale_a))
    q, k, v = fused_qkv(b, "attn.qkv", shifted, c.hidden, heads, head_dim, outer=True)
    core = b.attention("attn.core", q, k, v, causal=False)
    out = b.linear("attn.proj", core, out=(c.hidden,), contract=(heads, head_dim), bias=True)
    middle = b.add("attention_residual", x, b.op("mul", "attn.gate", (out, gate_a)))
    normed = b.norm("norm2", middle, c.hidden, fn="layer", bias=False, affine=False)
    shifted = b.op("modulate", "modulate2", (normed, shift_m, scale_m))
    out = dense_ffn(b, shifted, c.hidden, ffn, fn="gelu_tanh", bias=True, paths=("mlp.fc1", "mlp.fc2"))
    return b.build(b.add("mlp_residual", middle, b.op("mul", "mlp.gate", (out, gate_m)), name="y"))


def head_block(c: DitConfig) -> Block:
    """Modulated norm, linear to pixels of patches, squared error: from `x`, `cond`, `target` to the scalar `loss`."""
    b = BlockBuilder("head")
    x = b.input("x", BATCH, c.seq, c.hidden)
    cond = b.input("cond", BATCH, c.cond)
    target = b.input("target", *c.target.dims)
    shift, scale = modulation(b, cond, c, 2)
    normed = b.norm("norm_final", x, c.hidden, fn="layer", bias=False, affine=False)
    shifted = b.op("modulate", "modulate", (normed, shift, scale))
    out = b.linear("linear", shifted, out=c.target.dims[2:], contract=(c.hidden,), bias=True)
    return b.build(b.op("mse", "loss", (out, target), (), dtype="fp32"))


def dit(c: DitConfig) -> Graph:
    """The model as a Graph; inputs `latent`, `time`, `label`, `target`; output `head.loss`."""
    embed_inputs = tuple((name, name) for name in ("latent", "time", "label"))
    layers = Call(
        block="layers",
        name="layers",
        inputs=(("x", "embed.x"), ("cond", "embed.cond")),
        repeat=c.num_layers,
        chain=(("y", "x"),),
        first=0,
        prefix="blocks",
    )
    head = (("x", "layers.y"), ("cond", "embed.cond"), ("target", "target"))
    return Graph(
        name=c.name,
        inputs=(
            c.latent,
            Tensor(name="time", dims=(BATCH,), dtype="fp32"),
            Tensor(name="label", dims=(BATCH,), dtype="int64"),
            c.target,
        ),
        blocks=(embed_block(c), layer_block(c), head_block(c)),
        calls=(
            Call(block="embed", name="embed", inputs=embed_inputs, prefix=""),
            layers,
            Call(block="head", name="head", inputs=head, prefix="final_layer"),
        ),
        outputs=("head.loss",),
    )


def dit_xl_2() -> DitConfig:
    """DiT-XL/2 at 256. Source: Peebles and Xie 2023, table 1."""
    return DitConfig(name="dit-xl-2", num_layers=28, hidden_size=1152, num_heads=16, patch_size=2)


def dit_b_4() -> DitConfig:
    """DiT-B/4 at 256. Source: Peebles and Xie 2023, table 1."""
    return DitConfig(name="dit-b-4", num_layers=12, hidden_size=768, num_heads=12, patch_size=4)
