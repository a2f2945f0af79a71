"""A block on a mesh: the strategy of each op, local sizes, and every collective in order, forward and backward.

`shard_block` walks the ops. Between ops a tensor is at home (`homes`); where an op needs it otherwise, the
collectives that bring it there come before the op, once for all readers that need it alike, and their conjugates
carry the gradient back (gather ↔ scatter, copy ↔ all-reduce: Megatron-LM's f and g). Leaves out gradients' reduction
over data-parallel ranks (`parameters`) and all times.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from gnomon.errors import PlanError, nearest
from gnomon.graph import Block, Dtypes, Graph, Number, Op, Sizes, Tensor, nbytes, no_grad_inputs
from gnomon.ops.balance import DATA
from gnomon.ops.strategy import Strategy
from gnomon.plans import Layout, Mesh
from gnomon.sharding.homes import routed_tensors
from gnomon.sharding.strategies import setting_of, strategies
from gnomon.tensors.layout import Collective, Scene, Sharding, ceil_div, local_size, redistribute
from gnomon.tensors.names import base, is_sequence

INNER_AXES = ("cp", "tp", "ep", "etp")
"""Mesh axes that a block's collectives run on. Beside them all with other tokens together (`ops.balance.DATA`), over
which a step's choices of experts are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedOp:
    """One op as a rank runs it."""

    op: Op
    """The op of the graph."""
    strategy: Strategy
    """How it runs."""
    sizes: Mapping[str, Number]
    """Local size of every dim that its tensors have, to be given to the graph's rules for FLOPs and bytes. In
    attention over cp the queries are this rank's and `kv_…` the whole sequence; what a causal mask leaves of that is
    `causal_shares`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBlock:
    """A block as one rank of a mesh runs it."""

    block: Block
    """The block of the graph."""
    ops: tuple[ShardedOp, ...]
    """One for each op, in order."""
    homes: Mapping[str, Sharding]
    """How each tensor lies between ops."""
    local_elements: Mapping[str, Number]
    """Elements of each tensor on one rank, as it lies at home."""
    local_bytes: Mapping[str, Number]
    """Bytes of each tensor on one rank, as it lies at home, in the dtypes that kernels read."""
    forward: tuple[Collective, ...]
    """In order of issue."""
    backward: tuple[Collective, ...]
    """In order of issue."""
    partial_grads: Mapping[str, tuple[str, ...]]
    """For parameters: axes among cp and tp on which ranks hold the same part of it but each only a term of its
    gradient. cp belongs to the reduction over data-parallel ranks; tp is one all-reduce a step (norms under sequence
    parallelism)."""
    gathered: Mapping[str, Number]
    """Bytes of each tensor that some op reads gathered over tp or cp, as it reads it."""
    keep_gathered: bool
    """Whether that is what is kept for backward, in place of this rank's part."""
    dtypes: Dtypes
    """What `compute` and `param` are in `local_bytes`."""
    copies: Mapping[str, int]
    """For parameters that more ranks divide than there are elements: neighbouring tp ranks that hold the same part
    (key-value heads under larger tp). Their gradients are added up over them."""

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Lists the block's collectives: those of its forward, then those of its backward."""
        return self.forward + self.backward

    def op(self, path: str) -> ShardedOp:
        """The op at `path`, or the one that an op of the lowered block (`core:scores`) belongs to. PlanError if there
        is none."""
        origin = path.partition(":")[0]
        for sharded in self.ops:
            if sharded.op.path == origin:
                return sharded
        known = [sharded.op.path for sharded in self.ops]
        raise PlanError(f"block {self.block.name!r} has no op {origin!r}{nearest(origin, known)}")

    def kept_bytes_of(self, tensor: Tensor) -> Number:
        """Bytes on one rank of a tensor that is kept for backward: gathered, if that is what is kept."""
        if self.keep_gathered and tensor.name in self.gathered:
            return self.gathered[tensor.name]
        return self.bytes_of(tensor)

    def bytes_of(self, tensor: Tensor) -> Number:
        """Bytes on one rank of a tensor of the block, or of one that lowering added (`core:probs`), which lies as its
        op runs."""
        if tensor.name in self.local_bytes:
            return self.local_bytes[tensor.name]
        return nbytes(tensor, self.sizes(tensor.name), self.dtypes)

    def sizes(self, path: str) -> Mapping[str, Number]:
        """Local sizes of the dims of the op at `path`."""
        return self.op(path).sizes


