"""The page of `gnomon plan --vary`, `--pareto` and the like with `--html`: a plot of the cases, and a table of them.

`sweep_page(cases, title, …)` returns the text of one file that loads nothing and has no script: a front of step time
over peak memory as points with the staircase that they make, other questions as bars of the step. Everything is placed
in per cent, so that it fits any width. Leaves out the page of one prediction (`report.page.html`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from pathlib import Path

from gnomon.report.planning import PLAN_WORDS
from gnomon.report.sweep import heads, row
from gnomon.report.tables import gib
from gnomon.search.questions.goals import Case
from gnomon.units import show_seconds

_FOLDER = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
GIB = 2**30

TICKS = 5
"""Marks on an axis, about."""

APART = 4.0
"""Per cent of an axis by which numbers next to points are apart at least; points between them have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotAxis:
    """A quantity along a side of the plot."""

    name: str
    """What it shows, with its unit."""
    low: float
    """Of the plot."""
    high: float
    """Of the plot; `low` stands at 0 per cent, `high` at 100."""

    def percent(self, value: float) -> float:
        """Place of a value on the axis, in percent."""
        return 100 * (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> tuple[float, ...]:
        """Round values within, 1, 2 or 5 of a power of ten apart."""
        raw = (self.high - self.low) / TICKS
        power = 10.0 ** floor(log10(raw))
        # A hair is given, so that rounding does not take 5 for a distance of 2 that is meant exactly.
        apart = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
        first = -floor(-self.low / apart)
        return tuple(i * apart for i in range(first, floor(self.high / apart) + 1))

    @staticmethod
    def of(name: str, values: Sequence[float]) -> PlotAxis:
        """Around some values, with room at their sides."""
        low, high = min(values), max(values)
        # One value alone has no range; its room is a share of itself.
        room = 0.08 * ((high - low) or high or 1.0)
        return PlotAxis(name=name, low=max(0.0, low - room), high=high + room)


def sweep_page(cases: Sequence[Case], title: str, answer: str = "", *, front: bool = False) -> str:
    """HTML with a plot and a table of all cases; those without a plan say why. answer: the answer in words. front: the
    cases are plans of one job with less and less memory."""
    columns = heads(cases)
    names = ("no.", *(name or ("memory allowed" if front else "case") for name in columns))
    rows = "".join(_table_row(i, names, (str(i), *row(case, columns, whys=True))) for i, case in enumerate(cases, 1))
    heading = "".join(f"<th>{escape(name)}</th>" for name in names)
    style = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "sweep.css"))
    sentence = f'<p class="sentence">{escape(answer)}</p>' if answer else ""
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>{sentence}
{_front(cases) if front else _bars(cases)}
<table class="cases"><thead><tr>{heading}</tr></thead><tbody>{rows}</tbody></table>
<p class="hint">{escape(PLAN_WORDS)}</p>
</main>
</body>
</html>
"""


def _table_row(index: int, names: Sequence[str], cells: Sequence[str]) -> str:
    """One case as a row of the table; on a narrow page each cell stands behind the name of its column."""
    named = zip(names, cells, strict=True)
    shown = "".join(f'<td data-head="{escape(name)}">{escape(cell)}</td>' for name, cell in named)
    return f'<tr id="case-{index}">{shown}</tr>'


def undominated(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Indices of the (memory, time) that no other beats in one without losing in the other, the least memory first."""
    front: list[int] = []
    # By rising memory: a plan is on the front if it is faster than all that take less.
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return tuple(front)


