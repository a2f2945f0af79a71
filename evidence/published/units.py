"""Metrics of a published table in the few units that readers know: other names for them, totals, milliseconds.

`in_usual_units(row)` returns the row with `metric`, `value` and their second pair as `s_per_step`,
`tokens_per_s_per_device`, `samples_per_s`, `tflops_per_device`, `mfu_pct` or `hfu_pct`, and a note for each that was
converted. What it does not understand stays, to be refused by name. Leaves out what FLOP/s count (`measured`).
"""

from __future__ import annotations

import re
from dataclasses import replace

from evidence.published.row import Row

USUAL = ("s_per_step", "tokens_per_s_per_device", "samples_per_s", "tflops_per_device", "mfu_pct", "hfu_pct")

_S = r"s(?:ec(?:ond)?s?)?"
SECONDS = rf"(?:step|iter\w*)_(?:(?:time|latency)_)?(m?){_S}|(?:(?:time|latency)_)?(m?){_S}_per_(?:step|iter\w*)"
STEPS = r"(?:steps?|it(?:er\w*)?)_(?:per_)?s(?:ec\w*)?"
RATE = r"(k?)(tok|sample|seq|image|example)[a-z]*(?:_per_(device|gpu|chip))?_(?:per_)?s(?:ec(?:ond)?)?(?:_(.+))?"
"""Thousands or one, of what, of how many devices, which may stand before the time or behind it."""
FLOPS = r"(?:model_)?([tp])flops?(?:_per_s)?(?:_(.+))?"
SHARE = r"(mfu|hfu)(?:_(?:pct|percent|frac\w*|ratio))?"
ONE = r"(?:per_)?(?:device|gpu|chip|gcd|accelerator|npu|die)s?"
ALL = r"(?:in_)?(?:total|global|all|aggregate|cluster|system|overall)"


def in_usual_units(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with its metrics as `USUAL` has them, and what was converted."""
    notes = []
    for name, amount in (("metric", "value"), ("second_metric", "second_value")):
        metric, value = getattr(row, name), getattr(row, amount)
        if metric is None or value is None or metric in USUAL:
            continue
        match = _usual(row, re.sub(r"[^a-z0-9]+", "_", metric.lower().replace("/", "_per_")).strip("_"), value)
        if match is not None:
            changed: dict[str, object] = {name: match[0], amount: match[1]}
            row = replace(row, **changed)  # type: ignore[arg-type]
            notes.append(f"{metric} = {value:g} read as {match[0]} = {match[1]:.6g}")
    return row, tuple(notes)


def _usual(row: Row, metric: str, value: float) -> tuple[str, float] | None:
    """(metric, value) in usual units; None where that is not known."""
    if metric in USUAL:
        return metric, value
    if match := re.fullmatch(SECONDS, metric):
        return "s_per_step", value / (1000 if match[1] or match[2] else 1)
    if re.fullmatch(STEPS, metric):
        return "s_per_step", 1 / value
    if match := re.fullmatch(SHARE, metric):
        return f"{match[1]}_pct", value * 100 if value < 1 else value
    if metric == "tgs":  # InternEvo's log: tokens a GPU a second
        return "tokens_per_s_per_device", value
    if match := re.fullmatch(RATE, metric):
        return _rate(row, match[2] == "tok", value * (1000 if match[1] else 1), match[3] or match[4] or "total")
    if (match := re.fullmatch(FLOPS, metric)) and (of := _of(match[2] or ("device" if match[1] == "t" else "total"))):
        devices = row.num_devices or 0
        if of == "one" or devices:
            return "tflops_per_device", value * (1000 if match[1] == "p" else 1) / (1 if of == "one" else devices)
    return None


def _of(words: str) -> str:
    return "one" if re.fullmatch(ONE, words) else "all" if re.fullmatch(ALL, words) else ""


def _rate(row: Row, tokens: bool, value: float, words: str) -> tuple[str, float] | None:
    of, devices = _of(words), row.num_devices or 0
    if of == "one" and tokens:
        return "tokens_per_s_per_device", value
    if not of or not devices:
        return None
    share = value / devices if of == "all" else value
    return ("tokens_per_s_per_device", share) if tokens else ("samples_per_s", share * devices)
