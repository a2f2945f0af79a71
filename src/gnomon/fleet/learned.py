"""Speeds that jobs learn as they run, in place of speeds that are known: what Pollux and Sia have.

Two sides of a replay. `LearnedForecasts` is what the policy believes: from the steps that a job has timed, `fit`
makes a throughput model for each kind of device; with the gradient noise of its last step that gives goodput at the
best batch. On a kind that the job never had, it is as fast as on one that it had, times a ratio that is measured on
single devices; before it ran at all it scales linearly. `LearnedExecution` is what then happens: the job trains, at
its real speed, at the batch that its model prefers, which need not be the best one. The replay tells
`LearnedForecasts.ran` what ran. Leaves out the throughput model itself (`throughput`). Sources: Qiao et al., OSDI
2021; Jayaram Subramanya et al., SOSP 2023, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gnomon.fleet.goodput import BATCHES, Placement, Profile, fixed_batch, goodput_at
from gnomon.fleet.job import Job
from gnomon.fleet.kinds import ByKind
from gnomon.fleet.state import Allocation, PhaseForecasts, devices_of
from gnomon.fleet.throughput import Floats, Point, fit

Counts = NDArray[np.int64]
_EPS = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What a job has measured of itself so far."""

    points: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    """Kind of device -> steps that it timed there, each placement and batch once."""
    noise: tuple[float, float] = (0.0, 0.0)
    """(squared norm, variance) of the gradient in its last step."""

    def after(self, kind: str, point: Point, noise: tuple[float, float]) -> Experience:
        """The experience with one more step, measured on a kind of device."""
        own = self.points.get(kind, ())
        if any(old[:3] == point[:3] for old in own):
            return Experience(points=self.points, noise=noise)
        return Experience(points={**self.points, kind: tuple(sorted((*own, point)))}, noise=noise)


@dataclass(frozen=True, slots=True)
class BestBatch:
    """The goodput at the best batch, and that batch, by the shapes (nodes, replicas) that were asked for."""

    goodput: Floats
    """Progress a second, in steps of the initial batch size; 0 where no batch is possible."""
    local: Counts
    """Sequences of a microbatch on a replica."""
    accumulated: Counts
    """Microbatches a step before the last one (gradient accumulation)."""


def best_batch(
    profile: Profile,
    points: tuple[Point, ...],
    noise: tuple[float, float],
    nodes: Counts,
    replicas: Counts,
    largest: int,
) -> BestBatch:
    """The batch of the most goodput for each shape, by what these points say. largest: local batch that fits in memory.

    Goodput is throughput times statistical efficiency (Pollux, section 3): with the squared norm s and variance v
    of the gradient at the initial batch B0, a step at batch B is worth (v + s) / (v B0 / B + s) steps at B0.
    """
    model, (grad_square, grad_variance) = fit(points), noise
    first, last = profile.batches[0], profile.batches[-1]
    # (BATCHES, shapes): each shape begins with the least batch that its replicas can have.
    batch = np.geomspace(np.maximum(first, profile.min_local * replicas), last, BATCHES)
    each = batch / replicas
    accumulated = np.ceil(each / largest - _EPS).astype(np.int64) - 1
    # The noise is estimated from the difference between replicas' gradients, or between microbatches: one replica
    # beyond the initial batch needs two of them.
    single = (replicas == 1) & (each > first + _EPS)
    accumulated = np.where(single, np.maximum(accumulated, 1), accumulated)
    local = np.ceil(each / (accumulated + 1) - _EPS).astype(np.int64)
    compute = model.compute_s(local)
    seconds = accumulated * compute + model.step_s(nodes, replicas, compute)
    noise_at_batch = grad_variance / (replicas * local * (accumulated + 1) / first) + grad_square
    known = noise_at_batch > 0  # no noise measured yet: every step counts as one
    efficiency = np.where(known, (grad_variance + grad_square) / np.where(known, noise_at_batch, 1.0), 1.0)
    goodput = efficiency / seconds
    goodput = np.where((profile.min_local <= local) & (local <= largest), goodput, 0.0)
    best = goodput.argmax(axis=0), np.arange(len(replicas))
    return BestBatch(goodput[best], local[best], accumulated[best])


