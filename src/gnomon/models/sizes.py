"""Further sizes of families: Llama 2 and 3, Mistral, Qwen2.5, Qwen3, Gemma 3 and 4 as configs; GPT-OSS and DeepSeek-V2
as graphs.

`LLAMA_SIZES`, `GEMMA_SIZES` and `GRAPH_SIZES` map names to functions. Source of every row: the config.json of the
model's repository on the Hugging Face hub; of Gemma, src/maxtext/configs/models of MaxText (e591f30). Leaves out sizes
that have functions of their own besides those of their family, and Gemma 4's smallest (inputs of their own for each
layer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from gnomon.graph import Graph
from gnomon.models.decoder import DecoderConfig, Mixture, decoder
from gnomon.models.deepseek import DeepseekConfig, deepseek_v3
from gnomon.models.llama import LlamaConfig
from gnomon.models.mixtral import MixtralConfig, mixtral

Row = tuple[str, int, int, int, int, int]
"""Name, layers, hidden size, query heads, key heads, width of the feed-forward."""

_LLAMAS: tuple[tuple[Row, int, bool], ...] = (
    (("llama-2-13b", 40, 5120, 40, 40, 13824), 32000, False),
    (("llama-3.2-3b", 28, 3072, 24, 8, 8192), 128256, True),
    (("llama-3.3-70b", 80, 8192, 64, 8, 28672), 128256, False),
)
"""Row, vocabulary, whether the head is tied."""

_QWEN2_5: tuple[tuple[Row, int, bool], ...] = (
    (("qwen2.5-0.5b", 24, 896, 14, 2, 4864), 151936, True),
    (("qwen2.5-1.5b", 28, 1536, 12, 2, 8960), 151936, True),
    (("qwen2.5-3b", 36, 2048, 16, 2, 11008), 151936, True),
    (("qwen2.5-14b", 48, 5120, 40, 8, 13824), 152064, False),
    (("qwen2.5-32b", 64, 5120, 40, 8, 27648), 152064, False),
    (("qwen2.5-72b", 80, 8192, 64, 8, 29568), 152064, False),
)
"""With biases on q, k, v."""

_QWEN3: tuple[tuple[Row, bool], ...] = (
    (("qwen3-0.6b", 28, 1024, 16, 8, 3072), True),
    (("qwen3-1.7b", 28, 2048, 16, 8, 6144), True),
    (("qwen3-4b", 36, 2560, 32, 8, 9728), True),
    (("qwen3-14b", 40, 5120, 40, 8, 17408), False),
    (("qwen3-32b", 64, 5120, 64, 8, 25600), False),
)
"""With norms on q and k, and heads of 128 whatever the hidden size."""


def _llama(
    row: Row, vocab: int, tied: bool, *, head_dim: int = 0, bias: bool = False, norm: bool = False
) -> LlamaConfig:
    name, layers, hidden, heads, kv_heads, ffn = row
    return LlamaConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        ffn_size=ffn,
        vocab_size=vocab,
        tied=tied,
        qkv_bias=bias,
        qk_norm=norm,
    )


LLAMA_SIZES: Mapping[str, Callable[[], LlamaConfig]] = {
    **{row[0]: partial(_llama, row, vocab, tied) for row, vocab, tied in _LLAMAS},
    "mistral-nemo-12b": partial(_llama, ("mistral-nemo-12b", 40, 5120, 32, 8, 14336), 131072, False, head_dim=128),
    **{row[0]: partial(_llama, row, vocab, tied, bias=True) for row, vocab, tied in _QWEN2_5},
    **{row[0]: partial(_llama, row, 151936, tied, head_dim=128, norm=True) for row, tied in _QWEN3},
}
"""Name -> a function returning the config."""


_GEMMA: tuple[tuple[Row, int, int, int], ...] = (
    (("gemma-3-1b", 26, 1152, 4, 1, 6912), 256, 512, 256),
    (("gemma-3-4b", 34, 2560, 8, 4, 10240), 256, 1024, 256),
    (("gemma-3-12b", 48, 3840, 16, 8, 15360), 256, 1024, 256),
    (("gemma-3-27b", 62, 5376, 32, 16, 21504), 128, 1024, 168),
    (("gemma-4-26b-a4b", 30, 2816, 16, 8, 2112), 256, 1024, 1),
    (("gemma-4-31b", 60, 5376, 32, 16, 21504), 256, 1024, 1),
)
"""Row, width of a head, window of five layers in six, square of what scores are divided by (Gemma 4's queries and keys
have norms and no factor)."""
_FULL_HEADS = {"gemma-4-26b-a4b": (2, 512), "gemma-4-31b": (4, 512)}
"""Key heads of the sixth layer, and their width."""
_GEMMA_EXPERTS = {"gemma-4-26b-a4b": Mixture(num_experts=128, experts_per_token=8, expert_ffn_size=704)}
"""Besides the dense feed-forward, which every token visits."""


def _gemma(row: Row, head_dim: int, window: int, query_scalar: int) -> DecoderConfig:
    name, layers, hidden, heads, kv_heads, ffn = row
    mixture = _GEMMA_EXPERTS.get(name)
    return DecoderConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=262144,
        tied=True,
        order="both",
        qk_norm=True,
        activation="gelu_tanh",
        embed_scale=hidden**0.5,
        windows=(*(window,) * 5, 0),
        full_heads=_FULL_HEADS.get(name),
        query_scale=query_scalar**-0.5,
        mixture=replace(mixture, shared_ffn_size=ffn) if mixture else None,
    )


GEMMA_SIZES: Mapping[str, Callable[[], DecoderConfig]] = {row[0][0]: partial(_gemma, *row) for row in _GEMMA}
"""Name -> a function returning the config."""


def _gemma_graph(name: str) -> Graph:
    return decoder(GEMMA_SIZES[name]())


def _gpt_oss(name: str, layers: int, experts: int) -> Graph:
    """GPT-OSS: every other layer sees 128 tokens; biases, of which the experts' are not stored here."""
    return mixtral(
        MixtralConfig(
            name=name,
            num_layers=layers,
            hidden_size=2880,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            num_experts=experts,
            experts_per_token=4,
            expert_ffn_size=2880,
            vocab_size=201088,
            window=128,
            windowed_every=2,
            qkv_bias=True,
            out_bias=True,
            expert_bias=True,
            moe_path="mlp",
        )
    )


