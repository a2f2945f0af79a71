"""The proof of a captured model: Graph and module compute the same, outputs and gradients, in float64.

`prove(module, example)` captures a module as it is, runs both on the same inputs and returns a `Proof`; where they
differ it names the first op that does, with file and line of the user's code. The Graph runs by the op functions that
training runs by. Leaves out dropout, which both sides leave out, and models too large to compute in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gnomon.errors import CaptureError
from gnomon.frontend.capture import CapturedModule, Dims, captured
from gnomon.frontend.records import is_trained
from gnomon.graph import Dtypes as GraphDtypes
from gnomon.graph import Graph, Layer
from gnomon.plans import Layout, Mesh
from gnomon.runtime.module.apply import slots_of
from gnomon.runtime.module.blocks import BlockRun
from gnomon.runtime.module.stage import Stage, bound, differentiable
from gnomon.runtime.ops import check_runnable
from gnomon.runtime.parameters.parameters import Dtypes, Parameters
from gnomon.sharding import shard_graph

TOLERANCE = 1e-9
"""Of float64, relative to the largest element of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How far a Graph is from its module."""

    outputs: float
    """Largest difference of an output, over that output's largest element."""
    gradients: float
    """The same of the gradients of parameters."""
    first: str
    """The first op that differs by more than the tolerance, and where it is called; empty if none does."""

    @property
    def holds(self) -> bool:
        """Whether both are within the tolerance."""
        return max(self.outputs, self.gradients) <= TOLERANCE


def symbols(graph: Graph, placeholder: int = 2) -> dict[str, int]:
    """A size for each dim that the inputs bring, for what only wants parameters."""
    dims = {a.name for t in graph.inputs for d in t.dims for a in d.atoms if a.size is None and not a.same_as}
    return {"batch": 1, "seq": placeholder, **dict.fromkeys(dims, placeholder)}


