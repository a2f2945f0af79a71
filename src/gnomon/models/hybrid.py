"""Hybrids of Mamba-2, gated DeltaNet, attention, feed-forward and mixture layers: Mamba-2 itself, Nemotron-H, Nemotron
3, Bamba, Granite 4, Qwen3-Next.

`hybrid(config)` returns a Graph with one call for each run of equal layers. A layer is written as its parts, each with
a norm before and a residual around it: `M` Mamba-2, `D` gated DeltaNet, `*` attention, `-` feed-forward, `E` mixture,
as Nemotron-H's `hybrid_override_pattern` has it; Bamba's layers are `M-` and `*-`, Qwen3-Next's `DE` and `*E`. The
convolution's weight is counted in two parts, over x and over B and C: as many parameters. Leaves out attention besides
Mamba in one layer (Falcon-H1).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from gnomon.errors import GraphError
from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph
from gnomon.models.parts import (
    BATCH,
    INPUT_IDS,
    LABELS,
    SEQ,
    Attention,
    Experts,
    attention_dims,
    dense_ffn,
    divisible,
    embed_block,
    embed_call,
    gated_ffn,
    head_block,
    head_call,
    joined_with_next,
    layers_call,
    moe_ffn,
    positive,
    self_attention,
)

PARTS = {"M": "mamba", "D": "linear_attn", "*": "self_attn", "-": "mlp", "E": "moe"}
"""Letter of a layer's part -> path of its module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """The sizes of a Mamba-2 mixer."""

    num_heads: int
    """Heads."""
    head_dim: int
    """Width of a head."""
    num_groups: int
    """Groups of heads that share B and C."""
    state_size: int
    """State of a head, for each of its head_dim numbers."""
    conv_kernel: int = 4
    """Taps of the convolution."""
    chunk: int = 128
    """Tokens that the scan works on at once."""
    conv_bias: bool = True
    """A bias of the convolution."""

    def __post_init__(self) -> None:
        positive(num_heads=self.num_heads, head_dim=self.head_dim, num_groups=self.num_groups)
        positive(state_size=self.state_size, conv_kernel=self.conv_kernel, chunk=self.chunk)
        divisible("num_heads", self.num_heads, "num_groups", self.num_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The sizes of a gated DeltaNet mixer."""

    key_heads: int
    """Heads of q and k."""
    value_heads: int
    """Heads of v and of the state; a multiple of key_heads."""
    key_dim: int
    """Width of a head of q and k."""
    value_dim: int
    """Width of a head of v."""
    conv_kernel: int = 4
    """Taps of the convolution over q, k and v."""
    chunk: int = 64
    """Tokens that the kernel works on at once."""

    def __post_init__(self) -> None:
        positive(key_heads=self.key_heads, value_heads=self.value_heads, key_dim=self.key_dim, value_dim=self.value_dim)
        positive(conv_kernel=self.conv_kernel, chunk=self.chunk)
        divisible("value_heads", self.value_heads, "key_heads", self.key_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridMixture:
    """The routed feed-forward of `E` parts."""

    num_experts: int
    """Experts of a layer."""
    experts_per_token: int
    """Experts that a token visits."""
    expert_ffn_size: int
    """Width of one expert."""
    shared_ffn_size: int = 0
    """Width of the expert that every token visits; 0 for none."""
    latent_size: int = 0
    """Width in which routed rows are dispatched (LatentMoE); 0: the hidden size."""
    num_groups: int = 1
    """Groups of consecutive experts: a token's are all in some of them, which bounds the nodes that it is sent to."""
    groups_per_token: int = 1
    """Groups that a token chooses."""
    sigmoid: bool = True
    """Scores are sigmoids with a bias on those that choose; else softmax without."""

    def __post_init__(self) -> None:
        positive(num_experts=self.num_experts, experts_per_token=self.experts_per_token)
        positive(expert_ffn_size=self.expert_ffn_size)
        if self.experts_per_token > self.num_experts:
            raise GraphError(f"experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")
        divisible("num_experts", self.num_experts, "num_groups", self.num_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """A decoder of several kinds of layers."""

    name: str
    """Of the model."""
    layers: tuple[str, ...]
    """Each layer's parts, of the letters of PARTS."""
    hidden_size: int
    """Width of the residual stream."""
    vocab_size: int
    """Rows of the embedding, padding included."""
    num_heads: int = 1
    """Query heads of attention parts."""
    num_kv_heads: int = 1
    """Key and value heads; divides num_heads."""
    head_dim: int = 1
    """Width of an attention head."""
    rotary: bool = False
    """Rotary positions in attention."""
    attention_bias: bool = False
    """Biases of q, k, v and the output."""
    attention_gate: bool = False
    """A gate of its own projection on what attention gives, and norms on q and k (Qwen3-Next)."""
    ffn_size: int = 1
    """Width of dense feed-forwards."""
    gated: bool = False
    """Feed-forwards and experts are act(gate) · up, then down; otherwise up, act and down."""
    activation: str = "relu2"
    """Of both; squared ReLU in Nemotron."""
    mamba: Mamba2 | None = None
    """Of `M` parts."""
    delta: DeltaNet | None = None
    """Of `D` parts."""
    mixture: HybridMixture | None = None
    """Of `E` parts."""
    tied: bool = False
    """Whether lm_head is the embedding table."""
    embed_scale: float = 0.0
    """Factor of the embedding; 0 for none (Granite)."""
    query_scale: float = 0.0
    """Factor of attention's scores; 0 is 1/√head_dim."""
    mtp_layers: tuple[str, ...] = ()
    """Layers of the multi-token prediction module; () for none."""
    mtp_depth: int = 0
    """How often it runs, each time on what it made before and one token further; its weights are the same."""

    def __post_init__(self) -> None:
        positive(num_layers=len(self.layers), hidden_size=self.hidden_size, vocab_size=self.vocab_size)
        positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        positive(ffn_size=self.ffn_size)
        letters = set("".join((*self.layers, *self.mtp_layers)))
        if not all((*self.layers, *self.mtp_layers)) or letters - PARTS.keys():
            raise GraphError(f"layers are written with the letters {' '.join(PARTS)}, not {self.layers}")
        for letter, what, part in (
            ("M", "mamba", self.mamba),
            ("D", "delta", self.delta),
            ("E", "mixture", self.mixture),
        ):
            if letter in letters and part is None:
                raise GraphError(f"layers have {letter!r} parts: give `{what}`")
        if bool(self.mtp_layers) != bool(self.mtp_depth) or not 0 <= self.mtp_depth <= 8:
            raise GraphError(f"mtp_depth={self.mtp_depth} with mtp_layers={self.mtp_layers}: give both or neither")


def mamba_mixer(b: BlockBuilder, x: str, hidden: Dim, m: Mamba2, path: str) -> str:
    """One projection to z, x, B, C and dt, convolution and scan, a norm over each group, projection back. The
    projection's rows lie group after group, so that ranks divide them as they divide groups.

    Source: NVIDIA/Megatron-LM megatron/core/ssm/mamba_mixer.py (one column-parallel and one row-parallel linear, groups
    and heads divided over tp, a gated RMSNorm over each group), read 2026-11-22.
    """
    width = m.num_heads * m.head_dim
    # Rows of z and x (a width each), of B and C (a state for each group each), and of dt (one for each head).
    projected = Dim(name="ssm_proj", size=2 * width + 2 * m.num_groups * m.state_size + m.num_heads)
    heads, groups = Dim(name="ssm_heads", size=m.num_heads), Dim(name="ssm_groups", size=m.num_groups)
    inner, state = Dim(name="ssm_width", size=width // m.num_groups), Dim(name="ssm_state", size=m.state_size)
    two, taps = Dim(name="ssm_bc", size=2), Dim(name="ssm_taps", size=m.conv_kernel)
    joined = b.linear(f"{path}.in_proj", x, out=(projected,), contract=(hidden,), bias=False)
    mixer_inputs = [joined, b.parameter(f"{path}.conv1d.weight_x", groups, inner, taps)]
    mixer_inputs.append(b.parameter(f"{path}.conv1d.weight_bc", two, groups, state, taps))
    if m.conv_bias:
        mixer_inputs.append(b.parameter(f"{path}.conv1d.bias_x", groups, inner))
        mixer_inputs.append(b.parameter(f"{path}.conv1d.bias_bc", two, groups, state))
    mixer_inputs += [b.parameter(f"{path}.{name}", heads) for name in ("dt_bias", "A_log", "D")]
    y = b.op("state_space", f"{path}.scan", tuple(mixer_inputs), (*b.dims(x)[:-1], groups, inner), chunk=m.chunk)
    weight = b.parameter(f"{path}.norm.weight", groups, inner)
    normed = b.op("norm", f"{path}.norm", (y, weight), fn="rms", over=inner.name)
    return b.linear(f"{path}.out_proj", normed, out=(hidden,), contract=(groups, inner), bias=False)


def delta_mixer(b: BlockBuilder, x: str, hidden: Dim, m: DeltaNet, path: str) -> str:
    """One projection to z, v, k and q and one number a head each for decay and step, convolution and the delta rule, a
    norm over each head, projection back. As `mamba_mixer` with v for x, k and q for B and C: the same op, whose rule
    differs, and which only servers price.

    Source: Yang, Kautz, Hatamizadeh 2024 (Gated Delta Networks); transformers modeling_qwen3_next.py, 4.57.
    """
    width = m.value_heads * m.value_dim
    # Rows of z and v (a width each), of k and q, and two numbers for each value head: the decay and the step.
    projected = Dim(name="ssm_proj", size=2 * width + 2 * m.key_heads * m.key_dim + 2 * m.value_heads)
    heads, groups = Dim(name="ssm_heads", size=m.value_heads), Dim(name="ssm_groups", size=m.key_heads)
    inner, state = Dim(name="ssm_width", size=width // m.key_heads), Dim(name="ssm_state", size=m.key_dim)
    two, taps = Dim(name="ssm_bc", size=2), Dim(name="ssm_taps", size=m.conv_kernel)
    joined = b.linear(f"{path}.in_proj", x, out=(projected,), contract=(hidden,), bias=False)
    mixer_inputs = [joined, b.parameter(f"{path}.conv1d.weight_x", groups, inner, taps)]
    mixer_inputs.append(b.parameter(f"{path}.conv1d.weight_bc", two, groups, state, taps))
    mixer_inputs += [b.parameter(f"{path}.{name}", heads) for name in ("dt_bias", "A_log", "D")]
    dims = (*b.dims(x)[:-1], groups, inner)
    y = b.op("state_space", f"{path}.scan", tuple(mixer_inputs), dims, chunk=m.chunk, rule="gated_delta")
    weight = b.parameter(f"{path}.norm.weight", groups, inner)
    normed = b.op("norm", f"{path}.norm", (y, weight), fn="rms", over=inner.name)
    return b.linear(f"{path}.out_proj", normed, out=(hidden,), contract=(groups, inner), bias=False)


def _feed_forward(b: BlockBuilder, x: str, hidden: Dim, ffn: Dim, c: HybridConfig, path: str) -> str:
    if c.gated:
        return gated_ffn(b, x, hidden, ffn, fn=c.activation, path=path)
    paths = (f"{path}.up_proj", f"{path}.down_proj")
    return dense_ffn(b, x, hidden, ffn, fn=c.activation, bias=False, paths=paths)


def _mixture(b: BlockBuilder, x: str, hidden: Dim, c: HybridConfig, path: str) -> str:
    m = c.mixture
    assert m is not None, "checked by HybridConfig"
    e = Experts(
        experts=Dim(name="experts", size=m.num_experts),
        topk=Dim(name="topk", size=m.experts_per_token),
        ffn=Dim(name="expert_ffn", size=m.expert_ffn_size),
        router="sigmoid" if m.sigmoid else "softmax",
        router_bias=m.sigmoid,
        groups=m.num_groups,
        groups_per_token=m.groups_per_token,
        gated=c.gated,
        activation=c.activation,
        latent=Dim(name="latent", size=m.latent_size) if m.latent_size else None,
    )
    routed = moe_ffn(b, x, hidden, e, path)
    if not m.shared_ffn_size:
        return routed
    shared = Dim(name="shared_ffn", size=m.shared_ffn_size)
    return b.add(f"{path}.sum", routed, _feed_forward(b, x, hidden, shared, c, f"{path}.shared_experts"))


def _part(b: BlockBuilder, letter: str, x: str, hidden: Dim, c: HybridConfig, path: str) -> str:
    """A part on its normed input."""
    match letter:
        case "M":
            assert c.mamba is not None, "checked by HybridConfig"
            return mamba_mixer(b, x, hidden, c.mamba, path)
        case "D":
            assert c.delta is not None, "checked by HybridConfig"
            return delta_mixer(b, x, hidden, c.delta, path)
        case "*":
            heads, kv_heads, head_dim = attention_dims(c.num_heads, c.num_kv_heads, c.head_dim)
            bias = c.attention_bias
            a = Attention(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                causal=True,
                rotary=c.rotary,
                qkv_bias=bias,
                out_bias=bias,
                scale=c.query_scale,
                qk_norm=c.attention_gate,
                gated=c.attention_gate,
            )
            return self_attention(b, x, hidden, a, path)
        case "-":
            return _feed_forward(b, x, hidden, Dim(name="ffn", size=c.ffn_size), c, path)
        case _:
            return _mixture(b, x, hidden, c, path)


def _layers(b: BlockBuilder, layers: tuple[str, ...], x: str, hidden: Dim, c: HybridConfig, last: str) -> str:
    """Parts of layers in a row, from x; what they write at the end is named `last`. Paths are numbered if a letter
    comes twice."""
    letters = "".join(layers)
    for index, letter in enumerate(letters):
        path = PARTS[letter] + (f".{index}" if letters.count(letter) > 1 else "")
        out = _part(b, letter, b.norm(f"{path}_norm", x, hidden, fn="rms", bias=False), hidden, c, path)
        x = b.add(f"{path}_residual", x, out, name=last if index == len(letters) - 1 else "")
    return x


def layer_block(c: HybridConfig, layer: str) -> Block:
    """One layer from `x` to `y`."""
    hidden = Dim(name="hidden", size=c.hidden_size)
    b = BlockBuilder("layers_" + "_".join(PARTS[letter] for letter in layer))
    return b.build(_layers(b, (layer,), b.input("x", BATCH, SEQ, hidden), hidden, c, "y"))


def mtp_block(c: HybridConfig, vocab: Dim, hidden: Dim) -> Block:
    """A multi-token prediction module: x joined with the next token, its layers, the model's head; outputs `loss`, and
    `y` for the next one. Source: NVIDIA/Megatron-LM megatron/core/transformer/multi_token_prediction.py."""
    b = BlockBuilder("mtp")
    start, labels = joined_with_next(b, vocab, hidden, c.hidden_size)
    y = _layers(b, c.mtp_layers, start, hidden, c, "y")
    normed = b.norm("final_layernorm", y, hidden, fn="rms", bias=False)
    logits = b.linear("lm_head", normed, out=(vocab,), contract=(hidden,), bias=False)
    loss = b.op("cross_entropy", "loss", (logits, labels), (), dtype="fp32")
    return b.build(y, loss)


def hybrid(c: HybridConfig) -> Graph:
    """The model as a Graph; inputs `input_ids`, `labels` (and later ones for each prediction), outputs the losses."""
    hidden, vocab = Dim(name="hidden", size=c.hidden_size), Dim(name="vocab", size=c.vocab_size)
    table = "model.embed_tokens.weight" if c.tied else "lm_head.weight"
    blocks = [
        embed_block(vocab, hidden, scale=c.embed_scale),
        *(layer_block(c, layer) for layer in dict.fromkeys(c.layers)),
    ]
    calls, x, first = [embed_call()], "embed.x", 0
    # A call for each run of equal layers, each run reading the one before; runs apart that are alike share a block, so
    # that a layer is priced once however often its kind comes back.
    for layer, same in groupby(c.layers):
        repeat, name = len(list(same)), f"layers_{first}"
        block = "layers_" + "_".join(PARTS[letter] for letter in layer)
        calls.append(layers_call(block, x, first=first, repeat=repeat, name=name))
        x, first = f"{name}.y", first + repeat
    blocks.append(head_block(vocab, hidden))
    calls.append(head_call(x, lm_head=table))
    inputs, outputs = [INPUT_IDS, LABELS], ["head.loss"]
    if c.mtp_depth:
        module = mtp_block(c, vocab, hidden)
        blocks.append(module)
        # The module reads the model's own embedding and head, and all its depths share the rest of its weights.
        own = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": table}
        shared = tuple((p.name, own.get(p.name, f"mtp.{p.name}")) for p in module.parameters)
    for depth in range(1, c.mtp_depth + 1):
        later = (INPUT_IDS.renamed(f"mtp_ids_{depth}"), LABELS.renamed(f"mtp_labels_{depth}"))
        mtp_inputs = (("x", x), ("next_ids", later[0].name), ("labels", later[1].name))
        calls.append(Call(block="mtp", name=f"mtp_{depth}", inputs=mtp_inputs, params=shared))
        x = f"mtp_{depth}.y"
        inputs, outputs = [*inputs, *later], [*outputs, f"mtp_{depth}.loss"]
    return Graph(name=c.name, inputs=tuple(inputs), blocks=tuple(blocks), calls=tuple(calls), outputs=tuple(outputs))


_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_ULTRA = "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_NEMOTRON_VOCAB = 131_072


def _nemotron_3(
    size: str,
    layers: str,
    hidden_size: int,
    mamba_heads: int,
    mixture: HybridMixture,
    *,
    num_heads: int,
    mtp_depth: int,
) -> HybridConfig:
    """What the three sizes of Nemotron 3 have in common: two key-value heads, states of 128, eight groups."""
    return HybridConfig(
        name=f"nemotron-3-{size}",
        layers=tuple(layers),
        hidden_size=hidden_size,
        vocab_size=_NEMOTRON_VOCAB,
        num_heads=num_heads,
        num_kv_heads=2,
        head_dim=128,
        mamba=Mamba2(num_heads=mamba_heads, head_dim=64, num_groups=8, state_size=128),
        mixture=mixture,
        mtp_layers=("*", "E") if mtp_depth else (),
        mtp_depth=mtp_depth,
    )


def nemotron_3_nano(*, mtp_depth: int = 0) -> HybridConfig:
    """Nemotron 3 Nano 30B-A3B. Source: NVIDIA-NeMo/Megatron-Bridge nemotron_h_provider.py Nemotron3NanoProvider, and
    its config.json (nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16)."""
    mixture = HybridMixture(num_experts=128, experts_per_token=6, expert_ffn_size=1856, shared_ffn_size=3712)
    return _nemotron_3("nano", _NANO, 2688, 64, mixture, num_heads=32, mtp_depth=mtp_depth)


def nemotron_3_super(*, mtp_depth: int = 0) -> HybridConfig:
    """Nemotron 3 Super 120B-A12B. Source: its config.json (nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16)."""
    mixture = HybridMixture(
        num_experts=512, experts_per_token=22, expert_ffn_size=2688, shared_ffn_size=5376, latent_size=1024
    )
    return _nemotron_3("super", _SUPER, 4096, 128, mixture, num_heads=32, mtp_depth=mtp_depth)


def nemotron_3_ultra(*, mtp_depth: int = 0) -> HybridConfig:
    """Nemotron 3 Ultra 550B-A55B. Source: its config.json (nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16)."""
    mixture = HybridMixture(
        num_experts=512, experts_per_token=22, expert_ffn_size=5120, shared_ffn_size=10_240, latent_size=2048
    )
    return _nemotron_3("ultra", _ULTRA, 8192, 256, mixture, num_heads=64, mtp_depth=mtp_depth)


def nemotron_h_8b() -> HybridConfig:
    """Nemotron-H 8B. Source: NVIDIA-NeMo/Megatron-Bridge nemotron_h_provider.py NemotronHModelProvider8B."""
    return HybridConfig(
        name="nemotron-h-8b",
        layers=tuple(_NEMOTRON_H_8B),
        hidden_size=4096,
        vocab_size=_NEMOTRON_VOCAB,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=21_504,
        mamba=Mamba2(num_heads=128, head_dim=64, num_groups=8, state_size=128),
    )


def mamba2_2_7b() -> HybridConfig:
    """Mamba-2 2.7B. Source: its config.json (state-spaces/mamba2-2.7b): vocabulary padded to a multiple of 16, tied."""
    return HybridConfig(
        name="mamba2-2.7b",
        layers=("M",) * 64,
        hidden_size=2560,
        vocab_size=50_288,
        mamba=Mamba2(num_heads=80, head_dim=64, num_groups=1, state_size=128, chunk=256),
        tied=True,
    )
