"""Where a gang of devices goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gnomon.fleet.placement import place, snug
from gnomon.fleet.state import devices_of


def test_the_rest_of_a_wide_job_leaves_whole_nodes_to_others() -> None:
    assert place([4, 4, 4, 1], range(4), 9) == ((0, 4), (1, 4), (2, 1))
    assert snug([4, 4, 4, 1], range(4), 9) == ((0, 4), (1, 4), (3, 1))
    assert snug([3, 2, 4], range(3), 2) == ((1, 2),)
    assert snug([1, 1], range(2), 3) is None


@given(free=st.lists(st.integers(0, 8), min_size=1, max_size=8), count=st.integers(1, 40))
def test_both_take_as_few_nodes_as_hold_it_and_only_what_is_free(free: list[int], count: int) -> None:
    one, other = place(free, range(len(free)), count), snug(free, range(len(free)), count)
    assert (one is None) == (other is None) == (sum(free) < count)
    if one and other:
        assert devices_of(one) == devices_of(other) == count and len(one) == len(other)
        for allocation in (one, other):
            assert len({node for node, _ in allocation}) == len(allocation)
            assert all(0 < used <= free[node] for node, used in allocation)
