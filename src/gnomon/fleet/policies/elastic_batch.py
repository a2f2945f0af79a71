"""ElasticBatch: jobs get MIG slices by what they are worth, and every device is cut into legal slices only.

`elastic_batch` places jobs on slices, the largest profile first, on the device that has least left over; a device's
slices are always legal, and no device is opened while another has a place. `cover` chooses the slices and batch sizes
that serve rates of requests within a latency with the fewest devices, from a table of throughput and latency. Source:
TPDS 2024 (ElasticBatch); geometries from NVIDIA's MIG user guide (`gnomon.fleet.mig`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gnomon.errors import InputError
from gnomon.fleet.mig import PLACES, Geometry, memory_share, profile_of
from gnomon.fleet.state import Decision, Forecasts, Policy, State


def elastic_batch(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Slices for those that wait, the largest first."""
    devices = [n for i, pool in enumerate(state.machines.pools) if pool.mig for n in state.machines.nodes_of(i)]
    cut = {node: Geometry() for node in devices}
    for active in state.running:
        for node, _ in active.allocation:
            if node in cut:
                cut[node].slices[active.job.id] = active.slice_at
    out = []
    for active in sorted(state.queue, key=lambda active: (-int(profile_of(active.job)[0]), active.index)):
        name = profile_of(active.job)
        compute = int(name[0])
        open_ = [n for n in devices if state.free[n] and cut[n].start(name) is not None]
        if not open_:
            continue
        # Best fit: the device with most slices taken, so that empty ones stay whole for large profiles.
        node = max(open_, key=lambda n: (bin(cut[n].mask()).count("1"), -n))
        cut[node].add(active.job.id, name)
        out.append(Decision(active.job.id, ((node, compute),)))
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """What a slice does with a batch of one bucket of inputs."""

    profile: str
    """Name of the slice of a device (MIG profile)."""
    batch: int
    """Inputs at a time."""
    per_s: float
    """Inputs a second."""
    latency_s: float
    """Seconds of such a batch."""


def cover(
    demand: Mapping[str, float], points: Mapping[str, Sequence[BatchPoint]], slo_s: float
) -> tuple[tuple[tuple[str, BatchPoint], ...], ...]:
    """Slices of each device that serve every bucket's rate within the latency, on few devices.

    Of each bucket the point with most throughput for its share of a device (of compute or of memory slices, whichever
    is more) is used as often as its rate needs, and the last slice is the smallest that is enough; slices go, the
    largest first, on the first device where they are legal.
    InputError for a bucket that no slice serves in time.
    """
    chosen_points: list[tuple[str, BatchPoint]] = []
    for bucket, rate in demand.items():
        usable = [p for p in points[bucket] if p.latency_s <= slo_s and p.per_s > 0 and p.profile in PLACES]
        if not usable:
            raise InputError(f"no slice serves {bucket!r} within {slo_s:g} s")
        best = max(usable, key=lambda p: (p.per_s / _part(p.profile), -int(p.profile[0])))
        # 1e-9: a rate that is a whole number of slices must not need one more for its last digit.
        whole = math.floor(rate / best.per_s + 1e-9)
        chosen_points += [(bucket, best)] * whole
        rest = rate - whole * best.per_s
        if rest > 1e-9 * rate:
            enough = [p for p in usable if p.per_s >= rest]
            chosen_points.append((bucket, min(enough or [best], key=lambda p: (_part(p.profile), p.per_s))))
    devices: list[tuple[Geometry, list[tuple[str, BatchPoint]]]] = []
    # First fit decreasing: the largest profiles have the fewest legal places.
    for number, (bucket, point) in enumerate(sorted(chosen_points, key=lambda pair: -int(pair[1].profile[0]))):
        home = next((device for device in devices if device[0].start(point.profile) is not None), None)
        if home is None:
            home = (Geometry(), [])
            devices.append(home)
        home[0].add(str(number), point.profile)
        home[1].append((bucket, point))
    return tuple(tuple(allocation) for _, allocation in devices)


def _part(name: str) -> float:
    """The share of a device that a slice takes: a 1g with twice the memory leaves room for three others, not for
    six."""
    return max(int(name[0]) / 7, memory_share(name))


ELASTIC_BATCH = Policy(
    name="elastic-batch",
    paper="ElasticBatch, TPDS 2024",
    about="MIG slices, the largest first, on the fullest device with a legal place",
    decide=elastic_batch,
    slices=True,
)
