"""The fitted numbers as they are without some of the runs: to judge predictions of what was never seen.

`folds()` are those on record, in `folds.toml` beside this, which `evidence.fits.fit_stacks` writes together with the
numbers themselves (`gnomon.prices.fitted`). Leaves out the fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar
from zlib import crc32

from gnomon import schema
from gnomon.prices.fitted import FittedRates

FILE = Path(__file__).parent / "folds.toml"
"""The folds on record."""

MODEL_FOLDS = 4
"""Parts into which models are divided; each is left out in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """The numbers as they are without some of the runs."""

    left_out: str
    """A source; or the part of the models."""
    numbers: FittedRates
    """Fitted to the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folds:
    """Everything fitted again without parts of the runs, to judge predictions of what was never seen."""

    SCHEMA: ClassVar[str] = "gnomon.folds/1"

    models: tuple[Fold, ...] = ()
    """Without one part of the models each: `fold_of` says which."""
    sources: tuple[Fold, ...] = ()
    """Without one source each."""

    def without_model(self, model: str) -> FittedRates | None:
        """The numbers to which no run of a model was fitted; None if there are none."""
        return next((fold.numbers for fold in self.models if fold.left_out == str(fold_of(model))), None)

    def without_source(self, source: str) -> FittedRates | None:
        """The numbers to which no run of a source was fitted; None where none of its runs were used."""
        return next((fold.numbers for fold in self.sources if fold.left_out == source), None)


def fold_of(model: str) -> int:
    """The part that a model is in: the same in every source."""
    return crc32(model.encode()) % MODEL_FOLDS


@cache
def folds() -> Folds:
    """The folds on record."""
    return schema.load(Folds, FILE.read_text(encoding="utf-8"), source=FILE.name)
