"""`gnomon run`: a plan file carried out on this machine, or by the torchrun that started this process.

`run(options)` prints the prediction, trains, prints what was measured beside it, and returns 0, or 130 and 143 when ^C
and SIGTERM ended it (with a checkpoint). Only the runtime needs torch; it is loaded by name, once it is known to be
there. Leaves out comparing in detail: `gnomon compare` does that with the Timeline that this writes.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import Any

from gnomon import schema
from gnomon.cli.missing import need_torch
from gnomon.cli.models import read_model_to_run, teacher_of
from gnomon.cli.options.flags import words_of
from gnomon.cli.options.run import DataOptions, RunOptions
from gnomon.cli.own import with_own
from gnomon.cli.request import named_router
from gnomon.cli.run_job import is_job, planned_job
from gnomon.cli.terminal import print_json, print_lines
from gnomon.cli.values import no_folder
from gnomon.errors import InputError, PlanError
from gnomon.formats.router import SUFFIX, routers_of
from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster
from gnomon.late import load_late
from gnomon.methods import bamboo, check_methods, chunkflow, mimose, partial_reduce, rewrites, skrull, teaching_of, used
from gnomon.methods import every as every_method
from gnomon.methods.easyscale import Observation, place_workers
from gnomon.models.lora import parse_adapters
from gnomon.plans import Plan, PlanFile, Saved, load_plan
from gnomon.prediction import Prediction, memory_copies, predict
from gnomon.prediction.expert_costs import expert_costs
from gnomon.report.prediction import describe
from gnomon.report.tables import Column, gib, number, percent, table, wrapped
from gnomon.request.model import is_code, too_long
from gnomon.sharding.matrices import decaying
from gnomon.software import Stack, stack
from gnomon.timeline.text import print_timeline
from gnomon.units import show_bytes

STACK = "gnomon"
"""The record of the program that runs it: ours."""

KINDS = {"cpu": "cpu", "cuda": "gpu"}
"""Device of torch -> kind of device in the catalogue."""

UNTRIED = "on GPUs the runtime was tried with one H200; several of them, and NCCL, were not"

VALIDATIONS = 5
"""Validations in a run whose user does not say how many."""

NOTICED = 0.05
"""Share of the steps that other processes took, from which on it is said."""

SHORT = 2 * VALIDATIONS
"""Steps below which a run validates only at its end: it would do little else."""

CHECKPOINT_EVERY = 100
"""Steps between checkpoints, where a folder for them is given and nothing else."""


def run(options: RunOptions) -> int:
    """Read, predict, train, tell."""
    differences: tuple[str, ...] = ()
    # A job file of another program has no plan yet: one is made as `predict` reads the file, and what our runtime does
    # otherwise than that program is kept to be printed, not dropped.
    if is_job(options.plan):
        file, options, differences = planned_job(options)
    else:
        file = read_plan(options.plan)
    file = _on_processes(file, options.processes)
    # After the ranks were placed: a plan may itself name fewer devices than ranks, without --processes.
    shared = shares_processes(file, options)
    if options.determinism and not shared:
        raise InputError(
            "--determinism needs --processes N, on which ranks run as logical workers; add it, or leave this out"
        )
    if options.follow_speed and not shared:
        raise InputError(
            "--follow-speed needs --processes N, on which ranks run as logical workers; add it, or leave this out"
        )
    # Logical workers take turns in one process and share its Program; a captured module holds state of its own, of
    # which there would be one for all of them.
    if shared and is_code(file.model):
        raise PlanError("a model that is code runs with a process for each rank; leave --processes and device_of out")
    if options.decisions and not (shared or options.memory_checkpoint_every or bamboo.METHOD.used(file.plan)):
        raise InputError(
            "--decisions records what is decided as processes are lost or slow: it needs --processes N, "
            "--memory-checkpoint-every N or a plan with bamboo; add one, or leave this out"
        )
    # What cannot be is refused here, before torch is loaded and long before a process is started.
    _check_lengths(file, options, shared=shared)
    _check_resumes(file, options, shared=shared)
    _check_plain(file, options)
    _check_there(options)
    graph, notes = read_model_to_run(file.model)
    # Only now, as a recorded load is held against the model's routers. Before torch: a wrong file is said at once.
    file = _routed(file, options, graph)
    need_torch("running a plan")
    if options.explain_optimizer:
        decay = weight_decay_of(graph)
        print_json(decay) if options.json else print_lines(explain_optimizer(file, decay))
        return 0
    machines = parse_cluster(file.on)
    device = device_of(file.on, file.plan, machines, options.device)
    assumed: list[str] = []
    check_methods(file.plan, "run", graph)
    # Two plans from here on: the one that is carried out, and its nearest one that a price exists for.
    predictable = _without_unpredicted(file.plan)
    taught = teacher_of(file.plan, graph)
    priced_for = with_own(_stack(file), machines, options, assumed)
    # Predicted before anything runs, so that the number on screen cannot know what was measured.
    prediction = predict(graph, machines, predictable, file.workload, priced_for, teacher=taught)
    notes += tuple(assumed)
    notes += (f"the prediction takes the router's load of {options.router}",) if options.router is not None else ()
    notes += _turns(file, options) if shared else ()
    notes += _groups(file.plan)
    notes += (memory_copies(prediction, every).sentence,) if (every := options.memory_checkpoint_every) else ()
    notes += _lengths(file, prediction, options.packing)
    # On processors all ranks are processes of this one machine and add up; a GPU's memory was checked by the plan's
    # verdict.
    notes += _check_memory(prediction) if device == "cpu" else (UNTRIED,)
    if any(chip.kind != KINDS[device] for chip in machines.devices):
        notes += (f"the prediction is for {file.on}, and this runs on {device}",)
    folder = Path(options.checkpoints or Path(options.plan).with_suffix(".checkpoints"))
    resumes, resume_notes = _check_checkpoints(
        folder, resume=options.resume, is_requested=options.checkpoints is not None
    )
    notes += resume_notes
    # A student without weights of its own begins with layers of its teacher, where their shapes are alike.
    if taught is not None and options.weights is None:
        notes += load_late("gnomon.methods.learnt.teacher:begins")(teaching_of(file.plan), graph, taught)
    else:
        # A resumed run begins as its checkpoint; saying where the first run's numbers came from would mislead.
        notes += () if resumes else begins(file.model, options.weights, options.seed)
    notes += uncalibrated(machines, file.on)
    notes += tuple(f"not as the file says: {one}" for one in differences)
    # Headers of weight files are read here, and the folder of --export is tried: neither must fail after hours of
    # training.
    _check_weights(options, file, graph)
    if is_code(file.model):
        notes += load_late("gnomon.runtime.launch.captured_job:randomness")(graph)
    shown = is_rank_0() and not options.json
    if shown:
        print_lines(_before(file, prediction, notes, options, done=resumes))
        # Out before any process is started: in a pipe it would stand behind what those write.
        sys.stdout.flush()
    job = _job(options, file, graph, prediction, folder, device=device)
    plain = _trained_plain(job) if options.with_plain else None
    # As a shell has it of a process that a signal ended.
    if plain is not None and plain.signal:
        return 128 + int(plain.signal)
    outcome = load_late("gnomon.runtime.launch.run:run")(job)
    # Under torchrun every process comes here, and only one may speak.
    if is_rank_0():
        run_report = RunReport(
            file=file, graph=graph, prediction=prediction, outcome=outcome, plain=plain, shared=shared
        )
        _after(options, run_report)
    return 128 + outcome.signal if outcome.signal else 0


def weight_decay_of(graph: Graph) -> dict[str, Any]:
    """What takes weight decay, for JSON: the rule, the number, and names of parameters."""
    every = decaying(graph)
    return {
        "weight_decay": load_late("gnomon.runtime.optim.update:AdamWSettings")().weight_decay,
        "decays": [name for name, decays in every.items() if decays],
        "does_not_decay": [name for name, decays in every.items() if not decays],
    }


def explain_optimizer(file: PlanFile, decay: dict[str, Any]) -> tuple[str, ...]:
    """The parameters by groups, those of all layers under one name, with how many there are of each."""

    def rows(names: Sequence[str]) -> list[str]:
        # A hundred layers have the same list: numbers of layers become stars.
        kinds = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
        return [f"  {name}{f' ({count})' if count > 1 else ''}" for name, count in kinds.items()]

    return (
        f"{file.model}, {file.plan.optimizer.kind}",
        f"weight decay {decay['weight_decay']:g}, matrices of linears, experts and convolutions, and tables:",
        *rows(decay["decays"]),
        "no weight decay, norms, biases, and vectors of routers, sinks and state-space scans:",
        *rows(decay["does_not_decay"]),
    )


def _without_unpredicted(plan: Plan) -> Plan:
    """The nearest plan that can be predicted, of methods that decide while a run goes on. For partial reduce, whose
    workers average with those that are ready, the plan that averages over all in every step; for mimose, which
    recomputes what the length of a batch asks for, the plan that recomputes every layer."""
    # Both choose as the run goes, from what it observes; a plan's prediction has no such observations.
    unpriced = (partial_reduce.NAME, mimose.NAME)
    passes = tuple(one for one in plan.schedule.passes if one.name not in unpriced)
    saved = Saved(preset="full") if mimose.METHOD.used(plan) else plan.saved
    return replace(plan, schedule=replace(plan.schedule, passes=passes), saved=saved)


def _on_processes(file: PlanFile, processes: int | None) -> PlanFile:
    """The plan with its ranks as logical workers on so many processes, if they are asked for."""
    if processes is None:
        return file
    if processes > file.plan.world_size:
        raise PlanError(f"the plan has {file.plan.world_size} ranks, which are no use to {processes} processes")
    return replace(file, plan=place_workers(file.plan, Observation(processes=processes)))


def _routed(file: PlanFile, options: RunOptions, graph: Graph) -> PlanFile:
    """The plan with the router's load that the prediction is to take. InputError for one of another model, and where
    routers are to be recorded and cannot be."""
    if (name := options.record_router) is not None:
        routers_of(graph)
        if Path(name).suffix != SUFFIX:
            raise InputError(f"--record-router writes a {SUFFIX} file; name it {Path(name).with_suffix(SUFFIX)}")
        others = (
            ("--processes", shares_processes(file, options)),
            ("--memory-checkpoint-every", options.memory_checkpoint_every is not None),
            ("a plan with bamboo", bamboo.METHOD.used(file.plan)),
            ("a plan with partial_reduce", partial_reduce.METHOD.used(file.plan)),
        )
        for what, is_asked in others:
            if is_asked:
                raise InputError(
                    f"--record-router counts what the plan's own processes route, one a rank, and {what} runs them "
                    f"otherwise; record without it"
                )
    if options.router is None:
        return file
    # Capacity and padding are the plan's; the file of a load says only who was chosen.
    before = file.workload.router
    load = replace(named_router(options.router, graph), capacity=before.capacity, padded=before.padded)
    return replace(file, workload=replace(file.workload, router=load))


def _check_lengths(file: PlanFile, options: RunOptions, *, shared: bool) -> None:
    """InputError where sequences of several lengths would be run by what takes rows of one length."""
    methods = [entry for entry in (chunkflow.METHOD, skrull.METHOD) if entry.used(file.plan)]
    if file.workload.seq_len and not methods:
        return
    others = (
        ("ranks that share processes", shared),
        ("--memory-checkpoint-every", options.memory_checkpoint_every is not None),
        ("bamboo", bamboo.METHOD.used(file.plan)),
        ("partial_reduce", partial_reduce.METHOD.used(file.plan)),
        ("a model that is code", is_code(file.model)),
    )
    for what, is_asked in others:
        if is_asked:
            why = f"{methods[0].name} makes its own microbatches" if methods else "the plan is for several lengths"
            raise InputError(f"{why}, and {what} takes rows of one length; leave one of them out")


def _check_resumes(file: PlanFile, options: RunOptions, *, shared: bool) -> None:
    """InputError where a run is to go on from a checkpoint, or be run anew in part, with a method that keeps more than
    checkpoints hold."""
    checkpoint_options = (
        ("--resume", options.resume),
        ("--max-restarts", options.max_restarts > 0),
        ("--memory-checkpoint-every", options.memory_checkpoint_every is not None),
        ("ranks that share processes", shared),
        ("a plan with bamboo", bamboo.METHOD.used(file.plan)),
        ("a plan with partial_reduce", partial_reduce.METHOD.used(file.plan)),
    )
    what = next((what for what, is_asked in checkpoint_options if is_asked), None)
    for entry in used(file.plan):
        if not entry.resumes and what is not None:
            raise InputError(
                f"{entry.name} keeps what no checkpoint holds, so {what} cannot go on with it; leave one of them out"
            )


def changing(plan: Plan) -> tuple[str, ...]:
    """Methods of a plan that change what is learnt."""
    return tuple(entry.name for entry in used(plan) if not entry.resumes)


def _check_plain(file: PlanFile, options: RunOptions) -> None:
    """InputError where a run without methods is asked for beside one that has none, or cannot be started after it."""
    if not options.with_plain:
        return
    if not changing(file.plan):
        known = ", ".join(entry.name for entry in every_method() if not entry.resumes)
        raise InputError(
            f"--with-plain trains the plan without methods that change what is learnt ({known}), and it names none; "
            f"leave it out"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError("--with-plain runs twice, which torchrun's processes do not; start it without torchrun")


def _trained_plain(job: Any) -> Any:
    """The outcome of a job without the methods that change what is learnt, for as many steps."""
    left_out = changing(job.plan)
    passes = tuple(one for one in job.plan.schedule.passes if one.name not in left_out)
    plan = replace(job.plan, schedule=replace(job.plan.schedule, passes=passes))
    if not job.quiet:
        print(f"first without {', '.join(left_out)}, for as many steps:", file=sys.stderr, flush=True)
    # The plain run is there to be compared with and leaves nothing behind; nor is it held against the prediction, which
    # is of the plan with its methods.
    without = replace(job, plan=plan, export=None, checkpoints=None, checkpoint_at_end=False, measure=False)
    return load_late("gnomon.runtime.launch.run:run")(replace(without, expected_step_s=None, record_router=None))


def shares_processes(file: PlanFile, options: RunOptions) -> bool:
    """Whether ranks are logical workers, whose processes may come and go."""
    return options.processes is not None or file.plan.num_devices < file.plan.world_size


def _turns(file: PlanFile, options: RunOptions) -> tuple[str, ...]:
    """What is said of logical workers."""
    workers, processes = file.plan.world_size, file.plan.num_devices
    where = options.checkpoints or options.plan
    return (
        f"{workers} logical workers on {processes} processes, the same losses on any number; the prediction is for "
        f"these; gnomon scale {quote(where)} --to N changes the number while this runs",
    )


def _groups(plan: Plan) -> tuple[str, ...]:
    """What is said of workers that average their models in groups."""
    if not partial_reduce.METHOD.used(plan):
        return ()
    settings = partial_reduce.settings_of(plan)
    return (
        f"{settings.workers} workers average their models in groups of {settings.group} that are ready (partial "
        f"reduce): a slow one holds up nobody, and losses differ from run to run; the prediction is for an all-reduce "
        f"of gradients in every step",
    )


def _lengths(file: PlanFile, prediction: Prediction, packing: str | None) -> tuple[str, ...]:
    """What is said of batches of many lengths. PlanError for a budget that the longest is not within."""
    lines, plan, workload = list[str](), file.plan, file.workload
    if mimose.METHOD.used(plan):
        budget, by_class = mimose.settings_of(plan).budget, prediction.tightest.by_class
        needs = sum(by_class[name] for name in ("parameters", "gradients", "master", "states", "activations", "logits"))
        if needs > budget:
            raise PlanError(
                f"mimose has a budget of {show_bytes(budget)}, and a microbatch of the longest sequences is predicted "
                f"to keep {show_bytes(needs)} with every layer recomputed; raise the budget, or take less seq_len or "
                f"a smaller micro batch"
            )
        lines.append(
            f"mimose recomputes as many layers as the length of each microbatch asks for, within {show_bytes(budget)} "
            f"a rank; the prediction is for all of them"
        )
    every = workload.sequence_lengths() if workload.distribution is None else workload.distribution.values
    if warning := too_long(file.model, max(every)):
        lines.append(warning)
    if workload.distribution is not None:
        lines.append("each step draws lengths of its own; the prediction is for one draw")
    elif workload.lengths and packing in ("documents", "padded"):
        lines.append("sequences are documents as long as they are; the prediction is for the lengths of the plan")
    if packing == "padded" and workload.seq_len:
        lines.append(
            "a microbatch is as long as its longest row; the prediction, and tokens a second, take rows of seq_len"
        )
    return tuple(lines)


def _check_weights(options: RunOptions, file: PlanFile, graph: Graph) -> None:
    """InputError for weights that are not the model's, or a folder that they cannot be written to."""
    if is_code(file.model):
        load_late("gnomon.runtime.launch.captured_job:check_trainable")(graph)
        if options.export is not None:
            load_late("gnomon.runtime.checkpoint.pretrained:check_target")(_folder(options.export))
        return
    if isinstance(options.data, str) and is_code(options.data):
        raise InputError(f"--data {options.data} makes batches for a model that is code, and {file.model!r} is none")
    model = _source(options, file)
    if options.weights is not None:
        load_late("gnomon.runtime.checkpoint.pretrained:values_of")(model, graph)
    if options.export is not None:
        load_late("gnomon.runtime.checkpoint.pretrained:check_export")(_folder(options.export), model)


