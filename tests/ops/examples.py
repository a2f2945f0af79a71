"""Small blocks of random sizes for every kind of the registry, each with what is computed there, in plain torch.

`EXAMPLES[kind](random)` gives them. An oracle takes operands in the kind's order, in the shapes of the graph's dims,
and is written from the paper or calls torch, transformers or einsum: nothing of Gnomon's runtime. Shapes in oracles:
B batch, T positions, S keys, H hidden, N query heads, K key heads, D width of a head, V vocabulary, E experts.
Leaves out what is compared (`test_every_kind`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.graph import Block, BlockBuilder, Captured, Dim, Node, Op, Use, attrs, kv_dim, product
from gnomon.graph import Tensor as Declared

Oracle = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One op in a block of its own."""

    block: Block
    oracle: Oracle
    """Operands -> the op's float outputs."""
    below: Mapping[str, int] = field(default_factory=dict)
    """Of inputs of integers: they are under this."""
    at_least: Mapping[str, int] = field(default_factory=dict)
    """And not under this, where that is not 0."""
    meshes: tuple[Mapping[str, int], ...] = ()
    """Meshes on which it is divided."""
    divided: Callable[..., Any] | None = None
    """(site, *local operands) -> outputs on ranks that divide it, where the runtime has no function for that: as the
    strategy says in words. None: the runtime's own."""
    flops: int | None = None
    """Of the forward, by the paper, where torch's counter does not see them."""
    flops_back: int = 0
    """The same of the backward."""
    free: bool = False
    """Whether its last dim may be of any name and size."""
    keeps: str = ""
    """Why the runtime's function keeps otherwise than the kind says; empty: it keeps the same."""

    @property
    def op(self) -> Op:
        return self.block.ops[-1]


TP, CP, BOTH = {"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}


def dim(name: str, size: int) -> Dim:
    return Dim(name=name, size=size)


def batch(r: Random) -> Dim:
    return dim("batch", r.choice((1, 2, 3)))


def seq(r: Random) -> Dim:
    return dim("seq", r.choice((4, 8)))


def hidden(r: Random) -> Dim:
    return dim("hidden", r.choice((4, 8)))


def ffn(r: Random) -> Dim:
    return dim("ffn", r.choice((4, 8, 12)))


def one(
    kind: str,
    inputs: Mapping[str, tuple[Dim, ...]],
    out: tuple[Dim, ...] | None = None,
    *,
    parameters: Mapping[str, tuple[Dim, ...]] | None = None,
    integers: tuple[str, ...] = (),
    contracts: tuple[str, ...] = (),
    **values: Any,
) -> Block:
    """A block of one op, whose activations come before its parameters."""
    b = BlockBuilder("one")
    names = tuple(b.input(n, *d, dtype="int64" if n in integers else "compute") for n, d in inputs.items())
    names += tuple(b.parameter(n, *d) for n, d in (parameters or {}).items())
    return b.build(b.op(kind, "y", names, out, contracts=contracts, **values))


# Elementwise

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x) ** 2,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def activations(r: Random) -> list[Example]:
    def of(fn: str) -> Example:
        inputs = {"x": (batch(r), seq(r), ffn(r))}
        written = {"gelu_new": "runs torch's gelu in one kernel", "quick_gelu": "autograd keeps its two factors"}
        written["relu2"] = "square of relu in two kernels: keeps what relu wrote"
        return Example(
            block=one("activation", inputs, fn=fn), oracle=FUNCTIONS[fn], meshes=(BOTH,), keeps=written.get(fn, "")
        )

    return [of(fn) for fn in FUNCTIONS]


def gates(r: Random) -> list[Example]:
    dims = (batch(r), seq(r), ffn(r))

    def clamped(gate: Tensor, up: Tensor) -> Tensor:  # GPT-OSS: transformers' GptOssExperts
        gate, up = gate.clamp(min=None, max=0.7), up.clamp(min=-0.7, max=0.7)
        return (up + 1) * gate * torch.sigmoid(gate * 1.3)

    two = {"gate": dims, "up": dims}
    plain = [
        Example(block=one("glu", two, fn=fn), oracle=lambda g, u, fn=fn: FUNCTIONS[fn](g) * u, meshes=(BOTH,))
        for fn in ("silu", "gelu", "gelu_tanh", "relu")
    ]
    clamps = Example(
        block=one("glu", two, fn="silu", limit=0.7, alpha=1.3),
        oracle=clamped,
        meshes=(TP,),
        keeps="clamps are steps of torch's own, each keeping what it read",
    )
    return [*plain, clamps]


def sums(r: Random) -> list[Example]:
    b, t, f = batch(r), seq(r), ffn(r)
    x = (b, t, f)
    return [
        Example(block=one("add", {"a": x, "b": x}), oracle=torch.add, meshes=(BOTH,)),
        Example(block=one("add", {"a": x, "b": x}, factor=0.3), oracle=lambda a, b: a + 0.3 * b, meshes=(TP,)),
        Example(block=one("add", {"a": x, "b": (b, f)}), oracle=lambda a, b: a + b[:, None], meshes=(BOTH,)),
        Example(block=one("add", {"a": x}, parameters={"bias": (f,)}), oracle=torch.add, meshes=(BOTH,)),
    ]


def factors(r: Random) -> list[Example]:
    b, t, f = batch(r), seq(r), ffn(r)
    x = (b, t, f)
    return [
        Example(block=one("mul", {"a": x, "b": x}), oracle=torch.mul, meshes=(BOTH,)),
        Example(block=one("mul", {"a": x, "b": (b, f)}), oracle=lambda a, b: a * b[:, None], meshes=(BOTH,)),
        Example(block=one("mul", {"a": x}, parameters={"by": (f,)}), oracle=torch.mul, meshes=(BOTH,)),
    ]


