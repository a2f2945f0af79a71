"""Options of `gnomon plan`, and those that it, `gnomon predict` and `gnomon fit` share: what a job is, how it is run.

`plan_options(parser)`, `add_job_options(parser)` and `add_run_options(parser)` add them; only `argparse`. Leaves out
reading them into values.
"""

from __future__ import annotations

import argparse

from gnomon import orders
from gnomon.cli.options_serve import serve_options
from gnomon.cli.values import at_most, count, lengths, named_size, new_file, number_from, some, tokens

SHOWN = 5
"""Unlike plans that `gnomon plan` shows."""

PLAN_TEXT = """\
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

exit status: 0 a plan was found; 1 no machines are as fast as asked; 2 there is
none, or the request is wrong."""


EXPLAIN_TEXT = """\
PLAN.toml is a plan file, as gnomon plan -o writes it. Says what bounds the
step, what every single change would gain or lose, which changes do not fit and
on which rank, what faster links or larger devices would do, and whether the
network is the problem. All numbers are predictions.

example:
  gnomon plan llama-3.1-8b --on 4x8xh100-sxm --global-batch 128 -o plan.toml
  gnomon explain plan.toml

exit status: 0 the plan fits; 1 it does not; 2 wrong request."""


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers by commas, for argparse."""
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a list of whole numbers, as in 9,8,8,7")
    return tuple(int(part) for part in parts)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """What a job is: a model and machines, a plan file, or a job file."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="name, config.json or its folder, a job file, or a plan file"
    )
    parser.add_argument("--on", type=some, metavar="CLUSTER", help="machines, as in 4x8xh100-sxm")
    parser.add_argument("--plan", type=some, metavar="FILE", help="a plan in TOML; the options below change it")
    parser.add_argument(
        "--from",
        dest="source",
        nargs=2,
        metavar=("FORMAT", "FILE"),
        help="an existing job, where its format is not recognised: megatron, torchtitan, deepspeed, axolotl, ...",
    )
    job = parser.add_argument_group("beside a job file")
    job.add_argument("--model", dest="network", type=some, metavar="MODEL", help="the network, in place of the file's")
    job.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the file (or of config.json), or a variable of a script, by its name there; again for more",
    )
    job.add_argument("--vocab-size", type=count, metavar="N", help="rows of the embedding, where a tokenizer decides")
    job.add_argument("--strict", action="store_true", help="an error for a field that is not known")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Batch, axes, and how a job is run."""
    work = parser.add_argument_group("batch")
    for name, text in (
        ("--global-batch", "sequences in an optimizer step"),
        ("--micro-batch-size", "sequences of a microbatch on one data-parallel rank"),
    ):
        work.add_argument(name, type=count, metavar="N", help=text)
    work.add_argument("--seq-len", type=tokens, metavar="N", help="tokens of a sequence; 8k = 8192")
    work.add_argument(
        "--size",
        dest="sizes",
        action="append",
        default=[],
        type=named_size,
        metavar="NAME=N",
        help="of another dim that the model leaves open, as enc_seq=512, the tokens of an encoder; again for more",
    )
    work.add_argument(
        "--inputs", metavar="INPUTS", help="of a MODEL that is code: NAME=DTYPE[DIM,...], as ids=int64[batch,seq]"
    )
    work.add_argument(
        "--tokens-per-batch",
        type=some,
        metavar="N",
        help="tokens of an optimizer step, for --global-batch; 4M = 4 x 1024 x 1024",
    )
    work.add_argument(
        "--router", metavar="LOAD", help="how tokens spread over experts: balanced, zipf:1.0, or a JSON list of counts"
    )
    work.add_argument(
        "--capacity", type=float, metavar="C", help="rows an expert takes over the mean; more are dropped; no limit"
    )
    work.add_argument(
        "--pad-experts", action="store_true", default=None, help="every expert computes its whole capacity"
    )
    axes = parser.add_argument_group("axes (ranks; dp-shard is what remains unless given)")
    for name, text in (
        ("tp", "tensor parallelism"),
        ("pp", "pipeline stages"),
        ("cp", "context parallelism: parts of a sequence"),
        ("ep", "expert parallelism, over ranks of dp-shard, cp and tp"),
        ("dp-shard", "data parallelism; ZeRO divides over these"),
        ("dp-replicate", "data parallelism beyond them: replicas (HSDP)"),
    ):
        axes.add_argument(f"--{name}", type=count, metavar="N", help=text)
    axes.add_argument("--vpp", type=count, metavar="N", help="virtual stages on each pipeline rank")
    axes.add_argument("--layers-per-stage", type=counts, metavar="N,N", help="layers of each stage, as in 9,8,8,7")
    adapters = parser.add_argument_group("adapters on a frozen model; MODEL+lora16 and MODEL+qlora16 say the same")
    adapters.add_argument("--lora-rank", type=count, metavar="R", help="train LoRA adapters of this rank only")
    adapters.add_argument(
        "--lora-targets", type=some, metavar="NAMES", help="linears that get one, as in q_proj,v_proj; all of layers"
    )
    adapters.add_argument("--lora-base", choices=("compute", "nf4"), help="how frozen linears are stored; compute")
    how = parser.add_argument_group("how it is run")
    how.add_argument("--zero", type=int, choices=(0, 1, 2, 3), metavar="STAGE", help="ZeRO stage; 3 is FSDP")
    how.add_argument(
        "--recompute", choices=("none", "selective", "full"), metavar="HOW", help="none, selective or full"
    )
    how.add_argument(
        "--context",
        choices=("ring", "all_gather", "ulysses"),
        metavar="HOW",
        help="with cp: ring, all_gather or ulysses",
    )
    how.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(orders.names())}")
    how.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32", "fp8"), metavar="DTYPE", help="bf16, fp16, fp32 or fp8"
    )
    how.add_argument("--sequence-parallel", action="store_true", default=None, help="with tp")
    add_local_option(how)


def add_local_option(parser: argparse._ActionsContainer) -> None:
    """`--no-local-calibration`."""
    parser.add_argument(
        "--no-local-calibration", action="store_true", help="leave out what gnomon plan --try measured on this machine"
    )


def plan_options(parser: argparse.ArgumentParser) -> None:
    """All options of `gnomon plan`."""
    serve_options(parser)
    parser.add_argument("model", metavar="MODEL", help="name, config.json or its folder")
    parser.add_argument(
        "--on", type=some, required=True, metavar="CLUSTER", help="machines, as in 4x8xh100-sxm or local"
    )
    parser.add_argument("-o", "--output", type=new_file, metavar="FILE", help="write the best plan to a plan file")
    parser.add_argument(
        "--top", type=at_most(1000), metavar="N", help="show the N fastest plans; default: 5 diverse ones"
    )
    parser.add_argument(
        "--stack", type=some, metavar="NAME", help="the program that will run it (gnomon catalogue stacks)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--equal-stages", action="store_true", help="do not look for uneven stages, or recompute that differs by stage"
    )
    parser.add_argument(
        "--sac-ilp",
        action="store_true",
        help="choose tensor by tensor what each stage recomputes or sends to the host, by an integer programme (scipy)",
    )
    parser.add_argument(
        "--uneven-replicas",
        action="store_true",
        help="on up to 128 devices: pipelines whose stages have other numbers of replicas too (DAPPLE)",
    )
    _limits(parser)
    _beyond(parser)
    _questions(parser)
    _tries(parser)
    add_run_options(parser)


def _limits(parser: argparse.ArgumentParser) -> None:
    """What a plan may be."""
    limits = parser.add_argument_group("limits")
    limits.add_argument("--forbid", action="append", default=[], metavar="LIMIT", help="as in 'pp>1'; may be repeated")
    limits.add_argument(
        "--memory", type=some, metavar="SIZE", help="of a device that may be filled, as in 60GiB; 92 %% of it"
    )
    limits.add_argument("--tries", type=count, metavar="N", help="predictions on a mixed cluster, at most; 300")


def _beyond(parser: argparse.ArgumentParser) -> None:
    """Choices that are tried on the best plans."""
    more = parser.add_argument_group(
        "choices beyond the exact search",
        "reshard_after_forward prefetch bucket_bytes order async_tp\n"
        "  activation_offload optimizer_offload parameter_offload parameter_disk\n"
        "  fp8: tried on the best plans",
    )
    much = more.add_mutually_exclusive_group()
    much.add_argument("--refine", action="store_true", default=None, help="try all that they can be; default a few")
    much.add_argument("--no-refine", dest="refine", action="store_false", help="leave them as they are")
    more.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE", help="one of them, or any field")
    more.add_argument("--allow", action="append", default=[], metavar="NAME", help="fp8: it changes what is computed")
    more.add_argument(
        "--methods",
        type=some,
        metavar="NAMES",
        help="published methods to try, as in mario,dapple_warmup, or all (gnomon catalogue methods)",
    )
    more.add_argument("--no-clip", action="store_true", help="no clipping of gradients; optimizer_offload needs it")


def _questions(parser: argparse.ArgumentParser) -> None:
    """What else is asked than the fastest plan."""
    other = parser.add_argument_group("other questions")
    other.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="the best plan at each value; may be given twice",
    )
    other.add_argument(
        "--lengths",
        type=lengths,
        metavar="LIST",
        help="the fastest plan for a batch of several lengths: 32k,4kx8,512x55 (x: how many such), or a file of one a "
        "line; --methods chunkflow,skrull are tried on it",
    )
    other.add_argument(
        "--mtbf",
        type=number_from(0.01, 1e6),
        metavar="HOURS",
        help="the plan that makes most useful steps where each machine is lost once in so many hours: with copies of "
        "stages (bamboo) or without; seconds as gnomon fleet spot takes them",
    )
    other.add_argument("--pareto", action="store_true", help="the front of time and memory")
    other.add_argument("--longest", type=tokens, metavar="N", help="the longest sequence that fits, a multiple of N")
    other.add_argument(
        "--largest",
        type=some,
        metavar="RULE",
        help="the largest model that fits: layers, hidden or both of MODEL, or names by commas",
    )
    other.add_argument(
        "--budget",
        type=some,
        metavar="TIME",
        help="processor time that the search may take, as in 5min: the best plan so far is then the answer, with a "
        "bound on what was not looked at; 60s unless said (10min for other questions); ^C ends it too",
    )
    other.add_argument(
        "--max-step", type=some, metavar="TIME", help="fewest nodes of CLUSTER whose step is no longer, as in 2s"
    )
    other.add_argument(
        "--deadline", type=some, metavar="TIME", help="fewest nodes that train --tokens in this time, as in 7d"
    )
    other.add_argument("--tokens", type=some, metavar="N", help="tokens to train on, as in 1T; with --deadline")
    other.add_argument("--max-devices", type=count, metavar="N", help="the best on whole nodes with at most N devices")
    other.add_argument("--best", choices=("step", "cost"), default="step", help="shortest step, or cheapest token")
    other.add_argument(
        "--price", action="append", default=[], metavar="DOLLARS", help="of a device-hour, as in 2.5 or h100-sxm=2.5"
    )
    other.add_argument("--html", type=new_file, metavar="FILE", help="the cases as a page with a plot")


def _tries(parser: argparse.ArgumentParser) -> None:
    """Plans that are run."""
    tries = parser.add_argument_group("trying plans on this machine, with Gnomon's own runtime")
    tries.add_argument(
        "--try", dest="try_", type=at_most(50), metavar="N", help="run the best N for a few steps, keep the best"
    )
    tries.add_argument("--try-steps", type=at_most(1000), default=5, metavar="N", help="that count, after 3; 5")
    tries.add_argument("--try-timeout", type=some, metavar="TIME", help="for each, as in 10min; default 5 min or more")
    tries.add_argument("--try-dir", type=some, metavar="DIR", help="for plan files and logs; default a temporary one")


def explain_options(parser: argparse.ArgumentParser) -> None:
    """All options of `gnomon explain`."""
    parser.add_argument("plan", metavar="PLAN.toml", help="a plan file")
    parser.add_argument("--json", action="store_true", help="for programs")
    add_local_option(parser)
