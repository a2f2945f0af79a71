"""Dims, dtypes and sizes: the numbers under every shape.

A `Dim` has a name and either a size, or factors (`hidden = heads × head_dim`), or neither: then the workload gives its
size (`batch`, `seq`). Functions here turn dims into numbers given `sizes`, a mapping from dim name to a Python int
(results are exact ints) or a numpy array (many shapes at once; results are float64 with 53 bits).
`sizes` also overrides a dim's own size by name: that is how a local, sharded shape is asked for.
Leaves out: layouts (room `sharding`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import GraphError, nearest

Number: TypeAlias = "int | NDArray[np.float64]"
"""An exact Python int, or float64 values, one for each shape asked about."""

Sizes: TypeAlias = "Mapping[str, int | NDArray[Any]]"
"""Dim name -> size: what the workload gives (`batch`, `seq`), and local sizes that replace a dim's own."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")

DTYPE_BITS: Mapping[str, int] = {
    "fp64": 64,
    "fp32": 32,
    "tf32": 32,  # stored as fp32; only the tensor core reads fewer bits
    "bf16": 16,
    "fp16": 16,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "fp4_e2m1": 4,
    "int64": 64,
    "int32": 32,
    "int8": 8,
    "uint8": 8,
    "bool": 8,  # torch stores a boolean in a byte; so do dropout masks
}
"""Bits of one element by dtype name."""

SYMBOLIC_DTYPES = ("compute", "param")
"""Names that a plan's precision resolves: activations are `compute`, parameters `param`."""


def check_name(name: str, what: str) -> None:
    """Raise GraphError unless `name` is letters, digits, `_`, `.`, `-` and does not start with a digit."""
    if not _NAME.fullmatch(name):
        raise GraphError(f"{what} name {name!r} is not legal: use letters, digits, '_', '.', '-'; start with a letter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """A named extent of a tensor. Two dims are the same iff all fields are equal."""

    name: str
    """`batch seq heads kv_heads head_dim ffn experts vocab …`; a scope is a dotted prefix (`vision.heads`)."""
    size: int | None = None
    """Elements, at least 1. None: given by the workload, or by the factors."""
    factors: tuple[Dim, ...] = ()
    """A product dim: outermost first. Sharding a factor shards the product."""
    same_as: str = ""
    """A second run over the same axis (`kv_seq` of `seq`): its size when `sizes` does not name it."""

    def __post_init__(self) -> None:
        check_name(self.name, "dim")
        if self.size is not None and (isinstance(self.size, bool) or self.size < 1):
            raise GraphError(f"dim {self.name!r} has size {self.size}: a size is an integer of at least 1")
        if self.factors and (self.size is not None or self.same_as):
            raise GraphError(f"dim {self.name!r} has factors and a size of its own: leave size and same_as out")
        names = [atom.name for factor in self.factors for atom in factor.atoms]
        if len(set(names)) != len(names):
            raise GraphError(f"dim {self.name!r} has a factor twice: {' × '.join(names)}")

    @property
    def atoms(self) -> tuple[Dim, ...]:
        """The dims that are not products, outermost first: itself, or those of its factors."""
        return tuple(a for f in self.factors for a in f.atoms) if self.factors else (self,)

    def __str__(self) -> str:
        if self.factors:
            return f"{self.name}=({'×'.join(map(str, self.factors))})"
        return self.name if self.size is None else f"{self.name}={self.size}"


def product(name: str, *factors: Dim) -> Dim:
    """A dim that is the product of others, outermost first: `product("hidden", heads, head_dim)`."""
    return Dim(name=name, factors=factors)


def _number(value: int | NDArray[Any], name: str) -> Number:
    """A size as an exact int or float64 array (int64 sums of FLOPs overflow); GraphError if it is under 1."""
    if isinstance(value, (bool, float)):
        raise GraphError(f"size of dim {name!r} is {value!r}: give an integer")
    if isinstance(value, np.ndarray):
        array = value.astype(np.float64)
        if array.size and not bool((array >= 1).all()):
            raise GraphError(f"size of dim {name!r} has values under 1 (smallest {array.min()})")
        return array
    if value < 1:
        raise GraphError(f"size of dim {name!r} is {value}: a size is at least 1")
    return int(value)


def size_of(dim: Dim, sizes: Sizes) -> Number:
    """Counts the elements along `dim`. `sizes` by name first, then its factors, its own size, and what it is `same_as`.

    Raises GraphError if nothing gives the size.
    """
    if dim.name in sizes:
        return _number(sizes[dim.name], dim.name)
    if dim.factors:
        return numel(dim.factors, sizes)
    if dim.size is not None:
        return dim.size
    if dim.same_as:
        if dim.same_as in sizes:
            return _number(sizes[dim.same_as], dim.same_as)
        raise GraphError(f"dim {dim.name!r} has no size: give sizes[{dim.name!r}] or sizes[{dim.same_as!r}]")
    hint = nearest(dim.name, sizes)
    raise GraphError(f"dim {dim.name!r} has no size: give sizes[{dim.name!r}], as in {{{dim.name!r}: 4096}}{hint}")


def numel(dims: Iterable[Dim], sizes: Sizes) -> Number:
    """The number of elements of a shape: the product of its dims' sizes; 1 for none (a scalar)."""
    total: Number = 1
    for dim in dims:
        total = total * size_of(dim, sizes)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """What the symbolic dtypes stand for; from a plan's precision."""

    compute: str
    """dtype of activations."""
    param: str
    """dtype of the parameters that kernels read (not of an fp32 master copy)."""

    def __post_init__(self) -> None:
        for dtype in (self.compute, self.param):
            if dtype not in DTYPE_BITS:
                raise GraphError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPE_BITS)}; known: {', '.join(DTYPE_BITS)}")

    def resolve(self, dtype: str) -> str:
        """A concrete dtype name for `dtype`, which may be `compute` or `param`."""
        return {"compute": self.compute, "param": self.param}.get(dtype, dtype)

    def bits(self, dtype: str) -> int:
        """Bits of one element of `dtype`, symbolic or not."""
        return DTYPE_BITS[self.resolve(dtype)]


BF16 = Dtypes(compute="bf16", param="bf16")
"""The usual mixed precision: kernels read bf16 parameters and activations."""
