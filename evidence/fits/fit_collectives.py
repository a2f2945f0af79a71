"""Rebuild the fitted rows of `gnomon/prices/collectives.toml` from measured collectives, and print how well they hold.

    python -m evidence.fits.fit_collectives DATA_DIR            # prints the table kept in results/fit_collectives.md
    python -m evidence.fits.fit_collectives DATA_DIR --write    # and put the rows into the file

DATA_DIR holds kernels/*.csv (public measurements; each names its source) and a clone of
crazyguitar/aws-gpu-communication-benchmark; without the clone its rows stay as they are. Every second size is kept out
of every fit; errors are on those. Where a size was measured several times (NCCL versions, settings, fp16 and int8 where
only bytes are moved), the fit is to the median and errors are of every single measurement. Beside an error stands what
no price can be better than: how far single measurements are from the median of their size, and how far the neighbouring
sizes' medians, joined by lines in logarithms, are from the sizes kept out. Within a node NCCL's own tuning says where
small buffers end (`nccl_tuning.py`), and both sides are fitted apart; then what the formula leaves there is bent
(`bends.py`). About a minute on one core. Assumed rows are left as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evidence.fits.bends import with_bends
from evidence.fits.collective_tables import (
    OPS,
    Array,
    Points,
    apex,
    cost,
    errors,
    group,
    log_error,
    log_spread,
    points,
    provenance,
    read,
    rounded,
    size_text,
)
from evidence.fits.fit_across import LOGS, P5, across_rows, alps, fit_across
from evidence.fits.fitting import search
from evidence.fits.nccl_tuning import switch_bytes
from gnomon import schema
from gnomon.hardware import catalogue
from gnomon.prices import collectives
from gnomon.prices.collectives import (
    AcrossFit,
    AlgorithmCost,
    CollectiveFile,
    CopyFit,
    InsideFit,
    SmallFit,
    inside_cost,
)
from gnomon.prices.links import AxisLink

FILE = Path(__file__).parents[2] / "src/gnomon/prices/collectives.toml"

# --- inside a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """One row to fit: groups of several sizes on one machine."""

    label: str
    link: str
    kinds: tuple[str, ...]
    """Of `collectives`; the data is of the first."""
    groups: dict[int, tuple[AxisLink, Points]]
    data: str
    nccl: tuple[int, int] | None = None
    """Its version, whose tuning says where small buffers end; None: all sizes are fitted as one."""


def fit_inside(want: Inside) -> InsideFit:
    """The formula's constants, then what they leave by size, both from the sizes that are fitted."""
    kind, costs = want.kinds[0], []
    halves = {ranks: measured.halves() for ranks, (_, measured) in sorted(want.groups.items())}
    links = {ranks: link for ranks, (link, _) in want.groups.items()}
    for ranks, (fitted, _) in halves.items():
        per_byte = float(collectives.bound_seconds(kind, 1.0, links[ranks]))
        if want.nccl is None:
            result = _fit_cost(fitted, per_byte, log_error)
        else:
            switch = switch_bytes(links[ranks].arch, kind, ranks, want.nccl)
            result = replace(
                _fit_cost(fitted.where(fitted.bytes > switch), per_byte, log_spread),
                small=_fit_cost(fitted.where(fitted.bytes <= switch), per_byte, log_spread),
                small_bytes=float(switch),
            )
        costs.append((ranks, per_byte, result))
    sizes = np.concatenate([m.bytes for _, m in want.groups.values()])
    row = InsideFit(
        link=want.link,
        collectives=want.kinds,  # type: ignore[arg-type]
        ranks=tuple(ranks for ranks, _, _ in costs),
        **_constants([(per_byte, cost) for _, per_byte, cost in costs]),  # type: ignore[arg-type]
        small=None
        if want.nccl is None
        else SmallFit(
            up_to_bytes=tuple(cost.small_bytes for _, _, cost in costs),
            **_constants([(per_byte, cost.small) for _, per_byte, cost in costs if cost.small]),
        ),
        provenance=provenance(want.data, 0.0, 0.0, sizes),
    )
    row = with_bends(row, kind, links, {ranks: fitted for ranks, (fitted, _) in halves.items()})
    miss = np.concatenate([_misses(row, kind, links[ranks], held) for ranks, (_, held) in halves.items()])
    source = provenance(want.data, float(np.median(miss)), float(np.quantile(miss, 0.9)), sizes)
    return replace(row, provenance=source)


