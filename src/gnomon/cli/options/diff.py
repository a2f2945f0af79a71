"""Options of `gnomon diff`.

Leaves out reading the two jobs (`cli.diff`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.cli.options.flags import Group, option, positional, switch
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.values import some

LIMITS = Group("when to fail", "exit status 1, and an annotation with --github")


@dataclass(frozen=True, kw_only=True)
class DiffOptions(TrainingOptions):
    """Two jobs, and what may change between them."""

    about = """\
BEFORE and AFTER are what gnomon predict takes: job files of any program, plan
files, models. REVISION:PATH is a file of a commit of the git repository here.
The other options are of both. Machines that neither file names: --on.

examples:
  gnomon diff v1.sh v2.sh --on 8x8xh100-sxm
  gnomon diff origin/main:train.yaml train.yaml --on 2x8xa100-sxm-80gb \\
      --max-slower 2% --github

exit status: 0 within the limits; 1 slower or larger than allowed, or it no
longer fits in memory; 2 a job cannot be read."""

    model: str | None = positional(metavar="BEFORE", help="a job file, a plan file, a model, or REVISION:PATH")
    after: str = positional(metavar="AFTER", help="another")
    max_slower: str | None = option(
        "--max-slower", read=some, metavar="PERCENT", help="of its speed that may be lost, as in 2%%", group=LIMITS
    )
    max_memory: str | None = option(
        "--max-memory", read=some, metavar="SIZE", help="that the peak of a rank may grow by, as in 1GiB", group=LIMITS
    )
    github: bool = switch("--github", help="annotations, and a table in $GITHUB_STEP_SUMMARY", group=LIMITS)
    json: bool = switch("--json", help="for programs")
