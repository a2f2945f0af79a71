"""DeepSeek-V3: latent attention (MLA), shared and routed experts, first layers dense, multi-token prediction optional.

`deepseek_v3(config)` returns a Graph of embed, dense layers, mixture layers, optionally MTP modules, and head. In
training MLA is run uncompressed: keys and values of every head are made from the latent. A group-limited choice of
experts has no effect on FLOPs; it bounds how many nodes a token visits. Leaves out the absorbed form used in decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.errors import GraphError
from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph
from gnomon.models.parts import (
    BATCH,
    INPUT_IDS,
    LABELS,
    SEQ,
    Experts,
    embed_block,
    embed_call,
    gated_ffn,
    head_block,
    head_call,
    joined_with_next,
    layers_call,
    moe_ffn,
    positive,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """A DeepSeek-V3 decoder."""

    name: str
    """Of the model."""
    num_layers: int
    """Decoder layers, without MTP modules."""
    num_dense_layers: int
    """Of these, the first that have a dense feed-forward."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Attention heads."""
    q_rank: int
    """Width of the query latent; 0: queries come straight from the hidden state."""
    kv_rank: int
    """Width of the key and value latent."""
    nope_dim: int
    """Part of a query or key head without position."""
    rope_dim: int
    """Rotated part; the key's is shared by all heads."""
    v_head_dim: int
    """Width of a value head."""
    ffn_size: int
    """Width of a dense feed-forward."""
    num_experts: int
    """Routed experts of a mixture layer."""
    experts_per_token: int
    """Routed experts that a token visits."""
    num_shared_experts: int
    """Experts that every token visits, run as one of that many times the width."""
    expert_ffn_size: int
    """Width of one expert."""
    vocab_size: int
    """Rows of the embedding."""
    num_groups: int = 1
    """Groups of consecutive experts: a token's are all in some of them, which bounds the nodes that it is sent to."""
    groups_per_token: int = 1
    """Groups that a token chooses."""
    router: Literal["softmax", "sigmoid"] = "sigmoid"
    """How scores are made from logits: sigmoid with a bias on the scores that choose in V3, softmax without in V2."""
    query_scale: float = 0.0
    """Factor of the scores; 0 is the root of 1 over a head's width. YaRN's mscale_all_dim changes it."""
    mtp_modules: int = 0
    """Multi-token prediction modules, each of which predicts one token further: V3 was trained with 1. Their embedding
    and head are the model's own."""
    mtp_loss_factor: float = 0.1
    """Weight of the mean of their losses: 0.3, later 0.1 in V3's training (section 4.2)."""

    def __post_init__(self) -> None:
        positive(num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads)
        positive(kv_rank=self.kv_rank, nope_dim=self.nope_dim, rope_dim=self.rope_dim, v_head_dim=self.v_head_dim)
        positive(ffn_size=self.ffn_size, num_experts=self.num_experts, experts_per_token=self.experts_per_token)
        positive(expert_ffn_size=self.expert_ffn_size, vocab_size=self.vocab_size)
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise GraphError(f"num_dense_layers={self.num_dense_layers} is not between 0 and {self.num_layers}")
        if self.num_experts % self.num_groups or not 1 <= self.groups_per_token <= self.num_groups:
            raise GraphError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts}, and groups_per_token="
                f"{self.groups_per_token} be from 1 to it"
            )
        if self.experts_per_token > self.num_experts // self.num_groups * self.groups_per_token:
            raise GraphError(
                f"experts_per_token={self.experts_per_token}: {self.groups_per_token} of {self.num_groups} groups of "
                f"{self.num_experts} experts have fewer"
            )
        if not 0 <= self.mtp_modules <= 8:
            raise GraphError(f"mtp_modules={self.mtp_modules}: from 0 to 8")


