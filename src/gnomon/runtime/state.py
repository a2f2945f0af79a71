"""What happens to a rank's parameters and gradients in a step: gathered, freed, reduced, measured, updated.

`State` has one method for each such kind of action; each starts its communication under the name of the buffer that it
writes (`buffers`). Gradients are summed, never averaged: the loss is divided by all tokens of the step beforehand.
Left out: which rows there are, and when (`execute`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.program import NO_UNIT
from gnomon.runtime.buffers import Buffers, Name
from gnomon.runtime.collectives import all_gather, all_reduce, reduce_scatter
from gnomon.runtime.mesh import Groups
from gnomon.runtime.optim import AdamW, AdamWSettings, clip_scale, squares
from gnomon.runtime.parameters import Parameters
from gnomon.runtime.stage import Stage


class State:
    """Parameters, gradients and moments of a rank's stages."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        groups: Groups,
        buffers: Buffers,
        settings: AdamWSettings,
        tied: frozenset[str],
        device: torch.device,
    ) -> None:
        """tied: parameters that several stages hold, whose gradients are added up before the update."""
        self.stages, self.groups, self.buffers, self.settings, self.tied = stages, groups, buffers, settings, tied
        self.device = device
        self.adam = {number: AdamW.of(stage.parameters_) for number, stage in stages.items()}
        self.new_step()

    @property
    def nbytes(self) -> int:
        """Of the moments."""
        return sum(adam.first.nbytes + adam.second.nbytes for adam in self.adam.values())

    def new_step(self) -> None:
        """Forgets the norm of the step before."""
        self.norm = torch.full((), float("nan"), dtype=torch.float64, device=self.device)
        self.scale: Tensor | float = 1.0
        self.joined = False

    def gathered(self, stage: int) -> Parameters:
        """The stage's parameters, once their gather has arrived."""
        self.buffers.wait(("P", stage, NO_UNIT))
        return self.stages[stage].parameters_

    def _grad_name(self, stage: int) -> Name:
        return ("GS" if self.stages[stage].parameters_.zero >= 2 else "G", stage, NO_UNIT)

    def all_reduce(self, stage: int, comm: str) -> None:
        """AR: the sum over a communicator of the gradient, or of what it adds up of it."""
        group = self.groups.by_comm[comm]
        held = self.stages[stage].parameters_
        name = self._grad_name(stage)
        self.buffers.wait(name)
        if comm == "embedding":
            self.join_tied(name)
            return
        if group is None:
            return
        grad = held.my_grad()
        if comm in ("dp", "dp_replicate"):
            self.buffers.start(name, all_reduce(grad, group, wait=False), grad.nbytes)
            return
        chosen = [slice(*range_) for slot, range_ in held.pieces() if slot.sums == comm]
        if not chosen:
            return
        packed = torch.cat([grad[part] for part in chosen])

        def unpack() -> None:
            for part, value in zip(chosen, torch.split(packed, [p.stop - p.start for p in chosen]), strict=True):
                grad[part] = value

        self.buffers.start(name, all_reduce(packed, group, wait=False), packed.nbytes, unpack, (packed,))

    def join_tied(self, row: Name | None = None) -> None:
        """Gives every stage that holds a tied parameter the sum of all their gradients, once a step: over the stages of
        this rank, and over the communicator `embedding`. Under ZeRO stages cut a parameter into other shards than each
        other, so ranks that shard exchange its whole gradient. row: what an AR of the Program writes; without one, all
        holders are on this pipeline rank, and the first NORM or OPT comes here."""
        if self.joined or not self.tied:
            return
        self.joined = True
        stages = {
            n: stage.parameters_ for n, stage in self.stages.items() if self.tied & set(stage.parameters_.by_name)
        }
        if not stages:
            return
        for each in stages:
            self.buffers.wait(self._grad_name(each))
        sharded = any(held.zero for held in stages.values())
        group = self.groups.by_comm["embedding"] or (self.groups.by_comm["dp_shard"] if sharded else None)
        if group is None and len(stages) == 1:
            return
        slots = {slot.name: slot for held in stages.values() for slot in held.slots if slot.name in self.tied}
        first, size = dict[str, int](), 0
        for name, slot in sorted(slots.items()):
            first[name], size = size, size + slot.stop - slot.start
        some = next(iter(stages.values()))
        total = torch.zeros(size, dtype=some.dtypes.grad, device=self.device)
        parts: list[tuple[Parameters, slice, slice]] = []
        for held in stages.values():
            for slot, (low, high) in held.pieces():
                if slot.name in first:
                    at = first[slot.name] + held.mine[0] + low - slot.start
                    parts.append((held, slice(low, high), slice(at, at + high - low)))
        for held, mine, whole in parts:
            total[whole] += held.my_grad()[mine]

        def hand_out() -> None:
            for held, mine, whole in parts:
                held.my_grad()[mine] = total[whole]

        if row is None or group is None:
            if group is not None:
                all_reduce(total, group)
            hand_out()
            return
        self.buffers.start(row, all_reduce(total, group, wait=False), total.nbytes, hand_out, (total,))
        if len(stages) > 1:
            self.buffers.wait(row)

    def unshard(self, stages: Iterable[int]) -> None:
        """UNSHARD: whole parameters from the shards of all ranks."""
        for each in stages:
            held = self.stages[each].parameters_
            self.buffers.wait(("PS", each, NO_UNIT))
            if held.zero == 3:
                held.flat = torch.empty(held.size, dtype=held.dtypes.param, device=self.device)
            assert held.flat is not None  # below stage 3 the shard lies where the gather would write it
            work = all_gather(held.flat, held.shard, self._shards(), wait=False)
            self.buffers.start(("P", each, NO_UNIT), work, held.flat.nbytes)

    def reshard(self, stage: int) -> None:
        """RESHARD: frees what was gathered."""
        self.gathered(stage).flat = None

    def _shards(self) -> ProcessGroup:
        group = self.groups.by_comm["dp_shard"]
        assert group is not None, "rows that shard need dp_shard > 1"
        return group

    def reduce_grad(self, stages: Iterable[int]) -> None:
        """REDUCE_GRAD: this rank's shard of the sum of gradients, in place; later units add to it. One at a time under
        ZeRO 2 and 3: what is under way holds a whole gradient."""
        for each in stages:
            if self.stages[each].parameters_.zero >= 2:
                self.reduced()
            held = self.stages[each].parameters_
            name = self._grad_name(each)
            self.buffers.wait(name)
            whole = held.grad
            assert whole is not None, "a gradient is reduced before it was computed"
            part = whole[held.mine[0] : held.mine[1]]
            work = reduce_scatter(part, whole, self._shards(), wait=False)
            if held.zero == 1:
                self.buffers.start(name, work, whole.nbytes)
                continue

            def finish(held: Parameters = held, part: Tensor = part) -> None:
                if held.grad_shard is None:
                    held.grad_shard = part.clone()  # or it would hold the whole
                else:
                    held.grad_shard += part

            held.grad = None
            self.buffers.start(name, work, whole.nbytes, finish, (whole,))

    def reduced(self) -> None:
        """Until no shard of a gradient is under way."""
        for name in [name for name in self.buffers.arriving if name[0] == "GS"]:
            self.buffers.wait(name)

    def measure_norm(self, stages: Iterable[int]) -> None:
        """NORM: the global gradient norm, and the factor that clips to it."""
        mesh = self.groups.mesh
        self.join_tied()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for each in stages:
            self.buffers.wait(self._grad_name(each))
            held = self.stages[each].parameters_
            total += squares(held, mesh.dp_replicate if held.zero else mesh.data_ranks)
        group = self.groups.by_comm["norm"]
        if group is not None:
            all_reduce(total, group)
        self.norm = total.sqrt()
        self.scale = clip_scale(self.norm, self.settings.clip_norm)

    def update(self, stage: int) -> None:
        """OPT: AdamW on this rank's part."""
        self.join_tied()
        self.buffers.wait(self._grad_name(stage))
        held = self.stages[stage].parameters_
        if held.zero < 3:
            self.gathered(stage)
        self.adam[stage].update(held, self.settings, scale=self.scale)
        held.drop_grad()
