"""`gnomon plan` with another question: `--vary`, `--pareto`, `--longest`, `--max-step`.

`answer` prints a table of cases and returns 0, or 1 when none of them is what was asked. Leaves out the searches
(`gnomon.search.goals`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError, nearest
from gnomon.hardware import Cluster
from gnomon.plans import Workload
from gnomon.report.sweep import sweep_mapping, sweep_page, sweep_text
from gnomon.report.tables import wrapped
from gnomon.search.goals import VARIED, Case, Question, fewest_devices, longest, of_nodes, pareto, vary
from gnomon.units import parse_count, parse_seconds, show_bytes, show_seconds

RESOLUTION = 0.01
"""Share of a device's memory by which plans of a front differ at least."""

ASKED = ("vary", "pareto", "longest", "max_step")
"""Options that ask something else than the fastest plan."""


def is_asked(options: argparse.Namespace) -> bool:
    """Whether one of them is given. InputError for several, for what they do not go with, or `--html` without."""
    given = [f"--{name.replace('_', '-')}" for name in ASKED if getattr(options, name) not in (None, False)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are different questions; ask one at a time")
    if given and options.output:
        raise InputError(f"-o writes one plan, and {given[0]} finds several; fix the case and plan it alone")
    if options.html and not given:
        raise InputError("--html draws several cases; give --vary, --pareto, --longest or --max-step with it")
    return bool(given)


def answer(
    options: argparse.Namespace, asked: Question, cluster: Cluster, workload: Workload, assumed: Sequence[str]
) -> int:
    """Search, print, draw."""
    met = True
    if options.vary:
        name, values = _varied(options.vary)
        cases, said = vary(asked, cluster, workload, name, values), ""
    elif options.pareto:
        least = min(group.node.device.memory_bytes for group in cluster.groups)
        resolution = int(least * RESOLUTION)
        cases = pareto(asked, cluster, workload, resolution_bytes=resolution)
        said = f"Each plan is the fastest in the memory allowed, which falls by {show_bytes(resolution)} or more."
        met = bool(cases)
    elif options.longest:
        cases = longest(asked, cluster, workload, multiple=options.longest)
        said = f"longest: {cases[-1].label}, in multiples of {options.longest}"
    else:
        limit = parse_seconds(options.max_step)
        nodes = sum(group.count for group in cluster.groups)
        clusters = [of_nodes(cluster, count) for count in range(1, nodes + 1)]
        cases = fewest_devices(asked, clusters, workload, limit)
        last = cases[-1]
        met = last.found is not None and last.found.step_s <= limit
        said = (
            f"fewest devices for {show_seconds(limit)}: {last.cluster.num_devices}, in whole nodes"
            if met
            else f"no number of nodes up to {nodes} takes {show_seconds(limit)} or less"
        )
    _show(options, cases, said, assumed)
    return 0 if met else 1


def _show(options: argparse.Namespace, cases: Sequence[Case], said: str, assumed: Sequence[str]) -> None:
    title = f"{options.model} on {options.on}"
    if options.json:
        print_json({**sweep_mapping(cases), "said": said, "assumptions": list(assumed)})
    else:
        first = "memory allowed" if options.pareto else "case"
        print_lines((title, "", *sweep_text(cases, first), *(("", *wrapped(said, indent="")) if said else ())))
        if assumed:
            print_lines(("", "assumed", *(line for each in assumed for line in wrapped(each, bullet="- "))))
    if options.html:
        Path(options.html).write_text(sweep_page(cases, title), encoding="utf-8")


def _varied(text: str) -> tuple[str, tuple[int, ...]]:
    """(name, values) of `seq_len=4k,32k`: lengths of sequences are counted in units of 1,024, as models are named."""
    name, _, rest = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in VARIED:
        raise InputError(f"cannot vary {name[:40]!r}{nearest(name, VARIED)}; there are {', '.join(VARIED)}")
    each_of = [each.strip() for each in rest.split(",") if each.strip()]
    if name == "seq_len":
        each_of = [f"{each[:-1]}Ki" if each[-1] in "kK" else each for each in each_of]
    values = tuple(parse_count(each) for each in each_of)
    if not values or min(values) < 1:
        raise InputError(f"--vary {text[:40]!r} has no values; write {name}=N,N,…, as in seq_len=4k,32k")
    return name, values
