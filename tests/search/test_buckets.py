"""Sizes of gradient buckets: each cuts otherwise, and a search for Gnomon's runtime finds one that it runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from gnomon.hardware import parse_cluster
from gnomon.lowering.gradient_buckets import gradient_buckets
from gnomon.models.presets import model
from gnomon.plans import Mesh, Plan, Schedule, Workload, stage_layers
from gnomon.prediction import predict
from gnomon.search.planning import plan as search
from gnomon.search.refinement.bucket_sizes import bucket_sizes
from gnomon.search.refinement.choices import allowed, choice
from gnomon.search.refinement.refine import QUICK, refine
from gnomon.software import own, stack

GRAPH = model("llama-3.2-1b")
TWO = Plan(mesh=Mesh(dp_replicate=2), schedule=Schedule(micro_batch_size=2))


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
    (group,) = parse_cluster("2x1xa100-sxm-80gb").groups
    node = replace(group.node, nics=1, nic=replace(group.node.nic, bytes_per_s=12.5e9))
    cluster = replace(parse_cluster("2x1xa100-sxm-80gb"), groups=(replace(group, node=node),))
    work, fixed = Workload(global_batch_size=8, seq_len=2048), {"pp": 1, "tp": 1, "cp": 1, "zero": 0}
    result = search(GRAPH, cluster, work, stack("gnomon"), fixed=fixed, top=1)
    open_ = allowed(result.stack, allow=(), forbid=(), fixed=())
    assert choice("bucket_bytes") in open_
    best = refine(result, choices=open_, effort=QUICK).best
    assert best.plan.overlap.bucket_bytes and own.plan_reason(best.plan) is None
    for size in (25 * 2**20, 2**40):
        other = replace(best.plan, overlap=replace(best.plan.overlap, bucket_bytes=size))
        assert best.step_s <= predict(GRAPH, cluster, other, work, result.stack).step_s
