"""Options of `gnomon fleet` and its actions. Nothing here knows a trace or a policy.

Leaves out reading them into values (`cli.fleet_request` and the modules `cli.fleet_*`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gnomon.cli.options.flags import Group, Options, option, positional, switch
from gnomon.cli.options.job import LayoutOptions, StackOption
from gnomon.cli.options.run import LaunchOptions
from gnomon.cli.options.serve import ServeOptions
from gnomon.cli.values import at_most, count, new_file, number_from, some
from gnomon.fleet.assumed_losses import AssumedLosses

TRACE = Group("the trace")
RULES = Group("the cluster")
ASSUMED = AssumedLosses()


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class FleetOptions(Options):
    """What every action has."""

    json: bool = switch("--json", help="for programs")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class TraceOptions(Options):
    """A trace of jobs, and the rules under which it is played."""

    file: str = positional(metavar="FILE", help="a trace of jobs")
    format: str | None = option(
        "--format", read=some, metavar="NAME", help="where its first line does not say", group=TRACE
    )
    workload: int | None = option(
        "--workload", read=count, metavar="N", help="of a file that holds several", group=TRACE
    )
    points: str | None = option(
        "--points", read=some, metavar="PATH", help="measured speeds of the models in it", group=TRACE
    )
    learned: bool = switch("--learned", help="of a folder of points: jobs learn them as they run", group=TRACE)
    start_day: float = option(
        "--start-day", default=0.0, read=number_from(0), metavar="D", help="leave out what came before", group=TRACE
    )
    days: float | None = option(
        "--days", read=number_from(0), metavar="D", help="only jobs of so many days", group=TRACE
    )
    skip_bad: bool = switch("--skip-bad", help="list rows with a mistake, in place of an error", group=TRACE)
    skip_larger: bool = switch(
        "--skip-larger", help="list jobs larger than the cluster, and leave them out", group=TRACE
    )
    elastic: float = option(
        "--elastic",
        default=0.0,
        read=number_from(0, 1),
        metavar="SHARE",
        help="of jobs on several devices that can run on half to twice as many; default none but those of the trace",
        group=TRACE,
    )
    seed: int = option(
        "--seed", default=0, read=at_most(2**32 - 1, least=0), metavar="N", help="of what is drawn; 0", group=TRACE
    )
    inference: str | None = option(
        "--inference", read=some, metavar="CLUSTER", help="more machines, which serve inference first", group=RULES
    )
    demand: str | None = option(
        "--demand", read=some, metavar="FILE", help="its load: bin_start_s,relative_load (0 to 1)", group=RULES
    )
    headroom: float = option(
        "--headroom", default=0.0, read=number_from(0, 1), metavar="SHARE", help="kept free for it; 0", group=RULES
    )
    gpu_sharing: bool = switch("--gpu-sharing", help="jobs on parts of a device are played too (fgd)", group=RULES)
    mig: bool = switch("--mig", help="devices are cut into MIG slices", group=RULES)
    pack: bool = switch("--pack", help="a job takes as few nodes as it can, or waits", group=RULES)
    serial: float = option(
        "--serial",
        default=0.0,
        read=number_from(0, 1),
        metavar="SHARE",
        help="of a job's time that more devices do not shorten; 0",
        group=RULES,
    )
    pairs: str | None = option(
        "--pairs", read=some, metavar="FILE", help="measured speeds of two models on one device", group=RULES
    )
    sharing: float = option(
        "--sharing",
        default=0.5,
        read=number_from(0.01, 1),
        metavar="SHARE",
        help="of its speed a job keeps next to another; 0.5",
        group=RULES,
    )
    memory: float = option(
        "--memory",
        default=0.0,
        read=number_from(0),
        metavar="GIB",
        help="that a job takes where the trace does not say",
        group=RULES,
    )
    restart: float = option(
        "--restart", default=60.0, read=number_from(0), metavar="S", help="to start again after a stop; 60", group=RULES
    )
    resize: float = option(
        "--resize", default=30.0, read=number_from(0), metavar="S", help="to go on with other devices; 30", group=RULES
    )
    checkpoint_every: float = option(
        "--checkpoint-every", default=1800.0, read=number_from(0), metavar="S", help="of work; 1800", group=RULES
    )
    no_notice: bool = switch("--no-notice", help="a preempted job loses work since its last checkpoint", group=RULES)
    node_mtbf: float | None = option(
        "--node-mtbf", read=number_from(0), metavar="DAYS", help="between failures of a node; default none", group=RULES
    )
    repair: float = option(
        "--repair", default=4.0, read=number_from(0), metavar="HOURS", help="that a failed node is away; 4", group=RULES
    )
    policy: str = option("--policy", default="fifo", read=some, metavar="NAME", help="gnomon fleet policies; fifo")
    on: str = option("--on", required=True, read=some, metavar="CLUSTER", help="machines, as in 100x8xv100-sxm-32gb")
    compare: str | None = option("--compare", read=some, metavar="A,B,…", help="policies to compare it with")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ReplayOptions(TraceOptions, FleetOptions):
    """A trace that is played."""

    about = """\
