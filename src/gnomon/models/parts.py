"""Parts that model families share: the dims of text, self-attention, feed-forwards, routed experts, embedding, head.

Each adds ops to a `BlockBuilder` under the module paths of the public implementation and returns a tensor name.
Leaves out: residuals and norms, whose place is what tells families apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from gnomon.errors import GraphError
from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph, Op, Tensor, kv_dim, product
from gnomon.ops.op import AttrValue, attrs

BATCH = Dim(name="batch")
"""Sequences in a microbatch; the workload gives it."""
SEQ = Dim(name="seq")
"""Tokens of a sequence; the workload gives it."""
INPUT_IDS = Tensor(name="input_ids", dims=(BATCH, SEQ), dtype="int64")
"""Token ids, as a graph input."""
LABELS = Tensor(name="labels", dims=(BATCH, SEQ), dtype="int64")
"""Next-token ids, as a graph input."""


MAX_SIZE = 2**32
"""No dim of a model is longer; a longer one in a file is a mistake."""
MAX_LAYERS = 10_000
"""No model is deeper."""


def positive(**sizes: int) -> None:
    """Raise GraphError naming the first size that is not a sensible positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise GraphError(f"{name} is {size!r}: needs an integer of at least 1")
        limit = MAX_LAYERS if name.endswith("layers") else MAX_SIZE
        if size > limit:
            raise GraphError(f"{name} is {size}: at most {limit}")


def divisible(what: str, size: int, by_what: str, by: int) -> None:
    """Raise GraphError unless `size` is a multiple of `by`."""
    if size % by:
        raise GraphError(f"{what}={size} is not a multiple of {by_what}={by}: the nearest is {size // by * by}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """Biases and norms of q, k, v and the output, as a config gives them and its layers have them."""

    qkv_bias: bool = False
    """Biases of q_proj, k_proj and v_proj (Qwen2; Llama with attention_bias)."""
    out_bias: bool = False
    """Bias of o_proj (Llama with attention_bias)."""
    qk_norm: bool = False
    """RMSNorm over the head_dim of q and k (Qwen3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Projections):
    """Shape and variant of a self-attention with separate q, k, v projections."""

    heads: Dim
    """Query heads."""
    kv_heads: Dim
    """Key and value heads; the same dim as `heads` without grouping."""
    head_dim: Dim
    """Width of a head."""
    causal: bool
    """Whether a token sees only earlier ones and itself."""
    rotary: bool = True
    """Rotary position embedding of q and k."""
    alibi: bool = False
    """Linear biases of the scores (BLOOM, MPT)."""
    joined_qk_norm: bool = False
    """The norms of q and k go over all heads at once."""
    sinks: bool = False
    """A score a head that no value belongs to (GPT-OSS)."""
    rotary_factor: bool = False
    """Sines and cosines are multiplied by a factor, as YaRN's are (GPT-OSS); fused kernels know none."""
    values_are_keys: bool = False
    """No v_proj: what k_proj makes, before norm and rotary, is read as values too (Gemma 4's full layers)."""
    gated: bool = False
    """What attention gives is multiplied by the sigmoid of a projection of its own (Qwen3-Next)."""
    window: int = 0
    """Sliding window in tokens; 0 is none."""
    scale: float = 0.0
    """Factor of the scores; 0 is 1/√head_dim."""
    softcap: float = 0.0
    """Cap of the scores by tanh (Gemma 2); 0 is none."""
    dropout: float = 0.0
    """Dropout of the attention probabilities."""


def attention_dims(heads: int, kv_heads: int, head_dim: int) -> tuple[Dim, Dim, Dim]:
    """The dims (heads, kv_heads, head_dim) of an attention; equal numbers of heads share one dim, so that they are
    split together."""
    divisible("num_heads", heads, "num_kv_heads", kv_heads)
    query = Dim(name="heads", size=heads)
    # One dim, so that an axis which divides one divides the other.
    keys = query if heads == kv_heads else Dim(name="kv_heads", size=kv_heads)
    return query, keys, Dim(name="head_dim", size=head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes(Projections):
    """What decoders with grouped queries have in common."""

    name: str
    """Of the model."""
    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides num_heads."""
    head_dim: int
    """Width of a head; heads × head_dim need not be hidden_size."""
    vocab_size: int
    """Rows of the embedding, padding included."""
    tied: bool = False
    """Whether lm_head is the embedding table."""

    def __post_init__(self) -> None:
        positive(num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads)
        positive(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, vocab_size=self.vocab_size)

    def attention(self, *, window: int = 0) -> Attention:
        """The attention of a layer. window: in tokens, 0 for none."""
        heads, kv_heads, head_dim = attention_dims(self.num_heads, self.num_kv_heads, self.head_dim)
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            causal=True,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm=self.qk_norm,
            window=window,
        )

    @property
    def head_weight(self) -> str:
        """Full name of the head's parameter."""
        return "model.embed_tokens.weight" if self.tied else "lm_head.weight"


def self_attention(b: BlockBuilder, x: str, hidden: Dim, a: Attention, path: str = "self_attn") -> str:
    """q, k, v projections, rotary, attention, output projection; the result has the dims of `x`."""
    projected, plain = {}, ""
    for letter, heads in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)):
        name = f"{path}.{letter}_proj"
        # What k_proj made, before its norm and rotary.
        if letter == "v" and a.values_are_keys:
            projected["v"] = plain
            continue
        projected[letter] = b.linear(name, x, out=(heads, a.head_dim), contract=(hidden,), bias=a.qkv_bias)
        plain = projected[letter]
        if a.qk_norm and a.joined_qk_norm and letter != "v":
            projected[letter] = _norm_over_heads(b, f"{path}.{letter}_norm", projected[letter], heads, a.head_dim)
        elif a.qk_norm and letter != "v":
            projected[letter] = b.norm(f"{path}.{letter}_norm", projected[letter], a.head_dim, fn="rms", bias=False)
        if a.rotary and letter != "v":
            factor: dict[str, Any] = {"factor": True} if a.rotary_factor else {}
            projected[letter] = b.op("rotary", f"{path}.{letter}_rotary", (projected[letter],), **factor)
    core = b.attention(
        f"{path}.core",
        projected["q"],
        projected["k"],
        projected["v"],
        causal=a.causal,
        window=a.window,
        scale=a.scale,
        softcap=a.softcap,
        dropout=a.dropout,
        bias=_linear_biases(b, path, a.heads) if a.alibi else "",
        sinks=b.parameter(f"{path}.sinks", a.heads) if a.sinks else "",
    )
    if a.gated:
        gate = b.linear(f"{path}.gate_proj", x, out=(a.heads, a.head_dim), contract=(hidden,), bias=a.qkv_bias)
        # sigmoid(gate) · core: a gated unit whose "up" side is what attention gave.
        core = b.op("glu", f"{path}.gate", (gate, core), fn="sigmoid")
    return b.linear(f"{path}.o_proj", core, out=(hidden,), contract=(a.heads, a.head_dim), bias=a.out_bias)


