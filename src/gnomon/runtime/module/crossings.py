"""What crosses from one stage of the Program to another: one tensor or several, to the next stage or as a skip.

`hops(graph, plan, by_layer)` lists them by source and target; what they are called in forward and backward are the
Program's buffers. `Shapes` says what a rank receives. A tensor that a later stage reads passes through those between
where the plan routes it so (`plans.transfers`), and within a stage of the plan that the Program takes apart into
layers. Leaves out sending (`messages`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from gnomon.errors import PlanError
from gnomon.graph import Dtypes, Graph, Layer, gradients
from gnomon.graph import Tensor as GraphTensor
from gnomon.graph.wiring import reads as reads
from gnomon.graph.wiring import writes as writes
from gnomon.plans import Layout, Mesh, Plan, stage_layers
from gnomon.plans.groups import layer_groups
from gnomon.plans.stages import Transfer, transfers
from gnomon.sharding import Sharding, shard_graph
from gnomon.tensors.layout import local_size

DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "int64": torch.int64, "int32": torch.int32, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
"""Of tensors that are not in the plan's own dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One tensor that crosses."""

    name: str
    """As layers read it: `call.tensor`, `call#2.tensor` within a run of equal layers."""
    block: str
    """Of the layer that makes it."""
    tensor: GraphTensor
    trained: bool
    """Whether its gradient goes the other way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Tensors that one stage of the Program hands to another for each microbatch, all at once."""

    source: int
    target: int
    crossings: tuple[Crossing, ...]
    buffers: tuple[str, str] = ("", "")
    """(buffer, that of the gradient), where the Program has names of its own for them."""

    @property
    def buffer(self) -> str:
        """The Program's name for it: X of the next stage, or a skip."""
        if self.buffers[0]:
            return self.buffers[0]
        return "X" if self.target == self.source + 1 else f"SKIP_{self.source}_{self.target}"

    @property
    def gradient(self) -> str:
        """The same of what comes back."""
        if self.buffers[1]:
            return self.buffers[1]
        return "DY" if self.target == self.source + 1 else f"DSKIP_{self.source}_{self.target}"

    @property
    def trained(self) -> tuple[Crossing, ...]:
        """Those whose gradients come back."""
        return tuple(crossing for crossing in self.crossings if crossing.trained)


def hops(graph: Graph, plan: Plan, *, by_layer: bool) -> tuple[Hop, ...]:
    """Lists every tensor that crosses from one stage to another. by_layer: whether a stage of the Program is a layer,
    as under ZeRO 3."""
    known, hops_ = _crossings(graph), dict[tuple[str, str], Crossing]()
    for layer in graph.layers():
        for out, name in writes(graph, layer).items():
            hops_[layer.label, out] = known[name]
    sent = transfers(plan, graph)
    stages = stage_layers(plan, graph)
    groups = layer_groups(plan, stages)
    counts = [len(part) if by_layer else 1 for part in groups]
    first = [sum(counts[:stage]) for stage in range(len(counts))]
    listed = [
        Hop(
            # From the last layer of one stage to the first of another: within a stage `_within` passes tensors on from
            # layer to layer.
            source=first[transfer.source] + counts[transfer.source] - 1,
            target=first[transfer.target],
            crossings=tuple(hops_[pair] for pair in transfer.tensors),
        )
        for transfer in sent
    ]
    if by_layer:
        for stage, part in enumerate(groups):
            listed += _within(graph, part, first[stage], _at(stage, sent, hops_), known)
    return tuple(sorted(listed, key=lambda hop: (hop.source, hop.target)))


def _at(
    stage: int, sent: Sequence[Transfer], crossings: Mapping[tuple[str, str], Crossing]
) -> tuple[dict[str, None], dict[str, None]]:
    """Names of what enters a stage of the plan, and of what leaves it."""
    enters = {crossings[pair].name: None for transfer in sent if transfer.target == stage for pair in transfer.tensors}
    leaves = {crossings[pair].name: None for transfer in sent if transfer.source == stage for pair in transfer.tensors}
    return enters, leaves


