"""What Megatron-Bridge's performance recipes set for mixtures of experts, release by release.

Its table of runs names a container, and containers are cut from releases whose recipes are public: 25.09 is v0.1, 25.11
v0.2, 26.02 v0.3 (26.02.01 v0.3.1), 26.04 v0.4, 26.06 v0.5, 26.08 v0.6. `recipe(row, release)` returns what a row leaves
out. Leaves out graphs of parts of a layer, whose launches are priced one by one.
Source: NVIDIA-NeMo/Megatron-Bridge at these tags, scripts/performance/configs/*/*_workload_base_configs.py and (26.08)
src/megatron/bridge/perf_recipes, read 2026-11-22.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gnomon.formats.published.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of a recipe that no column holds."""

    one_copy: bool = False
    """`moe_flex_dispatcher_backend` is HybridEP or DeepEP."""
    overlap: bool = False
    """`moe_a2a_overlap`: dispatch and combine beside another microbatch's computing."""
    graphs: bool = False
    """Layers or whole steps are replayed as CUDA graphs."""
    fused: bool = False
    """`cutedsl_fused_grouped_mlp`, `cuda_graph_impl = full_iteration` and `fp8_dot_product_attention`, which came
    together."""


ONE_COPY = (
    (r"deepseek.*h100", "25.09", "99"),
    (r"deepseek.*gb[23]00", "25.11", "99"),
    (r"deepseek.*\bb[23]00", "26.02", "99"),
    (r"qwen3.*gb[23]00", "25.11", "99"),
    (r"qwen3.*\bb300", "26.04", "99"),
    (r"qwen3.*30b.*(h100|b300)", "26.02", "99"),
    (r"qwen3.*30b.*\bb200", "26.02.01", "99"),
    (r"qwen3.*\bb200", "26.04", "99"),
    (r"gpt.?oss.*b300", "26.02", "99"),
    (r"gpt.?oss.*b200", "26.04", "99"),
    (r"kimi", "26.02", "99"),
)
"""(pattern of model and device, first release, last) of recipes that send a token once."""

OVERLAP = (
    (r"deepseek.*h100", "25.09", "25.12"),
    (r"qwen3.*235b.*h100", "25.11", "99"),
    (r"qwen3.*235b.*\bb200", "25.11", "25.12"),
    (r"qwen3.*235b.*\bb300", "26.02", "26.02"),
    (r"qwen3.*30b.*h100", "25.11", "26.03"),
    (r"gpt.?oss.*gb200", "26.04", "99"),
)
"""The same of recipes that overlap dispatch; those of FUSED do too."""

FUSED = (
    (r"(deepseek|qwen3|gpt.?oss).*gb[23]00", "26.06", "99"),
    (r"deepseek.*\bb300", "26.08", "99"),
)
"""The same of recipes in MXFP8 that run whole steps as one graph with fused experts."""

GRAPHS = (
    (r"qwen3.*gb200", "25.09", "25.10"),
    (r"qwen3.*30b.*\bb200", "25.09", "25.10"),
)
"""The same of recipes with graphs of whole layers, which rows dropped to a fixed number allow; FUSED have them too."""


def recipe(row: Row, release: str) -> Recipe:
    """What the recipe of a mixture sets; nothing for dense models and where the release is not known."""
    if not row.experts or not re.fullmatch(r"\d\d\.\d\d(\.\d\d)?", release):
        return Recipe()
    key = f"{row.model} {row.device}".lower()

    def among(rules: tuple[tuple[str, str, str], ...]) -> bool:
        return any(re.search(pattern, key) and first <= release <= last for pattern, first, last in rules)

    fused = among(FUSED) and "mxfp8" in (row.precision or "")
    return Recipe(
        one_copy=among(ONE_COPY),
        overlap=fused or among(OVERLAP),
        graphs=fused or among(GRAPHS),
        fused=fused,
    )
