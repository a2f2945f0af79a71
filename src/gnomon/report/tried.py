"""What came of trying plans: predicted beside measured, which is the best, and what trying was worth.

`tried_text(attempts)` is the table, `tried_mapping(attempts)` the same as values for JSON, `best_of` the one to keep.
Leaves out running them (`cli.plan_try`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gnomon.plans import Ran
from gnomon.report.planning import short
from gnomon.report.tables import Column, percent, table, wrapped
from gnomon.search import FoundPlan, Result
from gnomon.units import show_seconds

UNSTEADY = 1.3
"""Ratio of the machine's speeds before two attempts from which their times do not compare."""

Ended = Literal["ran", "refused", "failed", "timed out"]
"""How an attempt ended: `refused` says that the plan cannot run, `failed` that it began to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One plan that was tried."""

    candidate: FoundPlan
    """The plan, as predicted."""
    file: str
    """Its plan file."""
    ran: Ran | None
    """What was measured; None where it did not come so far."""
    outcome: Ended
    """How it ended."""
    reason: str
    """Why it has no measurement; empty if it has."""
    wall_s: float
    """Seconds that trying it took in all."""

    @property
    def off(self) -> float | None:
        """Predicted over measured, minus 1."""
        return None if self.ran is None else self.candidate.step_s / self.ran.step_s - 1


def best_of(attempts: Sequence[Attempt]) -> Attempt | None:
    """The one with the shortest measured step; of equals the first predicted. None if none ran."""
    ran = [attempt for attempt in attempts if attempt.ran is not None]
    return min(ran, key=_measured_s, default=None)


def tried_text(attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """Lines of at most 80 columns: a row for each, those that did not run with the reason, and what is kept."""
    best = best_of(attempts)
    columns = (
        Column(name="tried", align="left"),
        *(Column(name=name) for name in ("predicted", "measured", "off %", "spread %")),
        Column(name="", align="left"),
    )
    rows = []
    for number, attempt in enumerate(attempts, 1):
        ran = attempt.ran
        rows.append(
            (
                f"{number} {short(attempt.candidate)}",
                show_seconds(attempt.candidate.step_s),
                "-" if ran is None else show_seconds(ran.step_s),
                "-" if attempt.off is None else percent(attempt.off),
                "-" if ran is None else percent(ran.spread),
                verdict(attempt, best),
            )
        )
    lines = [*table(columns, rows)]
    for number, attempt in enumerate(attempts, 1):
        if attempt.reason:
            lines += wrapped(f"{short(attempt.candidate)}: {attempt.reason}", bullet=f"{number} ")
    if best is not None:
        lines += ["", *wrapped(worth(attempts), indent="")]
    if warning := unsteady(attempts):
        lines += wrapped(warning, indent="")
    return tuple(lines)


def unsteady(attempts: Sequence[Attempt]) -> str:
    """A warning where the machine's own speed changed from one attempt to the next; empty where it did not, or where
    nobody knows."""
    slowdowns = [
        attempt.ran.slowdown for attempt in attempts if attempt.ran is not None and attempt.ran.slowdown is not None
    ]
    if len(slowdowns) < 2 or max(slowdowns) <= UNSTEADY * min(slowdowns):
        return ""
    return (
        f"The machine itself was {min(slowdowns):.1f} to {max(slowdowns):.1f} times as slow as when it was calibrated, "
        f"from one attempt to the next: differences of that size are its own. Try again when it does nothing else."
    )


def verdict(attempt: Attempt, best: Attempt | None) -> str:
    """`kept`, `as fast` (within the spread of the two), `12 % slower`, or how it ended."""
    if attempt.ran is None or best is None or best.ran is None:
        return attempt.outcome
    if attempt is best:
        return "kept"
    slower = attempt.ran.step_s / best.ran.step_s - 1
    if slower <= max(attempt.ran.spread, best.ran.spread) / 2:
        return "as fast"
    return f"{percent(slower, 0)} % slower"


def worth(attempts: Sequence[Attempt]) -> str:
    """What the predicted best would have lost against the measured best."""
    ran = sorted((attempt for attempt in attempts if attempt.ran is not None), key=_measured_s)
    first = attempts[0]
    if first.ran is None:
        return "The predicted best did not run."
    place, lost = ran.index(first), first.ran.step_s / _measured_s(ran[0]) - 1
    if place == 0:
        return f"The predicted best of {len(ran)} is the measured best."
    return f"The predicted best is number {place + 1} of {len(ran)} as measured, {percent(lost)} % slower."


def ranked_text(again: Result, attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """Lines of at most 80 columns: the best plans of a search with the numbers of these runs, and what of them ran."""
    columns = (
        Column(name="ranked again, with what was measured", align="left"),
        *(Column(name=name) for name in ("predicted", "measured")),
    )
    rows = []
    for candidate in again.best:
        ran = _ran(candidate, attempts)
        rows.append(
            (short(candidate), show_seconds(candidate.step_s), "not tried" if ran is None else show_seconds(ran.step_s))
        )
    lines = list(table(columns, rows))
    fastest, first = best_of(attempts), again.best[0]
    if _ran(first, attempts) is None and fastest is not None and first.step_s < _measured_s(fastest):
        hint = (
            f"{short(first)} was not tried, and is now predicted to be faster than what is kept: --try again tries it"
        )
        lines += wrapped(hint, indent="")
    return tuple(lines)


def ranked_mapping(again: Result, attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """The same as plain values for JSON."""
    rows = [(candidate, _ran(candidate, attempts)) for candidate in again.best]
    return [
        {"plan": short(f), "predicted_step_s": f.step_s, "measured_step_s": None if ran is None else ran.step_s}
        for f, ran in rows
    ]


def _ran(candidate: FoundPlan, attempts: Sequence[Attempt]) -> Ran | None:
    """What was measured of a plan, if it was tried and ran."""
    return next((attempt.ran for attempt in attempts if attempt.candidate.plan == candidate.plan), None)


def tried_mapping(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Plain values for JSON."""
    best = best_of(attempts)
    return {
        "schema": "gnomon.tried/1",
        "kept": None if best is None else attempts.index(best),
        "attempts": [
            {
                "plan": short(attempt.candidate),
                "file": attempt.file,
                "ended": attempt.outcome,
                "reason": attempt.reason,
                "wall_s": attempt.wall_s,
                "predicted_step_s": attempt.candidate.step_s,
                "measured_step_s": None if attempt.ran is None else attempt.ran.step_s,
                "off": attempt.off,
                "spread": None if attempt.ran is None else attempt.ran.spread,
                "peak_bytes": None if attempt.ran is None else attempt.ran.peak_memory_bytes,
                "slowdown": None if attempt.ran is None else attempt.ran.slowdown,
                "verdict": verdict(attempt, best),
            }
            for attempt in attempts
        ],
    }


def _measured_s(attempt: Attempt) -> float:
    assert attempt.ran is not None
    return attempt.ran.step_s
