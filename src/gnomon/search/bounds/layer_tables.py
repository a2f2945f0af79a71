"""What layers cost under a context, for all microbatch sizes at once: the numbers that bounds are made of.

`Kinds` says which layers of a graph are alike and how many of each a stage has; `KindTable` holds seconds and bytes of
each kind on one rank, as arrays over microbatch sizes, from the same prices as predictions (`price_layer_saved`).
Leaves out pipelines, data-parallel communication and the update (`bounds`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.graph import Block, Graph, Kernels, Layer, no_grad_inputs
from gnomon.hardware import Cluster, Device
from gnomon.plans import LayerSaving, Plan, Precision, Saved, savings, select, stage_layers
from gnomon.prediction.layer import price_layer_saved
from gnomon.prediction.layer_types import KernelFacts, LayerPrice, LocalContext, Phase
from gnomon.prediction.stage import StagePrice
from gnomon.prices.collectives import copy_s_per_byte
from gnomon.prices.fitted import FittedRates, Rates, rates
from gnomon.prices.host import host_cost
from gnomon.prices.links import AxisLink
from gnomon.sharding.homes import routed_tensors
from gnomon.sharding.parameters import frozen_bytes, local_elements
from gnomon.software import Stack

Doubles = NDArray[np.float64]
PRESETS = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that cost the same wherever they stand."""

    block: Block
    """The block that they call."""
    no_grad: tuple[str, ...]
    """Inputs that need no gradient."""
    savings: Mapping[str, LayerSaving]
    """What is kept of a layer, by way of saving."""
    narrow: bool
    """Whether matmuls run in eight bits."""
    layers: tuple[Layer, ...]
    """The layers."""


class Kinds:
    """The kinds of a graph's layers, and how stages are made of them."""

    def __init__(
        self, graph: Graph, plan: Plan, kernels: Kernels, extra_presets: Mapping[str, Saved] | None = None
    ) -> None:
        """plan: precision and rules of saving. extra_presets: further ways of saving, by name."""
        self.graph = graph
        self.layers = graph.layers()
        # Presets can be compared only if the plan's own rules do not fix what is saved.
        presets = PRESETS if not plan.saved.rules and plan.saved.every == 1 else (plan.saved.preset,)
        ways = {name: replace(plan.saved, preset=name) for name in presets}  # type: ignore[arg-type]
        by_preset = {
            name: savings(replace(plan, saved=saved), graph, kernels)
            for name, saved in {**ways, **(extra_presets or {})}.items()
        }
        fp8 = plan.precision.fp8
        narrow = {layer.label for layer in select(fp8.calls, graph)} if fp8 else set()
        groups: dict[object, list[Layer]] = {}
        # Two layers are of one kind if nothing that has a price tells them apart: block, what needs no gradient, what
        # is kept under every way of saving, and eight-bit matmuls.
        for layer in self.layers:
            no_grad = no_grad_inputs(graph, layer.call)
            saved_tensors = tuple(by_label[layer.label] for by_label in by_preset.values())
            groups.setdefault((layer.call.block, no_grad, saved_tensors, layer.label in narrow), []).append(layer)
        self.kinds = tuple(
            LayerKind(
                block=graph.block(layers[0].call.block),
                no_grad=no_grad_inputs(graph, layers[0].call),
                savings={name: by_label[layers[0].label] for name, by_label in by_preset.items()},
                narrow=layers[0].label in narrow,
                layers=tuple(layers),
            )
            for layers in groups.values()
        )
        self.kind_of = {layer.label: i for i, kind in enumerate(self.kinds) for layer in kind.layers}
        self.numbers = {layer.label: i for i, layer in enumerate(self.layers)}

    @cached_property
    def shared(self) -> frozenset[str]:
        """Full names of parameters that several layers hold."""
        seen: set[str] = set()
        twice: set[str] = set()
        for layer in self.layers:
            for tensor in self.graph.block(layer.call.block).parameters:
                name = layer.call.parameter_name(tensor.name, layer.index)
                # A name that comes a second time belongs to two layers.
                (twice if name in seen else seen).add(name)
        return frozenset(twice)

    @cached_property
    def own_frozen(self) -> tuple[frozenset[str], ...]:
        """Lists each kind's weights that are not trained and that no other layer holds, by their names in the block."""
        holders = Counter(
            layer.call.parameter_name(tensor.name, layer.index)
            for layer in self.layers
            for tensor in self.graph.block(layer.call.block).frozen
        )
        firsts = [kind.layers[0] for kind in self.kinds]
        return tuple(
            frozenset(
                tensor.name
                for tensor in self.graph.block(layer.call.block).frozen
                if holders[layer.call.parameter_name(tensor.name, layer.index)] == 1
            )
            for layer in firsts
        )


