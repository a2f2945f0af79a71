"""A graph whose layers of experts are taken apart where tokens go to other ranks, so that exchanges are rows.

`taken_apart(plan, graph)` cuts each such layer into what comes up to the dispatch (`route`), the dispatch, the experts,
and the combine with what follows it; where that has weights of its own it is a part by itself (`join`). Parameters keep
their names, and each part knows the block that it is of. Leaves out their rows (`lowering.exchanges`) and prices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from gnomon.errors import PlanError
from gnomon.graph import Block, Call, Graph, Layer, Op
from gnomon.plans.parts import SavedRule
from gnomon.plans.plan import Plan
from gnomon.plans.select import format_layers, select
from gnomon.plans.stages import stage_layers

Part = Literal["route", "dispatch", "experts", "combine", "join"]
PARTS: tuple[Part, ...] = get_args(Part)
DISPATCH: Part = "dispatch"
COMBINE: Part = "combine"
EXCHANGES: tuple[Part, ...] = (DISPATCH, COMBINE)
"""Parts that ranks of ep and etp do together, without weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """The graph of parts."""

    graph: Graph
    """The model, each of its layers of experts cut into several."""
    plan: Plan
    """For that graph, of the same stages."""


def part_of(graph: Graph, layer: Layer) -> Part | None:
    """Says which part of a layer of experts it is; None in a graph that was not cut, and for a layer that has none."""
    block = graph.block(layer.call.block)
    return None if block.part_of is None else next(p for p in PARTS if block.name == f"{block.part_of.name}.{p}")


LINA = "lina"
"""The pass that cuts exchanges into parts, as plans write it."""


def exchange_parts(plan: Plan) -> int:
    """Parts that each exchange is cut into, of some of a rank's experts each."""
    lina_params = next((dict(method.params) for method in plan.schedule.passes if method.name == LINA), None)
    return 1 if lina_params is None else int(lina_params.get("all_to_all", 2))


def divides_experts(plan: Plan) -> bool:
    """Whether tokens go to other ranks for their experts."""
    return any(mesh.ep * mesh.etp > 1 for mesh in (plan.stage_mesh(stage) for stage in range(plan.num_stages)))


def has_rows(plan: Plan) -> bool:
    """Whether exchanges of experts are rows of the plan's Program."""
    return plan.overlap.experts and divides_experts(plan)


def whole_layer(graph: Graph, layer: Layer) -> Layer:
    """The layer that a part is of, as it is named; itself where it is none."""
    part = part_of(graph, layer)
    if part is None:
        return layer
    call = layer.call
    if call.first is None:
        return Layer(call=replace(call, name=call.name.removesuffix(f"-{part}")), index=0)
    return Layer(call=replace(call, family=call.group.removesuffix(f".{part}")), index=layer.index)


@lru_cache(maxsize=32)
def taken_apart(plan: Plan, graph: Graph) -> Apart:
    """The graph in parts, and the plan for it. PlanError where no layer can be cut, or the plan counts layers that are
    not there any more."""
    if any(block.part_of is not None for block in graph.blocks):
        return Apart(graph=graph, plan=plan)  # they are taken apart already
    _refuse(plan)
    _check_parts(plan, graph)
    parts = {block.name: cut for block in graph.blocks if (cut := _cut(block))}
    if not parts:
        raise PlanError(
            f"overlap.experts: no layer of {graph.name} sends tokens to experts once and adds up what comes back; "
            f"leave it out"
        )
    calls, named, sources = list[Call](), list[tuple[str, Part]](), dict[str, str]()
    labels: dict[str, list[Layer]] = {}
    for call in graph.calls:
        if call.block not in parts:
            apart_call = replace(
                call, inputs=tuple((own, sources.get(source_name, source_name)) for own, source_name in call.inputs)
            )
            calls.append(apart_call)
            labels |= {layer.label: [Layer(call=apart_call, index=layer.index)] for layer in _layers(call)}
            continue
        for layer in _layers(call):
            before = dict(sources)
            mine = _calls_of(layer, graph.block(call.block), parts[call.block], sources)
            if layer.index < call.repeat - 1:  # the next repeat reads it by the chain
                chained = {own: sources[f"{call.name}.{out}"] for out, own in call.chain}
                sources = before | {f"{call.name}<{own}": source for own, source in chained.items()}
            calls += [one for _, one in mine]
            labels[layer.label] = [Layer(call=one, index=0) for _, one in mine]
            named += [(one.label(), part) for part, one in mine]
    of_parts = replace(
        graph,
        blocks=tuple(one for block in graph.blocks for one in _blocks(block, parts)),
        calls=tuple(calls),
        outputs=tuple(sources.get(source, source) for source in graph.outputs),
    )
    return Apart(graph=of_parts, plan=_plan(plan, graph, labels, named))


