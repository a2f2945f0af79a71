"""Options of `gnomon fit`, most of them those of `gnomon predict`.

Leaves out reading them into values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.cli.options.flags import option, switch
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.values import count, new_file, some


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FitOptions(TrainingOptions):
    """What is to fit, and how the answer is written."""

    about = """\
What would make a job fit: each change that spares memory, alone and together,
the smallest first, with the GiB that it frees on the fullest rank and what a
step then takes, as gnomon predict says; what does not help, and why. The job is
given as to gnomon predict: a model with its options, a plan file (--plan), or
a job file of another program, such as one that ran out of memory.

examples:
  gnomon fit llama-2-13b --on 1x1xv100-sxm-32gb --global-batch 16
  gnomon fit llama-3.1-70b --on 2x8xh100-sxm --global-batch 32 -o plan.toml
  gnomon fit pretrain.sh --on 4x8xa100-sxm-80gb --to fits.sh
  gnomon fit llama-3.1-8b --on 1x8xh100-sxm --zero 3 --largest seq-len

exit status: 0 it fits, or a change was found that makes it fit; 1 none was; 2
wrong request."""

    memory: str | None = option(
        "--memory", read=some, metavar="SIZE", help="of a device that may be filled, as in 60GiB; all of it"
    )
    largest: Literal["batch", "seq-len"] | None = option(
        "--largest",
        metavar="WHAT",
        choices=("batch", "seq-len"),
        help="instead: the largest microbatch (batch) or the longest sequence (seq-len) that fits, under each change",
    )
    output: str | None = option(
        "-o", "--output", read=new_file, metavar="FILE", help="write the plan that fits to a plan file"
    )
    to: str | None = option(
        "--to", read=new_file, metavar="FILE", help="of a job file: write it with the changes that make it fit"
    )
    choose: int | None = option(
        "--choose", read=count, metavar="N", help="the plan to write, by its number; default the fastest that fits"
    )
    sac_ilp: bool = switch(
        "--sac-ilp", help="where recompute makes it fit, choose tensor by tensor what is recomputed (needs scipy)"
    )
    budget: str | None = option(
        "--budget", read=some, metavar="TIME", help="processor time, as in 5min; 60s unless said"
    )
    json: bool = switch("--json", help="for programs")
