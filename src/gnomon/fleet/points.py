"""Forecasts from points: speeds of a model on numbers of devices of a kind, measured or predicted by the planner.

`read_points(path)` takes a table `job_type, scale_factor, gpu, steps_per_s` (Gavel's; `model, devices, device, rate` is
the same). `MeasuredPoints` are forecasts from points, and from the stated curve for models that have none. Between
points a speed is interpolated in logarithms; beyond them it stays what it is at the last, so that nothing is promised.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.fleet.forecast import NEVER, Curve
from gnomon.fleet.job import Job
from gnomon.fleet.machines import Machines
from gnomon.fleet.state import Allocation, PhaseForecasts, devices_of, packed_on
from gnomon.fleet.traces.rows import TraceRows, need
from gnomon.hardware import catalogue

Points = Mapping[tuple[str, str], Sequence[tuple[int, float]]]
"""(model, kind of device) -> (devices, steps a second), by devices."""

Key = TypeVar("Key", bound=tuple[str, ...])
Value = TypeVar("Value")
_NAMES = (("job_type", "scale_factor", "gpu", "steps_per_s"), ("model", "devices", "device", "rate"))


def read_points(path: str | Path) -> tuple[Points, tuple[str, ...]]:
    """Reads measured points; returns (points, notes). Rows of speed 0 did not fit; rows of devices spread over nodes
    (`…_unconsolidated`) are passed over. InputError with the line for what cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise InputError(f"cannot read points {str(path)!r}: {reason}") from error
    rows = TraceRows(str(path))
    by_model: dict[tuple[str, str], dict[int, float]] = {}
    skipped = empty = 0
    for line, row in rows.table(text):
        names = _NAMES[0] if "job_type" in row else _NAMES[1]
        need(str(path), list(row), names)
        model, kind = row[names[0]].strip(), row[names[2]].strip().lower()
        count, rate = rows.count(line, row, names[1]), rows.number(line, row, names[3])
        if kind.endswith("_unconsolidated"):
            skipped += 1
        elif rate == 0:
            empty += 1
        else:
            device = catalogue.find_device(kind)
            by_count = by_model.setdefault((model, device.name if device else kind), {})
            if count in by_count:
                rows.problem(line, f"{model!r} on {count} {kind} is there twice")
            by_count[count] = rate
    rows.jobs(())
    if not by_model:
        raise InputError(f"{path}: no point of any model")
    notes = []
    if skipped or empty:
        notes.append(f"{path}: {skipped} points of devices spread over nodes and {empty} of speed 0 were passed over")
    return {key: tuple(sorted(speeds.items())) for key, speeds in by_model.items()}, tuple(notes)


