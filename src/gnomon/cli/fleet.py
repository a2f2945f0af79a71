"""`gnomon fleet`: replay a trace of jobs under scheduling policies, and list the policies.

`run(options)` does the action that was asked for and returns the exit status. Other actions are in the modules
`fleet_*` beside this one. Leaves out the replay itself (`gnomon.fleet`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gnomon.cli.fleet_forecast import run as forecast
from gnomon.cli.fleet_live import run as run_live
from gnomon.cli.fleet_play import played, policies_of
from gnomon.cli.fleet_request import FleetRequest, request_of
from gnomon.cli.fleet_service import run as service
from gnomon.cli.fleet_service import run_slices as slices
from gnomon.cli.fleet_spot import decisions
from gnomon.cli.fleet_spot import run as spot
from gnomon.cli.fleet_what_if import run as what_if
from gnomon.cli.launch import run as submit
from gnomon.cli.options.flags import Options
from gnomon.cli.options.fleet import (
    DecisionsOptions,
    FleetOptions,
    FleetRunOptions,
    ForecastOptions,
    PoliciesOptions,
    ReplayOptions,
    ServiceOptions,
    SlicesOptions,
    SpotOptions,
    SubmitOptions,
    WhatIfOptions,
)
from gnomon.cli.terminal import print_json, print_lines
from gnomon.fleet.page import fleet_page
from gnomon.fleet.perfetto import fleet_trace
from gnomon.fleet.policies import POLICIES
from gnomon.fleet.result import USES, Result
from gnomon.report.tables import Column, number, percent, table, wrapped
from gnomon.schema import save_text
from gnomon.units import show_seconds


def run(options: FleetOptions | SubmitOptions) -> int:
    """Do what is asked."""
    return _ACTIONS[type(options)](options)


def _replay(options: ReplayOptions) -> int:
    chosen = policies_of(options)
    what = request_of(options, record=bool(options.output or options.trace))
    results = played(what, chosen)
    written = []
    if options.output:
        title = f"{what.trace.name} on {what.machines.text}"
        save_text(fleet_page(results, title=title, sentence=verdict(results), notes=what.notes), options.output)
        written.append(options.output)
    if options.trace:
        save_text(json.dumps(fleet_trace(results[0]), allow_nan=False), options.trace)
        written.append(options.trace)
    if options.json:
        print_json(as_json(what, results))
        return 0
    print_lines([*text(what, results), *(f"wrote {path}" for path in written)])
    return 0


def verdict(results: Sequence[Result]) -> str:
    """The best policy by mean JCT, in a sentence."""
    by = sorted(results, key=lambda result: result.figures()["jct_mean_s"])
    best = by[0]
    mean = number(best.figures()["jct_mean_s"] / 3600)
    if len(by) == 1:
        return f"Under {best.policy} a job is done {mean} h after it is submitted, on average."
    second = by[1].figures()["jct_mean_s"] / best.figures()["jct_mean_s"]
    return (
        f"{best.policy} has the lowest mean JCT, {mean} h; the next is {by[1].policy} with {number(second)} times that."
    )


def as_json(what: FleetRequest, results: Sequence[Result]) -> dict[str, object]:
    """The results as plain values, for `--json`."""
    return {
        "trace": what.trace.name,
        "format": what.trace.format,
        "jobs": len(what.trace.jobs),
        "left_out": [{"line": row.line, "reason": row.reason} for row in what.trace.left_out],
        "cluster": what.machines.text,
        "devices": what.machines.devices // what.machines.unit,
        "notes": list(what.notes),
        "policies": [
            {"policy": result.policy, **result.figures(), "device_s": dict(result.device_s)} for result in results
        ],
    }


def text(what: FleetRequest, results: Sequence[Result]) -> list[str]:
    """The results as lines of text: a table of policies, where the device-hours went, and what was assumed."""
    trace = what.trace
    span = show_seconds(trace.jobs[-1].submit_s - trace.jobs[0].submit_s)
    head = f"{len(trace.jobs):,} jobs submitted in {span}, on {what.machines.text}"
    names = ("JCT mean h", "p50 h", "p99 h", "queue h", "p99 h", "used %", "preempted", "resized")
    rows = []
    for result in results:
        f = result.figures()
        hours = [
            number(f[key] / 3600) for key in ("jct_mean_s", "jct_p50_s", "jct_p99_s", "queue_mean_s", "queue_p99_s")
        ]
        rows.append(
            (result.policy, *hours, percent(f["utilisation"]), f"{result.preemptions:,}", f"{result.resizes:,}")
        )
    columns = (Column(name="policy", align="left"), *(Column(name=name) for name in names))
    lines = [*wrapped(head, indent=""), "", *table(columns, rows), "", *_uses(results)]
    unmet = [result for result in results if result.unmet_s > 0]
    for missed in unmet:
        lines += wrapped(f"{missed.policy}: inference missed {missed.unmet_s / 3600:.1f} node-hours", indent="")
    lines += ["", "assumed", *(line for note in what.notes for line in wrapped(note, bullet="- "))]
    return lines


def _uses(results: Sequence[Result]) -> Sequence[str]:
    """A table of where the device-hours went; the columns add up to all of them."""
    shown = [use for use in USES if any(result.device_s[use] > 0 for result in results)]
    columns = (Column(name="device-hours", align="left"), *(Column(name=use) for use in shown), Column(name="all"))
    rows = []
    for result in results:
        total = sum(result.device_s.values())
        rows.append((result.policy, *(f"{result.device_s[use] / 3600:,.0f}" for use in shown), f"{total / 3600:,.0f}"))
    return table(columns, rows)


def _policies(options: PoliciesOptions) -> int:
    if options.json:
        print_json([{"name": p.name, "paper": p.paper, "about": p.about, "needs": p.needs} for p in POLICIES])
        return 0
    columns = [Column(name=name, align="left") for name in ("policy", "paper", "needs", "what it does")]
    rows = [(p.name, p.paper, p.needs, p.about) for p in POLICIES]
    print_lines(table(columns, rows, width=120))
    return 0


_ACTIONS: Mapping[type[Options], Callable[[Any], int]] = {
    ReplayOptions: _replay,
    WhatIfOptions: what_if,
    ForecastOptions: forecast,
    ServiceOptions: service,
    SlicesOptions: slices,
    PoliciesOptions: _policies,
    SpotOptions: spot,
    DecisionsOptions: decisions,
    SubmitOptions: submit,
    FleetRunOptions: run_live,
}
