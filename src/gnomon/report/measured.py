"""Measured runs of the user's own beside their predictions, one a line, and how far off they are in all.

`compared(runs)` predicts them; `comparison_text` is what `gnomon validate` prints. Leaves out reading the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnomon.errors import GnomonError
from gnomon.prediction import Prediction, predict
from gnomon.prediction.measured import MeasuredRun, RefusedRun, predicted_s
from gnomon.report.tables import Column, number, percent, table, wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One measured run next to its prediction."""

    run: MeasuredRun
    """As measured."""
    prediction: Prediction
    """As predicted."""

    @property
    def error(self) -> float:
        """Predicted over measured seconds, minus 1."""
        return predicted_s(self.run, self.prediction) / self.run.step_s - 1

    @property
    def in_band(self) -> bool:
        """Whether the measured step lies in the band of 80% of the prediction."""
        band = self.prediction.band
        return band.low_s <= self.run.step_s <= band.high_s

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak, minus 1; None if it was not measured."""
        return None if self.run.peak_bytes is None else self.prediction.tightest.peak_bytes / self.run.peak_bytes - 1

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "id": self.run.id,
            "measured_s": self.run.step_s,
            "predicted_s": self.prediction.step_s,
            "error": self.error,
            "in_band": self.in_band,
            "measured_bytes": self.run.peak_bytes,
            "predicted_bytes": self.prediction.tightest.peak_bytes,
            "memory_error": self.memory_error,
            "fits": self.prediction.fits,
            "assumed": [*self.run.assumed, *self.prediction.assumptions],
        }


def compare_runs(runs: Iterable[MeasuredRun]) -> tuple[tuple[ComparedRun, ...], tuple[RefusedRun, ...]]:
    """(runs with their predictions, runs that cannot be predicted), in the order given."""
    done: list[ComparedRun] = []
    refused: list[RefusedRun] = []
    for run in runs:
        try:
            prediction = predict(run.graph, run.cluster, run.plan, run.workload, run.stack)
            done.append(ComparedRun(run=run, prediction=prediction))
        except GnomonError as error:
            refused.append(RefusedRun(id=run.id, reason=str(error)))
    return tuple(done), tuple(refused)


def comparison_text(done: Sequence[ComparedRun], refused: Sequence[RefusedRun]) -> tuple[str, ...]:
    """A table, its summary, and what was filled in or refused."""
    names = ("step s", "predicted", "error %", "in band", "peak GiB", "predicted", "error %", "fits")
    rows = [
        (
            row.run.id,
            number(row.run.step_s, 4),
            number(row.prediction.step_s, 4),
            percent(row.error),
            "yes" if row.in_band else "no",
            "-" if row.run.peak_bytes is None else f"{row.run.peak_bytes / 2**30:.1f}",
            f"{row.prediction.tightest.peak_bytes / 2**30:.1f}",
            percent(row.memory_error),
            "yes" if row.prediction.fits else "no",
        )
        for row in done
    ]
    lines = (
        list(table((Column(name="run", align="left"), *(Column(name=n) for n in names)), rows, gap=1)) if rows else []
    )
    if done:
        lines += ["", *wrapped(_summary(done), indent="")]
    for note in dict.fromkeys(note for row in done for note in row.run.assumed):
        lines += wrapped(note, bullet="- ")
    for gone in refused:
        lines += wrapped(f"{gone.id} cannot be predicted: {gone.reason}", indent="")
    return tuple(lines)


def _summary(done: Sequence[ComparedRun]) -> str:
    sizes, inside = np.abs([row.error for row in done]), sum(row.in_band for row in done)
    summary = (
        f"{len(done)} run{'s' * (len(done) != 1)}: step time off by {np.median(sizes):.1%} at the median, "
        f"{np.mean(sizes):.1%} in the mean, {np.max(sizes):.1%} at most; {inside} inside the 80% interval"
    )
    memory = np.abs([row.memory_error for row in done if row.memory_error is not None])
    if memory.size:
        summary += (
            f"; peak memory of {memory.size} off by {np.median(memory):.1%} at the median, {np.max(memory):.1%} at most"
        )
    if wrong := sum(not row.prediction.fits for row in done):
        summary += f"; {wrong} said not to fit, although all ran"
    return summary
