"""What a search finds: plans that were predicted, and how many points went which way.

`Result` is what `solve` and `plan` return, `Counts` its account of every point. Leaves out how they are found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gnomon.errors import PlanError, ProgramError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Plan, Workload
from gnomon.prediction import Prediction
from gnomon.search.space.points import Point, Space, saving_of
from gnomon.software import Stack


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """One plan that was predicted and fits."""

    point: Point
    """The point of the space that it is, or that it was made from where a pass changed its plan after the search."""
    plan: Plan
    """What is run: the point's plan, or what a pass made of it."""
    prediction: Prediction
    """Its time and memory, under the search's workload and stack."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.prediction.step_s


NEAR_TIE = 0.02
"""Plans whose steps differ by less are a tie: predictions of single runs are off by more (docs/accuracy.md)."""

SAFER = 0.01
"""A plan is safer than another whose band reaches so much farther up."""


def safest(best: FoundPlan, others: Sequence[FoundPlan]) -> FoundPlan | None:
    """Picks from the plans that tie with the best the one whose band reaches least far up; None where that of the best
    is no farther than by SAFER."""
    ties = [candidate for candidate in others if candidate.step_s <= best.step_s * (1 + NEAR_TIE)]
    low = min(ties, key=lambda candidate: candidate.prediction.band.high_s, default=best)
    return low if low.prediction.band.high_s < best.prediction.band.high_s * (1 - SAFER) else None


SAME_MESH = 2
"""Plans of one mesh among a few unlike ones, at most."""

UP_TO = 1.5
"""Alternatives are looked for that take so many times the best plan's step, at most."""

Ranks = tuple[int, ...]
"""Ranks of pipeline, data, context, tensor and expert parallelism; of every stage where a plan lists them."""

Sort = tuple[Ranks, str, int, int | None]
"""What plans are alike in: ranks on each axis, recomputation, ZeRO stage and size of a microbatch."""


def sort_of(plan: Plan) -> Sort:
    """The sort of a plan. Schedule, layout, and how data-parallel ranks are divided into replicas do not count."""
    meshes = [stage.mesh for stage in plan.stages if stage.mesh is not None] or [plan.mesh]
    axes = [len(plan.stages) or plan.mesh.pp]
    for mesh in meshes:
        axes += mesh.data_ranks, mesh.cp, mesh.tp, mesh.ep
    return tuple(axes), saving_of(plan.saved), plan.optimizer.zero, plan.schedule.micro_batch_size


def sort_of_point(point: Point) -> Sort:
    """The same of a point's plan."""
    axes = point.pp, point.dp_replicate * point.dp_shard, point.cp, point.tp, point.ep
    return axes, point.recompute, point.zero, point.micro_batch_size


