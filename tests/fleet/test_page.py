"""The page of a replay in a real browser: it draws without errors, fits its window, and says what was replayed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import needs_chromium, shown

from gnomon.fleet.job import Job, Trace
from gnomon.fleet.machines import machines
from gnomon.fleet.page import fleet_page
from gnomon.fleet.policies import policy
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules

pytestmark = needs_chromium

PROBE = """
<script>
  const boxes = (what) => [...document.querySelectorAll(what)].map((one) => one.getBoundingClientRect());
  const lines = boxes("polyline").map((box) => [box.width, box.height]);
  const jobs = boxes("rect.run").filter((box) => box.width > 0 && box.height > 0).length;
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify({ lines, jobs, wide: document.documentElement.scrollWidth });
  document.body.append(out);
</script>
</body>"""


@pytest.fixture(scope="module")
def page() -> str:
    jobs = [Job(id=f"job {i}", submit_s=i * 30.0, work_s=600.0 + 40 * (i % 7), devices=1 + i % 4) for i in range(30)]
    on = machines("2x4xv100-sxm-32gb")
    trace = Trace(name="thirty jobs", format="table", jobs=tuple(jobs))
    results = [replay(trace, on, policy(name), rules=Rules(record=True)) for name in ("srtf", "fifo", "lyra")]
    return fleet_page(results, title="thirty <jobs>", sentence="Which policy?", notes=("nothing",))


def test_it_draws_without_a_word_from_the_browser(page: str, tmp_path: Path) -> None:
    dom, log = shown(page, tmp_path)
    assert "CONSOLE" not in log, log
    assert "thirty &lt;jobs&gt;" in dom and all(name in dom for name in ("srtf", "fifo", "lyra"))


@pytest.mark.parametrize("width", [700, 1280])
def test_curves_and_jobs_are_seen_and_nothing_is_wider_than_the_window(page: str, tmp_path: Path, width: int) -> None:
    probed = page.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    dom, _ = shown(probed.replace("</body>", PROBE), tmp_path, width=width)
    match = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert match, dom[-400:]
    probe = json.loads(match[1])
    assert len(probe["lines"]) == 3 * 3 and probe["jobs"] >= 30
    assert all(wide > width / 3 and tall > 20 for wide, tall in probe["lines"])
    assert probe["wide"] <= width
