"""DeepSpeed-MoE: GPT with experts in every other layer, more of them in the last ones, a dense part beside (PR-MoE).

`pr_moe(config)` returns a Graph of embed, layers and head, a block for each kind of layer. *Pyramid*: `experts` says
how many a layer has. *Residual*: a token goes through one expert and through a dense feed-forward of the same width,
and two learnt numbers for each token, which add up to 1, weigh the two. No token is dropped here: a capacity is the
workload's, and the loss that balances experts is the plan's (`experts.balance = "layer"`, coefficient 0.01). Leaves out
noise on the router's logits.
Sources: Rajbhandari et al. 2022 (DeepSpeed-MoE, ICML), sections 3 and 4.1 and tables 1 and 5;
deepspeedai/DeepSpeed edaa722 deepspeed/moe/layer.py MoE.forward, sharded_moe.py top1gating.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gnomon.errors import GraphError
from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph, Tensor
from gnomon.models.gpt import GptConfig, attention_sublayer, gpt_embed
from gnomon.models.parts import (
    BATCH,
    INPUT_IDS,
    LABELS,
    SEQ,
    dense_ffn,
    embed_call,
    head_block,
    head_call,
)

COEFFICIENTS = Dim(name="coefficients", size=2)
"""Of the experts' part, and of the dense one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrMoeConfig(GptConfig):
    """A GPT decoder with mixtures of experts."""

    experts: tuple[int, ...]
    """Of each layer; 0 for a dense one."""
    residual: bool = True
    """Whether layers with experts have a dense feed-forward beside them."""
    experts_per_token: int = 1
    """Experts that a token visits."""

    def __post_init__(self) -> None:
        GptConfig.__post_init__(self)
        if len(self.experts) != self.num_layers:
            raise GraphError(f"experts lists {len(self.experts)} layers, and num_layers is {self.num_layers}")
        if wrong := [n for n in self.experts if n < 0 or 0 < n < max(2, self.experts_per_token)]:
            raise GraphError(
                f"a layer has {wrong[0]} experts, and a token visits {self.experts_per_token}; use 0 for a dense "
                f"layer, or 2 and more"
            )


def pyramid(num_layers: int, few: int, many: int, last: int = 2) -> tuple[int, ...]:
    """Experts of every other layer, `few` of them and in the last so many such layers `many`."""
    layers = [0] * num_layers
    routed = range(1, num_layers, 2)
    for place, layer in enumerate(routed):
        layers[layer] = many if place >= len(routed) - last else few
    return tuple(layers)


def _experts(b: BlockBuilder, x: str, hidden: Dim, ffn: Dim, count: int, c: PrMoeConfig) -> str:
    """Router, dispatch, experts with biases, combine; the weight of one expert is its probability."""
    experts, topk = Dim(name="experts", size=count), Dim(name="topk", size=c.experts_per_token)
    wide = Dim(name="expert_ffn", size=ffn.size)
    logits = b.linear("mlp.gate", x, out=(experts,), contract=(hidden,), bias=False)
    tokens = b.dims(x)[:-1]
    weights, indices = b.outputs(
        "router",
        "mlp.router",
        (logits,),
        (
            Tensor(name="mlp.router.weights", dims=(*tokens, topk)),
            Tensor(name="mlp.router.indices", dims=(*tokens, topk), dtype="int64"),
        ),
        fn="softmax",
        # Of one expert the weight is its probability: divided by its own sum it would be 1, and the router would learn
        # nothing.
        normalised=c.experts_per_token > 1,
    )
    rows = b.op("dispatch", "mlp.dispatch", (x, indices), (*tokens, topk, hidden), experts=experts.name)
    up = b.experts("mlp.experts.c_fc", rows, experts=experts, out=wide, contract=hidden, bias=True)
    act = b.op("activation", "mlp.experts.act", (up,), fn=c.activation)
    out = b.experts("mlp.experts.c_proj", act, experts=experts, out=hidden, contract=wide, bias=True)
    return b.op("combine", "mlp.combine", (out, weights, indices), (*tokens, hidden))


