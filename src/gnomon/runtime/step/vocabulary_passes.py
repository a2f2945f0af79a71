"""A divided vocabulary in passes (`vocab_1`, `vocab_2`): a rank computes its parts and goes on while ranks exchange.

`Passes` has a function for each action of `orders.patterns.vocabulary`. What ranks exchange is done by one thread, in
the order of the rows, as on a stream of its own. Until the softmax is known over all parts each rank keeps exponentials
over its own largest logit; SUM_V brings the factor that they lack. Leaves out `interlaced`, where all ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gnomon.errors import PlanError
from gnomon.runtime.mesh.collectives import all_reduce
from gnomon.runtime.module.blocks import BlockRun, Frame
from gnomon.runtime.module.crossings import ReceivedShape
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.parameters.parameters import Weight
from gnomon.runtime.step.buffers import Name
from gnomon.runtime.step.lane import Lane
from gnomon.runtime.step.rows import Action
from gnomon.runtime.step.vocabulary import DividedVocabulary, Heads


@dataclass(frozen=True, slots=True)
class HeadOutputs:
    """What the head's product made, and the logits after it, which may be the same."""

    matmul: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxPart:
    """What S leaves for T of a microbatch."""

    edge: GradientEdge | None
    """Of the logits, where backward goes through the product (`vocab_1`)."""
    outputs: HeadOutputs
    """Where it does not; only what autograd has of it is read."""
    hidden: Tensor
    """A leaf."""
    exponentials: Tensor
    """(…, rows): of the logits less their largest, `VS`."""
    local: Tensor
    """(…): the row that a label has here, 0 for others."""
    here: Tensor
    """(…): whether it is here."""
    counts: Tensor
    """(…): whether a label counts."""


_EMPTY = torch.empty(0)
NOTHING = HeadOutputs(_EMPTY, _EMPTY)
"""Of a head whose logits are its product."""


