"""Instruction sets of processors, and kernels that all processes of a job have: EasyScale's determinism level D2.

torch chooses its kernels by the processor, and those for AVX-512 and for AVX2 add up in different orders. `common` is
the set that a job's processes agree on, and `compute_with` makes this process use it, before its first operation:
torch's own kernels of that set, the branch of MKL that has the same bits on Intel's processors and others, and neither
oneDNN nor NNPACK, which look at the processor themselves. Leaves out who is asked and when (`kernels`).
Source: EasyScale (SC 2023) for the level; oneMKL's developer guide, "Specifying Code Branches".
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from gnomon.errors import PlanError, RunError

CAPABILITY = "ATEN_CPU_CAPABILITY"
"""Variable in which torch is told to use kernels of a lesser set."""
SETS = ("default", "avx2", "avx512")
"""By what torch calls them there, each within the next."""
MOST = "avx2"
"""The largest that a job agrees on: what today's x86-64 processors all have, so that its bits are theirs too that join
later."""


def own() -> str:
    """The set whose kernels torch would use in this process: the processor's, or less where CAPABILITY says so.

    PlanError for processors that have none of SETS.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise PlanError(f"determinism D2 is for x86-64 processors, not {platform.machine()}; use D1")
    cpu: Any = torch.cpu
    has = "avx512" if cpu._is_avx512_supported() else "avx2" if cpu._is_avx2_supported() else "default"
    limit = os.environ.get(CAPABILITY, has)
    return min(has, limit if limit in SETS else has, key=SETS.index)


def kind() -> str:
    """What decides the last digits of this process's results, for people: its kernels and its processor."""
    machine = platform.machine().lower()
    kernels = f"{own()} kernels" if machine in ("x86_64", "amd64") else "kernels"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), machine)
    return f"{kernels} on {model}"


def common(found: Iterable[str]) -> str:
    """What all of them have, at most MOST."""
    return min((MOST, *found), key=SETS.index)


def has(found: str, name: str) -> bool:
    """Whether a process of the one set has the kernels of the other."""
    return SETS.index(found) >= SETS.index(name)


def compute_with(name: str) -> None:
    """Makes this process compute with kernels of that set alone. To be called before its first operation on tensors:
    RunError where torch had chosen its kernels already."""
    os.environ[CAPABILITY] = name
    os.environ["MKL_CBWR"] = "COMPATIBLE"
    os.environ["ONEDNN_MAX_CPU_ISA"] = {"default": "SSE41", "avx2": "AVX2"}[name]
    torch.backends.mkldnn.set_flags(_enabled=False)
    torch.backends.nnpack.set_flags(_enabled=False)
    if (chosen := torch.backends.cpu.get_cpu_capability().lower().replace(" ", "")) != name:
        raise RunError(f"torch computes with {chosen} kernels in this process, and the job with {name}")
