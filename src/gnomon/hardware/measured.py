"""What was measured on one machine: seconds of operations by size, with their spread, and when, where, by what.

`Measured` is a frozen fact about a device, written by `gnomon calibrate` and carried by `Device.measured`. A `Table`
has the seconds of one operation on a grid of sizes, with all processes at work at once, and alone. Leaves out how a
size between two points is priced (`gnomon.prices.measured`), and measuring (`gnomon.runtime.calibrate.calibrate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from gnomon.errors import InputError

NOISY_SPREAD = 0.15
"""Relative interquartile range of repeats, at the median of all figures, from which a machine is called noisy."""


def _median(values: Sequence[float]) -> float:
    """The median of at least one value. The module `statistics` would load random and OpenSSL for it."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Sizes of one kind that a table has seconds for."""

    name: str
    """`m`, `rows`, `bytes` …"""
    sizes: tuple[int, ...]
    """Ascending."""

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise InputError(f"axis {self.name!r}: sizes must ascend from 1 or more, got {self.sizes[:8]}")


def grid_points(axes: tuple[Axis, ...]) -> Iterator[dict[str, int]]:
    """Sizes by axis of every point of a grid, last axis fastest."""
    for sizes in product(*(axis.sizes for axis in axes)):
        yield {axis.name: size for axis, size in zip(axes, sizes, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Seconds of one operation on a grid of sizes."""

    what: str
    """`matmul`, `norm`, `all_reduce` …"""
    dtype: str
    """Of its operands; empty where it makes no difference."""
    direction: str
    """`forward`, `input_grad`, `weight_grad`, `backward`; empty where it has none."""
    axes: tuple[Axis, ...]
    """Of the grid; none for a single figure."""
    seconds: tuple[float, ...]
    """Median of the repeats with every process at work at once; last axis fastest."""
    alone_s: tuple[float, ...]
    """The same with the other processes idle; empty where it was not measured, or means nothing (communication)."""
    spread: tuple[float, ...]
    """Interquartile range of the repeats over their median, point by point."""

    def __post_init__(self) -> None:
        what = f"measured {self.what} {self.dtype} {self.direction}".rstrip()
        points = math.prod(len(axis.sizes) for axis in self.axes)
        if not len(self.seconds) == len(self.spread) == points or len(self.alone_s) not in (0, points):
            raise InputError(
                f"{what}: a grid of {points} points has {len(self.seconds)} seconds, {len(self.alone_s)} alone and "
                f"{len(self.spread)} spreads"
            )
        if not all(0 < value < math.inf for value in (*self.seconds, *self.alone_s)):
            raise InputError(f"{what}: seconds must be positive and finite")
        if not all(0 <= value < math.inf for value in self.spread):
            raise InputError(f"{what}: spreads must be finite and not negative")

    def points(self) -> Iterator[dict[str, int]]:
        """Sizes by axis of every point, last axis fastest."""
        yield from grid_points(self.axes)

    def figures(self) -> Iterator[tuple[dict[str, int], float]]:
        """Every point with its seconds, then every point with those alone, where there are any."""
        for column in (self.seconds, self.alone_s):
            yield from zip(self.points(), column, strict=False)

    @property
    def key(self) -> tuple[str, str, str]:
        """What the table is looked up by."""
        return self.what, self.dtype, self.direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything that one calibration measured."""

    host: str
    """Name of the machine."""
    date: str
    """When it began, UTC: `2026-11-21T07:40:12Z`."""
    software: str
    """What ran: `torch 2.13.0, gloo`."""
    processes: int
    """That worked at once."""
    threads: int
    """Of each."""
    tables: tuple[Table, ...]
    """One for each operation, number format and direction."""
    lost_beside: float | None = None
    """Seconds that computing loses to each second of a collective beside it: near 1 where every core has a process that
    computes, near 0 where cores are idle. None where it was not measured: calibrations before 2026-11-26."""

    def __post_init__(self) -> None:
        if self.lost_beside is not None and not 0 <= self.lost_beside < math.inf:
            raise InputError(f"lost_beside must be 0 or more, got {self.lost_beside}")
        if not (self.host and self.date and self.software):
            raise InputError("a calibration must say its host, date and software")
        if min(self.processes, self.threads) < 1:
            raise InputError(
                f"a calibration has 1 process and 1 thread at least, not {self.processes} x {self.threads}"
            )
        keys = [table.key for table in self.tables]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise InputError(f"a calibration has two tables of {' '.join(twice[0]).rstrip()}; keep one")

    def __hash__(self) -> int:
        # Devices are keys of every memo: thousands of figures are not hashed each time; equality still compares them.
        return hash((self.host, self.date, self.software, self.processes, len(self.tables)))

    @property
    def spread(self) -> float:
        """Spread of the repeats, at the median of all figures."""
        spreads = [value for table in self.tables for value in table.spread]
        return _median(spreads) if spreads else 0.0

    @property
    def noisy(self) -> bool:
        """Whether the machine did other things meanwhile: `spread` over NOISY_SPREAD."""
        return self.spread > NOISY_SPREAD

    @property
    def alone(self) -> Measured:
        """The same machine with the other processes idle, where that was measured."""
        tables = tuple(replace(t, seconds=t.alone_s or t.seconds, alone_s=()) for t in self.tables)
        return replace(self, processes=1, tables=tables)

    @property
    def note(self) -> str:
        """One line, to be shown beside a prediction."""
        text = f"measured on {self.host}, {self.date}, {self.software}, spread {100 * self.spread:.0f} %"
        return text + ("; the machine was noisy" if self.noisy else "")


def merged(runs: tuple[Measured, ...]) -> Measured:
    """One calibration from several of the same grids: the median of each figure. InputError where they differ."""
    if not runs:
        raise InputError("there is no calibration to merge; give at least one")
    first = runs[0]
    for other in runs[1:]:
        if [(t.key, t.axes) for t in other.tables] != [(t.key, t.axes) for t in first.tables]:
            raise InputError("calibrations of different operations or sizes cannot be merged; use one version's")
    tables = []
    for same in zip(*(run.tables for run in runs), strict=True):
        columns = {
            name: tuple(_median(values) for values in zip(*(getattr(t, name) for t in same), strict=True))
            for name in ("seconds", "alone_s", "spread")
        }
        mine = same[0]
        tables.append(Table(what=mine.what, dtype=mine.dtype, direction=mine.direction, axes=mine.axes, **columns))
    return replace(first, tables=tuple(tables))
