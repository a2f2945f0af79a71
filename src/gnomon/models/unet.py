"""A convolutional U-Net that denoises images (DDPM), with skips from the way down to the way up.

`unet(config)` returns a Graph in which every residual block and change of resolution is a call of its own, so skips are
plain edges of the DAG. Channel dims are named by the block that makes them; height and width by the factor of
reduction (`image_h.2`). Leaves out: text conditioning, several heads of attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gnomon.errors import GraphError
from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph, Tensor, product
from gnomon.models.parts import BATCH, divisible, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class UnetConfig:
    """A DDPM U-Net."""

    name: str
    """Of the model."""
    image_size: int
    """Height and width in pixels; a multiple of 2^(levels-1)."""
    channels: tuple[int, ...]
    """Channels of each level, from full resolution down."""
    attention_levels: tuple[int, ...]
    """Levels (from 0) whose residual blocks are followed by attention."""
    blocks_per_level: int = 2
    """Residual blocks of a level on the way down; one more on the way up."""
    image_channels: int = 3
    """Of the image and of the output."""
    groups: int = 32
    """Of group norms."""
    dropout: float = 0.0
    """Inside residual blocks."""

    def __post_init__(self) -> None:
        positive(image_size=self.image_size, blocks_per_level=self.blocks_per_level, groups=self.groups)
        positive(image_channels=self.image_channels)
        if not self.channels:
            raise GraphError("a U-Net needs channels for at least one level")
        for level, count in enumerate(self.channels):
            divisible(f"channels[{level}]", count, "groups", self.groups)
        divisible("image_size", self.image_size, "2^(levels-1)", 2 ** (len(self.channels) - 1))
        if any(not 0 <= level < len(self.channels) for level in self.attention_levels):
            raise GraphError(f"attention_levels={self.attention_levels}: levels are 0 to {len(self.channels) - 1}")

    def side(self, level: int) -> tuple[Dim, Dim]:
        """Height and width at a level."""
        # A dim's name says its level, so that tensors of two resolutions are never taken for one shape.
        factor = 2**level
        return tuple(Dim(name=f"image_{a}.{factor}", size=self.image_size // factor) for a in "hw")  # type: ignore[return-value]

    @property
    def time(self) -> Dim:
        """Width of the time embedding: four times the first level's channels."""
        return Dim(name="time_embed", size=4 * self.channels[0])


@dataclass(slots=True)
class _UnetWalk:
    """The graph under construction: calls so far, where `x` is, and the stack of skips."""

    c: UnetConfig
    x: str = ""
    channels: Dim = field(default_factory=lambda: Dim(name="channels", size=1))
    level: int = 0
    blocks: list[Block] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    skips: list[tuple[str, Dim]] = field(default_factory=list)

    def place(self, block: Block, prefix: str, inputs: tuple[tuple[str, str], ...], channels: Dim) -> None:
        """Add a block that is called once; its output `y` becomes `x`."""
        self.blocks.append(block)
        self.calls.append(Call(block=block.name, name=block.name, inputs=inputs, prefix=prefix))
        self.x, self.channels = f"{block.name}.y", channels

    def start(self, name: str) -> tuple[BlockBuilder, str]:
        """A builder with input `x` of the present shape."""
        b = BlockBuilder(name)
        return b, b.input("x", BATCH, self.channels, *self.c.side(self.level))

    def residual(self, name: str, prefix: str, width: int, *, attend: bool, skip: bool = False) -> None:
        """A residual block, after joining the latest skip if asked, followed by attention if asked."""
        b, x = self.start(name)
        inputs = [("x", self.x), ("time", "time.time_embed")]
        joined = self.channels
        if skip:
            # Last in, first out: the way up meets the resolutions of the way down in reverse.
            source, extra = self.skips.pop()
            inputs.append(("skip", source))
            joined = Dim(name=f"channels.{name}.joined", size=(self.channels.size or 0) + (extra.size or 0))
            other = b.input("skip", BATCH, extra, *self.c.side(self.level))
            x = b.op("concat", "join", (x, other), (BATCH, joined, *self.c.side(self.level)))
        time = b.input("time", BATCH, self.c.time)
        out = Dim(name=f"channels.{name}", size=width)
        y = residual_ops(b, x, time, joined, out, self.c, self.level, name="" if attend else "y")
        if attend:
            y = attention_ops(b, y, out, self.c, self.level)
        self.place(b.build(y), prefix, tuple(inputs), out)

    def resize(self, name: str, prefix: str, step: int) -> None:
        """Halves an image (step 1: strided convolution) or double (step -1: upsample, convolution) height and width."""
        b, x = self.start(name)
        out = Dim(name=f"channels.{name}", size=self.channels.size)
        self.level += step
        side = self.c.side(self.level)
        if step < 0:
            x = b.op("upsample", "upsample", (x,), (BATCH, self.channels, *side))
        y = b.conv2d("conv", x, (out, *side), 3, name="y")
        self.place(b.build(y), prefix, (("x", self.x),), out)


