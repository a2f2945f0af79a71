"""Numbers of stacks, devices and links that only whole runs show, fitted to published ones and kept with provenance.

`rates(stack, device)` returns what a stack does with its host, its kernels and its communication on a device;
`fitted().link_factor(name)` how much longer a network takes than its price. At most six numbers a stack, twenty for
devices and links together: the file `fitted.toml`, which `benchmarks/fit_stacks.py` writes. A stack without a record
has neutral rates, and they say so. Leaves out where the numbers are applied (`prediction.step`) and anything about one
run, one model or one cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import ClassVar, Literal

from gnomon import schema
from gnomon.errors import InputError
from gnomon.hardware.types import Device
from gnomon.prices.curves import Provenance
from gnomon.units import Seconds

Name = Literal["host_kernel_s", "host_collective_s", "host_peer_s", "host_unit_s", "compute", "attention", "exposed"]
"""Numbers of a stack: the fields of `Rates`."""

LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "host_kernel_s": (0.0, 2e-4),
        "host_collective_s": (0.0, 2e-3),
        "host_peer_s": (0.0, 2e-3),
        "host_unit_s": (0.0, 0.2),
        "compute": (0.3, 1.0),
        "attention": (0.2, 2.0),
        "exposed": (0.0, 2.0),
    }
)
"""Name -> what is physically possible. `attention` may be over 1: the stack's kernel need not be the curve's."""

STACK_NUMBERS = 6
"""Most numbers of one stack."""

SHARED_NUMBERS = 20
"""Most numbers of devices and links together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How a stack runs on a device. The defaults are neutral: the prices of kernels and links as they are."""

    host_kernel_s: Seconds | None = None
    """Host time from one launch to the next; None: by the way of launching (`host.host_cost`)."""
    host_collective_s: Seconds = 0.0
    """Host time of a collective inside a layer, beyond its launch."""
    host_peer_s: Seconds = 0.0
    """Host time of a collective inside a layer for each rank of its group, in plans with pipeline stages."""
    host_unit_s: Seconds = 0.0
    """Host time of a forward or backward of a stage, beyond its kernels: gathers, hooks, the loop around it."""
    compute: float = 1.0
    """Sustained speed of kernels over their speed in short bursts."""
    attention: float = 1.0
    """Speed of the stack's attention kernels over those of the curves."""
    exposed: float = 1.0
    """Seconds that kernels wait for a collective inside a layer, over its price."""

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InputError(f"{name} of a stack must be from {low:g} to {high:g}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackNumber:
    """One fitted number of a stack."""

    stack: str
    """Name of its record."""
    name: Name
    """Which number."""
    value: float
    """Seconds, or a ratio."""
    arch: str = ""
    """Generation of devices that it holds for, with those named after it (`blackwell-ultra`); empty for all."""

    def __post_init__(self) -> None:
        low, high = LIMITS[self.name]
        if not low <= self.value <= high:
            raise InputError(f"{self.name} of {self.stack} must be from {low:g} to {high:g}, got {self.value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRecord:
    """The numbers of one stack, fitted together."""

    numbers: tuple[StackNumber, ...]
    """At most STACK_NUMBERS."""
    provenance: Provenance
    """Of all of them."""

    def __post_init__(self) -> None:
        names = {number.stack for number in self.numbers}
        keys = {(number.name, number.arch) for number in self.numbers}
        if len(names) != 1 or len(keys) != len(self.numbers):
            raise InputError(f"numbers of {', '.join(sorted(names)) or 'no stack'}: one stack, each number once")
        if len(self.numbers) > STACK_NUMBERS:
            raise InputError(f"{self.stack} has {len(self.numbers)} fitted numbers; at most {STACK_NUMBERS}")

    @property
    def stack(self) -> str:
        """Whose they are."""
        return self.numbers[0].stack


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkNumber:
    """A network's time in training over its price."""

    link: str
    """Name in the catalogue."""
    factor: float
    """Seconds over the price; from 0.2 to 10."""
    provenance: Provenance

    def __post_init__(self) -> None:
        if not 0.2 <= self.factor <= 10:
            raise InputError(f"factor of link {self.link} must be from 0.2 to 10, got {self.factor!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Everything fitted to whole runs."""

    SCHEMA: ClassVar[str] = "gnomon.fitted/1"

    stacks: tuple[StackRecord, ...] = ()
    links: tuple[LinkNumber, ...] = ()

    def __post_init__(self) -> None:
        if len({record.stack for record in self.stacks}) != len(self.stacks):
            raise InputError("a stack has two records of fitted numbers; keep one")
        if len({number.link for number in self.links}) != len(self.links):
            raise InputError("a link has two fitted factors; keep one")
        if len(self.links) > SHARED_NUMBERS:
            raise InputError(f"{len(self.links)} numbers of devices and links; at most {SHARED_NUMBERS}")

    def record(self, stack: str) -> StackRecord | None:
        """A stack's record, if it has one."""
        return next((record for record in self.stacks if record.stack == stack), None)

    def rates(self, stack: str, arch: str) -> Rates:
        """A stack's rates on a generation of devices: its numbers for that one before its numbers for all."""
        record = self.record(stack)
        chosen: dict[str, float] = {}
        for number in sorted(record.numbers if record else (), key=lambda n: n.arch):
            if arch.startswith(number.arch):
                chosen[number.name] = number.value
        return Rates(**chosen)

    def link_factor(self, name: str) -> float:
        """Seconds over price of a network in training runs; 1 where nothing was fitted."""
        return next((number.factor for number in self.links if number.link == name), 1.0)

    @property
    def count(self) -> int:
        """Fitted numbers in all."""
        return sum(len(record.numbers) for record in self.stacks) + len(self.links)


@cache
def fitted() -> Fitted:
    """The numbers on record."""
    path = files("gnomon.prices").joinpath("fitted.toml")
    return schema.load(Fitted, path.read_text(encoding="utf-8"), source="fitted.toml")


def rates(stack: str, device: Device, numbers: Fitted | None = None) -> Rates:
    """A stack's rates on a device; neutral where nothing was fitted (`rates_note` says so), and where a device has no
    launches to pay for. numbers: in place of those on record."""
    return (numbers or fitted()).rates(stack, device.arch) if device.kind == "gpu" else Rates()


def rates_note(stack: str, device: Device) -> str:
    """What the rates rest on, to be shown beside a prediction."""
    record = fitted().record(stack)
    if record is None or device.kind != "gpu":
        return f"no runs fitted for {stack!r} on {device.name}: burst speed, host time by the way of launching"
    which = f"{len(record.numbers)} numbers of {stack!r} fitted to {record.provenance.data}"
    if device.arch not in record.provenance.range:
        which += f"; none of them on {device.arch}"
    return which
