"""Adapters of published LoRA runs, which no column holds: rank and targets of the recipes behind the tables.

`adapters_of(row)` returns them with a note; None for runs that train all weights. NeMo AutoModel's are in `automodel`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from evidence.published import automodel
from evidence.published.row import Row
from gnomon.models.lora import Adapters

QKV = ("q_proj", "k_proj", "v_proj")
"""`linear_qkv`."""

ADAPTERS = (
    (
        r"megatron-bridge.*70b",
        Adapters(rank=16, targets=QKV, joined=True),
        "Megatron-Bridge v0.5.0 llama3_llm_finetune.py",
    ),
    (r"nemo-24.*nemo", Adapters(rank=32, targets=QKV, joined=True), "NeMo 1's megatron_gpt_finetuning_config.yaml"),
    (
        r"dgxc.*nemo.*70b",
        Adapters(rank=16, targets=QKV, joined=True),
        "NeMo 24.12 recipes/llama3_70b.py, performance mode",
    ),
    (
        r"dgxc.*nemo.*8b",
        Adapters(rank=8, targets=QKV, joined=True),
        "NeMo 24.12 recipes/llama3_8b.py, performance mode",
    ),
)
"""(pattern of family, program and model, adapters, where they are from); read 2026-11-22."""


USUAL = Adapters(rank=16, targets=QKV)
"""Where nothing says. Megatron's programs join the three."""
JOINED_QKV = r"\b(opt|gpt-?2|gpt-?3|gpt-?neox|pythia|bloom|mpt)\b"
"""Models whose layers here have one linear for the three, `c_attn`."""


def adapters_of(row: Row) -> tuple[Adapters | None, tuple[str, ...]]:
    """The adapters of a LoRA run and where they are from; the usual ones, assumed, for a recipe that is not known."""
    if not re.search(r"lora", row.model.lower()):
        return None, ()
    key = f"{row.family} {row.framework} {row.model}".lower()
    found = next(((made, why) for pattern, made, why in ADAPTERS if re.search(pattern, key)), None)
    if (of_recipe := automodel.adapters(row)) is not None:
        found = of_recipe, automodel.SOURCE
    joined = re.search(r"nemo|megatron", row.framework.lower()) is not None
    usual = replace(USUAL, targets=("c_attn",)) if re.search(JOINED_QKV, row.model.lower()) else USUAL
    made, why = found or (replace(usual, joined=joined), "assumed, the row does not give them")
    return made, (f"LoRA of rank {made.rank} on {', '.join(made.targets) or 'all linears of layers'}: {why}",)
