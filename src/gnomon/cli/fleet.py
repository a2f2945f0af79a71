"""`gnomon fleet`: replay a trace of jobs under scheduling policies, and list the policies.

`run(options)` does the action that was asked for and returns the exit status. Other actions are in the modules
`fleet_*` beside this one. Leaves out the replay itself (`gnomon.fleet`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.cli.terminal import Progress, print_json, print_lines
from gnomon.errors import InputError
from gnomon.fleet.forecast import Costs, Curve
from gnomon.fleet.job import Trace, between
from gnomon.fleet.machines import Machines, machines, without_larger
from gnomon.fleet.page import fleet_page
from gnomon.fleet.perfetto import fleet_trace
from gnomon.fleet.policies import POLICIES, policy
from gnomon.fleet.replay import Failure, Rules, replay
from gnomon.fleet.result import USES, Result
from gnomon.fleet.scenario import DAY_S, random_failures, read_demand, repeated, with_elastic
from gnomon.fleet.state import Policy
from gnomon.fleet.traces import Reading, read_trace
from gnomon.hardware.rent import ANY, rent
from gnomon.hardware.specs import parse_cluster
from gnomon.report.tables import Column, number, percent, table, wrapped
from gnomon.schema import save_text
from gnomon.units import show_seconds

LISTED = 5
"""Rows that were left out, of which the reason is printed."""


def run(options: argparse.Namespace) -> int:
    """Do what is asked."""
    return {"replay": _replay, "what-if": _what_if, "policies": _policies}[options.action](options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A trace and the cluster that it is played on."""

    trace: Trace
    machines: Machines
    rules: Rules
    curve: Curve
    notes: tuple[str, ...]
    """What a reader must know: what was left out, what was assumed."""


def asked(options: argparse.Namespace, *, record: bool = False, on: str | None = None) -> Asked:
    """What the options of a replay say. InputError for what cannot be read or replayed."""
    reading = Reading(format=options.format or "", workload=options.workload, skip_bad=options.skip_bad)
    trace = read_trace(options.file, reading)
    if options.start_day or options.days is not None:
        start = options.start_day * DAY_S
        trace = between(trace, start, start + options.days * DAY_S if options.days is not None else float("inf"))
    cluster = machines(on or options.on, inference=options.inference or "", mig=options.mig)
    notes = list(trace.notes)
    if trace.left_out:
        notes.append(_left_out(trace))
    if options.skip_larger:
        trace, larger = without_larger(trace, cluster)
        if larger:
            names = ", ".join(f"{job.id} (line {job.line}, {job.fewest} devices)" for job in larger[:LISTED])
            more = f" and {len(larger) - LISTED:,} more" if len(larger) > LISTED else ""
            notes.append(f"{len(larger):,} jobs larger than the cluster were left out: {names}{more}")
    before = len(trace.notes)
    trace = with_elastic(trace, options.elastic, options.seed)
    notes += trace.notes[before:]
    curve = Curve(cluster, serial=options.serial)
    rules, more_notes = _rules(options, trace, cluster, record)
    return Asked(trace=trace, machines=cluster, rules=rules, curve=curve, notes=(*notes, curve.stated(), *more_notes))


def _left_out(trace: Trace) -> str:
    first = "; ".join(f"line {each.line}: {each.reason}" for each in trace.left_out[:LISTED])
    more = "; …" if len(trace.left_out) > LISTED else ""
    return f"{len(trace.left_out):,} rows of {trace.name} are no jobs of the replay: {first}{more}"


