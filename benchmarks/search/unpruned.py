"""The optimum of 175B on 512 A100 with pruning by time off: every point that may fit is looked at.

    nice -n 19 python benchmarks/search/unpruned.py [MARGIN] [SAMPLE]      # default 1.02 and 300; minutes

Predicting all of them would take a day, so: the first bound of every point that is legal, not a duplicate and not too
large is computed, whatever the best plan is; every point whose bound is within MARGIN of the best plan's step is
predicted, and of all others a random SAMPLE. Claims, each asserted: none is faster than the plan that the search found;
no bound is above its prediction; points add up. Prints the lines kept in results/search.md.
"""

from __future__ import annotations

import random
import sys
import time

import gnomon
from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Goal, Workload
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import Point, make_space
from gnomon.search.solve import Search
from gnomon.search.tighten import Loose, Tighten

MODEL, CLUSTER = "gpt3-175b", "64x8xa100-sxm-80gb"
WORKLOAD = Workload(global_batch_size=512, seq_len=2048)


def bounded(search: Search, near_s: float, sample: int) -> tuple[list[tuple[float, Point]], list[tuple[float, Point]]]:
    """(points with a bound up to `near_s`, a random sample of the others), each with its bound; counts the others as
    too slow."""
    draw, near, others = random.Random(0), list[tuple[float, Point]](), list[tuple[float, Point]]()
    for _, family in search.blocks.families():
        for row in search.blocks.rows(family):
            for column in row.columns:
                block = search.opening.block(row.family, row.schedule, row.virtual, column)
                for least, group in search.opening.open(block):
                    for own, item in search.opening.members(group):
                        bound, point = max(least, own), item.point if isinstance(item, Loose) else item
                        if bound <= near_s:
                            near.append((bound, point))
                            continue
                        search.counts.too_slow += 1
                        if len(others) < sample:
                            others.append((bound, point))
                        elif (place := draw.randrange(search.counts.too_slow)) < sample:
                            others[place] = bound, point
                search.opening.tighten = Tighten(search.job)  # what was remembered for playing
    return near, others


def main(margin: float, sample: int) -> None:
    """Looks at all points."""
    found = gnomon.plan(MODEL, CLUSTER, WORKLOAD, top=1)
    best = found.best[0]
    graph, cluster = model(MODEL), parse_cluster(CLUSTER)
    space = make_space(graph, cluster, WORKLOAD, base=found.space.base, stack=PLAIN_STACK)
    search = Search(graph, cluster, WORKLOAD, space, PLAIN_STACK, Goal(), top=1)
    start = time.process_time()
    near, others = bounded(search, best.step_s * margin, sample)
    spent = time.process_time() - start
    print(
        f"{time.strftime('%Y-%m-%d')}: the search finds {best.step_s:.6f} s; bounds of all points that may fit: "
        f"{spent:.0f} s of one core; {len(near):,} within the margin",
        flush=True,
    )
    counts = search.counts
    assert counts.covered + len(near) == space.size, counts
    least, gaps = float("inf"), []
    for name, part in (("near", near), ("sample", others)):
        start, fitting, refused = time.process_time(), 0, 0
        for bound, point in part:
            try:
                prediction = predict(graph, cluster, space.plan(point), WORKLOAD)
            except PlanError:  # rows of these fields are not expressed: what the search counts as illegal when it asks
                refused += 1
                continue
            assert bound <= prediction.step_s, (bound, prediction.step_s, point)
            gaps.append(prediction.step_s / bound - 1)
            if all(rank.peak_bytes <= search.limit for rank in prediction.memory):
                fitting, least = fitting + 1, min(least, prediction.step_s)
                assert prediction.step_s >= best.step_s, (prediction.step_s, point)
        print(
            f"{name}: {len(part):,} asked for, {refused:,} refused, {fitting:,} fit, "
            f"{time.process_time() - start:.0f} s",
            flush=True,
        )
    gaps.sort()
    print(
        f"{space.size:,} points: {counts.illegal:,} illegal, {counts.duplicates:,} duplicates, {counts.too_large:,} "
        f"too large, {len(near):,} with a bound within {margin - 1:.1%} of the best, {counts.too_slow:,} above; the "
        f"fastest of all predicted that fit: {least:.6f} s; predictions are above their first bound by "
        f"{gaps[len(gaps) // 2]:.2%} (median), {gaps[-1]:.1%} at most"
    )


if __name__ == "__main__":
    main(*(float(text) for text in sys.argv[1:2] or ["1.02"]), *(int(text) for text in sys.argv[2:3] or ["300"]))
