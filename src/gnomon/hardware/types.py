"""The machines as frozen values: Device, Link, Node, NodeGroup, Cluster, and the price of renting them.

All figures are peaks of one thing, stated: FLOP/s dense and per device, bytes/s in one direction and per device (or per
port, for a network card), memory that software can allocate. Each value says where its figures come from, and which of
them nobody has checked. What a kernel or a collective reaches of a peak is left to prices; which link a group of ranks
uses is in `gnomon.prices.links`; names are in `gnomon.hardware.catalogue`, specs such as `4x8xh100-sxm` in
`gnomon.hardware.specs`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from gnomon.errors import InputError, UnpricedError, nearest
from gnomon.hardware.generations import Generation, generation
from gnomon.hardware.measured import Measured
from gnomon.units import Bytes, BytesPerS, DollarsPerHour, FlopsPerS, Hertz, Seconds, Watts

LinkKind = Literal[
    "nvlink", "pcie", "infiniband", "roce", "efa", "ethernet", "omnipath", "ici", "xgmi", "c2c", "loopback"
]
Confidence = Literal["checked", "partly", "unchecked"]

_DATE = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])(-[0-3][0-9])?")


def _check_provenance(what: str, source: str, date: str, confidence: Confidence, unchecked: tuple[str, ...]) -> None:
    if not source.strip():
        raise InputError(f"{what} has no source; name the document or the measurement its figures come from")
    if not _DATE.fullmatch(date):
        raise InputError(f"{what}: date {date!r} must be YYYY-MM or YYYY-MM-DD")
    # Both ways: a catalogue that says "partly" without naming what would hide which figure is a guess.
    if (confidence == "partly") != bool(unchecked):
        raise InputError(
            f"{what}: confidence is 'partly' exactly when `unchecked` names the fields that are not checked"
        )


def _check_unchecked(what: str, unchecked: tuple[str, ...], known: set[str]) -> None:
    for name in unchecked:
        if name not in known:
            raise InputError(f"{what}: `unchecked` names {name!r}, which is no field{nearest(name, known)}")


def _check_positive(what: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{what}: {name} must be positive and finite, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakFlops:
    """Dense peak FLOP/s of one device by number format, without structured sparsity. None: the device cannot."""

    bf16: FlopsPerS | None = None
    """Matrix units, fp32 accumulation."""
    fp16: FlopsPerS | None = None
    """Matrix units, fp32 accumulation."""
    tf32: FlopsPerS | None = None
    """Matrix units, on fp32 data."""
    fp32: FlopsPerS | None = None
    """Vector units (what elementwise work and fp32 without TF32 get)."""
    fp32_matrix: FlopsPerS | None = None
    """Matrix units at full fp32 precision (AMD); None: same as `fp32`."""
    fp64: FlopsPerS | None = None
    """Vector units."""
    fp8: FlopsPerS | None = None
    """Matrix units, fp32 accumulation."""
    fp4: FlopsPerS | None = None
    """Matrix units, block-scaled formats."""
    int8: FlopsPerS | None = None
    """Matrix units, operations a second."""

    def __post_init__(self) -> None:
        rates = {field.name: getattr(self, field.name) for field in fields(self)}
        _check_positive("peak", **rates)
        if all(rate is None for rate in rates.values()):
            raise InputError("peak has no rate at all; give at least one, such as bf16 or fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or processor), as a rank sees it."""

    name: str
    """The field's name, lower case: `h100-sxm-80gb`."""
    kind: Literal["gpu", "tpu", "cpu"]
    """What programs it; the prices room has a set of rules for each."""
    arch: str
    """Generation: `hopper`, `cdna3`, `tpu-v5p`; `generation` has what holds for all of it."""
    per: Literal["package", "gcd", "chip", "process"]
    """What one device is, and all figures here are of: a package (also one of two dies), a GCD (MI250X has two), a TPU
    chip, or the part of a processor that one process gets."""
    dense_peak: PeakFlops
    """FLOP/s by number format, without structured sparsity."""
    memory_bytes: Bytes
    """Memory that a program sees as the device's total (CUDA, HIP), before context and allocator take their part."""
    marketed_memory_bytes: Bytes
    """Memory as sold: `80 GB` on a sheet may be 80 GiB of chips, of which 79.25 GiB are seen."""
    memory_bytes_per_s: BytesPerS
    """Peak bandwidth of that memory."""
    num_sms: int
    """SMs (NVIDIA), compute units (AMD), TensorCores (TPU) or cores (CPU)."""
    form_factor: str
    """`SXM5`, `PCIe dual-slot`, `OAM` …"""
    source: str
    """Document that the figures come from."""
    date: str
    """Of that document, or of the look-up: YYYY-MM or YYYY-MM-DD."""
    power_w: Watts | None = None
    """TDP or board power limit; None if not published."""
    l2_bytes: Bytes | None = None
    """Last cache shared by all SMs that the vendor calls L2; None where there is none or it is not published."""
    clock_base_hz: Hertz | None = None
    """Guaranteed clock; None if not published."""
    clock_boost_hz: Hertz | None = None
    """Clock at which the peaks are stated; None if not published."""
    fabric_bytes_per_s: BytesPerS | None = None
    """NVLink, xGMI or ICI of the device, all links together, one direction; None: only the host's bus."""
    confidence: Confidence = "checked"
    """`partly`: the fields named in `unchecked` were not found in the source."""
    unchecked: tuple[str, ...] = ()
    """Fields (`dense_peak.fp8`: one rate) whose figure was not found in the source."""
    note: str = ""
    """What a reader must know, such as a figure that vendors state differently."""
    measured: Measured | None = None
    """Seconds of operations on this very machine, which prices take before any curve; None in the catalogue."""

    def __post_init__(self) -> None:
        what = f"device {self.name!r}"
        _check_provenance(what, self.source, self.date, self.confidence, self.unchecked)
        rates = {f"dense_peak.{field.name}" for field in fields(self.dense_peak)}
        _check_unchecked(what, self.unchecked, rates | {field.name for field in fields(self)})
        _check_positive(
            what,
            memory_bytes=self.memory_bytes,
            marketed_memory_bytes=self.marketed_memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s,
            num_sms=self.num_sms,
            power_w=self.power_w,
            l2_bytes=self.l2_bytes,
            fabric_bytes_per_s=self.fabric_bytes_per_s,
        )

    @property
    def collectives_library(self) -> str:
        """What moves data between devices like it; two libraries do not talk to each other."""
        return self.generation.collectives

    @property
    def generation(self) -> Generation:
        """What holds for all devices of its generation."""
        return generation(self.arch, self.kind)

    def __hash__(self) -> int:  # part of every key of a memo; devices of one name seldom differ
        return hash((self.name, self.arch, self.memory_bytes, self.num_sms))

    def flops_per_s(self, dtype: str) -> float:
        """Dense peak for `dtype`: a field of PeakFlops, or a format of its width (`fp8_e4m3`, `fp4_e2m1`).

        UnpricedError if the device has none: no rate is guessed.
        """
        rates = {field.name: getattr(self.dense_peak, field.name) for field in fields(self.dense_peak)}
        # Only AMD's matrix cores and a few others have full fp32; elsewhere fp32 without TF32 runs on vector units.
        if rates.get("fp32_matrix") is None:
            rates["fp32_matrix"] = rates["fp32"]
        # fp8_e4m3 and fp8_e5m2 have one rate.
        rate = rates.get(dtype.split("_e")[0])
        if rate is None:
            has = ", ".join(name for name, value in rates.items() if value is not None)
            raise UnpricedError(f"{self.name} has no peak for {dtype!r}; it has {has}")
        return float(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One end of a connection: what one device (or one network port) can send into it."""

    name: str
    """`nvlink4`, `infiniband-ndr` …"""
    kind: LinkKind
    """The technology."""
    bytes_per_s: BytesPerS
    """One direction, one end (a device for fabrics inside a node, a port for networks), before protocol overhead."""
    latency_s: Seconds
    """Time of an empty message between two ends, software included."""
    source: str
    """Document that the figures come from."""
    date: str
    """YYYY-MM or YYYY-MM-DD."""
    duplex: bool = True
    """Whether both directions run at `bytes_per_s` at the same time."""
    confidence: Confidence = "checked"
    """As in Device."""
    unchecked: tuple[str, ...] = ()
    """As in Device."""
    note: str = ""
    """What a reader must know."""

    def __post_init__(self) -> None:
        what = f"link {self.name!r}"
        _check_provenance(what, self.source, self.date, self.confidence, self.unchecked)
        _check_unchecked(what, self.unchecked, {field.name for field in fields(self)})
        _check_positive(what, bytes_per_s=self.bytes_per_s)
        if not 0 <= self.latency_s < 1:
            raise InputError(f"{what}: latency_s must be from 0 to 1 s, got {self.latency_s!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Devices joined by one fabric: usually a server; an NVL72 rack or a TPU slice is one node too."""

    name: str
    """`dgx-h100`, `aws-p4d` …"""
    device: Device
    """All devices of a node are of one kind."""
    count: int
    """Devices in it."""
    intra: Link
    """Between its devices; `bytes_per_s` is of one device to all its peers together."""
    topology: Literal["switch", "mesh", "ring", "torus2d", "torus3d", "bus"]
    """`switch`: a pair gets the full rate; `mesh`: the rate is divided over the peers; `bus`: devices share a host."""
    host: Link
    """Between a device and host memory."""
    source: str
    """Document that describes the node."""
    date: str
    """YYYY-MM or YYYY-MM-DD."""
    pair_bytes_per_s: BytesPerS | None = None
    """One direction between two neighbours with nothing else running; None where it follows from the topology."""
    mesh_peers: int = 7
    """Peers that a device of a full mesh has links to, used or not; other topologies ignore it."""
    devices_per_host_link: int = 1
    """Devices behind one host link (a PCIe switch): they share `host.bytes_per_s`."""
    nic: Link | None = None
    """A network port; None for a machine that stands alone."""
    nics: int = 0
    """Ports for traffic between devices (those for storage and management are not counted)."""
    host_memory_bytes: Bytes | None = None
    """DRAM, for offload; None if not stated."""
    host_memory_bytes_per_s: BytesPerS | None = None
    """Bandwidth of all of it; None if not stated."""
    host_cores: int | None = None
    """Processor cores; None if not stated."""
    disk_read_bytes_per_s: BytesPerS | None = None
    """Of all its disks together, of what is not in a cache; for parameters that wait there. None if not stated."""
    disk_write_bytes_per_s: BytesPerS | None = None
    """The same, until it is on the disk; None if not stated."""
    confidence: Confidence = "checked"
    """As in Device."""
    unchecked: tuple[str, ...] = ()
    """As in Device."""
    note: str = ""
    """What a reader must know."""

    def __post_init__(self) -> None:
        what = f"node {self.name!r}"
        _check_provenance(what, self.source, self.date, self.confidence, self.unchecked)
        _check_unchecked(what, self.unchecked, {field.name for field in fields(self)})
        if min(self.count, self.devices_per_host_link, self.mesh_peers) < 1:
            raise InputError(f"{what}: count, devices_per_host_link and mesh_peers must be at least 1")
        if (self.nic is None) != (self.nics == 0) or self.nics < 0:
            raise InputError(f"{what}: give both `nic` and `nics`, or neither; got {self.nics} nics")
        disk = {
            "disk_read_bytes_per_s": self.disk_read_bytes_per_s,
            "disk_write_bytes_per_s": self.disk_write_bytes_per_s,
        }
        _check_positive(what, **disk)

    @property
    def pair_rate_bytes_per_s(self) -> float:
        """One direction between two of its devices with nothing else running; in a mesh they have one link."""
        if self.pair_bytes_per_s is not None:
            return self.pair_bytes_per_s
        # Direct links (MI250, xGMI): a pair has the one between them, however fast all together are.
        share = self.mesh_peers if self.topology == "mesh" else 1
        return self.intra.bytes_per_s / share

    @property
    def nic_bytes_per_s(self) -> float:
        """One direction out of the node, all ports together; 0 without ports."""
        return self.nic.bytes_per_s * self.nics if self.nic else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes that follow each other in rank order."""

    node: Node
    """One of them."""
    count: int = 1
    """How many."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"a group of {self.node.name!r} needs at least 1 node, got {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a job. Ranks are numbered group by group, node by node, device by device."""

    SCHEMA: ClassVar[str] = "gnomon.cluster/1"

    name: str
    """The spec or the name it was asked by."""
    groups: tuple[NodeGroup, ...]
    """Possibly of different kinds."""
    oversubscription: float = 1.0
    """Bandwidth into the first switch over bandwidth out of it; 1 is a non-blocking network."""
    assumptions: tuple[str, ...] = ()
    """What the spec did not say and the catalogue filled in; shown beside every prediction."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise InputError(f"cluster {self.name!r} has no nodes")
        if not 1 <= self.oversubscription < math.inf:
            raise InputError(f"cluster {self.name!r}: oversubscription is at least 1, got {self.oversubscription!r}")
        without_nic = [group.node.name for group in self.groups if group.node.nic is None]
        # A cluster of one workstation is fine; two have to be connected by something.
        if without_nic and self.num_nodes > 1:
            raise InputError(
                f"cluster {self.name!r} has {self.num_nodes} nodes, but {without_nic[0]!r} has no network port"
            )

    @property
    def num_nodes(self) -> int:
        """Nodes in all groups."""
        return sum(group.count for group in self.groups)

    @property
    def num_devices(self) -> int:
        """Devices in all groups: the world size."""
        return sum(group.count * group.node.count for group in self.groups)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node, in rank order."""
        return tuple(group.node for group in self.groups for _ in range(group.count))

    @property
    def node_kinds(self) -> tuple[Node, ...]:
        """One node of each group."""
        return tuple(group.node for group in self.groups)

    def node_with(self, device: str) -> Node:
        """The first node with such devices."""
        return next(node for node in self.node_kinds if node.device.name == device)

    def count_devices(self, places: Iterable[int] = ()) -> Counter[Device]:
        """How many devices of each kind are among those with these numbers, each once; left out, among all."""
        used_places, first, counts = sorted(set(places)), 0, Counter[Device]()
        for group in self.groups:
            last = first + group.count * group.node.count
            mine = bisect_left(used_places, last) - bisect_left(used_places, first) if used_places else last - first
            if mine:
                counts[group.node.device] += mine
            first = last
        return counts

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of every rank."""
        return tuple(group.node.device for group in self.groups for _ in range(group.count * group.node.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a device costs to rent, on demand, as published."""

    name: str
    """The offer: `aws-p5.48xlarge`."""
    device: str
    """Its name in the catalogue."""
    num_devices: int
    """Devices in the offer."""
    dollars_per_hour: DollarsPerHour
    """Of the whole offer."""
    region: str
    """Where it holds."""
    source: str
    """Price list."""
    date: str
    """When it was read; prices change often."""
    confidence: Confidence = "checked"
    """As in Device."""
    unchecked: tuple[str, ...] = ()
    """As in Device."""
    note: str = ""
    """What a reader must know."""

    def __post_init__(self) -> None:
        _check_provenance(f"price {self.name!r}", self.source, self.date, self.confidence, self.unchecked)
        _check_positive(f"price {self.name!r}", num_devices=self.num_devices, dollars_per_hour=self.dollars_per_hour)

    @property
    def dollars_per_device_hour(self) -> float:
        """Dollars an hour for one device."""
        return self.dollars_per_hour / self.num_devices


def with_host_memory(cluster: Cluster, size: int) -> Cluster:
    """The machines with so many bytes of host memory in each node, which are then not the catalogue's."""
    groups = (
        replace(
            group, node=replace(group.node, name=f"{group.node.name} with {size / 2**30:g} GiB", host_memory_bytes=size)
        )
        for group in cluster.groups
    )
    return replace(cluster, groups=tuple(groups))
