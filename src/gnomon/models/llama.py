"""Llama and its kin: Llama 2/3, Mistral, Qwen2 (biases on q, k, v), Qwen3 (norms on q and k); tied or not.

`llama(config)` returns a Graph of three blocks: embed, layers (run-length coded), head with the loss. Presets return
configs. Paths and parameter names are those of the public Hugging Face modules. Leaves out: rotary scaling (no effect
on shapes), key-value caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.graph import Block, BlockBuilder, Dim, Graph
from gnomon.models.parts import (
    BATCH,
    SEQ,
    DecoderSizes,
    embed_block,
    embed_call,
    gated_ffn,
    head_block,
    head_call,
    language_model,
    layers_call,
    positive,
    self_attention,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderSizes):
    """A Llama-like decoder."""

    ffn_size: int
    """Width of the gated feed-forward."""
    ffn_bias: bool = False
    """Biases in the feed-forward."""
    window: int = 0
    """Sliding window in tokens, 0 for none (Mistral 7B v0.1: 4096)."""
    full_layers: int = 0
    """With a window: this many first layers see everything (Qwen2's max_window_layers)."""
    activation: str = "silu"
    """Of the gate."""

    def __post_init__(self) -> None:
        DecoderSizes.__post_init__(self)
        positive(ffn_size=self.ffn_size)


def layer_block(c: LlamaConfig, name: str, window: int) -> Block:
    """One decoder layer from `x` to `y`."""
    hidden, ffn = Dim(name="hidden", size=c.hidden_size), Dim(name="ffn", size=c.ffn_size)
    b = BlockBuilder(name)
    x = b.input("x", BATCH, SEQ, hidden)
    normed = b.norm("input_layernorm", x, hidden, fn="rms", bias=False)
    middle = b.add("attention_residual", x, self_attention(b, normed, hidden, c.attention(window=window)))
    normed = b.norm("post_attention_layernorm", middle, hidden, fn="rms", bias=False)
    out = gated_ffn(b, normed, hidden, ffn, fn=c.activation, bias=c.ffn_bias)
    return b.build(b.add("mlp_residual", middle, out, name="y"))


def llama(c: LlamaConfig) -> Graph:
    """The model as a Graph; inputs `input_ids` and `labels`, output `head.loss`."""
    hidden, vocab = Dim(name="hidden", size=c.hidden_size), Dim(name="vocab", size=c.vocab_size)
    # Layers that see everything come first, as Qwen2 counts them; a run of none is left out, as each block must be
    # called.
    full = min(c.full_layers, c.num_layers) if c.window else c.num_layers
    blocks, calls, x = [embed_block(vocab, hidden)], [embed_call()], "embed.x"
    for name, window, first, repeat in (
        ("layers", 0, 0, full),
        ("layers_windowed", c.window, full, c.num_layers - full),
    ):
        if repeat:
            blocks.append(layer_block(c, name, window))
            calls.append(layers_call(name, x, first=first, repeat=repeat))
            x = f"{name}.y"
    blocks.append(head_block(vocab, hidden))
    calls.append(head_call(x, lm_head=c.head_weight))
    return language_model(c.name, blocks, calls)


def llama_tiny() -> LlamaConfig:
    """3.1 million parameters on bytes: a step of some thousand tokens takes about a second on one core."""
    return LlamaConfig(
        name="llama-tiny",
        num_layers=4,
        hidden_size=256,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        ffn_size=704,
        vocab_size=256,
    )


def llama_mini() -> LlamaConfig:
    """Two layers of width 64: numbers that can be followed by hand."""
    return LlamaConfig(
        name="llama-mini",
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=128,
        vocab_size=256,
    )


def _llama3(name: str, layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False) -> LlamaConfig:
    """Llama 3: 8 key heads, vocabulary 128,256."""
    return LlamaConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=hidden // heads,
        ffn_size=ffn,
        vocab_size=128256,
        tied=tied,
    )


def llama3_1_8b() -> LlamaConfig:
    """Llama 3.1 8B. Source: The Llama 3 Herd of Models (2024), table 3."""
    return _llama3("llama-3.1-8b", 32, 4096, 32, 14336)


def llama3_1_70b() -> LlamaConfig:
    """Llama 3.1 70B. Source: The Llama 3 Herd of Models (2024), table 3."""
    return _llama3("llama-3.1-70b", 80, 8192, 64, 28672)


def llama3_1_405b() -> LlamaConfig:
    """Llama 3.1 405B. Source: The Llama 3 Herd of Models (2024), table 3."""
    return _llama3("llama-3.1-405b", 126, 16384, 128, 53248)


def llama3_2_1b() -> LlamaConfig:
    """Llama 3.2 1B, tied. Source: its config.json (meta-llama/Llama-3.2-1B)."""
    return _llama3("llama-3.2-1b", 16, 2048, 32, 8192, tied=True)


def llama2_7b() -> LlamaConfig:
    """Llama 2 7B. Source: Touvron et al. 2023."""
    return LlamaConfig(
        name="llama-2-7b",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        ffn_size=11008,
        vocab_size=32000,
    )


def llama2_70b() -> LlamaConfig:
    """Llama 2 70B. Source: Touvron et al. 2023 and its config.json."""
    return LlamaConfig(
        name="llama-2-70b",
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=28672,
        vocab_size=32000,
    )


def mistral_7b() -> LlamaConfig:
    """Mistral 7B v0.1, window 4096. Source: Jiang et al. 2023."""
    return LlamaConfig(
        name="mistral-7b",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=14336,
        vocab_size=32000,
        window=4096,
    )


def qwen2_5_7b() -> LlamaConfig:
    """Qwen2.5 7B: biases on q, k, v; no window in use. Source: its config.json (Qwen/Qwen2.5-7B)."""
    return LlamaConfig(
        name="qwen2.5-7b",
        num_layers=28,
        hidden_size=3584,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        ffn_size=18944,
        vocab_size=152064,
        qkv_bias=True,
    )


def qwen3_8b() -> LlamaConfig:
    """Qwen3 8B: norms on q and k. Source: its config.json (Qwen/Qwen3-8B)."""
    return LlamaConfig(
        name="qwen3-8b",
        num_layers=36,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=12288,
        vocab_size=151936,
        qk_norm=True,
    )
