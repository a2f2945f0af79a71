"""`evidence validate`: a table of published runs, predicted and compared; a summary, the rows, or one run in full.

`run(options)` prints and returns 0. Rows are independent, so they are spread over processes; the numbers do not depend
on how many.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from evidence.published import Refused, Row, Run, read_runs, read_table, unread_columns
from evidence.published.row import COMPOSED
from evidence.validation import Score, Summary, score, summarise, summary_text
from gnomon.cli.terminal import Progress, print_json, print_lines, say_unread
from gnomon.errors import InputError, nearest
from gnomon.prediction import predict
from gnomon.report.prediction import describe, prediction_text
from gnomon.report.tables import number, percent, wrapped
from gnomon.schema import save_text

CHUNK = 24
"""Runs sent to a process at a time: neighbours share graphs, plans and prices."""

ALONE = 100
"""Runs that are not worth a second process."""

REASONS = 12
"""Reasons for refusal shown; --json and --rows have all."""


def run(options: argparse.Namespace) -> int:
    """Read, predict, print."""
    rows, _ = read_table(Path(options.table))
    say_unread(unread_columns(Path(options.table)))
    runs, refused = read_runs(Path(options.table))
    if not runs and not refused:
        raise InputError(f"{options.table} has no rows below its header; give a table with a measured run in each")
    if options.explain is not None:
        return _explain(options.explain, runs, refused, as_json=options.json)
    if options.family is not None:
        known = sorted({r.family for r in runs} | {r.family for r in refused})
        if options.family not in known:
            asked = options.family[:40]
            raise InputError(f"no row of family {asked!r}{nearest(asked, known)}; there are {', '.join(known)}")
        runs = tuple(r for r in runs if r.family == options.family)
        refused = tuple(r for r in refused if r.family == options.family)
        rows = tuple(r for r in rows if r.family == options.family)
    results = score_all(runs, options.workers or min(8, os.cpu_count() or 1))
    scores = tuple(r for r in results if isinstance(r, Score))
    left = (*refused, *(r for r in results if isinstance(r, Refused)))
    if options.rows is not None:
        write_rows(options.rows, scores, left)
    summaries = summarise(scores, left, rows)
    if options.json:
        print_json({"schema": "gnomon.validation/1", "families": [s.to_mapping() for s in summaries]})
    else:
        print_lines(_text(summaries))
    return 0


def score_all(runs: Sequence[Run], workers: int) -> tuple[Score | Refused, ...]:
    """Every run's score or refusal, in the order given."""
    progress = Progress("predicted", len(runs))
    order = sorted(range(len(runs)), key=lambda i: (runs[i].group, str(runs[i].plan)))
    results: dict[int, Score | Refused] = {}
    for done, (index, result) in enumerate(zip(order, _scored([runs[i] for i in order], workers), strict=True), 1):
        results[index] = result
        progress.show(done)
    progress.end()
    return tuple(results[i] for i in range(len(runs)))


def _scored(runs: Sequence[Run], workers: int) -> Iterable[Score | Refused]:
    if workers == 1 or len(runs) < ALONE:
        yield from map(score, runs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_silently) as pool:
        with _interrupts_wait():
            result = pool.map(score, runs, chunksize=CHUNK)
        try:
            yield from result
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def _end_silently() -> None:
    """In a worker: ^C ends it at once and without a word; this process says what there is to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """^C is delivered afterwards; processes that are started meanwhile do not see it while they import."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def write_rows(path: str, scores: Iterable[Score], refused: Iterable[Refused]) -> None:
    """A CSV of every row: id, family, measured and predicted seconds and bytes, errors, verdict, or the reason."""
    header = (
        "id family measured_s predicted_s error without_model without_source in_band measured_bytes predicted_bytes "
        "memory_error fits chosen first_error without_source_chosen reason notes"
    )
    lines: list[Sequence[object]] = [
        (
            *(s.id, s.family, f"{s.measured_s:.6g}", f"{s.predicted_s:.6g}", f"{s.error:.4f}"),
            *(f"{s.without_model:.4f}", f"{s.without_source:.4f}", s.in_band),
            *("" if s.measured_bytes is None else s.measured_bytes, s.predicted_bytes),
            *("" if s.memory_error is None else f"{s.memory_error:.4f}", s.fits),
            *(s.chosen, f"{s.first_error:.4f}", f"{s.without_source_chosen:.4f}", "", "; ".join(s.notes)),
        )
        for s in scores
    ]
    lines += [(r.id, r.family, *[""] * 13, r.reason, "") for r in refused]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header.split())
    writer.writerows(lines)
    save_text(text.getvalue(), path)


