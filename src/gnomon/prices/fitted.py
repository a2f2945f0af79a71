"""Numbers of stacks, devices and links that only whole runs show, fitted to published ones and kept with provenance.

`rates(stack, device)` returns what a stack does with its host, its kernels and its communication on a device;
`fitted().link_factor(name)` how much longer a network takes than its price. At most six numbers a stack, twenty for
all stacks, devices and links together: the file `fitted.toml`, which `evidence/fits/fit_stacks` writes. A stack without
a record has the rates of all stacks, and they say so; a user's own numbers (`Stack.own`) go before all. Leaves out
where the numbers are applied (`prediction.step`) and anything about one run, one model or one cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from gnomon import schema
from gnomon.errors import InputError, nearest
from gnomon.hardware.generations import numbers_of
from gnomon.hardware.types import Device
from gnomon.prices.curves import Provenance
from gnomon.prices.links import AxisLink
from gnomon.software import OwnNumber, Stack
from gnomon.units import Seconds

Name = Literal["host_kernel_s", "host_collective_s", "host_unit_s", "compute", "attention", "triton", "exposed"]
"""Numbers of a stack: the fields of `Rates`. `triton` stands for `attention` where that runs as Triton's kernel of
2023."""

OLDER_KERNELS = ("flash1", "triton")
"""Kernels at about half the speed of FlashAttention-2, of which what other kernels lose in training says nothing: on
A100 Triton's runs in training as fast as in its charts."""

LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "host_kernel_s": (0.0, 2e-4),
        "host_collective_s": (0.0, 2e-3),
        "host_unit_s": (0.0, 0.2),
        "compute": (0.3, 1.0),
        "attention": (0.2, 2.0),
        "triton": (0.2, 2.0),
        "exposed": (0.0, 2.0),
    }
)
"""Name -> what is physically possible. `attention` may be over 1: the stack's kernel need not be the curve's."""

OWN_LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType({**LIMITS, "compute": (0.02, 5.0)})
"""Limits for numbers of a user's own runs: a machine that was calibrated while others used it may be faster since,
and one that others use now is slower."""

STACK_NUMBERS = 6
"""The number of fitted numbers of one stack, at most."""

SHARED_NUMBERS = 20
"""The number of fitted numbers of all stacks, devices and links together, at most."""

