"""Which layers share a gradient bucket, and which share an action: chosen together by the simulator.

Fewer, larger actions cost the host less, but gradients of all their layers are there only at the end, so that their
reductions begin later. `search` starts from what it is given (buckets of one size, a bucket a layer, and `seed`'s,
which is the best of all cuts while nothing slows down beside something else), each with and without its layers fused;
from there it merges, divides or shifts buckets and actions, and goes back to worse ones within ALPHA of the best. The
result is never slower than where it began. Source: Yi et al. 2022 (DisCo, TPDS): a search over fusions of operations
and of all-reduces by simulated time, which backtracks. There operations are a compiler's; here they are layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from random import Random
from typing import NamedTuple

from gnomon.graph import Graph
from gnomon.lowering.gradient_buckets import gradient_buckets
from gnomon.plans import Plan, stage_layers
from gnomon.prediction import Prediction

Cut = tuple[int, ...]
"""Numbers of neighbouring layers, in the order of the model, as in `overlap.buckets` and `overlap.fused`."""


class Grain(NamedTuple):
    """How fine the rows of a plan are."""

    buckets: Cut
    fused: Cut
    """Layers of each action: no bucket ends inside one."""


ALPHA = 1.05
"""Cuts slower than the best by more than this are not gone on from."""
BARREN = 6
"""Cuts gone on from without gain, after which the search ends."""
MOVES = 3
"""Of each kind, tried from a cut."""


def with_grain(plan: Plan, grain: Grain) -> Plan:
    """The plan with these buckets and actions."""
    fused = grain.fused if max(grain.fused) > 1 else ()
    buckets = () if fused == grain.buckets else grain.buckets
    return replace(plan, overlap=replace(plan.overlap, bucket_bytes=None, buckets=buckets, fused=fused))


def both_ways(cuts: Iterable[Cut]) -> Iterator[Grain]:
    """Buckets whose layers are actions by themselves, and the same where each bucket is one."""
    for cut in cuts:
        yield Grain(cut, (1,) * sum(cut))
        yield Grain(cut, cut)


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
        # The last bucket is i … j - 1: its reduction begins once its last gradient is there and the bucket before has
        # ended.
        end, i = min((max(ready[j - 1], ends[i]) + seconds(i, j), i) for i in range(j))
        ends.append(end)
        before.append(i)
    # Back from the end, bucket by bucket.
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
    buckets, first = list[int](), 0
    for stage in range(len(pricing.stages)):
        # From the last layer to the first, as backwards make gradients.
        layers = [block for block, (of, _) in enumerate(pricing.blocks) if of == stage][::-1]
        seconds = [sum(pricing.seconds(of[block]) for of in (back, late) if block in of) for block in layers]

        def reduced(i: int, j: int, layers: Sequence[int] = layers) -> float:
            return pricing.reductions.together(kind, layers[i:j])

        buckets += reversed(least_end(list(accumulate(seconds)), reduced))
        first += len(layers)
    return tuple(buckets)


def neighbours(grain: Grain, stages: Sequence[int], random: Random, count: int = MOVES) -> Iterator[Grain]:
    """Grains one move away: `count` random ones of each kind. stages: layers of each, of which no bucket has some of
    two."""
    # Sizes as positions where a bucket or an action ends, so that moves are changes of sets.
    cuts, ends = {*accumulate(grain.buckets)}, {*accumulate(grain.fused)}
    # Borders of stages stay: no bucket has layers of two.
    fixed, every = {*accumulate(stages)}, range(1, sum(stages))
    free, inner = sorted(cuts - fixed), sorted(ends - cuts)
    moved = [(end, other) for end in free for other in (end - 1, end + 1) if other in every and other not in cuts]
    kinds: tuple[Sequence[tuple[set[int], set[int]]], ...] = (
        [(cuts - {end}, ends) for end in free],  # two buckets are one
        [(cuts - {end}, ends - {end}) for end in free],  # and the actions on both sides too
        [(cuts | {place}, ends | {place}) for place in every if place not in cuts],
        [(cuts - {end} | {other}, ends - {end} | {other}) for end, other in moved],
        [(cuts, ends - {end}) for end in inner],
        [(cuts, ends | {place}) for place in every if place not in ends],
    )
    for listed in kinds:
        for of_buckets, of_actions in random.sample(listed, min(count, len(listed))):
            yield Grain(_of_ends(of_buckets), _of_ends(of_actions))


def _of_ends(ends: Iterable[int]) -> Cut:
    return tuple(b - a for a, b in pairwise([0, *sorted(ends)]))


def search(
    begin: Iterable[Grain], stages: Sequence[int], seconds: Callable[[Grain], float | None], tries: int
) -> Grain:
    """The grain with the fewest seconds that is met, going on from those of `begin`.

    seconds: what the simulator says; None for one that cannot be had. tries: calls of it, at most, but for `begin`.
    """
    # A fixed seed: the same plan comes out of every run.
    random, known, frontier = Random(0), dict[Grain, float](), list[tuple[float, Grain]]()
    tries_left = tries

    def look(grain: Grain) -> None:
        found = seconds(grain)
        known[grain] = float("inf") if found is None else found
        if found is not None:
            heappush(frontier, (found, grain))

    for grain in dict.fromkeys(begin):
        look(grain)
    barren = 0
    while frontier and tries_left > 0 and barren < BARREN:
        step, grain = heappop(frontier)
        best = min(known.values())
        # The heap's least, so that all others are too slow to go on from as well.
        if step > ALPHA * best:
            break
        for other in neighbours(grain, stages, random):
            if other not in known and tries_left > 0:
                tries_left -= 1
                look(other)
        barren = 0 if min(known.values()) < best else barren + 1
    return min(known.items(), key=lambda pair: (pair[1], len(pair[0].fused), len(pair[0].buckets), pair[0]))[0]
