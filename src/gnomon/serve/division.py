"""A decoder divided over the processes of a replica: `divide(graph, ways, rank)` is what one of them holds.

Layouts and collectives between ops are those of training (`sharding`, `runtime.module.moves`): heads, ffn and
vocabulary over tp (Shoeybi et al. 2019), layers over pp. A rank's model is a Graph of its own: the layers of its stage,
with the sizes that it holds, whose inputs are what stages before it hand over. Every rank of a stage has all tokens and
routes them; experts are dealt out whole over ep, and each expert's matrices over the ranks that are left (etp), so that
a rank computes the rows of its own experts, and one sum over the stage gives each token what its experts made. Leaves
out sequence parallelism and attention's data parallelism, under which rows would travel. Ranks are numbered stage by
stage, the ranks of one stage beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gnomon.errors import InputError, PlanError
from gnomon.graph import Block, Call, Dtypes, Graph, Layer, Op, Tensor
from gnomon.plans import Layout, Mesh, Plan, stage_layers
from gnomon.runtime.module.apply import slots_of
from gnomon.runtime.module.crossings import reads, writes
from gnomon.runtime.module.moves import Move, steps
from gnomon.runtime.ops.site import ALONE, Axis
from gnomon.runtime.parameters.parameters import Slot
from gnomon.serve.sizes import Ways
from gnomon.sharding import ShardedBlock, homes, shard_block
from gnomon.sharding.homes import routed_tensors
from gnomon.software import own
from gnomon.tensors.dims import Dim
from gnomon.tensors.layout import Scene, Sharding
from gnomon.tensors.names import base

ROUTED = ("dispatches", "multiplies rows", "combines")
"""What ops of experts do: on all tokens of a rank, without collectives but a sum at the end."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Collectives around an op on this rank."""

    there: Mapping[str, tuple[Move, ...]]
    """Input -> from where it lies to how the op reads it."""
    leave: Mapping[str, tuple[Move, ...]]
    """Output -> from how the op makes it to where it lies."""

    def sums(self, name: str) -> bool:
        """Whether ranks make terms of an output, which are added up."""
        return [move.kind for move in self.leave.get(name, ())] == ["all_reduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShare:
    """What one rank has of a model."""

    graph: Graph
    """Its stage's layers, in the sizes of this rank."""
    tp: Axis = ALONE
    """Its place among the ranks of its stage."""
    ep: Axis = ALONE
    """Which part of the experts it has."""
    etp: Axis = ALONE
    """Its place among those that share each of its experts."""
    stage: int = 0
    ways: Ways = Ways()
    moves: Mapping[tuple[str, str], Moves] = field(default_factory=dict)
    """(block, path of an op) -> collectives around it, where there are some."""
    end: tuple[Move, ...] = ()
    """From a rank's logits (wanted, vocabulary) to all of them."""
    slots: Mapping[str, Slot] = field(default_factory=dict)
    """Its part of each parameter; none: whole ones."""
    vocab_size: int
    """Of the whole model."""

    @property
    def is_last(self) -> bool:
        """Whether its stage makes logits."""
        return self.stage == self.ways.pp - 1

    @property
    def rank(self) -> int:
        """Its number in the replica."""
        return self.stage * self.ways.tp + self.tp.index

    def around(self, block: Block, op: Op) -> Moves | None:
        """Collectives around an op."""
        return self.moves.get((block.name, op.path))

    def sums(self, block: Block, op: Op) -> bool:
        """Whether an op makes a term of what ranks add up."""
        moves = self.around(block, op)
        return moves is not None and any(moves.sums(name) for name in op.outputs)


def whole(graph: Graph) -> ModelShare:
    """A model on one process. graph: without its loss."""
    return ModelShare(graph=graph, vocab_size=_vocabulary(graph))


def divide(graph: Graph, ways: Ways, rank: int, tp: Axis = ALONE) -> ModelShare:
    """Divides a model. graph: without its loss. tp: the group of the rank's stage; without one, what it holds is all
    that is asked. PlanError for a model that does not divide so."""
    stage, index = divmod(rank, ways.tp)
    tp = tp if tp.group is not None else Axis(ranks=ways.tp, index=index)
    sharded = _sharded(graph, ways)
    axes = {
        "tp": tp,
        # Within a stage etp is the inner index: ranks beside each other share the matrices of the same experts.
        "ep": Axis(ranks=ways.ep, index=index // ways.etp),
        "etp": Axis(ranks=ways.etp, index=index % ways.etp),
    }
    blocks = {name: _local(block, axes) for name, block in sharded.items()}
    local = replace(graph, blocks=tuple(blocks[block.name] for block in graph.blocks))
    layers = stage_layers(Plan(mesh=Mesh(pp=ways.pp)), graph)
    own_layers = layers[stage]
    local_graph = _stage(local, [len(part) for part in layers], stage) if ways.pp > 1 else local
    moves = {
        (name, op.path): found
        for name, block in sharded.items()
        for op in block.block.ops
        if (found := _around(block, op, axes)) is not None
    }
    output_call = graph.outputs[0].partition(".")
    head = sharded[graph.call(output_call[0]).block]
    home = head.homes[output_call[2]]
    dims = [tuple(atom.name for atom in dim.atoms) for dim in head.block.tensor(output_call[2]).dims]
    end = steps(home, Sharding(), [dims[0], dims[-1]], axes) if ways.tp > 1 else ()
    return ModelShare(
        graph=local_graph, tp=tp, ep=axes["ep"], etp=axes["etp"], stage=stage, ways=ways, moves=moves, end=end,
        slots=_slots(own_layers, sharded, axes) if ways.tp > 1 else {}, vocab_size=_vocabulary(graph),
    )  # fmt: skip


def check_division(graph: Graph, ways: Ways) -> None:
    """PlanError for a model that does not divide so; graph: without its loss."""
    if (reason := own.tensor_parallel_reason(graph, ways.tp)) and own.has_scan(graph):
        raise PlanError(reason)
    for rank in range(ways.ranks):
        divide(graph, ways, rank)


def _vocabulary(graph: Graph) -> int:
    return int(graph.source(graph.outputs[0])[1].dims[-1].size or 0)


def _sharded(graph: Graph, ways: Ways) -> dict[str, ShardedBlock]:
    tp = ways.tp
    if ways.ep > 1 and not any(block.does("multiplies rows") for block in graph.blocks):
        raise PlanError(f"{graph.name} has no experts that ep = {ways.ep} could deal out; leave it out")
    sizes = {dim.name for block in graph.blocks for dim in block.dims if dim.size is None}
    tables = {dim.size for block in graph.blocks for dim in block.dims if base(dim.name) == "vocab" and dim.size}
    layout = Layout(vocab_parallel=not any(size % tp for size in tables))  # a table that does not divide stays whole
    open_sizes = {name: 2 * tp for name in sizes} | {"batch": 1}
    sharded_blocks = {block.name: _sharded_block(block, layout, ways, open_sizes) for block in graph.blocks}
    for block in sharded_blocks.values():
        for op in block.ops:
            over = str(op.op.attr("over", "")) if op.op.does == "normalises" else ""
            if over and tp > 1 and op.strategy.inputs[0].axes_of(over):
                raise PlanError(
                    f"{graph.name}: {op.op.path} norms over {over}, which ranks of tp would have parts of; serve it "
                    f"with tensor-parallel size 1"
                )
    return sharded_blocks


def _sharded_block(block: Block, layout: Layout, ways: Ways, sizes: Mapping[str, int]) -> ShardedBlock:
    """Shards a block with its experts apart: in training their tokens are divided over tp (sequence parallelism), here
    every rank has all."""
    tp, over = ways.tp, {"tp": ways.tp, "ep": ways.ep, "etp": ways.etp}
    mesh, dtypes = Mesh(tp=tp, etp=tp), Dtypes(param="fp32", compute="fp32")
    routed = [op for op in block.ops if _is_routed(block, op)]
    if not routed:
        return shard_block(block, layout, mesh, sizes, dtypes)
    routed_inputs = tuple(name for op in routed if op.does == "combines" for name in op.outputs)
    rest = tuple(op for op in block.ops if op not in routed)
    tensor_names = {name for op in rest for name in (*op.inputs, *op.outputs)} | {
        *routed_inputs,
        *block.inputs,
        *block.outputs,
    }
    tensors = tuple(tensor for tensor in block.tensors if tensor.name in tensor_names)
    sharded = shard_block(
        replace(block, inputs=(*block.inputs, *routed_inputs), tensors=tensors, ops=rest), layout, mesh, sizes, dtypes
    )
    scene = Scene(axis_sizes={"cp": 1, **over}, sizes=sizes, dtypes=dtypes)
    lie = homes(block, layout, scene)
    for weight in (op.inputs[1] for op in routed if op.does == "multiplies rows"):
        for dim in block.tensor(weight).atoms:
            for axis in lie[weight].axes_of(dim.name):
                if (dim.size or 0) % over[axis]:
                    axis_text = f"tp = {tp}" if axis == "etp" and ways.ep == 1 else f"{axis} = {over[axis]}"
                    raise PlanError(
                        f"block {block.name!r}: {axis_text} does not divide {dim.name} = {dim.size} of its experts; "
                        f"use a divisor"
                    )
    return replace(sharded, block=block, homes=lie)


def _is_routed(block: Block, op: Op) -> bool:
    """Whether it works on rows of experts."""
    routed = routed_tensors(block)
    return op.does in ROUTED or any(name in routed for name in (*op.inputs, *op.outputs))


# --- a rank's sizes


def _local(sharded: ShardedBlock, axes: Mapping[str, Axis]) -> Block:
    block = sharded.block
    tensors = tuple(_part(tensor, sharded.homes[tensor.name], axes) for tensor in block.tensors)
    return block if tensors == block.tensors else replace(block, tensors=tensors)


def _part(tensor: Tensor, home: Sharding, axes: Mapping[str, Axis]) -> Tensor:
    """Experts stay as many as the router knows: a block has one size of a dim. Who reads weights counts its own."""

    def part(dim: Dim) -> Dim:
        if dim.factors:
            return replace(dim, factors=tuple(map(part, dim.factors)))
        if dim.size is None or not home.axes_of(dim.name):
            return dim
        return replace(
            dim, size=max(1, dim.size // math.prod(axes[a].ranks for a in home.axes_of(dim.name) if a != "ep"))
        )

    return replace(tensor, dims=tuple(map(part, tensor.dims)))


def _slots(layers: Sequence[Layer], sharded: Mapping[str, ShardedBlock], axes: Mapping[str, Axis]) -> dict[str, Slot]:
    routed = {
        layer.call.parameter_name(name, layer.index)
        for layer in layers
        for name in routed_tensors(sharded[layer.call.block].block)
        if sharded[layer.call.block].block.tensor(name).kind == "parameter"
    }
    every = [
        *slots_of(layers, sharded, axes, set(), routed),
        *slots_of(layers, sharded, axes, set(), routed, apart=True),
        *slots_of(layers, sharded, axes, set(), frozen=True),
    ]
    return {slot.name: slot for slot in every}


# --- collectives


def _around(sharded: ShardedBlock, op: Op, axes: Mapping[str, Axis]) -> Moves | None:
    block = sharded.block
    if axes["tp"].ranks == 1:
        return None
    if _is_routed(block, op):
        if op.does != "combines" or not _divides_experts(sharded):
            return None
        return Moves({}, dict.fromkeys(op.outputs, (Move(kind="all_reduce", axis=axes["tp"], dim=-1),)))
    strategy = sharded.op(op.path).strategy

    def way(source: Sharding, target: Sharding, name: str) -> tuple[Move, ...]:
        return steps(source, target, [tuple(a.name for a in dim.atoms) for dim in block.tensor(name).dims], axes)

    there = {
        name: moves
        for name, input_layout in zip(op.inputs, strategy.inputs, strict=True)
        if block.tensor(name).is_activation and block.tensor(name).is_float
        if (moves := way(sharded.homes[name], input_layout, name))
    }
    leave = {
        name: moves
        for name, output_layout in zip(op.outputs, strategy.outputs, strict=True)
        if (moves := way(output_layout, sharded.homes[name], name))
    }
    return Moves(there, leave) if there or leave else None


def _divides_experts(sharded: ShardedBlock) -> bool:
    """Whether ranks have some of the experts, or parts of each."""
    weights = [op.inputs[1] for op in sharded.block.ops if op.does == "multiplies rows"]
    return any(sharded.homes[name].dim_of(axis) is not None for name in weights for axis in ("ep", "etp"))


# --- a stage's layers


def _stage(graph: Graph, counts: Sequence[int], stage: int) -> Graph:
    """The layers of one stage as a Graph of its own. counts: layers of each."""
    layers, begin = graph.layers(), sum(counts[:stage])
    end = begin + counts[stage]
    if not counts[stage]:
        raise InputError(f"{graph.name} has too few layers for {len(counts)} stages; lower the pipeline-parallel size")
    enters, leaves = _crossing(graph, begin), _crossing(graph, end)
    received = {name: f"x{at}" for at, name in enumerate(enters)}
    calls: list[Call] = []
    produced: dict[str, str] = {}
    for layer in layers[begin:end]:
        call = layer.call
        # Layers of one call stay one call with a count. `first` keeps the numbers that they have in the whole model, by
        # which parameters are named.
        if calls and calls[-1].name == call.name:
            calls[-1] = replace(calls[-1], repeat=calls[-1].repeat + 1)
        else:
            first = None if call.first is None else call.first + layer.index
            # What an earlier stage made is an input of this graph, under its name here. What this stage made has its
            # call's name. All else is an input of the whole graph.
            inputs = tuple((own_, received.get(name, produced.get(name, name))) for own_, name in reads(layer).items())
            calls.append(replace(call, inputs=inputs, repeat=1, first=first, family=call.group))
        produced |= {name: f"{call.name}.{out}" for out, name in writes(graph, layer).items()}
    tensors = _outputs(graph)
    batch = [tensor for tensor in graph.inputs if any(s == tensor.name for c in calls for _, s in c.inputs)]
    entering = [replace(tensors[name], name=own_) for name, own_ in received.items()]
    used = {call.block for call in calls}
    return replace(
        graph,
        inputs=(*batch, *entering),
        blocks=tuple(block for block in graph.blocks if block.name in used),
        calls=tuple(calls),
        outputs=tuple(received.get(name) or produced[name] for name in leaves) or graph.outputs,
    )


def _crossing(graph: Graph, at: int) -> list[str]:
    """What layers from the at-th on read of those before it."""
    layers = graph.layers()
    if at == len(layers):
        return []
    produced = {name for layer in layers[:at] for name in writes(graph, layer).values()}
    return list(dict.fromkeys(name for layer in layers[at:] for name in reads(layer).values() if name in produced))


def _outputs(graph: Graph) -> dict[str, Tensor]:
    return {
        name: graph.block(layer.call.block).tensor(out)
        for layer in graph.layers()
        for out, name in writes(graph, layer).items()
    }
