"""Published models by name: `model("llama-3.1-8b")` returns its Graph.

The names are those of the presets' configs. Leaves out: variants of a preset; make those with `dataclasses.replace` on
its config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gnomon.errors import CatalogueError, nearest
from gnomon.graph import Graph
from gnomon.models import bert, deepseek, dit, gemma, gpt, llama, mixtral, t5, unet, vit

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
}
"""Name -> a function returning the config, of models that the runtime can run too."""


def _llama(make: Callable[[], llama.LlamaConfig]) -> Callable[[], Graph]:
    return lambda: llama.llama(make())


PRESETS: Mapping[str, Callable[[], Graph]] = {
    **{name: _llama(make) for name, make in LLAMAS.items()},
    "gemma-2-2b": lambda: gemma.gemma2(gemma.gemma2_2b()),
    "gemma-2-9b": lambda: gemma.gemma2(gemma.gemma2_9b()),
    "gemma-2-27b": lambda: gemma.gemma2(gemma.gemma2_27b()),
    "mixtral-8x7b": lambda: mixtral.mixtral(mixtral.mixtral_8x7b()),
    "mixtral-8x22b": lambda: mixtral.mixtral(mixtral.mixtral_8x22b()),
    "qwen3-30b-a3b": lambda: mixtral.mixtral(mixtral.qwen3_30b_a3b()),
    "qwen3-235b-a22b": lambda: mixtral.mixtral(mixtral.qwen3_235b_a22b()),
    "deepseek-v3": lambda: deepseek.deepseek_v3(deepseek.deepseek_v3_671b()),
    "gpt2": lambda: gpt.gpt(gpt.gpt2()),
    "gpt2-xl": lambda: gpt.gpt(gpt.gpt2_xl()),
    "gpt3-175b": lambda: gpt.gpt(gpt.gpt3_175b()),
    "gpt-neox-20b": lambda: gpt.gpt_neox(gpt.gpt_neox_20b()),
    "pythia-1.4b": lambda: gpt.gpt_neox(gpt.pythia_1_4b()),
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
}
"""Name -> a function returning the Graph."""


def model(name: str) -> Graph:
    """The published model of that name; CatalogueError with the nearest names otherwise."""
    make = PRESETS.get(name)
    if make is None:
        raise CatalogueError(f"unknown model {name!r}{nearest(name, PRESETS)}; known: {', '.join(sorted(PRESETS))}")
    return make()
