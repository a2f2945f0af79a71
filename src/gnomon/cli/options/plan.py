"""Options of `gnomon plan` and `gnomon explain`.

Leaves out reading them into values (`cli.plan_asked`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.cli import values
from gnomon.cli.options.flags import Group, either, option, positional, repeated, switch
from gnomon.cli.options.job import JobFileOptions, LayoutOptions, StackOption, TrainingOptions
from gnomon.cli.options.serve import ServeOptions
from gnomon.cli.values import at_most, count, new_file, number_from, some

SHOWN = 5
"""Diverse plans that `gnomon plan` shows."""

LIMITS = Group("limits")
MORE = Group(
    "choices beyond the exact search",
    "reshard_after_forward prefetch bucket_bytes order async_tp\n"
    "  activation_offload optimizer_offload parameter_offload parameter_disk\n"
    "  fp8: tried on the best plans",
)
OTHER = Group("other questions")
TRIES = Group("trying plans on this machine, with Gnomon's own runtime")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PlanOptions(JobFileOptions, LayoutOptions, StackOption, ServeOptions):
    """What is planned for, what plans may be, and what else is asked of them."""

    about = """\
Searches every combination of parallelism axes, schedules, ZeRO stages,
recompute and microbatch sizes, and prints the fastest that fits in memory,
alternatives with other axes, recompute or ZeRO stage with what they lose (--top
N: the N fastest, diverse or not), and how many plans were covered. The options
of gnomon predict fix a field; --forbid limits one: tp pp cp ep dp_replicate
dp_shard zero virtual_stages micro_batch_size schedule recompute
sequence_parallel keep_gathered context overlap.

Several cases: --vary NAME=VALUES finds the best plan at each value of seq_len
global_batch nodes on network links memory (nodes=1..16, on=4x8xh100-sxm,
2xaws-p5, network=0.5,1,2 times its bandwidth, memory=40GiB,80GiB); two of them
may be given. --max-step, --deadline with --tokens, and --max-devices choose
among 1, 2, ... nodes of CLUSTER, or among the values of --vary nodes or on;
--best cost takes the cheapest in place of the fewest or the fastest.

examples:
  gnomon plan llama-3.1-8b --on 4x8xh100-sxm --global-batch 128 -o plan.toml
  gnomon plan llama-tiny --on local --global-batch 16 --seq-len 256
  gnomon plan llama-tiny --on local --global-batch 16 --seq-len 256 --try 5
  gnomon plan gpt3-175b --on 64x8xa100-sxm-80gb --global-batch 512 \\
      --seq-len 2048 --forbid 'pp>8' --memory 70GiB

  gnomon plan llama-3.1-8b --on 16x8xh100-sxm --tokens-per-batch 4M \\
      --deadline 7d --tokens 1T --best cost --price 2.5
  gnomon plan --like pretrain.sh --on 4x8xh100-sxm --to faster.sh