def _rules(options: argparse.Namespace, trace: Trace, cluster: Machines, record: bool) -> tuple[Rules, tuple[str, ...]]:
    costs = Costs(
        restart_s=options.restart,
        resize_s=options.resize,
        checkpoint_every_s=options.checkpoint_every,
        saves_when_preempted=not options.no_notice,
    )
    notes = [
        f"a job that is stopped {'loses the work since its last checkpoint' if options.no_notice else 'saves first'}, "
        f"and takes {options.restart:g} s to start again; a resize takes {options.resize:g} s"
    ]
    # Failures and load are drawn for as long as a replay may take: all work one job after another is the longest.
    work = sum(job.work_s * job.devices for job in trace.jobs) / max(1, cluster.devices)
    until = trace.jobs[-1].submit_s + max(2 * work, max(job.work_s for job in trace.jobs) * 4) + DAY_S
    failures: tuple[Failure, ...] = ()
    if options.node_mtbf:
        failures = random_failures(
            cluster,
            mtbf_s=options.node_mtbf * DAY_S,
            repair_s=options.repair * 3600,
            until_s=until,
            seed=options.seed,
        )
        notes.append(f"a node fails every {options.node_mtbf:g} days on average, for {options.repair:g} h")
    demand: tuple[tuple[float, float], ...] = ()
    if options.inference:
        if not options.demand:
            raise InputError("--inference needs the load of its machines: --demand FILE (bin_start_s,relative_load)")
        demand = repeated(read_demand(options.demand), until)
        notes.append("inference has the first claim on its machines; its load is repeated day by day")
    elif options.demand:
        raise InputError("--demand is the load of machines that serve inference; add them with --inference CLUSTER")
    return (
        Rules(
            costs=costs,
            spread=not options.pack,
            failures=failures,
            demand=demand,
            headroom=options.headroom,
            record=record,
        ),
        tuple(notes),
    )


def played(what: Asked, chosen: Sequence[Policy]) -> Sequence[Result]:
    """The results of policies, with progress."""
    out = []
    for each in chosen:
        progress = Progress(f"{each.name}:", len(what.trace.jobs))
        try:
            out.append(
                replay(
                    what.trace,
                    what.machines,
                    each,
                    rules=what.rules,
                    # The curve that is assumed anyway leaves the fast way open.
                    forecasts=what.curve if what.curve != Curve(what.machines) else None,
                    progress=progress.show,
                )
            )
        finally:
            progress.end()
    return out


def policies_of(options: argparse.Namespace) -> Sequence[Policy]:
    """--policy, then --compare, each once."""
    names = [options.policy, *(options.compare.split(",") if options.compare else ())]
    return [policy(name.strip()) for name in dict.fromkeys(names)]


def _replay(options: argparse.Namespace) -> int:
    chosen = policies_of(options)
    what = asked(options, record=bool(options.output or options.trace))
    results = played(what, chosen)
    written = []
    if options.output:
        title = f"{what.trace.name} on {what.machines.text}"
        save_text(fleet_page(results, title=title, said=verdict(results), notes=what.notes), options.output)
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
    by = sorted(results, key=lambda each: each.figures()["jct_mean_s"])
    best = by[0]
    mean = number(best.figures()["jct_mean_s"] / 3600)
    if len(by) == 1:
        return f"Under {best.policy} a job is done {mean} h after it is submitted, on average."
    second = by[1].figures()["jct_mean_s"] / best.figures()["jct_mean_s"]
    return (
        f"{best.policy} has the lowest mean JCT, {mean} h; the next is {by[1].policy} with {number(second)} times that."
    )


def _what_if(options: argparse.Namespace) -> int:
    """The cluster as it is, with more machines, and under other policies."""
    if not options.add and not options.compare:
        raise InputError("what-if needs --add CLUSTER, --compare POLICIES, or both")
    chosen = policies_of(options)
    specs = [options.on] + ([f"{options.on}+{options.add}"] if options.add else [])
    cases = []
    for spec in specs:
        what = asked(options, on=spec)
        cases += [(spec, what, result) for result in played(what, chosen)]
    base = cases[0][2].figures()
    rows = [(spec, result, _rent(spec, options), result.figures()) for spec, _, result in cases]
    if options.json:
        print_json([{"on": spec, "policy": r.policy, "dollars_per_hour": rent, **f} for spec, r, rent, f in rows])
        return 0
    columns = (
        Column(name="machines", align="left"),
        Column(name="policy", align="left"),
        *(Column(name=n) for n in ("JCT mean h", "p99 h", "queue h", "used %", "$ an hour", "JCT against first")),
    )
    lines = table(
        columns,
        [
            (
                spec,
                r.policy,
                *(number(f[key] / 3600) for key in ("jct_mean_s", "jct_p99_s", "queue_mean_s")),
                percent(f["utilisation"]),
                "-" if rent is None else f"{rent:,.0f}",
                f"{base['jct_mean_s'] / f['jct_mean_s']:.2f} x",
            )
            for spec, r, rent, f in rows
        ],
        width=120,
    )
    notes = [*cases[-1][1].notes, *_rents(specs[-1], options)]
    said = [line for note in notes for line in wrapped(note, bullet="- ")]
    print_lines([*lines, "", *wrapped(_answer(rows), indent=""), "", "assumed", *said])
    return 0


