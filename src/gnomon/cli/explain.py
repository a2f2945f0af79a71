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
    request = read_request(options)
    file = _plan_file(options)
    prediction = predict(request.graph, request.cluster, request.plan, request.workload, request.stack)
    progress = SearchProgress("neighbours predicted:")
    reasons = explain(
        prediction,
        runners_up=file.runners_up if file else (),
        too_large=file.too_large if file else (),
        on_progress=progress,
    )
    progress.end()
    assumed_lines = (*request.assumed, *request.notes)
    if options.json:
        print_json({**reasons_mapping(reasons, request.terms), "assumptions": list(assumed_lines)})
    else:
        ways = advice(prediction, terms=request.terms)
        print_lines(reasons_text(reasons, advice=ways, terms=request.terms))
        print_lines(("", *(line for one in assumed_lines for line in wrapped(one, indent=""))) if assumed_lines else ())
    return 0 if prediction.fits else 1


def _plan_file(options: ExplainOptions) -> PlanFile | None:
    """The plan file, with the other plans of its search; None for a job."""
    path = options.plan or options.model
    if path is None or not path.endswith(".toml") or not is_plan_file(path):
        return None
    plan = load_plan(path)
    return plan if isinstance(plan, PlanFile) else None
