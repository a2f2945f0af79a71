"""What only the notes of a published run say: compilation, asynchronous tensor parallelism, release, schedule, memory.

`read_notes(row)` returns `NoteFacts`. Patterns are those of the sources in the table; a note that matches none changes
nothing. Leaves out what a column says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from evidence.published.megatron_ci import is_test
from evidence.published.row import Row

MemoryMetric = Literal["allocated", "reserved", "device", "unstated"]

_RELEASES = (r"release (v[\d.]+)", r"NeMo container ([\d.]+)", r"image (torch [\d.]+)", r"@(v[\d.]+)")

_ORDERS = (
    r"\b(zb-?h[12]|zb-?[12]p|zb-?v|v-?half|v-?min|1f1b-i|interleaved[- ]?1f1b|gpipe|dualpipe-?v?)\b",
    r"\b(1f1b)\b",
)
"""Pipeline schedules by their usual names, where a source does not say `schedule`."""

_MEMORY: tuple[tuple[str, MemoryMetric], ...] = (
    (r"nvidia-smi", "device"),
    (r"max[-_ ](?:memory[-_ ])?allocated|peak allocated|allocated memory", "allocated"),
    (r"max[-_ ](?:memory[-_ ])?reserved|peak reserved|reserved memory", "reserved"),
    (r"mem = peak gpu memory", "reserved"),  # nanotron's log: torch's own figure, without what lies outside
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteFacts:
    """Facts that no column holds."""

    compiled: bool | None = None
    """torch.compile is used; None if the notes do not say."""
    async_tp: bool = False
    """Tensor-parallel collectives are cut to overlap with their products."""
    release: str = ""
    """Release of the program, as the source writes it."""
    schedule: str = ""
    """Pipeline schedule, in lower case: `1f1b`, `v-half` …"""
    method: str = ""
    """Variant of the schedule, in lower case: `baseline`, `redis`, `vocab-1` …"""
    memory_metric: MemoryMetric = "unstated"
    """What the memory figure is."""
    memory_rank: int | None = None
    """Rank that it is of, -1 for the last; None for the highest, or not said."""
    without_optimizer: bool = False
    """The time is forward and backward, without the update."""
    inconsistent: str = ""
    """The source contradicts itself, in its note's words."""


def read_notes(row: Row) -> NoteFacts:
    """The facts of a row's notes, framework and section."""
    notes = row.notes
    lower = f"{notes} {row.section or ''}".lower()
    program = row.framework.lower()
    schedule = re.search(r"schedule[:= ]+([\w-]+)(?: method ([\w-]+))?", notes, re.IGNORECASE)
    rank = re.search(r"\(rank (\d+)\)", notes)
    contradiction = re.search(r"(WARNING published dp|INCONSISTENT)[^;]*", notes)
    return NoteFacts(
        compiled=_compiled(lower, program),
        async_tp=bool(re.search(r"async(?:hronous)?[ -]?tp|async tensor", lower)),
        release=_first(_RELEASES, f"{notes} {row.source or ''}"),
        schedule=schedule[1].lower() if schedule else _first(_ORDERS, f"{lower} {program}"),
        method=(schedule[2] or "").lower() if schedule else "",
        memory_metric=_memory_metric(lower, program),
        memory_rank=_memory_rank(row, rank),
        without_optimizer="no optimizer step" in lower,
        inconsistent=contradiction[0] if contradiction else "",
    )


NANOTRON_BENCHMARK = r"scripts/scaling_benchmarks\.py"
"""In the notes of runs of nanotron's benchmark, which are not of its main branch."""

_PROGRAMS: tuple[tuple[str, MemoryMetric], ...] = (
    (r"torchtitan", "reserved"),  # its log's memory is torch's max reserved (torchtitan components/metrics.py)
    # sail-sg/VocabularyParallelism 6191c3b artifact/quick_exp.sh: "max reserved" of the log (read 2026-11-24)
    (r"megatron-lm (?:fork|zero-bubble)", "reserved"),
)
"""(pattern of programs, what their log calls memory) where notes do not say."""


def _memory_metric(notes: str, program: str) -> MemoryMetric:
    for patterns, text in ((_MEMORY, notes), (_PROGRAMS, program)):
        for pattern, metric in patterns:
            if re.search(pattern, text):
                return metric
    return "unstated"


def _memory_rank(row: Row, stated: re.Match[str] | None) -> int | None:
    """The rank that a note names; of Megatron-LM's tests the last one, whose process writes the log
    (megatron/training/global_vars.py line 241, d98e8a6), whatever the note says; of nanotron's benchmark the first,
    which writes its table (huggingface/nanotron 67c5ebb6 src/nanotron/helpers.py log_throughput)."""
    if is_test(row):
        return -1
    if re.search(NANOTRON_BENCHMARK, row.notes):
        return 0
    return int(stated[1]) if stated else None


def _compiled(notes: str, program: str) -> bool | None:
    if re.search(
        r"no (?:torch\.)?compile|not compiled|eager mode|(?:without|w/o) (?:torch\.)?compile"
        r"|compile[=: ]+(?:off|no\b|none|false|disabled)",
        notes,
    ):
        return False
    if re.search(r"torch\.compile", program) or re.search(r"\bcompiled?\b|\binductor\b", notes):
        return True
    return None


def _first(patterns: tuple[str, ...], text: str) -> str:
    return next((match[1].rstrip(".") for pattern in patterns if (match := re.search(pattern, text))), "")