def residual_ops(
    b: BlockBuilder, x: str, time: str, ins: Dim, out: Dim, c: UnetConfig, level: int, *, name: str
) -> str:
    """norm, silu, conv, plus time, norm, silu, dropout, conv, plus a shortcut (1×1 if channels change)."""
    middle, side = Dim(name=f"{out.name}.middle", size=out.size), c.side(level)
    h = b.norm("norm1", x, ins, fn="group", bias=True, groups=c.groups)
    h = b.conv2d("conv1", b.op("activation", "act1", (h,), fn="silu"), (middle, *side), 3)
    moment = b.op("activation", "time_act", (time,), fn="silu")
    moment = b.linear("time_emb_proj", moment, out=(middle,), contract=(c.time,), bias=True)
    h = b.norm("norm2", b.add("time_sum", h, moment), middle, fn="group", bias=True, groups=c.groups)
    h = b.dropout("dropout", b.op("activation", "act2", (h,), fn="silu"), c.dropout)
    h = b.conv2d("conv2", h, (out, *side), 3)
    if ins.size != out.size:
        x = b.conv2d("conv_shortcut", x, (out, *side), 1)
    else:
        x = b.op("rename", "shortcut", (x,), (BATCH, out, *side))
    return b.add("residual", h, x, name=name)


def attention_ops(b: BlockBuilder, x: str, channels: Dim, c: UnetConfig, level: int) -> str:
    """Group norm and single-head attention over the pixels, added to x; writes `y`."""
    side = c.side(level)
    pixels, heads = product(f"pixels.{2**level}", *side), Dim(name="heads", size=1)
    head_dim = Dim(name="head_dim", size=channels.size)
    rows = b.norm("attention.group_norm", x, channels, fn="group", bias=True, groups=c.groups)
    rows = b.op("reshape", "attention.rows", (rows,), (BATCH, pixels, channels))
    q, k, v = (
        b.linear(f"attention.to_{part}", rows, out=(heads, head_dim), contract=(channels,), bias=True) for part in "qkv"
    )
    core = b.attention("attention.core", q, k, v, causal=False)
    out = b.linear("attention.to_out", core, out=(channels,), contract=(heads, head_dim), bias=True)
    out = b.op("reshape", "attention.image", (out,), (BATCH, channels, *side))
    return b.add("attention.residual", out, x, name="y")


def time_block(c: UnetConfig) -> Block:
    """Sinusoidal features of `time` through two linears to `time_embed`."""
    b = BlockBuilder("time")
    waves, inner = Dim(name="frequencies", size=c.channels[0]), Dim(name="time_hidden", size=4 * c.channels[0])
    # As DDPM's code has them: sines before cosines, and the lowest frequency is 1/10 000 exactly (shift 1).
    features = b.op(
        "timestep", "features", (b.input("time", BATCH, dtype="fp32"),), (BATCH, waves), sine_first=True, shift=1
    )
    up = b.linear("linear_1", features, out=(inner,), contract=(waves,), bias=True)
    act = b.op("activation", "act", (up,), fn="silu")
    return b.build(b.linear("linear_2", act, out=(c.time,), contract=(inner,), bias=True, name="time_embed"))


