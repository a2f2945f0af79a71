"""The models that torchtitan names by a flavor, as our configs.

`flavor(name, flavor)` returns a config or a preset's name. Sizes are those of pytorch/torchtitan v0.2.2 (2026-02-20),
torchtitan/models/{llama3,deepseek_v3,qwen3}/__init__.py. Leaves out: llama4, gpt_oss, flux, and small Qwen3 models.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.errors import CatalogueError, nearest
from gnomon.formats.job import ModelConfig
from gnomon.models import deepseek, llama, mixtral

LATENT = deepseek.DeepseekConfig(
    name="deepseek_v3 16B",
    num_layers=27,
    num_dense_layers=1,
    hidden_size=2048,
    num_heads=16,
    q_rank=0,
    kv_rank=512,
    nope_dim=128,
    rope_dim=64,
    v_head_dim=128,
    ffn_size=10944,
    num_experts=64,
    experts_per_token=6,
    num_shared_experts=2,
    expert_ffn_size=1408,
    vocab_size=102400,
)

FLAVORS: dict[str, ModelConfig] = {
    "llama3 debugmodel": llama.LlamaConfig(
        name="llama3 debugmodel",
        num_layers=6,
        hidden_size=256,
        num_heads=16,
        num_kv_heads=16,
        head_dim=16,
        ffn_size=768,  # 8/3 × 256 rounded up to a multiple of 256
        vocab_size=2048,
    ),
    "llama3 8B": llama.llama3_1_8b(),
    "llama3 70B": llama.llama3_1_70b(),
    "llama3 405B": llama.llama3_1_405b(),
    "qwen3 8B": llama.qwen3_8b(),
    "qwen3 30B-A3B": mixtral.qwen3_30b_a3b(),
    "qwen3 235B-A22B": mixtral.qwen3_235b_a22b(),
    "deepseek_v3 16B": LATENT,
    "deepseek_v3 236B": replace(
        LATENT,
        name="deepseek_v3 236B",
        num_layers=60,
        hidden_size=5120,
        num_heads=128,
        q_rank=1536,
        ffn_size=12288,
        num_experts=160,
        expert_ffn_size=1536,
    ),
    "deepseek_v3 671B": replace(deepseek.deepseek_v3_671b(), mtp_modules=0),
}
"""`model.name model.flavor` -> config."""


def flavor(name: str, size: str) -> ModelConfig:
    """The config of a flavor; `8B_flex` and `8B_varlen` are 8B. CatalogueError with the nearest names otherwise."""
    key = f"{name} {size.removesuffix('_flex').removesuffix('_varlen').removesuffix('_flex_attn')}"
    if key not in FLAVORS:
        raise CatalogueError(
            f"torchtitan's model {key!r} is not described{nearest(key, FLAVORS)}; known: {', '.join(FLAVORS)}; "
            f"give model= otherwise"
        )
    return FLAVORS[key]
