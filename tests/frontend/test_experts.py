"""Ranks divide the experts of a captured model: it trains as its module does, and what is exchanged is exact."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from frontend.mixture import BASE, EXPERTS, SETTINGS, WORKLOAD, Mixture, batches, capture, module, plans, run  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

import gnomon  # noqa: E402
from gnomon.errors import PlanError  # noqa: E402
from gnomon.graph import EAGER, Dtypes, Graph, Setting, graph_work, numel, with_dispatch  # noqa: E402
from gnomon.plans import Layout, Mesh, Workload  # noqa: E402
from gnomon.runtime.processes.launch import launch  # noqa: E402
from gnomon.sharding import shard_graph  # noqa: E402

pytestmark = pytest.mark.torch

SIZES = {"batch": 3, "seq": 5}
FP32 = Dtypes(param="fp32", compute="fp32")


def plain(way: str) -> tuple[list[float], dict[str, Tensor]]:
    model = module(way)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay
    )
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters())


def test_a_captured_mixture_trains_with_divided_experts_as_its_module() -> None:
    by_rank = launch(run, 2)
    for way in ("gathered", "turned"):
        wanted, weights = plain(way)
        held = sum(x.numel() for name, x in weights.items() if name.startswith("layers."))
        for name in plans(way):
            losses = [sum(by_rank[rank][f"{way} {name}"][0][step] for rank in by_rank) for step in range(len(wanted))]
            assert losses == pytest.approx(wanted, rel=1e-9), (way, name)
            assert {by_rank[rank][f"{way} {name}"][2] for rank in by_rank} == {held // 2}, (way, name)
        for rank in by_rank:
            trained = by_rank[rank][f"{way} ep"][1]
            assert set(trained) == set(weights)
            for own, x in weights.items():
                assert torch.allclose(trained[own].view(x.shape), x, rtol=1e-9, atol=1e-9), (way, own)


def matrix_flops(graph: Graph) -> object:
    setting = Setting(sizes=SIZES, dtypes=FP32, causal_flops="full")
    return graph_work(graph, EAGER, setting).total.matmul_flops


def products(graph: Graph) -> list[tuple[str, ...]]:
    return [(op.kind, *sorted(op.contracts)) for block in graph.blocks for op in block.ops if op.contracts]


@given(
    ep=st.sampled_from([1, 2, 4]),
    chosen=st.integers(1, 3),
    width=st.sampled_from([8, 12, 16]),
    inner=st.sampled_from([20, 24, 28]),
    way=st.sampled_from(["gathered", "sorted", "turned"]),
)
@settings(max_examples=6, deadline=None)
def test_divided_experts_cost_what_their_rows_do(ep: int, chosen: int, width: int, inner: int, way: str) -> None:
    graph = capture(Mixture(way, experts=EXPERTS, chosen=chosen, width=width, inner=inner)).graph
    routed = with_dispatch(graph)
    assert matrix_flops(routed) == matrix_flops(graph)
    assert routed.parameters().keys() == graph.parameters().keys()
    sharded = shard_graph(routed, Layout(), Mesh(dp_shard=4, ep=ep), SIZES, FP32)
    tokens = SIZES["batch"] * SIZES["seq"]
    for block in sharded.values():
        experts = [t for t in block.block.parameters if t.dims[0].name == "experts"]
        assert [block.local_elements[t.name] * ep for t in experts] == [numel(t.dims, {}) for t in experts]
        moved = [collective for collective in block.collectives if collective.axis == "ep"]
        mixtures = sum(op.op.kind == "combine" for op in block.ops) if ep > 1 else 0
        assert [collective.kind for collective in moved] == ["all_to_all"] * (4 * mixtures)  # out and back, both ways
        assert {collective.bytes for collective in moved} <= {tokens * chosen * width * 4}


def test_rows_that_are_sorted_by_expert_give_the_same_ops_as_gathered_weights() -> None:
    gathered, in_order = (with_dispatch(capture(Mixture(way)).graph) for way in ("gathered", "sorted"))
    kinds = [[op.kind for block in graph.blocks for op in block.ops] for graph in (gathered, in_order)]
    assert kinds[0] == kinds[1]
    assert [kinds[0].count(kind) for kind in ("dispatch", "grouped_linear", "combine")] == [2, 4, 2]
    assert products(gathered) == products(in_order)


def test_the_search_looks_at_plans_that_divide_experts() -> None:
    graph = capture(Mixture("gathered", experts=8, width=256, inner=512)).graph
    work = Workload(global_batch_size=8, seq_len=8)
    fixed = {"tp": 1, "cp": 1, "pp": 1, "dp_replicate": 1, "zero": 2, "recompute": "none", "micro_batch_size": 1}
    best = {}
    for ep in (None, 1, 4):
        asked = fixed if ep is None else {**fixed, "ep": ep}
        best[ep] = gnomon.plan(graph, "1x8xh100-sxm", work, fixed=asked, top=1).best[0]
    assert [best[ep].plan.mesh.ep for ep in (1, 4)] == [1, 4]
    assert best[None].step_s <= min(best[1].step_s, best[4].step_s)
    again = gnomon.predict(graph, "1x8xh100-sxm", best[4].plan, work)
    assert again.step_s == best[4].step_s


class Peeking(Mixture):
    """Rows of experts are also compared with each other, which a rank that holds some of them cannot."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        layer, x = self.layers[0], self.embed(ids).flatten(0, 1)
        weights, chosen = self.routers[0](x).softmax(-1).topk(self.chosen, dim=-1)
        rows = x.repeat_interleave(self.chosen, dim=0)
        wide = torch.bmm(layer.up[chosen.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1)
        return (wide.cumsum(0).mean() + weights.sum()).reshape(())


def test_what_else_happens_to_rows_of_experts_is_named_with_its_line() -> None:
    graph = capture(Peeking()).graph
    assert with_dispatch(graph) is graph
    with pytest.raises(PlanError, match=r"ep x etp = 2, .*\(\S*test_experts\.py:\d+\)"):
        gnomon.predict(graph, "1x8xh100-sxm", BASE, WORKLOAD)