def _linear_biases(b: BlockBuilder, path: str, heads: Dim) -> str:
    """Builds ALiBi's biases: from positions to what is added to the scores."""
    places = b.state("position_ids", SEQ, dtype="int64", lifetime="job")
    return b.op("alibi", f"{path}.alibi", (places,), (SEQ, kv_dim(SEQ), heads))


def _norm_over_heads(b: BlockBuilder, path: str, x: str, heads: Dim, head_dim: Dim) -> str:
    """RMSNorm over all heads of a token together."""
    dims = b.dims(x)
    # Joined, since a norm goes over one dim.
    row = product(f"{heads.name}_row", heads, head_dim)
    joined = b.op("reshape", f"{path}.joined", (x,), (*dims[:-2], row))
    return b.op("reshape", f"{path}.heads", (b.norm(path, joined, row, fn="rms", bias=False),), dims)


def gated_ffn(b: BlockBuilder, x: str, hidden: Dim, ffn: Dim, *, fn: str, bias: bool = False, path: str = "mlp") -> str:
    """Builds down(fn(gate(x)) · up(x)): SwiGLU with fn silu, GeGLU with gelu."""
    gate = b.linear(f"{path}.gate_proj", x, out=(ffn,), contract=(hidden,), bias=bias)
    up = b.linear(f"{path}.up_proj", x, out=(ffn,), contract=(hidden,), bias=bias)
    act = b.op("glu", f"{path}.act", (gate, up), fn=fn)
    return b.linear(f"{path}.down_proj", act, out=(hidden,), contract=(ffn,), bias=bias)


