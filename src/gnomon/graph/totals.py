"""Totals of a block and of a graph: work by phase, and bytes kept for the backward by tensor identity.

Everything is a sum over `ops.py` rules on lowered blocks; nothing is tabulated per model. A graph's totals use that its
repeated calls are equal. Bytes kept are counted once for a tensor that two blocks keep (one as output, one as input, or
an encoder's output in every decoder layer). Leaves out: splits over devices, microbatches, optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from gnomon.graph.backward import BackwardBlock, Policy, backward, gradients, saved
from gnomon.graph.graph import Graph
from gnomon.graph.types import Call
from gnomon.graph.work import forward_work, grad_work
from gnomon.ops.kernels import Kernels
from gnomon.ops.work import Setting, Work, nbytes
from gnomon.tensors.dims import Number, numel


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """Work of a block by phase. Adds up and scales like a number."""

    forward: Work
    """The forward."""
    input_grad: Work
    """Gradients of activations, sums of gradients, and whatever a schedule cannot delay."""
    weight_grad: Work
    """Gradients of the weights of contractions and embeddings: what zero-bubble schedules delay."""

    def __add__(self, other: BlockWork) -> BlockWork:
        return BlockWork(
            forward=self.forward + other.forward,
            input_grad=self.input_grad + other.input_grad,
            weight_grad=self.weight_grad + other.weight_grad,
        )

    def __mul__(self, times: int) -> BlockWork:
        return BlockWork(
            forward=self.forward * times, input_grad=self.input_grad * times, weight_grad=self.weight_grad * times
        )

    @property
    def total(self) -> Work:
        """Adds up all three phases."""
        return self.forward + self.input_grad + self.weight_grad


NO_WORK = BlockWork(forward=Work(), input_grad=Work(), weight_grad=Work())
"""The zero of sums."""


def backward_work(back: BackwardBlock, setting: Setting) -> BlockWork:
    """Work of a lowered block with its backward, by phase."""
    block = back.forward
    forward = sum((forward_work(op, block, setting) for op in block.ops), Work())
    grads = [(g.phase, grad_work(g, block, setting)) for g in back.ops]
    return BlockWork(
        forward=forward,
        input_grad=sum((w for phase, w in grads if phase != "weight_grad"), Work()),
        weight_grad=sum((w for phase, w in grads if phase == "weight_grad"), Work()),
    )


def no_grad_inputs(graph: Graph, call: Call) -> tuple[str, ...]:
    """Inputs of a call into which no gradient flows: the graph's own, and what is made of them without parameters."""
    ungraded = _ungraded(graph)
    return tuple(own for own, source in call.inputs if source in ungraded)


@lru_cache(maxsize=64)
def _ungraded(graph: Graph) -> frozenset[str]:
    """Sources (`call.tensor`, or an input's name) into which no gradient flows. With adapters, what a frozen table of
    embeddings makes asks for gradients, as PEFT has it; that of a captured model does as its module says, and that of a
    model of which a part is trained does not."""
    is_captured = any(op.captured is not None for block in graph.blocks for op in block.ops)
    found = {ungraded.name for ungraded in graph.inputs}
    for call in graph.calls:
        block = graph.block(call.block)
        # With a trained table its output has a gradient; with a frozen one only if PEFT asks for it.
        still = any(op.does == "looks up" and op.stops_gradients for op in block.ops)
        if not is_captured and block.does("looks up") and not still:
            continue
        ungraded = tuple(own for own, source in call.inputs if source in found)
        graded = gradients(block, (), ungraded)
        found |= {f"{call.name}.{name}" for name in block.outputs if name not in graded}
    return frozenset(found)


def call_backward(graph: Graph, call: Call, kernels: Kernels, setting: Setting) -> BackwardBlock:
    """The backward of a call's block, with no gradient into the graph's own inputs."""
    return backward(graph.block(call.block), kernels, setting.dtypes, no_grad_inputs=no_grad_inputs(graph, call))


def graph_work(graph: Graph, kernels: Kernels, setting: Setting) -> BlockWork:
    """Work of one forward and backward of the whole model on one batch of `setting.sizes`."""
    known: dict[tuple[str, tuple[str, ...]], BlockWork] = {}
    total = NO_WORK
    for call in graph.calls:
        key = (call.block, no_grad_inputs(graph, call))
        # Calls of one block differ in work only by the inputs into which no gradient flows.
        if key not in known:
            known[key] = backward_work(call_backward(graph, call, kernels, setting), setting)
        total = total + known[key] * call.repeat
    return total + BlockWork(forward=Work(), input_grad=accumulation_work(graph, setting), weight_grad=Work())


def accumulation_work(graph: Graph, setting: Setting) -> Work:
    """Adding up the gradients of tensors that several calls read: skips, an encoder's output, a shared bias."""
    readers: dict[str, int] = {}
    for call in graph.calls:
        chained = {own for _, own in call.chain}
        for own, source in call.inputs:
            producer, tensor = graph.source(source)
            if producer is not None and tensor.is_float:
                # Only the first repetition reads a chained input from its source; the others read it of the repetition
                # before.
                readers[source] = readers.get(source, 0) + (1 if own in chained else call.repeat)
    total = Work()
    for source, count in readers.items():
        tensor = graph.source(source)[1]
        size, elements = nbytes(tensor, setting.sizes, setting.dtypes), numel(tensor.dims, setting.sizes)
        if count > 1:
            # n gradients are summed by n - 1 additions, each of which reads both terms once and keeps the sum in place
            # of one.
            added = elements * (count - 1)
            total = total + Work(vector_flops=added, read_bytes=size * count, write_bytes=size)
    return total


def graph_saved_bytes(graph: Graph, kernels: Kernels, setting: Setting, policies: Mapping[str, Policy]) -> Number:
    """Bytes kept between the forward and the backward of the whole model, each storage once.

    policies: block name -> policy; a block that is not named keeps all that its backward reads. Graph inputs (token
    ids) that an op keeps are counted.
    """
    for name in policies:
        graph.block(name)
    totals: dict[str, Number] = {}
    for call in graph.calls:
        back = call_backward(graph, call, kernels, setting)
        entries = saved(back, policies.get(call.block, {}), setting.dtypes).on_device
        sizes = [nbytes(e.tensor, setting.sizes, setting.dtypes) for e in entries]
        chained = {own: out for out, own in call.chain}
        sources = dict(call.inputs)
        for index in range(call.repeat):
            for entry, size in zip(entries, sizes, strict=True):
                name = entry.tensor.name
                key = f"{call.name}#{index}.{name}"
                # What one repetition keeps of its input is what the one before kept of its output: one key, so that it
                # counts once.
                if name in chained and index > 0:
                    key = f"{call.name}#{index - 1}.{chained[name]}"
                elif name in sources:
                    key = _source_key(graph, sources[name])
                totals[key] = size
    total: Number = 0
    for size in totals.values():
        total = total + size
    return total


def _source_key(graph: Graph, source: str) -> str:
    producer, tensor = graph.source(source)
    # Readers of a repeated call read its last repetition.
    return source if producer is None else f"{producer.name}#{producer.repeat - 1}.{tensor.name}"
