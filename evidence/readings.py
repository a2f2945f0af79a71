"""Thresholds that decide how rows are read and were chosen on measured step times; on record, and without some runs.

Rows of nanotron's benchmark do not say how the jobs were started. `readings().nanotron` are the thresholds by which
they are read (`evidence.published.nanotron`); `evidence.fits.fit_readings` finds them and writes `readings.toml` beside
this. `without_model` gives those found without some models. Without the source there are none: its rows are then read
as they stand. Leaves out readings that are changed until a run fits (`evidence.published.fitted_reading`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from evidence.folds import fold_of
from gnomon import schema

FILE = Path(__file__).parent / "readings.toml"
"""The thresholds on record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobThresholds:
    """Which of nanotron's jobs on several nodes ran with checked collectives and with polled messages."""

    polled_nodes: int
    """Jobs with stages on so many nodes polled; jobs without stages on so many checked their collectives."""
    polled_tp: int
    """Jobs with so many tensor-parallel ranks polled where they had stages, and did not check where they had none."""
    early_nodes: int
    """From so many nodes on, a job with stages that shows an early setting polled."""
    early_params_b: float
    """An early setting: a model of so many billion parameters..."""
    early_micro_batch: int
    """...with so many sequences a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingFold:
    """The thresholds as they are without some of the runs."""

    left_out: str
    """The part of the models (`evidence.folds.fold_of`)."""
    nanotron: JobThresholds
    """Fitted to the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Everything on record."""

    SCHEMA: ClassVar[str] = "gnomon.readings/1"

    nanotron: JobThresholds
    """Fitted to all runs of the source."""
    models: tuple[ReadingFold, ...] = ()
    """Without one part of the models each; a part that has none of the source's models is not listed."""
    data: str
    """What they were fitted to."""
    date: str
    """When."""

    def without_model(self, model: str) -> JobThresholds:
        """The thresholds to which no run of a model was fitted."""
        part = str(fold_of(model))
        return next((fold.nanotron for fold in self.models if fold.left_out == part), self.nanotron)


@cache
def readings() -> Readings:
    """The thresholds on record."""
    return schema.load(Readings, FILE.read_text(encoding="utf-8"), source=FILE.name)
