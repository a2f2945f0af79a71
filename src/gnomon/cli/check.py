"""`gnomon check`: before a run, whether every rank has what the plan needs, and which rank or link is slow.

`run(options)` starts the plan's ranks here (or is one of the user's torchrun), looks for a few seconds, prints what was
found beside the prediction, and returns 0, or 1 where something would end the run. Leaves out training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from gnomon.cli.missing import need_torch
from gnomon.cli.models import read_model_to_run
from gnomon.cli.options.flags import changed_options, flags
from gnomon.cli.options.job import JobFileOptions
from gnomon.cli.options.run import CheckOptions
from gnomon.cli.request import job_request
from gnomon.cli.run import STACK, device_of, is_rank_0, read_plan
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware import parse_cluster
from gnomon.late import load_late
from gnomon.prediction import Prediction, predict
from gnomon.prices.collectives import collective_seconds, p2p_seconds
from gnomon.prices.links import axis_link
from gnomon.report.tables import Column, gib, number, table, wrapped
from gnomon.request.job_file import is_plan
from gnomon.software import stack
from gnomon.units import show_bytes

READY, NOT_READY = 0, 1
STATES = 2
"""Moments of an optimizer that a checkpoint holds in addition to the parameters."""


BESIDE_A_JOB = ("on", *(field.name for field in fields(JobFileOptions)))
"""Options that a plan file has no use for."""


def run(options: CheckOptions) -> int:
    """Predict, look, judge, tell."""
    began = perf_counter()
    need_torch("looking at the ranks of a job")
    named = options.job or (options.source or ("", ""))[1]
    prediction, graph = _predicted(options)
    on = prediction.pricing.cluster.name
    device = device_of(on, prediction.plan, prediction.pricing.cluster, options.device)
    folder = str(Path(options.checkpoints or Path(named).with_suffix(".checkpoints")))
    reports = load_late("gnomon.runtime.checks.preflight:reports")(prediction.plan.world_size, folder, device)
    # Under torchrun every rank measures, and the first alone judges.
    if not is_rank_0():
        return READY
    verdict = load_late("gnomon.runtime.checks.preflight:judge")(
        reports,
        peak_bytes={rank: group.peak_bytes for group in prediction.memory for rank in group.ranks},
        checkpoint_bytes=_checkpoint_bytes(prediction, graph),
        folder=folder,
        shared=device == "cpu",
    )
    links = _links(prediction, reports)
    took = perf_counter() - began
    if options.json:
        print_json(
            {
                "schema": "gnomon.check/1",
                "ranks": [asdict(report) for report in reports],
                "links": links,
                "problems": list(verdict.problems),
                "warnings": list(verdict.warnings),
                "took_s": took,
            }
        )
    else:
        print_lines(_lines(on, prediction, reports, links, verdict, took))
    return NOT_READY if verdict.problems else READY


def _predicted(options: CheckOptions) -> tuple[Prediction, Graph]:
    """The prediction that ranks are held against, and its model: a plan file by Gnomon's runtime, a job of another
    program by that program. InputError where neither is given."""
    if options.job is None and options.source is None:
        raise InputError(
            "say what is to be checked: gnomon check plan.toml, or a job file of another program with --on"
        )
    if options.source is None and options.job is not None and is_plan(options.job):
        for name, flag in flags(CheckOptions).items():
            if name in BESIDE_A_JOB and name in changed_options(options):
                raise InputError(f"{flag.names[0]} is for a job file, and a plan file says all of it: change it there")
        file = read_plan(options.job)
        graph, _ = read_model_to_run(file.model)
        return predict(graph, parse_cluster(file.on), file.plan, file.workload, stack(STACK)), graph
    request = job_request(options.job, options, options.on)
    return predict(request.graph, request.cluster, request.plan, request.workload, request.stack), request.graph


def _checkpoint_bytes(prediction: Prediction, graph: Graph) -> int:
    """Bytes of a checkpoint: what is trained, its states and its master copy. Frozen weights are not in one."""
    precision = prediction.plan.precision
    widths = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "none": 0}
    # A master copy in the parameters' own dtype is the parameters themselves.
    master = 0 if precision.master == precision.param else widths.get(precision.master, 4)
    states = STATES * widths.get(precision.states, 4)
    return graph.num_parameters() * (widths.get(precision.param, 4) + states + master)


def _links(prediction: Prediction, reports: Sequence[Any]) -> list[dict[str, Any]]:
    """Collectives over all ranks, and messages, measured and predicted."""
    sizes, message = load_late("gnomon.runtime.checks.preflight:sizes")()
    cluster, ranks = prediction.pricing.cluster, np.arange(prediction.plan.world_size)
    if len(ranks) < 2 or len(reports) < 2:
        return []
    every, pair = axis_link(cluster, ranks[None, :]), axis_link(cluster, ranks[None, :2])
    rows = [
        {
            "what": f"all-reduce of {show_bytes(size)}",
            # A collective has ended when its last rank has.
            "measured_s": max(report.all_reduce_s[i] for report in reports),
            "predicted_s": float(collective_seconds("all_reduce", size, every)),
        }
        for i, size in enumerate(sizes)
    ]
    slowest = max(report.link_s for report in reports)
    rows.append(
        {
            "what": f"message of {show_bytes(message)}",
            "measured_s": slowest,
            "predicted_s": float(p2p_seconds(message, pair)),
        }
    )
    return rows


def _lines(
    on: str, prediction: Prediction, reports: Sequence[Any], links: Sequence[dict[str, Any]], verdict: Any, took: float
) -> tuple[str, ...]:
    names = ("rank", "host", "needs GiB", "free GiB", "disk GiB", "product ms")
    columns = tuple(Column(name=name, align="left" if name == "host" else "right") for name in names)
    needs = {rank: group.peak_bytes for group in prediction.memory for rank in group.ranks}
    rows = [
        (
            str(one.rank),
            one.host,
            gib(needs[one.rank]),
            gib(one.free_bytes),
            gib(one.disk_bytes),
            number(1e3 * one.busy_s),
        )
        for one in reports
    ]
    wide = (Column(name="", align="left"), Column(name="measured ms"), Column(name="predicted ms"))
    timed = [(row["what"], number(1e3 * row["measured_s"]), number(1e3 * row["predicted_s"])) for row in links]
    return (
        *wrapped(f"{prediction.model} on {on}: {len(reports)} ranks, {reports[0].software}", indent=""),
        "",
        *table(columns, rows),
        *(("", *table(wide, timed)) if timed else ()),
        "",
        *(line for text in verdict.problems for line in wrapped(text, bullet="- problem: ")),
        *(line for text in verdict.warnings for line in wrapped(text, bullet="- slow: ")),
        f"{'not ready' if verdict.problems else 'ready'}: looked for {took:.1f} s",
    )