exit status: 0 a plan was found; 1 no machines are as fast as asked; 2 there is
none, or the request is wrong."""

    model: str = positional(
        optional=True, default="", metavar="MODEL", help="name, config.json or its folder, or a job file as with --like"
    )
    like: str | None = option(
        "--like",
        read=some,
        metavar="FILE",
        help="a job file: what its program can do to run it faster, as a diff of the file; - reads standard input",
    )
    to: str | None = option("--to", read=new_file, metavar="FILE", help="with --like: write the changed file")
    on: str = option("--on", required=True, read=some, metavar="CLUSTER", help="machines, as in 4x8xh100-sxm or local")
    output: str | None = option(
        "-o", "--output", read=new_file, metavar="FILE", help="write the best plan to a plan file"
    )
    top: int | None = option(
        "--top", read=at_most(1000), metavar="N", help="show the N fastest plans; default: 5 diverse ones"
    )
    json: bool = switch("--json", help="for programs")
    equal_stages: bool = switch(
        "--equal-stages", help="do not look for uneven stages, or recompute that differs by stage"
    )
    sac_ilp: bool = switch(
        "--sac-ilp",
        help="choose tensor by tensor what each stage recomputes or sends to the host, by an integer programme (scipy)",
    )
    uneven_replicas: bool = switch(
        "--uneven-replicas",
        help="on up to 128 devices: pipelines whose stages have other numbers of replicas too (DAPPLE)",
    )
    forbid: tuple[str, ...] = repeated("--forbid", metavar="LIMIT", help="as in 'pp>1'; may be repeated", group=LIMITS)
    memory: str | None = option(
        "--memory",
        read=some,
        metavar="SIZE",
        help="of a device that may be filled, as in 60GiB; 92 %% of it",
        group=LIMITS,
    )
    tries: int | None = option(
        "--tries", read=count, metavar="N", help="predictions on a mixed cluster, at most; 300", group=LIMITS
    )
    refine: bool | None = either(
        "--refine", help="try all that they can be; --no-refine: leave them as they are; default a few", group=MORE
    )
    fix: tuple[str, ...] = repeated("--fix", metavar="NAME=VALUE", help="one of them, or any field", group=MORE)
    allow: tuple[str, ...] = repeated("--allow", metavar="NAME", help="fp8: it changes what is computed", group=MORE)
    methods: str | None = option(
        "--methods",
        read=some,
        metavar="NAMES",
        help="published methods to try, as in mario,dapple_warmup, or all (gnomon catalogue methods)",
        group=MORE,
    )
    no_clip: bool = switch("--no-clip", help="no clipping of gradients; optimizer_offload needs it", group=MORE)
    vary: tuple[str, ...] = repeated(
        "--vary", metavar="NAME=V,V", help="the best plan at each value; may be given twice", group=OTHER
    )
    lengths: tuple[int, ...] | None = option(
        "--lengths",
        read=values.lengths,
        metavar="LIST",
        help="the fastest plan for a batch of several lengths: 32k,4kx8,512x55 (x: how many such), or a file of one a "
        "line; --methods chunkflow,skrull are tried on it",
        group=OTHER,
    )
    mtbf: float | None = option(
        "--mtbf",
        read=number_from(0.01, 1e6),
        metavar="HOURS",
        help="the plan that makes most useful steps where each machine is lost once in so many hours: with copies of "
        "stages (bamboo) or without; seconds as gnomon fleet spot takes them",
        group=OTHER,
    )
    pareto: bool = switch("--pareto", help="the front of time and memory", group=OTHER)
    longest: int | None = option(
        "--longest",
        read=values.tokens,
        metavar="N",
        help="the longest sequence that fits, a multiple of N",
        group=OTHER,
    )
    largest: str | None = option(
        "--largest",
        read=some,
        metavar="RULE",
        help="the largest model that fits: layers, hidden or both of MODEL, or names by commas",
        group=OTHER,
    )
    budget: str | None = option(
        "--budget",
        read=some,
        metavar="TIME",
        help="processor time that the search may take, as in 5min: the best plan so far is then the answer, with a "
        "bound on what was not looked at; 60s unless said (10min for other questions); ^C ends it too",
        group=OTHER,
    )
    max_step: str | None = option(
        "--max-step",
        read=some,
        metavar="TIME",
        help="fewest nodes of CLUSTER whose step is no longer, as in 2s",
        group=OTHER,
    )
    deadline: str | None = option(
        "--deadline",
        read=some,
        metavar="TIME",
        help="fewest nodes that train --tokens in this time, as in 7d",
        group=OTHER,
    )
    tokens: str | None = option(
        "--tokens", read=some, metavar="N", help="tokens to train on, as in 1T; with --deadline", group=OTHER
    )
    max_devices: int | None = option(
        "--max-devices", read=count, metavar="N", help="the best on whole nodes with at most N devices", group=OTHER
    )
    best: Literal["step", "cost"] = option(
        "--best", default="step", choices=("step", "cost"), help="shortest step, or cheapest token", group=OTHER
    )
    price: tuple[str, ...] = repeated(
        "--price", metavar="DOLLARS", help="of a device-hour, as in 2.5 or h100-sxm=2.5", group=OTHER
    )
    html: str | None = option(
        "--html", read=new_file, metavar="FILE", help="the cases as a page with a plot", group=OTHER
    )
    try_: int | None = option(
        "--try", read=at_most(50), metavar="N", help="run the best N for a few steps, keep the best", group=TRIES
    )
    try_steps: int = option(
        "--try-steps", default=5, read=at_most(1000), metavar="N", help="that count, after 3; 5", group=TRIES
    )
    try_timeout: str | None = option(
        "--try-timeout", read=some, metavar="TIME", help="for each, as in 10min; default 5 min or more", group=TRIES
    )
    try_dir: str | None = option(
        "--try-dir", read=some, metavar="DIR", help="for plan files and logs; default a temporary one", group=TRIES
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExplainOptions(TrainingOptions, ServeOptions):
    """The plan or job whose reasons are asked."""

    about = """\
What is explained is a plan file, as gnomon plan -o writes it, or a job as
gnomon predict takes it: a job file of another program, or a model with options.
Says what bounds the step, what every single change would gain or lose, which
changes do not fit and on which rank, what another precision or a larger batch
would do, what faster links or larger devices would do, and whether the network
is the problem. All numbers are predictions.

example:
  gnomon plan llama-3.1-8b --on 4x8xh100-sxm --global-batch 128 -o plan.toml
  gnomon explain plan.toml
  gnomon explain pretrain.sh --on 4x8xa100-sxm-80gb
  gnomon explain llama-3.3-70b --serve --on 4xh100-sxm --input-len 1000 \\
      --output-len 500 --concurrency 64 --question ttft

exit status: 0 the plan fits; 1 it does not; 2 wrong request."""

    question: str | None = option(
        "--question", read=some, metavar="NAME", help="with --serve: what is asked; without it all are listed"
    )
    json: bool = switch("--json", help="for programs")
