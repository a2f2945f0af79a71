"""Configs of hybrids: the published files give the published counts.

The facts are those of the public config.json files; the counts those of the models' pages.
"""

from __future__ import annotations

from typing import Any

import pytest

from gnomon.errors import CatalogueError, InputError
from gnomon.formats.huggingface.hybrids import HYBRIDS
from gnomon.formats.huggingface.read import HfModel, from_hf_config

NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON = {
    "hybrid_override_pattern": NANO,
    "num_hidden_layers": 52,
    "hidden_size": 2688,
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "use_conv_bias": True,
    "intermediate_size": 1856,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
MAMBA = {
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
# model_type -> facts, parameters in billions, how near the page is
PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "nemotron_h": (NEMOTRON, 31.6, 0.05),
    "mamba2": (
        {
            "num_hidden_layers": 64,
            "hidden_size": 2560,
            "vocab_size": 50288,
            "num_heads": 80,
            "head_dim": 64,
            "n_groups": 1,
            "state_size": 128,
            "tie_word_embeddings": True,
        },
        2.7,
        0.05,
    ),
    "bamba": (
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attn_layer_indices": [9, 18, 27],
            **MAMBA,
        },
        9.78,
        0.01,
    ),
    "granitemoehybrid": (
        {
            "num_hidden_layers": 40,
            "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
            "hidden_size": 4096,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "vocab_size": 100352,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "tie_word_embeddings": True,
            **MAMBA,
        },
        32.2,
        0.05,
    ),
    "llama4_text": (
        {
            "num_hidden_layers": 48,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "vocab_size": 202048,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
        },
        107.77,  # Scout's 109 B without its image encoder
        0.01,
    ),
}


def read(kind: str, **changes: Any) -> HfModel:
    values = {"model_type": kind, **PUBLISHED[kind][0], **changes}
    return from_hf_config({key: value for key, value in values.items() if value != "absent"}, "m")


def test_every_reader_is_tried() -> None:
    assert set(PUBLISHED) == {one.name for one in HYBRIDS}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_config_has_the_published_parameters(kind: str) -> None:
    _, billions, near = PUBLISHED[kind]
    assert read(kind).graph.num_parameters() / 1e9 == pytest.approx(billions, abs=near)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_key_that_nobody_understands_is_named(kind: str) -> None:
    assert "use_magic = True: no reader knows this key; not accounted for" in read(kind, use_magic=True).notes


def test_maverick_has_mixtures_in_every_second_layer() -> None:
    """400.7 B of 401.6 are its language model's."""
    graph = read("llama4_text", num_local_experts=128, interleave_moe_layer_step=2).graph
    assert graph.num_parameters() / 1e9 == pytest.approx(400.7, abs=0.1)


def test_a_model_of_images_and_text_is_its_language_model() -> None:
    text = {"model_type": "llama4_text", **PUBLISHED["llama4_text"][0]}
    result = from_hf_config({"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 1408}}, "m")
    assert result.graph.num_parameters() == read("llama4_text").graph.num_parameters()
    assert result.notes[0].startswith("only its language model (llama4_text)")


def test_a_language_model_may_be_tied_from_outside() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "qwen2_5_vl_text", "num_key_value_heads": 2, "vocab_size": 256, **sizes}
    outer = {"model_type": "qwen2_5_vl", "text_config": text}
    whole, tied = (
        from_hf_config({**outer, "tie_word_embeddings": t}, "m").graph.num_parameters() for t in (False, True)
    )
    assert whole - tied == 256 * 64


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"model_type": "qwen3_next"}, "gated DeltaNet"),
        ({"model_type": "new_vl", "text_config": {"model_type": "new_text"}}, "has no reader"),
        ({"model_type": "falcon_h1"}, "side by side"),
    ],
)
def test_models_that_are_not_described_say_why(values: dict[str, Any], why: str) -> None:
    with pytest.raises(CatalogueError, match=why):
        from_hf_config(values, "m")


def test_layers_by_name_or_by_letter() -> None:
    names = {"M": "mamba", "E": "moe", "*": "attention"}
    listed = read("nemotron_h", hybrid_override_pattern="absent", layers_block_type=[names[c] for c in NANO])
    assert listed.graph.num_parameters() == read("nemotron_h").graph.num_parameters()


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("nemotron_h", "hybrid_override_pattern", "MXM"),
        ("nemotron_h", "use_bias", True),
        ("bamba", "attn_layer_indices", [40]),
        ("granitemoehybrid", "layer_types", ["attention", "lstm"]),
        ("mamba2", "rms_norm", False),
    ],
)
def test_what_is_not_described_is_refused(kind: str, key: str, value: object) -> None:
    with pytest.raises(InputError):
        read(kind, **{key: value})
