"""Better bounds for points that the first ones leave: the schedule's order played bare, and single ranks under ZeRO 3.

`Tighten.register` remembers points that may need it; `Tighten.bound` plays all that share a schedule at once, when the
first of them is asked for; `Tighten.single` looks at ranks one by one. Leaves out what the simulator alone says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.search.bounds.bare_schedule import Reductions, play, skeleton
from gnomon.search.bounds.families import (
    ACTIONS,
    Actions,
    Ends,
    Pipeline,
    SearchJob,
    is_split,
    layer_seconds,
    way,
    ways,
)
from gnomon.search.bounds.layer_tables import KindTable
from gnomon.search.bounds.point_time import Sharding
from gnomon.search.bounds.zero2_rank import gaps_of, ranks_with_stalls_s
from gnomon.search.bounds.zero3_rank import LayerTimes, rank_by_itself_s, rows_of_ranks
from gnomon.search.space.points import Point

Doubles = NDArray[np.float64]
_Group = tuple[str, int, int, int, Reductions, tuple[int, ...], int]

COLUMNS = 256
"""The number of sets of durations that are played at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Loose:
    """A point whose bound can still be made better."""

    point: Point
    """The point."""
    pipeline: Pipeline
    """How its layers are cut into stages."""
    act: Actions
    """[stages, 1] seconds of each action."""
    sends: Doubles
    """[stages - 1, 1] seconds of messages."""
    count: int
    """Microbatches."""
    ends: Ends
    """[stages] seconds of what begins and ends a step, each."""
    sharding: Sharding
    """How its data-parallel ranks divide parameters and states."""
    table: KindTable
    """Prices of its family's layers."""
    column: int
    """Index of the microbatch size."""
    adding: Doubles
    """[kinds] of layers: seconds of adding weight gradients up."""
    static: Doubles
    """[ranks] bytes that stay between steps."""

    @property
    def gathers(self) -> bool:
        """Whether layers are gathered again and again."""
        return self.sharding.zero == 3 and self.sharding.optimizer.reshard_after_forward

    @property
    def reductions(self) -> Reductions:
        """Says which reductions the skeleton has rows for."""
        if self.sharding.zero == 3:
            return "layers"
        if self.ends.microbatch_reduce.any():
            return "stages"
        return "once" if self.ends.reduce.any() and not self.ends.blocked.any() else ""


