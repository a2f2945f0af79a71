"""What a search finds: plans that were predicted, and how many points went which way.

`Result` is what `solve` and `plan` return, `Counts` its account of every point. Leaves out how they are found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Plan, Stack, Workload
from gnomon.prediction import Prediction
from gnomon.search.space import Point, Space


@dataclass(frozen=True, kw_only=True)
class Found:
    """One plan that was predicted and fits."""

    point: Point
    plan: Plan
    prediction: Prediction

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.prediction.step_s


SAME_MESH = 2
"""Plans of one mesh among a few that are tried."""


def varied(plans: Sequence[Plan], few: int) -> list[int]:
    """Which plans to try of some in order of predicted time: the first `few`, but at most SAME_MESH with as many ranks
    on each axis, since what a prediction has wrong of one it has wrong of the others. With too few meshes, the next in
    order. Indices, in order."""
    seen: Counter[tuple[int, ...]] = Counter()
    first: list[int] = []
    rest: list[int] = []
    for i, plan in enumerate(plans):
        mesh = plan.mesh
        axes = (mesh.pp, mesh.data_ranks, mesh.cp, mesh.tp, mesh.ep)
        seen[axes] += 1
        (first if seen[axes] <= SAME_MESH else rest).append(i)
    return sorted((first + rest)[:few])


@dataclass(kw_only=True)
class Counts:
    """How many points went which way; they add up to the space."""

    space: int = 0
    priced: int = 0
    """Predicted."""
    too_slow: int = 0
    """Not predicted: a bound on the time is above the best."""
    too_large: int = 0
    """Not predicted: a bound on the memory is above the limit."""
    duplicates: int = 0
    """The same run as another point."""
    illegal: int = 0
    """Cannot run: axes that do not divide, a batch that does not, too few layers."""
    why: dict[str, int] = field(default_factory=dict)
    """Name of a rule -> points that break it."""

    @property
    def bounded(self) -> int:
        """Bounded away, by time or memory."""
        return self.too_slow + self.too_large

    @property
    def covered(self) -> int:
        """All of these."""
        return self.priced + self.bounded + self.duplicates + self.illegal

    def reject(self, why: str, points: int) -> None:
        """Counts points that break a rule."""
        if points:
            self.illegal += points
            self.why[why] = self.why.get(why, 0) + points


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a search found."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    stack: Stack
    goal: Goal
    space: Space
    best: tuple[Found, ...]
    """The fastest plans that fit, the best first."""
    counts: Counts
    limit_bytes: int
    """What a device's peak may be."""
    near: tuple[Found, ...] = ()
    """Plans that are faster than the best and do not fit, the fastest first."""
    least_bytes: int | None = None
    """Bytes that every plan holds on some rank at least; None where no bound was asked."""
    why_illegal: dict[str, int] = field(default_factory=dict)
    """Name of a rule -> points that break it."""


def memory_limit(cluster: Cluster, goal: Goal) -> int:
    """Bytes that a rank's peak may be: the goal's, or its share of the smallest device."""
    least = min(group.node.device.memory_bytes for group in cluster.groups)
    return min(least, goal.memory_bytes) if goal.memory_bytes else int(least * goal.memory_fraction)