def _text(summaries: Sequence[Summary]) -> Sequence[str]:
    last = summaries[-1] if summaries else None
    if last is None:
        return ("no rows",)
    lines = [
        *summary_text(summaries),
        "",
        *wrapped(
            "First table. rows, and those predicted; rho: rank correlation among runs of one model on as many devices; "
            "memory: error of the peak; no fit: runs that ran and are said not to fit. Spread of the measurements "
            "themselves, as distance from their mean: repeats agree in every column and note, twins in every column, "
            "releases are of one program otherwise run alike.",
            indent="",
        ),
        *wrapped(
            "Second table: errors of the step time. bias: median signed error, above 0 too slow; model, source: with "
            "the row's model or source held out of every fit; band: rows inside the 80% interval with their source "
            "held out; width: of that interval.",
            indent="",
        ),
        *wrapped(
            "Rows leave things open and are read twice. The fitted reading has seen how the run came out: thresholds "
            "chosen on step times, settings changed until the run fits (`python -m evidence constants` lists them). "
            "Rates are fitted to it; memory and the first five columns of errors are of it. The first reading has seen "
            "nothing that was measured: model, source, band and no fit are of it. The last table has both, for "
            "families in which they differ. All in %.",
            indent="",
        ),
        f"verdict 'does not fit' on runs that ran: {last.false_out_of_memory} of {last.predicted}",
    ]
    if any(summary.family == COMPOSED for summary in summaries) and len(summaries) > 1:
        lines += wrapped(f"{COMPOSED}: times that a simulator put together, not measured; not in 'all'", indent="")
    if last.refused:
        refused = last.rows - last.predicted
        lines += ["", f"refused: {refused:,} row{'s' * (refused != 1)}"]
        for reason, count in last.refused[:REASONS]:
            lines += wrapped(reason, bullet=f"{count:>4}  ")
        if len(last.refused) > REASONS:
            lines.append(f"  … and {len(last.refused) - REASONS} more reasons; --rows FILE lists every row")
    return lines


def _explain(wanted: str, runs: Sequence[Run], refused: Sequence[Refused], *, as_json: bool) -> int:
    """One row: why it is refused, or its prediction beside what was measured."""
    gone = next((r for r in refused if r.id == wanted), None)
    run = next((r for r in runs if r.id == wanted), None)
    if gone is None and run is None:
        known = [r.id for r in runs] + [r.id for r in refused]
        hint = nearest(wanted[:60], known) or (f"; they are named as in {known[0]!r}" if known else "")
        raise InputError(f"no row {wanted[:60]!r}{hint}; --rows FILE writes every row's id")
    result = score(run) if run is not None else gone
    if isinstance(result, Refused):
        if as_json:
            print_json({"id": wanted, "refused": result.reason})
        else:
            print_lines(wrapped(result.reason, indent="", bullet="refused: "))
        return 0
    assert run is not None and isinstance(result, Score)
    prediction = predict(run.graph, run.cluster, run.plan, run.workload, run.stack)
    if as_json:
        measured = {"step_s": list(run.readings_s), "memory_bytes": run.memory_bytes, "covers": run.covers}
        print_json({"id": wanted, "measured": measured, "error": result.error, "prediction": prediction.to_mapping()})
    else:
        print_lines((*_beside(run, result), "", *prediction_text(prediction, assumed=run.notes)))
    return 0


def _beside(made: Run, result: Score) -> Sequence[str]:
    row: Row = made.row
    lines = [f"{made.id}: {row.model}, {row.framework} on {row.num_devices} {row.device}"]
    lines += wrapped(row.source or "source not given")
    lines += wrapped(describe(made.plan, made.workload))
    lines += ["", f"{'':<12}{'measured':>12}{'predicted':>12}{'error %':>10}"]
    lines.append(
        f"{'step s':<12}{number(result.measured_s, 4):>12}{number(result.predicted_s, 4):>12}"
        f"{percent(result.error):>10}"
    )
    if result.measured_bytes is not None:
        lines.append(
            f"{'memory GiB':<12}{result.measured_bytes / 2**30:>12.1f}{result.predicted_bytes / 2**30:>12.1f}"
            f"{percent(result.memory_error):>10}"
        )
    return lines
