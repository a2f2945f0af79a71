"""Options of `gnomon explore`.

Leaves out the page and its server (`cli.explore`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.cli.options.flags import Group, option, switch
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.options.serve import ServeOptions
from gnomon.cli.values import at_most

PAGE = Group("page")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FormOptions(TrainingOptions, ServeOptions):
    """What the page's form may ask: a job, or with --serve a server."""


@dataclass(frozen=True, kw_only=True)
class ExploreOptions(FormOptions):
    """The options of `explore`: the job with which the page begins, and its port."""

    about = """\
A page in the browser on which a prediction follows every change: model,
machines, batch, axes, schedule, precision, program; with --serve engine, load,
lengths, targets. It makes a job fit, searches on from where it stands, and
saves a plan file. Only this machine can open it, with the address that is
printed; the server ends with Ctrl+C.

examples:
  gnomon explore llama-3.1-8b --on 4x8xh100-sxm --tp 2 --global-batch 128
  gnomon explore llama-3.3-70b --on 4xh100-sxm --serve --concurrency 64 \\
      --input-len 1000 --output-len 500"""

    port: int = option("--port", default=0, read=at_most(65535, 0), metavar="N", help="default any", group=PAGE)
    no_browser: bool = switch("--no-browser", help="print the address only", group=PAGE)
