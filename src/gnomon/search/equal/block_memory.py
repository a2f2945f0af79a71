"""What a family's points hold on their ranks, before any is looked at: bounds on memory, and the room there is.

`BlockMemory` says whether a family, a schedule or a microbatch size may fit at all. Leaves out the memory of single
points (`bounds.point_memory`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gnomon.prices.allocator import workspace_bytes
from gnomon.search.bounds.families import Doubles, Family, Pipeline, SearchJob, v_placed
from gnomon.search.bounds.in_flight import under_way
from gnomon.search.bounds.point_memory import least_held, state_sizes, tensor_room
from gnomon.search.equal.legality import Choices, Legality

ROUNDED = 64.0
"""Bytes by which a mean of whole elements may have been rounded up too far."""


class BlockMemory:
    """Bounds on the memory of the families of one space, looked up by block."""

    def __init__(self, job: SearchJob, legality: Legality, limit: int) -> None:
        """Takes the limit, bytes that a rank's peak may be."""
        self.job, self.space, self.legality, self.limit = job, job.space, legality, limit
        self.clip = self.space.base.optimizer.clip
        self.workspace = min(workspace_bytes(device, job.stack) for device in job.devices)
        self.least = float("inf")
        """Bytes that every point holds on some rank, at least."""
        self._static: dict[object, Doubles] = {}
        self._rooms: dict[int, float] = {}
        self._firsts: dict[object, tuple[float, Doubles]] = {}
        self._layers = np.array([len(kind.layers) for kind in job.kinds.kinds], float)

    def hopeless(self, family: Family) -> bool:
        """Whether no point of a family fits by what is known before its layers are priced: ranks hold the parameters of
        the whole model, each once, and what stays with them between steps."""
        choices = self.legality.choices(family)
        if not choices.choices:
            return False
        # Dense parameters are divided by tp, routed experts by ep (and their own tensor axis), both by the pipeline.
        ways = np.array([family.tp, family.ep * family.mesh.etp], float) * family.pp
        elements = (self.job.elements / ways)[None, :]
        least = float(self._state(choices, elements, np.zeros((1, 2))).min()) + self.workspace - ROUNDED
        if least > self.room(family):
            self.least = min(self.least, least)
            return True
        return False

    def too_large(self, family: Family) -> bool:
        """Whether no point of a family fits: what stays on ranks between steps, in the mean of ranks, is more than
        there is room for. (Tied weights may lie on several ranks or on one; they are left to `rows`.)"""
        if self.job.kinds.shared:
            return False
        choices = self.legality.choices(family)
        if not choices.choices:  # no sharding is legal: no point that could fit
            return True
        elements, frozen = (
            # The mean over ranks: the fullest rank holds no less, however layers are cut into stages.
            (self._layers @ per_kind)[None, :] / family.pp
            for per_kind in (family.table.elements, family.table.frozen)
        )
        least = float(self._state(choices, elements, frozen).min()) + self.workspace - ROUNDED
        self.least = min(self.least, least)
        return least > self.room(family)

    def may_fit(self, family: Family, pipeline: Pipeline) -> NDArray[np.bool_]:
        """[microbatch sizes] whether some sharding may fit, going by one unit under way."""
        held_bytes = least_held(family.table, pipeline) + self.workspace
        # [choices, ranks, sizes]: the fullest rank of each choice, then the choice that is best.
        least = (self.static(family, pipeline)[:, :, None] + held_bytes).max(axis=1).min(axis=0)
        self.least = min(self.least, float(least.min()))
        fits: NDArray[np.bool_] = least <= self.room(family)
        return fits

    def has_room(self, family: Family, schedule: str, virtual: int, pipeline: Pipeline) -> NDArray[np.bool_]:
        """[microbatch sizes] whether the first rank may have room for the units that are under way together."""
        units = [
            under_way(schedule, family.pp, virtual, int(count)) for count in self.legality.microbatches(family).tolist()
        ]
        least, saved_bytes = self._first_rank(family, pipeline)
        roomy: NDArray[np.bool_] = least + np.array(units, float) * saved_bytes <= self.room(family)
        return roomy

    def held_bytes(self, family: Family, schedule: str, virtual: int) -> Doubles:
        """[kept, microbatch sizes] bytes that the fullest rank holds, at least: with one unit under way, and on the
        first rank those that are under way together."""
        pipeline = self.job.pipeline(family.pp, virtual, v_placed(schedule))
        static = self.static(family, pipeline)
        units = [
            under_way(schedule, family.pp, virtual, int(count)) for count in self.legality.microbatches(family).tolist()
        ]
        _, saved_bytes = self._first_rank(family, pipeline)
        one = (static[:, :, None] + least_held(family.table, pipeline)).max(axis=1)
        fullest: Doubles = np.maximum(one, static[:, :1] + np.array(units, float) * saved_bytes) + self.workspace
        return fullest

    def _first_rank(self, family: Family, pipeline: Pipeline) -> tuple[float, Doubles]:
        """(bytes that the first rank holds between steps, [microbatch sizes] that a unit holds on it), at least."""
        key = family.table, family.dp, pipeline.name
        if key not in self._firsts:
            # The first rank holds the most units of any schedule that has rows.
            saved_bytes = (pipeline.split.counts[pipeline.rank_of == 0] @ family.table.kept_bytes).min(axis=0)
            self._firsts[key] = float(self.static(family, pipeline)[:, 0].min()) + self.workspace, saved_bytes
        return self._firsts[key]

    def static(self, family: Family, pipeline: Pipeline) -> Doubles:
        """[kept, ranks] bytes that stay on a rank between steps."""
        key = family.tp, family.cp, family.ep, family.dp, family.layout, pipeline.name
        if key not in self._static:
            table, parts = family.table, pipeline.split
            elements = parts.counts @ table.elements
            for stage, kind, tensor in parts.repeated:
                elements[stage, 0] -= int(table.prices[kind].sharded.local_elements[tensor])
            frozen = parts.counts @ table.frozen
            # [choices, stages] @ [stages, ranks].
            self._static[key] = self._state(self.legality.choices(family), elements, frozen) @ pipeline.on_rank.T
        return self._static[key]

    def _state(self, choices: Choices, elements: Doubles, frozen: Doubles) -> Doubles:
        """[kept, stages] bytes of parameters, gradients and states. elements, frozen (bytes of weights that are not
        trained): [stages, dense and routed]."""
        total = np.zeros((len(choices.choices), len(elements)))
        for column in range(2):
            own = elements[None, :, column]
            # From ZeRO stage `first` on, `size` bytes an element are divided; before it every rank holds all.
            divided = np.ceil(own / choices.ways[:, column, None])
            for size, first in state_sizes(self.space.base, self.job.stack):
                total += np.where(choices.zero[:, None] >= first, divided, own) * size
            asleep = frozen[None, :, column] * (not self.space.base.optimizer.offload_parameters)
            total += np.where(choices.zero[:, None] >= 3, asleep / choices.ways[:, column, None], asleep)
        return total

    def room(self, family: Family) -> float:
        """Bytes of tensors at most: communicators take the rest, at least one of the pipeline, the norm's, and one of
        data-parallel ranks."""
        # Counted from below: only groups that every plan of the family has.
        groups = (family.pp > 1) + (self.clip and self.space.devices > 1) + (family.dp * family.cp > 1)
        return self.tensor_bytes_with(groups)

    def tensor_bytes_with(self, groups: int) -> float:
        """Bytes of tensors at most, next to so many communicators. A prediction gives a job that needs all of a device
        the room that communicators usually take: there the fewest are counted."""
        if self.limit >= min(device.memory_bytes for device in self.job.devices):
            groups = min(groups, 1)
        if groups not in self._rooms:
            self._rooms[groups] = tensor_room(self.job, self.limit, groups)
        return self._rooms[groups]