def _answer(rows: Sequence[tuple[str, Result, float | None, dict[str, float]]]) -> str:
    """Machines or policy: which of the two shortens jobs more."""
    first = rows[0]
    base = first[3]["jct_mean_s"]
    same = [row for row in rows if row[0] == first[0] and row[1].policy != first[1].policy]
    more = [row for row in rows if row[0] != first[0] and row[1].policy == first[1].policy]
    parts = []
    if same:
        best = min(same, key=lambda row: row[3]["jct_mean_s"])
        parts.append(f"policy {best[1].policy} in place of {first[1].policy}: {base / best[3]['jct_mean_s']:.2f} x")
    if more:
        price = "" if more[0][2] is None or first[2] is None else f" for ${more[0][2] - first[2]:,.0f} an hour more"
        parts.append(f"more machines under {first[1].policy}: {base / more[0][3]['jct_mean_s']:.2f} x{price}")
    return "mean JCT is shorter by: " + "; ".join(parts)


def _given(options: argparse.Namespace) -> dict[str, float]:
    return {ANY: options.price} if options.price is not None else {}


def _rent(spec: str, options: argparse.Namespace) -> float | None:
    found = rent(parse_cluster(spec), _given(options))
    return None if found is None else found.dollars_per_hour


def _rents(spec: str, options: argparse.Namespace) -> tuple[str, ...]:
    found = rent(parse_cluster(spec), _given(options))
    return ("no public price of some device: give --price",) if found is None else found.sources


def as_json(what: Asked, results: Sequence[Result]) -> dict[str, object]:
    """For programs."""
    return {
        "trace": what.trace.name,
        "format": what.trace.format,
        "jobs": len(what.trace.jobs),
        "left_out": [{"line": each.line, "reason": each.reason} for each in what.trace.left_out],
        "cluster": what.machines.text,
        "devices": what.machines.devices,
        "notes": list(what.notes),
        "policies": [{"policy": each.policy, **each.figures(), "device_s": dict(each.device_s)} for each in results],
    }


def text(what: Asked, results: Sequence[Result]) -> list[str]:
    """For people: a table of policies, where the device-hours went, and what was assumed."""
    trace = what.trace
    span = show_seconds(trace.jobs[-1].submit_s - trace.jobs[0].submit_s)
    head = f"{len(trace.jobs):,} jobs submitted in {span}, on {what.machines.text}"
    names = ("JCT mean h", "p50 h", "p99 h", "queue h", "p99 h", "used %", "preempted", "resized")
    rows = []
    for each in results:
        f = each.figures()
        hours = [
            number(f[key] / 3600) for key in ("jct_mean_s", "jct_p50_s", "jct_p99_s", "queue_mean_s", "queue_p99_s")
        ]
        rows.append((each.policy, *hours, percent(f["utilisation"]), f"{each.preemptions:,}", f"{each.resizes:,}"))
    columns = (Column(name="policy", align="left"), *(Column(name=name) for name in names))
    lines = [*wrapped(head, indent=""), "", *table(columns, rows), "", *_uses(results)]
    unmet = [each for each in results if each.unmet_s > 0]
    for each in unmet:
        lines += wrapped(f"{each.policy}: inference missed {each.unmet_s / 3600:.1f} node-hours", indent="")
    lines += ["", "assumed", *(line for note in what.notes for line in wrapped(note, bullet="- "))]
    return lines


def _uses(results: Sequence[Result]) -> Sequence[str]:
    """Where device-hours went; every one of them."""
    shown = [use for use in USES if any(each.device_s[use] > 0 for each in results)]
    columns = (Column(name="device-hours", align="left"), *(Column(name=use) for use in shown), Column(name="all"))
    rows = []
    for each in results:
        total = sum(each.device_s.values())
        rows.append((each.policy, *(f"{each.device_s[use] / 3600:,.0f}" for use in shown), f"{total / 3600:,.0f}"))
    return table(columns, rows)


def _policies(options: argparse.Namespace) -> int:
    if options.json:
        print_json([{"name": p.name, "paper": p.paper, "about": p.about, "needs": p.needs} for p in POLICIES])
        return 0
    columns = [Column(name=name, align="left") for name in ("policy", "paper", "needs", "what it does")]
    rows = [(p.name, p.paper, p.needs, p.about) for p in POLICIES]
    print_lines(table(columns, rows, width=120))
    return 0
