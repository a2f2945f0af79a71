"""Options of `gnomon explore`.

Leaves out the page and its server (`cli.explore`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.cli.options.flags import Group, option, switch
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.values import at_most

PAGE = Group("page")


@dataclass(frozen=True, kw_only=True)
class ExploreOptions(TrainingOptions):
    """Where the page begins."""

    about = """\
A page in the browser on which a prediction follows every change: model,
machines, batch, axes, schedule, precision, program. It makes a job fit,
searches on from where it stands, and saves a plan file. Only this machine can
open it, with the address that is printed; the server ends with Ctrl+C.

example:
  gnomon explore llama-3.1-8b --on 4x8xh100-sxm --tp 2 --global-batch 128"""

    port: int = option("--port", default=0, read=at_most(65535, 0), metavar="N", help="default any", group=PAGE)
    no_browser: bool = switch("--no-browser", help="print the address only", group=PAGE)
