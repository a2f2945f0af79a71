"""`gnomon fleet spot`: what losses of machines cost a plan, with copies of stages, copies in memory, or restarts.

`run(options)` prints the useful steps of each way and which is best at the asked rate of losses and around it.
`decisions(options)` plays a recorded trace of a run's decisions again. Leaves out the simulation (`fleet.losses`,
`control`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.cli.options.fleet import DecisionsOptions, SpotOptions
from gnomon.cli.request import request_of_plan
from gnomon.cli.terminal import Progress, print_json, print_lines
from gnomon.control import read_trace, replayed
from gnomon.fleet.assumed_losses import AssumedLosses
from gnomon.fleet.losses import PricedPlan, best_of, price_under_losses, useful
from gnomon.fleet.spot import System
from gnomon.methods import bamboo
from gnomon.plans import Pass, load_plan_file, save_plan_file
from gnomon.report.tables import Column, number, table, wrapped
from gnomon.units import show_seconds

WAYS: Mapping[System, str] = {
    "bamboo": "copies of stages (bamboo)",
    "memory": "copies in memory",
    "restart": "checkpoints, all start again",
    "elastic": "torch elastic, whole pipelines",
}
"""System -> what people call it."""
AROUND = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Of the asked time between losses."""


def run(options: SpotOptions) -> int:
    """Prints the useful steps of each system by the time between losses of machines."""
    assumed = _assumed(options)
    priced = _priced(options, assumed)
    systems = tuple(one for one in WAYS if one != "bamboo" or not priced.refused)
    progress, found = Progress("spot:", len(AROUND)), dict[float, dict[System, float]]()
    for done, factor in enumerate(AROUND):
        progress.show(done)
        hours = options.mtbf * factor
        found[hours] = useful(priced, hours, systems, assumed)
    progress.end()
    best = best_of(found[options.mtbf])
    written = []
    if options.output is not None:
        passes = (Pass(name=bamboo.NAME),) if best == "bamboo" else ()
        plan = replace(
            priced.plan, schedule=replace(priced.plan.schedule, passes=(*priced.plan.schedule.passes, *passes))
        )
        save_plan_file(replace(load_plan_file(options.plan), plan=plan, predicted=None), options.output)
        written.append(f"wrote {options.output}: the plan {'with' if passes else 'without'} copies of stages")
    if options.json:
        rows = [{"mtbf_hours": hours, "useful": dict(one), "best": best_of(one)} for hours, one in found.items()]
        print_json({"best": best, "refused": priced.refused or None, "useful_steps": rows})
        return 0
    print_lines((*_text(options, priced, found), *written))
    return 0


def _priced(options: SpotOptions, assumed: AssumedLosses) -> PricedPlan:
    """What the simulation takes. InputError for a plan whose stages have meshes of their own."""
    request = request_of_plan(options.plan)
    return price_under_losses((request.graph, request.cluster, request.workload, request.stack), request.plan, assumed)


def _assumed(options: SpotOptions) -> AssumedLosses:
    return AssumedLosses(
        come_s=options.come,
        start_s=options.start,
        takeover_s=options.takeover,
        checkpoint_s=options.checkpoint_seconds,
        memory_every=options.memory_checkpoint_every,
        hours=options.hours,
        lists=options.lists,
        bulk=options.bulk,
    )


def _text(options: SpotOptions, priced: PricedPlan, found: Mapping[float, Mapping[System, float]]) -> list[str]:
    costs, best = priced.costs, best_of(found[options.mtbf])
    names = {"bamboo": costs.copied_step_s, "memory": costs.memory_step_s}
    rows = [
        (WAYS[system], number(names.get(system, costs.step_s)), *(f"{one[system]:.3f}" for one in found.values()))
        for system in next(iter(found.values()))
    ]
    columns = (
        Column(name="useful steps", align="left"), Column(name="step s"),
        *(Column(name=f"{hours:g} h") for hours in found),
    )  # fmt: skip
    machines = f"{priced.shape.machines} machines ({priced.shape.stages} stages, {priced.shape.pipelines} replicas)"
    head = (
        f"{machines}, each lost once in so many hours; useful steps over those of a run without losses and copies, "
        f"{options.lists} lists of {options.hours:g} hours"
    )
    summary = f"at one loss of a machine in {options.mtbf:g} hours: {WAYS[best]}"
    pays = [hours for hours, one in found.items() if best_of(one) == "bamboo"]
    if priced.refused:
        summary += f". Copies of stages: {priced.refused}"
    else:
        summary += f". Copies of stages are best up to {max(pays):g} hours" if pays else ". Copies of stages never are"
    notes = (
        f"{priced.copies}",
        f"another machine is there after {show_seconds(costs.come_s)}; a start takes {show_seconds(costs.start_s)}, "
        f"going on without one {show_seconds(costs.takeover_s)}; checkpoints every {costs.checkpoint_every} steps "
        f"cost nothing; {options.bulk:.0%} of losses take a second machine",
    )
    bullets = [line for note in notes for line in wrapped(note, bullet="- ")]
    return [
        *wrapped(head, indent=""),
        "",
        *table(columns, rows, width=120),
        "",
        *wrapped(summary, indent=""),
        "",
        "assumed",
        *bullets,
    ]


def decisions(options: DecisionsOptions) -> int:
    """Prints a recorded trace, and whether the simulated launcher decides the same; 1 where it does not."""
    trace = read_trace(Path(options.file))
    same = list(replayed(trace)) == [(look.seen, look.decision) for look in trace.looks]
    decisions_made = [(look.at, look.decision) for look in trace.looks if look.decision is not None]
    if options.json:
        listed = [
            {"at": at, "members": one.members, "placement": one.plan.placement, "lost": one.lost}
            for at, one in decisions_made
        ]
        print_json({"controller": trace.controller, "looks": len(trace.looks), "decisions": listed, "same": same})
        return 0 if same else 1
    columns = (Column(name="s"), *(Column(name=name, align="left") for name in ("processes", "place of each rank")))
    rows = [
        (
            f"{at:.3f}",
            " ".join(map(str, one.members)),
            " ".join(map(str, one.plan.device_of)) if not one.lost else "all wait",
        )
        for at, one in decisions_made
    ]
    verdict = "the same again, played with what happened alone" if same else "played again, the decisions differ"
    head = f"{trace.controller}: {len(trace.looks)} looks, {len(decisions_made)} decisions; {verdict}"
    print_lines([*wrapped(head, indent=""), "", *table(columns, rows)])
    return 0 if same else 1