def _deepseek_v2(name: str, *, large: bool) -> Graph:
    """DeepSeek-V2 (DeepSeek-AI 2024a, section 3.1) and its Lite (appendix B)."""
    return deepseek_v3(
        DeepseekConfig(
            name=name,
            num_layers=60 if large else 27,
            num_dense_layers=1,
            hidden_size=5120 if large else 2048,
            num_heads=128 if large else 16,
            q_rank=1536 if large else 0,
            kv_rank=512,
            nope_dim=128,
            rope_dim=64,
            v_head_dim=128,
            ffn_size=12288 if large else 10944,
            num_experts=160 if large else 64,
            experts_per_token=6,
            num_shared_experts=2,
            expert_ffn_size=1536 if large else 1408,
            vocab_size=102400,
            num_groups=8 if large else 1,
            groups_per_token=3 if large else 1,
            router="softmax",
        )
    )


GRAPH_SIZES: Mapping[str, Callable[[], Graph]] = {
    **{name: partial(_gemma_graph, name) for name in GEMMA_SIZES},
    "gpt-oss-20b": partial(_gpt_oss, "gpt-oss-20b", 24, 32),
    "gpt-oss-120b": partial(_gpt_oss, "gpt-oss-120b", 36, 128),
    "deepseek-v2-lite": partial(_deepseek_v2, "deepseek-v2-lite", large=False),
    "deepseek-v2": partial(_deepseek_v2, "deepseek-v2", large=True),
}
"""Name -> a function returning the Graph, of models whose configs other programs cannot be told."""