def _layers(call: Call) -> tuple[Layer, ...]:
    return tuple(Layer(call=call, index=index) for index in range(call.repeat))


def _blocks(block: Block, parts: dict[str, dict[Part, Block]]) -> tuple[Block, ...]:
    return tuple(parts[block.name].values()) if block.name in parts else (block,)


def _refuse(plan: Plan) -> None:
    """PlanError for fields that count layers, or that read in one part what another makes."""
    overlap, saved = plan.overlap, plan.saved
    for field, is_set in (
        ("overlap.buckets", overlap.buckets),
        ("overlap.fused", overlap.fused),
        ("saved.every above 1", saved.every > 1),
        ("saved.rules with first_per_stage", any(rule.first_per_stage is not None for rule in saved.rules)),
        ("schedule.vocabulary other than 'ends'", plan.schedule.vocabulary != "ends"),
        ("optimizer.offload", plan.optimizer.offload is not None),
        ("experts.replicas or placement", bool(plan.experts.replicas or plan.experts.placement)),
    ):
        if is_set:
            raise PlanError(
                f"overlap.experts takes layers of experts apart, and {field} needs them whole; leave one of the two out"
            )


def _check_parts(plan: Plan, graph: Graph) -> None:
    """PlanError where exchanges are to have more parts than a rank has experts."""
    num_parts, ep = exchange_parts(plan), max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
    for block in graph.blocks if num_parts > 1 else ():
        for op in (op for op in block.ops if op.does == "dispatches"):
            experts = next((dim.size for dim in block.dims if dim.name == op.attr("experts", "")), None) or 1
            if num_parts > experts // ep:
                raise PlanError(
                    f"pass {LINA}: all_to_all = {num_parts} parts are of some of a rank's experts each, and a rank has "
                    f"{experts // ep} of the {experts} of {block.name} (ep = {ep}); use at most that"
                )


def _calls_of(layer: Layer, block: Block, parts: dict[Part, Block], sources: dict[str, str]) -> list[tuple[Part, Call]]:
    """Lists the calls of one repeat. sources: where tensors are now; those that it makes are added."""
    call, calls_of_parts = layer.call, list[tuple[Part, Call]]()
    bound = {
        own: sources.get(f"{call.name}<{own}", sources.get(source_name, source_name))
        for own, source_name in call.inputs
    }
    if layer.index == 0:
        bound = {own: sources.get(source_name, source_name) for own, source_name in call.inputs}
    number = None if call.first is None else call.first + layer.index
    for part, own in parts.items():
        tensor_names = {tensor.name for tensor in own.tensors}
        name = f"{call.name}-{part}" if number is None else f"{call.name}-{number}-{part}"
        one = Call(
            block=own.name,
            name=name,
            inputs=tuple((tensor, bound[tensor]) for tensor in own.inputs),
            first=number,
            family=None if number is None else f"{call.group}.{part}",
            prefix=call.group if call.prefix is None else call.prefix,
            params=tuple(pair for pair in call.params if pair[0] in tensor_names),
        )
        bound |= {out: f"{name}.{out}" for out in own.outputs}
        calls_of_parts.append((part, one))
    sources.update((f"{call.name}.{out}", bound[out]) for out in block.outputs)
    return calls_of_parts


