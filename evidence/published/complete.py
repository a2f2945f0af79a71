"""Columns that follow from others, or from a note: devices from axes, a batch from its parts, a length from tokens.

`completed(row)` returns the row with such columns filled in, and notes. Leaves out guesses: a column that nothing
implies stays empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from evidence.published.machines import COUNTED
from evidence.published.row import Row
from evidence.published.rules import first

PER_DEVICE = r"maxtext|paxml"
"""Programs whose recipes give the batch by device (`per_device_batch_size`), whatever the axes are."""

NEUSIGHT_STAGES = r"NeuSight/.*-pp\d+_(\d+)\.json"
"""Files of runs with stages, which end in the number of microbatches (sitar-lab/NeuSight scripts/asplos/
collect_label_distributed.py; run_label_distributed.py asks for one, read 2026-11-22)."""

FLASH_WIDTH = 2048
"""Width of the 1.3B model of FlashAttention's own training code."""
FLASH_TOKENS = 1 << 20
"""Tokens of its step."""

NEMO = r"^(?:NVIDIA[- /]?)?NeMo(?: (?:Framework|Megatron))?(?:[ -]?\(?v?(\d+\.\d[\w.]*).*)?$"
"""NeMo by its other names, with or without a release, which readers look for in the notes."""

MICROBATCHES = 8
"""Of a step whose batch is not given."""


def completed(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with what its other columns and notes imply, and how it was found."""
    notes: list[str] = []
    if (nemo := re.search(NEMO, row.framework, re.IGNORECASE)) and row.framework != "NeMo":
        release = f"; release v{nemo[1]}" if re.match(r"\d\d", nemo[1] or "") and "release v" not in row.notes else ""
        row = replace(row, framework="NeMo", notes=row.notes + release)
    if row.num_devices is None and (counted := re.match(COUNTED, row.device, re.IGNORECASE)):
        row = replace(row, num_devices=int(counted[1]) * int(counted[2] or 1))
        notes.append(f"{row.num_devices} devices: the number before their name")
    if row.num_devices is None and None not in (row.tp, row.pp, row.dp):
        row = replace(row, num_devices=(row.tp or 1) * (row.pp or 1) * (row.dp or 1) * (row.cp or 1))
        notes.append(f"{row.num_devices} devices: the product of the axes")
    for axis in ("pp", "tp", "cp"):
        others = [getattr(row, other) for other in ("tp", "pp", "dp") if other != axis]
        rest = prod(others) * (row.cp or 1) if None not in others else 0
        if getattr(row, axis) is None and row.num_devices and rest and row.num_devices % rest == 0:
            left = row.num_devices // rest
            if axis == "cp" and left == 1:
                continue
            changed: dict[str, Any] = {axis: left}
            row = replace(row, **changed)
            notes.append(f"{axis} {left}: the devices over the other axes")
    if row.global_batch is None and row.micro_batch and row.dp and not _by_device(row) and _of_tokens(row):
        row = replace(row, global_batch=row.micro_batch * row.dp * MICROBATCHES)
        notes.append(f"global batch not given: {MICROBATCHES} microbatches, which tokens/s hardly depend on")
    if row.global_batch is None and row.micro_batch and row.num_devices and _by_device(row):
        batch = row.micro_batch * row.num_devices
        row = replace(row, global_batch=batch)
        notes.append(f"global batch {batch}: {row.micro_batch} a device")
    if row.micro_batch and row.global_batch and row.num_devices and _by_device(row):
        ranks = max(1, row.num_devices // ((row.tp or 1) * (row.pp or 1) * (row.cp or 1)))
        if row.global_batch == row.micro_batch * row.num_devices != row.micro_batch * ranks:
            row = replace(row, micro_batch=row.global_batch // ranks)
        elif row.micro_batch is not None and (share := (row.global_batch or 0) // ranks) < row.micro_batch and share:
            row = replace(row, micro_batch=share)
            notes.append(f"{share} sequences of a device: the global batch over the devices")
    if row.micro_batch is None and (size := first(row, "recipe_micro_batch")):
        row = replace(row, micro_batch=size)
        notes.append(f"microbatches of {size}: what the recipe sets")
    row, batch_notes = _flash_repo(row)
    notes += batch_notes
    counted = re.search(NEUSIGHT_STAGES, row.source or "")
    if counted and row.global_batch and row.dp and row.global_batch % (row.dp * int(counted[1])) == 0:
        share = row.global_batch // (row.dp * int(counted[1]))
        if share != row.micro_batch:
            row = replace(row, micro_batch=share)
            notes.append(f"microbatches of {share}: the source's file names {counted[1]} of them")
    match = re.search(r"tokens/step=(\d+)", row.notes)
    length: int = first(row, "max_target_length", 0)
    if match and length and row.seq_len is None and row.global_batch is None and int(match[1]) % length == 0:
        row = replace(row, seq_len=length, global_batch=int(match[1]) // length)
        notes.append(f"{row.global_batch} sequences of {length}: the recipe's length, {match[1]} tokens a step")
    if match and row.seq_len is None and row.global_batch and int(match[1]) % row.global_batch == 0:
        row = replace(row, seq_len=int(match[1]) // row.global_batch)
        notes.append(f"sequences of {row.seq_len}: {match[1]} tokens a step")
    return row, tuple(notes)


def _flash_repo(row: Row) -> tuple[Row, list[str]]:
    """The batch that the configs of FlashAttention's own training code set."""
    share: int | None = first(row, "sequences_of_1.3b")
    if row.micro_batch or row.global_batch or share is None:
        return row, []
    share = share if row.hidden == FLASH_WIDTH or row.seq_len == 8192 else share // 2
    row = replace(row, micro_batch=share, global_batch=FLASH_TOKENS // (row.seq_len or 1))
    return row, [f"{row.global_batch} sequences, microbatches of {share}: the config of the source"]


def _of_tokens(row: Row) -> bool:
    """Whether what was measured is a rate of one device, without stages that would wait for microbatches."""
    return row.pp == 1 and row.metric in ("tokens_per_s_per_device", "tflops_per_device", "mfu_pct")


def interleaved(rows: Sequence[Row]) -> tuple[tuple[Row, ...], Mapping[str, str]]:
    """The rows with virtual stages that a source leaves out here and states elsewhere, and a note for each by its id.

    A source publishes one recipe many times: for other numbers of devices, precisions and releases. Of rows of one
    source, sizes of model, length, tp and pp (and of mixtures, device), those without virtual stages have those that
    all others state.
    """
    stated: dict[tuple[object, ...], set[str]] = {}
    for row in rows:
        if row.vpp:
            stated.setdefault(_recipe(row), set()).add(row.vpp)
    out, notes = [], {}
    for row in rows:
        known = stated.get(_recipe(row), set())
        if not row.vpp and (row.pp or 1) > 1 and len(known) == 1:
            (vpp,) = known
            row = replace(row, vpp=vpp)
            notes[row.id] = (
                f"virtual stages not in the row: {vpp}, as this source has this model on these axes elsewhere"
            )
        out.append(row)
    return tuple(out), notes


def _recipe(row: Row) -> tuple[object, ...]:
    device = row.device if row.experts else ""  # recipes of mixtures are cut to a device
    return (row.family, row.framework, row.layers, row.hidden, row.heads, row.ffn, row.seq_len, row.tp, row.pp, device)


def _by_device(row: Row) -> bool:
    return bool(re.search(PER_DEVICE, row.framework.lower()))
