"""The machine that code is made for: vector width, caches, cores, the compiler and its flags.

`this_machine()` reads it once. A new instruction set is one row of `SETS` and one header in cpp/. Leaves out
bandwidths, which `tile_cost.rates` measures where somebody asks for predicted times.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gnomon.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSet:
    name: str
    """As people call it."""
    header: str
    """The file of cpp/ with its vectors."""
    flags: tuple[str, ...]
    """What the C++ compiler is given for it."""
    lanes: int
    """Floats in a vector."""
    needs: frozenset[str]
    """Flags of /proc/cpuinfo."""


SETS = (
    InstructionSet(
        name="avx512_bf16",
        header="isa_avx512.h",
        flags=("-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512bf16"),
        lanes=16,
        needs=frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "avx512_bf16"}),
    ),
    InstructionSet(
        name="avx512",
        header="isa_avx512.h",
        flags=("-march=x86-64-v4", "-mprefer-vector-width=512"),
        lanes=16,
        needs=frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}),
    ),
    InstructionSet(
        name="avx2",
        header="isa_avx2.h",
        flags=("-march=x86-64-v3",),
        lanes=8,
        needs=frozenset({"avx2", "fma", "f16c", "bmi2"}),
    ),
    InstructionSet(name="generic", header="isa_generic.h", flags=(), lanes=4, needs=frozenset()),
)
"""From the widest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    isa: InstructionSet
    """The widest instruction set that it has, or the one that was asked for."""
    l1_bytes: int
    """First data cache of a core."""
    l2_bytes: int
    """Second cache of a core."""
    l3_bytes: int
    """Last cache, which cores share."""
    line_bytes: int
    """A line of the caches."""
    cores: int
    """Logical CPUs that this process may run on."""
    model: str
    """Name of the processor."""


@cache
def this_machine() -> Machine:
    flags, model = _cpuinfo()
    isa = _asked_set(os.environ.get("GNOMON_ISA_NAME"), flags)
    return Machine(
        isa=isa,
        l1_bytes=_cache("index0", 32 << 10),
        l2_bytes=_cache("index2", 512 << 10),
        l3_bytes=_cache("index3", 16 << 20),
        line_bytes=64,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        model=model,
    )


def _asked_set(instruction_set: str | None, flags: frozenset[str]) -> InstructionSet:
    """The widest that the processor has, or the one that is asked for. InputError for one that is not there."""
    # Never empty: the generic set, the last, needs no flag.
    there = [one for one in SETS if one.needs <= flags]
    if not instruction_set:
        return there[0]
    if found := [one for one in there if one.name == instruction_set]:
        return found[0]
    has = ", ".join(one.name for one in there)
    raise InputError(f"GNOMON_ISA_NAME={instruction_set} is no instruction set that this processor has; it has {has}")


def has_features(names: frozenset[str]) -> bool:
    """Whether the processor has all of these flags of /proc/cpuinfo, and GNOMON_ISA_NAME asks for no set that is
    narrower than they are."""
    lanes = this_machine().isa.lanes
    most = 4 if not names else 16 if any(name.startswith("avx512") for name in names) else 8
    return names <= _cpuinfo()[0] and most <= lanes


@cache
def cxx() -> str | None:
    """The C++ compiler, or None: CXX where it is set, else g++ or c++."""
    compiler = os.environ.get("CXX")
    return next((path for name in ([compiler] if compiler else ["g++", "c++"]) if (path := shutil.which(name))), None)


def _cpuinfo() -> tuple[frozenset[str], str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset(), platform.machine()
    # From the end, so that of all processors the first one's fields stay.
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    return frozenset(fields.get("flags", "").split()), fields.get("model name", platform.machine())


def _cache(which: str, default: int) -> int:
    try:
        text = Path(f"/sys/devices/system/cpu/cpu0/cache/{which}/size").read_text(encoding="utf-8").strip()
        return int(text[:-1]) << {"K": 10, "M": 20}[text[-1]]
    except (OSError, ValueError, KeyError):
        return default
