"""Options of `gnomon checkpoint` and its actions.

Leaves out what they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.cli.options.flags import Options, option, positional, switch


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CheckpointOptions(Options):
    """A checkpoint, or a folder of them."""

    path: str = positional(metavar="PATH", help="a checkpoint, or a folder of them: its newest whole one")
    json: bool = switch("--json", help="for programs")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class InspectOptions(CheckpointOptions):
    """Step, plan, contents, and what it goes on from."""

    pass


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class VerifyOptions(CheckpointOptions):
    """Options of `checkpoint verify`, which reads every checksum."""

    pass


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ConvertOptions(CheckpointOptions):
    """The same for another plan, or a folder of quantised weights in another form."""

    plan: str | None = option("--plan", metavar="PLAN.toml", help="of the ranks that will read it")
    to: str | None = option(
        "--to",
        choices=("gptq", "awq", "compressed-tensors", "fp32", "bf16", "fp16", "gguf"),
        help="form of the quantised weights in PATH, a folder with config.json; whole numbers, of a GGUF file too; or "
        "one GGUF file",
    )
    output: str = option("-o", "--output", required=True, metavar="FOLDER", help="to write to")
    dry_run: bool = switch("--dry-run", help="only say bytes, seconds and memory")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExportHfOptions(CheckpointOptions):
    """A checkpoint whose weights are written as safetensors with config.json."""

    model: str | None = option(
        "--model", metavar="FOLDER", help="whose config.json the plan was made for (default: what the checkpoint names)"
    )
    output: str = option("-o", "--output", required=True, metavar="FOLDER", help="to write to")


ABOUT = """\
PATH is a checkpoint of gnomon run, or the folder of --checkpoints. A run reads
one under any plan; convert writes one file for each rank of another plan, or
the weights of a quantised folder as another program stores them, where each
number stays what it is.

examples:
  gnomon checkpoint verify saved
  gnomon checkpoint convert saved --plan other.toml -o resharded --dry-run
  gnomon checkpoint convert path/to/gptq_folder --to compressed-tensors -o out
  gnomon checkpoint convert model.gguf --to fp32 -o folder
  gnomon checkpoint export-hf saved -o weights

exit status: 0 done; 1 a checkpoint is damaged; 2 the request is wrong."""
