"""The page of a replay: policies side by side, the cluster over time by job, queue, utilisation, JCTs, why jobs waited.

`fleet_page(results, …)` returns the text of one file that loads nothing and needs no script; plots are SVG placed in
per cent, so that they fit any width. The style is that of the other pages (`gnomon.report.page`). Leaves out the
figures themselves (`gnomon.fleet.result`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from html import escape
from operator import or_
from pathlib import Path

import numpy as np

import gnomon.report.page as pages
from gnomon.fleet.result import USES, Floats, Result, Series
from gnomon.fleet.state import REASONS, devices_of
from gnomon.report.tables import number, percent

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
LANES = 64
"""Nodes of which the jobs are drawn; the page says how many there are more."""
SPANS = 4000
"""Spans that are drawn at most, the longest first."""
COLUMNS = 300
"""Points along a curve of the cluster over time."""
WAITERS = 15
"""Jobs of which it is listed why they waited."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7a5195", "#666666")

_STYLE = """
.plot { width: 100%; height: 220px; display: block; border: 1px solid var(--line); border-radius: 6px; }
.nodes { height: 420px; }
.axis { display: flex; justify-content: space-between; color: var(--dim); font-size: .8rem; }
svg path, svg polyline { vector-effect: non-scaling-stroke; fill: none; stroke-width: 1.6; }
svg rect.run { stroke: var(--back); stroke-width: .4; vector-effect: non-scaling-stroke; }
"""


