"""The page of several cases: the front's points, its stairs and its axes, bars elsewhere, and nothing that is wider
than the window (in a browser, where there is one)."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import needs_chromium, shown

from gnomon.hardware import parse_cluster
from gnomon.plans import Mesh, Plan, Saved, Schedule, Workload
from gnomon.prediction import predict
from gnomon.report.page.sweep import PlotAxis, sweep_page, undominated
from gnomon.search import FoundPlan
from gnomon.search.questions.goals import Case
from gnomon.search.space.points import Point

ON = parse_cluster("1x2xh100-sxm")
WORK = Workload(global_batch_size=16, seq_len=256)


def case(label: str, micro: int = 1, *, full: bool = False, why: str = "") -> Case:
    """A case with a plan of that micro batch, or with none."""
    if why:
        return Case(label=label, cluster=ON, workload=WORK, best=None, why=why)
    saved = Saved(preset="full" if full else "none")
    plan = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(micro_batch_size=micro), saved=saved)
    prediction = predict("llama-tiny", ON, plan, WORK)
    point = Point(1, 1, 1, 1, 1, 2, "one_f_one_b", 1, micro, False, False, "ring", saved.preset, 0, True)
    return Case(label=label, cluster=ON, workload=WORK, best=FoundPlan(point=point, plan=plan, prediction=prediction))


@pytest.fixture(scope="module")
def cases() -> tuple[Case, ...]:
    """Three plans that no other beats, one that another beats (recompute of less work), and one case without a plan."""
    return (
        case("8 GiB", 8),
        case("6 GiB", 4),
        case("4 GiB", 2),
        case("3 GiB", 8, full=True),
        case("1 GiB & less", why="nothing <fits>"),
    )


class Elements(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))


def test_which_points_no_other_beats() -> None:
    points = [(3.0, 1.0), (2.0, 2.0), (2.5, 2.0), (1.0, 5.0), (3.0, 1.5), (2.0, 2.0)]
    assert [points[i] for i in undominated(points)] == [(1.0, 5.0), (2.0, 2.0), (3.0, 1.0)]
    assert undominated([]) == ()


def test_axes_have_round_marks_around_their_values() -> None:
    axis = PlotAxis.of("GiB", [10.0, 60.0])
    assert axis.low < 10 and axis.high > 60 and axis.ticks == (20.0, 40.0, 60.0)
    assert (axis.percent(axis.low), axis.percent(axis.high)) == (0, 100)
    one = PlotAxis.of("s", [0.5])
    assert one.low < 0.5 < one.high and len(one.ticks) >= 2
    assert PlotAxis.of("s", [0.0, 0.0]).high > 0


def test_a_front_is_points_over_their_stairs(cases: tuple[Case, ...]) -> None:
    page = sweep_page(cases, "a <model>", "Each plan is the fastest.", front=True)
    elements = Elements(page).tags
    points = [attrs for tag, attrs in elements if tag == "a"]
    front = [attrs for attrs in points if attrs["class"] == "point"]
    memory = {c.label: c.best.prediction.tightest.peak_bytes for c in cases if c.best}
    assert len(points) == 4 and 2 <= len(front) <= 4

    placed = []
    for attrs in points:
        left, bottom = (float(value) for value in re.findall(r"(?:left|bottom):([\d.]+)%", attrs["style"]))
        assert 0 < left < 100 and 0 < bottom < 100
        placed.append((left, bottom))
    order = sorted(range(4), key=lambda i: placed[i][0])
    assert order == sorted(range(4), key=lambda i: list(memory.values())[i])  # across: memory

    stairs = next(attrs["points"] for tag, attrs in elements if tag == "polyline").split()
    corners = [tuple(float(part) for part in corner.split(",")) for corner in stairs]
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in zip(corners, corners[1:], strict=False))
    assert all(
        (left, round(100 - bottom, 2)) in corners
        for (left, bottom), p in zip(placed, points, strict=True)
        if p in front
    )

    assert "step time (ms)" in page and "peak memory of the fullest device (GiB)" in page
    assert points[0]["aria-label"].startswith("1: ") and "dp2" in points[0]["aria-label"]
    rows = {attrs["id"] for tag, attrs in elements if tag == "tr" and "id" in attrs}
    assert rows == {f"case-{i}" for i in range(1, 6)} and {p["href"][1:] for p in points} <= rows
    assert "nothing &lt;fits&gt;" in page and "a &lt;model&gt;" in page and "<script" not in page


def test_other_cases_are_bars_from_zero(cases: tuple[Case, ...]) -> None:
    page = sweep_page(cases, "sweep")
    widths = [float(value) for value in re.findall(r'class="step" style="width:([\d.]+)%', page)]
    seconds = [c.best.step_s if c.best else 0.0 for c in cases]
    assert widths == pytest.approx([100 * entry / max(seconds) for entry in seconds], abs=0.01)
    assert "<polyline" not in page and "<th>case</th>" in page


@needs_chromium
@pytest.mark.parametrize("front", [True, False])
def test_no_page_is_wider_than_its_window(front: bool, cases: tuple[Case, ...], tmp_path: Path) -> None:
    """In frames of both widths, as a window of Chromium has a least width."""
    long = "on=" + "+".join(["4x8xh100-sxm-80gb"] * 9)
    every = (*cases, *(case(f"{long}{i}", 1) for i in range(2)))
    page = sweep_page(every, long, "words " * 40, front=front)
    frames = "".join(f'<iframe id="w{w}" style="width:{w}px;height:800px;border:0"></iframe>' for w in (400, 1280))
    held = json.dumps(page).replace("</", "<\\/")
    script = (
        f"const page = {held};"
        "const found = []; for (const frame of document.querySelectorAll('iframe')) {"
        "frame.srcdoc = page; frame.onload = () => { const root = frame.contentDocument.documentElement;"
        "found.push([frame.clientWidth, root.scrollWidth, root.clientWidth]);"
        "document.getElementById('out').textContent = JSON.stringify(found); }; }"
    )
    outer = f'<!doctype html><meta charset="utf-8"><body>{frames}<pre id="out"></pre><script>{script}</script></body>'
    dom, _ = shown(outer, tmp_path, "--virtual-time-budget=4000")
    match = re.search(r'<pre id="out">(.*?)</pre>', dom)
    assert match, dom[-300:]
    actual = sorted(json.loads(match[1]))
    assert [frame for frame, _, _ in actual] == [400, 1280]
    assert all(scroll <= client for _, scroll, client in actual), actual
