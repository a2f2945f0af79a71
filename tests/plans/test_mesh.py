"""Rank groups of a mesh against enumeration by hand and by explicit loops.

Covers the dense view, the experts' refolding, other orders, and what a mesh refuses.
"""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.plans import DENSE_AXES, Mesh

SIZES = st.integers(1, 3)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = {axis: draw(SIZES) for axis in DENSE_AXES}
    folded = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    ep = draw(st.sampled_from([d for d in range(1, folded + 1) if folded % d == 0]))
    etp = draw(st.sampled_from([d for d in range(1, folded // ep + 1) if folded // ep % d == 0]))
    return Mesh(**sizes, ep=ep, etp=etp)


def test_groups_of_16_ranks_by_hand() -> None:
    # pp 2, dp_shard 2, tp 4: tp is innermost, so ranks 0-3 are one tensor-parallel group and 8-15 the second stage.
    view = Mesh(pp=2, dp_shard=2, tp=4).dense
    assert view.groups("tp").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert view.groups("dp_shard").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert view.groups("pp").tolist() == [[r, r + 8] for r in range(8)]


def test_experts_refold_the_same_ranks_by_hand() -> None:
    # dp_shard 4 x tp 2 = 8 ranks hold 4 groups of experts twice (edp = 2): ranks 0-3 and 4-7 each hold all experts.
    mesh = Mesh(dp_shard=4, tp=2, ep=4)
    assert mesh.edp == 2
    assert mesh.experts.groups("ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.experts.groups("edp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.world_size == 8


def test_unions_join_axes() -> None:
    view = Mesh(dp_replicate=2, dp_shard=2, cp=2, tp=2).dense
    assert view.groups("fsdp").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert view.groups("dp").tolist() == view.groups("dp_replicate", "dp_shard").tolist()
    assert view.size("loss") == 8
    assert view.coordinate(13, "fsdp") == 2  # rank 13 = (1, 1, 0, 1): shard 1, context part 0


def test_another_order() -> None:
    # Pipeline innermost: neighbours in rank are neighbouring stages.
    mesh = Mesh(pp=2, tp=2, order=("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    assert mesh.dense.groups("pp").tolist() == [[0, 1], [2, 3]]
    assert mesh.dense.groups("tp").tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize("order", [*permutations(DENSE_AXES)], ids=" ".join)
def test_a_place_in_a_group_is_that_of_its_process_whatever_the_order(order: tuple[str, ...]) -> None:
    # Processes of a group are numbered by rank, so members of a row must ascend, and a shard's index must be its place.
    view = Mesh(dp_replicate=2, dp_shard=2, cp=2, tp=2, order=order).dense
    for axis in (*DENSE_AXES, "dp", "fsdp", "loss"):
        for row in view.groups(axis).tolist():
            assert row == sorted(row) and [view.coordinate(rank, axis) for rank in row] == [*range(len(row))]


@given(meshes())
def test_groups_equal_enumeration(mesh: Mesh) -> None:
    for view in mesh.views:
        ranks = {coordinates: rank for rank, coordinates in enumerate(product(*map(range, view.sizes)))}
        for index, axis in enumerate(view.axes):
            groups: dict[tuple[int, ...], list[int]] = {}
            for coordinates, rank in ranks.items():
                groups.setdefault(coordinates[:index] + coordinates[index + 1 :], []).append(rank)
            assert view.groups(axis).tolist() == list(groups.values())
        assert all(ranks[view.coordinates(rank)] == rank for rank in range(view.num_ranks))


@given(meshes())
def test_every_axis_partitions_the_ranks(mesh: Mesh) -> None:
    for view in mesh.views:
        assert view.num_ranks == mesh.world_size
        for axis in view.axes:
            assert sorted(view.groups(axis).ravel().tolist()) == list(range(mesh.world_size))


def test_refusals_name_the_limit_and_a_legal_value() -> None:
    with pytest.raises(PlanError, match=r"ep x etp = 3 x 1 = 3 .* dp_shard x cp x tp = 8.*nearest legal ep is 2"):
        Mesh(dp_shard=4, tp=2, ep=3)
    with pytest.raises(PlanError, match="tp = 0"):
        Mesh(tp=0)
    with pytest.raises(PlanError, match="put these three next to each other"):
        _ = Mesh(order=("tp", "pp", "dp_replicate", "dp_shard", "cp")).experts
    with pytest.raises(PlanError, match="has no axis 'ep'"):
        Mesh().dense.groups("ep")
    with pytest.raises(PlanError, match="rank 8 is not in a mesh of 8"):
        Mesh(tp=8).dense.coordinates(8)


def test_large_mesh_is_cheap_to_ask() -> None:
    view = Mesh(pp=16, dp_shard=128, tp=8).dense
    assert view.groups("dp_shard").shape == (128, 128)
