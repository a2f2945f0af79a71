"""Predictions against published runs: errors of each run, and a summary for each family.

`score(run)` predicts one run with the numbers on record, with those fitted without the run's model, and with those
fitted without its source; and under two readings of what the source leaves open: the first, which saw nothing of the
outcome, and the fitted one (`evidence.published.fitted_reading`). What was left out is predicted on the first reading,
and a run is "said not to fit" by it. `summarise` gives, per family, rows, predicted, refused by reason, the errors of
time and memory, how many measurements fall in their bands, and the rank correlation within groups a user would choose
among. Everything is pure: the same table gives the same numbers. Leaves out fitting, the spread of the measurements
themselves (`noise`), and running on several cores.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.folds import folds
from evidence.noise import Noise, noise
from evidence.published import Refused, Row, Run, nanotron
from evidence.published.fitted_reading import first_prediction, fitted_reading, same
from evidence.published.row import COMPOSED
from evidence.readings import readings
from gnomon.errors import GnomonError
from gnomon.prediction import Prediction
from gnomon.prediction.band import Ratios, band_of
from gnomon.prediction.evidence import evidence
from gnomon.prediction.measured import predicted_s
from gnomon.prices.fitted import FittedRates
from gnomon.report.tables import Column, percent, table
from gnomon.units import Seconds

SMALLEST_GROUP = 4
"""Runs of one group from which a rank correlation means something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One run, predicted."""

    id: str
    """Of the run."""
    family: str
    """Its source."""
    group: tuple[str, str, int]
    """(family, model, devices)."""
    measured_s: float
    """Seconds of a step, as published: of several readings, the one furthest from the prediction."""
    predicted_s: float
    """Seconds of a step, on the fitted reading."""
    measured_bytes: int | None
    """Peak memory, as published."""
    predicted_bytes: int
    """Peak memory on the fitted reading, of the same kind and rank as far as the source says."""
    fits: bool
    """The verdict on the first reading. The run ran, so False is wrong."""
    notes: tuple[str, ...]
    """What the row leaves open."""
    without_model: float
    """The error of the first reading, with numbers and thresholds to which no run of its model was fitted."""
    without_source: float
    """The error of the first reading, with numbers to which no run of its source was fitted."""
    band: Ratios
    """Between which measured over predicted was to lie, with those numbers on that reading."""
    chosen: bool
    """The fitted reading is not the first one: the outcome has decided something."""
    first_error: float
    """The error of the first reading, with the numbers on record."""
    first_bytes: int
    """Peak memory on the first reading."""
    without_source_chosen: float
    """The error of the fitted reading, with numbers to which no run of its source was fitted."""
    fits_chosen: bool
    """The verdict on the fitted reading."""

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def in_band(self) -> bool:
        """Whether the measurement lies in the band of the prediction that never saw its source."""
        return self.band.low <= 1 / (1 + self.without_source) <= self.band.high

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured memory on the fitted reading, minus 1."""
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1

    @property
    def first_memory_error(self) -> float | None:
        """The same of the first reading."""
        return None if self.measured_bytes is None else self.first_bytes / self.measured_bytes - 1


def score(run: Run) -> Score | Refused:
    """The predictions of a run beside its measurement; Refused with the reason if it cannot be predicted."""
    try:
        first = first_prediction(run)
        chosen, made = fitted_reading(run, first)
        others, held = _without_model(run, (run, first), (chosen, made))
    except GnomonError as error:
        return Refused(id=run.id, family=run.family, reason=str(error))
    without_source = folds().without_source(run.family)
    # a source that nothing was fitted to is new to the numbers on record
    without_model = folds().without_model(run.row.model) if without_source is not None else None
    predicted = predicted_s(chosen, made)
    unseen = predicted_s(run, first, without_source)
    return Score(
        id=run.id,
        family=run.family,
        group=run.group,
        measured_s=_worst(run, predicted),
        predicted_s=predicted,
        measured_bytes=run.memory_bytes,
        predicted_bytes=predicted_bytes(chosen, made),
        fits=first.fits,
        notes=chosen.notes,
        without_model=_error(others, held, without_model),
        without_source=unseen / _worst(run, unseen) - 1,
        band=_band(first, without_source, unseen),
        chosen=not same(run, chosen),
        first_error=_error(run, first, None),
        first_bytes=predicted_bytes(run, first),
        without_source_chosen=_error(chosen, made, without_source),
        fits_chosen=made.fits,
    )


def _without_model(run: Run, *known: tuple[Run, Prediction]) -> tuple[Run, Prediction]:
    """The run as thresholds read it to which no run of its model was fitted, and its prediction, which may be known.
    Without its source there are no thresholds, and without its outcome it is not known that it fits."""
    read = replace(run, stack=nanotron.as_timed(run.stack, run.row, readings().without_model(run.row.model)))
    made = next((made for other, made in known if same(other, read)), None)
    return read, made or first_prediction(read)


