"""`gnomon compare`: where two Timelines of one plan differ, and which price is the most wrong; or what a profiler saw.

`run(options)` prints and returns 0. Leaves out making the Timelines (`gnomon predict` and `gnomon run` write them) and
recorded traces (`cli.compare_traces`).
"""

from __future__ import annotations

from gnomon.cli import compare_traces
from gnomon.cli.options.tools import CompareOptions
from gnomon.cli.report import read_timeline
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.report.difference import compare, comparison_text
from gnomon.report.tables import wrapped


def run(options: CompareOptions) -> int:
    """Reads two files, compares them and prints the differences."""
    files = options.files
    if any(compare_traces.is_recorded(path) for path in files):
        return compare_traces.run(options)
    job_only_options = {
        "--on": options.on,
        "--from": options.source,
        "--model": options.network,
        "--set": options.settings,
        "--args": options.arguments,
    }
    if job_only := [name for name, value in job_only_options.items() if value]:
        raise InputError(
            f"{job_only[0]} is for a job file, which is compared with what a profiler recorded of the job; "
            "give its trace "
            f"or snapshot too"
        )
    if len(files) != 2:
        raise InputError(
            f"compare takes two Timelines of one plan, or what a profiler recorded (a Kineto trace, a folder of them, "
            f"a memory snapshot), alone or after a plan file; {len(files)} given, none of them recorded"
        )
    timelines = read_timeline(files[0]), read_timeline(files[1])
    comparison = compare(*timelines, (files[0], files[1]))
    if options.json:
        print_json(comparison.to_mapping())
    else:
        print_lines(comparison_text(comparison))
        if assumptions := [
            assumption for timeline in timelines if timeline.clock == "measured" for assumption in timeline.assumptions
        ]:
            print_lines(
                (
                    "",
                    "of what was measured",
                    *(line for assumption in assumptions for line in wrapped(assumption, bullet="- ")),
                )
            )
    return 0
