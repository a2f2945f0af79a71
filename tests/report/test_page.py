"""The page: its numbers are the prediction's, its columns give the spans back, and no text can break out of it."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gnomon.plans import Mesh, Optimizer, Plan, Saved, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.report.page import page_data, page_html
from gnomon.report.page.spans import span_columns, window_s
from gnomon.report.tables import percent
from gnomon.schema import dump
from gnomon.timeline import Spans, Timeline, Worker, memory_curve, peaks
from gnomon.timeline.queued import without_a_core
from gnomon.units import quantise

WORK = Workload(global_batch_size=4, seq_len=64)


def result(**axes: int) -> Prediction:
    job = Plan(mesh=Mesh(**axes), schedule=Schedule(micro_batch_size=1))
    return predict("llama-tiny", f"1x{job.world_size}xh100-sxm", job, WORK)


def measured(like: Timeline, factor: float = 1.25) -> Timeline:
    """The same spans, each later and longer, without causes."""
    s = like.spans
    start, end = s.start_s * factor, s.end_s * factor
    spans = Spans.of(worker=s.worker, stream=s.stream, kind=s.kind, role=s.role, start_s=start, end_s=end)
    spans = replace(spans, stage=s.stage, unit=s.unit)
    step_s = float(quantise(like.makespan_s * factor))
    return replace(like, clock="measured", spans=spans, makespan_s=step_s, period_s=None, memory=None)


def read_back(part: dict[str, Any]) -> list[tuple[int, int, int, float, float]]:
    """(worker, stream, kind, start, end) of every span, as the page's script reads them."""
    out, at = [], 0
    for worker, stream, _, count in part["lanes"]:
        tick = 0
        for i in range(at, at + count):
            start = tick + part["gap"][i]
            tick = start + part["lasts"][i]
            kind = part["table"][part["what"][i]][0]
            out.append((worker, stream, kind, start * part["tick_s"], tick * part["tick_s"]))
        at += count
    return out


def test_columns_give_the_spans_back() -> None:
    timeline = result(pp=4).timeline(steady=False)
    s = timeline.spans
    wanted = sorted(
        zip(*(c.tolist() for c in (s.worker, s.stream, s.kind, s.start_s, s.end_s)), strict=True),
        key=lambda row: row[:4],
    )
    again = sorted(read_back(span_columns(timeline)), key=lambda row: row[:4])
    assert [row[:3] for row in again] == [row[:3] for row in wanted]
    assert np.array([row[3:] for row in again]) == pytest.approx(np.array([row[3:] for row in wanted]), abs=2e-9)


def test_causes_and_memory_survive() -> None:
    timeline = result(pp=2).timeline(steady=False)
    part = span_columns(timeline)
    assert sum(cause != 0 for cause in part["cause"]) == (timeline.spans.cause >= 0).sum()
    spans = read_back(part)
    for worker, name in enumerate(w.name for w in timeline.workers):
        events = [
            (spans[i][3] if change > 0 else spans[i][4], change)
            for i, what in enumerate(part["what"])
            for _, change in part["effects"][part["table"][what][6]]
            if spans[i][0] == worker
        ]
        held = sum(part["resident"][worker]) + np.cumsum([change for _, change in sorted(events)])
        assert max(held) == pytest.approx(memory_curve(timeline, name).bytes.max())


def test_memory_of_a_repeating_timeline_is_folded() -> None:
    """Each class begins its period with what earlier ones left, and never holds less than nothing."""
    timeline = result(pp=4).timeline()
    part = span_columns(timeline)
    spans = read_back(part)
    level = np.array(part["resident"])
    events = [
        (spans[i][3 if change > 0 else 4] % timeline.step_s, change, spans[i][0], cls)
        for i, what in enumerate(part["what"])
        for cls, change in part["effects"][part["table"][what][6]]
    ]
    tops = level.sum(axis=1)
    for _, change, worker, cls in sorted(events):
        level[worker, cls] += change
        assert level[worker, cls] > -1
        tops[worker] = max(tops[worker], level[worker].sum())
    assert tops == pytest.approx(np.array([peak.bytes for peak in peaks(timeline)]), rel=0.02)


def test_a_long_timeline_is_cut_and_says_so() -> None:
    count = 100_000
    start = np.arange(count) * 1e-4
    timeline = Timeline(
        clock="measured",
        workers=(Worker(name="rank 0"),),
        streams=("compute",),
        kinds=("F",),
        spans=Spans.of(worker=0, stream=0, kind=0, role=0, start_s=start, end_s=start + 1e-4, unit=np.arange(count)),
        makespan_s=10.5,
    )
    assert window_s([timeline], 1000) == pytest.approx(0.1)
    page = page_html(page_data([timeline]))
    assert len(page.encode()) < 2_000_000
    assert re.search(r"Only the first [\d.]+ s are shown: [\d,]+ of 100,000 spans", page)


def test_the_answer_is_the_predictions() -> None:
    job = result(pp=2)
    data = page_data([job.timeline(steady=False)], prediction=job)
    figures = {figure["name"]: figure["value"] for figure in data["answer"]}
    assert figures["step"] == job.step_s
    assert figures["tokens/s/device"] == job.tokens_per_s_per_device
    assert (figures["MFU"], figures["HFU"]) == (job.mfu, job.hfu)
    assert figures["peak memory"] == job.tightest.peak_bytes
    bands = {figure["name"]: figure["band_text"] for figure in data["answer"] if figure["band_text"]}
    assert set(bands) == {"step", "peak memory"} and all(text.endswith(", 80 %") for text in bands.values())
    assert bands["step"] in html.unescape(page_html(data))
    assert data["fits"] is True and data["verdict"] == job.verdict
    assert {part["key"]: part["seconds"] for part in data["breakdown"]["steady"]} == dict(job.breakdown)
    assert set(job.assumptions) <= set(data["assumptions"])


