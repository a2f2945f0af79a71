"""What Megatron Core's `recompute_modules` are in our blocks.

`module_rules(names, model)` returns a rule for each module that a model has, and the names that none is known for;
`modules_of(rules, model)` is the way back.
Source: NVIDIA/Megatron-LM megatron/core/transformer/transformer_config.py (`recompute_modules`), read 2026-11-22.
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.models.deepseek import DeepseekConfig
from gnomon.models.gpt import GptConfig
from gnomon.models.mixtral import MixtralConfig
from gnomon.plans import SavedRule

MODULES = ("layernorm", "mlp", "mla_up_proj", "moe_act", "moe", "shared_experts")
"""Beside `core_attn`, which the preset `selective` is."""
MLA_UP_PROJ = ("*kv_b_proj*", "*q_b_proj*", "*_nope", "*.q_pe", "*_rotary", "*.q", "*.k", "*.v")
"""Queries, keys and values as latent attention reads them, and what they are made of
(multi_latent_attention.py `qkv_up_proj_and_rope_apply`)."""
MLP = ("mlp.*",)
"""A dense feed-forward; in mixtures that of their dense layers, and of no other."""
SHARED = ("*shared_expert*",)
"""A shared expert with its gate (moe/moe_layer.py `shared_experts_compute`, under `tensor_parallel.checkpoint`)."""


def module_rules(names: Sequence[str], model: object) -> tuple[tuple[SavedRule, ...], tuple[str, ...]]:
    """(rules, names that are not understood) of modules by name; one that the model lacks changes nothing."""
    by_name = {name: _rules(name, model) for name in names}
    unknown = tuple(name for name, rules in by_name.items() if rules is None)
    return tuple(rule for rules in by_name.values() for rule in rules or ()), unknown


def modules_of(rules: Sequence[SavedRule], model: object) -> tuple[str, ...] | None:
    """Modules whose rules these are, in their order; None where a rule is of none."""
    named = {matched[0]: name for name in MODULES if (matched := _rules(name, model))}
    return tuple(named[rule] for rule in rules) if all(rule in named for rule in rules) else None


def _rules(name: str, model: object) -> tuple[SavedRule, ...] | None:
    """Rules of one module, None for an unknown one."""
    latent, mixture = isinstance(model, DeepseekConfig), isinstance(model, DeepseekConfig | MixtralConfig)
    tensors: tuple[str, ...] = ()
    calls = "*"
    if name == "layernorm":
        tensors = ("ln_1*", "ln_2*") if isinstance(model, GptConfig) else ("*_layernorm*",)
    elif name == "mlp":
        dense = model.num_dense_layers if isinstance(model, DeepseekConfig) else 0
        tensors = MLP if dense or not mixture else ()
        calls = f"layers[0:{dense}]" if dense else "*"
    elif name == "mla_up_proj":
        tensors = MLA_UP_PROJ if latent else ()
    elif name == "moe_act":
        tensors = ("*experts.act",) if mixture else ()
    elif name == "moe":  # router, dispatch, experts, combination and shared expert; its exchanges are made again
        path = model.moe_path if isinstance(model, MixtralConfig) else "mlp"
        tensors = (f"{path}.*",) if mixture else ()
        if isinstance(model, DeepseekConfig) and model.num_dense_layers:
            calls = f"layers[{model.num_dense_layers}:{model.num_layers}]"
    elif name == "shared_experts":
        tensors = SHARED if isinstance(model, DeepseekConfig) and model.num_shared_experts else ()
    else:
        return None
    return (SavedRule(calls=calls, tensors=tensors, action="recompute"),) if tensors else ()
