"""A table of the user's own measured runs: CSV, one run a row, columns named as the options of `gnomon predict`.

`read_runs(path)` returns the runs. The reader is strict: an unknown column, a missing value or one that cannot be is an
error that names line and column. Units are in the columns' names: `step_s`, `peak_gib`. Leaves out predicting.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gnomon.cli.options.flags import add_flags, flags, from_namespace
from gnomon.cli.options.job import LayoutOptions, TrainingOptions
from gnomon.cli.request import read_request
from gnomon.errors import GnomonError, InputError, nearest
from gnomon.formats.job import read_source
from gnomon.prediction.measured import MeasuredRun

MEASURED = ("step_s", "peak_gib")
"""Columns of what was measured: seconds of a step; peak memory of the fullest device in GiB, all of it counted."""

WHAT = ("model", "on", "plan", "stack")
"""Columns of what ran: MODEL and --on of `gnomon predict`; or a plan file, which has all but the measurement."""

YES = {"yes": True, "no": False}
"""Values of columns that are a switch on the command line."""

NEEDED = (("model",), ("on",), ("seq_len",), ("global_batch", "tokens_per_batch"))
"""Columns of which each row fills one of each, unless it names a plan file: nothing of a measured run is assumed that
changes its work."""


class _Parser(argparse.ArgumentParser):
    """`gnomon predict`'s options, whose mistakes are errors of a table."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in WHAT:
        parser.add_argument(f"--{name}")
    add_flags(parser, LayoutOptions)
    return parser


def _switches() -> Mapping[str, bool]:
    """Column -> whether it is a switch, of all columns that say what ran."""
    how = {name: flag.is_switch for name, flag in flags(LayoutOptions).items() if name != "no_local_calibration"}
    return dict.fromkeys(WHAT, False) | how


def columns() -> tuple[str, ...]:
    """All columns that a table may have."""
    return ("id", *_switches(), *MEASURED)


def read_runs(path: Path) -> tuple[MeasuredRun, ...]:
    """The runs of a table, in its order. InputError for a table that cannot be read as one, or for its first row that
    cannot."""
    text, name = read_source(path)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, [value.strip() for value in values]) for values in reader]
    except csv.Error as error:
        raise InputError(f"{name} is not CSV: {error}", f"line {reader.line_num}") from None
    if not lines:
        raise InputError(
            f"{name} is empty; its first line names the columns, as in model,on,seq_len,global_batch,step_s"
        )
    header = lines[0][1]
    _check(header, name)
    runs: dict[str, MeasuredRun] = {}
    for line, values in lines[1:]:
        if not any(values):
            continue
        if len(values) != len(header):
            raise InputError(f"{name} has {len(values)} values for {len(header)} columns", f"line {line}")
        row = {column: value for column, value in zip(header, values, strict=True) if value}
        try:
            run = _run(row, line)
        except GnomonError as error:
            raise InputError(f"{name}: {error}", f"line {line}") from error
        if run.id in runs:
            raise InputError(f"{name} has two runs with id {run.id[:60]!r}", f"line {line}")
        runs[run.id] = run
    if not runs:
        raise InputError(f"{name} has no rows below its header; give a table with a measured run in each")
    return tuple(runs.values())


def _check(header: Sequence[str], name: str) -> None:
    known = columns()
    if unknown := [column for column in header if column not in known]:
        raise InputError(
            f"{name} has a column {unknown[0][:40]!r} that is not known{nearest(unknown[0][:40], known)}; columns are "
            f"{', '.join(known)}",
            "line 1",
        )
    if twice := sorted({column for column in header if header.count(column) > 1}):
        raise InputError(f"{name} has two columns {twice[0]!r}", "line 1")
    if "step_s" not in header:
        raise InputError(f"{name} has no column 'step_s', the measured seconds of a step", "line 1")


def _run(row: Mapping[str, str], line: int) -> MeasuredRun:
    """Reads one row of the table."""
    if "step_s" not in row:
        raise InputError("step_s is empty: every row has a measured step")
    for names in () if "plan" in row else NEEDED:
        if not any(name in row for name in names):
            raise InputError(f"{' and '.join(names)} not given; fill it, or name a plan file in column plan")
    request = read_request(_options_of(row))
    return MeasuredRun(
        id=row.get("id", f"line {line}"),
        graph=request.graph,
        plan=request.plan,
        workload=request.workload,
        stack=request.stack,
        cluster=request.cluster,
        step_s=_number("step_s", row["step_s"]),
        peak_bytes=round(_number("peak_gib", row["peak_gib"]) * 2**30) if "peak_gib" in row else None,
        assumed=request.assumed,
    )


def _options_of(row: Mapping[str, str]) -> TrainingOptions:
    """The options that a row stands for."""
    arguments = []
    for column, switch in _switches().items():
        if column not in row:
            continue
        option, value = f"--{column.replace('_', '-')}", row[column]
        if switch and value not in YES:
            raise InputError(f"{column} is {value[:40]!r}; give yes or no")
        # One word, so that a value which begins with `-` is not taken for an option.
        arguments += ([option] if YES[value] else []) if switch else [f"{option}={value}"]
    try:
        parsed = _parser().parse_args(arguments)
    except InputError as error:
        raise InputError(str(error).replace("argument --", "column ", 1)) from None
    return from_namespace(TrainingOptions, parsed)


def _number(column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{column} is {text[:40]!r}, which is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{column} is {text[:40]}; give a finite number above 0")
    return value
