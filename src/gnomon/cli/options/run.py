"""Options of commands that train: `gnomon run`, `launch`, `check`, `parity`, `scale` and `data`.

Leaves out reading them into values.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.cli.options.flags import Options, option, positional, switch
from gnomon.cli.options.job import JobFileOptions, LocalOption
from gnomon.cli.values import at_most, count, new_file, not_negative, number_from, rate, some


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class TextOptions(Options):
    """How text becomes tokens, and tokens rows."""

    tokenizer: str | None = option(
        "--tokenizer", read=some, metavar="FILE", help="tokenizer.json or its folder; default bytes as tokens"
    )
    chat_template: str | None = option(
        "--chat-template", read=some, metavar="FILE", help="for messages; default the one next to the tokenizer"
    )
    column: str | None = option(
        "--column", read=some, metavar="NAME", help="with the text, of records; default text, messages or prompt"
    )
    learn: str | None = option(
        "--learn",
        choices=("answers", "completions", "all"),
        help="what is learnt of conversations and prompts: what the assistant says, and completions (default); "
        "completions, and conversations whole; or all",
    )
    packing: str | None = option(
        "--packing",
        choices=("stream", "documents", "padded"),
        help="rows cut from one stream of text, of whole documents that do not see each other, or of one document each "
        "(a microbatch is as long as its longest); default stream, and documents where only a part is to be learnt",
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RunOptions(TextOptions, LocalOption):
    """What is trained, on what, for how long."""

    about = """\
PLAN.toml is a plan file, as gnomon plan writes it: model, machines, batch and
plan. It is run by Gnomon's runtime (pip install gnomon[torch]) in as many
processes as it has ranks, started here, or by the torchrun that this is run in.
A token is a byte, or one of --tokenizer; text held out is never trained on. ^C
and SIGTERM write a checkpoint; --resume goes on from it to the same losses.

examples:
  gnomon run plan.toml --steps 100 --timeline measured.timeline
  gnomon run plan.toml --data ~/books --checkpoints saved --resume
  gnomon run plan.toml --weights path/to/hf_folder
  gnomon run plan.toml --data chats.jsonl --tokenizer path/to/tokenizer.json

exit status: 0 done; 2 the request is wrong, or a process failed; 130 or 143
stopped by ^C or SIGTERM.

