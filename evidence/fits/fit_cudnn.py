"""cuDNN's fused attention on Blackwell, forward and backward, from NVIDIA's own benchmark of it.

    python -m evidence.fits.fit_cudnn CUDNN_FRONTEND [--write]

CUDNN_FRONTEND is a checkout of NVIDIA/cudnn-frontend, whose benchmark/sdpa_benchmark_training/results holds times by
device, model, mask and dtype. Fits two constants of a row (efficiency and prologue; the others stay as they are) to
its lengths in bf16 and keeps a quarter of them out; prints what eight bits and windows take over that. GB200's rows
are Blackwell's; GB300's and B300's are GB300's.

    python -m evidence.fits.fit_cudnn CUDNN_FRONTEND --releases

prints how fast it is on Hopper under three releases of cuDNN, over the rows of hopper.toml: its older results are read
from the tags that had them.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from evidence.fits.fit_attention import ATTENTION_RANGES
from evidence.fits.fit_kernels import CURVES, merged
from evidence.fits.fitting import Error, Row, column, fit, kept_out, rounded
from gnomon import schema
from gnomon.hardware import catalogue
from gnomon.hardware.types import Device
from gnomon.prices.attention import Heads, attention_model, attention_seconds
from gnomon.prices.curves import Array, AttentionCurve, CurveFile, Provenance, curves_with

SOURCE = "NVIDIA/cudnn-frontend 3929da2 benchmark/sdpa_benchmark_training/results, cuDNN 9.22"
DATE = "2026-11-22"
RESULTS = "benchmark/sdpa_benchmark_training/results"

MODELS = {128: ("llama3.1", "ltx2", "wan22_a14b"), 192: ("dsv3", "kimiK26")}
"""Class of head sizes -> models with them, of which both directions were measured (192: of q and k, 128 of v)."""

DEVICES = {"NVIDIA GB200": ("gb200-nvl72", ("",)), "NVIDIA GB300": ("gb300-nvl72", ("gb300-nvl72", "b300-sxm-288gb"))}
"""Device of the results -> (in the catalogue, devices that its rows are for; empty: the whole generation)."""


RELEASES = {
    "9.1": ("v1.5.0", "benchmark/benchmark_results.csv"),
    "9.4": ("v1.7.0", "benchmark/benchmark_results.csv"),
    "9.19": ("v1.23.0", f"{RESULTS}/h200_919_only_cudnn/llama3.1_20260227_034703.csv"),
}
"""Release of cuDNN -> (tag, its results on H200)."""


def speeds_of(folder: Path, release: str) -> dict[tuple[int, int, int, int], tuple[float, float]]:
    """(sequences, length, heads, key heads) -> FLOP/s forward and backward: bf16, a causal mask, heads of 128."""
    tag, path = RELEASES[release]
    text = subprocess.run(["git", "-C", folder, "show", f"{tag}:{path}"], check=True, capture_output=True, text=True)
    lines, tflops = text.stdout.splitlines(), {}
    if "q_seqlen" in lines[0]:
        for row in csv.DictReader(lines):
            if (row["data_type"], row["attn_mask"]) == ("bfloat16", "top_left"):
                sizes = (row["batch_size"], row["q_seqlen"], row["num_q_heads"], row["num_kv_heads"])
                tflops[tuple(map(int, sizes))] = float(row["fwd_tflops"]), float(row["bwd_tflops"])
    else:  # columns were renamed in between: sizes, then PyTorch's three speeds, then cuDNN's forward, backward, both
        shift = 1 if "dropout_p" in lines[0] else 0
        for batch, heads, length, _, causal, *speeds in csv.reader(lines[1:]):
            if causal == "True":
                key = (int(batch), int(length), int(heads), int(heads))
                tflops[key] = float(speeds[shift + 3]), float(speeds[shift + 4])
    return {key: (a * 1e12, b * 1e12) for key, (a, b) in tflops.items() if 4096 <= key[1] <= 32768}


def print_releases(folder: Path) -> None:
    """Speed of each release over the rows', median and range over lengths."""
    h100 = catalogue.device("h100-sxm-80gb")
    curves = curves_with(h100, "cudnn")
    print("| cuDNN | lengths | forward | backward |\n|---|---:|---|---|")
    for release in RELEASES:
        parts: tuple[list[float], list[float]] = ([], [])
        for (batch, length, heads, kv_heads), speeds in sorted(speeds_of(folder, release).items()):
            for part, speed, backward in zip(parts, speeds, (False, True), strict=True):
                work = 2 * batch * heads * length**2 * 128 * (2.5 if backward else 1)
                sizes = (batch, length, length, heads, kv_heads, 128)
                price = attention_seconds(*sizes, causal=True, backward=backward, device=h100, curves=curves)
                part.append(speed * float(price) / work)
        text = (f"{np.median(part):.3f} ({min(part):.2f} to {max(part):.2f})" for part in parts)
        print(f"| {release} | {len(parts[0])} | {' | '.join(text)} |")


