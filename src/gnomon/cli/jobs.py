"""Job files on the command line: which argument is one, what is given beside it, and what is said of it.

`read_job` reads the file of `gnomon predict FILE` or `--from FORMAT FILE` with what the options give beside it. Leaves
out the readers (`formats.programs`), and predicting.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from gnomon.cli.options.job import PASTED, TrainingOptions
from gnomon.errors import CatalogueError, InputError
from gnomon.formats import programs
from gnomon.formats.given import Network, ReadContext, parse_settings
from gnomon.formats.job import NO_EFFECT, Job
from gnomon.formats.keys import MAX_CHARACTERS
from gnomon.formats.shell import ARGUMENTS
from gnomon.late import load_late
from gnomon.request.model import is_job_file, read_config


def job_file(options: TrainingOptions) -> tuple[programs.Format, Path] | None:
    """The job file that the options name and its format; None where they name a model. InputError for a file that is
    neither, and for options that go with a job file only."""
    if options.arguments is not None and _is_script(options):
        return load_late("gnomon.cli.script:script_format")(options.arguments), Path(str(options.model))
    if options.source is not None:
        program, name = options.source
        return programs.find(program), pasted() if name == PASTED else Path(name)
    if options.model is not None and (options.model == PASTED or is_job_file(options.model)):
        path = pasted() if options.model == PASTED else Path(options.model)
        job_format = programs.recognised(path)
        if job_format is None:
            if wrong := programs.broken(path):
                raise InputError(f"{options.model!r} cannot be read: {wrong}")
            known = ", ".join(programs.names())
            server = load_late("gnomon.formats.engines:started_by")(path.read_text("utf-8", "replace"))
            if server is not None:
                raise InputError(
                    f"{options.model!r} starts a server: gnomon predict --from {server} {options.model} --on CLUSTER "
                    f"--input-len N --output-len N"
                )
            if images := load_late("gnomon.formats.diffusion:refusal")(programs.sample(path)):
                raise InputError(images)
            if path.suffix == ".py":
                raise InputError(
                    f"{options.model!r} is no recipe that is recognised; a training script is run up to its first "
                    f"step, without GPU and network, if its arguments are given: gnomon predict {options.model} "
                    f'--args "…" (--args "" for none)'
                )
            raise InputError(
                f"{'what was pasted' if options.model == PASTED else repr(options.model)} is no model and no job file "
                f"that is recognised; name its format, as in --from megatron {options.model} (known: {known})"
            )
        return job_format, path
    if options.network is not None:
        raise InputError("--model is the network of a job file; give the file, or the model alone as MODEL")
    return None


def _is_script(options: TrainingOptions) -> bool:
    """Whether `--args` are those of a Python script. InputError for arguments of what takes none."""
    path = Path(options.model or "")
    if options.source is None and path.suffix == ".py":
        return True
    name = options.model if options.source is None else options.source[1]
    if name is None or not is_job_file(name) or Path(name).suffix not in (".sh", ".bash", ".sbatch", ".slurm", ""):
        raise InputError(
            f"--args are the arguments of a script, and {str(name)[:64]!r} is none; leave them out, or give SCRIPT.py"
        )
    return False


def pasted() -> Path:
    """A file with the text of standard input, removed when the program ends: a command, or YAML or JSON. InputError for
    nothing, and for what is no text."""
    if sys.stdin.isatty():
        print("paste a command or a file, then press Ctrl-D on a line of its own", file=sys.stderr)
    try:
        # One character more than is read, so that too much of them is seen and refused, not cut off.
        text = sys.stdin.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise InputError("standard input is no UTF-8 text; paste a command, YAML or JSON") from None
    if not text.strip():
        raise InputError("standard input holds nothing; paste a command, YAML or JSON, or give the file's name")
    folder = Path(tempfile.mkdtemp(prefix="gnomon-pasted-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"pasted{_suffix(text)}"
    path.write_text(text, encoding="utf-8")
    return path


def _suffix(text: str) -> str:
    """End of the name of a file that holds such a text."""
    if text.lstrip().startswith("{"):
        return ".json"
    first = next(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return ".yaml" if re.match(r"[A-Za-z_][\w.-]*:(\s|$)", first) else ".sh"


def read_job(source: tuple[programs.Format, Path], options: TrainingOptions, named: str | None, devices: int) -> Job:
    """The job in a file, on so many devices, with what the options give beside it. named: a model in place of its
    own."""
    job_format, path = source
    context = ReadContext(
        devices=devices,
        model=None if named is None or options.lora_rank is not None else network(named),
        vocab_size=options.vocab_size,
        seq_len=options.seq_len,
        micro_batch_size=options.micro_batch_size,
        global_batch=options.global_batch,
        precision=options.precision,
        settings=parse_settings([*options.settings, *_line(options, path)]),
        env=dict(os.environ),
        strict=options.strict,
    )
    return job_format.read(path, context)


def _line(options: TrainingOptions, path: Path) -> list[str]:
    """The command line of a launch script, as `--set args=…` gives it."""
    if options.arguments is None or path.suffix == ".py":
        return []
    return [f"{ARGUMENTS}={options.arguments}"]


def network(name: str) -> Network:
    """What a name or a config.json stands for: a config where there is one, else the Graph."""
    try:
        config, graph = read_config(name)
    except CatalogueError as error:
        raise InputError(f"--model: {error}") from None
    return graph if config is None else config


def said_of(job: Job, devices: int) -> list[str]:
    """What the file left open, and the devices that it is for where they are others."""
    stated = job.stated_devices
    if stated is None or stated == devices:
        return list(job.assumed)
    return [*job.assumed, f"the file is for {stated} devices, predicted here on {devices} (--on)"]


def notes_of(job: Job) -> tuple[str, ...]:
    """One sentence for each field that is not predicted, those that matter first; the names of those that do not."""
    neutral = [note.removesuffix(NO_EFFECT).partition(" = ")[0] for note in job.notes if note.endswith(NO_EFFECT)]
    other = tuple(note for note in job.notes if not note.endswith(NO_EFFECT))
    listed = (f"no effect on time or memory: {', '.join(neutral)}",) if neutral else ()
    return (*(f"not predicted: {field}" for field in job.unexpressed), *other, *listed)
