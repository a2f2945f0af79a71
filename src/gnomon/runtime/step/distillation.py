"""Knowledge distillation, and its adversarial augmentation on embeddings (`methods.learnt`: xtc, ad2, mos).

`Distillation.forward` runs a microbatch through student and teacher and returns the loss that backward begins at:

    (1 - share) CE + share T^2 KL(teacher || student) + hidden * MSE(hidden states)

summed over tokens that count (`Teaching.added`: CE + share T^2 KL). `Distillation.adversarial_backward` is virtual
adversarial training (Miyato et al. 2018) on the rows that were looked up: `rounds` steps of projected gradient ascent
on the KL, within a ball around each row, and then the gradient of the KL at the perturbed rows. Hooks see a forward
through `Stage.watch`. One rank has the whole model and the whole microbatch. Leaves out the student's weights
(`optim.xtc`).
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

FIRST_SHIFT = 1e-3
"""Length of the first perturbation, as a share of the radius."""
Run = Callable[[], dict[str, Tensor]]


@dataclass(slots=True)
class ForwardOutputs:
    """What is seen of one forward: hidden states and logits."""

    logits: Tensor | None = None
    """(batch, seq, vocab)."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """What each repeated layer makes, (batch, seq, hidden), by its place among them."""
    norms: Tensor | None = None
    """(batch, seq, 1) Euclidean norms of the embedding rows that were looked up."""
    width: int = 0
    """The size of these rows."""


class ForwardHooks:
    """Records the logits, embedding norms and hidden states of a stage's forwards, and perturbs its embeddings."""

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
        """(batch, seq, width) added to the embedding rows; None: nothing is."""
        self.layers = {}
        for place, layer in enumerate(repeated(graph) if hidden else ()):
            self.layers[layer.label, graph.block(layer.call.block).outputs[0]] = place

    @contextmanager
    def recording(self, shift: Tensor | None = None) -> Iterator[ForwardOutputs]:
        """Records the forward that runs inside, with its embeddings moved by `shift`."""
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
class CleanForward:
    """What a microbatch's adversarial backward needs of its forward on unperturbed embeddings."""

    logits: Tensor
    """(batch, seq, vocab) of the teacher."""
    norms: Tensor
    """(batch, seq, 1) of the student's embedding rows."""
    width: int
    """The size of these rows."""
    counts: Tensor
    """(batch, seq) whether a token's loss counts."""


