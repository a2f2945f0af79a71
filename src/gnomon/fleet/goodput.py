"""Measured points of training jobs: step times by placement and batch, gradient noise by epoch; forecasts from them.

`Profiles.read(folder)` takes the tables of Pollux's artifact (`pollux_validation.csv`, `pollux_placements.csv`,
`pollux_scalability.csv`). `Profiled(profiles, adaptive)` are forecasts: with `adaptive` a job picks the batch with the
highest goodput (throughput x statistical efficiency) on what it holds, else it keeps its own. Work is progress in
examples of the smallest batch. Source: Qiao et al., OSDI 2021.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.fleet.job import Job
from gnomon.fleet.state import Allocation, PhaseForecasts
from gnomon.fleet.traces.rows import TraceRows, need

Floats = NDArray[np.float64]
Placement = tuple[int, ...]
"""Replicas on each node, in the order of ranks."""

Row = dict[str, str]
"""Cells by column."""
RUNS = ("batch_size", "progress", "iteration", "grad_sqr", "grad_var")
"""Columns of whole training runs, a row an epoch."""
PLACED = ("placement", "local_bsz", "step_time", "sync_time")
"""Columns of step times by placement: a digit for the replicas of each node."""
SCALED = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
"""Columns of step times on many nodes."""
_EPS = 1e-8
BATCHES = 50
"""Total batch sizes that an adaptive job looks at, in geometric steps, as Pollux's agent does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A whole training run at one batch size, a row an epoch."""

    progress: Floats
    """[epochs] training progress, cumulative."""
    iteration: Floats
    """[epochs] iterations done."""
    grad_sqr: Floats
    """[epochs] squared norm of the gradient."""
    grad_var: Floats
    """[epochs] variance of the gradient."""


