"""Strategies for every layer on heterogeneous devices: what a step takes; the best of small spaces is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search.mixed_spaces import node
from search.spaces import model

from gnomon.hardware import Cluster, NodeGroup
from gnomon.plans import Optimizer, Plan, Precision, Workload
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.mixed import by_speed as side_by_side
from gnomon.search.mixed.bounds import LayerTables
from gnomon.search.mixed.heterog import by_speed, options, search, seeds, whole
from gnomon.search.mixed.layer_strategies import LayerChoice, LayerCosts, LayerPlay, resharded
from gnomon.search.mixed.plan_mixed import plan_mixed
from gnomon.search.mixed.space import MixedPoint, make_mixed_space


class _Fixed:
    """Draws nothing: devices as the catalogue has them, one network port."""

    def choice(self, values: tuple[float, ...]) -> float:
        return values[0]


def cluster(*kinds: tuple[str, int], gbit: float = 25) -> Cluster:
    """Nodes of so many devices, over so many Gbit/s."""
    groups = []
    for name, count in kinds:
        made = node(name, count, _Fixed())  # type: ignore[arg-type]
        assert made.nic is not None
        groups.append(NodeGroup(node=replace(made, nics=1, nic=replace(made.nic, bytes_per_s=gbit * 1e9 / 8))))
    return Cluster(name="unlike", groups=tuple(groups))


BASE = Plan(precision=Precision(param="fp16", compute="fp16"), optimizer=Optimizer(clip=False))
FAST_AND_SLOW = cluster(("a100-sxm-40gb", 2), ("v100-sxm-32gb", 2))


@cache
def play(machines: Cluster, layers: int = 3, batch: int = 8, kind: str = "gpt", room: float = 1.0) -> LayerPlay:
    """Of a tiny model. room: share of its memory that a device may hold."""
    graph, work = model(kind, layers), Workload(global_batch_size=batch, seq_len=512)
    kinds = make_mixed_space(graph, machines, work, base=BASE).kinds
    tables = LayerTables(graph, machines, work, PLAIN_STACK, BASE, kinds)
    crossing = (512 * 2.0 * 64,) * tables.num_layers
    costs = LayerCosts(tables=tables, sequences=batch, microbatches=1, recompute="none", crossing_bytes=crossing)
    return LayerPlay(costs, [int(room * kind.node.device.memory_bytes) for kind in kinds])


counts = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(counts, counts)
def test_every_sequence_goes_where_the_next_layer_wants_it(left: list[int], right: list[int]) -> None:
    total = max(sum(left), sum(right))
    left[-1] += total - sum(left)
    right[-1] += total - sum(right)
    before = LayerChoice(tuple(range(len(left))), tuple(left))
    after = LayerChoice(tuple(range(10, 10 + len(right))), tuple(right))
    sent = resharded(before, after)
    for devices, shares, end in ((before.devices, left, 0), (after.devices, right, 1)):
        for device, share in zip(devices, shares, strict=True):
            assert sum(entry[2] for entry in sent if entry[end] == device) == share
    assert resharded(before, before) == [(device, device, share) for device, share in zip(*before[:2], strict=True)]


def test_a_step_on_one_device_and_over_two_is_the_sum_of_its_parts() -> None:
    one = play(FAST_AND_SLOW)
    costs = one.costs
    forward, back, _, elements = costs.layers[0]
    alone = (LayerChoice((0,), (8,)),) * costs.tables.num_layers
    update = float(costs.tables.update_s(0, float(elements.sum()), 1))
    assert one.step_s(alone) == pytest.approx(float(forward[:, 8].sum() + back[:, 8].sum()) + update)
    split = (*alone[:1], *(LayerChoice((1,), (8,)),) * (costs.tables.num_layers - 1))
    wire = one.wire_s("send_recv", 8 * costs.crossing_bytes[0], (0, 1))
    last = float(costs.tables.update_s(0, float(elements[0]), 1))
    assert one.step_s(split) == pytest.approx(float(forward[:, 8].sum() + back[:, 8].sum()) + 2 * wire + last)


def test_shares_by_speed_beat_equal_ones_and_the_search_beats_all_seeds() -> None:
    for batch in (8, 24):
        one = play(FAST_AND_SLOW, batch=batch)
        steps = {name: one.step_s(strategy) for name, strategy in seeds(one.costs)}
        if batch == 24:
            assert steps["all, by speed, ring"] < steps["all, equal, ring"]
        shares = by_speed(one.costs, (0, 1, 2, 3))
        assert sum(shares) == batch and shares[0] >= shares[2]
        found = search(one, tries=200)
        assert found.step_s <= min(steps.values()) == found.seed_s


@pytest.mark.parametrize(("gbit", "kind"), [(1, "gpt"), (10, "tied")])
def test_the_search_finds_the_best_of_all_strategies(gbit: float, kind: str) -> None:
    """Four layers (embedding and head counted), two devices, up to eight options each: all are played."""
    one = play(cluster(("a100-sxm-40gb", 1), ("v100-sxm-32gb", 1), gbit=gbit), layers=2, kind=kind)
    listed, layers = options(one.costs), one.costs.tables.num_layers
    every = {whole(one.costs, strategy) for strategy in product(listed, repeat=layers)}
    best = min(map(one.step_s, every))
    assert search(one).step_s == pytest.approx(best, rel=1e-12)


def test_what_does_not_fit_is_never_chosen() -> None:
    one = play(FAST_AND_SLOW, room=1e-9)
    assert search(one, tries=20).step_s == float("inf")


def test_uneven_data_parallelism_takes_what_a_prediction_of_it_says() -> None:
    """The same plan by both: the play has no launches of updates and no contention."""
    graph, work = model("gpt", 6), Workload(global_batch_size=16, seq_len=1024)
    space = make_mixed_space(graph, FAST_AND_SLOW, work, base=BASE)
    tables = LayerTables(graph, FAST_AND_SLOW, work, PLAIN_STACK, BASE, space.kinds)
    costs = LayerCosts(
        tables=tables, sequences=16, microbatches=1, recompute="none", crossing_bytes=(1.0,) * tables.num_layers
    )
    one = LayerPlay(costs, [2**60, 2**60])
    point = MixedPoint(
        "replicas", (0, 1), (1, 1), (space.num_layers,), (10, 6), 1, False, "none", 0, "one_f_one_b", ep=(1, 1)
    )
    predicted = predict(graph, FAST_AND_SLOW, space.plan(point), work, PLAIN_STACK).step_s
    played = one.step_s((LayerChoice((0, 1, 2, 3), (5, 5, 3, 3)),) * tables.num_layers)
    assert np.isclose(played, predicted, rtol=0.1)


def test_the_mixed_search_is_never_slower_than_shares_by_speed_however_few_it_tries() -> None:
    graph, work = model("gpt", 2), Workload(global_batch_size=8, seq_len=512)
    fixed = {"tp": 1, "cp": 1, "recompute": "none", "virtual_stages": 1}
    space = make_mixed_space(graph, FAST_AND_SLOW, work, base=BASE, fixed=fixed)
    tables = LayerTables(graph, FAST_AND_SLOW, work, PLAIN_STACK, BASE, space.kinds)
    listed = list(side_by_side.points(space, tables))
    assert {point.microbatches for point in listed} == {1, 2} and set(listed) <= set(space.points())
    assert all(point.shares[0] >= point.shares[1] for point in listed)
    steps = [predict(graph, FAST_AND_SLOW, space.plan(point), work, PLAIN_STACK).step_s for point in listed]
    assert plan_mixed(graph, FAST_AND_SLOW, work, base=BASE, fixed=fixed, tries=1).best[0].step_s <= min(steps)
