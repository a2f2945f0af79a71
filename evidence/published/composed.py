"""Rows that were never run: times which a simulator put together, and published as measured.

vTrain's single-node table (VIA-Research/vTrain f8dda84 data/ground_truth_single.csv) is one. A microbatch more, a layer
more and a data-parallel rank more cost the same in every row, to the nanosecond; the last is what its table of
all-reduces says (trace/a100), in MiB and without 2(n-1)/n past the table's end as its code has it, so that eight ranks
reduce 2.3 GiB sooner than two (90 pairs of rows, all to 8 ns). No measurement does this. What is behind the rows is
real, once for each hidden size, tensor-parallel size and microbatch: kernels, and gaps between them, of one layer on
an A100, as CUPTI recorded a single step. Its multi-node table has times of one digit behind the millisecond, as
Megatron-LM logs them.

`with_composition(row)` returns such a row as what it is, and notes; others come back as they are.
"""

from __future__ import annotations

from dataclasses import replace

from evidence.published.row import COMPOSED, Row

PROGRAM = "vTrain of Megatron-DeepSpeed"
"""What made them. Stack `vtrain`."""


def is_composed(row: Row) -> bool:
    """Whether a simulator put the row's time together."""
    return row.family == COMPOSED


def with_composition(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row as vTrain's code makes its time: without recompute (src/predictor.py runs a layer again on all stages but
    the last, and the table's stages all take the same)."""
    if not is_composed(row):
        return row, ()
    note = "not measured: composed by vTrain's simulator from one profiled layer (published.composed has the proof)"
    return replace(row, framework=PROGRAM, recompute="none"), (note,)