def _stack(file: PlanFile) -> Stack:
    """Returns our own program's stack; with the numbers of a stack file of it, if the plan names one."""
    named = stack(file.stack) if file.stack.endswith(".toml") else None
    return named if named is not None and named.name == STACK else stack(STACK)


def read_plan(path: str) -> PlanFile:
    """Reads a plan file; InputError for a plan that does not say what it is for."""
    if not isinstance(file := load_plan(path), PlanFile):
        raise InputError(
            f"{path} does not say which model, machines and batch it is for; start it with "
            f'`schema = "{PlanFile.SCHEMA}"`, as `gnomon plan MODEL --on CLUSTER -o FILE` does'
        )
    return file


def _folder(name: str) -> Path:
    """Returns the folder of a model or of weights as a path."""
    return Path(name).expanduser()


def _source(options: RunOptions, file: PlanFile) -> Path:
    """Folder or config.json that says in which layout weights are."""
    return _folder(options.weights or parse_adapters(file.model)[0])


def _read_from(options: RunOptions, file: PlanFile) -> Path | None:
    """What checkpoints name as the model, whole; None for one that is no file."""
    if is_code(file.model):
        return None
    source = _source(options, file)
    return source.resolve() if source.exists() else None


def begins(model: str, weights: str | None, seed: int) -> tuple[str, ...]:
    """What the parameters begin as, said."""
    if weights is not None:
        return (f"parameters begin as the weights in {weights}",)
    if is_code(model):
        return (f"parameters begin as {model.partition('(')[0]}() makes them, after torch.manual_seed({seed})",)
    model = parse_adapters(model)[0]
    folder = Path(model) if Path(model).is_dir() else Path(model).parent
    weight_files = sorted(file.name for file in folder.glob("*.safetensors")) if Path(model).exists() else []
    unread = (
        f"; {weight_files[0]} next to its config.json is not read: --weights {folder} begins with it"
        if weight_files
        else ""
    )
    return (f"parameters begin as random numbers of seed {seed}{unread}",)


