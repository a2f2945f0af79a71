"""A plan as other programs' files, as text and JSON: which can run it, and how fast it is there.

Leaves out writing the files (`gnomon export`), and planning for one program (`--stack`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnomon.report.tables import Column, memory_unit, number, table, wrapped
from gnomon.request.exported import AsFile
from gnomon.units import show_seconds


def programs_text(files: Sequence[AsFile]) -> tuple[str, ...]:
    """A row for each program that can run the plan; then why others cannot."""
    able = [file for file in files if file.prediction is not None]
    lines: list[str] = []
    if able:
        unit, scale = memory_unit(max(file.prediction.tightest.peak_bytes for file in able if file.prediction))
        rows = [
            (
                file.program,
                show_seconds(p.step_s),
                number(p.tightest.peak_bytes / scale),
                "" if p.fits else "does not fit",
            )
            for file in able
            if (p := file.prediction) is not None
        ]
        columns = (
            Column(name="the best plan as a file of", align="left"),
            Column(name="step"),
            Column(name=f"peak {unit}"),
            Column(name="", align="left"),
        )
        lines += table(columns, rows)
    for file in files:
        if file.prediction is None:
            lines += wrapped(f"{file.program} cannot run it: {file.why}", indent="")
    lines += wrapped(
        "gnomon export writes these files and lists what they leave to the program; --stack NAME plans for one",
        indent="",
    )
    return tuple(lines)


def programs_mapping(files: Sequence[AsFile]) -> list[dict[str, Any]]:
    """Plain values for JSON."""
    return [
        {
            "program": file.program,
            "stack": file.stack,
            "step_s": None if file.prediction is None else file.prediction.step_s,
            "peak_bytes": None if file.prediction is None else file.prediction.tightest.peak_bytes,
            "why_not": file.why,
        }
        for file in files
    ]
