"""Tokens sent once to a node: how many nodes, what that costs, and DeepEP's own measurements."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.hardware import parse_cluster
from gnomon.models.deepseek import deepseek_v3, deepseek_v3_671b
from gnomon.models.hybrid import hybrid, nemotron_3_super
from gnomon.plans import Fp8, Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.prediction import predict
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.dispatch import dispatch_seconds, holders
from gnomon.prices.links import AxisLink, axis_link
from gnomon.software import Fact, Stack


def ep_link(nodes: int, *, device: str = "h100-sxm") -> AxisLink:
    """Experts over all devices of so many nodes of 8."""
    return axis_link(parse_cluster(f"{nodes}x8x{device}"), np.arange(8 * nodes)[None])


def counted(places: int, experts: int, topk: int, groups: int, chosen: int) -> float:
    """The mean over every choice that a token has."""
    size, ranks_reached = experts // groups, []
    for some in combinations(range(groups), chosen):
        inside = [e for e in range(experts) if e // size in some]
        ranks_reached += [len({e * places // experts for e in mine}) for mine in combinations(inside, topk)]
    return float(np.mean(ranks_reached))


@pytest.mark.parametrize(
    ("places", "experts", "topk", "groups", "chosen"),
    [(4, 8, 2, 1, 1), (2, 8, 3, 4, 2), (4, 12, 2, 2, 1), (4, 12, 3, 3, 2), (3, 12, 2, 4, 2), (8, 8, 4, 4, 2)],
)
def test_holders_are_the_mean_over_all_choices(places: int, experts: int, topk: int, groups: int, chosen: int) -> None:
    assert holders(places, experts, topk, groups, chosen) == pytest.approx(
        counted(places, experts, topk, groups, chosen)
    )


@settings(max_examples=60, deadline=None)
@given(
    place_bits=st.integers(0, 5), part=st.integers(1, 6), topk=st.integers(1, 6), split=st.sampled_from((1, 2, 4, 8))
)
def test_holders_are_bounded_and_grow(place_bits: int, part: int, topk: int, split: int) -> None:
    """One expert, one place; never more than places or experts; more with either; fewer in fewer groups."""
    places, experts = 2**place_bits, 32 * part
    result = holders(places, experts, topk)
    assert 1 - 1e-12 <= result <= min(places, topk) + 1e-12
    assert holders(places, experts, 1) == pytest.approx(1)
    assert holders(1, experts, topk) == 1
    assert result <= holders(places, experts, topk + 1) + 1e-12
    assert result <= holders(2 * places, experts, topk) + 1e-12
    if topk <= experts // split:
        within = [holders(places, experts, topk, split, chosen) for chosen in range(1, split + 1)]
        assert all(a <= b + 1e-9 for a, b in zip(within, within[1:], strict=False))
        assert within[-1] == pytest.approx(result)


def test_deepseek_v3_goes_to_four_nodes_at_most() -> None:
    """Of 8 nodes with a group each, 3.6 on average, where a free choice would visit 5.3."""
    assert holders(8, 256, 8, 8, 4) == pytest.approx(3.629, abs=1e-3)
    assert holders(8, 256, 8) == pytest.approx(5.295, abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.sampled_from((1, 2, 4, 8)),
    size=st.floats(1e4, 1e9),
    topk=st.integers(1, 16),
    device=st.sampled_from(("h100-sxm", "a100-sxm-80gb", "b200-sxm-180gb")),
)
def test_never_longer_than_the_plain_exchange_and_grows_with_copies(
    nodes: int, size: float, topk: int, device: str
) -> None:
    link = ep_link(nodes, device=device)
    copies = [{"nodes": holders(nodes, 64, t) / t, "ranks": holders(8 * nodes, 64, t) / t} for t in (topk, topk + 1)]
    few, more = (dispatch_seconds(size * t, link, **c) for t, c in zip((topk, topk + 1), copies, strict=True))
    assert few <= collective_seconds("all_to_all", size * topk, link)
    assert few <= more * (1 + 1e-9)
    both = dispatch_seconds(np.array([size * topk]), link, **copies[0])
    assert both[0] == pytest.approx(few)


def test_within_a_node_the_network_does_not_matter() -> None:
    link = ep_link(1)
    copies = {"nodes": 1 / 8, "ranks": holders(8, 256, 8) / 8}
    assert dispatch_seconds(1e8, link, **copies) == dispatch_seconds(
        1e8, replace(link, across_bytes_per_s=1.0), **copies
    )


@pytest.mark.parametrize(("nodes", "gb_per_s", "off"), [(2, 72.4, 0.10), (4, 62.9, 0.05), (8, 53.2, 0.05)])
def test_deepep_as_it_was_measured(nodes: int, gb_per_s: float, off: float) -> None:
    """8 H100 a node, 4096 tokens of 7168, top 8 of 256 experts in 4 nodes at most; GB/s (the mean of
    dispatch and combine where they differ) count each copy to a node."""
    groups = (8, 4) if nodes == 8 else (1, 1)
    visits, ranks = (holders(places, 256, 8, *groups) for places in (nodes, 8 * nodes))
    token = 7168 * 2
    result = dispatch_seconds(4096 * 8 * token, ep_link(nodes), nodes=visits / 8, ranks=ranks / 8)
    assert result == pytest.approx(4096 * visits * token / (gb_per_s * 1e9), rel=off)


def test_a_job_with_it_is_shorter_in_forward_and_backward() -> None:
    """DeepSeek-V3's layers, experts over 8 nodes; within one node far less is gained."""
    graph = deepseek_v3(replace(deepseek_v3_671b(), num_layers=4))
    fact = Fact(field="moe_dispatch", source="test", date="2026-11-22")
    waits: dict[tuple[int, str], dict[str, float]] = {}
    for ep in (8, 64):
        for how in ("all_to_all", "fused"):
            program = Stack(name="any", version="1").with_values((fact,), moe_dispatch=how)
            plan = Plan(
                mesh=Mesh(dp_shard=64, ep=ep), optimizer=Optimizer(zero=1), schedule=Schedule(micro_batch_size=1)
            )
            prediction = predict(graph, "8x8xh100-sxm", plan, Workload(global_batch_size=64, seq_len=4096), program)
            waits[ep, how] = {kind: prediction.pricing.compute.parts(kind, 0)["ep"] for kind in ("F", "B")}
    for kind in ("F", "B"):
        assert waits[64, "fused"][kind] < 0.5 * waits[64, "all_to_all"][kind]
        assert 0.4 * waits[8, "all_to_all"][kind] < waits[8, "fused"][kind] < waits[8, "all_to_all"][kind]


