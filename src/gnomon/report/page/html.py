"""The page around the data: headings and tables in HTML, the rest drawn by `page.js` from the JSON that it carries.

`page_html(data)` returns the text of the file. Every text is escaped; a Content-Security-Policy forbids the page to
load anything. Tables are there without scripts, so the page can be searched, read aloud and printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any

from gnomon.report.tables import number, percent
from gnomon.units import show_bytes

_FOLDER = Path(__file__).parent
# A page is whole in one file and loads nothing from anywhere, so that it can be kept, sent and opened without a
# network.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
HEAD = 1 << 16
"""Characters of a page within which its head ends: styles stand in it."""
_BAR_WORKERS = 16
"""Workers whose step is shown as bars; the page says how many there are more."""

_SHELL = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def page_html(data: Mapping[str, Any], replays: Sequence[str] = ()) -> str:
    """The page of what `page_data` returned. replays: whole pages of replays, of a server or a fleet, shown within."""
    sections = (
        _heading(data),
        _timeline(data),
        _memory(data),
        _breakdown(data["breakdown"]),
        _difference(data),
        _alternatives(data["alternatives"]),
        _where(data),
        *(_replay(number, page) for number, page in enumerate(replays)),
        _listed("assumed", "What was assumed", data["assumptions"]),
        _listed("notes", "Notes", data["notes"]),
        _plan(data["plan"]),
    )
    return _SHELL.format(
        policy=_POLICY,
        title=escape(data["title"]),
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        body="\n".join(section for section in sections if section),
        data=embedded(data),
        script=(_FOLDER / "page.js").read_text(encoding="utf-8"),
    )


def title_of(page: str) -> str | None:
    """The title of a page of ours; None for another text."""
    found = re.search(r"<title>(.*?)</title>", page[:HEAD], re.DOTALL)
    ours = page.startswith("<!doctype html>") and '<meta name="color-scheme" content="light dark">' in page[:HEAD]
    return unescape(found.group(1)).strip() if ours and found else None


def _replay(number: int, page: str) -> str:
    """A section with a whole page in a frame of its own: its styles stay there, and nothing in it runs."""
    name, title = f"replay-{number}", title_of(page) or "A replay"
    frame = f'<iframe class="replay" sandbox="" title="{escape(title)}" srcdoc="{escape(page)}"></iframe>'
    return f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{escape(title)}</h2>{frame}</section>'


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element: no `<`, `>`, `&` or line separator of JavaScript is left in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _heading(data: Mapping[str, Any]) -> str:
    cards = "".join(_card(figure) for figure in data["answer"])
    verdict = ""
    if data["fits"] is not None:
        kind = "good" if data["fits"] else "bad"
        verdict = f'<p class="verdict {kind}">{escape(data["verdict"])}</p>'
    line = f'<p class="plan">{escape(data["plan_line"])}</p>' if data["plan_line"] else ""
    return (
        f'<header><h1>{escape(data["title"])}</h1>{line}<p class="sentence">{escape(data["sentence"])}</p>'
        f'<dl class="cards">{cards}</dl>{verdict}</header>'
    )


def _card(figure: Mapping[str, Any]) -> str:
    band_html = ""
    if figure["band_text"]:
        band_html = f'<dd class="measured">{escape(figure["band_text"])}</dd>'
    if figure["measured_text"]:
        band_html += f'<dd class="measured">measured {escape(figure["measured_text"])}</dd>'
    name = escape(figure["name"])
    return f'<div><dt>{name}</dt><dd data-figure="{name}">{escape(figure["text"])}</dd>{band_html}</div>'


def _timeline(data: Mapping[str, Any]) -> str:
    parts = [t["spans"] for t in data["timelines"]]
    window = ""
    if any(part["cut"] for part in parts):
        shown = " and ".join(f"{part['shown']:,} of {part['total']:,} spans" for part in parts)
        end = max(part["end_s"] for part in parts)
        window = f'<p class="window">Only the first {number(end, 4)} s are shown: {shown}.</p>'
    return f"""\