class Tighten:
    """Bounds that play something."""

    def __init__(self, job: SearchJob) -> None:
        self.job = job
        self._waiting: dict[_Group, dict[Loose, float]] = {}
        self._found: dict[Loose, float] = {}

    def register(self, loose: Loose, bound: float) -> None:
        """Remembers a point that may be played with the next of its schedule, and the bound that it has."""
        self._waiting.setdefault(self._group(loose), {})[loose] = bound

    def with_stalls(self, loose: Loose) -> float:
        """Seconds that a step takes at least, under ZeRO 2: computing of the busiest rank, with what it waits for
        reductions, from the first forward on."""
        if loose in self._found:  # was played along
            return self._found[loose]
        point, pipeline, act = loose.point, loose.pipeline, loose.act
        stalls = gaps_of(point.schedule, point.pp, point.virtual_stages, loose.count)
        before = way(pipeline, act.forward, loose.sends)[pipeline.lowest, 0]
        head = loose.ends.head[pipeline.root[pipeline.lowest]]
        seconds = float(
            (head + before + ranks_with_stalls_s(stalls, act, loose.ends.microbatch_reduce)).max() + loose.ends.norm
        )
        waiting = self._waiting[self._group(loose)]
        waiting[loose] = max(waiting[loose], seconds)
        return seconds

    def bound(self, loose: Loose, worst: float = float("inf")) -> float:
        """Seconds that a step takes at least, when all ranks meet once a step. worst: points with a bound above it are
        not played along.

        The bare schedule begins with the update (and gather) that the first stage needs, and ends with the norm, which
        waits for all rows and reductions; reductions that may not overlap follow all rows of their rank.
        """
        if loose not in self._found:
            group = self._group(loose)
            waiting = self._waiting[group]
            # A level is one array operation for all columns, so points that are likely to be asked for next are played
            # along, those with the least bounds first.
            near = [other for other, bound in waiting.items() if bound < worst and other is not loose]
            part = [loose, *sorted(near, key=lambda other: waiting[other])[: COLUMNS - 1]]
            for member, seconds in zip(part, self._play(group, part), strict=True):
                self._found[member] = seconds
                del waiting[member]
        # A point is asked for once, so its bound need not be kept.
        return self._found.pop(loose)

    def _play(self, group: _Group, part: list[Loose]) -> list[float]:
        first = part[0]
        acts = Actions(*(np.concatenate([getattr(member.act, name) for member in part], axis=1) for name in ACTIONS))
        # -1 marks stages that are not linked: no message is waited for.
        sends = np.where(
            first.pipeline.linked[:, None], np.concatenate([member.sends for member in part], axis=1), -1.0
        )
        reduce, final = _side_by_side([self._reductions(member) for member in part])
        head = np.stack([member.ends.head for member in part], axis=1)
        gathers = lasts = None
        if first.gathers:
            gathers, lasts = _side_by_side([self._gathered(member) for member in part])
        ends, finals, reduced = play(skeleton(*group), acts, reduce, final, sends, head, gathers, lasts)
        blocked = first.pipeline.on_rank @ np.stack([member.ends.blocked for member in part], axis=1)
        late = np.maximum(np.maximum(ends.max(axis=0), reduced.max(axis=0)), (finals + blocked).max(axis=0))
        return [float(late[i] + member.ends.norm) for i, member in enumerate(part)]

    def _reductions(self, loose: Loose) -> tuple[Doubles, Doubles]:
        """([stages] seconds of a reduction of every microbatch, of the last with what follows on its stream)."""
        if loose.reductions != "layers":
            return loose.ends.microbatch_reduce, loose.ends.reduce
        counts, sharding = loose.pipeline.split.counts, loose.sharding
        # [stages, kinds] @ [kinds]: reductions of all layers of a stage.
        reduce = counts @ sharding.reduced_s
        return reduce, reduce + counts @ sharding.summed_s * loose.pipeline.own

    def _gathered(self, loose: Loose) -> tuple[Doubles, Doubles]:
        return gathered(loose.pipeline, loose.sharding, self._layers(loose))

    def _layers(self, loose: Loose) -> dict[str, list[float]]:
        sharding = loose.sharding
        return layer_seconds(loose.table, loose.adding, sharding.copying, loose.column)

    def _group(self, loose: Loose) -> _Group:
        point = loose.point
        layers = tuple(len(order) for order in loose.pipeline.split.order) if loose.gathers else ()
        gathers_open = self.job.space.base.overlap.prefetch + 1 if loose.gathers else 0
        return point.schedule, point.pp, point.virtual_stages, loose.count, loose.reductions, layers, gathers_open

    def by_itself(self, loose: Loose) -> float:
        """Seconds that a step takes at least, under ZeRO 3: the longest of a few ranks played by themselves."""
        point, sharding, act, pipeline = loose.point, loose.sharding, loose.act, loose.pipeline
        back = act.input if is_split(point.schedule) else act.whole
        before, behind, _ = ways(pipeline, act.forward, back, loose.sends)
        times = LayerTimes(
            layers=[order.tolist() for order in pipeline.split.order],
            seconds=self._layers(loose),
            gathered=sharding.gathered_s.tolist(),
            reduced=sharding.reduced_s.tolist(),
            summed=sharding.summed_s.tolist(),
        )
        rows = rows_of_ranks(point.schedule, point.pp, point.virtual_stages, loose.count)
        longest = 0.0
        # Any rank is a bound. Each costs a play layer by layer, so only three are looked at.
        for rank in {0, point.pp // 2, point.pp - 1}:
            low = pipeline.lowest[rank]
            single = rank_by_itself_s(
                rows[rank],
                times,
                prefetch=self.job.space.base.overlap.prefetch,
                start=float(loose.ends.head[pipeline.root[low]] + before[low, 0]),
                behind=float(behind[low, 0]),
            )
            longest = max(longest, single)
        return longest + float(loose.ends.norm)


def _side_by_side(pairs: list[tuple[Doubles, Doubles]]) -> tuple[Doubles, Doubles]:
    """Columns of the first and of the second of each pair."""
    first, second = zip(*pairs, strict=True)
    return np.column_stack(first), np.column_stack(second)


def gathered(pipeline: Pipeline, sharding: Sharding, seconds: Mapping[str, list[float]]) -> tuple[Doubles, Doubles]:
    """(seconds of gathers, seconds of last layers) for `bare_schedule.play`. Stages of one layer count no gathers:
    passes in a row may share it."""
    stages = len(pipeline.split.order)
    rows, lasts = np.zeros((3, stages)), np.zeros((3, stages))
    for order, own in pipeline.distinct:
        times = sharding.gathered_s[order]
        # Rows: all gathers of a stage, all but the first, all but the last (a turned pass has one already).
        if len(order) > 1:
            rows[:, own] = np.array([times.sum(), times[1:].sum(), times[:-1].sum()])[:, None]
        # The last layer of a pass runs after its gather: the model's last in forward, the stage's first in backward.
        ends = seconds["F"][order[-1]], seconds["B"][order[0]], seconds["I"][order[0]]
        lasts[:, own] = np.array(ends)[:, None]
    return rows.reshape(-1, 1), lasts.reshape(-1, 1)
