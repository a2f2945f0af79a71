"""Seconds of a step from what was published: time and tokens/s as they are, FLOP/s only through its source's formula.

`readings(row)` returns the step times that a row implies, the most trustworthy first: seconds, then tokens/s, then
FLOP/s where no time is given. MFU is used only for the one source that publishes nothing else. Leaves out memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from evidence.published.row import Row
from gnomon.errors import InputError

BEFORE_FIX = 1.03
"""BLOOM's TFLOP/s before 'TFLOPs calculation improved' read about 3% low (chronicles-prequel.md)."""

PARAMETERS_ALONE = r"configs/tpu/v4/README\.md"
"""Sources whose FLOP/s are six for each parameter and token: AI-Hypercomputer/maxtext 281e04bf3 (2023-04-27)
MaxText/train.py `per_device_tflops`; read 2026-11-23."""

HARDWARE = r"(?i)\bHFU[- ]like|\bincl(?:\.|udes|uding) (?:full )?recomput|\bhardware FLOP"
"""Notes of FLOP/s that count what is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What FLOP/s and MFU are taken of where the source's own formula is not known."""

    flops: float
    """Model FLOPs of a step, without recomputation."""
    flops_per_s: float
    """Dense peak of all devices in the compute dtype."""


def readings(row: Row, vocab: int, usual: Callable[[], Peak] | None = None) -> tuple[float, ...]:
    """Seconds per optimizer step; the first is the one to trust. InputError when none follows.

    vocab: rows of the embedding, for sources whose FLOP formula counts the head. usual: model FLOPs and peak, for
    sources whose formula is not known.
    """
    collected = [
        seconds
        for metric, value in ((row.metric, row.value), (row.second_metric, row.second_value))
        if metric is not None and value is not None and (seconds := _timed(row, metric, value)) is not None
    ]
    if collected:
        return tuple(sorted(collected, key=lambda s: s != collected[0]))
    formula = _FORMULAS.get(row.family)
    if formula is None and usual is not None:
        return (_by_model_flops(row, usual()),)
    if formula is None:
        raise InputError(f"{row.metric} = {row.value:g} is not a time, and no FLOP formula is known for {row.family!r}")
    return (formula(row, vocab),)


def _by_model_flops(row: Row, usual: Peak) -> float:
    """Hardware FLOPs count a recomputed forward, a third more, where the whole of it runs again."""
    again = 4 / 3 if _hardware(row) and (row.recompute or "").startswith("full") else 1.0
    if row.metric == "tflops_per_device":
        return usual.flops * again / (row.value * 1e12 * _need(row, "num_devices"))
    return usual.flops * again / (row.value / 100 * usual.flops_per_s)


def _hardware(row: Row) -> bool:
    """Whether the figure is said to count what is recomputed: HFU, FLOP/s with an HFU beside it, or in the notes."""
    if row.metric != "tflops_per_device":
        return row.metric == "hfu_pct"
    return row.second_metric == "hfu_pct" or re.search(HARDWARE, row.notes) is not None


def _timed(row: Row, metric: str, value: float) -> float | None:
    match metric:
        case "s_per_step":
            return value
        case "tokens_per_s_per_device":
            return _need(row, "global_batch") * _need(row, "seq_len") / value / _need(row, "num_devices")
        case "samples_per_s":
            return _need(row, "global_batch") / value
        case "tflops_per_device" | "mfu_pct" | "hfu_pct":
            return None
    raise InputError(f"metric {metric!r} is not known; use s_per_step, tokens_per_s_per_device or samples_per_s")


def _need(row: Row, column: str) -> int:
    value = getattr(row, column)
    if value is None:
        raise InputError(f"{column} not given")
    return int(value)


def _narayanan(row: Row, vocab: int) -> float:
    """FLOPs with recomputation, 96 B s l h² (1 + s/6h + V/16lh): Narayanan et al. 2021, equation 3."""
    layers, hidden, seq = (_need(row, c) for c in ("layers", "hidden", "seq_len"))
    work = 96 * _need(row, "global_batch") * seq * layers * hidden**2
    terms = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    achieved = row.value * (BEFORE_FIX if re.search("before TFLOPs fix", row.notes) else 1.0)
    return work * terms / (achieved * 1e12 * _need(row, "num_devices"))


def _vocab_parallel(row: Row, vocab: int) -> float:
    """MFU over 312 TFLOP/s with bsh(72h + 12s) a layer and 6bshV for the head: the paper's formula."""
    layers, hidden, seq, batch = (_need(row, c) for c in ("layers", "hidden", "seq_len", "global_batch"))
    work = batch * seq * hidden * (layers * (72 * hidden + 12 * seq) + 6 * vocab)
    return work / (row.value / 100 * 312e12 * _need(row, "num_devices"))


_FORMULAS: dict[str, Callable[[Row, int], float]] = {
    "narayanan-sc21": _narayanan,
    "bloom-prequel": _narayanan,
    "vocab-parallel-mlsys25": _vocab_parallel,
}
"""Family -> seconds from its FLOP figure."""
