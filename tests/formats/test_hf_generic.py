"""Model types that one path reads by their keys: parameters are those of transformers 5.23 for the same sizes."""

from __future__ import annotations

from typing import Any

import pytest

from gnomon.errors import CatalogueError, InputError
from gnomon.formats.huggingface.generic import SHAPES
from gnomon.formats.huggingface.known import READERS, SAME_KEYS
from gnomon.formats.huggingface.read import from_hf_config

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 64,
    "shared_intermediate_size": 48,
    "sliding_window": 16,
    "d_model": 64,
    "ffn_dim": 96,
    "num_layers": 4,
    "attention_heads": 4,
}


def config_of(kind: str) -> dict[str, Any]:
    """A small config of a type, as transformers writes it with all its keys."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind]()
    for key, size in SMALL.items():
        if isinstance(getattr(config, key, None), int) or key == "head_dim" and hasattr(config, key):
            setattr(config, key, size)
    for key in [name for name in vars(config) if name.endswith("token_id") and getattr(config, name) is not None]:
        setattr(config, key, 1)
    types = getattr(config, "layer_types", None)
    if isinstance(types, list):
        config.layer_types = types[:4]
    if isinstance(getattr(config, "mlp_layer_types", None), list):
        config.mlp_layer_types = config.mlp_layer_types[:4]
    values: dict[str, Any] = config.to_dict()
    return {**values, "model_type": kind}


@pytest.mark.parametrize("kind", SHAPES)
def test_parameters_are_those_of_transformers(kind: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    values = config_of(kind)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**values))
    result = from_hf_config(values, kind)
    assert result.graph.num_parameters() == sum(p.numel() for p in model.parameters())
    assert not [note for note in result.notes if "no reader knows" in note and "bias" in note]


@pytest.mark.parametrize(("kind", "like"), SAME_KEYS.items())
def test_types_of_the_same_keys_are_the_same_network(kind: str, like: str) -> None:
    assert like in READERS and kind not in READERS
    values = config_of(like)
    result = from_hf_config({**values, "model_type": kind}, kind)
    assert result.graph.num_parameters() == from_hf_config(values, like).graph.num_parameters()


def test_a_window_that_nothing_places_is_refused() -> None:
    values = {**config_of("helium"), "sliding_window": 8}
    with pytest.raises(InputError, match="which layers have it is not known"):
        from_hf_config(values, "x")


def test_a_type_that_keys_do_not_say_names_the_way_on() -> None:
    with pytest.raises(CatalogueError, match=r"'reformer' has no reader.*gnomon.capture takes its PyTorch module"):
        from_hf_config({"model_type": "reformer"}, "x")