@dataclass(frozen=True, kw_only=True)
class Split:
    """The kinds of layers that each stage of a pipeline has."""

    order: tuple[NDArray[np.int64], ...]
    """Kind of each layer of each stage, in order."""
    counts: Doubles
    """[stages, kinds]."""
    repeated: tuple[tuple[int, int, str], ...]
    """(stage, kind, tensor) of parameters that a layer before in the same stage holds too."""


def split(kinds: Kinds, plan: Plan) -> Split:
    """The stages of a plan. PlanError if the layers cannot be divided so."""
    order, repeated = [], []
    for stage, layers in enumerate(stage_layers(plan, kinds.graph)):
        order.append(np.array([kinds.kind_of[layer.label] for layer in layers], np.int64))
        seen: set[str] = set()
        for layer in layers if kinds.shared else ():
            for tensor in kinds.graph.block(layer.call.block).parameters:
                name = layer.call.parameter_name(tensor.name, layer.index)
                if name in kinds.shared and name in seen:
                    repeated.append((stage, kinds.kind_of[layer.label], tensor.name))
                seen.add(name)
    counts = np.array([np.bincount(stage_kinds, minlength=len(kinds.kinds)) for stage_kinds in order], float)
    # bincount gives [kinds] counts a stage; stacked they are [stages, kinds], the matrix that turns prices of kinds
    # into prices of stages.
    return Split(order=tuple(order), counts=counts, repeated=tuple(repeated))


@dataclass(frozen=True, kw_only=True, eq=False)  # a key of what is kept of it: arrays are not compared
class KindTable:
    """Numbers of each kind on one rank: arrays [kinds, microbatch sizes]. Seconds are as the stack runs them."""

    forward_s: Doubles
    """Seconds of a forward, kernels and collectives together."""
    input_s: Doubles
    """Seconds of recomputation and input gradients."""
    weight_s: Doubles
    """Seconds of weight gradients, without what adds them up."""
    kernels_s: tuple[Doubles, Doubles, Doubles]
    """Seconds that kernels take of the three."""
    host_s: tuple[Doubles, Doubles, Doubles]
    """Seconds of the launches of the three."""
    kept_bytes: Doubles
    """Bytes that a layer keeps for its backward, at least."""
    copied_s: Doubles
    """Seconds of sending what a forward keeps to the host, and of its way back, without what begins a copy."""
    inside_bytes: Doubles
    """Bytes that a layer's backward needs on top of what is kept."""
    output_bytes: Doubles
    """Bytes that a layer passes on."""
    input_bytes: Doubles
    """Bytes that it reads from layers before."""
    prices: tuple[LayerPrice, ...]
    """The price of each kind, with arrays inside, which gives its parameters."""
    elements: Doubles
    """[kinds, 2] parameter elements on one rank: dense, routed."""
    frozen: Doubles
    """[kinds, 2] bytes of weights that are not trained on one rank, dense and routed, but for those that several layers
    hold."""
    tensors: Doubles
    """[kinds] numbers of parameter tensors."""
    device: Device
    """The device that it is priced on."""
    rates: Rates
    """The rates that it keeps in training."""
    launch_s: float
    """Seconds that the host takes to launch one kernel."""


def _frozen(kinds: Kinds, prices: Sequence[LayerPrice]) -> Doubles:
    own = zip(prices, kinds.own_frozen, strict=True)
    return np.array([[frozen_bytes(p.sharded, experts=e, only=only) for e in (False, True)] for p, only in own], float)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonPrices:
    """What all tables of one search have in common, and the prices of layers that it has so far."""

    kinds: Kinds
    """The layers that are alike."""
    cluster: Cluster
    """All machines, whatever part of them a plan takes."""
    stack: Stack
    """The program, nothing that prices need left open (`prediction.software_kernels`)."""
    kernels: Kernels
    """The ops that the program fuses."""
    sizes: Mapping[str, int]
    """The workload's sizes without `batch`."""
    numbers: FittedRates
    """Numbers that were fitted to runs."""
    prices: dict[object, tuple[LayerPrice, ...]]
    """Prices of a kind by what it sees of a plan and of a device; new ones are added."""


