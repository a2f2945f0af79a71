"""Predictions against published runs: an error for each run, and a summary for each family.

`score(run)` predicts one run; `summarise` gives, per family, rows, predicted, refused by reason, the errors of time and
memory, the rank correlation within groups a user would choose among, and the noise that repeats of one measurement
show. Everything is pure: the same table gives the same numbers. Leaves out fitting, and running on several cores.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import GnomonError
from gnomon.formats.published import Refused, Row, Run
from gnomon.formats.published.settle import settled
from gnomon.prediction import Prediction
from gnomon.report.tables import Column, percent, table

UPDATE_KINDS = ("OPT", "NORM")
"""Kinds of action that a time without the update does not cover."""

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
    """Seconds of a step."""
    measured_bytes: int | None
    """Peak memory, as published."""
    predicted_bytes: int
    """Peak memory, of the same kind and rank as far as the source says."""
    fits: bool
    """The prediction's verdict. The run ran, so False is wrong."""
    notes: tuple[str, ...]
    """What the row leaves open."""

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured memory, minus 1."""
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1


def score(run: Run) -> Score | Refused:
    """The prediction of a run beside its measurement; Refused with the reason if it cannot be predicted."""
    try:
        run, found = settled(run)
    except GnomonError as error:
        return Refused(id=run.id, family=run.family, reason=str(error))
    predicted = found.step_s
    if run.covers == "forward_backward":
        predicted -= sum(found.breakdown.get(kind, 0.0) for kind in UPDATE_KINDS)
    worst = max(run.readings_s, key=lambda seconds: abs(predicted / seconds - 1))
    return Score(
        id=run.id,
        family=run.family,
        group=run.group,
        measured_s=worst,
        predicted_s=predicted,
        measured_bytes=run.memory_bytes,
        predicted_bytes=_memory(run, found),
        fits=found.fits,
        notes=run.notes,
    )


def _memory(run: Run, found: Prediction) -> int:
    """Peak of the kind that the source measured, of its rank or the highest."""
    ranks = [rank for rank in found.memory if run.memory_rank is None or run.memory_rank in rank.ranks]
    if run.memory_metric == "allocated":
        return max(rank.allocated_bytes for rank in ranks or found.memory)
    if run.memory_metric == "reserved":
        return max(rank.reserved_bytes for rank in ranks or found.memory)
    return max(rank.peak_bytes for rank in ranks or found.memory)


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
    """Errors of the step time; None without predictions."""
    memory: Errors | None
    """Errors of the peak memory; None where none is published."""
    spearman: float | None
    """Rank correlation of times within groups of one model and number of devices, mean over groups by size."""
    spearman_runs: int
    """Runs in those groups."""
    false_out_of_memory: int
    """Runs that ran although the verdict is that they do not fit."""
    noise: float | None
    """Median distance of repeats from their mean, as a share: no prediction can be better."""
    repeats: int
    """Rows that repeat another in every column but the measurement."""

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def summarise(scores: Iterable[Score], refused: Iterable[Refused], rows: Iterable[Row] = ()) -> tuple[Summary, ...]:
    """Families in alphabetical order, then `all`. `rows` give the noise."""
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
    found = [_summary(name, done[name], left[name], table_rows[name]) for name in names]
    if len(found) > 1:
        everything = _summary(
            "all",
            [s for name in names for s in done[name]],
            [r for name in names for r in left[name]],
            [r for name in names for r in table_rows[name]],
        )
        found.append(everything)
    return tuple(found)


def _summary(family: str, scores: Sequence[Score], refused: Sequence[Refused], rows: Sequence[Row]) -> Summary:
    memory = [score.memory_error for score in scores if score.memory_error is not None]
    correlation, members = rank_correlation(scores)
    spread, repeats = noise(rows)
    return Summary(
        family=family,
        rows=len(scores) + len(refused),
        predicted=len(scores),
        refused=tuple(Counter(r.reason for r in refused).most_common()),
        time=errors([score.error for score in scores]),
        memory=errors(memory),
        spearman=correlation,
        spearman_runs=members,
        false_out_of_memory=sum(not score.fits for score in scores),
        noise=spread,
        repeats=repeats,
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


_MEASURED = {"id", "line", "metric", "value", "second_metric", "second_value", "mem_gib", "notes", "section", "source"}
_SETTING = tuple(f.name for f in fields(Row) if f.name not in _MEASURED)


def noise(rows: Iterable[Row]) -> tuple[float | None, int]:
    """(median distance of repeats from their group's mean, rows in such groups): rows equal in every column but what
    was measured, in the same metric. What only notes tell apart counts as noise."""
    groups: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for row in rows:
        groups[(row.metric, *(getattr(row, name) for name in _SETTING))].append(row.value)
    found: list[float] = []
    for values in groups.values():
        if len(values) > 1:
            mean = sum(values) / len(values)
            found += [abs(value / mean - 1) for value in values]
    return (float(np.median(found)) if found else None), len(found)


def summary_text(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """One line a family: rows, predicted, errors in per cent, correlation, memory, noise."""
    columns = (
        Column(name="family", align="left"),
        *(Column(name=n) for n in ("rows", "pred", "median", "mean", "p90", "worst", "bias", "rho", "mem", "noise")),
    )
    return table(columns, [_summary_row(summary) for summary in summaries], gap=1)


def _summary_row(summary: Summary) -> tuple[str, ...]:
    time, memory = summary.time, summary.memory
    shown: Mapping[str, float | None] = {
        name: getattr(time, name) if time else None for name in ("median", "mean", "p90", "worst", "bias")
    }
    return (
        summary.family,
        str(summary.rows),
        str(summary.predicted),
        *(percent(value) for value in shown.values()),
        "-" if summary.spearman is None else f"{summary.spearman:.2f}",
        percent(memory.median) if memory else "-",
        percent(summary.noise),
    )
