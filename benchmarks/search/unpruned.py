"""The optimum of 175B on 512 A100 with pruning by time off: points that may fit are played one by one.

    nice -n 19 python benchmarks/search/unpruned.py [SECONDS [K/N]]   # of one core, default 7200; prints as it goes

With K/N it plays the K-th of N shares, so that N processes play all of them.

Every point that is legal, not a duplicate and not too large by a bound on memory is played as a prediction plays it,
with what kernels lose to collectives, but for its memory, which is asked of those only that are faster than the plan
that the search finds. Nothing is left out because of a bound on time; such a bound only says which points come first,
so that a run that is stopped has played all that were most likely to be faster. Claims, each asserted: no point that
fits is faster; no first bound is above its step; points add up. Prints the lines kept in results/search.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import gnomon
from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Goal, Workload
from gnomon.prediction import TimedPlan
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import Point, make_space
from gnomon.search.equal.devices import EqualDevices

MODEL, CLUSTER = "gpt3-175b", "64x8xa100-sxm-80gb"
WORKLOAD = Workload(global_batch_size=512, seq_len=2048)
MARGINS = (1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.5, float("inf"))
"""First bound over the best plan's step, at most, of the points that are played together."""


def bounded(search: EqualDevices) -> Iterator[tuple[float, Point]]:
    """Every point that may fit, with a bound on its step that knows of no best plan."""
    for _, family in search.blocks.families():
        for row in search.blocks.rows(family):
            for column in row.columns:
                block = search.opening.block(row.family, row.schedule, row.virtual, column)
                for bound, group in search.opening.open(block):
                    if group.rough:
                        bound = max(bound, search.opening.better(group)[0])
                    for point in search.opening.points(block, group.members):
                        yield bound, point


def order(point: Point) -> tuple[object, ...]:
    """Points of one Program come one after another, then those of one price."""
    divided = point.dp_shard * point.cp > 1
    return (
        point.schedule, point.pp, point.virtual_stages, point.micro_batch_size * point.dp_replicate * point.dp_shard,
        point.zero if divided else 0, point.dp_replicate > 1, point.overlap, point.tp, point.sequence_parallel,
        point.keep_gathered, point.recompute,
    )  # fmt: skip


@dataclass(kw_only=True)
class Tally:
    """What was found so far."""

    played: int = 0
    refused: int = 0
    faster: int = 0
    """Faster than the best plan, and too large."""
    least_s: float = float("inf")
    """Of those that were slower or fit."""


def main(budget_s: float, share: int, shares: int) -> None:
    """Plays a share of all points, or as many as the budget allows, those with the least bounds first."""
    result = gnomon.plan(MODEL, CLUSTER, WORKLOAD, top=1)
    best = result.best[0]
    graph, cluster = model(MODEL), parse_cluster(CLUSTER)
    space = make_space(graph, cluster, WORKLOAD, base=result.space.base, stack=PLAIN_STACK)
    search = EqualDevices(graph, cluster, WORKLOAD, space, PLAIN_STACK, Goal())
    start = time.process_time()
    every = list(bounded(search))
    counts = search.counts
    assert counts.covered + len(every) == space.size, counts
    print(
        f"{time.strftime('%Y-%m-%d')}: the search finds {best.step_s:.6f} s. {space.size:,} points: {counts.illegal:,} "
        f"illegal, {counts.duplicates:,} duplicates, {counts.too_large:,} too large by a bound on memory, "
        f"{len(every):,} to play",
        flush=True,
    )
    tally, low = Tally(), 0.0
    for margin in MARGINS:
        part = sorted(
            (entry for entry in every if low <= entry[0] < best.step_s * margin), key=lambda entry: order(entry[1])
        )
        part = part[len(part) * (share - 1) // shares : len(part) * share // shares]
        for done, (bound, point) in enumerate(part):
            if time.process_time() - start > budget_s:
                print(f"stopped in the next part, {done:,} of {len(part):,} played: {tally}", flush=True)
                return
            play(search, point, bound, best.step_s, tally)
        low = best.step_s * margin
        print(f"first bound up to {margin - 1:.0%} above: all {len(part):,}; {tally}; "
              f"{time.process_time() - start:.0f} s", flush=True)  # fmt: skip


def play(search: EqualDevices, point: Point, bound: float, best_s: float, tally: Tally) -> None:
    """Plays one point and adds it to the tally."""
    try:
        timed = TimedPlan.of(search.graph, search.cluster, search.space.plan(point), WORKLOAD)
    except PlanError:  # rows of these fields are not expressed: what the search counts as illegal when it asks
        tally.refused += 1
        return
    tally.played += 1
    assert bound <= timed.step_s, (bound, timed.step_s, point)
    if timed.step_s < best_s and any(rank.peak_bytes > search.limit for rank in timed.prediction().memory):
        tally.faster += 1
        return
    assert timed.step_s >= best_s, (timed.step_s, point)
    tally.least_s = min(tally.least_s, timed.step_s)


if __name__ == "__main__":
    share, shares = (int(sy) for sy in (sys.argv[2] if len(sys.argv) > 2 else "1/1").split("/"))
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 7200.0, share, shares)