@dataclass(frozen=True)
class Profile:
    """What was measured of one application."""

    name: str
    """Name of the application."""
    validation: Mapping[int, Validation]
    """By global batch size, ascending."""
    placements: Mapping[Placement, tuple[Floats, Floats, Floats]]
    """Placement -> (local batch sizes, step seconds, seconds of it that are communication)."""
    scaled: Mapping[int, Mapping[int, tuple[Floats, Floats, Floats]]]
    """Nodes -> replicas -> as in `placements`."""
    max_local: int
    """Largest local batch that fits in memory."""
    fixed_batch: int = 0
    """A batch that an adaptive job keeps all the same; 0 for none."""
    most: int = 64
    """Most replicas that it can use."""
    slowdown: float = 1.0
    """How many times longer its steps take than was measured."""
    _steps: dict[tuple[Placement, int], tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def epochs(self) -> int:
        """Epochs to the end."""
        return min(len(run.progress) for run in self.validation.values())

    @cached_property
    def progress(self) -> tuple[float, ...]:
        """Progress after 0, 1, 2 … epochs."""
        return (0.0, *(min(float(v.progress[e]) for v in self.validation.values()) for e in range(self.epochs)))

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes that were run to the end."""
        return tuple(self.validation)

    @cached_property
    def min_local(self) -> int:
        """Smallest local batch that was measured."""
        return int(min(sizes[0] for sizes, _, _ in self.placements.values()))

    def progress_at(self, epoch: int) -> float:
        """Progress at the end of so many epochs."""
        return self.progress[epoch]

    def _between(self, batch: float) -> tuple[int, int, float]:
        """The batch sizes around one, and the weight of the upper."""
        known = self.batches
        if not known[0] - _EPS <= batch <= known[-1] + _EPS:
            raise InputError(f"{self.name}: a batch of {batch:g} is not between {known[0]} and {known[-1]}")
        # A batch is a product of rounded numbers: one that differs from a measured size in its last digits alone is
        # that size.
        upper = next((size for size in known if size >= batch - _EPS), known[-1])
        lower = max(size for size in known if size <= batch + _EPS)
        return lower, upper, (batch - lower) / (upper - lower) if upper > lower else 0.0

    def noise(self, batch: float, epoch: int) -> tuple[float, float]:
        """(squared norm, variance) of the gradient."""
        lower, upper, share = self._between(batch)
        low, high = self.validation[lower], self.validation[upper]
        sqr = (1 - share) * low.grad_sqr[epoch] + share * high.grad_sqr[epoch]
        var = (1 - share) * low.grad_var[epoch] + share * high.grad_var[epoch]
        return float(sqr), float(var)

    def gain(self, batch: float, epoch: int) -> float:
        """Progress of one step: examples of the smallest batch that it is worth (the gradient noise scale)."""
        # With the noise scale phi = m0 var / sqr, m0 the smallest batch, the gain divided by `scale` is Pollux's
        # statistical efficiency (phi + m0) / (phi + m).
        sqr, var = self.noise(batch, epoch)
        scale = batch / self.batches[0]
        return (var + sqr) / (var / scale + sqr)

    def iterations(self, batch: float, epoch: int) -> float:
        """Steps done at the end of epoch number `epoch`, from 0."""
        lower, upper, share = self._between(batch)
        low, high = self.validation[lower].iteration[epoch], self.validation[upper].iteration[epoch]
        return float((1 - share) * low + share * high)

    def total(self, replicas: int, atomic: int, accumulated: int) -> int:
        """The global batch, within those that were run to the end."""
        return min(max(replicas * atomic * (accumulated + 1), self.batches[0]), self.batches[-1])

    def largest_local(self, placement: Placement) -> int:
        """Largest local batch that was measured on a placement, or else on no fewer nodes and replicas."""
        points = self.placements.get(_turned(placement))
        if points is not None:
            return min(int(points[0][-1]), self.max_local)
        nodes, replicas = len(placement), sum(placement)
        larger = (
            int(sizes[-1])
            for count, by_replicas in self.scaled.items()
            for many, (sizes, _, _) in by_replicas.items()
            if count >= nodes and many >= replicas
        )
        return min(max(larger, default=self.max_local), self.max_local)

    @cached_property
    def alone_per_s(self) -> float:
        """Examples a second of one device at the largest batch that was measured on it."""
        sizes, step, _ = self.placements[(1,)]
        return float(sizes[-1] / (step.max() * self.slowdown))

    def step_s(self, placement: Placement, local: int) -> tuple[float, float]:
        """(seconds of a step, of which communication) on a placement with a local batch."""
        turned = _turned(placement)
        key = (turned, local)
        times = self._steps.get(key)
        if times is None:
            step, sync = self._step_s(turned, local)
            times = self._steps[key] = step * self.slowdown, sync * self.slowdown
        return times

    def _step_s(self, placement: Placement, local: int) -> tuple[float, float]:
        points = self.placements.get(placement)
        if points is not None:
            return _at(points, local)
        nodes, replicas = len(placement), sum(placement)
        known = sorted(self.scaled)
        nodes = min(max(nodes, known[0]), known[-1])
        lower = max(count for count in known if count <= nodes)
        upper = min(count for count in known if count >= nodes)
        share = (nodes - lower) / (upper - lower) if upper > lower else 0.0
        # The same replicas a node at both ends.
        low, high = (self._scaled(count, replicas / len(placement) * count, local) for count in (lower, upper))
        return (1 - share) * low[0] + share * high[0], (1 - share) * low[1] + share * high[1]

    def _scaled(self, nodes: int, replicas: float, local: int) -> tuple[float, float]:
        known = sorted(self.scaled[nodes])
        replicas = min(max(replicas, known[0]), known[-1])
        lower = max(count for count in known if count <= replicas)
        upper = min(count for count in known if count >= replicas)
        share = (replicas - lower) / (upper - lower) if upper > lower else 0.0
        low, high = _at(self.scaled[nodes][lower], local), _at(self.scaled[nodes][upper], local)
        return (1 - share) * low[0] + share * high[0], (1 - share) * low[1] + share * high[1]


def _turned(placement: Placement) -> Placement:
    """A placement as the tables write it: the first of its rotations."""
    return min(placement[i:] + placement[:i] for i in range(len(placement)))


def _at(points: tuple[Floats, Floats, Floats], local: int) -> tuple[float, float]:
    sizes, step, sync = points
    return float(np.interp(local, sizes, step)), float(np.interp(local, sizes, sync))


@dataclass(frozen=True, slots=True)
class Profiles:
    """The measured profiles by application."""

    profiles: Mapping[str, Profile]
    """Name of an application -> what was measured of it."""

    @staticmethod
    def read(
        folder: str | Path, *, max_local: Mapping[str, int] | None = None, fixed: Mapping[str, int] | None = None
    ) -> Profiles:
        """Reads profiles from a folder with the three tables. max_local: largest local batch of an application, where
        it is less than was measured. fixed: applications that keep a batch, and run on one device."""
        base = Path(folder)
        tables = [
            rows_of(base / f"pollux_{name}.csv", ("app", *columns))
            for name, columns in (("validation", RUNS), ("placements", PLACED), ("scalability", SCALED))
        ]
        return Profiles.of_rows(*tables, where=str(base), max_local=max_local, fixed=fixed)

    @staticmethod
    def of_rows(
        validation: Sequence[Row],
        placements: Sequence[Row],
        scalability: Sequence[Row],
        *,
        where: str,
        max_local: Mapping[str, int] | None = None,
        fixed: Mapping[str, int] | None = None,
        slowdown: Mapping[str, float] | None = None,
    ) -> Profiles:
        """Makes profiles from rows with a column `app`, besides `RUNS`, `PLACED` and `SCALED`. where: their source, for
        errors."""
        runs_of, placements_of = _validation(validation), _placements(placements)
        scaled_of = _scaled(scalability, placements_of)
        out = {}
        for name, runs in runs_of.items():
            if name not in placements_of or name not in scaled_of:
                raise InputError(f"{where}: application {name!r} has no placements or no scalability")
            largest = int(max(sizes[-1] for sizes, _, _ in placements_of[name].values()))
            out[name] = Profile(
                name=name,
                validation=runs,
                placements=placements_of[name],
                scaled=scaled_of[name],
                max_local=(max_local or {}).get(name, largest),
                fixed_batch=(fixed or {}).get(name, 0),
                most=1 if name in (fixed or {}) else 64,
                slowdown=(slowdown or {}).get(name, 1.0),
            )
        return Profiles(out)

    def of(self, job: Job) -> Profile:
        """InputError for a job of an application that was not measured."""
        profile = self.profiles.get(job.model)
        if profile is None:
            raise InputError(f"job {job.id!r} is of {job.model!r}; measured are {', '.join(sorted(self.profiles))}")
        return profile

    def duration_s(self, model: str, devices: int, batch: int, steps: float) -> float:
        """How long an application takes on packed devices at a batch; NaN where it was not measured."""
        profile = self.profiles.get(model)
        if profile is None:
            return math.nan
        placement = packed(devices)
        atomic, accumulated = fixed_batch(profile, devices, batch)
        return sum(
            (profile.progress_at(epoch + 1) - profile.progress_at(epoch))
            * _step(profile, placement, atomic, accumulated)
            / profile.gain(profile.total(devices, atomic, accumulated), epoch)
            for epoch in range(profile.epochs)
        )


def packed(devices: int, per_node: int = 4) -> Placement:
    """Full nodes, then the rest."""
    full, rest = divmod(devices, per_node)
    return (per_node,) * full + ((rest,) if rest else ())


def fixed_batch(profile: Profile, replicas: int, batch: int) -> tuple[int, int]:
    """(local batch, steps that gradients are accumulated over besides) of a given global batch."""
    # _EPS: a quotient that is whole must not be rounded up for its last digit.
    local = math.ceil(batch / replicas - _EPS)
    accumulated = math.ceil(local / profile.max_local - _EPS) - 1
    if replicas == 1 and batch > profile.batches[0]:
        accumulated = max(1, accumulated)  # the noise of one gradient alone cannot be measured
    atomic = math.ceil(local / (accumulated + 1) - _EPS)
    return min(atomic, profile.batches[-1] // (replicas * (accumulated + 1))), accumulated


def goodput_at(profile: Profile, epoch: int, placement: Placement, atomic: int, accumulated: int) -> float:
    """Progress a second with a batch."""
    total = profile.total(sum(placement), atomic, accumulated)
    return profile.gain(total, epoch) / _step(profile, placement, atomic, accumulated)


def _step(profile: Profile, placement: Placement, atomic: int, accumulated: int) -> float:
    step, sync = profile.step_s(placement, atomic)
    # Steps that only accumulate do not communicate.
    return step + (step - sync) * accumulated


@dataclass(frozen=True)
class Profiled(PhaseForecasts):
    """Implements `Forecasts` from profiles."""

    profiles: Profiles
    """What was measured, by application."""
    adaptive: bool = False
    """Whether jobs choose their batch (Pollux), or keep the one they came with."""
    _memo: dict[tuple[str, int, int, Placement], float] = field(default_factory=dict, compare=False, repr=False)
    _remaining_s: dict[tuple[str, int, int, Placement], float] = field(default_factory=dict, compare=False, repr=False)
    _packed: dict[tuple[str, int, int, int, int], Floats] = field(default_factory=dict, compare=False, repr=False)

    def goodput(self, job: Job, epoch: int, placement: Placement) -> float:
        """Progress a second in an epoch."""
        profile = self.profiles.of(job)
        free = self.adaptive and not profile.fixed_batch
        # 0: the best batch does not depend on the one that the job came with.
        key = (job.model, 0 if free else profile.fixed_batch if self.adaptive else job.batch_size, epoch, placement)
        rate = self._memo.get(key)
        if rate is None:
            rate = self._best(profile, epoch, placement) if free else self._goodput(profile, key[1], epoch, placement)
            self._memo[key] = rate
        return rate

    def _goodput(self, profile: Profile, batch: int, epoch: int, placement: Placement) -> float:
        return goodput_at(profile, epoch, placement, *fixed_batch(profile, sum(placement), batch))

    def _best(self, profile: Profile, epoch: int, placement: Placement) -> float:
        """The highest goodput over batch sizes."""
        replicas = sum(placement)
        # More replicas than the largest batch has room for, each with its smallest local batch, make no progress: rate
        # 0.
        least = max(profile.batches[0], profile.min_local * replicas)
        if least > profile.batches[-1]:
            return 0.0
        best = 0.0
        seen = set()
        # Evenly in logarithms: goodput changes with the ratio of batches.
        for batch in np.geomspace(least, profile.batches[-1], BATCHES):
            local = float(batch) / replicas
            accumulated = math.ceil(local / profile.max_local - _EPS) - 1
            if replicas == 1 and local > profile.batches[0] + _EPS:
                accumulated = max(1, accumulated)
            atomic = math.ceil(local / (accumulated + 1) - _EPS)
            if not profile.min_local <= atomic <= profile.max_local or (atomic, accumulated) in seen:
                continue
            seen.add((atomic, accumulated))
            best = max(best, goodput_at(profile, epoch, placement, atomic, accumulated))
        return best

    def epoch(self, job: Job, done_s: float) -> int:
        """The epoch that a job is in."""
        progress = self.profiles.of(job).progress
        # A job that has just ended an epoch is in the next, whatever the last digits of its work.
        reached = (done_s / job.work_s + 1e-9) * progress[-1]
        # progress[0] is 0, so the boundaries that were reached are one more than the epochs done. A job at its very end
        # stays in its last epoch.
        return min(bisect_right(progress, reached), len(progress) - 1) - 1

    def phase(self, job: Job, done_s: float, allocation: Allocation) -> tuple[float, float]:
        """Returns (rate, until) as `Forecasts` does; a rate holds for an epoch."""
        profile = self.profiles.of(job)
        # Work is in seconds and progress in examples. Both run from 0 to the end of the job, so the one is the other by
        # a factor.
        total = profile.progress_at(profile.epochs)
        epoch = self.epoch(job, done_s)
        goodput = self.goodput(job, epoch, tuple(count for _, count in allocation))
        return goodput * job.work_s / total, profile.progress_at(epoch + 1) / total * job.work_s

    def packed(self, job: Job, done_s: float, node: int, per_node: int, most: int) -> Floats:
        """Returns the rates on 1 to `most` devices; one row serves all jobs of an application that are in the same
        epoch."""
        profile, epoch = self.profiles.of(job), self.epoch(job, done_s)
        key = (job.model, 0 if self.adaptive else job.batch_size, epoch, per_node, most)
        goodputs = self._packed.get(key)
        if goodputs is None:
            shapes = (packed(count, per_node) for count in range(1, most + 1))
            goodputs = self._packed[key] = np.array([self.goodput(job, epoch, shape) for shape in shapes])
        scaled: Floats = goodputs * (job.work_s / profile.progress_at(profile.epochs))
        return scaled

    def limits(self, job: Job) -> tuple[int, int]:
        """Allows any number of devices, as long as the smallest local batch allows it."""
        profile = self.profiles.of(job)
        batch = profile.batches[-1] if self.adaptive else job.batch_size
        return 1, max(1, min(profile.most, batch // profile.min_local))

    def remaining_s(self, job: Job, done_s: float, allocation: Allocation) -> float:
        """Returns the seconds of whole epochs that are left, as Optimus counts them."""
        profile = self.profiles.of(job)
        placement = tuple(count for _, count in allocation)
        last, now = profile.epochs - 1, self.epoch(job, done_s)
        key = (job.model, job.batch_size, now, placement)
        remaining = self._remaining_s.get(key)
        if remaining is None:
            size = job.batch_size
            iterations = profile.iterations(size, last) - profile.iterations(size, now) if now < last else 1.0
            step = _step(profile, placement, *fixed_batch(profile, sum(placement), size))
            remaining = self._remaining_s[key] = iterations * step
        return remaining


def rows_of(path: Path, columns: Sequence[str]) -> list[Row]:
    """Rows of a table of measured points, whose columns are numbers, but for `app`. InputError for what is damaged."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read measured points {str(path)!r}: {error}") from error
    rows = TraceRows(str(path))
    out = []
    for line, row in rows.table(text):
        need(str(path), list(row), columns)
        for column in columns:
            if column != "app":
                rows.number(line, row, column)
        out.append(row)
    rows.jobs(())
    return out


