"""Bamboo's step on one process: its own stage, a copy of the next one's, and what is needed to go on within a step.

`ProcessWork` does a rank's rows of the Program (`methods.bamboo.redundant`) on real tensors. It keeps what it sent
until the step is over, the input of each redundant forward, and which rows it has done. So a step that was cut off goes
on with other rows (`ProcessWork.resume`): the copy's stage becomes the process's own, its backwards are done again for
all units, from the activations that the redundant forward kept or, where these were let go, from its input; messages
that were lost on the way are sent again. Norm and loss are sums that do not depend on who computed their terms. Left
out: processes that come and go (`takeover`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.lowering.edit import Row, rows_of
from gnomon.methods.bamboo import fail_over, with_copy
from gnomon.runtime.launch.redundant_rows import Lines, RankExecutor, RowActions, StepUnderWay
from gnomon.runtime.mesh.groups import stage_sets
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.step.buffers import Buffers, Name


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """How far a process is in a step that was cut off: what it tells the others."""

    received: frozenset[Name] = frozenset()
    """Messages that it has."""
    reduced: frozenset[int] = frozenset()
    """Stages whose gradients it has added up with the other replicas'."""
    norm: float | None = None
    """Of all gradients, once it is known: then all replicas were reduced."""
    copied: bool = False
    """Whether it has the gradient of the stage that it has a copy of."""