def device_of(on: str, plan: Plan, machines: Cluster, name_given: str | None) -> str:
    """Chooses `cpu` or `cuda`: what was requested, or else what the plan's machines have. PlanError for machines
    that the runtime does not drive, and without the GPUs. on: how the user names them."""
    names = {kind: name for name, kind in KINDS.items()}
    other = next((device.name for device in machines.devices if device.kind not in names), None)
    if name_given is None and other is not None:
        raise PlanError(
            f"the plan is for {on}, whose {other} the runtime does not drive; plan for this machine with --on "
            f"local, or try the plan on processors with --device cpu"
        )
    device = name_given or ("cuda" if any(chip.kind == "gpu" for chip in machines.devices) else "cpu")
    if device == "cuda":
        has: int = load_late("torch.cuda:device_count")()
        # Under torchrun this machine has only some of the ranks.
        needs = int(os.environ.get("LOCAL_WORLD_SIZE", plan.world_size))
        if has < needs:
            raise PlanError(
                f"the plan is for {on} and needs {needs} GPUs on this machine, where torch sees {has}; plan for "
                f"this machine with --on local, or try the plan on processors with --device cpu"
            )
    return device


def _check_memory(prediction: Prediction) -> tuple[str, ...]:
    """PlanError when all ranks together need more than this machine has; a note where they share its cores."""
    # One row of `memory` is a class of ranks alike, so each counts as many times as it has members.
    needed = sum(rank.peak_bytes * len(rank.ranks) for rank in prediction.memory)
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > has:
        fewer = ", fewer experts.replicas" if prediction.plan.experts.replicas else ""
        raise PlanError(
            f"{prediction.model} needs {gib(needed)} GiB under this plan, and this machine has {gib(has)}; take a "
            f"smaller model, a smaller micro batch{fewer} or recompute"
        )
    cores = os.cpu_count() or 1
    # A calibrated machine was measured with its processes together, so its prices hold the sharing already.
    measured = any(group.node.device.measured for group in prediction.pricing.cluster.groups)
    if prediction.plan.world_size > cores and not measured and "TORCHELASTIC_RUN_ID" not in os.environ:
        return (f"{prediction.plan.world_size} processes share {cores} cores: slower than predicted",)
    return ()