def _validation(rows: Sequence[Row]) -> dict[str, dict[int, Validation]]:
    by_app: dict[str, dict[int, list[tuple[float, ...]]]] = {}
    for row in rows:
        epoch = tuple(float(row[column]) for column in RUNS[1:])
        by_app.setdefault(row["app"], {}).setdefault(int(row["batch_size"]), []).append(epoch)
    out = {}
    for app, runs in by_app.items():
        arrays = {batch: np.array(epochs) for batch, epochs in sorted(runs.items())}
        out[app] = {
            batch: Validation(progress=a[:, 0], iteration=a[:, 1], grad_sqr=a[:, 2], grad_var=a[:, 3])
            for batch, a in arrays.items()
        }
    return out


def _placements(rows: Sequence[Row]) -> dict[str, dict[Placement, tuple[Floats, Floats, Floats]]]:
    by_app: dict[str, dict[Placement, list[tuple[float, float, float]]]] = {}
    for row in rows:
        key = tuple(int(digit) for digit in row["placement"].strip())
        point = float(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])
        by_app.setdefault(row["app"], {}).setdefault(key, []).append(point)
    return {
        app: {key: _columns(points) for key, points in by_placement.items()} for app, by_placement in by_app.items()
    }


def _columns(points: list[tuple[float, float, float]]) -> tuple[Floats, Floats, Floats]:
    array = np.array(sorted(points))
    return array[:, 0], array[:, 1], array[:, 2]


