"""Experts that ranks of ep hold as a plan places them: their gradients are added up, and they move (FlexMoE).

`Replicas` counts the tokens that experts get, as `router_bias` does. Every so many steps each rank works out by
`control.placing` what all others do, and slots that have another expert then get its weights, its master copy and its
moments from a rank that has them. Gradients of an expert that several ranks hold are added up over these before the
update, in the order of ranks on each, so that copies stay the same to the bit. Two all-to-alls carry what a reduction
by rings would: each holder adds up one part and gives it to the others. Leaves out who computes which rows
(`plans.replicas`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.control.placing import Look, PlacingCosts, move
from gnomon.graph import Graph, Layer
from gnomon.lowering.norm import EVERYONE
from gnomon.plans.experts import routers
from gnomon.plans.replicas import Placement, holders, on_ranks
from gnomon.runtime.mesh.collectives import all_reduce, all_to_all
from gnomon.runtime.mesh.groups import Groups
from gnomon.runtime.module.apply import held_here
from gnomon.runtime.module.stage import Stage
from gnomon.runtime.optim.update import Update
from gnomon.runtime.parameters.parameters import Parameters, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalanced:
    """What one look of the controller changed, of one layer."""

    step: int
    """After which it changed."""
    layer: str
    """Name of the layer."""
    slots: tuple[int, ...]
    """That have another expert now."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """The gradient of an expert's parameter that several ranks have terms of."""

    ranks: tuple[int, ...]
    """Of ep, that hold it."""
    pieces: tuple[Tensor, ...]
    """A part of it for each of them, which that one adds up; views."""

    def piece(self, rank: int) -> Tensor:
        """The piece that a holder adds up."""
        return self.pieces[self.ranks.index(rank)]