<section aria-labelledby="h-timeline"><h2 id="h-timeline">Timeline</h2>{window}
<div class="tools" role="group" aria-label="timeline"><button type="button" id="zoom-in" title="zoom in (+)">+</button>
<button type="button" id="zoom-out" title="zoom out (−)">−</button>
<button type="button" id="zoom-all" title="whole step (0)">whole step</button>
<span class="hint">drag or ← → to move, Ctrl+wheel or + − to zoom, n and p for the next and previous action,
↑ ↓ for the lane</span></div>
<ul id="legend" class="legend"></ul>
<div id="lanes" class="lanes" tabindex="0" role="application" aria-label="timeline: actions of every worker and stream"
aria-describedby="detail"><canvas id="lanes-canvas"></canvas><div id="lanes-space"></div></div>
<p id="detail" class="detail" aria-live="polite"></p><noscript><p>The timeline is drawn by a script.</p></noscript>
</section>"""


def _memory(data: Mapping[str, Any]) -> str:
    of = [t for t in data["timelines"] if t["spans"]["resident"]]
    peaks = [(t["name"], peak) for t in data["timelines"] for peak in t["peaks"]]
    if not peaks:
        return ""
    rows = []
    for name, peak in peaks[:_BAR_WORKERS]:
        limit = data["limits"].get(peak["worker"]) if name.startswith("predicted") else None
        most = max(peak["by_buffer"], key=lambda pair: float(pair[1]), default=("", 0.0))
        at = peak["action"] or "throughout"
        rows.append(
            (
                peak["worker"],
                name,
                show_bytes(peak["bytes"]),
                show_bytes(limit["limit_bytes"]) if limit else "",
                f"{at} at {number(peak['moment_s'])} s" if peak["action"] else at,
                f"{most[0]} {show_bytes(float(most[1]))}",
            )
        )
    table = _table(
        ("worker", "run", "peak", "limit", "reached in", "most of it"),
        rows,
        caption="Peak memory, in order of time",
    )
    note = _more_hint(len(peaks) - _BAR_WORKERS, "rows")
    drawing = ""
    if of:
        drawing = """<div class="tools"><label>worker <select id="memory-worker"></select></label></div>
<ul id="memory-legend" class="legend"></ul>
<canvas id="memory-canvas" class="memory" role="img" aria-label="memory over time by class"></canvas>"""
    return (
        f'<section aria-labelledby="h-memory"><h2 id="h-memory">Memory over time</h2>{drawing}{table}{note}</section>'
    )


def _breakdown(data: Mapping[str, Any]) -> str:
    out = ""
    if data["steady"]:
        rows = [(p["part"], number(p["seconds"]), percent(p["seconds"] / data["step_s"])) for p in data["steady"]]
        rows.append(("step", number(data["step_s"]), "100.0"))
        out += _bar("", data["steady"], data["step_s"], data["step_s"])
        keys = [p["key"] for p in data["steady"]]
        out += _table(("part", "s", "%"), rows, caption="Busiest rank, in the steady state", last=True, keys=keys)
    longest = max((of["step_s"] for worker in data["workers"] for of in worker["of"]), default=0.0)
    if data["workers"]:
        kind = "one step of the steady state" if data["window"] == "period" else "one step from rest"
        out += f"<h3>Every worker, {kind}</h3>"
    for worker in data["workers"][:_BAR_WORKERS]:
        for of in worker["of"]:
            out += _bar(f"{worker['worker']}, {of['timeline']}", of["parts"], of["step_s"], longest)
    out += _more_hint(len(data["workers"]) - _BAR_WORKERS, "workers")
    if data["workers"]:
        fullest = min(data["workers"], key=lambda w: _idle(w["of"][0]["parts"]))
        out += _both_bars(fullest)
    if not out:
        return ""
    return f'<section aria-labelledby="h-parts"><h2 id="h-parts">Where the step goes</h2>{out}</section>'


def _idle(parts: Iterable[Mapping[str, Any]]) -> float:
    waits = ("communication", "bubble", "ahead", "host", "copy", "idle")
    return float(sum(part["seconds"] for part in parts if part["key"] in waits))


def _both_bars(worker: Mapping[str, Any]) -> str:
    """A worker's parts, predicted and measured."""
    of = worker["of"]
    seconds = [{part["part"]: part["seconds"] for part in side["parts"]} for side in of]
    keys = {part["part"]: part["key"] for side in of for part in side["parts"]}
    names = list(keys)
    steps = [side["step_s"] for side in of]
    rows = [(name, *_cells([column.get(name, 0.0) for column in seconds])) for name in names]
    rows.append(("step", *_cells(steps)))
    head = ("part", *(f"{side['timeline']} s" for side in of), *(("difference s",) if len(of) == 2 else ()))
    caption = f"{worker['worker']}, as in the timeline: collectives inside a layer count as forward or backward"
    return _table(head, rows, caption=caption, last=True, keys=list(keys.values()))


def _cells(values: Sequence[float]) -> tuple[str, ...]:
    texts = tuple(number(value) for value in values)
    return texts if len(values) < 2 else (*texts, _signed(values[1] - values[0]))


def _signed(value: float) -> str:
    return "0" if not value else f"{'+' if value > 0 else '−'}{number(abs(value))}"