class Passes(Heads):
    """A rank's part at work."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.early = self.divided.plan.schedule.vocabulary == "vocab_2"
        self.lane = Lane()
        self.parts: dict[int, SoftmaxPart] = {}
        self.at = self.divided.at
        if self.lookup is not None:
            self.local_lookup = self._stage(self.lookup.layers[0], _without_exchanges(self.divided), self.lookup.leaves)
        layer = self.head.layers[0]
        self.run = _without_exchanges(self.divided)[layer.call.block]
        self.matmul_site, self.loss_op = self.run.ops[0].site, self.run.ops[-1].site
        if self.loss_op.op.does != "compares labels":
            raise PlanError(f"vocabulary: {layer.label} does not end in its loss; use 'ends'")
        self.bound = dict(layer.call.inputs)

    def close(self) -> None:
        """Ends the thread that waits for collectives."""
        self.lane.close()

    def actions(self) -> Mapping[str, Action]:
        """Maps each kind of row to what does it."""
        return {
            "EMBED": self._embed,
            "SUM_E": self._sum_embedded,
            "CAST_E": self._cast_gradient,
            "EGRAD": self._embedding_gradient,
            "CAST_H": self._cast_hidden,
            "S": self._logits,
            "SUM_V": self._sum_softmax,
            "T": self._gradients,
            "SUM_H": self._sum_gradient,
        }

    def _start(
        self,
        name: Name,
        nbytes: int,
        exchange: Callable[[], None],
        finish: Callable[[], None],
        also: Sequence[Name] = (),
    ) -> None:
        self.buffers.start(name, self.lane.start(exchange), nbytes, finish, also=also)

    def _put(self, name: Name, *tensors: Tensor) -> None:
        self.buffers.tensors[name] = tensors

    def _embed(self, stage: int, unit: int) -> None:
        self.compute.state.gathered(stage)
        outputs: dict[str, Tensor] = self.local_lookup({}, self.feed.of_unit(unit))
        x = outputs[self.divided.ends.embedded]
        self.looked_up[unit] = get_gradient_edge(x)
        self.buffers.wait(("EX", self.at, unit))
        self._put(("EX", self.at, unit), x.detach())

    def _sum_embedded(self, stage: int, unit: int) -> None:
        name = ("EX", self.at, unit)
        (x,) = self.buffers.take(name)
        keep = (lambda: self._put(name, x)) if self.is_first else _nothing
        self._start(name, x.nbytes, lambda: self._sum(x), keep)

    def _cast_gradient(self, stage: int, unit: int) -> None:
        assert self.embedded is not None
        self._cast(("EG", self.at, unit), self.first_rank, self.embedded, here=self.is_first)

    def _cast_hidden(self, stage: int, unit: int) -> None:
        self._cast(("HX", self.at, unit), self.last_rank, self.hidden, here=self.is_last)

    def _cast(self, name: Name, rank: int, shape: ReceivedShape, *, here: bool) -> None:
        if here:
            x = self.buffers.take(name)[0].contiguous()
        else:
            x = torch.empty(shape.sizes, dtype=shape.dtype, device=self.feed.device)
        self._start(name, x.nbytes, lambda: _broadcast(x, rank, self.group), lambda: self._put(name, x))

    def _embedding_gradient(self, stage: int, unit: int) -> None:
        (grad,) = self.buffers.take(("EG", self.at, unit))
        torch.autograd.backward([self.looked_up.pop(unit)], [grad])

    def _logits(self, stage: int, unit: int) -> None:
        self.compute.state.gathered(stage)
        (x,) = self.buffers.take(("HX", self.at, unit))
        batch, hidden = self.feed.of_unit(unit), x.detach()
        outputs = self._head_matmul(hidden if self.early else hidden.requires_grad_(), batch)
        logits = outputs.logits
        labels = batch[self.bound[self.loss_op.op.inputs[1]]]
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        rows = wide.shape[-1]
        top = wide.amax(-1)
        # Over the largest logit of this part alone; the largest of all parts is known after SUM_V, which multiplies by
        # exp(own largest - largest of all).
        exponentials = (wide - top.unsqueeze(-1)).exp_()
        total = exponentials.sum(-1)
        # A label that another rank has is clamped to row 0, where `here` makes what it reads and adds 0.
        local = labels - self.divided.axes["tp"].index * rows
        here = (local >= 0) & (local < rows)
        local = torch.where(here, local, 0)
        target = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1) * here.to(wide.dtype)
        early = self._early(outputs, exponentials / total.unsqueeze(-1), local, here) if self.early else ()
        # What SUM_V takes: (…) each, and under `vocab_2` two of (…, width).
        self._put(("VL", self.at, unit), top, total, target, *early)
        self.parts[unit] = SoftmaxPart(
            edge=None if self.early else get_gradient_edge(logits),
            outputs=self._light(outputs),
            hidden=hidden,
            exponentials=exponentials,
            local=local,
            here=here,
            counts=labels >= 0,
        )

    def _light(self, outputs: HeadOutputs) -> HeadOutputs:
        """The same without logits that nothing reads."""
        return outputs if self.early and outputs.logits is not outputs.matmul else NOTHING

    def _head_matmul(self, hidden: Tensor, batch: Batch) -> HeadOutputs:
        """Logits of this rank's rows. Under `vocab_2` the product itself is no part of autograd's graph: its two
        gradients come apart."""
        layer, loss = self.head.layers[0], self.loss_op.op
        own = {name: source for name, source in layer.call.inputs if name != loss.inputs[1]}
        inputs = {name: batch.get(source, hidden) for name, source in own.items()}
        weights = self.head.weights(layer, self.run)
        frame = Frame(self.run, inputs, weights, _no_state, None, {}, self.hidden.dtype)
        # The first op is the head's matmul; the others (a logit scale, a soft cap) stay in autograd's graph.
        first, *others = self.run.ops[:-1]
        with torch.set_grad_enabled(not self.early):
            (matmul,) = frame.do(first, again=False).values()
        if self.early and others:
            frame.values[first.site.op.outputs[0]] = matmul.requires_grad_()
        for op in others:
            frame.do(op, again=False)
        return HeadOutputs(matmul, frame.values[loss.inputs[0]])

    def _early(self, outputs: HeadOutputs, softmax: Tensor, local: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the hidden states by the softmax of this part alone, and by the labels that are here: rows of the
        table."""
        label = torch.zeros_like(softmax).scatter_(-1, local.unsqueeze(-1), here.unsqueeze(-1).to(softmax.dtype))
        matrix = self._weight(0).matrix
        matrix = matrix.T if self.matmul_site.inner_first else matrix
        # d loss / d hidden = (softmax - onehot) W. The first term lacks the factor of SUM_V, which is one number a
        # token, so the matmul need not wait for it.
        by_softmax = self._before(outputs, softmax) @ matrix
        size = self._before(outputs, label).gather(-1, local.unsqueeze(-1))
        return by_softmax, matrix[local] * size

    def _before(self, outputs: HeadOutputs, grad: Tensor) -> Tensor:
        """The gradient of the product, of that of the logits."""
        grad = grad.to(self.hidden.dtype)
        if outputs.logits is not outputs.matmul:
            (grad,) = torch.autograd.grad([outputs.logits], [outputs.matmul], [grad], retain_graph=True)
        factor = self.matmul_site.attr("factor", 1.0)
        return grad if factor == 1.0 else grad * factor

    def _weight(self, index: int) -> Weight:
        """Finds a weight of the head's matmul: its table (0), or its bias (1)."""
        name = self.matmul_site.op.inputs[1 + index]
        return self.head.weights(self.head.layers[0], self.run)(name, 0 if index else self.matmul_site.weight_rows)

    def _weight_gradients(self, part: SoftmaxPart, grad: Tensor) -> None:
        """Adds the gradients of the table and the bias, without that of hidden states, which SUM_V has added up."""
        rows, read = self._before(part.outputs, grad).flatten(0, -2), part.hidden.flatten(0, -2)
        self._weight(0).add_matmul(*((read, rows) if self.matmul_site.inner_first else (rows, read)))
        if len(self.matmul_site.op.inputs) > 2:
            self._weight(1).add(rows.sum(0))

    def _sum_softmax(self, stage: int, unit: int) -> None:
        name, last = ("VL", self.at, unit), ("HG", self.last, unit)
        top, total, target, *early = self.buffers.take(name)
        # `top` becomes the largest of all ranks in place; its own value is needed for the factor.
        own, counts = top.clone(), self.parts[unit].counts
        weight = self.compute.loss_grad() * self.loss_op.attr("loss_weight", 1.0)
        factor = torch.empty_like(top)

        def exchange() -> None:
            all_reduce(top, self._group(), largest=True)
            torch.exp(own - top, out=factor)
            mine = total * factor
            total.copy_(mine)
            self._sum(total)
            self._sum(target)
            if early:
                # This part's share of the softmax's denominator makes its softmax that of the whole vocabulary.
                ratio, counted = (mine / total).unsqueeze(-1), (weight * counts).unsqueeze(-1)
                by_softmax, by_label = early
                by_softmax.copy_((by_softmax * ratio - by_label) * counted)
                self._sum(by_softmax)

        def finish() -> None:
            self._put(name, top, total, target, factor)
            if early and self.is_last:
                self._put(last, early[0])

        sizes = 3 * top.nbytes + (early[0].nbytes if early else 0)
        self._start(name, sizes, exchange, finish, [last] if early and self.is_last else [])

    def _gradients(self, stage: int, unit: int) -> None:
        top, total, target, factor = self.buffers.take(("VL", self.at, unit))
        part = self.parts.pop(unit)
        weight = self.loss_op.attr("loss_weight", 1.0)
        self.compute.loss += self.share(((total.log() + top - target) * part.counts).sum() * weight)
        # softmax - onehot, in place of the exponentials, which nothing reads any more.
        grad = part.exponentials.mul_((factor / total).unsqueeze(-1))
        grad.scatter_add_(-1, part.local.unsqueeze(-1), -part.here.unsqueeze(-1).to(grad.dtype))
        grad *= (self.compute.loss_grad() * weight * part.counts).unsqueeze(-1)
        if part.edge is None:
            self._weight_gradients(part, grad)
            return
        torch.autograd.backward([part.edge], [grad.to(self.hidden.dtype)])
        assert part.hidden.grad is not None
        self._put(("HG", self.at, unit), part.hidden.grad)

    def _sum_gradient(self, stage: int, unit: int) -> None:
        (x,) = self.buffers.take(("HG", self.at, unit))
        name = ("HG", self.last if self.is_last else self.at, unit)
        keep = (lambda: self._put(name, x)) if self.is_last else _nothing
        self._start(name, x.nbytes, lambda: self._sum(x), keep)

    def _group(self) -> dist.ProcessGroup:
        assert self.group is not None
        return self.group

    def _sum(self, x: Tensor) -> None:
        all_reduce(x, self._group())


def _without_exchanges(divided: DividedVocabulary) -> dict[str, BlockRun]:
    """The same blocks without what ranks exchange."""
    runs_ = {}
    for name, block in divided.blocks.items():
        block_run = runs_[name] = BlockRun(block, divided.axes)
        block_run.ops = [
            replace(
                op,
                inputs=tuple(i if isinstance(i, str) else replace(i, there=(), back=()) for i in op.inputs),
                leave=tuple(() for _ in op.leave),
                enter=tuple(() for _ in op.enter),
                moves=False,
            )
            for op in block_run.ops
        ]
    return runs_


def _nothing() -> None:
    """What remains to be done on ranks that only took part."""


def _no_state(name: str) -> Tensor:
    raise AssertionError(f"a divided head reads {name}")


def _broadcast(x: Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
    dist.broadcast(x, rank, group=group)
