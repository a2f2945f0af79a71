"""What fits of kernel prices share: reading tables, a search, errors on what was kept out, and a fitted row.

Pure numpy; imported by the commands beside it. Leaves out: any model of a kernel.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.prices.curves import Array, AttentionCurve, GemmCurve, Provenance, StreamCurve

DATE = "2026-11-22"
DEVICES = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "b200_sxm": "b200-sxm-180gb",
    "l40s": "l40s-48gb",
    "V100-PCIE-16GB": "v100-pcie-16gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "NVIDIA L4": "l4-24gb",
    "Tesla T4": "t4-16gb",
    "AMD Instinct MI210": "mi210-64gb",
    "AMD Instinct MI100": "mi100-32gb",
    "A100-80GB-SXM4": "a100-sxm-80gb",
    "H100-80GB-SXM5": "h100-sxm-80gb",
}
"""Device names of the tables -> of the catalogue."""

Row = dict[str, str]
Model = Callable[[dict[str, float]], Array]


def read(data: Path, table: str, **wanted: str) -> list[Row]:
    """Rows of a table whose columns equal `wanted`."""
    return [row for row in _table(data, table) if all(row[name] == value for name, value in wanted.items())]


@cache
def _table(data: Path, table: str) -> list[Row]:
    with open(data / "kernels" / f"{table}.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[Row], name: str) -> Array:
    return np.array([float(row[name]) for row in rows])


def kept_out(rows: list[Row], *names: str) -> Any:
    """A quarter of the distinct values of these columns, by hash."""
    return np.array([zlib.crc32(",".join(row[name] for name in names).encode()) % 4 == 0 for row in rows])


# --- the search


@dataclass(frozen=True)
class Range:
    """A constant and where to look for it."""

    low: float
    high: float
    start: float
    log: bool = False

    def at(self, x: float) -> float:
        """x: any real number -> a value between the limits."""
        part = 1 / (1 + np.exp(-np.clip(x, -30, 30)))
        if self.log:
            return float(self.low * (self.high / self.low) ** part)
        return float(self.low + (self.high - self.low) * part)

    @property
    def x(self) -> float:
        """The inverse of `at`, of the start."""
        part = (self.start - self.low) / (self.high - self.low)
        if self.log:
            part = float(np.log(self.start / self.low) / np.log(self.high / self.low))
        part = min(max(part, 1e-3), 1 - 1e-3)
        return float(np.log(part / (1 - part)))


def nelder_mead(loss: Callable[[Array], float], start: Array, steps: int) -> Array:
    """The least of a function by Nelder and Mead's simplex (1965), restarted once at what it found."""
    for _ in range(2):
        points = [start, *(start + 0.6 * axis for axis in np.eye(len(start)))]
        values = [loss(point) for point in points]
        for _ in range(steps // 2):
            order = np.argsort(values)
            points, values = [points[i] for i in order], [values[i] for i in order]
            if values[-1] - values[0] < 1e-6:
                break
            centre = np.mean(points[:-1], axis=0)
            trial = centre + (centre - points[-1])
            value = loss(trial)
            if value < values[0]:
                far = centre + 2 * (centre - points[-1])
                far_value = loss(far)
                trial, value = (far, far_value) if far_value < value else (trial, value)
            elif value >= values[-2]:
                trial = centre + 0.5 * ((trial if value < values[-1] else points[-1]) - centre)
                value = loss(trial)
            if value < values[-1]:
                points[-1], values[-1] = trial, value
                continue
            points = [points[0], *(points[0] + 0.5 * (point - points[0]) for point in points[1:])]
            values = [values[0], *(loss(point) for point in points[1:])]
        start = points[int(np.argmin(values))]
    return start


def search(loss: Callable[[Array], float], start: Array, low: Array, high: Array) -> Array:
    """Least of a function by pattern search: one parameter at a time, up or down by a factor that shrinks, within
    limits."""
    best, least = start.copy(), loss(start)
    step = 0.7
    while step > 0.004:
        better = False
        for i in range(len(best)):
            for factor in (1 + step, 1 / (1 + step)):
                tried = best.copy()
                tried[i] = min(max(tried[i] * factor, low[i]), high[i])
                result = loss(tried)
                if result < least - 1e-9:
                    best, least, better = tried, result, True
        step = step if better else step * 0.6
    return best


def fit(ranges: dict[str, Range], model: Model, measured: Array, steps: int = 400) -> dict[str, float]:
    """Constants with the least mean absolute logarithm of predicted over measured."""

    def named(x: Array) -> dict[str, float]:
        return {name: where.at(value) for (name, where), value in zip(ranges.items(), x, strict=True)}

    def loss(x: Array) -> float:
        return float(np.abs(np.log(model(named(x)) / measured)).mean())

    return named(nelder_mead(loss, np.array([where.x for where in ranges.values()]), steps))


@dataclass(frozen=True)
class Error:
    """Errors of a model on shapes."""

    median: float
    p90: float
    bias: float
    count: int

    @classmethod
    def of(cls, predicted: Array, measured: Array) -> Error:
        off = predicted / measured - 1
        if not len(off):
            return cls(float("nan"), float("nan"), float("nan"), 0)
        return cls(float(np.median(abs(off))), float(np.quantile(abs(off), 0.9)), float(np.median(off)), len(off))

    def __str__(self) -> str:
        if not self.count:
            return "none"
        return f"{self.median:.1%} / {self.p90:.1%} of {self.count}"


NONE = Error(float("nan"), float("nan"), float("nan"), 0)


@dataclass(frozen=True)
class Result:
    """One fitted row with what is said about it in the table."""

    arch: str
    row: GemmCurve | AttentionCurve | StreamCurve
    name: str
    shapes: str
    held: Error
    others: str = ""

    def line(self) -> str:
        if not self.held.count:
            return f"| {self.name} | {self.row.provenance.data} | - | - | - | - | - |"
        return (
            f"| {self.name} | {self.shapes} | {self.held.count} | {self.held.median:.1%} | {self.held.p90:.1%} "
            f"| {self.held.bias:+.1%} | {self.others} |"
        )


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def provenance(data: str, error: Error, shapes: str) -> Provenance:
    return Provenance(
        data=data, date=DATE, error=f"held out {error.median:.1%} / {error.p90:.1%} (median / p90)", range=shapes
    )


def thin(count: int, most: int = 2500) -> Any:
    """Indices of at most `most` shapes, evenly spread and the same every time."""
    return np.random.default_rng(0).permutation(count)[:most]


def assumed(what: str) -> Provenance:
    return Provenance(data=f"assumed: {what}", date=DATE, error="unchecked", range="all shapes")


BLANK = Provenance(data="-", date=DATE, error="-", range="-")
"""Of a row that is only being tried."""
