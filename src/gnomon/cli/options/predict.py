"""Options of `gnomon predict`.

Leaves out reading them into values (`cli.request`, `cli.predict_serve`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.cli import values
from gnomon.cli.options.flags import Group, option, switch
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.options.serve import ServeOptions
from gnomon.cli.values import count, new_file

FILES = Group("files to write, of one step from rest")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PredictOptions(TrainingOptions, ServeOptions):
    """What is to be predicted, and how the answer is written."""

    about = """\
MODEL is a name (gnomon catalogue models), a Hugging Face config.json, or a
folder that holds one. CLUSTER is NODESxDEVICESxDEVICE such as 4x8xh100-sxm,
parts joined by +, or a .toml file. A plan file of gnomon plan has both in it.
What is not given is assumed and listed.
A job file (Megatron script, torchtitan TOML, DeepSpeed JSON, axolotl YAML ...)
is recognised; fields that are not known are listed. Variables that a script
does not set are taken from the environment, or from --set.

examples:
  gnomon predict llama-3.1-8b --on 4x8xh100-sxm --zero 3 --global-batch 128
  gnomon predict path/to/config.json --on 8x8xa100-sxm-80gb --tp 4 --pp 2 \\
      --global-batch 512 --seq-len 4096
  gnomon predict pretrain.sh --on 128x8xh100-sxm --set micro_batch_size=2

exit status: 0 it fits; 1 it does not fit in memory; 2 wrong request."""

    memory_checkpoint_every: int | None = option(
        "--memory-checkpoint-every", read=count, metavar="N", help="say what copies in memory, as of gnomon run, cost"
    )
    assumptions: bool = switch("--assumptions", help="list also what cannot change the answer by a tenth of its band")
    json: bool = switch("--json", help="for programs")
    html: str | None = option(
        "--html", read=new_file, metavar="FILE", help="a page with everything, for a browser", group=FILES
    )
    trace: str | None = option(
        "--trace", read=new_file, metavar="FILE", help="a trace for ui.perfetto.dev", group=FILES
    )
    timeline: str | None = option(
        "--timeline",
        read=new_file,
        metavar="FILE",
        help="the timeline, for gnomon report and gnomon compare",
        group=FILES,
    )
    lengths: tuple[int, ...] | None = option(
        "--lengths",
        read=values.lengths,
        metavar="LIST",
        help="tokens of each sequence of the batch: 32k,4kx8,512x55 (x: how many such), or a file of one a line",
    )
