"""The table of `transformers_types`: counts, reasons, and a line a type."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
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
        f"planned by search for 8 H100s: {sum(isinstance(row.get('planned'), dict) for row in caught)} of "
        f"{len(caught)}{refused(row['planned'] for row in caught if isinstance(row.get('planned'), str))}",
        errors("FLOPs", {row["type"]: row.get("flops_error") for row in caught}),
        f"proved to 1e-9 in float64: {sum(p['holds'] for p in proofs)} of {len(proofs)} that were small enough",
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
    steps = {row["type"]: row["step"] for row in rows if isinstance(row.get("step"), dict)}
    asked = [row["ran"] for row in rows if row.get("ran")]
    lines = [errors("bytes kept", {row["type"]: row.get("kept_error") for row in rows})]
    for key, what, within in (("memory_error", "memory of a step", 0.05), ("time_error", "time of a step", 0.12)):
        lines.append(errors(what, {kind: step[key] for kind, step in steps.items()}, within))
    for name in dict.fromkeys(name for ran in asked for name in ran):
        some = refused(ran[name] for ran in asked if ran.get(name))
        lines.append(
            f"ran under {name} as a plain loop: {sum(ran.get(name) == '' for ran in asked)} of {len(asked)}{some}"
        )
    every = sum(not any(ran.values()) for ran in asked)
    return [*lines, f"ran as a plain loop under all of these plans: {every} of {len(asked)}"]


def errors(what: str, found: Mapping[str, Any], within: float = 0.01) -> str:
    """How many are within a share, the median, and the worst by name. found: type -> error, or why there is none."""
    off = {kind: abs(error) for kind, error in found.items() if isinstance(error, (int, float))}
    if not off:
        return f"{what}: none counted"
    worst = sorted(off, key=lambda kind: -off[kind])[:5]
    return (
        f"{what} within {within:.0%}: {sum(error <= within for error in off.values())} of {len(off)} counted; "
        f"median {median(off.values()):.2%}, worst {', '.join(f'{kind} {off[kind]:.1%}' for kind in worst)}"
    )


def refused(reasons: Iterable[str]) -> str:
    """The commonest reasons with their counts."""
    return "".join(f"; {count}: {reason}" for reason, count in Counter(map(cut, reasons)).most_common(6))


def cut(reason: str) -> str:
    """A reason without what differs from type to type."""
    if reason.startswith("losses differ by "):
        off = float(reason.split()[-1])
        return "losses differ by less than 1e-7" if off < 1e-7 else "losses differ by more than 1e-7"
    return re.sub(r"\d[\d.e+-]*", "N", reason)[:110]