A job file of LLaMA-Factory, axolotl, TRL and others is trained in one process,
by what it says of model, adapters, data, packing, rates and steps; what is not
done as it says is listed first."""

    plan: str = positional(metavar="PLAN.toml", help="a plan file, or a trainer's job file (YAML, script)")
    data: str | None = option(
        "--data",
        read=some,
        metavar="PATH",
        help="text to train on: a folder or file of text, .jsonl, .parquet, a saved dataset, or Megatron's PREFIX; "
        "default Python's standard library; for a model that is code also MODULE:FUNCTION, the batch of a step",
    )
    weights: str | None = option(
        "--weights", read=some, metavar="FOLDER", help="safetensors and config.json to begin with; default random"
    )
    export: str | None = option(
        "--export", read=some, metavar="FOLDER", help="write the weights at the end, as safetensors with config.json"
    )
    with_plain: bool = switch(
        "--with-plain",
        help="of a plan with methods that change what is learnt: train it without them first, and show both losses",
    )
    explain_optimizer: bool = switch(
        "--explain-optimizer", help="say which parameters take weight decay and why, and do not train"
    )
    steps: int = option("--steps", default=200, read=count, metavar="N", help="in all, with those before a resume; 200")
    lr: float = option("--lr", default=1e-3, read=rate, metavar="RATE", help="largest learning rate; 0.001")
    lr_schedule: str = option(
        "--lr-schedule",
        default="constant",
        choices=("constant", "linear", "cosine", "wsd"),
        help="what follows the warm-up, down to --min-lr at the last step (wsd: over the last tenth); constant",
    )
    warmup_steps: int = option(
        "--warmup-steps", default=0, read=at_most(10**9, least=0), metavar="N", help="over which it rises; 0"
    )
    min_lr: float | None = option("--min-lr", read=rate, metavar="RATE", help="learning rate of the last step; 0")
    seed: int = option(
        "--seed", default=0, read=at_most(2**32 - 1, least=0), metavar="N", help="of parameters and order of data; 0"
    )
    resume: bool = switch("--resume", help="go on from the newest checkpoint")
    checkpoints: str | None = option(
        "--checkpoints", read=some, metavar="DIR", help="also at the end; default PLAN.checkpoints, when stopped"
    )
    checkpoint_every: int | None = option(
        "--checkpoint-every", read=count, metavar="N", help="steps; 100 with --checkpoints"
    )
    keep: int = option("--keep", default=2, read=count, metavar="N", help="newest checkpoints that are kept; 2")
    override: str | None = option(
        "--override", read=some, metavar="NAMES", help="with --resume: what may differ, of seed,lr,optimizer,data"
    )
    grace: float = option(
        "--grace",
        default=300.0,
        read=rate,
        metavar="S",
        help="seconds for a last step and checkpoint when stopped; 300",
    )
    timeline: str | None = option(
        "--timeline", read=new_file, metavar="FILE", help="write the measured Timeline of a step"
    )
    record_router: str | None = option(
        "--record-router",
        read=new_file,
        metavar="FILE.npz",
        help="write the tokens that each expert of each layer got in each step, which --router of other commands reads",
    )
    router: str | None = option(
        "--router", metavar="LOAD", help="for the prediction: how tokens spread over experts, as --router of predict"
    )
    device: str | None = option("--device", choices=("cpu", "cuda"), help="default: what the plan's machines have")
    json: bool = switch("--json", help="for programs")
    max_restarts: int = option(
        "--max-restarts",
        default=0,
        read=at_most(1000, least=0),
        metavar="N",
        help="times to go on from the newest checkpoint when a process is lost; 0",
    )
    memory_checkpoint_every: int | None = option(
        "--memory-checkpoint-every",
        read=count,
        metavar="N",
        help="steps between copies of each rank's state in the memory of the next rank, from which a lost process is "
        "replaced while the others stay (--max-restarts times)",
    )
    processes: int | None = option(
        "--processes",
        read=count,
        metavar="N",
        help="run the plan's ranks as logical workers on N processes, whose number gnomon scale changes; a rank each",
    )
    follow_speed: bool = switch(
        "--follow-speed",
        help="with --processes: logical workers move from slow processes to fast ones while it runs; same losses",
    )
    determinism: str | None = option(
        "--determinism",
        choices=("D1", "D2"),
        help="with --processes: the same losses on any number of processes (D1, the default), or on different kinds "
        "of processors too, by kernels that all have, which are slower (D2)",
    )
    meet_within: float | None = option(
        "--meet-within",
        read=rate,
        metavar="S",
        help="seconds in which processes that are there must have met, at the start and after a loss; 20",
    )
    decisions: str | None = option(
        "--decisions",
        read=new_file,
        metavar="FILE",
        help="write what was seen of processes and decided, which gnomon fleet decisions plays again",
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LaunchOptions(Options):
    """A plan that something else starts."""

    about = """\
Writes the job that runs a plan file with gnomon run on each node, reads it back
and checks it: options and types that the scheduler knows, and the devices that
the plan has. On SIGTERM the job writes a checkpoint; it resumes from it.
torchrun is started here; a job is sent by sbatch or kubectl.

examples:
  gnomon launch plan.toml --via torchrun
  gnomon launch plan.toml --via slurm --dry-run > job.sh"""

    via: str = option(
        "--via", required=True, choices=("torchrun", "slurm", "kubernetes", "kueue", "ray"), help="what starts it"
    )
    plan: str = positional(metavar="PLAN.toml", help="a plan file, on the cluster's file system")
    dry_run: bool = switch("--dry-run", help="print the job, checked, in place of sending it")
    name: str | None = option("--name", read=some, metavar="NAME", help="of the job; default the file's")
    steps: int = option("--steps", default=200, read=count, metavar="N", help="of training; 200")
    hours: float | None = option("--hours", read=number_from(0.01, 8000), metavar="H", help="limit of time; 24")
    queue: str | None = option("--queue", read=some, metavar="NAME", help="partition of Slurm, queue of Kueue")
    image: str | None = option("--image", read=some, metavar="IMAGE", help="container, for Kubernetes; gnomon:latest")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CheckOptions(JobFileOptions):
    """A plan or a job whose ranks are looked at."""

    about = """\
