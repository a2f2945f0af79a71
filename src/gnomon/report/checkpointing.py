"""What recomputation chosen tensor by tensor gains over presets: text, and values for JSON.

Leaves out the plan itself (`report.planning`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gnomon.plans import Plan
from gnomon.report.tables import percent, wrapped
from gnomon.search.checkpointing.improve import ByTensor
from gnomon.units import show_seconds

SHOWN = 8
"""Runs of layers that are listed."""


def by_tensor_text(by_tensor: ByTensor) -> tuple[str, ...]:
    """Lines of at most 80 columns."""
    tried_text = (
        f"recomputation tensor by tensor (integer programme): {by_tensor.tried} "
        f"plan{'s' * (by_tensor.tried != 1)} near the "
        f"best, {by_tensor.predicted} predictions"
    )
    if by_tensor.best is None:
        return tuple(wrapped(f"{tried_text}; none is faster than with presets", indent=""))
    change = f"{show_seconds(by_tensor.best.step_s)}, {percent(-by_tensor.gain)} % against the best of presets"
    lines = [*wrapped(f"{tried_text}: {change}", indent="")]
    listed = list(_kept_lines(by_tensor.best.plan))
    lines += [line for entry in listed[:SHOWN] for line in wrapped(entry, bullet="- ")]
    if len(listed) > SHOWN:
        lines += wrapped(f"and {len(listed) - SHOWN} runs of layers more, which the plan file lists", bullet="- ")
    return tuple(lines)


def by_tensor_mapping(by_tensor: ByTensor) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "step_s": None if by_tensor.best is None else by_tensor.best.step_s,
        "presets_step_s": by_tensor.before_s,
        "gain": by_tensor.gain,
        "plans": by_tensor.tried,
        "predicted": by_tensor.predicted,
        "kept": [] if by_tensor.best is None else list(_kept_lines(by_tensor.best.plan)),
    }


def _kept_lines(plan: Plan) -> Iterator[str]:
    """`layers[0:4] keep input, mlp.gate_proj; the rest is recomputed`, run by run."""
    rules = plan.saved.rules
    for place, rule in enumerate(rules):
        if rule.action != "recompute":
            continue
        after = rules[place + 1] if place + 1 < len(rules) else rule
        names = after.tensors if after.action == "keep" and after.calls == rule.calls else ()
        saved_names = ", ".join(("input", *names))
        yield f"{rule.calls} keep {saved_names}; the rest is recomputed"
