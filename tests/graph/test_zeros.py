"""Zeros of weights reach other weights: a layer worked by hand. (`tests/runtime/test_compress.py`: results stay.)"""

from __future__ import annotations

from math import prod

import numpy as np

from gnomon.graph import Graph
from gnomon.graph.zeros import Mask, columns_read
from gnomon.models.llama import llama, llama_tiny

LAYER = "model.layers.0"
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
            "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def whole(graph: Graph) -> dict[str, Mask]:
    """Every matrix of the first layer, with nothing zero: (outputs, inputs)."""
    out = {}
    for name in MATRICES:
        sizes = [atom.size or 1 for atom in graph.parameters()[f"{LAYER}.{name}.weight"].atoms]
        inputs = prod(sizes[1:]) if name in ("self_attn.o_proj", "mlp.down_proj") else sizes[-1]
        out[name] = np.ones((prod(sizes) // inputs, inputs), np.bool_)
    return out


def idle(kept: dict[str, Mask], graph: Graph) -> dict[str, tuple[set[int], set[int]]]:
    """(rows, columns) that are idle as wholes and were kept, of matrices that have some."""
    made = columns_read(graph, {f"{LAYER}.{name}.weight": mask for name, mask in kept.items()})
    out = {}
    for name, mask in kept.items():
        after = made[f"{LAYER}.{name}.weight"]
        assert not (after & ~mask).any()
        rows, columns = (set(np.flatnonzero(mask.any(axis) & ~after.any(axis)).tolist()) for axis in (1, 0))
        if (mask & ~after).any():
            out[name] = rows, columns
    return out


def test_what_a_zero_row_or_column_makes_idle() -> None:
    config = llama_tiny()
    graph, width = llama(config), config.head_dim
    shared = config.num_heads // config.num_kv_heads
    assert shared > 1
    kept = whole(graph)
    assert idle(kept, graph) == {}
    kept["mlp.gate_proj"][5] = False  # the gate is 0 there: what it is times, and what reads it
    kept["mlp.down_proj"][:, 3] = False  # nobody reads it: what makes it
    kept["self_attn.v_proj"][1] = False  # of the first head of values, which `shared` heads have
    columns = {head * width + 1 for head in range(shared)}
    assert idle(kept, graph) == {
        "mlp.gate_proj": ({3}, set()), "mlp.up_proj": ({3, 5}, set()), "mlp.down_proj": (set(), {5}),
        "self_attn.o_proj": (set(), columns),
    }  # fmt: skip
    kept = whole(graph)
    kept["self_attn.o_proj"][:, 0] = False  # one of the heads that share it reads it still
    assert idle(kept, graph) == {}
    for head in range(shared):
        kept["self_attn.o_proj"][:, head * width] = False
    assert idle(kept, graph) == {"self_attn.v_proj": ({0}, set())}


def test_it_goes_on_until_nothing_changes() -> None:
    """No result reads a layer's attention: values, and then queries and keys, are idle; what others read is not."""
    graph = llama(llama_tiny())
    kept = whole(graph)
    kept["self_attn.o_proj"][:] = False
    made = idle(kept, graph)
    assert set(made) == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    assert all(len(rows) == len(kept[name]) for name, (rows, _) in made.items())