def kind_tables(
    shared: CommonPrices,
    plan: Plan,
    device: Device,
    links: Mapping[str, AxisLink],
    micro: Sequence[int],
    load: float,
    presets: Sequence[str],
) -> dict[str, KindTable]:
    """Way of saving -> numbers of all kinds under the axes and layout of `plan`, whose pp is 1.

    links: what the axes run over. micro: sequences of a microbatch on one data-parallel rank. load: busiest over mean
    rows of a rank's experts. presets: the ways of saving.
    """
    # One call prices all microbatch sizes: `batch` is an array, and every price that depends on it becomes one.
    batch: object = np.array(micro, np.int64) if len(micro) > 1 else int(micro[0])
    prices: list[tuple[LayerPrice, ...]] = []
    facts, known = KernelFacts.of(shared.stack, plan.layout), shared.prices
    for i, kind in enumerate(shared.kinds.kinds):
        whole, here, busiest = plan.stage_mesh(0), dict(links), load
        if not routed_tensors(kind.block):  # without experts, nothing lies on their axes
            whole, busiest = replace(whole, ep=1, etp=1), 1.0
            here = {axis: link for axis, link in links.items() if axis not in ("ep", "etp")}
        # without attention, nothing is exchanged of a context
        layout = plan.layout if kind.block.does("attends") else replace(plan.layout, context="ring")
        # The key is what a layer of this kind sees. Axes it does not use were set to 1 above, so that plans which
        # differ only in them share a price.
        key = i, whole.tp, whole.cp, whole.ep, whole.etp, layout, device, tuple(sorted(here.items())), busiest
        if key in known:
            prices.append(known[key])
            continue
        # All ways of saving are priced together: they differ in what backward recomputes, not in the kernels.
        ways = [(kind.savings[name], kind.savings[name].whole) for name in presets]
        context = LocalContext(
            block=kind.block,
            no_grad=kind.no_grad,
            sizes=tuple(sorted({**shared.sizes, "batch": int(micro[0])}.items())),
            mesh=whole,
            layout=layout,
            links=tuple(sorted(here.items(), key=lambda item: item[0])),
            saving=ways[0][0],
            whole_recompute=ways[0][1],
            precision=_precision(plan.precision, kind.narrow),
            kernels=shared.kernels,
            facts=facts,
            device=device,
            split_paths=tuple((s.op, s.parts) for s in plan.overlap.splits),
            load=busiest,
            expert_overlap=plan.overlap.experts,
        )
        known[key] = price_layer_saved(context, {**shared.sizes, "batch": batch}, ways)
        prices.append(known[key])
    return {
        name: _table(shared, plan, device, links, tuple(by_way[i] for by_way in prices), len(micro))
        for i, name in enumerate(presets)
    }


def parameters_of(table: KindTable) -> object:
    """What there is to know of the layers' parameters on one rank, as a key: of tables with equal ones, all that is
    reduced, gathered, updated and held of parameters is equal, whatever the layers keep and however long they take."""
    return (
        table.device,
        table.launch_s,
        tuple(
            (
                price.sharded.block,
                price.sharded.dtypes,
                tuple(
                    price.sharded.local_elements[tensor.name]
                    for tensor in (*price.sharded.block.parameters, *price.sharded.block.frozen)
                ),
                tuple(price.sharded.partial_grads.items()),
                tuple(price.sharded.copies.items()),
            )
            for price in table.prices
        ),
    )


