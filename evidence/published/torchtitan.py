"""Runs of torchtitan: what its code did at the date that a row's source names, and what its selective checkpoints keep.

`with_recipe(row)` fills in recompute from its presets, `recomputed(row, plan, graph)` the plan with what is kept,
`kernels(row)` fields of the stack, `narrow(row, fp8)` how eight bits are scaled. Rows of other programs come back as
they are. Source of all: pytorch/torchtitan at the commits named, read 2026-11-23.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from evidence.published.row import Row
from gnomon.formats.torchtitan.read import kept_ops
from gnomon.graph import Graph
from gnomon.plans import Fp8, Plan, Saved, SavedRule

SOURCE = "pytorch/torchtitan as of the date that the source names (evidence.published.torchtitan)"

DATED = r"(20[23]\d)-?(0[1-9]|1[0-2])"

FUSED_SINCE = 202503
"""Fused AdamW is the default (6e49885, 2025-02-24); `foreach`, torch's own, before."""
CUDNN_SINCE = 202510
"""cuDNN's attention goes first on every device (6a3a9da, 2025-10-09); FlashAttention-2 before, but for Blackwell
(3b85aa3, 2025-05-14)."""
STOPS_BEFORE = 202509
"""Until 25413d2 (2025-08-29) checkpoints stop at the last tensor that is needed, as torch's do; since, `early_stop` is
off."""

SELECTIVE = (
    r"^(?:ac[:=_ ]*)?(?:selective|sac)(?:[-_ ]*(?:ac|activation checkpointing))?[-_ (:=]*(?:per[-_ ]?)?(?:op)?\)?$"
)
"""Recompute in words that mean `selective_ac_option = "op"`, the option of its presets."""

PRESETS = ((r"llama.*\b8b", "selective op"), (r"llama.*(70b|405b)", "full"))
"""(pattern of models, recompute of train_configs/llama3_8b.toml, llama3_70b.toml and llama3_405b.toml: e846b69)."""


def is_titan(row: Row) -> bool:
    return "torchtitan" in row.framework.lower()


def _month(row: Row) -> int:
    """Year and month that the source names, as 202412; 0 for none."""
    match = re.search(DATED, f"{row.source or ''} {row.section or ''}")
    return int(match[1] + match[2]) if match else 0


def with_recipe(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with the recompute of its preset, where the table does not say."""
    how = next((how for pattern, how in PRESETS if re.search(pattern, row.model.lower())), "")
    if not is_titan(row) or row.recompute or not how:
        return row, ()
    return replace(row, recompute=how), (f"recompute not stated: {how}, as torchtitan's preset of the model has it",)


def recomputed(row: Row, plan: Plan, graph: Callable[[], Graph]) -> tuple[Plan, tuple[str, ...]]:
    """The plan with what selective checkpoints keep: attention, every other product of a layer, and what ranks have
    summed (parallelize_llama.py _save_list at e846b69; distributed/activation_checkpoint.py since). Products in eight
    bits are another op, `_scaled_mm`, which no list has: all of them run again."""
    if not is_titan(row) or not re.search(SELECTIVE, (row.recompute or "").strip().lower()):
        return plan, ()
    kept = kept_ops(graph(), plan.mesh.ep > 1)
    words = "every other product"
    if plan.precision.fp8 is not None:
        kept, words = tuple(name for name in kept if "core" in name or "dispatch" in name), "no product in eight bits"
    if plan.mesh.tp > 1:
        kept = (*kept, *(name for name in ("*o_proj", "*down_proj") if name not in kept))
    saved = Saved(preset="full", rules=(SavedRule(tensors=kept),))
    return replace(plan, saved=saved), (f"selective checkpoints: attention kept, {words}",)


def kernels(row: Row, compiled: bool | None) -> Mapping[str, Any]:
    """Fields of the stack at the date of the source; none without a date."""
    month = _month(row) if is_titan(row) else 0
    if not month:
        return {}
    collected: dict[str, Any] = {}
    if month < FUSED_SINCE:
        collected["optimizer_step"] = "foreach"
    if month < CUDNN_SINCE and not re.search(r"b[23]00", row.device.lower()):
        collected["attention_kernel"] = "flash2"
    if month < STOPS_BEFORE and not compiled:
        collected["recompute_stops"] = True
    return collected


def narrow(row: Row, fp8: Fp8) -> Fp8:
    """torchao's scales: of each tensor as it is, unless the row says of rows or blocks (float8.py at e846b69); then
    shards are cast before they are gathered, as docs/float8.md has it there."""
    if not is_titan(row) or fp8.recipe not in ("delayed", "tensorwise"):
        return fp8
    return replace(fp8, recipe="tensorwise", gather=True)
