"""A replay of a server as a page of its own: queue, batch, KV memory and time to first token over time.

`replay_page(forecast, title)` returns HTML with drawings in it, which needs no network and no script. Leaves out ITL
over time, and requests one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gnomon.serving.forecast import Forecast
from gnomon.units import show_seconds

WIDTH, HEIGHT, LEFT = 900, 150, 70
MOST_POINTS = 1500
"""Of a curve."""


def replay_page(found: Forecast, title: str) -> str:
    """The page. Curves are of one group of devices."""
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
    numbers = " · ".join(
        f"{name} p50 {show_seconds(spread.p50)}, p99 {show_seconds(spread.p99)}"
        for name, spread in (("TTFT", found.ttft), ("TPOT", found.tpot), ("end to end", found.e2e))
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        "<style>body{font:14px sans-serif;margin:2em;max-width:1000px}svg{display:block;margin:0 0 1em}"
        "path{fill:none;stroke:#2563a8;stroke-width:1.5}circle{fill:#2563a8}text{font-size:12px}line{stroke:#bbb}</style>"
        f"</head><body>\n<h1>{escape(title)}</h1>\n<p>{escape(numbers)}</p>\n"
        f"<p>{found.output_tokens_per_s:,.0f} output tokens/s of {found.devices} devices; curves are of one group</p>\n"
        f"{drawings}\n</body></html>\n"
    )


def _drawing(name: str, times: Sequence[float], values: Sequence[float], unit: str, joined: bool, span: float) -> str:
    """One curve over the whole replay. joined: a line that holds a value until the next; else dots."""
    step = -(-len(times) // MOST_POINTS) or 1
    top = max(values, default=0.0) or 1.0
    points = [
        (LEFT + (WIDTH - LEFT) * at / span, HEIGHT - (HEIGHT - 20) * value / top)
        for at, value in zip(times[::step], values[::step], strict=True)
    ]
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