@dataclass(frozen=True)
class LearnedForecasts(PhaseForecasts):
    """Forecasts from what jobs have measured so far: the interface `Forecasts`."""

    actual: ByKind
    """The real speeds, on every kind of device: what steps are timed by, and what nobody asks for a forecast."""
    experience: dict[str, Experience] = field(default_factory=dict)
    """Job -> what it has measured; only `ran` writes it."""
    _memo: dict[tuple[object, ...], BestBatch] = field(default_factory=dict, compare=False, repr=False)
    _ratios: dict[tuple[str, str, str], float] = field(default_factory=dict, compare=False, repr=False)

    def fresh(self) -> LearnedForecasts:
        """One that knows of no job yet."""
        return LearnedForecasts(self.actual)

    @property
    def execution(self) -> LearnedExecution:
        """What happens while jobs train at the batches that these forecasts prefer."""
        return LearnedExecution(machines=self.actual.machines, kinds=self.actual.kinds, learned=self)

    def ran(self, job: Job, done_s: float, allocation: Allocation) -> None:
        """Notes a step that a job timed: on an allocation, at the batch that it prefers there, with `done_s` work
        done."""
        kind, shape = self.actual.kind(allocation[0][0]), tuple(count for _, count in allocation)
        profiled = self.actual.kinds[kind]
        profile, epoch = profiled.profiles.of(job), profiled.epoch(job, done_s)
        local, accumulated = self.batch(job, kind, shape)
        point = Point(len(shape), sum(shape), local, *profile.step_s(shape, local))
        noise = profile.noise(profile.total(sum(shape), local, accumulated), epoch)
        self.experience[job.id] = self.experience.get(job.id, Experience()).after(kind, point, noise)

    def batch(self, job: Job, kind: str, shape: Placement) -> tuple[int, int]:
        """(local batch, steps that are accumulated over besides) that a job trains with on a placement: the smallest
        batch until it has timed a step on that kind of device, then what is best by what it timed."""
        profile, replicas = self.actual.kinds[kind].profiles.of(job), sum(shape)
        experience = self.experience.get(job.id)
        points = experience.points.get(kind) if experience else None
        if profile.fixed_batch or experience is None or points is None:
            smallest = max(profile.batches[0], profile.min_local * replicas)
            return fixed_batch(profile, replicas, profile.fixed_batch or smallest)
        largest = profile.largest_local(shape)
        key = (job.model, kind, points, experience.noise, len(shape), replicas, largest)
        best = self._memo.get(key)
        if best is None:
            at = np.array([len(shape)]), np.array([replicas])
            best = self._memo[key] = best_batch(profile, points, experience.noise, *at, largest)
        local, accumulated = int(best.local[0]), int(best.accumulated[0])
        return min(local, profile.batches[-1] // (replicas * (accumulated + 1))), accumulated

    def rates(self, job: Job, kind: str, counts: Counts, nodes: Counts | None = None) -> Floats:
        """Seconds of work a second on so many devices of a kind. nodes: they are on; default as few as hold them."""
        experience = self.experience.get(job.id)
        if experience is None:
            return counts / job.devices
        base, ratio = kind, 1.0
        if kind not in experience.points:
            base = next(other for other in self.actual.kinds if other in experience.points)
            # The nodes are of the kind that is asked about; nodes of the other kind hold another number of devices.
            ratio, nodes = self._ratio(job, kind, base), None
        profiled = self.actual.kinds[base]
        profile = profiled.profiles.of(job)
        if nodes is None:
            nodes = -(-counts // self.actual.per_node(base))
        key = (job.model, base, experience.points[base], experience.noise, nodes.tobytes(), counts.tobytes())
        best = self._memo.get(key)
        if best is None:
            best = self._memo[key] = best_batch(
                profile, experience.points[base], experience.noise, nodes, counts, profile.max_local
            )
        out: Floats = best.goodput * (ratio * job.work_s / profile.progress_at(profile.epochs))
        return out

    def _ratio(self, job: Job, kind: str, base: str) -> float:
        """How many times faster one device of a kind is than one of another, at its largest batch."""
        key = (job.model, kind, base)
        ratio = self._ratios.get(key)
        if ratio is None:
            fast, slow = (self.actual.kinds[name].profiles.of(job).alone_per_s for name in (kind, base))
            ratio = self._ratios[key] = fast / slow
        return ratio

    def phase(self, job: Job, done_s: float, allocation: Allocation) -> tuple[float, float]:
        """Returns (rate, until) as `Forecasts` does; as far as is known, a rate holds for ever."""
        kind, count = self.actual.kind(allocation[0][0]), devices_of(allocation)
        return float(self.rates(job, kind, np.array([count]), np.array([len(allocation)]))[0]), math.inf

    def packed(self, job: Job, done_s: float, node: int, per_node: int, most: int) -> Floats:
        """Returns the rates on 1 to `most` devices, each on as few nodes as hold them."""
        counts = np.arange(1, most + 1)
        return self.rates(job, self.actual.kind(node), counts, -(-counts // per_node))

    def limits(self, job: Job) -> tuple[int, int]:
        """Returns the limits that the known forecasts give."""
        return self.actual.limits(job)

    def memory_bytes(self, job: Job, devices: int) -> float:
        """Returns the memory that the known forecasts give."""
        return self.actual.memory_bytes(job, devices)

    def resize_s(self, job: Job, devices: int) -> float:
        """Returns the seconds of a resize that the known forecasts give."""
        return self.actual.resize_s(job, devices)

    def speed_share(self, job: Job, other: Job) -> float:
        """Returns the share of speed that the known forecasts give."""
        return self.actual.speed_share(job, other)


@dataclass(frozen=True)
class LearnedExecution(ByKind):
    """What happens while jobs learn: a job trains at its real speed, at the batch that it prefers by what it has
    timed."""

    learned: LearnedForecasts

    def phase(self, job: Job, done_s: float, allocation: Allocation) -> tuple[float, float]:
        """Returns (rate, until) as `Forecasts` does; a rate holds for an epoch."""
        profiled, shape = self.on(allocation[0][0]), tuple(count for _, count in allocation)
        profile, epoch = profiled.profiles.of(job), profiled.epoch(job, done_s)
        total = profile.progress_at(profile.epochs)
        batch = self.learned.batch(job, self.kind(allocation[0][0]), shape)
        goodput = goodput_at(profile, epoch, shape, *batch)
        return goodput * job.work_s / total, profile.progress_at(epoch + 1) / total * job.work_s