def _scaled(
    rows: Sequence[Row], placements: Mapping[str, Mapping[Placement, tuple[Floats, Floats, Floats]]]
) -> dict[str, dict[int, dict[int, tuple[Floats, Floats, Floats]]]]:
    """Measured seconds by nodes and replicas: from the table of scalability for many nodes, and for few as the mean
    over placements."""
    by_app: dict[str, dict[int, dict[int, list[tuple[float, float, float]]]]] = {}
    for row in rows:
        point = float(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])
        by_nodes = by_app.setdefault(row["app"], {}).setdefault(int(row["num_nodes"]), {})
        by_nodes.setdefault(int(row["num_replicas"]), []).append(point)
    out: dict[str, dict[int, dict[int, tuple[Floats, Floats, Floats]]]] = {}
    for app, by_node in by_app.items():
        out[app] = {
            nodes: {replicas: _columns(points) for replicas, points in by_count.items()}
            for nodes, by_count in by_node.items()
        }
        few: dict[int, dict[int, list[tuple[Floats, Floats, Floats]]]] = {}
        for key, points in placements.get(app, {}).items():
            # A placement `31` is three devices on one node and one on another.
            few.setdefault(len(key), {}).setdefault(sum(key), []).append(points)
        for nodes, by_replicas in few.items():
            out[app].setdefault(nodes, {}).update({r: _mean(many) for r, many in by_replicas.items()})
    return out


def _mean(many: Sequence[tuple[Floats, Floats, Floats]]) -> tuple[Floats, Floats, Floats]:
    sizes = many[0][0]
    # At the local batches of the first, where all are interpolated.
    step = np.mean([np.interp(sizes, points[0], points[1]) for points in many], axis=0)
    sync = np.mean([np.interp(sizes, points[0], points[2]) for points in many], axis=0)
    return sizes, step, sync
