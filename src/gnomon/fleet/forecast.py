"""How fast a job runs on devices that it does not have yet: from a stated curve, or from measured points.

`Curve` is what is assumed where a trace says nothing of a model: how work scales with devices, nodes and their speed,
in numbers that the output prints. Every forecast is a pure function, memoised. Points are in `gnomon.fleet.points`,
forecasts of the planner in `gnomon.fleet.planned`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gnomon.fleet.job import Job
from gnomon.fleet.machines import Machines
from gnomon.fleet.state import Allocation, PhaseForecasts, devices_of

NEVER = math.inf


@dataclass(frozen=True)
class Curve(PhaseForecasts):
    """Forecasts from a stated curve: time on n devices is `serial + (1 - serial) x asked / n`, at the slowest device's
    speed."""

    machines: Machines
    """The cluster, for the speeds of its devices."""
    serial: float = 0.0
    """Share of the work that does not get faster with devices (Amdahl); 0 is linear scaling, as Lyra assumes."""
    spread: float = 0.0
    """Share of its speed that a job loses on more nodes than it needs."""
    sharing: float = 0.5
    """Share of its speed that a job keeps beside another on the same devices."""
    proportional: bool = False
    """Devices of several speeds add up, as where each gets work in proportion (EasyScale); else the slowest decides."""
    memory: float = 0.0
    """Bytes that a job takes of a device where the trace does not say."""
    _memo: dict[tuple[int, int, int, int, float], float] = field(default_factory=dict, compare=False, repr=False)
    _packed: dict[tuple[int, float, int, int], NDArray[np.float64]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def phase(self, job: Job, done_s: float, allocation: Allocation) -> tuple[float, float]:
        """Returns (rate, until) as `Forecasts` does: from the scaling curve and the speeds of the nodes."""
        speeds = self.machines.speed
        count = devices_of(allocation)
        if self.proportional:
            # The mean of a device: `rate` multiplies by their number.
            speed = sum(speeds[node] * used for node, used in allocation) / count
        else:
            speed = min(speeds[node] for node, _ in allocation)
        largest = self.machines.capacity[allocation[0][0]]
        return self.rate(job, count, len(allocation), largest, speed), NEVER

    def packed(self, job: Job, done_s: float, node: int, per_node: int, most: int) -> NDArray[np.float64]:
        """Returns the rates on 1 to `most` devices packed on nodes as `node`, by the curve."""
        speed = self.machines.speed[node]
        key = (job.devices, speed, per_node, most)
        rates = self._packed.get(key)
        if rates is None:
            counts = range(1, most + 1)
            rates = np.array([self.rate(job, count, -(-count // per_node), per_node, speed) for count in counts])
            self._packed[key] = rates
        return rates

    def limits(self, job: Job) -> tuple[int, int]:
        """Returns the fewest and the most devices that the job's line states."""
        return job.fewest, job.most

    def rate(self, job: Job, count: int, nodes: int, per_node: int, speed: float) -> float:
        """Work a second on `count` devices of that speed on so many nodes."""
        # Nothing else of a job matters to the curve, so that all jobs of a size share an entry.
        key = (job.devices, count, nodes, per_node, speed)
        rate = self._memo.get(key)
        if rate is None:
            rate = speed / (self.serial + (1 - self.serial) * job.devices / count)
            # -(-a // b) is a / b rounded up: the fewest nodes that have so many devices.
            if nodes > -(-count // per_node):
                rate *= 1 - self.spread
            self._memo[key] = rate
        return rate

    def memory_bytes(self, job: Job, devices: int) -> float:
        """Returns the memory that the job's line states, or else the one assumed for all."""
        return job.memory_bytes or self.memory

    def speed_share(self, job: Job, other: Job) -> float:
        """Returns the one share of speed assumed for any two jobs on one device."""
        return self.sharing

    def assumption(self) -> str:
        """What is assumed, in a line."""
        shape = "linearly" if self.serial == 0 else f"with {self.serial:.0%} of its time not divided (Amdahl)"
        slower_text = f", {self.spread:.0%} slower on more nodes than it needs" if self.spread else ""
        speeds = {pool.device: pool.speed for pool in self.machines.pools}
        kinds = ", ".join(f"{device} {speed:.2f}" for device, speed in speeds.items())
        relative = f"; relative speed of a device: {kinds} (ratio of peaks)" if len(speeds) > 1 else ""
        return f"a job without a model scales {shape}{slower_text}{relative}"
