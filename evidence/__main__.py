"""`python -m evidence validate RUNS.csv`: published runs, predicted and scored by family; `constants`: what was fitted.

The options are below `--help`. Leaves out fits (`evidence.fits`) and snapshots (`evidence.snapshot`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from evidence import constants, inference, validate
from gnomon.cli.terminal import print_lines
from gnomon.errors import GnomonError

TEXT = """\
RUNS.csv is a table of published runs, one a row, with columns such as family,
model, layers, hidden, device, num_devices, tp, pp, micro_batch, global_batch,
metric and value. Errors are in per cent of the measured time; rho is the rank
correlation among runs of one model on as many devices; memory the median error
of the peak; repeats how far repeats of a measurement lie from their mean. A
table of inference servers (it has a column load_kind) is scored as `inference`
scores it."""


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    top = argparse.ArgumentParser(prog="python -m evidence", description="Published runs and what they say.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = commands.add_parser(
        "validate",
        help="predicted against published measurements",
        epilog=TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("table", metavar="RUNS.csv", help="measured runs")
    made.add_argument("--family", metavar="NAME", help="only rows of this family")
    made.add_argument("--explain", metavar="ID", help="one run in full: prediction, measurement, what was assumed")
    made.add_argument("--rows", metavar="OUT.csv", help="write every row's prediction, or why there is none")
    made.add_argument("--workers", type=int, metavar="N", help="processes; default the machine's cores, at most 8")
    made.add_argument("--json", action="store_true", help="for programs")
    served = commands.add_parser("inference", help="the same of published runs of inference servers")
    served.add_argument("table", metavar="RUNS.csv", help="measured runs")
    served.add_argument("--family", metavar="NAME", help="only rows of this family")
    served.add_argument("--every", type=int, default=1, metavar="N", help="only each n-th row, for a quick look")
    served.add_argument("--on-record", action="store_true", help="not also with each source left out: half the time")
    served.add_argument("--rows", metavar="OUT.csv", help="write every figure: measured, predicted, without its source")
    commands.add_parser("constants", help="every number that was fitted to whole jobs, and their count")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 2 the request is wrong."""
    try:
        options = parser().parse_args(argv)
        if options.command == "validate" and inference.is_table(options.table):
            print_lines(inference.table(options.table, options.family))
            return 0
        if options.command == "validate":
            return validate.run(options)
        if options.command == "inference":
            rows = inference.table(
                options.table, options.family, max(1, options.every), refit=not options.on_record, out=options.rows
            )
            print_lines(rows)
            return 0
        print_lines(constants.text())
        return 0
    except GnomonError as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
