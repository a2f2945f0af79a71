"""Size, load and redraw of the page of `gnomon report` with 2,000, 20,000 and 200,000 spans, in Chromium.

`python benchmarks/report/spans.py` writes pages of pipelined steps and opens each in a headless Chromium with a probe
that zooms in and out by the keyboard. Load is from the start of navigation to the first drawn timeline; a redraw is
one whole frame's drawing, by the page's own clock. Needs Chromium; no GPU.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from browser import CHROMIUM, shown

from gnomon.plans import Mesh, Plan, Schedule, Workload
from gnomon.prediction import predict
from gnomon.report.page import page_data, page_html
from gnomon.schema import dump

AT_ONCE = "<head>\n<script>window.requestAnimationFrame = (draw) => { draw(); return 0; };</script>"
"""A page that is printed is shown no frames: what is to be drawn in the next is drawn at once, and its time taken."""
PROBE = """
<script>
(() => {
  const loaded = performance.now(), box = document.getElementById("lanes"), frames = [];
  for (let turn = 0; turn < 30; turn++) {
    const start = performance.now();
    box.dispatchEvent(new KeyboardEvent("keydown", { key: turn < 15 ? "+" : "-" }));
    document.getElementById("lanes-canvas").getContext("2d").getImageData(0, 0, 1, 1);  // waits for the drawing
    frames.push(performance.now() - start);
  }
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify({ loaded, frames });
  document.body.append(out);
})();
</script>
</body>"""
SIZES = (2_000, 20_000, 200_000)


def main() -> None:
    """A row a size."""
    if CHROMIUM is None:
        raise SystemExit("needs Chromium (Debian: apt install chromium)")
    print(
        "| spans | page | written in | loaded and drawn | a redraw, median | slowest |\n|---:|---:|---:|---:|---:|---:|"
    )
    for size in SIZES:
        job = Plan(mesh=Mesh(pp=8), schedule=Schedule(micro_batch_size=1))
        work = Workload(global_batch_size=size // 30, seq_len=256)  # about 30 spans a microbatch of 8 stages
        prediction = predict("llama-3.2-1b", "1x8xh100-sxm", job, work)
        timeline = prediction.timeline(steady=False)
        start = time.process_time()
        page = page_html(page_data([timeline], prediction=prediction, plan=dump(job)))
        written = time.process_time() - start
        with tempfile.TemporaryDirectory() as folder:
            probed = page.replace("</body>", PROBE).replace("<head>", AT_ONCE, 1)
            dom, _ = shown(probed, Path(folder))
        found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
        assert found, "the page did not draw"
        probe = json.loads(found[1])
        frames = probe["frames"]
        drawn = f"{probe['loaded']:.0f} ms | {statistics.median(frames):.1f} ms | {max(frames):.1f} ms"
        print(f"| {len(timeline.spans.start_s):,} | {len(page) / 1e6:.2f} MB | {written:.2f} CPU-s | {drawn} |")


if __name__ == "__main__":
    main()
