"""Options of `gnomon fit`, most of them those of `gnomon predict`. Only `argparse`.

`fit_options(parser)` adds them. Leaves out reading them into values.
"""

from __future__ import annotations

import argparse

from gnomon.cli.options_plan import add_job_options, add_run_options
from gnomon.cli.values import count, new_file, some

FIT_TEXT = """\
What would make a job fit: each change that spares memory, alone and together,
the smallest first, with the GiB that it frees on the fullest rank and what a
step then takes, as gnomon predict says; what does not help, and why. The job is
given as to gnomon predict: a model with its options, a plan file (--plan), or
a job file of another program, such as one that ran out of memory.

examples:
  gnomon fit llama-2-13b --on 1x1xv100-sxm-32gb --global-batch 16
  gnomon fit llama-3.1-70b --on 2x8xh100-sxm --global-batch 32 -o plan.toml
  gnomon fit pretrain.sh --on 4x8xa100-sxm-80gb
  gnomon fit llama-3.1-8b --on 1x8xh100-sxm --zero 3 --largest seq-len

exit status: 0 it fits, or a change was found that makes it fit; 1 none was; 2
wrong request."""


def fit_options(parser: argparse.ArgumentParser) -> None:
    """All options of `gnomon fit`."""
    add_job_options(parser)
    parser.add_argument(
        "--stack", type=some, metavar="NAME", help="the program that will run it (gnomon catalogue stacks)"
    )
    parser.add_argument(
        "--memory", type=some, metavar="SIZE", help="of a device that may be filled, as in 60GiB; all of it"
    )
    parser.add_argument(
        "--largest",
        choices=("batch", "seq-len"),
        metavar="WHAT",
        help="instead: the largest microbatch (batch) or the longest sequence (seq-len) that fits, under each change",
    )
    parser.add_argument("-o", "--output", type=new_file, metavar="FILE", help="write the plan that fits to a plan file")
    parser.add_argument(
        "--choose", type=count, metavar="N", help="the plan to write, by its number; default the fastest that fits"
    )
    parser.add_argument(
        "--sac-ilp",
        action="store_true",
        help="where recompute makes it fit, choose tensor by tensor what is recomputed (needs scipy)",
    )
    parser.add_argument("--budget", type=some, metavar="TIME", help="processor time, as in 5min; 60s unless said")
    parser.add_argument("--json", action="store_true", help="for programs")
    add_run_options(parser)
