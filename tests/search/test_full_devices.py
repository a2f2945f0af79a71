"""Plans that fill a device: the search finds one exactly where `predict` says that it fits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search.spaces import model

from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.hardware.scaled import scaled
from gnomon.plans import Goal, Plan, Workload
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import make_space, solve
from gnomon.search.equal.devices import EqualDevices

GRAPH = model("llama", 2)
WORK = Workload(global_batch_size=4, seq_len=512)


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(["1x4xh100-sxm", "1x2xl40s", "1x4xtpu-v5p"]),
    fixed=st.sampled_from(
        [
            {"pp": 1, "tp": 1, "zero": 0},
            {"pp": 1, "tp": 2, "zero": 1},
            {"pp": 2, "tp": 1, "zero": 0},
            {"pp": 1, "tp": 1, "zero": 3},
        ]
    ),
    part=st.floats(-0.5, 1.5),
)
def test_a_plan_is_found_where_it_is_predicted_to_fit(name: str, fixed: dict[str, object], part: float) -> None:
    """Devices with less memory than the plan usually takes, down to what it must have and below."""
    fixed = {**fixed, "micro_batch_size": 1, "schedule": "one_f_one_b", "recompute": "none", "overlap": True}
    roomy = parse_cluster(name)
    space = make_space(GRAPH, roomy, WORK, base=Plan(), fixed=fixed)
    points = list(space.points())
    usual = predict(GRAPH, roomy, space.plan(points[0]), WORK, PLAIN_STACK).tightest
    least = usual.allocated_bytes + (usual.usual_bytes - usual.allocated_bytes) // 3
    narrow = scaled(roomy, memory_bytes=int(usual.usual_bytes - part * (usual.usual_bytes - least)))
    space = make_space(GRAPH, narrow, WORK, base=Plan(), fixed=fixed)
    fit = [point for point in points if predict(GRAPH, narrow, space.plan(point), WORK, PLAIN_STACK).fits]
    try:
        result = solve(GRAPH, narrow, WORK, space, goal=Goal(memory_fraction=1.0)).best
    except PlanError:
        result = ()
    assert bool(result) == bool(fit)
    assert all(entry.prediction.fits for entry in result)


def test_a_family_without_choices_is_too_large() -> None:
    cluster = parse_cluster("1x2xh100-sxm")
    space = make_space(GRAPH, cluster, WORK, base=Plan(), fixed={"pp": 1, "tp": 1})
    blocks = EqualDevices(GRAPH, cluster, WORK, space, PLAIN_STACK, Goal()).blocks
    family = next(family for _, family in blocks.families() if blocks.legality.choices(family).choices)
    assert not blocks.memory.too_large(family)
    none = blocks.legality.choose(family, ())
    blocks.legality.choices = lambda _: none  # type: ignore[method-assign]
    assert blocks.memory.too_large(family) and not list(blocks.rows(family))


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_is_known_before_prices_rules_out_no_more_than_what_is_known_after(kind: str, zero: int) -> None:
    cluster, graph = parse_cluster("1x8xh100-sxm"), model(kind, 4)
    space = make_space(graph, cluster, WORK, base=Plan(), fixed={"zero": zero, "recompute": "full"})
    blocks = EqualDevices(
        graph, cluster, WORK, space, PLAIN_STACK, Goal(memory_bytes=cluster.groups[0].node.count)
    ).blocks
    assert not list(blocks.families()) and blocks.counts.too_large > 0  # a few bytes: no layer was priced
    assert not blocks.job.priced.prices
    sure, roomy = blocks.memory.least, EqualDevices(graph, cluster, WORK, space, PLAIN_STACK, Goal()).blocks
    families = [family for _, family in roomy.families() if roomy.legality.choices(family).choices]
    assert families
    for family in families:
        assert not roomy.memory.too_large(family)
        ways = np.array([family.tp, family.ep * family.mesh.etp])
        held = roomy._layers @ family.table.elements
        assert (roomy.job.elements / ways <= held * (1 + 1e-12)).all()
    assert sure <= roomy.memory.least