class ProcessWork(RowActions):
    """What one process does of a plan with copies. `own` is its rank's part, `copy` that of the next rank."""

    def __init__(self, make: Callable[[int], RankExecutor], rank: int) -> None:
        """Takes make, which makes the part of a rank, and the rank of the plan that the process was started for."""
        self.own = make(rank)
        self.copy = make(self.own.peer(self.own.stage + 1))
        self.buffers = Buffers()
        self.own.share(self.buffers)
        self.copy.share(self.buffers)
        self.plan, self.graph, self.workload = self.own.plan, self.own.graph, self.own.workload
        plain = self.own.program
        self.program = replace(plain, counts=(1,) * plain.num_classes)
        self.plays: dict[int, RankExecutor] = {self.own.stage: self.own}
        """Stages whose work this process does."""
        self.rows: Sequence[Row] = ()
        self.places: tuple[int, ...] = ()
        self.keepers: Mapping[int, int] = {}
        """Rank -> place of the process that keeps a copy of its state."""
        self.place = 0
        self.now = StepUnderWay()
        self.at: Row | None = None
        """The row that runs; None between steps."""
        self.groups = {}
        for part in (self.own, self.copy):
            part.messages = Lines(part, self)  # type: ignore[assignment]

    # --- who does what

    def settle(self, places: tuple[int, ...], born: Sequence[int], keepers: Mapping[int, int]) -> None:
        """Who does what from now on. places: of the process that does each rank's work. born: rank that each process
        was started for, by place."""
        here = self.place = dist.get_rank()
        self.places, self.keepers = places, dict(keepers)
        # One process may have both its own stage and that of a lost rank.
        parts = [part for part in (self.own, self.copy) if places[part.number] == here]
        self.plays = {part.stage: part for part in parts}
        self.rows = self._rows(born)

    def _rows(self, born: Sequence[int]) -> list[Row]:
        """The rows of this process's replica, in which some processes may have two stages."""
        count, here = self.plan.num_stages, dist.get_rank()
        ranks = [self.own.peer(stage) for stage in range(count)]
        # A rank whose work is done by a process that was started for another one has failed over.
        dead = [stage for stage in range(count) if born[self.places[ranks[stage]]] != ranks[stage]]
        listed = rows_of(fail_over(self.program, dead, one_update=False) if dead else self.program)
        alive = [stage for stage in range(count) if stage not in dead]
        rows = list(listed[alive.index(self.own.stage)]) if self.own.stage in self.plays else []
        if not any(row.kind == "NORM" for row in rows):
            at = next((i for i, row in enumerate(rows) if row.kind == "OPT"), len(rows))
            # All meet in it, even where nothing is clipped: see `_norm`.
            rows.insert(at, Row(kind="NORM", stage=self.own.stage))
        if self.own.stage in self.plays:
            holds, is_copied = self.keepers.get(self.copy.number) == here, self.own.number in self.keepers
            rows = with_copy(rows, self.own.stage, count, holds=holds, sends=is_copied)
        return rows

    # --- a step

    def begin(self, number: int, batch: Tensor | Batch) -> None:
        """Begins a new step with its batch."""
        self.now = StepUnderWay(number=number)
        self.buffers.tensors.clear()
        for part in (self.own, self.copy):
            part.feed.take(batch)
            part.state.new_step()
            part.compute.new_step()
            part.compute.saved.clear()
            for parameters in part.stage_parameters:
                parameters.begun.clear()

    def run(self) -> None:
        """The rows of the step that are left."""
        for row in self.rows:
            key = row.kind, row.stage, row.unit
            if key not in self.now.rows_done:
                self.row(row)
                self.now.rows_done.add(key)

    @property
    def keeps(self) -> bool:
        """Whether `copy` is up to date, or will be at the end of this step."""
        return self.keepers.get(self.copy.number) == self.place

    def row(self, row: Row) -> None:
        """Carries out one row of the Program."""
        self.at = row
        getattr(self, f"_{row.kind.lower()}")(row.stage, row.unit)

    def total(self) -> tuple[float, float]:
        """(loss of the step, norm of its gradients), of all ranks: the end of a step."""
        mine = torch.zeros(self.plan.world_size, dtype=torch.float64)
        for part in self.plays.values():
            mine[part.number] = part.compute.loss
        self.at = None
        for work, _ in self.now.leaving:
            work.wait()
        dist.all_reduce(mine)  # a rank's term is one process's, and 0 in the others: exact in any order
        assert self.now.norm is not None
        norm = self.now.norm if self.plan.optimizer.clip else math.nan
        return math.fsum(mine.tolist()), norm

    # --- going on within a step

    def progress(self) -> StepProgress:
        """How far this process is in the step; messages that are on their way are none."""
        now = self.now
        reduced = {stage for kind, stage, _ in now.rows_done if kind == "AR"}
        received = frozenset(name for name in now.received if name[0] != "GC")
        return StepProgress(received=received, reduced=frozenset(reduced), norm=now.norm, copied=now.copied)

    def cut_off(self) -> None:
        """Forgets what was on its way when connections broke."""
        now = self.now
        for name in now.coming:
            self.buffers.tensors.pop(name, None)
            buffer, stage, unit = name
            # It was posted to a connection that is broken: the row receives once more, from whoever has that stage now.
            now.rows_done.discard((f"RECV_{'F' if buffer == 'X' else 'B'}", stage, unit))
        if not now.copied:
            now.rows_done.discard(("RECV_COPY", self.own.stage, -1))
        now.coming.clear()
        now.leaving.clear()

    def take_over(self) -> None:
        """The copy's stage becomes this process's own, within the step."""
        now, stage = self.now, self.copy.stage
        units = {unit for kind, at, unit in now.rows_done if kind == "FRC" and at == stage}
        updated = ("OPT_COPY", stage, -1) in now.rows_done
        # Its forward ran here as the redundant one; what of it did not arrive is sent again by `resume`.
        now.rows_done |= {(kind, stage, unit) for unit in units for kind in ("LOAD", "RECV_F", "F", "SEND_F")}
        # The whole gradient came before the rank was lost: no backward of its stage is left. It came
        # clipped (`_send_copy`).
        if now.copied:
            all_units = range(self.own.feed.num_units)
            now.rows_done |= {(kind, stage, unit) for unit in all_units for kind in ("B", "SEND_B", "RECV_B")}
            now.rows_done.add(("AR", stage, -1))
            now.scaled.add(stage)
            now.received |= {("DY", stage, unit) for unit in all_units}
            for parameters in self.copy.stage_parameters:
                parameters.begun.update(parameters.by_name)
        else:
            for parameters in self.copy.stage_parameters:
                parameters.grad = None  # some of it may have been sent
                parameters.begun.clear()
        if updated:
            now.rows_done.add(("OPT", stage, -1))

    def resume(self, everyone: Sequence[StepProgress], takeovers: Mapping[int, int]) -> None:
        """Makes ready for the rest of the step, with how far every process is. takeovers: rank that is lost now ->
        place of the process that has taken it over; `take_over` and `settle` were called."""
        now = self.now
        # A sum over replicas stands only if all of them have it; else all add up again, from the terms that `_ar`
        # keeps.
        for stage in {row.stage for row in self.rows if row.kind == "AR"}:
            members = {self.places[rank] for rank in stage_sets(self.plan)[stage]}
            if not all(stage in self._reduced(everyone, place, stage, takeovers) for place in members):
                now.rows_done.discard(("AR", stage, -1))
        now.norm = next((progress.norm for progress in everyone if progress.norm is not None), None)
        for row in self.rows:
            if row.kind == "NORM":
                (now.rows_done.discard if now.norm is None else now.rows_done.add)((row.kind, row.stage, row.unit))
            if row.kind == "SEND_COPY" and not everyone[self.keepers[self.own.number]].copied:
                now.rows_done.discard((row.kind, row.stage, row.unit))
            if row.kind in ("SEND_F", "SEND_B"):
                hop = 1 if row.kind == "SEND_F" else -1
                name = ("X" if hop > 0 else "DY", row.stage + hop, row.unit)
                target = self.own.peer(row.stage + hop)
                place = self.places[target]
                # Who has the lost rank's gradient runs no backward of its stage, and needs no message for one.
                needless = target in takeovers and everyone[place].copied
                if needless or name in everyone[place].received:
                    now.rows_done.add((row.kind, row.stage, row.unit))
                # Sent, and lost on the way.
                elif name in now.log:
                    now.rows_done.discard((row.kind, row.stage, row.unit))
        for name, tensors in now.log.items():
            (buffer, stage, unit), hop = name, 1 if name[0] == "X" else -1
            # Both ends are here now: what would have been a message is handed over.
            within = stage in self.plays and stage - hop in self.plays
            if within and ("F" if buffer == "X" else "B", stage, unit) not in now.rows_done:
                self.buffers.tensors.setdefault(name, tuple(x.detach() for x in tensors))

    def _reduced(
        self, everyone: Sequence[StepProgress], place: int, stage: int, takeovers: Mapping[int, int]
    ) -> frozenset[int]:
        """Stages that a process has added up; of one that it took over only with the gradient that it was sent."""
        progress = everyone[place]
        lost = any(takeovers.get(rank) == place for rank in stage_sets(self.plan)[stage])
        return (frozenset({stage}) if progress.copied else frozenset()) if lost else progress.reduced
