"""What can be written after `gnomon fleet`, and its help. Nothing here knows a trace or a policy.

`fleet_options(parser)` adds the sub-commands to the parser of `gnomon fleet`; the modules `fleet_*` beside this one
read their values.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from gnomon.cli.values import at_most, count, new_file, number_from, some
from gnomon.fleet.assumed_losses import Assumed

FLEET_TEXT = """\
Many jobs on one cluster. replay plays a trace of jobs under a scheduling policy,
in simulated time; what-if says what more machines or another policy would do.

examples:
  gnomon fleet replay jobs.csv --on 100x8xv100-sxm-32gb --policy sjf \\
      --compare fifo,srtf -o fleet.html
  sacct -P -a -S 2026-01-01 -o JobID,User,Submit,Start,End,State,ReqTRES > jobs.txt
  gnomon fleet replay jobs.txt --on 16x8xh100-sxm --policy backfill
  gnomon fleet policies"""

_REPLAY = """\
FILE is a trace: a table with job_id, submit_s, duration_s and num_gpus (and any
of min_gpus, max_gpus, device, model, batch_size, seq_len, plan, steps, slice,
memory_gib, deadline_s, weight, user); the output of sacct -P; pods of kubectl
get pods -A -o json; a table of pod events; or a trace as published of Philly,
Helios, Acme, PAI, openb, DLRM, Tiresias, Gavel, Pollux or Sia. Rows that cannot
be replayed are named with their line. A job with a plan file, or a model that is
known and its batch_size, has its rate and memory predicted; with steps it needs
no duration_s.

exit status: 0 done; 2 the request or the trace is wrong."""

_WHAT_IF = """\
Plays the trace on the machines that there are and with those of --add, under
--policy and every policy of --compare, and says what each would bring and cost.

example:
  gnomon fleet what-if jobs.csv --on 100x8xv100-sxm-32gb --add 20x8xv100-sxm-32gb \\
      --policy fifo --compare sjf,las"""

_FORECAST = """\
PLAN.toml is a plan file. Its tensor, pipeline and context parallelism stay; the
same global batch is divided over more or fewer data-parallel ranks. Each number
of devices is predicted as gnomon predict would, with its band. A resize writes
and reads a checkpoint (14 bytes a parameter) and starts the processes again.

example:
  gnomon plan llama-3.1-8b --on 4x8xh100-sxm --global-batch 256 -o plan.toml
  gnomon fleet forecast plan.toml --devices 8..128"""

_SUBMIT = """\
Writes the job that runs a plan file with gnomon run on each node, reads it back
and checks it: options and types that the scheduler knows, as many devices as the
plan has. The job writes a checkpoint when it is told to stop, and resumes.

example:
  gnomon fleet submit plan.toml --via slurm --dry-run > job.sh"""

_SPOT = """\
Plays losses of machines, drawn at the rate that is asked and at others around it,
against the plan as it is, with copies in memory (gnomon run
--memory-checkpoint-every) and with copies of stages (the pass bamboo), each with
its predicted seconds, and says which is best. The controllers of gnomon run decide.

example:
  gnomon fleet spot plan.toml --mtbf 10 -o best.toml"""

_RUN = """\
Runs the jobs of a table on this machine under a policy: starts them, stops them
with SIGTERM (gnomon run writes a checkpoint), resumes them, and resizes those
with min_gpus and max_gpus by starting them again on other devices. What happens
is journalled: started again after kill -9, it goes on where it was, and no job
runs twice. Policies are told duration_s; of a plan it is predicted if it is not
given, as is its rate on other numbers of devices.

tables of plans (options are gnomon run's) and of commands:
  job_id,plan,steps,min_gpus,max_gpus,options
  small,small.toml,100,1,4,--data books
  job_id,num_gpus,duration_s,min_gpus,max_gpus,command
  large,2,600,1,4,python train.py --gpus {devices}

exit status: 0 all done; 2 the request is wrong, or a job failed three times."""


def fleet_options(parser: argparse.ArgumentParser) -> None:
    """The sub-commands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _replay(_action(actions, "replay", "play a trace under one policy or several", _REPLAY))
    _what_if(_action(actions, "what-if", "the same jobs with more machines, or another policy", _WHAT_IF))
    _forecast(_action(actions, "forecast", "rate, memory and cost of a plan on numbers of devices", _FORECAST))
    _submit(_action(actions, "submit", "a plan as a job of Slurm, Kueue or Ray", _SUBMIT))
    _spot(_action(actions, "spot", "what losses of machines cost a plan, with and without copies", _SPOT))
    _decisions(_action(actions, "decisions", "a recorded trace of gnomon run --decisions, played again", ""))
    _run(_action(actions, "run", "jobs on this machine, scheduled by a policy", _RUN))
    policies = _action(actions, "policies", "the policies that are known", "")
    policies.add_argument("--json", action="store_true", help="for programs")


def _action(actions: argparse._SubParsersAction, name: str, text: str, epilog: str) -> argparse.ArgumentParser:  # type: ignore[type-arg]
    made: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, epilog=epilog)
    return made