def _within(
    graph: Graph,
    groups: Sequence[Sequence[Layer]],
    first: int,
    ends: tuple[Mapping[str, None], Mapping[str, None]],
    known: Mapping[str, Crossing],
) -> Iterator[Hop]:
    """Lists what one action's layers hand to the next action's within one stage of the plan: tensors that are there and
    read later."""
    there = dict(ends[0])
    for place in range(len(groups) - 1):
        # A dict as an ordered set: both ends list the tensors of a message in one order.
        there |= dict.fromkeys(name for layer in groups[place] for name in writes(graph, layer).values())
        later = [layer for group in groups[place + 1 :] for layer in group]
        read_later = {name for layer in later for name in reads(layer).values()} | set(ends[1])
        crossings = tuple(known[name] for name in there if name in read_later)
        if crossings:
            yield Hop(source=first + place, target=first + place + 1, crossings=crossings)


def _crossings(graph: Graph) -> dict[str, Crossing]:
    """Every output of every layer, by name. An input of a captured model counts as trained: its ops need a gradient to
    go back through."""
    captured = any(op.captured is not None for block in graph.blocks for op in block.ops)
    trained = {tensor.name for tensor in graph.inputs if captured and tensor.is_float}
    known = dict[tuple[str, tuple[str, ...]], frozenset[str]]()
    out: dict[str, Crossing] = {}
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        # What the layer reads and nothing trained went into: equal layers differ in it, as the first one reads the
        # batch.
        still = tuple(own for own, name in reads(layer).items() if name not in trained)
        key = (block.name, still)
        if key not in known:
            known[key] = gradients(block, (), still)
        for own, name in writes(graph, layer).items():
            if own in known[key]:
                trained.add(name)
            out[name] = Crossing(name=name, block=block.name, tensor=block.tensor(own), trained=own in known[key])
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedShape:
    """A tensor as a rank receives it."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    rows: int
    """Rows of it for each sequence; 0 where it has no batch."""


class Shapes:
    """What tensors that cross look like on a rank."""

    def __init__(self, graph: Graph, layout: Layout, mesh: Mesh, sizes: Mapping[str, int], dtype: torch.dtype) -> None:
        """Takes the sizes of the dims that the graph leaves open (`batch` that of this rank's part of a microbatch),
        and the dtype of activations."""
        self.sizes, self.dtype = dict(sizes), dtype
        self.axes = {axis: getattr(mesh, axis) for axis in ("cp", "tp", "ep", "etp")}
        self._of = graph, layout, mesh

    @cached_property
    def homes(self) -> dict[str, Mapping[str, Sharding]]:
        """The sharding of every block's tensors where they lie between ops, by name."""
        graph, layout, mesh = self._of
        known = {dim.name: 2 * mesh.cp * mesh.tp for block in graph.blocks for dim in block.dims if dim.size is None}
        sharded = shard_graph(graph, layout, mesh, known | {"batch": 1}, Dtypes(param="fp32", compute="fp32"))
        return {name: block.homes for name, block in sharded.items()}

    def of(self, crossing: Crossing, sizes: Mapping[str, int] | None = None) -> ReceivedShape:
        """The local shape of a crossing tensor. sizes: of this microbatch, where it has others than the rest. PlanError
        for a length that is no dim of the inputs, which only the sender knows."""
        sizes = self.sizes if sizes is None else sizes
        tensor, home = crossing.tensor, self.homes[crossing.block][crossing.tensor.name]
        lengths = []
        for dim in tensor.dims:
            length = 1
            for atom in dim.atoms:
                if atom.size is None and (atom.same_as or atom.name) not in sizes:
                    raise PlanError(f"{crossing.name} crosses stages, and nobody says how long its {atom.name} is")
                if "_plus_" in atom.name or "_minus_" in atom.name:
                    raise PlanError(f"{crossing.name} crosses stages, and is as long as {atom.name}; use pp = 1")
                length *= int(local_size(atom, home, self.axes, sizes))
            lengths.append(length)
        batched = bool(tensor.dims) and tensor.dims[0].atoms[0].name == "batch"
        dtype = self.dtype if tensor.dtype in ("compute", "param") else DTYPES.get(tensor.dtype)
        if dtype is None:
            raise PlanError(f"{crossing.name} crosses stages, and is {tensor.dtype}, which the runtime does not send")
        if tensor.dtype == "fp32":  # sums in fp32 or, where a plan computes in fp64, in that
            dtype = torch.promote_types(dtype, self.dtype)
        return ReceivedShape(sizes=tuple(lengths), dtype=dtype, rows=lengths[0] // sizes["batch"] if batched else 0)
