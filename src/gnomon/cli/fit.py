"""`gnomon fit`: ways to make a job fit, each with what it frees and costs, and a plan file with the chosen one.

`run(options)` shows every part as soon as it is known, and returns 0 if the job fits or something makes it fit, 1 if
nothing does. Leaves out the ladder itself (`search.fit`).
"""

from __future__ import annotations

from dataclasses import replace
from difflib import unified_diff
from pathlib import Path
from typing import Literal

from gnomon.cli.budget import Budget
from gnomon.cli.job_text import at_fields, job_text, save_job
from gnomon.cli.jobs import job_file
from gnomon.cli.options.fit import FitOptions
from gnomon.cli.plan_file import For, plan_file
from gnomon.cli.request import Request, adapted_name, read_request
from gnomon.cli.terminal import Progress, next_steps, print_json, print_lines
from gnomon.cli.values import quantity
from gnomon.errors import InputError
from gnomon.hardware import parse_cluster
from gnomon.models.lora import parse_adapters
from gnomon.models.presets import CONFIGS, model
from gnomon.plans import PlanFile, load_plan, save_plan_file
from gnomon.report.assumed import material
from gnomon.report.fit import alone_text, combined_text, fit_mapping, heading_text, largest_mapping, largest_text
from gnomon.report.tables import wrapped
from gnomon.request.fit import FitRequest, Ladder, ladder
from gnomon.request.model import is_job_file
from gnomon.search.checkpointing.improve import check_stack
from gnomon.search.fit.ladder import Fitting, Rung
from gnomon.search.fit.largest import largest
from gnomon.search.fit.terms import Change
from gnomon.units import parse_bytes, show_seconds

BUDGET = "60s"
"""Processor time, unless --budget says otherwise."""


def run(options: FitOptions) -> int:
    """Predict the ladder, print it, write the chosen plan."""
    source = job_file(options) if options.to is not None else None
    if options.to is not None and source is None:
        raise InputError("--to writes a job file with what makes it fit; give one, or -o FILE for a plan file")
    options = options if source is None else replace(options, **at_fields(options, source[1]))
    job_request = read_request(options)
    named = _named(options, job_request) if options.output else ""
    limit = None if options.memory is None else quantity("--memory", parse_bytes, options.memory)
    if options.sac_ilp:
        check_stack(job_request.stack)
        if options.largest is not None:
            raise InputError("--largest does not recompute tensor by tensor; leave out --sac-ilp")
    request = FitRequest(
        graph=job_request.graph,
        cluster=job_request.cluster,
        plan=job_request.plan,
        workload=job_request.workload,
        stack=job_request.stack,
        memory_bytes=limit,
        by_tensor=options.sac_ilp,
        terms=job_request.terms,
    )
    progress = Progress("plans predicted:", 0)
    with Budget(options.budget, BUDGET) as budget:
        fitting = request.fitting(keep_going=budget, on_progress=lambda done: progress.say(f"plans predicted: {done}"))
        if not options.json:
            print_lines(heading_text(fitting))
        if options.largest is not None:
            return _largest(options, options.largest, job_request, fitting, progress)
        single_changes = tuple(fitting.single_changes())
        if not options.json:
            print_lines(alone_text(fitting, single_changes))
        answer = ladder(fitting, single_changes)
    progress.end()
    chosen = _chosen(answer, options.choose)
    if options.json:
        print_json(fit_mapping(fitting, answer, chosen=chosen, assumed=(*job_request.assumed, *job_request.notes)))
    else:
        print_lines((*combined_text(fitting, answer, chosen=chosen), *_assumed(job_request, fitting)))
    if options.output:
        _write(options, options.output, job_request, named, answer, chosen)
    if options.to is not None and source is not None:
        _write_job(options, options.to, job_request, source[1], fitting, chosen)
    return 0 if answer.fits or answer.combined else 1


def _largest(
    options: FitOptions, what: Literal["batch", "seq-len"], request: Request, fitting: Fitting, progress: Progress
) -> int:
    """The answer to --largest."""
    if options.output is not None or options.choose is not None:
        raise InputError("--largest shows sizes and writes no plan; leave out -o and --choose")
    sizes = tuple(largest(fitting, what))
    progress.end()
    if options.json:
        assumed = (*request.assumed, *request.notes)
        print_json(largest_mapping(fitting, what, sizes, assumed=assumed))
    else:
        print_lines((*largest_text(fitting, what, sizes), *_assumed(request, fitting)))
    return 0 if any(case.size for case in sizes) else 1


