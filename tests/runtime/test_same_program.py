"""What really ran is the Program: the same actions in the same order, and the bytes that room sharding says.

Seen from outside (`traced`): torch's own functions are watched while a step runs.
"""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import jobs, parity, traced  # noqa: E402

from gnomon.graph import Dtypes  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Plan  # noqa: E402
from gnomon.sharding import parameter_collectives, shard_graph  # noqa: E402

pytestmark = pytest.mark.torch

GRAPH = llama(parity.CONFIG)
BYTES = [
    "tp", "tp and sp", "dp", "zero 1", "zero 2", "zero 3", "tp 4: two ranks a key head", "dp 2, shard 2",
]  # fmt: skip
MESSAGES = ["1f1b", "interleaved", "zero bubble v", "pp and dp", "pp and tp", "pp, tp and sp, v"]


@pytest.mark.parametrize("name", traced.ORDERS)
def test_actions_run_in_the_order_of_the_rows(name: str) -> None:
    for results in jobs.results(parity.PLANS[name].world_size).values():
        ran, rows, *_ = results.traced[name]
        assert ran == rows
        assert len(ran) > 4


@pytest.mark.parametrize("name", traced.ORDERS)
def test_as_many_activations_are_held_as_the_program_says(name: str) -> None:
    for results in jobs.results(parity.PLANS[name].world_size).values():
        held, foreseen = results.traced[name][3]
        assert held == foreseen > 0


@pytest.mark.parametrize("name", BYTES)
def test_collectives_have_the_bytes_that_sharding_says(name: str) -> None:
    plan = parity.PLANS[name]
    want = activation_collectives(plan) + gradient_collectives(plan)
    want["all_reduce", "all", plan.world_size, 8] += 1  # the global norm, a float64
    for results in jobs.results(plan.world_size).values():
        assert Counter(results.traced[name][2]) == +want


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_have_the_bytes_of_a_microbatch(name: str) -> None:
    """(sequences of a rank, seq, hidden) in float32, or this rank's tokens of them under sequence parallelism."""
    plan = parity.PLANS[name]
    rows = parity.WORKLOAD.global_batch_size // (plan.schedule.num_microbatches or 1) // plan.mesh.data_ranks
    tokens = parity.WORKLOAD.seq_len // (plan.mesh.tp if plan.layout.sequence_parallel else 1)
    want = rows * tokens * parity.CONFIG.hidden_size * 4
    for results in jobs.results(plan.world_size).values():
        sent = [call for call in results.traced[name][2] if call[0] in ("isend", "irecv")]
        assert len(sent) == sum(action.startswith(("SEND", "RECV")) for action in results.traced[name][1])
        assert {call[1:] for call in sent} == {("pp", 2, want)}


def sharded(plan: Plan) -> dict:  # type: ignore[type-arg]
    units = plan.schedule.num_microbatches or 1
    sizes = {
        "batch": parity.WORKLOAD.global_batch_size // units // plan.mesh.data_ranks,
        "seq": parity.WORKLOAD.seq_len,
    }
    return shard_graph(GRAPH, plan.layout, plan.mesh, sizes, Dtypes(param="fp32", compute="fp32"))


def activation_collectives(plan: Plan) -> Counter[traced.Call]:
    """Of one pipeline rank's layers and units."""
    found: Counter[traced.Call] = Counter()
    blocks = sharded(plan)
    for layer in GRAPH.layers():
        for collective in blocks[layer.call.block].collectives:
            axes = traced.named((collective.axis,), plan.mesh)
            found[collective.kind, axes, collective.ranks, collective.bytes] += plan.schedule.num_microbatches or 1
    return found


def gradient_collectives(plan: Plan) -> Counter[traced.Call]:
    """Of parameters and gradients, added up over the layers that one row of the Program handles."""
    found: Counter[traced.Call] = Counter()
    blocks = sharded(plan)
    layers = GRAPH.layers()
    units = plan.schedule.num_microbatches or 1
    by_layer = plan.optimizer.zero == 3
    for part in [(layer,) for layer in layers] if by_layer else [layers]:
        sums: Counter[tuple[str, int, str, tuple[str, ...]]] = Counter()
        for layer in part:
            for c in parameter_collectives(blocks[layer.call.block], plan.mesh, plan.optimizer, parity.FP32):
                sums[c.kind, c.ranks, c.when, c.axes] += int(c.bytes)
        for (kind, ranks, when, axes), size in sums.items():
            often = units if when.startswith("before_f") or when.startswith("before_b") else 1
            if kind == "reduce_scatter" and plan.optimizer.zero >= 2:
                often = units
            if when == "before_backward" and part[-1].call.block == "head":
                often = 0  # the block that backward needs first stays gathered
            found[kind, traced.named(axes, plan.mesh), ranks, size] += often
    if by_layer:  # a block that is used again next in the same direction stays: the embedding, between two units
        embed = sharded_bytes(plan)
        found[embed] -= units - 1
    return found


def sharded_bytes(plan: Plan) -> traced.Call:
    """The gather of the embedding."""
    block = sharded(plan)["embed"]
    (gather, *_) = parameter_collectives(block, plan.mesh, plan.optimizer, parity.FP32)
    return gather.kind, traced.named(gather.axes, plan.mesh), gather.ranks, int(gather.bytes)
