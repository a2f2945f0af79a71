"""What uneven stages and recomputation by stage gain over the best plan of equal stages: text, and values for JSON.

`uneven_text` says the gain, the reasons and what was tried. Leaves out the plan itself (`report.planning`).
"""

from __future__ import annotations

from typing import Any

from gnomon.report.tables import percent, wrapped
from gnomon.search.stages.dapple import Dapple, cuts_of
from gnomon.search.stages.uneven import Uneven
from gnomon.units import show_seconds


def uneven_text(uneven: Uneven) -> tuple[str, ...]:
    """Lines of at most 80 columns; none where nothing was tried."""
    if not uneven.tried:
        return ()
    cuts = [trial.cuts for trial in uneven.tried]
    tried_text = (
        f"uneven stages, recompute by stage: {len(uneven.tried)} plan{'s' * (len(uneven.tried) > 1)} near the best, "
        f"{sum(cut.predicted for cut in cuts):,} of {_count(sum(cut.every for cut in cuts))} ways to cut their "
        f"layers predicted, {_count(sum(cut.too_large for cut in cuts))} too large, "
        f"{_count(sum(cut.too_slow for cut in cuts))} shown too slow, {_count(sum(cut.num_open for cut in cuts))} not "
        f"looked at"
    )
    if uneven.best is None:
        return tuple(wrapped(f"{tried_text}; none is faster", indent=""))
    change = f"{percent(-uneven.gain)} % against" if uneven.exact_s is not None else "where nothing else fits of"
    lines = [*wrapped(f"{tried_text}: {change} the best of equal stages", indent="")]
    lines = [*lines, *(line for reason in uneven.reasons for line in wrapped(reason, bullet="- "))]
    own = next(trial for trial in uneven.tried if trial.step_s is not None and trial.step_s == uneven.best.step_s)
    if own.cuts.proven:
        lines += wrapped("no other cut of this plan's layers is faster by 0.1 %", bullet="- ")
    return tuple(lines)


def _count(value: int) -> str:
    """A count in full up to a milliard; above, as a power of ten."""
    return f"{value:,}" if value < 10**9 else f"{value:.1e}".replace("e+", "e")


def replicas_text(dapple: Dapple, best_s: float) -> tuple[str, ...]:
    """What stages with other numbers of replicas do, against the best plan that is shown, on lines of 80 columns."""
    tried_text = (
        f"stages with other numbers of replicas (DAPPLE): {dapple.predicted} plans predicted, no proof of the best"
    )
    if dapple.best is None:
        return ("", *wrapped(f"{tried_text}; none fits", indent=""))
    stages = ", ".join(f"{layers} x {replicas}" for layers, replicas in cuts_of(dapple.best))
    slower_by = percent(dapple.best.step_s / best_s - 1)
    change = f"step {show_seconds(dapple.best.step_s)}, {slower_by} % against the plan above"
    count = dapple.best.pricing.count
    return ("", *wrapped(f"{tried_text}: layers x replicas {stages}; {count} microbatches; {change}", indent=""))


def replicas_mapping(dapple: Dapple) -> dict[str, Any]:
    """Plain values for JSON."""
    best = dapple.best
    return {
        "predicted": dapple.predicted,
        "states": dapple.states,
        "stages": [] if best is None else [{"layers": n, "replicas": m} for n, m in cuts_of(best)],
        "prediction": None if best is None else best.to_mapping(),
    }


def uneven_mapping(uneven: Uneven) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "gain": uneven.gain,
        "equal_stages_s": uneven.exact_s,
        "reasons": list(uneven.reasons),
        "tried": [
            {
                "point": trial.point._asdict(),
                "equal_s": trial.equal_s,
                "step_s": trial.step_s,
                "cuts": {
                    "every": trial.cuts.every,
                    "predicted": trial.cuts.predicted,
                    "too_large": trial.cuts.too_large,
                    "too_slow": trial.cuts.too_slow,
                    "proven": trial.cuts.proven,
                },
            }
            for trial in uneven.tried
        ],
    }
