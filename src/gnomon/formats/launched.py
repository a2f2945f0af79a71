"""The words of a training command in a launch script of a trainer, with what is given beside the script.

`launched(path, given, wanted)` follows the script and returns the command's options; a `--set` of a name that the
script uses is a variable, any other is an option. Leaves out what an option means (each program's folder).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import FormatError, InputError, nearest
from gnomon.formats.given import ReadContext, setting_value
from gnomon.formats.job import Fields, read_source
from gnomon.formats.shell import ARGUMENTS, Launch, branches, launches, unknown
from gnomon.formats.usage import written_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """A training command as it was found in a script."""

    file: str
    """The script."""
    launch: Launch
    options: Mapping[str, str]
    """`--set` words that are no variables of the script."""
    skipped: Sequence[str]
    """What of the script was not followed."""
    devices: int | None
    """Nodes x processes of its launcher, or of Slurm's header."""
    variables: Mapping[str, str]
    """The script's variables at its end, those that hold one word."""
    arguments_from: str = ""
    """Which arguments the script was started with, where they were not given but written down beside it."""

    def fields(self, values: Mapping[str, object], context: ReadContext) -> Fields:
        """Its options by name, with what of the script was not followed."""
        f = Fields(values, self.file, context)
        f.notes += [self.arguments_from] if self.arguments_from else []
        for phrase in self.skipped:
            f.note_default("script", phrase, "was not followed; check that it sets nothing of the job")
        return f


NODE = 8
"""Devices of a machine, at most, where a script counts them."""


def launched(path: Path, context: ReadContext, accepts: Callable[[Launch], bool], hint: str) -> TrainCommand:
    """The last command of the script that is wanted. hint: an option that such a command has, for the message.

    FormatError where there is none, InputError for a `--set` that is neither a variable nor an option.
    """
    text, file = read_source(path)
    settings, arguments_place = with_written(text, path, context)
    one_node = None if context.devices is None else min(context.devices, NODE)
    script = launches(text, context.env, settings, path.resolve().parent, one_node)
    commands = [one for one in script.launches if accepts(one)]
    if not commands:
        if ARGUMENTS not in context.settings and (words := branches(text)):
            raise FormatError(
                f"{file} chooses what it starts by its argument: give one, as in --set args={words[0]} "
                f"({', '.join(words)})",
                file,
            )
        skipped = f"; not followed: {', '.join(script.skipped)}" if script.skipped else ""
        raise FormatError(f"{file} starts no Python program with {hint}{skipped}; give the command itself", file)
    options = {name: text for name, text in context.settings.items() if name not in script.read and name != ARGUMENTS}
    if wrong := [name for name in options if name.isidentifier() and name.upper() == name]:
        raise InputError(f"{file} uses no variable {wrong[0]!r}{nearest(wrong[0], script.read)}", "--set")
    return TrainCommand(
        file=file,
        launch=commands[-1],
        options=options,
        skipped=tuple(script.skipped),
        devices=launched_devices(commands[-1].launcher, text),
        variables={name: value for name, value in script.variables.items() if isinstance(value, str)},
        arguments_from=arguments_place,
    )


def with_written(text: str, path: Path | None, context: ReadContext) -> tuple[Mapping[str, str], str]:
    """(settings with the arguments that the script's comment or README writes down, a sentence on them): where the
    script takes arguments and none are given."""
    none = ARGUMENTS not in context.settings and not any(name.isdecimal() for name in (*context.settings, *context.env))
    found = written_arguments(text, path) if none else None
    if found is None:
        return context.settings, ""
    return {
        **context.settings,
        ARGUMENTS: found[0],
    }, f'started with "{found[0]}", as {found[1]} has it (--args for others)'


def launched_devices(launcher: Sequence[str], text: str) -> int | None:
    """nnodes x processes per node, from the options of torchrun, `deepspeed` or Slurm's header; None when either is not
    stated."""
    # `--a=b` becomes two words, as `--a b` is: then each option is followed by its value.
    options = [part for word in launcher for part in word.split("=", 1)]
    values = {
        a.lstrip("-").replace("-", "_"): b for a, b in zip(options, options[1:], strict=False) if a.startswith("-")
    }
    header = dict(re.findall(r"^#SBATCH\s+--?([\w-]+)[=\s]+(\d+)\s*$", text, re.MULTILINE))
    nodes = values.get("nnodes") or values.get("num_nodes") or values.get("nodes") or header.get("nodes")
    nodes = nodes or header.get("N")
    per_node = values.get("nproc_per_node") or values.get("num_gpus") or header.get("ntasks-per-node")
    per_node = per_node or header.get("gpus-per-node")
    # torchrun and deepspeed start on one machine unless they are told of more.
    if per_node is not None and nodes is None and {"nproc_per_node", "num_gpus"} & set(values):
        nodes = "1"
    if nodes is None or per_node is None or not (nodes.isdigit() and per_node.isdigit()):
        return None
    return int(nodes) * int(per_node)


def find_near(name: str, folder: Path) -> Path | None:
    """A file that is named, looked for in the working folder, beside the script and above it."""
    places = (Path(name), *(parent / name for parent in (folder, *folder.parents)))
    return next((place for place in places if place.is_file()), None)


def overrides(words: Sequence[str]) -> dict[str, object]:
    """Values of Hydra's words `a.b=c`, `+a.b=c`, `++a.b=c`; `~a.b` and other words are left out."""
    values: dict[str, object] = {}
    for word in words:
        match = re.fullmatch(r"\+{0,2}([A-Za-z_][\w./@]*)=(.*)", word, re.DOTALL)
        if match:
            text = match[2].strip().strip("'\"")
            values[match[1]] = text if unknown(text) is not None else setting_value(text)
    return values


def dashed(words: Sequence[str]) -> dict[str, object]:
    """Values of argparse's words `--a.b c d`, `--a`, `--a=c`: text and numbers, true for a switch, a list for several
    words."""
    values: dict[str, object] = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z_]", word):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = setting_value(text) if equals else True
        elif name:
            value = word if unknown(word) is not None else setting_value(word)
            before = values[name]
            if before is True:
                values[name] = value
            elif isinstance(before, list):
                before.append(value)
            else:
                values[name] = [before, value]
    return values
