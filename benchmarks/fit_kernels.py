"""Rebuild the efficiency curves of `gnomon.prices` from tables of measured kernels, and print how well they hold.

    python benchmarks/fit_kernels.py DATA_DIR            # fit, print the table kept in results/fit_kernels.md
    python benchmarks/fit_kernels.py DATA_DIR --write    # and put the rows into src/gnomon/prices/curves/*.toml

DATA_DIR holds kernels/*.csv (public measurements; each names its source). A quarter of the (n, k) pairs, of the
(batch, length) pairs of attention and of the (m, k) pairs of casts, chosen by hash, is kept out of every fit; errors
are on those. About half a minute on one core. Rows that are assumed, not fitted, are left as they are in the files.
"""

from __future__ import annotations

import argparse
import csv
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gnomon import schema
from gnomon.hardware import catalogue
from gnomon.hardware.types import Device
from gnomon.prices.attention import Heads, attention_model
from gnomon.prices.curves import (
    Array,
    AttentionCurve,
    AttentionKernel,
    CurveFile,
    GemmCurve,
    Provenance,
    StreamCurve,
    StreamKind,
)
from gnomon.prices.gemm import Products, gemm_model
from gnomon.prices.stream import cached_efficiency

CURVES = Path(__file__).parents[1] / "src/gnomon/prices/curves"
DATE = "2026-11-21"
DEVICES = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "b200_sxm": "b200-sxm-180gb",
    "l40s": "l40s-48gb",
    "V100-PCIE-16GB": "v100-pcie-16gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "AMD Instinct MI210": "mi210-64gb",
    "A100-80GB-SXM4": "a100-sxm-80gb",
    "H100-80GB-SXM5": "h100-sxm-80gb",
}
"""Device names of the tables -> of the catalogue."""

Row = dict[str, str]
Model = Callable[[dict[str, float]], Array]


def read(data: Path, table: str, **wanted: str) -> list[Row]:
    """Rows of a table whose columns equal `wanted`."""
    return [row for row in _table(data, table) if all(row[name] == value for name, value in wanted.items())]