def _misses(row: InsideFit, kind: Any, link: AxisLink, held: Points) -> Array:
    """Absolute, of every measurement."""
    return np.abs(inside_cost(row, kind, link).seconds(held.bytes) / held.seconds - 1)


def _fit_cost(points: Points, per_byte: float, loss: Callable[[Array, Array], float]) -> AlgorithmCost:
    """per_byte: seconds at the link's peak."""
    result = search(
        lambda p: loss(cost(p[0], per_byte / p[1], p[2], points.bytes), points.seconds),
        np.array([points.seconds.min(), 0.8, 0.5]),
        np.array([1e-7, 0.01, 0.01]),
        np.array([1e-2, 1.0, 50.0]),
    )
    return AlgorithmCost(start_s=float(result[0]), s_per_byte=per_byte / float(result[1]), ramp=float(result[2]))


def _constants(costs: list[tuple[float, AlgorithmCost]]) -> dict[str, tuple[float, ...]]:
    return {
        "start_s": tuple(rounded(cost.start_s) for _, cost in costs),
        "share": tuple(min(1.0, rounded(per_byte / cost.s_per_byte)) for per_byte, cost in costs),
        "ramp": tuple(rounded(cost.ramp) for _, cost in costs),
    }


AIC = "nccl_intranode_aiconfigurator"


DTYPES = {"all_reduce": ("fp16",), "reduce_scatter": ("fp16",), "all_gather": ("fp16", "int8"),
          "alltoall": ("fp16", "int8")}  # fmt: skip


def nccl_rows(data: Path, device: str, op: str, ranks: int, version: str = "*") -> list[dict[str, str]]:
    """Of nccl-tests; version: of NCCL, "*" for all."""
    return [
        row
        for dtype in DTYPES[op]
        for row in read(
            data, AIC, device=device, library="nccl/*", dtype=dtype, op=op, num_gpus=str(ranks), nccl_version=version
        )
    ]


def inside_rows(data: Path) -> list[Inside]:
    """AIConfigurator's runs in fp16, and in int8 where bytes are only moved: all-reduces of H100 on int8 do without the
    switches' sums."""
    collected = []
    for device, spec, link, versions, nccl in (
        ("a100_sxm", "dgx-a100-80gb", "nvlink3", "2.27.3", (2, 27)),
        ("h100_sxm", "dgx-h100", "nvlink4", "2.23, 2.27.3 and 2.29.2", (2, 29)),
        ("b200_sxm", "dgx-b200", "nvlink5", "2.27.3 to 2.29.2", (2, 29)),
        ("l40s", "8xl40s", "pcie4-x16", "2.27.3", (2, 27)),
    ):
        for op in ("all_reduce", "all_gather", "reduce_scatter", "alltoall"):
            sizes = (2, 4) if device == "l40s" else (2, 4, 8)
            groups = {
                n: (
                    group(f"1x{spec}" if device != "l40s" else spec, n, n),
                    points(nccl_rows(data, device, op, n)),
                )
                for n in sizes
            }
            kinds = ("all_gather", "broadcast") if op == "all_gather" else (OPS.get(op, op),)
            dtypes = " and ".join(DTYPES[op])
            source = f"{AIC}.csv: {device}, nccl-tests, {dtypes}, NCCL {versions}"
            collected.append(Inside(label=device, link=link, kinds=kinds, groups=groups, data=source, nccl=nccl))
    return collected + other_rows(data)


