"""Models that are named on a command line or in a call: presets, ids of the Hugging Face hub, and files of configs.

`read_model(name)` returns the Graph, `read_config(name)` what it was built from. Leaves out job files, which bring
their model with them (`formats`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.errors import CatalogueError, InputError
from gnomon.formats.given import Network, network_graph
from gnomon.graph import Graph
from gnomon.late import load_late
from gnomon.models.decoder import DecoderConfig
from gnomon.models.lora import parse_adapters, with_adapters
from gnomon.models.presets import CONFIGS, Config, known_name, left_out, positions
from gnomon.models.presets import model as preset
from gnomon.models.trained import parse_trained, with_trained


def is_a_file(name: str) -> bool:
    """Whether a name is that of a file; a name that the system does not take is not."""
    try:
        return Path(name).is_file()
    except OSError:
        return False


def is_job_file(name: str) -> bool:
    """Whether a name is that of a file, and the file is no model's config."""
    path = Path(name)
    if not is_a_file(name):
        return False
    # A config.json is by far the most frequent, and only JSON can be one: other ends are told without a look inside.
    return path.suffix != ".json" or _format_of(path) is not None


if TYPE_CHECKING:
    from gnomon.formats.format import Format
    from gnomon.formats.huggingface.read import HfModel

CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*(\(.*\))?", re.DOTALL)
"""A model that is code: `my_project.model:build`, with its inputs in brackets."""


def is_code(name: str) -> bool:
    """Whether a name is MODULE:FUNCTION. Only such a name is ever imported."""
    return CODE.fullmatch(name) is not None


def with_inputs(name: str, inputs: str | None, seq_len: int | None) -> str:
    """A name of code with its inputs in brackets. InputError for inputs of what is no code."""
    if not is_code(name):
        if inputs is not None:
            raise InputError(f"--inputs are those of a model that is code (MODULE:FUNCTION), and {name!r} is none")
        return name
    if inputs is not None:
        if "(" in name:
            raise InputError(f"{name!r} says its inputs already; leave --inputs out")
        name = f"{name}({inputs})"
    # The word `seq` in the inputs becomes `seq=4096`, unless it has a size already.
    if seq_len is not None:  # recorded at that length: some sizes follow from it by no product
        name = re.sub(r"\bseq\b(?!\s*=)", f"seq={seq_len}", name.partition("(")[2]).join(
            (name.partition("(")[0] + "(" if "(" in name else name, "")
        )
    return name


def read_model(
    name: str, *, settings: Mapping[str, str] | None = None, strict: bool = False
) -> tuple[Graph, tuple[str, ...]]:
    """(graph, what its file says that the graph leaves out) of a preset, a config.json or a folder with one. settings:
    keys of the config by name, in place of its own; strict: a key that is not known is an error."""
    if is_code(name):
        raise InputError(f"{name!r} is code, which the command line imports; in Python give gnomon.capture(module, …)")
    # From the outside in: `[trained part]` and adapters are written behind the name, and each reads the rest as a
    # model.
    name, part = parse_trained(name)
    if part is not None:
        whole, notes = read_model(name, settings=settings, strict=strict)
        return (graph := with_trained(whole, part)), (*notes, trained_line(graph))
    name, adapters = parse_adapters(name)
    path = _config_path(name)
    if adapters is not None:
        whole, notes = read_model(name, settings=settings, strict=strict)
        graph = with_adapters(whole, adapters)
        trained, frozen = graph.num_parameters() / 1e6, graph.num_frozen() / 1e9
        return graph, (*notes, f"{trained:.4g} million parameters of adapters are trained, {frozen:.4g} billion frozen")
    if not (path.suffix == ".json" or path.is_file()):
        # A preset is a function; what it has no argument for cannot be changed by a key.
        if settings:
            raise InputError(f"--set changes keys of a file, and {name!r} is a name; give its config.json")
        network, note = named_network(name)
        return network_graph(network), (note,) if note else ()
    if path.is_file() and is_job_file(name):
        job_format = _format_of(path)
        what = "no model: give a name (`gnomon catalogue models`) or a Hugging Face config.json"
        if job_format is not None:
            what = f"a job file of {job_format.name}: `gnomon predict {name} --on CLUSTER` reads it"
        elif path.suffix == ".toml":
            what += "; a plan file goes behind --plan"
        raise InputError(f"{name!r} is {what}")
    model = _read_config(path, settings=settings, strict=strict)
    return model.graph, model.notes


def trained_line(graph: Graph) -> str:
    """How much of a model is trained, of which a part is."""
    trained, frozen = graph.num_parameters() / 1e9, graph.num_frozen() / 1e9
    return f"{trained:.4g} of {trained + frozen:.4g} billion parameters are trained, the others frozen"


def read_config(name: str) -> tuple[Config | None, Graph]:
    """(config, graph) of a preset, a config.json or a folder with one; no config for what is no decoder, or frozen."""
    if is_code(name) or parse_adapters(name)[1] is not None or parse_trained(name)[1] is not None:
        return None, read_model(name)[0]
    path = _config_path(name)
    if path.suffix == ".json" or path.is_file():
        model = _read_config(path)
        return model.config, model.graph
    network, _ = named_network(name)
    return None if isinstance(network, Graph | DecoderConfig) else network, network_graph(network)


