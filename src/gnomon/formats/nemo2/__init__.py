"""NeMo 2's recipes and the scripts around them, in Python: read by `ast`, never run or imported.

What a setting means was read from NVIDIA/NeMo at commit 8cfedd720346 (2025-09): nemo/collections/llm/recipes/,
nemo/lightning/pytorch/{strategies/megatron_strategy,plugins/mixed_precision}.py; the rest as Megatron-Bridge's reader
has it, which names Megatron-Core's fields alike. A script's `llm.NAME.pretrain_recipe(…)` is looked for in a checkout
around it, an installed NeMo, or `--set recipes=path/to/NeMo`. Leaves out callbacks, and networks but text decoders.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.errors import InputError, nearest
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import GIVE_MODEL, Network, ReadContext
from gnomon.formats.hub import network_called
from gnomon.formats.job import Fields, Job, flatten, read_source
from gnomon.formats.megatron_bridge.read import job_of_overrides
from gnomon.formats.megatron_bridge.recipes import plain
from gnomon.formats.python_values import ARGUMENTS, CALL, function_values, module_of
from gnomon.formats.trainers import adapted
from gnomon.software import stack

BELOW = Path("nemo/collections/llm/recipes")

SECTIONS = {
    "trainer.strategy.ddp": "ddp",
    "trainer.strategy": "model",
    "optim.config": "optimizer",
    "model.config": "model",
    "data": "train",
}
"""Parts of a recipe -> Megatron-Bridge's sections."""

SPELLED = {
    "train.seq_length": "dataset.seq_length",
    "model.fsdp": "model.use_megatron_fsdp",
    "model.num_moe_experts": "model.num_moe_experts",
}

NEUTRAL = frozenset(
    """
    ckpt_async_save ckpt_parallel_load ckpt_include_optimizer ckpt_load_strictness ckpt_load_optimizer data_sampler
    ckpt_save_optimizer ckpt_parallel_save num_train_samples tokenizer dataset_kwargs restore_config save_ckpt_format
    paths ckpt_load_main_params progress_interval replace_progress_bar ckpt_parallel_save_optim
    ckpt_assume_constant_structure
    """.split()
)

FAMILIES = (
    (r"Llama(\d)(\d?)Config(\d+)B", "llama-{0}.{1}-{2}b"),
    (r"CodeLlamaConfig(\d+)B", "codellama-{0}b"),
    (r"MistralConfig(\d+)B", "mistral-{0}b"),
    (r"MistralNeMoConfig(\d+)B", "mistral-nemo-{0}b"),
    (r"MixtralConfig(\d+x\d+)B", "mixtral-{0}b"),
    (r"Qwen(2)Config(\w+)", "qwen2-{1}"),
    (r"Qwen(25)Config(\w+)", "qwen2.5-{1}"),
    (r"Qwen(3)Config(\w+)", "qwen3-{1}"),
    (r"GPTConfig175B", "gpt3-175b"),
    (r"GPTOSSConfig(\d+)B", "gpt-oss-{0}b"),
    (r"DeepSeekV(\d)(Lite)?Config", "deepseek-v{0}-{1}"),
    (r"Gemma(\d)Config(\d+)B", "gemma-{0}-{1}b"),
    (r"SSMConfig|NemotronHConfig(\d+)B", "nemotron-h-{0}b"),
)
"""Pattern of a config's class -> the name of its network."""


def _looks(sample: Sample) -> bool:
    named = re.search(r"run\.Partial\(|pretrain_recipe|finetune_recipe", sample.text) is not None
    return sample.path.suffix == ".py" and "nemo" in sample.text and named


def network_name(config: str) -> str:
    """The name of the network that a class of NeMo holds: `Llama31Config8B` is llama-3.1-8b; itself where unknown."""
    for pattern, spelled in FAMILIES:
        if match := re.fullmatch(pattern, config):
            name = spelled.format(*(part or "" for part in match.groups())).lower().replace(".-", "-").rstrip("-")
            return (
                re.sub(r"(\d)p(\d)", r"\1.\2", name).replace("500m", "0.5b").replace("600m", "0.6b").replace("_", "-")
            )
    return config


def folders(path: Path, folder: str | None) -> tuple[Path, ...]:
    """Lists the folders where recipes are looked for."""
    placed = [Path(folder), *Path(folder).parents] if folder else []
    roots = [*placed, *path.resolve().parents, *map(Path, sys.path)]
    return (path.resolve().parent, *(root for root in roots if (root / BELOW).is_dir()))


