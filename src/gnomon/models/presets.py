"""Published models by name: `model("llama-3.1-8b")` returns its Graph.

The names are those of the presets' configs. Leaves out: variants of a preset; make those with `dataclasses.replace` on
its config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gnomon.errors import CatalogueError, InputError, nearest
from gnomon.graph import Graph
from gnomon.late import load_late
from gnomon.models import deepseek, gpt, llama, mixtral
from gnomon.models.lora import parse_adapters, with_adapters
from gnomon.models.sizes import GRAPH_SIZES, LLAMA_SIZES
from gnomon.models.trained import parse_trained, with_trained

Config = llama.LlamaConfig | mixtral.MixtralConfig | deepseek.DeepseekConfig | gpt.GptConfig | gpt.GptNeoxConfig
"""What a decoder is built from."""

LLAMAS: Mapping[str, Callable[[], llama.LlamaConfig]] = {
    "llama-mini": llama.llama_mini,
    "llama-tiny": llama.llama_tiny,
    "llama-2-7b": llama.llama2_7b,
    "llama-2-70b": llama.llama2_70b,
    "llama-3.1-8b": llama.llama3_1_8b,
    "llama-3.1-70b": llama.llama3_1_70b,
    "llama-3.1-405b": llama.llama3_1_405b,
    "llama-3.2-1b": llama.llama3_2_1b,
    "mistral-7b": llama.mistral_7b,
    "qwen2.5-7b": llama.qwen2_5_7b,
    "qwen3-8b": llama.qwen3_8b,
    **LLAMA_SIZES,
}
"""Name -> a function returning the config, of models that the runtime can run too."""


CONFIGS: Mapping[str, Callable[[], Config]] = {
    **LLAMAS,
    "mixtral-8x7b": mixtral.mixtral_8x7b,
    "mixtral-8x22b": mixtral.mixtral_8x22b,
    "qwen3-30b-a3b": mixtral.qwen3_30b_a3b,
    "qwen3-235b-a22b": mixtral.qwen3_235b_a22b,
    "deepseek-v3": deepseek.deepseek_v3_671b,
    "gpt2": gpt.gpt2,
    "gpt2-xl": gpt.gpt2_xl,
    "gpt3-175b": gpt.gpt3_175b,
    "gpt-neox-20b": gpt.gpt_neox_20b,
    "pythia-1.4b": gpt.pythia_1_4b,
}
"""Name -> a function returning the config, of decoders that other programs can be told."""


def build(config: Config) -> Graph:
    """The Graph of a decoder's config."""
    match config:
        case llama.LlamaConfig():
            return llama.llama(config)
        case mixtral.MixtralConfig():
            return mixtral.mixtral(config)
        case deepseek.DeepseekConfig():
            return deepseek.deepseek_v3(config)
        case gpt.GptConfig():
            return gpt.gpt(config)
        case gpt.GptNeoxConfig():
            return gpt.gpt_neox(config)


def _graph(make: Callable[[], Config]) -> Callable[[], Graph]:
    return lambda: build(make())


def _of_family(family: str, builder: str, sizes: str) -> Callable[[], Graph]:
    """What a file beside this one builds of its sizes: loaded when it is asked for, as most are not."""

    def make() -> Graph:
        config: object = load_late(f"gnomon.models.{family}:{sizes}")()
        graph: Graph = load_late(f"gnomon.models.{family}:{builder}")(config)
        return graph

    return make


