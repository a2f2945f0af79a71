"""A plan applied to a model: the stages that one rank holds, each with its parameters and a forward.

`apply(graph, plan, groups)` returns a `Stage` for each stage of the Program on this rank (under ZeRO 3 a stage
is one layer). What is whole, divided or copied is read from `sharding`, so memory and collectives are those that
the prediction counts. PlanError for what the plan asks and is not done here. Left out: when a stage runs (`execute`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from gnomon.control.placing import placements_of
from gnomon.errors import PlanError
from gnomon.graph import Dtypes as GraphDtypes
from gnomon.graph import Graph, Layer, Op
from gnomon.graph import Tensor as GraphTensor
from gnomon.plans import Layout, Mesh, Plan, RouterLoad, layer_presets, stage_layers
from gnomon.plans.experts import routers, under
from gnomon.plans.groups import layer_groups
from gnomon.plans.parts import Preset
from gnomon.plans.plan import effective_zero
from gnomon.plans.replicas import Placement, on_ranks
from gnomon.plans.saving import in_runs
from gnomon.plans.stages import held_by_several
from gnomon.runtime.mesh.groups import Groups, meshes_of
from gnomon.runtime.module.blocks import UNLIMITED, BlockRun, Capacity, cut_linears
from gnomon.runtime.module.crossings import Hop, hops
from gnomon.runtime.module.saving import rules_of
from gnomon.runtime.module.stage import Stage
from gnomon.runtime.ops import check_runnable
from gnomon.runtime.ops.site import ALONE, Axis
from gnomon.runtime.ops.speculation import Guess
from gnomon.runtime.parameters.files import disk_folder
from gnomon.runtime.parameters.frozen import Where, four_bit_of, frozen_of, in_four_bits, place_slots
from gnomon.runtime.parameters.initial import initial, tables_of
from gnomon.runtime.parameters.parameters import CPU, Borrowed, Dtypes, Parameters, Slot, Values
from gnomon.sharding import ShardedBlock, shard_graph
from gnomon.sharding.context import uneven_positions_reason, whole_sequence_reason
from gnomon.sharding.homes import routed_tensors
from gnomon.sharding.matrices import is_looked_up, split_of, takes_decay
from gnomon.software import own
from gnomon.tensors.layout import Sharding

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Torch's dtypes; those that the runtime computes in are `software.own.DTYPES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShare:
    """What a stage has beside its layers: this rank's part of layers that all pipeline ranks divide."""

    slots: tuple[Slot, ...]
    """Trained."""
    frozen: tuple[Slot, ...] = ()
    """Not trained."""
    enters: tuple[Hop, ...] = ()
    """What its layers are handed by them."""
    leaves: tuple[Hop, ...] = ()
    """What its layers hand them."""


NO_SHARES: Mapping[int, VocabularyShare] = MappingProxyType({})
NO_SHARE = VocabularyShare(slots=())


