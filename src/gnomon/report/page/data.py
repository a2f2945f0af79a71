"""What the page shows, as plain values: the answer, timelines, memory, breakdown, difference, assumptions, plan.

`page_data(timelines, …)` returns a mapping for JSON (`gnomon.page/1`) that the template prints and its script draws;
nothing is computed later than here. Texts are for people; numbers stand beside them in SI units. Leaves out layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from gnomon.errors import InputError
from gnomon.prediction import Prediction
from gnomon.prediction.breakdown import AXES
from gnomon.report.difference import change_name, compare
from gnomon.report.page.spans import span_columns, window_s
from gnomon.report.page.where import alternative_rows, communication_rows, layout_rows
from gnomon.report.prediction import WORDS, between, describe
from gnomon.report.tables import number, percent
from gnomon.timeline import NONE, ROLES, Share, Timeline, breakdown, peaks
from gnomon.timeline.difference import Difference
from gnomon.timeline.queued import share_without_a_core
from gnomon.units import show_bytes, show_seconds

MAX_SPANS = 40_000
"""Spans in a page, of both timelines together; longer ones are cut."""
MAX_JSON_BYTES = 1_700_000
"""Of the spans as JSON, so that a page stays below 2 MB."""
MAX_CHANGES = 12
"""Rows of the table of differences."""

UNKNOWN_WAIT = "waiting (for what was not recorded)"
"""Idle time of a timeline whose spans name no causes, as measured ones may not."""

Mapping = dict[str, Any]


def page_data(
    timelines: Sequence[Timeline],
    *,
    prediction: Prediction | None = None,
    plan: str = "",
    assumed: Sequence[str] = (),
    notes: Sequence[str] = (),
    title: str = "",
    others: Sequence[Prediction] = (),
) -> Mapping:
    """The content of a page.

    timelines: the predicted one, the measured one, or both in this order. prediction: what the predicted timeline is
    of; without it the page cannot say MFU, memory limits or the model. plan: TOML as shown. assumed, notes: lines
    before those of the prediction. others: predictions of the plan's alternatives. InputError for no timeline, or more
    than two.
    """
    if not 1 <= len(timelines) <= 2 or [t.clock for t in timelines] == ["measured", "predicted"]:
        raise InputError("a page shows a predicted timeline, a measured one, or both in this order")
    if len(timelines) == 2 and timelines[0].clock == timelines[1].clock:
        names = tuple(f"{t.clock} {i + 1}" for i, t in enumerate(timelines))
    else:
        names = tuple(t.clock for t in timelines)
    heading = title or (f"{prediction.model} on {prediction.cluster}" if prediction else "Timeline of a step")
    assumption_lines = (
        *assumed,
        *(prediction.assumptions if prediction else ()),
        *(a for t in timelines for a in t.assumptions),
    )
    return {
        "schema": "gnomon.page/1",
        "title": heading,
        "plan_line": describe(prediction.plan, prediction.workload) if prediction else "",
        "sentence": _sentence(timelines, prediction),
        "answer": _answer(timelines, prediction),
        "fits": prediction.fits if prediction else None,
        "verdict": prediction.verdict if prediction else "",
        "timelines": _timelines(timelines, names),
        "limits": _limits(timelines[0], prediction),
        "breakdown": _breakdown(timelines, names, prediction),
        "difference": _difference(timelines, names),
        "assumptions": list(dict.fromkeys(assumption_lines)),
        "notes": list(dict.fromkeys((*notes, *(prediction.notes if prediction else ())))),
        "communication": list(communication_rows(prediction)) if prediction else [],
        "layout": list(layout_rows(prediction)[0]) if prediction else [],
        "nodes_left": layout_rows(prediction)[1] if prediction else 0,
        "alternatives": list(alternative_rows(prediction, others)) if prediction and others else [],
        "plan": plan,
        "words": WORDS,
        "roles": list(ROLES),
    }


def _step_s(timeline: Timeline) -> float:
    """Seconds that a step adds to a long run, if the timeline knows, else of the step shown."""
    return timeline.step_s if timeline.period_s is None else timeline.period_s


def _sentence(timelines: Sequence[Timeline], prediction: Prediction | None) -> str:
    if prediction is None:
        how = "is predicted to take" if timelines[0].clock == "predicted" else "was measured at"
        text = f"A step {how} {show_seconds(_step_s(timelines[0]))}."
    else:
        most = max(prediction.breakdown, key=lambda part: prediction.breakdown[part])
        share = percent(prediction.breakdown[most] / prediction.step_s, 0)
        rank = prediction.tightest
        fits = {"fits": "It fits", "may not fit": "It may not fit", "does not fit": "It does not fit"}[rank.verdict]
        text = (
            f"A step is predicted to take {show_seconds(prediction.step_s)}, of which {share} % is "
            f"{WORDS.get(most, most.lower())}. {fits} in memory: {show_bytes(rank.peak_bytes)} of "
            f"{show_bytes(rank.limit_bytes)} on the fullest rank."
        )
    if len(timelines) == 2:
        before = prediction.step_s if prediction else _step_s(timelines[0])
        core_share = share_without_a_core(timelines[1].assumptions)
        if core_share:
            text = f"Other processes had the cores for {percent(core_share, 0)} % of the measured step. {text}"
        text += (
            f" It was measured at {show_seconds(_step_s(timelines[1]))}, {_change_text(before, _step_s(timelines[1]))}."
        )
    return text


def _change_text(before: float, after: float) -> str:
    if not before or after == before:
        return "as predicted"
    return f"{percent(abs(after / before - 1))} % {'longer' if after > before else 'shorter'} than predicted"


def _answer(timelines: Sequence[Timeline], prediction: Prediction | None) -> list[Mapping]:
    """The figures at the top of the page: what, value with unit for people, the number itself, the band and what was
    measured where there is one."""
    measured = timelines[-1] if timelines[-1].clock == "measured" else None
    step = prediction.step_s if prediction else _step_s(timelines[0])
    out = [_figure("step", step, show_seconds(step), _step_s(measured) if measured else None, show_seconds)]
    if prediction is None:
        return out
    band = prediction.band
    share = f", {percent(band.coverage, 0)} %"
    out[0] = {**out[0], "band_text": between(band.low_s, band.high_s) + share}
    # All rates are work over time and the work is the same: measured ones follow from the step.
    speed = step / _step_s(measured) if measured and _step_s(measured) else None
    devices = prediction.plan.num_devices
    rates: tuple[tuple[str, float, Callable[[float], str]], ...] = (
        (f"{prediction.counted}/s/device", prediction.tokens_per_s_per_device, lambda value: number(value, 4)),
        (f"{prediction.counted}/s", prediction.tokens_per_s_per_device * devices, lambda value: number(value, 4)),
        ("MFU", prediction.mfu, lambda value: f"{percent(value)} %"),
        ("HFU", prediction.hfu, lambda value: f"{percent(value)} %"),
    )
    for name, value, show in rates:
        out.append(_figure(name, value, show(value), None if speed is None else value * speed, show))
    rank = prediction.tightest
    filled = f"{show_bytes(rank.peak_bytes)} of {show_bytes(rank.limit_bytes)}"
    band_text = f"{show_bytes(band.low_bytes)} to {show_bytes(band.high_bytes)}{share}"
    out.append({**_figure("peak memory", rank.peak_bytes, filled, None, str), "band_text": band_text})
    out.append(_figure("devices", devices, f"{devices:,}", None, str))
    return out


def _figure(name: str, value: float, text: str, measured: float | None, show: Callable[[float], str]) -> Mapping:
    return {
        "name": name,
        "value": value,
        "text": text,
        "band_text": "",
        "measured": measured,
        "measured_text": "" if measured is None else show(measured),
    }


def _timelines(timelines: Sequence[Timeline], names: Sequence[str]) -> list[Mapping]:
    """Every timeline with its tables, cut to what a page can hold, over the same window."""
    limit = MAX_SPANS
    while True:
        until = window_s(timelines, limit)
        columns = [span_columns(timeline, until) for timeline in timelines]
        # Size is known only once it is written: spans have names of different lengths.
        if limit < 100 or len(json.dumps(columns, separators=(",", ":"))) <= MAX_JSON_BYTES:
            break
        limit //= 2
    return [
        {
            "name": name,
            "clock": timeline.clock,
            "step_s": timeline.step_s,
            "repeats": timeline.repeats,
            "workers": [{"name": w.name, "count": w.count} for w in timeline.workers],
            "streams": list(timeline.streams),
            "kinds": list(timeline.kinds),
            "paths": list(timeline.paths),
            "buffers": list(timeline.buffers),
            "spans": part,
            "peaks": _peaks(timeline),
        }
        for name, timeline, part in zip(names, timelines, columns, strict=True)
    ]


def _peaks(timeline: Timeline) -> list[Mapping]:
    if timeline.memory is None:
        return []
    return [
        {
            "worker": peak.worker,
            "bytes": peak.bytes,
            "moment_s": peak.moment_s,
            "action": peak.action,
            "by_buffer": [[name, size] for name, size in peak.by_buffer if size],
        }
        for peak in peaks(timeline)
    ]


def _limits(timeline: Timeline, prediction: Prediction | None) -> Mapping:
    """Worker -> bytes of its device, predicted peak and its moment, of the fullest ranks of its class."""
    if prediction is None:
        return {}
    out: Mapping = {}
    # Rising, so that the fullest of several classes under one name is what stays.
    for rank in sorted(prediction.memory, key=lambda rank: rank.peak_bytes):
        name = timeline.workers[rank.rank_class].name
        out[name] = {"limit_bytes": rank.limit_bytes, "peak_bytes": rank.peak_bytes, "peak_at": rank.peak_at}
    return out


def _breakdown(timelines: Sequence[Timeline], names: Sequence[str], prediction: Prediction | None) -> Mapping:
    """Parts of the step: of the prediction in its steady state, and of every worker of the timelines as shown."""
    steady = [
        {"part": WORDS.get(part, part.lower()), "key": part, "seconds": seconds}
        for part, seconds in sorted((prediction.breakdown if prediction else {}).items(), key=lambda item: -item[1])
    ]
    workers: dict[str, list[Mapping]] = {}
    for name, timeline in zip(names, timelines, strict=True):
        if "compute" not in timeline.streams:
            continue
        shares = breakdown(timeline)
        for worker in shares.workers:
            parts: dict[str, Mapping] = {}
            for share in shares.of(worker):
                key, text = _part(share, timeline)
                entry = parts.setdefault(text, {"part": text, "key": key, "seconds": 0.0})
                entry["seconds"] += share.seconds
            ordered = sorted(parts.values(), key=lambda entry: -entry["seconds"])
            workers.setdefault(worker, []).append({"timeline": name, "step_s": shares.step_s, "parts": ordered})
    return {
        "steady": steady,
        "step_s": prediction.step_s if prediction else None,
        "window": "period" if timelines[0].repeats else "makespan",
        "workers": [{"worker": worker, "of": of} for worker, of in workers.items()],
    }


def _part(share: Share, timeline: Timeline) -> tuple[str, str]:
    """(key for the colour, what people call it) of a share of a worker's step."""
    if share.busy:
        return share.action, WORDS.get(share.action, share.action.lower())
    if (timeline.spans.cause == NONE).all():
        return "idle", UNKNOWN_WAIT
    if share.part == "communication":
        axis = AXES.get(share.action, share.action.lower())
        return "communication", f"waiting for {axis} communication"
    return share.part, {"host": "waiting for the host", "copy": "waiting for copies"}.get(
        share.part, WORDS.get(share.part, share.part)
    )


