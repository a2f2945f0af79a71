"""Plans for a batch of several lengths: text, and values for JSON.

Leaves out the search (`search.questions.lengths`) and the full prediction (`report.prediction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnomon import schema
from gnomon.plans import Plan
from gnomon.report.planning import links_text, short_plan
from gnomon.report.prediction import between, describe
from gnomon.report.tables import Column, gib, number, percent, table_of_plans, wrapped
from gnomon.search.questions.lengths import Fastest, Lengths
from gnomon.units import show_bytes, show_seconds


def lengths_text(answer: Lengths, *, methods: bool, assumed: Sequence[str], notes: Sequence[str]) -> tuple[str, ...]:
    """Lines of at most 80 columns. methods: whether any was tried."""
    best = answer.best
    pricing, band = best.pricing, best.band
    step_text = f"{show_seconds(best.step_s):>12}  ({between(band.low_s, band.high_s)}, {percent(band.coverage, 0)} %)"
    lines = [
        f"{pricing.graph.name} on {pricing.cluster.name}",
        *wrapped(describe(best.plan, best.workload)),
        *(line for entry in _params(best.plan) for line in wrapped(entry)),
        *wrapped(links_text(best.plan, pricing.cluster)),
        "",
        f"{'step':<16}{step_text}",
        f"{f'{best.counted}/s/device':<16}{number(best.tokens_per_s_per_device, 4):>12}",
        f"{'MFU':<16}{f'{percent(best.mfu)} %':>12}",
        "",
        *wrapped(best.verdict, indent=""),
        *wrapped(f"allowed: {show_bytes(answer.limit_bytes)} a device (--memory changes it)", indent=""),
        "",
        *_ways(answer),
        "",
        *wrapped(_searched(answer), indent=""),
    ]
    if not methods:
        lines += wrapped("--methods chunkflow,skrull tries methods that are made for such batches", indent="")
    for title, entries in (("assumed", (*assumed, *best.assumptions)), ("notes", (*best.notes, *notes))):
        if entries:
            lines += ["", title, *(line for entry in dict.fromkeys(entries) for line in wrapped(entry, bullet="- "))]
    return tuple(lines)


def lengths_mapping(answer: Lengths) -> dict[str, Any]:
    """Plain values for JSON, as `gnomon.lengths/1`."""
    return {
        "schema": "gnomon.lengths/1",
        "limit_bytes": answer.limit_bytes,
        "ways": [
            {
                "method": way.method,
                "plan": None if way.prediction is None else schema.to_mapping(way.prediction.plan),
                "prediction": None if way.prediction is None else way.prediction.to_mapping(),
                "smallest_peak_bytes": None if way.smallest is None else way.smallest.tightest.peak_bytes,
                "why": way.why,
            }
            for way in answer.ways
        ],
        "searches": answer.stand_ins,
        "covered": answer.covered,
        "predicted": answer.predicted,
        "complete": answer.complete,
    }


def _params(plan: Plan) -> list[str]:
    """One line for each pass with parameters, as in `chunkflow: chunk_size 8192, keep 4`."""
    return [
        f"{method.name}: {', '.join(f'{name} {value}' for name, value in method.params)}"
        for method in plan.schedule.passes
        if method.params
    ]


def _ways(answer: Lengths) -> tuple[str, ...]:
    """The fastest plan of each way, and why one has none."""
    best = answer.best.step_s
    columns = (
        Column(name="fastest plan", align="left"),
        Column(name="step"),
        Column(name="loses %"),
        Column(name="GiB"),
    )
    rows, without = [], list[str]()
    for way in answer.ways:
        name = f"with {way.method}" if way.method else "without a method"
        if way.prediction is None:
            without += wrapped(f"{name}: {_why(way, answer)}", indent="")
            continue
        loses = percent(way.prediction.step_s / best - 1) if way.prediction is not answer.best else ""
        peak = gib(way.prediction.tightest.peak_bytes)
        plan = "; ".join((short_plan(way.prediction.plan), *_params(way.prediction.plan)))
        rows.append((f"{name}: {plan}", show_seconds(way.prediction.step_s), loses, peak))
    return (*table_of_plans(columns, rows), *without)


def _why(way: Fastest, answer: Lengths) -> str:
    if way.smallest is None:
        return f"no plan can run: {way.why}" if way.why else "not tried, the budget was spent"
    peak = show_bytes(way.smallest.tightest.peak_bytes)
    return f"no plan was found that fits; the smallest takes {peak} of {show_bytes(answer.limit_bytes)}"


def _searched(answer: Lengths) -> str:
    searched_text = (
        f"{answer.stand_ins} searches of batches of one length ({answer.covered:,} plans), then "
        f"{answer.predicted:,} plans "
        f"predicted on these lengths, from the best of the searches on by changes of one field; a faster plan may exist"
    )
    return searched_text if answer.complete else f"budget spent (--budget): {searched_text}"
