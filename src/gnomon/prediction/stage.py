"""The layers of one pipeline stage on one of its ranks: their prices, parameters, and what each action costs.

`stage_prices(...)` gathers `layer_price`s of the layers that a plan puts on each stage, run-length coded, with the
links behind its axes. Parameters that layers of one stage share are counted once. Leaves out the order of actions and
memory over time (the Program's), and the rest of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.graph import DTYPE_BITS, Block, Call, Graph, Kernels, Layer, nbytes, no_grad_inputs
from gnomon.hardware import Cluster, Device
from gnomon.ops.balance import DATA
from gnomon.plans import LayerSaving, Layout, Mesh, Plan, Precision, divided_layers, savings, select, stage_layers
from gnomon.prediction.layer import layer_price
from gnomon.prediction.layer_types import KernelFacts, LayerPrice, LocalContext, Phase
from gnomon.prediction.vocabulary import VocabularyShare
from gnomon.prices.attention import Pieces
from gnomon.prices.links import AxisLink, axis_link
from gnomon.sharding import ParameterCollective
from gnomon.sharding.block import INNER_AXES
from gnomon.sharding.homes import routed_tensors
from gnomon.sharding.matrices import UpdateCollective, bytes_in_update, extra_state_bytes, matrices_of, projected
from gnomon.sharding.parameters import (
    STATE_TENSORS,
    frozen_bytes,
    local_elements,
    parameter_collectives,
    shard_ranks,
    state_width,
)

GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cp": ("dense", ("cp",)),
    "tp": ("dense", ("tp",)),
    "ep": ("experts", ("ep",)),
    "etp": ("experts", ("etp",)),
    "dp_shard+cp": ("dense", ("dp_shard", "cp")),
    "dp_replicate": ("dense", ("dp_replicate",)),
    "dp_replicate+dp_shard+cp": ("dense", ("dp_replicate", "dp_shard", "cp")),
    "edp": ("experts", ("edp",)),
    "dp_replicate+edp": ("experts", ("dp_replicate", "edp")),
}
"""Maps the name of a group of ranks that communicate to (view of the mesh, its axes)."""


@dataclass(frozen=True, kw_only=True)
class StagePrice:
    """A stage on its ranks. `layers` is run-length coded: (price, labels of the layers that share it)."""

    stage: int
    """Number of the pipeline stage."""
    mesh: Mesh
    """The stage's axes, which may differ from other stages'."""
    ranks: tuple[int, ...]
    """Ranks of the job, in the order of the stage's mesh."""
    device: Device
    """The device that it is priced on."""
    members: tuple[int, ...]
    """The ranks among `ranks` on such a device with as large a share of each microbatch: these are priced."""
    links: Mapping[str, AxisLink]
    """Axis -> its groups of ranks, as their collectives see the network."""
    layers: tuple[tuple[LayerPrice, tuple[Layer, ...]], ...]
    """(price, the layers that share it) of each price."""
    plan: Plan
    """The plan that it is of."""
    share: VocabularyShare | None = None
    """The part of a divided embedding and head, on the first stage of each pipeline rank."""

    @cached_property
    def held_layers(self) -> tuple[tuple[LayerPrice, tuple[Layer, ...]], ...]:
        """The layers and the parts of layers whose parameters the stage holds."""
        return (*self.layers, *(((p, (layer,)) for p, layer in self.share.layers) if self.share else ()))

    @cached_property
    def order(self) -> tuple[LayerPrice, ...]:
        """The price of each layer, in order of the graph."""
        by_label = {layer.label: price for price, layers in self.layers for layer in layers}
        return tuple(by_label[layer.label] for layer in self.in_order)

    @cached_property
    def in_order(self) -> tuple[Layer, ...]:
        """The stage's layers in order of the graph."""
        every = [layer for _, layers in self.layers for layer in layers]
        return tuple(sorted(every, key=lambda layer: self._position[layer.label]))

    @cached_property
    def _position(self) -> dict[str, int]:
        every = sorted((n, layer.label) for n, layer in self._numbered)
        return {label: i for i, (_, label) in enumerate(every)}

    @cached_property
    def _numbered(self) -> tuple[tuple[int, Layer], ...]:
        return tuple((self.numbers[layer.label], layer) for _, layers in self.layers for layer in layers)

    numbers: Mapping[str, int]
    """Maps the label of a layer to its place in the graph."""

    def phase(self, name: str) -> Phase:
        """The phase `forward`, `input_grad`, `weight_grad` or `recompute` of the whole stage."""
        return reduce(Phase.__add__, (getattr(p, name) * len(layers) for p, layers in self.layers), Phase())

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO has ranks to divide over."""
        return self.mesh.dp_shard * self.mesh.cp > 1

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes that each layer keeps for its backward, in order of the graph; what several read (an encoder's output)
        counts with the first of them, and a layer's input counts with it, not with the layer that made it."""
        # seen: where kept tensors were made, so that one tensor read by several layers counts once.
        seen: set[tuple[str, str, str]] = set()
        out = []
        before = None
        known: dict[tuple[int, int], _Sources] = {}  # a run of layers has one call and one price
        sums: dict[tuple[int, int, tuple[int, ...]], int] = {}
        for layer, price in zip(self.in_order, self.order, strict=True):
            at = id(layer.call), id(price)
            if at not in known:
                known[at] = _Sources.of(layer.call, price)
            # An input that was recomputed or sent away with the layer before is not kept here.
            away = _read_from(before, layer) if price.input_away else frozenset()
            new = []
            for i, source in enumerate(known[at].of_layer(layer.index)):
                if source not in seen:
                    seen.add(source)
                    if price.saved[i].tensor not in away:
                        new.append(i)
            counted = tuple(new)
            # Runs of layers repeat: equal sets of counted tensors have equal sums.
            if (*at, counted) not in sums:
                sums[(*at, counted)] = sum(price.saved[i].bytes for i in counted)
            out.append(sums[(*at, counted)])
            before = layer
        return tuple(out)

    @cached_property
    def logits_bytes(self) -> int:
        """Bytes of what it keeps that has the vocabulary as a dim."""
        return sum(tensor.bytes for price in self.order for tensor in price.saved if tensor.is_logits)

    @cached_property
    def elements(self) -> tuple[int, int]:
        """(dense, routed experts') parameter elements on one rank, shared ones once, before ZeRO divides them."""
        seen: set[str] = set()
        dense = routed = 0
        for price, layers in self.held_layers:
            experts = routed_tensors(price.sharded.block)
            for layer in layers:
                for tensor in price.sharded.block.parameters:
                    # Of a divided vocabulary each pipeline rank has only its own part of the embedding or head.
                    if layer in self._parts and self.share and not self.share.holds(layer, tensor):
                        continue
                    name = layer.call.parameter_name(tensor.name, layer.index)
                    if name not in seen:
                        seen.add(name)
                        count = int(price.sharded.local_elements[tensor.name])
                        # ZeRO divides the two over other groups of ranks (`shard_ranks`), so they are counted apart.
                        dense, routed = (dense, routed + count) if tensor.name in experts else (dense + count, routed)
        return dense, routed

    @cached_property
    def frozen_bytes(self) -> tuple[int, int]:
        """Bytes of (dense, routed experts') weights that are not trained, on one rank before ZeRO 3 divides them."""
        seen: set[str] = set()
        totals = [0, 0]
        for price, layers in self.held_layers:
            for layer in layers:
                names = {t.name: layer.call.parameter_name(t.name, layer.index) for t in price.sharded.block.frozen}
                only = frozenset(own for own, full in names.items() if full not in seen)
                seen.update(names.values())
                for experts in (False, True):
                    totals[experts] += frozen_bytes(price.sharded, experts=experts, only=only)
        return totals[0], totals[1]

    @cached_property
    def table_bytes(self) -> int:
        """Bytes of buffers of integers and truth values, of which each rank has all."""
        tables = {
            layer.call.parameter_name(tensor.name, layer.index): (price, tensor)
            # Integer tables are no parameters, so ZeRO does not divide them.
            for price, layers in self.held_layers
            if (found := price.sharded.block.tables)
            for layer in layers
            for tensor in found
        }
        sizes = (nbytes(tensor, {}, price.sharded.dtypes) for price, tensor in tables.values())
        return sum(int(size) for size in sizes)

    @cached_property
    def num_tensors(self) -> int:
        """Counts the parameter tensors it holds."""
        return sum(len(price.sharded.block.parameters) * len(layers) for price, layers in self.held_layers)

    @cached_property
    def _parts(self) -> frozenset[Layer]:
        return frozenset(layer for _, layer in self.share.layers) if self.share else frozenset()

    @property
    def kept_kinds(self) -> tuple[tuple[str, float, int], ...]:
        """Lists (what is kept of an element, its bytes, the ZeRO stage that divides it)."""
        precision = self.plan.precision
        return (
            ("parameters", width(precision.param), 3),
            ("gradients", width(precision.grad), 2),
            ("master", 0 if precision.master == "none" else width(precision.master), 1),
            ("states", STATE_TENSORS[self.plan.optimizer.kind] * state_width(precision), 1),
        )

    def replica_bytes(self) -> int:
        """Bytes that stay on a rank of one expert of each layer (FlexMoE's replicas); 0 without experts on ranks."""
        if not self.plan.experts.placement:
            return 0
        # Each kind of state is divided from its ZeRO stage on: `first`.
        ways, zero = shard_ranks(self.mesh, experts=True), self.plan.optimizer.zero
        rows = self.plan.experts.placement
        mean = sum(map(len, rows)) / len(rows) / self.mesh.ep  # slots of a layer on a rank
        each = int(self.elements[1] / mean)
        return sum(int(each * size // (ways if zero >= first else 1)) for _, size, first in self.kept_kinds)

    def static_bytes(self) -> dict[str, int]:
        """Bytes that stay on a rank between steps: parameters, gradients, master copy, states."""
        optimizer, kinds = self.plan.optimizer, self.kept_kinds
        out = dict.fromkeys((name for name, _, _ in kinds), 0)
        for experts, elements in zip((False, True), self.elements, strict=True):
            ways = shard_ranks(self.mesh, experts=experts)
            for name, size, first in kinds:
                # ZeRO divides from its stage on, rounded up: the fullest rank.
                out[name] += round((-(-elements // ways) if optimizer.zero >= first else elements) * size)
        for experts, size in zip((False, True), self.frozen_bytes, strict=True):
            ways = shard_ranks(self.mesh, experts=experts) if optimizer.zero >= 3 else 1
            out["parameters"] += -(-size // ways)
        out["parameters"] += self.table_bytes
        # What is not of a parameter's size: means by rows, projected moments, wide ones of tables.
        for experts, extra in zip((False, True), self._extra_states, strict=True):
            ways = shard_ranks(self.mesh, experts=experts) if optimizer.zero >= 1 else 1
            out["states"] += ceil(extra / ways)
        if self.plan.overlap.optimizer:  # each is used where it is made
            out["gradients"] = max((self._gradient_bytes(price) for price, _ in self.held_layers), default=0)
        # An offloaded share of the optimizer takes its master copy and states with it.
        if optimizer.offload is not None:
            stays = 1 - optimizer.offload.fraction
            out["master"], out["states"] = int(out["master"] * stays), int(out["states"] * stays)
        if optimizer.offload_parameters:
            out["parameters"] = 0
        return out

    def _gradient_bytes(self, price: LayerPrice) -> int:
        """Bytes of a rank's part of the gradients of one layer."""
        sharded, total = price.sharded, 0
        for experts in (False, True):
            ways = shard_ranks(self.mesh, experts=experts) if self.plan.optimizer.zero >= 2 else 1
            total += -(-local_elements(sharded, experts=experts) // ways)
        return total * width(self.plan.precision.grad)

    def updated_elements(self) -> int:
        """Elements that this rank's optimizer updates."""
        sharded = self.plan.optimizer.zero >= 1
        return sum(
            -(-elements // (shard_ranks(self.mesh, experts=experts) if sharded else 1))
            for experts, elements in zip((False, True), self.elements, strict=True)
        )

    def collectives(self, price: LayerPrice) -> tuple[ParameterCollective, ...]:
        """Lists the communications of one layer's parameters and gradients."""
        return self._collectives[price]

    def update_collectives(self, price: LayerPrice) -> tuple[UpdateCollective, ...]:
        """Lists the communications of one layer's parameters inside the update."""
        return self._update_collectives[price]

    @cached_property
    def _update_collectives(self) -> dict[LayerPrice, tuple[UpdateCollective, ...]]:
        optimizer, precision = self.plan.optimizer, self.plan.precision
        collectives = {}
        for price, layers in self.held_layers:
            parts, unrepeated = self.share is not None and layers[0] in self._parts, self._repeated(price, layers)
            collectives[price] = tuple(
                bytes_in_update(
                    price.sharded,
                    self.mesh,
                    optimizer,
                    precision,
                    without=unrepeated,
                    vocabulary=self.plan.num_pipeline_ranks if parts else 1,
                )
            )
        return collectives

    def link_of(self, axes: tuple[str, ...]) -> AxisLink:
        """The link between ranks of these axes, or of the pipeline, which divide the vocabulary."""
        return self.share.link if self.share is not None and axes == ("vocabulary",) else self.links["+".join(axes)]

    def update_matrices(self, price: LayerPrice) -> tuple[tuple[int, int, int], ...]:
        """(count, rows, columns) of the matrices of one layer that the update looks at whole, of all shards: those
        that Muon makes orthogonal, and whose gradients are projected."""
        optimizer = self.plan.optimizer
        if optimizer.kind != "muon" and optimizer.low_rank is None:
            return ()
        found = [m for m in matrices_of(price.sharded, self.mesh) if m.orthogonalised]
        if (low := optimizer.low_rank) is not None:
            repeated = any(price is other and one[0].call.first is not None for other, one in self.held_layers)
            found = [m for m in found if projected(m, low, repeated=repeated)]
        return tuple((m.count, m.rows, m.columns) for m in found)

    @cached_property
    def _extra_states(self) -> tuple[float, float]:
        """Bytes of (dense, routed experts') states besides those of a parameter's size, before ZeRO divides them."""
        optimizer, precision, totals = self.plan.optimizer, self.plan.precision, [0.0, 0.0]
        usual = optimizer.kind not in ("adafactor", "muon") and optimizer.low_rank is None
        for price, layers in self.held_layers if not usual or precision.wide_tables else ():
            for experts in (False, True):
                own = extra_state_bytes(
                    price.sharded,
                    self.mesh,
                    optimizer,
                    precision,
                    experts=experts,
                    without=self._repeated(price, layers),
                    repeated=layers[0].call.first is not None,
                )
                totals[experts] += own * len(layers)
        return totals[0], totals[1]

    @cached_property
    def _collectives(self) -> dict[LayerPrice, tuple[ParameterCollective, ...]]:
        optimizer, precision = self.plan.optimizer, self.plan.precision
        return {
            p: parameter_collectives(p.sharded, self.mesh, optimizer, precision, without=self._repeated(p, layers))
            for p, layers in self.held_layers
        }

    def _repeated(self, price: LayerPrice, layers: Sequence[Layer]) -> frozenset[str]:
        """Parameters of a layer that one before it on this stage holds too (a head tied to the embedding next to it):
        reduced and gathered with that one. Under ZeRO 3 each block has its own copy on the way."""
        if self.share and layers[0] in self._parts:
            before = self.share.layers[: [layer for _, layer in self.share.layers].index(layers[0])]
            seen = {layer.call.parameter_name(t.name, 0) for p, layer in before for t in p.sharded.block.parameters}
            mine = {t: layers[0].call.parameter_name(t.name, 0) for t in price.sharded.block.parameters}
            return frozenset(t.name for t, name in mine.items() if name in seen or not self.share.holds(layers[0], t))
        # Under ZeRO 3 every block gathers and reduces its own parameters; repeated layers share none.
        if (self.plan.optimizer.zero == 3 and self.is_sharded) or len(layers) > 1:
            return frozenset()
        at = self.in_order.index(layers[0])
        earlier = {
            layer.call.parameter_name(tensor.name, layer.index)
            for layer, other in zip(self.in_order[:at], self.order[:at], strict=True)
            for tensor in other.sharded.block.parameters
        }
        names = {t.name: layers[0].call.parameter_name(t.name, layers[0].index) for t in price.sharded.block.parameters}
        return frozenset(name for name, full in names.items() if full in earlier)


def _read_from(before: Layer | None, layer: Layer) -> frozenset[str]:
    """Inputs that a layer has from the one before it: by its call's chain, or, where each layer is a call of its own
    (windows that alternate), by the name of that call. The first of a stage has them from the stage before; what is no
    layer, as the head, has none."""
    if layer.call.chain:
        return frozenset(own for _, own in layer.call.chain)
    if layer.call.first is None:
        return frozenset()
    makers = [(own, source.partition(".")[0]) for own, source in layer.call.inputs if "." in source]
    return frozenset(own for own, maker in makers if before is None or before.call.name == maker)


class _Sources(NamedTuple):
    """The places where the tensors that layers of one call keep were computed: (call, which repeat, tensor) of each."""

    first: tuple[tuple[str, str, str], ...]
    """The sources for the first repeat."""
    chained: tuple[str, ...]
    """The tensor of the repeat before, for later repeats; empty for those of the repeat itself, and for inputs that
    every repeat reads."""
    same: tuple[bool, ...]
    """Whether it is an input that every repeat reads."""
    outputs: tuple[bool, ...]
    """Whether later calls read that of the last repeat."""
    call: Call

    @classmethod
    def of(cls, call: Call, price: LayerPrice) -> _Sources:
        """The sources of what a price keeps."""
        chain, inputs, outputs = {own: out for out, own in call.chain}, dict(call.inputs), price.sharded.block.outputs
        first, chained = [], []
        for saved_tensor in price.saved:
            # inputs: own name -> "maker.tensor" of the graph.
            if saved_tensor.is_input:
                maker, _, tensor = inputs[saved_tensor.tensor].partition(".")
                first.append((maker, "last", tensor))
                chained.append(chain.get(saved_tensor.tensor, ""))
            else:
                first.append((call.name, "0", saved_tensor.tensor))
                chained.append("")
        same = tuple(saved_tensor.is_input and not out for saved_tensor, out in zip(price.saved, chained, strict=True))
        ends = tuple(not saved_tensor.is_input and saved_tensor.tensor in outputs for saved_tensor in price.saved)
        return cls(tuple(first), tuple(chained), same, ends, call)

    def of_layer(self, index: int) -> list[tuple[str, str, str]]:
        """Lists the sources of one repeat of a layer."""
        name, here, before, last = self.call.name, str(index), str(index - 1), index == self.call.repeat - 1
        # In order: an input of every repeat (or of the first); what the repeat before made; an output of the last
        # repeat; its own.
        return [
            first
            if same or (chained and not index)
            else (name, before, chained)
            if chained
            else (name, "last" if output and last else here, first[2])
            for first, chained, same, output in zip(self.first, self.chained, self.same, self.outputs, strict=True)
        ]


def width(dtype: str) -> int:
    """Bytes of an element of a dtype."""
    return DTYPE_BITS[dtype] // 8


def stage_prices(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    stage: int,
    *,
    sizes: Mapping[str, int],
    kernels: Kernels,
    facts: KernelFacts,
    load: float = 1.0,
    pieces: Pieces = (),
) -> tuple[StagePrice, ...]:
    """Prices of the layers of one stage, for each kind of worker (device, share of a microbatch), the slowest first.

    sizes: `seq` and others of the workload, and `batch` of one data-parallel rank's microbatch, unless the plan gives
    each rank a share. facts: of the stack. load: busiest over mean rows of experts. pieces: as in `LocalContext`.
    """
    # Alike devices and equal shares: one worker stands for all ranks.
    planned = _planned(plan, graph, cluster, kernels)
    mesh, ranks = plan.stage_mesh(stage), planned.ranks[stage]
    shares = plan.stages[stage].shares if plan.stages else ()
    workers: dict[tuple[Device, int], tuple[int, ...]] = {}
    if planned.alike is not None and not shares:
        workers[planned.alike, sizes["batch"]] = ranks
    else:
        # Otherwise group ranks by (device, share); a share of 0 has nothing to price.
        listed: dict[tuple[Device, int], list[int]] = {}
        for index, rank in enumerate(ranks):
            part = shares[mesh.dense.coordinate(index, "dp")] if shares else sizes["batch"]
            if part:
                listed.setdefault((planned.devices[rank], part), []).append(rank)
        workers = {worker: tuple(members) for worker, members in listed.items()}
    prices = [
        _stage_price(
            planned,
            stage,
            {**sizes, "batch": part},
            load,
            device,
            members,
            facts,
            pieces,
        )
        for (device, part), members in workers.items()
    ]
    # The slowest first: callers that want one worker of a stage take the first (`stages_of`).
    return tuple(sorted(prices, key=_seconds, reverse=True)) if len(prices) > 1 else tuple(prices)


class _Planned:
    """What the stages of one plan share: layers, savings, links and the prices so far."""

    def __init__(self, plan: Plan, graph: Graph, cluster: Cluster, kernels: Kernels) -> None:
        self.plan, self.graph, self.cluster, self.kernels = plan, graph, cluster, kernels
        self.ranks, self.divided = plan.stage_ranks, divided_layers(plan, graph)
        self.whole, labels = stage_layers(plan, graph), {layer.label for layer in self.divided}
        self.layers = tuple(tuple(layer for layer in part if layer.label not in labels) for part in self.whole)
        self.saving = savings(plan, graph, kernels)
        self.numbers = {layer.label: i for i, layer in enumerate(graph.layers())}
        self.narrow = (
            {layer.label for layer in select(plan.precision.fp8.calls, graph)} if plan.precision.fp8 else set()
        )
        self.experts = any(routed_tensors(block) for block in graph.blocks)
        """Whether any layer of the model routes tokens to experts."""
        self.prices: dict[object, LayerPrice] = {}
        self._links: dict[object, dict[str, AxisLink]] = {}
        kinds = {group.node.device for group in cluster.groups}
        self.alike = next(iter(kinds)) if len(kinds) == 1 else None
        """The device, where all are of one kind; None otherwise."""

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Lists the device of each rank."""
        every = self.cluster.devices
        return tuple(every[place] for place in self.plan.device_of)

    def links(self, stage: int) -> dict[str, AxisLink]:
        """Maps each group of axes to the link that a stage's collectives run over; stages on the same ranks have the
        same, whatever layers they hold: those of experts too where the model has any, since a search moves layers
        between stages."""
        mesh, ranks = self.plan.stage_mesh(stage), self.ranks[stage]
        key = mesh, ranks
        if key not in self._links:
            self._links[key] = stage_links(self.plan, self.cluster, mesh, ranks, experts=self.experts)
        return self._links[key]

    @cached_property
    def across(self) -> dict[str, AxisLink]:
        """Maps groups of axes to links for exchanges of a divided vocabulary: `tp` is the pipeline's."""
        columns = tuple(dict.fromkeys(self.ranks))
        place = self.plan.places(np.array(columns, np.int64).T)
        return {**self.links(0), "tp": axis_link(self.cluster, place)}

    def share(self, stage: int, parts: Sequence[tuple[LayerPrice, Layer]]) -> VocabularyShare:
        """The part that a rank has of the divided embedding and head."""
        mine = self.plan.pipeline_ranks[stage]
        stages = [s for s, rank in enumerate(self.plan.pipeline_ranks) if rank == mine]
        (head, last), first = parts[-1], parts[0]
        return VocabularyShare(
            how=self.plan.schedule.vocabulary,
            head=head,
            embedding=first[0] if first[1] is not last else None,
            layers=tuple(parts),
            whole=frozenset(layer.label for s in stages for layer in self.whole[s]),
            link=self.across["tp"],
        )


_Alike: TypeAlias = "tuple[str, tuple[str, ...], LayerSaving, bool]"
"""(block, inputs without gradient, what is saved, whether in eight bits): what layers of one price have in common."""

_planned = lru_cache(maxsize=2)(_Planned)


def _seconds(stage: StagePrice) -> float:
    return sum(stage.phase(name).device_s for name in ("forward", "input_grad", "weight_grad", "recompute"))


def _stage_price(
    planned: _Planned,
    stage: int,
    sizes: Mapping[str, int],
    load: float,
    device: Device,
    members: tuple[int, ...],
    facts: KernelFacts,
    pieces: Pieces,
) -> StagePrice:
    plan, graph, saving = planned.plan, planned.graph, planned.saving
    mesh, links = plan.stage_mesh(stage), planned.links(stage)
    splits = tuple((split.op, split.parts) for split in plan.overlap.splits)
    known = device, tuple(sorted(sizes.items())), load, facts

    def priced(
        alike: _Alike, mesh: Mesh = mesh, links: Mapping[str, AxisLink] = links, layout: Layout = plan.layout
    ) -> LayerPrice:
        """One price for all layers that are alike, on the stage's mesh or another."""
        name, no_grad, saved, low = alike
        block = graph.block(name)
        parts = pieces if block.does("attends") else ()
        # The key holds all that a price follows from and nothing of the stage's number, so that stages share prices.
        key = known, tuple(links.items()), name, no_grad, saved, low, parts
        if key not in planned.prices:
            inside, among = _inside(block, mesh, links)
            context = LocalContext(
                block=block,
                no_grad=no_grad,
                sizes=known[1],
                mesh=inside,
                layout=layout,
                links=among,
                saving=saved,
                whole_recompute=saved.whole,
                precision=_precision(plan, low),
                kernels=planned.kernels,
                device=device,
                facts=facts,
                # an exchange that is a row of the Program is hidden by the clock, not by its price
                expert_overlap=plan.overlap.experts and block.part_of is None,
                split_paths=splits,
                load=load,
                pieces=parts,
            )
            planned.prices[key] = layer_price(context)
        return planned.prices[key]

    def alike(layer: Layer) -> _Alike:
        no_grad = no_grad_inputs(graph, layer.call)
        return layer.call.block, no_grad, saving[layer.label], layer.label in planned.narrow

    # what layers differ in: a context is long to hash, so there is one for each group
    groups: dict[_Alike, list[Layer]] = {}
    for layer in planned.layers[stage]:
        groups.setdefault(alike(layer), []).append(layer)
    if not groups:
        raise PlanError(f"stage {stage} has no layers; use fewer stages")
    prices = [(priced(kind), tuple(layers)) for kind, layers in groups.items()]
    share = None
    # The first stage of a pipeline rank carries that rank's part of the vocabulary.
    if planned.divided and plan.pipeline_ranks.index(plan.pipeline_ranks[stage]) == stage:
        # The vocabulary is divided over the pipeline's ranks as if they were tensor-parallel ones.
        vocabulary_mesh = replace(mesh, tp=plan.num_pipeline_ranks)
        layout = replace(plan.layout, sequence_parallel=False)
        parts = [(priced(alike(layer), vocabulary_mesh, planned.across, layout), layer) for layer in planned.divided]
        share = replace(planned.share(stage, parts), narrow=facts.narrow_hidden)
    return StagePrice(
        stage=stage,
        mesh=mesh,
        ranks=planned.ranks[stage],
        device=device,
        members=members,
        links=links,
        layers=tuple(prices),
        plan=plan,
        share=share,
        numbers=planned.numbers,
    )


def _precision(plan: Plan, narrow: bool) -> Precision:
    """The part of the precision that prices of layers depend on, so that plans share them."""
    return Precision(compute=plan.precision.compute, fp8=plan.precision.fp8 if narrow else None)


def _inside(block: Block, mesh: Mesh, links: Mapping[str, AxisLink]) -> tuple[Mesh, tuple[tuple[str, AxisLink], ...]]:
    """The axes and links that the price of a layer follows from, so that plans with other data parallelism share it;
    without experts, nothing lies on theirs."""
    # The smallest mesh with these inner axes: data parallelism beyond ep x etp changes nothing inside a layer.
    ep, etp = (mesh.ep, mesh.etp) if routed_tensors(block) else (1, 1)
    if block.does("counts the step"):
        inside = replace(mesh, pp=1)
        data_links = ((DATA, links[DATA]),) if DATA in links else ()
    else:
        inside, data_links = Mesh(dp_shard=ep * etp, cp=mesh.cp, tp=mesh.tp, ep=ep, etp=etp), ()
    among = ((axis, links[axis]) for axis in INNER_AXES if axis in links and getattr(inside, axis) > 1)
    return inside, (*among, *data_links)


def stage_links(
    plan: Plan, cluster: Cluster, mesh: Mesh, ranks: Sequence[int], *, experts: bool = True
) -> dict[str, AxisLink]:
    """What the collectives of each group of axes run over: the slowest group of its kind. experts: whether there are
    any, for the groups of their own."""
    place = plan.places(np.array(ranks, np.int64))
    links = {}
    for name, groups in _groups(mesh, experts):
        links[name] = axis_link(cluster, place[groups])
    return links


@lru_cache(maxsize=64)
def _groups(mesh: Mesh, experts: bool) -> tuple[tuple[str, NDArray[np.int64]], ...]:
    """Groups of two ranks or more that communicate, by name."""
    views = {"dense": mesh.dense, "experts": mesh.experts if experts else mesh.dense}
    named = []
    for name, (view, axes) in GROUPS.items():
        if (view == "experts" and not experts) or any(axis not in views[view].axes for axis in axes):
            continue
        groups = views[view].groups(*axes)
        if groups.shape[1] > 1:
            # [groups, ranks]: a group of one rank sends nothing, so it gets no link.
            named.append((name, groups))
    return tuple(named)
