"""Which of the best plans `gnomon plan --try` runs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gnomon.plans import Mesh, Plan, Schedule
from gnomon.search import varied

PLANS = st.lists(
    st.builds(
        lambda mesh, micro: Plan(mesh=mesh, schedule=Schedule(micro_batch_size=micro)),
        st.sampled_from([Mesh(dp_shard=8), Mesh(dp_shard=4, tp=2), Mesh(dp_shard=4, pp=2), Mesh(dp_replicate=8)]),
        st.sampled_from([1, 2, 4]),
    ),
    min_size=1,
    max_size=12,
)


def axes(plan: Plan) -> tuple[int, ...]:
    return plan.mesh.pp, plan.mesh.tp, plan.mesh.data_ranks


@given(plans=PLANS, few=st.integers(1, 6))
def test_the_best_is_tried_and_no_mesh_more_than_twice_unless_there_is_no_other(plans: list[Plan], few: int) -> None:
    chosen = varied(plans, few)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(few, len(plans))
    most = Counter(axes(plans[i]) for i in chosen)
    left = {axes(plan) for i, plan in enumerate(plans) if i not in chosen}
    assert max(most.values()) <= 2 or all(most[each] >= 2 for each in left)


def test_the_third_plan_of_a_mesh_gives_way_to_another_mesh() -> None:
    data, tensor = Plan(mesh=Mesh(dp_shard=8)), Plan(mesh=Mesh(dp_shard=4, tp=2))
    assert varied([data, data, data, tensor], 3) == [0, 1, 3]
    assert varied([data, data, data], 3) == [0, 1, 2]
