"""Every row of a table as it is predicted, to the bit: what a change of the code that must change nothing is held to.

    python -m evidence.snapshot RUNS.csv -o rows.jsonl           # one line a row
    python -m evidence.snapshot RUNS.csv -o rows.jsonl --against before.jsonl

Seconds are hexadecimal floats. With `--against` it prints the rows that differ, and in which fields, and returns 1 if
there are some. Leaves out whether predictions are right (`evidence.validate`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.published import Refused, read_runs
from evidence.validate import score_all
from evidence.validation import Score

SHOWN = 20
"""Rows that differ, shown."""


def line(row: Score | Refused) -> dict[str, Any]:
    """One row."""
    if isinstance(row, Refused):
        return {"id": row.id, "family": row.family, "refused": row.reason}
    return {
        "id": row.id,
        "family": row.family,
        "measured_s": row.measured_s.hex(),
        "step_s": row.predicted_s.hex(),
        "without_model": float(row.without_model).hex(),
        "without_source": float(row.without_source).hex(),
        "band": [float(row.band.low).hex(), float(row.band.high).hex()],
        "memory_bytes": row.predicted_bytes,
        "measured_bytes": row.measured_bytes,
        "fits": row.fits,
        "first_error": float(row.first_error).hex(),
        "first_bytes": row.first_bytes,
        "notes": list(row.notes),
    }


def differences(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each row that is not the same."""
    old, new = ({row["id"]: row for row in rows} for rows in (before, after))
    collected = []
    for name in sorted({*old, *new}):
        one, other = old.get(name, {}), new.get(name, {})
        if fields := [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]:
            collected.append(f"{name}: " + "; ".join(f"{key} {one.get(key)} -> {other.get(key)}" for key in fields))
    return collected


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, write, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="RUNS.csv")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="ROWS.jsonl")
    parser.add_argument("--against", type=Path, metavar="BEFORE.jsonl", help="an earlier snapshot")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N")
    options = parser.parse_args(argv)
    runs, refused = read_runs(options.table)
    rows = [line(row) for row in (*refused, *score_all(runs, options.workers))]
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if options.against is None:
        return 0
    before = [json.loads(text) for text in options.against.read_text(encoding="utf-8").splitlines()]
    apart = differences(before, rows)
    print(f"{len(rows)} rows, {len(apart)} differ")
    print("".join(f"{text}\n" for text in apart[:SHOWN]), end="")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
