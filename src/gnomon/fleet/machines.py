"""The cluster that jobs share: pools of equal nodes, each with devices of one kind, and which of them serve inference.

`machines("100x8xv100-sxm-32gb")` reads what `--on` takes; `Pool.mig` makes every device of a pool a node of MIG slices.
Nodes are numbered through all pools. Leaves out who runs where: that is the replay's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from gnomon.errors import InputError
from gnomon.fleet.job import Job, Trace
from gnomon.fleet.mig import memory_share, profile_of
from gnomon.hardware import Device, catalogue
from gnomon.hardware.specs import parse_cluster

Memory = Callable[[Job, int], float]
"""(job, devices) -> bytes that it takes of each of them; 0 where it is not known."""
PARTS = 1000
"""Parts of a device that jobs share."""
SLICES = 7
"""Compute slices of a device in MIG mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool of equal nodes."""

    name: str
    """`training`, `inference`, or the name of its device."""
    device: str
    """Kind of device, by the catalogue's name."""
    nodes: int
    """How many nodes."""
    per_node: int
    """Devices in a node; of a MIG pool, compute slices of a device."""
    speed: float = 1.0
    """Work a second of a device, relative to the device that the trace was measured on."""
    serves: bool = False
    """Whether inference has the first claim on its nodes, so that training only borrows them."""
    hosted: int = 0
    """Devices of a machine, where a node is one device and a device one of its PARTS; 0 where a node is a machine."""
    mig: bool = False
    """Whether a node is one device in MIG mode, and a device one of its compute slices."""

    @property
    def devices(self) -> int:
        """Devices of all its nodes."""
        return self.nodes * self.per_node

    @property
    def memory_bytes(self) -> float:
        """Memory of a device, all its slices together; infinite of one that is not in the catalogue."""
        return _memory_bytes(self.device)


@dataclass(frozen=True)
class Machines:
    """All pools of a cluster; nodes are numbered through them in order."""

    pools: tuple[Pool, ...]
    """Nodes that are alike, pool by pool."""

    def __post_init__(self) -> None:
        if not self.pools:
            raise InputError("a cluster needs at least one pool of nodes")
        for pool in self.pools:
            if pool.nodes < 1 or pool.per_node < 1:
                raise InputError(
                    f"pool {pool.name!r} has {pool.nodes} nodes of {pool.per_node} devices; at least 1 each"
                )

    @cached_property
    def capacity(self) -> tuple[int, ...]:
        """Devices of every node."""
        return tuple(pool.per_node for pool in self.pools for _ in range(pool.nodes))

    @cached_property
    def pool_of(self) -> tuple[int, ...]:
        """Index of every node's pool."""
        return tuple(index for index, pool in enumerate(self.pools) for _ in range(pool.nodes))

    @cached_property
    def speed(self) -> tuple[float, ...]:
        """Relative speed of every node's devices."""
        return tuple(pool.speed for pool in self.pools for _ in range(pool.nodes))

    @property
    def unit(self) -> int:
        """The number of parts of a device that jobs are counted in."""
        return PARTS if any(pool.hosted for pool in self.pools) else 1

    def nodes_of(self, pool: int) -> range:
        """Numbers of a pool's nodes."""
        first = sum(earlier.nodes for earlier in self.pools[:pool])
        return range(first, first + self.pools[pool].nodes)

    @property
    def devices(self) -> int:
        """Counts the devices of all pools."""
        return sum(pool.devices for pool in self.pools)

    @property
    def text(self) -> str:
        """`100 x 8 v100-sxm-32gb + 20 x 8 t4 (inference)`."""
        return " + ".join(
            f"{pool.nodes // max(pool.hosted, 1):,} x "
            f"{'MIG ' if pool.mig else f'{pool.hosted or pool.per_node} '}{pool.device}"
            f"{' (inference)' if pool.serves else ''}"
            for pool in self.pools
        )


@lru_cache
def _memory_bytes(device: str) -> float:
    known = catalogue.find_device(device)
    return math.inf if known is None else float(known.memory_bytes)


def machines(
    spec: str, *, inference: str = "", mig: bool = False, parts: bool = False, measured_on: str = ""
) -> Machines:
    """Pools that a spec names.

    spec: as `--on` of every command takes it. inference: more of them, which serve inference first.
    mig: every device is a node of 7 slices. parts: it is one of PARTS. measured_on: device whose speed is 1; default
    the first pool's.
    """
    specs = [(spec, False)] + ([(inference, True)] if inference else [])
    groups: list[tuple[str, Device, int, int, bool]] = []
    for text, serves in specs:
        for group in parse_cluster(text).groups:
            groups.append((text, group.node.device, group.count, group.node.count, serves))
    reference = catalogue.device(measured_on) if measured_on else groups[0][1]
    pools = [
        Pool(
            name="inference" if serves else "training",
            device=device.name,
            # Where devices are shared, each device of a training machine is a node of its own, whose "devices" are
            # slices or parts; machines that serve inference stay whole.
            nodes=count * (per_node if (mig or parts) and not serves else 1),
            per_node=per_node if serves else SLICES if mig else PARTS if parts else per_node,
            hosted=per_node if parts and not serves else 0,
            speed=relative_speed(device, reference),
            serves=serves,
            mig=mig and not serves,
        )
        for _, device, count, per_node, serves in groups
    ]
    return Machines(tuple(_named(pools)))


