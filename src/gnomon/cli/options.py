"""What can be written on the command line, and its help. Only `argparse`: nothing here knows a model or a machine.

`parser()` returns the parser; each command's values are read by the module of its name beside this one.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from gnomon.cli.missing import not_there
from gnomon.cli.options_fit import FIT_TEXT, fit_options
from gnomon.cli.options_fleet import FLEET_TEXT, fleet_options, launch_options
from gnomon.cli.options_plan import (
    EXPLAIN_TEXT,
    PLAN_TEXT,
    add_job_options,
    add_local_option,
    add_run_options,
    explain_options,
    plan_options,
)
from gnomon.cli.options_serve import serve_options
from gnomon.cli.terminal import broken
from gnomon.cli.values import at_most, count, lengths, new_file, not_negative, rate, some
from gnomon.errors import nearest
from gnomon.late import load_late

_EPILOG = """\
examples, all of which run on a laptop:
  gnomon predict llama-3.1-8b --on 4x8xh100-sxm --zero 3 --global-batch 128
  gnomon predict gpt2 --on a100-sxm-40gb --micro-batch-size 8
  gnomon catalogue clusters

exit status: 0 done; 1 predicted, but does not fit in memory or is not as fast
as asked; 2 the request is wrong; 3 a mistake in Gnomon. GNOMON_DEBUG=1 shows
tracebacks."""

_PREDICT = """\
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

_VALIDATE = """\
RUNS.csv is a table of your measured runs, one a row. Columns are the options of
gnomon predict by name: model, on, stack, seq_len, global_batch,
micro_batch_size, tp, pp, cp, ep, dp_replicate, vpp, zero, recompute, schedule,
precision, ...; or plan, a plan file that has them all. Measured: step_s, the
seconds of a step after warm-up; peak_gib, if you have it, memory of the fullest
device as its driver shows it. id names a run. gnomon calibrate --from reads the
same table.

example of a table:
  id,model,on,stack,seq_len,global_batch,micro_batch_size,tp,zero,step_s
  a,llama-3.1-8b,4x8xh100-sxm,torchtitan,8192,64,1,1,3,2.85
  b,llama-3.1-8b,4x8xh100-sxm,torchtitan,8192,64,2,2,3,3.02"""

_RUN = """\
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
stopped by ^C or SIGTERM."""

_PARITY = """\
PLAN.toml is a plan file, as gnomon plan writes it. Its model is made small
(short dims, few layers, at most two ranks on an axis) and trained for three
steps in float64 under the plan's axes, schedule, layout and recomputation,
beside torch's autograd on whole tensors. Every activation, gradient, loss and
updated parameter is compared as it lies on each rank.

example:
  gnomon parity plan.toml

exit status: 0 equal; 1 a tensor differs, which is named; 2 the request is
wrong, or the runtime does not run the plan."""

_LAUNCH = """\
Writes the job that runs a plan file with gnomon run on each node, reads it back
and checks it: options and types that the scheduler knows, and the devices that
the plan has. The job writes a checkpoint when it is told to stop, and resumes.
torchrun is started here; a job is sent by sbatch or kubectl.

examples:
  gnomon launch plan.toml --via torchrun
  gnomon launch plan.toml --via slurm --dry-run > job.sh"""

_CHECK = """\
Starts the plan's ranks as gnomon run would, here or in the torchrun that this
is run in, and looks for a few seconds: software, free memory beside the
predicted peak, disk beside a checkpoint, a product on every rank, short
collectives and messages beside their prediction.

example:
  gnomon check plan.toml

exit status: 0 ready; 1 something would end the run; 2 the request is wrong."""

_SCALE = """\
JOB is a job that gnomon run PLAN.toml --processes N started and that still
runs: its folder of checkpoints, or its plan file. Its logical workers go to the
other number of processes at the end of a step; losses stay the same bits.
Without --to it says what the job stands on.

examples:
  gnomon scale plan.toml
  gnomon scale saved --to 4

exit status: 0 done; 1 it has not changed in time; 2 the request is wrong."""