def dense_ffn(b: BlockBuilder, x: str, hidden: Dim, ffn: Dim, *, fn: str, bias: bool, paths: tuple[str, str]) -> str:
    """Builds down(fn(up(x))); `paths` are those of the two linears."""
    up = b.linear(paths[0], x, out=(ffn,), contract=(hidden,), bias=bias)
    act = b.op("activation", f"{paths[0]}.act", (up,), fn=fn)
    return b.linear(paths[1], act, out=(hidden,), contract=(ffn,), bias=bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts of a mixture."""

    experts: Dim
    """Number of routed experts."""
    topk: Dim
    """Experts chosen for each token."""
    ffn: Dim
    """Width of one expert."""
    router: Literal["softmax", "sigmoid"]
    """How scores are made from logits."""
    router_bias: bool = False
    """A bias on the scores that choose (DeepSeek-V3); it gets no gradient but is stored."""
    paths: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's linears: gate, up, down."""
    groups: int = 1
    """Groups of consecutive experts, of which a token chooses some before it chooses experts of these."""
    groups_per_token: int = 1
    """How many."""
    gated: bool = True
    """Gated by SiLU; otherwise up, `activation` and down, without a gate."""
    activation: str = "gelu"
    """Of experts without a gate."""
    latent: Dim | None = None
    """Width in which rows are dispatched and experts work, between two linears of their own (LatentMoE, Nemotron 3)."""
    limit: float = 0.0
    """Of the clamp; 0 where the Graph leaves out sinks, the router's and the experts' biases, as in predictions."""
    alpha: float = 0.0
    """Of the clamped gate: gate · sigmoid(alpha · gate) · (up + 1)."""
    biased: bool = False
    """Linears have biases and the gate's two sides are clamped (GPT-OSS). The biases are a few numbers an expert: what
    counts is the arithmetic, which the attributes `clamped` and `biased` of activation and combine stand for."""


def moe_ffn(b: BlockBuilder, x: str, hidden: Dim, e: Experts, path: str) -> str:
    """Router, dispatch, grouped feed-forward, combine. No token is dropped: rows = tokens × topk."""
    complete = e.biased and e.limit > 0
    logits = b.linear(f"{path}.gate", x, out=(e.experts,), contract=(hidden,), bias=complete)
    tokens = b.dims(x)[:-1]
    inputs = (logits, b.parameter(f"{path}.gate.e_score_correction_bias", e.experts)) if e.router_bias else (logits,)
    weights, indices = b.outputs(
        "router",
        f"{path}.router",
        inputs,
        (
            Tensor(name=f"{path}.router.weights", dims=(*tokens, e.topk)),
            Tensor(name=f"{path}.router.indices", dims=(*tokens, e.topk), dtype="int64"),
        ),
        fn=e.router,
        **({"groups": e.groups, "groups_per_token": e.groups_per_token} if e.groups > 1 else {}),
    )
    clamped: dict[str, Any] = {"clamped": True} if e.biased else {}
    clamped |= {"limit": e.limit, "alpha": e.alpha} if complete else {}
    biased: dict[str, Any] = {"biased": True} if e.biased else {}
    # The router reads x itself; only what is dispatched is narrower.
    width, sent = e.latent or hidden, x
    if e.latent is not None:
        sent = b.linear(f"{path}.fc1_latent_proj", x, out=(e.latent,), contract=(hidden,), bias=False)
    # Rows are (tokens, topk): each token once for each of its experts.
    rows = b.op("dispatch", f"{path}.dispatch", (sent, indices), (*tokens, e.topk, width), experts=e.experts.name)
    gate_path, up_path, down_path = (f"{path}.experts.{p}" for p in e.paths)
    gate = b.experts(gate_path, rows, experts=e.experts, out=e.ffn, contract=width, bias=complete) if e.gated else ""
    up = b.experts(up_path, rows, experts=e.experts, out=e.ffn, contract=width, bias=complete)
    if gate:
        act = b.op("glu", f"{path}.experts.act", (gate, up), fn="silu", **clamped)
    else:
        act = b.op("activation", f"{path}.experts.act", (up,), fn=e.activation)
    out = b.experts(down_path, act, experts=e.experts, out=width, contract=e.ffn, bias=complete)
    joined = b.op("combine", f"{path}.combine", (out, weights, indices), (*tokens, width), **biased)
    if e.latent is None:
        return joined
    return b.linear(f"{path}.fc2_latent_proj", joined, out=(hidden,), contract=(e.latent,), bias=False)


def embed_block(vocab: Dim, hidden: Dim, *, scale: float = 0.0, path: str = "embed_tokens") -> Block:
    """Token embedding from `input_ids` to `x`, times `scale` if that is not 0."""
    b = BlockBuilder("embed")
    ids = b.input("input_ids", BATCH, SEQ, dtype="int64")
    x = b.embedding(path, ids, vocab, hidden, name="rows" if scale else "x")
    return b.build(b.op("scale", f"{path}.scale", (x,), name="x", factor=scale) if scale else x)


def head_block(
    vocab: Dim,
    hidden: Dim,
    *,
    fn: str = "rms",
    bias: bool = False,
    softcap: float = 0.0,
    head_bias: bool = False,
    affine: bool = True,
) -> Block:
    """Final norm, language-model head and cross-entropy: from `x` and `labels` to the scalar `loss`.

    bias: of the norm. head_bias: of the head. affine: whether the norm has a weight.
    """
    b = BlockBuilder("head")
    x = b.input("x", BATCH, SEQ, hidden)
    labels = b.input("labels", BATCH, SEQ, dtype="int64")
    normed = b.norm("norm", x, hidden, fn=fn, bias=bias, affine=affine)
    logits = b.linear("lm_head", normed, out=(vocab,), contract=(hidden,), bias=head_bias)
    if softcap:
        logits = b.op("softcap", "lm_head.softcap", (logits,), cap=softcap)
    return b.build(b.op("cross_entropy", "loss", (logits, labels), (), dtype="fp32"))


def joined_with_next(b: BlockBuilder, vocab: Dim, hidden: Dim, width: int) -> tuple[str, str]:
    """(what the layers of a multi-token prediction module begin with, its labels): the inputs `x` and `next_ids`, each
    normed, side by side through one linear (DeepSeek-V3, section 2.2; Megatron-LM's multi_token_prediction.py).
    width: of the hidden states."""
    joined = Dim(name="joined_hidden", size=2 * width)
    x = b.input("x", BATCH, SEQ, hidden)
    ids = b.input("next_ids", BATCH, SEQ, dtype="int64")
    labels = b.input("labels", BATCH, SEQ, dtype="int64")
    rows = b.norm("enorm", b.embedding("embed_tokens", ids, vocab, hidden), hidden, fn="rms", bias=False)
    old = b.norm("hnorm", x, hidden, fn="rms", bias=False)
    # The order is that of eh_proj's columns: the embedding's half first.
    pair = b.op("concat", "pair", (rows, old), (BATCH, SEQ, joined))
    return b.linear("eh_proj", pair, out=(hidden,), contract=(joined,), bias=False), labels


def embed_call(prefix: str = "model") -> Call:
    """The call of `embed_block`."""
    return Call(block="embed", name="embed", inputs=(("input_ids", "input_ids"),), prefix=prefix)


def layers_call(block: str, x: str, *, first: int, repeat: int, name: str = "") -> Call:
    """The call of a block from `x` to `y` for `repeat` layers, of which `first` is the number of the first. name: in
    place of the block's."""
    return Call(
        block=block,
        name=name or block,
        inputs=(("x", x),),
        repeat=repeat,
        chain=(("y", "x"),),
        first=first,
        family="layers",
        prefix="model.layers",
    )


def head_call(
    x: str, *, norm: str = "model.norm", lm_head: str = "lm_head.weight", bias: bool = False, weight: bool = True
) -> Call:
    """The call of `head_block` on `x`; `norm` and `lm_head` name its parameters in full (tied: the table's name).
    bias, weight: whether the norm has one."""
    biases = (("norm.bias", f"{norm}.bias"),) if bias else ()
    weights = (("norm.weight", f"{norm}.weight"),) if weight else ()
    params = (*weights, *biases, ("lm_head.weight", lm_head))
    return Call(block="head", name="head", inputs=(("x", x), ("labels", "labels")), prefix="", params=params)


def language_model(name: str, blocks: Iterable[Block], calls: Iterable[Call]) -> Graph:
    """A Graph with inputs `input_ids` and `labels` and output `head.loss`."""
    return Graph(
        name=name, inputs=(INPUT_IDS, LABELS), blocks=tuple(blocks), calls=tuple(calls), outputs=("head.loss",)
    )


def with_attribute(graph: Graph, kind: str, name: str, value: AttrValue, **of: AttrValue) -> Graph:
    """The model with an attribute on every op of a kind, of those whose own attributes are `of`: what a class of
    transformers does in a way of its own (`norm`'s `wide` and `fp32`, attention's `eager`). A norm without a weight has
    nothing to multiply `wide`."""

    def marked(op: Op) -> Op:
        plain = name == "wide" and len(op.inputs) == 1
        if op.kind != kind or plain or any(op.attr(key, "") != one for key, one in of.items()):
            return op
        return replace(op, attrs=attrs(**{**dict(op.attrs), name: value}))

    blocks = (replace(block, ops=tuple(marked(op) for op in block.ops)) for block in graph.blocks)
    return replace(graph, blocks=tuple(blocks))