PRESETS: Mapping[str, Callable[[], Graph]] = {
    **{name: _graph(make) for name, make in CONFIGS.items()},
    "gemma-2-2b": _of_family("gemma", "gemma2", "gemma2_2b"),
    "gemma-2-9b": _of_family("gemma", "gemma2", "gemma2_9b"),
    "gemma-2-27b": _of_family("gemma", "gemma2", "gemma2_27b"),
    "nemotron-h-8b": _of_family("hybrid", "hybrid", "nemotron_h_8b"),
    "nemotron-3-nano": _of_family("hybrid", "hybrid", "nemotron_3_nano"),
    "nemotron-3-super": _of_family("hybrid", "hybrid", "nemotron_3_super"),
    "nemotron-3-ultra": _of_family("hybrid", "hybrid", "nemotron_3_ultra"),
    "mamba2-2.7b": _of_family("hybrid", "hybrid", "mamba2_2_7b"),
    "pr-moe-350m": _of_family("pr_moe", "pr_moe", "pr_moe_350m"),
    "pr-moe-1.3b": _of_family("pr_moe", "pr_moe", "pr_moe_1_3b"),
    "mos-350m": _of_family("pr_moe", "pr_moe", "mos_350m"),
    "bert-base": _of_family("bert", "bert", "bert_base"),
    "bert-large": _of_family("bert", "bert", "bert_large"),
    "t5-small": _of_family("t5", "t5", "t5_small"),
    "t5-base": _of_family("t5", "t5", "t5_base"),
    "flan-t5-base": _of_family("t5", "t5", "flan_t5_base"),
    "vit-b-16": _of_family("vit", "vit", "vit_b16"),
    "vit-l-16": _of_family("vit", "vit", "vit_l16"),
    "dit-b-4": _of_family("dit", "dit", "dit_b_4"),
    "dit-xl-2": _of_family("dit", "dit", "dit_xl_2"),
    "ddpm-cifar10": _of_family("unet", "unet", "ddpm_cifar10"),
    "unet-tiny": _of_family("unet", "unet", "unet_tiny"),
    **GRAPH_SIZES,
}
"""Name -> a function returning the Graph."""


HUB_IDS: Mapping[str, tuple[str, ...]] = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b"),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13b"),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b"),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-70B"),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B", "meta-llama/Meta-Llama-3.1-405B"),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B",),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B",),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B",),
    "mistral-7b": ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B"),
    "mistral-nemo-12b": ("mistralai/Mistral-Nemo-Base-2407", "mistralai/Mistral-Nemo-Instruct-2407"),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B"),
    "mixtral-8x22b": ("mistralai/Mixtral-8x22B-v0.1", "mistralai/Mixtral-8x22B"),
    **{f"qwen2.5-{size}b": (f"Qwen/Qwen2.5-{size}B",) for size in ("0.5", "1.5", "3", "7", "14", "32", "72")},
    **{f"qwen3-{size}b": (f"Qwen/Qwen3-{size}B",) for size in ("0.6", "1.7", "4", "8", "14", "32")},
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B",),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B",),
    "deepseek-v2-lite": ("deepseek-ai/DeepSeek-V2-Lite",),
    "deepseek-v2": ("deepseek-ai/DeepSeek-V2",),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-R1"),
    "gpt2": ("openai-community/gpt2",),
    "gpt2-xl": ("openai-community/gpt2-xl",),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "gpt-neox-20b": ("EleutherAI/gpt-neox-20b",),
    "pythia-1.4b": ("EleutherAI/pythia-1.4b", "EleutherAI/pythia-1.4b-deduped"),
    **{f"gemma-2-{size}b": (f"google/gemma-2-{size}b",) for size in (2, 9, 27)},
    **{f"gemma-3-{size}b": (f"google/gemma-3-{size}b-pt",) for size in (1, 4, 12, 27)},
    "gemma-4-26b-a4b": ("google/gemma-4-26B-A4B",),
    "gemma-4-31b": ("google/gemma-4-31B",),
    "nemotron-h-8b": ("nvidia/Nemotron-H-8B-Base-8K",),
    "mamba2-2.7b": ("state-spaces/mamba2-2.7b",),
    "bert-base": ("google-bert/bert-base-uncased", "bert-base-uncased"),
    "bert-large": ("google-bert/bert-large-uncased", "bert-large-uncased"),
    "t5-small": ("google-t5/t5-small",),
    "t5-base": ("google-t5/t5-base",),
    "flan-t5-base": ("google/flan-t5-base",),
    "vit-b-16": ("google/vit-base-patch16-224",),
    "vit-l-16": ("google/vit-large-patch16-224",),
    "dit-xl-2": ("facebook/DiT-XL-2-256",),
    "ddpm-cifar10": ("google/ddpm-cifar10-32",),
}
"""Name -> what the Hugging Face hub calls models of its sizes, the usual one first; case does not matter."""