def is_rank_0() -> bool:
    """Whether this process speaks: under torchrun the first one alone does."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def uncalibrated(machines: Cluster, on: str) -> tuple[str, ...]:
    """What is said of a prediction for this machine that nobody measured."""
    if not on.startswith("local") or any(device.measured for device in machines.devices):
        return ()
    return (
        "this machine was never calibrated, so the prediction is for a guess at it and may be off by a factor: "
        "`gnomon calibrate` measures it in about a minute",
    )


def _check_checkpoints(folder: Path, *, resume: bool, is_requested: bool) -> tuple[int, tuple[str, ...]]:
    """(steps behind the newest checkpoint that is gone on from, else 0; notes on checkpoints). InputError when what is
    there would be mixed up with this run, or when a folder that the user asked for cannot be written to."""
    if problem := no_folder(folder):
        if is_requested:
            raise InputError(f"cannot write checkpoints to {str(folder)!r}: {problem}; give another --checkpoints")
        return 0, (
            f"no checkpoint can be written next to the plan ({problem}): a stop keeps nothing (--checkpoints DIR)",
        )
    # A folder with checkpoints of another run in it would be resumed by the next --resume with the wrong parameters.
    if not resume:
        load_late("gnomon.runtime.launch.train:check_unused")(folder)
    elif (newest := load_late("gnomon.runtime.checkpoint.record:newest")(folder)) is None:
        return 0, (f"no checkpoint in {folder} to go on from: starting at the beginning",)
    else:
        step: int = load_late("gnomon.runtime.checkpoint.record:read_record")(newest).step
        return step, (f"resumes after step {step:,}: parameters and the optimizer's states are those of {newest}",)
    return 0, ()


def _job(
    options: RunOptions,
    file: PlanFile,
    graph: Graph,
    prediction: Prediction,
    folder: Path,
    *,
    device: str,
) -> Any:
    settings = load_late("gnomon.runtime.optim.update:AdamWSettings")(lr=options.lr, rate=_schedule(options))
    # Without a folder of the user's, checkpoints are written only when the run is stopped.
    every = options.checkpoint_every or (CHECKPOINT_EVERY if options.checkpoints else 0)
    return load_late("gnomon.runtime.launch.train:TrainingJob")(
        graph=graph,
        code=file.model if is_code(file.model) else "",
        plan=file.plan,
        # A pass that orders rows by predicted times (Lina) gives another Program on another machine's times: the one
        # that was predicted is handed over, so that both sides play the same. Otherwise the ranks lower the plan
        # themselves.
        program=prediction.structure.program if rewrites(file.plan) else None,
        workload=file.workload,
        steps=options.steps,
        weights=None if options.weights is None else _folder(options.weights),
        export=None if options.export is None else (_folder(options.export), _source(options, file)),
        source=_read_from(options, file),
        data=source_of(options),
        settings=settings,
        seed=options.seed,
        # 0 leaves the validation after the last step.
        validate_every=options.steps // VALIDATIONS if options.steps >= SHORT else 0,
        checkpoints=folder,
        checkpoint_every=every,
        checkpoint_at_end=options.checkpoints is not None,
        keep=options.keep,
        resume=options.resume,
        max_restarts=options.max_restarts,
        memory_checkpoint_every=options.memory_checkpoint_every or 0,
        logical_workers=shares_processes(file, options),
        follow_speed=options.follow_speed,
        determinism=options.determinism or "D1",
        grace_s=options.grace,
        decisions=None if options.decisions is None else Path(options.decisions),
        override=tuple(filter(None, (options.override or "").split(","))),
        resume_with=_resume_command(options),
        measure=options.timeline is not None,
        **({"expert_costs": expert_costs(prediction)} if file.plan.experts.rebalance_every else {}),
        record_router=None if options.record_router is None else Path(options.record_router),
        counted=prediction.counted,
        # What measured steps are held against; with workers that take turns it would depend on how many processes there
        # are.
        expected_step_s=None if shares_processes(file, options) else prediction.step_s,
        # To ask before training whether the machine is as fast now as it was then.
        calibrated=prediction.pricing.cluster if device == "cpu" else None,
        device=device,
        **({} if options.meet_within is None else {"meet_s": options.meet_within}),
    )


def _schedule(options: RunOptions) -> Any:
    """How the learning rate changes. PlanError for steps that leave no room for it."""
    shape, lowest = options.lr_schedule, options.min_lr or 0.0
    # A constant rate never comes to the lowest one, and one above --lr would be climbed to.
    if lowest and (shape == "constant" or lowest > options.lr):
        raise InputError(
            f"--min-lr {lowest:g} is what the learning rate {options.lr:g} goes down to under --lr-schedule linear, "
            f"cosine or wsd; give one of these, and a rate below --lr"
        )
    if options.warmup_steps >= options.steps and shape != "constant":
        raise InputError(
            f"--warmup-steps {options.warmup_steps} leave none of {options.steps} steps for --lr-schedule {shape}; "
            f"give fewer, or more --steps"
        )
    # Warm-up, stable, decay: the last tenth of the steps, as in MiniCPM (Hu et al. 2024).
    decay = min(max(1, options.steps // 10), options.steps - options.warmup_steps) if shape == "wsd" else 0
    return load_late("gnomon.runtime.optim.learning_rate:LearningRate")(
        shape=shape,
        warmup_steps=options.warmup_steps,
        total_steps=options.steps if shape != "constant" else 0,
        decay_steps=decay,
        final=lowest / options.lr,
    )


def source_of(options: RunOptions | DataOptions) -> Any:
    """The text that was asked for, or the function that makes batches."""
    if options.data is not None and is_code(options.data):
        return load_late("gnomon.runtime.data.own_batches:OwnData")(name=options.data)
    paths = {
        name: None if path is None else Path(path).expanduser()
        for name, path in (
            ("path", options.data),
            ("tokenizer", options.tokenizer),
            ("chat_template", options.chat_template),
        )
    }
    return load_late("gnomon.runtime.data.store:Source")(
        **paths, column=options.column or "", packing=options.packing or "", learn=options.learn or "answers"
    )


def _check_there(options: RunOptions) -> None:
    """InputError for files that are not there, before torch is loaded and anything is started."""
    for option, name, what in (
        ("data", options.data, "folder or file with text in it"),
        ("tokenizer", options.tokenizer, "folder or file of a tokenizer"),
    ):
        paths = (
            ()
            if name is None or (option == "data" and is_code(name))
            else (Path(name).expanduser(), Path(f"{name}.bin").expanduser())
        )
        if paths and not any(path.exists() for path in paths):
            raise InputError(f"{name!r} does not exist; name a {what} (--{option})")


def _resume_command(options: RunOptions) -> str:
    """The same command with --resume."""
    words = ["gnomon", "run", *words_of(replace(options, resume=True))]
    return " ".join(quote(word) for word in words)


def _before(
    file: PlanFile, prediction: Prediction, notes: Sequence[str], options: RunOptions, *, done: int
) -> tuple[str, ...]:
    """What is trained and expected. done: steps behind it already."""
    tokens = counted_in_step(file, prediction)
    steps = f"steps {done + 1} to {options.steps}" if 0 < done < options.steps else f"{options.steps} steps"
    return (
        *wrapped(f"{prediction.model} on {file.on}: {describe(file.plan, file.workload)}", indent=""),
        *wrapped(
            f"predicted: {number(prediction.step_s)} s a step, {number(tokens / prediction.step_s, 4)} "
            f"{prediction.counted}/s, peak "
            f"{show_bytes(prediction.tightest.peak_bytes)} a rank",
            indent="",
        ),
        *wrapped(f"training {steps} on {source_of(options).describe()}", indent=""),
        *(line for note in notes for line in wrapped(note, bullet="- ")),
    )


def counted_in_step(file: PlanFile, prediction: Prediction) -> int:
    """Tokens of a step; samples, for a model that reads no text (`Prediction.counted`)."""
    work = file.workload
    return sum(work.sequence_lengths()) if prediction.counted == "tokens" else work.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run and its prediction."""

    file: PlanFile
    """What was asked."""
    graph: Graph
    """What was trained."""
    prediction: Prediction
    """What was predicted."""
    outcome: Any
    """What happened: a `gnomon.runtime.Outcome`."""
    plain: Any | None = None
    """The same without methods that change what is learnt, where that was asked for."""
    shared: bool = False
    """Whether ranks took turns in processes, whose number the prediction takes as it was at first."""

    @property
    def tokens(self) -> int:
        """Counts the tokens of a step; or its samples."""
        return counted_in_step(self.file, self.prediction)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        o, prediction = self.outcome, self.prediction
        return {
            "schema": "gnomon.run/1",
            "model": prediction.model,
            "cluster": prediction.cluster,
            "plan": schema.to_mapping(self.file.plan),
            "workload": schema.to_mapping(self.file.workload),
            "resumed_from": o.resumed_from,
            "warm_up_steps": o.warm,
            "stopped_by_signal": o.signal or None,
            "checkpoint": None if o.checkpoint is None else str(o.checkpoint),
            "predicted": {
                "step_s": prediction.step_s,
                "step_s_as_it_was_before_training": None if o.slowdown is None else prediction.step_s * o.slowdown,
                "peak_bytes": prediction.tightest.peak_bytes,
            },
            "measured": {
                "step_s": o.step_s,
                f"{prediction.counted}_per_s": self.tokens / o.step_s,
                "process_peak_bytes": o.process_peak_bytes,
                "waited_for_a_core": o.core_wait_share,
            }
            if o.records
            else None,
            "without_methods": None
            if self.plain is None
            else {
                "methods": list(changing(self.file.plan)),
                "loss": _finite(self.plain.records[-1].loss),
                "validation_loss": _finite(self.plain.records[-1].validation_loss),
            },
            "notes": list(o.notes),
            "optimizer": weight_decay_of(self.graph),
            "steps": [
                {
                    "step": r.step,
                    "loss": _finite(r.loss),
                    "step_s": r.step_s,
                    "validation_loss": _finite(r.validation_loss),
                }
                for r in o.records
            ],
        }


