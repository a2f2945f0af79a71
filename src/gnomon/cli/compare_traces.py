"""`gnomon compare` with what a profiler wrote: a Kineto trace, a folder with one a rank, a memory snapshot.

`run(paths, as_json)` reads them, and a plan file or a predicted Timeline next to them, prints and returns 0. Leaves out
two Timelines of one plan (`cli.compare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gnomon.cli.report import predicted_plan, read_timeline
from gnomon.cli.terminal import Progress, print_json, print_lines
from gnomon.errors import InputError
from gnomon.formats.kineto import is_snapshot, is_trace, read_snapshot, read_traces
from gnomon.plans import is_plan_file
from gnomon.profile import Snapshot, Trace
from gnomon.report.profile import Expected, against, expected_of, expected_of_timeline, profile_of, profile_text


def is_recorded(path: str) -> bool:
    """Whether a profiler wrote it. InputError if there is no such file."""
    if not Path(path).exists():
        raise InputError(f"cannot read {path!r}: no such file")
    return is_snapshot(path) or is_trace(path)


def run(paths: Sequence[str], as_json: bool) -> int:
    """Read, account, print."""
    traces: list[Trace] = []
    snapshots: list[Snapshot] = []
    expected: Expected | None = None
    progress = Progress("read", len(paths))
    for done, path in enumerate(paths):
        progress.show(done, f": {path}")
        if is_snapshot(path):
            snapshots.append(read_snapshot(path))
        elif is_trace(path):
            traces += read_traces(path)
        elif expected is not None:
            raise InputError(f"{path!r} and {expected.source!r} are both predictions; give one, and what was recorded")
        else:
            expected = _expected(path)
    progress.end()
    _check_ranks(traces)
    profile = profile_of(sorted(traces, key=lambda trace: trace.rank), snapshots)
    if as_json:
        told = profile.to_mapping()
        if expected is not None:
            told["predicted"] = {
                "source": expected.source,
                "step_s": expected.step_s,
                "parts_s": dict(expected.parts),
                "peak_bytes": expected.peak_bytes,
            }
            if profile.accounts:
                told["gaps"] = [
                    {"part": g.part, "s": [g.expected_s, g.measured_s], "likely_cause": g.cause}
                    for g in against(profile, expected)
                ]
        print_json(told)
    else:
        print_lines(profile_text(profile, expected))
    return 0


def _expected(path: str) -> Expected:
    """The predicted step of a plan file or of a Timeline."""
    if path.endswith(".toml") and is_plan_file(path):
        return expected_of(predicted_plan(path), path)
    timeline = read_timeline(path)
    return expected_of_timeline(timeline, path)


def _check_ranks(traces: Sequence[Trace]) -> None:
    """InputError for two traces of one rank given apart."""
    seen: dict[int, str] = {}
    for trace in traces:
        if trace.rank in seen:
            raise InputError(
                f"{seen[trace.rank]!r} and {trace.source!r} are both of rank {trace.rank}: give one recording of one "
                f"job, a file a rank"
            )
        seen[trace.rank] = trace.source
