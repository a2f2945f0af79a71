"""What uneven stages and recomputation by stage gain over the best plan of equal stages: text, and values for JSON.

`uneven_text` says the gain, the reasons and what was tried. Leaves out the plan itself (`report.planning`).
"""

from __future__ import annotations

from typing import Any

from gnomon.report.tables import percent, wrapped
from gnomon.search.stages.dapple import Dapple, cuts_of
from gnomon.search.stages.uneven import Uneven
from gnomon.units import show_seconds


def uneven_text(found: Uneven) -> tuple[str, ...]:
    """Lines of at most 80 columns; none where nothing was tried."""
    if not found.tried:
        return ()
    cuts = [each.cuts for each in found.tried]
    told = (
        f"uneven stages, recompute by stage: {len(found.tried)} plan{'s' * (len(found.tried) > 1)} near the best, "
        f"{sum(each.predicted for each in cuts):,} of {_count(sum(each.every for each in cuts))} ways to cut their "
        f"layers predicted, {_count(sum(each.too_large for each in cuts))} too large, "
        f"{_count(sum(each.too_slow for each in cuts))} shown too slow, {_count(sum(each.left for each in cuts))} not "
        f"looked at"
    )
    if found.best is None:
        return tuple(wrapped(f"{told}; none is faster", indent=""))
    change = f"{percent(-found.gain)} % against" if found.exact_s is not None else "where nothing else fits of"
    lines = [*wrapped(f"{told}: {change} the best of equal stages", indent="")]
    lines = [*lines, *(line for reason in found.reasons for line in wrapped(reason, bullet="- "))]
    own = next(each for each in found.tried if each.step_s is not None and each.step_s == found.best.step_s)
    if own.cuts.proven:
        lines += wrapped("no other cut of this plan's layers is faster by 0.1 %", bullet="- ")
    return tuple(lines)


def _count(value: int) -> str:
    """In full up to a milliard; above, as a power of ten."""
    return f"{value:,}" if value < 10**9 else f"{value:.1e}".replace("e+", "e")


def replicas_text(found: Dapple, best_s: float) -> tuple[str, ...]:
    """What stages with other numbers of replicas do, against the best plan that is shown, on lines of 80 columns."""
    told = f"stages with other numbers of replicas (DAPPLE): {found.predicted} plans predicted, no proof of the best"
    if found.best is None:
        return ("", *wrapped(f"{told}; none fits", indent=""))
    stages = ", ".join(f"{layers} x {replicas}" for layers, replicas in cuts_of(found.best))
    more = percent(found.best.step_s / best_s - 1)
    change = f"step {show_seconds(found.best.step_s)}, {more} % against the plan above"
    count = found.best.pricing.count
    return ("", *wrapped(f"{told}: layers x replicas {stages}; {count} microbatches; {change}", indent=""))


def replicas_mapping(found: Dapple) -> dict[str, Any]:
    """Plain values for JSON."""
    best = found.best
    return {
        "predicted": found.predicted,
        "states": found.states,
        "stages": [] if best is None else [{"layers": n, "replicas": m} for n, m in cuts_of(best)],
        "prediction": None if best is None else best.to_mapping(),
    }


def uneven_mapping(found: Uneven) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "gain": found.gain,
        "equal_stages_s": found.exact_s,
        "reasons": list(found.reasons),
        "tried": [
            {
                "point": each.point._asdict(),
                "equal_s": each.equal_s,
                "step_s": each.step_s,
                "cuts": {
                    "every": each.cuts.every,
                    "predicted": each.cuts.predicted,
                    "too_large": each.cuts.too_large,
                    "too_slow": each.cuts.too_slow,
                    "proven": each.cuts.proven,
                },
            }
            for each in found.tried
        ],
    }