POSITIONS: Mapping[str, int] = {
    "llama-2-": 4096,
    "llama-3.": 131072,
    "mistral-7b": 32768,
    "mistral-nemo": 131072,
    "mixtral-8x7b": 32768,
    "mixtral-8x22b": 65536,
    **{f"qwen2.5-{size}b": 131072 for size in ("1.5", "7", "14", "32", "72")},
    **{f"qwen2.5-{size}b": 32768 for size in ("0.5", "3")},
    "qwen3-": 40960,
    "deepseek-": 163840,
    "gpt-oss-": 131072,
    "gpt-neox-20b": 2048,
    "pythia-": 2048,
    "gemma-2-": 8192,
    "gemma-3-1b": 32768,
    "gemma-3-": 131072,
    "nemotron-h-8b": 8192,
}
"""Beginning of a preset's name -> tokens of the longest sequence that it is made for, where positions are computed, as
max_position_embeddings of its config.json (of most quoted by Lightning-AI/litgpt, litgpt/config.py, 2685705). Learned
positions are in the Graph. What is not listed is not known here."""


def positions(name: str) -> int | None:
    """`POSITIONS` of a preset; None for one that is not listed."""
    return next((most for start, most in POSITIONS.items() if name.startswith(start)), None)


LANGUAGE_MODELS: Mapping[str, str] = {
    "gemma-3-4b": "gemma3_text",
    "gemma-3-12b": "gemma3_text",
    "gemma-3-27b": "gemma3_text",
    "gemma-4-26b-a4b": "gemma4_text",
    "gemma-4-31b": "gemma4_text",
}
"""Preset that is published with a tower for images -> what transformers calls its network of words, all that the
preset has."""


def only_words(family: str) -> str:
    """Says what is left out of a model that reads images or sound, of whose networks only that of words is known."""
    return f"only its language model ({family}): what reads images or sound, and its projector, are left out"


def left_out(name: str) -> str:
    """What the preset of a name leaves out of the published model; nothing for one that has all of it."""
    return only_words(LANGUAGE_MODELS[name]) if name in LANGUAGE_MODELS else ""


TUNED = ("-instruct", "-chat", "-base", "-it", "-pt", "-hf")
"""Ends of hub ids that say how the weights were trained; the sizes are the same."""


def _plain(name: str) -> str:
    """A name without case, and without the end that says how it was trained."""
    low, last = name.lower(), ""
    while low != last:
        low, last = next((low.removesuffix(end) for end in TUNED if low.endswith(end)), low), low
    return low


_KNOWN: Mapping[str, str] = {
    **{_plain(hub_id.rpartition("/")[2]): name for name, ids in HUB_IDS.items() for hub_id in ids},
    **{_plain(hub_id): name for name, ids in HUB_IDS.items() for hub_id in ids},
    **{_plain(name): name for name in PRESETS},
}


def known_name(name: str) -> str:
    """The preset's name of a name in any case, or of an id of the Hugging Face hub with or without its owner;
    CatalogueError with the nearest names otherwise."""
    preset = _KNOWN.get(name.lower()) or _KNOWN.get(_plain(name))
    if preset is None:
        raise CatalogueError(f"unknown model {name[:64]!r}{_near(name)}; `gnomon catalogue models` lists all")
    return preset


def _near(name: str) -> str:
    """Names that it may be a misspelling of. Another number is another model, not a slip: of the hub's ids only those
    whose numbers are the same, but for the size at the end."""
    if "/" not in name:
        return nearest(name.lower(), PRESETS, cutoff=0.65)
    numbers = re.findall(r"\d+", name)[:-1]
    ids = {hub_id.lower(): hub_id for hub_ids in HUB_IDS.values() for hub_id in hub_ids}
    near = nearest(name.lower(), [low for low in ids if re.findall(r"\d+", low)[:-1] == numbers], cutoff=0.8)
    for low, hub_id in ids.items():
        near = near.replace(f"'{low}'", f"'{hub_id}'")
    return near


def graph_of(network: Graph | str) -> Graph:
    """A Graph, or the one of that name; InputError for what is neither, such as a torch module."""
    if isinstance(network, str):
        return model(network)
    if not isinstance(network, Graph):
        raise InputError(
            f"a model is a gnomon.graph.Graph or a name such as 'llama-3.1-8b', not a {type(network).__name__}"
        )
    return network


def model(name: str) -> Graph:
    """The published model of that name (`known_name`), frozen and with adapters if it ends in `+lora16`, in part if it
    ends in `+only:PATTERN`; CatalogueError with the nearest names otherwise."""
    name, trained = parse_trained(name)
    if trained is not None:
        return with_trained(model(name), trained)
    name, adapters = parse_adapters(name)
    make = PRESETS[known_name(name)]
    return make() if adapters is None else with_adapters(make(), adapters)
