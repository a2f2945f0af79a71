"""Names of models: of presets in any case, and of the Hugging Face hub."""

from __future__ import annotations

import pytest

from gnomon.errors import CatalogueError
from gnomon.models.presets import HUB_IDS, PRESETS, known_name


def test_ids_of_the_hub_are_known() -> None:
    assert set(HUB_IDS) <= set(PRESETS)
    for name, ids in HUB_IDS.items():
        for hub_id in ids:
            assert {known_name(entry) for entry in (hub_id, hub_id.upper(), hub_id.rpartition("/")[2])} == {name}


def test_case_does_not_matter() -> None:
    assert all(known_name(name.upper()) == name for name in PRESETS)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("google/gemma-2-2b-it", "gemma-2-2b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
    ],
)
def test_tuned_weights_have_the_same_sizes(asked: str, name: str) -> None:
    assert known_name(asked) == name


@pytest.mark.parametrize("other", ["mistralai/Mistral-7B-v0.3", "meta-llama/Llama-3.1-9B", "nobody/Llama-3.1-8B"])
def test_other_models_are_not_taken_for_these(other: str) -> None:
    with pytest.raises(CatalogueError, match="unknown model"):
        known_name(other)


def test_another_number_is_another_model_and_no_slip() -> None:
    with pytest.raises(CatalogueError, match=r"unknown model 'Qwen/Qwen9-7B'; "):
        known_name("Qwen/Qwen9-7B")
    with pytest.raises(CatalogueError, match="did you mean 'Qwen/Qwen3-8B'"):
        known_name("Qwen/Qwen3-8")
