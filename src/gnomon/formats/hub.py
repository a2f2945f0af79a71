"""Which network a trainer's file means by `base_model: NousResearch/Llama-2-7b-hf`: the catalogue's, or a config.json.

`network_called(name)` returns it, and a sentence where the name is not one that the catalogue lists: copies of another
owner, tuned or quantised weights, and models that share another's sizes. Leaves out the network itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from gnomon.errors import CatalogueError, InputError
from gnomon.formats.given import GIVE_MODEL, Network
from gnomon.formats.huggingface.read import read_hf_config
from gnomon.formats.job import read_source
from gnomon.models.llama import LlamaConfig
from gnomon.models.presets import CONFIGS, known_name

SAME_SIZES = {
    "meta-llama-3-8b": "llama-3.1-8b",
    "llama-3-8b": "llama-3.1-8b",
    "meta-llama-3-70b": "llama-3.1-70b",
    "llama-3-70b": "llama-3.1-70b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "zephyr-7b-*": "mistral-7b",
    "mistral-7b-sft-*": "mistral-7b",
    "openhermes-2.5-mistral-7b": "mistral-7b",
    "qwen2.5-coder-0.5b": "qwen2.5-0.5b",
    "qwen2.5-coder-1.5b": "qwen2.5-1.5b",
    "qwen2.5-coder-3b": "qwen2.5-3b",
    "qwen2.5-coder-7b": "qwen2.5-7b",
    "qwen2.5-coder-14b": "qwen2.5-14b",
    "qwen2.5-coder-32b": "qwen2.5-32b",
    "qwen2.5-math-1.5b": "qwen2.5-1.5b",
    "qwen2.5-math-7b": "qwen2.5-7b",
    "qwen2.5-math-72b": "qwen2.5-72b",
    "qwen2-0.5b": "qwen2.5-0.5b",
    "qwen2-1.5b": "qwen2.5-1.5b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2-72b": "qwen2.5-72b",
    "qwq-32b*": "qwen2.5-32b",
    "deepcoder-14b*": "qwen2.5-14b",
    "deepseek-v3.1*": "deepseek-v3",
    "deepseek-r1*0528": "deepseek-v3",
    "nvidia-nemotron-3-nano-30b-a3b*": "nemotron-3-nano",
    "nvidia-nemotron-3-super-120b-a12b*": "nemotron-3-super",
    "nvidia-nemotron-3-ultra-550b-a55b*": "nemotron-3-ultra",
}
"""Plain name, or a pattern of it -> the catalogue's model of the same sizes."""

OTHER_VOCABULARY = {
    "mistral-7b-v0.3": ("mistral-7b", 32768, 0),
    "mistral-7b-instruct-v0.3": ("mistral-7b", 32768, 0),
    "mistral-7b-v0.2": ("mistral-7b", 32000, 0),
    "mistral-7b-instruct-v0.2": ("mistral-7b", 32000, 0),
    "codellama-7b": ("llama-2-7b", 32016, 0),
    "codellama-13b": ("llama-2-13b", 32016, 0),
}
"""Plain name -> (the catalogue's model of the same layers, rows of its embedding, window)."""

SMALL = {
    "smollm2-135m": (30, 576, 9, 3, 1536),
    "smollm2-360m": (32, 960, 15, 5, 2560),
    "smollm2-1.7b": (24, 2048, 32, 32, 8192),
    "tinyllama-1.1b": (22, 2048, 32, 4, 5632),
}
"""Plain name -> (layers, hidden size, heads, KV heads, feed-forward), in Llama's form. Sizes here and above are
those of the models' config.json, as Lightning-AI/litgpt quotes them with addresses (litgpt/config.py, 2685705)."""

ENDS = re.compile(
    r"(-bnb-4bit|-unsloth|-gptq.*|-awq.*|-aqlm.*|-bf16|-fp8|-hf|-instruct|-chat|-base|-it|-pt|-sft|-source|-thinking|"
    r"-merges|-sft-mixture|-rm-700k|-\d{4}|-intermediate-step.*|-chat-v[\d.]+|-deduped)$"
)
"""Ends of names that say how weights were trained, when, or how they are stored."""


def network_called(name: str, folder: Path | None = None) -> tuple[Network | str, str]:
    """(network or the catalogue's name of it, sentence on what was taken for it).

    folder: where a relative path begins. InputError for a name that nothing here knows, with what to give.
    """
    found = find_network(name, folder)
    if found is None:
        give = f"{download(name)}, and give --model {folder_of(name)}" if is_hub_id(name) else GIVE_MODEL
        raise InputError(f"the file trains {name[:80]!r}, whose sizes are not known here; {give}")
    return found


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""OWNER/NAME."""


def is_hub_id(name: str) -> bool:
    """Whether a name is of the form that the Hugging Face hub has for models."""
    return HUB_ID.fullmatch(name) is not None


def folder_of(hub_id: str) -> str:
    """Names the folder where `download` puts a model's config."""
    return hub_id.partition("/")[2]


def how_to_get(name: str) -> str | None:
    """What to do where a name is an id of the hub whose sizes are not known; None where it is no such id."""
    if not is_hub_id(name):
        return None
    return f"if the hub has it, {download(name)}, then give {folder_of(name)} as the model"


def download(hub_id: str) -> str:
    """What to do to have the config.json of a model of the hub."""
    return f"download its config.json: hf download {hub_id} config.json --local-dir {folder_of(hub_id)}"


def find_network(name: str, folder: Path | None = None) -> tuple[Network | str, str] | None:
    """Finds a model as `network_called` does; None for a name that nothing here knows."""
    for place in (Path(name), *([folder / name] if folder is not None else [])):
        config = place / "config.json" if place.is_dir() else place
        if config.name == "config.json" and config.is_file():
            model = read_hf_config(read_source(config)[0], place.name)
            return model.graph if model.config is None else model.config, ""
    try:
        return known_name(name), ""
    except CatalogueError:
        pass
    plain = plain_name(name)
    for spelled in (name.rpartition("/")[2], plain):
        try:
            known = known_name(spelled)
        except CatalogueError:
            continue
        return known, f"{name} is taken for the catalogue's {known} by its name (--model)"
    for pattern, known in SAME_SIZES.items():
        if fnmatchcase(plain, pattern):
            return known, f"{name} has the sizes of {known} (--model)"
    return _of_llamas_form(name, plain)


def plain_name(name: str) -> str:
    """A hub id without owner, case, and the ends that do not change its sizes."""
    plain, last = name.rstrip("/").rpartition("/")[2].lower(), ""
    while plain != last:
        last, plain = plain, ENDS.sub("", plain)
    return plain


def _of_llamas_form(name: str, plain: str) -> tuple[Network, str] | None:
    if plain in OTHER_VOCABULARY:
        known, vocab, window = OTHER_VOCABULARY[plain]
        config = CONFIGS[known]()
        assert isinstance(config, LlamaConfig)
        return replace(config, name=plain, vocab_size=vocab, window=window), f"{name} has the layers of {known}"
    if plain in SMALL:
        layers, hidden, heads, kv_heads, ffn = SMALL[plain]
        small = plain.startswith("smollm2")
        config = LlamaConfig(
            name=plain,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=hidden // heads,
            ffn_size=ffn,
            vocab_size=49152 if small else 32000,
            tied=small,
        )
        return config, ""
    return None