def layer_block(c: PrMoeConfig, count: int) -> Block:
    """One layer from `x` to `y`. count: of experts; 0: dense."""
    hidden, ffn = Dim(name="hidden", size=c.hidden_size), Dim(name="ffn", size=c.ffn_size or 4 * c.hidden_size)
    b = BlockBuilder(block_name(count))
    x = b.input("x", BATCH, SEQ, hidden)
    middle = attention_sublayer(b, c, x, hidden)
    normed = b.norm("ln_2", middle, hidden, fn="layer", bias=True)
    paths = ("mlp.mlp.c_fc", "mlp.mlp.c_proj") if count else ("mlp.c_fc", "mlp.c_proj")
    if not count:
        out = dense_ffn(b, normed, hidden, ffn, fn=c.activation, bias=True, paths=paths)
    else:
        out = _experts(b, normed, hidden, ffn, count, c)
        if c.residual:
            dense = dense_ffn(b, normed, hidden, ffn, fn=c.activation, bias=True, paths=paths)
            logits = b.linear("mlp.coefficient", normed, out=(COEFFICIENTS,), contract=(hidden,), bias=True)
            out = b.op("blend", "mlp.blend", (out, dense, logits), b.dims(dense))
    return b.build(b.add("mlp_residual", middle, b.dropout("mlp.dropout", out, c.dropout), name="y"))


def block_name(count: int) -> str:
    """The name of the block of a layer with so many experts."""
    return f"layer_{count}_experts" if count else "layer_dense"


def pr_moe(c: PrMoeConfig) -> Graph:
    """The model as a Graph; inputs `input_ids` and `labels`, output `head.loss`."""
    hidden, vocab = Dim(name="hidden", size=c.hidden_size), Dim(name="vocab", size=c.vocab_size)
    embed = gpt_embed(c)
    calls, x = [embed_call("transformer")], f"embed.{embed.outputs[0]}"
    for index, count in enumerate(c.experts):
        name = f"layer_{index}"
        calls.append(
            Call(
                block=block_name(count),
                name=name,
                inputs=(("x", x),),
                first=index,
                family="layers",
                prefix="transformer.h",
            )
        )
        x = f"{name}.y"
    table = "transformer.wte.weight" if c.tied else "lm_head.weight"
    calls.append(head_call(x, norm="transformer.ln_f", lm_head=table, bias=True))
    layers = (layer_block(c, count) for count in dict.fromkeys(c.experts))
    return Graph(
        name=c.name,
        inputs=(INPUT_IDS, LABELS),
        blocks=(embed, *layers, head_block(vocab, hidden, fn="layer", bias=True)),
        calls=tuple(calls),
        outputs=("head.loss",),
    )


def _sized(name: str, hidden: int, few: int, many: int) -> PrMoeConfig:
    return PrMoeConfig(
        name=name,
        num_layers=24,
        hidden_size=hidden,
        num_heads=16,
        vocab_size=50257,
        max_positions=2048,
        experts=pyramid(24, few, many),
    )


def pr_moe_350m() -> PrMoeConfig:
    """350M+PR-MoE-32/64, 4 B parameters. Source: DeepSpeed-MoE, table 5."""
    return _sized("pr-moe-350m", 1024, 32, 64)


def pr_moe_1_3b() -> PrMoeConfig:
    """1.3B+PR-MoE-64/128, 31 B parameters. Source: DeepSpeed-MoE, table 5."""
    return _sized("pr-moe-1.3b", 2048, 64, 128)


def mos_350m() -> PrMoeConfig:
    """The student of `pr_moe_350m`: 21 of its 24 layers, 3.5 B parameters. Source: DeepSpeed-MoE, section 4.2."""
    return student(pr_moe_350m(), 21, "mos-350m")


def student(c: PrMoeConfig, num_layers: int, name: str) -> PrMoeConfig:
    """The same with fewer layers, dense ones and ones with experts in turn as before; the first ones, which have fewest
    experts, are left out."""
    if not 0 < num_layers <= c.num_layers:
        raise GraphError(f"a student of {c.name} has 1 to {c.num_layers} layers, not {num_layers}")
    gone = c.num_layers - num_layers
    # Layers go in pairs, so that the first one left is dense again; of an odd number one comes back as a dense last
    # layer.
    experts = (*c.experts, 0)[gone + gone % 2 :][:num_layers]
    return replace(c, name=name, num_layers=num_layers, experts=experts)