def _assumed(request: Request, fitting: Fitting) -> tuple[str, ...]:
    every = tuple(dict.fromkeys((*request.assumed, *request.notes, *fitting.base.assumptions)))
    shown = tuple(line for line in every if material(fitting.base, line))
    return (
        ("", "assumed", *(line for assumption in shown for line in wrapped(assumption, bullet="- "))) if shown else ()
    )


def _chosen(ladder: Ladder, number: int | None) -> Rung | None:
    """The rung of `--choose`, or the fastest that fits."""
    if number is None:
        return ladder.fastest
    if number > len(ladder.combined):
        raise InputError(f"--choose {number}: {len(ladder.combined)} ways to fit were found; give one of their numbers")
    return ladder.combined[number - 1]


def _named(options: FitOptions, request: Request) -> str:
    """The model by a name that a plan file can have: as it is given, or the catalogue's if a job file trains that."""
    if options.plan is not None and options.model is None:
        plan = load_plan(options.plan)
        if isinstance(plan, PlanFile):
            return plan.model
    name = adapted_name(options, options.network or options.model)
    if name is None or options.source is not None and options.network is None or is_job_file(name):
        if (known := _known(request)) is not None:
            return known
        raise InputError(
            "-o writes a plan file, which names its model; the job file's is none of the catalogue's: give it as "
            "--model NAME or --model path/to/config.json, or write the job file with --to"
        )
    return name


def _write_job(
    options: FitOptions, output: str, request: Request, path: Path, fitting: Fitting, chosen: Rung | None
) -> None:
    """The job's own file with the chosen changes in it, which is read again before it is written. InputError where
    nothing makes it fit, and where a change is not a setting of the file."""
    if chosen is None:
        reason = "the job fits as it is" if fitting.has_room(fitting.base) else "nothing was found that fits"
        raise InputError(f"{reason}, so {output} was not written")
    change = Change(before=request.plan, after=chosen.plan, workload=request.workload)
    settings = None if request.terms is None else request.terms.settings(chosen.options, change)
    if request.terms is None or settings is None:
        raise InputError(f"what such a file says of its plan is not known, so {output} was not written")
    if by_hand := [str(value) for key, value in settings if not key]:
        raise InputError(f"{by_hand[0]}: no setting of the file, so {output} was not written; another way: --choose N")
    words = request.terms.in_file(settings)
    with job_text(options, path) as text:
        reread = text.with_settings(words, chosen.step_s)
    if not fitting.has_room(reread.prediction):
        raise InputError(
            f"the changed file would not fit ({reread.prediction.verdict}), so {output} was not written; change it by "
            f"hand, as listed, or choose another way: --choose N"
        )
    save_job(reread.text, path, output)
    if not options.json:
        before, after = text.text.splitlines(), reread.text.splitlines()
        print_lines(("", *unified_diff(before, after, str(path), output, lineterm="", n=1)))
        step = show_seconds(reread.prediction.step_s)
        print_lines(("", f"written to {output}: {step} a step; {reread.prediction.verdict}"))


def _known(request: Request) -> str | None:
    """The catalogue's name, adapters included, of a model that is the same to every size; None for others."""
    base, adapters = parse_adapters(request.graph.name)
    names = [base] if base in CONFIGS else [] if adapters is not None else list(CONFIGS)
    for name in names:
        spelled = f"{name}{adapters or ''}"
        if replace(model(spelled), name="") == replace(request.graph, name=""):
            return spelled
    return None


def _write(options: FitOptions, output: str, request: Request, named: str, ladder: Ladder, chosen: Rung | None) -> None:
    prediction = ladder.base if ladder.fits else chosen.prediction if chosen is not None else None
    if prediction is None:
        raise InputError(f"nothing was found that fits, so {output} was not written")
    machines = options.on
    if machines is None:  # of a plan file then, which `read_request` has read
        plan = None if options.plan is None else load_plan(options.plan)
        machines = plan.on if isinstance(plan, PlanFile) else request.cluster.name
    parse_cluster(machines)
    others = (rung.plan for rung in ladder.combined)
    what = For(named, machines, options.stack)
    file = plan_file(what, request.workload, request.stack, prediction, request.assumed, others=others)
    save_plan_file(replace(file, workload=prediction.workload), output)
    if not options.json:
        print_lines(("", *next_steps(output, "run")))
