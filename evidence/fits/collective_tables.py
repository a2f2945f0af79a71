"""What fits of collectives share: tables of measurements, errors on what was kept out, and the link of a group.

Imported by `fit_collectives.py` and `fit_across.py`. Leaves out: any model of a collective.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gnomon.hardware import parse_cluster
from gnomon.prices import collectives
from gnomon.prices.curves import Provenance
from gnomon.prices.links import AxisLink, axis_link

DATE = "2026-11-23"
OPS = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
"""Names of the tables -> ours."""

Array = NDArray[np.float64]


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
    collected = []
    for row in rows:
        size = float(row["bytes"]) if "bytes" in row else float(row["size_kb"]) * 1024
        if size >= least and float(row["time_us"]) > 0:
            collected.append((size, float(row["time_us"]) * 1e-6))
    return Points(bytes=np.array([f[0] for f in collected]), seconds=np.array([f[1] for f in collected]))


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
    return np.asarray(collectives.AlgorithmCost(start_s=start, s_per_byte=per_byte, ramp=ramp).seconds(size))


def group(spec: str, ranks: int, per_node: int) -> AxisLink:
    """The link of one group of ranks, `per_node` of them on each node of a cluster, nothing else running."""
    cluster = parse_cluster(spec)
    size = cluster.groups[0].node.count
    devices = np.concatenate([np.arange(per_node) + node * size for node in range(ranks // per_node)])
    return axis_link(cluster, devices[None, :])


def provenance(data: str, median: float, p90: float, sizes: Array) -> Provenance:
    return Provenance(
        data=data,
        date=DATE,
        error=f"held out {median:.1%} / {p90:.1%} (median / p90)",
        range=f"{size_text(sizes.min())} to {size_text(sizes.max())}",
    )


def size_text(count: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= 0.99 * scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def apex(data: Path, device: str, op: str, nodes: int, per_node: int, dtype: str = "half") -> list[dict[str, str]]:
    return read(
        data, "collectives_apex", device=device, op=op, dtype=dtype, num_nodes=str(nodes), gpus_per_node=str(per_node)
    )
