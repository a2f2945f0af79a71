"""A table of published runs as text: named columns, each value with its type, problems kept by row.

`read_table(source)` returns `Row`s and, for rows whose values cannot be read, `RefusedRun` with the reason; a header
that cannot be read is an error for the whole file. Leaves out what the values mean for a model or a plan.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gnomon.errors import InputError, nearest
from gnomon.formats.job import read_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A row that gives no run, or a run that gives no prediction."""

    id: str
    """The row's id; `line N` where it has none."""
    family: str
    """Its family; empty if that could not be read."""
    reason: str
    """What is missing or cannot be expressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. None is an empty value: not stated."""

    id: str
    """Unique in the table."""
    family: str
    """Rows of one source."""
    model: str
    """As the source calls it."""
    device: str
    """As the source calls it."""
    framework: str
    """The program that ran."""
    metric: str
    """`s_per_step`, `tokens_per_s_per_device`, `samples_per_s`, `tflops_per_device` or `mfu_pct`."""
    value: float
    """In the metric's unit."""
    line: int = 0
    """Line of the file."""
    source: str | None = None
    """Where it was published."""
    section: str | None = None
    """Where in the source."""
    arch: str | None = None
    """`dense` or `moe`."""
    layers: int | None = None
    """Layers."""
    hidden: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Query heads."""
    kv_heads: str | None = None
    """Key and value heads, or `MLA`."""
    ffn: str | None = None
    """Width of the feed-forward; `768 expert`, `18432 dense / 2048 expert`."""
    vocab: int | None = None
    """Rows of the embedding."""
    seq_len: int | None = None
    """Tokens of a sequence."""
    experts: str | None = None
    """Routed experts; `256+1 shared`."""
    topk: int | None = None
    """Experts a token visits."""
    params_b: float | None = None
    """Parameters in units of 1e9, as published."""
    num_devices: int | None = None
    """Devices."""
    devices_per_node: int | None = None
    """Devices of one node."""
    interconnect: str | None = None
    """As the source describes it."""
    precision: str | None = None
    """`bf16`, `fp8`, …; a question mark where the source does not say."""
    tp: int | None = None
    """Tensor-parallel ranks."""
    pp: int | None = None
    """Pipeline-parallel ranks."""
    vpp: str | None = None
    """Virtual stages on each pipeline rank; a few say `layers/vstage=k`."""
    dp: int | None = None
    """Data-parallel ranks."""
    cp: int | None = None
    """Context-parallel ranks."""
    ep: int | None = None
    """Expert-parallel ranks."""
    sequence_parallel: str | None = None
    """`yes` or `no`."""
    zero_or_fsdp: str | None = None
    """ZeRO stage or kind of FSDP, in the program's words."""
    micro_batch: int | None = None
    """Sequences of a microbatch on one data-parallel rank."""
    global_batch: int | None = None
    """Sequences of a step."""
    recompute: str | None = None
    """`none`, `full`, `selective` …"""
    flash_attention: str | None = None
    """Which attention kernel."""
    offload: str | None = None
    """What is kept on the host."""
    second_metric: str | None = None
    """A second published figure; `hfu_pct` too."""
    second_value: float | None = None
    """Its value."""
    mem_gib: float | None = None
    """Peak memory, as printed by the source."""
    notes: str = ""
    """What no column says."""


COLUMNS = tuple(field.name for field in fields(Row) if field.name != "line")
"""Names of columns."""

COMPOSED = "vtrain-composed"
"""Family of rows that vTrain composed (`evidence.published.composed`)."""

APART = ((r"VIA-Research/vTrain.*ground_truth_single", COMPOSED),)
"""(pattern of sources, family): files whose rows are of another kind than those that a table groups with them."""

REQUIRED = ("id", "family", "model", "device", "framework", "metric", "value")
"""Columns that a table must have and every row must fill."""

_TYPES: Mapping[str, type] = {
    name: kind
    for kind, names in {
        int: "layers hidden heads vocab seq_len topk num_devices devices_per_node tp pp dp cp ep "
        "micro_batch global_batch",
        float: "value params_b second_value mem_gib",
    }.items()
    for name in names.split()
}


SLIP = 0.75
"""How alike (`difflib`) a column's name is to a known one if it is that one mistyped."""

HUB = r"^[\w.-]+/(?=[A-Za-z][\w.-]{3,}$)"
"""What stands before a model's name on a hub: `meta-llama/Llama-3.1-8B`."""

LOWER = ("arch", "metric", "precision", "sequence_parallel", "zero_or_fsdp", "recompute", "flash_attention", "offload",
         "second_metric", "experts", "ffn")  # fmt: skip
"""Columns whose words mean the same in capitals."""


