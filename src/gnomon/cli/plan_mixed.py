"""`gnomon plan` for a cluster of heterogeneous devices: the search over kinds, its text, and a plan file.

`plan_over_kinds` searches, prints, writes, and returns 0. Leaves out the search itself (`search.mixed.plan_mixed`), and
other questions than the fastest plan (`plan_goals`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.cli.budget import ONE, Budget, SearchProgress
from gnomon.cli.options.plan import SHOWN, PlanOptions
from gnomon.cli.plan_asked import PlanRequest
from gnomon.cli.plan_file import For, plan_file
from gnomon.cli.terminal import next_steps, print_json, print_lines
from gnomon.plans import PlanFile, save_plan_file
from gnomon.report.mixed import mixed_mapping, mixed_text
from gnomon.search.mixed.devices import TRIES
from gnomon.search.mixed.plan_mixed import MixedResult, plan_mixed
from gnomon.software import own


def plan_over_kinds(options: PlanOptions, request: PlanRequest) -> int:
    """Searches plans over devices of several kinds, prints the best and writes its file."""
    on_progress, notes = SearchProgress(), request.notes
    with Budget(options.budget, ONE) as budget:
        result = plan_mixed(
            *request.job,
            base=request.base,
            fixed=request.fixed,
            forbid=options.forbid,
            top=options.top or SHOWN,
            diverse=options.top is None,
            tries=options.tries or TRIES,
            on_progress=on_progress,
            keep_going=budget,
            first=budget.half,
        )
    on_progress.end()
    if request.stack.name != own.NAME and result.best[0].point is not None:
        notes = (
            *notes,
            "uneven shares and stages of other axes are run by gnomon run; other programs may have no "
            "options for them (gnomon export says so)",
        )
    if options.output:
        save_plan_file(_file(options, result, request.assumed), options.output)
    if options.json:
        print_json({**mixed_mapping(result), "assumptions": [*request.assumed, *result.best[0].prediction.assumptions]})
    else:
        print_lines(mixed_text(result, assumed=request.assumed, notes=notes))
        if options.output:
            print_lines(("", *next_steps(options.output)))
    return budget.status


def _file(options: PlanOptions, result: MixedResult, assumed: Sequence[str]) -> PlanFile:
    others = (*result.best, result.equal, *(each_alone for _, each_alone in result.best_of_kinds))
    plans = (candidate.plan for candidate in others if candidate is not None)
    named = For(options.model, options.on, options.stack)
    return plan_file(named, result.workload, result.stack, result.best[0].prediction, assumed, others=plans)
