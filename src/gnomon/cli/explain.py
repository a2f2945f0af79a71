"""`gnomon explain`: why the plan of a plan file is as fast and as large as it is.

`run(options)` prints reasons and returns 0 if the plan fits, 1 if not. Leaves out searching for a better plan.
"""

from __future__ import annotations

from gnomon.cli.budget import Covered
from gnomon.cli.models import read_model
from gnomon.cli.options.plan import ExplainOptions
from gnomon.cli.own import with_own
from gnomon.cli.terminal import print_json, print_lines
from gnomon.hardware import parse_cluster
from gnomon.plans import load_plan_file
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.report.reasons import reasons_mapping, reasons_text
from gnomon.report.tables import wrapped
from gnomon.search.fit.advice import advice
from gnomon.search.questions.reasons import explain
from gnomon.software import stack as named_stack


def run(options: ExplainOptions) -> int:
    """Predict the plan and its neighbours, and print."""
    file = load_plan_file(options.plan)
    graph, _ = read_model(file.model)
    machines, assumed = parse_cluster(file.on), list[str]()
    stack = with_own(named_stack(file.stack) if file.stack else PLAIN_STACK, machines, options, assumed)
    prediction = predict(graph, machines, file.plan, file.workload, stack)
    progress = Covered("neighbours predicted:")
    reasons = explain(prediction, runners_up=file.runners_up, too_large=file.too_large, told=progress)
    progress.end()
    if options.json:
        print_json({**reasons_mapping(reasons), "assumptions": assumed})
    else:
        print_lines(reasons_text(reasons, advice=advice(prediction)))
        print_lines(
            ("", *(line for assumption in assumed for line in wrapped(assumption, indent=""))) if assumed else ()
        )
    return 0 if prediction.fits else 1