class Distillation:
    """A student and its teacher on one rank."""

    def __init__(
        self, teaching: Teaching, augments: Ad2Settings | None, graph: Graph, stage: Stage, teacher: OneProcess
    ) -> None:
        """Takes augments, how embeddings are perturbed; None: not at all. PlanError for a teacher of other tokens or
        layers."""
        self.teaching, self.augments, self.stage, self.teacher = teaching, augments, stage, teacher
        self.pairs = stands_for(teaching, graph, teacher.graph)
        """Repeated layer of the student -> the teacher's, whose hidden states are compared."""
        hidden = teaching.hidden > 0
        self.student_hooks = ForwardHooks(graph, stage, hidden=hidden)
        self.teacher_hooks = ForwardHooks(teacher.graph, teacher.stage, hidden=hidden)
        self.is_on = True
        """Whether this step has the teacher (`Teaching.until`)."""
        self.clean: dict[int, CleanForward] = {}
        """Microbatch -> its clean forward, until its adversarial backward has read it."""
        self.same_width = True
        """Whether the teacher's embeddings are as wide as the student's. Then a perturbation can be added to them too,
        and the teacher labels the perturbed input; else its logits of the clean one stand in."""
        self.kl_sum, self.perturbed_kl_sum, self.tokens = 0.0, 0.0, 0
        """Sums over tokens that counted, for `note`."""

    def new_step(self, updates: int) -> None:
        """Begins a step. updates: the number of updates so far, after `until` of which the teacher is left out."""
        self.is_on = not self.teaching.until or updates < self.teaching.until

    def _teacher_outputs(self, batch: Batch, packing: Packing | None, shift: Tensor | None = None) -> ForwardOutputs:
        with torch.no_grad(), self.teacher_hooks.recording(shift) as seen:
            self.teacher.stage({}, batch, packing)
        return seen

    def forward(self, unit: int, run: Run, batch: Batch, packing: Packing | None) -> tuple[dict[str, Tensor], Tensor]:
        """(outputs of the student's forward, the loss that backward begins at: a sum over tokens, as the student's)."""
        expected = self._teacher_outputs(batch, packing)
        with self.student_hooks.recording() as seen:
            outputs = run()
        counts = batch[self.student_hooks.labels] >= 0
        assert seen.logits is not None and expected.logits is not None and seen.norms is not None
        kl = self._kl_loss(seen.logits, expected.logits, counts)
        own = 1.0 if self.teaching.added else 1 - self.teaching.share
        # All terms are sums over tokens that count, as the student's own loss: one division by their number
        # (`loss_grad`) is that of all.
        loss = own * outputs[self.student_hooks.loss] + self.teaching.share * kl
        for place, other in self.pairs.items() if self.teaching.hidden else ():
            mine, target = seen.hidden[place], expected.hidden[other]
            if mine.shape != target.shape:
                raise PlanError(
                    f"layers of the model are {mine.shape[-1]} wide and the teacher's {target.shape[-1]}, whose "
                    f"squares cannot be taken; leave hidden out, or give a teacher as wide"
                )
            squares = (mine.float() - target.float()).square().mean(-1)
            loss = loss + self.teaching.hidden * (squares * counts).sum()
        self.kl_sum += float(kl.detach())
        self.tokens += int(counts.sum())
        if self.augments is not None:
            self.clean[unit] = CleanForward(expected.logits, seen.norms, seen.width, counts)
            self.same_width = expected.width == seen.width
        return outputs, loss

    def _kl_loss(self, logits: Tensor, teacher_logits: Tensor, counts: Tensor) -> Tensor:
        """T^2 KL(teacher || student) at temperature T, summed over tokens that count."""
        t = self.teaching.temperature
        student, teacher = (functional.log_softmax(x.float() / t, -1) for x in (logits, teacher_logits))
        per_token = functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        return t * t * (per_token * counts).sum()

    def adversarial_backward(
        self, unit: int, run: Run, batch: Batch, packing: Packing | None, loss_grad: Tensor
    ) -> None:
        """Adds the gradient of the KL at perturbed embeddings to the parameters'. loss_grad: the upstream gradient that
        the clean loss's backward begins with, so that both have one scale."""
        clean, settings = self.clean.pop(unit), self.augments
        assert settings is not None
        radius = settings.radius * clean.norms
        # Where student and teacher agree the KL is at its minimum and its gradient at 0 is 0: begin a little off it.
        shift = (FIRST_SHIFT * radius).expand(*radius.shape[:-1], clean.width) / clean.width**0.5
        for _ in range(settings.rounds):
            shift = shift.detach().requires_grad_()
            # Only the embeddings' gradient is wanted: weight gradients are collected here and dropped.
            self.stage.tape.aside = []
            try:
                with self.student_hooks.recording(shift) as seen:
                    run()
                assert seen.logits is not None
                kl = self._kl_loss(seen.logits, clean.logits, clean.counts)
                (ascent,) = torch.autograd.grad(kl, shift)
            finally:
                self.stage.tape.aside = None
            # Steps of radius / rounds reach the ball's edge in as many rounds; what goes beyond is put back onto it
            # below.
            moved = shift.detach() + radius / settings.rounds * functional.normalize(ascent, dim=-1)
            shift = moved * (radius / moved.norm(dim=-1, keepdim=True).clamp_(min=1e-12)).clamp_(max=1.0)
        expected: Tensor | None = clean.logits
        if self.same_width:
            expected = self._teacher_outputs(batch, packing, shift.to(clean.norms.dtype)).logits
        assert expected is not None
        with self.student_hooks.recording(shift) as seen:
            run()
        assert seen.logits is not None
        kl = self._kl_loss(seen.logits, expected, clean.counts)
        self.perturbed_kl_sum += float(kl.detach())
        torch.autograd.backward([settings.weight * kl], [loss_grad.to(kl.dtype)])

    @property
    def note(self) -> str:
        """How far the student was from its teacher, on average over the run."""
        tokens = max(self.tokens, 1)
        perturbed = f", {self.perturbed_kl_sum / tokens:.3f} at perturbed embeddings" if self.augments else ""
        whose = "" if self.same_width or not self.augments else " (the teacher's logits are of unperturbed ones)"
        long = f"its first {self.teaching.until} steps" if self.teaching.until else "the run"
        mean = f"{self.kl_sum / tokens:.3f}"
        return f"distilled from {self.teaching.folder}: KL {mean} a token over {long}{perturbed}{whose}"
