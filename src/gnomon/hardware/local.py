"""This machine as a cluster: from the file that `gnomon calibrate` wrote, or a guess.

`measured_cluster` makes a Cluster of a calibration, `with_processes` another number of its processes, and `local_file`
says where a calibration is kept. Peaks of a measured device are the best that was seen: no price goes under them.
Leaves out measuring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gnomon.errors import CatalogueError
from gnomon.hardware import catalogue
from gnomon.hardware.measured import Measured, Table
from gnomon.hardware.types import Cluster, Device, Link, NodeGroup, PeakFlops
from gnomon.trust import user_folder

MAX_PROCESSES = 256
"""Most processes of one machine."""

WIDTHS = {"fp32": 4, "bf16": 2, "fp64": 8}
"""Bytes of an element of what is measured."""


def local_file() -> Path:
    """The file that keeps this machine's calibration: `local.toml` in $GNOMON_HOME, or in ~/.config/gnomon."""
    return user_folder() / "local.toml"


def processes_of(spec: str) -> int | None:
    """Processes that `local:N` asks for; None for `local`. CatalogueError for anything else after the colon."""
    _, colon, count = spec.partition(":")
    if not colon:
        return None
    if not count.isascii() or not count.isdigit() or not 1 <= int(count) <= MAX_PROCESSES:
        raise CatalogueError(
            f"cannot read {spec[:64]!r}; write `local`, or `local:N` for N processes of this machine, N from 1 to "
            f"{MAX_PROCESSES}"
        )
    return int(count)


def with_processes(cluster: Cluster, count: int | None) -> Cluster:
    """A measured machine with so many processes, default as many as were measured at once.

    One process has the machine to itself, so it gets the figures measured alone; more than were measured share the
    memory, and are said to be a guess.
    """
    node = cluster.groups[0].node
    device, measured = node.device, node.device.measured
    if count is None or measured is None or count == node.count:
        return cluster
    assumptions = list(cluster.assumptions)
    if count > node.count:
        assumptions.append(
            f"{count} processes where {node.count} were measured: as fast as those, which they cannot be"
        )
    # Alone, a process has the caches and the memory bandwidth that several share.
    if count == 1:
        measured = measured.alone
    # What all measured processes had together is the machine's, and is divided anew.
    memory = device.memory_bytes * node.count // count
    of = replace(device, measured=measured, memory_bytes=memory, marketed_memory_bytes=memory)
    group = NodeGroup(node=replace(node, device=of, count=count))
    return replace(cluster, name=f"local:{count}", groups=(group,), assumptions=tuple(assumptions))


def measured_cluster(measured: Measured, memory_bytes: int) -> Cluster:
    """The machine of a calibration: as many processes as worked at once, each with its share of the memory."""
    count, note = measured.processes, f"gnomon calibrate, {measured.software}"
    host = "-".join(part for part in measured.host.lower().replace(".", "-").split("-") if part) or "host"
    share = memory_bytes // count
    # What was measured is a process and its threads, so that is the device; the catalogue's processors are packages.
    device = Device(
        name=f"cpu-{host}",
        kind="cpu",
        arch="measured",
        per="process",
        dense_peak=PeakFlops(**{dtype: best_flops_per_s(measured, dtype) for dtype in WIDTHS}),
        memory_bytes=share,
        marketed_memory_bytes=share,
        memory_bytes_per_s=best_bytes_per_s(measured),
        num_sms=measured.threads,
        form_factor=f"{measured.threads} thread",
        source=note,
        date=measured.date[:10],
        note="Peaks are the fastest seen, data in caches included",
        measured=measured,
    )
    row = catalogue.node_row("local")
    node = replace(
        catalogue.build_node(row, device, count),
        # Ranks of one machine talk through its memory.
        intra=_loopback(measured, note),
        disk_read_bytes_per_s=_disk(measured, "disk_read") or row.disk_read_bytes_per_s,
        disk_write_bytes_per_s=_disk(measured, "disk_write") or row.disk_write_bytes_per_s,
        source=note,
        date=measured.date[:10],
        confidence="checked",
    )
    return Cluster(name="local", groups=(NodeGroup(node=node),))


def _loopback(measured: Measured, note: str) -> Link:
    """What messages between processes reach; the catalogue's guess where there was but one process."""
    guess = catalogue.link("loopback")
    table = _find(measured.tables, "send_recv", "")
    if table is None:
        return guess
    rates = [size / seconds for size, seconds in zip(table.axes[0].sizes, table.seconds, strict=True)]
    return replace(
        guess,
        bytes_per_s=max(rates),
        # The smallest message is empty as far as its time goes.
        latency_s=min(table.seconds),
        source=note,
        date=measured.date[:10],
        confidence="checked",
    )


def _disk(measured: Measured, what: str) -> float | None:
    """What the largest file reached; None where no disk was measured, whose rate is the catalogue's guess then."""
    table = _find(measured.tables, what, "")
    return None if table is None else table.axes[0].sizes[-1] / table.seconds[-1]


def best_flops_per_s(measured: Measured, dtype: str) -> float | None:
    """Fastest product seen in a dtype, alone or not; None if none was measured."""
    rates = [
        # A multiplication and an addition for each of m·n·k.
        2.0 * point["m"] * point["n"] * point["k"] / seconds
        for table in measured.tables
        if (table.what, table.dtype) == ("matmul", dtype)
        for point, seconds in table.figures()
    ]
    return max(rates, default=None)


def best_bytes_per_s(measured: Measured) -> float:
    """Fastest sum of two arrays seen, by the bytes that it reads and writes; the catalogue's guess without any."""
    rates = [
        # Two reads and one write.
        3.0 * WIDTHS[table.dtype] * point["elements"] / seconds
        for table in measured.tables
        if table.what == "add" and table.dtype in WIDTHS
        for point, seconds in table.figures()
    ]
    return max(rates, default=catalogue.device("cpu-process").memory_bytes_per_s)


def _find(tables: Iterable[Table], what: str, dtype: str) -> Table | None:
    return next((table for table in tables if (table.what, table.dtype) == (what, dtype)), None)