ANY = "*"
"""The name of the record that holds for every stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How a stack runs on a device. The defaults are neutral: the prices of kernels and links as they are."""

    host_kernel_s: Seconds | None = None
    """Host time from one launch to the next; None: by the way of launching (`host.host_cost`)."""
    host_collective_s: Seconds = 0.0
    """Host time of a collective inside a layer, beyond its launch."""
    host_unit_s: Seconds = 0.0
    """Host time of a forward or backward of a stage, beyond its kernels: gathers, hooks, the loop around it."""
    compute: float = 1.0
    """Sustained speed of kernels over their speed in short bursts."""
    attention: float = 1.0
    """Speed of the stack's attention kernels over those of the curves."""
    exposed: float = 1.0
    """Seconds that kernels wait for a collective inside a layer, over its price."""

    def __post_init__(self) -> None:
        for name, (low, high) in OWN_LIMITS.items():
            value = getattr(self, name, None)
            if value is not None and not low <= value <= high:
                raise InputError(f"{name} of a stack must be from {low:g} to {high:g}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackNumber:
    """One fitted number of a stack."""

    stack: str
    """Name of the stack's record."""
    name: Name
    """Which number it is."""
    value: float
    """The number: seconds, or a ratio."""
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
    """The numbers, at most STACK_NUMBERS."""
    provenance: Provenance
    """Where all of them are known from."""

    def __post_init__(self) -> None:
        names = {number.stack for number in self.numbers}
        keys = {(number.name, number.arch) for number in self.numbers}
        if len(names) != 1 or len(keys) != len(self.numbers):
            raise InputError(f"numbers of {', '.join(sorted(names)) or 'no stack'}: one stack, each number once")
        if len(self.numbers) > STACK_NUMBERS and self.stack != ANY:
            raise InputError(f"{self.stack} has {len(self.numbers)} fitted numbers; at most {STACK_NUMBERS}")

    @property
    def stack(self) -> str:
        """The stack whose constants they are."""
        return self.numbers[0].stack


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkNumber:
    """A network's time in training over its price."""

    link: str
    """Name of the link in the catalogue."""
    factor: float
    """Seconds over the price of communication outside layers: messages between stages, gradients, parameters; from 0.2
    to 10. In layers a stack's `exposed` says it."""
    provenance: Provenance
    """The runs that it was fitted to."""
    hop_s: Seconds = 0.0
    """What each further node of a tensor-parallel group adds to a collective inside a layer, beyond its price: it
    passes through the nodes one after another. Seen on two and four nodes."""

    def __post_init__(self) -> None:
        if not 0.2 <= self.factor <= 10:
            raise InputError(f"factor of link {self.link} must be from 0.2 to 10, got {self.factor!r}")
        if not 0 <= self.hop_s <= 2e-3:
            raise InputError(f"hop_s of link {self.link} must be from 0 to 2 ms, got {self.hop_s!r}")

    @property
    def count(self) -> int:
        """Counts the numbers that were fitted."""
        return 1 + (self.hop_s > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRates:
    """Everything fitted to whole runs."""

    SCHEMA: ClassVar[str] = "gnomon.fitted/1"

    universal: StackRecord | None = None
    """The numbers of every stack, on each generation of devices; a stack's own record goes before it."""
    stacks: tuple[StackRecord, ...] = ()
    """Numbers of one stack each."""
    links: tuple[LinkNumber, ...] = ()
    """Numbers of one link each."""

    def __post_init__(self) -> None:
        if len({record.stack for record in self.stacks}) != len(self.stacks):
            raise InputError("a stack has two records of fitted numbers; keep one")
        if len({number.link for number in self.links}) != len(self.links):
            raise InputError("a link has two fitted factors; keep one")
        if self.universal is not None and self.universal.stack != ANY:
            raise InputError(f"numbers of every stack are named {ANY!r}, not {self.universal.stack!r}")
        if self.shared > SHARED_NUMBERS:
            raise InputError(f"{self.shared} numbers of all stacks, devices and links; at most {SHARED_NUMBERS}")

    def record(self, stack: str) -> StackRecord | None:
        """A stack's record, if it has one."""
        return next((record for record in self.stacks if record.stack == stack), None)

    def rates(self, stack: Stack, arch: str) -> Rates:
        """A stack's rates on a generation of devices: the user's own numbers before the stack's before those of all
        stacks, and in each the numbers of the generation before those of the one that it borrows from, before those of
        all devices."""
        lender = numbers_of(arch)
        record = self.record(stack.name)
        kernel = stack.layers.attention_kernel if stack.layers.attention == "flash" else None
        chosen: dict[str, float] = {}
        # Later layers overwrite earlier ones: all stacks, then the stack, then the user's own runs.
        layers: tuple[Sequence[StackNumber | OwnNumber], ...] = (
            [n for n in self.universal.numbers if n.name != "attention" or stack.layers.attention != "unfused"]
            if self.universal
            else (),
            record.numbers if record else (),
            stack.own.numbers if stack.own else (),
        )
        # What is of another kernel than the stack's.
        others = {"triton"} if kernel != "triton" else set()
        others |= {"attention"} if kernel in OLDER_KERNELS else set()
        for numbers in layers:
            # Sorted so that the most specific number comes last and wins: no generation, then the nearest, then this
            # one.
            for number in sorted(numbers, key=lambda n: (n.arch == arch, n.arch == lender, n.arch)):
                if number.name not in LIMITS:
                    known = ", ".join(LIMITS)
                    raise InputError(
                        f"stack {stack.name!r} has a number {number.name[:40]!r}, which is none"
                        f"{nearest(number.name[:40], LIMITS)}; known: {known}"
                    )
                own = isinstance(number, OwnNumber)  # of the kernel that ran, whatever it was
                of_arch = arch.startswith(number.arch) or number.arch == lender
                if of_arch and (own or number.name not in others):
                    chosen["attention" if number.name == "triton" else number.name] = number.value
        return Rates(**chosen)

    def of_generations(self) -> FittedRates:
        """Only the numbers of all stacks that name a generation of devices."""
        if self.universal is None:
            return FittedRates()
        numbers = tuple(number for number in self.universal.numbers if number.arch)
        return FittedRates(universal=replace(self.universal, numbers=numbers))

    def link_factor(self, name: str) -> float:
        """Seconds over price of a network in training runs, outside layers; 1 where nothing was fitted."""
        return next((number.factor for number in self.links if number.link == name), 1.0)

    def hop_s(self, name: str) -> Seconds:
        """What each further node of a tensor-parallel group adds; 0 where nothing was fitted."""
        return next((number.hop_s for number in self.links if number.link == name), 0.0)

    def hops_s(self, axis: str, collectives: int, link: AxisLink) -> Seconds:
        """Seconds beyond their price of so many collectives of an axis, for the nodes that they pass through."""
        return collectives * self.hop_s(link.across_name) * (link.nodes - 1) if axis == "tp" else 0.0

    @property
    def count(self) -> int:
        """Fitted numbers in all."""
        return sum(len(record.numbers) for record in self.stacks) + self.shared

    @property
    def shared(self) -> int:
        """Counts those of all stacks, devices and links."""
        return sum(number.count for number in self.links) + (len(self.universal.numbers) if self.universal else 0)


@cache
def fitted_rates() -> FittedRates:
    """Reads the numbers on record, once."""
    return schema.load_packaged(FittedRates, Path(__file__).with_name("fitted.toml"))


def rates(stack: Stack, device: Device, numbers: FittedRates | None = None) -> Rates:
    """A stack's rates on a device; those of all stacks where nothing was fitted (`rates_note` says so). Where a device
    has no launches to pay for, of those of all stacks only what is of its own generation, besides the user's own
    numbers. numbers: in place of those on record."""
    known = numbers or fitted_rates()
    return (known if device.kind == "gpu" else known.of_generations()).rates(stack, device.arch)


Known = Literal["own", "stack", "stack elsewhere", "device", "nothing"]
"""What the rates of a stack on a device rest on: the user's own runs; published runs of the stack there; of the stack
on other devices; of other stacks there; or of neither."""


def evidence_of(stack: Stack, device: Device, numbers: FittedRates | None = None) -> Known:
    """Says what the rates rest on, in one word."""
    records = numbers or fitted_rates()
    if stack.own is not None:
        return "own"
    record = records.record(stack.name)
    if record is not None and device.kind == "gpu":
        here = device.arch in record.provenance.range.split(";")[0].split(", ") and not stack.nearest
        return "stack" if here else "stack elsewhere"
    everywhere = records.universal.numbers if records.universal else ()
    return "device" if any(n.arch and device.arch.startswith(n.arch) for n in everywhere) else "nothing"


NAMED = 4
"""The number of sources of a fit that are named next to a prediction; of more only their number is said."""


def rates_note(stack: Stack, device: Device) -> str:
    """What the rates rest on, to be shown next to a prediction."""
    if device.measured is not None:
        own = stack.own
        fit = f"; {len(own.numbers)} numbers of {stack.name!r} fitted to {own.runs} own runs" if own else ""
        return f"{device.measured.note}{fit}"
    records = fitted_rates()
    record, every = records.record(stack.name), records.universal
    match evidence_of(stack, device):
        case "own" if stack.own is not None:
            return f"{len(stack.own.numbers)} numbers of {stack.name!r} fitted to {stack.own.runs} own runs"
        case "stack" if record is not None:
            return f"{len(record.numbers)} numbers of {stack.name!r} fitted to {_brief(record.provenance.data)}"
        case "stack elsewhere" if record is not None:
            fitted_to = f"{len(record.numbers)} numbers of {stack.name!r} fitted to {_brief(record.provenance.data)}"
            return (
                f"{fitted_to}; none of this program" if stack.nearest else f"{fitted_to}; none of them on {device.arch}"
            )
        case "device" if every is not None:
            return (
                f"no runs fitted for {stack.name!r}: {len(every.numbers)} numbers of all stacks, fitted to "
                f"{_brief(every.provenance.data)}"
            )
    return f"no runs fitted for {stack.name!r} on {device.name}: burst speed, host time by the way of launching"


def _brief(data: str) -> str:
    """`… 206 runs of 20 sources` for a list of more than NAMED sources; a shorter list as it is."""
    runs, of, names = data.partition(" runs of ")
    count = names.count(", ") + 1
    return data if not of or count <= NAMED else f"{runs} runs of {count} sources"