def fleet_page(results: Sequence[Result], *, title: str, sentence: str, notes: Sequence[str] = ()) -> str:
    """Results of policies as one HTML page. results: at least one; recorded ones (`Rules.record`) have plots of the
    cluster over time."""
    style = (Path(pages.__file__).parent / "page.css").read_text(encoding="utf-8") + _STYLE
    recorded = [result for result in results if result.series is not None]
    sections = [
        _section("policies", "Policies", _figures(results) + _hours(results)),
        _section("jct", "Job completion times", _distributions(results)),
        *(_section(f"over-{r.policy}", f"{r.policy}: the cluster over time", _over_time(r)) for r in recorded[:1]),
        _section("queue", "Jobs that wait, and devices in use", _curves(recorded)) if recorded else "",
        _section("waited", "Why jobs waited", _waits(recorded)) if recorded else "",
        _section("assumed", "What was assumed", "<ul>" + "".join(f"<li>{escape(n)}</li>" for n in notes) + "</ul>"),
    ]
    body = "\n".join(section for section in sections if section)
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
<header><h1>{escape(title)}</h1><p class="sentence">{escape(sentence)}</p></header>
{body}
</main>
</body>
</html>
"""


def _section(name: str, title: str, body: str) -> str:
    return f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{escape(title)}</h2>{body}</section>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, words: int = 1) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}>{escape(c)}</{tag}>" if i < words else f'<{tag} class="n">{escape(c)}</{tag}>'
            for i, c in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        # Where a table is wider than the page it is scrolled, by the keyboard too.
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{line(head, 'th')}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _figures(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        f = result.figures()
        keys = ("jct_mean_s", "jct_p50_s", "jct_p99_s", "queue_mean_s", "queue_p99_s", "makespan_s")
        hours = (number(f[key] / 3600) for key in keys)
        rows.append(
            (
                result.policy,
                *hours,
                percent(f["utilisation"]),
                percent(f["goodput"]),
                f"{result.preemptions:,}",
                f"{result.resizes:,}",
            )
        )
    head = (
        "policy",
        "JCT mean",
        "p50",
        "p99",
        "queue mean",
        "p99",
        "makespan",
        "used %",
        "useful %",
        "preempted",
        "resized",
    )
    return _table(head, rows, "Hours, but where it says otherwise; JCT is from submission to the end")


def _hours(results: Sequence[Result]) -> str:
    shown = [use for use in USES if any(result.device_s[use] > 0 for result in results)]
    rows = [(r.policy, *(f"{r.device_s[use] / 3600:,.0f}" for use in shown)) for r in results]
    return _table(("policy", *shown), rows, "Where device-hours went; they add up to all there were")


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</li>' for i, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def _axis(low: str, high: str) -> str:
    return f'<div class="axis"><span>{escape(low)}</span><span>{escape(high)}</span></div>'


def _distributions(results: Sequence[Result]) -> str:
    """Share of jobs that are done within a time, over its logarithm."""
    every = np.concatenate([result.jct_s for result in results])
    low, high = float(np.log10(max(every.min(), 1.0))), float(np.log10(max(every.max(), 10.0)))
    lines = ""
    shares = np.linspace(0, 1, 201)
    for i, result in enumerate(results):
        times = np.log10(np.maximum(np.quantile(result.jct_s, shares), 1.0))
        x = (times - low) / max(high - low, 1e-9) * 100
        # y of an SVG points down.
        points = " ".join(f"{a:.2f},{100 - 100 * b:.2f}" for a, b in zip(x, shares, strict=True))
        lines += f'<polyline stroke="{COLOURS[i % len(COLOURS)]}" points="{points}"/>'
    plot = (
        '<svg class="plot" viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="share of jobs done within a time">{lines}</svg>'
    )
    axis = _axis(f"{number(10**low)} s", f"{number(10**high / 3600)} h (logarithmic)")
    return _legend([result.policy for result in results]) + plot + axis + _quantiles(results)


def _quantiles(results: Sequence[Result]) -> str:
    shares = (5, 25, 50, 75, 90, 95, 99, 100)
    rows = [(r.policy, *(number(float(np.percentile(r.jct_s, s)) / 3600) for s in shares)) for r in results]
    return _table(("policy", *(f"{s} %" for s in shares)), rows, "Hours within which that share of the jobs is done")


def _over_time(result: Result) -> str:
    """A lane a node, a rectangle a job; the longest spans where there are too many."""
    nodes = min(LANES, len(result.machines.capacity))
    end = max(result.end_s, 1.0)
    rects: list[str] = []
    drawn = 0
    places = _places(result, nodes)
    # The longest first, so that SPANS cuts off the shortest.
    for span, run in sorted(enumerate(result.runs), key=lambda pair: (pair[1].start_s - pair[1].end_s, pair[0])):
        job, hours = result.jobs[run.index], number((run.end_s - run.start_s) / 3600)
        name = f"{job.id}: {devices_of(run.allocation)} devices, {hours} h, {run.why}"
        for node, _ in run.allocation:
            if node >= nodes or len(rects) >= SPANS:
                continue
            drawn += 1
            capacity = result.machines.capacity[node]
            for row, count in places[span, node]:
                rects.append(
                    f'<rect class="run" x="{run.start_s / end * 100:.3f}" '
                    f'y="{(node + row / capacity) / nodes * 100:.3f}" '
                    f'width="{max((run.end_s - run.start_s) / end * 100, 0.02):.3f}" '
                    f'height="{count / capacity / nodes * 100:.3f}" fill="{COLOURS[run.index % len(COLOURS)]}">'
                    f"<title>{escape(name)}</title></rect>"
                )
    total = sum(len(run.allocation) for run in result.runs)
    cut = f" The {drawn:,} longest of {total:,} spans are drawn." if drawn < total else ""
    undrawn = len(result.machines.capacity) - nodes
    undrawn_text = f" {undrawn:,} more nodes are not drawn." if undrawn > 0 else ""
    plot = (
        '<svg class="plot nodes" viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="jobs on nodes over time">{"".join(rects)}</svg>'
    )
    hint = f'<p class="hint">A lane is a node, a rectangle a job on some of its devices.{cut}{undrawn_text}</p>'
    return hint + plot + _axis("0 h", f"{number(end / 3600)} h")


def _places(result: Result, nodes: int) -> Mapping[tuple[int, int], Sequence[tuple[int, int]]]:
    """(span, node) -> (first device, devices) of the parts of its lane: one part if one is free, else several; those
    of the job that it shares devices with where it does."""
    out: dict[tuple[int, int], Sequence[tuple[int, int]]] = {}
    rows_of_node: dict[int, list[tuple[float, int]]] = {}
    for span, run in sorted(enumerate(result.runs), key=lambda pair: (pair[1].start_s, pair[0])):
        for node, count in run.allocation:
            if node >= nodes:
                continue
            # rows: a bit for each device of the node that a run takes.
            now = [(end, rows) for end, rows in rows_of_node.get(node, ()) if end > run.start_s]
            busy, capacity = reduce(or_, (rows for _, rows in now), 0), result.machines.capacity[node]
            whole = ((1 << count) - 1) if count else 0
            first = next((row for row in range(capacity - count + 1) if not busy & (whole << row)), -1)
            free = [row for row in range(capacity) if not busy >> row & 1][:count]
            # Fewer free devices than it holds: it shares them with another job, and is drawn over it.
            if first >= 0 or len(free) < count:
                parts = [(max(first, 0), count)]
            else:
                parts = [(row, 1) for row in free]
            out[span, node] = parts
            rows_of_node[node] = [*now, (run.end_s, sum(((1 << many) - 1) << row for row, many in parts))]
    return out


def _sampled(series: Series, values: Floats, end: float) -> tuple[Floats, Floats]:
    """The means of a curve of steps over equal parts of the time."""
    edges = np.linspace(0.0, end, COLUMNS + 1)
    times = np.concatenate([[0.0], series.time_s, [end]])
    steps = np.concatenate([[0.0], values])
    areas = np.concatenate([[0.0], np.cumsum(steps * np.diff(times))])
    # The integral of a curve of steps is linear between them, so that interpolating it is exact, however short a step
    # is.
    at = np.interp(edges, times, areas)
    return (edges[1:] + edges[:-1]) / 2, np.diff(at) / np.diff(edges)


def _curves(results: Sequence[Result]) -> str:
    end = max(max(result.end_s for result in results), 1.0)
    out = _legend([result.policy for result in results])
    for name, unit in (("waiting", "jobs wait"), ("busy", "devices in use")):
        curves = [_sampled(r.series, getattr(r.series, name), end) for r in results if r.series is not None]
        top = max(max(float(y.max()) for _, y in curves), 1.0)
        lines = ""
        for i, (x, y) in enumerate(curves):
            points = " ".join(f"{a / end * 100:.2f},{100 - b / top * 100:.2f}" for a, b in zip(x, y, strict=True))
            lines += f'<polyline stroke="{COLOURS[i % len(COLOURS)]}" points="{points}"/>'
        out += f"<h3>{escape(unit)}, up to {number(top)}</h3>"
        out += (
            '<svg class="plot" viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(unit)} over time">{lines}</svg>'
        )
        out += _axis("0 h", f"{number(end / 3600)} h")
    return out


def _waits(results: Sequence[Result]) -> str:
    head = ("policy", *REASONS)
    rows = [(r.policy, *(f"{s / 3600:,.1f}" for s in r.reasons.sum(axis=0))) for r in results]
    out = _table(head, rows, "Job-hours waited, by what was in the way (looked at every 5 minutes)")
    first = results[0]
    order = np.argsort(-first.waited_s, kind="stable")[:WAITERS]
    listed = []
    for index in order:
        if first.waited_s[index] <= 0:
            break
        job = first.jobs[index]
        why = REASONS[int(np.argmax(first.reasons[index]))]
        hours = number(float(first.waited_s[index]) / 3600)
        listed.append((job.id, f"mostly {why}", f"{job.devices:,}", number(job.work_s / 3600), hours))
    if listed:
        head = ("job", "why", "devices", "work h", "waited h")
        out += _table(head, listed, f"Jobs that waited longest under {first.policy}", words=2)
    return out