def _table(
    shared: CommonPrices,
    plan: Plan,
    device: Device,
    links: Mapping[str, AxisLink],
    prices: tuple[LayerPrice, ...],
    width: int,
) -> KindTable:
    kinds, cluster, stack, numbers = shared.kinds, shared.cluster, shared.stack, shared.numbers
    own, launch_s = rates(stack, device, numbers), host_cost(stack, device, numbers).per_kernel_s

    def rows(values: Sequence[object]) -> Doubles:
        # What does not depend on the microbatch is a number, the same in every column.
        return np.array([np.broadcast_to(np.asarray(value, float), (width,)) for value in values])

    def kernels(phase: Phase) -> Any:
        # Attention and other kernels run at different shares of their price, as fitted to runs.
        return (phase.compute_s - phase.attention_s + phase.attention_s / own.attention) / own.compute

    def seconds(phase: Phase) -> Any:
        spent = kernels(phase)
        for axis, waited in phase.comm_s.items():
            # A collective's price, and for each hop what runs take beyond it; `exposed` is the share that the stack
            # does not hide.
            hops = numbers.hops_s(axis, phase.collectives.get(axis, 0), links[axis])
            spent = spent + (waited + hops) * own.exposed
        return spent

    def host(phase: Phase) -> object:
        # The host launches every kernel, and does more for a collective.
        return launch_s * phase.kernels + own.host_collective_s * sum(phase.collectives.values())

    return KindTable(
        forward_s=rows([seconds(p.forward) for p in prices]),
        input_s=rows([seconds(p.recompute) + seconds(p.input_grad) for p in prices]),
        weight_s=rows([seconds(p.weight_grad) for p in prices]),
        kernels_s=(
            rows([kernels(p.forward) for p in prices]),
            rows([kernels(p.recompute) + kernels(p.input_grad) for p in prices]),
            rows([kernels(p.weight_grad) for p in prices]),
        ),
        host_s=(
            rows([host(p.forward) for p in prices]),
            rows([host(p.recompute) + host(p.input_grad) for p in prices]),  # type: ignore[operator]
            rows([host(p.weight_grad) for p in prices]),
        ),
        kept_bytes=rows(_least_kept(kinds, plan, prices, device, links)),
        copied_s=_copied(prices, width, cluster, device),
        inside_bytes=rows([_inside(p, device, stack) for p in prices]),
        output_bytes=rows([p.output_bytes for p in prices]),
        input_bytes=rows([p.input_bytes for p in prices]),
        prices=prices,
        elements=np.array([[local_elements(p.sharded, experts=e) for e in (False, True)] for p in prices], float),
        frozen=_frozen(kinds, prices),
        tensors=np.array([len(p.sharded.block.parameters) for p in prices], float),
        device=device,
        rates=own,
        launch_s=launch_s,
    )


def _copied(prices: Sequence[LayerPrice], width: int, cluster: Cluster, device: Device) -> Doubles:
    """[kinds, microbatch sizes] as `KindTable` has it: several layers are copied at once, no faster than the wire."""
    sizes = np.array([np.broadcast_to(np.asarray(p.offloaded_bytes, float), (width,)) for p in prices])
    if not sizes.any():
        return sizes
    return sizes * copy_s_per_byte(cluster.node_with(device.name))


def _precision(precision: Precision, narrow: bool) -> Precision:
    return precision if narrow or precision.fp8 is None else replace(precision, fp8=None)


def _inside(price: LayerPrice, device: Device, stack: Stack) -> Any:
    """[microbatch sizes] bytes that a layer's backward has inside, at least: XLA writes the gradient of logits over
    them where room is short, and where gradients are made without buckets ZeRO may have none before the first."""
    # Without buckets gradients are made late: only those made early count for the least.
    gradients = price.early_bytes if stack.gradients.bucketed is False else price.transient_bytes
    # Offloaded activations are in two copies on their way back: the one that is read and the one that comes.
    inside = gradients + 2 * price.offloaded_bytes + price.remade_bytes
    if device.kind != "tpu":
        return inside
    return np.maximum(inside - sum(tensor.bytes for tensor in price.saved if tensor.is_logits), 0)


def _least_kept(
    kinds: Kinds,
    plan: Plan,
    prices: Sequence[LayerPrice],
    device: Device,
    links: Mapping[str, AxisLink],
) -> list[object]:
    """Finds for each kind the least that one of its layers keeps, with all layers in one stage.

    What several layers read counts once in a stage. A shorter stage has fewer layers that another one's tensor saves
    it from counting, so a layer keeps no less there than it does here.
    """
    # `StagePrice` with all layers in one stage counts shared tensors once: the least that any cut can keep.
    whole = StagePrice(
        stage=0,
        mesh=plan.stage_mesh(0),
        ranks=(0,),
        device=device,
        members=(0,),
        links=links,
        layers=tuple((price, kind.layers) for price, kind in zip(prices, kinds.kinds, strict=True)),
        plan=plan,
        numbers=kinds.numbers,
    )
    least: dict[int, object] = {}
    for layer, size in zip(whole.in_order, whole.kept_bytes, strict=True):
        kind = kinds.kind_of[layer.label]
        least[kind] = np.minimum(least[kind], size) if kind in least else size  # type: ignore[call-overload]
    return [least[i] for i in range(len(kinds.kinds))]
