"""Files that commands write on the side: pages, traces, timelines. Whole or not at all.

`write_text(path, text)` writes; `write_views(options, …)` writes those that `--html`, `--trace` and `--timeline` name.
Leaves out what goes to the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from gnomon.errors import InputError
from gnomon.formats.perfetto import perfetto_trace
from gnomon.prediction import Prediction
from gnomon.report.page import page_data, page_html
from gnomon.schema import dump
from gnomon.timeline import print_timeline


def write_text(path: str | Path, text: str) -> None:
    """Writes a file in UTF-8 by way of a temporary one beside it, so that a crash leaves what was there before.

    InputError if it cannot be written.
    """
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error


def write_views(
    options: argparse.Namespace, prediction: Prediction, assumed: Sequence[str] = (), notes: Sequence[str] = ()
) -> None:
    """Writes the predicted step, from rest, to the files that the options name; nothing if they name none."""
    if not (options.html or options.trace or options.timeline):
        return
    timeline = prediction.timeline(steady=False)
    if options.timeline:
        write_text(options.timeline, print_timeline(timeline))
    if options.trace:
        title = f"{prediction.model} on {prediction.cluster}"
        write_text(options.trace, json.dumps(perfetto_trace([timeline], title=title), allow_nan=False))
    if options.html:
        plan = dump(prediction.plan)
        data = page_data([timeline], prediction=prediction, plan=plan, assumed=assumed, notes=notes)
        write_text(options.html, page_html(data))
