"""`gnomon plan --like FILE`: what of a job's own file to change, so that it runs faster on the machines that it has.

`run(options)` reads the job, searches what its program can do with everything else as the file has it, and prints the
lines that change, each with what it gains by itself, and the file's diff; `--to` writes the changed file. What is
offered is what the changed file says when it is read again: each is put into the file's text, read, and predicted.
Leaves out the search (`cli.plan`) and putting settings into a text (`formats.edit`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from shlex import quote

from gnomon.cli.budget import ONE, Budget
from gnomon.cli.job_text import JobText, Reread, Where, at, job_text, save_job
from gnomon.cli.jobs import job_file
from gnomon.cli.options.flags import changed_options, flags
from gnomon.cli.options.job import PASTED, TrainingOptions
from gnomon.cli.options.plan import PlanOptions
from gnomon.cli.plan import searched
from gnomon.cli.plan_asked import FIELDS, PlanRequest
from gnomon.cli.plan_choices import PlanChoices
from gnomon.cli.request import Request, read_request
from gnomon.cli.terminal import print_json, print_lines
from gnomon.cli.values import quantity
from gnomon.errors import GnomonError, InputError, PlanError
from gnomon.formats.changed import KINDS, SCRIPT, Words, written_setting
from gnomon.formats.job import ModelConfig
from gnomon.graph import Graph
from gnomon.models.decoder import DecoderConfig
from gnomon.plans import Goal, Plan, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.report.like import Like, Line, like_mapping, like_text
from gnomon.request.exported import SAME, Target, based
from gnomon.request.model import read_config
from gnomon.search.fit.terms import REMOVED, Change, Setting
from gnomon.search.refinement.choices import fixed_base
from gnomon.units import parse_bytes

TOP = 12
"""Plans of the search that are put into the file's text."""


def run(options: PlanOptions) -> int:
    """Read, search, put into the file, print, write."""
    training = _as_training(options)
    source = job_file(training)
    if source is None:
        raise InputError(
            f"{str(training.model)[:64]!r} is no job file here; give its path, or plan a model by its name: "
            f"gnomon plan MODEL"
        )
    _refuse(options)
    job_format, path = source
    if job_format.name == "script":
        raise InputError(
            f"{path} is a script, whose text is not changed; gnomon fit {path} --args shows what frees memory, and "
            f"gnomon plan MODEL the layouts of its model"
        )
    training = at(training, path)
    request = read_request(training)
    # What the file does now is what every change is held against.
    before = predict(request.graph, request.cluster, request.plan, request.workload, request.stack)
    words = Words(
        program=job_format,
        kind=KINDS.get(path.suffix.lower(), SCRIPT),
        terms=request.terms,
        config=_config(request, options.network),
        graph=request.graph,
        near=max(node.count for node in request.cluster.nodes),
    )
    with job_text(training, path) as text:
        file = _File(text=text, request=request, words=words)
        with Budget(options.budget, ONE) as budget:
            plan_request = _question(options, request, file)
            try:
                # Several, since the fastest plan may be one that the program's file cannot say.
                search_result = searched(replace(options, top=TOP), plan_request, budget)
            except PlanError as error:
                shown = quote(str(path))
                raise PlanError(
                    f"{error}; gnomon fit {shown} --on {options.on} lists what would make it fit"
                ) from error
        after, changed, lines = _chosen(file, before, search_result.best.plan)
        covered = f"{search_result.result.counts.space} plans covered; what the file does not change stays as it is"
    shown = PASTED if options.like == PASTED else str(path)
    answer = Like(
        source=shown,
        target=options.to or shown,
        program=job_format.name,
        before=before,
        after=after,
        lines=lines,
        text=text.text,
        changed_file=changed,
        covered=covered,
    )
    assumed, notes = (*request.assumed, *plan_request.assumed), request.notes
    if options.json:
        print_json(like_mapping(answer, assumed=assumed, notes=notes))
    else:
        print_lines(like_text(answer, assumed=assumed, notes=notes))
    if options.to is not None:
        # The status is then the budget's alone: nothing faster is no error.
        if after is None:  # a copy would look like an answer
            print_lines(() if options.json else ("", f"{options.to} was not written"))
            return budget.status
        save_job(changed, path, options.to)
        if not options.json:
            print_lines(("", f"written to {options.to}"))
    return budget.status


