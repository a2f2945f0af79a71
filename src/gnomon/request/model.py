"""Models that are named on a command line or in a call: presets, ids of the Hugging Face hub, and files of configs.

`read_model(name)` returns the Graph, `read_config(name)` what it was built from. Leaves out job files, which bring
their model with them (`formats`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gnomon.errors import CatalogueError, InputError
from gnomon.formats import programs
from gnomon.formats.huggingface.read import read_hf_config
from gnomon.formats.job import read_source
from gnomon.graph import Graph
from gnomon.models.lora import parse_adapters, with_adapters
from gnomon.models.presets import CONFIGS, Config, known_name
from gnomon.models.presets import model as preset


def is_job_file(name: str) -> bool:
    """Whether a name is that of a file, and the file is no model's config."""
    path = Path(name)
    try:
        if not path.is_file():
            return False
    except OSError:
        return False
    return path.suffix != ".json" or programs.recognised(path) is not None


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
    name, adapters = parse_adapters(name)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if adapters is not None:
        whole, notes = read_model(name, settings=settings, strict=strict)
        graph = with_adapters(whole, adapters)
        trained, frozen = graph.num_parameters() / 1e6, graph.num_frozen() / 1e9
        return graph, (*notes, f"{trained:.4g} million parameters of adapters are trained, {frozen:.4g} billion frozen")
    if not (path.suffix == ".json" or path.is_file()):
        if settings:
            raise InputError(f"--set changes keys of a file, and {name!r} is a name; give its config.json")
        try:
            return preset(name), ()
        except CatalogueError as error:
            if "/" not in name:
                raise
            raise InputError(f"cannot read {name!r}: there is no such file or folder, and {error}") from None
    if path.is_file() and is_job_file(name):
        job_format = programs.recognised(path)
        what = "no model: give a name (`gnomon catalogue models`) or a Hugging Face config.json"
        if job_format is not None:
            what = f"a job file of {job_format.name}: `gnomon predict {name} --on CLUSTER` reads it"
        elif path.suffix == ".toml":
            what += "; a plan file goes behind --plan"
        raise InputError(f"{name!r} is {what}")
    text, source = read_source(path)
    label = path.resolve().parent.name if path.name == "config.json" else path.stem
    model = read_hf_config(text, label or source, settings=settings, strict=strict)
    return model.graph, model.notes


def read_config(name: str) -> tuple[Config | None, Graph]:
    """(config, graph) of a preset, a config.json or a folder with one; no config for what is no decoder, or frozen."""
    if is_code(name) or parse_adapters(name)[1] is not None:
        return None, read_model(name)[0]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix == ".json" or path.is_file():
        text, source = read_source(path)
        label = path.resolve().parent.name if path.name == "config.json" else path.stem
        model = read_hf_config(text, label or source)
        return model.config, model.graph
    known = known_name(name)
    return (CONFIGS[known]() if known in CONFIGS else None, preset(known))
