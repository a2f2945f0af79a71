"""The slowest group of an axis: hand figures on known machines, and enumeration rank by rank on small mixed clusters.

H100: 450 GB/s inside a node of 8, 8 ports of 50 GB/s. A100 (p4de): 300 GB/s, 4 ports of 12.5 GB/s. V100 (DGX-1): 150
GB/s, 4 ports of 12.5 GB/s.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import InputError, UnpricedError
from gnomon.hardware import Cluster, parse_cluster
from gnomon.plans import Mesh
from gnomon.prices.links import AxisLink, axis_link

GB = 1e9
SPECS = ("3x8xh100-sxm", "2xaws-p4de+1x8xh100-sxm", "2x8xmi300x+1xaws-p4de", "1xdgx-1-v100-32gb+2xaws-p5", "4x4xl40s")
CLUSTERS = {spec: parse_cluster(spec) for spec in SPECS}


@pytest.mark.parametrize(
    ("spec", "groups", "nodes", "per_node", "inside", "across", "sharers"),
    [
        # One node: only NVLink counts.
        ("2x8xh100-sxm", [range(8), range(8, 16)], 1, 8, 450, 0, 1),
        ("2x8xh100-sxm", [[0, 1], [2, 3], [8, 9]], 1, 2, 450, 0, 1),
        # Two nodes, all 8 ranks of each in the one group: it has all 8 ports.
        ("2x8xh100-sxm", [range(16)], 2, 8, 450, 400, 1),
        # 8 groups with one rank a node: each has its own port.
        ("2x8xh100-sxm", [[i, i + 8] for i in range(8)], 2, 1, 0, 50, 8),
        # One such group alone: the other ports are idle, and not its own.
        ("2x8xh100-sxm", [[0, 8]], 2, 1, 0, 50, 1),
        # Two groups with 4 ranks a node: half the ports each.
        ("2x8xh100-sxm", [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]], 2, 4, 450, 200, 2),
        # 4 ports for 8 devices: 8 groups have half a port each, one group a whole one.
        ("2xaws-p4de", [[i, i + 8] for i in range(8)], 2, 1, 0, 6.25, 8),
        ("2xaws-p4de", [[0, 8]], 2, 1, 0, 12.5, 1),
        # 32 ports for 8 devices: four each.
        ("2xaws-p5", [[0, 8]], 2, 1, 0, 50, 1),
        # Groups inside a node do not use ports: the crossing group shares with none of them.
        ("2x8xh100-sxm", [[0, 8], [1, 2], [3, 4]], 2, 1, 0, 50, 1),
        # 3 ranks on a node and 1 on the other: the lone rank's port limits.
        ("2x8xh100-sxm", [[0, 1, 2, 8]], 2, 3, 450, 50, 1),
        # Mixed: the same group shape is slowest where the machine is.
        ("1x8xh100-sxm+1xaws-p4de", [range(8), range(8, 16)], 1, 8, 300, 0, 1),
        ("1x8xh100-sxm+1xaws-p4de", [range(16)], 2, 8, 300, 50, 1),
        # A mesh: 64 GB/s to each of 7 peers; four ranks reach three of them.
        ("8xmi300x", [range(8)], 1, 8, 448, 0, 1),
        ("8xmi300x", [range(4), range(4, 8)], 1, 4, 192, 0, 1),
    ],
)
def test_hand_figures(
    spec: str, groups: list[list[int]], nodes: int, per_node: int, inside: float, across: float, sharers: int
) -> None:
    width = max(len(g) for g in groups)
    link = axis_link(parse_cluster(spec), np.array([list(g) for g in groups if len(g) == width]))
    assert (link.ranks, link.nodes, link.ranks_per_node) == (width, nodes, per_node)
    assert link.inside_bytes_per_s == pytest.approx(inside * GB)
    assert link.across_bytes_per_s == pytest.approx(across * GB)
    assert link.sharers == sharers


def test_oversubscription_divides_what_leaves_a_node_only() -> None:
    flat = parse_cluster("2x8xh100-sxm")
    thin = replace(flat, oversubscription=4.0)
    both = np.arange(16)[None, :]
    assert axis_link(thin, both).across_bytes_per_s == axis_link(flat, both).across_bytes_per_s / 4
    assert axis_link(thin, both).inside_bytes_per_s == axis_link(flat, both).inside_bytes_per_s
    one = np.arange(8)[None, :]
    assert axis_link(thin, one) == axis_link(flat, one)


def test_a_message_goes_over_one_link() -> None:
    """One of seven links of a mesh; one port of a node whose ranks of the group have four."""
    mesh = axis_link(parse_cluster("8xmi300x"), np.arange(8)[None, :])
    assert mesh.pair_bytes_per_s == 64 * GB
    ring = axis_link(parse_cluster("2x8xh100-sxm"), np.array([[0, 1, 2, 3, 8, 9, 10, 11]]))
    assert (ring.across_bytes_per_s, ring.pair_bytes_per_s) == (200 * GB, 50 * GB)


@pytest.mark.parametrize(
    ("spec", "a", "b", "kind", "rate"),
    [
        ("4x8xh100-sxm", 0, 7, "nvlink4", 450),
        ("4x8xh100-sxm", 7, 8, "infiniband-ndr", 50),
        ("2xaws-p5", 0, 8, "efa-100", 50),  # four rails a device
        ("2xaws-p4d", 0, 8, "efa-100", 12.5),  # two devices share a port; alone, one has it
        ("4xmi300x", 0, 1, "xgmi-mi300x", 64),  # one of seven links; the others lead nowhere
        ("8xv100-sxm", 0, 1, "nvlink2", 25),
        ("2x8xa100-sxm-80gb+1x8xv100-sxm-32gb", 8, 16, "infiniband-edr", 12.5),  # the slower end
        ("18x4xgb200", 0, 71, "nvlink5", 900),  # trays of one rack
        ("8xl40s", 0, 1, "pcie4-x16", 31.5),
    ],
)
def test_what_one_rank_can_send_another(spec: str, a: int, b: int, kind: str, rate: float) -> None:
    cluster = parse_cluster(spec)
    for pair in ([a, b], [b, a]):
        link = axis_link(cluster, np.array([pair]))
        assert (link.across_name or link.inside_name, link.pair_bytes_per_s) == (kind, rate * GB)


@pytest.mark.parametrize(("spec", "sums"), [("8xh100-sxm", True), ("8xa100-sxm-80gb", False), ("8xmi300x", False)])
def test_switches_that_add_up(spec: str, sums: bool) -> None:
    assert axis_link(parse_cluster(spec), np.arange(8)[None, :]).switch_sums is sums


def enumerate_slowest(cluster: Cluster, groups: list[list[int]]) -> float:
    """Rate of the slowest hop of any group, rank by rank, as the docstring of `axis_link` says it."""
    home = [i for i, node in enumerate(cluster.nodes) for _ in range(node.count)]
    on = [Counter(home[rank] for rank in group) for group in groups]
    rates = []
    for mine in on:
        for i, k in mine.items():
            node = cluster.nodes[i]
            if len(mine) > 1:
                assert node.nic is not None
                crossing = sum(1 for other in on if len(other) > 1 and i in other)
                own = max(1.0, node.nics / node.count) * k * node.nic.bytes_per_s
                rates.append(min(node.nics * node.nic.bytes_per_s / crossing, own) / cluster.oversubscription)
            if k > 1:
                links = k - 1 if node.topology in ("mesh", "ring") else node.count
                rate = node.intra.bytes_per_s if k == node.count and node.topology == "ring" else None
                pair = node.pair_rate_bytes_per_s
                rates.append(rate or min(node.intra.bytes_per_s, links * pair))
    return min(rates)


@given(data=st.data())
def test_as_enumerated(data: st.DataObject) -> None:
    cluster = CLUSTERS[data.draw(st.sampled_from(SPECS))]
    cluster = replace(cluster, oversubscription=data.draw(st.sampled_from([1.0, 2.5])))
    size = data.draw(st.sampled_from([2, 3, 4, 6, 8, 12]))
    order = data.draw(st.permutations(range(cluster.num_devices)))
    count = data.draw(st.integers(1, len(order) // size)) if len(order) >= size else 0
    groups = [list(order[i * size : (i + 1) * size]) for i in range(count)]
    link = axis_link(cluster, np.array(groups))
    hops = [rate for rate in (link.inside_bytes_per_s, link.across_bytes_per_s) if rate]
    assert min(hops) == pytest.approx(enumerate_slowest(cluster, groups))
    shapes = {
        (len(on), max(on.values()))
        for on in (Counter(int(np.searchsorted(starts(cluster), r, "right")) for r in g) for g in groups)
    }
    assert (link.nodes, link.ranks_per_node) in shapes


def starts(cluster: Cluster) -> list[int]:
    """First rank of every node."""
    return [0, *np.cumsum([node.count for node in cluster.nodes]).tolist()[:-1]]


@given(seed=st.integers(0, 99))
def test_order_of_groups_and_ranks_does_not_matter(seed: int) -> None:
    cluster, shuffle = CLUSTERS["2xaws-p4de+1x8xh100-sxm"], np.random.default_rng(seed)
    groups = np.arange(24).reshape(6, 4)
    mixed = shuffle.permuted(shuffle.permutation(groups), axis=1)
    assert axis_link(cluster, groups) == axis_link(cluster, mixed)


def test_equal_links_are_one_key() -> None:
    cluster = parse_cluster("4x8xh100-sxm")
    mesh = Mesh(pp=2, dp_shard=2, tp=8)
    first, again = (axis_link(cluster, mesh.dense.groups("tp") + shift) for shift in (0, 0))
    assert first == again and len({first, again}) == 1
    with pytest.raises(AttributeError):
        first.ranks = 3  # type: ignore[misc]


@pytest.mark.parametrize("axis", ["tp", "dp_shard", "cp", "dp_replicate"])
def test_sixteen_thousand_ranks_are_quick(axis: str) -> None:
    cluster = parse_cluster("2048x8xh100-sxm")
    groups = Mesh(dp_replicate=16, dp_shard=32, cp=4, tp=8).dense.groups(axis)
    assert groups.size == 16384
    taken = []
    for _ in range(5):
        begin = time.process_time()
        link = axis_link(cluster, groups)
        taken.append(time.process_time() - begin)
    assert min(taken) < 0.02
    assert link.across_bytes_per_s == (0 if axis == "tp" else 50 * GB)


def test_what_cannot_be_asked() -> None:
    cluster = parse_cluster("2x8xh100-sxm")
    with pytest.raises(InputError, match="two ranks or more"):
        axis_link(cluster, np.zeros((4, 1), np.int64))
    with pytest.raises(InputError, match="device 16, but cluster '2x8xh100-sxm' has 16 devices"):
        axis_link(cluster, np.array([[0, 16]]))
    with pytest.raises(InputError, match="device -1"):
        axis_link(cluster, np.array([[0, -1]]))
    # A Cluster refuses this itself; the check stands for clusters made without it.
    alone = replace(cluster.groups[0].node, nic=None, nics=0)
    broken = object.__new__(Cluster)
    for name, value in (("name", "alone"), ("groups", (replace(cluster.groups[0], node=alone),)),
                        ("oversubscription", 1.0), ("assumptions", ())):  # fmt: skip
        object.__setattr__(broken, name, value)
    with pytest.raises(UnpricedError, match="no network port"):
        axis_link(broken, np.array([[0, 8]]))


def test_logical_workers_may_share_a_device() -> None:
    """Placement may put two ranks on one device: they count as two, on one node."""
    link: AxisLink = axis_link(parse_cluster("8xh100-sxm"), np.array([[0, 0, 1, 1]]))
    assert (link.ranks, link.nodes, link.ranks_per_node) == (4, 1, 4)