def apply(
    graph: Graph,
    plan: Plan,
    groups: Groups,
    *,
    seed: int = 0,
    capacity: Capacity = UNLIMITED,
    device: torch.device = CPU,
    values: Values | None = None,
    by_layer: bool = False,
    shares: Mapping[int, VocabularyShare] = NO_SHARES,
    whole: Graph | None = None,
) -> dict[int, Stage]:
    """Stage number in the Program -> the stage, for those on this rank, filled with the values of step 0: those that
    `values` reads (`pretrained.values_of`), or random ones by the seed. capacity: of experts, as in `BlockRun`.
    by_layer: whether the Program has a stage for each layer, as it has under ZeRO 3. shares: by stage. whole: the graph
    that says what parameters begin as, where `graph` is a part of it."""
    check_runnable(graph)
    check_plan(plan)
    check_meshes(graph, plan)
    zero, mesh = effective_zero(plan), groups.mesh
    if zero == 3 and mesh.ep * mesh.etp > 1 and _has_frozen_experts(graph):
        raise PlanError(
            f"{graph.name} has frozen experts, which the runtime does not shard; use zero 0 to 2, or ep = 1"
        )
    if (lies := placements(graph, plan)) and _has_frozen_experts(graph):
        raise PlanError(
            f"{graph.name} has frozen experts, which the runtime does not place; leave experts' placement out"
        )
    axes, sharded = axes_of(plan, groups), sharded_blocks(graph, plan, mesh)
    runs = {
        name: BlockRun(
            block,
            axes,
            keep_gathered=plan.layout.keep_gathered,
            capacity=capacity,
            splits=plan.overlap.splits,
            gathers=plan.layout.dispatch == "all_gather",
        )
        for name, block in sharded.items()
    }
    if has_experts(graph) and any(rule.axes and rule.dim.endswith("ffn") for rule in plan.layout.rules):
        raise PlanError("layout.rules divide ffn over tp, and that of routed experts lies over etp; leave the rule out")
    check_splits(plan, runs)
    check_shared(graph, sharded)
    stages, presets, start = dict[int, Stage](), layer_presets(plan, graph), beginning(values, whole or graph, seed)
    where = Where(
        shard=groups.here.shard,
        num_shards=mesh.dp_shard * mesh.cp if zero == 3 else 1,
        away=zero == 3 and plan.optimizer.offload_parameters,
        folder=folder_of(plan),
    )
    narrow = in_four_bits(whole or graph)
    rules, crossing = rules_of(plan, graph), hops(graph, plan, by_layer=zero == 3 or by_layer)
    runs_again = in_runs(plan, graph)
    check_runs(plan, graph, presets, runs_again, by_layer=zero == 3 or by_layer)
    for stage_parts in parts_held(graph, plan, groups, sharded, device, by_layer=by_layer, shares=shares):
        number, layers = stage_parts.number, stage_parts.layers
        for part in stage_parts.parts:
            part.fill(start)
        share = shares.get(number, NO_SHARE)
        enters = [*share.enters, *(hop for hop in crossing if hop.target == number)]
        leaves = [*(hop for hop in crossing if hop.source == number), *share.leaves]
        stages[number] = Stage(
            graph, layers, stage_parts.parts, runs, zero, borrowed=stage_parts.borrowed, enters=enters, leaves=leaves
        )
        still = place_slots([*slots_of(layers, sharded, axes, set(), frozen=True), *share.frozen])
        if stages[number].captured:
            still = _held_apart(still, values, zero, graph)
        dtype = dtypes(plan).param
        stages[number].frozen = frozen_of((s for s in still if s.name not in narrow), dtype, start, device, where)
        stages[number].four_bit = four_bit_of(
            (slot for slot in still if slot.name in narrow), dtype, start, values, device, where
        )
        if plan.experts.speculate and mesh.ep > 1:
            routed = {router.layer for router in routers(graph)}
            stages[number].guesses = {layer.label: Guess() for layer in layers if layer.label in routed}
        stages[number].placements = {layer.label: lies[layer.label] for layer in layers if layer.label in lies}
        stages[number].presets, stages[number].in_runs, stages[number].rules = presets, runs_again, rules
    return stages


def _held_apart(slots: Sequence[Slot], values: Values | None, zero: int, graph: Graph) -> tuple[Slot, ...]:
    """Picks, of what a captured model reads and does not train, the weights that ZeRO 3 divides; all else is in its
    states, whole. PlanError where tp divides them too."""
    if zero < 3 or values is None:
        return ()
    chosen = []
    for slot in slots:
        if values(slot) is None:
            continue  # a buffer, or a constant
        if slot.shape != slot.whole:
            raise PlanError(
                f"{graph.name}: the runtime does not divide {slot.name}, which is not trained, by ZeRO 3 and tp"
            )
        chosen.append(slot)
    return place_slots(chosen)