def _bar(label: str, parts: Sequence[Mapping[str, Any]], step_s: float, longest: float) -> str:
    cells = "".join(
        f'<span data-part="{escape(part["key"])}" style="width:{part["seconds"] / step_s * 100:.3f}%" '
        f'title="{escape(part["part"])} {number(part["seconds"])} s"></span>'
        for part in sorted(parts, key=lambda part: _place(part["key"]))
        if part["seconds"] > 0 and step_s
    )
    text = f'<span class="bar-label">{escape(label)}</span>' if label else ""
    width = step_s / longest * 100 if longest else 0
    seconds = f'<span class="bar-s">{number(step_s)} s</span>'
    return f'<div class="bar-row">{text}<div class="bar" style="width:{width:.2f}%">{cells}</div>{seconds}</div>'


def _place(key: str) -> int:
    """The position of a part within a bar: the same parts below each other, work before waiting."""
    order = ("F", "C", "R", "B", "I", "W", "F&B", "NORM", "OPT")
    waits = ("launch", "host", "copy", "offload", "bubble", "ahead", "idle")
    if key in order:
        return order.index(key)
    return 100 + waits.index(key) if key in waits else 50


def _difference(data: Mapping[str, Any]) -> str:
    difference = data["difference"]
    if difference is None:
        return ""
    names = [t["name"] for t in data["timelines"]]
    out = f"<p>{escape(difference['summary'])}</p>" if difference["summary"] else ""
    if difference["changes"]:
        rows = [(c["worker"], c["what"], *_cells([c["before_s"], c["after_s"]])) for c in difference["changes"]]
        head = ("worker", "what", *(f"{name} s" for name in names), "difference s")
        out += _table(head, rows, caption="Time, largest difference first") + _more_hint(
            difference["left"], "differences"
        )
    if difference["memory"]:
        sized = [
            (m["worker"], m["buffer"], show_bytes(m["before_bytes"]), show_bytes(m["after_bytes"]))
            for m in difference["memory"]
        ]
        out += _table(("worker", "class", *names), sized, caption="Memory at the peak")
    if not out:
        out = "<p>The two timelines do not differ.</p>"
    title = " against ".join(names)
    return f'<section aria-labelledby="h-diff"><h2 id="h-diff">{escape(title.capitalize())}</h2>{out}</section>'


def _alternatives(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = ("plan", "step", "loses", "peak", "memory")
    table = _table(head, rows, caption="What the search found next, and what was faster and does not fit")
    return f'<section aria-labelledby="h-why"><h2 id="h-why">Why this plan</h2>{table}</section>'


def _where(data: Mapping[str, Any]) -> str:
    """Axes over links, and ranks on nodes."""
    parts = ""
    if data["communication"]:
        head = ("axis", "ranks", "link", "exposed s")
        parts += _table(head, data["communication"], caption="Communication by axis, exposed on the busiest rank")
    if len(data["layout"]) + data["nodes_left"] > 1 or data["communication"]:
        head = ("node", "devices", "ranks", "places on the axes")
        parts += _table(head, data["layout"], caption="Ranks by node") + _more_hint(data["nodes_left"], "nodes")
    if not parts:
        return ""
    return f'<section aria-labelledby="h-where"><h2 id="h-where">Where it runs</h2>{parts}</section>'


def _listed(name: str, title: str, entries: Sequence[str]) -> str:
    if not entries:
        return ""
    items = "".join(f"<li>{escape(entry)}</li>" for entry in entries)
    return f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2><ul>{items}</ul></section>'


def _plan(text: str) -> str:
    if not text:
        return ""
    return (
        '<section aria-labelledby="h-plan"><h2 id="h-plan">Plan</h2><details open><summary>TOML</summary>'
        f'<pre tabindex="0">{escape(text)}</pre></details></section>'
    )


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str,
    last: bool = False,
    keys: Sequence[str] = (),
) -> str:
    """An HTML table; words to the left, numbers to the right. last: the last row is the sum. keys: parts of the step
    whose colour stands before the first cell of each row."""
    # A column is of numbers only if all its cells are, so that heading and cells stand on the same side.
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(head))]

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="n"' if is_number else "" for is_number in right)
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    body = ""
    for i, row in enumerate(rows):
        cells = line(row, "td")
        if i < len(keys):
            cells = cells.replace("<td>", f'<td><i class="swatch" data-part="{escape(keys[i])}"></i>', 1)
        body += f"<tr{' class=sum' if last and i == len(rows) - 1 else ''}>{cells}</tr>"
    return (
        # Where a table is wider than the page it is scrolled, by the keyboard too.
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{line(head, 'th')}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _is_number(text: str) -> bool:
    return not text or text.lstrip("+−-")[:1].isdigit()


def _more_hint(count: int, what: str) -> str:
    return f'<p class="hint">and {count:,} more {what}</p>' if count > 0 else ""
