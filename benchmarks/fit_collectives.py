"""Rebuild the fitted rows of `gnomon/prices/collectives.toml` from measured collectives, and print how well they hold.

    python benchmarks/fit_collectives.py DATA_DIR            # fit, print the table kept in results/fit_collectives.md
    python benchmarks/fit_collectives.py DATA_DIR --write    # and put the rows into the file

DATA_DIR holds kernels/*.csv (public measurements; each names its source). Every second size is kept out of every fit;
errors are on those. Where a size was measured several times (NCCL versions, settings), the fit is to the
median and errors are of every single measurement. Within a node NCCL's own tuning says where small buffers end
(`nccl_tuning.py`), and both sides are fitted apart. About a minute on one core. Assumed rows are left as they are.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fitting import search
from nccl_tuning import switch_bytes
from numpy.typing import NDArray

from gnomon import schema
from gnomon.hardware import catalogue, parse_cluster
from gnomon.prices import collectives
from gnomon.prices.collectives import AcrossFit, CollectiveFile, CopyFit, Cost, InsideFit, SmallFit
from gnomon.prices.curves import Provenance
from gnomon.prices.links import AxisLink, axis_link

FILE = Path(__file__).parents[1] / "src/gnomon/prices/collectives.toml"
DATE = "2026-11-22"
OPS = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
"""Names of the tables -> ours."""

Array = NDArray[np.float64]
Model = Callable[[Array, Array], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Measurements of one collective on one group."""

    bytes: Array
    seconds: Array

    def where(self, which: NDArray[np.bool_]) -> Points:
        return Points(bytes=self.bytes[which], seconds=self.seconds[which])

    def halves(self) -> tuple[Points, Points]:
        """(fitted to: medians of sizes 1, 3, 5 …; kept out: every measurement at the sizes between)."""
        sizes = np.unique(self.bytes)
        fit = sizes[0::2] if len(sizes) > 1 else sizes
        medians = np.array([np.median(self.seconds[self.bytes == size]) for size in fit])
        out = ~np.isin(self.bytes, fit)
        return Points(bytes=fit, seconds=medians), Points(bytes=self.bytes[out], seconds=self.seconds[out])


def read(data: Path, table: str, **wanted: str) -> list[dict[str, str]]:
    """Rows of a table whose columns equal (or with a trailing `*` begin with) `wanted`."""
    return [row for row in _table(data, table) if all(_same(row[k], v) for k, v in wanted.items())]


def _same(value: str, wanted: str) -> bool:
    return value.startswith(wanted[:-1]) if wanted.endswith("*") else value == wanted


@cache
def _table(data: Path, table: str) -> list[dict[str, str]]:
    with open(data / "kernels" / f"{table}.csv", newline="") as file:
        return list(csv.DictReader(file))


def points(rows: Iterable[dict[str, str]], *, least: float = 512) -> Points:
    """Bytes and seconds; `size_kb` of a table stands for KiB."""
    found = []
    for row in rows:
        size = float(row["bytes"]) if "bytes" in row else float(row["size_kb"]) * 1024
        if size >= least and float(row["time_us"]) > 0:
            found.append((size, float(row["time_us"]) * 1e-6))
    return Points(bytes=np.array([f[0] for f in found]), seconds=np.array([f[1] for f in found]))


def errors(predicted: Array, measured: Array) -> tuple[float, float]:
    """Median and 90th percentile of the absolute relative error."""
    miss = np.abs(predicted / measured - 1)
    return float(np.median(miss)), float(np.quantile(miss, 0.9))


def log_error(predicted: Array, measured: Array) -> float:
    return float(np.abs(np.log(predicted / measured)).mean())


def log_spread(predicted: Array, measured: Array) -> float:
    """Mean and root mean square together, so that neither the middle nor the tail is given up for the other."""
    miss = np.log(predicted / measured)
    return float(np.abs(miss).mean() + np.sqrt((miss**2).mean()))


def cost(start: float, per_byte: float, ramp: float, size: Array) -> Array:
    return np.asarray(collectives.Cost(start_s=start, s_per_byte=per_byte, ramp=ramp).seconds(size))