def read_table(source: str | Path) -> tuple[tuple[Row, ...], tuple[Refused, ...]]:
    """(rows, rows that cannot be read) of a CSV file, given as a Path, or of text, given as str.

    Columns of other names are not read (`unread_columns`). InputError for a file that cannot be read, a header without
    a required column, or with one that looks like a slip of a known one.
    """
    text, name = read_source(source)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return _rows(reader, name)
    except csv.Error as error:
        raise InputError(f"{name} is not CSV: {error}", f"line {reader.line_num}") from None


def unread_columns(source: str | Path) -> tuple[str, ...]:
    """Columns of a table that have no meaning here: what its owner keeps beside."""
    text, _ = read_source(source)
    header = next(csv.reader(io.StringIO(text, newline="")), [])
    return tuple(column.strip() for column in header if column.strip() not in COLUMNS)


def _rows(reader: Any, name: str) -> tuple[tuple[Row, ...], tuple[Refused, ...]]:
    header = next(reader, None)
    if header is None:
        raise InputError(f"{name} is empty; the first line names the columns: {', '.join(COLUMNS)}")
    _check_header([column.strip() for column in header], name)
    columns = [column.strip() for column in header]
    rows: list[Row] = []
    refused: list[Refused] = []
    seen: set[str] = set()
    for values in reader:
        if not any(value.strip() for value in values):
            continue
        given = {c: v.strip() for c, v in zip(columns, values, strict=False)}
        label = given.get("id") or f"line {reader.line_num}"
        try:
            if len(values) != len(columns):
                raise InputError(f"it has {len(values)} values for {len(columns)} columns")
            if label in seen:
                raise InputError(f"id {label!r} is used twice")
            rows.append(_row({c: v for c, v in given.items() if c in COLUMNS}, reader.line_num))
        except InputError as error:
            refused.append(Refused(id=label, family=given.get("family", ""), reason=str(error)))
        seen.add(label)
    return tuple(rows), tuple(refused)


def _check_header(columns: Iterable[str], name: str) -> None:
    given = list(columns)
    if twice := sorted({column for column in given if given.count(column) > 1}):
        raise InputError(f"{name} has two columns {twice[0]!r}", "line 1")
    missing = [column for column in REQUIRED if column not in given]
    unknown = [column for column in given if column not in COLUMNS]
    if slips := unknown if missing else [other for other in unknown if get_close_matches(other, COLUMNS, cutoff=SLIP)]:
        raise InputError(
            f"{name} has a column {slips[0][:40]!r} that is not known{nearest(slips[0][:40], COLUMNS)}; "
            f"known are {', '.join(COLUMNS)}",
            "line 1",
        )
    if missing:
        raise InputError(f"{name} has no column {missing[0]!r}; every table needs {', '.join(REQUIRED)}", "line 1")


def _row(given: Mapping[str, str], line: int) -> Row:
    values: dict[str, Any] = {"line": line}
    for column, text in given.items():
        if column == "global_batch" and re.fullmatch(TOKENS, text):
            continue
        if text:
            values[column] = _value(column, text)
        elif column in REQUIRED:
            raise InputError(f"{column} is empty")
    values["model"] = re.sub(HUB, "", values.get("model", ""))
    if values.get("kv_heads", "").upper() == "MLA":
        values["kv_heads"] = "MLA"
    row = _of_tokens(Row(**values), given)
    another = next((family for pattern, family in APART if re.search(pattern, row.source or "")), None)
    return row if another is None else replace(row, family=another)


TOKENS = r"(?i)([\d.]+) ?([kmb]) tokens"
"""A batch in tokens."""


def _of_tokens(row: Row, given: Mapping[str, str]) -> Row:
    """The row with a batch in tokens as a note of tokens a step, which `complete` divides by the length: a power of two
    of millions is one of 2^20, as batches are whole numbers of sequences."""
    match = re.fullmatch(TOKENS, given.get("global_batch", ""))
    if match is None:
        return row
    count, power = float(match[1]), "kmb".index(match[2].lower()) + 1
    whole = count >= 1 and count.is_integer() and int(count) & (int(count) - 1) == 0
    tokens = round(count * (1 << 10 * power if whole else 10 ** (3 * power)))
    if row.seq_len:
        return replace(row, global_batch=max(1, round(tokens / row.seq_len)))
    return replace(row, notes=f"{row.notes}; tokens/step={tokens}")


def _value(column: str, text: str) -> str | int | float:
    kind = _TYPES.get(column, str)
    if kind is str:
        return text.lower() if column in LOWER else text
    try:
        value = kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise InputError(f"{column} = {text[:40]!r} is not {wanted}") from None
    if not math.isfinite(value) or value <= 0:
        raise InputError(f"{column} = {text[:40]!r} is not above 0 and finite")
    return value  # type: ignore[no-any-return]
