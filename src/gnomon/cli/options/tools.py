"""Options of the smaller commands: tables, pages, files of other programs, and what is known.

Leaves out reading them into values.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.cli.options.flags import Options, option, positional, repeated, several, switch
from gnomon.cli.options.job import JobFileOptions
from gnomon.cli.values import at_most, new_file, some


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ValidateOptions(Options):
    """A table of measured runs."""

    about = """\
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

    table: str = positional(metavar="RUNS.csv", help="measured runs")
    json: bool = switch("--json", help="for programs")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CompareOptions(JobFileOptions):
    """The options of `compare`: two Timelines, or a prediction and recorded traces."""

    about = """\
Both files are Timelines of one plan: the predicted one of gnomon predict
--timeline, the measured one of gnomon run --timeline. Says by action where time
and memory differ, and names the price that is most wrong. What is listed of a
worker adds up to the difference of the steps.

Or what torch.profiler or Nsight Systems recorded of any job: where its step
went, which kernels and collectives took it, memory at the peak (from
torch.cuda.memory's snapshot), what held it up and what to do; after a plan
file, a job file of another program (with --on) or a predicted Timeline, next to
what was predicted.

examples:
  gnomon compare predicted.timeline measured.timeline
  gnomon compare trace.json.gz
  gnomon compare report.sqlite     # nsys export --type sqlite report.nsys-rep
  gnomon compare plan.toml traces/ snapshot.pickle
  gnomon compare pretrain.sh traces/ --on 4x8xh100-sxm"""

    files: tuple[str, ...] = several(
        optional=True,
        metavar="FILE",
        help="two Timelines; or a trace of torch.profiler (a folder: one a rank), an export of nsys, a memory "
        "snapshot, a plan file, a job file",
    )
    on: str | None = option("--on", read=some, metavar="CLUSTER", help="machines of a job file, as in 4x8xh100-sxm")
    json: bool = switch("--json", help="for programs")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ReportOptions(Options):
    """Timelines for a page."""

    about = """\
Writes one self-contained page: the answer, the timelines one over the other,
memory over time, where the step goes, where they differ, and the plan. Replays
of a server (gnomon predict --serve --page) and of a fleet (gnomon fleet replay
-o) can stand in it too.

examples:
  gnomon predict llama-tiny --on 1x4xh100-sxm --pp 4 --timeline step.timeline
  gnomon report step.timeline -o report.html
  gnomon report step.timeline --replay serving.html --replay fleet.html"""

    before: str = positional(metavar="TIMELINE", help="what gnomon predict --timeline or a run wrote")
    after: str | None = positional(optional=True, metavar="MEASURED", help="a second one, to compare with")
    plan: str | None = option("--plan", read=some, metavar="FILE", help="the plan file that both are of")
    replays: tuple[str, ...] = repeated(
        "--replay",
        metavar="PAGE",
        help="the page of a replay, of predict --serve --page or of fleet replay -o, as a part of this one; again for "
        "more",
    )
    title: str | None = option("--title", metavar="TEXT", help="heading; default the plan's model and machines")
    output: str = option(
        "-o", "--output", default="report.html", read=new_file, metavar="FILE", help="default report.html"
    )
    trace: str | None = option(
        "--trace", read=new_file, metavar="FILE", help="the same timelines as a trace for ui.perfetto.dev"
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CalibrateOptions(Options):
    """What is measured, or read from runs."""

    about = """\
Measures this machine with the operations that `gnomon run` executes: matmuls,
attention, norms, the optimizer, and messages between processes, by size, with
all processes busy and with one alone. Takes under a minute; let the machine do
nothing else meanwhile. `--on local` predicts with what was found; `local:2` is
two of its processes. Needs torch.

examples:
  gnomon calibrate && gnomon predict llama-tiny --on local --precision fp32
  gnomon calibrate --from-trace traces/ --job pretrain.sh --on 4x8xh100-sxm \\
      -o own.toml
  gnomon predict pretrain.sh --on 16x8xh100-sxm --stack own.toml"""

    runs: str | None = option(
        "--from",
        metavar="RUNS",
        help="instead: a stack file, for --stack, from 3 to 10 measured runs of one program: a table (columns as "
        "validate's), or the folder of gnomon plan --try",
    )
    trace: str | None = option(
        "--from-trace",
        read=some,
        metavar="TRACES",
        help="instead: a stack file from where a recorded step's time went: what torch.profiler wrote (a folder: one a "
        "rank) of the job of --job",
    )
    job: str | None = option(
        "--job", read=some, metavar="FILE", help="with --from-trace: its plan file, or another program's job file"
    )
    on: str | None = option("--on", read=some, metavar="CLUSTER", help="machines of a job file, as in 4x8xh100-sxm")
    network: str | None = option("--model", read=some, metavar="MODEL", help="the network, in place of the job file's")
    output: str | None = option(
        "-o", "--output", metavar="FILE", help="file to write; default local.toml in $GNOMON_HOME"
    )
    processes: int | None = option(
        "--processes", read=at_most(256), metavar="N", help="at once; default the machine's physical cores"
    )
    seconds: int = option(
        "--seconds", default=40, read=at_most(3600), metavar="S", help="of measuring, about; default 40"
    )
    json: bool = switch("--json", help="for programs")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CompileOptions(Options):
    """A module to compile."""

    about = """\
Compiles a module with torch.compile(module, backend="gnomon") for this CPU and
says what was made of it. FUNCTION takes nothing and returns the module (or a
function) and a tuple of example inputs. --explain prints, for each group of
operations that became one kernel, its tiles, where each edge lives (registers,
scratch in L1 or L2, memory), its traffic, what bounds it, and its time:
predicted, measured, and ATen's. Needs torch and g++.

--device writes the module's stencils (explicit sums of shifted slices, pads or
rolls; convolutions of few channels) for another device that a file describes:
avx512, avx2, neon, h200, sw26010, or NAME.toml. Loops for cores that have
scratchpads are played here and compared with eager.

examples:
  gnomon compile model.py:build --explain
  gnomon compile model.py:build --ragged attention_mask --explain
  gnomon compile heat.py:build --device sw26010 -o texts/"""

    model: str = positional(metavar="FILE.py:FUNCTION", help="returns (module, inputs)")
    explain: bool = switch("--explain", help="groups, tiles, memory levels, traffic, times")
    train: bool = switch("--train", help="the backward too")
    tune: str | None = option("--tune", read=some, metavar="TIME", help="measure tiles of each graph, as in 30s")
    ragged: str | None = option(
        "--ragged", read=some, metavar="NAME", help="argument that says what of a padded batch is there"
    )
    frozen: bool = switch("--frozen", help="weights are written no more, so that columns of zeros can be left out")
    preview: bool = switch("--preview", help="results may be near, not equal: convolutions before a pooling")
    device: str | None = option("--device", read=some, metavar="NAME", help="write stencils for this device instead")
    output: str | None = option("-o", "--output", read=some, metavar="FOLDER", help="where --device writes its texts")
    json: bool = switch("--json", help="for programs")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExportOptions(Options):
    """A plan and the program that it is for."""

    about = """\
PLAN is a plan file, as gnomon plan writes it, or a job file of another program
with its machines. The file that the other program reads goes to standard
output, or to FILE; standard error lists what it cannot express, and what your
code or command line must say. The same is in the file as comments, where it has
them. What is written is read back and compared.

examples:
  gnomon export plan.toml --to megatron -o pretrain.sh
  gnomon export plan.toml --to torchtitan --strict -o job.toml
  gnomon export qlora.yaml --on 1x8xa100-sxm-80gb --to axolotl -o axolotl.yaml

exit status: 0 done; 2 the request is wrong, the program refuses the plan, or
with --strict something is not expressed."""

    plan: str = positional(metavar="PLAN", help="a plan file, or a job file")
    to: str = option(
        "--to",
        required=True,
        metavar="PROGRAM",
        help="megatron, torchtitan, deepspeed, accelerate or nanotron; of fine-tuning: axolotl, llama-factory, swift, "
        "torchtune, trl; of a server: vllm, sglang, tensorrt-llm",
    )
    on: str | None = option("--on", read=some, metavar="CLUSTER", help="machines of a job file, as in 1x8xh100-sxm")
    network: str | None = option("--model", read=some, metavar="MODEL", help="the network of a job file")
    settings: tuple[str, ...] = repeated(
        "--set", metavar="NAME=VALUE", help="a field of a job file by its name there; again for more"
    )
    output: str | None = option("-o", "--output", read=new_file, metavar="FILE", help="default standard output")
    force: bool = switch("--force", help="write over FILE")
    strict: bool = switch("--strict", help="an error if something is not expressed")
    json: bool = switch("--json", help="for programs")


KINDS = ("devices", "clusters", "models", "stacks", "schedules", "methods")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CatalogueOptions(Options):
    """What is asked of what is known."""

    about = """\
Clusters are nodes that can be named after --on, stacks the programs that may
run a job, schedules the orders of a pipeline. Without KIND: how many of each
are known. Files in GNOMON_ORDERS add schedules to them, and to every command.
With a NAME: all that is known of one, where it comes from, how sure it is.

examples:
  gnomon catalogue devices
  gnomon catalogue devices h100-sxm
  gnomon catalogue stacks megatron-lm --json"""

    what: str | None = positional(optional=True, metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    name: str | None = positional(optional=True, metavar="NAME", help="one of them, in full")
    json: bool = switch("--json", help="for programs")
