"""The user's own runs on this machine: kept by `gnomon plan --try`, and the numbers that they give.

`keep` puts a plan file of each run below `$GNOMON_HOME/runs`; `refit` fits those that are there and writes what
`cli.own.with_own` reads; `read_own` and `fit_folder` are for runs anywhere. Leaves out running (`cli.plan_try`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median

from gnomon import schema
from gnomon.cli.models import read_model_to_run
from gnomon.cli.own import IGNORE, machine_of, runs_folder, stack_file
from gnomon.errors import GnomonError, InputError
from gnomon.hardware import Cluster, parse_cluster
from gnomon.plans import PlanFile, is_plan_file, load_plan_file, save_plan_file
from gnomon.prediction import predict
from gnomon.prediction.measured import MeasuredRun, RefusedRun
from gnomon.report.own_runs import FEW, OwnFit, fit_own
from gnomon.report.prediction import describe
from gnomon.report.tables import percent
from gnomon.software import Stack, own
from gnomon.software import stack as named_stack
from gnomon.units import show_seconds

NEWEST = 20
"""Runs that the numbers are fitted to, at most."""


def read_own(source: Path) -> tuple[tuple[MeasuredRun, ...], tuple[RefusedRun, ...]]:
    """(runs, what cannot be read as one) of a plan file with what was measured, or of all those in a folder, by name.

    Other files of a folder are passed over. InputError for a folder without any, or a file that is none.
    """
    paths = sorted(source.glob("*.toml")) if source.is_dir() else [source]
    runs: list[MeasuredRun] = []
    refused: list[RefusedRun] = []
    for path in paths:
        try:
            if source.is_dir() and not is_plan_file(path):
                continue
            file = load_plan_file(path)
            # Without numbers of earlier runs, on top of which new ones would be fitted.
            stack = replace(named_stack(file.stack or own.NAME), own=None)
            runs.append(_own_run(path.stem, file, stack))
        except GnomonError as error:
            refused.append(RefusedRun(id=path.stem, reason=str(error)))
    if not runs and not refused:
        raise InputError(f"no plan file in {str(source)!r}; `gnomon plan --try N --try-dir {source}` puts some there")
    return tuple(runs), tuple(refused)


def _own_run(id: str, file: PlanFile, stack: Stack) -> MeasuredRun:
    """The run of a plan file. InputError for a file without a measurement."""
    ran = file.measured
    if ran is None:
        raise InputError("the plan file does not say what was measured; `gnomon plan --try` writes ones that do")
    return MeasuredRun(
        id=id,
        graph=read_model_to_run(file.model)[0],
        plan=file.plan,
        workload=file.workload,
        stack=stack,
        cluster=parse_cluster(file.on),
        step_s=ran.step_s,
        source=f"{ran.made} on {ran.host}",
    )


def fit_runs(runs: Iterable[MeasuredRun], source: str) -> OwnFit:
    """Fits the runtime's own numbers to measured runs; they name a machine if all runs are of one."""
    measured = tuple(runs)
    machines = {machine_of(run.cluster) for run in measured}
    return fit_own(
        measured, source=source, date=date.today().isoformat(), machine=machines.pop() if len(machines) == 1 else ""
    )


def fit_folder(folder: Path) -> OwnFit:
    """Numbers from all runs that lie in a folder. InputError if none can be read."""
    runs, refused = read_own(folder)
    if not runs:
        raise InputError(f"nothing in {str(folder)!r} can be read as a run: {refused[0].reason}")
    return fit_runs(runs, folder.name)


def keep(files: Iterable[PlanFile]) -> None:
    """Keeps plan files with what was measured; a newer run of the same plan and work takes the place of the older."""
    folder = runs_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        what = schema.dump(replace(file, measured=None, predicted=None))
        name = f"{Path(file.model).stem}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
        save_plan_file(file, folder / f"{name}.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """What the runs that are kept say."""

    stack: Stack | None
    """With their numbers, as predictions now take them; None where they are too few or do no good."""
    summary: str
    """What was done, in a line."""


def refit(machines: Cluster) -> Refit:
    """Fits the newest runs of a machine again. Writes the file that `with_own` reads, or takes it away where fewer than
    FEW runs are there, or where numbers of the other runs predict each run no better than none do."""
    runs = _newest(machine_of(machines))
    path = stack_file()
    why = f"{len(runs)} of the {FEW} runs that it takes"
    if len(runs) >= FEW:
        fit = fit_runs(runs, runs_folder().name)
        # Each run by numbers of the others: by numbers that it was fitted to itself it would always look better.
        before, after = (median(map(abs, errors)) for errors in (fit.before, fit.left_out))
        if after <= before and fit.stack.own is not None:
            schema.save_file(fit.stack, path)
            summary = f"from now on predictions for this machine take what {len(fit.runs)} runs say ({path}; {IGNORE})"
            return Refit(stack=fit.stack, summary=summary)
        why = (
            f"each of {len(fit.runs)} runs is predicted {percent(after)} % off with numbers of the others, and "
            f"{percent(before)} % without"
        )
    path.unlink(missing_ok=True)
    return Refit(stack=None, summary=f"predictions stay as they are: {why}")


def accuracy(machines: Cluster, stack: Stack) -> tuple[str, ...]:
    """A line for each run that is kept of these machines, predicted as now and measured; none where there is none."""
    lines = []
    for run in _newest(machine_of(machines)) if stack.name == own.NAME else ():
        try:
            prediction = predict(run.graph, run.cluster, run.plan, run.workload, stack)
        except GnomonError:
            continue
        off = percent(prediction.step_s / run.step_s - 1)
        lines.append(
            f"run kept of this machine, {run.source}: {describe(prediction.plan, prediction.workload)}: predicted "
            f"{show_seconds(prediction.step_s)}, measured {show_seconds(run.step_s)}, off by {off} %"
        )
    return tuple(lines)


def _newest(machine: str) -> tuple[MeasuredRun, ...]:
    """The newest runs that are kept of a machine, by name."""
    if not runs_folder().is_dir() or not any(runs_folder().glob("*.toml")):
        return ()
    runs, _ = read_own(runs_folder())
    host = machine.partition(",")[0]
    mine = [run for run in runs if machine_of(run.cluster) == machine and run.source.endswith(f" on {host}")]
    age = {run.id: (runs_folder() / f"{run.id}.toml").stat().st_mtime for run in mine}
    return tuple(sorted(sorted(mine, key=lambda run: age[run.id])[-NEWEST:], key=lambda run: run.id))