def most_alike(meshes: int, few: int) -> int:
    """Plans of one mesh among a few unlike ones, at most, where there are so many meshes: more than SAME_MESH where
    these are too few."""
    return max(SAME_MESH, -(-few // max(meshes, 1)))


def pick_diverse(plans: Sequence[Plan], few: int, *, fill: bool = False) -> list[int]:
    """Alternatives among plans in order of predicted time: each the first with its ranks on each axis, recomputation,
    ZeRO stage and microbatch, at most `most_alike` of them with the same ranks, since what a prediction has wrong of
    one it has wrong of the others. fill: with too few of them, the next in order. Indices, in order."""
    seen: set[Sort] = set()
    meshes: Counter[Ranks] = Counter()
    same = most_alike(len({sort_of(plan)[0] for plan in plans}), few)
    first: list[int] = []
    rest: list[int] = []
    for i, plan in enumerate(plans):
        sort = sort_of(plan)
        if sort in seen or meshes[sort[0]] == same:
            rest.append(i)
            continue
        seen.add(sort)
        meshes[sort[0]] += 1
        first.append(i)
    return sorted((first + (rest if fill else []))[:few])


@dataclass(kw_only=True)
class Counts:
    """How many points went which way; they add up to the space."""

    space: int = 0
    """Points of the space: what the counts below add up to."""
    num_predicted: int = 0
    """Predicted."""
    too_slow: int = 0
    """Not predicted: a bound on the time is above the best."""
    too_large: int = 0
    """Not predicted: a bound on the memory is above the limit."""
    duplicates: int = 0
    """The same run as another point."""
    illegal: int = 0
    """Cannot run: axes that do not divide, a batch that does not, too few layers."""
    num_unseen: int = 0
    """Not looked at: the budget was spent before."""
    why: dict[str, int] = field(default_factory=dict)
    """Name of a rule -> points that break it."""

    @property
    def bounded(self) -> int:
        """Bounded away, by time or memory."""
        return self.too_slow + self.too_large

    @property
    def covered(self) -> int:
        """The points that were covered, all kinds together."""
        return self.num_predicted + self.bounded + self.duplicates + self.illegal + self.num_unseen

    def __add__(self, other: Counts) -> Counts:
        """Adds the counts of two searches."""
        names = ("space", "num_predicted", "too_slow", "too_large", "duplicates", "illegal", "num_unseen")
        why = dict(Counter(self.why) + Counter(other.why))
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in names}, why=why)

    def reject(self, why: str, points: int) -> None:
        """Counts points that break a rule."""
        if points:
            self.illegal += points
            self.why[why] = self.why.get(why, 0) + points


def why_not(error: PlanError | ProgramError) -> str:
    """The rule that a plan or its Program breaks, in a few words."""
    if isinstance(error, ProgramError) and error.problems:
        return str(error.problems[0]).partition(":")[0]
    return str(error).partition(";")[0][:80]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a search found."""

    graph: Graph
    """The model as the search saw it."""
    cluster: Cluster
    """The machines of every plan."""
    workload: Workload
    """The batch of one step."""
    stack: Stack
    """The program that runs the plans; its record says which of them it can run."""
    goal: Goal
    """What was asked: how much of a device's memory may be filled."""
    space: Space
    """The choices that were searched, all their combinations."""
    best: tuple[FoundPlan, ...]
    """The fastest plans that fit, the best first; with `diverse`, alternatives to it."""
    counts: Counts
    """What became of every point of `space`; those of plans that were only made later by a pass are not in it."""
    limit_bytes: int
    """What a device's peak may be."""
    diverse: bool = False
    """Whether each of the best is the fastest of its sort (`sort_of`), few of one mesh (`most_alike`), up to UP_TO
    times the best step: in place of the fastest ones, alike or not."""
    near: tuple[FoundPlan, ...] = ()
    """Plans that are faster than the best and do not fit, the fastest first."""
    smallest: FoundPlan | None = None
    """Of the plans that were predicted and do not fit, the one with the lowest peak."""
    open_s: float | None = None
    """Seconds that a step of any plan that was not looked at takes at least; None where every plan was covered."""
    neighbours: int | None = None
    """Plans one change away from the best that were predicted after the budget was spent, until none was faster; None
    where every plan was covered."""
    least_bytes: int | None = None
    """Bytes that every plan holds on some rank at least; None where no bound was asked."""
    why_illegal: dict[str, int] = field(default_factory=dict)
    """Name of a rule -> points that break it."""

    def led_by(self, better: FoundPlan | None) -> Result:
        """The same with a faster plan before the others, of which as many are kept as before; itself without one."""
        if better is None:
            return self
        return replace(self, best=(better, *self.best)[: max(len(self.best), 1)])


def memory_limit(cluster: Cluster, goal: Goal) -> int:
    """Bytes that a rank's peak may be: the goal's, or its share of the smallest device."""
    least = min(group.node.device.memory_bytes for group in cluster.groups)
    return min(least, goal.memory_bytes) if goal.memory_bytes else int(least * goal.memory_fraction)
