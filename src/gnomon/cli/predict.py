"""`gnomon predict`: one prediction, as text or JSON; when it does not fit, what would.

`run(options)` prints and returns 0 if the plan fits in memory, 1 if not.
"""

from __future__ import annotations

from gnomon.cli.models import teacher_of
from gnomon.cli.options.predict import PredictOptions
from gnomon.cli.request import read_request
from gnomon.cli.serving import asks_to_serve, refuse_others
from gnomon.cli.terminal import print_json, print_lines
from gnomon.late import load_late
from gnomon.prediction import memory_copies, predict
from gnomon.prediction.loading import host_short
from gnomon.report.prediction import host_mapping, prediction_text
from gnomon.report.tables import wrapped
from gnomon.units import show_seconds


def run(options: PredictOptions) -> int:
    """Predicts the step and prints it."""
    refuse_others(options)
    if asks_to_serve(options):
        status: int = load_late("gnomon.cli.predict_serve:run")(options)
        return status
    request = read_request(options, options.lengths or ())
    taught = teacher_of(request.plan, request.graph)
    prediction = predict(request.graph, request.cluster, request.plan, request.workload, request.stack, teacher=taught)
    short = host_short(prediction)
    changes = None
    if short or not prediction.has_room:  # by name, so that a plan that fits does not load the search
        changes = load_late("gnomon.search.fit.advice:advice")(prediction, terms=request.terms)
    if options.html or options.trace or options.timeline:  # by name, so that text alone does not load what writes them
        load_late("gnomon.cli.files:write_views")(options, prediction, request.assumed, request.notes)
    copies = memory_copies(prediction, options.memory_checkpoint_every) if options.memory_checkpoint_every else None
    if options.json:
        mapping = prediction.to_mapping()
        mapping["assumptions"] = [*request.assumed, *mapping["assumptions"]]
        mapping["notes"] = [*request.notes, *mapping["notes"]]
        mapping["advice"] = [
            {"change": c.what, "step_s": c.step_s, "peak_bytes": c.peak_bytes, "lines": list(c.lines)}
            for c in (changes.ways if changes else ())
        ]
        mapping["host_memory"] = host_mapping(prediction)
        mapping["advice_complete"] = changes is None or changes.complete
        if copies is not None:
            mapping["memory_copies"] = {
                "every": copies.every,
                "sent_bytes": copies.sent_bytes,
                "held_bytes": copies.held_bytes,
                "seconds": copies.copy_every_s,
                "step_s": prediction.step_s + copies.step_s,
            }
        print_json(mapping)
    else:
        print_lines(
            prediction_text(prediction, assumed=request.assumed, advice=changes, every_assumption=options.assumptions)
        )
        if copies is not None:
            sentence = f"{copies.sentence}: {show_seconds(prediction.step_s + copies.step_s)} with them"
            print_lines(("", *wrapped(sentence, indent="")))
        if request.notes:
            print_lines(("", "from the file", *(line for n in request.notes for line in wrapped(n, bullet="- "))))
    return 0 if prediction.fits and not short else 1