SHARED = (
    "on", "source", "network", "settings", "arguments", "vocab_size", "strict", "sizes", "no_local_calibration",
)  # fmt: skip
"""Options that say the job, as they do for `gnomon predict`."""

SEARCHED = (*FIELDS, "memory", "forbid", "refine", "fix", "allow", "methods", "equal_stages", "budget")
"""Options of the search that mean the same for a job file."""


def _refuse(options: PlanOptions) -> None:
    """InputError for an option that has no meaning here: one that asks something else, or that is for the file to
    say. None is dropped in silence."""
    allowed = {"like", "model", "to", "json", *SHARED, *SEARCHED}
    for name in changed_options(options):
        if name == "output":
            raise InputError("-o writes a plan file, and what is planned is a job file: --to FILE writes it changed")
        if name not in allowed:
            raise InputError(
                f"{flags(PlanOptions)[name].names[-1]} does not go with a job file, which is planned as it says; leave "
                f"it out, or change the file's own setting (--set NAME=VALUE)"
            )


def _as_training(options: PlanOptions) -> TrainingOptions:
    """The job as `gnomon predict` takes it. Axes that are given fix the search, and do not change the job. InputError
    where two jobs are named."""
    if options.like is not None and (options.model or options.source is not None):
        raise InputError("--like names the job; leave MODEL and --from out, and give the network by --model NAME")
    if options.source is not None and options.model:
        raise InputError("--from names the job; leave MODEL out, and give the network by --model NAME")
    same = {name: getattr(options, name) for name in SHARED}
    return TrainingOptions(model=options.like or options.model or None, **same)


def _config(request: Request, network: str | None) -> ModelConfig | None:
    """The sizes of the job's network; None for one that is no decoder of ours."""
    model = None if request.job is None else request.job.model
    name = network if model is None else model
    if isinstance(name, (DecoderConfig, Graph)):
        return None
    try:
        return read_config(name)[0] if isinstance(name, str) else name
    except GnomonError:
        return None


@dataclass(frozen=True, kw_only=True)
class _File:
    """The job's file, and what it says of plans. A `request.exported.Says`."""

    text: JobText
    request: Request
    words: Words

    def settings(self, plan: Plan) -> tuple[Setting, ...]:
        """What has to be set for a plan. PlanError for one that the file cannot say."""
        return self.words.settings(Change(before=self.request.plan, after=plan, workload=self.request.workload))

    def least(self, plan: Plan) -> tuple[Setting, ...]:
        """The settings without which the changed file would not say the plan: less those that change nothing once the
        others are there, as a value that is the program's own."""
        settings = self.settings(plan)
        step_s = self.with_plan(settings, plan).prediction.step_s
        for one in settings:
            # Leaving a flag in that the new plan does not have can end in an assertion there, which a prediction does
            # not see.
            if one[1] is REMOVED or one[1] is False:
                continue  # what is left behind may be refused by the program itself
            fewer = tuple(other for other in settings if other is not one)
            try:
                without = self.with_plan(fewer, plan)
            except GnomonError:
                continue
            # What is recomputed is compared too: with room for everything another choice may take the same time.
            if without.prediction.step_s == step_s and without.request.plan.saved == plan.saved:
                settings = fewer
        return settings

    def with_plan(self, settings: Sequence[Setting], plan: Plan) -> Reread:
        """The file with the settings of a plan, read again. GnomonError where it says no job, or one of another
        batch."""
        request = self.request
        step_s = predict(request.graph, request.cluster, plan, request.workload, request.stack).step_s
        return self.text.with_settings(settings, step_s, workload=request.workload)

    def program(self) -> Target:
        """Returns what the job's program can write, whatever the job's own file says."""
        request, words = self.request, self.words
        return Target(
            format=words.program,
            config=words.config,
            graph=request.graph,
            machines=request.cluster,
            workload=request.workload,
            stack=request.stack,
        )

    def predicted(self, plan: Plan) -> tuple[Plan, Prediction]:
        """A plan as the changed file says it."""
        reread = self.with_plan(self.settings(plan), plan)
        return reread.request.plan, reread.prediction

    offered = predicted


