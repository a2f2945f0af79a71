"""Other questions against asking every plan of a small space."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.errors import GnomonError, PlanError
from gnomon.hardware import Cluster, parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Goal, Plan, Workload
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import make_space, parse_limit
from gnomon.search.goals import Question, fewest_devices, longest, of_nodes, pareto, vary

CLUSTER = parse_cluster("1x2xa100-sxm-80gb")
WORK = Workload(global_batch_size=4, seq_len=128)
ASKED = Question(
    graph=model("llama-tiny"),
    stack=PLAIN_STACK,
    base=Plan(),
    fixed={"schedule": "one_f_one_b", "sequence_parallel": False, "keep_gathered": False, "overlap": True},
    limits=(parse_limit("zero>1"), parse_limit("recompute=selective")),
)


def everything(cluster: Cluster, work: Workload) -> list[tuple[float, int]]:
    """(seconds, peak bytes) of every plan of the space that runs."""
    space = make_space(ASKED.graph, cluster, work, base=ASKED.base, fixed=ASKED.fixed, limits=ASKED.limits)
    found = []
    for point in space.points():
        try:
            each = predict(ASKED.graph, cluster, space.plan(point), work, PLAIN_STACK)
        except GnomonError:
            continue
        found.append((each.step_s, each.tightest.peak_bytes))
    return found


def test_the_front_is_that_of_every_plan() -> None:
    every = everything(CLUSTER, WORK)
    front = {(s, b) for s, b in every if not any(t <= s and c <= b and (t, c) != (s, b) for t, c in every)}
    cases = pareto(ASKED, CLUSTER, WORK)
    shown = [(c.found.step_s, c.found.prediction.tightest.peak_bytes) for c in cases if c.found is not None]
    assert len(front) > 1 and set(shown) == front and shown == sorted(shown)


def test_the_longest_sequence_is_that_of_trying_all() -> None:
    limit = sorted(peak for _, peak in everything(CLUSTER, replace(WORK, seq_len=448)))[0]
    asked = replace(ASKED, goal=Goal(memory_bytes=limit))
    fits = [n for n in range(64, 1025, 64) if min(b for _, b in everything(CLUSTER, replace(WORK, seq_len=n))) <= limit]
    cases = longest(asked, CLUSTER, WORK, multiple=64)
    assert cases[-1].workload.seq_len == max(fits) and cases[-1].found is not None


def test_no_sequence_fits() -> None:
    with pytest.raises(PlanError, match="no plan fits with 64 tokens"):
        longest(replace(ASKED, goal=Goal(memory_bytes=2**20)), CLUSTER, WORK, multiple=64)


def test_fewest_devices_are_the_first_that_are_fast_enough() -> None:
    clusters = [of_nodes(CLUSTER, nodes) for nodes in (1, 2)]
    work = Workload(global_batch_size=64, seq_len=512)
    steps = [min(s for s, _ in everything(cluster, work)) for cluster in clusters]
    for limit in (max(steps), min(steps)):
        cases = fewest_devices(ASKED, clusters, work, limit)
        wanted = next(c.num_devices for c, step in zip(clusters, steps, strict=True) if step <= limit)
        assert cases[-1].cluster.num_devices == wanted
    assert len(fewest_devices(ASKED, clusters, work, 1e-9)) == 2


def test_each_value_has_its_best_plan() -> None:
    cases = vary(ASKED, CLUSTER, WORK, "seq_len", (64, 256))
    for case, length in zip(cases, (64, 256), strict=True):
        best = min(s for s, _ in everything(CLUSTER, replace(WORK, seq_len=length)))
        assert case.found is not None and case.found.step_s == best
    with pytest.raises(PlanError, match="cannot vary"):
        vary(ASKED, CLUSTER, WORK, "heads", (1,))
