"""Sizes of gradient buckets: each cuts otherwise, and a search for Gnomon's runtime finds one that it runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gnomon.hardware import Cluster, parse_cluster
from gnomon.lowering.gradient_buckets import gradient_buckets
from gnomon.models.presets import model
from gnomon.plans import Mesh, Plan, Schedule, Workload, stage_layers
from gnomon.prediction import predict
from gnomon.search.planning import plan as search
from gnomon.search.refinement.bucket_cuts import (
    Cut,
    Grain,
    both_ways,
    cut_of,
    least_end,
    neighbours,
    seed,
    with_grain,
)
from gnomon.search.refinement.bucket_cuts import search as search_grains
from gnomon.search.refinement.bucket_sizes import bucket_sizes
from gnomon.search.refinement.choices import allowed, choice
from gnomon.search.refinement.refine import QUICK, refine
from gnomon.software import own, stack

GRAPH = model("llama-3.2-1b")
TWO = Plan(mesh=Mesh(dp_replicate=2), schedule=Schedule(micro_batch_size=2))


def linked(bytes_per_s: float) -> Cluster:
    """Two nodes of one A100, joined by one link."""
    (group,) = parse_cluster("2x1xa100-sxm-80gb").groups
    node = replace(group.node, nics=1, nic=replace(group.node.nic, bytes_per_s=bytes_per_s))
    return replace(parse_cluster("2x1xa100-sxm-80gb"), groups=(replace(group, node=node),))


def every_cut(layers: int) -> list[Cut]:
    ends = [(0, *some, layers) for count in range(layers) for some in combinations(range(1, layers), count)]
    return [tuple(b - a for a, b in pairwise(one)) for one in ends]


def cut(plan: Plan, size: int) -> tuple[tuple[int, ...], ...]:
    sized = replace(plan, overlap=replace(plan.overlap, bucket_bytes=size))
    return gradient_buckets(GRAPH, sized, stage_layers(plan, GRAPH))


def test_each_size_cuts_the_layers_otherwise_from_one_layer_to_all() -> None:
    cuts = [cut(TWO, size) for size in bucket_sizes(GRAPH, TWO)]
    assert len(cuts) > 3 and len(set(cuts)) == len(cuts)
    assert all(len(before) >= len(after) for before, after in pairwise(cuts))
    assert len(cuts[0]) == sum(len(layers) for layers in stage_layers(TWO, GRAPH)) and len(cuts[-1]) == 1
    assert bucket_sizes(GRAPH, replace(TWO, mesh=Mesh(tp=2))) == ()
    assert (
        bucket_sizes(GRAPH, replace(TWO, mesh=Mesh(pp=2, dp_replicate=2), schedule=Schedule(name="dualpipe_v"))) == ()
    )


def test_a_search_for_the_runtime_chooses_buckets_that_it_runs() -> None:
    cluster = linked(12.5e9)
    work, fixed = Workload(global_batch_size=8, seq_len=2048), {"pp": 1, "tp": 1, "cp": 1, "zero": 0}
    result = search(GRAPH, cluster, work, stack("gnomon"), fixed=fixed, top=1)
    open_ = allowed(result.stack, allow=(), forbid=(), fixed=())
    assert choice("bucket_bytes") in open_
    best = refine(result, choices=open_, effort=QUICK).best
    assert best.plan.overlap.in_buckets and own.plan_reason(best.plan) is None
    for size in (25 * 2**20, 2**40):
        other = replace(best.plan, overlap=replace(best.plan.overlap, bucket_bytes=size, buckets=(), fused=()))
        assert best.step_s <= predict(GRAPH, cluster, other, work, result.stack).step_s


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8), st.integers(0, 15))
def test_reductions_end_first_with_the_buckets_of_least_end(layers: list[tuple[int, int]], latency: int) -> None:
    """Against every way to cut: layers of (seconds of backward, seconds of a reduction beyond its latency)."""
    ready = list(accumulate(back for back, _ in layers))

    def seconds(i: int, j: int) -> float:
        return latency + sum(size for _, size in layers[i:j])

    def end(sizes: Cut) -> float:
        now, ends = 0.0, [0, *accumulate(sizes)]
        for i, j in pairwise(ends):
            now = max(now, ready[j - 1]) + seconds(i, j)
        return now

    assert end(least_end(ready, seconds)) == min(map(end, every_cut(len(layers))))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 9))
def test_a_move_keeps_all_layers_and_stages_apart_and_buckets_hold_whole_actions(cut: list[int], number: int) -> None:
    total = sum(cut)
    stages = (total,) if number % 2 else (cut[0], total - cut[0]) if len(cut) > 1 else (total,)
    for start in both_ways([tuple(cut)]):
        for other in neighbours(start, stages, Random(number)):
            ends, actions = {*accumulate(other.buckets)}, {*accumulate(other.fused)}
            assert max(ends) == max(actions) == total and min(*other.buckets, *other.fused) >= 1 and other != start
            assert {*accumulate(stages)} <= ends <= actions


def test_what_is_found_is_the_best_of_all_and_at_most_as_slow_as_either_alone() -> None:
    """Six rows: 32 ways to cut, and 243 with actions of several layers; each is played."""
    graph, work = model("llama-tiny"), Workload(global_batch_size=4, seq_len=512)
    layers, cluster, own_stack = len(graph.layers()), linked(4e8), stack("gnomon")

    def seconds(grain: Grain) -> float:
        return predict(graph, cluster, with_grain(TWO, grain), work, own_stack).step_s

    finest = replace(TWO, overlap=replace(TWO.overlap, bucket_bytes=1))
    cuts = [cut_of(finest, graph), (layers,), seed(predict(graph, cluster, finest, work, own_stack))]
    found = search_grains(both_ways(cuts), [layers], seconds, tries=90)
    every = [Grain(a, b) for a in every_cut(layers) for b in every_cut(layers) if {*accumulate(a)} <= {*accumulate(b)}]
    steps = {grain: seconds(grain) for grain in every}
    assert len(every) == 3 ** (layers - 1) and seconds(found) == min(steps.values())
    assert seconds(found) <= min(step for grain, step in steps.items() if max(grain.fused) == 1)
    assert seconds(found) <= min(step for grain, step in steps.items() if grain.fused == grain.buckets)


def test_refining_cuts_layers_unequally_and_says_so() -> None:
    work, fixed = Workload(global_batch_size=8, seq_len=2048), {"pp": 1, "tp": 1, "cp": 1, "zero": 0}
    result = search(GRAPH, linked(5e9), work, stack("gnomon"), fixed=fixed, top=1)
    refined = refine(result, choices=(choice("bucket_bytes"), choice("buckets")), effort=QUICK)
    last = refined.steps[-1]
    overlap = refined.best.plan.overlap
    assert last.choice.name == "buckets" and len(set(overlap.buckets or overlap.fused)) > 1
    assert refined.best.step_s == last.prediction.step_s < refined.steps[-2].prediction.step_s
