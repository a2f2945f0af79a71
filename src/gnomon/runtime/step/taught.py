"""A model that learns from a teacher, and from embeddings moved to where they differ (`methods.learnt`: xtc, ad2).

`Taught.forward` runs a microbatch through both and returns the loss that backward begins at; `Taught.adversary` moves
the rows that were looked up and adds the gradient of what the model then gets wrong. `ForwardOutputs` is what is looked
at in a stage's forward. One rank has the whole model and the whole microbatch. Leaves out weights (`optim.xtc`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.errors import PlanError
from gnomon.graph import Graph, Layer
from gnomon.methods.learnt.ad2 import Ad2Settings
from gnomon.methods.learnt.teacher import repeated, stands_for
from gnomon.methods.learnt.teaching import Teaching
from gnomon.runtime.data.packing import Packing
from gnomon.runtime.module.one_process import OneProcess
from gnomon.runtime.module.stage import Batch, Stage

BESIDE = 1e-3
"""Of the radius: where the first step of an adversary begins."""
Run = Callable[[], dict[str, Tensor]]


@dataclass(slots=True)
class ForwardOutputs:
    """What is seen of one forward: hidden states and logits."""

    logits: Tensor | None = None
    """(batch, seq, vocab)."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """What each repeated layer makes, (batch, seq, hidden), by its place among them."""
    norms: Tensor | None = None
    """(batch, seq, 1) of the rows that were looked up."""
    width: int = 0
    """Of these rows."""


class Eyes:
    """What looks at a stage's forwards."""

    def __init__(self, graph: Graph, stage: Stage, *, hidden: bool) -> None:
        """Takes hidden, whether to look at what repeated layers make. PlanError for a model without one loss of logits
        and labels, or whose first layer looks nothing up."""
        self.stage, self.seen = stage, ForwardOutputs()
        losses = [(layer, op) for layer in graph.layers() for op in graph.block(layer.call.block).ops if _compares(op)]
        looked = [
            (layer, op)
            for layer in graph.layers()
            for op in graph.block(layer.call.block).ops
            if op.does == "looks up" and op.inputs[0] in graph.block(layer.call.block).inputs
        ]
        if len(losses) != 1 or not looked:
            raise PlanError(
                f"{graph.name} has {len(losses)} losses of logits and {len(looked)} lookups of ids; methods with a "
                f"teacher take models with one loss and an embedding"
            )
        (head, loss), (first, lookup) = losses[0], looked[0]
        self.logits, self.rows = (head.label, loss.inputs[0]), (first.label, lookup.outputs[0])
        self.labels = stage.reads[_at(stage, head)][loss.inputs[1]]
        self.loss = stage.writes[_at(stage, head)][loss.outputs[0]]
        self.shift: Tensor | None = None
        """Is added to the rows that are looked up."""
        self.layers = {}
        for place, layer in enumerate(repeated(graph) if hidden else ()):
            self.layers[layer.label, graph.block(layer.call.block).outputs[0]] = place

    @contextmanager
    def looking(self, shift: Tensor | None = None) -> Iterator[ForwardOutputs]:
        """Watches the forward that runs inside."""
        self.seen, self.shift, self.stage.watch = ForwardOutputs(), shift, self._note
        try:
            yield self.seen
        finally:
            self.shift = self.stage.watch = None

    def _note(self, layer: Layer, name: str, x: Tensor) -> None:
        at = layer.label, name
        if at == self.rows:
            self.seen.norms, self.seen.width = x.detach().norm(dim=-1, keepdim=True), x.shape[-1]
            if self.shift is not None:
                x.add_(self.shift)  # before anything reads it
        if at == self.logits:
            self.seen.logits = x
        if at in self.layers:
            self.seen.hidden[self.layers[at]] = x


def _compares(op: object) -> bool:
    return getattr(op, "does", "") == "compares labels"


def _at(stage: Stage, layer: Layer) -> int:
    return next(index for index, one in enumerate(stage.layers) if one.label == layer.label)


@dataclass(slots=True)
class ForwardRecord:
    """What a microbatch's backward has of its forward."""

    logits: Tensor
    """The teacher's."""
    norms: Tensor
    width: int
    """Of the rows that were looked up."""
    counts: Tensor
    """(batch, seq) whether a token's loss counts."""


