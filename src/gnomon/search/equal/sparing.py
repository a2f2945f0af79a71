"""Plans to try once a search's budget is spent and none was found that fits: of each family the ones that keep little.

`sparing_points` orders them by what they hold, by the same bounds on memory as the search (`block_memory`), and then by
time. They are few and cheap to name, so that a request on thousands of devices has a plan to show in time. Leaves out
predicting them (`solve`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from gnomon import orders
from gnomon.search.bounds.families import Family
from gnomon.search.equal.blocks import Blocks
from gnomon.search.space.points import Point, Recompute

ROOMY = 0.85, 0.93
"""Shares of the room for tensors below which a plan is taken before others: bounds on memory leave something out."""

SAVES_MOST = "full", "selective", "offload", "none"
"""Ways of recomputing, the one that keeps least first."""


@dataclass(frozen=True)
class _Candidate:
    """A point, the share of the room that it takes at least, and a bound on its time."""

    point: Point
    share: float
    time_s: float

    @property
    def order(self) -> tuple[float, ...]:
        """Roomy ones by time, then the others by what they hold."""
        within = next((i for i, share in enumerate(ROOMY) if self.share <= share), len(ROOMY))
        return (within, self.time_s) if within < len(ROOMY) else (within, self.share)


def sparest(recompute: Iterable[str]) -> str:
    """Picks from some ways of recomputing the one that keeps least."""
    return next(name for name in SAVES_MOST if name in set(recompute))


def sparing_points(blocks: Blocks, families: Iterable[Family]) -> Iterator[Point]:
    """Picks from each family that recomputes most, at the smallest microbatch, the plan that shards least of those with
    room to spare, and the plan that holds least; what is most likely to fit, and fast, first."""
    candidates = [candidate for family in families for candidate in _of_family(blocks, family)]
    for candidate in sorted(dict.fromkeys(candidates), key=lambda candidate: candidate.order):
        yield candidate.point


def _of_family(blocks: Blocks, family: Family) -> Iterator[_Candidate]:
    choices, legal = blocks.legality.choices(family), blocks.legality.scheduled(family.pp, family.dp).rows
    # One schedule is enough here: the default where it can run, else the first that can.
    rows = [row for row in legal if row[0] == orders.DEFAULT] or list(legal[:1])
    if not choices.choices or not rows:
        return
    schedule, virtual, columns = rows[0]
    column = min(columns, key=lambda at: family.micro[at])
    peak_bytes = blocks.memory.held_bytes(family, schedule, virtual)[:, column] / blocks.memory.room(family)
    time_s = float(blocks.row_bound(family, schedule, virtual, column))
    roomy = np.flatnonzero(peak_bytes <= ROOMY[0])
    picked = {int(np.argmin(peak_bytes))}
    if len(roomy):
        # A choice is (replicas, shards, zero, overlap): the lowest ZeRO stage, of equal ones with overlap.
        picked.add(min(roomy.tolist(), key=lambda at: (choices.choices[at][2], not choices.choices[at][3])))
    layout = family.layout
    for at in sorted(picked):
        # In shares of the room: a lower bound above 1 says that the plan cannot fit.
        if peak_bytes[at] > 1:
            continue
        replicas, shards, zero, overlap = choices.choices[at]
        point = Point(
            family.tp, family.cp, family.ep, family.pp, replicas, shards, schedule, virtual, family.micro[column],
            layout.sequence_parallel, layout.keep_gathered, layout.context, cast(Recompute, family.recompute), zero,
            overlap,
        )  # fmt: skip
        yield _Candidate(point, float(peak_bytes[at]), time_s)
