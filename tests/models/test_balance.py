"""The loss that balances experts: what it adds to a graph, to its collectives and its prediction; equal to the formula.

Equality with transformers, alone and under plans, is in tests/runtime/test_grid.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gnomon
from gnomon.errors import GraphError, PlanError
from gnomon.formats.huggingface.read import read_hf_config
from gnomon.graph import BF16, Graph
from gnomon.graph.outputs import losses, without_loss
from gnomon.hardware import parse_cluster
from gnomon.models.balance import BEFORE, LOAD, with_balance_loss
from gnomon.models.presets import model
from gnomon.plans import Layout, Mesh, Plan, Schedule, Workload, check
from gnomon.sharding import shard_block

MIXTRAL = model("mixtral-8x7b")
BALANCED = with_balance_loss(MIXTRAL, 0.02)
CONFIG = Path(__file__).parents[1] / "formats/configs/mixtral-8x7b-v0.1.json"
SIZES = {"batch": 1, "seq": 64}


def read(**changes: object) -> tuple[Graph, tuple[str, ...]]:
    found = read_hf_config(json.dumps(json.loads(CONFIG.read_text("utf-8")) | changes), "mixtral")
    return found.graph, found.notes


def test_the_load_goes_from_layer_to_layer_and_ends_in_a_second_loss() -> None:
    assert losses(BALANCED) == ("head.loss", "head.balance")
    assert [(call.name, call.repeat) for call in BALANCED.calls] == [
        ("embed", 1), ("layers_first", 1), ("layers", 31), ("head", 1),
    ]  # fmt: skip
    assert [layer.label for layer in BALANCED.layers()] == [layer.label for layer in MIXTRAL.layers()]
    assert BALANCED.parameters() == MIXTRAL.parameters()
    assert BEFORE not in BALANCED.block("layers_first").inputs and BEFORE in BALANCED.block("layers").inputs
    assert without_loss(BALANCED).outputs == without_loss(MIXTRAL).outputs


def test_a_config_that_asks_for_it_has_it() -> None:
    assert losses(read(output_router_logits=True)[0]) == ("head.loss", "head.balance")
    assert read(output_router_logits=True)[0].block("head").op("balance").attr("coefficient", 0.0) == 0.02
    assert losses(read()[0]) == ("head.loss",)


def test_ranks_with_parts_of_the_tokens_add_the_load_up_and_its_gradient() -> None:
    """Two numbers for each expert, in fp32, over cp and over tp under sequence parallelism."""
    layout, mesh = Layout(sequence_parallel=True), Mesh(cp=2, tp=2, ep=4)
    layer = shard_block(BALANCED.block("layers"), layout, mesh, SIZES, BF16)
    added = {c.axis: c.bytes for c in layer.forward if c.kind == "all_reduce" and "load" in c.tensor}
    assert added == {"cp": 2 * 8 * 4, "tp": 2 * 8 * 4}
    assert not [c for c in layer.backward if "load" in c.tensor]
    head = shard_block(BALANCED.block("head"), layout, mesh, SIZES, BF16)
    assert {c.axis for c in head.backward if c.tensor == LOAD} == {"cp", "tp"}


def test_it_costs_little_and_something() -> None:
    plan = Plan(mesh=Mesh(pp=2, dp_shard=4, ep=4), schedule=Schedule(num_microbatches=4))
    cluster, batch = parse_cluster("1x8xh100-sxm-80gb"), Workload(global_batch_size=32, seq_len=4096)
    without, given = (gnomon.predict(graph, cluster, plan, batch).step_s for graph in (MIXTRAL, BALANCED))
    assert without < given < 1.01 * without


def test_what_has_no_routers_and_what_divides_the_head_is_refused() -> None:
    with pytest.raises(GraphError, match="has no routers"):
        with_balance_loss(model("llama-3.2-1b"), 0.01)
    plan = Plan(mesh=Mesh(pp=2), schedule=Schedule(vocabulary="vocab_1", num_microbatches=4))
    with pytest.raises(PlanError, match="the loss that balances experts is whole"):
        check(plan, BALANCED, None, Workload(global_batch_size=8, seq_len=64))
