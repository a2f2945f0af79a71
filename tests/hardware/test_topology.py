"""Where ranks stand and what lies between them: DGX H100 (450 GB/s NVLink, 8 ports of 50 GB/s) and what differs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import InputError
from gnomon.hardware import link_behind, link_between, parse_cluster, place

GB = 1e9
FOUR_DGX = parse_cluster("4x8xh100-sxm")
MIXED = parse_cluster("2x8xa100-sxm-80gb+1x8xv100-sxm-32gb")


def test_ranks_go_group_by_group_and_node_by_node() -> None:
    where = [(place(MIXED, r).group, place(MIXED, r).node_index, place(MIXED, r).local_rank) for r in (0, 7, 8, 16, 23)]
    assert where == [(0, 0, 0), (0, 0, 7), (0, 1, 0), (1, 2, 0), (1, 2, 7)]
    assert [place(MIXED, r).device.name for r in (15, 16)] == ["a100-sxm-80gb", "v100-sxm-32gb"]
    assert tuple(place(MIXED, r).device for r in range(24)) == MIXED.devices


@pytest.mark.parametrize("rank", [-1, 32, 10**9])
def test_a_rank_that_is_not_there_is_an_error(rank: int) -> None:
    with pytest.raises(InputError, match="which has 32 devices"):
        place(FOUR_DGX, rank)
    with pytest.raises(InputError, match="which has 32 devices"):
        link_behind(FOUR_DGX, [0, rank])


@pytest.mark.parametrize(
    ("spec", "a", "b", "link", "bytes_per_s"),
    [
        ("4x8xh100-sxm", 0, 7, "nvlink4", 450 * GB),
        ("4x8xh100-sxm", 7, 8, "infiniband-ndr", 50 * GB),
        ("2xaws-p5", 0, 8, "efa-100", 4 * 12.5 * GB),  # four rails a device
        ("2xaws-p4d", 0, 8, "efa-100", 12.5 * GB),  # two devices share a port; alone, one has it
        ("8xmi300x", 0, 1, "xgmi-mi300x", 64 * GB),  # one of seven links
        ("4xmi300x", 0, 1, "xgmi-mi300x", 64 * GB),  # the other links lead nowhere
        ("8xv100-sxm", 0, 1, "nvlink2", 25 * GB),
        ("2x8xa100-sxm-80gb+1x8xv100-sxm-32gb", 8, 16, "infiniband-edr", 12.5 * GB),  # the slower end
        ("18x4xgb200", 0, 71, "nvlink5", 900 * GB),  # trays of one rack
        ("8xl40s", 0, 1, "pcie4-x16", 31.5 * GB),
    ],
)
def test_link_between_two_ranks(spec: str, a: int, b: int, link: str, bytes_per_s: float) -> None:
    cluster = parse_cluster(spec)
    for hop in (link_between(cluster, a, b), link_between(cluster, b, a)):
        assert (hop.link.name, hop.bytes_per_s) == (link, bytes_per_s)


def test_a_rank_has_no_link_to_itself() -> None:
    with pytest.raises(InputError, match="no link to itself"):
        link_between(FOUR_DGX, 3, 3)
    for ranks in ([], [3], [3, 3], [1, 2, 1]):
        with pytest.raises(InputError, match="at least two ranks, each once"):
            link_behind(FOUR_DGX, ranks)


@pytest.mark.parametrize(
    ("ranks", "link", "bytes_per_s", "sharers", "per_node"),
    [
        (range(8), "nvlink4", 450 * GB, 1, 8),  # tp 8
        (range(0, 32, 8), "infiniband-ndr", 50 * GB, 8, 1),  # dp 4 beside tp 8: eight groups leave each node
        ((0, 1, 8, 9), "infiniband-ndr", 100 * GB, 4, 2),  # four groups
        (range(32), "infiniband-ndr", 400 * GB, 1, 8),  # one group has all ports: 400, less than NVLink's 450
    ],
)
def test_the_slowest_hop_of_a_group(
    ranks: tuple[int, ...], link: str, bytes_per_s: float, sharers: float, per_node: int
) -> None:
    hop = link_behind(FOUR_DGX, ranks)
    assert (hop.link.name, hop.bytes_per_s, hop.sharers, hop.ranks_per_node) == (link, bytes_per_s, sharers, per_node)
    assert hop.num_nodes == len({rank // 8 for rank in ranks})


def test_a_group_that_has_a_node_to_itself_still_drives_only_its_own_ports() -> None:
    assert link_behind(FOUR_DGX, (0, 8), groups_per_node=1).bytes_per_s == 50 * GB
    assert link_behind(FOUR_DGX, (0, 1, 8, 9), groups_per_node=1).bytes_per_s == 100 * GB


def test_oversubscription_divides_what_leaves_a_node_and_nothing_else() -> None:
    half = replace(FOUR_DGX, oversubscription=2.0)
    assert link_behind(half, range(32)).bytes_per_s == 200 * GB
    assert link_behind(half, range(0, 32, 8)).bytes_per_s == 25 * GB
    assert link_behind(half, range(8)).bytes_per_s == 450 * GB


def test_a_mesh_gives_a_small_group_only_the_links_between_its_members() -> None:
    mi300x = parse_cluster("8xmi300x")
    assert [link_behind(mi300x, range(n)).bytes_per_s for n in (2, 4, 8)] == [64 * GB, 192 * GB, 448 * GB]


def test_a_mixed_group_goes_at_the_pace_of_its_slowest_node() -> None:
    # Alone, the A100 nodes would cross at 8 x 25 GB/s; the V100 node has 4 x 12.5.
    assert link_behind(MIXED, range(16)).bytes_per_s == 200 * GB
    hop = link_behind(MIXED, range(24))
    assert (hop.link.name, hop.bytes_per_s, hop.num_nodes) == ("infiniband-edr", 50 * GB, 3)


@given(st.sets(st.integers(0, 31), min_size=2), st.randoms())
def test_the_order_of_ranks_does_not_matter_and_no_hop_beats_the_fabric(ranks: set[int], random) -> None:
    order = sorted(ranks)
    shuffled = list(order)
    random.shuffle(shuffled)
    hop = link_behind(FOUR_DGX, order)
    other = link_behind(FOUR_DGX, shuffled)
    assert (other.bytes_per_s, other.latency_s, other.num_nodes) == (hop.bytes_per_s, hop.latency_s, hop.num_nodes)
    assert 0 < hop.bytes_per_s <= 450 * GB
    if hop.num_nodes > 1:
        assert hop.bytes_per_s <= 400 * GB


def test_devices_without_a_port_of_their_own_share_what_there_is() -> None:
    # p4d: four ports of 12.5 GB/s for eight devices.
    p4d = parse_cluster("2xaws-p4d")
    assert link_behind(p4d, (0, 8)).bytes_per_s == 50 * GB / 8
    assert link_behind(p4d, (0, 8), groups_per_node=2).bytes_per_s == 12.5 * GB
    assert link_behind(p4d, (0, 1, 8, 9)).bytes_per_s == 50 * GB / 4
    assert link_behind(p4d, range(16)).bytes_per_s == 50 * GB
