"""Cases of a sweep as a table, as values for JSON, and as a page with a plot in SVG that needs nothing else.

Leaves out how the cases were found (`gnomon.search.goals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

from gnomon.hardware.kinds import kinds_of
from gnomon.report.mixed import short_mixed
from gnomon.report.planning import short_plan
from gnomon.report.tables import Column, dollars, gib, number, table, wrapped
from gnomon.search import Found
from gnomon.search.choices import made, show_value
from gnomon.search.goals import Case
from gnomon.search.mixed_results import MixedFound
from gnomon.search.squeeze import Fitted
from gnomon.units import show_seconds

WIDTH, HEIGHT, EDGE = 640, 320, 70
"""Of the plot, in pixels; the edge is for its labels."""

LONG = 20
"""Characters from which labels are too long for a column of the text."""

LABEL = 110
"""Pixels that a case takes at least, for its label."""


def sweep_text(cases: Sequence[Case], first: str) -> tuple[str, ...]:
    """A table, a case a row, then why cases have no plan. first: the heading of the labels; long ones are numbered and
    stand below."""
    names = _heads(cases)
    words = ("", "best plan")
    columns = tuple(Column(name=n or first, align="left" if n in words else "right") for n in names)
    long = any(len(case.label) > LONG for case in cases)
    shown = [replace(case, label=f"{i}") if long else case for i, case in enumerate(cases, 1)]
    lines = [*table(columns, [_row(case, names) for case in shown])]
    cut = [case for case, line in zip(shown, lines[1:], strict=True) if case.found and not line.endswith(_words(case))]
    if cut:
        lines += ["", "plans in full", *(li for c in cut for li in wrapped(f"{c.label}: {_words(c)}", bullet="- "))]
    if long:
        lines += ["", *(line for i, c in enumerate(cases, 1) for line in wrapped(c.label, bullet=f"{i}: "))]
    if any(case.found is None for case in cases):
        lines += ["", "no plan"]
        lines += [line for c in cases if c.found is None for line in wrapped(f"{c.label}: {c.why}", bullet="- ")]
    return tuple(lines)


def _heads(cases: Sequence[Case]) -> tuple[str, ...]:
    """Of the columns; cost only where some case has one."""
    cost = ("$/1M tok",) if any(case.dollars_per_token is not None for case in cases) else ()
    return ("", "devices", "step", "tok/s/device", "GiB", *cost, "best plan")


def _row(case: Case, names: Sequence[str], *, whys: bool = False) -> tuple[str, ...]:
    devices, found = f"{case.cluster.num_devices:,}", case.found
    if found is None:
        return case.label, devices, *("" for _ in names[3:]), case.why if whys else ""
    rate = number(found.prediction.tokens_per_s_per_device, 4)
    spent = case.dollars_per_token
    cost = ("" if spent is None else dollars(spent * 1e6).lstrip("$"),) if "$/1M tok" in names else ()
    return case.label, devices, show_seconds(found.step_s), rate, _gib(found), *cost, _words(case)


def _gib(found: Found | MixedFound) -> str:
    return gib(found.prediction.tightest.peak_bytes)


def _words(case: Case) -> str:
    """The plan in a few words, with the kinds of devices that do the work where there are several."""
    assert case.found is not None
    if isinstance(case.found, MixedFound):
        return short_mixed(case.found, kinds_of(case.cluster))
    plan = case.found.plan
    return "; ".join((short_plan(plan), *(f"{c.name} {show_value(c, value, plan)}" for c, value in made(plan))))


def fitted_words(fitted: Fitted) -> str:
    """By which choices a plan fits and what they cost, as in `activation_offload 8 (+3.1 % step)`."""
    plan = fitted.found.plan
    names = " and ".join(f"{c.name} {show_value(c, value, plan)}" for c, value in fitted.made)
    need = gib(fitted.without.tightest.peak_bytes)
    return f"{names}, {100 * fitted.cost:+.1f} % of the step of the same plan without, which takes {need} GiB"


def sweep_mapping(cases: Sequence[Case]) -> dict[str, Any]:
    """Plain values, as `gnomon.sweep/1`."""
    return {"schema": "gnomon.sweep/1", "cases": [_mapping(case) for case in cases]}


def _mapping(case: Case) -> dict[str, Any]:
    given = {"label": case.label, "devices": case.cluster.num_devices}
    if case.found is None:
        return {**given, "why": case.why}
    found = case.found
    return {
        **given,
        "step_s": found.step_s,
        "tokens_per_s_per_device": found.prediction.tokens_per_s_per_device,
        "dollars_per_step": case.dollars_per_step,
        "dollars_per_million_tokens": None if case.dollars_per_token is None else case.dollars_per_token * 1e6,
        "peak_bytes": found.prediction.tightest.peak_bytes,
        "point": None if found.point is None else found.point._asdict(),
        **({} if isinstance(found, MixedFound) else {"choices": {c.name: value for c, value in made(found.plan)}}),
        **({} if case.fitted is None else {"fits_by": _fits_by(case.fitted)}),
    }


def _fits_by(fitted: Fitted) -> dict[str, Any]:
    return {
        "choices": {choice.name: value for choice, value in fitted.made},
        "longer_step": fitted.cost,
        "peak_bytes_without": fitted.without.tightest.peak_bytes,
        "step_s_without": fitted.without.step_s,
    }


def sweep_page(cases: Sequence[Case], title: str) -> str:
    """HTML with a plot of the step's seconds and a table. Cases without a plan have no bar, and say why."""
    names = _heads(cases)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _row(case, names, whys=True))}</tr>" for case in cases
    )
    heads = "".join(f"<th>{h}</th>" for h in names)
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
        f"<h1>{escape(title)}</h1>{_plot(cases)}<table><tr>{heads}</tr>{rows}</table></html>\n"
    )


def _plot(cases: Sequence[Case]) -> str:
    """Bars of the step's seconds, from zero."""
    most = max((case.found.step_s for case in cases if case.found is not None), default=1.0)
    width = max(WIDTH, EDGE + LABEL * len(cases))
    wide = (width - EDGE) / max(1, len(cases))
    parts = []
    for index, case in enumerate(cases):
        left, seconds = EDGE + index * wide, 0.0 if case.found is None else case.found.step_s
        tall = (HEIGHT - 2 * 30) * seconds / most
        said = "no plan" if case.found is None else show_seconds(seconds)
        parts.append(
            f'<rect x="{left + wide * 0.15:.1f}" y="{HEIGHT - 30 - tall:.1f}" width="{wide * 0.7:.1f}" '
            f'height="{tall:.1f}" fill="#4477aa"><title>{escape(case.why or said)}</title></rect>'
            f'<text x="{left + wide / 2:.1f}" y="{HEIGHT - 35 - tall:.1f}" text-anchor="middle">{escape(said)}</text>'
            f'<text x="{left + wide / 2:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(case.label)}</text>'
        )
    label = f'<text x="5" y="{HEIGHT / 2:.0f}">step</text>'
    return f'<svg width="{width}" height="{HEIGHT}" font-size="11" role="img">{label}{"".join(parts)}</svg>'
