"""What the page of a replay draws, read without a browser: tags close, curves stay inside, no device has two jobs."""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import combinations

import pytest

from gnomon.fleet.job import Job, Trace
from gnomon.fleet.machines import machines
from gnomon.fleet.page import fleet_page
from gnomon.fleet.policies import policy
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules

VOID = {"meta", "link", "br", "rect", "polyline"}


class Drawn(HTMLParser):
    """Boxes of jobs and points of curves; ValueError where a tag does not close."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.boxes: list[tuple[float, float, float, float]] = []
        self.curves: list[list[tuple[float, float]]] = []
        self.feed(page)
        self.close()
        if self.open:
            raise ValueError(f"still open: {self.open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "rect" and given.get("class") == "run":
            x, y, width, height = (float(given[name]) for name in ("x", "y", "width", "height"))
            self.boxes.append((x, y, x + width, y + height))
        if tag == "polyline":
            self.curves.append([(float(x), float(y)) for x, y in (p.split(",") for p in given["points"].split())])
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag == "rect":
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            raise ValueError(f"</{tag}> closes nothing")


@pytest.mark.parametrize("name", ["srtf", "lyra", "las"])
def test_every_job_is_drawn_where_nothing_else_is(name: str) -> None:
    jobs = [Job(id=f"job {i}", submit_s=i * 30.0, work_s=600.0 + 40 * (i % 7), devices=1 + i % 4) for i in range(30)]
    on, trace = machines("2x4xv100-sxm-32gb"), Trace(name="thirty jobs", format="table", jobs=tuple(jobs))
    result = replay(trace, on, policy(name), rules=Rules(record=True))
    drawn = Drawn(fleet_page([result], title="thirty <jobs> & more", sentence="Which policy?", notes=("nothing",)))
    assert len(drawn.boxes) >= sum(len(run.allocation) for run in result.runs) >= 30
    held = sum((right - left) * (low - high) for left, high, right, low in drawn.boxes) / 100**2
    devices_s = sum(result.device_s[use] for use in ("useful", "lost", "overhead"))
    assert held * on.devices * result.end_s == pytest.approx(devices_s, rel=0.01)
    for one, other in combinations(drawn.boxes, 2):
        wide = min(one[2], other[2]) - max(one[0], other[0])
        tall = min(one[3], other[3]) - max(one[1], other[1])
        assert wide < 0.01 or tall < 0.01, (one, other)
    assert len(drawn.curves) == 3
    for curve in drawn.curves:
        assert all(-0.01 <= value <= 100.01 for point in curve for value in point)
        assert all(before[0] <= after[0] for before, after in zip(curve, curve[1:], strict=False))
