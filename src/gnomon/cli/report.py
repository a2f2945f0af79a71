"""`gnomon report`: one page of a predicted timeline, a measured one, or both, and of the plan behind them.

`run(options)` writes the page, and a trace if asked, and returns 0. With `--plan` the plan is predicted again, which
gives the page its speed, MFU and memory limits. Leaves out running anything.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from gnomon.cli.options.tools import ReportOptions
from gnomon.cli.own_runs import accuracy
from gnomon.cli.request import Request, request_of_plan
from gnomon.cli.terminal import print_lines
from gnomon.errors import GnomonError, InputError
from gnomon.formats.perfetto import perfetto_trace
from gnomon.plans import PlanFile, is_plan_file, load_plan
from gnomon.prediction import Prediction, predict
from gnomon.report.page import page_data, page_html
from gnomon.report.page.html import title_of
from gnomon.report.tables import wrapped
from gnomon.schema import header_of, read_file, save_text
from gnomon.timeline import Timeline
from gnomon.timeline.text import parse_timeline

DIFFERS = 0.001
"""Share by which a predicted timeline may differ from its plan's prediction before the page says so."""


def run(options: ReportOptions) -> int:
    """Writes the page of the report."""
    paths = [path for path in (options.before, options.after) if path is not None]
    replays = [_replay(path) for path in options.replays]
    timelines = [read_timeline(path) for path in paths]
    prediction, request, plan = _plan(options.plan)
    for timeline, path in zip(timelines, paths, strict=True):
        _check_ranks(timeline, path, prediction, options.plan)
    doubts = _doubts(timelines, prediction)
    notes = (*(request.notes if request else ()), *doubts)
    notes += accuracy(request.cluster, request.stack) if request else ()
    data = page_data(
        timelines,
        prediction=prediction,
        plan=plan,
        assumed=request.assumed if request else (),
        notes=notes,
        title=options.title or "",
        others=() if request is None else _alternatives(str(options.plan), request),
    )
    save_text(page_html(data, replays), options.output)
    written = [options.output]
    if options.trace:
        save_text(json.dumps(perfetto_trace(timelines, title=data["title"]), allow_nan=False), options.trace)
        written.append(options.trace)
    lines = [line for text in (data["sentence"], *doubts) for line in wrapped(text, indent="")]
    print_lines([*lines, *(f"wrote {path}" for path in written)])
    return 0


def _replay(path: str) -> str:
    """The page of a replay. InputError for another file."""
    try:
        text = read_file(path).decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    if title_of(text) is None:
        raise InputError(
            f"{path!r} is no page of a replay; gnomon predict --serve --page FILE and gnomon fleet replay -o FILE make "
            f"one"
        )
    return text


def read_timeline(path: str) -> Timeline:
    """The timeline in a file. InputError if it cannot be read, FormatError with the line if it is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise InputError(f"cannot read {path!r}: {reason}") from error
    return parse_timeline(text, path)


def predicted_plan(path: str) -> Prediction:
    """The prediction of a plan file."""
    prediction, _, _ = _plan(path)
    assert prediction is not None
    return prediction


def _plan(path: str | None) -> tuple[Prediction | None, Request | None, str]:
    """(prediction, what was asked, text) of a plan file; of a bare plan only the text."""
    if path is None:
        return None, None, ""
    header = header_of(read_file(path), source=path)
    text = Path(path).read_text(encoding="utf-8") if is_plan_file(path) else ""
    if not text and not header.startswith("gnomon.plan/"):
        raise InputError(f"{path!r} is no plan file: its header is {header or 'missing'!r}, not 'gnomon.planfile/1'")
    if not text:
        raise InputError(
            f"{path!r} is a plan without its model and machines; give a plan file (gnomon.planfile/1), "
            f"or `gnomon predict MODEL --on CLUSTER --plan {path} --html FILE`"
        )
    request = request_of_plan(path)
    return predict(request.graph, request.cluster, request.plan, request.workload, request.stack), request, text


def _alternatives(path: str, request: Request) -> tuple[Prediction, ...]:
    """Predictions of the plans that a plan file names next to its own; those that no longer can run are left out."""
    file = load_plan(path)
    assert isinstance(file, PlanFile)
    found = []
    for plan in (*file.runners_up, *file.too_large):
        with suppress(GnomonError):
            found.append(predict(request.graph, request.cluster, plan, request.workload, request.stack))
    return tuple(found)


def _check_ranks(timeline: Timeline, path: str, prediction: Prediction | None, plan: str | None) -> None:
    """InputError for a timeline whose workers are not those of the plan."""
    if prediction is None:
        return
    present, needed_ranks = (
        {worker.name: worker.count for worker in side.workers} for side in (timeline, prediction.timeline(steady=False))
    )
    if present != needed_ranks:
        a, b = (", ".join(f"{name} ({count})" for name, count in counts.items()) for counts in (present, needed_ranks))
        raise InputError(
            f"{path!r} is not of the plan in {plan!r}: it has workers {a}, the plan {b} (ranks of each); give the "
            f"plan that it was made by, or leave --plan out"
        )


def _doubts(timelines: list[Timeline], prediction: Prediction | None) -> tuple[str, ...]:
    """What a reader must know where the plan and the predicted timeline are not of one prediction."""
    first = timelines[0]
    if prediction is None or first.clock != "predicted":
        return ()
    now = prediction.step_s if first.repeats or first.period_s is not None else prediction.makespan_s
    then = first.step_s if first.period_s is None else first.period_s
    if abs(now - then) <= DIFFERS * now:
        return ()
    return (
        f"the predicted timeline is not of this plan as it is predicted now: its step takes {then:.4g} s, the plan's "
        f"{now:.4g} s; figures above are the plan's, the timeline is the file's",
    )