_CHECKPOINT = """\
PATH is a checkpoint of gnomon run, or the folder of --checkpoints. A run reads
one under any plan; convert writes one file for each rank of another plan.

examples:
  gnomon checkpoint verify saved
  gnomon checkpoint convert saved --plan other.toml -o resharded --dry-run
  gnomon checkpoint export-hf saved --model path/to/hf_folder -o weights

exit status: 0 done; 1 a checkpoint is damaged; 2 the request is wrong."""

_REPORT = """\
Writes one self-contained page: the answer, the timelines one over the other,
memory over time, where the step goes, where they differ, and the plan.

example:
  gnomon predict llama-tiny --on 1x4xh100-sxm --pp 4 --timeline step.timeline
  gnomon report step.timeline -o report.html"""

_COMPARE = """\
Both files are Timelines of one plan: the predicted one of gnomon predict
--timeline, the measured one of gnomon run --timeline. Says by action where time
and memory differ, and names the price that is most wrong. What is listed of a
worker adds up to the difference of the steps.

Or what torch.profiler recorded of any job: where its step went, which kernels
and collectives took it, memory at the peak (from torch.cuda.memory's snapshot),
what held it up and what to do; after a plan file or a predicted Timeline, next
to what was predicted.

examples:
  gnomon compare predicted.timeline measured.timeline
  gnomon compare trace.json.gz
  gnomon compare plan.toml traces/ snapshot.pickle"""


_GENERATE = """\
A few words from a model on one process, to look at what a run has learnt. There
is no cache of keys and values: every token runs the whole sequence again.

example:
  gnomon generate path/to/hf_folder --prompt "Once upon a time" --count 40"""

_DATA = """\
Reads text as gnomon run --data does and counts its documents, tokens and rows;
damaged files are named with their line. Tokens are kept in ~/.cache/gnomon/data
and made once. -o writes them as a pair of files that Megatron-LM reads too.

examples:
  gnomon data ~/books
  gnomon data corpus.jsonl --tokenizer path/to/tokenizer.json -o corpus"""

_CALIBRATE = """\
Measures this machine with the operations that `gnomon run` executes: products,
attention, norms, the optimizer, and messages between processes, by size, with
all processes busy and with one alone. Takes under a minute; let the machine do
nothing else meanwhile. `--on local` predicts with what was found; `local:2` is
two of its processes. Needs torch.

example:
  gnomon calibrate && gnomon predict llama-tiny --on local --precision fp32"""


_COMPILE = """\
Compiles a module with torch.compile(module, backend="gnomon") for this CPU and
says what was made of it. FUNCTION takes nothing and returns the module (or a
function) and a tuple of example inputs. --explain prints, for each group of
operations that became one kernel, its tiles, where each edge lives (registers,
scratch in L1 or L2, memory), its traffic, what bounds it, and its time:
predicted, measured, and ATen's. Needs torch and g++.

example:
  gnomon compile model.py:build --explain"""


_CATALOGUE = """\
Clusters are nodes that can be named after --on, stacks the programs that may
run a job, schedules the orders of a pipeline. Without KIND: how many of each
are known. Files in GNOMON_ORDERS add schedules to them, and to every command.
With a NAME: all that is known of one, where it comes from, how sure it is.

examples:
  gnomon catalogue devices
  gnomon catalogue devices h100-sxm
  gnomon catalogue stacks megatron-lm --json"""


_EXPORT = """\
PLAN.toml is a plan file, as gnomon plan writes it. The file that the other
program reads goes to standard output, or to FILE; standard error lists what it
cannot express, and what your code or command line must say. The same is in the
file as comments, where it has them. What is written is read back and compared.

examples:
  gnomon export plan.toml --to megatron -o pretrain.sh
  gnomon export plan.toml --to torchtitan --strict -o job.toml

exit status: 0 done; 2 the request is wrong, the program refuses the plan, or
with --strict something is not expressed."""


