"""`gnomon compare`: where two Timelines of one plan differ, and which price is the most wrong.

`run(options)` prints and returns 0. Leaves out making the Timelines: `gnomon predict` and `gnomon run` write them.
"""

from __future__ import annotations

import argparse

from gnomon.cli.report import read_timeline
from gnomon.cli.terminal import print_json, print_lines
from gnomon.report.difference import compare, comparison_text


def run(options: argparse.Namespace) -> int:
    """Read, compare, print."""
    found = compare(
        read_timeline(options.predicted), read_timeline(options.measured), (options.predicted, options.measured)
    )
    if options.json:
        print_json(found.to_mapping())
    else:
        print_lines(comparison_text(found))
    return 0