def _finite(loss: float | None) -> float | None:
    """A loss for JSON, which has no NaN: None where training diverged."""
    return loss if loss is not None and isfinite(loss) else None


def _after(options: RunOptions, report: RunReport) -> None:
    """Write the Timeline, say how it went."""
    outcome = report.outcome
    written = []
    if options.timeline is not None and outcome.timeline is not None:
        schema.save_text(print_timeline(outcome.timeline), options.timeline)
        written.append(f"wrote {options.timeline}: the Timeline of a measured step")
    if options.record_router is not None and outcome.records:
        written.append(f"wrote {options.record_router}: the tokens of each expert, for --router of predict and plan")
    if outcome.checkpoint is not None:
        written.append(f"wrote {outcome.checkpoint}: the checkpoint")
    if options.export is not None and outcome.records and not outcome.signal:
        names = "by the module's names" if is_code(report.file.model) else "with their config.json"
        written.append(f"wrote {options.export}: the weights, {names}")
    if options.json:
        print_json(report.to_mapping())
    else:
        notes = [line for note in outcome.notes for line in wrapped(note, bullet="- ")]
        print_lines((*summary(report), *notes, *written))


def summary(report: RunReport) -> tuple[str, ...]:
    """Returns the lines of a run: speed measured and predicted, and the losses."""
    outcome = report.outcome
    if not outcome.records:
        return (f"nothing to do: {outcome.resumed_from} steps are behind it already; ask for more with --steps",)
    predicted, measured = report.prediction.step_s, outcome.step_s
    first, last = outcome.records[0], outcome.records[-1]
    held_out = "" if last.validation_loss is None else f", on held-out text {last.validation_loss:.3f}"
    losses = f"loss {first.loss:.3f} -> {last.loss:.3f}{held_out}"
    other_lines = _without(report, last)
    if report.shared:
        rate = f"{number(report.tokens / measured, 4)} {report.prediction.counted}/s"
        speed = f"measured: {number(measured)} s a step, {rate}"
        return ("", f"{speed}; predicted for the processes at first: {number(predicted)} s", losses)
    columns = (Column(name="", align="left"), *(Column(name=name) for name in ("predicted", "measured", "off by")))
    rows = [
        ("step s", number(predicted), number(measured), _off(predicted, measured)),
        (
            f"{report.prediction.counted}/s",
            number(report.tokens / predicted, 4),
            number(report.tokens / measured, 4),
            _off(report.tokens / predicted, report.tokens / measured),
        ),
    ]
    busier: tuple[str, ...] = ()
    if outcome.slowdown is not None:
        now = predicted * outcome.slowdown
        busier = wrapped(
            f"expected as it was before training: {number(now)} s, off by {_off(now, measured)}", indent=""
        )
    if outcome.core_wait_share is not None and outcome.core_wait_share >= NOTICED:
        undisturbed = measured * (1 - outcome.core_wait_share)
        busier += wrapped(
            f"other processes had the cores for {percent(outcome.core_wait_share, 0)} % of these steps; without "
            f"it a step takes about {number(undisturbed)} s, off by {_off(predicted, undisturbed)}",
            indent="",
        )
    counted = f"steps {outcome.records[outcome.warm].step} to {last.step}"
    warm = f"; the first {outcome.warm} are warm-up" if outcome.warm else ""
    guessed = uncalibrated(report.prediction.pricing.cluster, report.file.on)
    return (
        "",
        *busier,
        *table(columns, rows),
        *wrapped(f"measured: the median of {counted}{warm}", indent=""),
        *(line for note in guessed for line in wrapped(note, indent="")),
        losses,
        *other_lines,
    )


def _without(report: RunReport, last: Any) -> tuple[str, ...]:
    """The losses without methods that change what is learnt, if there are any, and how far those with them are off."""
    if report.plain is None:
        return ()
    plain, names = report.plain.records[-1], ", ".join(changing(report.file.plan))
    held_out = ""
    if plain.validation_loss is not None and last.validation_loss is not None:
        loss_change = last.validation_loss - plain.validation_loss
        held_out = f", on held-out text {plain.validation_loss:.3f} ({names}: {loss_change:+.3f})"
    return wrapped(f"without {names}, as many steps: loss {plain.loss:.3f}{held_out}", indent="")


def _off(predicted: float, measured: float) -> str:
    """How far the prediction is from what was measured, in per cent of the latter."""
    return f"{(predicted / measured - 1) * 100:+.1f} %"