def parser() -> argparse.ArgumentParser:
    """The parser of `gnomon`; its result holds `command` and that command's values."""
    top = _Parser(
        prog="gnomon",
        description="Predict how a deep-learning job will run, plan it, run it, and compare.",
        epilog=_EPILOG,
    )
    top.add_argument("--version", action="version", version=f"gnomon {load_late('gnomon:__version__')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _predict(_command(commands, "predict", "time and memory of a training step", _PREDICT))
    plan_options(_command(commands, "plan", "the fastest plan that fits, for a model on machines", PLAN_TEXT))
    fit_options(_command(commands, "fit", "what would make a job fit in memory, and at what price", FIT_TEXT))
    explain_options(_command(commands, "explain", "why a plan is as fast and as large as it is", EXPLAIN_TEXT))
    _validate(_command(commands, "validate", "your measured runs beside their predictions", _VALIDATE))
    _compare(_command(commands, "compare", "where a prediction and a measured run differ", _COMPARE))
    _run(_command(commands, "run", "train by a plan file, and compare with its prediction", _RUN))
    launch_options(
        _command(commands, "launch", "a plan by torchrun, Slurm, Kubernetes or Ray", _LAUNCH),
        ("torchrun", "slurm", "kubernetes", "kueue", "ray"),
    )
    _check(_command(commands, "check", "whether every rank has what a plan needs; slow ranks and links", _CHECK))
    _parity(_command(commands, "parity", "a plan against the plain model, in small", _PARITY))
    _generate(_command(commands, "generate", "a few words from a folder of weights", _GENERATE))
    _scale(_command(commands, "scale", "another number of processes for a job that runs", _SCALE))
    _checkpoint(_command(commands, "checkpoint", "look at checkpoints, check, convert and export them", _CHECKPOINT))
    _data(_command(commands, "data", "what a corpus holds as tokens; writes Megatron's format", _DATA))
    _report(_command(commands, "report", "a page that shows timelines, predicted and measured", _REPORT))
    _calibrate(_command(commands, "calibrate", "measure this machine, for --on local", _CALIBRATE))
    _compile(_command(commands, "compile", "what the compiler makes of a PyTorch model", _COMPILE))
    _export(_command(commands, "export", "a plan file as another program's job file", _EXPORT))
    fleet_options(_command(commands, "fleet", "many jobs on one cluster: replay a trace under a policy", FLEET_TEXT))
    kinds = ("devices", "clusters", "models", "stacks", "schedules", "methods")
    catalogue = _command(commands, "catalogue", f"{', '.join(kinds[:-1])} and {kinds[-1]}", _CATALOGUE)
    catalogue.add_argument("what", nargs="?", choices=kinds, metavar="KIND", help=", ".join(kinds))
    catalogue.add_argument("name", nargs="?", metavar="NAME", help="one of them, in full")
    catalogue.add_argument("--json", action="store_true", help="for programs")
    return top


def defaults(*arguments: str) -> argparse.Namespace:
    """What a command's options are when only these are given."""
    return parser().parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, in place of all options. No name is short for another, and an option that would silently
    replace what it was given before is an error. Parsers of commands are of this class too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **settings}, allow_abbrev=False)
        self._given: dict[argparse.Action, list[str]] = {}

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """As argparse's; what a command does not know is that command's mistake, not that of `gnomon`."""
        self._given = {}
        parsed, more = super().parse_known_args(args, namespace)
        if more:
            if (missing := not_there(more)) is not None:
                self.exit(2, broken(f"{self.prog}: {missing}", sys.stderr) + "\n")
            near = nearest(more[0].partition("=")[0], self._option_string_actions) if more[0].startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(more)}{near}")
        return parsed, more

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As argparse's, which calls it once each time that an option stands there."""
        if action.option_strings and not isinstance(action, argparse._AppendAction):
            before = self._given.setdefault(action, arg_strings)
            if before is not arg_strings:
                values = f" ({' '.join(before)}, then {' '.join(arg_strings)})" if before else ""
                raise argparse.ArgumentError(
                    action, f"it is given twice{values[:200]}; keep one{_TOGETHER.get(action.dest, '')}"
                )
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """As argparse's, with the nearest of the choices."""
        if action.choices is not None and value not in action.choices:
            if isinstance(action, argparse._SubParsersAction) and (missing := not_there([str(value)])) is not None:
                self.exit(2, broken(f"{self.prog}: {missing}", sys.stderr) + "\n")
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{str(value)!r} is none of {', '.join(choices)}{nearest(str(value), choices)}"
            )

    def error(self, message: str) -> NoReturn:
        self.exit(2, broken(f"{self.prog}: {message}; see {self.prog} --help", sys.stderr) + "\n")


