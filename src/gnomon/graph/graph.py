"""`Graph`: a model as a directed acyclic graph of calls of blocks, run-length coded.

Thirty-two identical layers are one Call. Tied weights are one parameter name in two calls; a shared block is two calls
with the same parameter names. A graph checks itself and answers exact parameter counts, layers and where an input comes
from. Leaves out: FLOPs and bytes (`totals.py`), stages (room `plans`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gnomon.errors import GraphError, nearest
from gnomon.graph.types import Block, Call, Layer, layers_of
from gnomon.tensors.dims import numel
from gnomon.tensors.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A model. Calls are listed in an order in which they can run, so there is no cycle."""

    name: str
    """`llama-3.1-8b`."""
    inputs: tuple[Tensor, ...]
    """What a batch brings: token ids, labels, pixels. No gradient flows into them."""
    blocks: tuple[Block, ...]
    """Each used by at least one call."""
    calls: tuple[Call, ...]
    """The DAG; a call reads graph inputs and outputs of earlier calls."""
    outputs: tuple[str, ...]
    """Sources (`head.loss`) of what the model returns."""
    left_out: str = ""
    """Why this Graph can be priced and not run, as a sentence: what of the model's mathematics it does not say."""
    _blocks: Mapping[str, Block] = field(init=False, repr=False, compare=False)
    _calls: Mapping[str, Call] = field(init=False, repr=False, compare=False)
    _parameters: Mapping[str, Tensor] = field(init=False, repr=False, compare=False)
    _layers: tuple[Layer, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_blocks", {b.name: b for b in self.blocks})
        object.__setattr__(self, "_calls", {c.name: c for c in self.calls})
        object.__setattr__(self, "_layers", tuple(layers_of(self.calls)))
        names = [*(b.name for b in self.blocks), *(c.name for c in self.calls)]
        if len(self._blocks) != len(self.blocks) or len(self._calls) != len(self.calls):
            raise GraphError(f"graph {self.name!r} names a block or call twice: {names}")
        unused = set(self._blocks) - {c.block for c in self.calls}
        if unused:
            raise GraphError(f"graph {self.name!r} has blocks that no call uses: {', '.join(sorted(unused))}")
        done: dict[str, Call] = {}
        for call in self.calls:
            self._check_call(call, done)
            done[call.name] = call
        self._check_labels()
        object.__setattr__(self, "_parameters", self._collect_parameters())
        for source in self.outputs:
            self.source(source)

    def block(self, name: str) -> Block:
        """The block of that name; GraphError with the nearest names otherwise."""
        if name not in self._blocks:
            raise GraphError(f"graph {self.name!r} has no block {name!r}{nearest(name, self._blocks)}")
        return self._blocks[name]

    def call(self, name: str) -> Call:
        """The call of that name; GraphError with the nearest names otherwise."""
        if name not in self._calls:
            raise GraphError(f"graph {self.name!r} has no call {name!r}{nearest(name, self._calls)}")
        return self._calls[name]

    def source(self, source: str) -> tuple[Call | None, Tensor]:
        """What `call.tensor` or a graph input's name stands for; the call is None for a graph input."""
        name, _, tensor = source.partition(".")
        if not tensor:
            for graph_input in self.inputs:
                if graph_input.name == name:
                    return None, graph_input
            known = [*(t.name for t in self.inputs), *(f"{c.name}.…" for c in self.calls)]
            raise GraphError(f"graph {self.name!r} has no input {source!r}{nearest(source, known)}")
        call = self.call(name)
        block = self.block(call.block)
        if tensor not in block.outputs:
            raise GraphError(
                f"{source!r}: block {block.name!r} has no output {tensor!r}{nearest(tensor, block.outputs)}"
            )
        return call, block.tensor(tensor)

    def layers(self) -> tuple[Layer, ...]:
        """Every (call, index) with repeats expanded, in the order in which they run."""
        return self._layers

    def __hash__(self) -> int:  # blocks know theirs; what calls differ in is left to comparing
        return hash((*self.blocks, len(self.calls), *(call.repeat for call in self.calls)))

    def parameters(self) -> Mapping[str, Tensor]:
        """Full name -> parameter, each once however many calls share it."""
        return self._parameters

    def num_parameters(self) -> int:
        """Exact number of parameters; tied and shared ones count once."""
        total = 0
        for tensor in self._parameters.values():
            count = numel(tensor.dims, {})
            assert isinstance(count, int), "a parameter has fixed sizes"
            total += count
        return total

    def num_active_parameters(self) -> int:
        """Parameters that a token meets: of routed experts only those that it visits."""
        idle: dict[str, int] = {}
        for layer in self._layers:
            block = self._blocks[layer.call.block]
            dims = {dim.name.rpartition(".")[2]: dim.size or 0 for dim in block.dims}
            experts, chosen = dims.get("experts", 0), dims.get("topk", 0)
            for tensor in block.parameters if chosen else ():
                if "experts" in tensor.name.split(".") and any(d.name.endswith("experts") for d in tensor.dims):
                    count = numel(tensor.dims, {})
                    assert isinstance(count, int), "a parameter has fixed sizes"
                    # By full name, so that a shared parameter counts once. All experts of a layer are one tensor, in
                    # equal parts.
                    idle[layer.call.parameter_name(tensor.name, layer.index)] = count * (experts - chosen) // experts
        return self.num_parameters() - sum(idle.values())

    def num_frozen(self) -> int:
        """Weights that are read and not trained; tied and shared ones count once."""
        weights: dict[str, Tensor] = {}
        for layer in self._layers:
            for tensor in self._blocks[layer.call.block].frozen:
                weights[layer.call.parameter_name(tensor.name, layer.index)] = tensor
        total = 0
        for tensor in weights.values():
            count = numel(tensor.dims, {})
            assert isinstance(count, int), "a weight has fixed sizes"
            total += count
        return total

    def _check_call(self, call: Call, done: Mapping[str, Call]) -> None:
        where = f"{self.name}/{call.name}"
        block = self.block(call.block)
        bound = dict(call.inputs)
        if len(bound) != len(call.inputs):
            raise GraphError(f"{where}: an input is given twice")
        if set(bound) != set(block.inputs):
            raise GraphError(
                f"{where}: block {block.name!r} needs inputs {block.inputs}, the call gives {tuple(bound)}"
            )
        for own, source in call.inputs:
            producer = source.partition(".")[0]
            if "." in source and producer not in done:
                why = "a cycle" if producer in self._calls else f"unknown{nearest(producer, done)}"
                raise GraphError(f"{where}: input {own!r} reads {source!r}, which no earlier call gives ({why})")
            self._check_same(self.source(source)[1], block.tensor(own), f"{where}: input {own!r} from {source!r}")
        for out, own in call.chain:
            if out not in block.outputs or own not in block.inputs:
                raise GraphError(f"{where}: chain {out!r} -> {own!r} must lead from an output to an input")
            self._check_same(block.tensor(out), block.tensor(own), f"{where}: chain {out!r} -> {own!r}")
        for parameter, _ in call.params:
            if block.tensor(parameter).kind != "parameter" and block.tensor(parameter) not in block.frozen:
                raise GraphError(f"{where}: {parameter!r} is not a parameter of block {block.name!r}")

    @staticmethod
    def _check_same(found: Tensor, expected: Tensor, where: str) -> None:
        if found.dims != expected.dims or found.dtype != expected.dtype:
            raise GraphError(f"{where}: gets {found}, needs {expected}; dims and dtype must agree")

    def _check_labels(self) -> None:
        seen: set[str] = set()
        for layer in layers_of(self.calls):
            if layer.label in seen:
                raise GraphError(f"graph {self.name!r} has two layers {layer.label!r}: change `first` or `family`")
            seen.add(layer.label)

    def _collect_parameters(self) -> dict[str, Tensor]:
        parameters: dict[str, Tensor] = {}
        for layer in layers_of(self.calls):
            shared = {own for own, _ in layer.call.params}
            for tensor in self._blocks[layer.call.block].parameters:
                name = layer.call.parameter_name(tensor.name, layer.index)
                known = parameters.get(name)
                if known is None:
                    parameters[name] = tensor
                elif tensor.name not in shared:
                    raise GraphError(
                        f"parameter {name!r} of {layer.label} is already that of an earlier call; to share it say so "
                        f"in the call's params, otherwise change its prefix or first"
                    )
                elif known.dims != tensor.dims or known.dtype != tensor.dtype:
                    raise GraphError(f"parameter {name!r} is {known} in one call and {tensor} in {layer.label}")
        return parameters