class CapturedRun:
    """A captured model on this process, with the module's own values."""

    def __init__(self, module: nn.Module, capture: CapturedModule, dtype: torch.dtype) -> None:
        graph = capture.graph
        check_runnable(graph)
        self.graph, self.captured = graph, capture
        fp32 = GraphDtypes(param="fp32", compute="fp32")
        sharded = shard_graph(graph, Layout(), Mesh(), symbols(graph), fp32)
        self.runs = {name: BlockRun(block, {}) for name, block in sharded.items()}
        slots = tuple(slots_of(graph.layers(), sharded, {}, set()))
        self.parameters = Parameters(
            slots, Dtypes(param=dtype, grad=dtype, master=None, states=dtype), zero=0, shard=0, num_shards=1
        )
        values = dict(module.named_parameters())
        self.parameters.fill(lambda slot: values[slot.name].detach().double().reshape(slot.shape))
        frozen = {name: p.detach() for name, p in module.named_parameters() if not is_trained(p)}
        self.states = {**frozen, **{name: b.clone() for name, b in module.named_buffers()}, **capture.constants}
        self.stage = Stage(graph, graph.layers(), (self.parameters,), self.runs, 0)
        self.dtype = dtype

    def run(self, batch: Mapping[str, Tensor], seen: Callable[[int, str, Tensor], None] | None = None) -> list[Tensor]:
        """Outputs in the graph's order. seen: is told each activation, with the number of its layer."""
        graph = self.graph
        values, sizes = differentiable(batch), bound(graph.inputs, batch)
        for place, layer in enumerate(graph.layers()):
            run = self.runs[layer.call.block]
            reads, writes = self.stage.reads[place], self.stage.writes[place]
            inputs = {own: values[name] for own, name in reads.items()}
            outputs = run.run(
                inputs,
                self.stage.weights(layer, run),
                self._state(layer),
                sizes=sizes,
                compute=self.dtype,
                seen=None if seen is None else partial(seen, place),
            )
            values.update((name, outputs[own]) for own, name in writes.items())
        return [values[name] for name in graph.outputs]

    def _state(self, layer: Layer) -> Callable[[str], Tensor]:
        return lambda name: self.states[layer.call.parameter_name(name, layer.index)]

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients of all parameters by name, after a backward."""
        for slot in self.parameters.slots:
            if self.parameters.grad is not None:
                yield slot.name, self.parameters.whole_grad()[slot.start : slot.stop].view(slot.shape)


def prove(
    module: nn.Module, example: Sequence[Any] | Mapping[str, Any], *, dims: Dims | None = None, seed: int = 0
) -> Proof:
    """Captures a copy of the module in float64 and compares. CaptureError where it cannot be captured or run, or has no
    numbers."""
    if bare := [name for name, x in (*module.named_parameters(), *module.named_buffers()) if x.device.type == "meta"]:
        raise CaptureError(
            f"a proof computes outputs and gradients, and {bare[0]} is on the meta device, which has no numbers; build "
            "the module on the CPU, small if need be"
        )
    module = copy.deepcopy(module).double().eval()
    example = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, example)
    capture = captured(module, example, dims=dims, training=False, computing=True)
    return compare(module, example, capture, seed=seed)


def compare(module: nn.Module, example: Any, capture: CapturedModule, *, seed: int = 0) -> Proof:
    """The proof for a module in float64 and its capture."""
    trace = capture.trace
    run = CapturedRun(module, capture, torch.float64)
    inputs = {v.name: trace.tensors[i] for i, v in enumerate(trace.values) if v.origin == "input"}
    batch = {t.name: inputs[t.name] for t in capture.graph.inputs}
    differs: list[tuple[int, str]] = []

    def seen(place: int, name: str, x: Tensor) -> None:
        value = capture.placed[place].part.values.get(name)
        if differs or value is None or trace.values[value].shape != tuple(x.shape) or not x.dim():
            return  # of a loss the graph makes the sum
        if _apart(x, trace.tensors[value]) > TOLERANCE and not _written_over(trace, value):
            differs.append((place, name))

    torch.manual_seed(0)
    got = run.run(batch, seen)
    want = [trace.tensors[i] for i in trace.outputs]
    got = [_as_torch(g, w, capture, i) for i, (g, w) in enumerate(zip(got, want, strict=True))]
    outputs = max(_apart(g, w) for g, w in zip(got, want, strict=True))
    gradients = _gradients(module, run, got, want, trace)
    first = ""
    if differs:
        place, name = differs[0]
        part = capture.placed[place].part
        op = next((o for o in part.block.ops if name in o.outputs), None)
        path = op.path if op is not None else name
        first = f"{capture.graph.layers()[place].label}/{path} ({part.lines.get(path, '?')})"
    return Proof(outputs=outputs, gradients=gradients, first=first)


def _as_torch(got: Tensor, want: Tensor, capture: CapturedModule, place: int) -> Tensor:
    """A loss that the graph sums is a mean in the module."""
    source = capture.graph.source(capture.graph.outputs[place])
    if source[0] is None:
        return got
    block = capture.graph.block(source[0].block)
    op = next((o for o in block.ops if source[1].name in o.outputs), None)
    if op is None or op.does != "compares labels" or op.attr("reduction", "") != "mean":
        return got
    labels = next(p for p in capture.placed if p.block == block.name).part.values[op.inputs[1]]
    return got / (capture.trace.tensors[labels] >= 0).sum()


def _gradients(module: nn.Module, run: CapturedRun, got: Sequence[Tensor], want: Sequence[Tensor], trace: Any) -> float:
    """Both sides go back from the same weighted sum of their outputs."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.rand(w.shape, generator=generator, dtype=torch.float64) for w in want]
    pairs = [(g, w, c) for g, w, c in zip(got, want, weights, strict=True) if w.requires_grad and w.is_floating_point()]
    if not pairs:
        return 0.0
    own = {v.name: trace.tensors[i] for i, v in enumerate(trace.values) if v.origin == "parameter" and v.grad}
    sum((w * c).sum() for _, w, c in pairs).backward()  # type: ignore[union-attr]
    sum((g * c).sum() for g, _, c in pairs).backward()  # type: ignore[union-attr]
    mine = dict(run.gradients())
    worst = 0.0
    largest = max((float(x.grad.abs().max()) for x in own.values() if x.grad is not None and x.numel()), default=1.0)
    for name, x in own.items():
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        grad = mine.get(name)
        grad = torch.zeros_like(x) if grad is None else grad.view(x.shape)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        worst = max(worst, float((gradient - grad).abs().max()) / max(largest, 1e-30) if x.numel() else 0.0)
    return worst


def _apart(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the larger of the two largest elements; infinite where only one is finite."""
    a, b = a.detach(), b.detach()
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    narrow = b.dtype if b.dtype in (torch.float32, torch.bfloat16, torch.float16) else None
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    scale = b[b.isfinite()].abs().max().clamp(min=1e-30) if bool(b.isfinite().any()) else torch.tensor(1.0)
    difference = (a - b).abs().masked_fill(same, 0.0)
    worst = float(difference.nan_to_num(nan=float("inf")).max() / scale)
    # what the code itself rounds to float32 agrees to 1e-5, not to 1e-9
    return worst if narrow is None else worst * 1e-4


def _written_over(trace: Any, value: int) -> bool:
    """Whether a later op wrote into the same memory, so that the numbers are no longer those of then."""
    storage = trace.values[value].storage
    return any(v.storage == storage for v in trace.values[value + 1 :])


def check(proof: Proof, name: str) -> None:
    """CaptureError for a proof that does not hold."""
    if not proof.holds:
        raise CaptureError(
            f"the Graph of {name} does not compute what the module does: outputs differ by {proof.outputs:.2g}, "
            f"gradients by {proof.gradients:.2g}; first at {proof.first or 'the backward'}"
        )