def other_rows(data: Path) -> list[Inside]:
    """V100 from vTrain and apex_plus, messages from apex_plus and vidur."""
    v100 = {
        n: (group("1xdgx-1-v100-32gb", n, n), points(read(data, "allreduce_vtrain", device="v100*", num_gpus=str(n))))
        for n in (2, 4, 8)
    }
    collected = [
        Inside(
            label="v100 SXM",
            link="nvlink2",
            kinds=("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
            groups=v100,
            data="allreduce_vtrain.csv: 8 V100 with NVLink, all_reduce; the other kinds assumed alike",
        )
    ]
    for op in ("all_reduce", "all_gather", "reduce_scatter", "alltoall"):
        rows = {
            n: (group("1xpcie3-server", n, n), points(apex(data, "V100-PCIE-16GB", op, 1, n), least=1)) for n in (2, 4)
        }
        kinds = ("all_gather", "broadcast") if op == "all_gather" else (OPS.get(op, op),)
        source = "collectives_apex.csv: 4 V100-PCIe, half"
        collected.append(Inside(label="v100 PCIe", link="pcie3-x16", kinds=kinds, groups=rows, data=source))
    for label, spec, link, rows, data_name in (
        ("h100_sxm", "dgx-h100", "nvlink4",
         [row for dtype in ("half", "float") for row in apex(data, "H100-SXM-80GB", "sendrecv", 1, 2, dtype)],
         "collectives_apex.csv"),
        ("v100 PCIe", "pcie3-server", "pcie3-x16", apex(data, "V100-PCIE-16GB", "sendrecv", 1, 2),
         "collectives_apex.csv"),
        ("a100 DGX", "dgx-a100-80gb", "nvlink3",
         read(data, "collectives_vidur", device="a100_dgx", op="send_recv", gpus_per_node="2"),
         "collectives_vidur.csv"),
    ):  # fmt: skip
        groups = {2: (group(f"1x{spec}", 2, 2), points(rows, least=1024))}
        source = f"{data_name}: {label}, one message"
        nccl = (2, 27) if link.startswith("nvlink") else None
        collected.append(Inside(label=label, link=link, kinds=("send_recv",), groups=groups, data=source, nccl=nccl))
    return collected


def copies(data: Path) -> tuple[CopyFit, Points]:
    rows = read(data, "misc_bandwidths_published", kind="h2d_pinned")
    size = np.array([float(row["item"]) for row in rows])
    measured = Points(bytes=size, seconds=size / (np.array([float(row["value"]) for row in rows]) * 1e9))
    host = catalogue.node("dgx-h100").host
    fitted, held = measured.halves()
    result = search(
        lambda p: log_error(cost(p[0], 1 / (host.bytes_per_s * p[1]), p[2], fitted.bytes), fitted.seconds),
        np.array([2.5e-6, 0.87, 0.1]),
        np.array([1e-7, 0.1, 0.001]),
        np.array([1e-4, 1.0, 10.0]),
    )
    miss = errors(cost(result[0], 1 / (host.bytes_per_s * result[1]), result[2], held.bytes), held.seconds)
    row = CopyFit(
        link="pcie",
        start_s=rounded(result[0]),
        share=rounded(result[1]),
        ramp=rounded(result[2]),
        provenance=provenance("misc_bandwidths_published.csv: H100, PCIe 5, host to device, pinned", *miss, size),
    )
    return row, measured


# --- what is printed and written


def report(label: str, kinds: tuple[str, ...], row: Any, groups: Iterable[Points]) -> None:
    message, halves = row.provenance, [measured.halves() for measured in groups]
    print(
        f"| {label} | {row.link} | {', '.join(kinds)} | {message.error} | {message.range} | {repeats(halves)} "
        f"| {between(halves)} |"
    )


def repeats(halves: list[tuple[Points, Points]]) -> str:
    """How far single measurements at the sizes kept out are from the median of their size, which no price can be nearer
    than; where sizes were measured once, "-"."""
    off: list[float] = []
    for _, held in halves:
        for size in np.unique(held.bytes):
            same = held.seconds[held.bytes == size]
            off.extend(np.abs(same / np.median(same) - 1) if len(same) > 1 else [])
    return f"{np.median(off):.1%} / {np.quantile(off, 0.9):.1%}" if off else "-"


def between(halves: list[tuple[Points, Points]]) -> str:
    """The error of having no model at the sizes kept out: the line in logarithms between their neighbours' medians.

    Sizes beyond the last neighbour are left out."""
    off: list[float] = []
    for fitted, held in halves:
        within = held.where(held.bytes <= fitted.bytes.max())
        line = np.exp(np.interp(np.log(within.bytes), np.log(fitted.bytes), np.log(fitted.seconds)))
        off.extend(np.abs(line / within.seconds - 1))
    return f"{np.median(off):.1%} / {np.quantile(off, 0.9):.1%}"


def versions(data: Path, rows: Sequence[InsideFit]) -> None:
    """H100's fitted rows on one NCCL at a time."""
    print("\n| H100 x2/4/8 | NCCL | sizes kept out | repeats |\n| --- | --- | --- | --- |")
    for op in DTYPES:
        row = next(r for r in rows if r.link == "nvlink4" and OPS.get(op, op) in r.collectives)
        for version in ("2.23", "2.29.2"):
            miss, halves = [], []
            for n in row.ranks:
                every = points(nccl_rows(data, "h100_sxm", op, n))
                kept = ~np.isin(every.bytes, every.halves()[0].bytes)
                mine = points(nccl_rows(data, "h100_sxm", op, n, version))
                held = mine.where(np.isin(mine.bytes, np.unique(every.bytes[kept])))
                miss.append(_misses(row, row.collectives[0], group("1xdgx-h100", n, n), held))
                halves.append((held, held))
            every_miss = np.concatenate(miss)
            if len(every_miss):
                text = f"{np.median(every_miss):.1%} / {np.quantile(every_miss, 0.9):.1%}"
                print(f"| {OPS.get(op, op)} | {version} | {text} | {repeats(halves)} |")


def without_a_size(data: Path) -> None:
    """Each size of group priced by a row fitted without it, straight and bent: on its sizes kept out."""
    print("\n| size of group left out | collectives | straight | bent |\n| --- | --- | --- | --- |")
    for want in inside_rows(data):
        straight, bent = [], []
        for ranks in want.groups if len(want.groups) > 1 else ():
            link, measured = want.groups[ranks]
            others = replace(want, groups={n: group for n, group in want.groups.items() if n != ranks})
            row, held = fit_inside(others), measured.halves()[1]
            small = row.small and replace(row.small, bend=None)
            straight.append(_misses(replace(row, bend=None, small=small), want.kinds[0], link, held))
            bent.append(_misses(row, want.kinds[0], link, held))
        if bent:
            message = [np.concatenate(miss) for miss in (straight, bent)]
            shown = " | ".join(f"{np.median(miss):.1%} / {np.quantile(miss, 0.9):.1%}" for miss in message)
            print(f"| {want.label} x{'/'.join(map(str, want.groups))} | {', '.join(want.kinds)} | {shown} |")


def judge(data: Path) -> None:
    """Systems that nothing was fitted to."""
    print("\n| not fitted to | kind | median / p90 | bias | points |\n| --- | --- | --- | --- | ---: |")
    h100, a100 = group("1xdgx-h100", 8, 8), group("1xdgx-a100-80gb", 8, 8)
    tests = [
        (
            "H200 x8, NCCL 2.23 to 2.29.2",
            op,
            h100,
            read(data, AIC, device="h200_sxm", library="nccl/*", dtype="fp16", op=op, num_gpus="8"),
            512,
        )
        for op in ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
    ]
    tests += [
        ("H100 x8, vidur (torch)", "all_reduce", h100,
         read(data, "collectives_vidur", device="h100_dgx", op="all_reduce", num_gpus="8"), 2**22),
        ("A100 x8, vidur (torch)", "all_reduce", a100,
         read(data, "collectives_vidur", device="a100_dgx", op="all_reduce", num_gpus="8",
              gpus_per_node="8"), 2**22),
        ("A100 x8, vTrain", "all_reduce", a100,
         read(data, "allreduce_vtrain", device="a100*", num_gpus="8"), 2**20),
        ("H100 x8, VoltagePark", "all_reduce", h100, read(data, LOGS, cluster="VoltagePark*", op="all_reduce",
         num_gpus="8"), 2**20),
        ("H100 x8, apex_plus", "all_gather", h100, apex(data, "H100-SXM-80GB", "all_gather", 1, 8), 2**20),
    ]  # fmt: skip
    for n in (16, 64, 256, 1024):
        rows = read(data, LOGS, device="gh200_alps", num_gpus=str(n))
        tests.append((f"GH200 Alps x{n}, median of settings", "all_reduce", alps(n), _medians(rows), 2**26))
    for label, op, link, rows, least in tests:
        measured = points(rows, least=least)
        predicted = np.asarray(collectives.collective_seconds(OPS.get(op, op), measured.bytes, link))
        median, p90 = errors(predicted, measured.seconds)
        bias = float(np.median(predicted / measured.seconds - 1))
        text = f"{median:.1%} / {p90:.1%} | {bias:+.1%} | {len(measured.bytes)}"
        print(f"| {label}, from {size_text(least)} | {op} | {text} |")


def _medians(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    sizes = sorted({row["bytes"] for row in rows}, key=int)
    return [
        {"bytes": s, "time_us": str(np.median([float(row["time_us"]) for row in rows if row["bytes"] == s]))}
        for s in sizes
    ]


def save(inside: list[InsideFit], across: list[AcrossFit], copied: list[CopyFit]) -> None:
    """Fitted rows first, then those of the file whose tables are not there, and its assumed ones."""
    old = schema.load_file(CollectiveFile, FILE)
    fresh = {row.provenance.data for row in across}
    absent = [row for row in old.across if row.provenance.data.startswith(P5) and row.provenance.data not in fresh]
    kept = CollectiveFile(
        inside=(*inside, *(row for row in old.inside if _assumed(row))),
        across=(*across, *absent, *(row for row in old.across if _assumed(row))),
        copies=(*copied, *(row for row in old.copies if _assumed(row))),
    )
    FILE.write_text(schema.dump(kept))
    collectives.collective_fits.cache_clear()
    collectives.algorithm_costs.cache_clear()


def _assumed(row: Any) -> bool:
    return bool(row.provenance.error == "unchecked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", action="store_true", help="put the rows into collectives.toml")
    options = parser.parse_args()
    print("| system | link | collectives | error | sizes | repeats | neighbours |\n|" + " --- |" * 7)
    inside = []
    for want in inside_rows(options.data):
        inside.append(fit_inside(want))
        label = f"{want.label} x{'/'.join(map(str, want.groups))}"
        report(label, want.kinds, inside[-1], [measured for _, measured in want.groups.values()])
    if options.write:
        save(inside, [], [])
    across = []
    for wanted in across_rows(options.data):
        rows = fit_across(wanted)
        across.extend(rows)
        label = f"{wanted.label}, {' and '.join(row.algorithm for row in rows)}"
        report(label, rows[0].collectives, rows[0], [measured for _, measured in wanted.groups])
    copied, measured = copies(options.data)
    report("host copies", ("host to device",), copied, [measured])
    if options.write:
        save(inside, across, [copied])
    versions(options.data, inside)
    without_a_size(options.data)
    judge(options.data)


if __name__ == "__main__":
    main()
