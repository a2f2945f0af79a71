"""What computes: forward and backward of this rank's stages, whole or in halves, and what lives between them.

`Compute` has a function for each such kind of action: F, C and R run a stage, B goes back through it, I computes input
gradients and puts weight gradients aside, W computes those. Left out: messages, parameters, and what is inside a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gnomon.graph import Graph, Layer
from gnomon.lowering.exchanges import BACKWARD, FORWARD
from gnomon.runtime.data.packing import LENGTHS
from gnomon.runtime.module.stage import Stage
from gnomon.runtime.ops.attention import shared_tables
from gnomon.runtime.ops.routing import Routing
from gnomon.runtime.parameters.parameters import Aside
from gnomon.runtime.step.buffers import Buffers, Name
from gnomon.runtime.step.distillation import Distillation
from gnomon.runtime.step.feed import Feed, size_named
from gnomon.runtime.step.lane import Lane
from gnomon.runtime.step.mimose import Mimose
from gnomon.runtime.step.resident_bytes import NOTHING, ResidentBytes, measure_resident
from gnomon.runtime.step.rows import Action
from gnomon.runtime.step.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedForBackward:
    """What a forward leaves for its backward."""

    entered: Mapping[str, Tensor]
    """Leaves that the stage read, by name."""
    edges: Mapping[str, GradientEdge]
    """Where backward begins, by name; what the stage made may be freed before."""

    @staticmethod
    def of(entered: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> SavedForBackward:
        """Notes a forward's inputs, and where its outputs enter autograd's graph."""
        return SavedForBackward(
            entered=entered, edges={name: get_gradient_edge(y) for name, y in outputs.items() if y.requires_grad}
        )


class Compute:
    """Stages of one rank at work."""

    def __init__(
        self, graph: Graph, stages: Mapping[int, Stage], state: State, buffers: Buffers, feed: Feed, dtype: torch.dtype
    ) -> None:
        """Has nothing saved yet. dtype: of activations."""
        self.stages, self.state, self.buffers, self.feed, self.device = stages, state, buffers, feed, feed.device
        self.unit = 0
        """That whose forward runs, or ran last."""
        self.saved: dict[tuple[int, int], SavedForBackward] = {}
        self.aside: dict[tuple[int, int], list[Aside]] = {}
        self._resident: dict[
            Hashable, ResidentBytes
        ] = {}  # what a microbatch keeps at a stage from F to B; counted once asked for
        self._put_aside: dict[Hashable, ResidentBytes] = {}  # from I to W
        layout, tp = feed.layout, state.groups.mesh.tp
        self._vocab = size_named(graph, "vocab") // (tp if layout.vocab_parallel and layout.loss_parallel else 1)
        self._rotary = lambda: _angles(graph, feed.longest, dtype, feed.device)
        self._loss_dtype = torch.promote_types(dtype, torch.float32)  # that of `cross_entropy`
        self.loss = torch.zeros((), device=feed.device)
        self.mimose: Mimose | None = None
        """Says before each forward what of it is recomputed."""
        self.distillation: Distillation | None = None
        """Has the model learn from a teacher; `loss` stays that of the text alone."""
        self.routed: Callable[[Layer, Tensor], None] | None = None
        """Is told which experts tokens choose in each layer, (…, topk), once for each microbatch."""
        self.counted: Sequence[Callable[[Layer, Tensor], None]] = ()
        """The same, for biases and experts that move by it."""
        self.lane: Lane | None = None
        """Where exchanges of experts are made that are rows."""
        self.routings: dict[int, dict[str, Routing]] = {}
        """Of each microbatch, whose the rows are that parts of layers of experts hand each other."""

    def actions(self) -> Mapping[str, Action]:
        """Maps each kind of row to what does it. LOAD does nothing: ids are in memory, and a stage takes its rows when
        it runs."""
        return {
            "F": self._forward,
            "B": self._whole_backward,
            "I": self._input_backward,
            "W": self._weight_backward,
            "C": self._forward_unsaved,
            "R": self._forward_again,
            "LOAD": lambda stage, unit: None,
            **dict.fromkeys(FORWARD.values(), self._exchange),
            **dict.fromkeys(BACKWARD.values(), self._exchange_back),
        }

    def new_step(self) -> None:
        """Begins the loss at 0."""
        self.routings.clear()
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)

    @property
    def apart(self) -> tuple[Tensor, ...]:
        """What all microbatches read and none makes."""
        return (*self._rotary(), *self.feed.batch.values())

    def microbatches(self) -> Iterator[ResidentBytes]:
        """What is held between actions for each microbatch."""
        yield from (self._resident.get(self._alike(*at), NOTHING) for at in self.saved)
        yield from (self._put_aside.get(self._alike(*at), NOTHING) for at in self.aside)
        if (packing := self.feed.packing_of(self.unit)) is not None and packing.prefixes is not None:
            yield ResidentBytes(activations=packing.prefixes.nbytes, logits=0)

    def _alike(self, stage: int, unit: int) -> Hashable:
        """Microbatches of a stage that keep as much."""
        packing = self.feed.packing_of(unit)
        if packing is None:
            return stage
        return stage, packing.documents.shape[1], tuple((part.tokens, part.is_chunk) for part in packing.parts or ())

    def _run(self, stage: int, unit: int, entered: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.state.gathered(stage)
        self.unit = unit
        module = self.stages[stage]
        module.unit, module.routings = unit, self.routings.setdefault(unit, {})
        batch, packing = self.feed.of_unit(unit), self.feed.packing_of(unit)
        recorder = self.buffers.recorder
        # Rows cut to the longest of their microbatch keep other amounts each time, so nothing is known of the next one.
        known = self._alike(stage, unit) in self._resident and LENGTHS not in self.feed.batch
        if recorder is None or not recorder.memory or known or not torch.is_grad_enabled():
            plain: dict[str, Tensor] = module(entered, batch, packing)
            return plain

        def noted(note: Callable[[Tensor], None]) -> dict[str, Tensor]:
            module.note = note
            result: dict[str, Tensor] = module(entered, batch, packing)
            module.note = None
            return result

        apart = self.apart
        if packing is not None and packing.prefixes is not None:  # counted with what is between microbatches
            apart += tuple(x for prefix in packing.prefixes.prefixes.values() for x in prefix.tensors)
        outputs, self._resident[self._alike(stage, unit)] = measure_resident(
            noted, tuple(entered.values()), vocab=self._vocab, loss=bool(module.results), apart=apart
        )
        return outputs

    def _run_first(self, stage: int, unit: int, entered: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first forward of a microbatch: what is computed again later routes the same tokens once more."""
        module = self.stages[stage]
        module.routed = self.listeners()
        try:
            return self._run(stage, unit, entered)
        finally:
            module.routed = None

    def listeners(self) -> Callable[[Layer, Tensor], None] | None:
        """Who is told which experts tokens choose; None: nobody."""
        hooks = [one for one in (self.routed, *self.counted) if one is not None]
        return _call_all(hooks) if hooks else None

    def entering(self, stage: int, unit: int, *, keep: bool = False) -> dict[str, Tensor]:
        """What enters a stage, as leaves where gradients go back. keep: the buffers are read again later."""
        entered: dict[str, Tensor] = {}
        for hop in self.stages[stage].enters:
            name = (hop.buffer, stage, unit)
            self.buffers.wait(name)
            tensors = self.buffers.tensors[name] if keep else self.buffers.take(name)
            for crossing, x in zip(hop.crossings, tensors, strict=True):
                entered[crossing.name] = x.requires_grad_() if crossing.trained and not keep else x
        return entered

    def hand_on(self, stage: int, unit: int, outputs: Mapping[str, Tensor]) -> None:
        """Puts what a stage made where later ones read it, and adds up its losses."""
        module = self.stages[stage]
        for result in module.results:
            # Losses are added up over all ranks: of those that compute the same one each reports a share.
            self.loss += outputs[result].detach().double() / self.feed.counted / module.copies[result]
        for hop in module.leaves:
            handed = tuple(outputs[crossing.name].detach() for crossing in hop.crossings)
            self.buffers.tensors[hop.buffer, hop.target, unit] = handed

    def _forward(self, stage: int, unit: int) -> None:
        entered = self.entering(stage, unit)
        if self.mimose is not None:
            self.mimose.begin(self.feed.of_unit(unit))
        if self.distillation is None or not self.distillation.is_on:
            outputs = self._run_first(stage, unit, entered)
            self.saved[stage, unit] = SavedForBackward.of(entered, outputs)
        else:
            run = partial(self._run_first, stage, unit, entered)
            outputs, loss = self.distillation.forward(unit, run, self.feed.of_unit(unit), self.feed.packing_of(unit))
            self.saved[stage, unit] = SavedForBackward.of(
                entered, {**outputs, self.distillation.student_hooks.loss: loss}
            )
        self.hand_on(stage, unit, outputs)

    def _forward_unsaved(self, stage: int, unit: int) -> None:
        with torch.no_grad():
            self.hand_on(stage, unit, self._run_first(stage, unit, self.entering(stage, unit, keep=True)))

    def _forward_again(self, stage: int, unit: int) -> None:
        entered = self.entering(stage, unit)
        self.saved[stage, unit] = SavedForBackward.of(entered, self._run(stage, unit, entered))

    def _whole_backward(self, stage: int, unit: int) -> None:
        self._clear(stage)
        self._backward(stage, unit)
        if self.mimose is not None:
            self.mimose.end()
        if self.distillation is not None and self.distillation.augments is not None:
            run = partial(self._run, stage, unit, {})
            batch, packing = self.feed.of_unit(unit), self.feed.packing_of(unit)
            self.distillation.adversarial_backward(unit, run, batch, packing, self.loss_grad())

    def _clear(self, stage: int) -> None:
        """Makes room for a stage's gradient: under ZeRO 2 it would have two whole ones while one is reduced. Where a
        stage is a layer, others' may be under way."""
        if self.stages[stage].zero == 2 and not self.state.by_layer:
            self.state.reduced()

    def _backward(self, stage: int, unit: int) -> None:
        """Runs the whole backward through autograd; weight gradients go where the tape puts them."""
        self.state.gathered(stage)
        begins = self.begins(stage, unit)
        saved = self.saved.pop((stage, unit))
        self._go_back(stage, unit, begins)
        for name, back in self.ends(stage, unit, saved).items():
            self.buffers.tensors[name] = back

    def begins(self, stage: int, unit: int) -> list[tuple[GradientEdge, Tensor]]:
        """The edges at which a backward begins, each with its gradient."""
        saved, module = self.saved[stage, unit], self.stages[stage]
        begins: list[tuple[GradientEdge, Tensor]] = []
        if module.results:
            begins += [(saved.edges[result], self.loss_grad()) for result in module.results]
        for hop in module.leaves:
            grads = self.buffers.take((hop.gradient, stage, unit))
            pairs = zip(hop.trained, grads, strict=True)
            begins += [(saved.edges[crossing.name], g) for crossing, g in pairs if crossing.name in saved.edges]
        return begins

    def _go_back(self, stage: int, unit: int, begins: Sequence[tuple[GradientEdge, Tensor]]) -> None:
        # Layers that are computed again in backward read where this microbatch's rows went, not the last one's.
        self.stages[stage].routings = self.routings.setdefault(unit, {})
        if begins:
            torch.autograd.backward([edge for edge, _ in begins], [grad for _, grad in begins])

    def ends(self, stage: int, unit: int, saved: SavedForBackward) -> dict[Name, tuple[Tensor, ...]]:
        """The gradients of what a stage read, by the buffers that they are."""
        ends = dict[Name, tuple[Tensor, ...]]()
        for hop in self.stages[stage].enters:
            leaves = [saved.entered[crossing.name] for crossing in hop.trained]
            # Zeros where nothing came: the stage before waits for a message of this size.
            back = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
            ends[hop.gradient, hop.source, unit] = back
        return ends

    def _exchange(self, stage: int, unit: int) -> None:
        """Has the lane send tokens to their experts, or bring their results back, with what a forward does beside."""
        entered, done = self.entering(stage, unit), dict[str, Tensor]()
        first, *others = ((hop.buffer, hop.target, unit) for hop in self.stages[stage].leaves)

        def finish() -> None:
            self.saved[stage, unit] = SavedForBackward.of(entered, done)
            self.hand_on(stage, unit, done)

        self._start(first, lambda: done.update(self._run_first(stage, unit, entered)), entered, finish, others)

    def _exchange_back(self, stage: int, unit: int) -> None:
        """The same for gradients."""
        begins = self.begins(stage, unit)
        saved = self.saved.pop((stage, unit))
        first, *others = ((hop.gradient, hop.source, unit) for hop in self.stages[stage].enters)

        def finish() -> None:
            self.buffers.tensors.update(self.ends(stage, unit, saved))

        self._start(first, lambda: self._go_back(stage, unit, begins), saved.entered, finish, others)

    def _start(
        self,
        name: Name,
        work: Callable[[], None],
        entered: Mapping[str, Tensor],
        finish: Callable[[], None],
        also: Sequence[Name],
    ) -> None:
        assert self.lane is not None, "the Program has exchanges, so there is a lane"
        self.buffers.start(name, self.lane.start(work), sum(x.nbytes for x in entered.values()), finish, also=also)

    def loss_grad(self) -> Tensor:
        """The gradient at which backward begins: 1 / (tokens counted), times the loss scale."""
        scaled = 1.0 if self.state.loss_scale is None else self.state.loss_scale.scale
        return torch.full((), scaled / self.feed.counted, dtype=self._loss_dtype, device=self.device)

    def _input_backward(self, stage: int, unit: int) -> None:
        tape = self.stages[stage].tape
        # A list puts weight gradients aside from here on (`Tape.run`); they are taken off after the backward.
        tape.aside = []
        self._backward(stage, unit)
        self.aside[stage, unit], tape.aside = tape.aside, None
        alike = self._alike(stage, unit)
        if alike in self._resident and alike not in self._put_aside:
            tensors = [tensor for deferred in self.aside[stage, unit] for tensor in deferred.reads]
            apart = tuple(self.feed.batch.values())
            self._put_aside[alike] = ResidentBytes.of(tensors, vocab=self._vocab, loss=False, apart=apart)

    def _weight_backward(self, stage: int, unit: int) -> None:
        self._clear(stage)
        with torch.no_grad():
            for deferred in self.aside.pop((stage, unit)):
                deferred.weight_grad()


def _call_all(listeners: Sequence[Callable[[Layer, Tensor], None]]) -> Callable[[Layer, Tensor], None]:
    """All of them are."""

    def tell(layer: Layer, indices: Tensor) -> None:
        for listener in listeners:
            listener(layer, indices)

    return tell


def _angles(graph: Graph, positions: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Tables of the model's rotary embeddings, which all microbatches share."""
    tables: list[Tensor] = []
    for block in graph.blocks:
        for op in block.ops:
            if op.does == "rotates":
                fraction = op.attr("fraction", 1.0)
                assert isinstance(fraction, float)
                width = int((block.tensor(op.inputs[0]).dims[-1].size or 0) * fraction)
                tables += shared_tables(op.attrs, positions, width, dtype, device)
    return tuple(tables)
