"""Megatron-Bridge's launch scripts, its recipes in Python, and overrides `model.tensor_model_parallel_size=4` alone.

A script names a recipe, whose file is looked for around it. Leaves out what an override means (`read`) and how a recipe
is followed (`recipes`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.errors import InputError, nearest
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import GIVE_MODEL, ReadContext
from gnomon.formats.hub import network_called
from gnomon.formats.job import Fields, Job, read_source
from gnomon.formats.launched import dashed, launched, overrides
from gnomon.formats.megatron_bridge.read import job_of_overrides, read_megatron_bridge
from gnomon.formats.megatron_bridge.recipes import find_recipe, is_recipe, names_in, recipe_fields, sources
from gnomon.formats.python_values import module_of
from gnomon.formats.shell import Launch
from gnomon.formats.trainers import adapted

OPTIONS = {
    "max_steps": "train.train_iters",
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "seq_length": "model.seq_length",
    "tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size",
    "virtual_pipeline_model_parallel_size": "model.virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size": "model.expert_model_parallel_size",
    "expert_tensor_parallel_size": "model.expert_tensor_parallel_size",
}
"""Options of run_recipe.py -> what they set."""
SHORT = {"-tp": "tensor_model", "-pp": "pipeline_model", "-cp": "context", "-vp": "virtual_pipeline_model"} | {
    "-ep": "expert_model",
    "-etp": "expert_tensor",
}
BATCHES = {"-gb": "--global_batch_size", "-mb": "--micro_batch_size", "-sl": "--seq_length", "-ms": "--max_steps"}

SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_moe_experts")
"""Fields that make a network another one."""

WORDS = r"^\s*\+{0,2}(model\.\w*(parallel|recompute|num_|seq_length)\w*|train\.(global|micro|train_iters)\w*)="


def _looks(sample: Sample) -> bool:
    if sample.values:
        return False
    if sample.path.suffix == ".py":
        return is_recipe(sample.text)
    others = re.search(r"verl|megatron_\w+_(pretraining|finetuning|sft)\.py", sample.text) is not None  # NeMo 1's
    is_bridge = re.search(WORDS, sample.text, re.MULTILINE) is not None and not others
    return (
        is_bridge
        or re.search(r"run_recipe\.py|megatron\.bridge", sample.text) is not None
        and "--recipe" in sample.text
    )


def _accepts(launch: Launch) -> bool:
    return {"--recipe", "--model"} & set(launch.options) != set() or any(
        re.match(WORDS, word) for word in launch.options
    )


def _recipe(name: str, path: Path, context: ReadContext) -> tuple[dict[str, object], str | None]:
    """(settings, id of the network) of a recipe that is looked for; nothing where a network is given instead."""
    recipe = find_recipe(name, sources(path, context.settings.get("recipes")))
    if recipe is not None:
        return recipe_fields(name, recipe)
    if context.model is None:
        raise InputError(
            f"the recipe {name!r} is not in a checkout around {path}, nor installed; "
            f"--set recipes=path/to/Megatron-Bridge, or give --model and the sizes that it sets"
        )
    return {}, None


def _job(values: Mapping[str, object], name: str, hub: str | None, file: str, context: ReadContext) -> Job:
    """The job of a recipe's settings with what is laid over them."""
    assumed: tuple[str, ...] = ()
    settings = {key: text for key, text in context.settings.items() if key not in ("recipe", "recipes")}
    if context.model is None:
        if hub is None:
            raise InputError(f"{file}: the recipe {name} does not name a network of the hub; {GIVE_MODEL}")
        if changed := [key for key in SIZES if f"model.{key}" in values]:
            raise InputError(f"{file}: the recipe {name} changes {hub} (model.{changed[0]}); {GIVE_MODEL}")
        network, note = network_called(hub)
        assumed = (note,) if note else ()
        context = replace(context, model=network)
    f = Fields({}, file)
    if any(key.startswith("peft.") for key in values) and context.model is not None:
        rank = values.get("peft.dim", 32)
        network = adapted(f, context.model, rank if isinstance(rank, int) else 32, (), four_bits=False, named="peft")
        context, values = (
            replace(context, model=network),
            {k: v for k, v in values.items() if not k.startswith("peft.")},
        )
    count = re.search(r"_(\d+)gpus?_", name)
    stated = int(count[1]) if count else None
    devices = context.devices or stated
    job = job_of_overrides(values, file, replace(context, devices=devices, settings=settings), whole=bool(hub))
    listed = (*f.unexpressed, *job.unexpressed)
    return replace(job, unexpressed=listed, assumed=(*assumed, *job.assumed), stated_devices=stated)


def _python(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    names, recipe_name = names_in(text), context.settings.get("recipe")
    if recipe_name is not None and recipe_name not in names:
        raise InputError(f"{file} has no recipe {recipe_name!r}{nearest(recipe_name, names)}", "--set")
    name = recipe_name or next((name for name in names if "pretrain" in name), names[0])
    folders = [*sources(path, context.settings.get("recipes")), path.resolve().parent]
    values, hub = recipe_fields(name, module_of(text, file, folders))
    job = _job(values, name, hub, file, context)
    others = f", the first of {len(names)} (--set recipe=…)" if recipe_name is None and len(names) > 1 else ""
    return replace(job, assumed=(f"the recipe {name} of the file{others}", *job.assumed))


def _script(path: Path, context: ReadContext) -> Job:
    script = launched(path, context, _accepts, "--recipe")
    options = script.launch.options
    words = [f"--{SHORT[word]}_parallel_size" if word in SHORT else BATCHES.get(word, word) for word in options]
    flags = dashed([word for word in words if "=" not in word or word.startswith("--")])
    mode = str(flags.get("mode") or "pretrain")
    name = str(flags.get("recipe") or f"{flags.get('model')}_{'peft' if mode in ('lora', 'dora') else mode}_config")
    settings, hub = _recipe(name, path, context)
    laid = {OPTIONS[key]: value for key, value in flags.items() if key in OPTIONS}
    values = {**settings, **laid, **overrides(options)}
    return _job(values, name, hub, script.file, replace(context, settings=script.options))


def _read(path: Path, context: ReadContext) -> Job:
    if path.suffix == ".py":
        return _python(path, context)
    text, _ = read_source(path)
    if re.search(r"--recipe|run_recipe\.py|\bpython3?\b|torchrun", text):
        return _script(path, context)
    if context.model is None:
        raise InputError(f"overrides of Megatron-Bridge do not say the model; {GIVE_MODEL}")
    return read_megatron_bridge(
        path, model=context.model, devices=context.devices or 8, env=context.env, context=context
    )


FORMAT = Format(
    name="megatron-bridge",
    program="NVIDIA-NeMo/Megatron-Bridge 067f987",
    files="launch scripts of recipes, recipes in Python, overrides",
    looks=_looks,
    read=_read,
)
