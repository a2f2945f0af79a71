"""What a kind is priced by: a curve and how it is walked. Seconds are made of it in `prices`.

`Stream` moves bytes, `Matmul` multiplies matrices; the words name curves of their own: attention's, that of cached
keys in blocks (`paged`), a scan's, those of the ATen ops of a captured op, a sector and a number for each label, a
table's gradient. Leaves out devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Walk: TypeAlias = Literal["plain", "reduce", "reduce_grad", "gather", "scatter"]
"""plain: elementwise and copies. reduce: norm, softmax, loss forward. reduce_grad: their backward, and sums over rows.
gather: rows by index. scatter: rows added up by index."""


@dataclass(frozen=True, slots=True)
class Stream:
    """How an op without matmuls runs: eager PyTorch's kernels, unless its docstring says that it is fused."""

    kernels: int
    """Kernels launched."""
    reads: float
    """Bytes read over those of the op's work, which counts each tensor once."""
    writes: float
    """The same of bytes written."""
    walk: Walk
    """How memory is walked."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """A contraction, as matmuls: forward, and one for each operand's gradient."""

    rows: Literal["tokens", "experts", "pixels", "batch"]
    """What rows of the left operand are. tokens: of all leading dims, times a weight. experts: of each expert, times
    its own weight. pixels: an implicit matmul, a row for each output pixel. batch: of each matrix of a batch."""
    narrow: bool
    """Whether a plan's eight- or four-bit recipe reaches it."""


Curve: TypeAlias = Stream | Matmul | Literal["free", "attention", "paged", "scan", "aten", "labels", "table"]


def once(walk: Walk = "plain", kernels: int = 1) -> Stream:
    """Each tensor read or written once, by so many kernels together."""
    return Stream(kernels, 1.0, 1.0, walk)


def passes(kernels: int, times: float, walk: Walk = "plain") -> Stream:
    """All bytes so many times."""
    return Stream(kernels, times, times, walk)