def read_pairs(path: str | Path) -> Mapping[tuple[str, str, str], tuple[float, float]]:
    """(model, other, kind of device) -> steps a second of both when they share devices: a table
    `job_type_a, job_type_b, gpu, steps_per_s_a, steps_per_s_b` (Gavel's)."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise InputError(f"cannot read pairs {str(path)!r}: {reason}") from error
    rows = TraceRows(str(path))
    out: dict[tuple[str, str, str], tuple[float, float]] = {}
    for line, row in rows.table(text):
        need(str(path), list(row), ("job_type_a", "job_type_b", "gpu", "steps_per_s_a", "steps_per_s_b"))
        a, b, kind = (row[key].strip() for key in ("job_type_a", "job_type_b", "gpu"))
        of_a, of_b = rows.number(line, row, "steps_per_s_a"), rows.number(line, row, "steps_per_s_b")
        device = catalogue.find_device(kind.lower())
        name = device.name if device else kind.lower()
        out[a, b, name], out[b, a, name] = (of_a, of_b), (of_b, of_a)
    rows.jobs(())
    return out


def of_pools(table: Mapping[Key, Value], machines: Machines) -> Mapping[Key, Value]:
    """What was measured on a family of devices, as `v100`, for every kind of it that a pool has and that was not
    measured itself, as `v100-sxm-16gb`, besides. table: of points or of pairs; the kind is the last part of a key."""
    known = {key[-1] for key in table}
    out = dict(table)
    for device in {pool.device for pool in machines.pools} - known:
        for key, value in table.items():
            if device.startswith(f"{key[-1]}-"):
                out[cast(Key, (*key[:-1], device))] = value
    return out


def speed_at(points: Sequence[tuple[int, float]], devices: int) -> float:
    """Steps a second on a number of devices."""
    counts = [count for count, _ in points]
    at = bisect_left(counts, devices)
    if at < len(points) and counts[at] == devices:
        return points[at][1]
    if at == 0:
        return points[0][1] * devices / counts[0]  # fewer devices than measured: no better than linear
    if at == len(points):
        return points[-1][1]
    (low, slow), (high, fast) = points[at - 1], points[at]
    share = math.log(devices / low) / math.log(high / low)
    return math.exp(math.log(slow) * (1 - share) + math.log(fast) * share)


@dataclass(frozen=True)
class MeasuredPoints(PhaseForecasts):
    """Forecasts from points, with the stated curve behind them: the interface `Forecasts`."""

    points: Points
    """Steps a second that were measured, by model, kind of device and devices."""
    curve: Curve
    """What is taken where nothing was measured."""
    reference: str
    """Kind of device that a trace's durations are of, where it does not say."""
    memory: Mapping[tuple[str, str], Sequence[tuple[int, float]]] = field(default_factory=dict)
    """(model, kind of device) -> (devices, bytes of each)."""
    pairs: Mapping[tuple[str, str, str], tuple[float, float]] = field(default_factory=dict)
    """As `read_pairs` returns."""
    _memo: dict[tuple[str, str, int, int, str], float] = field(default_factory=dict, compare=False, repr=False)
    _packed: dict[tuple[str, str, int, str, int, int], NDArray[np.float64]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def phase(self, job: Job, done_s: float, allocation: Allocation) -> tuple[float, float]:
        """Returns (rate, until) as `Forecasts` does, from the measured points where the job's model has some."""
        cluster = self.curve.machines
        kind = cluster.pools[cluster.pool_of[allocation[0][0]]].device
        count = devices_of(allocation)
        key = (job.model, job.device, job.devices, count, kind)
        rate = self._memo.get(key)
        if rate is None:
            here = self.points.get((job.model, kind))
            base = self.points.get((job.model, job.device or self.reference))
            if here is None or base is None:
                return self.curve.phase(job, done_s, allocation)
            rate = self._memo[key] = speed_at(here, count) / speed_at(base, job.devices)
        return rate, NEVER

    def packed(self, job: Job, done_s: float, node: int, per_node: int, most: int) -> NDArray[np.float64]:
        """Returns the rates on 1 to `most` devices packed on nodes as `node`."""
        cluster = self.curve.machines
        kind = cluster.pools[cluster.pool_of[node]].device
        key = (job.model, job.device, job.devices, kind, per_node, most)
        rates = self._packed.get(key)
        if rates is None:
            counts = range(1, most + 1)
            rates = np.array([self.phase(job, 0.0, packed_on(count, node, per_node))[0] for count in counts])
            self._packed[key] = rates
        return rates

    def limits(self, job: Job) -> tuple[int, int]:
        """Returns the limits that the curve gives."""
        return self.curve.limits(job)

    def memory_bytes(self, job: Job, devices: int) -> float:
        """Returns the memory measured, or else the curve's."""
        points = self.memory.get((job.model, job.device or self.reference))
        return speed_at(points, devices) if points else self.curve.memory_bytes(job, devices)

    def speed_share(self, job: Job, other: Job) -> float:
        """Returns the share of speed measured for the two on one device, or else the curve's."""
        kind = job.device or self.reference
        both, one_s = self.pairs.get((job.model, other.model, kind)), self.points.get((job.model, kind))
        if both is None or one_s is None:
            return self.curve.speed_share(job, other)
        # Never 0, with which a job would never end.
        return min(both[0] / speed_at(one_s, 1), 1.0) or 1e-6

    def duration_s(self, model: str, devices: int, batch: int, steps: float) -> float:
        """Seconds of so many steps on the reference device; NaN for a model without points."""
        points = self.points.get((model, self.reference))
        return steps / speed_at(points, devices) if points else math.nan
