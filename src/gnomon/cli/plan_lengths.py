"""`gnomon plan --lengths`: the fastest plan for a batch of sequences of several lengths, and a plan file.

`plan_varied` searches, prints, writes, and returns 0. Leaves out the search itself (`search.questions.lengths`).
"""

from __future__ import annotations

from gnomon.cli.budget import ONE, Budget
from gnomon.cli.options.plan import PlanOptions
from gnomon.cli.plan_asked import PlanRequest
from gnomon.cli.plan_file import For, plan_file
from gnomon.cli.terminal import Trying, next_steps, print_json, print_lines
from gnomon.errors import InputError, PlanError
from gnomon.hardware.kinds import is_mixed
from gnomon.methods import Method, methods_named
from gnomon.plans import save_plan_file
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.report.lengths import lengths_mapping, lengths_text
from gnomon.search.questions.lengths import peers, plan_lengths
from gnomon.software import Stack, own

REPORTED_EVERY = 10
"""Predictions between two lines of progress."""

ONE_LENGTH_ONLY = ("refine", "sac_ilp", "uneven_replicas", "layers_per_stage", "try_", "top", "html", "price")
"""Options that are for batches of one length."""


def plan_varied(options: PlanOptions, request: PlanRequest) -> int:
    """Searches a plan for sequences of varied lengths, prints it and writes its file."""
    for name in ONE_LENGTH_ONLY:
        if getattr(options, name):
            option = name.rstrip("_").replace("_", "-")
            raise InputError(f"--{option} is for batches of one length; leave it out, or give --seq-len")
    if is_mixed(request.machines):
        raise InputError("--lengths is for devices of one kind; name one of these with --on")
    methods, trying = _methods(options, request.stack), Trying()

    def on_progress(predicted: int) -> None:
        if predicted % REPORTED_EVERY == 0:
            trying(f"plans on these lengths: {predicted}")

    with Budget(options.budget, ONE) as budget:
        lengths_plan = plan_lengths(
            *request.job,
            methods=methods,
            base=request.base,
            fixed=request.fixed,
            forbid=options.forbid,
            extra_choices=request.choices.extra_choices,
            on_progress=on_progress,
            keep_going=budget,
        )
    trying.end()
    if options.output:
        named = For(options.model, options.on, options.stack)
        file = plan_file(
            named, request.workload, request.stack, lengths_plan.best, request.assumed, others=lengths_plan.runners_up
        )
        save_plan_file(file, options.output)
    if options.json:
        print_json({**lengths_mapping(lengths_plan), "assumptions": [*request.assumed, *lengths_plan.best.assumptions]})
    else:
        print_lines(
            lengths_text(
                lengths_plan, methods=options.methods is not None, assumed=request.assumed, notes=request.notes
            )
        )
        if options.output:
            print_lines(("", *next_steps(options.output)))
    return budget.status


def _methods(options: PlanOptions, stack: Stack) -> tuple[Method, ...]:
    """The methods to try: first the usual ways to make microbatches of sequences, then those of `--methods`.

    The usual ways (`peers`) are left out under a stack of another program, which makes its microbatches in its own way.
    `--methods all` means every method for batches of varied lengths that the stack runs; a method that is named and
    that the stack is not known to run is a PlanError.
    """
    usual = peers() if stack is PLAIN_STACK or stack.name == own.NAME else ()
    if options.methods is None:
        return usual
    named = methods_named(options.methods)
    if options.methods.strip() == "all":
        named = tuple(entry for entry in named if entry.stand_ins is not None)
    for entry in named if stack is not PLAIN_STACK else ():
        if stack.name != own.NAME or "run" in entry.missing:
            if options.methods.strip() != "all":
                raise PlanError(f"--methods {entry.name}: stack {stack.name} is not known to run it; leave it out")
            named = tuple(other for other in named if other is not entry)
    return (*usual, *(entry for entry in named if entry not in usual))
