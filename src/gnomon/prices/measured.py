"""Seconds of operations on a machine that was measured: interpolation between the points of its tables.

`table_seconds` reads one table at any sizes; `matmul_seconds`, `attention_points`, `stream_points`, `rule_seconds` and
`communication_seconds` know which table and which sizes an operation has. Between points the logarithm of seconds is
linear in the logarithms of the sizes; beyond the largest they grow as the work does, and below the smallest they stay.
Never falling with size, exact at the points where those do not fall themselves. Leaves out what was not measured:
None, and the caller's curves take over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.hardware.measured import Measured, Table
from gnomon.prices.curves import Array, Size, Time, as_time
from gnomon.tensors.dims import DTYPE_BITS

GROWTH: Mapping[str, float] = {"seq": 2.0, "ranks": 1.0}
"""Maps an axis to the power of the size that seconds grow with beyond the largest point; 1 where it is not named."""

STREAM_WIDTHS = 3
"""Tensors that the table of `add` moves: two read, one written. Stands for any other op by its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Grid:
    """A table ready to be read: logs of its sizes and of its seconds."""

    names: tuple[str, ...]
    logs: tuple[Array, ...]
    """Logs of the sizes, by axis."""
    values: Array
    """Log seconds, rising along every axis."""


@lru_cache(maxsize=32)
def _grids(measured: Measured) -> Mapping[tuple[str, str, str], _Grid]:
    return {table.key: _grid(table) for table in measured.tables}


def _grid(table: Table) -> _Grid:
    """Repeats are noisy: where a larger size was faster, both get the geometric mean of the bounds that rise."""
    values = np.log(np.array(table.seconds)).reshape([len(axis.sizes) for axis in table.axes])
    # over: running maximum from small sizes; under: running minimum from large ones. Both rise, and so does their mean.
    over, under = values, values
    for axis in range(values.ndim):
        over = np.maximum.accumulate(over, axis=axis)
        under = np.flip(np.minimum.accumulate(np.flip(under, axis), axis=axis), axis)
    return _Grid(
        names=tuple(axis.name for axis in table.axes),
        logs=tuple(np.log(np.array(axis.sizes, dtype=np.float64)) for axis in table.axes),
        values=(over + under) / 2,
    )


def has(measured: Measured, what: str, dtype: str = "", direction: str = "") -> bool:
    """Whether there is such a table."""
    return (what, dtype, direction) in _grids(measured)


def table_seconds(measured: Measured, what: str, dtype: str = "", direction: str = "", **sizes: Size) -> Time:
    """Seconds of one operation at these sizes, one for each axis of its table; arrays broadcast.

    UnpricedError without such a table, or for sizes under 1.
    """
    grid = _grids(measured).get((what, dtype, direction))
    if grid is None:
        named = " ".join(part for part in (what, dtype, direction) if part)
        raise UnpricedError(f"{named} was not measured on {measured.host}; run `gnomon calibrate` with this version")
    if unknown := [name for name in grid.names if name not in sizes]:
        raise UnpricedError(
            f"the table of {what} on {measured.host} goes by {unknown[0]!r}, and is asked for by "
            f"{', '.join(sizes) or 'nothing'}; run `gnomon calibrate` with this version"
        )
    log_sizes = [np.log(np.asarray(sizes[name], dtype=np.float64)) for name in grid.names]
    if any(np.any(log < 0) for log in log_sizes):
        raise UnpricedError(f"{what} of {sizes} has no price: sizes are at least 1")
    # Multilinear in logs: each axis gives two neighbours with weights 1 - share and share; corners multiply them.
    corners, growth = [], 0.0
    for name, log, known in zip(grid.names, log_sizes, grid.logs, strict=True):
        inside = np.clip(log, known[0], known[-1])
        # Beyond the largest point seconds grow with a fixed power, so the excess of the log is added after.
        growth = growth + GROWTH.get(name, 1.0) * (np.maximum(log, known[-1]) - known[-1])
        lower = np.clip(np.searchsorted(known, inside, side="right") - 1, 0, max(len(known) - 2, 0))
        right = np.minimum(lower + 1, len(known) - 1)
        # An axis with one point is its own neighbour: the share is 0, and the gap is only not to be 0.
        gap = np.where(right > lower, known[right] - known[lower], 1.0)
        share = (inside - known[lower]) / gap
        corners.append(((lower, 1 - share), (right, share)))
    log_s: Array | float = np.asarray(growth, dtype=np.float64)
    for corner in product(*corners):
        weight: Any = 1.0
        for _, share in corner:
            weight = weight * share
        log_s = log_s + weight * grid.values[tuple(lower for lower, _ in corner)]
    return as_time(np.exp(np.asarray(log_s)))


def matmul_seconds(
    measured: Measured, m: Size, n: Size, k: Size, batch: Size, *, dtype: str, role: str, peak: float
) -> Time:
    """Seconds of `batch` matmuls that make m×n from sums over k, each as long as a lone one.

    role: `forward`, `input_grad` or `weight_grad`, which differ in how the operands lie. peak: FLOP/s that no matmul
    is faster than. UnpricedError if the dtype was not measured.
    """
    one = table_seconds(measured, "matmul", dtype, role, m=m, n=n, k=k)
    flops = 2.0 * np.asarray(m, np.float64) * np.asarray(n, np.float64) * np.asarray(k, np.float64)
    return as_time(np.asarray(batch, np.float64) * np.maximum(one, flops / peak))


def attention_points(
    measured: Measured, heads: Size, pairs: Size, head_dim: int, *, dtype: str, backward: bool
) -> Time:
    """Seconds of attention for `heads` (of all sequences), each a causal square with the area of `pairs`: queries
    times keys. UnpricedError if the dtype was not measured."""
    way = "backward" if backward else "forward"
    # A causal square of area `pairs` has side sqrt(pairs).
    side = np.sqrt(np.maximum(np.asarray(pairs, np.float64), 1.0))
    return table_seconds(measured, "attention", dtype, way, heads=heads, seq=side, head_dim=head_dim)


def stream_points(measured: Measured, nbytes: Size, *, kernels: int = 1) -> Time:
    """Seconds of kernels that move so many bytes in all, none of which was measured by itself: as sums in fp32 do."""
    width = STREAM_WIDTHS * DTYPE_BITS["fp32"] / 8
    elements = np.maximum(np.asarray(nbytes, np.float64) / (kernels * width), 1.0)
    return as_time(kernels * np.asarray(table_seconds(measured, "add", "fp32", "forward", elements=elements)))


def rule_seconds(
    measured: Measured, kind: str, dtype: str, *, rows: Size, width: Size, backward: bool, by_rows: bool
) -> Time | None:
    """Seconds of an op that may have a table, over rows and width or over elements; None if it has none."""
    direction = "backward" if backward else "forward"
    if not has(measured, kind, dtype, direction):
        return None
    if by_rows:
        return table_seconds(measured, kind, dtype, direction, rows=rows, width=width)
    return table_seconds(measured, kind, dtype, direction, elements=np.asarray(rows, np.float64) * width)


def communication_seconds(measured: Measured, kind: str, ranks: int, nbytes: Size) -> Time | None:
    """Seconds of a collective of `ranks` processes on buffers of `nbytes`; None if it was not measured."""
    if not has(measured, kind):
        return None
    size = np.maximum(np.asarray(nbytes, np.float64), 1.0)
    if kind == "send_recv":
        return table_seconds(measured, kind, bytes=size)
    return table_seconds(measured, kind, ranks=ranks, bytes=size)
