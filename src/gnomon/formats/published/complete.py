"""Columns that follow from others, or from a note: devices from axes, a batch from its parts, a length from tokens.

`completed(row)` returns the row with such columns filled in, and notes. Leaves out guesses: a column that nothing
implies stays empty.
"""

from __future__ import annotations

import re
from dataclasses import replace

from gnomon.formats.published.row import Row

PER_DEVICE = r"maxtext|paxml"
"""Programs whose recipes give the batch by device (`per_device_batch_size`), whatever the axes are."""


def completed(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with what its other columns and notes imply, and how it was found."""
    notes: list[str] = []
    if row.num_devices is None and None not in (row.tp, row.pp, row.dp):
        row = replace(row, num_devices=(row.tp or 1) * (row.pp or 1) * (row.dp or 1) * (row.cp or 1))
        notes.append(f"{row.num_devices} devices: the product of the axes")
    if row.global_batch is None and row.micro_batch and row.num_devices and _by_device(row):
        batch = row.micro_batch * row.num_devices
        row = replace(row, global_batch=batch)
        notes.append(f"global batch {batch}: {row.micro_batch} a device")
    if row.micro_batch and row.global_batch and row.num_devices and _by_device(row):
        ranks = max(1, row.num_devices // ((row.tp or 1) * (row.pp or 1) * (row.cp or 1)))
        if row.global_batch == row.micro_batch * row.num_devices != row.micro_batch * ranks:
            row = replace(row, micro_batch=row.global_batch // ranks)
    found = re.search(r"tokens/step=(\d+)", row.notes)
    if found and row.seq_len is None and row.global_batch and int(found[1]) % row.global_batch == 0:
        row = replace(row, seq_len=int(found[1]) // row.global_batch)
        notes.append(f"sequences of {row.seq_len}: {found[1]} tokens a step")
    return row, tuple(notes)


def _by_device(row: Row) -> bool:
    return bool(re.search(PER_DEVICE, row.framework.lower()))
