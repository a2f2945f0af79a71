"""Which network a trainer's file means by `base_model: NousResearch/Llama-2-7b-hf`: the catalogue's, or a config.json.

`network_called(name)` returns it, and a sentence where the name is not one that the catalogue lists: copies of another
owner, tuned or quantised weights, and models that share another's sizes. Leaves out the network itself.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from gnomon.errors import CatalogueError, InputError
from gnomon.formats.given import GIVE_MODEL, Network
from gnomon.formats.huggingface.named import Keys, config_called, language_model
from gnomon.formats.huggingface.read import from_hf_config, read_hf_config
from gnomon.formats.job import read_source
from gnomon.models.presets import known_name, left_out

SAME_SIZES = {
    "llama-7b": "llama-2-7b",
    "llama-13b": "llama-2-13b",
    "open_llama_7b*": "llama-2-7b",
    "open_llama_13b*": "llama-2-13b",
    "alpaca-7b*": "llama-2-7b",
    "guanaco-7b*": "llama-2-7b",
    "guanaco-13b*": "llama-2-13b",
    "vicuna-7b*": "llama-2-7b",
    "vicuna-13b*": "llama-2-13b",
    "wizardlm-13b*": "llama-2-13b",
    "wizardlm-70b*": "llama-2-70b",
    "meta-llama-3-8b": "llama-3.1-8b",
    "llama-3-8b": "llama-3.1-8b",
    "meta-llama-3-70b": "llama-3.1-70b",
    "llama-3-70b": "llama-3.1-70b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-coder-v2-lite": "deepseek-v2-lite",
    "llama-3*-tulu-3*-8b": "llama-3.1-8b",
    "llama-3*-tulu-3*-70b": "llama-3.1-70b",
    "hermes-*-llama-3*-8b": "llama-3.1-8b",
    "hermes-*-llama-3*-70b": "llama-3.1-70b",
    "qwen3-embedding-0.6b": "qwen3-0.6b",
    "qwen3-embedding-4b": "qwen3-4b",
    "qwen3-embedding-8b": "qwen3-8b",
    "qwen3-reranker-0.6b": "qwen3-0.6b",
    "qwen3-reranker-4b": "qwen3-4b",
    "qwen3-reranker-8b": "qwen3-8b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
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
        if (words := language_model(plain_name(name))) is not None:
            raise InputError(
                f"the file trains {name[:80]!r}, which sees images: its vision tower and the tokens of images are not "
                f"known here; --model {words} is its network of words alone"
            )
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
    how = f"if the hub has it, {download(name)}, then give {folder_of(name)} as the model"
    words = language_model(plain_name(name))
    return how if words is None else f"{how}; {words} is its network of words alone"


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
        known = known_name(name)
        return known, f"{name}: {without}" if (without := left_out(known)) else ""
    except CatalogueError:
        pass
    plain = plain_name(name)
    for spelled in (name.rpartition("/")[2], plain):
        try:
            known = known_name(spelled)
        except CatalogueError:
            continue
        without = left_out(known)
        note = f"{name} is taken for the catalogue's {known} by its name (--model)"
        return known, f"{note}; {without}" if without else note
    for pattern, known in SAME_SIZES.items():
        if fnmatchcase(plain, pattern):
            return known, f"{name} has the sizes of {known} (--model)"
    return _sized(name, plain)


def plain_name(name: str) -> str:
    """A hub id without owner, case, and the ends that do not change its sizes."""
    plain, last = name.rstrip("/").rpartition("/")[2].lower(), ""
    # Ends come in any order and number (-instruct-bnb-4bit): they are taken off until none is left.
    while plain != last:
        last, plain = plain, ENDS.sub("", plain)
    return plain


def _sized(name: str, plain: str) -> tuple[Network, str] | None:
    """A network of sizes that are known by name only."""
    found = sizes_called(name)
    if found is None:
        return None
    keys, differs = found
    model = from_hf_config(keys, plain)
    return model.graph if model.config is None else model.config, f"{name}: {differs}" if differs else ""


def sizes_called(name: str) -> tuple[Keys, str] | None:
    """(config.json of a model that is known by name only, how it differs from the model); None for others."""
    return config_called(name.rpartition("/")[2].lower()) or config_called(plain_name(name))
