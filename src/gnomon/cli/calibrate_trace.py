"""`gnomon calibrate --from-trace TRACES --job FILE`: a stack file from where the time of one recorded step went.

`run(options)` reads what torch.profiler wrote and the job, divides what was measured by what is predicted, for kernels,
collectives and the host apart, writes the stack file and returns 0. Leaves out runs of which only the step is known
(`cli.calibrate_from`).
"""

from __future__ import annotations

from datetime import date
from pathlib import Path

from gnomon import schema
from gnomon.cli.options.flags import changed_options
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.options.tools import CalibrateOptions
from gnomon.cli.own import machine_of
from gnomon.cli.request import read_request
from gnomon.cli.terminal import print_json, print_lines
from gnomon.cli.values import not_writable
from gnomon.errors import InputError
from gnomon.formats.kineto import is_nsight, is_trace, read_nsight, read_traces
from gnomon.prediction.measured import MeasuredRun
from gnomon.report.own_runs import OwnFit, fit_parts
from gnomon.report.profile import PART_WORDS, profile_of
from gnomon.report.tables import wrapped
from gnomon.units import show_seconds

PREDICTED = ("compute", "exposed communication", "copies", "host", "waiting")
"""Parts of a recorded step that a prediction has; the others (loading data, compiling …) are of the job's own doing."""


def run(options: CalibrateOptions) -> int:
    """Read, divide, write, print."""
    if options.runs is not None:
        raise InputError("--from and --from-trace are two ways to the same numbers; use one of them")
    if options.trace is None or options.job is None:
        raise InputError("a trace says nothing without its job: give --from-trace TRACES and --job FILE")
    if measuring := [name for name in ("processes", "seconds") if name in changed_options(options)]:
        raise InputError(f"--{measuring[0]} is for measuring this machine; leave it out where a trace is read")
    target = Path(options.output or "own.toml")
    if problem := not_writable(target):
        raise InputError(f"cannot write {str(target)!r}: {problem}; choose another place with -o")
    if not Path(options.trace).exists():
        raise InputError(f"cannot read {options.trace!r}: no such file")
    if not (is_trace(options.trace) or is_nsight(options.trace)):
        raise InputError(f"{options.trace!r} is no trace of torch.profiler; see gnomon compare --help")
    request = read_request(TrainingOptions(model=options.job, on=options.on, network=options.network))
    recorded = read_nsight(options.trace) if is_nsight(options.trace) else read_traces(options.trace)
    profile = profile_of(sorted(recorded, key=lambda trace: trace.rank), ())
    if not profile.accounts:
        raise InputError(f"no whole step is in {options.trace!r}; record three or more, with ProfilerStep marks")
    account = profile.slowest
    parts = {name: account.parts[name] for name in PREDICTED}
    unpredicted = {
        name: s for name, s in account.parts.items() if name not in PREDICTED and s > 0.01 * account.step.seconds
    }
    if request.plan.world_size != profile.world_size and profile.world_size > 1:
        raise InputError(
            f"the trace is of {profile.world_size} ranks and the job of {request.plan.world_size}; give the "
            "job that was "
            f"recorded, on its machines (--on)"
        )
    measured = MeasuredRun(
        id=Path(options.trace).name,
        graph=request.graph,
        plan=request.plan,
        workload=request.workload,
        stack=request.stack,
        cluster=request.cluster,
        step_s=sum(parts.values()),
        source=options.trace,
    )
    fit = fit_parts(
        measured, parts, source=measured.id, date=date.today().isoformat(), machine=machine_of(request.cluster)
    )
    schema.save_file(fit.stack, target)
    if options.json:
        print_json(
            {
                "schema": "gnomon.trace_fit/1",
                "file": str(target),
                "stack": fit.stack.name,
                "factors": dict(fit.factors),
                "parts_s": parts,
                "left_out_s": unpredicted,
                "before": fit.before[0],
                "after": fit.after[0],
            }
        )
    else:
        print_lines(_text(fit, measured.step_s, unpredicted, target))
    return 0


def _text(fit: OwnFit, step_s: float, unpredicted: dict[str, float], target: Path) -> list[str]:
    factors_text = ", ".join(f"{what} {factor:.3g}" for what, factor in fit.factors if abs(factor - 1) > 1e-9)
    lines = list(
        wrapped(
            f"of {show_seconds(step_s)} that a prediction has, the step was predicted {fit.before[0]:+.1%}, and is "
            f"{fit.after[0]:+.1%} now",
            indent="",
        )
    )
    lines += wrapped(f"time of {factors_text or 'nothing'} of what is on record for {fit.stack.name!r}", indent="")
    for name, seconds in unpredicted.items():
        lines += wrapped(f"left out: {PART_WORDS[name]}, {show_seconds(seconds)}", indent="")
    lines += wrapped("one step of one job: its kernels and sizes; several runs say more (--from)", indent="")
    return [*lines, "", f"written to {target}: --stack {target}"]
