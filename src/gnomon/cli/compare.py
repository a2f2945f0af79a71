"""`gnomon compare`: where two Timelines of one plan differ, and which price is the most wrong.

`run(options)` prints and returns 0. Leaves out making the Timelines: `gnomon predict` and `gnomon run` write them.
"""

from __future__ import annotations

import argparse

from gnomon.cli.report import read_timeline
from gnomon.cli.terminal import print_json, print_lines
from gnomon.report.difference import compare, comparison_text
from gnomon.report.tables import wrapped


def run(options: argparse.Namespace) -> int:
    """Read, compare, print."""
    timelines = read_timeline(options.predicted), read_timeline(options.measured)
    comparison = compare(*timelines, (options.predicted, options.measured))
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
