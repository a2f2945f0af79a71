"""Efficiency curves: which part of a device's peaks its kernels reach, with where each number is known from.

`curves_for(device)` returns the frozen `Curves` of one device: a row for each dtype, attention kernel and kind of
streaming, read from `curves/<arch>.toml`, or derived from another row and then named in `.assumptions`. Rows are fitted
by `evidence/fits/fit_kernels`. Leaves out: the formulas (`gemm`, `attention`, `stream`), links, and clocks that fall
under long load (`host.sustained`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gnomon import schema
from gnomon.errors import InputError, UnpricedError, nearest
from gnomon.hardware.generations import GENERIC
from gnomon.hardware.measured import Measured
from gnomon.hardware.types import Device
from gnomon.ops.curve import Walk
from gnomon.units import Seconds

Array: TypeAlias = NDArray[np.float64]
"""Float64 values, one for each shape."""

Time: TypeAlias = "float | NDArray[np.float64]"
"""Seconds: a float, or an array with one for each shape in the question."""

Size: TypeAlias = "int | float | NDArray[np.float64]"
"""A size in elements, or an array of sizes."""

AttentionKernel: TypeAlias = Literal["flash1", "flash2", "flash3", "cudnn", "triton"]
"""flash1: the first FlashAttention (PyTorch's own before 2.2). flash2: FlashAttention-2 (PyTorch's own since). flash3:
FlashAttention-3 on Hopper, 4 on Blackwell. cudnn: cuDNN's fused attention, as Transformer Engine calls it. triton:
Triton's FlashAttention of 2023."""

CublasRelease: TypeAlias = Literal["12.1"]
"""Releases of cuBLAS of which there is data apart from that of the GEMM rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The source of the constants of one row."""

    data: str
    """What was fitted or read: device, library, number of shapes; or what was assumed."""
    date: str
    """The date of the fit or the reading, YYYY-MM-DD."""
    error: str
    """Median and 90th percentile of the absolute error on shapes kept out of the fit; `unchecked` if there is none."""
    range: str
    """The shapes in which the constants hold."""

    def __post_init__(self) -> None:
        if not (self.data and self.date and self.error and self.range):
            raise InputError(f"provenance {self.data!r}: data, date, error and range must all be said")


