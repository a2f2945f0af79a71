"""What somebody tells a trainer around transformers: its YAML, or the command that starts it, as one set of fields.

`trainer_source(path, given, wanted, hint)` reads a YAML file, or a launch script or pasted command whose words are
those fields as flags (HfArgumentParser: `--bf16 True`, `--fsdp "full_shard auto_wrap"`); a YAML file that the command
names is read with it, its flags before the file's values. What the launcher says of sharding and precision
(`accelerate launch`, `deepspeed`, torchrun) is laid under the script's own fields. Leaves out what fields mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gnomon.errors import InputError
from gnomon.formats.accelerate.launch import launched_values
from gnomon.formats.format import Sample
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Fields, flatten, read_source
from gnomon.formats.launched import TrainCommand, dashed, find_near, launched, overrides
from gnomon.formats.shell import ARGUMENTS, Launch, branches, launches
from gnomon.formats.yaml_file import read_yaml, said_twice

YAML_ENDS = (".yaml", ".yml", ".json")
"""Ends of files that hold a mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trainer's job before its fields are read."""

    fields: Fields
    """The trainer's fields by name."""
    folder: Path
    """Where paths in it begin."""
    program: str
    """The script or command that is started; empty for a YAML file."""
    num_devices: int | None
    """Devices that launcher or header say."""
    assumed: list[str] = field(default_factory=list)
    """What is not there and how it was filled in."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the script that it has when it starts the program."""


def commands_of(sample: Sample) -> tuple[Launch, ...]:
    """Programs that a launch script or pasted command starts; none for YAML, JSON, TOML and Python files, and for text
    that is no shell script."""
    if sample.values or sample.path.suffix in (".py", ".json", ".toml", *YAML_ENDS):
        return ()
    try:
        found = tuple(launches(sample.text, {}).launches)
        chosen = () if found else branches(sample.text)  # commands that stand in branches on the script's argument
        return found or tuple(one for word in chosen for one in launches(sample.text, {}, {ARGUMENTS: word}).launches)
    except InputError:
        return ()


def trainer_source(
    path: Path, context: ReadContext, accepts: Callable[[Launch], bool], hint: str, *, by_pyyaml: bool = True
) -> Source:
    """The fields of a file. wanted: which command of a script is meant; hint: an option of it, for the message.
    by_pyyaml: whether the program reads YAML by PyYAML, which takes the last of a key that is given twice."""
    folder = path.resolve().parent
    if path.suffix.lower() in YAML_ENDS:
        text, file = read_source(path)
        twice: list[str] = []
        fields = Fields(flatten(read_yaml(text, file, twice if by_pyyaml else None)), file, context)
        return Source(fields=fields, folder=folder, program="", num_devices=None, assumed=said_twice(twice))
    command = launched(path, context, accepts, hint)
    assumed: list[str] = []
    values, stated = launched_values(command.launch.launcher, folder, assumed)
    values |= _written(command, folder, assumed)
    options = {name.lstrip("-").replace("-", "_"): text for name, text in command.options.items()}
    nodes, processes = (command.variables.get(name, "") for name in ("NNODES", "NPROC_PER_NODE"))
    if stated is None and command.devices is None and processes.isdigit():  # swift and megatron take them from there
        stated = int(processes) * (int(nodes) if nodes.isdigit() else 1)
    return Source(
        fields=command.fields(values, replace(context, settings=options)),
        folder=folder,
        program=command.launch.program,
        num_devices=stated or command.devices,
        assumed=assumed,
        env=command.variables,
    )


def _written(command: TrainCommand, folder: Path, assumed: list[str]) -> dict[str, object]:
    """Fields of a YAML file that the command names, then those that stand in the command."""
    words = list(command.launch.options)
    names: list[str] = []
    if words and words[0] in ("train", "run", "sft", "dpo", "grpo", "kto", "reward", "rloo", "pt", "rlhf"):
        words = words[1:]
    while words and not words[0].startswith("-"):
        names += [words[0]] if words[0].endswith(YAML_ENDS) else []
        words = words[1:] if "=" not in words[0] else words[1:]
    flags = dashed(words) | overrides([word for word in command.launch.options if not word.startswith("-")])
    if isinstance(config := flags.pop("config", None), str):
        names.append(config)
    values: dict[str, object] = {}
    for name in names:
        place = find_near(name, folder)
        if place is None:
            raise InputError(
                f"{command.file} takes its fields from {name!r}, which is not here; give that file: gnomon predict "
                f"{name} --on CLUSTER, or put it beside the script"
            )
        text, file = read_source(place)
        twice: list[str] = []
        values |= flatten(read_yaml(text, file, twice))
        assumed += said_twice(twice)
        assumed.append(f"fields of {name}, which the command names")
    return values | {name: plain(value) for name, value in flags.items()}


def plain(value: object) -> object:
    """HfArgumentParser's `True` and `False`, which other parsers leave as words."""
    return {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value


def starts(launch: Launch, *names: str) -> bool:
    """Whether a command's program is one of these, by its file's name without `.py` or its last part."""
    return program_name(launch.program) in names


def program_name(program: str) -> str:
    """`sft` of examples/scripts/sft.py, trl.scripts.sft and sft; the command of one that a package installs."""
    last = program.rpartition("/")[2]
    return last.removesuffix(".py") if last.endswith(".py") else last.rpartition(".")[2]


def given_flags(launch: Launch, names: Sequence[str]) -> bool:
    """Whether the command has one of these flags, with dashes or underscores."""
    have = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in launch.options if word.startswith("--")}
    return not have.isdisjoint(names)
