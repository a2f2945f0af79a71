"""The page in a real browser: it draws without errors, asks for nothing, and its numbers are the prediction's.

Skipped without Chromium. `--dump-dom` prints the page after its script has run, `--log-net-log` what it asked for.
"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from browser import needs_chromium, shown

from gnomon.cli import main
from gnomon.plans import Mesh, Plan, Schedule, Workload
from gnomon.prediction import predict
from gnomon.report.page import page_data, page_html
from gnomon.report.prediction import WORDS
from gnomon.report.tables import number, percent
from gnomon.schema import dump
from gnomon.units import show_seconds

pytestmark = needs_chromium

PROBE = """
<script>
(() => {
  const ink = (id) => {
    const canvas = document.getElementById(id), g = canvas.getContext("2d");
    const pixels = g.getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
    for (let i = 0; i < pixels.length; i += 4) seen.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
    return [...seen].map((c) => c.toString(16).padStart(6, "0"));
  };
  const box = document.getElementById("lanes");
  const press = (key) => box.dispatchEvent(new KeyboardEvent("keydown", { key }));
  press("ArrowDown"); press("n");
  const found = { lanes: ink("lanes-canvas"), memory: ink("memory-canvas"),
    detail: document.getElementById("detail").textContent, wide: document.documentElement.scrollWidth };
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
</script>
</body>"""
"""Added to the page by the test: what the canvases show, and what the keyboard chooses."""


def test_in_a_browser(tmp_path: Path) -> None:
    job = Plan(mesh=Mesh(pp=2), schedule=Schedule(micro_batch_size=1))
    prediction = predict("llama-tiny", "1x2xh100-sxm", job, Workload(global_batch_size=4, seq_len=64))
    page = page_html(page_data([prediction.timeline(steady=False)], prediction=prediction, plan=dump(job)))
    net = tmp_path / "net.json"
    dom, log = shown(page.replace("</body>", PROBE), tmp_path, f"--log-net-log={net}")

    assert "CONSOLE" not in log, log  # neither an error nor a refusal of the policy
    asked = re.findall(r'"url":"((?:https?|wss?|ftp)://[^"]+)"', net.read_text(encoding="utf-8", errors="replace"))
    assert [url for url in asked if "google" not in url and "gvt1" not in url] == []  # the browser's own aside

    figures = dict(re.findall(r'data-figure="([^"]+)">([^<]+)<', dom))
    assert figures["step"] == show_seconds(prediction.step_s)
    assert figures["MFU"] == f"{percent(prediction.mfu)} %"
    assert figures["tokens/s/device"] == number(prediction.tokens_per_s_per_device, 4)
    for part, seconds in prediction.breakdown.items():
        assert f'</i>{WORDS.get(part, part.lower())}</td><td class="n">{number(seconds)}</td>' in dom

    match = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert match, dom[-400:]
    probe = json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert {"0072b2", "e69f00"} <= set(probe["lanes"])  # forward and backward
    assert "a3adb8" in probe["memory"]  # overhead, most of so small a job
    assert probe["detail"].split(" ")[0] in ("0F1", "1F1", "0B0", "1B0", "1SEND_B0", "0SEND_F1")
    assert probe["wide"] <= 1280


DENSE = """
<script>
(() => {
  const canvas = document.getElementById("lanes-canvas"), g = canvas.getContext("2d"), seen = new Set();
  const pixels = g.getImageData(150, 0, canvas.width - 150, canvas.height).data;
  for (let i = 0; i < pixels.length; i += 4) seen.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
  const hex = (text) => {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = text;
    return probe.fillStyle.slice(1);
  };
  const swatches = [...document.querySelectorAll(".legend i")].map((i) => hex(i.style.background));
  const root = getComputedStyle(document.documentElement);
  const page = ["--back", "--soft", "--line", "--dim", "--text"].map((name) => hex(root.getPropertyValue(name).trim()));
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify({ seen: [...seen].map((c) => c.toString(16).padStart(6, "0")), swatches, page });
  document.body.append(out);
})();
</script>
</body>"""


@pytest.mark.parametrize("scale", [1, 2])
def test_dense_timelines_have_the_colours_of_the_legend(scale: int, tmp_path: Path) -> None:
    """Some hundred spans in each pixel: none is blended with its neighbours."""
    job = Plan(mesh=Mesh(pp=2), schedule=Schedule(micro_batch_size=1))
    prediction = predict("llama-tiny", "1x2xh100-sxm", job, Workload(global_batch_size=3000, seq_len=64))
    page = page_html(page_data([prediction.timeline(steady=False)], prediction=prediction, plan=dump(job)))
    # The names of times along the axis are blended with what is behind them, as all letters are.
    page = page.replace("g.fillText(seconds(at)", "void (seconds(at)")
    dom, _ = shown(page.replace("</body>", DENSE), tmp_path, f"--force-device-scale-factor={scale}")
    match = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert match, dom[-400:]
    probe = json.loads(match[1])
    assert {"0072b2", "e69f00"} <= set(probe["swatches"]) & set(probe["seen"])
    assert set(probe["seen"]) <= {*probe["swatches"], *probe["page"]}


def test_replays_stand_in_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server's and a fleet's, each in a frame of its own, drawn and with its own styles."""
    serving, fleet, step, out = (
        tmp_path / name for name in ("serving.html", "fleet.html", "step.timeline", "all.html")
    )
    job = ["llama-tiny", "--on", "1x2xh100-sxm", "--global-batch", "4", "--seq-len", "64", "--timeline", str(step)]
    served = ["--input-len", "64", "--output-len", "8", "--concurrency", "4", "--page", str(serving)]
    trace = tmp_path / "jobs.csv"
    trace.write_text("job_id,submit_s,duration_s,num_gpus\na,0,600,2\nb,60,600,2\n")
    assert main(["predict", *job]) == 0
    assert main(["predict", "llama-3.2-1b", "--serve", "--on", "h100-sxm", *served]) == 0
    assert main(["fleet", "replay", str(trace), "--on", "1x2xh100-sxm", "--policy", "fifo", "-o", str(fleet)]) == 0
    assert main(["report", str(step), "--replay", str(serving), "--replay", str(fleet), "-o", str(out)]) == 0
    assert main(["report", str(step), "--replay", str(step), "-o", str(out)]) == 2
    assert "is no page of a replay; gnomon predict --serve --page" in capsys.readouterr().err
    page = out.read_text(encoding="utf-8")
    frames = [unescape(text) for text in re.findall(r'<iframe class="replay" sandbox="" [^>]*srcdoc="([^"]*)"', page)]
    assert frames == [serving.read_text(encoding="utf-8"), fleet.read_text(encoding="utf-8")]
    assert frames[0].count("<svg") >= 4 and frames[1].count("<svg") >= 1
    _, log = shown(page, tmp_path)
    assert "CONSOLE" not in log, log
