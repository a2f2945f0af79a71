"""Language models inside other configs: what is absent there is the class's, and what was left out is said."""

from __future__ import annotations

from typing import Any

import pytest

from gnomon.errors import CatalogueError, InputError
from gnomon.formats.huggingface.read import from_hf_config
from gnomon.models.presets import model

SCALED = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
GEMMA_27B = {
    "model_type": "gemma3_text",
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 168,
    **SCALED,
}
GEMMA_4B = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    **SCALED,
}
QWEN_VL = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 151655,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 32, "hidden_size": 1280},
    "vocab_size": 152064,
}


@pytest.mark.parametrize(("text", "preset"), [(GEMMA_27B, "gemma-3-27b"), (GEMMA_4B, "gemma-3-4b")])
def test_gemma_3_as_it_is_published_leaves_sizes_to_its_class(text: dict[str, Any], preset: str) -> None:
    """The files of the hub give no vocabulary, and that of 4B no heads. The preset has no room for 64 more tokens."""
    result = from_hf_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "m")
    assert result.graph.num_parameters() == model(preset).num_parameters() + 64 * text["hidden_size"]
    assert "vocab_size 262,208" in result.notes[1]
    assert ("num_attention_heads 8" in result.notes[1]) == (preset == "gemma-3-4b")


def test_llava_names_its_vicuna_by_vocabulary_alone() -> None:
    """7.06 B in the checkpoint, of which 6.74 are the language model's."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    result = from_hf_config({"model_type": "llava", "text_config": text}, "m")
    assert result.graph.num_parameters() == 6_738_415_616 + 2 * 64 * 4096  # Llama 2 7B, and 64 tokens more


def test_sizes_are_required_where_no_config_is_around() -> None:
    with pytest.raises(InputError, match="missing key 'vocab_size'"):
        from_hf_config(GEMMA_27B, "m")


def test_a_flat_file_of_images_and_text_is_read_as_its_text() -> None:
    result = from_hf_config(QWEN_VL, "m")
    assert result.graph.num_parameters() == model("qwen2.5-7b").num_parameters()
    assert result.notes == (
        "only its language model (qwen2): what reads images or sound, and its projector, are left out",
    )


def test_internvl_says_llm_config() -> None:
    text = {key: value for key, value in QWEN_VL.items() if key not in ("vision_config", "image_token_id")}
    whole = {"model_type": "internvl_chat", "llm_config": {**text, "model_type": "qwen2"}}
    assert from_hf_config(whole, "m").graph.num_parameters() == model("qwen2.5-7b").num_parameters()


def test_a_language_model_that_nobody_reads_is_named_with_what_holds_it() -> None:
    with pytest.raises(CatalogueError, match="model_type 'aria' has no reader"):
        from_hf_config({"model_type": "aria", "text_config": {"model_type": "aria_text"}}, "m")