def _question(options: PlanOptions, request: Request, file: _File) -> PlanRequest:
    """The question to search: with what the file's program can do open, and everything else as the file has it."""
    plan, terms = request.plan, request.terms
    written = file.words.writes(Change(before=plan, after=plan, workload=request.workload))
    if not written and terms is None:
        raise InputError(
            f"what a file of {file.words.program.name} says of its plan is not known, so it cannot be changed; plan "
            f"the model itself: gnomon plan MODEL --on {options.on} --stack NAME"
        )
    fixed = {} if written else _as_it_is(plan, request.workload, frozenset(terms.words if terms is not None else ()))
    fixed |= {field: value for name, field in FIELDS.items() if (value := getattr(options, name)) is not None}
    chosen = PlanChoices.read(options if written else replace(options, refine=False), request.stack)
    fixed |= chosen.point
    base = replace(
        plan,
        stages=(),
        schedule=Schedule(passes=plan.schedule.passes),
        saved=replace(plan.saved, rules=()) if "recompute" not in fixed else plan.saved,
        layout=replace(plan.layout, dispatch=None if written else plan.layout.dispatch),
    )
    if written and not base.overlap.grad_reduce:  # buckets are open then: as the program has them where it overlaps
        early = replace(base, overlap=replace(base.overlap, grad_reduce=True, param_gather=True))
        usual = based(early, file.program(), precision=False)
        base = replace(base, overlap=replace(usual.overlap, grad_reduce=False, param_gather=False))
    limit = None if options.memory is None else quantity("--memory", parse_bytes, options.memory)
    return PlanRequest(
        target=file,
        graph=request.graph,
        notes=request.notes,
        machines=request.cluster,
        stack=request.stack,
        workload=request.workload,
        base=fixed_base(base, request.graph, chosen.fixed),
        fixed=fixed,
        choices=chosen,
        goal=Goal() if limit is None else Goal(memory_bytes=limit),
        assumed=[],
    )


def _as_it_is(plan: Plan, workload: Workload, words: frozenset[str]) -> dict[str, object]:
    """Fields of a point that a file has no words for, as the file has them."""
    mesh, layout, schedule = plan.mesh, plan.layout, plan.schedule
    every: dict[str, object] = {
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "ep": mesh.ep,
        "schedule": schedule.name,
        "virtual_stages": schedule.virtual_stages,
        "micro_batch_size": Change(before=plan, after=plan, workload=workload).micro,
        "sequence_parallel": layout.sequence_parallel,
        "keep_gathered": layout.keep_gathered,
        "context": layout.context,
        "recompute": plan.saved.preset,
        "zero": plan.optimizer.zero,
        "overlap": plan.overlap.grad_reduce,
    }
    if mesh.cp == 1:
        del every["context"]
    if not words & {"tp", "pp", "cp", "zero"}:
        every |= {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    open_ = {name for name in every if name in words}
    return {name: value for name, value in every.items() if name not in open_}


def _chosen(file: _File, before: Prediction, best: Plan) -> tuple[Prediction | None, str, tuple[Line, ...]]:
    """(prediction of the changed file, its text, its lines by themselves); nothing is changed where that gains less
    than `SAME`, unless the file as it is does not fit."""
    settings = file.least(best)
    changed = file.with_plan(settings, best)
    if before.fits and changed.prediction.step_s > before.step_s * (1 - SAME):
        return None, file.text.text, ()
    groups: dict[str, list[Setting]] = {}
    for key, value in settings:
        groups.setdefault(_family(key), []).append((key, value))
    return changed.prediction, changed.text, tuple(_line(file, settings, changed.where) for settings in groups.values())


def _family(key: str) -> str:
    """What a setting is about: settings of one family mean nothing without each other."""
    words = set(re.split("[-_.]", key))
    return next((name for name, about in FAMILIES.items() if words & about), key)


FAMILIES = {
    "batch": {"batch", "accumulation"},
    "recomputation": {"recompute", "checkpointing", "checkpoint"},
    "experts": {"moe"},
    "overlap": {"overlap"},
    "eight bits": {"fp8"},
}
"""What settings can be about -> words of which their keys have one."""


def _line(file: _File, settings: Sequence[Setting], where: Where) -> Line:
    written = tuple(written_setting(setting, file.words.kind) for setting in settings)
    try:
        prediction = file.text.read(settings, where, workload=file.request.workload).prediction
    except GnomonError as error:
        return Line(settings=written, by_itself=None, why=str(error).replace(f"{file.text.place}: ", ""))
    return Line(settings=written, by_itself=prediction, why="")
