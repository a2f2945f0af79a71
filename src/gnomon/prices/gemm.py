"""Time of a matmul on one device: tiles in waves over the SMs, then memory, then a launch floor.

    seconds = t0 + (compute^q + memory^q)^(1/q)
    compute = least over tile shapes and splits of k of: waves · (prologue + tile's FLOPs / (SM's peak · efficiency))

Prices rise with every size (a minimum of rising functions) and with batch; they step only where a tile or 64 of k
begins: `TILES` and `K_STEP` name those edges. Leaves out: which layout the operands are in, reading what a kernel
before left in the cache, power limits under long load (`host.sustained`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.hardware.types import Device
from gnomon.prices.curves import Array, Curves, GemmCurve, Size, Time, as_time
from gnomon.prices.stream import cached_efficiency
from gnomon.tensors.dims import DTYPE_BITS

TILES = (
    (256, 128), (128, 256), (256, 64), (64, 256), (128, 128), (128, 64), (64, 128), (64, 64),
    (128, 32), (32, 128), (64, 32), (32, 64), (64, 16), (16, 64), (128, 16), (16, 128),
)  # fmt: skip
"""Rows and columns of the output tiles that libraries choose from."""

SPLITS = (1, 2, 4, 8)
"""Parts into which k may be cut, so that few tiles still fill the device."""

K_STEP = 64
"""k is worked through in steps of this many elements."""

_ROWS, _COLS, _PARTS = np.array([shape + (split,) for shape in TILES for split in SPLITS], dtype=np.float64).T


def gemm_seconds(
    m: Size,
    n: Size,
    k: Size,
    batch: Size = 1,
    *,
    dtype: str,
    device: Device,
    curves: Curves,
    moved_bytes: Size | None = None,
) -> Time:
    """Seconds of `batch` matmuls of m×k by k×n, without host time.

    Sizes: elements, at least 1, broadcast together. dtype: what the units multiply (`bf16`, `tf32`, `fp8` …).
    moved_bytes: operands and result of all matmuls; None counts each once in `dtype`, results of 8 bits and fewer in
    16. Never under the roofline (FLOPs over dense peak, bytes over peak bandwidth). UnpricedError without a peak or
    curve for the dtype. Source of the form: tile and wave quantisation as in NVIDIA's matrix-multiplication guide;
    constants fitted, see `curves`.
    """
    sizes = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k, batch)))
    if any(np.any(size < 1) for size in sizes):
        raise UnpricedError(f"a matmul of {m} x {k} by {k} x {n}, {batch} times, has no price: sizes are at least 1")
    moved = _operand_bytes(*sizes, dtype=dtype) if moved_bytes is None else np.asarray(moved_bytes, dtype=np.float64)
    shape = GemmShapes(m=sizes[0], n=sizes[1], k=sizes[2], batch=sizes[3], moved_bytes=moved)
    return as_time(gemm_model(shape, peak_of(dtype, device), device, curves.gemm_for(dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShapes:
    """The shapes of matmuls m×k by k×n, as arrays of equal shape."""

    m: Array
    """Rows of the result."""
    n: Array
    """Columns of the result."""
    k: Array
    """Length of the sums."""
    batch: Array
    """Numbers of matmuls of this shape that run together."""
    moved_bytes: Array
    """Bytes of operands and results of all of them."""


def peak_of(dtype: str, device: Device) -> float:
    """Dense FLOP/s for a matmul in `dtype`; fp32 runs on matrix units where they do full fp32 (AMD)."""
    return device.flops_per_s("fp32_matrix" if dtype == "fp32" else dtype)


def gemm_model(shape: GemmShapes, peak: float, device: Device, row: GemmCurve) -> Array:
    """`gemm_seconds` for one row of constants; what a fit evaluates. peak: dense FLOP/s."""
    compute = _compute_s(shape, peak / device.num_sms, device.num_sms, row)
    share = cached_efficiency(shape.moved_bytes, device, row.memory_efficiency, row.cache_efficiency)
    memory = shape.moved_bytes / (device.memory_bytes_per_s * share)
    # the larger one is factored out, or the powers of microseconds underflow
    large, small = np.maximum(compute, memory), np.minimum(compute, memory)
    return np.asarray(row.t0_s + large * (1 + (small / large) ** row.overlap_power) ** (1 / row.overlap_power))


def _compute_s(shape: GemmShapes, sm_flops_per_s: float, num_sms: int, row: GemmCurve) -> Array:
    # [..., 1] against [tile shapes × splits of k], of which the best is taken
    m, n, k, batch = (size[..., None] for size in (shape.m, shape.n, shape.k, shape.batch))
    # a tile reads (rows + cols) · k elements for rows · cols · k multiplications: small tiles wait for memory
    efficiency = 1 / (1 + row.tile_overhead + row.tile_edge * (1 / _ROWS + 1 / _COLS))
    # Each part of k is a tile of its own; counted here for each SM.
    tiles = np.ceil(m / _ROWS) * np.ceil(n / _COLS) * batch * _PARTS / num_sms
    # between whole waves (the last one waits for its slowest tile) and tiles that follow each other without a gap
    waves = row.wave_overlap * np.maximum(tiles, 1) + (1 - row.wave_overlap) * np.ceil(tiles)
    # k is padded to whole steps in each split.
    depth = np.ceil(k / (_PARTS * K_STEP)) * K_STEP
    tile_s = row.prologue_s / row.speed + 2 * _ROWS * _COLS * depth / (sm_flops_per_s * efficiency * row.speed)
    return np.asarray((waves * tile_s).min(axis=-1))


def _operand_bytes(m: Array, n: Array, k: Array, batch: Array, *, dtype: str) -> Array:
    bits = DTYPE_BITS.get({"fp8": "fp8_e4m3", "fp4": "fp4_e2m1", "fp32_matrix": "fp32"}.get(dtype, dtype))
    if bits is None:
        raise UnpricedError(f"bytes of a matmul in {dtype!r} are not known; give moved_bytes")
    # Operands at their width, results at 16 bits or more.
    return np.asarray(batch * ((m * k + k * n) * bits + m * n * max(bits, 16)) / 8)
