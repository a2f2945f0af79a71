"""Kernels of `triton_text` loaded and called: blocks from sizes, partial results, which of the functions fits.

`launchers` takes kernels and gives functions `(sizes, *tensors) -> 0 or 1`; 1 asks for ATen, where a row is longer than
a block and cannot be walked. Leaves out text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gnomon.compiler.text.triton_module import module_of
from gnomon.compiler.text.triton_text import TritonKernel
from gnomon.compiler.tiles.sizes import product, symbols, text

log = logging.getLogger("gnomon.compiler")
LONGEST = 16_384
"""Points of a row that one program holds in registers; longer rows are walked."""
AREA = 4_096
"""Points of a block, where the row leaves a choice."""
WALKED = 4_096
"""Points of a block of a row that is walked."""
ACROSS = 128
"""Columns of a block in which partial results are added up."""
MOST_KNOWN = 1024
"""Sizes and alignments of a kernel that are remembered."""
HELD = {"F": torch.float32, "D": torch.float64, "L": torch.int64, "B": torch.int32}
"""Types of partial results by kind."""
MOST_PARTS = 512
"""Programs beside each other that add up columns: enough for the multiprocessors of a GPU."""


def launchers(kernels: Sequence[TritonKernel]) -> list[Callable[..., int] | None]:
    """A function for each kernel; None where its text cannot be loaded."""
    return [_loaded(kernel) for kernel in kernels]


def _loaded(kernel: TritonKernel) -> Callable[..., int] | None:
    try:
        return Launcher(kernel, module_of(kernel.source))
    except (OSError, SyntaxError, ImportError) as error:
        log.warning("a kernel cannot be kept or loaded (%s): its operations stay PyTorch's", error)
        return None


@dataclass(frozen=True, slots=True)
class _LaunchStep:
    """A function of a kernel at sizes that were seen."""

    function: Any
    """As Triton compiled it, or the function to be compiled."""
    grid: tuple[int, int, int]
    partial: tuple[tuple[int, torch.dtype], ...]
    """Elements and types of partial results."""
    rest: tuple[int, ...]
    """Arguments after the pointers."""


class Launcher:
    """A kernel as a function of its sizes and tensors: inputs by slot, then outputs. What Triton compiled for sizes and
    alignments that came before is called directly: looking it up again takes Triton longer than a small kernel."""

    def __init__(self, kernel: TritonKernel, module: Any) -> None:
        self.kernel, self.module = kernel, module
        self.known: dict[tuple[Any, ...], tuple[_LaunchStep, ...]] = {}
        self.interpreted = os.environ.get("TRITON_INTERPRET") == "1"

    def __call__(self, sizes: tuple[int, ...], *tensors: torch.Tensor) -> int:
        # Triton compiles otherwise for pointers that are multiples of 16 bytes.
        key = (sizes, *[tensor.data_ptr() % 16 for tensor in tensors])
        steps = self.known.get(key)
        if steps is not None:
            device = tensors[0].device
            partial = [torch.empty(count, dtype=dtype, device=device) for count, dtype in steps[0].partial]
            for step in steps:
                step.function[step.grid](*tensors, *partial, *step.rest)
            return 0
        first = self._first(sizes, tensors)
        if first is None:
            return 1
        if not self.interpreted:
            if len(self.known) > MOST_KNOWN:
                self.known.clear()
            self.known[key] = first
        return 0

    def _first(self, sizes_of_call: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> tuple[_LaunchStep, ...] | None:
        """Calls it, and returns how to do so again; None where it does not fit."""
        kernel, (rows, points, *sizes) = self.kernel, sizes_of_call
        if not rows or not points:
            return None
        width = _power(points)
        walked = kernel.nest.has_row and width > LONGEST
        if walked and not kernel.walks:
            return None
        wide = (WALKED if walked else width) if kernel.nest.has_row else min(width, 1024)
        high = max(1, min(_power(rows), AREA // wide))
        tiles = 1 if kernel.nest.has_row else -(-points // wide)
        blocks, chunk = -(-rows // high), 1
        if kernel.columns:
            # A program adds up so many blocks of rows before it leaves a partial result, so that there are at most
            # MOST_PARTS of them.
            chunk = -(-blocks // max(1, MOST_PARTS // tiles))
        parts = -(-blocks // chunk)
        counts = [(i, parts * points) for i in kernel.columns] + [(i, parts * tiles) for i in kernel.totals]
        partial = tuple((count, HELD[kernel.nest.body.code[i].kind]) for i, count in counts)
        # Places are computed in 32 bits unless `WIDE` says that they do not fit.
        far = max(t.untyped_storage().nbytes() for t in tensors) >= 2**31 or rows * points >= 2**31
        warps = 4 if high * wide <= 4096 else 8 if high * wide <= 8192 else 16
        options = {"num_warps": warps, "debug": kernel.checks, "sanitize_overflow": False}
        buffers = [torch.empty(count, dtype=dtype, device=tensors[0].device) for count, dtype in partial]
        across = min(width, ACROSS)
        todo = [(self.module.walk if walked else self.module.whole, parts * tiles, (high, wide))]
        if kernel.after:
            todo.append((self.module.after, -(-points // across) if kernel.columns else 1, (1, across)))
        steps = []
        for function, grid, blocked in todo:
            rest = (*sizes, parts, tiles, chunk, far, *blocked)
            compiled = function[(grid, 1, 1)](*tensors, *buffers, *rest, **({} if self.interpreted else options))
            steps.append(_LaunchStep(compiled, (grid, 1, 1), partial, rest))
        return tuple(steps)


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


class SizeTable:
    """(rows, points of a row, the kernel's sizes) for each set of the symbols' values that came."""

    def __init__(self, kernel: TritonKernel, names: Sequence[str], scope: dict[str, Any]) -> None:
        nest = kernel.nest
        rows, points = (product(nest.sizes[a] for a in axes) for axes in (nest.outer, nest.inner))
        body = ", ".join(text(size) for size in (rows, points, *kernel.sizes))
        inside = dict(scope)
        # As Python's own code, so that no call needs sympy.
        exec(f"def sizes({', '.join(names)}):\n    return ({body},)", inside)
        self.sizes, self.names = inside["sizes"], tuple(names)

    def __call__(self, *values: int) -> tuple[int, ...]:
        return self.sizes(*values)  # type: ignore[no-any-return]


def symbol_names(kernel: TritonKernel) -> list[str]:
    """Names of the sizes that a call asks for, sorted."""
    nest = kernel.nest
    every = [*kernel.sizes, *(nest.sizes[a] for a in (*nest.outer, *nest.inner))]
    return sorted({str(s) for size in every for s in symbols(size)})
