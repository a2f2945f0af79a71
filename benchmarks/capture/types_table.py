"""The table of `transformers_types`: counts, reasons, and a line a type."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any


def cause(row: Mapping[str, Any]) -> str:
    """Why a type is not captured, in a few words."""
    errors = row.get("errors") or ["?"]
    if not row.get("built", True):
        missing = "requires the" in errors[0] and "library" in errors[0]
        return "needs a package that is not installed here" if missing else "its default config does not build"
    if errors[0].startswith(("over", "no answer", "the process ended")):
        return "not done within the limits"
    if row.get("ran", True):
        return "runs in eager, and is not captured"
    if any("Python reads a number" in error for error in errors):
        return "too large to be run here, and reads numbers that depend on values"
    return "no example that it takes is made here"


def table(rows: list[dict[str, Any]], every: int) -> str:
    """Counts, then a line a type."""
    caught = [row for row in rows if row["captured"]]
    number = lambda key: [row[key] for row in caught if isinstance(row.get(key), (int, float))]  # noqa: E731
    flops = number("flops_error")
    proofs = [row["proof"] for row in caught if isinstance(row.get("proof"), dict)]
    plans: dict[str, int] = {}
    for row in caught:
        for name, value in row["plans"].items():
            plans[name] = plans.get(name, 0) + isinstance(value, float)
    failed = [row for row in rows if not row["captured"]]
    built = len(caught) + sum(row.get("built", True) for row in failed)
    ran = len(caught) + sum(row.get("ran", True) for row in failed)
    lines = [
        f"types of AutoModel: {every}; tried: {len(rows)}; captured: {len(caught)}, of {built} that are built, and of "
        f"{ran} that run in eager on an example that is made here",
        *(f"priced under {name}: {count} of {len(caught)}" for name, count in plans.items()),
        f"FLOPs within 1%: {sum(abs(x) <= 0.01 for x in flops)} of {len(flops)} counted",
        f"proved to 1e-9: {sum(p['holds'] for p in proofs)} of {len(proofs)} proofs",
        *trained_lines(caught),
        *(f"not captured: {count}: {why}" for why, count in Counter(map(cause, failed)).most_common()),
        "",
        "| type | built | CPU s | ops | blocks | layers | opaque bytes | opaque FLOPs | FLOPs off | kept off | "
        "time off | memory off | priced | proof | ran under |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["type"]):
        if not row["captured"]:
            why = (row.get("errors") or ["?"])[0].replace("|", "/")
            lines.append(f"| {row['type']} | no: {why[:140]} | | | | | | | | | | | | | |")
            continue
        held, step = row.get("proof"), row.get("step")
        text = f"{max(held['outputs'], held['gradients']):.0e}" if isinstance(held, dict) else "-"
        time_off, memory_off = (step["time_error"], step["memory_error"]) if isinstance(step, dict) else ("", "")
        lines.append(
            f"| {row['type']} | {row['how']} | {row['cpu_s']} | {row['steps']} | {row['blocks']} | {row['layers']} | "
            f"{row['opaque_bytes']:.0%} | {row['opaque_flops']:.0%} | {percent(row.get('flops_error'))} | "
            f"{percent(row.get('kept_error'))} | {percent(time_off, 0)} | {percent(memory_off, 1)} | "
            f"{', '.join(name for name, value in row['plans'].items() if isinstance(value, float))} | {text} | "
            f"{', '.join(name for name, why in row.get('ran', {}).items() if not why) or '-'} |"
        )
    return "\n".join(lines)


def percent(value: Any, places: int = 2) -> str:
    """A share, where there is one."""
    return f"{value:+.{places}%}" if isinstance(value, float) else "-"


def trained_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Counts of what was trained, and the reasons of what was not, the commonest first."""
    kept = sorted(abs(row["kept_error"]) for row in rows if isinstance(row.get("kept_error"), float))
    steps = [row["step"] for row in rows if isinstance(row.get("step"), dict)]
    asked = [row["ran"] for row in rows if row.get("ran")]
    lines = []
    if kept:
        lines.append(f"bytes kept within 1%: {sum(x <= 0.01 for x in kept)} of {len(kept)}; median {median(kept):.2%}")
    for key, what in (("time_error", "time of a step"), ("memory_error", "memory of a step")):
        if off := sorted(abs(step[key]) for step in steps):
            lines.append(f"{what}: {median(off):.1%} off in the median of {len(off)}, {off[-1]:.0%} at worst")
    for name in dict.fromkeys(name for ran in asked for name in ran):
        why = Counter(cut(ran[name]) for ran in asked if ran.get(name))
        some = "".join(f"; {count}: {reason}" for reason, count in why.most_common(4))
        lines.append(
            f"ran under {name} as a plain loop: {sum(ran.get(name) == '' for ran in asked)} of {len(asked)}{some}"
        )
    return lines


def cut(reason: str) -> str:
    """A reason without what differs from type to type."""
    return re.sub(r"\d[\d.e+-]*", "N", reason)[:110]
