"""`gnomon plan`: the fastest plan that fits, the runners-up, and a plan file.

`run(options)` searches, prints, writes, and returns 0. That nothing can run or fits is a PlanError that names the
nearest. Leaves out the search itself (room `search`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gnomon.cli.budget import ONE, Budget, Passing, SearchProgress
from gnomon.cli.options.plan import SHOWN, PlanOptions
from gnomon.cli.plan_asked import PlanRequest, config_of, whole_model
from gnomon.cli.plan_file import For, plan_file
from gnomon.cli.plan_goals import answer, is_asked, varied_machines
from gnomon.cli.plan_lengths import plan_varied
from gnomon.cli.plan_mixed import plan_over_kinds
from gnomon.cli.serving import refuse_others
from gnomon.cli.terminal import next_steps, print_json, print_lines
from gnomon.errors import InputError
from gnomon.hardware import Cluster, parse_prices, rent
from gnomon.hardware.kinds import is_mixed
from gnomon.hardware.rent import ANY
from gnomon.late import load_late
from gnomon.orders.one_f_one_b import ORDER as ONE_F_ONE_B
from gnomon.plans import Plan, PlanFile, Saved, is_plan_file, save_plan_file
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.report.planning import plan_text, result_mapping
from gnomon.report.programs import programs_mapping, programs_text
from gnomon.report.tried import ranked_mapping, ranked_text
from gnomon.report.uneven import replicas_mapping, replicas_text
from gnomon.request.exported import AsFile, as_files, comes_back, exportable
from gnomon.request.model import is_job_file
from gnomon.search import FoundPlan, Result, parse_limit, pick_diverse, plan
from gnomon.search.mixed.devices import TRIES
from gnomon.search.passes import Improved, improve
from gnomon.search.questions.goals import Question
from gnomon.search.refinement.make_fit import Spare
from gnomon.software import own


def run(plan_options: PlanOptions) -> int:
    """Searches for plans, prints the best and writes its file."""
    if is_like(plan_options):
        # Late: each question imports a search of its own, and most commands ask only one.
        status: int = load_late("gnomon.cli.plan_like:run")(plan_options)
        return status
    if not plan_options.model:
        raise InputError("no model; give a name (`gnomon catalogue models`), a config.json, or a job file with --like")
    # Options that change a job file say nothing without one.
    if like_only := [name for name in ("--to", *BESIDE) if getattr(plan_options, BESIDE.get(name, "to"))]:
        raise InputError(f"{like_only[0]} goes with a job file; give it with --like FILE")
    refuse_others(plan_options)
    options = plan_options if plan_options.serve else whole_model(plan_options)
    if options.serve:
        status = load_late("gnomon.cli.plan_serve:run")(options)
        return status
    request = PlanRequest.read(options)
    mixed = is_mixed(request.machines)
    if options.mtbf is not None and (mixed or options.lengths or options.try_ or is_asked(options)):
        raise InputError("--mtbf is for the fastest plan on devices of one kind; ask other questions without it")
    if options.lengths:
        return _varied(options, request)
    if options.layers_per_stage is not None and (mixed or is_asked(options)):
        raise InputError("--layers-per-stage is for one plan on devices of one kind; leave it out")
    if options.sac_ilp and (mixed or is_asked(options)):
        raise InputError("--sac-ilp is for the fastest plan on devices of one kind; leave it out")
    if mixed:
        return _over_kinds(options, request)
    if is_asked(options):
        return _other(options, request)
    if options.try_:
        load_late("gnomon.cli.plan_try:check_try")(options, request.machines, request.stack)
        load_late("gnomon.cli.plan_try:limit_of")(options)
    return _one(options, request)


BESIDE = {
    "--model": "network", "--set": "settings", "--args": "arguments", "--vocab-size": "vocab_size",
    "--strict": "strict",
}  # fmt: skip
"""Option that goes with a job file -> its field."""


def is_like(options: PlanOptions) -> bool:
    """Whether a job file is to be changed."""
    named = options.model
    job = is_job_file(named) and not (named.endswith(".toml") and is_plan_file(named))
    return options.like is not None or options.source is not None or job


def _varied(options: PlanOptions, request: PlanRequest) -> int:
    """Plans for a batch of several lengths."""
    if is_asked(options) or request.choices.late:
        raise InputError("--lengths is a question of its own; ask it without the others")
    return plan_varied(options, request)


def _over_kinds(options: PlanOptions, request: PlanRequest) -> int:
    """Plans over devices of several kinds."""
    if options.try_:
        raise InputError("--try is for equal devices, and these are of several kinds; name one of them with --on")
    if request.choices.is_requested:
        raise InputError("--refine is for equal devices; on a mixed cluster fix choices with --fix")
    if is_asked(options):
        return _other(options, request)
    return plan_over_kinds(options, request)


def _other(options: PlanOptions, request: PlanRequest) -> int:
    """Another question than the fastest plan."""
    if options.try_:
        raise InputError("--try runs the best plans of one search; ask other questions without it")
    sizes = [f"--{name}" for name in ("pareto", "longest", "largest") if getattr(options, name)]
    if request.choices.is_requested and sizes:
        raise InputError(f"--refine is for the fastest plan, and {sizes[0]} asks another; fix choices with --fix")
    # A front or a size is of the exact search alone, unless effort is asked for.
    exact = bool(sizes) and (options.pareto or request.choices.effort is None)
    question = Question(
        graph=request.graph,
        stack=request.stack,
        base=request.base,
        fixed=request.fixed,
        limits=tuple(parse_limit(text) for text in request.choices.forbid),
        goal=request.goal,
        prices=_prices(options, request.machines),
        improve=None if exact else lambda result: _improved(options, request, result),
        extra_choices=tuple(name for name in request.choices.extra_choices if not sizes or name == "dispatch"),
        spare=request.choices.spare() if sizes else Spare(),
        tries=options.tries or TRIES,
    )
    return answer(options, question, request.machines, request.workload, request.assumed)


def _prices(options: PlanOptions, machines: Cluster) -> dict[str, float]:
    """The prices that `--price` gives, dollars an hour by device. InputError for the price of a device that no machines
    have which are asked about."""
    prices = parse_prices(tuple(options.price))
    clusters = (machines, *varied_machines(options))
    names = {group.node.device.name for cluster in clusters for group in cluster.groups}
    if unknown := [name for name in prices if name != ANY and name not in names]:
        raise InputError(
            f"--price gives that of {unknown[0]}, and the machines are {', '.join(sorted(names))}; price those, or "
            f"leave it out"
        )
    return prices


def _found(options: PlanOptions, request: PlanRequest, budget: Budget) -> Result:
    """The search, with its progress shown: of the fastest plans if so many are asked for, else of plans that differ."""
    num_wanted = max(SHOWN, options.try_ or 0)
    if options.top is not None:
        return _search(request, max(options.top, options.try_ or 0), budget, diverse=False)
    result = _search(request, num_wanted, budget, diverse=True)
    # Runs are to tell plans apart, so unlike ones come first; alike ones are better than none.
    if options.try_ and len(result.best) < options.try_:  # as many as are asked for, be they alike
        every = _search(request, options.try_, budget, diverse=False).best
        # Unlike ones first, and only as many alike ones as are missing.
        points = {candidate.point for candidate in result.best}
        new_candidates = [candidate for candidate in every if candidate.point not in points]
        result = replace(
            result, best=tuple(sorted((*result.best, *new_candidates), key=lambda candidate: candidate.step_s))
        )
    return result


def _search(request: PlanRequest, top: int, budget: Budget, *, diverse: bool) -> Result:
    on_progress = SearchProgress()
    result = plan(
        *request.job,
        base=request.base,
        fixed=request.fixed,
        forbid=request.choices.forbid,
        extra_choices=request.choices.extra_choices,
        top=top,
        diverse=diverse,
        on_progress=on_progress,
        keep_going=budget.first,
    )
    on_progress.end()
    return result


def searched(options: PlanOptions, request: PlanRequest, budget: Budget) -> Improved:
    """The search, uneven stages, and the choices beyond both."""
    result = exportable(_found(options, request, budget), request.target)
    if request.choices.is_requested and request.stack is PLAIN_STACK:
        request.assumed.append("stack not given: taken to run every choice that --refine tries (--stack)")
    passes = request.choices.passes(
        uneven_stages=not options.equal_stages,
        layers_per_stage=options.layers_per_stage,
        by_tensor=options.sac_ilp,
        replicas=_replica_base(request) if options.uneven_replicas else None,
    )
    with Passing() as on_progress:
        return improve(
            result,
            passes,
            # A pass may make what the program's file cannot say; such a step is not taken.
            accepts=lambda found: comes_back(found, request.target),
            on_pass=on_progress,
            keep_going=budget,
        )


def _improved(options: PlanOptions, request: PlanRequest, result: Result) -> FoundPlan:
    """The best plan of a search of another question, with uneven stages and choices beyond the search."""
    passes = request.choices.passes(uneven_stages=not options.equal_stages, layers_per_stage=options.layers_per_stage)
    with Passing() as on_progress:
        return improve(result, passes, on_pass=on_progress).best


def _one(options: PlanOptions, request: PlanRequest) -> int:
    """Finds the fastest plan: searched, tried if asked, written and printed."""
    cost = rent(request.machines, _prices(options, request.machines))
    with Budget(options.budget, ONE) as budget:
        search_result = searched(options, request, budget)
        # With losses, copies of the state and time between checkpoints are part of what is fastest.
        lost = None
        if options.mtbf is not None:
            compared = load_late("gnomon.cli.plan_losses:compare_copies")
            lost = compared(request, search_result.result, search_result.best, options.mtbf, budget)
    result, assumed = search_result.result, request.assumed
    best = search_result.best if lost is None else lost.best
    assumed += (f"{name} is fixed, and means nothing in this plan" for name in request.choices.idle(best, result))
    no_effect = "no_effect: "
    assumed += (note.removeprefix(no_effect) for note in best.prediction.notes if note.startswith(no_effect))
    tries: Any = None
    again: Result | None = None
    if options.try_:
        # The passes may have made a better plan than the search's best, which is tried with the others.
        every = (best, *(candidate for candidate in result.best if candidate is not best))
        candidates = tuple(
            every[i] for i in pick_diverse([candidate.plan for candidate in every], options.try_, fill=True)
        )
        tries = load_late("gnomon.cli.plan_try:try_plans")(
            options, candidates, lambda candidate: _file(options, result, candidate, assumed), request.machines
        )
        # This machine's numbers have changed: the order that the search would give now is shown beside what ran.
        if tries.refit is not None and tries.refit.stack is not None:
            with Budget(options.budget, ONE) as budget:
                again = _found(options, replace(request, stack=tries.refit.stack), budget)
    elif options.output:
        save_plan_file(_file(options, result, best, assumed), options.output)
    files: tuple[AsFile, ...] = ()
    # Nobody said which program: each that could run the plan is shown with its own prediction.
    if request.stack is PLAIN_STACK:
        config = config_of(options.model)
        files = as_files(best.plan, config, request.graph, request.machines, result.workload)
    if options.json:
        shown = [*assumed, *(cost.sources if cost else ()), *result.best[0].prediction.assumptions]
        extra: dict[str, Any] = {} if tries is None else {"tried": tries.to_mapping()}
        extra |= {} if tries is None or again is None else {"ranked_again": ranked_mapping(again, tries.attempts)}
        extra |= {} if search_result.replicas is None else {"uneven_replicas": replicas_mapping(search_result.replicas)}
        extra |= {} if lost is None else {"losses": load_late("gnomon.cli.plan_losses:mapping")(lost)}
        extra |= {"programs": programs_mapping(files)} if files else {}
        mapping = result_mapping(
            result,
            rent=cost,
            stages=search_result.stages,
            refined=search_result.refined,
            tensors=search_result.tensors,
            climbed=search_result.climbed,
        )
        print_json({**mapping, **extra, "assumptions": shown})
    else:
        text = plan_text(
            result,
            assumed=assumed,
            notes=request.notes,
            rent=cost,
            refined=search_result.refined,
            stages=search_result.stages,
            tensors=search_result.tensors,
            climbed=search_result.climbed,
        )
        print_lines(text)
        if files:
            print_lines(("", *programs_text(files)))
        if lost is not None:
            print_lines(load_late("gnomon.cli.plan_losses:text")(lost))
        if search_result.replicas is not None:
            before = search_result.climbed or search_result.refined
            print_lines(replicas_text(search_result.replicas, (before.best if before else result.best[0]).step_s))
        if tries is not None:
            print_lines(("", *tries.text(options.output)))
            if again is not None:
                print_lines(("", *ranked_text(again, tries.attempts)))
        elif options.output:
            here = options.on.partition(":")[0] == "local"
            print_lines(("", *next_steps(options.output, "run" if here else "export")))
    return budget.status or (0 if tries is None else tries.status())


def _replica_base(request: PlanRequest) -> Plan:
    """The base plan of DAPPLE's planner. InputError for a stack that does not run such stages, and for what is fixed
    that its plans do not have."""
    if request.stack is not PLAIN_STACK and request.stack.name != own.NAME:
        raise InputError(
            f"stages with other numbers of replicas are not run by {request.stack.name}; leave out --uneven-replicas, "
            f"or plan for gnomon run with --stack {own.NAME}"
        )
    plain = {"zero", "recompute"}
    # Values that are every plan's there (an axis of 1, no interleaving) may be fixed all the same.
    wrong = [
        name for name, value in request.fixed.items() if name not in plain and value not in (1, False, ONE_F_ONE_B.name)
    ]
    if wrong:
        raise InputError(
            f"{wrong[0]} is fixed, and --uneven-replicas looks for data-parallel stages under 1F1B, where only "
            f"{' and '.join(sorted(plain))} can be; leave one of them out"
        )
    base, zero, preset = request.base, request.fixed.get("zero"), request.fixed.get("recompute")
    if zero is not None:
        base = replace(base, optimizer=replace(base.optimizer, zero=zero))  # type: ignore[arg-type]
    if preset is not None:
        base = replace(base, saved=Saved(preset=preset))  # type: ignore[arg-type]
    return base


def _file(options: PlanOptions, result: Result, best: FoundPlan, assumed: list[str]) -> PlanFile:
    # Only those that would have been chosen, had they fitted.
    faster = tuple(candidate.plan for candidate in result.near if candidate.step_s < best.step_s)
    others = (candidate.plan for candidate in result.best)
    named = For(options.model, options.on, options.stack)
    return plan_file(named, result.workload, result.stack, best.prediction, assumed, others=others, too_large=faster)