def _recipe(path: Path, text: str, file: str, context: ReadContext) -> tuple[str, object]:
    """(name, what the recipe's function returns): the file's own, or one that its script calls by `llm.NAME`."""
    module = module_of(text, file, folders(path, context.settings.get("recipes")))
    names = [name for name in module.functions if name.endswith("recipe")]
    recipe_name = context.settings.get("recipe")
    if recipe_name is not None and recipe_name not in module.functions:
        raise InputError(f"{file} has no recipe {recipe_name!r}{nearest(recipe_name, names)}", "--set")
    name = recipe_name or next((name for name in names if "pretrain" in name), names[0] if names else "")
    batch_sizes = {key: int(text) for key, text in context.settings.items() if text.isdigit()}
    if name:
        return name, function_values(name, module, dict(batch_sizes))
    called = re.search(r"\bllm\.(?:recipes\.)?(\w+)\.(pretrain_recipe|finetune_recipe)\b", text)
    imported = re.search(r"from nemo\.collections\.llm\.recipes\.(\w+) import (pretrain_recipe|finetune_recipe)", text)
    if (match := called or imported) is None:
        raise InputError(
            f"{file} builds no recipe that is followed; say which of its functions does: --set recipe=NAME"
        )
    there = module.import_sibling(f"{'.'.join(BELOW.parts)}.{match[1]}")
    if there is None:
        raise InputError(
            f"{file} starts from NeMo's recipe {match[1]}, which is not in a checkout around it, nor installed; --set "
            f"recipes=path/to/NeMo"
        )
    return f"{match[1]}.{match[2]}", function_values(match[2], there, dict(batch_sizes))


def _settings(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The recipe as Megatron-Bridge's `section.field`."""
    flat = flatten(config)
    for key, value in flat.items():
        last = key.rpartition(".")[2]
        section = next((part for part in SECTIONS if key.startswith(f"{part}.")), None)
        if section is None or value is None or last in (CALL, ARGUMENTS) or last in NEUTRAL:
            continue
        inner = key.removeprefix(f"{section}.")
        if "." not in inner and not isinstance(value, Mapping):
            name = f"{SECTIONS[section]}.{inner}"
            yield SPELLED.get(name, name), value == "megatron" if inner == "fsdp" else plain(value)
    plugin = {key.removeprefix("trainer.plugins."): value for key, value in flat.items() if "trainer.plugins." in key}
    called = str(plugin.get(CALL))
    yield "mixed_precision", "fp16_mixed" if "16-mixed" == plugin.get("precision") or "fp16" in called else "bf16_mixed"
    for key in ("fp8", "fp8_recipe", "fp8_param_gather", "grad_reduce_in_fp32"):
        if plugin.get(key) is not None:
            yield f"mixed_precision.{key}", plugin[key]


def _network(config: Mapping[str, object], file: str, assumed: list[str]) -> Network | str:
    model = config.get("model")
    config_tree = model.get("config") if isinstance(model, Mapping) else None
    named = config_tree.get(ARGUMENTS) if isinstance(config_tree, Mapping) else None
    kind = str(named[0]) if isinstance(named, list) and named else ""
    kind = kind or str(config_tree.get(CALL) if isinstance(config_tree, Mapping) else "")
    try:
        network, note = network_called(network_name(kind.rpartition(".")[2]))
    except InputError:
        raise InputError(
            f"{file}: the recipe's network, {kind or 'of its own code'}, is not known; {GIVE_MODEL}"
        ) from None
    assumed += [note] if note else []
    return network


def _read(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    name, config = _recipe(path, text, file, context)
    trainer = config.get("trainer") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(trainer, Mapping):
        raise InputError(
            f"{file}: {name} builds its recipe in a way that is not followed; --set recipe=NAME of another"
        )
    settings = {key: text for key, text in context.settings.items() if "." in key}
    sizes = (trainer.get("num_nodes", 1), trainer.get("devices"))
    stated = sizes[0] * sizes[1] if isinstance(sizes[0], int) and isinstance(sizes[1], int) else None
    assumed: list[str] = [f"the recipe {name} of the file (--set recipe=…)"]
    network = context.model if context.model is not None else _network(config, file, assumed)
    f = Fields({}, file)
    peft = config.get("peft")
    if isinstance(peft, Mapping):
        rank = peft.get("dim", 32)
        network = adapted(f, network, rank if isinstance(rank, int) else 32, (), four_bits=False, named="peft")
    job_context = replace(context, model=network, devices=context.devices or stated, settings=settings)
    values = dict(_settings(config))
    if values.get("optimizer.use_distributed_optimizer") is False:  # nothing is sharded, so nothing is gathered
        values["ddp.overlap_param_gather"] = values["ddp.use_distributed_optimizer"] = False
    job = job_of_overrides(values, file, job_context, whole=True, base=stack("megatron-lm"))
    return replace(
        job,
        unexpressed=(*f.unexpressed, *job.unexpressed),
        assumed=(*assumed, *job.assumed),
        stated_devices=stated,
    )


FORMAT = Format(
    name="nemo2",
    program="NVIDIA/NeMo 8cfedd7 (2.x)",
    files="recipes in Python, and scripts around them",
    looks=_looks,
    read=_read,
)
