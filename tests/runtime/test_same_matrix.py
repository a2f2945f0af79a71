"""What really ran is the Program where ranks divide sequences and experts: actions, bytes, products and peak memory.

As `test_same_program` and `test_accounts`, on two processes. Rings go in zig-zag order, under which ranks work alike.
Experts take what the router chose, so bytes and products are compared over all ranks together, and memory more widely.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import accounted, traced  # noqa: E402
from runtime.parity import FP32, SP, schedule  # noqa: E402
from runtime.ranks import launch  # noqa: E402

import gnomon  # noqa: E402
from gnomon.graph import Graph  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.models.mixtral import MixtralConfig, mixtral  # noqa: E402
from gnomon.plans import Layout, Mesh, Optimizer, Plan  # noqa: E402
from gnomon.prediction import Prediction  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.sharding.context import chunks_of  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

LLAMA = llama(accounted.CONFIG)
MIXTRAL = mixtral(
    MixtralConfig(
        name="mixture", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=4,
        experts_per_token=2, expert_ffn_size=96, vocab_size=256,
    )
)  # fmt: skip
TWO = schedule("one_f_one_b", 2)
GATHERED = Layout(context="all_gather")
CASES: dict[str, tuple[Graph, Plan]] = {
    "ring, zig-zag": (LLAMA, Plan(mesh=Mesh(cp=2), schedule=TWO)),
    "ring, contiguous": (LLAMA, Plan(mesh=Mesh(cp=2), schedule=TWO, layout=Layout(context_order="contiguous"))),
    "gathered, zig-zag": (LLAMA, Plan(mesh=Mesh(cp=2), schedule=TWO, layout=GATHERED)),
    "ring, zero 3": (LLAMA, Plan(mesh=Mesh(cp=2), schedule=TWO, optimizer=Optimizer(zero=3))),
    "experts": (MIXTRAL, Plan(mesh=Mesh(dp_shard=2, ep=2), schedule=TWO)),
    "experts over tp": (MIXTRAL, Plan(mesh=Mesh(tp=2, ep=2), schedule=TWO, layout=SP)),
    "slices of experts": (MIXTRAL, Plan(mesh=Mesh(dp_shard=2, etp=2), schedule=TWO)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Of one rank."""

    flops: int
    most: int
    """Bytes of tensors at the fullest moment of a step."""
    calls: list[traced.Call]
    actions: list[str]
    rows: list[str]


def run_all() -> dict[str, Ran]:
    return {name: _run(*case) for name, case in CASES.items()}


def _run(graph: Graph, plan: Plan) -> Ran:
    executor = Executor(graph, replace(plan, precision=FP32), accounted.WORKLOAD)
    with accounted.Products() as products:
        executor.step(accounted.batch())
        executor.synchronise()
    most = accounted.fullest_moment(executor)
    ids = torch.arange(8)[:, None].repeat(1, 65)
    with traced.watching(executor, ids) as trace:
        executor.step(ids)
    rows = traced.expected_actions(executor)
    executor.leave()
    return Ran(flops=products.flops, most=most, calls=trace.calls, actions=trace.actions, rows=rows)


@cache
def ran() -> dict[int, dict[str, Ran]]:
    return launch(run_all, 2)


@cache
def predicted(name: str) -> Prediction:
    graph, plan = CASES[name]
    plan = replace(plan, precision=FP32)
    return gnomon.predict(graph, "1x2xa100-sxm-80gb", plan, accounted.WORKLOAD, stack("gnomon"))


@pytest.mark.parametrize("name", CASES)
def test_actions_run_in_the_order_of_the_rows(name: str) -> None:
    for results in ran().values():
        assert results[name].actions == results[name].rows


@pytest.mark.parametrize("name", CASES)
def test_what_ranks_exchange_has_the_bytes_that_sharding_says(name: str) -> None:
    """Messages of a ring one by one; rows of experts over all ranks together. Slices of experts are gathered and added
    up by all-to-alls of as many bytes; how many rows each expert gets is told besides (int64)."""
    actual, (_, plan) = predicted(name), CASES[name]
    want, sums = Counter[tuple[str, int]](), Counter[str]()
    for layer in actual.stages[0].order:
        for c in layer.sharded.collectives:
            times = actual.pricing.count * c.steps
            if c.axis in ("ep", "etp"):
                sums["all_to_all"] += int(c.bytes) * times * 2  # of both ranks
            elif c.axis == "cp":
                want[c.kind, int(c.bytes)] += times
    got = Counter[str]()
    for results in ran().values():
        calls = [call for call in results[name].calls if call[2] == 2]
        if plan.mesh.cp > 1:
            inside = Counter((kind, size) for kind, axes, _, size in calls if axes == "cp")
            assert not want - inside and want
        got["all_to_all"] += sum(size for kind, *_, size in calls if kind == "all_to_all" and size > 1024)
    if sums:
        assert got == sums


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_graph(name: str) -> None:
    """Over all ranks. A ring computes what its chunks see, the diagonal as a square: the graph counts every pair."""
    actual = predicted(name)
    stage = actual.stages[0]
    want = 2 * actual.pricing.count * sum(stage.phase(p).flops for p in ("forward", "input_grad", "weight_grad"))
    got = [results[name].flops for results in ran().values()]
    _, plan = CASES[name]
    if plan.mesh.cp > 1:
        order, pairs = plan.layout.context_order, list[int]()
        chunks = 2 * 2 if order == "zigzag" else 2
        for rank in range(2):
            pairs.append(sum(query + 1 for query in chunks_of(rank, 2, order)))
        length = accounted.WORKLOAD.seq_len
        whole = 12 * 64 * length * length * 8 * accounted.CONFIG.num_layers  # of all pairs, forward and backward
        seen = whole * sum(pairs) // chunks**2
        assert sum(got) == want - whole + seen
        assert (got[0] == got[1]) == (order == "zigzag")
    else:
        assert sum(got) == want


@pytest.mark.parametrize("name", CASES)
def test_the_fullest_moment_is_as_predicted(name: str) -> None:
    (memory,) = predicted(name).memory
    want = memory.allocated_bytes - memory.by_class["workspace"]
    close = 0.03 if "experts" in name else 0.02
    for results in ran().values():
        assert results[name].most == pytest.approx(want, rel=close)