def _front(cases: Sequence[Case]) -> str:
    """A point a plan, memory across and time up, over the staircase of what is fastest in each memory."""
    shown = [(i, case) for i, case in enumerate(cases, 1) if case.best is not None]
    if not shown:
        return ""
    points = [(c.best.prediction.tightest.peak_bytes / GIB, c.best.step_s) for _, c in shown if c.best is not None]
    most = max(seconds for _, seconds in points)
    unit, factor = ("s", 1.0) if most >= 1 else ("ms", 1e3) if most >= 1e-3 else ("us", 1e6)
    across = PlotAxis.of("peak memory of the fullest device (GiB)", [memory for memory, _ in points])
    up = PlotAxis.of(f"step time ({unit})", [seconds * factor for _, seconds in points])
    placed = [(across.percent(memory), up.percent(seconds * factor)) for memory, seconds in points]
    best = undominated(points)
    marks = "".join(
        _point(shown[i][0], shown[i][1], placed[i], front=i in best, numbered=numbered)
        for i, numbered in zip(range(len(shown)), _numbered(placed), strict=True)
    )
    lines = "".join(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="100"/>' for x in map(across.percent, across.ticks))
    lines += "".join(
        f'<line x1="0" x2="100" y1="{100 - y:.2f}" y2="{100 - y:.2f}"/>' for y in map(up.percent, up.ticks)
    )
    stairs = _stairs([placed[i] for i in best])
    below = "".join(f'<span class="tick" style="left:{across.percent(v):.2f}%">{v:g}</span>' for v in across.ticks)
    ticks = "".join(f'<span class="tick" style="bottom:{up.percent(v):.2f}%">{v:g}</span>' for v in up.ticks)
    return f"""\
<figure class="front" role="group" aria-label="{escape(up.name)} over {escape(across.name)}">
<div class="y-name">{escape(up.name)}</div>
<div class="y-ticks" aria-hidden="true">{ticks}</div>
<div class="plot"><svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{lines}\
<polygon points="{stairs} 100,0 {placed[best[0]][0]:.2f},0"/><polyline points="{stairs}"/></svg>{marks}</div>
<div class="x-ticks" aria-hidden="true">{below}</div>
<figcaption>{escape(across.name)}</figcaption>
</figure>"""


def _stairs(front: Sequence[tuple[float, float]]) -> str:
    """Corners of the fastest step in each memory, in per cent from the top left: down and right from point to point."""
    corners = [(front[0][0], 0.0)]
    for x, y in front:
        corners += [(x, corners[-1][1]), (x, 100 - y)]
    corners.append((100.0, 100 - front[-1][1]))
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in corners)


def _numbered(placed: Sequence[tuple[float, float]]) -> list[bool]:
    """Says which points have their number next to them: those that are apart from all others that do."""
    places: list[tuple[float, float]] = []
    shown = []
    for x, y in placed:
        shown.append(all(max(abs(x - a), abs(y - b)) >= APART for a, b in places))
        places += [(x, y)] if shown[-1] else []
    return shown


def _point(index: int, case: Case, at: tuple[float, float], *, front: bool, numbered: bool) -> str:
    """A point that leads to its row, and what stands over the plot while the pointer is on it."""
    assert case.best is not None
    memory = gib(case.best.prediction.tightest.peak_bytes)
    plan = row(case, heads((case,)))[-1]
    label = escape(f"{index}: {show_seconds(case.best.step_s)}, {memory} GiB: {plan}")
    kind = "point" if front else "point beaten"
    shown = f"<b>{index}</b>" if numbered else ""
    return (
        f'<a class="{kind}" href="#case-{index}" style="left:{at[0]:.2f}%;bottom:{at[1]:.2f}%" aria-label="{label}">'
        f'{shown}</a><span class="hint-box" aria-hidden="true">{label}</span>'
    )


def _bars(cases: Sequence[Case]) -> str:
    """A bar of the step's seconds for each case, from zero."""
    most = max((case.best.step_s for case in cases if case.best is not None), default=1.0)
    rows = []
    for case in cases:
        seconds = 0.0 if case.best is None else case.best.step_s
        text = "no plan" if case.best is None else show_seconds(seconds)
        rows.append(
            f'<div class="bar-row"><span class="bar-label">{escape(case.label)}</span>'
            f'<span class="bar" title="{escape(case.why or text)}"><span class="step" '
            f'style="width:{100 * seconds / most:.2f}%"></span></span><span class="bar-s">{escape(text)}</span></div>'
        )
    return f'<figure role="group" aria-label="step time">{"".join(rows)}<figcaption>step time</figcaption></figure>'
