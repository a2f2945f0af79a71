"""Columns that a row leaves empty and its notes fill, in natural words; and what programs do unless they say otherwise.

`with_words(row)` returns the row with recompute, attention, sharding, sequence parallelism, virtual stages and
microbatch as its notes have them, and notes. A column that a row gives is never changed. Leaves out guesses (`plan`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from evidence.published.row import Row

WORDS: tuple[tuple[str, str, str], ...] = (
    ("recompute", r"\b(?:no|without) (?:activation |gradient )?(?:checkpoint|recomput)", "none"),
    ("recompute", r"\bselective (?:activation )?(?:recomput|checkpoint)", "selective"),
    ("recompute", r"\b(?:full|with) (?:activation |gradient )?(?:recomput|checkpoint|remat)", "full"),
    ("recompute", r"\b(?:gradient|activation) (?:checkpointing|recomputation)\b(?! not| off| is not| unknown)", "full"),
    ("flash_attention", r"\b(?:no|without) flash[- ]?att", "no"),
    ("flash_attention", r"\bflash[- ]?att(?:entio)?n[- ]?v?2\b", "fa2"),
    ("flash_attention", r"\bflash[- ]?att(?:entio)?n[- ]?v?3\b", "fa3"),
    ("flash_attention", r"\bflash[- ]?att", "yes"),
    ("zero_or_fsdp", r"\bdistributed optimizer\b", "distributed optimizer"),
    ("zero_or_fsdp", r"\bzero[- ](?:stage )?1\b", "zero1"),
    ("zero_or_fsdp", r"\bzero[- ](?:stage )?2\b", "zero2"),
    ("zero_or_fsdp", r"\bzero[- ](?:stage )?3\b", "zero3"),
    ("zero_or_fsdp", r"\bhsdp\b|\bhybrid shard", "hsdp"),
    ("zero_or_fsdp", r"\bfsdp2?\b|\bfully sharded", "fsdp"),
    ("sequence_parallel", r"\b(?:no|without) sequence parallel", "no"),
    ("sequence_parallel", r"\bsequence parallel(?:ism)?\b", "yes"),
)
"""(column, pattern of notes, what it then says), the first of a column that matches."""

NUMBERS: tuple[tuple[str, str], ...] = (
    ("vpp", r"\b(?:vpp|virtual (?:pipeline )?(?:stages?|size|chunks?))[ =:of]*(\d+)"),
    ("tp", r"\b(?:tp|tensor[- ]parallel(?:ism)?(?: size| degree)?)[ =:of]*(\d+)"),
    ("pp", r"\b(?:pp|pipeline[- ]parallel(?:ism)?(?: size| degree)?)[ =:of]*(\d+)"),
    ("cp", r"\b(?:cp|context[- ]parallel(?:ism)?(?: size| degree)?)[ =:of]*(\d+)"),
    ("ep", r"\b(?:ep|expert[- ]parallel(?:ism)?(?: size| degree)?)[ =:of]*(\d+)"),
    ("micro_batch", r"\b(?:mbs|micro[- ]?batch(?: size)?(?: per (?:gpu|device))?)[ =:of]*(\d+)"),
    ("seq_len", r"\b(?:sequence length|seq[- _]?len|context length)[ =:of]*(\d+)\b(?!k)"),
)

ACCUMULATED = r"(?:\bga|\bgas|grad(?:ient)?[- ]?accum\w*(?: steps?)?)[ =:of]*(\d+)"
ASSUMED = r"not given|not in the|assumed|unknown|not stated"
"""Notes that say what they lack are of no use."""


def with_words(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with what its notes say of columns that are empty, and notes on it."""
    text = "; ".join(part for part in re.split(r"[;.] |;", row.notes) if not re.search(ASSUMED, part.lower())).lower()
    collected: dict[str, Any] = {}
    for column, pattern, value in WORDS:
        if getattr(row, column) is None and column not in collected and re.search(pattern, text):
            collected[column] = value
    for column, pattern in NUMBERS:
        if getattr(row, column) is None and (number := re.search(pattern, text)):
            collected[column] = number[1] if column == "vpp" else int(number[1])
    steps = re.search(ACCUMULATED, text)
    if row.micro_batch is None and "micro_batch" not in collected and steps and row.global_batch and row.num_devices:
        axes = [collected.get(axis) or getattr(row, axis) or 1 for axis in ("tp", "pp", "cp")]
        share, rest = divmod(row.global_batch, max(1, row.num_devices // (axes[0] * axes[1] * axes[2])) * int(steps[1]))
        if share and not rest:
            collected["micro_batch"] = share
    notes = tuple(f"{column} {value}: in the notes" for column, value in collected.items())
    return replace(row, **collected), notes