# By name, so that a preset's prediction loads no reader of files.


def _format_of(path: Path) -> Format | None:
    """The program whose job file it is."""
    found: Format | None = load_late("gnomon.formats.programs:recognised")(path)
    return found


def _read_config(path: Path, *, settings: Mapping[str, str] | None = None, strict: bool = False) -> HfModel:
    """What a config.json says, called by its folder or its own name."""
    text, source = read_source(path)
    # Models lie in folders of their name, all with a config.json in it.
    label = path.resolve().parent.name if path.name == "config.json" else path.stem
    model: HfModel = load_late("gnomon.formats.huggingface.read:read_hf_config")(
        text, label or source, settings=settings, strict=strict
    )
    return model


def read_source(path: Path) -> tuple[str, str]:
    """(text, name for messages) of a file, as `formats.job.read_source`."""
    text, name = load_late("gnomon.formats.job:read_source")(path)
    return text, name


def _config_path(name: str) -> Path:
    """A file, or the config.json of a folder. InputError for a folder without one."""
    path = Path(name)
    if not path.is_dir():
        return path
    if not (path / "config.json").is_file():
        raise InputError(
            f"the folder {name[:80]!r} holds no config.json; give the folder of a model, or its config.json"
        )
    return path / "config.json"


FILES = (
    ".toml", ".json", ".yaml", ".yml", ".sh", ".bash", ".py", ".ini", ".cfg", ".txt", ".csv", ".sbatch", ".slurm",
    ".conf", ".log",
)  # fmt: skip
"""Ends of names that no model has."""


def check_there(name: str) -> None:
    """InputError for a name that can only be that of a file or a folder, where there is none."""
    path = Path(name)
    # Only what cannot be a name: "org/model" may be either, and is left to the catalogue and the Hub.
    if name.lower().endswith(FILES) or (name.startswith((".", "/", "~", "\\")) or name.endswith(("/", "\\"))):
        try:
            there = path.exists()
        except OSError as error:
            raise InputError(f"cannot read {name[:80]!r}: {error.strerror}") from None
        if not there:
            folder = path.parent
            where = "" if folder.is_dir() else f" (nor a folder {str(folder)!r})"
            raise InputError(f"cannot read {name!r}: there is no such file{where}; check the path")


def known_model(name: str) -> str:
    """The preset of a name, as `known_name`. CatalogueError for one that is none, with what to download where it is an
    id of the hub; InputError for a file that is not there."""
    check_there(name)
    try:
        return known_name(name)
    except CatalogueError as error:
        if (how := load_late("gnomon.formats.hub:how_to_get")(name)) is not None:
            raise CatalogueError(f"{error}, and there is no such file or folder; {how}") from None
        if "/" in name:
            raise InputError(f"cannot read {name[:80]!r}: there is no such file or folder; check the path") from None
        raise CatalogueError(f"{error}; of any other give its config.json, or the folder of it") from None


def named_network(name: str) -> tuple[Network, str]:
    """(network, sentence on what was taken for it) of a name: the catalogue's, or the hub's of known sizes. Errors as
    of `known_model`."""
    try:
        known = known_model(name)
        network: Network | str = known
        note = left_out(known)
    except CatalogueError:
        found = load_late("gnomon.formats.hub:find_network")(name)
        if found is None:
            raise
        network, note = found
    if isinstance(network, str):
        # A config where there is one: files of other programs are written from its sizes.
        network = CONFIGS[network]() if network in CONFIGS else preset(network)
    return network, note.replace(" (--model)", "")


def positions_of(name: str) -> int | None:
    """Tokens of the longest sequence that a model by its name, or of a config.json, is made for; None where that is not
    known, as of code. Learned positions are checked with the plan (`plans.check`)."""
    plain = parse_adapters(parse_trained(name)[0])[0]
    if is_code(plain):
        return None
    path = Path(plain) / "config.json" if Path(plain).is_dir() else Path(plain)
    if path.suffix == ".json" and path.is_file():
        try:
            config = json.loads(read_source(path)[0])
        except (ValueError, RecursionError):
            return None
        return _positions(config) if isinstance(config, dict) else None
    try:
        return positions(known_name(plain))
    except CatalogueError:
        return None


def _positions(config: Mapping[str, object]) -> int | None:
    """`max_position_embeddings` of a config, times the factor of its rotary scaling where that begins from fewer."""
    # Of models that see: their text part has the positions.
    inner = config.get("text_config")
    values = {**config, **(inner if isinstance(inner, dict) else {})}
    most = values.get("max_position_embeddings")
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        return None
    scaling = values.get("rope_scaling") or values.get("rope_parameters")
    if isinstance(scaling, dict):
        factor, first = scaling.get("factor"), scaling.get("original_max_position_embeddings", most)
        # max(): some files give the length before scaling there, some after it.
        if isinstance(factor, int | float) and isinstance(first, int) and factor > 1:
            most = max(most, int(first * factor))
    return most


def too_long(name: str, longest: int) -> str | None:
    """What to say of sequences that are longer than a model is made for; None where they are not."""
    most = positions_of(name)
    if most is None or longest <= most:
        return None
    return (
        f"sequences of {longest:,} tokens are longer than the {most:,} positions that {name[:64]} is made for: time "
        "and memory are those of positions that were extended"
    )
