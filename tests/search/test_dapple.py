"""DAPPLE's planner: its closed form against 1F1B's, its placements, and its plans against predicting every one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from search import cuts

from gnomon.errors import GnomonError, PlanError
from gnomon.hardware import parse_cluster
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Plan, Precision, Schedule, Workload
from gnomon.prediction import predict
from gnomon.search.stages.dapple import Prices, cuts_of, dapple
from gnomon.search.stages.replication import (
    PipelineStep,
    StagePiece,
    append_first,
    fresh_first,
    latency,
    place,
    scatter_first,
)


@pytest.mark.parametrize(
    ("delay", "once", "twice"), [(0, 45, 45), (1, 67, 51), (2, 89, 61), (3, 111, 75)], ids=["0", "1", "2", "3"]
)
def test_the_closed_form_is_that_of_1f1b(delay: int, once: int, twice: int) -> None:
    """Four equal stages, twelve microbatches, forward 1 and backward 2, with either warm-up: the seconds that these
    take when they are played (tests/cases/dapple_warm_up.py). The closed form is never above; with few microbatches
    under way it does not see that the waits of several stages add up."""
    steps: list[PipelineStep] = []
    for stage in range(4):
        steps += [PipelineStep(delay, delay, message=True)] if stage else []
        steps.append(PipelineStep(1, 2))
    assert 0.8 * once <= latency(steps, 12, twice=False) <= once
    assert 0.95 * twice <= latency(steps, 12) <= twice
    assert delay > 1 or latency(steps, 12) == twice


def test_the_pivot_is_the_longest_stage() -> None:
    """Stage 1 takes 3 and 6 for each of 4 microbatches; the first needs 1 before and 2 after."""
    steps = [PipelineStep(1, 2), PipelineStep(3, 6), PipelineStep(1, 2)]
    assert latency(steps, 4) == 1 + 4 * 9 + 2
    assert latency([PipelineStep(1, 2, 10), PipelineStep(3, 6), PipelineStep(1, 2)], 4) == 1 + 4 * 9 + 2 + 10
    assert latency([PipelineStep(1, 2), PipelineStep(3, 6), PipelineStep(1, 2, 50)], 4) == 1 + 3 + 3 * 9 + 50


def test_placements() -> None:
    size, free = (4, 4, 4), (4, 1, 4)
    assert fresh_first(free, size, 5) == (4, 0, 1)
    assert append_first(free, size, 3) == (2, 1, 0)
    assert scatter_first((4, 4, 4), size, 5) == (2, 2, 1)


def model(vocab: int = 65536) -> GptConfig:
    return GptConfig(name="t", num_layers=4, hidden_size=1024, num_heads=16, vocab_size=vocab, max_positions=512)


def every(prices: Prices, most: int) -> Iterator[tuple[StagePiece, ...]]:
    """All cuts into at most so many stages, with all numbers of replicas and all places on nodes."""
    total, nodes = len(prices.places) - 1, prices.nodes
    for stages in range(1, most + 1):
        for cut in cuts.every_cut(total, stages):
            for taken in product(product(*(range(n + 1) for n in nodes)), repeat=stages):
                whole = [sum(entry) for entry in taken]
                full = all(sum(entry[n] for entry in taken) == size for n, size in enumerate(nodes))
                if not full or any(count not in prices.replicas for count in whole):
                    continue
                pieces, used, done = [], (0,) * len(nodes), 0
                for count, entry in zip(cut, taken, strict=True):
                    pieces.append(StagePiece(done, done + count, entry, place(nodes, used, entry)))
                    used, done = tuple(u + t for u, t in zip(used, entry, strict=True)), done + count
                yield tuple(pieces)


@pytest.mark.parametrize(("on", "vocab"), [("2x2xa100-sxm-80gb", 1024), ("2x2xa100-sxm-80gb", 131072),
                                           ("1x3xh100-sxm", 65536), ("3x1xa100-sxm-80gb", 32768)])  # fmt: skip
def test_its_plan_is_near_the_best_of_all(on: str, vocab: int) -> None:
    """Within 3 % of the fastest of all cuts, replicas and places, by the simulator."""
    graph, cluster, work = gpt(model(vocab)), parse_cluster(on), Workload(global_batch_size=24, seq_len=512)
    replicas = dapple(graph, cluster, work, counts=(4,))
    prices = Prices(graph, cluster, work, Plan(), 4, replicas.best.pricing.stack if replicas.best else None)  # type: ignore[arg-type]
    steps = []
    for pieces in every(prices, 3):
        try:
            steps.append(predict(graph, cluster, prices.plan(pieces), work).step_s)
        except GnomonError:
            continue
    assert replicas.best is not None and replicas.best.step_s <= 1.03 * min(steps)
    assert replicas.parallel is None or replicas.best.step_s <= replicas.parallel.step_s


def test_stages_have_other_numbers_of_replicas() -> None:
    """On slow links a heavy head is worth replicas of its own."""
    graph, cluster = gpt(model(131072)), parse_cluster("1x3xh100-sxm")
    replicas = dapple(graph, cluster, Workload(global_batch_size=48, seq_len=512), counts=(8,))
    assert replicas.best is not None and sum(n for _, n in cuts_of(replicas.best)) == 3
    assert sum(n for n, _ in cuts_of(replicas.best)) == 6


def test_what_it_is_not_for() -> None:
    work = Workload(global_batch_size=24, seq_len=512)
    with pytest.raises(PlanError, match="up to 128 devices"):
        dapple(gpt(model()), parse_cluster("32x8xh100-sxm"), work)
    with pytest.raises(PlanError, match="divides a batch of 24"):
        dapple(gpt(model()), parse_cluster("1x2xh100-sxm"), work, counts=(7,))


@pytest.mark.parametrize("vocab", [1024, 131072, 262144])
@pytest.mark.parametrize("on", ["1x4xh100-sxm", "2x2xv100-sxm-32gb"])
def test_no_slower_than_equal_stages(on: str, vocab: int) -> None:
    """With a light head and a heavy one, against every pipeline of equal layers and replicas, either warm-up aside."""
    half = Plan(precision=Precision(param="fp16", compute="fp16"))
    graph, cluster, work = gpt(model(vocab)), parse_cluster(on), Workload(global_batch_size=16, seq_len=512)
    replicas = dapple(graph, cluster, work, base=half, counts=(4, 8))
    steps = []
    for count in (4, 8):
        for stages in (2, 4):
            mesh, schedule = Mesh(pp=stages, dp_shard=4 // stages), Schedule(num_microbatches=count)
            if 16 // count % mesh.dp_shard == 0:
                steps.append(predict(graph, cluster, replace(half, mesh=mesh, schedule=schedule), work).step_s)
    assert replicas.best is not None and len(steps) == 4 and replicas.best.step_s <= min(steps)
