"""The models that torchtitan names by a flavor, as our configs.

`flavor(name, flavor)` returns a config or a preset's name. Sizes are those of pytorch/torchtitan v0.2.2 (2026-02-20),
torchtitan/models/{llama3,llama4,deepseek_v3,qwen3,gpt_oss}/__init__.py (llama4: model/args.py, model/model.py), and for
llama2 those of train_configs' days (1923ce4, 2024-09-07). Leaves out: flux, vlm, and chunked attention of llama4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gnomon.errors import CatalogueError, nearest
from gnomon.formats.given import GIVE_MODEL, Network
from gnomon.formats.job import Fields, divides
from gnomon.models import deepseek, llama, mixtral
from gnomon.models.decoder import DecoderConfig, Mixture
from gnomon.models.presets import CONFIGS, model

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

LLAMA4 = DecoderConfig(
    name="llama4 debugmodel",
    num_layers=6,
    hidden_size=256,
    num_heads=16,
    num_kv_heads=16,
    head_dim=16,
    ffn_size=768,
    vocab_size=2048,
    mixture=Mixture(
        num_experts=8,
        experts_per_token=1,
        expert_ffn_size=512,  # 8/3 × 256, halved for the shared expert beside it, up to a multiple of 256
        router="sigmoid",
        router_bias=True,
        shared_ffn_size=512,
        pattern=(False, True),
    ),
)
LLAMA4_17B_EXPERTS = Mixture(
    num_experts=128,
    experts_per_token=1,
    expert_ffn_size=8192,
    router="sigmoid",
    router_bias=True,
    shared_ffn_size=8192,
    pattern=(False, True),
)
LLAMA4_17B = DecoderConfig(
    name="llama4 17bx128e",
    num_layers=48,
    hidden_size=5120,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=16384,
    vocab_size=202048,
    mixture=LLAMA4_17B_EXPERTS,
)

FLAVORS: dict[str, Network] = {
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
    "deepseek_v3 debugmodel": replace(
        LATENT,
        name="deepseek_v3 debugmodel",
        num_layers=6,
        hidden_size=256,
        ffn_size=1024,
        num_experts=8,
        experts_per_token=3,
        expert_ffn_size=256,
        vocab_size=2048,
    ),
    "qwen3 debugmodel_moe": replace(
        mixtral.qwen3_30b_a3b(),
        name="qwen3 debugmodel_moe",
        num_layers=8,
        hidden_size=256,
        num_heads=16,
        num_kv_heads=8,
        num_experts=64,
        vocab_size=2048,
    ),
    "llama4 debugmodel": LLAMA4,
    "llama4 17bx16e": replace(
        LLAMA4_17B, name="llama4 17bx16e", mixture=replace(LLAMA4_17B_EXPERTS, num_experts=16, pattern=())
    ),
    "llama4 17bx128e": LLAMA4_17B,
}
"""`model.name model.flavor` -> config."""


PRESETS: Mapping[str, str] = {
    **{f"qwen3 {size}B": f"qwen3-{size}b" for size in ("0.6", "1.7", "4", "14", "32")},
    **{f"llama2 {size}B": f"llama-2-{size}b" for size in (7, 13, 70)},
    **{f"gpt_oss {size}b": f"gpt-oss-{size}b" for size in (20, 120)},
}
"""`model.name model.flavor` -> the catalogue's model of the same sizes."""

SAME = ("_flex", "_varlen", "_attn", "_irope")
"""Ends of flavors that say how attention is computed."""


def by_dims(f: Fields, name: str) -> Network | None:
    """The network of a fork that says its sizes by torchtitan's names of them: `model.dim`, `model.n_layers` …, by the
    rules of llama3 (models/llama3/model/args.py: the feed-forward is 8/3 of dim, times ffn_dim_multiplier, rounded up
    to multiple_of). None where the file has no `model.dim`."""
    if not f.has("model.dim"):
        return None
    dim, heads = f.integer("model.dim"), f.integer("model.n_heads")
    multiple, factor = f.integer("model.multiple_of", 256), f.number("model.ffn_dim_multiplier", 1.0)
    ffn = f.integer(
        "model.hidden_dim", f.integer("model.ffn_dim", -(-int(int(8 * dim / 3) * factor) // multiple) * multiple)
    )
    divides("model.dim", dim, "model.n_heads", heads)
    f.notes.append(f"model.dim and others: read by the rules of llama3, feed-forward {ffn} (--set model.hidden_dim=…)")
    f.ignore("model.norm_eps", "model.rope_theta", "model.max_seq_len", "model.depth_init", "model.norm_type")
    experts = f.integer("model.num_experts", 0, least=0)
    if experts:
        f.report("model.num_experts", "experts of a fork's own network are not read: a dense feed-forward, too small")
    return llama.LlamaConfig(
        name=name,
        num_layers=f.integer("model.n_layers"),
        hidden_size=dim,
        num_heads=heads,
        num_kv_heads=f.integer("model.n_kv_heads", heads),
        head_dim=f.integer("model.head_dim", dim // heads),
        ffn_size=ffn,
        vocab_size=f.integer("model.vocab_size", 128_256),
        tied=f.flag("model.enable_weight_tying", False),
        qk_norm=f.flag("model.qk_norm", False),
    )


def flavor(name: str, size: str) -> Network:
    """The network of a flavor; `8B_flex` and `8B_varlen` are 8B. CatalogueError with the nearest names otherwise."""
    plain = size
    while end := next((end for end in SAME if plain.endswith(end)), ""):
        plain = plain.removesuffix(end)
    key = f"{name} {plain}"
    if key in PRESETS:
        config = CONFIGS.get(PRESETS[key])
        return model(PRESETS[key]) if config is None else config()
    if key not in FLAVORS:
        known = {**FLAVORS, **PRESETS}
        raise CatalogueError(
            f"torchtitan's model {key!r} is not described{nearest(key, known)}; known: {', '.join(known)}; "
            f"{GIVE_MODEL}, or a fork's sizes: --set model.dim=4096 --set model.n_layers=32 --set model.n_heads=32"
        )
    return FLAVORS[key]