def _band(result: Prediction, numbers: FittedRates | None, seconds: Seconds) -> Ratios:
    """The band of a prediction of so many seconds under other numbers."""
    if numbers is None:
        return band_of(evidence(result.pricing, result.step_s))
    return band_of(evidence(result.pricing.with_numbers(numbers), seconds))


def _worst(run: Run, predicted: float) -> float:
    """Of several readings, the one furthest from the prediction."""
    return max(run.readings_s, key=lambda seconds: abs(predicted / seconds - 1))


def _error(run: Run, result: Prediction, numbers: FittedRates | None) -> float:
    """The error of a prediction, under other numbers if there are any."""
    seconds = predicted_s(run, result, numbers)
    return seconds / _worst(run, seconds) - 1


def predicted_bytes(run: Run, result: Prediction) -> int:
    """Peak of the kind that the source measured, of its rank or the highest."""
    ranks = [rank for rank in result.memory if run.memory_rank is None or run.memory_rank in rank.ranks]
    if run.memory_metric == "allocated":
        return max(rank.allocated_bytes for rank in ranks or result.memory)
    if run.memory_metric == "reserved":
        return max(rank.reserved_bytes for rank in ranks or result.memory)
    return max(rank.peak_bytes for rank in ranks or result.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Absolute errors of a set of predictions, as shares."""

    count: int
    """Predictions."""
    median: float
    mean: float
    p90: float
    worst: float
    bias: float
    """Median of the signed errors: above 0, predictions are too long (or too large)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One family."""

    family: str
    """Its name, or `all`."""
    rows: int
    """Rows of the table."""
    predicted: int
    """Of these, predicted."""
    refused: tuple[tuple[str, int], ...]
    """(reason, rows), most frequent first."""
    time: Errors | None
    """Errors of the step time on the fitted reading, with the numbers on record; None without predictions."""
    without_model: Errors | None
    """Errors on the first reading with each model left out of every fit."""
    without_source: Errors | None
    """Errors on the first reading with the source left out of every fit: what a new user's job will see."""
    memory: Errors | None
    """Errors of the peak memory on the fitted reading; None where none is published."""
    chosen: int
    """Rows whose fitted reading is not the first one."""
    first: Errors | None
    """Errors of the step time on the first reading, with the numbers on record."""
    without_source_chosen: Errors | None
    """Errors on the fitted reading with the source left out of every fit of numbers."""
    first_memory: Errors | None
    """Errors of the peak memory on the first reading."""
    in_band: float | None
    """Share of rows inside the band of the prediction with their source left out."""
    band_width: float | None
    """Median width of those bands, over the prediction."""
    spearman: float | None
    """Rank correlation of times within groups of one model and number of devices, mean over groups by size."""
    spearman_runs: int
    """Runs in those groups."""
    false_out_of_memory: int
    """Runs that ran although the verdict on the first reading is that they do not fit."""
    false_out_of_memory_chosen: int
    """The same of the fitted reading."""
    noise: Noise
    """How far measurements of one setting lie apart: no prediction can be better."""

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def summarise(scores: Iterable[Score], refused: Iterable[Refused], rows: Iterable[Row] = ()) -> tuple[Summary, ...]:
    """Families in alphabetical order, then `all`, in which rows that a simulator made do not count. `rows` give the
    noise."""
    done: dict[str, list[Score]] = defaultdict(list)
    left: dict[str, list[Refused]] = defaultdict(list)
    table_rows: dict[str, list[Row]] = defaultdict(list)
    for item in scores:
        done[item.family].append(item)
    for gone in refused:
        left[gone.family].append(gone)
    for row in rows:
        table_rows[row.family].append(row)
    names = sorted({*done, *left})
    collected = [_summary(name, done[name], left[name], table_rows[name]) for name in names]
    measured = [name for name in names if name != COMPOSED]
    if len(measured) > 1:
        everything = _summary(
            "all",
            [s for name in measured for s in done[name]],
            [r for name in measured for r in left[name]],
            [r for name in measured for r in table_rows[name]],
        )
        collected.append(everything)
    return tuple(collected)


def _summary(family: str, scores: Sequence[Score], refused: Sequence[Refused], rows: Sequence[Row]) -> Summary:
    memory = [score.memory_error for score in scores if score.memory_error is not None]
    correlation, members = rank_correlation(scores)
    return Summary(
        family=family,
        rows=len(scores) + len(refused),
        predicted=len(scores),
        refused=tuple(Counter(r.reason for r in refused).most_common()),
        time=errors([score.error for score in scores]),
        without_model=errors([score.without_model for score in scores]),
        without_source=errors([score.without_source for score in scores]),
        memory=errors(memory),
        chosen=sum(score.chosen for score in scores),
        first=errors([score.first_error for score in scores]),
        without_source_chosen=errors([score.without_source_chosen for score in scores]),
        first_memory=errors([score.first_memory_error for score in scores if score.first_memory_error is not None]),
        in_band=float(np.mean([score.in_band for score in scores])) if scores else None,
        band_width=float(np.median([s.band.high - s.band.low for s in scores])) if scores else None,
        spearman=correlation,
        spearman_runs=members,
        false_out_of_memory=sum(not score.fits for score in scores),
        false_out_of_memory_chosen=sum(not score.fits_chosen for score in scores),
        noise=noise(rows),
    )


def errors(signed: Sequence[float]) -> Errors | None:
    """Statistics of signed relative errors; None for none. The 90th percentile is linear between neighbours."""
    if not signed:
        return None
    values = np.asarray(signed, dtype=np.float64)
    sizes = np.abs(values)
    return Errors(
        count=len(signed),
        median=float(np.median(sizes)),
        mean=float(np.mean(sizes)),
        p90=float(np.percentile(sizes, 90)),
        worst=float(np.max(sizes)),
        bias=float(np.median(values)),
    )


def rank_correlation(scores: Iterable[Score]) -> tuple[float | None, int]:
    """(Spearman's correlation of predicted and measured times within groups, mean by group size; runs in them)."""
    groups: dict[tuple[str, str, int], list[Score]] = defaultdict(list)
    for item in scores:
        groups[item.group].append(item)
    total, members = 0.0, 0
    for group in groups.values():
        value = spearman([s.predicted_s for s in group], [s.measured_s for s in group])
        if len(group) >= SMALLEST_GROUP and value is not None:
            total += value * len(group)
            members += len(group)
    return (total / members if members else None), members


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation of ranks, ties sharing their mean rank; None when one side is all equal."""
    a, b = _ranks(first), _ranks(second)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: NDArray[np.float64] = last - (counts - 1) / 2
    return mean[inverse]


READINGS = ("rows", "median", "p90", "source", "p90", "memory", "p90", "no fit")
"""Columns of the last table: rows that are read by their outcome; errors of the step time with the numbers on record
and with the source left out; errors of the peak memory; runs said not to fit."""


def summary_text(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """Three tables, one line a family in each: what there is, with memory and noise; errors of the step time; and, of
    families in which the outcome decided how rows are read, the errors with and without that."""
    words = Column(name="family", align="left")
    names = ("rows", "pred", "rho", "memory", "p90", "no fit", "repeats", "twins", "releases")
    first = table((words, *(Column(name=n) for n in names)), [_first_row(s) for s in summaries], gap=1)
    groups = ("median", "mean", "p90", "worst", "bias"), ("model", "p90"), ("source", "p90", "band", "width")
    columns = (words, *(Column(name=n) for group in groups for n in group))
    third = (words, Column(name="reading", align="left"), *(Column(name=name) for name in READINGS))
    decided = [line for s in summaries if s.chosen for line in _readings(s)]
    last = ("", *table(third, decided, gap=1)) if decided else ()
    return (*first, "", *table(columns, [_second_row(s) for s in summaries], gap=1), *last)


def _first_row(summary: Summary) -> tuple[str, ...]:
    memory, spread = summary.memory, summary.noise
    return (
        summary.family,
        str(summary.rows),
        str(summary.predicted),
        "-" if summary.spearman is None else f"{summary.spearman:.2f}",
        percent(memory.median if memory else None),
        percent(memory.p90 if memory else None),
        str(summary.false_out_of_memory),
        *(percent(value) for value in (spread.repeats, spread.twins, spread.releases)),
    )


def _second_row(summary: Summary) -> tuple[str, ...]:
    shown = (
        (summary.time, ("median", "mean", "p90", "worst", "bias")),
        (summary.without_model, ("median", "p90")),
        (summary.without_source, ("median", "p90")),
        (summary, ("in_band", "band_width")),
    )
    cells = (percent(getattr(e, name) if e else None, 0 if e is summary else 1) for e, names in shown for name in names)
    return (summary.family, *cells)


def _readings(summary: Summary) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The line of the fitted reading and that of the first one."""
    fitted = (summary.time, summary.without_source_chosen, summary.memory)
    first = (summary.first, summary.without_source, summary.first_memory)
    shares = [
        [percent(getattr(e, n) if e else None) for e in one for n in ("median", "p90")] for one in (fitted, first)
    ]
    return (
        (summary.family, "fitted", str(summary.chosen), *shares[0], str(summary.false_out_of_memory_chosen)),
        ("", "first", "", *shares[1], str(summary.false_out_of_memory)),
    )