@cache
def _table(data: Path, table: str) -> list[Row]:
    with open(data / "kernels" / f"{table}.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[Row], name: str) -> Array:
    return np.array([float(row[name]) for row in rows])


def kept_out(rows: list[Row], *names: str) -> Any:
    """A quarter of the distinct values of these columns, by hash."""
    return np.array([zlib.crc32(",".join(row[name] for name in names).encode()) % 4 == 0 for row in rows])


# --- the search


@dataclass(frozen=True)
class Range:
    """A constant and where to look for it."""

    low: float
    high: float
    start: float
    log: bool = False

    def at(self, x: float) -> float:
        """x: any real number -> a value between the limits."""
        part = 1 / (1 + np.exp(-np.clip(x, -30, 30)))
        if self.log:
            return float(self.low * (self.high / self.low) ** part)
        return float(self.low + (self.high - self.low) * part)

    @property
    def x(self) -> float:
        """The inverse of `at`, of the start."""
        part = (self.start - self.low) / (self.high - self.low)
        if self.log:
            part = float(np.log(self.start / self.low) / np.log(self.high / self.low))
        part = min(max(part, 1e-3), 1 - 1e-3)
        return float(np.log(part / (1 - part)))


def nelder_mead(loss: Callable[[Array], float], start: Array, steps: int) -> Array:
    """The least of a function by Nelder and Mead's simplex (1965), restarted once at what it found."""
    for _ in range(2):
        points = [start, *(start + 0.6 * axis for axis in np.eye(len(start)))]
        values = [loss(point) for point in points]
        for _ in range(steps // 2):
            order = np.argsort(values)
            points, values = [points[i] for i in order], [values[i] for i in order]
            if values[-1] - values[0] < 1e-6:
                break
            centre = np.mean(points[:-1], axis=0)
            trial = centre + (centre - points[-1])
            value = loss(trial)
            if value < values[0]:
                far = centre + 2 * (centre - points[-1])
                far_value = loss(far)
                trial, value = (far, far_value) if far_value < value else (trial, value)
            elif value >= values[-2]:
                trial = centre + 0.5 * ((trial if value < values[-1] else points[-1]) - centre)
                value = loss(trial)
            if value < values[-1]:
                points[-1], values[-1] = trial, value
                continue
            points = [points[0], *(points[0] + 0.5 * (point - points[0]) for point in points[1:])]
            values = [values[0], *(loss(point) for point in points[1:])]
        start = points[int(np.argmin(values))]
    return start


def fit(ranges: dict[str, Range], model: Model, measured: Array, steps: int = 400) -> dict[str, float]:
    """Constants with the least mean absolute logarithm of predicted over measured."""

    def named(x: Array) -> dict[str, float]:
        return {name: where.at(value) for (name, where), value in zip(ranges.items(), x, strict=True)}

    def loss(x: Array) -> float:
        return float(np.abs(np.log(model(named(x)) / measured)).mean())

    return named(nelder_mead(loss, np.array([where.x for where in ranges.values()]), steps))


@dataclass(frozen=True)
class Error:
    """Errors of a model on shapes."""

    median: float
    p90: float
    bias: float
    count: int

    @classmethod
    def of(cls, predicted: Array, measured: Array) -> Error:
        off = predicted / measured - 1
        if not len(off):
            return cls(float("nan"), float("nan"), float("nan"), 0)
        return cls(float(np.median(abs(off))), float(np.quantile(abs(off), 0.9)), float(np.median(off)), len(off))

    def __str__(self) -> str:
        if not self.count:
            return "none"
        return f"{self.median:.1%} / {self.p90:.1%} of {self.count}"


NONE = Error(float("nan"), float("nan"), float("nan"), 0)


@dataclass(frozen=True)
class Result:
    """One fitted row with what is said about it in the table."""

    arch: str
    row: GemmCurve | AttentionCurve | StreamCurve
    name: str
    shapes: str
    held: Error
    others: str = ""

    def line(self) -> str:
        if not self.held.count:
            return f"| {self.name} | {self.row.provenance.data} | - | - | - | - | - |"
        return (
            f"| {self.name} | {self.shapes} | {self.held.count} | {self.held.median:.1%} | {self.held.p90:.1%} "
            f"| {self.held.bias:+.1%} | {self.others} |"
        )


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def provenance(data: str, error: Error, shapes: str) -> Provenance:
    return Provenance(
        data=data, date=DATE, error=f"held out {error.median:.1%} / {error.p90:.1%} (median / p90)", range=shapes
    )


def thin(count: int, most: int = 2500) -> Any:
    """Indices of at most `most` shapes, evenly spread and the same every time."""
    return np.random.default_rng(0).permutation(count)[:most]


# --- matrix products


GEMM_RANGES = {
    "t0_s": Range(0.5e-6, 60e-6, 2.2e-6, log=True),
    "tile_overhead": Range(0.0, 1.0, 0.1),
    "tile_edge": Range(0.0, 40.0, 10.0),
    "prologue_s": Range(0.05e-6, 8e-6, 1.5e-6, log=True),
    "wave_overlap": Range(0.0, 1.0, 0.8),
    "memory_efficiency": Range(0.3, 1.0, 0.8),
    "cache_gain": Range(0.0, 1.0, 0.3),
    "overlap_power": Range(1.0, 20.0, 2.0, log=True),
}
"""`cache_gain`: how far from `memory_efficiency` to 1 data in the last cache gets."""

CASTS = {"cast_passes": Range(1.0, 8.0, 2.0), "cast_s": Range(0.5e-6, 10e-6, 2e-6, log=True)}
"""The cast of the input to 8 bits that some tables measure along: times 3·m·k bytes, and a kernel."""

BLANK = Provenance(data="-", date=DATE, error="-", range="-")


@dataclass(frozen=True)
class GemmTable:
    """Measured products of one table, device and number format."""

    table: str
    """File."""
    device: str
    """As the table names it."""
    rate: str
    """Format that the product runs in."""
    wanted: tuple[tuple[str, str], ...]
    """Columns that choose the rows."""
    bits: int = 16
    """Of an element of the operands."""
    own: bool = False
    """The row is for this device, not for its generation."""
    casts: bool = False
    """Times include casting the input to 8 bits: fitted along, and left out of the row."""
    floor_s: float | None = None
    """Measured with the host in the way: the fitted floor is replaced by this one."""


GEMMS = (
    GemmTable("gemm_aiconfigurator", "h100_sxm", "bf16", (("dtype", "bf16"), ("stack", "vllm-0.24.0"))),
    GemmTable("gemm_aiconfigurator", "h200_sxm", "bf16", (("dtype", "bf16"), ("stack", "vllm-0.24.0")), own=True),
    GemmTable(
        "gemm_aiconfigurator", "h100_sxm", "fp8", (("dtype", "fp8"), ("stack", "trtllm-1.3.0rc20")), 8, casts=True
    ),
    GemmTable("gemm_aiconfigurator", "a100_sxm", "bf16", (("dtype", "bf16"), ("stack", "sglang-0.5.10"))),
    GemmTable("gemm_aiconfigurator", "b200_sxm", "bf16", (("dtype", "bf16"), ("stack", "vllm-0.24.0"))),
    GemmTable("gemm_aiconfigurator", "b200_sxm", "fp8", (("dtype", "fp8"), ("stack", "vllm-0.24.0")), 8, casts=True),
    GemmTable("gemm_aiconfigurator", "b200_sxm", "fp4", (("dtype", "nvfp4"), ("stack", "vllm-0.24.0")), 4, casts=True),
    GemmTable("gemm_aiconfigurator", "l40s", "bf16", (("dtype", "bf16"), ("stack", "vllm-0.24.0"))),
    GemmTable("gemm_aiconfigurator", "l40s", "fp8", (("dtype", "fp8"), ("stack", "vllm-0.24.0")), 8, casts=True),
    GemmTable("gemm_v100_apex", "V100-PCIE-16GB", "fp16", (("dtype", "half"),), floor_s=3e-6),
    GemmTable("gemm_fp32_neusight", "Tesla V100-PCIE-32GB", "fp32", (), 32, floor_s=3e-6),
    GemmTable("gemm_fp32_neusight", "NVIDIA A100-PCIE-40GB", "fp32", (), 32, floor_s=3e-6),
    GemmTable("gemm_fp32_neusight", "NVIDIA H100 80GB HBM3", "fp32", (), 32, floor_s=3e-6),
    GemmTable("gemm_fp32_neusight", "AMD Instinct MI210", "fp32", (), 32, floor_s=3e-6),
)


def gemm_row(rate: str, values: dict[str, float], said: Provenance = BLANK, device: str = "") -> GemmCurve:
    kept = {name: value for name, value in values.items() if name not in ("cache_gain", *CASTS)}
    memory = values["memory_efficiency"]
    return GemmCurve(
        dtype="bf16" if rate == "fp16" else rate,
        cache_efficiency=float(f"{memory + (1 - memory) * values['cache_gain']:.3g}"),
        provenance=said,
        device=device,
        **kept,
    )


def fit_gemm(data: Path, of: GemmTable) -> Result:
    """One GEMM curve: two thirds of the fitted shapes are large, as training's are; a third is anything."""
    machine = catalogue.device(DEVICES[of.device])
    rows = read(data, of.table, device=of.device, **dict(of.wanted))
    m, n, k = (column(rows, name) for name in "mnk")
    seconds, out = column(rows, "time_us") * 1e-6, kept_out(rows, "n", "k")
    main = (m >= 256) & (n >= 512) & (k >= 512)
    batch = column(rows, "b") if "b" in rows[0] else np.ones_like(m)
    moved = batch * ((m * k + k * n) * of.bits + m * n * max(of.bits, 16)) / 8
    peak = machine.flops_per_s("fp32_matrix" if of.rate == "fp32" else of.rate)

    def predict(which: Any, values: dict[str, float]) -> Array:
        shape = Products(m=m[which], n=n[which], k=k[which], batch=batch[which], moved_bytes=moved[which])
        cast = 3 * m[which] * k[which] / machine.memory_bytes_per_s * values.get("cast_passes", 0.0)
        product = gemm_model(shape, peak, machine, gemm_row(of.rate, values))
        return np.asarray(product + cast + values.get("cast_s", 0.0))

    large, small = np.flatnonzero(main & ~out), np.flatnonzero(~main & ~out)
    large, small = large[thin(len(large), 2400)], small[thin(len(small), 600)]
    chosen = np.concatenate([large, small[: len(large) // 2]])
    ranges = GEMM_RANGES | (CASTS | {"t0_s": Range(0.5e-6, 4e-6, 2e-6, log=True)} if of.casts else {})
    values = rounded(fit(ranges, lambda values: predict(chosen, values), seconds[chosen]))
    held = Error.of(predict(main & out, values), seconds[main & out])
    rest = Error.of(predict(~main & out, values), seconds[~main & out])
    big = out & (m >= 1024) & (n >= 1024) & (k >= 1024)
    cubes = Error.of(predict(big, values), seconds[big])
    said = "".join(f"; {name} {values[name]:.3g}" for name in CASTS if of.casts)
    if of.floor_s is not None:
        said += f"; floor {values['t0_s'] * 1e6:.3g} us is the host's, {of.floor_s * 1e6:.3g} us put in its place"
        values["t0_s"] = of.floor_s
    stack = ", ".join(value for _, value in of.wanted) or "single and batched"
    shapes = "m >= 256, n and k >= 512"
    text = f"{of.table}.csv: {of.device}, {stack}, {len(rows)} shapes{said}"
    where = shapes + (f"; smaller ones {rest.median:.0%} / {rest.p90:.0%}" if rest.count else "")
    row = gemm_row(of.rate, values, provenance(text, held, where), machine.name if of.own else "")
    name = f"GEMM {of.rate} {machine.name} ({stack})"
    return Result(machine.arch, row, name, shapes, held, f"all three >= 1024: {cubes}; the rest: {rest}")


# --- fused attention


MEMORY = 0.8
"""Share of bandwidth at which dense attention moves its operands: assumed, because tables of serving kernels add the
paging of keys to it and charts are too coarse to tell."""

ATTENTION_RANGES = {
    "t0_s": Range(2e-6, 30e-6, 8e-6, log=True),
    "efficiency": Range(0.1, 1.0, 0.6),
    "prologue_s": Range(0.02e-6, 30e-6, 1e-6, log=True),
    "lone_block": Range(0.05, 1.5, 0.8),
    "tail_power": Range(1.0, 20.0, 2.0, log=True),
}

PAGED = {"query_passes": Range(0.0, 6.0, 0.5), "key_passes": Range(0.0, 10.0, 0.5)}
"""What serving kernels add, in passes over q and out, and over k and v: fitted along, and left out of the row."""


@dataclass(frozen=True)
class Part:
    """Measured attentions that are alike."""

    shape: Heads
    seconds: Array
    out: Any
    weight: Array
    paged: bool = False

    def predict(self, row: AttentionCurve, machine: Device, values: dict[str, float]) -> Array:
        seconds = attention_model(self.shape, machine.flops_per_s("bf16"), machine, row)
        if not self.paged:
            return seconds
        a = self.shape
        queries = values["query_passes"] * a.q_len * a.heads
        keys = values["key_passes"] * a.kv_len * a.kv_heads
        return np.asarray(seconds + 4 * a.batch * a.width * (queries + keys) / machine.memory_bytes_per_s)


@dataclass(frozen=True)
class AttentionTable:
    """Measured attention of one device, kernel and class of head sizes."""

    device: str
    """As the tables name it."""
    kernel: AttentionKernel
    """Kind of the row."""
    head_dim: int
    """Class of the row."""
    sizes: tuple[str, ...]
    """Head sizes measured."""
    prefill: str = ""
    """Kernel in the table of causal attention over a paged cache."""
    encoder: str = ""
    """Kernel in the table of attention without a mask."""
    chart: str = ""
    """Implementation in the table of published charts."""
    charted: str = ""
    """Device as the charts name it."""


_H100, _A100 = "H100-80GB-SXM5", "A100-80GB-SXM4"
_FA3, _VIT3, _VIT4 = "vllm_flash_attn_fa3", "vllm_vit_flash_attn_fa3", "vllm_vit_flash_attn_fa4"

ATTENTIONS = (
    AttentionTable("h100_sxm", "flash3", 64, ("64",), _FA3, _VIT3, "FA3", _H100),
    AttentionTable("h100_sxm", "flash3", 96, ("72", "80"), "", _VIT3),
    AttentionTable("h100_sxm", "flash3", 128, ("128",), _FA3, "", "FA3", _H100),
    AttentionTable("h100_sxm", "flash3", 192, ("192",), _FA3),
    AttentionTable("h100_sxm", "flash3", 256, ("256",), _FA3, "", "FA3", _H100),
    *(AttentionTable("h100_sxm", "flash2", d, (str(d),), chart="FA2", charted=_H100) for d in (64, 128, 256)),
    *(AttentionTable("h100_sxm", "cudnn", d, (str(d),), chart="cuDNN", charted=_H100) for d in (64, 128, 256)),
    AttentionTable("a100_sxm", "flash2", 128, ("128",), "vllm_flash_attn", "", "FA2", _A100),
    AttentionTable("l40s", "flash2", 128, ("128",), "vllm_flash_attn"),
    AttentionTable("b200_sxm", "flash3", 64, ("64",), "", _VIT4),
    AttentionTable("b200_sxm", "flash3", 96, ("72", "80"), "", _VIT4),
    AttentionTable("b200_sxm", "flash3", 128, ("128",), chart="FA4", charted="B200"),
    *(AttentionTable("b200_sxm", "cudnn", d, (str(d),), "torch_flow") for d in (64, 128, 256)),
)


def heads(rows: list[Row], causal: bool, width: int) -> Heads:
    batch, length, count = (column(rows, name) for name in ("batch", "seqlen", "heads"))
    keys = column(rows, "kv_heads") if "kv_heads" in rows[0] else count
    pairs = length * length / (2 if causal else 1)
    return Heads(
        batch=batch,
        q_len=length,
        kv_len=length,
        heads=count,
        kv_heads=keys,
        pairs=pairs,
        width=width,
        width_v=width,
        causal=causal,
    )


def table_parts(data: Path, of: AttentionTable) -> list[Part]:
    parts = []
    for causal, table, kernel in (
        (True, "attention_prefill_aiconfigurator", of.prefill),
        (False, "attention_encoder_noncausal_aiconfigurator", of.encoder),
    ):
        for size in of.sizes if kernel else ():
            rows = read(data, table, device=of.device, kernel=kernel, head_dim=size)
            if causal:
                rows = [r for r in rows if r["attn_dtype"] == r["kv_dtype"] == "bf16" and r["window"] == "0"]
            if rows:
                # training's lengths count; short ones are many and mostly floor
                weight = np.where(column(rows, "seqlen") >= 1024, 1.0, 0.3)
                out = kept_out(rows, "batch", "seqlen")
                parts.append(Part(heads(rows, causal, int(size)), column(rows, "time_us") * 1e-6, out, weight, causal))
    return parts


def chart_parts(data: Path, of: AttentionTable, mode: str) -> list[Part]:
    """Points read off charts: none is kept out, and each counts as forty."""
    parts = []
    for causal in ("False", "True"):
        rows = _charted(data, of, mode, causal)
        if rows:
            seconds = column(rows, "time_us") * 1e-6
            none = np.zeros(len(rows), dtype=bool)
            parts.append(Part(heads(rows, causal == "True", of.head_dim), seconds, none, np.full(len(rows), 40.0)))
    return parts


def _charted(data: Path, of: AttentionTable, mode: str, causal: str) -> list[Row]:
    if not of.chart:
        return []
    table = "flash_attention_fwd_bwd_published"
    rows = read(data, table, device=of.charted, mode=mode, causal=causal, head_dim=of.sizes[0])
    return [row for row in rows if row["impl"].startswith(of.chart)]


def attention_row(
    of: AttentionTable, direction: str, values: dict[str, float], said: Provenance = BLANK
) -> AttentionCurve:
    kept: dict[str, Any] = {name: value for name, value in values.items() if name not in PAGED}
    return AttentionCurve(
        kernel=of.kernel,
        direction=direction,  # type: ignore[arg-type]
        head_dim=of.head_dim,
        memory_efficiency=MEMORY,
        provenance=said,
        **kept,
    )


def fit_parts(
    of: AttentionTable, direction: str, parts: list[Part], ranges: dict[str, Range], fixed: dict[str, float]
) -> tuple[dict[str, float], Callable[[int, bool], Error]]:
    """Constants, and the error on what was kept out (or on all if nothing was) by least and most length."""
    machine = catalogue.device(DEVICES[of.device])
    whole = not any(part.out.any() for part in parts)

    def predict(values: dict[str, float]) -> list[Array]:
        row = attention_row(of, direction, fixed | values)
        return [part.predict(row, machine, values) for part in parts]

    weight = np.concatenate([part.weight[~part.out] for part in parts])
    measured = np.concatenate([part.seconds[~part.out] for part in parts])

    def weighted(values: dict[str, float]) -> Array:
        made = np.concatenate([p[~part.out] for p, part in zip(predict(values), parts, strict=True)])
        return np.asarray(np.exp(weight / weight.mean() * np.log(made / measured)))

    ranges = ranges | (PAGED if any(part.paged for part in parts) else {})
    values = rounded(fit(ranges, weighted, np.array(1.0), 500))

    def error(least: int, short: bool) -> Error:
        made, truth = [], []
        for predicted, part in zip(predict(values), parts, strict=True):
            length = (part.shape.q_len < least) if short else (part.shape.q_len >= least)
            which = length & (part.out if not whole else ~part.out)
            made.append(predicted[which])
            truth.append(part.seconds[which])
        return Error.of(np.concatenate(made), np.concatenate(truth))

    return fixed | values, error


def fit_attention(data: Path, of: AttentionTable) -> tuple[Result, dict[str, float]]:
    """The row of a forward, from tables and charts together."""
    machine = catalogue.device(DEVICES[of.device])
    tables, charts = table_parts(data, of), chart_parts(data, of, "fwd")
    ranges, fixed = ATTENTION_RANGES, {}
    if not tables:  # a dozen points bear two constants
        fixed = {"t0_s": 8e-6, "lone_block": 0.7, "tail_power": 1.5}
        ranges = _two(charts, fixed)
    values, error = fit_parts(of, "forward", tables + charts, ranges, fixed)
    held, short = error(1024, False), error(1024, True)
    count = sum(len(part.seconds) for part in tables)
    points = sum(len(part.seconds) for part in charts)
    names = " and ".join(name for name in (of.prefill, of.encoder) if name)
    text = f"attention_*_aiconfigurator.csv: {of.device}, {names}, head size {', '.join(of.sizes)}, {count} shapes; "
    text = (text if tables else "") + (f"{of.chart} charts: {points} points" if charts else "")
    said = provenance(text.removesuffix("; "), held, f"length >= 1024; shorter {short.median:.0%} / {short.p90:.0%}")
    if not tables:
        said = replace(said, error=f"fit {held.median:.1%} / {held.p90:.1%} (median / p90), nothing held out")
    row = attention_row(of, "forward", values, said)
    name = f"{of.kernel} forward {of.head_dim} {machine.name}" + ("" if tables else " (charts, all fitted)")
    return Result(machine.arch, row, name, "length >= 1024", held, f"shorter: {short}"), values


def _two(parts: list[Part], fixed: dict[str, float]) -> dict[str, Range]:
    """A dozen points bear two constants, two points one."""
    if sum(len(part.seconds) for part in parts) > 3:
        return {name: ATTENTION_RANGES[name] for name in ("efficiency", "prologue_s")}
    fixed["prologue_s"] = 3e-6
    return {"efficiency": ATTENTION_RANGES["efficiency"]}


def fit_backward(data: Path, of: AttentionTable, forward: dict[str, float]) -> Result | None:
    """The row of a backward, from charts: measured alone, or forward and backward together less the forward."""
    machine = catalogue.device(DEVICES[of.device])
    parts = chart_parts(data, of, "bwd")
    both = chart_parts(data, of, "fwd+bwd")
    row = attention_row(of, "forward", forward)
    parts += [
        replace(part, seconds=part.seconds - part.predict(row, machine, forward))
        for part in both
        if part.shape.causal or not parts
    ]
    if not parts:
        return None
    fixed = {"t0_s": 2 * forward["t0_s"], "lone_block": forward["lone_block"], "tail_power": forward["tail_power"]}
    values, error = fit_parts(of, "backward", parts, _two(parts, fixed), fixed)
    held = error(512, False)
    points = sum(len(part.seconds) for part in parts)
    less = ", of both directions less the forward" if both else ""
    said = Provenance(
        data=f"{of.chart} charts on {of.charted}: {points} points of 16k tokens{less}",
        date=DATE,
        error=f"fit {held.median:.1%} / {held.p90:.1%} (median / p90), nothing held out",
        range="length 512 to 16k",
    )
    name = f"{of.kernel} backward {of.head_dim} {machine.name} (charts, all fitted)"
    return Result(machine.arch, attention_row(of, "backward", values, said), name, "length 512 to 16k", held)


def fit_every_attention(data: Path) -> list[Result]:
    """Forwards and backwards. A class without a backward borrows the ratio of a neighbour's; A100's 64, measured only
    with both directions together, borrows H100's ratio of 64 to 128 for the forward."""
    found: list[Result] = []
    for of in ATTENTIONS:
        result, values = fit_attention(data, of)
        found += [result, *filter(None, [fit_backward(data, of, values)])]
        if of.device == "a100_sxm":
            rows = {(r.row.kernel, r.row.direction, r.row.head_dim): r.row for r in found if r.arch == "hopper"}  # type: ignore[union-attr]
            ratio = rows["flash2", "forward", 64].efficiency / rows["flash2", "forward", 128].efficiency  # type: ignore[union-attr]
            small = replace(of, head_dim=64, sizes=("64",), prefill="")
            values = rounded(values | {"efficiency": values["efficiency"] * ratio})
            said = assumed(f"the row of 128 times H100's ratio of 64 to 128, {ratio:.2f}")
            row = attention_row(small, "forward", values, said)
            found.append(Result(result.arch, row, "flash2 forward 64 a100 (assumed)", "-", NONE))
            found += filter(None, [fit_backward(data, small, values)])
    return found + [_borrowed_backward(r, found) for r in found if _lacks_backward(r, found)]


def assumed(what: str) -> Provenance:
    return Provenance(data=f"assumed: {what}", date=DATE, error="unchecked", range="all shapes")


def _key(result: Result) -> tuple[str, str, str, int]:
    row = result.row
    assert isinstance(row, AttentionCurve)
    return result.arch, row.kernel, row.direction, row.head_dim


def _lacks_backward(result: Result, found: list[Result]) -> bool:
    arch, kernel, direction, size = _key(result)
    return direction == "forward" and (arch, kernel, "backward", size) not in map(_key, found)


def _borrowed_backward(result: Result, found: list[Result]) -> Result:
    """Backward over forward as in the nearest class of the kernel, else of the generation, else FlashAttention-2's on
    A100."""
    arch, kernel, _, size = _key(result)
    known = {_key(r): r.row for r in found}
    pairs = [(key, known[*key[:2], "forward", key[3]]) for key in known if key[2] == "backward"]
    pairs = [(key, forward) for key, forward in pairs if (*key[:2], "forward", key[3]) in known]
    near = min(pairs, key=lambda p: (p[0][0] != arch, p[0][1] != kernel, p[0][1] != "flash2", abs(p[0][3] - size)))
    back, row = known[near[0]], result.row
    assert isinstance(back, AttentionCurve) and isinstance(row, AttentionCurve) and isinstance(near[1], AttentionCurve)
    ratio = back.efficiency / near[1].efficiency
    said = assumed(f"{ratio:.2f} of the forward's efficiency, as {near[0][1]} {near[0][3]} on {near[0][0]}")
    made = replace(
        row, direction="backward", t0_s=float(f"{2 * row.t0_s:.3g}"), prologue_s=back.prologue_s,
        efficiency=float(f"{row.efficiency * ratio:.3g}"), provenance=said,
    )  # fmt: skip
    return Result(result.arch, made, f"{kernel} backward {size} {arch} (assumed)", "-", NONE)


# --- streams


FLOOR_S = 2e-6
"""Launch floor on the device, as the casts have it; other tables were measured with the host in the way."""


@dataclass(frozen=True)
class StreamTable:
    """Measured streaming kernels of one device and kind."""

    arch: str
    """Generation that the row is kept for."""
    machine: str
    """Device, as in the catalogue."""
    kind: StreamKind
    """Kind of the row."""
    table: str
    """File."""
    device: str
    """As the table names it."""
    ops: tuple[str, ...]
    """Ops of the table."""
    passes: int
    """Arrays read and written."""
    mode: str = ""
    """Forward or backward, where the table has both."""
    own: bool = False
    """As in GemmTable."""


_CAST, _FP32, _LIGER = (
    "elementwise_quantize_aiconfigurator",
    "elementwise_fp32_neusight",
    "elementwise_norm_fwd_bwd_liger",
)
_CASTS = ("static_fp8_quant_bf16_to_fp8",)
_NORMS = ("layer_norm", "rms_norm", "megatron_rms_norm")

STREAMS = (
    StreamTable("hopper", "h100-sxm-80gb", "plain", _CAST, "h100_sxm", _CASTS, 1),
    StreamTable("hopper", "h200-sxm-141gb", "plain", _CAST, "h200_sxm", _CASTS, 1, own=True),
    StreamTable("blackwell", "b200-sxm-180gb", "plain", _CAST, "b200_sxm", _CASTS, 1),
    StreamTable("ada", "l40s-48gb", "plain", _CAST, "l40s", _CASTS, 1),
    StreamTable("ampere", "a100-pcie-80gb", "plain", _FP32, "NVIDIA A100 80GB PCIe", ("add", "mul"), 3),
    StreamTable("volta", "v100-pcie-32gb", "plain", _FP32, "Tesla V100-PCIE-32GB", ("add", "mul"), 3),
    StreamTable("cdna2", "mi210-64gb", "plain", _FP32, "AMD Instinct MI210", ("add", "mul"), 3),
    StreamTable("ampere", "a100-pcie-80gb", "reduce", _FP32, "NVIDIA A100 80GB PCIe", ("softmax", "ln"), 2),
    StreamTable("volta", "v100-pcie-32gb", "reduce", _FP32, "Tesla V100-PCIE-32GB", ("softmax", "ln"), 2),
    StreamTable("cdna2", "mi210-64gb", "reduce", _FP32, "AMD Instinct MI210", ("softmax", "ln"), 2),
    StreamTable("hopper", "h100-sxm-80gb", "reduce", _LIGER, "NVIDIA H100 80GB HBM3", _NORMS, 2, "forward"),
    StreamTable("hopper", "h100-sxm-80gb", "reduce_grad", _LIGER, "NVIDIA H100 80GB HBM3", _NORMS, 3, "backward"),
    StreamTable(
        "ampere", "a100-sxm-80gb", "reduce_grad", _LIGER, "NVIDIA A100-SXM4-80GB", ("rms_norm",), 3, "backward"
    ),
    StreamTable("ampere", "a100-sxm-80gb", "gather", _LIGER, "NVIDIA A100-SXM4-80GB", ("embedding",), 2, "forward"),
)


def _bytes(row: Row, of: StreamTable) -> float:
    if of.table == _CAST:
        return 3 * float(row["m"]) * float(row["k"])
    if of.table == _FP32:
        return 4 * of.passes * float(row["b"]) * float(row["h"])
    config = json.loads(row["config"])
    width = 4 if "32" in str(config.get("dtype", "")) else 2
    if row["op"] == "embedding":
        return of.passes * width * float(config["B"] * config["T"] * config["D"])
    rows = config["M"] if "M" in config else config["S"] * config["B"]
    return of.passes * width * float(rows) * float(row["x"])


def fit_stream(data: Path, of: StreamTable) -> Result:
    """A row; from casts with floor and cache, from the others only the share of bandwidth over 100 MB."""
    machine = catalogue.device(of.machine)
    rows = [row for op in of.ops for row in read(data, of.table, device=of.device, op=op)]
    rows = [row for row in rows if row.get("mode", "") == of.mode and row.get("stack", "vllm-0.24.0") == "vllm-0.24.0"]
    if of.table == _LIGER:  # eager steps of unfused norms are other kernels
        rows = [r for r in rows if (r["op"], r["provider"]) != ("rms_norm", "huggingface")]
    moved, seconds = np.array([_bytes(row, of) for row in rows]), column(rows, "time_us") * 1e-6
    names = {_CAST: ("m", "k"), _FP32: ("b", "h"), _LIGER: ("x", "provider")}[of.table]
    whole = of.table == _CAST
    out, large = kept_out(rows, *names), moved >= 1e8
    # what the last cache holds can beat the memory's peak, and prices never do: judged on the floor and beyond it
    cache = machine.l2_bytes or 0
    main = (moved < 2e6) | (moved > 4 * cache) if whole else large
    if of.table == _LIGER:
        out = main  # too few to keep any out

    def cached(values: dict[str, float]) -> float:
        return values["efficiency"] + (1 - values["efficiency"]) * (0.5 if whole else 0.05)

    def predict(which: Any, values: dict[str, float]) -> Array:
        share = cached_efficiency(moved[which], machine, values["efficiency"], cached(values))
        return np.asarray(values.get("t0_s", FLOOR_S) + moved[which] / (machine.memory_bytes_per_s * share))

    ranges = {"efficiency": Range(0.05, 1.0, 0.6)}
    if whole:
        ranges |= {"t0_s": Range(0.5e-6, 5e-6, 2e-6, log=True)}
    fitted = main & ~out if out is not main else main
    values = rounded(fit(ranges, lambda values: predict(fitted, values), seconds[fitted], 300))
    held = Error.of(predict(main & out, values), seconds[main & out])
    big = Error.of(predict(large & out, values), seconds[large & out])
    text = f"{of.table}.csv: {of.device}, {', '.join(of.ops)} {of.mode}".strip() + f", {int(main.sum())} shapes"
    said = provenance(
        text, held, "under 2 MB, and over 4 times the cache" if whole else "100 MB and more; floor as in casts"
    )
    if out is main:
        said = replace(said, error=f"fit {held.median:.1%} / {held.p90:.1%} (median / p90), nothing held out")
    row = StreamCurve(
        kind=of.kind,
        t0_s=values.get("t0_s", FLOOR_S),
        efficiency=values["efficiency"],
        cache_efficiency=float(f"{cached(values):.3g}"),
        provenance=said,
        device=machine.name if of.own else "",
    )
    name = f"{of.kind} streaming {of.machine} ({', '.join(of.ops)} {of.mode})".replace(" )", ")")
    every = Error.of(predict(out, values), seconds[out])
    return Result(of.arch, row, name, said.range, held, f"over 100 MB: {big}; all: {every}")


# --- files


def write(results: list[Result]) -> None:
    """Put fitted rows in the place of those of the same key; other rows stay."""
    for arch in sorted({result.arch for result in results}):
        path = CURVES / f"{arch}.toml"
        file = schema.load_file(CurveFile, path)
        new = [result.row for result in results if result.arch == arch]
        path.write_text(schema.dump(merged(file, new)))


def merged(file: CurveFile, rows: list[GemmCurve | AttentionCurve | StreamCurve]) -> CurveFile:
    def key(row: Any) -> tuple[Any, ...]:
        names = ("dtype", "kernel", "direction", "head_dim", "kind", "device")
        return tuple(getattr(row, name, "") for name in names)

    replaced = {key(row) for row in rows}
    every = [*rows, *(row for row in (*file.gemm, *file.attention, *file.stream) if key(row) not in replaced)]
    every.sort(key=lambda row: tuple(map(str, key(row))))
    return replace(
        file,
        gemm=tuple(row for row in every if isinstance(row, GemmCurve)),
        attention=tuple(row for row in every if isinstance(row, AttentionCurve)),
        stream=tuple(row for row in every if isinstance(row, StreamCurve)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="folder that holds kernels/*.csv")
    parser.add_argument("--write", action="store_true", help="rewrite src/gnomon/prices/curves/*.toml")
    args = parser.parse_args()
    results = [fit_gemm(args.data, of) for of in GEMMS]
    results += fit_every_attention(args.data)
    results += [fit_stream(args.data, of) for of in STREAMS]
    print("| curve | judged on | shapes | median | p90 | bias | also |\n|---|---|---:|---:|---:|---:|---|")
    for result in results:
        print(result.line())
    if args.write:
        write(results)


if __name__ == "__main__":
    main()
