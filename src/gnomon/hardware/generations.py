"""Generations of devices: one `Generation` value for each, in `catalogue/generations.toml`; all rooms ask it.

`generation_of(device)` returns the one that a device names as its `arch`, or the entry that holds for devices of a
generation that nobody wrote down. Leaves out figures of single devices (`Device`) and the curves themselves (`prices`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from gnomon import schema

OTHER = "other"
"""Begins the names of the entries for devices of generations that are not listed; their kind follows."""
GENERIC = "generic"
"""The curves of a generation whose kernels nobody measured: those of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What holds for all devices of one generation."""

    name: str
    """As in `Device.arch`: `hopper`, `cdna3`, `tpu-v5p`."""
    collectives: str
    """The library that moves data between its devices; two libraries do not talk to each other."""
    curves: str
    """The file of efficiency curves: its own, that of a generation with the same matrix units, or GENERIC."""
    numbers_of: str
    """The generation whose fitted numbers it has where it has none of its own; itself where it borrows none."""
    decoding_of: str
    """The generation under which rows of decoding kernels are kept; itself where it borrows none."""
    workspace: Literal["8 MiB", "32 MiB", "none"]
    """What PyTorch gives the matmul library of each handle, in round words (`prices.allocator` has the bytes)."""
    switch_sums: bool
    """Whether switches between its devices add up data in flight."""
    sends_once: bool
    """Whether dispatch kernels that send a token once to each node run on it."""
    devices_a_chip: int
    """Devices that a chip shows to programs, each with its own part of the memory."""
    long_runs: str = ""
    """How long runs were seen to differ from bursts, where it is known: said with predictions."""
    sustained_w_per_flops: float | None = None
    """Watts for each FLOP/s of the dense bf16 peak with which a device sustains that peak; None: not known."""
    matrix_unit: int | None = None
    """Side of the square matrix unit of a TPU; None for other kinds, whose tiles are in their curves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationsFile:
    """The file of all generations."""

    SCHEMA: ClassVar[str] = "gnomon.generations/1"

    generations: tuple[Generation, ...]
    """A row each."""


@cache
def generations() -> Mapping[str, Generation]:
    """All generations by name, those for unlisted ones too."""
    file = schema.load_packaged(GenerationsFile, Path(__file__).parent / "catalogue" / "generations.toml")
    return MappingProxyType({row.name: row for row in file.generations})


def numbers_of(arch: str) -> str:
    """The generation whose fitted numbers a generation has where it has none of its own."""
    return generations()[arch].numbers_of if arch in generations() else arch


def decoding_of(arch: str) -> str:
    """The generation under which rows of decoding kernels of a generation are kept."""
    return generations()[arch].decoding_of if arch in generations() else arch


def generation(arch: str, kind: str) -> Generation:
    """The generation of a name; for one that is not listed, what holds for others of its kind."""
    return generations().get(arch) or generations()[f"{OTHER} {kind}"]