def shard_block(
    block: Block, layout: Layout, mesh: Mesh, sizes: Sizes, dtypes: Dtypes, *, no_grad: Collection[str] = ()
) -> ShardedBlock:
    """`block` on one rank of `mesh` under `layout`.

    sizes: of the dims that the graph leaves open, undivided (`seq` is the whole sequence), `batch` being one
    data-parallel rank's. They may be arrays, for many shapes at once. no_grad: block inputs whose gradient nobody
    wants (pixels). PlanError if an op has no known strategy under the layout.
    """
    axis_sizes = {DATA: mesh.data_ranks * mesh.cp, **{axis: getattr(mesh, axis) for axis in INNER_AXES}}
    scene = Scene(axis_sizes=axis_sizes, sizes=sizes, dtypes=dtypes)
    walk = _Walk(block, layout, scene, no_grad)
    _check_divisible(block, walk.homes, scene)

    for op in block.ops:
        walk.forward_op(op)
    for sharded in reversed(walk.ops):
        walk.backward_op(sharded)
    elements = walk.local_elements()
    return ShardedBlock(
        block=block,
        ops=tuple(walk.ops),
        homes=walk.homes,
        local_elements=elements,
        local_bytes={name: _bytes(block.tensor(name), count, dtypes) for name, count in elements.items()},
        forward=tuple(walk.forward),
        backward=tuple(walk.backward),
        partial_grads=walk.partial_grads(),
        gathered=walk.gathered(),
        keep_gathered=layout.keep_gathered,
        dtypes=dtypes,
        copies=walk.copies(),
    )


def shard_graph(graph: Graph, layout: Layout, mesh: Mesh, sizes: Sizes, dtypes: Dtypes) -> dict[str, ShardedBlock]:
    """Each block of `graph` on one rank of `mesh`, by name; what parameters have no part in gets no gradient."""
    ungraded: dict[str, set[str]] = {}
    for call in graph.calls:
        # Only what no call of the block wants a gradient of.
        now = set(no_grad_inputs(graph, call))
        ungraded[call.block] = ungraded.get(call.block, now) & now
    return {
        name: shard_block(graph.block(name), layout, mesh, sizes, dtypes, no_grad=no_grad)
        for name, no_grad in ungraded.items()
    }


def _check_divisible(block: Block, homes: Mapping[str, Sharding], scene: Scene) -> None:
    """PlanError for a dim that its axes do not divide. Vocabulary is padded, positions too; key-value heads may be
    copied."""
    for tensor in block.tensors:
        for dim in tensor.atoms:
            kind, size = base(dim.name), dim.size
            # Open sizes are known later, and a divided vocabulary or sequence may be padded.
            if size is None or kind == "vocab" or is_sequence(dim.name):
                continue
            axes = homes[tensor.name].axes_of(dim.name)
            ways = prod(scene.ranks(axis) for axis in axes)
            # More tp ranks than key-value heads: each head is on ways / size ranks.
            if size % ways and not (kind == "kv_heads" and ways % size == 0):
                raise PlanError(
                    f"block {block.name!r}: {' x '.join(axes)} = {ways} does not divide {dim.name} = {size}; "
                    f"use a divisor of "
                    f"{size}, or a layout rule that keeps {dim.name!r} whole"
                )


_Need = tuple[str, Sharding, tuple[str, ...]]
"""(tensor, sharding that some ops need, axes on which they make partial gradients): readers of one need share its
collectives."""


