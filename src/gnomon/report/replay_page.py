"""A replay of a server as a page of its own: queue, batch, KV memory and time to first token over time.

`replay_page(forecast, title, measured)` returns HTML with drawings in it, which needs no network and no script; what a
server took for the same requests is drawn beside. Leaves out ITL over time, and requests one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gnomon.serving.forecast import Forecast
from gnomon.serving.measured import MeasuredLoad
from gnomon.units import show_seconds

WIDTH, HEIGHT, LEFT = 900, 150, 70
MOST_POINTS = 1500
"""Of a curve; of more, the largest of each stretch is drawn, so that no peak is lost."""
STYLE = """:root{color-scheme:light dark;--text:#1b2733;--back:#fff;--curve:#0072b2;--line:#888}
@media(prefers-color-scheme:dark){:root{--text:#e6e9ee;--back:#14181d;--curve:#56b4e9;--line:#777}}
body{font:14px system-ui,sans-serif;margin:0 auto;padding:1em;max-width:1000px;color:var(--text);background:var(--back)}
svg{display:block;margin:0 0 1em;width:100%;height:auto}h1{font-size:1.3em}h2{font-size:1em;margin:0}
path{fill:none;stroke:var(--curve);stroke-width:1.5}circle{fill:var(--curve)}
.measured{stroke-dasharray:6 4;stroke:var(--text)}
text{font-size:12px;fill:var(--text)}line{stroke:var(--line)}@media(max-width:600px){text{font-size:22px}}"""
"""Light, dark, and for a phone."""


def replay_page(found: Forecast, title: str, measured: MeasuredLoad | None = None) -> str:
    """A replay as one HTML page. Curves are of one group of devices. measured: of the same requests."""
    samples = found.played.samples
    times = [s[0] for s in samples]
    first = [float(t) for t in found.played.first_s]
    waits = [float(t) for t in found.played.first_s - found.played.arrival_s]
    order = sorted(range(len(first)), key=first.__getitem__)
    span = max(found.played.span_s, 1e-9)
    rows = (
        ("requests in the queue", times, [float(s[1]) for s in samples], "", True),
        ("requests that run", times, [float(s[2]) for s in samples], "", True),
        ("share of KV blocks", times, [100 * s[3] for s in samples], " %", True),
        ("time to first token, at the first token", [first[i] for i in order], [waits[i] for i in order], "s", False),
    )
    drawings = "\n".join(_drawing(*row, span) for row in rows)
    if measured is not None:
        drawings += "\n" + _both(found, measured)
    numbers = " · ".join(
        f"{name} p50 {show_seconds(spread.p50)}, p99 {show_seconds(spread.p99)}"
        for name, spread in (("TTFT", found.ttft), ("TPOT", found.tpot), ("end to end", found.e2e))
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<style>{STYLE}</style></head><body>\n<main>\n<h1>{escape(title)}</h1>\n<p>{escape(numbers)}</p>\n"
        f"<p>{found.output_tokens_per_s:,.0f} output tokens/s of {found.devices} devices; curves are of one group</p>\n"
        f"{drawings}\n</main>\n</body></html>\n"
    )


def _both(found: Forecast, measured: MeasuredLoad) -> str:
    """Shares of requests under a time, predicted and measured, of TTFT and TPOT."""
    played = found.played
    spans = (played.end_s - played.first_s)[played.output_len > 1]
    ours = {
        "time to first token": played.first_s - played.arrival_s,
        "time a further token": spans / (played.output_len[played.output_len > 1] - 1),
    }
    theirs = {"time to first token": measured.ttfts, "time a further token": measured.tpots}
    rows = []
    for name, predicted in ours.items():
        top = max([*map(float, predicted), *map(float, theirs[name]), 1e-9])
        lines = "".join(
            f'<path class="{which}" d="{_shares(sorted(map(float, values)), top)}"/>'
            for which, values in (("predicted", predicted), ("measured", theirs[name]))
        )
        rows.append(
            f"<h2>share of requests within a {escape(name)}: predicted (line), measured (dashes)</h2>\n"
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 20}" role="img" aria-label="{escape(name)}, predicted and measured">'
            f'<line x1="{LEFT}" y1="{HEIGHT}" x2="{WIDTH}" y2="{HEIGHT}"/>'
            f'<text x="0" y="24">100 %</text><text x="0" y="{HEIGHT}">0</text>'
            f'<text x="{LEFT}" y="{HEIGHT + 16}">0 s</text>'
            f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{escape(show_seconds(top))}</text>{lines}</svg>'
        )
    return "\n".join(rows)


def _shares(values: Sequence[float], top: float) -> str:
    """A path that rises by one request at each value."""
    step = -(-len(values) // MOST_POINTS) or 1
    path = f"M{LEFT} {HEIGHT}"
    for at in range(0, len(values), step):
        x, y = LEFT + (WIDTH - LEFT) * values[at] / top, HEIGHT - (HEIGHT - 20) * min(1.0, (at + step) / len(values))
        path += f"H{x:.1f}V{y:.1f}"
    return path


def _drawing(name: str, times: Sequence[float], values: Sequence[float], unit: str, joined: bool, span: float) -> str:
    """One curve over the whole replay. joined: a line that holds a value until the next; else dots."""
    step = -(-len(times) // MOST_POINTS) or 1
    top = max(values, default=0.0) or 1.0
    stretches = (range(start, min(start + step, len(times))) for start in range(0, len(times), step))
    shown = [max(stretch, key=lambda i: values[i]) for stretch in stretches]
    points = [(LEFT + (WIDTH - LEFT) * times[i] / span, HEIGHT - (HEIGHT - 20) * values[i] / top) for i in shown]
    if joined and points:
        body = f'<path d="M{points[0][0]:.1f} {points[0][1]:.1f}'
        body += "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:]) + '"/>'
    else:
        body = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.5"/>' for x, y in points)
    most = show_seconds(top) if unit == "s" else f"{top:,.0f}{unit}"
    return (
        f"<h2>{escape(name)}</h2>\n"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 20}" role="img" aria-label="{escape(name)}">'
        f'<line x1="{LEFT}" y1="{HEIGHT}" x2="{WIDTH}" y2="{HEIGHT}"/>'
        f'<text x="0" y="24">{escape(most)}</text><text x="0" y="{HEIGHT}">0</text>'
        f'<text x="{LEFT}" y="{HEIGHT + 16}">0 s</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{escape(show_seconds(span))}</text>{body}</svg>'
    )