def latent_attention(b: BlockBuilder, x: str, hidden: Dim, c: DeepseekConfig) -> str:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), uncompressed."""
    heads = Dim(name="heads", size=c.num_heads)
    nope, rope = Dim(name="qk_nope_dim", size=c.nope_dim), Dim(name="rope_dim", size=c.rope_dim)
    qk, value = Dim(name="qk_head_dim", size=c.nope_dim + c.rope_dim), Dim(name="v_head_dim", size=c.v_head_dim)
    kv_rank = Dim(name="kv_rank", size=c.kv_rank)
    tokens = (BATCH, SEQ)
    if c.q_rank:
        q_rank = Dim(name="q_rank", size=c.q_rank)
        latent = b.linear("self_attn.q_a_proj", x, out=(q_rank,), contract=(hidden,), bias=False)
        latent = b.norm("self_attn.q_a_layernorm", latent, q_rank, fn="rms", bias=False)
        q = b.linear("self_attn.q_b_proj", latent, out=(heads, qk), contract=(q_rank,), bias=False)
    else:
        q = b.linear("self_attn.q_proj", x, out=(heads, qk), contract=(hidden,), bias=False)
    q_parts = {"self_attn.q_nope": (*tokens, heads, nope), "self_attn.q_pe": (*tokens, heads, rope)}
    q_nope, q_pe = b.split("self_attn.q_split", q, q_parts)
    both = Dim(name="kv_rank_and_rope", size=c.kv_rank + c.rope_dim)
    compressed = b.linear("self_attn.kv_a_proj_with_mqa", x, out=(both,), contract=(hidden,), bias=False)
    kv_parts = {"self_attn.kv_latent": (*tokens, kv_rank), "self_attn.k_pe": (*tokens, rope)}
    kv_latent, k_pe = b.split("self_attn.kv_a_split", compressed, kv_parts)
    normed = b.norm("self_attn.kv_a_layernorm", kv_latent, kv_rank, fn="rms", bias=False)
    wide = Dim(name="nope_and_v", size=c.nope_dim + c.v_head_dim)
    # One matmul makes keys without position and values of all heads from the latent.
    kv = b.linear("self_attn.kv_b_proj", normed, out=(heads, wide), contract=(kv_rank,), bias=False)
    parts = {"self_attn.k_nope": (*tokens, heads, nope), "self_attn.v": (*tokens, heads, value)}
    k_nope, v = b.split("self_attn.kv_b_split", kv, parts)
    q_pe = b.op("rotary", "self_attn.q_rotary", (q_pe,))
    k_pe = b.op("rotary", "self_attn.k_rotary", (k_pe,))
    q = b.op("concat", "self_attn.q", (q_nope, q_pe), (*tokens, heads, qk))
    k = b.op("concat", "self_attn.k", (k_nope, k_pe), (*tokens, heads, qk))
    core = b.attention("self_attn.core", q, k, v, causal=True, scale=c.query_scale)
    return b.linear("self_attn.o_proj", core, out=(hidden,), contract=(heads, value), bias=False)


def mixture(b: BlockBuilder, x: str, hidden: Dim, c: DeepseekConfig) -> str:
    """Routed experts plus the shared ones."""
    e = Experts(
        experts=Dim(name="experts", size=c.num_experts),
        topk=Dim(name="topk", size=c.experts_per_token),
        ffn=Dim(name="expert_ffn", size=c.expert_ffn_size),
        router=c.router,
        router_bias=c.router == "sigmoid",
        groups=c.num_groups,
        groups_per_token=c.groups_per_token,
    )
    routed = moe_ffn(b, x, hidden, e, "mlp")
    if not c.num_shared_experts:
        return routed
    shared = Dim(name="shared_ffn", size=c.num_shared_experts * c.expert_ffn_size)
    return b.add("mlp.sum", routed, gated_ffn(b, x, hidden, shared, fn="silu", path="mlp.shared_experts"))


def decoder_layer(b: BlockBuilder, x: str, hidden: Dim, c: DeepseekConfig, *, dense: bool) -> str:
    """One layer on `x`; returns `y`."""
    normed = b.norm("input_layernorm", x, hidden, fn="rms", bias=False)
    middle = b.add("attention_residual", x, latent_attention(b, normed, hidden, c))
    normed = b.norm("post_attention_layernorm", middle, hidden, fn="rms", bias=False)
    if dense:
        out = gated_ffn(b, normed, hidden, Dim(name="ffn", size=c.ffn_size), fn="silu")
    else:
        out = mixture(b, normed, hidden, c)
    return b.add("mlp_residual", middle, out, name="y")


def layer_block(c: DeepseekConfig, name: str, *, dense: bool) -> Block:
    """One decoder layer from `x` to `y`."""
    hidden = Dim(name="hidden", size=c.hidden_size)
    b = BlockBuilder(name)
    return b.build(decoder_layer(b, b.input("x", BATCH, SEQ, hidden), hidden, c, dense=dense))


def mtp_block(c: DeepseekConfig, *, handed_on: bool = False) -> Block:
    """A multi-token prediction module (DeepSeek-V3, section 2.2): x joined with the next token, one layer, and a loss,
    which counts `mtp_loss_factor` over the number of modules. handed_on: it has `y` as well, for the next module.

    x is what the last layer writes, before the model's own norm: the head that all share includes one.
    """
    hidden = Dim(name="hidden", size=c.hidden_size)
    vocab, b = Dim(name="vocab", size=c.vocab_size), BlockBuilder("mtp_handed_on" if handed_on else "mtp")
    start, labels = joined_with_next(b, vocab, hidden, c.hidden_size)
    y = decoder_layer(b, start, hidden, c, dense=False)
    normed = b.norm("shared_head.norm", y, hidden, fn="rms", bias=False)
    logits = b.linear("shared_head.head", normed, out=(vocab,), contract=(hidden,), bias=False)
    # Equation 25 of the V3 report: lambda times the mean over modules.
    weight = c.mtp_loss_factor / c.mtp_modules
    loss = b.op("cross_entropy", "loss", (logits, labels), (), dtype="fp32", loss_weight=weight)
    return b.build(y, loss) if handed_on else b.build(loss)


def deepseek_v3(c: DeepseekConfig) -> Graph:
    """The model as a Graph; inputs `input_ids`, `labels` (and the next ones with MTP), outputs the losses."""
    hidden, vocab = Dim(name="hidden", size=c.hidden_size), Dim(name="vocab", size=c.vocab_size)
    blocks, calls, x = [embed_block(vocab, hidden)], [embed_call()], "embed.x"
    for name, dense, first, repeat in (
        ("dense_layers", True, 0, c.num_dense_layers),
        ("moe_layers", False, c.num_dense_layers, c.num_layers - c.num_dense_layers),
    ):
        if repeat:
            blocks.append(layer_block(c, name, dense=dense))
            calls.append(layers_call(name, x, first=first, repeat=repeat))
            x = f"{name}.y"
    blocks.append(head_block(vocab, hidden))
    calls.append(head_call(x))
    inputs, outputs = [INPUT_IDS, LABELS], ["head.loss"]
    shared = (("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", "lm_head.weight"))
    for depth in range(1, c.mtp_modules + 1):
        name, number = ("mtp", "") if c.mtp_modules == 1 else (f"mtp_{depth}", f"_{depth}")
        block = mtp_block(c, handed_on=depth < c.mtp_modules)
        if block not in blocks:
            blocks.append(block)
        later = [INPUT_IDS.renamed(f"mtp_ids{number}"), LABELS.renamed(f"mtp_labels{number}")]
        mtp_inputs = (("x", x), ("next_ids", later[0].name), ("labels", later[1].name))
        # The checkpoint stores modules as further layers.
        prefix = f"model.layers.{c.num_layers + depth - 1}"
        calls.append(Call(block=block.name, name=name, inputs=mtp_inputs, prefix=prefix, params=shared))
        inputs, outputs, x = [*inputs, *later], [*outputs, f"{name}.loss"], f"{name}.y"
    return Graph(name=c.name, inputs=tuple(inputs), blocks=tuple(blocks), calls=tuple(calls), outputs=tuple(outputs))


def deepseek_v3_671b(*, mtp_modules: int = 0) -> DeepseekConfig:
    """DeepSeek-V3 671B. Source: DeepSeek-AI 2024, section 4.2, and its config.json (deepseek-ai/DeepSeek-V3)."""
    return DeepseekConfig(
        name="deepseek-v3",
        num_layers=61,
        num_dense_layers=3,
        hidden_size=7168,
        num_heads=128,
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_head_dim=128,
        ffn_size=18432,
        num_experts=256,
        experts_per_token=8,
        num_shared_experts=1,
        expert_ffn_size=2048,
        vocab_size=129280,
        num_groups=8,
        groups_per_token=4,
        mtp_modules=mtp_modules,
    )