def scales(r: Random) -> list[Example]:
    x = (batch(r), seq(r), ffn(r))
    return [
        Example(
            block=one("scale", {"x": x}, factor=0.37),
            oracle=lambda x: x * 0.37,
            meshes=(BOTH,),
            keeps="the constant is rounded to x's dtype first, a tensor of one element that autograd keeps",
        ),
        Example(block=one("scale", {"x": x}, parameters={"by": (x[2],)}), oracle=torch.mul, meshes=(BOTH,)),
    ]


def modulations(r: Random) -> list[Example]:
    b, t, h = batch(r), seq(r), ffn(r)
    inputs = {"x": (b, t, h), "shift": (b, h), "by": (b, h)}

    def oracle(x: Tensor, shift: Tensor, by: Tensor) -> Tensor:  # DiT (Peebles and Xie 2023), `modulate`
        return x * (1 + by.unsqueeze(1)) + shift.unsqueeze(1)

    made = "1 + scale is a tensor of the run, a row a sample, and is kept in place of the scale"
    return [Example(block=one("modulate", inputs), oracle=oracle, meshes=(BOTH,), keeps=made)]


def blends(r: Random) -> list[Example]:
    b, t, h = batch(r), seq(r), ffn(r)
    inputs = {"a": (b, t, h), "b": (b, t, h), "logits": (b, t, dim("coefficients", 2))}

    def oracle(a: Tensor, b: Tensor, logits: Tensor) -> Tensor:  # DeepSpeed, deepspeed/moe/layer.py, MoE.forward
        coef = torch.nn.functional.softmax(logits, dim=-1)
        return a * coef[..., 0:1] + b * coef[..., 1:]

    made = "the softmax of the logits is a tensor of the run, and is kept in place of them"
    return [Example(block=one("blend", inputs), oracle=oracle, meshes=(BOTH,), keeps=made)]


def softcaps(r: Random) -> list[Example]:
    block = one("softcap", {"x": (batch(r), seq(r), dim("vocab", 8))}, cap=3.0)
    return [Example(block=block, oracle=lambda x: 3.0 * torch.tanh(x / 3.0), meshes=(BOTH,))]


def dropouts(r: Random) -> list[Example]:
    x = {"x": (batch(r), seq(r), ffn(r))}
    return [Example(block=one("dropout", x, p=0.0, drawn=True), oracle=lambda x: x * 1.0, meshes=(BOTH,))]


def casts(r: Random) -> list[Example]:
    return [Example(block=one("cast", {"x": (batch(r), seq(r), ffn(r))}), oracle=lambda x: x * 1.0, meshes=(BOTH,))]


def clips(r: Random) -> list[Example]:
    x = {"x": (batch(r), seq(r), ffn(r))}
    return [
        Example(block=one("clip", x, min=-0.5, max=0.4), oracle=lambda x: x.clamp(-0.5, 0.4), meshes=(BOTH,)),
        Example(block=one("clip", x, max=0.4), oracle=lambda x: x.clamp(max=0.4), meshes=(BOTH,)),
    ]


# Matmuls


def linears(r: Random) -> list[Example]:
    b, t, h, f = batch(r), seq(r), hidden(r), ffn(r)
    heads, width = dim("heads", 4), dim("head_dim", r.choice((2, 3)))
    plain = BlockBuilder("plain")
    up = plain.build(plain.linear("y", plain.input("x", b, t, h), out=(f,), contract=(h,), bias=True))
    down_b = BlockBuilder("down")
    down = down_b.build(down_b.linear("y", down_b.input("x", b, t, f), out=(h,), contract=(f,), bias=False))
    split = BlockBuilder("heads")
    out = split.build(split.linear("y", split.input("x", b, t, h), out=(heads, width), contract=(h,), bias=True))
    join = BlockBuilder("join")
    back = join.build(
        join.linear("y", join.input("x", b, t, heads, width), out=(h,), contract=(heads, width), bias=False)
    )
    inner = one("linear", {"x": (b, t, h)}, (b, t, f), parameters={"w": (h, f)}, contracts=("hidden",))
    return [
        Example(block=up, oracle=functional.linear, meshes=(BOTH,)),
        Example(block=down, oracle=functional.linear, meshes=(BOTH,)),
        Example(block=out, oracle=lambda x, w, c: torch.einsum("bth,ndh->btnd", x, w) + c, meshes=(BOTH,)),
        Example(block=back, oracle=lambda x, w: torch.einsum("btnd,hnd->bth", x, w), meshes=(BOTH,)),
        Example(block=inner, oracle=lambda x, w: x @ w, meshes=(BOTH,)),
    ]


def matmuls(r: Random) -> list[Example]:
    b, n, t, s, d = batch(r), dim("heads", 4), seq(r), dim("kv_seq", r.choice((4, 8))), dim("head_dim", 3)
    scores = one("matmul", {"q": (b, n, t, d), "k": (b, s, n, d)}, (b, n, t, s), contracts=("head_dim",))
    mixed = one("matmul", {"p": (b, n, t, s), "v": (b, s, n, d)}, (b, n, t, d), contracts=("kv_seq",))
    return [
        Example(block=scores, oracle=lambda q, k: torch.einsum("bntd,bsnd->bnts", q, k), meshes=(TP,)),
        Example(block=mixed, oracle=lambda p, v: torch.einsum("bnts,bsnd->bntd", p, v), meshes=(TP,)),
    ]