def sharded_blocks(graph: Graph, plan: Plan, mesh: Mesh) -> Mapping[str, ShardedBlock]:
    """Blocks of a rank in this mesh, of a few tokens: only parameters are asked for."""
    return _sharded(graph, plan.layout, mesh)


@lru_cache(maxsize=16)
def _sharded(graph: Graph, layout: Layout, mesh: Mesh) -> Mapping[str, ShardedBlock]:
    """Kept because a job asks for the same blocks when its plan is checked, and again when they are laid out."""
    open_dims = {dim.name for block in graph.blocks for dim in block.dims if dim.size is None}
    # any that axes divide
    sizes = {"batch": 1, "seq": 1} | {name: 2 * mesh.cp * mesh.tp for name in open_dims if name != "batch"}
    dtypes = GraphDtypes(param="fp32", compute="fp32")
    return MappingProxyType(shard_graph(graph, layout, mesh, sizes, dtypes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a rank holds of one stage of the Program."""

    number: int
    layers: Sequence[Layer]
    parts: list[Parameters]
    borrowed: Mapping[str, Parameters]
    """Name -> whose it is, of parameters that an earlier layer of the plan's stage holds too (tied weights): its own,
    or under ZeRO 3 a copy on its way."""


def parts_held(
    graph: Graph,
    plan: Plan,
    groups: Groups,
    sharded: Mapping[str, ShardedBlock],
    device: torch.device,
    *,
    by_layer: bool = False,
    shares: Mapping[int, VocabularyShare] = NO_SHARES,
) -> Iterator[Holding]:
    """Lays out the parameters of each stage of the Program on this rank, without values yet. What several layers of one
    of the plan's stages read is held by the first, whose backward comes last."""
    zero, axes, number = effective_zero(plan), axes_of(plan, groups), 0
    first, tables, lies = holders(plan, graph, zero), looked_up(graph), experts_here(graph, plan, groups)
    stages = stage_layers(plan, graph)
    for index, of_actions in enumerate(layer_groups(plan, stages)):
        by_itself, lent = zero == 3 or by_layer, dict[str, Parameters]()
        shared = _read_alike(of_actions, sharded) if by_itself else set[str]()
        for part in of_actions if by_itself else [stages[index]]:
            if plan.pipeline_ranks[index] == groups.here.pipeline_rank:
                counted = {name for name, stages in first.items() if stages[0] != number}
                apart = shared if zero == 3 else set[str]()
                share_slots = shares.get(number, NO_SHARE).slots
                parts = _parameters_of(
                    part,
                    sharded,
                    axes,
                    counted,
                    plan,
                    groups,
                    zero,
                    device,
                    tables,
                    set(lent),
                    apart,
                    share_slots,
                    lies,
                )
                borrowed = _borrowed(part, sharded, lent)
                lent |= {name: one for one in parts for name in one.by_name if name in shared}
                yield Holding(number=number, layers=part, parts=parts, borrowed=borrowed)
            # Counted on every rank, whoever holds the stage: numbers are those of the Program.
            number += 1


def _read_alike(parts: Sequence[Sequence[Layer]], sharded: Mapping[str, ShardedBlock]) -> set[str]:
    """Parameters of several of these stages, in all of which their gradients are summed over the same ranks."""
    ways: dict[str, list[tuple[int, object]]] = {}
    for part, layer in ((part, layer) for part, layers in enumerate(parts) for layer in layers):
        block = sharded[layer.call.block]
        for tensor in block.block.parameters:
            way = tensor.atoms, block.homes[tensor.name], block.partial_grads.get(tensor.name, ())
            ways.setdefault(layer.call.parameter_name(tensor.name, layer.index), []).append((part, way))
    return {
        name
        for name, found in ways.items()
        if len({part for part, _ in found}) > 1 and all(way == found[0][1] for _, way in found)
    }


def _borrowed(
    layers: Sequence[Layer], sharded: Mapping[str, ShardedBlock], lent: Mapping[str, Parameters]
) -> dict[str, Parameters]:
    names = [
        layer.call.parameter_name(tensor.name, layer.index)
        for layer in layers
        for tensor in sharded[layer.call.block].block.parameters
    ]
    copies = {id(one): Borrowed(one) for one in lent.values() if one.zero == 3}
    return {name: copies.get(id(lent[name]), lent[name]) for name in names if name in lent}


def axes_of(plan: Plan, groups: Groups) -> dict[str, Axis]:
    """The mesh axes that ops of this rank see."""
    mesh, along = groups.mesh, groups.here.along
    orders = {"cp": plan.layout.context_order}
    return {
        axis: Axis(
            group=groups.by_comm[axis],
            ranks=getattr(mesh, axis),
            index=along[axis],
            order=orders.get(axis, "contiguous"),
        )
        for axis in ("cp", "tp", "ep", "etp")
        if axis in along
    }


def check_shared(graph: Graph, sharded: Mapping[str, ShardedBlock]) -> None:
    """PlanError where layout rules divide a parameter in one block that another one reads whole."""
    found: dict[str, tuple[str, Sharding]] = {}
    for layer in graph.layers():
        block = sharded[layer.call.block]
        for tensor in block.block.parameters:
            name, home = layer.call.parameter_name(tensor.name, layer.index), block.homes[tensor.name]
            region, before = found.setdefault(name, (block.block.name, home))
            if home != before:
                raise PlanError(
                    f"layout.rules lay {name} out in {region} as {before} and in {block.block.name} as {home}; give "
                    f"both regions the same rule"
                )


def check_runs(
    plan: Plan, graph: Graph, presets: Mapping[str, Preset], in_runs: Collection[str], *, by_layer: bool
) -> None:
    """PlanError where layers that are recomputed together (`saved.every`) are actions by themselves."""
    for stage in layer_groups(plan, stage_layers(plan, graph)) if by_layer and in_runs else ():
        for before, group in pairwise(stage):
            first, last = group[0].label, before[-1].label
            if first in in_runs and presets.get(last) == "full":
                raise PlanError(
                    f"saved.every = {plan.saved.every} recomputes {first} from what {last} and those before it read, "
                    f"but overlap.fused has the two in different actions; let no action begin inside a run"
                )


def check_splits(plan: Plan, runs: Mapping[str, BlockRun]) -> None:
    """PlanError for a split that cuts nothing."""
    cut = {path for run in runs.values() for path in run.cuts}
    for split in plan.overlap.splits:
        if not any(fnmatchcase(path, split.op) for path in cut):
            every = {path for run in runs.values() for path in cut_linears(run.ops, (replace(split, op="*"),))}
            known = f": {', '.join(sorted(every))}" if every else "; sequence parallelism over tp > 1 makes them"
            raise PlanError(
                f"overlap.splits of {split.op!r} cuts nothing: what can be cut are linears that read gathered tokens "
                f"(all that read the same ones together) and those whose results are scattered{known}"
            )


def _has_frozen_experts(graph: Graph) -> bool:
    return any(tensor.name in routed_tensors(block) for block in graph.blocks for tensor in block.frozen)


def has_experts(graph: Graph) -> bool:
    """Whether some block routes tokens to experts."""
    return any(routed_tensors(block) for block in graph.blocks)


def _parameters_of(
    layers: Sequence[Layer],
    sharded: Mapping[str, ShardedBlock],
    axes: Mapping[str, Axis],
    counted: set[str],
    plan: Plan,
    groups: Groups,
    zero: int,
    device: torch.device,
    tables: Collection[str],
    lent: Collection[str],
    shared: Collection[str],
    share_slots: Sequence[Slot],
    lies: Mapping[str, tuple[Placement, Placement]],
) -> list[Parameters]:
    """The parameters of a stage: routed experts' apart where other ranks than those of the rest hold the same ones, and
    those that later layers borrow (shared). lent: what it borrows itself. share_slots: parts of divided layers. lies:
    as in `slots_of`."""
    mesh, here = groups.mesh, groups.here
    # Without these axes experts are reduced over the same ranks as the rest, and stay with it.
    experts = set[str]()
    if mesh.tp * mesh.ep * mesh.etp > 1:
        experts = {
            layer.call.parameter_name(name, layer.index)
            for layer in layers
            for name in routed_tensors(sharded[layer.call.block].block)
            if sharded[layer.call.block].block.tensor(name).kind == "parameter"
        }
    parts = list[Parameters]()
    # What only this stage holds, what later layers borrow, and experts: each is reduced over other ranks or at another
    # time, and so divided on its own.
    for apart, by_itself in ((False, False), (False, True), (True, False)):
        shards = mesh.edp if apart else mesh.dp_shard * mesh.cp
        away = zero == 3 and plan.optimizer.offload_parameters
        divided = zero if shards > 1 or away else 0
        every = slots_of(layers, sharded, axes, counted, experts, apart=apart, looked_up=tables, lies=lies)
        chosen = [one for one in every if one.name not in lent and (apart or (one.name in shared) == by_itself)]
        slots = place_slots([*chosen, *(share_slots if not apart and not by_itself else ())])
        if not slots and (apart or by_itself):
            continue
        parts.append(
            Parameters(
                slots,
                dtypes(plan),
                zero=divided if slots else 0,
                shard=here.along["edp"] if apart else here.shard,
                num_shards=shards if divided else 1,
                # Ranks that have the same elements: what ZeRO does not divide over is a copy too.
                replicas=mesh.dp_replicate * (1 if divided else shards),
                experts=apart,
                away=away,
                folder=folder_of(plan),
                device=device,
            )
        )
    return parts


def holders(plan: Plan, graph: Graph, zero: int) -> dict[str, tuple[int, ...]]:
    """Stages of the Program of each parameter that several of them hold (tied weights). zero: the ZeRO stage in effect;
    under 3, and with gradient buckets, a stage of the Program is a layer."""
    stages, by_layer = stage_layers(plan, graph), zero == 3 or own.by_layer(plan)
    groups = layer_groups(plan, stages)
    return held_by_several(graph, [group for part in groups for group in part] if by_layer else stages)


def folder_of(plan: Plan) -> Path | None:
    """The folder where parameters wait in files; None where they do not."""
    return disk_folder() if plan.optimizer.offload_parameters and plan.optimizer.parameter_tier == "disk" else None


def check_before(graph: Graph, plan: Plan) -> None:
    """PlanError, before any process starts, for what no rank could run: kinds of op, decisions of the plan, and
    what the mesh of some stage divides."""
    graph = under(graph, plan)
    check_runnable(graph)
    check_plan(plan)
    dtypes(plan)
    check_meshes(graph, plan)


def check_meshes(graph: Graph, plan: Plan) -> None:
    """PlanError for what the mesh of any stage does. Every rank asks for all of them: one that only asked for its own
    would wait for those that are refused."""
    for mesh in dict.fromkeys(meshes_of(plan)):
        check_mesh(graph, plan, mesh)


def check_mesh(graph: Graph, plan: Plan, mesh: Mesh) -> None:
    """PlanError where ranks of a mesh would have parts of what the runtime has whole."""
    if (reason := own.tensor_parallel_reason(graph, mesh.tp)) and own.has_scan(graph):
        raise PlanError(reason)
    ways = mesh.tp * mesh.cp
    if plan.layout.sequence_parallel and mesh.tp > 1 and (reason := uneven_positions_reason(graph, ways)):
        raise PlanError(reason)
    if mesh.cp > 1 and own.has_scan(graph):
        raise PlanError(f"{graph.name}: {own.WHOLE_SCANS}; use cp = 1")
    sharded = sharded_blocks(graph, plan, mesh)
    if mesh.cp > 1 and (reason := whole_sequence_reason(graph, sharded)):
        raise PlanError(f"{reason}, which the runtime does not run beside cp = {mesh.cp}; use cp = 1")


def check_plan(plan: Plan) -> None:
    """PlanError for decisions that the runtime does not carry out (`software.own`), so that none is ignored."""
    if reason := own.plan_reason(plan):
        raise PlanError(reason)


def dtypes(plan: Plan) -> Dtypes:
    """Dtypes of the plan. PlanError for those that the runtime has not, or that it would have to mix."""
    p = plan.precision
    if reason := own.precision_reason(p):
        raise PlanError(reason)
    master = None if p.master in ("none", p.param) else DTYPES[p.master]
    return Dtypes(param=DTYPES[p.param], grad=DTYPES[p.grad], master=master, states=DTYPES[p.states])


def slots_of(
    layers: Sequence[Layer],
    sharded: Mapping[str, ShardedBlock],
    axes: Mapping[str, Axis],
    counted: set[str],
    experts: Collection[str] = (),
    *,
    apart: bool = False,
    frozen: bool = False,
    looked_up: Collection[str] = (),
    lies: Mapping[str, tuple[Placement, Placement]] = MappingProxyType({}),
) -> Iterable[Slot]:
    """The stage's parameters one after the other, each once. counted: tied ones that an earlier stage counts. apart: of
    those that are among `experts`; otherwise of the others. frozen: its frozen weights instead. looked_up: tables of
    any layer. lies: label of a layer -> (experts of this rank, ranks that hold each), where the plan places them."""
    start, seen = 0, set[str]()
    for layer in layers:
        block = sharded[layer.call.block]
        for tensor in block.block.frozen if frozen else block.block.parameters:
            name = layer.call.parameter_name(tensor.name, layer.index)
            if name in seen or (name in experts) != apart:
                continue
            seen.add(name)
            copies = block.copies.get(tensor.name, 1)
            home = block.homes[tensor.name]
            inner = axes.get("etp" if apart else "tp", ALONE).ranks
            whole = home.dim_of("etp" if apart else "tp") is None
            sizes = tuple(int(dim.size or 0) for dim in tensor.atoms)
            local = [_local(int(dim.size or 0), dim.name, home.axes_of(dim.name), axes) for dim in tensor.atoms]
            sums = "tp" if "tp" in block.partial_grads.get(tensor.name, ()) else "kv_copies" if copies > 1 else ""
            placed_experts, held_by = lies.get(layer.label, (None, ())) if apart else (None, ())
            shape = tuple(length for length, _ in local)
            if placed_experts is not None:
                shape = (len(placed_experts), *shape[1:])
            slot = Slot(
                name=name,
                shape=shape,
                decays=takes_decay(block.block, tensor.name),
                copies=inner if whole else copies,
                split=split_of(block.block, tensor.name),
                places=() if whole else _places(tensor, home, axes, "etp" if apart else "tp"),
                table=name in looked_up or is_looked_up(block.block, tensor.name),
                whole=sizes,
                offset=tuple(first for _, first in local),
                start=start,
                # Ranks of this mesh among which the squared norm shares the element; 0 for a tied parameter that an
                # earlier stage counts.
                holders=0 if name in counted else inner if whole else copies,
                sums="" if apart else sums,
                experts=placed_experts,
                held_by=held_by,
            )
            start = slot.stop
            yield slot


def placements(graph: Graph, plan: Plan) -> dict[str, Placement]:
    """Label of each layer with experts -> the expert in each slot of ranks of ep; none where the plan leaves them in
    their usual order."""
    experts, ep = plan.experts, max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
    if not (experts.replicas or experts.placement or experts.rebalance_every) or ep == 1:
        return {}
    found = routers(graph)
    rows = placements_of(plan, [router.experts for router in found], ep, RouterLoad())
    return {router.layer: row for router, row in zip(found, rows, strict=True)}


def experts_here(graph: Graph, plan: Plan, groups: Groups) -> dict[str, tuple[Placement, Placement]]:
    """Label of each layer whose experts the plan places -> (those of this rank, how many ranks of ep hold each)."""
    rows = placements(graph, plan)
    return {label: held_here(row, groups.mesh.ep, groups.here.along["ep"]) for label, row in rows.items()}


def held_here(placement: Placement, ep: int, rank: int) -> tuple[Placement, Placement]:
    """(experts of a rank of ep, how many ranks hold each)."""
    own = on_ranks(placement, ep)[rank]
    return own, tuple(placement.count(expert) for expert in own)


def looked_up(graph: Graph) -> frozenset[str]:
    """Parameters whose rows are looked up in some layer, though another multiplies by them (tied ones)."""
    return frozenset(
        layer.call.parameter_name(tensor.name, layer.index)
        for layer in graph.layers()
        for block in (graph.block(layer.call.block),)
        for tensor in block.parameters
        if is_looked_up(block, tensor.name)
    )


def _places(tensor: GraphTensor, home: Sharding, axes: Mapping[str, Axis], axis: str) -> tuple[tuple[int, ...], ...]:
    """The first index, along each dim, of the part of every rank of an axis."""
    along = [{**axes, axis: replace(axes[axis], index=index)} for index in range(axes[axis].ranks)]
    return tuple(
        tuple(_local(int(dim.size or 0), dim.name, home.axes_of(dim.name), at)[1] for dim in tensor.atoms)
        for at in along
    )


def _local(size: int, dim: str, over: Sequence[str], axes: Mapping[str, Axis]) -> tuple[int, int]:
    """(elements of a dim on this rank, the first of them). over: axes that divide it, outermost first. PlanError for
    uneven parts."""
    # Mixed radix: the outermost axis changes slowest.
    ways, index = 1, 0
    for name in over:
        ways, index = ways * axes[name].ranks, index * axes[name].ranks + axes[name].index
    if size % ways == 0:
        return size // ways, index * (size // ways)
    # Fewer elements (key-value heads) than ranks: ways / size neighbours have a copy of the same one.
    if ways % size == 0:
        return 1, index // (ways // size)
    raise PlanError(
        f"{' x '.join(over)} = {ways} does not divide {dim} = {size}, and the runtime does not pad; use a divisor"
    )


def constants(graph: Graph) -> dict[str, float]:
    """Parameters that begin as one number: weights of norms, which begin as doing nothing, and biases."""
    numbers = {}
    for layer in graph.layers():
        for op in graph.block(layer.call.block).ops:
            for place, operand in enumerate(op.inputs[1:]):
                name = layer.call.parameter_name(operand, layer.index)
                if operand.endswith((".bias", ".lora_B.weight", ".sinks")) or op.rules.begins == "zeros":
                    numbers[name] = 0.0
                elif op.rules.begins == "ones" and not place:
                    # The norm adds its offset to the weight (Gemma), so that together they begin as 1.
                    numbers[name] = 1.0 - _number(op, "offset", 0.0)
    return numbers


def _number(op: Op, name: str, default: float) -> float:
    value = op.attr(name, default)
    assert isinstance(value, (int, float))
    return float(value)


def beginning(values: Values | None, graph: Graph, seed: int) -> Callable[[Slot], Tensor]:
    """What parameters are at step 0: what `values` has, tables that the graph says, and random ones by the seed."""
    begin, tables = constants(graph), tables_of(graph)

    def first(slot: Slot) -> Tensor:
        if slot.experts is not None and values is not None:
            return torch.cat([first(one) for one, _ in slot.each_expert()])
        value = values(slot) if values is not None else None
        if value is None:
            value = tables.get(slot.name)
        return part_of(slot, seed, begin.get(slot.name)) if value is None else value

    return first


def part_of(slot: Slot, seed: int, constant: float | None) -> Tensor:
    """This rank's part of a parameter at step 0."""
    # Drawn whole and then cut: whatever the plan, the model begins with the same numbers.
    return slot.part(initial(slot.name, slot.whole, seed, torch.float64, constant=constant))
