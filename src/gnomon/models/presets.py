"""Published models by name: `model("llama-3.1-8b")` returns its Graph.

The names are those of the presets' configs. Leaves out: variants of a preset; make those with `dataclasses.replace` on
its config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gnomon.errors import CatalogueError, nearest
from gnomon.graph import Graph
from gnomon.models import bert, deepseek, dit, gemma, gpt, hybrid, llama, mixtral, t5, unet, vit
from gnomon.models.lora import parse_adapters, with_adapters
from gnomon.models.sizes import GRAPH_SIZES, LLAMA_SIZES

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


PRESETS: Mapping[str, Callable[[], Graph]] = {
    **{name: _graph(make) for name, make in CONFIGS.items()},
    "gemma-2-2b": lambda: gemma.gemma2(gemma.gemma2_2b()),
    "gemma-2-9b": lambda: gemma.gemma2(gemma.gemma2_9b()),
    "gemma-2-27b": lambda: gemma.gemma2(gemma.gemma2_27b()),
    "nemotron-h-8b": lambda: hybrid.hybrid(hybrid.nemotron_h_8b()),
    "nemotron-3-nano": lambda: hybrid.hybrid(hybrid.nemotron_3_nano()),
    "nemotron-3-super": lambda: hybrid.hybrid(hybrid.nemotron_3_super()),
    "nemotron-3-ultra": lambda: hybrid.hybrid(hybrid.nemotron_3_ultra()),
    "mamba2-2.7b": lambda: hybrid.hybrid(hybrid.mamba2_2_7b()),
    "bert-base": lambda: bert.bert(bert.bert_base()),
    "bert-large": lambda: bert.bert(bert.bert_large()),
    "t5-small": lambda: t5.t5(t5.t5_small()),
    "t5-base": lambda: t5.t5(t5.t5_base()),
    "flan-t5-base": lambda: t5.t5(t5.flan_t5_base()),
    "vit-b-16": lambda: vit.vit(vit.vit_b16()),
    "vit-l-16": lambda: vit.vit(vit.vit_l16()),
    "dit-b-4": lambda: dit.dit(dit.dit_b_4()),
    "dit-xl-2": lambda: dit.dit(dit.dit_xl_2()),
    "ddpm-cifar10": lambda: unet.unet(unet.ddpm_cifar10()),
    "unet-tiny": lambda: unet.unet(unet.unet_tiny()),
    **GRAPH_SIZES,
}
"""Name -> a function returning the Graph."""


def model(name: str) -> Graph:
    """The published model of that name, frozen and with adapters if it ends in `+lora16`; CatalogueError with the
    nearest names otherwise."""
    name, adapters = parse_adapters(name)
    make = PRESETS.get(name)
    if make is None:
        raise CatalogueError(
            f"unknown model {name[:64]!r}{nearest(name, PRESETS)}; `gnomon catalogue models` lists all"
        )
    return make() if adapters is None else with_adapters(make(), adapters)