FILE is a trace: a table with job_id, submit_s, duration_s and num_gpus (and any
of min_gpus, max_gpus, device, model, batch_size, seq_len, plan, steps, slice,
memory_gib, deadline_s, weight, user); the output of sacct -P; pods of kubectl
get pods -A -o json; a table of pod events; or a trace as published of Philly,
Helios, Acme, PAI, openb, DLRM, Tiresias, Gavel, Pollux or Sia. Rows that cannot
be replayed are named with their line. A job with a plan file, or a model that is
known and its batch_size, has its rate and memory predicted; with steps it needs
no duration_s.

exit status: 0 done; 2 the request or the trace is wrong."""

    output: str | None = option(
        "-o", "--output", read=new_file, metavar="FILE", help="a page with everything, for a browser"
    )
    trace: str | None = option(
        "--trace", read=new_file, metavar="FILE", help="a trace for ui.perfetto.dev, of --policy"
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class WhatIfOptions(TraceOptions, FleetOptions):
    """A trace that is played on other machines too."""

    about = """\
Plays the trace on the machines that there are and with those of --add, under
--policy and every policy of --compare, and says what each would bring and cost.

example:
  gnomon fleet what-if jobs.csv --on 100x8xv100-sxm-32gb --add 20x8xv100-sxm-32gb \\
      --policy fifo --compare sjf,las"""

    add: str | None = option("--add", read=some, metavar="CLUSTER", help="machines to try besides")
    price: float | None = option(
        "--price", read=number_from(0), metavar="DOLLARS", help="of a device-hour; default public prices"
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ForecastOptions(FleetOptions):
    """A plan on numbers of devices."""

    about = """\
PLAN.toml is a plan file. Its tensor, pipeline and context parallelism stay; the
same global batch is divided over more or fewer data-parallel ranks. Each number
of devices is predicted as gnomon predict would, with its band. A resize writes
and reads a checkpoint (14 bytes a parameter) and starts the processes again.

example:
  gnomon plan llama-3.1-8b --on 4x8xh100-sxm --global-batch 256 -o plan.toml
  gnomon fleet forecast plan.toml --devices 8..128"""

    plan: str = positional(metavar="PLAN.toml", help="a plan file, as gnomon plan -o writes it")
    devices: str = option("--devices", required=True, read=some, metavar="A..B", help="8..64 (doubling), or 8,12,16")
    price: float | None = option(
        "--price", read=number_from(0), metavar="DOLLARS", help="of a device-hour; default public prices"
    )
    restart: float = option(
        "--restart", default=60.0, read=number_from(0), metavar="S", help="to start processes again; 60"
    )
    storage: float = option(
        "--storage", default=2.0, read=number_from(0.001), metavar="GB/S", help="of a node to checkpoints; 2"
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ServiceOptions(LayoutOptions, StackOption, ServeOptions, FleetOptions):
    """An inference service over the day."""

    about = """\