_TOGETHER = {"on": ", or join machines by +, as in 2x8xh100-sxm+1x8xa100-sxm"}
"""Option -> what to write in place of it twice, where there is something."""


def _command(commands: argparse._SubParsersAction, name: str, text: str, epilog: str) -> argparse.ArgumentParser:  # type: ignore[type-arg]
    made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, epilog=epilog)
    return made


def _predict(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser)
    parser.add_argument(
        "--stack", type=some, metavar="NAME", help="the program that will run it (gnomon catalogue stacks)"
    )
    parser.add_argument(
        "--memory-checkpoint-every", type=count, metavar="N", help="say what copies in memory, as of gnomon run, cost"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    files = parser.add_argument_group("files to write, of one step from rest")
    files.add_argument("--html", type=new_file, metavar="FILE", help="a page with everything, for a browser")
    files.add_argument("--trace", type=new_file, metavar="FILE", help="a trace for ui.perfetto.dev")
    files.add_argument(
        "--timeline", type=new_file, metavar="FILE", help="the timeline, for gnomon report and gnomon compare"
    )
    add_run_options(parser)
    parser.add_argument(
        "--lengths",
        type=lengths,
        metavar="LIST",
        help="tokens of each sequence of the batch: 32k,4kx8,512x55 (x: how many such), or a file of one a line",
    )
    serve_options(parser)


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="TIMELINE", help="what gnomon predict --timeline or a run wrote")
    parser.add_argument("after", nargs="?", metavar="MEASURED", help="a second one, to show beside it")
    parser.add_argument("--plan", type=some, metavar="FILE", help="the plan file that both are of")
    parser.add_argument("--title", metavar="TEXT", help="heading; default the plan's model and machines")
    parser.add_argument(
        "-o", "--output", type=new_file, metavar="FILE", default="report.html", help="default report.html"
    )
    parser.add_argument(
        "--trace", type=new_file, metavar="FILE", help="the same timelines as a trace for ui.perfetto.dev"
    )


def _validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="RUNS.csv", help="measured runs")
    parser.add_argument("--json", action="store_true", help="for programs")


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (
        ("inspect", "step, plan, contents, and what it goes on from"),
        ("verify", "every checksum of one, or of all in a folder"),
        ("convert", "the same for another plan, previewed"),
        ("export-hf", "its weights as safetensors with config.json"),
    ):
        made = actions.add_parser(name, help=text, description=text)
        made.add_argument("path", metavar="PATH", help="a checkpoint, or a folder of them: its newest whole one")
        if name == "convert":
            made.add_argument("--plan", required=True, metavar="PLAN.toml", help="of the ranks that will read it")
            made.add_argument("--dry-run", action="store_true", help="only say bytes, seconds and memory")
        if name == "export-hf":
            made.add_argument(
                "--model", required=True, metavar="FOLDER", help="whose config.json the plan was made for"
            )
        if name in ("convert", "export-hf"):
            made.add_argument("-o", "--output", required=True, metavar="FOLDER", help="to write to")
        made.add_argument("--json", action="store_true", help="for programs")