class _Walk:
    """The growing result of `shard_block`."""

    def __init__(self, block: Block, layout: Layout, scene: Scene, no_grad: Collection[str]) -> None:
        self.block = block
        self.layout = layout
        self.scene = scene
        self.setting = setting_of(block, layout, scene)
        self.homes = self.setting.homes
        self.routed = routed_tensors(block)
        self.ops: list[ShardedOp] = []
        self.forward: list[Collective] = []
        self.backward: list[Collective] = []
        # A graph input of integers can be read in any layout: the loader gives each rank the part it needs.
        block_inputs = block.inputs if block.part_of is None else block.part_of.inputs
        self.free = {name for name in block.inputs if name in block_inputs and not block.tensor(name).is_float}
        self.no_grad = {*no_grad, *(tensor.name for tensor in block.tensors if not tensor.is_float)}
        self.readers: dict[_Need, list[str]] = {}

    def needs(self, op: Op, strategy: Strategy) -> list[_Need]:
        """The activations that `op` reads, as it needs them; parameters are always at home."""
        triples = zip(op.inputs, strategy.inputs, strategy.grad_partial, strict=True)
        kinds = [need for need in triples if self.block.tensor(need[0]).is_activation and need[0] not in self.free]
        return list(dict.fromkeys(kinds))

    def forward_op(self, op: Op) -> None:
        strategy = strategies(op, self.setting)[0]
        for need in self.needs(op, strategy):
            name, sharding, _ = need
            # Two readers that need a tensor alike share the collectives that bring it there.
            moved = any(known[:2] == need[:2] for known in self.readers)
            self.readers.setdefault(need, []).append(op.path)
            if not moved:
                self.forward += self.move(name, self.homes[name], sharding, op.path)
        self.forward += [collective for collective in strategy.inside if collective.phase == "forward"]
        for name, output_layout in zip(op.outputs, strategy.outputs, strict=True):
            if (
                self.block.tensor(name).dims or not output_layout.partial
            ):  # a scalar loss is added up with the reported metrics
                self.forward += self.move(name, output_layout, self.homes[name], op.path)
        self.ops.append(ShardedOp(op=op, strategy=strategy, sizes=self.local_sizes(op, strategy)))

    def backward_op(self, sharded: ShardedOp) -> None:
        op, strategy = sharded.op, sharded.strategy
        for name, output_layout in zip(op.outputs, strategy.outputs, strict=True):
            if name not in self.no_grad and self.block.tensor(name).dims:
                # The gradient of a partial sum is whole on every rank, whose term of the sum it is a gradient of.
                whole = Sharding(shards=output_layout.shards)
                self.backward += self.move(name, self.homes[name], whole, op.path, backward=True)
        needs = [need for need in self.needs(op, strategy) if need[0] not in self.no_grad]
        for need in needs:
            self.gather_again(need, op)
        self.backward += [collective for collective in strategy.inside if collective.phase == "backward"]
        for need in needs:
            name, sharding, partial = need
            if self.readers[need][0] == op.path:  # the last to run in backward: all terms are there
                output_layout = sharding.with_partial(*partial)
                self.backward += self.move(name, output_layout, self.homes[name], op.path, backward=True)

    def gather_again(self, need: _Need, op: Op) -> None:
        """A gathered input is not kept: the weight gradient gathers it once more, for all readers of the need."""
        name, sharding, _ = need
        multiplies = [path for path in self.readers[need] if _multiplies(self.block.op(path))]
        # Backward runs from the last op to the first: the last of these readers is the first that needs it gathered,
        # and the others find it so.
        if self.layout.keep_gathered or not multiplies or multiplies[-1] != op.path:
            return
        moves = redistribute(
            self.block.tensor(name),
            self.homes[name],
            sharding,
            self.scene,
            path=op.path,
            phase="backward",
            weight_grad=True,
        )
        self.backward += [move for move in moves if move.kind == "all_gather"]

    def move(
        self, name: str, source: Sharding, target: Sharding, path: str, *, backward: bool = False
    ) -> tuple[Collective, ...]:
        tensor = self.block.tensor(name)
        return redistribute(tensor, source, target, self.scene, path=path, phase="backward" if backward else "forward")

    def local_sizes(self, op: Op, strategy: Strategy) -> dict[str, Number]:
        """Local size of each dim inside `op`. Rows of experts count once for each slice of an expert."""
        sizes: dict[str, Number] = {}
        if op.captured is not None:  # what it makes inside may have dims that its operands have not
            sizes.update(self.scene.sizes)
        sides = (*zip(op.inputs, strategy.inputs, strict=True), *zip(op.outputs, strategy.outputs, strict=True))
        for name, sharding in sides:
            for dim in self.block.tensor(name).atoms:
                size = local_size(dim, sharding, self.scene.axis_sizes, self.scene.sizes)
                # Where operands of an op disagree, the op runs on the smaller part.
                sizes[dim.name] = size if dim.name not in sizes else _smaller(sizes[dim.name], size)
        if self.scene.ranks("etp") > 1 and any(name in self.routed for name in (*op.inputs[:1], *op.outputs)):
            for count in self.row_dims(op):
                # Every slice of an expert computes the rows of all tokens of its etp group.
                sizes[count] = sizes[count] * self.scene.ranks("etp")
        return {**sizes, **strategy.sizes}

    def row_dims(self, op: Op) -> tuple[str, ...]:
        """The dim that counts rows for each token, if `op` works on rows."""
        for name in (*op.outputs, *op.inputs[:1]):
            tensor = self.block.tensor(name)
            if name in self.routed and tensor.is_activation:
                return tuple(dim.name for dim in tensor.atoms if base(dim.name) == "topk")
        return ()

    def local_elements(self) -> dict[str, Number]:
        local: dict[str, Number] = {}
        for tensor in self.block.tensors:
            is_row = tensor.name in self.routed and tensor.is_activation
            count: Number = self.scene.ranks("etp") if is_row else 1
            for dim in tensor.atoms:
                count = count * local_size(dim, self.homes[tensor.name], self.scene.axis_sizes, self.scene.sizes)
            local[tensor.name] = count if is_row else self.with_replicas(tensor, count)
        return local

    def with_replicas(self, tensor: Tensor, count: Number) -> Number:
        """Elements of experts' weights in all slots of a rank. count: in its equal part of the experts."""
        ep = self.scene.ranks("ep")
        replicas = next((op.attr("replicas", 0) for op in self.block.ops if op.does == "dispatches"), 0)
        sizes = [dim.size or 0 for dim in tensor.atoms if base(dim.name) == "experts"]
        if not replicas or tensor.name not in self.routed or tensor.is_activation or ep == 1 or not sizes:
            return count
        assert isinstance(replicas, int)
        each = sizes[0] // ep
        return count // each * (each + replicas // ep)

    def gathered(self) -> dict[str, Number]:
        """Bytes of each tensor that is gathered, of its largest form; what attention gathers inside is among them."""
        sizes: dict[str, Number] = {}
        for name, sharding, _ in self.readers:
            moves = self.move(name, self.homes[name], sharding, "")
            if any(move.kind == "all_gather" for move in moves):
                sizes[name] = self.scene.bytes(self.block.tensor(name), sharding)
        for sharded in self.ops:
            for inner in sharded.strategy.inside:
                if inner.kind == "all_gather" and inner.phase == "forward" and sharded.op.does == "attends":
                    sizes[inner.tensor] = inner.bytes
        return sizes

    def partial_grads(self) -> dict[str, tuple[str, ...]]:
        by_name: dict[str, set[str]] = {}
        for sharded in self.ops:
            for name, axes in zip(sharded.op.inputs, sharded.strategy.grad_partial, strict=True):
                if self.block.tensor(name).kind == "parameter" and axes:
                    by_name.setdefault(name, set()).update(axes)
        return {name: tuple(sorted(axes)) for name, axes in by_name.items()}

    def copies(self) -> dict[str, int]:
        counts = {}
        for tensor in self.block.parameters:
            if (count := self.copies_of(tensor)) > 1:
                counts[tensor.name] = count
        return counts

    def copies_of(self, tensor: Tensor) -> int:
        ways = self.scene.ranks("tp")
        dim = next((d for d in tensor.atoms if d.name == self.homes[tensor.name].dim_of("tp")), None)
        # Neighbouring tp ranks hold the same head.
        return ways // dim.size if dim is not None and dim.size is not None and dim.size < ways else 1


def _bytes(tensor: Tensor, elements: Number, dtypes: Dtypes) -> Number:
    return ceil_div(elements * dtypes.bits(tensor.dtype), 8)


def _smaller(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    # Arrays hold sizes of one dim for many shapes; one divides it more than the other, so it is smaller in all of them.
    return a if (a <= b).all() else b  # type: ignore[union-attr]


def _multiplies(op: Op) -> bool:
    """Whether its weight gradient is a matmul of its own with the input, of whole tokens."""
    return op.does in ("multiplies", "convolves")
