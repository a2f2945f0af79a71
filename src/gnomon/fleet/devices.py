"""The devices of a replay: which are free, which serve inference, which nodes are down, and the device-seconds of each.

`Devices` hands devices to jobs and takes them back, and adds up the seconds between events. Leaves out which job gets
which (the policy) and what a job does with them (`work`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gnomon.fleet.job import Job
from gnomon.fleet.machines import Machines
from gnomon.fleet.mig import Geometry, profile_of
from gnomon.fleet.state import Active, Allocation

_EPS = 1e-9


@dataclass(slots=True)
class Devices:
    """The free and held devices of all nodes at one moment."""

    machines: Machines
    """The cluster."""
    headroom: float
    """Share of the inference nodes that is kept free on top of the load."""
    free: list[int] = field(default_factory=list)
    """Free devices of each node."""
    down: dict[int, int] = field(default_factory=dict)
    """Node -> failures that hold it down."""
    serving: set[int] = field(default_factory=set)
    """Nodes that serve inference."""
    nodes_wanted: int = 0
    """Nodes that inference needs."""
    load: float = 0.0
    """Share of its nodes that inference needs."""
    mig: dict[int, Geometry] = field(default_factory=dict)
    """Node -> the slices of its device, where it is cut into some; empty without."""
    free_now: int = 0
    """Devices that nobody has."""
    serving_now: int = 0
    """Devices that serve inference."""
    down_now: int = 0
    """Devices of failed nodes."""
    free_s: float = 0.0
    """Device-seconds in which nobody had them, up to the last event."""
    serving_s: float = 0.0
    """Device-seconds of inference, up to the last event."""
    down_s: float = 0.0
    """Device-seconds, added up at every event."""
    unmet_s: float = 0.0
    """Node-seconds that inference was owed."""

    def __post_init__(self) -> None:
        self.free = list(self.machines.capacity)
        self.free_now = sum(self.free)
        for pool, group in enumerate(self.machines.pools):
            if group.mig:
                self.mig.update({node: Geometry() for node in self.machines.nodes_of(pool)})

    @property
    def busy(self) -> int:
        """Devices that jobs have."""
        return self.machines.devices - self.free_now - self.serving_now - self.down_now

    @property
    def owed(self) -> int:
        """Nodes that inference needs and has not."""
        return max(self.nodes_wanted - len(self.serving), 0)

    def advance(self, passed: float) -> None:
        """Add up the seconds that passed since the last event."""
        self.free_s += passed * self.free_now
        self.serving_s += passed * self.serving_now
        self.down_s += passed * self.down_now
        short = self.nodes_wanted - len(self.serving)
        if short > 0:
            self.unmet_s += passed * short

    def take(self, active: Active, allocation: Allocation) -> None:
        """Hand devices to a job."""
        for node, count in allocation:
            self.free[node] -= count
            self.free_now -= count
            if node in self.mig:
                self.mig[node].add(active.job.id, profile_of(active.job))
                active.slice_at = self.mig[node].slices[active.job.id]

    def give_back(self, active: Active) -> None:
        """Take a job's devices back."""
        for node, count in active.allocation:
            self.free[node] += count
            self.free_now += count
            if node in self.mig:
                self.mig[node].remove(active.job.id)

    def refusal(self, job: Job, allocation: Allocation, memory_bytes: float) -> str | None:
        """Why a job that takes so much of a device's memory cannot have these devices; None where it can."""
        nodes = [node for node, _ in allocation]
        if len(set(nodes)) != len(nodes):
            return f"gives {job.id!r} a node twice"
        for node, count in allocation:
            if count < 1 or count > self.free[node]:
                return f"gives {job.id!r} {count} devices of node {node}, which has {self.free[node]} free"
            pool = self.machines.pools[self.machines.pool_of[node]]
            if memory_bytes > pool.memory_bytes:
                return (
                    f"gives {job.id!r}, which takes {memory_bytes / 2**30:,.1f} GiB, devices of {pool.device} with "
                    f"{pool.memory_bytes / 2**30:,.1f}; it takes all devices for alike: choose a policy that knows "
                    "kinds (fifo, srtf, las, lyra), or leave those devices out of --on"
                )
            if node in self.mig and self.mig[node].start(profile_of(job)) is None:
                return f"puts {job.id!r} on device {node}: its slices leave no legal place"
        return None

    def fail(self, node: int) -> None:
        """A node goes down; its jobs were stopped before."""
        # Failures may overlap: a node is up again when the last of them is repaired.
        if node not in self.down:
            if node in self.serving:
                self.serving.discard(node)
                self.serving_now -= self.machines.capacity[node]
            else:
                self.free_now -= self.free[node]
            self.free[node] = 0
            self.down_now += self.machines.capacity[node]
        self.down[node] = self.down.get(node, 0) + 1

    def repair(self, node: int) -> None:
        """A failure of a node is over."""
        self.down[node] -= 1
        if self.down[node] == 0:
            del self.down[node]
            capacity = self.machines.capacity[node]
            self.free[node] = capacity
            self.free_now += capacity
            self.down_now -= capacity

    def demand(self, load: float) -> None:
        """Inference has another load, and needs as many whole nodes."""
        self.load = load
        nodes = sum(pool.nodes for pool in self.machines.pools if pool.serves)
        # A product that is whole must not be rounded up for its last digit.
        self.nodes_wanted = min(nodes, math.ceil((load + self.headroom) * nodes - _EPS))

    def serve(self) -> None:
        """Inference gives back what it does not need, and takes whole free nodes of its own up to what it needs."""
        capacity = self.machines.capacity
        if len(self.serving) > self.nodes_wanted:
            # The last are given back first, so that the nodes which serve stay the same at low load.
            for node in sorted(self.serving, reverse=True)[: len(self.serving) - self.nodes_wanted]:
                self.serving.discard(node)
                self.free[node] = capacity[node]
                self.free_now += capacity[node]
                self.serving_now -= capacity[node]
        elif len(self.serving) < self.nodes_wanted:
            for node in self._own():
                if len(self.serving) == self.nodes_wanted:
                    return
                if node not in self.serving and self.free[node] == capacity[node]:
                    self.serving.add(node)
                    self.free[node] = 0
                    self.free_now -= capacity[node]
                    self.serving_now += capacity[node]

    def _own(self) -> Sequence[int]:
        pools = self.machines.pools
        return [node for index, pool in enumerate(pools) if pool.serves for node in self.machines.nodes_of(index)]
