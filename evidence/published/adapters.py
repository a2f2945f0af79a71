"""Adapters of published LoRA runs, which no column holds: rank and targets of the recipes behind the tables.

`adapters_of(row)` returns them with a note; None for runs that train all weights. NeMo AutoModel's are in `automodel`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from evidence.published import automodel
from evidence.published.row import Row
from evidence.published.rules import matching
from gnomon.models.lora import Adapters

QKV = ("q_proj", "k_proj", "v_proj")
"""`linear_qkv`."""

USUAL = Adapters(rank=16, targets=QKV)
"""Where nothing says. Megatron's programs join the three."""
JOINED_QKV = r"\b(opt|gpt-?2|gpt-?3|gpt-?neox|pythia|bloom|mpt)\b"
"""Models whose layers here have one linear for the three, `c_attn`."""


def adapters_of(row: Row) -> tuple[Adapters | None, tuple[str, ...]]:
    """The adapters of a LoRA run and where they are from; the usual ones, assumed, for a recipe that is not known."""
    if not re.search(r"lora", row.model.lower()):
        return None, ()
    known = next(((rule.set["lora"], rule.source) for rule in matching(row, "lora")), None)
    result = None if known is None else (Adapters(**{**known[0], "targets": tuple(known[0]["targets"])}), known[1])
    if (of_recipe := automodel.adapters(row)) is not None:
        result = of_recipe, automodel.SOURCE
    joined = re.search(r"nemo|megatron", row.framework.lower()) is not None
    usual = replace(USUAL, targets=("c_attn",)) if re.search(JOINED_QKV, row.model.lower()) else USUAL
    made, why = result or (replace(usual, joined=joined), "assumed, the row does not give them")
    return made, (f"LoRA of rank {made.rank} on {', '.join(made.targets) or 'all linears of layers'}: {why}",)