class Replicas:
    """The replicas of experts on one rank: it counts rows, and moves experts at a look."""

    def __init__(
        self,
        graph: Graph,
        stages: Mapping[int, Stage],
        updates: Mapping[int, Sequence[Update]],
        groups: Groups,
        placements: Mapping[str, Placement],
        costs: PlacingCosts,
        every: int,
        device: torch.device,
    ) -> None:
        """Takes updates, the optimizer's states of each stage's parameters, placements of all layers of the job, and
        every, the steps between two looks; 0 for none."""
        self.stages, self.updates, self.costs, self.every = stages, updates, costs, every
        group = groups.by_comm["ep"]
        assert group is not None, "experts are placed on several ranks of ep"
        self.ep, self.rank, self.group, self.everyone = groups.mesh.ep, groups.here.along["ep"], group, groups
        self.experts, self.placements = {router.layer: router.experts for router in routers(graph)}, dict(placements)
        self.order = tuple(self.placements)
        self.layer_of = {
            layer.call.parameter_name(tensor.name, layer.index): layer.label
            for layer in graph.layers()
            if layer.label in self.placements
            for tensor in graph.block(layer.call.block).parameters
        }
        self.counts = torch.zeros((len(self.order), max(self.experts.values())), dtype=torch.int64, device=device)
        """(layers, experts): tokens since the last look, of this rank until they are added up."""
        self.steps = 0
        """Since then."""
        self.step = 0
        self.rebalanced: list[Rebalanced] = []
        """What was moved, in order."""
        self._hand_out()

    def note(self, layer: Layer, indices: Tensor) -> None:
        """Counts rows of each expert of a layer. indices: (…, topk), the experts that tokens chose."""
        self.counts[self.order.index(layer.label)] += torch.bincount(
            indices.reshape(-1), minlength=self.counts.shape[1]
        )

    def _hand_out(self) -> None:
        """Tells each stage where its layers' experts are."""
        for stage in self.stages.values():
            here = {layer.label for layer in stage.layers}
            stage.placements = {label: row for label, row in self.placements.items() if label in here}

    def _placed(self, stage: int) -> list[tuple[Parameters, Slot]]:
        """Parameters of a stage's experts."""
        return [
            (parameters, slot)
            for parameters in self.stages[stage].own_parameters
            if parameters.experts
            for slot in parameters.slots
            if slot.experts is not None
        ]

    def _shared(self, stage: int) -> list[Shared]:
        """Gradients of this rank that others have terms of, in an order that all of them have: by parameter, by
        expert."""
        found = []
        for parameters, slot in self._placed(stage):
            grad = parameters.whole_grad()[slot.start : slot.stop].view(slot.shape[0], -1)
            label, own = self.layer_of[slot.name], slot.experts or ()
            for expert, ranks in enumerate(holders(self.placements[label], self.experts[label], self.ep)):
                if len(ranks) > 1 and self.rank in ranks:
                    pieces = grad[own.index(expert)].tensor_split(len(ranks))
                    found.append(Shared(ranks=ranks, pieces=tuple(pieces)))
        return found

    def add_up(self, stage: int) -> int:
        """Adds up the gradients of this stage's experts over the ranks that hold them; returns the bytes sent."""
        rows = {self.placements[self.layer_of[slot.name]] for _, slot in self._placed(stage)}
        if not any(len(set(row)) < len(row) for row in rows):
            return 0
        shared, me = self._shared(stage), self.rank
        # All ranks list what they share in one order (`_shared`), so messages between two ranks need no labels.
        others = [[one for one in shared if rank != me and rank in one.ranks] for rank in range(self.ep)]
        terms = self._swapped(
            [[one.piece(to) for one in others[to]] for to in range(self.ep)],
            [[one.piece(me) for one in others[by]] for by in range(self.ep)],
        )
        # The first all-to-all is a reduce-scatter: rank `to` gets all terms of the piece that it adds up.
        came = {(id(one), by): term for by in range(self.ep) for one, term in zip(others[by], terms[by], strict=True)}
        for one in shared:
            own = one.piece(me)
            total = torch.zeros_like(own)
            # In the order of ranks on every holder: the sum is then the same to the bit whoever makes it.
            for by in one.ranks:
                total += own if by == me else came[id(one), by]
            own.copy_(total)
        # The second is an all-gather: each holder's finished piece to all others.
        sums = self._swapped(
            [[one.piece(me) for one in others[to]] for to in range(self.ep)],
            [[one.piece(by) for one in others[by]] for by in range(self.ep)],
        )
        for by in range(self.ep):
            for one, value in zip(others[by], sums[by], strict=True):
                one.piece(by).copy_(value)
        return sum(piece.nbytes for one in shared for piece in one.pieces)

    def _swapped(self, out: list[list[Tensor]], like: list[list[Tensor]]) -> list[Sequence[Tensor]]:
        """What each rank sends, of these sizes, for what is sent to each."""
        parts = [part.reshape(-1) for parts in out for part in parts]
        some = next((part for parts in (*out, *like) for part in parts), torch.empty(0, device=self.counts.device))
        flat = torch.cat(parts) if parts else some.new_empty(0)
        going, coming = ([sum(part.numel() for part in parts) for parts in way] for way in (out, like))
        room = some.new_empty(sum(coming))
        all_to_all(room, flat, self.group, coming, going)
        return [
            got.split([part.numel() for part in parts]) for got, parts in zip(room.split(coming), like, strict=True)
        ]

    @property
    def looks(self) -> bool:
        """Whether the controller looks after this step."""
        return bool(self.every) and (self.step + 1) % self.every == 0

    def end_step(self) -> bool:
        """Counts a step; at a look, moves experts. All ranks come here after the same steps. Returns whether any moved.
        The caller has waited for all that is under way (`looks`)."""
        self.step += 1
        self.steps += 1
        if not self.every or self.step % self.every:
            return False
        counts, steps, self.steps = self.counts.clone(), self.steps, 0
        self.counts.zero_()
        if (everyone := self.everyone.by_comm[EVERYONE]) is not None:
            all_reduce(counts, everyone)
        after: dict[str, Placement] = {}
        for row, label in zip(counts.tolist(), self.order, strict=True):
            look = Look(placement=self.placements[label], rows=tuple(row[: self.experts[label]]), steps=steps)
            moved = move(look, self.ep, self.costs, horizon=self.every)
            if moved.slots:
                after[label] = moved.placement
                self.rebalanced.append(Rebalanced(step=self.step, layer=label, slots=moved.slots))
        if after:
            self.move_to(after)
        return bool(after)

    def summary(self) -> str:
        """What was moved, in words."""
        moved, looks = sum(len(one.slots) for one in self.rebalanced), self.step // self.every
        if not moved:
            return f"experts stayed where they were at {looks} looks of the controller"
        last = max(one.step for one in self.rebalanced)
        return f"experts moved into {moved} slots at {looks} looks of the controller, the last after step {last}"

    def move_to(self, after: Mapping[str, Placement]) -> None:
        """Gives slots the experts that these layers' placements say, with all that is kept of them."""
        for number, stage in self.stages.items():
            for parameters, update in zip(stage.own_parameters, self.updates[number], strict=True):
                slots = [
                    slot for slot in parameters.slots if slot.experts is not None and self.layer_of[slot.name] in after
                ]
                if not slots:
                    continue
                buffers = [parameters.shard, parameters.master, update.first, update.second]
                for buffer in {id(x): x for x in buffers if x is not None}.values():
                    self._exchange(buffer, parameters, slots, after)
                now = {slot.name: held_here(after[self.layer_of[slot.name]], self.ep, self.rank) for slot in slots}
                parameters.place({n: own for n, (own, _) in now.items()}, {n: copies for n, (_, copies) in now.items()})
        self.placements |= after
        self._hand_out()

    def _exchange(
        self, buffer: Tensor, parameters: Parameters, slots: Sequence[Slot], after: Mapping[str, Placement]
    ) -> None:
        """One buffer of some parameters: what the new slots need comes from the first rank that has it, or from another
        slot of this one."""
        views = {slot.name: buffer[slot.start : slot.stop].view(slot.shape[0], -1) for slot in slots}
        # Slots are read as they were while others are written: an expert may move to where another one leaves.
        before = {name: view.clone() for name, view in views.items()}
        out: list[list[Tensor]] = [[] for _ in range(self.ep)]
        into: list[list[Tensor]] = [[] for _ in range(self.ep)]
        for slot in slots:
            label = self.layer_of[slot.name]
            old, new = (on_ranks(row, self.ep) for row in (self.placements[label], after[label]))
            for to in range(self.ep):
                for number, expert in enumerate(new[to]):
                    if old[to][number] == expert:
                        continue
                    # Every rank works this out alike, so sender and receiver agree without a message.
                    source = to if expert in old[to] else next(r for r in range(self.ep) if expert in old[r])
                    if self.rank == source:
                        out[to].append(before[slot.name][old[source].index(expert)])
                    if self.rank == to:
                        into[source].append(views[slot.name][number])
        for parts, values in zip(into, self._swapped(out, into), strict=True):
            for part, value in zip(parts, values, strict=True):
                part.copy_(value)
