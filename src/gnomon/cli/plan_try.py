"""`gnomon plan --try N`: the predicted top plans run for a few steps each, the best measured one kept.

`try_plans(options, found, …)` runs each as `gnomon run` in a process group of its own, with a limit on its time: one
that crashes, hangs or is killed is recorded and the next goes on. Each leaves its plan file, with what was measured, in
a folder; all that lie there give the numbers of a stack file. Leaves out choosing what to try (`search`) and
running it (`runtime`): this process does not load torch.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gnomon.cli.options.plan import PlanOptions
from gnomon.cli.own_runs import Refit, fit_folder, keep, refit
from gnomon.cli.values import no_folder, quantity
from gnomon.errors import InputError, PlanError, RunError
from gnomon.hardware import Cluster
from gnomon.late import load_late
from gnomon.plans import PlanFile, Ran, load_plan_file, save_plan_file
from gnomon.report.own_runs import OwnFit
from gnomon.report.planning import short
from gnomon.report.tables import wrapped
from gnomon.report.tried import Attempt, Ended, best_of, tried_mapping, tried_text
from gnomon.schema import save_file
from gnomon.search import FoundPlan
from gnomon.software import Stack, own
from gnomon.units import parse_seconds, show_seconds

WARM_UP = 3
"""Steps that do not count, as `gnomon run` has it."""

PATIENCE_S, TIMES = 300.0, 10.0
"""Seconds that an attempt may take by itself, beyond so many times its predicted steps."""

COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
RUN = "import sys; from gnomon.cli import main; sys.exit(main())"


def check_try(options: PlanOptions, machines: Cluster, stack: Stack) -> None:
    """InputError or PlanError, before the search, for what cannot be tried: here, by us, or at all."""
    if find_spec("torch") is None:
        raise InputError("--try runs plans with torch, which is not installed: pip install gnomon[torch]")
    if stack.name != own.NAME:
        raise InputError(
            f"--try runs plans with Gnomon's own runtime, not with {stack.name}; leave --stack out, or plan without "
            f"--try and hand the plan over with gnomon export"
        )
    if options.try_dir is not None and (problem := no_folder(Path(options.try_dir))):
        raise InputError(f"cannot write to {options.try_dir!r}: {problem}; give another --try-dir")
    kinds = {device.kind for device in machines.devices}
    nodes = sum(group.count for group in machines.groups)
    count = machines.num_devices
    here = "--try runs plans on this machine, and "
    elsewhere = f"plan for it with --on local, or plan without --try and run the plan files on {options.on}"
    if kinds == {"cpu"}:
        measured = next((device.measured for device in machines.devices if device.measured), None)
        # A calibration that was copied from another machine says nothing of this one.
        if measured is not None and measured.host != (platform.node() or "this machine"):
            raise PlanError(f"{here}{options.on} was measured on {measured.host}; {elsewhere}")
        # Two at least: the smallest plan that is worth trying has two ranks.
        cores = max(2, os.cpu_count() or 1)
        if count > cores:
            raise PlanError(f"{here}{options.on} has {count} processes where this has {cores} cores; {elsewhere}")
    elif kinds == {"gpu"}:
        has = _gpus()
        if nodes > 1 or has < count:
            raise PlanError(f"{here}{options.on} has {count} GPUs where torch sees {has}; {elsewhere}")
    else:
        raise PlanError(
            f"{here}{options.on} has {', '.join(sorted(kinds))} devices, which it does not drive; {elsewhere}"
        )


def _gpus() -> int:
    """GPUs that torch sees, asked of another process."""
    # In a process of its own: a CUDA context made here would take memory of the GPUs that plans are tried on.
    counted = subprocess.run([sys.executable, "-c", COUNT_GPUS], capture_output=True, text=True, check=False)
    words = counted.stdout.split()
    # The last word, as torch may warn before it.
    return int(words[-1]) if words and words[-1].isdigit() else 0


def folder_of(options: PlanOptions) -> Path:
    """The folder for plan files and logs: the one asked for, made if need be; else a new temporary folder."""
    if options.try_dir is None:
        return Path(tempfile.mkdtemp(prefix="gnomon-try-"))
    folder = Path(options.try_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {str(folder)!r}: {error.strerror}; give another --try-dir") from error
    return folder


def limit_of(options: PlanOptions) -> float | None:
    """Seconds that each may take, if asked. UnitError for what is no time, InputError for none."""
    if options.try_timeout is None:
        return None
    seconds = quantity("--try-timeout", parse_seconds, options.try_timeout)
    if seconds <= 0:
        raise InputError(f"--try-timeout {options.try_timeout}: no plan runs in no time; give at least some seconds")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """What came of trying plans, and where it is."""

    attempts: tuple[Attempt, ...]
    """In the order tried."""
    folder: Path
    """Plan files and logs."""
    fit: OwnFit | None
    """What all runs in the folder say of our own program here; None if nothing ran."""
    refit: Refit | None = None
    """What the runs that are kept of this machine say; None where nothing ran, or nothing is kept."""

    @property
    def stack(self) -> Path:
        """The stack file with those numbers."""
        return self.folder / "gnomon-own.toml"

    def text(self, output: str | None) -> tuple[str, ...]:
        """Returns the lines to print: each attempt, what was kept, where things are. output: the plan file asked
        for."""
        lines = [*tried_text(self.attempts), "", f"plan files, with what was measured, and logs: {self.folder}"]
        if self.fit is not None:
            own = self.fit.stack.own
            summary = f"with the numbers that {len(self.fit.runs)} runs give: {own.error if own else ''}"
            lines += [*wrapped(summary, indent=""), f"a stack file with them, for --stack: {self.stack}"]
        if self.refit is not None:
            lines += wrapped(self.refit.summary, indent="")
        if output and best_of(self.attempts):
            lines.append(f"written to {output}: gnomon run {output}")
        return tuple(lines)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        stack = None if self.fit is None else str(self.stack)
        calibration = (
            None if self.refit is None else {"taken": self.refit.stack is not None, "summary": self.refit.summary}
        )
        return {**tried_mapping(self.attempts), "folder": str(self.folder), "stack": stack, "calibration": calibration}

    def status(self) -> int:
        """Returns exit status 0; RunError if no attempt ran."""
        if best_of(self.attempts) is None:
            raise RunError(
                f"none of the {len(self.attempts)} plans tried ran; the first: {self.attempts[0].reason}; logs: "
                f"{self.folder}"
            )
        return 0


def try_plans(
    options: PlanOptions, candidates: Sequence[FoundPlan], plan_file: Callable[[FoundPlan], PlanFile], machines: Cluster
) -> Tries:
    """Runs each of the plans once, in order; writes the plan file that was asked for, of the best measured, the stack
    file, and unless the user says no this machine's calibration. plan_file: of one of them."""
    folder = folder_of(options)
    # Its default would end this process at once and leave the ranks of an attempt running.
    before = signal.signal(signal.SIGTERM, _ended)
    try:
        attempts = tuple(
            _tried(options, candidate, _bare(plan_file(candidate)), folder, (n, len(candidates)))
            for n, candidate in enumerate(candidates, 1)
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    # By what was measured: the order of predictions ends here.
    best_attempt = best_of(attempts)
    if best_attempt is None:
        return Tries(attempts=attempts, folder=folder, fit=None)
    calibrated = None if options.no_local_calibration else _calibrated(attempts, machines)
    tries = Tries(attempts=attempts, folder=folder, fit=fit_folder(folder), refit=calibrated)
    assert tries.fit is not None
    save_file(tries.fit.stack, tries.stack)
    if options.output:
        save_plan_file(replace(plan_file(best_attempt.candidate), measured=best_attempt.ran), options.output)
    return tries


def _calibrated(attempts: Sequence[Attempt], machines: Cluster) -> Refit | None:
    """Keeps what was measured, and fits this machine's numbers again."""
    try:
        keep(load_plan_file(tried.file) for tried in attempts if tried.ran is not None)
        return refit(machines)
    except OSError as error:
        return Refit(
            stack=None, summary=f"predictions stay as they are: cannot write {error.filename}: {error.strerror}"
        )


def _bare(file: PlanFile) -> PlanFile:
    """The plan file without what the search said of it, as the record of a run."""
    # Runs are fitted by their plan files, which must not hold what a search thought of others.
    return replace(file, predicted=None, runners_up=(), too_large=())


def _ended(number: int, frame: object) -> None:
    """Ends as ^C does: raises an exception, on whose way every started process is ended."""
    sys.exit(128 + number)


def _tried(options: PlanOptions, candidate: FoundPlan, file: PlanFile, folder: Path, which: tuple[int, int]) -> Attempt:
    """Runs one candidate and returns what came of it. which: (2, 5) for the second of five."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(file.model).name} {short(candidate)}").strip("-")
    path = folder / f"{which[0]}-{name}-{file.workload.batch_size}x{file.workload.seq_len}.toml"
    _say(f"trying {which[0]} of {which[1]}: {short(candidate)}, predicted {show_seconds(candidate.step_s)} a step")
    steps = WARM_UP + options.try_steps
    save_plan_file(file, path)
    done = attempt(path, steps=steps, limit_s=limit_of(options) or PATIENCE_S + TIMES * steps * candidate.step_s)
    ran = None if done.measurement is None else _ran(done.measurement)
    if ran is not None:
        save_plan_file(replace(file, measured=ran), path)
    _say(f"  measured {show_seconds(ran.step_s)}" if ran is not None else f"  {done.outcome}: {done.reason}")
    return Attempt(
        candidate=candidate, file=str(path), ran=ran, outcome=done.outcome, reason=done.reason, wall_s=done.wall_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a process ended."""

    measurement: dict[str, Any] | None
    """What `gnomon run --json` printed, if it measured anything."""
    outcome: Ended
    """How."""
    reason: str
    """Its last line of errors, or what became of it."""
    wall_s: float
    """Seconds it took."""


def attempt(plan: Path, *, steps: int, limit_s: float) -> ProcessEnd:
    """`gnomon run` of a plan file in its own process group, all of which is gone when this returns.

    Its output and errors stay beside the plan file. Nothing is raised for what the process does.
    """
    out, log = plan.with_suffix(".json"), plan.with_suffix(".log")
    # The same code as here, wherever it was started from.
    source = str(Path(__file__).parents[2])
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["run", str(plan), "--steps", str(steps), "--json"]
    began, timed_out = time.monotonic(), False
    with out.open("w") as output, log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": paths},
            # A group of its own, so that the ranks it starts can be ended with it.
            start_new_session=True,
        )
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:  # also for ^C here: whatever it started goes with it
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    wall_s = time.monotonic() - began
    if timed_out:
        reason = f"ended after the limit of {show_seconds(limit_s)} (--try-timeout)"
        return ProcessEnd(measurement=None, outcome="timed out", reason=reason, wall_s=wall_s)
    if process.returncode == 0 and (measured := _printed(out)) is not None:
        return ProcessEnd(measurement=measured, outcome="ran", reason="", wall_s=wall_s)
    ended, reason = _why(process.returncode, log)
    return ProcessEnd(measurement=None, outcome=ended, reason=reason, wall_s=wall_s)


