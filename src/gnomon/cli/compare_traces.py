"""`gnomon compare` with what a profiler wrote: a Kineto trace, a folder with one a rank, a memory snapshot.

`run(options)` reads them, and a plan file, a job file or a predicted Timeline next to them, prints and returns 0.
Leaves out two Timelines of one plan (`cli.compare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gnomon.cli.options.flags import changed_options, flags
from gnomon.cli.options.tools import CompareOptions
from gnomon.cli.report import predicted_plan, read_timeline
from gnomon.cli.request import job_request
from gnomon.cli.terminal import Progress, print_json, print_lines
from gnomon.errors import InputError
from gnomon.formats import programs
from gnomon.formats.kineto import is_nsight, is_snapshot, is_trace, read_nsight, read_snapshot, read_traces
from gnomon.plans import is_plan_file
from gnomon.prediction import predict
from gnomon.profile import Snapshot, Trace
from gnomon.report.profile import ExpectedParts, against, expected_of, expected_of_timeline, profile_of, profile_text


def is_recorded(path: str) -> bool:
    """Whether a profiler wrote it. InputError if there is no such file."""
    if not Path(path).exists():
        raise InputError(f"cannot read {path!r}: no such file")
    return is_snapshot(path) or is_trace(path) or is_nsight(path)


def run(options: CompareOptions) -> int:
    """Reads a prediction and traces, accounts for the difference and prints it."""
    paths = options.files
    traces: list[Trace] = []
    snapshots: list[Snapshot] = []
    of_job = options.source is not None
    expected = _of_job(None, options) if of_job else None
    progress = Progress("read", len(paths))
    for done, path in enumerate(paths):
        progress.show(done, f": {path}")
        if expected is None and _is_job(path):
            # Asked before `is_trace`, as a job's file in JSON could be taken for a recording.
            of_job, expected = True, _of_job(path, options)
        elif is_snapshot(path):
            snapshots.append(read_snapshot(path))
        elif is_trace(path):
            traces += read_traces(path)
        elif is_nsight(path):
            traces += read_nsight(path)
        elif expected is not None:
            raise InputError(f"{path!r} and {expected.source!r} are both predictions; give one, and what was recorded")
        else:
            expected = _expected(path)
    progress.end()
    if not of_job and (job_only := [name for name in changed_options(options) if name not in ("files", "json")]):
        raise InputError(
            f"{flags(type(options))[job_only[0]].names[-1]} is for a job file, and none of {', '.join(paths)} is one; "
            f"give it, or leave the option out"
        )
    _check_ranks(traces)
    profile = profile_of(sorted(traces, key=lambda trace: trace.rank), snapshots)
    if options.json:
        mapping = profile.to_mapping()
        if expected is not None:
            mapping["predicted"] = {
                "source": expected.source,
                "step_s": expected.step_s,
                "parts_s": dict(expected.parts),
                "peak_bytes": expected.peak_bytes,
            }
            if profile.accounts:
                mapping["gaps"] = [
                    {"part": g.part, "s": [g.expected_s, g.measured_s], "likely_cause": g.cause}
                    for g in against(profile, expected)
                ]
        print_json(mapping)
    else:
        print_lines(profile_text(profile, expected))
    return 0


JOB_FILE_BYTES = 2**20
"""A file that is larger is no job file."""
JOB_SUFFIXES = ("", ".json", ".sh", ".slurm", ".toml", ".txt", ".yaml", ".yml")
"""Ends of the names of job files; others, as of a Timeline, are not looked into."""


def _is_job(path: str) -> bool:
    """Whether it is a job file of a program, which JSON can be as well as a trace."""
    file = Path(path)
    text = file.is_file() and file.stat().st_size <= JOB_FILE_BYTES and file.suffix in JOB_SUFFIXES
    return text and programs.recognised(file) is not None


def _expected(path: str) -> ExpectedParts:
    """The predicted step of a plan file or of a Timeline."""
    if path.endswith(".toml") and is_plan_file(path):
        return expected_of(predicted_plan(path), path)
    timeline = read_timeline(path)
    return expected_of_timeline(timeline, path)


def _of_job(path: str | None, options: CompareOptions) -> ExpectedParts:
    """The predicted step of a job file on the machines of `--on`. path: None for that of `--from`."""
    request = job_request(path, options, options.on)
    name = path or (options.source or ("", ""))[1]
    return expected_of(predict(request.graph, request.cluster, request.plan, request.workload, request.stack), name)


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
