"""Models of published inference runs that have no preset, by the key or the name that a table of runs gives them.

`graph_of(key, name)` returns a Graph or raises InputError. Sizes are those of each model's config.json on the Hugging
Face hub, and of papers for GPT of Megatron and FasterTransformer; where a size could not be looked up the layer counts
and widths are chosen to give the published number of parameters (`Aquila`, `DeciLM`, `phi-1.5`). Leaves out vision and
audio towers (text requests do not run them).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.models.decoder import DecoderConfig, Mixture, decoder
from gnomon.models.deepseek import DeepseekConfig, deepseek_v3
from gnomon.models.gpt import GptConfig, gpt
from gnomon.models.hybrid import DeltaNet, HybridConfig, HybridMixture, Mamba2, hybrid
from gnomon.models.llama import LlamaConfig, llama
from gnomon.models.mixtral import MixtralConfig, mixtral
from gnomon.models.presets import model

PRESETS: Mapping[str, str] = {
    "llama3-8b": "llama-3.1-8b",
    "llama-7b": "llama-2-7b",
    "llama2-13b": "llama-2-13b",
    "llama2-70b": "llama-2-70b",
    "llama3-70b": "llama-3.1-70b",
    "llama3.1-405b": "llama-3.1-405b",
    "llama3.2-3b": "llama-3.2-3b",
    "mistral-7b": "mistral-7b",
    "mixtral-8x7b": "mixtral-8x7b",
    "mixtral-8x22b": "mixtral-8x22b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2.5-7b": "qwen2.5-7b",
    "qwen2-72b": "qwen2.5-72b",
    "qwen3-4b": "qwen3-4b",
    "qwen3-8b": "qwen3-8b",
    "qwen3-14b": "qwen3-14b",
    "qwen3-32b": "qwen3-32b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "deepseek-v3": "deepseek-v3",
    "gemma2-2b": "gemma-2-2b",
    "gemma2-9b": "gemma-2-9b",
    "gemma2-27b": "gemma-2-27b",
    "gemma3-4b": "gemma-3-4b",
    "gemma3-12b": "gemma-3-12b",
    "gemma3-27b": "gemma-3-27b",
    "gpt-175b": "gpt3-175b",
    "mistral-nemo-12b": "mistral-nemo-12b",
}
"""Key -> preset of the same sizes."""

_LLAMAS: Mapping[str, tuple[int, int, int, int, int, int]] = {
    # layers, hidden, heads, key heads, feed-forward, vocabulary
    "llama-30b": (60, 6656, 52, 52, 17920, 32000),
    "codellama-34b": (48, 8192, 64, 8, 22016, 32000),
    "yi-34b": (60, 7168, 56, 8, 20480, 64000),
    "deepseek-coder-33b": (62, 7168, 56, 8, 19200, 32256),
    "internlm-20b": (60, 5120, 40, 40, 13824, 103168),
    "mistral-large-123b": (88, 12288, 96, 8, 28672, 32768),
    "phi3-mini": (32, 3072, 32, 32, 8192, 32064),
    "phi3-medium": (40, 5120, 40, 10, 17920, 32064),
    "tinyllama-1.1b": (22, 2048, 32, 4, 5632, 32000),
    "qwen1.5-7b": (32, 4096, 32, 32, 11008, 151936),
    "qwen1.5-72b": (80, 8192, 64, 64, 24576, 152064),
    "aquila-7b": (32, 4096, 32, 32, 11008, 100008),
    "aquila2-34b": (60, 6144, 48, 8, 24576, 100008),
    "decilm-7b": (32, 4096, 32, 2, 14336, 32000),
}
_MISTRALS: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "mistral-small-24b": (40, 5120, 32, 8, 32768, 131072),
    "ministral-3-14b": (40, 5120, 32, 8, 16384, 131072),
}
"""With heads of 128."""
_GPTS: Mapping[str, tuple[int, int, int, int]] = {
    # layers, hidden, heads, vocabulary
    "gpt-530b": (105, 20480, 128, 51200),
    "gpt-89b": (48, 12288, 96, 51200),
    "gpt-20b": (44, 6144, 48, 51200),
    "gpt-6.7b": (32, 4096, 32, 51200),
    "gpt-1.3b": (24, 2048, 32, 51200),
    "gpt-350m": (24, 1024, 16, 51200),
    "opt-6.7b": (32, 4096, 32, 50272),
    "phi-1.5": (24, 2048, 32, 51200),
    "stablelm-alpha-3b": (16, 4096, 32, 50688),
    "stablelm-alpha-7b": (16, 6144, 48, 50432),
}
_DECODERS: Mapping[str, DecoderConfig] = {
    c.name: c
    for c in (
        DecoderConfig(
            name="gptj-6b", num_layers=28, hidden_size=4096, num_heads=16, num_kv_heads=16, head_dim=256,
            ffn_size=16384, vocab_size=50400, order="parallel", norm="layer", gated=False, activation="gelu",
        ),
        DecoderConfig(
            name="falcon-7b", num_layers=32, hidden_size=4544, num_heads=71, num_kv_heads=1, head_dim=64,
            ffn_size=18176, vocab_size=65024, order="parallel", norm="layer", gated=False, activation="gelu", tied=True,
        ),
        DecoderConfig(
            name="falcon-180b", num_layers=80, hidden_size=14848, num_heads=232, num_kv_heads=8, head_dim=64,
            ffn_size=59392, vocab_size=65024, order="parallel_two", norm="layer", gated=False, activation="gelu",
            tied=True,
        ),
        DecoderConfig(
            name="bloom-7b1", num_layers=30, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128,
            ffn_size=16384, vocab_size=250880, norm="layer", gated=False, activation="gelu", rotary=False, tied=True,
        ),
        DecoderConfig(
            name="bloom-176b", num_layers=70, hidden_size=14336, num_heads=112, num_kv_heads=112, head_dim=128,
            ffn_size=57344, vocab_size=250880, norm="layer", gated=False, activation="gelu", rotary=False, tied=True,
        ),
        DecoderConfig(
            name="mpt-7b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128,
            ffn_size=16384, vocab_size=50432, norm="layer", gated=False, activation="gelu", rotary=False, tied=True,
        ),
        DecoderConfig(
            name="glm-4.5-air", num_layers=46, hidden_size=4096, num_heads=96, num_kv_heads=8, head_dim=128,
            ffn_size=10944, vocab_size=151552,
            mixture=Mixture(
                num_experts=128, experts_per_token=8, expert_ffn_size=1408, router="sigmoid", shared_ffn_size=1408,
                num_dense_layers=1,
            ),
        ),
        DecoderConfig(
            name="hunyuan-a13b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
            ffn_size=3072, vocab_size=128256, qk_norm=True, tied=True,
            mixture=Mixture(num_experts=64, experts_per_token=8, expert_ffn_size=3072, shared_ffn_size=3072),
        ),
        DecoderConfig(
            name="dots1", num_layers=62, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128,
            ffn_size=10944, vocab_size=152064, qk_norm=True,
            mixture=Mixture(
                num_experts=128, experts_per_token=6, expert_ffn_size=1408, router="sigmoid", shared_ffn_size=2816,
                num_dense_layers=1,
            ),
        ),
        DecoderConfig(
            name="llama4-scout", num_layers=48, hidden_size=5120, num_heads=40, num_kv_heads=8, head_dim=128,
            ffn_size=16384, vocab_size=202048, windows=(8192, 8192, 8192, 0),
            mixture=Mixture(num_experts=16, experts_per_token=1, expert_ffn_size=8192, shared_ffn_size=8192),
        ),
        DecoderConfig(
            name="llama4-maverick", num_layers=48, hidden_size=5120, num_heads=40, num_kv_heads=8, head_dim=128,
            ffn_size=16384, vocab_size=202048, windows=(8192, 8192, 8192, 0),
            mixture=Mixture(
                num_experts=128, experts_per_token=1, expert_ffn_size=8192, shared_ffn_size=8192,
                pattern=(False, True),
            ),
        ),
    )
}  # fmt: skip
_MIXTRALS: Mapping[str, MixtralConfig] = {
    c.name: c
    for c in (
        MixtralConfig(
            name="qwen3-coder-480b", num_layers=62, hidden_size=6144, num_heads=96, num_kv_heads=8, head_dim=128,
            vocab_size=151936, num_experts=160, experts_per_token=8, expert_ffn_size=2560, qk_norm=True,
        ),
        MixtralConfig(
            name="minimax-m2.5", num_layers=62, hidden_size=3072, num_heads=48, num_kv_heads=8, head_dim=128,
            vocab_size=200064, num_experts=256, experts_per_token=8, expert_ffn_size=1536, qk_norm=True,
        ),
    )
}  # fmt: skip
_LATENT: Mapping[str, DeepseekConfig] = {
    c.name: c
    for c in (
        DeepseekConfig(
            name="kimi-k2", num_layers=61, num_dense_layers=1, hidden_size=7168, num_heads=64, q_rank=1536, kv_rank=512,
            nope_dim=128, rope_dim=64, v_head_dim=128, ffn_size=18432, num_experts=384, experts_per_token=8,
            num_shared_experts=1, expert_ffn_size=2048, vocab_size=163840,
        ),
        DeepseekConfig(
            name="glm-4.7-flash", num_layers=47, num_dense_layers=1, hidden_size=2048, num_heads=20, q_rank=768,
            kv_rank=512, nope_dim=192, rope_dim=64, v_head_dim=256, ffn_size=10240, num_experts=64, experts_per_token=4,
            num_shared_experts=1, expert_ffn_size=1536, vocab_size=154880,
        ),
        DeepseekConfig(
            name="glm-5", num_layers=78, num_dense_layers=3, hidden_size=6144, num_heads=64, q_rank=2048, kv_rank=512,
            nope_dim=192, rope_dim=64, v_head_dim=256, ffn_size=12288, num_experts=256, experts_per_token=8,
            num_shared_experts=1, expert_ffn_size=2048, vocab_size=154880,
        ),
        # its compressed and sparse attention is stood for by latent attention over all keys
        DeepseekConfig(
            name="deepseek-v4-flash", num_layers=43, num_dense_layers=0, hidden_size=4096, num_heads=64, q_rank=1024,
            kv_rank=512, nope_dim=128, rope_dim=64, v_head_dim=128, ffn_size=2048, num_experts=256, experts_per_token=6,
            num_shared_experts=1, expert_ffn_size=2048, vocab_size=129280,
        ),
    )
}  # fmt: skip


def _qwen_next(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, values: int, ffn: int, experts: tuple[int, int, int]
) -> Graph:
    """Three layers of gated DeltaNet, then one of attention; experts: (number, chosen, width), or none."""
    count, chosen, width = experts
    feed = "E" if count else "-"
    mixture = (
        HybridMixture(
            num_experts=count, experts_per_token=chosen, expert_ffn_size=width, shared_ffn_size=width, sigmoid=False
        )
        if count
        else None
    )
    return hybrid(
        HybridConfig(
            name=name,
            layers=("D" + feed, "D" + feed, "D" + feed, "*" + feed) * (layers // 4),
            hidden_size=hidden,
            vocab_size=248320,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=256,
            rotary=True,
            attention_gate=True,
            ffn_size=ffn,
            gated=True,
            activation="silu",
            delta=DeltaNet(key_heads=16, value_heads=values, key_dim=128, value_dim=128),
            mixture=mixture,
        )
    )


def _nemotron_nano_12b() -> Graph:
    layers = "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"
    return hybrid(
        HybridConfig(
            name="nemotron-nano-12b-v2", layers=tuple(layers), hidden_size=5120, vocab_size=131072, num_heads=40,
            num_kv_heads=8, head_dim=128, ffn_size=20480,
            mamba=Mamba2(num_heads=128, head_dim=80, num_groups=8, state_size=128),
        )
    )  # fmt: skip


_QWEN_NEXT: Mapping[str, Callable[[], Graph]] = {
    "qwen3.5-397b": partial(_qwen_next, "qwen3.5-397b", 60, 4096, 32, 2, 64, 1024, (512, 10, 1024)),
    "qwen3.5-122b-a10b": partial(_qwen_next, "qwen3.5-122b-a10b", 48, 3072, 32, 2, 64, 1024, (256, 8, 1024)),
    "qwen3.6-35b-a3b": partial(_qwen_next, "qwen3.6-35b-a3b", 40, 2048, 16, 2, 32, 512, (256, 8, 512)),
    "qwen3.6-27b": partial(_qwen_next, "qwen3.6-27b", 64, 5120, 24, 4, 48, 17408, (0, 0, 0)),
}

NAMES: tuple[tuple[str, str], ...] = (
    (r"qwen3\.6-35b-a3b", "qwen3.6-35b-a3b"),
    (r"qwen3\.5-122b-a10b", "qwen3.5-122b-a10b"),
    (r"deepseek-v4-flash", "deepseek-v4-flash"),
    (r"gemma-4-26b-a4b", "gemma-4-26b-a4b"),
    (r"gemma-4-31b", "gemma-4-31b"),
    (r"glm-4\.7-flash", "glm-4.7-flash"),
    (r"nemotron-3-super", "nemotron-3-super"),
    (r"nemotron-3-nano", "nemotron-3-nano"),
    (r"nemotron-nano-12b", "nemotron-nano-12b-v2"),
    (r"qwen3-omni-30b-a3b", "qwen3-30b-a3b"),
    (r"ministral-3-14b", "ministral-3-14b"),
    (r"decilm-7b", "decilm-7b"),
    (r"aquila2 ?-?34b", "aquila2-34b"),
    (r"aquila-7b", "aquila-7b"),
    (r"bloom-7b1", "bloom-7b1"),
    (r"stablelm alpha", "stablelm-alpha-7b"),
    (r"phi-1\.5", "phi-1.5"),
    (r"codellama|phind", "codellama-34b"),
    (r"mosaicml|mpt", "mpt-7b"),
    (r"falcon 180|falcon-180", "falcon-180b"),
    (r"^falcon", "falcon-7b"),
    (r"deepseek.?coder", "deepseek-coder-33b"),
    (r"mixtral", "mixtral-8x7b"),
    (r"mistral", "mistral-7b"),
    (r"llama-?2.?70b|llama 2 70b", "llama2-70b"),
    (r"llama-?2.?13b|llama 2 13b|vicuna 13b", "llama2-13b"),
    (r"vicuna|llama.?2|llama 7b", "llama-7b"),
)
"""Patterns of names, lower case -> key, tried in order where a run has no key."""


@cache
def graph_of(key: str, name: str = "", note: str = "") -> Graph:
    """The Graph of a run's model: by its key, else by its name, else by what its notes say of it."""
    found = key.lower()
    if not found:
        texts = [text.lower() for text in (name, note) if len(text) > 1]
        found = next((to for text in texts for pattern, to in NAMES if re.search(pattern, text)), "")
    if not found:
        raise InputError("model not in the tables")
    if found in PRESETS:
        return model(PRESETS[found])
    for table, make in ((_LLAMAS, _llama), (_MISTRALS, partial(_llama, head_dim=128))):
        if found in table:
            return make(found, *table[found])
    if found in _GPTS:
        layers, hidden, heads, vocab = _GPTS[found]
        return gpt(
            GptConfig(
                name=found, num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=vocab, max_positions=8192
            )
        )
    if found in _DECODERS:
        return decoder(_DECODERS[found])
    if found in _MIXTRALS:
        return mixtral(_MIXTRALS[found])
    if found in _LATENT:
        return deepseek_v3(_LATENT[found])
    if found in _QWEN_NEXT:
        return _QWEN_NEXT[found]()
    if found == "nemotron-nano-12b-v2":
        return _nemotron_nano_12b()
    try:
        return model(found)
    except Exception as error:
        raise InputError("model not in the tables") from error


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, head_dim: int = 0
) -> Graph:
    return llama(
        LlamaConfig(
            name=name,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim or hidden // heads,
            ffn_size=ffn,
            vocab_size=vocab,
        )
    )
