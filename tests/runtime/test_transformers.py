"""Models read from a config.json compute what transformers computes: logits, loss and every gradient, in float64.

A sample; `python benchmarks/runtime/models.py` prints every model type that Gnomon reads and transformers has.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")
pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from runtime.hf_models import compare  # noqa: E402

pytestmark = pytest.mark.torch

LIMIT = 1e-9
SAMPLE = (
    "llama (llama3 rotary)",
    "phi3 (longrope)",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "granite",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "bert",
    "t5",
    "vit",
    "bloom",
    "mpt",
    "mamba2",
    "bamba",
    "nemotron_h",
    "granitemoehybrid",
)


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_model_computes_what_transformers_computes(kind: str, tmp_path: Path) -> None:
    comparison = compare(kind, tmp_path)
    assert not comparison.refusal
    assert comparison.logits < LIMIT and comparison.loss < LIMIT and comparison.gradient < LIMIT, comparison
