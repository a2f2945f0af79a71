"""The ladder of `gnomon fit` as text for people and as values for JSON.

`heading_text`, `alone_text` and `combined_text` are its parts in order, so that each can be shown as soon as it is
known; `fit_mapping` has all of it. Leaves out the full predictions (`report.prediction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gnomon.prediction import Prediction, host_memory
from gnomon.report.prediction import describe
from gnomon.report.tables import Column, number, table_of_plans, wrapped
from gnomon.request.fit import Ladder
from gnomon.search.fit.ladder import Fitting, Rung, cost, freed_bytes, helps
from gnomon.search.fit.largest import Most
from gnomon.search.fit.options import ADAPTED, OPTIONS
from gnomon.search.fit.why import unhelpful, without_room
from gnomon.units import show_bytes, show_seconds

GIB = 2**30

COLUMNS = (
    Column(name="frees GiB"),
    Column(name="peak GiB"),
    Column(name="step"),
    Column(name="%"),
    Column(name="", align="left"),
)


def heading_text(fitting: Fitting) -> tuple[str, ...]:
    """The plan as it is, whether it fits, and by how much not."""
    base, limit = fitting.base, _limit(fitting)
    over = base.tightest.peak_bytes - limit
    lines = [f"{base.model} on {base.cluster}", *wrapped(describe(base.plan, base.workload)), ""]
    lines += wrapped(base.verdict, indent="")
    if over > 0:
        lines += wrapped(f"{_gib(over)} GiB too much; a step takes {show_seconds(base.step_s)} by its prediction")
    elif fitting.has_room(base):
        lines += wrapped(
            f"it fits with {_gib(-over)} GiB to spare; if it ran out all the same, --memory says what it may fill, as "
            f"in --memory {max(1, int(base.tightest.peak_bytes / GIB * 0.9))}GiB"
        )
    if fitting.limit_bytes is not None:
        lines += wrapped(f"--memory: {show_bytes(fitting.limit_bytes)} of a device may be filled")
    return tuple(lines)


def alone_text(fitting: Fitting, single_changes: Sequence[Rung]) -> tuple[str, ...]:
    """Each change by itself; then what does not help, and why."""
    base = fitting.base
    able = [rung for rung in single_changes if helps(base, rung)]
    rows = [(rung.what, *_numbers(fitting, rung)) for rung in able]
    columns = (Column(name="one change", align="left"), *COLUMNS)
    lines = ["", *(table_of_plans(columns, rows) if rows else ("no single change frees memory",))]
    lines += wrapped("%: how much longer a token takes than in the plan as it is", indent="") if rows else ()
    no = [(rung.what, unhelpful(base, rung, fitting.options)) for rung in single_changes if not helps(base, rung)]
    no += list(without_room(base.plan, single_changes, fitting.options))
    if no:
        lines += ["", "what does not help"]
        lines += [line for what, why in no for line in wrapped(f"{what}: {why}", bullet="- ")]
    return tuple(lines)


def combined_text(fitting: Fitting, ladder: Ladder, *, chosen: Rung | None = None) -> tuple[str, ...]:
    """Changes that fit together, and the smaller jobs. chosen: marked with a star."""
    lines: list[str] = []
    if ladder.combined:
        rows = [
            (f"{i}{'*' if rung is chosen else ''}  {rung.what}", *_numbers(fitting, rung))
            for i, rung in enumerate(ladder.combined, 1)
        ]
        columns = (Column(name="what fits, fewest changes first", align="left"), *COLUMNS)
        lines += ["", *table_of_plans(columns, rows)]
        if fitting.terms is not None:
            lines += ["in the job's own terms"]
            lines += [
                line
                for i, rung in enumerate(ladder.combined, 1)
                for line in wrapped(f"{i}: {'; '.join(fitting.lines(rung))}", bullet="  ")
            ]
        else:
            lines += wrapped("plans that differ in more (gnomon plan) may be faster", indent="")
        if chosen is not None:
            first = "fastest" if chosen is ladder.fastest else "chosen"
            lines += wrapped(f"* {first}: {_host(chosen.prediction)}results: {exactness(chosen)}", indent="")
    elif not ladder.fits:
        lines += ["", "no combination of these changes fits: use more devices, or a smaller model"]
    if not ladder.complete:
        lines += wrapped("the budget ended before all combinations were looked at (--budget)", indent="")
    if smaller := [rung for rung in ladder.smaller if rung.prediction is not None]:
        rows = [(rung.what, *_numbers(fitting, rung)) for rung in smaller]
        lines += ["", *table_of_plans((Column(name="another job", align="left"), *COLUMNS), rows)]
        lines += [
            line
            for rung in smaller
            if set(rung.options) <= ADAPTED and (way_lines := fitting.lines(rung))
            for line in wrapped(f"{rung.what}: {'; '.join(way_lines)}", bullet="  ")
        ]
        lines += [
            line
            for rung in smaller
            if not helps(fitting.base, rung)
            for line in wrapped(f"{rung.what} does not help: {_unchanged(fitting.base, rung)}", bullet="- ")
        ]
    return tuple(lines)


def fit_mapping(fitting: Fitting, ladder: Ladder, *, chosen: Rung | None, assumed: Sequence[str]) -> dict[str, Any]:
    """Plain values for JSON, as `gnomon.fit/1`."""
    base = ladder.base
    return {
        "schema": "gnomon.fit/1",
        "model": base.model,
        "cluster": base.cluster,
        "plan": describe(base.plan, base.workload),
        "fits": ladder.fits,
        "verdict": base.verdict,
        "step_s": base.step_s,
        "peak_bytes": base.tightest.peak_bytes,
        "limit_bytes": _limit(fitting),
        "alone": [{**_rung(base, rung), "lines": list(fitting.lines(rung))} for rung in ladder.single_changes],
        "no_room_for": [{"option": name, "why": why} for name, why in without_room(base.plan, ladder.single_changes)],
        "combined": [{**_rung(base, rung), "lines": list(fitting.lines(rung))} for rung in ladder.combined],
        "chosen": None if chosen is None else list(ladder.combined).index(chosen),
        "smaller_jobs": [_rung(base, rung) for rung in ladder.smaller],
        "predictions": ladder.predictions,
        "complete": ladder.complete,
        "assumptions": [*assumed, *base.assumptions],
    }


def exactness(rung: Rung) -> str:
    """How results with a rung compare with those without it: that of its least exact option."""
    order = ("bitwise", "up to the order of sums", "statistical")
    words = {
        "bitwise": "the same to the bit",
        "up to the order of sums": "the same up to the order of sums",
        "statistical": "another mathematics, alike in distribution",
    }
    # The least exact of what is combined is how exact the whole is.
    used = [option.exactness for option in OPTIONS if option.name in rung.options]
    return words[max(used, key=order.index, default="bitwise")]


def _rung(base: Prediction, rung: Rung) -> dict[str, Any]:
    prediction = rung.prediction
    why = rung.why_not
    if prediction is not None and not helps(base, rung):
        why = unhelpful(base, rung)
    return {
        "options": list(rung.options),
        "changes": list(rung.changes),
        "fits": rung.fits,
        "freed_bytes": None if prediction is None else freed_bytes(base, rung),
        "peak_bytes": None if prediction is None else rung.peak_bytes,
        "step_s": None if prediction is None else rung.step_s,
        "time_per_token": None if prediction is None else 1 + cost(base, rung),
        "verdict": "" if prediction is None else prediction.verdict,
        "host_bytes": None if prediction is None else host_memory(prediction).bytes,
        "results": exactness(rung),
        "why_not": why,
    }


def _numbers(fitting: Fitting, rung: Rung) -> tuple[str, ...]:
    over = rung.peak_bytes - _limit(fitting)
    if rung.fits:
        word = "fits"
    elif rung.why_not:
        word = rung.why_not
    else:
        word = f"{_gib(over)} over" if over > 0 else "may not fit"
    freed = freed_bytes(fitting.base, rung) / GIB
    change = f"{cost(fitting.base, rung) * 100:+.1f}"
    return f"{freed:.1f}", _gib(rung.peak_bytes), show_seconds(rung.step_s), change, word


def _host(prediction: Prediction | None) -> str:
    if prediction is None:
        return ""
    host = host_memory(prediction)
    if not host.bytes:
        return ""
    short = "" if host.fits else f" (its devices' share of the node's: {_gib(host.limit_bytes or 0)})"
    return f"{_gib(host.bytes)} GiB of a node's host memory{short}; "


def _unchanged(base: Prediction, rung: Rung) -> str:
    # The usual mistake, so it has a sentence of its own.
    if rung.options == ("global_batch",):
        return "memory is that of one microbatch, whatever their number"
    return unhelpful(base, rung)


def _limit(fitting: Fitting) -> int:
    # Of the tightest rank: with unequal devices the one that runs out first.
    limit = fitting.base.tightest.limit_bytes
    return limit if fitting.limit_bytes is None else min(limit, fitting.limit_bytes)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def largest_text(fitting: Fitting, what: str, sizes: Sequence[Most]) -> tuple[str, ...]:
    """The largest size as the plan is, and under each change."""
    unit = "sequences a microbatch" if what == "batch" else "tokens a sequence"
    columns = (
        Column(name=f"largest {what}", align="left"),
        Column(name=unit),
        Column(name="peak GiB"),
        Column(name="step"),
        Column(name="tokens/s/device"),
    )
    base = [case for case in sizes if not case.added]
    lines = ["", *table_of_plans(columns, [_size(case) for case in base])]
    if together := [case for case in sizes if case.added]:
        columns = (replace(columns[0], name="added one by one"), *columns[1:])
        lines += ["", *table_of_plans(columns, [_size(case) for case in together])]
    return tuple(lines)


def largest_mapping(fitting: Fitting, what: str, sizes: Sequence[Most], *, assumed: Sequence[str]) -> dict[str, Any]:
    """Plain values for JSON, as `gnomon.fit.largest/1`."""
    return {
        "schema": "gnomon.fit.largest/1",
        "model": fitting.base.model,
        "cluster": fitting.base.cluster,
        "what": what,
        "plan": describe(fitting.base.plan, fitting.base.workload),
        "limit_bytes": _limit(fitting),
        "sizes": [
            {"changes": list(case.changes), "together": case.added, "size": case.size, **_rung(fitting.base, case.rung)}
            for case in sizes
        ],
        "predictions": fitting.count,
        "complete": not fitting.incomplete,
        "assumptions": [*assumed, *fitting.base.assumptions],
    }


def _size(case: Most) -> tuple[str, ...]:
    prediction = case.rung.prediction
    if not case.size or prediction is None:
        return case.what, "none", "-" if prediction is None else _gib(case.rung.peak_bytes), "-", "-"
    tokens = number(prediction.tokens_per_s_per_device, 4)
    return case.what, f"{case.size:,}", _gib(case.rung.peak_bytes), show_seconds(prediction.step_s), tokens
