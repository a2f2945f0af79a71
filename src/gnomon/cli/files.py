"""Views of a prediction in files: what `--html`, `--trace` and `--timeline` of `gnomon predict` write.

Leaves out what goes to the terminal, and measured steps (`gnomon run`, `gnomon report`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from gnomon.cli.options.predict import PredictOptions
from gnomon.formats.perfetto import perfetto_trace
from gnomon.prediction import Prediction
from gnomon.report.page import page_data, page_html
from gnomon.schema import dump, save_text
from gnomon.timeline.text import print_timeline


def write_views(
    options: PredictOptions, prediction: Prediction, assumed: Sequence[str] = (), notes: Sequence[str] = ()
) -> None:
    """Writes the predicted step, from rest, to the files that the options name."""
    timeline = prediction.timeline(steady=False)
    if options.timeline:
        save_text(print_timeline(timeline), options.timeline)
    if options.trace:
        title = f"{prediction.model} on {prediction.cluster}"
        save_text(json.dumps(perfetto_trace([timeline], title=title), allow_nan=False), options.trace)
    if options.html:
        plan = dump(prediction.plan)
        data = page_data([timeline], prediction=prediction, plan=plan, assumed=assumed, notes=notes)
        save_text(page_html(data), options.html)