def rows_of(folder: Path) -> Iterator[Row]:
    """Every run that did not fail, with gradients added up in any order, as training does unless told otherwise."""
    for path in sorted((folder / RESULTS).glob("*/*/*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["success"] == "True" and row["deterministic_bwd"] == "False" and row["gpu_name"] in DEVICES:
                    yield row


def heads_of(rows: list[Row]) -> Heads:
    """Runs of one pair of head sizes, all with a causal mask or all without."""
    batch, length, count, keys = (column(rows, n) for n in ("batch_size", "q_seqlen", "num_q_heads", "num_kv_heads"))
    causal = rows[0]["attn_mask"] == "top_left"
    return Heads(
        batch=batch,
        q_len=length,
        kv_len=column(rows, "kv_seqlen"),
        heads=count,
        kv_heads=keys,
        pairs=length * length / (2 if causal else 1),
        width=int(rows[0]["head_dim_qk"]),
        width_v=int(rows[0]["head_dim_vo"]),
        causal=causal,
    )


def fit_row(parts: list[list[Row]], machine: Device, start: AttentionCurve) -> tuple[AttentionCurve, Error]:
    """The row with two constants of its own, and its error on the lengths that were kept out."""
    shapes = [heads_of(rows) for rows in parts]
    seconds = np.concatenate([column(rows, "time_ms") * 1e-3 for rows in parts])
    out = np.concatenate([kept_out(rows, "model_name", "q_seqlen") for rows in parts])
    peak = machine.flops_per_s("bf16")

    def predict(values: dict[str, float]) -> Array:
        row = replace(start, **values)
        return np.concatenate([attention_model(shape, peak, machine, row) for shape in shapes])

    ranges = {name: ATTENTION_RANGES[name] for name in ("efficiency", "prologue_s")}
    values = rounded(fit(ranges, lambda v: predict(v)[~out], seconds[~out]))
    return replace(start, **values), Error.of(predict(values)[out], seconds[out])


def found_rows(rows: list[Row], file: CurveFile) -> Iterator[tuple[AttentionCurve, Error, int]]:
    """(row, error, measured shapes) of each device, direction and class."""
    known = {(r.direction, r.head_dim): r for r in file.attention if r.kernel == "cudnn" and not r.device}
    for gpu, (name, devices) in DEVICES.items():
        for size, models in MODELS.items():
            for word, direction in (("fwd", "forward"), ("bwd", "backward")):
                mine = [
                    r for r in rows if (r["gpu_name"], r["profile_pass"], r["data_type"]) == (gpu, word, "bfloat16")
                ]
                mine = [r for r in mine if r["model_name"] in models]
                parts = [[r for r in mine if r["attn_mask"] == mask] for mask in ("top_left", "no_mask")]
                start = known.get((direction, size)) or known[direction, 128]
                row, error = fit_row(parts, catalogue.device(name), replace(start, head_dim=size))
                source = Provenance(
                    data=f"{SOURCE}, {gpu}: {len(mine)} shapes of {', '.join(models)}",
                    date=DATE,
                    error=f"held out {error.median:.1%} / {error.p90:.1%} (median / p90)",
                    range="length 2048 to 75k, bf16",
                )
                for device in devices:
                    yield replace(row, device=device, provenance=source), error, len(mine)


def ratios(rows: list[Row], what: str, other: str) -> Iterator[str]:
    """Time in a narrow dtype over that in bf16, of lengths of training, by device, head size, direction and window."""
    keys = ("gpu_name", "head_dim_qk", "profile_pass", "sliding_window_size", "attn_mask", "model_name", "q_seqlen")
    base = {tuple(r[k] for k in keys): float(r["time_ms"]) for r in rows if r["data_type"] == other}
    collected: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        key = tuple(row[k] for k in keys)
        if row["data_type"] == what and key in base and row["attn_mask"] == "top_left":
            if row["q_seqlen"] in ("4096", "8192"):
                collected.setdefault(key[:4], []).append(float(row["time_ms"]) / base[key])
    for key, values in sorted(collected.items()):
        yield f"| {what} | {' | '.join(key)} | {np.median(values):.2f} | {len(values)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="checkout of NVIDIA/cudnn-frontend")
    parser.add_argument(
        "--write", action="store_true", help="put the rows into src/gnomon/prices/curves/blackwell.toml"
    )
    parser.add_argument("--releases", action="store_true", help="print speeds of releases on Hopper instead")
    args = parser.parse_args()
    if args.releases:
        print_releases(args.folder)
        return
    rows, path = list(rows_of(args.folder)), CURVES / "blackwell.toml"
    file = schema.load_file(CurveFile, path)
    collected = list(found_rows(rows, file))
    print("| curve | device | shapes | efficiency | prologue | held out |\n|---|---|---:|---:|---:|---|")
    for row, error, count in collected:
        of = row.device or "gb200-nvl72 (all Blackwell)"
        name = f"cudnn {row.direction} {row.head_dim}"
        print(f"| {name} | {of} | {count} | {row.efficiency} | {row.prologue_s * 1e6:.2f} us | {error} |")
    print("\n| dtype | device | head size | direction | window | time over bf16 | shapes |")
    print("|---|---|---|---|---|---:|---:|")
    for dtype in ("mxfp8", "fp8"):
        print("\n".join(ratios(rows, dtype, "bfloat16")))
    if args.write:
        path.write_text(schema.dump(merged(file, [row for row, _, _ in collected])), encoding="utf-8")


if __name__ == "__main__":
    main()
