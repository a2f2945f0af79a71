"""What Megatron-Bridge's performance recipes set for mixtures of experts, release by release.

Its table of runs names a container, and containers are cut from releases whose recipes are public: 25.09 is v0.1, 25.11
v0.2, 26.02 v0.3 (26.02.01 v0.3.1), 26.04 v0.4, 26.06 v0.5, 26.08 v0.6. `recipe(row, release)` returns what a row leaves
out, `with_recompute` the row with what its recipe recomputes, `mtp_modules` and `mtp_stages` what DeepSeek-V3's second
prediction adds and where. Leaves out graphs of parts of a layer, whose launches are priced one by one.
Source: NVIDIA-NeMo/Megatron-Bridge at these tags, scripts/performance/configs/*/*_workload_base_configs.py and (26.08)
src/megatron/bridge/perf_recipes; NeMo's own at the end. Read 2026-11-22.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from evidence.published.row import Row
from evidence.published.rules import first, says


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of a recipe that no column holds."""

    one_copy: bool = False
    """`moe_flex_dispatcher_backend` is HybridEP or DeepEP."""
    hybrid_ep: bool = False
    """It is HybridEP."""
    overlap: bool = False
    """`moe_a2a_overlap`: dispatch and combine beside another microbatch's computing."""
    graphs: bool = False
    """Layers or whole steps are replayed as CUDA graphs."""
    fused: bool = False
    """`cutedsl_fused_grouped_mlp` and `cuda_graph_impl = full_iteration`, which came together."""
    narrow_attention: bool = False
    """`fp8_dot_product_attention`, which most of them set."""


_LATER = "release-time recipe may differ"
"""In the notes of rows whose recompute was read from the newest recipe."""

_MTP = r"megatron-bridge|^nemo$"
"""Programs whose recipes of DeepSeek-V3 train its second prediction (`mtp_num_layers = 1`), in every release: Megatron-
Bridge src/megatron/bridge/recipes/deepseek, NVIDIA/NeMo nemo/collections/llm/recipes/deepseek_v3.py `use_mtp = True`.
Their recipes of Kimi K2 do not."""

_DEEPSEEK_LAYERS = 61


def with_recompute(row: Row, release: str) -> tuple[Row, tuple[str, ...]]:
    """The row with what the recipe of its release recomputes, where the row does not say it or has it from a later
    recipe, and a note."""
    if not row.experts or (row.recompute and _LATER not in row.notes):
        return row, ()
    result: str | None = first(row, "recipe_recompute", release=release)
    if result is None or result == row.recompute:
        return row, ()
    return replace(row, recompute=result), (f"recompute {result}: the recipe of release {release}",)


def with_offloading(row: Row, release: str) -> tuple[Row, tuple[str, ...]]:
    """The row with the layers whose activations its recipe moves to the host, where the row does not say it."""
    sharded = re.search(r"megatron-bridge", row.framework.lower()) and "fsdp" in (row.zero_or_fsdp or "")
    if row.offload or not sharded:
        return row, ()
    count: int = first(row, "offloaded_layers", 0, release=release)
    if not count:
        return row, ()
    moved = replace(row, offload=f"activation cpu offload num_layers={count}", recompute=row.recompute or "none")
    return moved, (f"activations of {count} layers on the host: the recipe of release {release}",)


def mtp_modules(row: Row) -> int:
    """Multi-token prediction modules that a DeepSeek-V3 is trained with: what the name says, or its recipe."""
    name = row.model.lower()
    if "mtp" in name:
        return int("w/o" not in name)
    return int(bool(re.search(r"deepseek.?v3", name)) and bool(re.search(_MTP, row.framework.lower())))


def with_sharding(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row of a Nemotron 3 Ultra with Megatron-FSDP and what its recipe moves to the host, and a note. Its recipes
    shard weights in each NVLink domain and optimizer states over all of them (perf_recipes/nemotronh/common.py
    _apply_nemotron_3_ultra_fsdp_hsdp), which a plan cannot say: weights are taken as sharded over all too."""
    if not re.search(r"megatron-bridge.*nemotron.3.ultra", f"{row.framework} {row.model}".lower()):
        return row, ()
    note = "weights sharded over all ranks, what experts' activation reads on the host: the recipe's Megatron-FSDP"
    return replace(row, zero_or_fsdp="fsdp", offload="fused_group_mlp"), (note,)


def hybrid_mtp(row: Row) -> int:
    """How often the second prediction of a hybrid runs in Megatron-Bridge's recipes; 0 elsewhere."""
    result: int = first(row, "mtp_repeats", 0)
    return result


def narrow_calls(row: Row) -> tuple[str, ...]:
    """Layers of a Nemotron 3 that multiply in less than 16 bits: not the second prediction (`keep_mtp_spec_in_bf16`),
    and under NVFP4 not the last 14 of Super (src/megatron/bridge/training/mixed_precision.py
    nemotron_3_super_bf16_with_nvfp4_mixed). () where nothing is known."""
    if not row.layers or not re.search(r"megatron-bridge.*nemotron.3", f"{row.framework} {row.model}".lower()):
        return ()
    wide = 14 if "super" in row.model.lower() and "fp4" in (row.precision or "") else 0
    return (f"layers[0:{row.layers - wide}]",)


def mtp_stages(row: Row, stages: int) -> tuple[int, ...]:
    """Layers of each stage of those recipes, () where they say nothing: stages of 64 / `stages` layers, of which the
    last gives its room to the second prediction and the loss; 1, thirty of 2 and none with 32 (`Et|(tt|)*30mL`). NeMo
    takes one layer from the first stage for the embedding and two from the last."""
    if row.layers != _DEEPSEEK_LAYERS or stages < 2 or stages > 32 or 64 % stages or not mtp_modules(row):
        return ()
    share = 64 // stages
    if stages == 32:
        return (1, *[2] * 30, 0)
    if "bridge" not in row.framework.lower():
        return (share - 1, *[share] * (stages - 2), share - 2)
    return (*[share] * (stages - 1), share - 3)


def recipe(row: Row, release: str) -> Recipe:
    """What the recipe of a mixture sets; nothing for dense models and where the release is not known."""
    if not row.experts or not re.fullmatch(r"\d\d\.\d\d(\.\d\d)?", release):
        return Recipe()
    fused = says(row, "fused_experts", release=release) and "mxfp8" in (row.precision or "")
    one_copy = fused or says(row, "one_copy", release=release)
    return Recipe(
        one_copy=one_copy,
        hybrid_ep=one_copy and says(row, "hybrid_ep"),
        overlap=fused or says(row, "overlaps_dispatch", release=release),
        graphs=fused or says(row, "layer_graphs", release=release),
        fused=fused,
        narrow_attention=fused and not says(row, "wide_attention"),
    )
