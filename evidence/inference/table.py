"""The lines of `python -m evidence inference RUNS.csv`: scores by family, with and without its source.

Twice: with the constants on record, some of which were chosen with these runs in view, and with those that the other
sources give (`left_out`). Leaves out how a row is scored (`score`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evidence.inference.left_out import Refit
from evidence.inference.rows import Asked
from evidence.inference.score import Tally, answered_lines, figure_lines, read_rows, tallied
from gnomon.schema import save_text


def _rows(tally: Tally, held_out: Tally | None) -> Iterator[str]:
    yield "id,family,figure,measured_s,predicted_s,left_out_s,roofline_s"
    for key, found in sorted(tally.found.items()):
        others = found if held_out is None else held_out.found[key]
        for one, other in zip(found, others, strict=True):
            apart = "" if held_out is None else f"{other.predicted:.6g}"
            figures = f"{one.measured:.6g},{one.predicted:.6g},{apart},{one.roofline:.6g}"
            yield f"{one.row},{one.family},{one.figure.replace(',', '')},{figures}"


def _on_record(asked: Asked) -> Asked:
    return asked


def table(
    path: str | Path, family: str | None = None, every: int = 1, *, refit: bool = True, out: str | None = None
) -> Iterator[str]:
    """every: of equal-minded rows only each n-th, for a quick look. refit: whether also without the source. out: where
    every figure is written, as CSV."""
    everything = read_rows(path, every=every)
    rows = [row for row in everything if family is None or row["family"] == family]
    tally = tallied(rows, lambda source: _on_record)
    held_out = None
    if refit:
        without = Refit(everything)
        held_out = tallied(rows, without.without)
    if out is not None:
        save_text("\n".join(_rows(tally, held_out)) + "\n", out)
    yield from figure_lines(tally, held_out)
    yield from answered_lines(tally)
    if refit:
        yield ""
        yield "chosen from one source alone; a row has the medians of the others:"
        yield from without.lines()
