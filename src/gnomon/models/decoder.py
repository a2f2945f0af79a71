"""A decoder whose parts are chosen one by one: Falcon, Phi, OPT, BLOOM, StarCoder 2, StableLM, OLMo 2, Gemma 1, 3
and 4, and mixtures with grouped queries and shared experts (Qwen1.5-MoE, GLM-4.5).

`decoder(config)` returns a Graph of embed, layers (run-length coded where neighbours are alike) and head with the loss.
q, k and v come from linears of their own, whether or not the public code joins them: the same parameters and FLOPs.
Leaves out: position biases of the scores (ALiBi costs no kernel of its own), norms over all heads of q and k at once
(counted as norms of each head), layers that differ in more than window, mixture and the heads of full ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from gnomon.errors import GraphError
from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph
from gnomon.models.parts import (
    BATCH,
    SEQ,
    DecoderSizes,
    Experts,
    dense_ffn,
    gated_ffn,
    head_block,
    head_call,
    language_model,
    layers_call,
    moe_ffn,
    positive,
    self_attention,
)

Order = Literal["pre", "post", "both", "parallel", "parallel_two"]
"""Where a layer's norms stand: before attention and feed-forward; after each (OLMo 2); before and after (Gemma 3);
one before both, which run side by side (Phi, Falcon 7B); one before each, side by side (Falcon 40B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The routed feed-forward of all layers but the first ones."""

    num_experts: int
    """Experts of a layer."""
    experts_per_token: int
    """Experts that a token visits."""
    expert_ffn_size: int
    """Width of one expert."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How scores are made from logits."""
    router_bias: bool = False
    """A bias on the scores that choose."""
    groups: int = 1
    """Groups of consecutive experts, of which a token chooses some."""
    groups_per_token: int = 1
    """How many."""
    shared_ffn_size: int = 0
    """Width of the expert that every token visits; 0 for none."""
    shared_gate: bool = False
    """What the shared expert gives is multiplied by the sigmoid of one number a token, which a matrix of its own makes
    of the token (transformers' Qwen2MoeSparseMoeBlock.shared_expert_gate)."""
    num_dense_layers: int = 0
    """First layers that have the dense feed-forward."""
    pattern: tuple[bool, ...] = ()
    """Which of the other layers are routed, repeated; () is all of them."""
    gated: bool = True
    """Experts gated by SiLU; otherwise up, `activation` and down."""
    activation: str = "gelu"
    """Of experts without a gate."""

    def __post_init__(self) -> None:
        positive(num_experts=self.num_experts, experts_per_token=self.experts_per_token)
        positive(expert_ffn_size=self.expert_ffn_size)
        if self.experts_per_token > self.num_experts:
            raise GraphError(f"experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(DecoderSizes):
    """A decoder-only language model."""

    ffn_size: int
    """Width of the dense feed-forward."""
    order: Order = "pre"
    """Where the norms stand."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of norm."""
    norm_bias: bool = False
    """Biases of the norms."""
    norm_weight: bool = True
    """Weights of the norms (OLMo 1 has none)."""
    joined_qk_norm: bool = False
    """Norms of q and k go over all heads at once (OLMo 2); otherwise over each head."""
    gated: bool = True
    """act(gate) · up, then down; otherwise up, act and down."""
    activation: str = "silu"
    """Of the feed-forward."""
    ffn_bias: bool = False
    """Biases of the feed-forward."""
    head_bias: bool = False
    """Bias of lm_head (Phi)."""
    rotary: bool = True
    """Rotary positions."""
    alibi: bool = False
    """Linear biases of the scores in place of positions."""
    rotated: tuple[bool, ...] = (True,)
    """Which layers have them, repeated, where `rotary`: three of four in SmolLM 3."""
    position_rows: int = 0
    """Rows of a learned position embedding; 0 for none."""
    embed_norm: bool = False
    """A norm after the embedding (BLOOM)."""
    softcap: float = 0.0
    """Cap of the logits by tanh; 0 for none."""
    embed_scale: float = 0.0
    """Factor of the embedding (Gemma); 0 for none."""
    windows: tuple[int, ...] = (0,)
    """Sliding windows in tokens of the layers, repeated: five of 512 and a 0 (all tokens) in Gemma 3 1B."""
    full_heads: tuple[int, int] | None = None
    """(key heads, width of a head) of the layers without a window where they differ; these then read their keys as
    values too (Gemma 4)."""
    query_scale: float = 0.0
    """Factor of the scores; 0 is 1/√head_dim."""
    dropout: float = 0.0
    """After attention and feed-forward."""
    attention_dropout: float = 0.0
    """Of the attention probabilities."""
    mixture: Mixture | None = None
    """Routed experts, if it has any."""

    def __post_init__(self) -> None:
        DecoderSizes.__post_init__(self)
        positive(ffn_size=self.ffn_size)
        if self.full_heads is not None:
            positive(full_kv_heads=self.full_heads[0], full_head_dim=self.full_heads[1])
        if not self.windows:
            raise GraphError("windows is empty: give (0,) for layers that see all tokens")
        if self.mixture is not None and not 0 <= self.mixture.num_dense_layers <= self.num_layers:
            raise GraphError(f"num_dense_layers={self.mixture.num_dense_layers} is not between 0 and {self.num_layers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What tells layers apart."""

    window: int
    mixture: bool
    rotary: bool

    @property
    def block(self) -> str:
        """Name of its block."""
        return f"layers{'_moe' * self.mixture}{'_windowed' * bool(self.window)}"

    def block_name(self, c: DecoderConfig) -> str:
        """Name of its block in a model where only some layers have rotary positions, or in any other."""
        return f"{self.block}{'_unrotated' * (c.rotary and not self.rotary)}"


def _kinds(c: DecoderConfig) -> list[_Kind]:
    """What each layer of the decoder is: its window, mixture, rotary and norms."""
    return [
        _Kind(
            window=c.windows[i % len(c.windows)],
            mixture=_routed(c, i),
            rotary=c.rotary and c.rotated[i % len(c.rotated)],
        )
        for i in range(c.num_layers)
    ]


def _routed(c: DecoderConfig, layer: int) -> bool:
    """Whether a layer's feed-forward is a mixture."""
    if c.mixture is None or layer < c.mixture.num_dense_layers:
        return False
    pattern = c.mixture.pattern or (True,)
    return pattern[(layer - c.mixture.num_dense_layers) % len(pattern)]


def _normed(b: BlockBuilder, path: str, x: str, hidden: Dim, c: DecoderConfig) -> str:
    return b.norm(path, x, hidden, fn=c.norm, bias=c.norm_bias, affine=c.norm_weight)


def _feed_forward(b: BlockBuilder, x: str, hidden: Dim, c: DecoderConfig, kind: _Kind) -> str:
    if not kind.mixture or c.mixture is None:
        ffn = Dim(name="ffn", size=c.ffn_size)
        if c.gated:
            return gated_ffn(b, x, hidden, ffn, fn=c.activation, bias=c.ffn_bias)
        return dense_ffn(b, x, hidden, ffn, fn=c.activation, bias=c.ffn_bias, paths=("mlp.up_proj", "mlp.down_proj"))
    m = c.mixture
    e = Experts(
        experts=Dim(name="experts", size=m.num_experts),
        topk=Dim(name="topk", size=m.experts_per_token),
        ffn=Dim(name="expert_ffn", size=m.expert_ffn_size),
        router=m.router,
        router_bias=m.router_bias,
        groups=m.groups,
        groups_per_token=m.groups_per_token,
        gated=m.gated,
        activation=m.activation,
    )
    routed = moe_ffn(b, x, hidden, e, "mlp")
    if not m.shared_ffn_size:
        return routed
    shared = Dim(name="shared_ffn", size=m.shared_ffn_size)
    path = "mlp.shared_experts"
    if m.gated:
        ffn_out = gated_ffn(b, x, hidden, shared, fn=c.activation, path=path)
    else:
        paths = (f"{path}.up_proj", f"{path}.down_proj")
        ffn_out = dense_ffn(b, x, hidden, shared, fn=m.activation, bias=False, paths=paths)
    if m.shared_gate:
        one = Dim(name="shared_gate", size=1)
        gate = b.linear("mlp.shared_expert_gate", x, out=(one,), contract=(hidden,), bias=False)
        share = b.op("activation", "mlp.shared_expert_gate.act", (gate,), fn="sigmoid")
        share = b.op("rename", "mlp.shared_expert_gate.share", (share,), b.dims(x)[:-1])
        ffn_out = b.op("mul", "mlp.shared_experts.gated", (ffn_out, share))
    return b.add("mlp.sum", routed, ffn_out)


def layer_block(c: DecoderConfig, kind: _Kind) -> Block:
    """One layer from `x` to `y`."""
    hidden = Dim(name="hidden", size=c.hidden_size)
    sizes = c
    if c.full_heads is not None and not kind.window:
        sizes = replace(c, num_kv_heads=c.full_heads[0], head_dim=c.full_heads[1])
    a = replace(
        sizes.attention(window=kind.window),
        rotary=kind.rotary,
        joined_qk_norm=c.joined_qk_norm,
        alibi=c.alibi,
        values_are_keys=sizes is not c,
        scale=c.query_scale,
        dropout=c.attention_dropout,
    )
    b = BlockBuilder(kind.block_name(c))
    x = b.input("x", BATCH, SEQ, hidden)
    before, after = c.order != "post", c.order in ("post", "both")
    normed = _normed(b, "input_layernorm", x, hidden, c) if before else x
    out = self_attention(b, normed, hidden, a)
    out = _normed(b, "post_attention_layernorm", out, hidden, c) if after else out
    out = b.dropout("attention_dropout", out, c.dropout)
    if c.order in ("parallel", "parallel_two"):
        side = _normed(b, "mlp_layernorm", x, hidden, c) if c.order == "parallel_two" else normed
        # Attention and feed-forward read x side by side; their sum is added to x once.
        both = b.add("parallel_sum", b.dropout("mlp_dropout", _feed_forward(b, side, hidden, c, kind), c.dropout), out)
        return b.build(b.add("mlp_residual", x, both, name="y"))
    middle = b.add("attention_residual", x, out)
    second = "pre_feedforward_layernorm" if after else "post_attention_layernorm"  # as the public modules call it
    normed = _normed(b, second, middle, hidden, c) if before else middle
    out = _feed_forward(b, normed, hidden, c, kind)
    out = _normed(b, "post_feedforward_layernorm", out, hidden, c) if after else out
    return b.build(b.add("mlp_residual", middle, b.dropout("mlp_dropout", out, c.dropout), name="y"))


def embed_block(c: DecoderConfig, vocab: Dim, hidden: Dim) -> Block:
    """The block from `input_ids` to `x`: rows, their factor, positions and norm, as the model has them."""
    b = BlockBuilder("embed")
    x = b.embedding("embed_tokens", b.input("input_ids", BATCH, SEQ, dtype="int64"), vocab, hidden)
    if c.embed_scale:
        x = b.op("scale", "embed_tokens.scale", (x,), factor=c.embed_scale)
    if c.position_rows:
        places = b.state("position_ids", SEQ, dtype="int64", lifetime="job")
        rows = b.embedding("embed_positions", places, Dim(name="positions", size=c.position_rows), hidden)
        x = b.add("embed_sum", x, rows)
    return b.build(_normed(b, "embed_layernorm", x, hidden, c) if c.embed_norm else x)


def decoder(c: DecoderConfig) -> Graph:
    """The model as a Graph; inputs `input_ids` and `labels`, output `head.loss`."""
    hidden, vocab = Dim(name="hidden", size=c.hidden_size), Dim(name="vocab", size=c.vocab_size)
    embed = embed_block(c, vocab, hidden)
    kinds = _kinds(c)
    # Run-length coded: neighbours that are alike are one call.
    runs = [(kind, len(list(same))) for kind, same in groupby(kinds)]
    calls = [Call(block="embed", name="embed", inputs=(("input_ids", "input_ids"),), prefix="model")]
    x, first = f"embed.{embed.outputs[0]}", 0
    for kind, repeat in runs:
        # A kind that comes in several runs needs a name for each call.
        name = kind.block_name(c) if len(set(kinds)) == len(runs) else f"layers_{first}"
        calls.append(layers_call(kind.block_name(c), x, first=first, repeat=repeat, name=name))
        x, first = f"{name}.y", first + repeat
    calls.append(head_call(x, lm_head=c.head_weight, bias=c.norm_bias, weight=c.norm_weight))
    head = head_block(
        vocab, hidden, fn=c.norm, bias=c.norm_bias, head_bias=c.head_bias, affine=c.norm_weight, softcap=c.softcap
    )
    return language_model(c.name, (embed, *(layer_block(c, kind) for kind in dict.fromkeys(kinds)), head), calls)
