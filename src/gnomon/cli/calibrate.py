"""`gnomon calibrate`: measures this machine and writes a cluster file, which `--on local` then reads.

`run(options)` prints what was found and returns 0, also for a noisy machine, which is called so. Numbers of runs that
`gnomon plan --try` kept are fitted again over it. Leaves out how it is measured (`gnomon.runtime.calibrate.calibrate`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from gnomon import schema
from gnomon.cli.options.tools import CalibrateOptions
from gnomon.cli.own import runs_folder
from gnomon.cli.own_runs import refit
from gnomon.cli.terminal import print_json, print_lines
from gnomon.cli.values import not_writable
from gnomon.errors import InputError
from gnomon.hardware import NOISY_SPREAD, Cluster, Measured, Table, local_file, measured_cluster
from gnomon.late import load_late
from gnomon.report.tables import wrapped

SHOWN = (
    ("matmul", "fp32", "forward"), ("matmul", "bf16", "forward"), ("matmul", "fp64", "forward"),
    ("attention", "fp32", "forward"), ("attention", "fp32", "backward"), ("norm", "fp32", "forward"),
    ("add", "fp32", "forward"), ("adamw", "fp32", ""), ("all_reduce", "", ""), ("all_gather", "", ""),
    ("reduce_scatter", "", ""), ("send_recv", "", ""),
)  # fmt: skip
"""Tables that are printed, at their largest point."""


def run(options: CalibrateOptions) -> int:
    """Measures the machine, writes the file and prints it; with `--from`, leaves that to `calibrate_from`."""
    if options.trace is None and options.job is None and (options.on or options.network):
        raise InputError("--on and --model are of the job of a trace; give --from-trace TRACES and --job FILE too")
    if options.trace is not None or options.job is not None:
        from_trace: Callable[[CalibrateOptions], int] = load_late("gnomon.cli.calibrate_trace:run")
        return from_trace(options)
    if options.runs is not None:
        command: Callable[[CalibrateOptions], int] = load_late("gnomon.cli.calibrate_from:run")
        return command(options)
    target = local_file() if options.output is None else Path(options.output)
    _check_writable(target)
    calibrate, budget, cores, memory = _runtime()
    count = options.processes or cores()
    _check_processes(count)
    measured: Measured = calibrate(count, budget(seconds=float(options.seconds), quiet=False))
    cluster = measured_cluster(measured, memory())
    schema.save_file(cluster, target)
    # What runs say is over the machine's figures, which are new.
    again = refit(cluster) if target == local_file() and runs_folder().is_dir() else None
    if options.json:
        own = None if again is None else again.summary
        print_json({"file": str(target), "noisy": measured.noisy, "own_runs": own, **_mapping(cluster)})
    else:
        print_lines(report(cluster, target))
        print_lines(wrapped(f"runs that were tried here: {again.summary}", indent="") if again is not None else ())
    if measured.noisy:
        print(f"gnomon: {_warning(measured)}", file=sys.stderr)
    return 0


def _runtime() -> tuple[Callable[..., Any], Callable[..., Any], Callable[[], int], Callable[[], int]]:
    """What measures, by name: the rest of Gnomon does without torch."""
    try:
        names = ("calibrate", "Budget", "physical_cores", "memory_bytes")
        loaded = [load_late(f"gnomon.runtime.calibrate.calibrate:{name}") for name in names]
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError("gnomon calibrate runs torch, which is not installed; pip install gnomon[torch]") from None
    return loaded[0], loaded[1], loaded[2], loaded[3]


def _check_writable(target: Path) -> None:
    """InputError before a minute of measuring, rather than after it."""
    if target.suffix != ".toml":
        raise InputError(f"{str(target)!r}: a cluster file ends with .toml")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {str(target)!r}: {error.strerror}; choose another place with -o") from error
    if problem := not_writable(target):
        raise InputError(f"cannot write {str(target)!r}: {problem}; choose another place with -o")


def _check_processes(count: int) -> None:
    """InputError for more processes than cores: they would take turns, and measure that."""
    cores = max(2, os.cpu_count() or 1)
    if count > cores:
        raise InputError(f"--processes {count}: this machine has {cores} cores; measure {cores} processes or fewer")


def report(cluster: Cluster, target: Path) -> list[str]:
    """Lines for a person: what was measured, at the largest sizes, and where it was written."""
    device = cluster.groups[0].node.device
    measured = device.measured
    assert measured is not None
    lines = [f"{measured.host}: {measured.processes} processes of {measured.threads} thread, {measured.software}", ""]
    lines.append(f"{'operation':<23} {'largest size':<28} {'all busy':>9} {'alone':>9} {'spread':>7}")
    by_key = {table.key: table for table in measured.tables}
    lines += [_line(by_key[key]) for key in SHOWN if key in by_key]
    peak = device.dense_peak
    rates = {name: getattr(peak, name) for name in ("fp32", "bf16", "fp64")}
    best = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in rates.items() if rate)
    lines += ["", f"best: {best}; {device.memory_bytes_per_s / 1e9:.0f} GB/s in a process"]
    if measured.lost_beside is not None:
        share = 100 * measured.lost_beside
        lines.append(f"overlap: computing loses {share:.0f} % of the time that a collective overlaps with it")
    lines.append(f"spread of repeats (interquartile range over median): {100 * measured.spread:.0f} % at the median")
    lines.append(f"written to {target}" + ("; --on local reads it" if target == local_file() else ""))
    return lines


def _line(table: Table) -> str:
    sizes = " ".join(f"{axis.name}={axis.sizes[-1]:,}" for axis in table.axes)
    alone_text = f"{1e3 * table.alone_s[-1]:.3g} ms" if table.alone_s else ""
    name = " ".join(part for part in table.key if part)
    return (
        f"{name:<23} {sizes:<28} {f'{1e3 * table.seconds[-1]:.3g} ms':>9} {alone_text:>9} "
        f"{f'{100 * median(table.spread):.0f} %':>7}"
    )


def _warning(measured: Measured) -> str:
    return (
        f"this machine was noisy: repeats spread by {100 * measured.spread:.0f} %, over {100 * NOISY_SPREAD:.0f} %; "
        "predictions for it are as uncertain. Calibrate again when it is idle."
    )


def _mapping(cluster: Cluster) -> dict[str, object]:
    mapping = schema.to_mapping(cluster)
    measured = cluster.groups[0].node.device.measured
    return {"spread": measured.spread if measured else None, "cluster": mapping}