def group(spec: str, ranks: int, per_node: int) -> AxisLink:
    """The link of one group of ranks, `per_node` of them on each node of a cluster, nothing else running."""
    cluster = parse_cluster(spec)
    size = cluster.groups[0].node.count
    devices = np.concatenate([np.arange(per_node) + node * size for node in range(ranks // per_node)])
    return axis_link(cluster, devices[None, :])


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
    costs, misses = [], []
    for ranks, (link, measured) in sorted(want.groups.items()):
        fitted, held = measured.halves()
        per_byte = float(collectives.bound_seconds(want.kinds[0], 1.0, link))
        if want.nccl is None:
            found = _fit_cost(fitted, per_byte, log_error)
        else:
            switch = switch_bytes(link.arch, want.kinds[0], ranks, want.nccl)
            found = replace(
                _fit_cost(fitted.where(fitted.bytes > switch), per_byte, log_spread),
                small=_fit_cost(fitted.where(fitted.bytes <= switch), per_byte, log_spread),
                small_bytes=float(switch),
            )
        costs.append((ranks, per_byte, found))
        misses.append(np.abs(found.seconds(held.bytes) / held.seconds - 1))
    miss = np.concatenate(misses)
    sizes = np.concatenate([m.bytes for _, m in want.groups.values()])
    return InsideFit(
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
        provenance=provenance(want.data, float(np.median(miss)), float(np.quantile(miss, 0.9)), sizes),
    )


def _fit_cost(points: Points, per_byte: float, loss: Callable[[Array, Array], float]) -> Cost:
    """per_byte: seconds at the link's peak."""
    found = search(
        lambda p: loss(cost(p[0], per_byte / p[1], p[2], points.bytes), points.seconds),
        np.array([points.seconds.min(), 0.8, 0.5]),
        np.array([1e-7, 0.01, 0.01]),
        np.array([1e-2, 1.0, 50.0]),
    )
    return Cost(start_s=float(found[0]), s_per_byte=per_byte / float(found[1]), ramp=float(found[2]))


def _constants(costs: list[tuple[float, Cost]]) -> dict[str, tuple[float, ...]]:
    return {
        "start_s": tuple(_round(cost.start_s) for _, cost in costs),
        "share": tuple(min(1.0, _round(per_byte / cost.s_per_byte)) for per_byte, cost in costs),
        "ramp": tuple(_round(cost.ramp) for _, cost in costs),
    }


def provenance(data: str, median: float, p90: float, sizes: Array) -> Provenance:
    return Provenance(
        data=data,
        date=DATE,
        error=f"held out {median:.1%} / {p90:.1%} (median / p90)",
        range=f"{_size(sizes.min())} to {_size(sizes.max())}",
    )


def _size(count: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= 0.99 * scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _round(value: float) -> float:
    return float(f"{value:.3g}")


AIC = "nccl_intranode_aiconfigurator"


def inside_rows(data: Path) -> list[Inside]:
    """AIConfigurator's runs in fp16: on int8, all-reduces of H100 do without the switches' sums."""
    found = []
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
                    points(read(data, AIC, device=device, library="nccl/*", dtype="fp16", op=op, num_gpus=str(n))),
                )
                for n in sizes
            }
            kinds = ("all_gather", "broadcast") if op == "all_gather" else (OPS.get(op, op),)
            source = f"{AIC}.csv: {device}, nccl-tests, fp16, NCCL {versions}"
            found.append(Inside(label=device, link=link, kinds=kinds, groups=groups, data=source, nccl=nccl))
    return found + other_rows(data)


def other_rows(data: Path) -> list[Inside]:
    """V100 from vTrain and apex_plus, messages from apex_plus and vidur."""
    v100 = {
        n: (group("1xdgx-1-v100-32gb", n, n), points(read(data, "allreduce_vtrain", device="v100*", num_gpus=str(n))))
        for n in (2, 4, 8)
    }
    found = [
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
            n: (group("1xpcie3-server", n, n), points(_apex(data, "V100-PCIE-16GB", op, 1, n), least=1)) for n in (2, 4)
        }
        kinds = ("all_gather", "broadcast") if op == "all_gather" else (OPS.get(op, op),)
        source = "collectives_apex.csv: 4 V100-PCIe, half"
        found.append(Inside(label="v100 PCIe", link="pcie3-x16", kinds=kinds, groups=rows, data=source))
    for label, spec, link, rows, data_name in (
        ("h100_sxm", "dgx-h100", "nvlink4", _apex(data, "H100-SXM-80GB", "sendrecv", 1, 2), "collectives_apex.csv"),
        ("v100 PCIe", "pcie3-server", "pcie3-x16", _apex(data, "V100-PCIE-16GB", "sendrecv", 1, 2),
         "collectives_apex.csv"),
        ("a100 DGX", "dgx-a100-80gb", "nvlink3",
         read(data, "collectives_vidur", device="a100_dgx", op="send_recv", gpus_per_node="2"),
         "collectives_vidur.csv"),
    ):  # fmt: skip
        groups = {2: (group(f"1x{spec}", 2, 2), points(rows, least=1024))}
        found.append(
            Inside(
                label=label, link=link, kinds=("send_recv",), groups=groups, data=f"{data_name}: {label}, one message"
            )
        )
    return found


def _apex(data: Path, device: str, op: str, nodes: int, per_node: int) -> list[dict[str, str]]:
    return read(
        data, "collectives_apex", device=device, op=op, dtype="half", num_nodes=str(nodes), gpus_per_node=str(per_node)
    )


# --- between nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Across:
    """Rows to fit together: the fastest of them is compared."""

    label: str
    rows: tuple[AcrossFit, ...]
    """With constants to start from; those named in `fixed` stay."""
    fixed: tuple[tuple[int, str], ...]
    """(row, field) that the data cannot tell."""
    groups: tuple[tuple[AxisLink, Points], ...]


def fit_across(want: Across) -> tuple[AcrossFit, ...]:
    """All free constants of all rows at once."""
    names = ("start_s", "step_s", "inside_step_s", "share", "ramp")
    free = [(i, n) for i in range(len(want.rows)) for n in names if (i, n) not in want.fixed]
    limits = {"start_s": (1e-6, 1e-2), "step_s": (1e-7, 1e-2), "inside_step_s": (1e-8, 1e-3),
              "share": (0.02, 1.0), "ramp": (0.01, 50.0)}  # fmt: skip
    halves = [(link, *measured.halves()) for link, measured in want.groups]
    kind = want.rows[0].collectives[0]

    def rows_at(p: Array) -> tuple[AcrossFit, ...]:
        rows = list(want.rows)
        for (i, name), value in zip(free, p.tolist(), strict=True):
            rows[i] = replace(rows[i], **{name: value})
        return tuple(rows)

    def predict(rows: tuple[AcrossFit, ...], link: AxisLink, size: Array) -> Array:
        costs = [collectives.across_cost(row, kind, link).seconds(size) for row in rows]
        return np.asarray(np.minimum.reduce(costs))

    def loss(p: Array) -> float:
        rows = rows_at(p)
        each = [log_error(predict(rows, link, f.bytes), f.seconds) for link, f, _ in halves]
        return float(np.mean(each))

    first = np.array([getattr(want.rows[i], name) for i, name in free])
    low, high = (np.array([limits[name][side] for _, name in free]) for side in (0, 1))
    starts = [first, *(first * np.random.default_rng(seed).uniform(0.4, 2.0, len(first)) for seed in range(5))]
    found = min((search(loss, np.clip(start, low, high), low, high) for start in starts), key=loss)
    rows = rows_at(np.array([_round(v) for v in found]))
    miss = np.concatenate([np.abs(predict(rows, link, h.bytes) / h.seconds - 1) for link, _, h in halves])
    sizes = np.concatenate([m.bytes for _, m in want.groups])
    return tuple(
        replace(
            row,
            provenance=provenance(row.provenance.data, float(np.median(miss)), float(np.quantile(miss, 0.9)), sizes),
        )
        for row in rows
    )


def _row(link: str, kinds: tuple[str, ...], algorithm: str, data: str, **constants: float) -> AcrossFit:
    values = {"start_s": 2e-5, "step_s": 1e-5, "inside_step_s": 0.0, "share": 0.85, "ramp": 1.0, **constants}
    said = Provenance(data=data, date=DATE, error="unchecked", range="all")
    return AcrossFit(link=link, collectives=kinds, algorithm=algorithm, provenance=said, **values)  # type: ignore[arg-type]


def _alps(ranks: int) -> AxisLink:
    """GH200 nodes of Alps: 4 GPUs all to all over NVLink, 4 ports of 25 GB/s."""
    return AxisLink(
        ranks=ranks, nodes=ranks // 4, ranks_per_node=4, arch="hopper", inside_kind="nvlink", inside_name="nvlink4",
        inside_bytes_per_s=450e9, inside_latency_s=4.7e-7, switch_sums=False, pair_bytes_per_s=25e9,
        across_kind="ethernet", across_name="slingshot-200", across_bytes_per_s=100e9, across_latency_s=4e-6,
    )  # fmt: skip


def _tcp(nodes: int, per_node: int) -> AxisLink:
    """V100-PCIe nodes with one port of 10 Gb/s Ethernet."""
    return AxisLink(
        ranks=nodes * per_node, nodes=nodes, ranks_per_node=per_node, arch="volta",
        inside_kind="pcie" if per_node > 1 else "", inside_name="pcie3-x16" if per_node > 1 else "",
        inside_bytes_per_s=15.75e9 if per_node > 1 else 0.0, inside_latency_s=1e-6, switch_sums=False,
        pair_bytes_per_s=1.25e9, across_kind="ethernet", across_name="ethernet-10", across_bytes_per_s=1.25e9,
        across_latency_s=3e-5,
    )  # fmt: skip


NCCL_SIMPLE = {"step_s": 9.6e-6, "inside_step_s": 3.4e-6}
"""Latencies of a ring's step in NCCL's tuning model (src/graph/tuning.cc, Simple protocol): network and NVLink."""
RINGS = ("all_gather", "reduce_scatter")
LOGS = "nccl_multinode_logs"


def across_rows(data: Path) -> list[Across]:
    alps = tuple(
        (_alps(n), points(read(data, LOGS, device="gh200_alps", num_gpus=str(n)))) for n in (8, 32, 128, 512, 2048)
    )
    ar, slingshot = ("all_reduce",), f"{LOGS}.csv: GH200 Alps, NCCL 2.23.4, 8 to 2048 GPUs"
    ndr, voltage = group("4xdgx-h100", 32, 8), f"{LOGS}.csv: 4 nodes of 8 H100, 8 NDR ports, NCCL 2.24.3"
    p5 = (group("2xaws-p5", 16, 8), points(read(data, LOGS, cluster="AWS p5*")))
    p4de = (group("2xaws-p4de", 16, 8), points(read(data, LOGS, cluster="AWS p4de*")))
    efa = (
        ("p5", "", f"{LOGS}.csv: AWS p5, 2 nodes of 8 H100, 32 ports", p5),
        ("p4de", "ampere", f"{LOGS}.csv: AWS p4de, 2 nodes of 8 A100, 4 ports", p4de),
    )

    def at(op: str) -> tuple[tuple[AxisLink, Points], ...]:
        return ((ndr, points(read(data, LOGS, cluster="VoltagePark*", op=op, num_gpus="32"))),)

    one_message = read(data, "collectives_vidur", device="h100_dgx", op="send_recv", gpus_per_node="1")
    return [
        Across(
            label="Alps all_reduce",
            rows=(
                _row("slingshot-200", ar, "tree", slingshot, step_s=1.4e-5, share=0.2, ramp=2.0),
                _row("slingshot-200", ar, "tree", slingshot, step_s=8e-5, share=0.95, ramp=1.5),
                _row("slingshot-200", ar, "ring", slingshot, **NCCL_SIMPLE, ramp=0.01),
            ),
            fixed=((2, "step_s"), (2, "inside_step_s"), (0, "inside_step_s"), (1, "inside_step_s")),
            groups=alps,
        ),
        Across(
            label="NDR all_reduce",
            rows=(
                _row("infiniband", ar, "tree", voltage, share=0.3, ramp=2.0),
                _row("infiniband", ar, "tree", voltage, step_s=3e-5, ramp=1.5),
                _row("infiniband", ar, "ring", voltage, **NCCL_SIMPLE, ramp=0.01),
            ),
            fixed=((0, "step_s"), (1, "step_s"), (2, "step_s"), *((i, "inside_step_s") for i in range(3))),
            groups=at("all_reduce"),
        ),
        Across(
            label="NDR all_gather",
            rows=(
                _row("infiniband", RINGS, "ring", voltage, step_s=2.7e-6, inside_step_s=0.47e-6, ramp=2.0),
                _row("infiniband", RINGS, "ring", voltage, **NCCL_SIMPLE, ramp=0.01),
            ),
            fixed=((0, "step_s"), (0, "inside_step_s"), (1, "step_s"), (1, "inside_step_s")),
            groups=at("all_gather"),
        ),
        Across(
            label="NDR broadcast",
            rows=(
                _row("infiniband", ("broadcast",), "ring", voltage, start_s=1e-6, step_s=2.7e-6, share=0.2),
                _row("infiniband", ("broadcast",), "ring", voltage, step_s=9.6e-6, inside_step_s=3.4e-6, ramp=0.1),
            ),
            fixed=((0, "step_s"), (0, "inside_step_s"), (1, "step_s"), (1, "inside_step_s")),
            groups=at("broadcast"),
        ),
        Across(
            label="NDR send_recv",
            rows=(
                _row("infiniband", ("send_recv",), "direct",
                     "collectives_vidur.csv: H100, one GPU a node, its port taken as 400 Gb/s", step_s=2.7e-6),
            ),
            fixed=((0, "step_s"), (0, "inside_step_s")),
            groups=((group("2xdgx-h100", 2, 1), points(one_message)),),
        ),
        *(
            Across(
                label=f"EFA {name} all_reduce",
                rows=tuple(
                    replace(_row("efa", ar, "tree", source, start_s=8e-5, step_s=step, share=share), arch=arch)
                    for step, share in ((1e-5, 0.3), (4e-5, 0.8))
                ),
                fixed=((0, "step_s"), (0, "inside_step_s"), (1, "step_s"), (1, "inside_step_s")),
                groups=(measured,),
            )
            for name, arch, source, measured in efa
        ),
        *_tcp_rows(data),
    ]  # fmt: skip


def _tcp_rows(data: Path) -> list[Across]:
    """Sockets over 10 Gb/s Ethernet."""
    found = []
    for op in ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"):
        meshes = [(n, k) for n in (2, 4) for k in (1, 2, 4)] if op != "sendrecv" else [(2, 1)]
        if op == "reduce_scatter":  # its rows of 4 nodes are shifted by a column
            meshes = [(2, k) for k in (1, 2, 4)]
        groups = tuple((_tcp(n, k), points(_apex(data, "V100-PCIE-16GB", op, n, k), least=1024)) for n, k in meshes)
        kinds = ("all_gather", "broadcast") if op == "all_gather" else (OPS.get(op, op),)
        algorithm = "direct" if op in OPS else "ring"
        said = "collectives_apex.csv: 2 and 4 nodes of V100-PCIe, 10 Gb/s Ethernet, half"
        row = _row(
            "ethernet",
            kinds,
            algorithm,
            said,
            start_s=2e-4,
            step_s=1e-5 if op == "sendrecv" else 1e-4,
            inside_step_s=1e-5,
        )
        fixed = ((0, "step_s"), (0, "inside_step_s")) if op == "sendrecv" else ()
        found.append(Across(label=f"10GbE {op}", rows=(row,), fixed=fixed, groups=groups))
    return found


def copies(data: Path) -> CopyFit:
    rows = read(data, "misc_bandwidths_published", kind="h2d_pinned")
    size = np.array([float(row["item"]) for row in rows])
    measured = Points(bytes=size, seconds=size / (np.array([float(row["value"]) for row in rows]) * 1e9))
    host = catalogue.node("dgx-h100").host
    fitted, held = measured.halves()
    found = search(
        lambda p: log_error(cost(p[0], 1 / (host.bytes_per_s * p[1]), p[2], fitted.bytes), fitted.seconds),
        np.array([2.5e-6, 0.87, 0.1]),
        np.array([1e-7, 0.1, 0.001]),
        np.array([1e-4, 1.0, 10.0]),
    )
    miss = errors(cost(found[0], 1 / (host.bytes_per_s * found[1]), found[2], held.bytes), held.seconds)
    return CopyFit(
        link="pcie",
        start_s=_round(found[0]),
        share=_round(found[1]),
        ramp=_round(found[2]),
        provenance=provenance("misc_bandwidths_published.csv: H100, PCIe 5, host to device, pinned", *miss, size),
    )


# --- what is printed and written


def report(label: str, kinds: tuple[str, ...], row: Any, repeats: str = "-") -> None:
    said = row.provenance
    print(f"| {label} | {row.link} | {', '.join(kinds)} | {said.error} | {said.range} | {repeats} |")


def repeats(want: Inside) -> str:
    """How far single measurements are from the median of their size, which no price can be nearer than; where sizes
    were measured once, "-"."""
    off = []
    for _, measured in want.groups.values():
        for size in np.unique(measured.bytes):
            same = measured.seconds[measured.bytes == size]
            off.extend(np.abs(same / np.median(same) - 1) if len(same) > 1 else [])
    return f"{np.median(off):.1%} / {np.quantile(off, 0.9):.1%}" if off else "-"


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
        ("H100 x8, apex_plus", "all_gather", h100, _apex(data, "H100-SXM-80GB", "all_gather", 1, 8), 2**20),
    ]  # fmt: skip
    for n in (16, 64, 256, 1024):
        rows = read(data, LOGS, device="gh200_alps", num_gpus=str(n))
        tests.append((f"GH200 Alps x{n}, median of settings", "all_reduce", _alps(n), _medians(rows), 2**26))
    for label, op, link, rows, least in tests:
        measured = points(rows, least=least)
        predicted = np.asarray(collectives.collective_seconds(OPS.get(op, op), measured.bytes, link))
        median, p90 = errors(predicted, measured.seconds)
        bias = float(np.median(predicted / measured.seconds - 1))
        print(
            f"| {label}, from {_size(least)} | {op} | {median:.1%} / {p90:.1%} | {bias:+.1%} | {len(measured.bytes)} |"
        )


def _medians(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    sizes = sorted({row["bytes"] for row in rows}, key=int)
    return [
        {"bytes": s, "time_us": str(np.median([float(row["time_us"]) for row in rows if row["bytes"] == s]))}
        for s in sizes
    ]


def save(inside: list[InsideFit], across: list[AcrossFit], copied: list[CopyFit]) -> None:
    """Fitted rows first, then the assumed ones that the file has."""
    old = schema.load_file(CollectiveFile, FILE)
    kept = CollectiveFile(
        inside=(*inside, *(row for row in old.inside if _assumed(row))),
        across=(*across, *(row for row in old.across if _assumed(row))),
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
    print("| system | link | collectives | error | sizes | repeats |\n| --- | --- | --- | --- | --- | --- |")
    inside = []
    for want in inside_rows(options.data):
        inside.append(fit_inside(want))
        report(f"{want.label} x{'/'.join(map(str, want.groups))}", want.kinds, inside[-1], repeats(want))
    if options.write:
        save(inside, [], [])
    across = []
    for wanted in across_rows(options.data):
        rows = fit_across(wanted)
        across.extend(rows)
        report(f"{wanted.label}, {' and '.join(row.algorithm for row in rows)}", rows[0].collectives, rows[0])
    copied = copies(options.data)
    report("host copies", ("host to device",), copied)
    if options.write:
        save(inside, across, [copied])
    judge(options.data)


if __name__ == "__main__":
    main()
