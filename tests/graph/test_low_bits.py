"""What is said to need few bits can be rounded before, and results stay."""

from __future__ import annotations

import numpy as np

from gnomon.graph.low_bits import bits_needed
from gnomon.models.llama import llama, llama_tiny
from tests.graph.test_zeros import drawn, run


def rounded(x: np.ndarray) -> np.ndarray:
    """Eight bits with a scale for each row, in double."""
    top = np.abs(x).max(-1, keepdims=True)
    return np.where(top > 0, np.rint(x * 127 / np.where(top > 0, top, 1)) * top / 127, 0)


def test_a_decoders_layer_has_those_that_only_its_linears_read() -> None:
    graph = llama(llama_tiny())
    matrices = {name: 8 for name in graph.parameters() if name.endswith("_proj.weight")}
    made = bits_needed(graph, matrices, {})
    assert {name.partition(".")[2] for name in made if name.startswith("layers[0].")} == {
        "input_layernorm", "post_attention_layernorm", "self_attn.core", "mlp.act",
    }  # fmt: skip
    some = {name: 8 for name in matrices if "k_proj" not in name}  # one that reads a norm multiplies whole numbers
    assert {*made} - {*bits_needed(graph, some, {})} == {
        name for name in made if name.endswith("input_layernorm") and "layers" in name
    }
    assert bits_needed(graph, {}, {"model.embed_tokens.weight": 4}) == {"embed.x": 4}


def test_rounding_what_needs_few_bits_changes_no_result() -> None:
    """Of 60 drawn models, some of whose matrices round what they multiply: claimed tensors are rounded where they are
    made, too."""
    claimed = 0
    for seed in range(60):
        chance = np.random.default_rng(seed)
        graph = drawn(chance)
        numbers = {
            name: chance.standard_normal([atom.size or 1 for atom in one.atoms])
            for name, one in graph.parameters().items()
        }
        products = {
            name: 8 for name, x in numbers.items() if x.ndim == 2 and "table" not in name and chance.random() < 0.8
        }
        found = bits_needed(graph, products, {})
        claimed += len(found)
        ids = np.arange(5)[None]
        wanted, got = (run(graph, numbers, ids, {*products}, early, rounded) for early in (set(), {*found}))
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9, err_msg=str(seed))
    assert claimed > 100