def test_breakdowns_add_up() -> None:
    job = result(pp=4)
    before = job.timeline(steady=False)
    data = page_data([before, measured(before)], prediction=job)
    assert sum(part["seconds"] for part in data["breakdown"]["steady"]) == job.step_s
    assert len(data["breakdown"]["workers"]) == 4
    for worker in data["breakdown"]["workers"]:
        assert [of["timeline"] for of in worker["of"]] == ["predicted", "measured"]
        for of in worker["of"]:
            assert sum(part["seconds"] for part in of["parts"]) == of["step_s"]


def test_measured_stands_beside_predicted() -> None:
    job = result(pp=2)
    before = job.timeline(steady=False)
    data = page_data([before, measured(before)], prediction=job)
    assert f"{(before.makespan_s * 1.25 / job.step_s - 1) * 100:.1f} % longer than predicted" in data["sentence"]
    step = data["answer"][0]
    assert step["measured"] == pytest.approx(before.makespan_s * 1.25)
    changes = [change["after_s"] - change["before_s"] for change in data["difference"]["changes"]]
    assert all(abs(a) >= abs(b) for a, b in pairwise(changes))
    names = {change["what"] for change in data["difference"]["changes"]}
    assert "B (backward)" in names and "waiting" in names and not any("host" in name for name in names)
    assert data["difference"]["summary"].startswith("Largest wrong price: B (backward) on class")
    page = page_html(data)
    assert "Predicted against measured" in page and "waiting (for what was not recorded)" in page


def test_period_and_makespan_are_not_compared() -> None:
    job = result(pp=2)
    data = page_data([job.timeline(), measured(job.timeline(steady=False))], prediction=job)
    assert "compare two of a kind" in data["difference"]["summary"]


@pytest.mark.parametrize("count", [0, 3])
def test_one_or_two_timelines(count: int) -> None:
    timeline = result().timeline()
    with pytest.raises(ValueError, match="a predicted timeline, a measured one, or both"):
        page_data([timeline] * count)


class Elements(HTMLParser):
    """Elements and the attributes that could load something, with the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "br", "input"):
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)>" \u2028 & <!--'


def test_texts_cannot_break_out() -> None:
    job = replace(result(pp=2), model=EVIL, assumptions=(EVIL.replace("\u2028", ""),), notes=(EVIL,))
    timeline = job.timeline(steady=False)
    timeline = replace(timeline, workers=(Worker(name="</script><b>0"), Worker(name="'\"><b>1")))
    page = page_html(page_data([timeline], prediction=job, plan=EVIL, title=EVIL, assumed=[EVIL]))
    elements = Elements(page)
    assert elements.open == []
    assert "img" not in elements.tags and "b" not in elements.tags and elements.tags.count("script") == 2
    assert json.loads(elements.scripts[0])["title"] == EVIL
    assert not set("<>&\u2028") & set(elements.scripts[0])


def test_the_page_needs_nothing_else() -> None:
    job = result(pp=2)
    page = page_html(page_data([job.timeline(steady=False)], prediction=job, plan=dump(job.plan)))
    assert Elements(page).loads == ["data:,"]
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|\bimport\b", page)
    assert len(page.encode()) < 2_000_000


def test_cores_that_others_had_are_said_first() -> None:
    """A step that waited for them says nothing of the prediction."""
    job = result(dp_shard=2)
    before = job.timeline(steady=False)
    after = measured(before, 42.9)
    noted = replace(after, assumptions=(*after.assumptions, *without_a_core(0, 0.2), *without_a_core(1, 0.91)))
    said = page_data([before, noted], prediction=job)["sentence"]
    assert said.startswith("Other processes had the cores for 91 % of the measured step. A step is predicted")
    assert "Other processes" not in page_data([before, after], prediction=job)["sentence"]


def test_ranks_links_and_alternatives_are_on_the_page() -> None:
    plan = Plan(mesh=Mesh(pp=2, tp=4, dp_shard=2), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=1))
    work = Workload(global_batch_size=16, seq_len=4096)
    job = predict("llama-3.1-8b", "2x8xh100-sxm", plan, work)
    other = predict("llama-3.1-8b", "2x8xh100-sxm", replace(plan, saved=Saved(preset="full")), work)
    data = page_data([job.timeline(steady=False)], prediction=job, others=[other])
    by_axis = {row[0]: row for row in data["communication"]}
    assert by_axis["tp"][1] == "4" and "inside a node" in by_axis["tp"][2]
    assert by_axis["pp"][1] == "2" and "over 2 nodes" in by_axis["pp"][2]
    assert float(by_axis["tp"][3]) == pytest.approx(job.breakdown["tp communication"], rel=0.01)
    assert [row[2:] for row in data["layout"]] == [
        ("0-7", "pp 0; dp_shard 0-1; tp 0-3"),
        ("8-15", "pp 1; dp_shard 0-1; tp 0-3"),
    ]
    first, second = data["alternatives"]
    assert first[0].endswith("(this plan)") and second[2] == f"{percent(other.step_s / job.step_s - 1)} %"
    page = page_html(data)
    assert "Why this plan" in page and "Where it runs" in page
    many = replace(plan, mesh=Mesh(pp=2, tp=8, dp_shard=64))
    large = predict("llama-3.1-8b", "128x8xh100-sxm", many, Workload(global_batch_size=256, seq_len=4096))
    data = page_data([large.timeline(steady=False)], prediction=large)
    assert len(data["layout"]) == 32 and data["nodes_left"] == 96
    assert "and 96 more nodes" in page_html(data)
