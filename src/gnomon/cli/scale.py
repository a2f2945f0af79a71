"""`gnomon scale`: another number of processes for a job that runs.

`run(options)` asks the job's launcher, waits until it trains so, and returns 0, or 1 where that took too long. Leaves
out how the job changes (`runtime.launch.launcher`), and jobs on other machines than that of their launcher's
files.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep

from gnomon.cli.options.run import ScaleOptions
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.request.scale import JobState, ask, is_running, read_state

DONE, NOT_YET = 0, 1
LOOK_S = 0.05
SHOWN = 5
"""Changes that are listed."""


def run(options: ScaleOptions) -> int:
    """Asks a running job for another size, waits, and says what it did."""
    folder = Path(options.job).expanduser()
    folder = folder.with_suffix(".checkpoints") if folder.suffix == ".toml" else folder
    if options.to is None:
        state, status = read_state(folder), DONE
    else:
        before = ask(folder, options.to)
        state, status = _wait(folder, before, options.to, options.wait)
    if options.json:
        print_json({"schema": "gnomon.scale/1", "processes": state.processes, **asdict(state)})
    else:
        print_lines(_state_lines(state, options.to))
    return status


def _wait(folder: Path, before: JobState, processes: int, patience_s: float) -> tuple[JobState, int]:
    """What the job stands on, once it trains on so many processes. InputError where it ends before that."""
    until, state = monotonic() + patience_s, before
    while monotonic() < until:
        if state.processes == state.asked == processes and state.changes[-1].going_at is not None:
            return state, DONE
        sleep(LOOK_S)
        if not is_running(folder):
            raise InputError(f"the job in {str(folder)!r} ended before it ran on {processes} processes")
        state = read_state(folder)
    return state, NOT_YET


def _state_lines(state: JobState, processes: int | None) -> list[str]:
    lines = [f"{state.workers} logical workers on {state.processes} processes"]
    if processes is not None and state.processes != processes:
        lines[0] += f", and asked for {processes}: not yet"
    for change in state.changes[-SHOWN:]:
        took = "" if change.going_at is None else f", going on after {change.going_at - change.at:.3f} s"
        lines.append(f"  {max(change.placement) + 1} processes: {change.why}{took}")
    return lines