def _named(pools: Sequence[Pool]) -> Sequence[Pool]:
    """Several pools of one purpose are told apart by their device."""
    names = [pool.name for pool in pools]
    return [replace(pool, name=f"{pool.name} {pool.device}") if names.count(pool.name) > 1 else pool for pool in pools]


def relative_speed(device: Device, reference: Device) -> float:
    """Work a second of a device over that of another: the ratio of their dense peaks in the narrowest of bf16, fp16 and
    fp32 that both have. A stand-in where neither a model nor measured points say more."""
    if device.name == reference.name:
        return 1.0
    for dtype in ("fp16", "bf16", "fp32"):
        if getattr(device.dense_peak, dtype) and getattr(reference.dense_peak, dtype):
            return float(device.flops_per_s(dtype) / reference.flops_per_s(dtype))
    raise InputError(f"no number format is known in which both {device.name} and {reference.name} have a peak")


def check_fits(trace: Trace, cluster: Machines, memory: Memory) -> None:
    """InputError for jobs that could never start on these machines, the first of them by their line.

    memory: what is foretold of it.
    """
    kinds = {pool.device for pool in cluster.pools}
    whole = _most_devices(cluster)
    large = [job for job in trace.jobs if job.fewest > whole]
    if large:
        raise InputError(
            f"{trace.name}: {_lines(large)}: job {large[0].id!r} needs {large[0].fewest // cluster.unit} devices, but "
            f"{cluster.text} has {whole // cluster.unit} to train on; add nodes with --on, or leave such jobs out with "
            "--skip-larger"
        )
    other = [job for job in trace.jobs if job.slice and not any(pool.mig for pool in cluster.pools)]
    if other:
        raise InputError(f"{trace.name}: {_lines(other)}: job {other[0].id!r} wants MIG slices; add --mig")
    known = set(catalogue.device_names(aliases=True))
    unknown = [job for job in trace.jobs if job.device and job.device not in kinds and job.device not in known]
    if unknown:
        job = unknown[0]
        raise InputError(
            f"{trace.name}: {_lines(unknown)}: job {job.id!r} is of device {job.device!r}, which is neither on the "
            f"cluster nor in the catalogue{catalogue.suggest(job.device, tuple(sorted(known)))}"
        )
    full = [job for job in trace.jobs if not _has_memory(cluster, job, memory)]
    if full:
        job = full[0]
        raise InputError(
            f"{trace.name}: {_lines(full)}: job {job.id!r} takes {memory(job, job.devices) / 2**30:,.1f} GiB of each "
            f"of its {job.devices} devices, more than any of {cluster.text} has; give it more devices, or larger ones "
            "with --on, or leave such jobs out with --skip-larger"
        )


def without_larger(trace: Trace, cluster: Machines, memory: Memory) -> tuple[Trace, tuple[Job, ...]]:
    """The trace without jobs that need more devices than there are, or more memory than these have; and those jobs."""
    whole = _most_devices(cluster)
    large = tuple(job for job in trace.jobs if job.fewest > whole or not _has_memory(cluster, job, memory))
    ids = {job.id for job in large}
    fitting = tuple(job for job in trace.jobs if job.id not in ids)
    return (replace(trace, jobs=fitting) if large else trace), large


def _most_devices(cluster: Machines) -> int:
    """Devices that one job can have at most: those of all training pools, or of one pool that inference lends."""
    return max(sum(p.devices for p in cluster.pools if not p.serves), *(p.devices for p in cluster.pools))


def _has_memory(cluster: Machines, job: Job, memory: Memory) -> bool:
    """Whether any device, or the slice of one that a job gets, has the memory that it takes on as many as it may run
    on."""
    least = min(memory(job, count) for count in {job.fewest, job.devices, job.most})
    return any(
        least <= pool.memory_bytes * (memory_share(profile_of(job)) if pool.mig else 1.0) for pool in cluster.pools
    )


def _lines(jobs: Sequence[Job]) -> str:
    first = ", ".join(str(job.line) for job in jobs[:5])
    return f"line{'s' if len(jobs) > 1 else ''} {first}{f' and {len(jobs) - 5:,} more' if len(jobs) > 5 else ''}"
