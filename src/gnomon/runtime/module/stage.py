"""Consecutive layers of a model on one rank, as a torch module: `Stage`.

It runs the Graph's blocks (`blocks`) layer by layer with its parameters, under the plan's choice of what is computed
again in backward. Activations are autograd's; parameters and gradients are in `parameters`. Leaves out which layers a
rank holds and what their parameters begin as (`apply`), and when a stage runs (`execute`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gnomon.errors import GraphError, PlanError
from gnomon.graph import Graph, Layer
from gnomon.graph import Tensor as GraphTensor
from gnomon.graph.outputs import losses
from gnomon.plans.expert_rows import whole_layer
from gnomon.plans.parts import Preset
from gnomon.plans.replicas import Placement
from gnomon.runtime.data.packing import Packing, packing_of
from gnomon.runtime.module.blocks import BlockRun
from gnomon.runtime.module.crossings import Hop, reads, writes
from gnomon.runtime.module.moves import Move, move_through
from gnomon.runtime.module.saving import Keeper, Rules, SavingDecision
from gnomon.runtime.ops.places import places
from gnomon.runtime.ops.routing import Routing
from gnomon.runtime.ops.site import ALONE, requiring_grad
from gnomon.runtime.ops.speculation import Guess
from gnomon.runtime.parameters.parameters import Parameters, Tape, Weight
from gnomon.runtime.watch.layer_bytes import LayerBytes

Batch = Mapping[str, Tensor]
"""Inputs of the graph by name, of one microbatch on this rank."""

_NONE: Mapping[str, Parameters] = MappingProxyType({})


class Stage(nn.Module):
    """Consecutive layers on one rank."""

    def __init__(
        self,
        graph: Graph,
        layers: Sequence[Layer],
        parameters: Sequence[Parameters],
        runs: Mapping[str, BlockRun],
        zero: int,
        *,
        borrowed: Mapping[str, Parameters] = _NONE,
        enters: Sequence[Hop] = (),
        leaves: Sequence[Hop] = (),
    ) -> None:
        """Takes its parameters (held) by the ranks that their gradients are reduced over, the ZeRO stage in effect, the
        parameters that it reads and another stage holds (borrowed), by name, and what earlier stages hand it (enters)
        and it hands later ones (leaves)."""
        super().__init__()
        self.layers, self.own_parameters, self.runs, self.tape = tuple(layers), tuple(parameters), runs, Tape()
        self.zero = zero
        self.frozen: Parameters | None = None
        """Weights that are not trained; of a captured model those that ZeRO 3 divides."""
        self.four_bit: Parameters | None = None
        """Those of them that are in four bits."""
        self.holder = {name: part for part in parameters for name in part.by_name} | dict(borrowed)
        """Name of a parameter -> which of `parameters` has it, or from whom it is borrowed."""
        self.borrowed = dict(borrowed)
        # By identity, since a part stands under each of its parameters' names.
        self.reduced = (*parameters, *{id(part): part for part in borrowed.values() if part.borrowed}.values())
        """What gradients of its own are reduced of."""
        self.placements: Mapping[str, Placement] = {}
        """Label of a layer -> the expert in each slot of ranks of ep, where the plan places them."""
        self.guesses: Mapping[str, Guess] = {}
        """Label of a layer -> what its dispatch sends ahead by, where the plan has it so."""
        self.presets: Mapping[str, Preset] = {}
        """Label of a layer -> what of it is computed again in backward; left out: nothing."""
        self.in_runs: frozenset[str] = frozenset()
        """Labels of layers that are computed again together with the one before."""
        self.rules: Mapping[str, Rules] = {}
        """Label of a layer -> what it keeps, tensor by tensor, in place of a preset."""
        self.known: dict[Hashable, SavingDecision] = {}
        self.note: Callable[[Tensor], None] | None = None
        """Is told what layers with rules keep on the device."""
        self.measures: LayerBytes | None = None
        """Is told where layers begin and end, and what they make."""
        self.watch: Callable[[Layer, str, Tensor], None] | None = None
        """Is told each activation of each layer, by name, as it is made."""
        self.routed: Callable[[Layer, Tensor], None] | None = None
        """Is told which experts tokens choose in each layer, (…, topk)."""
        self.counted: Callable[[Layer, int, Tensor], Tensor] | None = None
        """Of a layer and a microbatch, what `BlockRun.run` calls so."""
        self.unit = 0
        """That whose forward runs, or ran last."""
        self.routings: dict[str, Routing] = {}
        """Of the microbatch: whose the rows are that parts of layers of experts hand each other, by full name."""
        self.whole = {layer.label: whole_layer(graph, layer) for layer in layers}
        """Label of a layer -> it, or the layer that it is a part of."""
        self._weights: dict[tuple[str, str, int], Weight] = {}
        self.graph_inputs = {tensor.name for tensor in graph.inputs}
        self.inputs = graph.inputs
        self.sizes: dict[str, int] = {}
        """Of dims that inputs bring, on this rank and in this microbatch."""
        self.states: Mapping[str, Tensor] = {}
        """Buffers of a captured model, by full name."""
        self.state_names = _state_names(graph, layers)
        """Those that its layers read."""
        self.scans = any(graph.block(layer.call.block).does("scans") for layer in layers)
        self.captured = any(op.captured is not None for block in graph.blocks for op in block.ops)
        self.draws = any(runs[layer.call.block].drawing for layer in layers)
        """Whether its layers draw random numbers, which are drawn again where layers are computed again."""
        self.entries: dict[str, tuple[Move, ...]] = {}
        """Of inputs of a captured model: which part this rank works on, where sequences are divided between layers."""
        for layer in layers if self.captured else ():
            run = runs[layer.call.block]
            self.entries |= {name: run.entry(own) for own, name in reads(layer).items() if name in self.graph_inputs}
        self.reads = [reads(layer) for layer in layers]
        self.writes = [writes(graph, layer) for layer in layers]
        written = {name for names in self.writes for name in names.values()}
        needed = [
            name
            for names in self.reads
            for name in names.values()
            if name not in written and name not in self.graph_inputs
        ]
        self.enters, self.leaves = tuple(enters), tuple(leaves)
        handed = {crossing.name for hop in self.enters for crossing in hop.crossings}
        if missing := [name for name in needed if name not in handed]:
            raise GraphError(f"{graph.name}: the stage of {layers[0].label} reads {missing[0]}, which no other makes")
        # The last layer that reads a name: later ones overwrite earlier. After it the tensor is let go of.
        read = {name: index for index, names in enumerate(self.reads) for name in names.values()}
        self.unread = [[name for name, last in read.items() if last == index] for index in range(len(self.reads))]
        """Of each layer: what no later one reads."""
        self.results = tuple(name for name in losses(graph) if name in written)
        """Losses that it makes: at the last stage, or layers of it."""
        self.copies = {
            full: runs[layer.call.block].copies[own]
            for layer, names in zip(layers, self.writes, strict=True)
            for own, full in names.items()
            if full in self.results
        }
        """Of each of them: ranks that compute the same one."""
        self.given_on = {crossing.name for hop in self.leaves for crossing in hop.crossings} | set(self.results)

    @property
    def parts(self) -> tuple[Parameters, ...]:
        """All that is gathered under ZeRO 3: what is trained, and what is only read."""
        return (*self.reduced, *self.still)

    @property
    def still(self) -> tuple[Parameters, ...]:
        """What is only read."""
        return tuple(part for part in (self.frozen, self.four_bit) if part is not None)

    def forward(self, entered: Mapping[str, Tensor], batch: Batch, packing: Packing | None = None) -> dict[str, Tensor]:
        """Computes the stage's layers. entered: what earlier stages hand it, by name. packing: of a row of several
        sequences, as ranks have it; None: what the batch says. Returns what it hands later ones, by name; at the last
        stage the loss summed over tokens, as `results`."""
        if self.captured:
            batch, self.sizes = differentiable(batch), bound(self.inputs, batch)
            batch = {n: move_through(x, self.entries[n], ()) if self.entries.get(n) else x for n, x in batch.items()}
        values = {**batch, **entered}
        packing = packing_of(batch) if packing is None else packing
        if packing is not None and self.scans:
            raise PlanError("the runtime's state-space scans run over whole rows; pack one document a row (stream)")
        unit = self.unit  # another's may be under way once this one's layers are computed again
        for part, again in self._parts():
            if self.measures is not None:
                self.measures.begin(part[0])
            if again:
                names, outs = tuple(self._outer(part)), self._outs(part)
                forward = partial(self._results, part, names, outs, packing, unit)
                inputs = [values[name] for name in names]
                if self.measures is not None:
                    self.measures.kept_by(part[0], partial(forward, *inputs))
                values.update(zip(outs, _again(forward, *inputs, draws=self.draws), strict=True))
                # They hold the inputs, which may be the last reference to what an earlier layer made.
                del forward, inputs
            else:
                self._run(part, values, packing, unit)
            for name in self.unread[part[-1]]:
                if name not in self.given_on:
                    values.pop(name, None)
            if self.measures is not None:
                self.measures.end(part[0], [values[name] for name in self._outs(part)])
        return {name: values[name] for name in self.given_on}

    def _parts(self) -> Iterator[tuple[range, bool]]:
        """Neighbouring layers, and whether they are computed again from the input of the first."""
        first = 0
        while first < len(self.layers):
            # A run of layers is computed again from the input of its first, so that only that is kept.
            stop = first + 1
            again = self._is_full(first)
            while again and stop < len(self.layers) and self.layers[stop].label in self.in_runs:
                stop += 1
            yield range(first, stop), again
            first = stop

    def _is_full(self, index: int) -> bool:
        label = self.layers[index].label
        return self.presets.get(label) == "full" and label not in self.rules

    def _outer(self, part: Sequence[int]) -> dict[str, None]:
        """What layers read that none of them makes."""
        written = {name for index in part for name in self.writes[index].values()}
        return dict.fromkeys(name for index in part for name in self.reads[index].values() if name not in written)

    def _results(
        self,
        part: Sequence[int],
        names: Sequence[str],
        outs: Sequence[str],
        packing: Packing | None,
        unit: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        values = dict(zip(names, tensors, strict=True))
        self._run(part, values, packing, unit)
        return tuple(values[out] for out in outs)

    def _outs(self, part: Sequence[int]) -> tuple[str, ...]:
        """What layers make that others read, or the stage gives away."""
        later = {name for index in range(part[-1] + 1, len(self.layers)) for name in self.reads[index].values()}
        written = [name for index in part for name in self.writes[index].values()]
        return tuple(name for name in written if name in later or name in self.given_on)

    def _run(self, part: Sequence[int], values: dict[str, Tensor], packing: Packing | None, unit: int) -> None:
        for index in part:
            layer, run = self.layers[index], self.runs[self.layers[index].call.block]
            inputs = {own: values[name] for own, name in self.reads[index].items()}
            keeper, again = None, frozenset[str]()
            if packing is not None and packing.prefixes is not None:
                packing = replace(packing, layer=layer.label)
            if layer.label in self.rules and torch.is_grad_enabled():
                keeper = Keeper(run, self.rules[layer.label], self.known, (layer.label, _alike(packing)))
            if self.presets.get(layer.label) == "selective" and layer.label not in self.rules:
                again = frozenset(op.path for op in run.block.ops if op.does == "attends")
            routings = {own: self.routings[name] for own, name in self.reads[index].items() if name in self.routings}
            outputs = run.run(
                inputs,
                self.weights(layer, run),
                self._state(layer, run, inputs, packing),
                again=again,
                packing=packing,
                sizes=self.sizes,
                compute=self.own_parameters[0].dtypes.param,
                seen=None if self.watch is None else partial(self.watch, layer),
                keeper=keeper,
                routed=None if self.routed is None else partial(self.routed, self.whole[layer.label]),
                placement=self.placements.get(self.whole[layer.label].label),
                guess=self.guesses.get(self.whole[layer.label].label),
                routings=routings,
                counted=None if self.counted is None else partial(self.counted, self.whole[layer.label], unit),
            )
            self.routings.update((name, routings[own]) for own, name in self.writes[index].items() if own in routings)
            if keeper is not None and self.note is not None:
                for tensor in keeper.on_device():
                    self.note(tensor)
            values.update((name, outputs[own]) for own, name in self.writes[index].items())

    def _state(
        self, layer: Layer, run: BlockRun, inputs: Mapping[str, Tensor], packing: Packing | None
    ) -> Callable[[str], Tensor]:
        states, frozen, derived = self.states, self.frozen, _state(run, inputs, packing)

        def state(name: str) -> Tensor:
            full = layer.call.parameter_name(name, layer.index)
            if self.captured and frozen is not None and full in frozen.by_name:
                return frozen.value(full).view(
                    [math.prod(a.size or 1 for a in dim.atoms) for dim in run.block.tensor(name).dims]
                )
            value = states.get(full)
            return derived(name) if value is None else value

        return state

    def weights(self, layer: Layer, run: BlockRun) -> Callable[[str, int], Weight]:
        """What a block reads its parameters by, in one layer."""

        def weight(name: str, rows: int) -> Weight:
            key = layer.label, name, rows
            if key not in self._weights:
                # A handle is asked for with every op of every microbatch, and never changes.
                self._weights[key] = weight_of(name, rows)
            return self._weights[key]

        def weight_of(name: str, rows: int) -> Weight:
            full = layer.call.parameter_name(name, layer.index)
            part = next((part for part in self.still if full in part.by_name), None) or self.holder[full]
            full_shape = part.by_name[full].shape
            shape, start = [], 0
            for dim in run.block.tensor(name).dims:
                stop = start + len(dim.atoms)
                shape.append(math.prod(full_shape[start:stop]))
                start = stop
            return Weight(part, full, self.tape, rows=rows, shape=shape)

        return weight


def _state_names(graph: Graph, layers: Sequence[Layer]) -> frozenset[str]:
    return frozenset(
        layer.call.parameter_name(tensor.name, layer.index)
        for layer in layers
        for tensor in graph.block(layer.call.block).tensors
        if tensor.kind == "state"
    )


def _alike(packing: Packing | None) -> Hashable:
    """What microbatches have in common that keep the same tensors."""
    # Decisions on what is kept are made once for microbatches that are alike: the same ops then save the same tensors
    # in the same order.
    if packing is None or packing.parts is None:
        return packing is None
    return tuple((part.tokens, part.is_chunk, bool(part.ranks)) for part in packing.parts)


def differentiable(batch: Batch) -> dict[str, Tensor]:
    """The batch with inputs that autograd goes back to, so that it comes to ops that read nothing else."""
    return {n: requiring_grad(x) if x.is_floating_point() else x for n, x in batch.items()}


def bound(inputs: Sequence[GraphTensor], batch: Batch) -> dict[str, int]:
    """Size of each dim that the inputs bring."""
    sizes: dict[str, int] = {}
    for tensor in inputs:
        for dim, size in zip(tensor.dims, batch[tensor.name].shape, strict=True):
            if dim.size is None and not dim.factors and not dim.same_as:
                sizes[dim.name] = int(size)
    return sizes


def _again(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, draws: bool) -> tuple[Tensor, ...]:
    """The function's outputs, whose inside is computed again in backward. draws: random numbers, which are then the
    same again."""
    outs: tuple[Tensor, ...] = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=draws)
    return outs


def _state(run: BlockRun, inputs: Mapping[str, Tensor], packing: Packing | None) -> Callable[[str], Tensor]:
    """Arrays that nobody trains: positions, as long as the block's integers are, or within packed documents."""

    shapes = {name: (x.shape, x.device) for name, x in inputs.items()}  # not the inputs, which may go to the host

    def state(name: str) -> Tensor:
        tensor = run.block.tensor(name)
        source = next(n for n in shapes if tensor.dims[0] in run.block.tensor(n).dims)
        where = run.block.tensor(source).dims.index(tensor.dims[0])
        shape, device = shapes[source]
        if packing is not None and packing.parts is not None:
            return places(run.block, name, packing.positions)
        # Under cp a rank has parts of a sequence, whose places are those of the whole.
        own = run.axes.get("cp", ALONE).positions(shape[where], device)
        if packing is not None:
            own = packing.positions[:, own]
        return places(run.block, name, own)

    return state