def head_block(c: UnetConfig, channels: Dim) -> Block:
    """Norm, silu, convolution to the image, squared error: from `x` and `target` to the scalar `loss`."""
    side, out = c.side(0), Dim(name="image_channels", size=c.image_channels)
    b = BlockBuilder("head")
    x = b.input("x", BATCH, channels, *side)
    target = b.input("target", BATCH, out, *side)
    normed = b.norm("conv_norm_out", x, channels, fn="group", bias=True, groups=c.groups)
    y = b.conv2d("conv_out", b.op("activation", "conv_act", (normed,), fn="silu"), (out, *side), 3)
    return b.build(b.op("mse", "loss", (y, target), (), dtype="fp32"))


def _down(walk: _UnetWalk) -> None:
    c = walk.c
    for level, width in enumerate(c.channels):
        for index in range(c.blocks_per_level):
            prefix = f"down_blocks.{level}.resnets.{index}"
            walk.residual(f"down_{level}_{index}", prefix, width, attend=level in c.attention_levels)
            walk.skips.append((walk.x, walk.channels))
        if level < len(c.channels) - 1:
            walk.resize(f"downsample_{level}", f"down_blocks.{level}.downsamplers.0", 1)
            walk.skips.append((walk.x, walk.channels))


def _up(walk: _UnetWalk) -> None:
    c = walk.c
    for step, level in enumerate(reversed(range(len(c.channels)))):
        # One more than on the way down: each level's resize, and the first convolution, left something to be read here
        # too.
        for index in range(c.blocks_per_level + 1):
            prefix = f"up_blocks.{step}.resnets.{index}"
            attend = level in c.attention_levels
            walk.residual(f"up_{level}_{index}", prefix, c.channels[level], attend=attend, skip=True)
        if level:
            walk.resize(f"upsample_{level}", f"up_blocks.{step}.upsamplers.0", -1)


def unet(c: UnetConfig) -> Graph:
    """The model as a Graph; inputs `image`, `time`, `target`; output `head.loss`."""
    image = Tensor(name="image", dims=(BATCH, Dim(name="image_channels", size=c.image_channels), *c.side(0)))
    walk = _UnetWalk(c=c)
    walk.blocks.append(time_block(c))
    walk.calls.append(Call(block="time", name="time", inputs=(("time", "time"),), prefix="time_embedding"))
    b = BlockBuilder("conv_in")
    first = Dim(name="channels.conv_in", size=c.channels[0])
    y = b.conv2d("conv_in", b.input("image", *image.dims), (first, *c.side(0)), 3, name="y")
    walk.place(b.build(y), "", (("image", "image"),), first)
    walk.skips.append((walk.x, walk.channels))
    _down(walk)
    walk.residual("mid_0", "mid_block.resnets.0", c.channels[-1], attend=True)
    walk.residual("mid_1", "mid_block.resnets.1", c.channels[-1], attend=False)
    _up(walk)
    head = head_block(c, walk.channels)
    inputs = (("x", walk.x), ("target", "target"))
    return Graph(
        name=c.name,
        inputs=(image, Tensor(name="time", dims=(BATCH,), dtype="fp32"), image.renamed("target")),
        blocks=(*walk.blocks, head),
        calls=(*walk.calls, Call(block="head", name="head", inputs=inputs, prefix="")),
        outputs=("head.loss",),
    )


def ddpm_cifar10() -> UnetConfig:
    """The CIFAR-10 model of DDPM. Source: Ho et al. 2020, appendix B; google/ddpm-cifar10-32's config.json."""
    return UnetConfig(
        name="ddpm-cifar10", image_size=32, channels=(128, 256, 256, 256), attention_levels=(1,), dropout=0.1
    )


def unet_tiny() -> UnetConfig:
    """Two levels at 8 pixels: for tests."""
    return UnetConfig(
        name="unet-tiny", image_size=8, channels=(8, 16), attention_levels=(1,), blocks_per_level=1, groups=4
    )