def _replay(parser: argparse.ArgumentParser) -> None:
    _trace_options(parser)
    parser.add_argument("--on", required=True, type=some, metavar="CLUSTER", help="machines, as in 100x8xv100-sxm-32gb")
    parser.add_argument("--policy", default="fifo", type=some, metavar="NAME", help="gnomon fleet policies; fifo")
    parser.add_argument("--compare", type=some, metavar="A,B,…", help="policies to play beside it")
    _rule_options(parser)
    parser.add_argument("-o", "--output", type=new_file, metavar="FILE", help="a page with everything, for a browser")
    parser.add_argument("--trace", type=new_file, metavar="FILE", help="a trace for ui.perfetto.dev, of --policy")
    parser.add_argument("--json", action="store_true", help="for programs")


def _forecast(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.toml", help="a plan file, as gnomon plan -o writes it")
    parser.add_argument("--devices", required=True, type=some, metavar="A..B", help="8..64 (doubling), or 8,12,16")
    parser.add_argument(
        "--price", type=number_from(0), metavar="DOLLARS", help="of a device-hour; default public prices"
    )
    parser.add_argument(
        "--restart", type=number_from(0), default=60.0, metavar="S", help="to start processes again; 60"
    )
    parser.add_argument(
        "--storage", type=number_from(0.001), default=2.0, metavar="GB/S", help="of a node to checkpoints; 2"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def _spot(parser: argparse.ArgumentParser) -> None:
    known = Assumed()
    parser.add_argument("plan", metavar="PLAN.toml", help="a plan file, as gnomon plan -o writes it")
    parser.add_argument(
        "--mtbf", required=True, type=number_from(0.01, 1e6), metavar="HOURS", help="between losses of one machine"
    )
    for name, value, metavar, least, most, text in (
        ("--come", known.come_s, "S", 0, math.inf, "until another machine is there"),
        ("--start", known.start_s, "S", 0, math.inf, "of a start of all processes"),
        ("--takeover", known.takeover_s, "S", 0, math.inf, "until those left go on without a start"),
        ("--checkpoint-seconds", known.checkpoint_s, "S", 0.001, math.inf, "between checkpoints"),
        ("--hours", known.hours, "H", 0.1, 1000, "that are played"),
        ("--bulk", known.bulk, "SHARE", 0, 1, "of losses that take a second machine"),
    ):
        parser.add_argument(
            name, type=number_from(least, most), default=value, metavar=metavar, help=f"{text}; {value:g}"
        )
    for name, number, kind, text in (
        ("--memory-checkpoint-every", known.memory_every, count, "steps between copies in memory"),
        ("--lists", known.lists, at_most(100), "of losses, drawn"),
    ):
        parser.add_argument(name, type=kind, default=number, metavar="N", help=f"{text}; {number}")
    parser.add_argument("-o", "--output", type=new_file, metavar="FILE", help="write the plan as it is best")
    parser.add_argument("--json", action="store_true", help="for programs")


def _decisions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="that gnomon run --decisions wrote")
    parser.add_argument("--json", action="store_true", help="for programs")


def _submit(parser: argparse.ArgumentParser) -> None:
    launch_options(parser, ("slurm", "kubernetes", "kueue", "ray"))


def launch_options(parser: argparse.ArgumentParser, via: Sequence[str]) -> None:
    """Of `gnomon launch` and `gnomon fleet submit`."""
    parser.add_argument("plan", metavar="PLAN.toml", help="a plan file, on the cluster's file system")
    parser.add_argument("--via", required=True, choices=via, help="what starts it")
    parser.add_argument("--dry-run", action="store_true", help="print the job, checked, in place of sending it")
    parser.add_argument("--name", type=some, metavar="NAME", help="of the job; default the file's")
    parser.add_argument("--steps", type=count, default=200, metavar="N", help="of training; 200")
    parser.add_argument("--hours", type=number_from(0.01, 8000), metavar="H", help="limit of time; 24")
    parser.add_argument("--queue", type=some, metavar="NAME", help="partition of Slurm, queue of Kueue")
    parser.add_argument("--image", type=some, metavar="IMAGE", help="container, for Kubernetes; gnomon:latest")


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("jobs", metavar="JOBS.csv", help="job_id and plan, steps; or num_gpus, duration_s, command")
    parser.add_argument("--devices", required=True, type=at_most(4096), metavar="N", help="that there are")
    parser.add_argument("--policy", default="fifo", type=some, metavar="NAME", help="gnomon fleet policies; fifo")
    parser.add_argument(
        "--every", type=number_from(0), metavar="S", help="between decisions of policies that resize; default theirs"
    )
    parser.add_argument("--folder", type=some, metavar="DIR", help="of journal and logs; default JOBS.csv.fleet")
    parser.add_argument("--json", action="store_true", help="for programs")


def _what_if(parser: argparse.ArgumentParser) -> None:
    _trace_options(parser)
    parser.add_argument("--on", required=True, type=some, metavar="CLUSTER", help="the machines that there are")
    parser.add_argument("--add", type=some, metavar="CLUSTER", help="machines to try besides")
    parser.add_argument("--policy", default="fifo", type=some, metavar="NAME", help="the policy that there is; fifo")
    parser.add_argument("--compare", type=some, metavar="A,B,…", help="policies to try")
    parser.add_argument(
        "--price", type=number_from(0), metavar="DOLLARS", help="of a device-hour; default public prices"
    )
    _rule_options(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def _trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a trace of jobs")
    trace = parser.add_argument_group("the trace")
    trace.add_argument("--format", type=some, metavar="NAME", help="where its first line does not say")
    trace.add_argument("--workload", type=count, metavar="N", help="of a file that holds several")
    trace.add_argument("--points", type=some, metavar="PATH", help="measured speeds of the models in it")
    trace.add_argument("--learned", action="store_true", help="of a folder of points: jobs learn them as they run")
    trace.add_argument("--start-day", type=number_from(0), default=0.0, metavar="D", help="leave out what came before")
    trace.add_argument("--days", type=number_from(0), metavar="D", help="only jobs of so many days")
    trace.add_argument("--skip-bad", action="store_true", help="list rows with a mistake, in place of an error")
    trace.add_argument(
        "--skip-larger", action="store_true", help="list jobs larger than the cluster, and leave them out"
    )
    trace.add_argument(
        "--elastic", type=number_from(0, 1), default=0.0, metavar="SHARE",
        help="of jobs on several devices that can run on half to twice as many; default none but those of the trace",
    )  # fmt: skip
    trace.add_argument("--seed", type=at_most(2**32 - 1, least=0), default=0, metavar="N", help="of what is drawn; 0")


def _rule_options(parser: argparse.ArgumentParser) -> None:
    rules = parser.add_argument_group("the cluster")
    rules.add_argument("--inference", type=some, metavar="CLUSTER", help="more machines, which serve inference first")
    rules.add_argument("--demand", type=some, metavar="FILE", help="its load: bin_start_s,relative_load (0 to 1)")
    rules.add_argument("--headroom", type=number_from(0, 1), default=0.0, metavar="SHARE", help="kept free for it; 0")
    rules.add_argument("--gpu-sharing", action="store_true", help="jobs on parts of a device are played too (fgd)")
    rules.add_argument("--mig", action="store_true", help="devices are cut into MIG slices")
    rules.add_argument("--pack", action="store_true", help="a job takes as few nodes as it can, or waits")
    rules.add_argument(
        "--serial",
        type=number_from(0, 1),
        default=0.0,
        metavar="SHARE",
        help="of a job's time that more devices do not shorten; 0",
    )
    rules.add_argument("--pairs", type=some, metavar="FILE", help="measured speeds of two models on one device")
    rules.add_argument(
        "--sharing",
        type=number_from(0.01, 1),
        default=0.5,
        metavar="SHARE",
        help="of its speed a job keeps beside another; 0.5",
    )
    rules.add_argument(
        "--memory",
        type=number_from(0),
        default=0.0,
        metavar="GIB",
        help="that a job takes where the trace does not say",
    )
    rules.add_argument(
        "--restart", type=number_from(0), default=60.0, metavar="S", help="to start again after a stop; 60"
    )
    rules.add_argument(
        "--resize", type=number_from(0), default=30.0, metavar="S", help="to go on with other devices; 30"
    )
    rules.add_argument("--checkpoint-every", type=number_from(0), default=1800.0, metavar="S", help="of work; 1800")
    rules.add_argument("--no-notice", action="store_true", help="a preempted job loses work since its last checkpoint")
    rules.add_argument(
        "--node-mtbf", type=number_from(0), metavar="DAYS", help="between failures of a node; default none"
    )
    rules.add_argument(
        "--repair", type=number_from(0), default=4.0, metavar="HOURS", help="that a failed node is away; 4"
    )
