"""What a kernel or an ATen op is: matmul, attention, norm, all-reduce …, by the names in `kinds.toml`.

A kernel is first judged by its own name where that is one of a collective, then by the ATen op that launched it (the
innermost that has a rule), then by its own name. What no row names is `other`: shown as such, with its name.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from gnomon.errors import InputError

OTHER = "other"

COMPILED = "fused by a compiler"
"""The kind whose ops are whole graphs."""

Role = Literal["compute", "communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKind:
    """One row of `kinds.toml`."""

    kind: str
    """Name of the kind."""
    role: Role
    """`compute` or `communication`."""
    ops: tuple[str, ...]
    """Names of ATen ops and of the host's marks; `*` stands for anything."""
    kernels: tuple[str, ...]
    """Parts of names of kernels, in lower case."""


@cache
def kernel_kinds() -> tuple[KernelKind, ...]:
    """The rows, in the order in which they are tried."""
    rows = tomllib.loads((Path(__file__).parent / "kinds.toml").read_text(encoding="utf-8"))["kind"]
    out = tuple(
        KernelKind(kind=row["kind"], role=row["role"], ops=tuple(row["ops"]), kernels=tuple(row["kernels"]))
        for row in rows
    )
    for row in out:
        if row.role not in ("compute", "communication") or row.kind == OTHER:
            raise InputError(f"kinds.toml: {row.kind!r} has the role {row.role!r}; compute or communication")
    return out


@cache
def kind_of_op(name: str) -> KernelKind | None:
    """The kind of work that an ATen op or a mark of this name does; None if no pattern matches."""
    return next((row for row in kernel_kinds() if any(fnmatchcase(name, pattern) for pattern in row.ops)), None)


@cache
def kind_of_kernel(name: str) -> KernelKind | None:
    """The kind of work that a device kernel of this name does; None if no pattern matches."""
    # fbgemm_gpu is the namespace of every kernel of a library, most of which are no GEMMs.
    lower = name.lower().replace("fbgemm_gpu", "")
    return next((row for row in kernel_kinds() if any(part in lower for part in row.kernels)), None)