def _data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="PATH", help="as --data of gnomon run")
    add_text_options(parser)
    parser.add_argument("--seq-len", type=count, default=2048, metavar="N", help="of the rows that are counted; 2048")
    parser.add_argument("-o", "--output", type=some, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    parser.add_argument("--json", action="store_true", help="for programs")


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="config.json and safetensors, as gnomon run --export writes")
    parser.add_argument("--prompt", type=some, required=True, metavar="TEXT", help="what comes before")
    parser.add_argument("--count", type=count, default=32, metavar="N", help="new tokens at most; 32")
    parser.add_argument("--tokenizer", type=some, metavar="FILE", help="default the folder's own, or bytes")
    parser.add_argument(
        "--temperature", type=not_negative, default=0.0, metavar="T", help="0, the default, takes the likeliest"
    )
    parser.add_argument("--top-k", type=count, default=0, metavar="K", help="draw among the K likeliest; all")
    parser.add_argument("--seed", type=at_most(2**32 - 1, least=0), default=0, metavar="N", help="of what is drawn; 0")
    parser.add_argument("--json", action="store_true", help="for programs")


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """How text becomes tokens, and tokens rows."""
    parser.add_argument(
        "--tokenizer", type=some, metavar="FILE", help="tokenizer.json or its folder; default bytes as tokens"
    )
    parser.add_argument(
        "--chat-template", type=some, metavar="FILE", help="for messages; default the one beside the tokenizer"
    )
    parser.add_argument(
        "--column", type=some, metavar="NAME", help="with the text, of records; default text, messages or prompt"
    )
    parser.add_argument(
        "--packing",
        choices=("stream", "documents", "padded"),
        help="rows cut from one stream of text, of whole documents that do not see each other, or of one document each "
        "(a microbatch is as long as its longest); default stream, and documents where only a part is to be learnt",
    )


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.toml", help="a plan file")
    parser.add_argument(
        "--data",
        type=some,
        metavar="PATH",
        help="text to train on: a folder or file of text, .jsonl, .parquet, a saved dataset, or Megatron's PREFIX; "
        "default Python's standard library; for a model that is code also MODULE:FUNCTION, the batch of a step",
    )
    parser.add_argument(
        "--weights", type=some, metavar="FOLDER", help="safetensors and config.json to begin with; default random"
    )
    parser.add_argument(
        "--export", type=some, metavar="FOLDER", help="write the weights at the end, as safetensors with config.json"
    )
    add_text_options(parser)
    parser.add_argument(
        "--explain-optimizer",
        action="store_true",
        help="say which parameters take weight decay and why, and do not train",
    )
    parser.add_argument("--steps", type=count, default=200, metavar="N", help="in all, with those before a resume; 200")
    parser.add_argument("--lr", type=rate, default=1e-3, metavar="RATE", help="largest learning rate; 0.001")
    parser.add_argument(
        "--lr-schedule",
        choices=("constant", "linear", "cosine", "wsd"),
        default="constant",
        help="what follows the warm-up, down to --min-lr at the last step (wsd: over the last tenth); constant",
    )
    parser.add_argument(
        "--warmup-steps", type=at_most(10**9, least=0), default=0, metavar="N", help="over which it rises; 0"
    )
    parser.add_argument("--min-lr", type=rate, metavar="RATE", help="learning rate of the last step; 0")
    parser.add_argument(
        "--seed", type=at_most(2**32 - 1, least=0), default=0, metavar="N", help="of parameters and order of data; 0"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument(
        "--checkpoints", type=some, metavar="DIR", help="also at the end; default PLAN.checkpoints, when stopped"
    )
    parser.add_argument("--checkpoint-every", type=count, metavar="N", help="steps; 100 with --checkpoints")
    parser.add_argument("--keep", type=count, default=2, metavar="N", help="newest checkpoints that are kept; 2")
    parser.add_argument(
        "--override", type=some, metavar="NAMES", help="with --resume: what may differ, of seed,lr,optimizer,data"
    )
    parser.add_argument(
        "--grace",
        type=rate,
        default=300.0,
        metavar="S",
        help="seconds for a last step and checkpoint when stopped; 300",
    )
    _loss_options(parser)
    parser.add_argument("--timeline", type=new_file, metavar="FILE", help="write the measured Timeline of a step")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: what the plan's machines have")
    parser.add_argument("--json", action="store_true", help="for programs")
    add_local_option(parser)


def _loss_options(parser: argparse.ArgumentParser) -> None:
    """Of runs that lose processes, and go on."""
    parser.add_argument(
        "--max-restarts", type=at_most(1000, least=0), default=0, metavar="N",
        help="times to go on from the newest checkpoint when a process is lost; 0",
    )  # fmt: skip
    parser.add_argument(
        "--memory-checkpoint-every", type=count, metavar="N",
        help="steps between copies of each rank's state in the memory of the next rank, from which a lost process is "
        "replaced while the others stay (--max-restarts times)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=count, metavar="N",
        help="run the plan's ranks as logical workers on N processes, whose number gnomon scale changes; a rank each",
    )  # fmt: skip
    parser.add_argument(
        "--follow-speed", action="store_true",
        help="with --processes: logical workers move from slow processes to fast ones while it runs; same losses",
    )  # fmt: skip
    parser.add_argument(
        "--determinism", choices=("D1", "D2"),
        help="with --processes: the same losses on any number of processes (D1, the default), or on different kinds "
        "of processors too, by kernels that all have, which are slower (D2)",
    )  # fmt: skip
    parser.add_argument(
        "--meet-within", type=rate, metavar="S",
        help="seconds in which processes that are there must have met, at the start and after a loss; 20",
    )  # fmt: skip
    parser.add_argument(
        "--decisions", type=new_file, metavar="FILE",
        help="write what was seen of processes and decided, which gnomon fleet decisions plays again",
    )  # fmt: skip


def _scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="folder of --checkpoints of gnomon run, or its plan file")
    parser.add_argument("--to", type=count, metavar="N", help="processes, from the next step on; default: only tell")
    parser.add_argument("--wait", type=not_negative, default=120.0, metavar="S", help="seconds for it; 120")
    parser.add_argument("--json", action="store_true", help="for programs")


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.toml", help="a plan file")
    parser.add_argument("--checkpoints", type=some, metavar="DIR", help="whose disk is looked at; PLAN.checkpoints")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: what the plan's machines have")
    parser.add_argument("--json", action="store_true", help="for programs")


