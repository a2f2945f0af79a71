"""Rebuild the efficiency curves of `gnomon.prices` from tables of measured kernels, and print how well they hold.

    python -m evidence.fits.fit_kernels DATA_DIR            # fit, print the table kept in results/fit_kernels.md
    python -m evidence.fits.fit_kernels DATA_DIR --write    # and put the rows into src/gnomon/prices/curves/*.toml

DATA_DIR holds kernels/*.csv (public measurements; each names its source). A quarter of the (n, k) pairs, of the
(batch, length) pairs of attention and of the (m, k) pairs of casts, chosen by hash, is kept out of every fit; errors
are on those. About half a minute on one core. Rows that are assumed, not fitted, are left as they are in the files.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evidence.fits.fit_attention import fit_every_attention
from evidence.fits.fitting import (
    BLANK,
    DEVICES,
    Error,
    Range,
    Result,
    Row,
    column,
    fit,
    kept_out,
    provenance,
    read,
    rounded,
    thin,
)
from gnomon import schema
from gnomon.hardware import catalogue
from gnomon.ops.curve import Walk
from gnomon.prices.curves import (
    Array,
    AttentionCurve,
    CurveFile,
    GemmCurve,
    Library,
    Provenance,
    StreamCurve,
    curves_for,
)
from gnomon.prices.gemm import GemmShapes, gemm_model, gemm_seconds
from gnomon.prices.stream import cached_efficiency

CURVES = Path(__file__).parents[2] / "src/gnomon/prices/curves"

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
    GemmTable("gemm_fp32_neusight", "NVIDIA L4", "fp32", (), 32, floor_s=3e-6, own=True),
    GemmTable("gemm_fp32_neusight", "Tesla T4", "fp32", (), 32, floor_s=3e-6),
    GemmTable("gemm_fp32_neusight", "AMD Instinct MI210", "fp32", (), 32, floor_s=3e-6),
    GemmTable("gemm_fp32_neusight", "AMD Instinct MI100", "fp32", (), 32, floor_s=3e-6),
)


def gemm_row(rate: str, values: dict[str, float], message: Provenance = BLANK, device: str = "") -> GemmCurve:
    kept = {name: value for name, value in values.items() if name not in ("cache_gain", *CASTS)}
    memory = values["memory_efficiency"]
    return GemmCurve(
        dtype="bf16" if rate == "fp16" else rate,
        cache_efficiency=float(f"{memory + (1 - memory) * values['cache_gain']:.3g}"),
        provenance=message,
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
        shape = GemmShapes(m=m[which], n=n[which], k=k[which], batch=batch[which], moved_bytes=moved[which])
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
    words = "".join(f"; {name} {values[name]:.3g}" for name in CASTS if of.casts)
    if of.floor_s is not None:
        words += f"; floor {values['t0_s'] * 1e6:.3g} us is the host's, {of.floor_s * 1e6:.3g} us put in its place"
        values["t0_s"] = of.floor_s
    stack = ", ".join(value for _, value in of.wanted) or "single and batched"
    shapes = "m >= 256, n and k >= 512"
    text = f"{of.table}.csv: {of.device}, {stack}, {len(rows)} shapes{words}"
    where = shapes + (f"; smaller ones {rest.median:.0%} / {rest.p90:.0%}" if rest.count else "")
    row = gemm_row(of.rate, values, provenance(text, held, where), machine.name if of.own else "")
    name = f"GEMM {of.rate} {machine.name} ({stack})"
    return Result(machine.arch, row, name, shapes, held, f"all three >= 1024: {cubes}; the rest: {rest}")


def older_cublas(data: Path) -> Library:
    """How fast large products are on H100 under CUDA 12.1: the row's seconds over those measured, over the same of
    A100, whose share is what that way of measuring (single launches, not graphs of six) costs."""
    shares = {}
    for device in ("h100", "a100"):
        machine = catalogue.device(f"{device}-sxm-80gb")
        rows = read(data, "linear_elementwise_vidur", device=device, kind="gemm")
        m, n, k, seconds = (*(column(rows, name) for name in "mnk"), column(rows, "time_us") * 1e-6)
        made = gemm_seconds(m, n, k, dtype="bf16", device=machine, curves=curves_for(machine, attention="flash2"))
        shares[device] = (np.asarray(made) / seconds)[seconds >= 5e-4]
    new, old = (float(np.median(shares[device])) for device in ("h100", "a100"))
    low, high = np.percentile(shares["h100"] / old, [10, 90])
    return Library(
        cublas="12.1",
        speed=float(f"{new / old:.2f}"),
        provenance=Provenance(
            data=f"linear_elementwise_vidur.csv: h100 over a100, {len(shares['h100'])} and {len(shares['a100'])} "
            f"products in fp16, torch 2.3 on CUDA 12.1; {new:.2f} and {old:.2f} of what the bf16 rows say",
            date="2026-11-22",
            error=f"10th and 90th percentile of the products: {low:.2f} and {high:.2f}",
            range="products of 0.5 ms and more; taken for shorter ones and for eight bits too",
        ),
    )


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
    kind: Walk
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
    StreamTable("ada", "l4-24gb", "plain", _FP32, "NVIDIA L4", ("add", "mul"), 3, own=True),
    StreamTable("turing", "t4-16gb", "plain", _FP32, "Tesla T4", ("add", "mul"), 3),
    StreamTable("cdna1", "mi100-32gb", "plain", _FP32, "AMD Instinct MI100", ("add", "mul"), 3),
    StreamTable("ada", "l4-24gb", "reduce", _FP32, "NVIDIA L4", ("softmax", "ln"), 2),
    StreamTable("turing", "t4-16gb", "reduce", _FP32, "Tesla T4", ("softmax", "ln"), 2),
    StreamTable("cdna1", "mi100-32gb", "reduce", _FP32, "AMD Instinct MI100", ("softmax", "ln"), 2),
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
    source = provenance(
        text, held, "under 2 MB, and over 4 times the cache" if whole else "100 MB and more; floor as in casts"
    )
    if out is main:
        source = replace(source, error=f"fit {held.median:.1%} / {held.p90:.1%} (median / p90), nothing held out")
    row = StreamCurve(
        kind=of.kind,
        t0_s=values.get("t0_s", FLOOR_S),
        efficiency=values["efficiency"],
        cache_efficiency=float(f"{cached(values):.3g}"),
        provenance=source,
        device=machine.name if of.own else "",
    )
    name = f"{of.kind} streaming {of.machine} ({', '.join(of.ops)} {of.mode})".replace(" )", ")")
    every = Error.of(predict(out, values), seconds[out])
    return Result(of.arch, row, name, source.range, held, f"over 100 MB: {big}; all: {every}")


# --- files


def write(results: list[Result]) -> None:
    """Put fitted rows in the place of those of the same key; other rows stay."""
    for arch in sorted({result.arch for result in results}):
        path = CURVES / f"{arch}.toml"
        file = schema.load_file(CurveFile, path)
        new = [result.row for result in results if result.arch == arch]
        path.write_text(schema.dump(merged(file, new)))


def write_library(library: Library) -> None:
    """Put it into Hopper's file."""
    path = CURVES / "hopper.toml"
    path.write_text(schema.dump(replace(schema.load_file(CurveFile, path), libraries=(library,))))


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
    library = older_cublas(args.data)
    print(
        f"\nproducts on H100 under cuBLAS {library.cublas}: {library.speed:.2f} of the row's speed; "
        f"{library.provenance.data}; {library.provenance.error}"
    )
    if args.write:
        write(results)
        write_library(library)


if __name__ == "__main__":
    main()