MODEL is served on units of the machines of --on, as gnomon predict --serve lays
them out. The trace of --requests is cut into bins; of each bin the fewest units
are found with which --share of its requests meet --ttft and --tpot, by playing
them. -o writes the load as a table that gnomon fleet replay takes: what the
service does not need is lent to training (Lyra).

example:
  gnomon fleet service llama-3.1-8b --on 1xh100-sxm --requests day.csv \\
      --ttft 1s --tpot 50ms -o demand.csv
  gnomon fleet replay jobs.csv --on 16x8xh100-sxm --inference 4x8xh100-sxm \\
      --demand demand.csv --policy lyra"""

    model: str = positional(metavar="MODEL", help="name, config.json or its folder")
    on: str = option("--on", required=True, read=some, metavar="CLUSTER", help="machines of one unit, as in 4xh100-sxm")
    bin: str = option("--bin", default="10min", read=some, metavar="TIME", help="stretch of the day; 10min")
    share: float = option(
        "--share", default=0.95, read=number_from(0.01, 1), metavar="X", help="of requests within the targets; 0.95"
    )
    most: int = option("--most", default=1024, read=count, metavar="N", help="units at most; 1024")
    output: str | None = option(
        "-o", "--output", read=new_file, metavar="FILE", help="the load as bin_start_s,relative_load"
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SlicesOptions(LayoutOptions, StackOption, ServeOptions, FleetOptions):
    """Slices for batches of prompts."""

    about = """\
Prompts of the trace (--requests), of which no answer is asked, are cut into
--buckets of lengths with the least padding and computed in batches. The MIG
slices and batch sizes that keep up with each bucket's rate within --slo are
chosen on the fewest devices (ElasticBatch), next to whole devices.

example:
  gnomon fleet slices llama-3.2-1b --on a100-sxm-80gb --requests prompts.csv \\
      --slo 200ms --rate 400"""

    model: str = positional(metavar="MODEL", help="name, config.json or its folder")
    on: str = option("--on", required=True, read=some, metavar="DEVICE", help="that is cut into slices")
    slo: str = option("--slo", required=True, read=some, metavar="TIME", help="longest time of a prompt, as in 200ms")
    buckets: int = option("--buckets", default=4, read=at_most(64), metavar="N", help="of lengths, at most; 4")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SpotOptions(FleetOptions):
    """A plan whose machines are lost."""

    about = """\
Plays losses of machines, drawn at the rate that is asked and at others around it,
against the plan as it is, with copies in memory (gnomon run
--memory-checkpoint-every) and with copies of stages (the pass bamboo), each with
its predicted seconds, and says which is best. The controllers of gnomon run decide.

