"""`gnomon explain`: why a plan, or the job of another program's file, is as fast and as large as it is.

`run(options)` prints reasons and returns 0 if it fits, 1 if not. Leaves out searching for a better plan.
"""

from __future__ import annotations

from gnomon.cli import explain_serve
from gnomon.cli.budget import SearchProgress
from gnomon.cli.options.plan import ExplainOptions
from gnomon.cli.request import read_request
from gnomon.cli.serving import asks_to_serve
from gnomon.cli.terminal import print_json, print_lines
from gnomon.plans import PlanFile, is_plan_file, load_plan
from gnomon.prediction import predict
from gnomon.report.reasons import reasons_mapping, reasons_text
from gnomon.report.tables import wrapped
from gnomon.search.fit.advice import advice
from gnomon.search.questions.reasons import explain


def run(options: ExplainOptions) -> int:
    """Predict the plan and its neighbours, and print."""
    if asks_to_serve(options):
        return explain_serve.run(options)
    asked = read_request(options)
    file = _plan_file(options)
    prediction = predict(asked.graph, asked.cluster, asked.plan, asked.workload, asked.stack)
    progress = SearchProgress("neighbours predicted:")
    reasons = explain(
        prediction,
        runners_up=file.runners_up if file else (),
        too_large=file.too_large if file else (),
        on_progress=progress,
    )
    progress.end()
    taken = (*asked.assumed, *asked.notes)
    if options.json:
        print_json({**reasons_mapping(reasons, asked.terms), "assumptions": list(taken)})
    else:
        ways = advice(prediction, terms=asked.terms)
        print_lines(reasons_text(reasons, advice=ways, terms=asked.terms))
        print_lines(("", *(line for one in taken for line in wrapped(one, indent=""))) if taken else ())
    return 0 if prediction.fits else 1


def _plan_file(options: ExplainOptions) -> PlanFile | None:
    """The plan file, with the other plans of its search; None for a job."""
    path = options.plan or options.model
    if path is None or not path.endswith(".toml") or not is_plan_file(path):
        return None
    given = load_plan(path)
    return given if isinstance(given, PlanFile) else None
