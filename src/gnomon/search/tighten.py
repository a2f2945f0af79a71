"""Better bounds for points that the first ones leave: the schedule's order played bare, and single ranks under ZeRO 3.

`Tighten.register` remembers the durations of points that may need it; `Tighten.bound` plays all that share a schedule
at once, when the first of them is asked for. Leaves out what the simulator alone says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.plans.parts import ScheduleName
from gnomon.search.alone import alone, passes
from gnomon.search.bounds import ACTIONS, Actions, Job, Pipeline, is_split, layer_seconds, ways
from gnomon.search.leaves import Sharding
from gnomon.search.skeleton import Reductions, play, skeleton
from gnomon.search.space import Point

Doubles = NDArray[np.float64]
_Group = tuple[ScheduleName, int, int, int, Reductions, int]

COLUMNS = 256
"""Sets of durations that are played at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Durations:
    """Seconds of the actions of points that differ only in what begins and ends a step: [stages, 1] each."""

    pipeline: Pipeline
    act: Actions
    sends: Doubles
    count: int
    head: Doubles
    """Before the first forward of a stage that begins a chain."""
    reduce: Doubles
    """Of every microbatch."""
    final: Doubles
    """The last of them, with what follows on its stream; the only one where there is one a step."""
    reductions: Reductions
    lead: int = 0
    """Passes by which gathers may be ahead (ZeRO 3); 0 where they are not looked at."""
    gathers: Doubles | None = None
    """[3 x stages, 1] see `skeleton.play`."""
    lasts: Doubles | None = None
    """[3 x stages, 1] see `skeleton.play`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Loose:
    """A point whose bound can still be made better."""

    point: Point
    durations: Durations
    sharding: Sharding
    column: int
    blocked: Doubles
    """[stages] reductions after all rows of their rank."""
    norm: float
    """Seconds of the norm, in which all ranks meet."""
    adding: Doubles
    """[kinds] of layers: seconds of adding weight gradients up."""


class Tighten:
    """Bounds that play something."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._waiting: dict[_Group, list[Durations]] = {}
        self._ends: dict[int, tuple[Doubles, Doubles, Doubles]] = {}
        self._known: dict[object, Durations] = {}

    def register(self, point: Point, durations: Durations) -> Durations:
        """Remembers durations that will be played with the next of their schedule; the equal ones that are known."""
        parts = durations.head, durations.reduce, durations.final, durations.gathers
        key = id(durations.act), durations.reductions, *(_bytes(part) for part in parts)
        if key not in self._known:
            self._known[key] = durations
            self._waiting.setdefault(_group(point, durations), []).append(durations)
        return self._known[key]

    def bound(self, loose: Loose) -> float:
        """Seconds that a step takes at least, when all ranks meet once a step.

        The bare schedule begins with the update (and gather) that the first stage needs, and ends with the norm, which
        waits for all rows and reductions; reductions that may not overlap follow all rows of their rank.
        """
        ends, final, reduced = self._played(loose)
        on_rank = loose.durations.pipeline.on_rank
        late = float((final + on_rank @ loose.blocked).max())
        found = max(late, float(ends.max()), float(reduced.max())) + loose.norm
        if loose.sharding.zero == 3 and loose.sharding.optimizer.reshard_after_forward:
            found = max(found, self._single(loose) + loose.norm)
        return found

    def _played(self, loose: Loose) -> tuple[Doubles, Doubles, Doubles]:
        key = id(loose.durations)
        if key not in self._ends:
            group = _group(loose.point, loose.durations)
            waiting = self._waiting.pop(group)
            made = skeleton(*group)
            for first in range(0, len(waiting), COLUMNS):
                part = waiting[first : first + COLUMNS]
                acts = [each.act for each in part]
                forward, whole, first_half, second_half = (
                    np.concatenate([getattr(act, name) for act in acts], axis=1) for name in ACTIONS
                )
                linked = part[0].pipeline.linked[:, None]
                sends = np.where(linked, np.concatenate([each.sends for each in part], axis=1), -1.0)
                reduce, last, head = (
                    np.concatenate([getattr(each, name) for each in part], axis=1)
                    for name in ("reduce", "final", "head")
                )
                more = [_side_by_side([getattr(each, name) for each in part]) for name in ("gathers", "lasts")]
                ends, final, reduced = play(
                    made, forward, whole, first_half, second_half, reduce, last, sends, head, *more
                )
                for i, each in enumerate(part):
                    self._ends[id(each)] = ends[:, i], final[:, i], reduced[:, i]
        return self._ends[key]

    def _single(self, loose: Loose) -> float:
        """The longest of a few ranks played by themselves."""
        point, given, sharding = loose.point, loose.durations, loose.sharding
        act, pipeline = given.act, given.pipeline
        back = act.input if is_split(point.schedule) else act.whole
        before, behind, _ = ways(pipeline, act.forward, back, given.sends)
        seconds = layer_seconds(sharding.table, loose.adding, sharding.copying, loose.column)
        layers = [order.tolist() for order in pipeline.split.order]
        rows = passes(point.schedule, point.pp, point.virtual_stages, given.count)
        found = 0.0
        for rank in {0, point.pp // 2, point.pp - 1}:
            low = pipeline.lowest[rank]
            single = alone(
                rows[rank],
                layers,
                seconds,
                sharding.gathered_s.tolist(),
                sharding.reduced_s.tolist(),
                sharding.summed_s.tolist(),
                prefetch=self.job.space.base.overlap.prefetch,
                start=float(given.head[pipeline.root[low], 0] + before[low, 0]),
                behind=float(behind[low, 0]),
            )
            found = max(found, single)
        return found


def _group(point: Point, durations: Durations) -> _Group:
    return point.schedule, point.pp, point.virtual_stages, durations.count, durations.reductions, durations.lead


def _bytes(values: Doubles | None) -> bytes:
    return b"" if values is None else values.tobytes()


def _side_by_side(values: list[Doubles | None]) -> Doubles | None:
    given = [value for value in values if value is not None]
    return np.concatenate(given, axis=1) if given else None


def gathered(
    pipeline: Pipeline, sharding: Sharding, seconds: dict[str, list[float]], prefetch: int
) -> tuple[int, Doubles, Doubles]:
    """(passes by which gathers may be ahead, seconds of gathers, seconds of last layers) for `skeleton.play`.

    At most prefetch + 1 layers are held gathered, so the first gather of a pass waits for a layer of the pass that is
    so many layers back (a pass has at least all but one of its own), which is let go after the pass before that one has
    ended. Stages of one layer count no gathers:
    passes in a row may share it.
    """
    sizes = [len(order) for order in pipeline.split.order]
    lead = -(-(prefetch + 1) // max(min(sizes) - 1, 1)) + 1
    rows = np.zeros((3, len(sizes)))
    lasts = np.zeros((3, len(sizes)))
    for stage, order in enumerate(pipeline.split.order):
        times = sharding.gathered_s[order]
        if len(order) > 1:
            rows[:, stage] = times.sum(), times[1:].sum(), times[:-1].sum()
        lasts[:, stage] = seconds["F"][order[-1]], seconds["B"][order[0]], seconds["I"][order[0]]
    return lead, rows.reshape(-1, 1), lasts.reshape(-1, 1)
