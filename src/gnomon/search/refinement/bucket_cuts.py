"""Which layers share a gradient bucket: buckets of unequal sizes, chosen by the simulator.

`cuts(predicted)` is the fastest way found to cut each stage's layers into buckets of neighbours. It starts from those
of one size, from a bucket a layer, and from `least_end`, which is the best of all cuts while nothing slows down beside
something else; from there it merges two neighbours, divides one, or moves a layer to the next, and goes back to worse
cuts within ALPHA of the best. Every cut is judged by the simulator; the result is never slower than where it began.
Source: Yi et al. 2022 (DisCo, TPDS): a search over fusions of all-reduces by simulated time, which backtracks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from random import Random

from gnomon.graph import Graph
from gnomon.lowering.gradient_buckets import gradient_buckets
from gnomon.plans import Plan, stage_layers
from gnomon.prediction import Prediction

Cut = tuple[int, ...]
"""Layers of each bucket, in the order of the model: `overlap.buckets`."""

ALPHA = 1.05
"""Cuts slower than the best by more than this are not gone on from."""
BARREN = 6
"""Cuts gone on from without gain, after which the search ends."""
MOVES = 3
"""Of each kind, tried from a cut."""


def with_cut(plan: Plan, cut: Cut) -> Plan:
    """The plan with these buckets."""
    return replace(plan, overlap=replace(plan.overlap, bucket_bytes=None, buckets=cut))


def cut_of(plan: Plan, graph: Graph) -> Cut:
    """The cut that a plan of `bucket_bytes` comes to. PlanError where its rows do not go layer by layer."""
    found = gradient_buckets(graph, plan, stage_layers(plan, graph))
    return tuple(len(one) for one in sorted(found, key=min))


def least_end(ready: Sequence[float], seconds: Callable[[int, int], float]) -> tuple[int, ...]:
    """Sizes of buckets of neighbours, the first ready first, whose reductions, one after the other, end first.

    ready: when each one's gradients are there, ascending. seconds(i, j): of reducing i … j - 1 together. Exact: what
    follows a bucket ends no later if the bucket ends earlier.
    """
    ends, before = [0.0], [0]
    for j in range(1, len(ready) + 1):
        end, i = min((max(ready[j - 1], ends[i]) + seconds(i, j), i) for i in range(j))
        ends.append(end)
        before.append(i)
    sizes, j = list[int](), len(ready)
    while j:
        sizes.append(j - before[j])
        j = before[j]
    return tuple(reversed(sizes))


def seed(prediction: Prediction) -> Cut:
    """`least_end` of each stage, by the prices of a prediction of a plan with a row for each layer."""
    pricing = prediction.pricing
    kind = "REDUCE_GRAD" if pricing.plan.optimizer.zero else "AR"
    back = {key.stage: key for key in prediction.structure.program.keys if key.kind in ("B", "I")}
    late = {key.stage: key for key in prediction.structure.program.keys if key.kind == "W"}
    made, first = list[int](), 0
    for stage in range(len(pricing.stages)):
        layers = [block for block, (of, _) in enumerate(pricing.blocks) if of == stage][::-1]
        seconds = [sum(pricing.seconds(of[block]) for of in (back, late) if block in of) for block in layers]

        def reduced(i: int, j: int, layers: Sequence[int] = layers) -> float:
            return pricing.reductions.together(kind, layers[i:j])

        made += reversed(least_end(list(accumulate(seconds)), reduced))
        first += len(layers)
    return tuple(made)


def neighbours(cut: Cut, stages: Sequence[int], random: Random, count: int = MOVES) -> Iterator[Cut]:
    """Cuts one move away: `count` random ones of each of three kinds. stages: layers of each, which no bucket leaves."""
    ends, fixed = list(accumulate(cut)), {*accumulate(stages)}
    free = [end for end in ends if end not in fixed]
    inner = [place for low, high in pairwise([0, *ends]) for place in range(low + 1, high)]
    moved = [
        (end, other)
        for end, low, high in zip(ends, [0, *ends], [*ends[1:], ends[-1]], strict=False)
        if end not in fixed
        for other in (end - 1, end + 1)
        if low < other < high
    ]
    for end in random.sample(free, min(count, len(free))):
        yield _of_ends({*ends} - {end})
    for place in random.sample(inner, min(count, len(inner))):
        yield _of_ends({*ends, place})
    for end, other in random.sample(moved, min(count, len(moved))):
        yield _of_ends({*ends} - {end} | {other})


def _of_ends(ends: Iterable[int]) -> Cut:
    return tuple(b - a for a, b in pairwise([0, *sorted(ends)]))


def search(begin: Iterable[Cut], stages: Sequence[int], seconds: Callable[[Cut], float | None], tries: int) -> Cut:
    """The cut with the fewest seconds that is met, going on from those of `begin`.

    seconds: what the simulator says; None for a cut that cannot be had. tries: calls of it, at most, but for `begin`.
    """
    random, known, frontier = Random(0), dict[Cut, float](), list[tuple[float, Cut]]()
    left = tries

    def look(cut: Cut) -> None:
        found = seconds(cut)
        known[cut] = float("inf") if found is None else found
        if found is not None:
            heappush(frontier, (found, cut))

    for cut in dict.fromkeys(begin):
        look(cut)
    barren = 0
    while frontier and left > 0 and barren < BARREN:
        step, cut = heappop(frontier)
        best = min(known.values())
        if step > ALPHA * best:
            break
        for other in neighbours(cut, stages, random):
            if other not in known and left > 0:
                left -= 1
                look(other)
        barren = 0 if min(known.values()) < best else barren + 1
    return min(known.items(), key=lambda pair: (pair[1], len(pair[0]), pair[0]))[0]
