"""LoRA adapters in PEFT's layout: written from a run that trained them, read into another, beside the frozen base.

A folder has `adapter_config.json` and `adapter_model.safetensors`, whose tensors are named
`base_model.model.<module>.lora_A.weight` and `.lora_B.weight`. `values_of` reads it, `export` writes it. An adapter's
factor is lora_alpha / r, which is 1 here. The base may be in four bits (`nf4`). Leaves out rank-stabilised factors,
DoRA, and adapters of modules that a model's files join (Phi-3's qkv_proj).
Source: PEFT 0.18, LoraConfig and save_pretrained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gnomon.errors import InputError, PlanError
from gnomon.formats.huggingface.known import TYPES, layout
from gnomon.formats.huggingface.pieces import TensorPiece
from gnomon.formats.huggingface.runnable import Runnable
from gnomon.formats.huggingface.weights import Layout, parameters_of
from gnomon.graph import Graph
from gnomon.models.lora import Adapters, parse_adapters
from gnomon.runtime.parameters.parameters import Values
from gnomon.runtime.parameters.weights import Folder, WeightReader, start_folder

if TYPE_CHECKING:
    from gnomon.runtime.step.execute import Executor

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
UNUSUAL = {"use_rslora": False, "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}}
"""Keys of a config that would change the mathematics -> the value that is read."""


def adapters_of(graph: Graph) -> Adapters | None:
    """The adapters that a graph's name says; None for a model that is trained whole."""
    return parse_adapters(graph.name)[1] if any(block.frozen for block in graph.blocks) else None


def peft_layout(graph: Graph) -> Layout:
    """Maps each trained tensor of `graph` to its place in PEFT's file."""
    known, trained = parameters_of(graph), graph.parameters()
    pieces = {
        name: (TensorPiece(tensor=f"{PREFIX}{name}", shape=known[name].shape, view=known[name].atoms),)
        for name in trained
    }
    return Layout(pieces=pieces)


def check(graph: Graph, base: Runnable) -> None:
    """PlanError where the names of modules in the files of the base are not those of the graph."""
    where = layout(base.graph, base.model_type)
    for name in graph.parameters():
        module = name.rpartition(".lora_")[0]
        if module and where.pieces[f"{module}.weight"][0].tensor != f"{module}.weight":
            other = where.pieces[f"{module}.weight"][0].tensor
            raise PlanError(
                f"adapters of {module} have no place in PEFT's layout, since the files of {base.model_type} have it in "
                f"{other}; take other targets (MODEL+lora16:down_proj)"
            )


def values_of(path: Path, graph: Graph) -> Values:
    """Reads the adapters in `path` for `graph`. InputError for those of another rank, other modules or another kind."""
    adapters = adapters_of(graph)
    if adapters is None:
        raise InputError(f"{graph.name} has no adapters to read from {path}; name the model MODEL+lora16")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path / CONFIG} cannot be read: {error}") from error
    if config.get("peft_type") != "LORA" or config.get("r") != adapters.rank:
        raise InputError(
            f"{path} has {config.get('peft_type')} of rank {config.get('r')}, and the plan is for LORA of rank "
            f"{adapters.rank}"
        )
    if config.get("lora_alpha", config["r"]) != config["r"]:
        raise InputError(
            f"{path}: lora_alpha = {config['lora_alpha']} with r = {config['r']}, and the runtime multiplies adapters "
            f"by 1; only lora_alpha = r is read"
        )
    for key, usual in UNUSUAL.items():
        if config.get(key, usual) not in (usual, None):
            raise InputError(f"{path}: {key} = {config[key]!r} is not read; only {usual!r}")
    folder, where = Folder.of(path / FILE), peft_layout(graph)
    folder.check(where)
    return WeightReader(folder, where)


def export(executor: Executor, target: Path, base: Runnable, source: Path) -> Path:
    """Writes the adapters of a running plan to `target`; every rank must call it."""
    graph = executor.graph
    adapters = adapters_of(graph)
    assert adapters is not None, "asked for a graph with adapters"
    check(graph, base)
    where = peft_layout(graph)
    executor.synchronise()
    first = dist.get_rank() == 0
    dtype = executor_dtype(executor)
    if first:
        writer = start_folder(target, where, dtype, single=FILE)
        (target / CONFIG).write_text(json.dumps(config_of(graph, adapters, base, source), indent=2) + "\n")
    dist.barrier()
    if not first:
        writer = start_folder(target, where, dtype, single=FILE, join=True)
    for number in sorted(executor.stages):
        parameters = executor.stages[number].own_parameters[0]
        if executor.groups.here.data == 0:
            for slot in parameters.slots:
                writer.write_part(where, slot, parameters.value(slot.name))
    dist.barrier()
    return target


def executor_dtype(executor: Executor) -> torch.dtype:
    """What forward reads parameters in."""
    return next(parameters.dtypes.param for parameters, _ in executor.parameters())


def config_of(graph: Graph, adapters: Adapters, base: Runnable, source: Path) -> dict[str, Any]:
    """PEFT's config of these adapters."""
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in graph.parameters()}
    return {
        "base_model_name_or_path": str(source),
        "bias": "none",
        "fan_in_fan_out": TYPES[base.model_type].weights.stored_transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": adapters.rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapters.rank,
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
    }