def _parity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.toml", help="a plan file")
    parser.add_argument("--ranks", type=at_most(64), default=8, metavar="N", help="most processes; default 8")
    parser.add_argument("--json", action="store_true", help="for programs")


def _compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FILE.py:FUNCTION", help="returns (module, inputs)")
    parser.add_argument("--explain", action="store_true", help="groups, tiles, memory levels, traffic, times")
    parser.add_argument("--train", action="store_true", help="the backward too")
    parser.add_argument("--json", action="store_true", help="for programs")


def _calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="runs",
        metavar="RUNS",
        help="instead: a stack file, for --stack, from 3 to 10 measured runs of one program: a table (columns as "
        "validate's), or the folder of gnomon plan --try",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write; default local.toml in $GNOMON_HOME")
    parser.add_argument(
        "--processes", type=at_most(256), metavar="N", help="at once; default the machine's physical cores"
    )
    parser.add_argument(
        "--seconds", type=at_most(3600), default=40, metavar="S", help="of measuring, about; default 40"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="two Timelines; or a trace of torch.profiler (a folder: one a rank), a memory snapshot, a plan file",
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.toml", help="a plan file")
    parser.add_argument(
        "--to",
        required=True,
        metavar="PROGRAM",
        help="megatron, torchtitan, deepspeed, accelerate or nanotron; of a server: vllm, sglang, tensorrt-llm",
    )
    parser.add_argument("-o", "--output", type=new_file, metavar="FILE", help="default standard output")
    parser.add_argument("--force", action="store_true", help="write over FILE")
    parser.add_argument("--strict", action="store_true", help="an error if something is not expressed")
    parser.add_argument("--json", action="store_true", help="for programs")