Starts the job's ranks as gnomon run would, here or in the torchrun that this is
run in, and checks for a few seconds: software, free memory against the
predicted peak, disk against a checkpoint's size, and a matmul on every rank,
short collectives and messages against their predicted times. The job is a plan
file, or what gnomon predict reads of other programs: a launch script, YAML, a
Trainer's script with --args.

examples:
  gnomon check plan.toml
  torchrun --nproc-per-node 8 -m gnomon check sft.yaml --on 1x8xh100-sxm

exit status: 0 ready; 1 something would end the run; 2 the request is wrong."""

    job: str | None = positional(optional=True, metavar="JOB", help="a plan file, or a job file of another program")
    on: str | None = option("--on", read=some, metavar="CLUSTER", help="machines of a job file, as in 1x8xh100-sxm")
    checkpoints: str | None = option(
        "--checkpoints", read=some, metavar="DIR", help="whose disk is looked at; JOB.checkpoints"
    )
    device: str | None = option("--device", choices=("cpu", "cuda"), help="default: what the plan's machines have")
    json: bool = switch("--json", help="for programs")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ParityOptions(Options):
    """A plan that is compared with the plain model."""

    about = """\
PLAN.toml is a plan file, as gnomon plan writes it. Its model is made small
(short dims, few layers, at most two ranks on an axis) and trained for three
steps in float64 under the plan's axes, schedule, layout and recomputation, and
by torch's autograd on whole tensors. Every activation, gradient, loss and
updated parameter is compared as it lies on each rank.

example:
  gnomon parity plan.toml

exit status: 0 equal; 1 a tensor differs, which is named; 2 the request is
wrong, or the runtime does not run the plan."""

    plan: str = positional(metavar="PLAN.toml", help="a plan file")
    ranks: int = option("--ranks", default=8, read=at_most(64), metavar="N", help="most processes; default 8")
    json: bool = switch("--json", help="for programs")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ScaleOptions(Options):
    """A job and its other number of processes."""

    about = """\
JOB is a job that gnomon run PLAN.toml --processes N started and that still
runs: its folder of checkpoints, or its plan file. Its logical workers go to the
other number of processes at the end of a step; losses stay the same bits.
Without --to it says what the job stands on.

examples:
  gnomon scale plan.toml
  gnomon scale saved --to 4

exit status: 0 done; 1 it has not changed in time; 2 the request is wrong."""

    job: str = positional(metavar="JOB", help="folder of --checkpoints of gnomon run, or its plan file")
    to: int | None = option(
        "--to", read=count, metavar="N", help="processes, from the next step on; default: only tell"
    )
    wait: float = option("--wait", default=120.0, read=not_negative, metavar="S", help="seconds for it; 120")
    json: bool = switch("--json", help="for programs")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class DataOptions(TextOptions):
    """Options of a corpus to train on."""

    about = """\
Reads text as gnomon run --data does and counts its documents, tokens and rows;
damaged files are named with their line. Tokens are kept in ~/.cache/gnomon/data
and made once. -o writes them as a pair of files that Megatron-LM reads too.

examples:
  gnomon data ~/books
  gnomon data corpus.jsonl --tokenizer path/to/tokenizer.json -o corpus
  gnomon data chats.jsonl --seq-len 32768 --lengths lengths.txt --sequences 64
  gnomon plan llama-3.1-8b --on 8xh100-sxm --lengths lengths.txt"""

    data: str = positional(metavar="PATH", help="as --data of gnomon run")
    lengths: str | None = option(
        "--lengths",
        read=some,
        metavar="FILE",
        help="write the lengths of a batch of documents, one a line, as --lengths of gnomon plan reads them",
    )
    sequences: int = option("--sequences", default=64, read=count, metavar="N", help="of that batch; 64")
    seq_len: int = option("--seq-len", default=2048, read=count, metavar="N", help="of the rows that are counted; 2048")
    output: str | None = option("-o", "--output", read=some, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    json: bool = switch("--json", help="for programs")