def _between(what: str, low: float, high: float, **values: float) -> None:
    for name, value in values.items():
        if not low <= value <= high:
            raise InputError(f"{what}: {name} must be from {low:g} to {high:g}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve:
    """Constants of `gemm.gemm_seconds` for one dtype."""

    dtype: str
    """`bf16` (also stands for fp16), `tf32`, `fp32`, `fp8`, `fp4`, `int8`: the rate that the matmul runs at."""
    t0_s: Seconds
    """Seconds of an empty kernel on the device."""
    tile_overhead: float
    """Loss of the matrix units however large the tile: efficiency is 1 / (1 + overhead + edge·(1/rows + 1/cols))."""
    tile_edge: float
    """Loss that falls with the size of the tile, in elements."""
    prologue_s: Seconds
    """Seconds of filling and draining the pipeline of a tile."""
    wave_overlap: float
    """Share of a last wave that is not full which costs nothing. 0: it costs a whole wave; 1: work spreads evenly."""
    memory_efficiency: float
    """Part of the memory's peak that operands larger than the last cache move at."""
    cache_efficiency: float
    """Part of the memory's peak that operands reach which fit the last cache; at most 1, so that no price is under the
    roofline."""
    overlap_power: float
    """q in (compute^q + memory^q)^(1/q): 1 adds them, large hides the smaller."""
    provenance: Provenance
    """Where the row's constants are known from."""
    device: str = ""
    """The only device of the generation that the row is for; empty: all."""
    speed: float = 1.0
    """Speed of the matrix units over what the constants say, under a library older than theirs."""

    def __post_init__(self) -> None:
        what = f"GEMM curve {self.dtype} {self.device}".rstrip()
        _between(what, 0, 1e-3, t0_s=self.t0_s, prologue_s=self.prologue_s)
        _between(what, 0, 1000, tile_overhead=self.tile_overhead, tile_edge=self.tile_edge)
        _between(what, 0, 1, wave_overlap=self.wave_overlap)
        _between(what, 0.1, 1, speed=self.speed)
        _between(what, 0.01, 1, memory_efficiency=self.memory_efficiency, cache_efficiency=self.cache_efficiency)
        _between(what, 1, 100, overlap_power=self.overlap_power)


BEND_WAVES = (1, 4, 16, 64, 256)
"""Blocks over SMs at which an attention curve may bend: lines in logarithms between, as at the ends beyond. From one to
the next a factor falls by a fifth at most, so that more blocks never take less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """Constants of `attention.attention_seconds` for one kernel, direction and class of head sizes."""

    kernel: AttentionKernel
    """The implementation."""
    direction: Literal["forward", "backward"]
    """Forward, or the backward with its recomputation of the probabilities."""
    head_dim: int
    """Largest head size of the class."""
    t0_s: Seconds
    """Seconds of an empty kernel (backward: of its three kernels together)."""
    efficiency: float
    """Part of the peak that one SM reaches inside a block of queries."""
    prologue_s: Seconds
    """Seconds of starting and finishing a block of queries."""
    lone_block: float
    """Time of a block with an SM to itself over its share of a full SM's time: under 1 where an SM holds several."""
    tail_power: float
    """p in (work^p + longest block^p)^(1/p): 1 adds the last block to the work, large hides it."""
    memory_efficiency: float
    """Part of the memory's peak at which q, k, v and the output move; added to the compute time."""
    provenance: Provenance
    """Where the row's constants are known from."""
    device: str = ""
    """The only device of the generation that the row is for; empty: all."""
    block: int = 128
    """Queries of a block (backward: keys)."""
    wave_overlap: float | None = None
    """Share of a last wave that costs nothing, as in GemmCurve, without a mask; None: blocks are added up as under
    one."""
    bend: tuple[float, ...] = ()
    """What measured compute times are over the formula at `BEND_WAVES` waves of blocks; empty: nothing is left."""

    def __post_init__(self) -> None:
        what = f"attention curve {self.kernel} {self.direction} {self.head_dim}"
        _between(what, 1, 1024, block=self.block)
        if self.bend and len(self.bend) != len(BEND_WAVES):
            raise InputError(f"{what}: bend has a factor for each of {BEND_WAVES} waves")
        # A factor may fall by a fifth at most from one knot to the next, while blocks grow fourfold: time never falls.
        for less, higher in zip(self.bend, self.bend[1:], strict=False):
            _between(f"{what}: bend over the factor before", 0.8, 2, factor=higher / less)
        _between(what, 0, 1, wave_overlap=self.wave_overlap or 0.0)
        _between(what, 0, 1e-3, t0_s=self.t0_s, prologue_s=self.prologue_s)
        _between(what, 0.01, 2, lone_block=self.lone_block)
        _between(what, 1, 100, tail_power=self.tail_power)
        _between(what, 0.01, 1, efficiency=self.efficiency, memory_efficiency=self.memory_efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCurve:
    """Constants of `stream.stream_seconds` for one kind of access."""

    kind: Walk
    """The way memory is walked."""
    t0_s: Seconds
    """Seconds of an empty kernel."""
    efficiency: float
    """Part of the memory's peak on data larger than the last cache."""
    cache_efficiency: float
    """Part of the memory's peak on data that fits the last cache; at most 1, so that no price is under the roofline."""
    provenance: Provenance
    """Where the row's constants are known from."""
    device: str = ""
    """The only device of the generation that the row is for; empty: all."""

    def __post_init__(self) -> None:
        what = f"stream curve {self.kind} {self.device}".rstrip()
        _between(what, 0, 1e-3, t0_s=self.t0_s)
        _between(what, 0.01, 1, efficiency=self.efficiency, cache_efficiency=self.cache_efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """How fast matmuls are under an older cuBLAS than that of the GEMM rows."""

    cublas: CublasRelease
    """The release of cuBLAS."""
    speed: float
    """Speed of matmuls over the rows' own."""
    provenance: Provenance
    """Where the speed is known from."""

    def __post_init__(self) -> None:
        _between(f"products under cuBLAS {self.cublas}", 0.1, 1, speed=self.speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudnnRelease:
    """How fast cuDNN's fused attention is in one of its releases."""

    cudnn: str
    """The release, as in `9.4`."""
    forward: float
    """Speed of the forward over that of the rows."""
    backward: float
    """Speed of gradients over that of the rows."""
    head_dim: int
    """The class of head sizes that was measured."""
    provenance: Provenance
    """Where the speeds are known from."""

    def __post_init__(self) -> None:
        _between(f"attention of cuDNN {self.cudnn}", 0.5, 2, forward=self.forward, backward=self.backward)

    @property
    def number(self) -> int:
        """The number by which releases are ordered."""
        return release_number(self.cudnn)


def release_number(release: str) -> int:
    """Orders releases: `9.13` and `9.13.1` are 913."""
    major, minor = release.split(".")[:2]
    # A patch release is left out: speeds are kept by minor release.
    return int(major) * 100 + int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFile:
    """One file of curves."""

    SCHEMA: ClassVar[str] = "gnomon.curves/1"

    arch: str
    """Name of the generation, as in Device."""
    measured: tuple[str, ...]
    """Devices whose kernels were measured; empty: none, all rows are assumed."""
    serving_attention: AttentionKernel
    """What inference engines run attention as: they take the newest kernel of a generation."""
    gemm: tuple[GemmCurve, ...] = ()
    """Rows of matmuls."""
    attention: tuple[AttentionCurve, ...] = ()
    """Rows of fused attention."""
    stream: tuple[StreamCurve, ...] = ()
    """Rows of kernels that stream memory."""
    libraries: tuple[Library, ...] = ()
    """Older libraries that are known to be slower on this generation."""
    cudnn: tuple[CudnnRelease, ...] = ()
    """Releases of cuDNN whose attention was measured, in order."""
    default_attention: AttentionKernel = "flash2"
    """What attention runs as where the stack does not say: what PyTorch's own scaled_dot_product_attention prefers on
    this generation (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: FlashAttention-2 up to Hopper, cuDNN on
    Blackwell, for which FlashAttention-2 has no kernels)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Every curve of one device."""

    device: str
    """The device's name in the catalogue."""
    attention_kernel: AttentionKernel
    """The kernel that `attention` ops of a lowered block run as."""
    gemm: tuple[GemmCurve, ...]
    """Rows of matmuls, by dtype."""
    attention: tuple[AttentionCurve, ...]
    """Rows of attention by kernel, direction and head size, ascending in the last."""
    stream: tuple[StreamCurve, ...]
    """Rows of streaming kernels, by kind."""
    assumptions: tuple[str, ...]
    """What was not measured on this device; to be shown next to every number made with it."""

    def gemm_for(self, dtype: str) -> GemmCurve:
        """The row for a dtype (fp16 as bf16, `fp8_e4m3` as fp8). UnpricedError if there is none."""
        row_dtype = gemm_dtype(dtype)
        for row in self.gemm:
            if row.dtype == row_dtype:
                return row
        known = [row.dtype for row in self.gemm]
        raise UnpricedError(f"{self.device} has no GEMM curve for {dtype!r}{nearest(dtype, known)}; it has {known}")

    def attention_for(self, direction: str, head_dim: int, kernel: AttentionKernel | None = None) -> AttentionCurve:
        """The row of the smallest class that holds `head_dim`, or of the largest. UnpricedError if there is none."""
        kernel = kernel or self.attention_kernel
        rows = [row for row in self.attention if (row.kernel, row.direction) == (kernel, direction)]
        for row in rows:
            if head_dim <= row.head_dim:
                return row
        if rows:
            return rows[-1]
        known = sorted({row.kernel for row in self.attention})
        raise UnpricedError(
            f"{self.device} has no {kernel} {direction}; it has {', '.join(known)}, or unfused attention"
        )

    def stream_for(self, kind: Walk) -> StreamCurve:
        """The row for a kind of access. UnpricedError if there is none."""
        for row in self.stream:
            if row.kind == kind:
                return row
        raise UnpricedError(f"{self.device} has no curve for {kind!r} streaming")


def gemm_dtype(dtype: str) -> str:
    """The dtype that a GEMM curve is kept by."""
    return "bf16" if dtype == "fp16" else dtype.split("_e")[0]


_KERNELS: Mapping[AttentionKernel, str] = {
    "flash1": "FlashAttention",
    "flash2": "FlashAttention-2",
    "flash3": "FlashAttention-3",
    "cudnn": "cuDNN's attention",
    "triton": "Triton's FlashAttention",
}

_KINDS: tuple[Walk, ...] = ("plain", "reduce", "reduce_grad", "gather", "scatter")


@cache
def _file(stem: str) -> CurveFile:
    return schema.load_packaged(CurveFile, Path(__file__).parent / "curves" / f"{stem}.toml")


def _file_of(device: Device) -> CurveFile:
    """The curves of a device's generation: its own, borrowed or generic ones."""
    stem = device.generation.curves
    return _file(f"{GENERIC}-{device.kind}" if stem == GENERIC else stem)


@cache
def curves_for(device: Device, *, attention: AttentionKernel | None = None) -> Curves:
    """The curves of a device, with what of them is assumed.

    attention: which fused kernel `attention` ops run as; None is `CurveFile.default_attention` of the generation, and
    said among the assumptions. A generation without data gets the generic curves; UnpricedError if the device has no
    such attention kernel.
    """
    generic = _file(f"{GENERIC}-{device.kind}")
    if device.measured is not None:
        # A machine that was calibrated has tables of its own; generic curves only fill what they leave out.
        return _measured_curves(device, device.measured, generic)
    file = _file_of(device)
    assumptions = []
    if not file.measured:
        row = _own(file.gemm, device, lambda row: True) or generic.gemm[0]
        assumptions.append(f"no kernel data for {device.arch}: {row.provenance.data}")
    elif device.name not in file.measured:
        assumptions.append(
            f"no kernel data for {device.name}: efficiencies of {', '.join(file.measured)} on its own peaks"
        )
    gemm = _gemm_rows(device, file, generic, assumptions)
    streams = tuple(
        _pick(file.stream, generic.stream, device, _is_kind(kind), f"{kind} streaming", assumptions) for kind in _KINDS
    )
    rows = _attention_rows(device, file, generic, assumptions)
    usual = file.default_attention
    if attention is None:
        assumptions.append(f"attention runs as {_KERNELS[usual]} on {device.arch}: the stack does not say which kernel")
    curves = Curves(
        device=device.name,
        attention_kernel=attention or usual,
        gemm=gemm,
        attention=rows,
        stream=streams,
        assumptions=tuple(dict.fromkeys(assumptions)),
    )
    # Fails here, at once, rather than at the first op that needs the kernel.
    curves.attention_for("forward", 128)
    return curves


def serving_curves(device: Device) -> Curves:
    """The curves of a device under an inference engine."""
    return curves_for(device, attention=_file_of(device).serving_attention)


@cache
def curves_with(
    device: Device,
    attention: AttentionKernel | None,
    cublas: CublasRelease | None = None,
    cudnn: str | None = None,
) -> Curves:
    """The curves of a device with the attention kernel that a stack prefers, or FlashAttention-2 where the device has
    none of it, as libraries choose. None: the generation's usual one, said among the assumptions. cublas: the library
    that multiplies, where it is older than that of the curves; of no account where no difference was measured. cudnn:
    the release of cuDNN whose attention runs; None: what the rows are of."""
    curves = _with_libraries(device, attention, cublas)
    releases = () if device.measured else _file_of(device).cudnn
    if cudnn is None or not releases:
        return curves
    return replace(curves, attention=tuple(_at_release(row, releases, cudnn) for row in curves.attention))


def _at_release(row: AttentionCurve, known: tuple[CudnnRelease, ...], release: str) -> AttentionCurve:
    """A row under a release of cuDNN: between two that were measured in proportion, before and after them as the
    nearest; rows of other kernels and head sizes as they are."""
    if row.kernel != "cudnn" or row.head_dim != known[0].head_dim:
        return row
    speeds = [one.forward if row.direction == "forward" else one.backward for one in known]
    speed = float(np.interp(release_number(release), [one.number for one in known], speeds))
    return replace(row, efficiency=row.efficiency * speed)


def _with_libraries(device: Device, attention: AttentionKernel | None, cublas: CublasRelease | None) -> Curves:
    curves = curves_for(device)
    if attention is not None:
        known = {row.kernel for row in curves.attention}
        curves = curves_for(device, attention=attention if attention in known else "flash2")
    # Only where a slower release was measured on this generation; elsewhere cuBLAS's age is of no account.
    older = [] if device.measured else [x for x in _file_of(device).libraries if x.cublas == cublas]
    if not older:
        return curves
    return replace(curves, gemm=tuple(replace(row, speed=older[0].speed) for row in curves.gemm))


def _measured_curves(device: Device, measured: Measured, generic: CurveFile) -> Curves:
    """The curves of a device that was measured: no price of what was measured asks them."""
    base = generic.gemm[0]
    return Curves(
        device=device.name,
        attention_kernel="flash2",
        gemm=tuple(replace(base, dtype=d) for d in ("bf16", "fp32", "fp64") if getattr(device.dense_peak, d)),
        attention=generic.attention,
        stream=generic.stream,
        assumptions=(measured.note,),
    )


def is_measured(device: Device) -> bool:
    """Whether there are kernel measurements of the device itself or of its generation."""
    own = device.generation.curves == device.arch
    return device.measured is not None or own and bool(_file(device.arch).measured)


class _Row(Protocol):
    @property
    def device(self) -> str: ...


R = TypeVar("R", bound=_Row)


def _own(rows: tuple[R, ...], device: Device, fits: Callable[[R], bool]) -> R | None:
    """The row for just this device, or else for its whole generation."""
    fitting = [row for row in rows if fits(row) and row.device in ("", device.name)]
    # True sorts after False: a row for this device wins over one for the generation.
    return max(fitting, key=lambda row: row.device != "", default=None)


def _is_kind(kind: Walk) -> Callable[[StreamCurve], bool]:
    return lambda row: row.kind == kind


def _pick(
    rows: tuple[R, ...],
    generic: tuple[R, ...],
    device: Device,
    fits: Callable[[R], bool],
    what: str,
    assumptions: list[str],
) -> R:
    curve = _own(rows, device, fits)
    if curve is None:
        if rows:
            assumptions.append(f"no data on {what} for {device.arch}: generic curve")
        curve = _own(generic, device, fits)
    assert curve is not None, what
    return curve


def _gemm_rows(device: Device, file: CurveFile, generic: CurveFile, assumptions: list[str]) -> tuple[GemmCurve, ...]:
    """A row for each dtype that the device has a peak for; those without data reach the share of peak of bf16. fp64 is
    a plan's own wish for small products (`experts.router_dtype`), of which no file has data: who asks for it says
    so."""
    # "bf16" stands for fp16 too (`gemm_dtype`), so a device with either has that row.
    rows, borrowed = [], []
    base = _own(file.gemm, device, lambda row: row.dtype == "bf16") or generic.gemm[0]
    for dtype in ("bf16", "tf32", "fp32", "fp32_matrix", "fp8", "fp4", "int8", "fp64"):
        if not any(getattr(device.dense_peak, name) for name in (dtype, *(("fp16",) if dtype == "bf16" else ()))):
            continue
        curve = _own(file.gemm, device, lambda row, row_dtype=dtype: row.dtype == row_dtype)  # type: ignore[misc]
        if curve is None and dtype != "fp64":
            borrowed.append(dtype)
        # Without data for a dtype the shape of the efficiency is bf16's, on the dtype's own peak.
        rows.append(curve or replace(base, dtype=dtype))
    if borrowed and file.measured:
        assumptions.append(
            f"no GEMM data in {', '.join(borrowed)} for {device.arch}: the share of the peak that bf16 reaches"
        )
    return tuple(rows)


def _attention_rows(
    device: Device, file: CurveFile, generic: CurveFile, assumptions: list[str]
) -> tuple[AttentionCurve, ...]:
    rows = [row for row in file.attention if row.device in ("", device.name)]
    # A row for this very device replaces the generation's row for the same kernel, direction and head size.
    specific = {(row.kernel, row.direction, row.head_dim) for row in rows if row.device}
    rows = [row for row in rows if row.device or (row.kernel, row.direction, row.head_dim) not in specific]
    if not any(row.kernel == "flash2" for row in rows):
        if file.measured:
            assumptions.append(f"no data on FlashAttention-2 for {device.arch}: generic curve")
        # FlashAttention-2 is what `curves_with` falls back on, so a generation without it gets the generic one.
        rows += generic.attention
    return tuple(sorted(rows, key=lambda row: (row.kernel, row.direction, row.head_dim)))


def as_time(value: NDArray[np.float64] | np.float64 | float) -> Time:
    """A float for one shape, an array for many."""
    return value if isinstance(value, np.ndarray) and value.ndim else float(value)
