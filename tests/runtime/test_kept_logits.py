"""What is logits of what autograd keeps: the one tensor of the loss, also where hidden states are as wide."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.plain_llama import Llama  # noqa: E402

from gnomon.models.llama import llama_mini  # noqa: E402
from gnomon.runtime.step.resident_bytes import measure_resident  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("vocab", [64, 96])
def test_hidden_states_as_wide_as_the_vocabulary_are_no_logits(vocab: int) -> None:
    """Two sequences of 16 tokens, hidden states of 64: cross-entropy keeps a number for each entry, in fp32."""
    config = replace(llama_mini(), hidden_size=64, vocab_size=vocab)
    model, ids = Llama(config, seed=0), torch.arange(34).reshape(2, 17) % vocab
    loss, result = measure_resident(
        lambda _: model(ids[:, :-1], ids[:, 1:]), vocab=vocab, loss=True, apart=list(model.parameters())
    )
    assert loss.ndim == 0 and result.logits == 2 * 16 * vocab * 4
    assert result.activations > 8 * 2 * 16 * 64 * 4  # of two layers
    hidden, inner = measure_resident(
        lambda _: model.model(ids[:, :-1]), vocab=vocab, loss=False, apart=list(model.parameters())
    )
    assert hidden.shape == (2, 16, 64) and inner.logits == 0
