"""Collectives between nodes: rows of each network, fitted together where NCCL takes the fastest of several algorithms.

`across_rows(data)` says what is fitted to what, `fit_across(want)` finds the constants; `fit_collectives.py` runs them.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from evidence.fits.collective_tables import (
    DATE,
    OPS,
    Array,
    Points,
    apex,
    group,
    log_error,
    points,
    provenance,
    read,
    rounded,
)
from evidence.fits.fitting import search
from gnomon.prices import collectives
from gnomon.prices.collectives import AcrossFit, SmallAcrossFit
from gnomon.prices.curves import Provenance
from gnomon.prices.links import AxisLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Across:
    """Rows to fit together: the fastest of them is compared."""

    label: str
    rows: tuple[AcrossFit, ...]
    """With constants to start from; those named in `fixed` stay."""
    fixed: tuple[tuple[int, str], ...]
    """(row, field) that the data cannot tell."""
    groups: tuple[tuple[AxisLink, Points], ...]


NAMES = ("start_s", "step_s", "inside_step_s", "share", "ramp")
LIMITS = {"start_s": (1e-6, 1e-2), "step_s": (1e-7, 1e-2), "inside_step_s": (1e-8, 1e-3),
          "share": (0.02, 1.0), "ramp": (0.01, 50.0)}  # fmt: skip


def fit_across(want: Across) -> tuple[AcrossFit, ...]:
    """All free constants of all rows at once, those for small buffers among them."""
    free = [(i, n) for i, row in enumerate(want.rows) for n in _names(row) if (i, n) not in want.fixed]
    halves = [(link, *measured.halves()) for link, measured in want.groups]
    kind = want.rows[0].collectives[0]

    def rows_at(p: Array) -> tuple[AcrossFit, ...]:
        rows = list(want.rows)
        for (i, name), value in zip(free, p.tolist(), strict=True):
            rows[i] = _with(rows[i], name, value)
        return tuple(rows)

    def predict(rows: tuple[AcrossFit, ...], link: AxisLink, size: Array) -> Array:
        costs = [collectives.across_cost(row, kind, link).seconds(size) for row in rows]
        return np.asarray(np.minimum.reduce(costs))

    def loss(p: Array) -> float:
        rows = rows_at(p)
        share = [log_error(predict(rows, link, f.bytes), f.seconds) for link, f, _ in halves]
        return float(np.mean(share))

    first = np.array([_value(want.rows[i], name) for i, name in free])
    low, high = (np.array([LIMITS[name.removeprefix(SMALL)][side] for _, name in free]) for side in (0, 1))
    starts = [first, *(first * np.random.default_rng(seed).uniform(0.4, 2.0, len(first)) for seed in range(5))]
    result = min((search(loss, np.clip(start, low, high), low, high) for start in starts), key=loss)
    rows = rows_at(np.array([rounded(v) for v in result]))
    miss = np.concatenate([np.abs(predict(rows, link, h.bytes) / h.seconds - 1) for link, _, h in halves])
    sizes = np.concatenate([m.bytes for _, m in want.groups])
    return tuple(
        replace(
            row,
            provenance=provenance(row.provenance.data, float(np.median(miss)), float(np.quantile(miss, 0.9)), sizes),
        )
        for row in rows
    )


SMALL = "small."
"""Before the name of a constant: that of small buffers."""


def _names(row: AcrossFit) -> tuple[str, ...]:
    return NAMES + (tuple(SMALL + name for name in NAMES) if row.small else ())


def _value(row: AcrossFit, name: str) -> float:
    return float(getattr(row.small if name.startswith(SMALL) else row, name.removeprefix(SMALL)))


def _with(row: AcrossFit, name: str, value: float) -> AcrossFit:
    if row.small and name.startswith(SMALL):
        return replace(row, small=replace(row.small, **{name.removeprefix(SMALL): value}))  # type: ignore[arg-type]
    return replace(row, **{name: value})  # type: ignore[arg-type]


def _row(link: str, kinds: tuple[str, ...], algorithm: str, data: str, **constants: float) -> AcrossFit:
    values = {"start_s": 2e-5, "step_s": 1e-5, "inside_step_s": 0.0, "share": 0.85, "ramp": 1.0, **constants}
    source = Provenance(data=data, date=DATE, error="unchecked", range="all")
    return AcrossFit(link=link, collectives=kinds, algorithm=algorithm, provenance=source, **values)  # type: ignore[arg-type]


def alps(ranks: int) -> AxisLink:
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
    measured_alps = tuple(
        (alps(n), points(read(data, LOGS, device="gh200_alps", num_gpus=str(n)))) for n in (8, 32, 128, 512, 2048)
    )
    ar, slingshot = ("all_reduce",), f"{LOGS}.csv: GH200 Alps, NCCL 2.23.4, 8 to 2048 GPUs"
    ndr, voltage = group("4xdgx-h100", 32, 8), f"{LOGS}.csv: 4 nodes of 8 H100, 8 NDR ports, NCCL 2.24.3"
    p4de = (group("2xaws-p4de", 16, 8), points(read(data, LOGS, cluster="AWS p4de*")))
    p4de_source = f"{LOGS}.csv: AWS p4de, 2 nodes of 8 A100, 4 ports"

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
            groups=measured_alps,
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
        Across(
            label="EFA p4de all_reduce",
            rows=tuple(
                replace(_row("efa", ar, "tree", p4de_source, start_s=8e-5, step_s=step, share=share), arch="ampere")
                for step, share in ((1e-5, 0.3), (4e-5, 0.8))
            ),
            fixed=((0, "step_s"), (0, "inside_step_s"), (1, "step_s"), (1, "inside_step_s")),
            groups=(p4de,),
        ),
        *_p5_rows(data),
        *_tcp_rows(data),
    ]  # fmt: skip


P5 = "aws-gpu-communication-benchmark"
"""Folder of the tables of crazyguitar/aws-gpu-communication-benchmark (fd167f9, data/, CC-BY-4.0), read 2026-11-23:
nccl-tests on 2 to 32 p5 of 8 H100, NCCL 2.28.7, aws-ofi-nccl 1.16.3, out of place and in place."""
RING_STEP_S, SMALL_RING_STEP_S = 3.4e-6, 1.9e-6
"""NCCL's constants for a step over NVLink, in Simple and LL128: all groups have 8 ranks a node, so that steps within
nodes and between them cannot be told apart."""
SMALL_RING_BYTES = 12 * 2**20
"""Of each rank, between the sizes at which rings of 2, 4, 8 and 16 nodes were last seen in LL128 (8 MiB) and first in
Simple (16 MiB); 32 nodes were measured up to 8 MiB. NCCL's tuning, with the 75 us that aws-ofi-nccl states for a
message (platform-aws.cpp), has 10 MiB on two nodes and 8 on 16."""


def _p5_rows(data: Path) -> list[Across]:
    """EFA of 32 ports a node, each kind over 2 to 32 nodes; none where the tables are not there."""
    if not (data / P5).is_dir():
        return []
    source = f"{P5}: nccl-tests on 2 to 32 AWS p5 of 8 H100, 32 ports, NCCL 2.28.7"
    small = SmallAcrossFit(
        up_to_bytes=SMALL_RING_BYTES, start_s=5e-5, step_s=7e-5, inside_step_s=SMALL_RING_STEP_S, share=0.9, ramp=0.1
    )
    ring = _row(
        "efa",
        RINGS,
        "ring",
        f"{source}, all_gather; reduce_scatter taken as alike",
        step_s=2e-4,
        inside_step_s=RING_STEP_S,
        ramp=0.1,
    )
    two_nodes = (group("2xaws-p5", 16, 8), points(read(data, LOGS, cluster="AWS p5*")))
    reduced = f"{source}; {LOGS}.csv: 2 of them"
    ar: tuple[str, ...] = ("all_reduce",)
    return [
        Across(
            label="EFA p5 all_reduce",
            rows=(
                _row("efa", ar, "tree", reduced, start_s=5e-5, share=0.5),
                _row("efa", ar, "tree", reduced, start_s=8e-5, step_s=4e-5, ramp=1.5),
                _row(
                    "efa", ar, "ring", reduced, start_s=1.2e-4, step_s=6e-5, inside_step_s=SMALL_RING_STEP_S, ramp=0.01
                ),
            ),
            fixed=tuple((i, "inside_step_s") for i in range(3)),
            groups=(*_p5_groups(data, "all_reduce"), two_nodes),
        ),
        Across(
            label="EFA p5 all_gather",
            rows=(replace(ring, small=small),),
            fixed=((0, "inside_step_s"), (0, "small.inside_step_s")),
            groups=_p5_groups(data, "all_gather"),
        ),
        Across(
            label="EFA p5 alltoall",
            rows=(_row("efa", ("all_to_all",), "direct", source, start_s=1e-4, step_s=1.5e-5, ramp=0.5),),
            fixed=((0, "inside_step_s"),),
            groups=_p5_groups(data, "alltoall"),
        ),
    ]


def _p5_groups(data: Path, op: str) -> tuple[tuple[AxisLink, Points], ...]:
    """By number of nodes; sizes are in MiB, times the size over the bandwidth that the table states."""
    collected: dict[int, list[tuple[float, float]]] = {}
    with open(data / P5 / "data" / f"nccl_{op}.csv", newline="") as file:
        for row in csv.DictReader(file):
            size = float(row["size(MB)"]) * 2**20
            for column in ("out algbw(GB/s)", "in algbw(GB/s)"):
                collected.setdefault(int(row["Nodes"]), []).append((size, size / (float(row[column]) * 1e9)))
    return tuple(
        (
            group(f"{nodes}xaws-p5", nodes * 8, 8),
            Points(bytes=np.array([m[0] for m in some]), seconds=np.array([m[1] for m in some])),
        )
        for nodes, some in sorted(collected.items())
    )


def _tcp_rows(data: Path) -> list[Across]:
    """Sockets over 10 Gb/s Ethernet."""
    collected = []
    for op in ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"):
        meshes = [(n, k) for n in (2, 4) for k in (1, 2, 4)] if op != "sendrecv" else [(2, 1)]
        if op == "reduce_scatter":  # its rows of 4 nodes are shifted by a column
            meshes = [(2, k) for k in (1, 2, 4)]
        groups = tuple((_tcp(n, k), points(apex(data, "V100-PCIE-16GB", op, n, k), least=1024)) for n, k in meshes)
        kinds = ("all_gather", "broadcast") if op == "all_gather" else (OPS.get(op, op),)
        algorithm = "direct" if op in OPS else "ring"
        text = "collectives_apex.csv: 2 and 4 nodes of V100-PCIe, 10 Gb/s Ethernet, half"
        row = _row(
            "ethernet",
            kinds,
            algorithm,
            text,
            start_s=2e-4,
            step_s=1e-5 if op == "sendrecv" else 1e-4,
            inside_step_s=1e-5,
        )
        fixed = ((0, "step_s"), (0, "inside_step_s")) if op == "sendrecv" else ()
        collected.append(Across(label=f"10GbE {op}", rows=(row,), fixed=fixed, groups=groups))
    return collected