example:
  gnomon fleet spot plan.toml --mtbf 10 -o best.toml"""

    plan: str = positional(metavar="PLAN.toml", help="a plan file, as gnomon plan -o writes it")
    mtbf: float = option(
        "--mtbf", required=True, read=number_from(0.01, 1e6), metavar="HOURS", help="between losses of one machine"
    )
    output: str | None = option("-o", "--output", read=new_file, metavar="FILE", help="write the plan as it is best")
    come: float = option(
        "--come",
        default=ASSUMED.come_s,
        read=number_from(0, math.inf),
        metavar="S",
        help=f"until another machine is there; {ASSUMED.come_s:g}",
    )
    start: float = option(
        "--start",
        default=ASSUMED.start_s,
        read=number_from(0, math.inf),
        metavar="S",
        help=f"of a start of all processes; {ASSUMED.start_s:g}",
    )
    takeover: float = option(
        "--takeover",
        default=ASSUMED.takeover_s,
        read=number_from(0, math.inf),
        metavar="S",
        help=f"until those left go on without a start; {ASSUMED.takeover_s:g}",
    )
    checkpoint_seconds: float = option(
        "--checkpoint-seconds",
        default=ASSUMED.checkpoint_s,
        read=number_from(0.001, math.inf),
        metavar="S",
        help=f"between checkpoints; {ASSUMED.checkpoint_s:g}",
    )
    hours: float = option(
        "--hours",
        default=ASSUMED.hours,
        read=number_from(0.1, 1000),
        metavar="H",
        help=f"that are played; {ASSUMED.hours:g}",
    )
    bulk: float = option(
        "--bulk",
        default=ASSUMED.bulk,
        read=number_from(0, 1),
        metavar="SHARE",
        help=f"of losses that take a second machine; {ASSUMED.bulk:g}",
    )
    memory_checkpoint_every: int = option(
        "--memory-checkpoint-every",
        default=ASSUMED.memory_every,
        read=count,
        metavar="N",
        help=f"steps between copies in memory; {ASSUMED.memory_every}",
    )
    lists: int = option(
        "--lists", default=ASSUMED.lists, read=at_most(100), metavar="N", help=f"of losses, drawn; {ASSUMED.lists}"
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class DecisionsOptions(FleetOptions):
    """A recorded trace of decisions."""

    file: str = positional(metavar="FILE", help="that gnomon run --decisions wrote")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SubmitOptions(LaunchOptions):
    """A plan as a job of a scheduler."""

    about = """\
Writes the job that runs a plan file with gnomon run on each node, reads it back
and checks it: options and types that the scheduler knows, as many devices as
the plan has. On SIGTERM the job writes a checkpoint; it resumes from it.

example:
  gnomon fleet submit plan.toml --via slurm --dry-run > job.sh"""

    via: str = option("--via", required=True, choices=("slurm", "kubernetes", "kueue", "ray"), help="what starts it")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FleetRunOptions(FleetOptions):
    """Jobs that are run on this machine."""

    about = """\
Runs the jobs of a table on this machine under a policy: starts them, stops them
with SIGTERM (gnomon run writes a checkpoint), resumes them, and resizes those
with min_gpus and max_gpus by starting them again on other devices. What happens
is journalled: started again after kill -9, it goes on where it was, and no job
runs twice. Policies know duration_s; of a plan it is predicted if it is not
given, as is its rate on other numbers of devices.

tables of plans (options are gnomon run's) and of commands:
  job_id,plan,steps,min_gpus,max_gpus,options
  small,small.toml,100,1,4,--data books
  job_id,num_gpus,duration_s,min_gpus,max_gpus,command
  large,2,600,1,4,python train.py --gpus {devices}

exit status: 0 all done; 2 the request is wrong, or a job failed three times."""

    jobs: str = positional(metavar="JOBS.csv", help="job_id and plan, steps; or num_gpus, duration_s, command")
    devices: int = option("--devices", required=True, read=at_most(4096), metavar="N", help="that there are")
    policy: str = option("--policy", default="fifo", read=some, metavar="NAME", help="gnomon fleet policies; fifo")
    every: float | None = option(
        "--every", read=number_from(0), metavar="S", help="between decisions of policies that resize; default theirs"
    )
    folder: str | None = option(
        "--folder", read=some, metavar="DIR", help="of journal and logs; default JOBS.csv.fleet"
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PoliciesOptions(FleetOptions):
    """What policies are known."""

    pass


ABOUT = """\
Many jobs on one cluster. replay plays a trace of jobs under a scheduling
policy, in simulated time; what-if says what more machines or another policy
would do.

examples:
  gnomon fleet replay jobs.csv --on 100x8xv100-sxm-32gb --policy sjf \\
      --compare fifo,srtf -o fleet.html
  sacct -P -a -S 2026-01-01 \\
      -o JobID,User,Submit,Start,End,State,ReqTRES > jobs.txt
  gnomon fleet replay jobs.txt --on 16x8xh100-sxm --policy backfill
  gnomon fleet policies"""