def _why(status: int, log: Path) -> tuple[Ended, str]:
    """How a process ended that measured nothing, and why."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].removeprefix("gnomon: ")[:400] if lines else "it said nothing"
    if status < 0:
        return "failed", f"was killed by {signal.Signals(-status).name}; its last line: {last}"
    # Status 2 is also Python's own for a bad command; once steps were counted, it failed and was not refused.
    began = any(line.lstrip().startswith("step ") for line in lines) or "the run ended" in last
    return "refused" if status == 2 and not began else "failed", last


def _printed(out: Path) -> dict[str, Any] | None:
    """The JSON of a run that measured steps."""
    try:
        record = json.loads(out.read_text())
    except ValueError:
        return None
    whole = isinstance(record, dict) and record.get("measured") and len(record.get("steps", ())) > WARM_UP
    return record if whole else None


def _ran(record: dict[str, Any]) -> Ran:
    """What is kept of a run."""
    seconds = [float(step["step_s"]) for step in record["steps"][WARM_UP:]]
    # Quartiles: a few steps of a shared machine are always far out.
    low, high = np.percentile(seconds, (25, 75))
    predicted, now = record["predicted"]["step_s"], record["predicted"]["step_s_as_it_was_before_training"]
    return Ran(
        step_s=median(seconds),
        spread=float(high - low) / median(seconds),
        steps=len(seconds),
        warm_up=WARM_UP,
        peak_memory_bytes=int(record["measured"]["process_peak_bytes"]),
        host=platform.node() or "this machine",
        made=f"gnomon {load_late('gnomon:__version__')}, {time.strftime('%Y-%m-%d')}",
        slowdown=None if now is None else now / predicted,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