def _difference(timelines: Sequence[Timeline], names: Sequence[str]) -> Mapping | None:
    """The places where two timelines differ, as `gnomon compare` says them, largest first; None for one timeline.
    `summary` holds what is most wrong, or why they cannot be compared."""
    if len(timelines) < 2:
        return None
    try:
        compared = compare(timelines[0], timelines[1], (names[0], names[1]))
    except InputError as error:
        return {"summary": str(error), "changes": [], "memory": [], "before_s": None, "after_s": None, "left": 0}
    difference = compared.difference
    changes = _changes(timelines, difference)
    memory = [
        {"worker": m.worker, "buffer": m.buffer, "before_bytes": m.before_bytes, "after_bytes": m.after_bytes}
        for m in difference.memory[:MAX_CHANGES]
    ]
    return {
        "summary": f"Largest wrong price: {compared.sentence}.",
        "changes": changes[:MAX_CHANGES],
        "memory": memory,
        "before_s": difference.before_s,
        "after_s": difference.after_s,
        "left": max(0, len(changes) - MAX_CHANGES),
    }


def _changes(timelines: Sequence[Timeline], difference: Difference) -> list[Mapping]:
    """Changes by worker and action, largest first. Where one side does not know what it waited for, all waiting of a
    worker is one change."""
    unknown = any((t.spans.cause == NONE).all() for t in timelines)
    rows: dict[tuple[str, str], list[float]] = {}
    for change in difference.changes:
        what = "waiting" if unknown and not change.busy else change_name(change)
        if change.busy and change.action in WORDS:
            what += f" ({WORDS[change.action]})"
        both = rows.setdefault((change.worker, what), [0.0, 0.0])
        both[0] += change.before_s
        both[1] += change.after_s
    ordered = sorted(rows.items(), key=lambda row: -abs(row[1][1] - row[1][0]))
    return [
        {"worker": worker, "what": what, "before_s": before, "after_s": after}
        for (worker, what), (before, after) in ordered
    ]