class Taught:
    """A model beside its teacher, on one rank."""

    def __init__(
        self, teaching: Teaching, augments: Ad2Settings | None, graph: Graph, stage: Stage, teacher: OneProcess
    ) -> None:
        """Takes augments, how rows are moved; None: not at all. PlanError for a teacher of other tokens or layers."""
        self.teaching, self.augments, self.stage, self.teacher = teaching, augments, stage, teacher
        self.pairs = stands_for(teaching, graph, teacher.graph)
        hidden = teaching.hidden > 0
        self.eyes = Eyes(graph, stage, hidden=hidden)
        self.theirs = Eyes(teacher.graph, teacher.stage, hidden=hidden)
        self.teaches = True
        """In this step."""
        self.told: dict[int, ForwardRecord] = {}
        self.same_rows = True
        self.off, self.off_moved, self.tokens = 0.0, 0.0, 0
        """Sums of KL over tokens that counted, of rows as they were and moved."""

    def new_step(self, updates: int) -> None:
        """Begins a step. updates: the number of updates so far, after `until` of which the teacher is left out."""
        self.teaches = not self.teaching.until or updates < self.teaching.until

    def _teacher(self, batch: Batch, packing: Packing | None, shift: Tensor | None = None) -> ForwardOutputs:
        with torch.no_grad(), self.theirs.looking(shift) as seen:
            self.teacher.stage({}, batch, packing)
        return seen

    def forward(self, unit: int, run: Run, batch: Batch, packing: Packing | None) -> tuple[dict[str, Tensor], Tensor]:
        """(what the model's forward makes, the loss that backward begins at, summed over tokens as the model's is)."""
        theirs = self._teacher(batch, packing)
        with self.eyes.looking() as seen:
            made = run()
        counts = batch[self.eyes.labels] >= 0
        assert seen.logits is not None and theirs.logits is not None and seen.norms is not None
        off = self._off(seen.logits, theirs.logits, counts)
        own = 1.0 if self.teaching.beside else 1 - self.teaching.share
        loss = own * made[self.eyes.loss] + self.teaching.share * off
        for place, other in self.pairs.items() if self.teaching.hidden else ():
            mine, wanted = seen.hidden[place], theirs.hidden[other]
            if mine.shape != wanted.shape:
                raise PlanError(
                    f"layers of the model are {mine.shape[-1]} wide and the teacher's {wanted.shape[-1]}, whose "
                    f"squares cannot be taken; leave hidden out, or give a teacher as wide"
                )
            squares = (mine.float() - wanted.float()).square().mean(-1)
            loss = loss + self.teaching.hidden * (squares * counts).sum()
        self.off += float(off.detach())
        self.tokens += int(counts.sum())
        if self.augments is not None:
            self.told[unit] = ForwardRecord(theirs.logits, seen.norms, seen.width, counts)
            self.same_rows = theirs.width == seen.width
        return made, loss

    def _off(self, logits: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
        """T^2 KL(teacher || model), summed over tokens that count."""
        t = self.teaching.temperature
        own, other = (functional.log_softmax(x.float() / t, -1) for x in (logits, wanted))
        each = functional.kl_div(own, other, reduction="none", log_target=True).sum(-1)
        return t * t * (each * counts).sum()

    def adversary(self, unit: int, run: Run, batch: Batch, packing: Packing | None, begin: Tensor) -> None:
        """Adds the gradient of the loss on moved rows. begin: that of a loss, at which backward begins."""
        told, settings = self.told.pop(unit), self.augments
        assert settings is not None
        radius = settings.radius * told.norms
        # where both agree, the gradient at 0 is 0: the first step begins a little beside it
        shift = (BESIDE * radius).expand(*radius.shape[:-1], told.width) / told.width**0.5
        for _ in range(settings.rounds):
            shift = shift.detach().requires_grad_()
            self.stage.tape.aside = []  # gradients of weights, which nobody asks for here
            try:
                with self.eyes.looking(shift) as seen:
                    run()
                assert seen.logits is not None
                (up,) = torch.autograd.grad(self._off(seen.logits, told.logits, told.counts), shift)
            finally:
                self.stage.tape.aside = None
            moved = shift.detach() + radius / settings.rounds * functional.normalize(up, dim=-1)
            shift = moved * (radius / moved.norm(dim=-1, keepdim=True).clamp_(min=1e-12)).clamp_(max=1.0)
        wanted = self._teacher(batch, packing, shift.to(told.norms.dtype)).logits if self.same_rows else told.logits
        assert wanted is not None
        with self.eyes.looking(shift) as seen:
            run()
        assert seen.logits is not None
        off = self._off(seen.logits, wanted, told.counts)
        self.off_moved += float(off.detach())
        torch.autograd.backward([settings.weight * off], [begin.to(off.dtype)])

    @property
    def note(self) -> str:
        """How far the model was from its teacher, on average over the run."""
        tokens = max(self.tokens, 1)
        moved = f", {self.off_moved / tokens:.3f} at moved embeddings" if self.augments is not None else ""
        whose = "" if self.same_rows or self.augments is None else " (the teacher's answers are those to unmoved ones)"
        long = f"its first {self.teaching.until} steps" if self.teaching.until else "the run"
        return f"taught by {self.teaching.folder}: KL {self.off / tokens:.3f} a token over {long}{moved}{whose}"