def test_hybrid_ep_gathers_the_routing_of_all_tokens_and_sends_weights_with_each_copy() -> None:
    """A byte for each token and expert, from every rank, before a forward; with each copy to a node four bytes for each
    of its 64 experts, forward and with the gradient."""
    graph = hybrid(replace(nemotron_3_super(), layers=("E",) * 2))
    fact = Fact(field="moe_dispatch", source="test", date="2026-11-23")
    plan = Plan(mesh=Mesh(dp_shard=64, ep=64), optimizer=Optimizer(zero=1), schedule=Schedule(micro_batch_size=1))
    waits: dict[str, dict[str, float]] = {}
    for how in ("fused", "hybrid_ep"):
        program = Stack(name="any", version="1").with_values((fact,), moe_dispatch=how)
        pricing = predict(graph, "8x8xb200-sxm", plan, Workload(global_batch_size=64, seq_len=8192), program).pricing
        waits[how] = {kind: pricing.compute.parts(kind, 0)["ep"] for kind in ("F", "B")}
        link, exposed = pricing.stages[0].links["ep"], pricing.rates[0].exposed
    copies = {name: holders(places, 512, 22) / 22 for name, places in (("nodes", 8), ("ranks", 64))}
    bare, more = (dispatch_seconds(8192 * 22 * row, link, **copies) for row in (1024 * 2, 1024 * 2 + 64 * 4))
    gathered = collective_seconds("all_gather", 8192 * 64 * 512, link)
    actual = {kind: waits["hybrid_ep"][kind] - waits["fused"][kind] for kind in ("F", "B")}
    assert actual["F"] == pytest.approx(2 * (gathered + more - bare) * exposed)
    assert actual["B"] == pytest.approx(2 * (more - bare) * exposed)


def test_fused_experts_have_no_activation_and_no_casts_between_products() -> None:
    """One kernel forward and one for each half of the backward fewer, and shorter; in 16 bits it is a loop."""
    graph = deepseek_v3(replace(deepseek_v3_671b(), num_layers=4))
    fact = Fact(field="moe_experts", source="test", date="2026-11-22")
    fused = Stack(name="any", version="1").with_values((fact,), moe_experts="fused")
    apart = Stack(name="any", version="1").with_values((fact,), moe_experts="looped")
    for narrow in (None, Fp8(recipe="mxfp8")):
        plan = Plan(
            mesh=Mesh(dp_shard=8, ep=8),
            optimizer=Optimizer(zero=1),
            schedule=Schedule(micro_batch_size=1),
            precision=Precision(fp8=narrow),
        )
        job = graph, "1x8xb200", plan, Workload(global_batch_size=8, seq_len=4096)
        one, two = predict(*job, fused).pricing, predict(*job, apart).pricing
        for name in ("forward", "input_grad", "weight_grad"):
            a, b = one.compute.phase(name, 0), two.compute.phase(name, 0)
            assert a.flops == b.flops
            if narrow is None:
                assert a.compute_s == b.compute_s and a.kernels == b.kernels
            else:
                assert a.compute_s < b.compute_s and (a.kernels < b.kernels or name == "weight_grad")
