"""Which points of a space are legal: axes and layouts by the rules of `plans.check`, schedules by their orders.

`Legality` answers for axes, for schedules and microbatch sizes, and for the ways of sharding that a block's points
differ in (`Choices`). Leaves out memory (`block_memory`) and time (`blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon import orders
from gnomon.plans import Layout, Mesh
from gnomon.search.bounds.families import Doubles, Family, SearchJob
from gnomon.search.space.legal import broken_rule
from gnomon.search.space.points import Point
from gnomon.sharding.parameters import shard_ranks

Choice = tuple[int, int, int, bool]
"""(dp_replicate, dp_shard, ZeRO stage, overlap) of a point."""


@dataclass(frozen=True, eq=False)
class Choices:
    """What the points of a block differ in: those that stand for themselves and may run."""

    choices: tuple[Choice, ...]
    illegal: int
    """The number of the other points that cannot run: experts that do not divide, ZeRO 3 that waits with its
    reductions, what the stack has not."""
    zero: NDArray[np.int64]
    """[kept] the ZeRO stage that the point names."""
    effective: NDArray[np.int64]
    """[kept] ZeRO stage that has an effect: 0 where there is one rank to divide over."""
    ways: Doubles
    """[kept, 2] ranks that ZeRO divides dense and routed parameters over."""
    kinds: NDArray[np.int64]
    """[kept] equal for those whose actions last equally long: effective stage, whether experts are divided, and whether
    anything is."""
    holding: NDArray[np.int64]
    """[kept] 0, or under ZeRO 2 and 3 equal for those with the same bytes that come and go: 4 x stage, and what kinds
    and overlap add."""


@dataclass(frozen=True, eq=False)
class Scheduled:
    """The schedules and microbatch sizes that go together on so many ranks."""

    rows: tuple[tuple[str, int, tuple[int, ...]], ...]
    """(schedule, virtual stages, columns that run) of each row."""
    blocks: int
    """The number of blocks in all rows."""
    why: dict[str, int]
    """Maps the name of a rule to the number of blocks that break it."""


class Legality:
    """Says which points of one space can run."""

    def __init__(self, job: SearchJob) -> None:
        self.job, self.space = job, job.space
        self._rules: dict[object, str] = {}
        self._scheduled: dict[tuple[int, int], Scheduled] = {}
        self._choices: dict[object, Choices] = {}
        self._counts: dict[int, Doubles] = {}

    def scheduled(self, pp: int, dp: int) -> Scheduled:
        """The schedules and microbatch sizes that run on so many ranks."""
        if (pp, dp) not in self._scheduled:
            # (microbatches, sequences left over) for every size; a rest means that the batch does not divide.
            counts = [divmod(self.space.global_batch, micro * dp) for micro in self.space.micro_batch_size]
            rows, why = [], dict[str, int]()
            for schedule, virtual in self.space.pipelines(pp):
                columns = []
                for column, (count, rest) in enumerate(counts):
                    rule = "batch" if rest or not count else _unscheduled(schedule, count, pp, virtual)
                    if rule:
                        why[rule] = why.get(rule, 0) + 1
                    else:
                        columns.append(column)
                if columns:
                    rows.append((schedule, virtual, tuple(columns)))
            blocks = sum(len(columns) for _, _, columns in rows)
            self._scheduled[pp, dp] = Scheduled(rows=tuple(rows), blocks=blocks, why=why)
        return self._scheduled[pp, dp]

    def microbatches(self, family: Family) -> Doubles:
        """[microbatch sizes] how many there are; 0 where the batch does not divide."""
        if family.dp not in self._counts:
            whole = [divmod(self.space.global_batch, micro * family.dp) for micro in family.micro]
            self._counts[family.dp] = np.array([0 if rest else count for count, rest in whole], float)
        return self._counts[family.dp]

    def illegal(self, tp: int, cp: int, ep: int, layout: Layout) -> str:
        """Name of the rule that axes and layout break; empty if none.

        A rule is about heads, tokens and feed-forwards over tp and cp, or about experts over ep, so the two are asked
        apart; of the layout, only what rules read.
        """
        ulysses = layout.context == "ulysses" and cp > 1
        seen = replace(layout, keep_gathered=False, context="ulysses" if ulysses else "ring")
        return self._rule(tp, cp, 1, seen) or self._rule(1, 1, ep, replace(seen, sequence_parallel=False))

    def _rule(self, tp: int, cp: int, ep: int, layout: Layout) -> str:
        key = tp, cp, ep, layout
        if key not in self._rules:
            base = self.space.base
            # The smallest mesh of these axes: experts lie on dp_shard x tp x cp, so dp_shard takes what ep x etp needs
            # beyond tp x cp.
            need = ep * base.mesh.etp
            shards = need // np.gcd(need, tp * cp)
            mesh = Mesh(tp=tp, cp=cp, ep=ep, etp=base.mesh.etp, dp_shard=int(shards), order=base.mesh.order)
            broken = broken_rule(self.job.graph, base, self.job.workload, mesh, layout)
            self._rules[key] = broken.name if broken else ""
        return self._rules[key]

    def choices(self, family: Family) -> Choices:
        """The choices of a family, which are the same in every block of it."""
        layout = family.layout
        flags = layout.sequence_parallel, layout.keep_gathered
        key = family.tp, family.cp, family.ep, family.dp, family.pp > 1, flags
        if key not in self._choices:
            self._choices[key] = self._chosen(family)
        return self._choices[key]

    def _chosen(self, family: Family) -> Choices:
        choices: list[Choice] = []
        illegal, layout, space = 0, family.layout, self.space
        for replicas, shards in space.shardings(family.dp):
            # Every ep x etp group lies inside dp_shard x cp x tp.
            if shards * family.cp * family.tp % (family.ep * space.base.mesh.etp):
                illegal += space.leaves
                continue
            for zero in space.zero:
                for overlap in space.overlap:
                    point = Point(
                        family.tp, family.cp, family.ep, family.pp, replicas, shards, orders.DEFAULT, 1, 1,
                        layout.sequence_parallel, layout.keep_gathered, layout.context, "none", zero, overlap,
                    )  # fmt: skip
                    away = space.base.optimizer.offload_parameters
                    if zero == 3 and not overlap and (shards * family.cp > 1 or away):
                        illegal += 1  # full sharding reduces layer by layer
                    elif space.canonical(point) == point:
                        if space.runs(family.pp, zero):
                            choices.append((replicas, shards, zero, overlap))
                        else:
                            illegal += 1
        return self.choose(family, tuple(choices), illegal)

    def choose(self, family: Family, choices: tuple[Choice, ...], illegal: int = 0) -> Choices:
        """The choices made from what is kept."""
        meshes = {
            (r, s): replace(family.mesh, pp=1, dp_replicate=r, dp_shard=s)
            for r, s in dict.fromkeys(choice[:2] for choice in choices)
        }
        ways = [[shard_ranks(meshes[r, s], experts=e) for e in (False, True)] for r, s, _, _ in choices]
        divided = [shards * family.cp > 1 for _, shards, _, _ in choices]
        zero = np.array([choice[2] for choice in choices], np.int64)
        of_ranks = np.array(ways, float).reshape(-1, 2)
        # Parameters on the host are gathered layer by layer even by one rank, as under ZeRO 3.
        by_layer = (zero == 3) & self.space.base.optimizer.offload_parameters
        effective = np.where(divided, zero, 3 * by_layer)
        overlap = np.array([choice[3] for choice in choices], np.int64)
        return Choices(
            choices=choices,
            illegal=illegal,
            zero=zero,
            effective=effective,
            ways=of_ranks,
            # A number a combination: 2 x stage (0 … 3), 1 for divided experts, 8 for layer by layer on one rank.
            kinds=2 * effective + (of_ranks[:, 1] > 1) + 8 * (by_layer & ~np.array(divided, bool)),
            # Digits again: 4 x stage, 2 for divided experts, 1 for overlap.
            holding=np.where(effective > 1, 4 * effective + 2 * (of_ranks[:, 1] > 1) + overlap, 0),
        )


@lru_cache(maxsize=4096)
def _unscheduled(schedule: str, count: int, pp: int, virtual: int) -> str:
    """The rule of schedules that a number of microbatches breaks."""
    return "microbatches" if orders.find(schedule).microbatches(pp, count, virtual) else ""
