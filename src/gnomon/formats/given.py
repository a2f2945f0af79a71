"""What a person gives beside a job file, by one rule for the readers of all formats.

`ReadContext` holds the devices, the network and sizes that a file may leave open, and `settings`: `--set name=value`
for anything that the reader would have read, by the name that the file gives it. `parse_settings(words)` reads the
words. Leaves out the command line (`cli`) and what a name means (each reader).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.models.decoder import DecoderConfig, decoder
from gnomon.models.presets import Config, build
from gnomon.models.presets import model as preset

Network = Config | DecoderConfig | Graph
"""What a job trains: the config of a decoder, or a Graph of anything else."""


def network_graph(model: Network | str) -> Graph:
    """The Graph of what a job trains. CatalogueError for a name that nobody knows."""
    match model:
        case Graph():
            return model
        case str(name):
            return preset(name)
        case DecoderConfig():
            return decoder(model)
        case config:  # one of `Config`, the configs of other families
            return build(config)


SEQ_LEN = 4096
"""Tokens of a sequence where neither the file nor the user says it, in formats whose program has no default of its own;
fewer for a model with fewer positions."""

GIVE_MODEL = "give --model NAME (gnomon catalogue models), or --model path/to/config.json"
"""What to do where a file does not say the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadContext:
    """What the user gives on top of a job file. None or empty: what the file says holds, or its program's default."""

    devices: int | None = None
    """The number of all devices that the job is predicted on; None where nobody said it."""
    model: Network | str | None = None
    """In place of the file's network."""
    vocab_size: int | None = None
    """Rows of the embedding before padding, where a tokenizer's file decides."""
    seq_len: int | None = None
    """Tokens of a sequence."""
    micro_batch_size: int | None = None
    """Sequences of a microbatch on one rank."""
    global_batch: int | None = None
    """Sequences of a step."""
    precision: str | None = None
    """bf16, fp16, fp32 or fp8, where the file leaves it to its launcher."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Fields (and variables of a script) by name, in place of the file's values."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    strict: bool = False
    """Whether a field that no reader knows is an error."""

    def values(self) -> dict[str, object]:
        """The settings as what they spell."""
        return {name: setting_value(text) for name, text in self.settings.items()}


NOTHING = ReadContext()
"""Nothing beside the file."""


def parse_settings(words: Sequence[str]) -> dict[str, str]:
    """Texts by name of `name=value` words. InputError for a word that is none, and for a name given twice."""
    settings: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip()
        if not equals or not name.lstrip("-"):
            raise InputError(f"--set {word[:60]!r} is not name=value; write it as in --set seq_length=4096")
        if name in settings:
            raise InputError(f"--set gives {name[:60]!r} twice; keep one")
        settings[name] = text
    return settings


def setting_value(text: str) -> object:
    """true, false, null, numbers and JSON lists as such; anything else is text."""
    word = text.strip()
    plain: dict[str, object] = {"true": True, "false": False, "null": None, "none": None}
    if word.lower() in plain:
        return plain[word.lower()]
    if word[:1] in "[{":
        try:
            return json.loads(word)
        except (ValueError, RecursionError):
            return text
    for kind in (int, float):
        try:
            value = kind(word)
        except ValueError:
            continue
        return value if math.isfinite(value) and len(word) < 40 else text
    return text