@lru_cache(maxsize=64)
def _cut(block: Block) -> dict[Part, Block] | None:
    """The parts of a block, in order; None where it has not one exchange there and one back."""
    dispatches = [op for op in block.ops if op.does == "dispatches"]
    combines = [op for op in block.ops if op.does == "combines"]
    if len(dispatches) != 1 or len(combines) != 1:
        return None
    (there,), (back,) = dispatches, combines
    late, last = _after(block, there), _after(block, back)
    if back.path not in late:
        return None
    ops: dict[Part, list[Op]] = {
        "route": [op for op in block.ops if op.path not in late and op is not there],
        DISPATCH: [there],
        "experts": [op for op in block.ops if op.path in late and op.path not in last and op is not back],
        COMBINE: [back],
    }
    rest = [op for op in block.ops if op.path in last]
    has_weights = any(not block.tensor(name).is_activation for op in rest for name in op.inputs)
    ops["join" if has_weights else COMBINE] = rest if has_weights else [back, *rest]
    if not ops["route"] or not ops["experts"]:
        return None
    block_outputs, parts = set(block.outputs), dict[Part, Block]()
    for part, own in reversed(ops.items()):
        parts[part] = _block(block, part, own, block_outputs)
        block_outputs |= set(parts[part].inputs)
    return dict(reversed(parts.items()))


def _after(block: Block, first: Op) -> set[str]:
    """Paths of the ops that read what an op makes, or what these make."""
    outputs, paths = set(first.outputs), set[str]()
    for op in block.ops:
        if outputs & set(op.inputs):
            paths.add(op.path)
            outputs |= set(op.outputs)
    return paths


def _block(block: Block, part: Part, ops: Sequence[Op], live_outputs: Collection[str]) -> Block:
    outputs = {name for op in ops for name in op.outputs}
    used = dict.fromkeys(name for op in ops for name in (*op.inputs, *op.outputs))
    block_inputs = tuple(name for name in used if name not in outputs and block.tensor(name).is_activation)
    return Block(
        name=f"{block.name}.{part}",
        inputs=block_inputs,
        outputs=tuple(name for name in used if name in outputs and name in live_outputs),
        tensors=tuple(tensor for tensor in block.tensors if tensor.name in used),
        ops=tuple(ops),
        part_of=block,
    )


def _plan(plan: Plan, graph: Graph, labels: dict[str, list[Layer]], named: Sequence[tuple[str, Part]]) -> Plan:
    """The plan with its layers by their parts. Full recomputation runs no exchange again: what came is kept."""
    every = [layer for parts in labels.values() for layer in parts]
    exchanged = {label for label, part in named if part in EXCHANGES}

    def chosen(selectors: Sequence[str]) -> tuple[str, ...]:
        if tuple(selectors) == ("*",):
            return ("*",)
        return format_layers([part for layer in select(selectors, graph) for part in labels[layer.label]])

    rules = [replace(rule, calls=one) for rule in plan.saved.rules for one in chosen((rule.calls,))]
    if plan.saved.preset != "none" or any(rule.preset or rule.action == "recompute" for rule in rules):
        kept_calls = format_layers([layer for layer in every if layer.label in exchanged])
        rules += [SavedRule(calls=one, action="keep") for one in kept_calls]
    fp8 = plan.precision.fp8
    apart_plan = replace(
        plan,
        saved=replace(plan.saved, rules=tuple(rules)),
        precision=plan.precision if fp8 is None else replace(plan.precision, fp8=replace(fp8, calls=chosen(fp8.calls))),
    )
    stages = stage_layers(plan, graph)
    if plan.stages:
        pairs = zip(plan.stages, stages, strict=True)
        apart = tuple(
            replace(one, calls=format_layers([part for layer in part_of for part in labels[layer.label]]))
            for one, part_of in pairs
        )
        return replace(apart_plan, stages=apart)
    if plan.num_stages == 1:
        return apart_plan
    counted = any(layer.call.first is not None for layer in every)
    counts = tuple(
        sum(part.call.first is not None or not counted for layer in own for part in labels[layer.label])
        for own in stages
    )
    return replace(apart_plan, schedule=replace(plan.schedule, layers_per_stage=counts))
