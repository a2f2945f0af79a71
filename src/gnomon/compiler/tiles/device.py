"""What tiles are cut for: a device's memory levels, vector units, matrix units and DMA, as data.

One TOML file a device in devices/, `described(name)` reads it; `this_device()` is this machine with what was measured
on it. A level that is `explicit` holds only what a program puts there (shared memory, a scratchpad), by DMA where there
is one. Generators ask for sizes and rates alone, so a new device of a known `printer` is one file. Leaves out clusters
and links (`gnomon.hardware`) and what a kernel costs on a GPU (`gnomon.prices`).
Source: tiles from hardware units are Roller's (OSDI 2022); DMA and scratchpads as data those of swTVM (arXiv
1904.07404).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gnomon import schema
from gnomon.compiler.machine import this_machine
from gnomon.compiler.tiles.tile_cost import rates
from gnomon.errors import InputError, nearest
from gnomon.units import Bytes, BytesPerS, Seconds

FOLDER = Path(__file__).parents[1] / "devices"
Printer: TypeAlias = Literal["cpp", "triton", "scratchpad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of memory, from the one next to the units."""

    name: str
    """As its maker calls it."""
    size: Bytes
    """Its bytes."""
    bandwidth: BytesPerS
    """To one worker, read and written together."""
    explicit: bool = False
    """Whether it holds only what a program puts there."""
    shared: bool = False
    """Whether all workers share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    lanes: int
    """Floats of 32 bits in a register."""
    registers: int
    """Registers of one worker."""
    rate: float
    """Vector instructions a second of one worker."""
    fused: bool
    """Whether a product and a sum are one instruction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """A unit that multiplies small matrices."""

    rows: int
    """Rows of the result."""
    columns: int
    """Columns of the result."""
    depth: int
    """Products that each number of the result adds up."""
    dtype: str
    """Of what is multiplied."""
    rate: float
    """Products and sums a second of one worker, each counted as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dma:
    """What moves memory to an explicit level beside the units' work."""

    latency: Seconds
    """From asking for a transfer to its first byte."""
    largest: Bytes
    """Of one transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDescription:
    SCHEMA: ClassVar[str] = "gnomon.tiles/1"
    name: str
    """Of the device."""
    about: str
    """Where its numbers are known from."""
    printer: Printer
    """What writes kernels for it."""
    workers: int
    """Cores, or blocks that run beside each other."""
    memory_bandwidth: BytesPerS
    """Of all workers together."""
    levels: tuple[Level, ...]
    """Memory, the level next to the units first."""
    vectors: Vectors
    """Its vector units."""
    matrices: Matrices | None = None
    """Its unit for matrices; None without one."""
    dma: Dma | None = None
    """What moves memory meanwhile; None where the units themselves load it."""
    header: str | None = None
    """The file of cpp/ with its vectors, for the printer `cpp`."""

    def __post_init__(self) -> None:
        if not self.levels or self.workers < 1:
            raise InputError(f"device {self.name!r}: a device has a level of memory and a worker at least")
        if self.printer == "scratchpad" and (self.dma is None or not self.levels[0].explicit):
            raise InputError(f"device {self.name!r}: the printer 'scratchpad' needs dma and an explicit first level")
        if self.printer == "cpp" and self.header is None:
            raise InputError(f"device {self.name!r}: the printer 'cpp' needs header, a file of vectors")


def names() -> tuple[str, ...]:
    """Lists the devices that have a file."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@cache
def described(name: str) -> DeviceDescription:
    """The device of a name, or of a file of that path; InputError where there is neither."""
    if name.endswith(".toml"):
        return schema.load_file(DeviceDescription, name)
    if name not in names():
        raise InputError(
            f"device {name!r}: known are {', '.join(names())}{nearest(name, names())}; or a file NAME.toml"
        )
    return schema.load_packaged(DeviceDescription, FOLDER / f"{name}.toml")


@cache
def this_device() -> DeviceDescription:
    """This machine, by the rates that `tile_cost` measures once a process."""
    with _disable_current_modes():  # Dynamo's fake tensors have no memory to measure
        machine, at = this_machine(), rates()
    levels = (
        # The first cache's rate is not measured: twice that of the second.
        Level(name="L1", size=machine.l1_bytes, bandwidth=2 * at.l2_bytes_per_s),
        Level(name="L2", size=machine.l2_bytes, bandwidth=at.l2_bytes_per_s),
        Level(name="L3", size=machine.l3_bytes, bandwidth=at.l3_bytes_per_s, shared=True),
    )
    vectors = Vectors(
        lanes=machine.isa.lanes,
        # AVX-512 has 32 vector registers, narrower sets have 16.
        registers=32 if machine.isa.lanes == 16 else 16,
        rate=at.instructions_per_s,
        fused=machine.isa.name != "generic",
    )
    return DeviceDescription(
        name="this machine",
        about="measured",
        printer="cpp",
        workers=torch.get_num_threads(),
        memory_bandwidth=at.memory_bytes_per_s,
        levels=levels,
        vectors=vectors,
        header=machine.isa.header,
    )