def sparse(r: Random) -> list[Example]:
    b, t, h, f = batch(r), seq(r), dim("hidden", 8), ffn(r)

    def oracle(x: Tensor, weight: Tensor) -> Tensor:  # Zhou et al. 2021: the two largest of four, straight through
        groups = weight.unflatten(-1, (-1, 4))
        kept = torch.zeros_like(groups).scatter(-1, groups.abs().topk(2, dim=-1).indices, 1.0)
        dense = weight + ((groups * kept).flatten(-2) - weight).detach()
        return x @ dense.T

    up = one("nm_linear", {"x": (b, t, h)}, (b, t, f), parameters={"w": (f, h)}, contracts=("hidden",), n=2, m=4)
    wide = dim("ffn", 8)
    down = one("nm_linear", {"x": (b, t, wide)}, (b, t, h), parameters={"w": (h, wide)}, contracts=("ffn",), n=2, m=4)

    def of(block: Block, width: int, made: int) -> Example:
        whole = 2 * (b.size or 0) * (t.size or 0) * width * made  # two of four elements, and all of the weight gradient
        return Example(block=block, oracle=oracle, meshes=(BOTH,), flops=whole // 2, flops_back=whole // 2 + whole)

    return [of(up, 8, f.size or 0), of(down, 8, 8)]


# Images


def convolutions(r: Random) -> list[Example]:
    b, c, out = batch(r), dim("channels", r.choice((2, 3))), dim("channels.out", 4)
    side = (dim("image_h", 8), dim("image_w", 8))
    small = (dim("image_h.2", 4), dim("image_w.2", 4))
    same, halved = BlockBuilder("same"), BlockBuilder("halved")
    one_b = BlockBuilder("one_by_one")
    return [
        Example(
            block=same.build(same.conv2d("y", same.input("x", b, c, *side), (out, *side), 3)),
            oracle=lambda x, w, bias: functional.conv2d(x, w, bias, 1, 1),
            meshes=(CP,),
            divided=_halo,
        ),
        Example(
            block=halved.build(halved.conv2d("y", halved.input("x", b, c, *side), (out, *small), 3)),
            oracle=lambda x, w, bias: functional.conv2d(x, w, bias, 2, 1),
        ),
        Example(
            block=one_b.build(one_b.conv2d("y", one_b.input("x", b, c, *side), (out, *side), 1)),
            oracle=lambda x, w, bias: functional.conv2d(x, w, bias),
            meshes=(CP,),
        ),
    ]


def upsamples(r: Random) -> list[Example]:
    b, c = batch(r), dim("channels", r.choice((2, 3)))
    small, large = (dim("image_h.2", 4), dim("image_w.2", 4)), (dim("image_h", 8), dim("image_w", 8))
    block = one("upsample", {"x": (b, c, *small)}, (b, c, *large))
    return [Example(block=block, oracle=lambda x: functional.interpolate(x, scale_factor=2.0), meshes=(CP,))]


def pools(r: Random) -> list[Example]:
    b, t, h = batch(r), seq(r), hidden(r)
    first = one("pool", {"x": (b, t, h)}, (b, h), fn="first")
    mean = one("pool", {"x": (b, t, h)}, (b, h), fn="mean")
    return [
        Example(block=first, oracle=lambda x: x[:, 0]),
        Example(block=mean, oracle=lambda x: x.mean(1)),
    ]


def patches(r: Random) -> list[Example]:
    b, c = batch(r), dim("channels", r.choice((1, 3)))
    side = (dim("image_h", 4), dim("image_w", 6))
    cut = (dim("patches", 6), c, dim("patch_h", 2), dim("patch_w", 2))

    def oracle(x: Tensor) -> Tensor:  # torch's unfold puts (channels, kernel rows, kernel columns) first
        rows = functional.unfold(x, 2, stride=2)  # (B, C · 4, patches)
        return rows.transpose(1, 2).unflatten(-1, (x.shape[1], 2, 2))

    return [Example(block=one("patchify", {"x": (b, c, *side)}, (b, *cut)), oracle=oracle)]


# Lookups and losses


def embeddings(r: Random) -> list[Example]:
    b, t, v, h = batch(r), seq(r), dim("vocab", 8), hidden(r)
    block = one("embedding", {"ids": (b, t)}, (b, t, h), parameters={"table": (v, h)}, integers=("ids",))
    return [Example(block=block, oracle=functional.embedding, below={"ids": 8}, meshes=(TP, BOTH))]


def timesteps(r: Random) -> list[Example]:
    b, width = batch(r), dim("frequencies", r.choice((6, 8)))

    def oracle(time: Tensor) -> Tensor:  # Ho et al. 2020, appendix B; frequencies of DiT
        steps = [math.exp(-math.log(10_000) * i / (width.size // 2)) for i in range(width.size // 2)]  # type: ignore[operator]
        angles = time[:, None] * torch.tensor(steps, dtype=time.dtype)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    block = one("timestep", {"time": (b,)}, (b, width))
    return [Example(block=block, oracle=oracle, free=True, keeps="nobody wants the gradient of a time")]


def entropies(r: Random) -> list[Example]:
    b, t, v = batch(r), seq(r), dim("vocab", 8)

    def oracle(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    block = one("cross_entropy", {"logits": (b, t, v), "labels": (b, t)}, (), integers=("labels",))
    copy = "labels that count for nothing are marked as torch wants them, in a copy"
    return [Example(block=block, oracle=oracle, below={"labels": 8}, meshes=(TP, CP, BOTH), keeps=copy)]


def squared(r: Random) -> list[Example]:
    b, t, c = batch(r), seq(r), dim("channels", r.choice((2, 3)))

    def oracle(x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(x, y, reduction="none").mean((1, 2)).sum()

    difference = "keeps their difference in place of two tensors, as wide as both together in bfloat16"

    return [Example(block=one("mse", {"x": (b, t, c), "target": (b, t, c)}, ()), oracle=oracle, keeps=difference)]


# Norms


def norms(r: Random) -> list[Example]:
    b, t, h = batch(r), seq(r), dim("hidden", r.choice((4, 8)))
    side = (dim("image_h", 4), dim("image_w", 3))
    found = []
    for fn, bias, affine in (("rms", False, True), ("layer", True, True), ("rms", False, False)):
        build = BlockBuilder("norm")
        block = build.build(build.norm("y", build.input("x", b, t, h), h, fn=fn, bias=bias, affine=affine))

        def oracle(x: Tensor, w: Tensor | None = None, c: Tensor | None = None, fn: str = fn) -> Tensor:
            if fn == "layer":
                return functional.layer_norm(x, x.shape[-1:], w, c, 1e-5)
            return functional.rms_norm(x, x.shape[-1:], w, 1e-5)

        found.append(Example(block=block, oracle=oracle, meshes=(CP,)))
    for fn in ("rms", "layer"):
        wide, build = dim("ffn", 8), BlockBuilder("divided")
        block = build.build(build.norm("y", build.input("x", b, t, wide), wide, fn=fn, bias=fn == "layer"))
        found.append(Example(block=block, oracle=found[fn == "layer"].oracle, meshes=(TP,)))
    build, c = BlockBuilder("group"), dim("channels", 4)
    block = build.build(build.norm("y", build.input("x", b, c, *side), c, fn="group", bias=True, groups=2))
    found.append(
        Example(
            block=block,
            oracle=lambda x, w, c: functional.group_norm(x, 2, w, c, 1e-5),
            meshes=(CP,),
            divided=_divided_group_norm,
        )
    )
    return found


def statistics(r: Random) -> list[Example]:
    b, t, h = batch(r), seq(r), hidden(r)
    block = one("row_stats", {"x": (b, t, h)}, (b, t))
    return [Example(block=block, oracle=lambda x: torch.rsqrt(x.square().mean(-1) + 1e-5), meshes=(CP,))]


def softmaxes(r: Random) -> list[Example]:
    b, t, v = batch(r), seq(r), dim("keys", 6)
    x = {"x": (b, t, v)}
    return [
        Example(block=one("softmax", x), oracle=lambda x: x.softmax(-1), meshes=(CP,)),
        Example(block=one("softmax", x, fn="log"), oracle=lambda x: x.log_softmax(-1), meshes=(CP,)),
    ]


# Attention


def rotaries(r: Random) -> list[Example]:
    b, t, n, d = batch(r), seq(r), dim("heads", 4), dim("head_dim", 4)

    def turned(x: Tensor, width: int, interleaved: bool) -> Tensor:  # Su et al. 2021, equation 34, as complex numbers
        part, rest = x[..., :width], x[..., width:]
        pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
        frequencies = 10_000.0 ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
        z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
        out = torch.view_as_real(z).transpose(-1, -2).flatten(-2)  # halves, as transformers' DeepSeek leaves them too
        return torch.cat([out, rest], dim=-1)

    x = {"x": (b, t, n, d)}
    tables = "sines and cosines are tables, which live anyway"
    return [
        Example(block=one("rotary", x), oracle=lambda x: turned(x, 4, False), meshes=(BOTH,), keeps=tables),
        Example(
            block=one("rotary", x, interleaved=True), oracle=lambda x: turned(x, 4, True), meshes=(CP,), keeps=tables
        ),
        Example(block=one("rotary", x, fraction=0.5), oracle=lambda x: turned(x, 2, False), meshes=(CP,), keeps=tables),
    ]


def biases(r: Random) -> list[Example]:
    t = seq(r)
    n = dim("heads", 4)

    def oracle(places: Tensor) -> Tensor:  # Press et al. 2022, section 3
        slopes = torch.tensor([2.0 ** (-8 * (i + 1) / 4) for i in range(4)])
        return ((places[None, :] - places[:, None])[..., None] * slopes).to(torch.get_default_dtype())

    b = BlockBuilder("alibi")
    places = b.state("position_ids", t, dtype="int64", lifetime="job")
    return [
        Example(block=b.build(b.op("alibi", "y", (places,), (t, kv_dim(t), n))), oracle=oracle, meshes=(TP,), free=True)
    ]


def attentions(r: Random) -> list[Example]:
    b, t, d, e = batch(r), dim("seq", 8), dim("head_dim", 4), dim("v_head_dim", r.choice((2, 4)))
    n, few = dim("heads", 4), dim("kv_heads", 2)

    def oracle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **rule: Any) -> Tensor:
        """softmax(q kᵀ / √D + bias) v over (B, T, N, D), written out. rule: causal, window, cap, sinks."""
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
        scores = torch.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(q.shape[-1])
        if cap := rule.get("cap"):
            scores = cap * torch.tanh(scores / cap)
        behind = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
        hidden_pairs = torch.zeros_like(behind, dtype=torch.bool)
        if rule.get("causal"):
            hidden_pairs = behind < 0
        if window := rule.get("window"):
            hidden_pairs = hidden_pairs | (behind >= window) | (behind <= -window)
        if bias is not None and not rule.get("sinks"):
            scores = scores + bias.movedim(-1, 0)
        scores = scores.masked_fill(hidden_pairs, -math.inf)
        if rule.get("sinks"):
            assert bias is not None
            extra = bias.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            return torch.einsum("bnts,bsnd->btnd", torch.cat([scores, extra], -1).softmax(-1)[..., :-1], v)
        return torch.einsum("bnts,bsnd->btnd", scores.softmax(-1), v)

    def of(heads: Dim, width: Dim, meshes: tuple[Mapping[str, int], ...], keeps: str = "", **rule: Any) -> Example:
        build = BlockBuilder("attention")
        q, k, v = (build.input(name, b, t, h, w) for name, h, w in (("q", n, d), ("k", heads, d), ("v", heads, width)))
        given: dict[str, Any] = {"causal": rule.get("causal", False), "window": rule.get("window", 0)}
        given |= {"softcap": rule.get("cap", 0.0)}
        if rule.get("sinks"):
            given["sinks"] = build.parameter("sinks", n)
        if rule.pop("biased", False):
            given["bias"] = build.input("bias", t, kv_dim(t), n)
        block = build.build(build.attention("y", q, k, v, **given))
        return Example(block=block, oracle=lambda *tensors: oracle(*tensors, **rule), meshes=meshes, keeps=keeps)

    masked = "the mask of a window or bias is a tensor of the run, which torch keeps"
    return [
        of(
            n,
            e,
            (TP, CP, BOTH),
            keeps="" if e.size == d.size else "torch has no kernel for heads of unequal widths on a CPU",
        ),
        of(few, d, (TP, CP, BOTH, {"tp": 4}), causal=True),
        of(few, d, (CP,), causal=True, window=3, keeps=masked),
        of(few, d, (TP, CP), causal=True, cap=2.0),
        of(n, d, (TP,), causal=True, sinks=True),
        of(n, d, (TP,), biased=True, keeps=masked),
    ]


def paged(r: Random) -> list[Example]:
    b, n, k, d, e = batch(r), dim("heads", 4), dim("kv_heads", 2), dim("head_dim", 4), dim("v_dim", 3)
    pool, size, width = dim("blocks", 7), dim("positions", 4), dim("blocks_of_one", 3)

    def block(queries: int, **values: Any) -> Block:
        build = BlockBuilder("paged")
        q = build.input("q", b, dim("queries", queries), n, d)
        keys = build.state("keys", pool, k, d, size, dtype="compute", lifetime="sequence")
        held = build.state("values", pool, k, size, e, dtype="compute", lifetime="sequence")
        table = build.input("table", b, width, dtype="int64")
        lengths = build.input("lengths", b, dtype="int64")
        dims = (b, dim("queries", queries), n, e)
        return build.build(build.op("paged_attention", "y", (q, keys, held, table, lengths), dims, **values))

    def oracle(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, window: int = 0) -> Tensor:
        """One sequence after the other, its blocks copied together; the queries are its last positions."""
        rows = []
        for one, blocks, length in zip(q, table, lengths.tolist(), strict=True):
            k_SKD = keys[blocks].permute(0, 3, 1, 2).flatten(0, 1)[:length].repeat_interleave(2, dim=1)
            v_SKE = values[blocks].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(2, dim=1)
            at = torch.arange(length - len(one), length)[:, None] - torch.arange(length)
            hidden = (at < 0) | (at >= window) if window else at < 0
            scores = torch.einsum("qnd,snd->nqs", one, k_SKD) / math.sqrt(one.shape[-1])
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            rows.append(torch.einsum("nqs,sne->qne", weights, v_SKE))
        return torch.stack(rows)

    def of(queries: int, **values: Any) -> Example:
        rows = (b.size or 0) * queries * 4  # of heads, over all positions of three blocks of four
        return Example(
            block=block(queries, causal=True, **values),
            oracle=lambda *tensors: oracle(*tensors, **values),
            below={"table": 7, "lengths": 12},
            at_least={"lengths": queries},
            meshes=(TP,),
            flops=2 * rows * 12 * (4 + 3),
        )

    return [of(1), of(3), of(2, window=3)]


def scans(r: Random) -> list[Example]:
    b, t = batch(r), dim("seq", 8)
    heads, per, groups_, state_, chunk = 4, 2, 2, r.choice((2, 3)), 4
    inner = heads * per
    joined = dim("ssm_proj", 2 * inner + 2 * groups_ * state_ + heads)
    h, g = dim("ssm_heads", heads), dim("ssm_groups", groups_)
    w, n = dim("ssm_width", inner // groups_), dim("ssm_state", state_)
    two, taps = dim("ssm_bc", 2), dim("ssm_taps", 3)

    def oracle(
        x: Tensor, wx: Tensor, wbc: Tensor, bx: Tensor, bbc: Tensor, dt_bias: Tensor, a: Tensor, skip: Tensor
    ) -> Tensor:  # noqa: E501
        """Dao and Gu 2024, equation 1 token by token: S = exp(-exp(A) dt) S + dt B xᵀ, y = C S + D x, times silu(z)."""
        rows = x.unflatten(-1, (groups_, -1))
        z, u, bb, cc, dt = rows.split([inner // groups_, inner // groups_, state_, state_, heads // groups_], dim=-1)

        def conv(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # (B, T, G, C), (G, C, taps): causal, by channel
            past = functional.pad(u, (0, 0, 0, 0, 2, 0))
            out = sum(past[:, i : i + u.shape[1]] * weight[..., i] for i in range(3))
            return functional.silu(out + bias)

        u, bb, cc = conv(u, wx, bx), conv(bb, wbc[0], bbc[0]), conv(cc, wbc[1], bbc[1])
        dt = functional.softplus(dt.flatten(2) + dt_bias)  # (B, T, heads)
        u = u.flatten(2).unflatten(-1, (heads, per))
        of = torch.arange(heads) // (heads // groups_)
        s, out = torch.zeros(x.shape[0], heads, per, state_, dtype=x.dtype), []
        for i in range(x.shape[1]):
            decay = torch.exp(-a.exp() * dt[:, i])[..., None, None]
            s = decay * s + dt[:, i, :, None, None] * u[:, i, :, :, None] * bb[:, i, of, None, :]
            out.append((s * cc[:, i, of, None, :]).sum(-1) + skip[:, None] * u[:, i])
        y = torch.stack(out, 1).flatten(2) * functional.silu(z.flatten(2))
        return y.unflatten(-1, (groups_, -1))

    build = BlockBuilder("scan")
    given = [build.input("joined", b, t, joined)]
    shapes = {"weight_x": (g, w, taps), "weight_bc": (two, g, n, taps), "bias_x": (g, w), "bias_bc": (two, g, n)}
    given += [build.parameter(f"c.{name}", *dims) for name, dims in shapes.items()]
    given += [build.parameter(f"c.{name}", h) for name in ("dt_bias", "A_log", "D")]
    block = build.build(build.op("state_space", "y", tuple(given), (b, t, g, w), chunk=chunk))
    # per token: states 2HPN and what they give 2HPN; in a chunk of Q: C Bᵀ 2QGN, times x 2QHP (section 6)
    tokens = b.size * t.size  # type: ignore[operator]
    flops = tokens * (4 * inner * state_ + 2 * chunk * (groups_ * state_ + inner))
    return [
        Example(block=block, oracle=oracle, meshes=(TP, CP), divided=_exchanged_scan, flops=flops, flops_back=2 * flops)
    ]


# Experts


def routers(r: Random) -> list[Example]:
    b, t, e, k = batch(r), seq(r), dim("experts", 8), dim("topk", 2)

    def block(fn: str, bias: bool, **values: Any) -> Block:
        build = BlockBuilder("router")
        inputs = [build.input("logits", b, t, e)]
        if bias:
            inputs.append(build.parameter("bias", e))
        made = (Declared(name="weights", dims=(b, t, k)), Declared(name="indices", dims=(b, t, k), dtype="int64"))
        return build.build(*build.outputs("router", "y", tuple(inputs), made, fn=fn, **values))

    def softmax(logits: Tensor) -> Tensor:  # Mixtral
        top = logits.softmax(-1).topk(2, dim=-1).values
        return top / top.sum(-1, keepdim=True)

    def sigmoid(logits: Tensor, bias: Tensor) -> Tensor:  # DeepSeek-V3, equations 13 to 16
        scores = logits.sigmoid()
        top = scores.gather(-1, (scores + bias).topk(2, dim=-1).indices)
        return top / top.sum(-1, keepdim=True)

    def evened(logits: Tensor) -> Tensor:  # Clark et al. 2022, as Megatron-LM iterates and weighs
        cost = logits.detach().flatten(0, 1).exp()
        rows, columns = torch.ones_like(cost[:, 0]), torch.ones_like(cost[0])
        moved = 1e9
        while moved > 1e-4:
            rows = 1 / len(rows) / ((columns * cost).sum(1) + 1e-8)
            new = 1 / len(columns) / ((rows[:, None] * cost).sum(0) + 1e-8)
            moved, columns = (columns - new).abs().mean(), new
        chosen = (columns * cost * rows[:, None]).topk(2, dim=1).indices
        return logits.softmax(-1).gather(-1, chosen.view(*logits.shape[:2], 2))

    steps = "torch's steps keep scores and sums; the kind is one of a fused router"
    return [
        Example(block=block("softmax", False), oracle=softmax, meshes=(CP,), keeps=steps),
        Example(block=block("sigmoid", True), oracle=sigmoid, meshes=(CP,), keeps=steps),
        Example(block=block("softmax", False, assignment="sinkhorn"), oracle=evened, keeps=steps),
    ]


def loads(r: Random) -> list[Example]:
    b, t, e = batch(r), seq(r), dim("experts", 8)

    def oracle(logits: Tensor) -> Tensor:  # transformers: sums of probabilities, and a histogram of choices
        chosen = functional.one_hot(logits.softmax(-1).topk(2, dim=-1).indices, 8).sum(2)
        return torch.stack((logits.softmax(-1).sum(1), chosen.to(logits.dtype).sum(1)), 1)

    block = one("expert_load", {"logits": (b, t, e)}, (b, dim("load_sums", 2), e), topk=2)
    kept = "torch's softmax keeps what it wrote, in float32 or wider"
    return [Example(block=block, oracle=oracle, meshes=(CP,), keeps=kept)]


def balances(r: Random) -> list[Example]:
    b, t, e = batch(r), seq(r), dim("experts", 8)

    def oracle(load: Tensor, labels: Tensor) -> Tensor:  # Fedus et al. 2021, equation 4, once for each label
        tokens = load[:, 1].detach().sum() / 2
        shares = (load[:, 1].detach().sum(0) / tokens, load[:, 0].sum(0) / tokens)
        return 0.1 * 8 * (shares[0] * shares[1]).sum() * labels.numel()

    inputs = {"load": (b, dim("load_sums", 2), e), "labels": (b, t)}
    block = one("balance_loss", inputs, (), integers=("labels",), coefficient=0.1, topk=2)
    steps = "a few numbers for each expert, in steps of torch's own"
    return [Example(block=block, oracle=oracle, below={"labels": 8}, meshes=(CP,), keeps=steps)]


def layer_balances(r: Random) -> list[Example]:
    b, t, e = batch(r), dim("load_sums", 3), dim("experts", 8)

    def layer(load: Tensor) -> Tensor:  # Fedus et al. 2021, equation 4; Zoph et al. 2022, equation 5
        chosen = load[:, 1].detach()
        tokens = chosen.sum() / 2
        uneven = 0.1 * 8 * (chosen.sum(0) / (2 * tokens) * load[:, 0].sum(0) / tokens).sum() / load.shape[0]
        return uneven + 0.01 * load[:, 2].sum(-1, keepdim=True) / tokens

    def sequence(load: Tensor) -> Tensor:  # DeepSeek-V3, equations 17 to 20
        chosen = load[:, 1].detach()
        tokens = chosen.sum(-1, keepdim=True) / 2
        frequency, probability = 8 / (2 * tokens) * chosen, load[:, 0] / tokens
        return 0.1 * (frequency * probability).sum(-1, keepdim=True) / load.shape[0]

    def step(load: Tensor, counts: Tensor) -> Tensor:  # Qiu et al. 2025, section 3: shares of a global batch
        tokens = load[:, 1].detach().sum() / 2
        uneven = 0.1 * 8 * (counts / counts.sum() * load[:, 0].sum(0) / tokens).sum() / load.shape[0]
        return uneven.expand(load.shape[0], 1)

    steps = "a few numbers for each expert, in steps of torch's own"
    made = []
    for per, oracle, sums in (("layer", layer, t), ("sequence", sequence, dim("load_sums", 2))):
        extra = {"z_loss": 0.01} if per == "layer" else {}
        block = one(
            "layer_balance", {"load": (b, sums, e)}, (b, dim("losses", 1)), per=per, coefficient=0.1, topk=2, **extra
        )
        made.append(Example(block=block, oracle=oracle, keeps=steps))
    inputs = {"load": (b, dim("load_sums", 2), e), "counts": (e,)}
    block = one("layer_balance", inputs, (b, dim("losses", 1)), per="global", coefficient=0.1, topk=2)
    return [*made, Example(block=block, oracle=step, keeps=steps)]


def step_loads(r: Random) -> list[Example]:
    b, e = batch(r), dim("experts", 8)
    block = one("step_load", {"load": (b, dim("load_sums", 2), e)}, (e,))
    return [Example(block=block, oracle=lambda load: load[:, 1].sum(0))]


TOPK, EXPERTS = 2, 4


def mixture(r: Random, last: str = "combine") -> Block:
    """dispatch, grouped linear and combine; `last` is the op that the block ends with."""
    b, t, h = dim("batch", 2), dim("seq", 8), dim("hidden", 4)
    e, k, f = dim("experts", EXPERTS), dim("topk", TOPK), dim("expert_ffn", r.choice((4, 6)))
    build = BlockBuilder("mixture")
    x, indices = build.input("x", b, t, h), build.input("indices", b, t, k, dtype="int64")
    weights = build.input("weights", b, t, k)
    rows = build.op("dispatch", "dispatch", (x, indices), (b, t, k, h), experts="experts")
    if last == "dispatch":
        return build.build(rows)
    up = build.experts("up", rows, experts=e, out=f, contract=h)
    if last == "grouped_linear":
        return build.build(up)
    down = build.experts("down", up, experts=e, out=h, contract=f)
    return build.build(build.op("combine", "combine", (down, weights, indices), (b, t, h)))


def mixed(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every token by each of its experts, in a loop. x: (B, T, H); up: (E, F, H); down: (E, H, F)."""
    out = torch.zeros_like(x)
    for at in range(indices.shape[-1]):
        own = indices[..., at]
        rows = torch.einsum("bth,btfh->btf", x, up[own])
        out = out + weights[..., at, None] * torch.einsum("btf,bthf->bth", rows, down[own])
    return out


def dispatches(r: Random) -> list[Example]:
    block = mixture(r, "dispatch")
    return [Example(block=block, oracle=lambda x, i: x[:, :, None].expand(*i.shape, x.shape[-1]), below={"indices": 4})]


def grouped(r: Random) -> list[Example]:
    return [Example(block=mixture(r, "grouped_linear"), oracle=lambda rows, up: rows, below={"indices": 4})]


def combines(r: Random) -> list[Example]:
    return [Example(block=mixture(r), oracle=mixed, below={"indices": 4})]


# Views


def reshapes(r: Random) -> list[Example]:
    b, t, n, d = batch(r), seq(r), dim("heads", 4), dim("head_dim", 3)
    joined = product("row", n, d)
    return [
        Example(
            block=one("reshape", {"x": (b, t, n, d)}, (b, t, joined)), oracle=lambda x: x.flatten(2), meshes=(BOTH,)
        ),
        Example(
            block=one("reshape", {"x": (b, t, n, d)}, (b, n, t, d)), oracle=lambda x: x.transpose(1, 2), meshes=(BOTH,)
        ),
        Example(
            block=one("reshape", {"x": (b, t, joined)}, (b, t, n, d)),
            oracle=lambda x: x.unflatten(-1, (4, 3)),
            meshes=(TP,),
        ),
    ]


def splits(r: Random) -> list[Example]:
    b, t, h = batch(r), seq(r), dim("joined", 6)
    build = BlockBuilder("split")
    x = build.input("x", b, t, h)
    cut = build.build(*build.split("y", x, {"a": (b, t, dim("first", 2)), "c": (b, t, dim("second", 4))}))
    apart = BlockBuilder("apart")
    y = apart.input("x", b, t, dim("modulations", 3), dim("hidden", 4))
    parts = apart.build(*apart.split("y", y, {f"p{i}": (b, t, dim("hidden", 4)) for i in range(3)}))
    return [
        Example(block=cut, oracle=lambda x: x.split([2, 4], dim=-1), meshes=(CP,)),
        Example(block=parts, oracle=lambda x: x.unbind(2), meshes=(CP,)),
    ]


def renames(r: Random) -> list[Example]:
    b, t, h = batch(r), seq(r), hidden(r)
    block = one("rename", {"x": (b, t, h)}, (b, t, dim("other", h.size or 0)))
    return [Example(block=block, oracle=lambda x: x.clone(), meshes=(CP,))]


def concats(r: Random) -> list[Example]:
    b, t, n = batch(r), seq(r), dim("heads", 4)
    c, d, joined = dim("nope", 3), dim("rope", 2), dim("qk", 5)
    wide = one("concat", {"a": (b, t, n, c), "c": (b, t, n, d)}, (b, t, n, joined))
    spread = one("concat", {"a": (b, t, n, c), "c": (b, t, d)}, (b, t, n, joined))
    h = hidden(r)
    token = one(
        "concat", {"x": (b, dim("patches", 4), h)}, (b, dim("places", 5), h), parameters={"cls": (h,)}, reverse=True
    )
    return [
        Example(block=wide, oracle=lambda a, c: torch.cat([a, c], -1), meshes=(BOTH,)),
        Example(
            block=spread, oracle=lambda a, c: torch.cat([a, c[:, :, None].expand(*a.shape[:3], 2)], -1), meshes=(BOTH,)
        ),
        Example(block=token, oracle=lambda x, c: torch.cat([c.expand(x.shape[0], 1, -1), x], 1)),
    ]


def repeats(r: Random) -> list[Example]:
    b, t, k, n, d = batch(r), seq(r), dim("kv_heads", 2), dim("heads", 4), dim("head_dim", 3)
    block = one("repeat", {"x": (b, t, k, d)}, (b, t, n, d))
    return [Example(block=block, oracle=lambda x: x.repeat_interleave(2, dim=2), meshes=(BOTH,))]


def opaques(r: Random) -> list[Example]:
    b, t, h = batch(r), seq(r), ffn(r)

    def of(
        target: str, oracle: Oracle, *args: Any, keeps: tuple[str, ...] = (), whole: tuple[str, ...] = ()
    ) -> Example:
        build = BlockBuilder("opaque")
        x = build.input("x", b, t, h)
        block = build.build(x)
        node = Node(target=target, args=(Use("x"), *args), outputs=("y",))
        captured = Captured(nodes=(node,), keeps=keeps, whole=whole)
        op = Op(kind="opaque", path="y", inputs=("x",), outputs=("y",), captured=captured, attrs=attrs())
        made = Declared(name="y", dims=block.tensor("x").dims)
        return Example(
            block=Block(name="opaque", inputs=("x",), outputs=("y",), tensors=(*block.tensors, made), ops=(op,)),
            oracle=oracle,
            meshes=(BOTH,),
        )

    return [
        of("aten.sin.default", torch.sin, keeps=("x",)),
        of("aten.cumsum.default", lambda x: x.cumsum(1), 1, whole=("seq",)),
    ]


# What the runtime does not divide: the strategy's own collectives, by hand


def _halo(site: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
    """A band of rows with the rows of its neighbours at both edges."""
    from ops.own_collectives import neighbours

    above, below = neighbours(x[:, :, :1], x[:, :, -1:], site.axis("cp"))
    rows = torch.cat([above, x, below], dim=2)
    return functional.conv2d(rows, weight, bias, 1, (0, 1))


def _divided_group_norm(site: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Statistics of a group of channels over bands of an image."""
    from ops.own_collectives import summed

    axis = site.axis("cp")
    groups = x.unflatten(1, (2, -1)).flatten(2)
    count = groups.shape[-1] * axis.ranks
    both = summed(torch.stack([groups.sum(-1), groups.square().sum(-1)]), axis) / count
    mean, square = both[0].unsqueeze(-1), both[1].unsqueeze(-1)
    out = ((groups - mean) * torch.rsqrt(square - mean.square() + 1e-5)).view_as(x)
    return out * weight[:, None, None] + bias[:, None, None]


def _exchanged_scan(site: Any, joined: Tensor, *parameters: Tensor) -> Tensor:
    """Over cp positions are exchanged for groups of heads, and back; over tp ranks have groups of their own."""
    from ops.own_collectives import exchanged

    from gnomon.runtime.ops.context import by_rank, in_order
    from gnomon.runtime.ops.state_space import state_space

    axis = site.axis("cp")
    if axis.ranks == 1:
        return state_space(site, joined, *parameters)  # type: ignore[return-value]
    mine = exchanged(joined.unflatten(-1, (2, -1)), axis, give=2, take=1).flatten(2)
    mine = in_order(mine.transpose(0, 1), axis).transpose(0, 1)
    own = []
    for name, value in zip(site.op.inputs[1:], parameters, strict=True):
        own.append(value.chunk(axis.ranks, dim=1 if name.endswith("_bc") else 0)[axis.index])
    y = state_space(site, mine, *own)
    assert isinstance(y, Tensor)
    return exchanged(by_rank(y.transpose(0, 1), axis).transpose(0, 1), axis, give=1, take=2)


EXAMPLES: Mapping[str, Callable[[Random], list[Example]]] = {
    "activation": activations,
    "glu": gates,
    "add": sums,
    "mul": factors,
    "scale": scales,
    "modulate": modulations,
    "blend": blends,
    "softcap": softcaps,
    "dropout": dropouts,
    "cast": casts,
    "clip": clips,
    "linear": linears,
    "matmul": matmuls,
    "nm_linear": sparse,
    "conv2d": convolutions,
    "upsample": upsamples,
    "pool": pools,
    "patchify": patches,
    "embedding": embeddings,
    "timestep": timesteps,
    "cross_entropy": entropies,
    "mse": squared,
    "norm": norms,
    "row_stats": statistics,
    "softmax": softmaxes,
    "rotary": rotaries,
    "alibi": biases,
    "attention": attentions,
    "paged_attention": paged,
    "state_space": scans,
    "router": routers,
    "expert_load": loads,
    "balance_loss": balances,
    "layer_balance": layer_balances,
    "step_load": step_loads,
    "dispatch": dispatches,
    "grouped_linear": grouped,
    "combine": combines,
    "reshape": reshapes,
    "split": splits,
    "rename": renames,
    "concat": concats,
    "repeat": repeats,
    "opaque": opaques,
}
"""Kind -> its examples."""
