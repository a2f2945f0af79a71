"""Cases of a sweep or a front as a table for the terminal and as values for JSON.

Leaves out how the cases were found (`gnomon.search.questions.goals`), and the page of them (`report.page.sweep`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gnomon.hardware.kinds import kinds_of
from gnomon.report.mixed import short_mixed
from gnomon.report.planning import short_plan
from gnomon.report.tables import Column, dollars, gib, number, table, wrapped
from gnomon.search import FoundPlan
from gnomon.search.mixed.results import MixedFound
from gnomon.search.questions.goals import Case
from gnomon.search.refinement.choices import choices_of, show_value
from gnomon.search.refinement.make_fit import FittingPlan
from gnomon.units import show_seconds

LONG = 20
"""Characters from which labels are too long for a column of the text."""


def sweep_text(cases: Sequence[Case], first: str) -> tuple[str, ...]:
    """A table, a case a row, then why cases have no plan. first: the heading of the labels; long ones are numbered and
    stand below."""
    names = heads(cases)
    words = ("", "best plan")
    columns = tuple(Column(name=n or first, align="left" if n in words else "right") for n in names)
    long = any(len(case.label) > LONG for case in cases)
    shown = [replace(case, label=f"{i}") if long else case for i, case in enumerate(cases, 1)]
    lines = [*table(columns, [row(case, names) for case in shown])]
    cut = [case for case, line in zip(shown, lines[1:], strict=True) if case.best and not line.endswith(words_of(case))]
    if cut:
        lines += ["", "plans in full", *(li for c in cut for li in wrapped(f"{c.label}: {words_of(c)}", bullet="- "))]
    if long:
        lines += ["", *(line for i, c in enumerate(cases, 1) for line in wrapped(c.label, bullet=f"{i}: "))]
    if any(case.best is None for case in cases):
        lines += ["", "no plan"]
        lines += [line for c in cases if c.best is None for line in wrapped(f"{c.label}: {c.why}", bullet="- ")]
    return tuple(lines)


def heads(cases: Sequence[Case]) -> tuple[str, ...]:
    """The heads of the columns; cost is one only where some case has a cost."""
    cost = ("$/1M tok",) if any(case.dollars_per_token is not None for case in cases) else ()
    return ("", "devices", "step", "tok/s/device", "GiB", *cost, "best plan")


def row(case: Case, names: Sequence[str], *, whys: bool = False) -> tuple[str, ...]:
    """Cells of a case under `names`; without a plan why there is none, if `whys`."""
    devices, best = f"{case.cluster.num_devices:,}", case.best
    if best is None:
        return case.label, devices, *("" for _ in names[3:]), case.why if whys else ""
    rate = number(best.prediction.tokens_per_s_per_device, 4)
    spent = case.dollars_per_token
    cost = ("" if spent is None else dollars(spent * 1e6).lstrip("$"),) if "$/1M tok" in names else ()
    return case.label, devices, show_seconds(best.step_s), rate, _gib(best), *cost, words_of(case)


def _gib(candidate: FoundPlan | MixedFound) -> str:
    return gib(candidate.prediction.tightest.peak_bytes)


def words_of(case: Case) -> str:
    """The plan in a few words, with the kinds of devices that do the work where there are several."""
    assert case.best is not None
    if isinstance(case.best, MixedFound):
        return short_mixed(case.best, kinds_of(case.cluster))
    plan = case.best.plan
    return "; ".join((short_plan(plan), *(f"{c.name} {show_value(c, value, plan)}" for c, value in choices_of(plan))))


def fitted_words(fitted: FittingPlan) -> str:
    """Says which choices make a plan fit and what they cost, as in `activation_offload 8 (+3.1 % step)`."""
    plan = fitted.candidate.plan
    names = " and ".join(f"{c.name} {show_value(c, value, plan)}" for c, value in fitted.choices)
    need = gib(fitted.without.tightest.peak_bytes)
    return f"{names}, {100 * fitted.cost:+.1f} % of the step of the same plan without, which takes {need} GiB"


def sweep_mapping(cases: Sequence[Case]) -> dict[str, Any]:
    """Plain values, as `gnomon.sweep/1`."""
    return {"schema": "gnomon.sweep/1", "cases": [_mapping(case) for case in cases]}


def _mapping(case: Case) -> dict[str, Any]:
    identity = {"label": case.label, "devices": case.cluster.num_devices}
    if case.best is None:
        return {**identity, "why": case.why}
    best = case.best
    return {
        **identity,
        "step_s": best.step_s,
        "tokens_per_s_per_device": best.prediction.tokens_per_s_per_device,
        "dollars_per_step": case.dollars_per_step,
        "dollars_per_million_tokens": None if case.dollars_per_token is None else case.dollars_per_token * 1e6,
        "peak_bytes": best.prediction.tightest.peak_bytes,
        "point": None if best.point is None else best.point._asdict(),
        **({} if isinstance(best, MixedFound) else {"choices": {c.name: value for c, value in choices_of(best.plan)}}),
        **({} if case.fit is None else {"fits_by": _fits_by(case.fit)}),
    }


def _fits_by(fitted: FittingPlan) -> dict[str, Any]:
    return {
        "choices": {choice.name: value for choice, value in fitted.choices},
        "longer_step": fitted.cost,
        "peak_bytes_without": fitted.without.tightest.peak_bytes,
        "step_s_without": fitted.without.step_s,
    }
