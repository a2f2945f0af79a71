"""Parameters as matrices, and what an update that looks at whole matrices communicates of them.

`matrices_of(sharded)` has the parameters of a block; `bytes_in_update` is the collectives of Adafactor and Muon, as
Gnomon's runtime runs them (`runtime.optim.matrix`), inside the update of a stage. Leaves out other rules, which look at
one element after another and have none, and seconds.
Sources: Shazeer and Stern 2018 (Adafactor); Liu et al. 2025 (Distributed Muon gathers over data-parallel ranks).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Literal

from gnomon.graph import DTYPE_BITS, Block, Graph, matrix_rows
from gnomon.plans import LowRank, Mesh, Optimizer, Precision
from gnomon.sharding.block import ShardedBlock
from gnomon.sharding.homes import routed_tensors
from gnomon.sharding.parameters import STATE_TENSORS, state_width
from gnomon.tensors.layout import CollectiveKind

Part = Literal["squares", "lengths", "shards", "matrix"]
"""What a communication carries: Adafactor's sums of squares by rows and columns, and of its updates; Muon's gathers of
a stage's shards, and of one matrix over tensor-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCollective:
    """One communication inside an update. Those of a stage's layers go together, but for each `matrix` by itself."""

    part: Part
    """What of the update it serves."""
    kind: CollectiveKind
    """Which collective."""
    axes: tuple[str, ...]
    """The mesh axes whose ranks are the group."""
    ranks: int
    """The number of ranks in the group."""
    bytes: int
    """Bytes of the whole buffer on one rank."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends: 2(n-1)/n of the buffer for an all-reduce, (n-1)/n for a gather."""
        return self.bytes * (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A parameter, as matrices side by side."""

    name: str
    """Name of the parameter."""
    elements: int
    """Elements on one rank, before ZeRO divides them."""
    count: int
    """The number of matrices on one rank: experts are several. 1 for a vector."""
    rows: int
    """Rows of a whole matrix; 0 for a vector."""
    columns: int
    """Columns of a whole matrix; 0 for a vector."""
    divided: bool
    """Whether tensor-parallel ranks (of etp, experts) have parts of each."""
    table: bool
    """Whether its rows are looked up."""
    experts: bool
    """Whether it is a parameter of routed experts."""

    @property
    def orthogonalised(self) -> bool:
        """Whether Muon makes its update orthogonal; vectors and tables it leaves to AdamW."""
        return self.rows > 0 and not self.table


def split_of(block: Block, name: str) -> tuple[int, int] | None:
    """(leading dims that are matrices side by side, dims before its columns) of a parameter; None where it is no
    operand of a matmul or a lookup."""
    for op in block.ops:
        # The second operand of a contraction is the weight, of a lookup the table.
        if op.inputs[1:2] != (name,) or not (op.contracts or op.does == "looks up"):
            continue
        dims = block.tensor(name).dims
        if op.does == "looks up":
            rows = len(dims[0].atoms)
        else:
            rows = sum(len(dim.atoms) for dim in dims[: matrix_rows(op, dims)])
        # Experts' weights are (experts, out, in): that many matrices side by side.
        many = len(dims[0].atoms) if op.does == "multiplies rows" else 0
        return (many, rows) if len(dims) > 1 else None
    return None


def is_looked_up(block: Block, name: str) -> bool:
    """Whether a parameter is a table."""
    return any(op.does == "looks up" and name in op.inputs for op in block.ops)


def takes_decay(block: Block, name: str) -> bool:
    """Whether weight decay is about a parameter: whether an op that reads it says so of the place where it reads it
    (`OpKind.decay`), whatever its shape and name are and however ranks divide it."""
    wide = len(block.tensor(name).dims) > 1
    return any(
        wide if op.rules.decay == "matrices" else op.rules.decay != "none" and place in op.rules.decay
        for op in block.ops
        for place, read in enumerate(op.inputs)
        if read == name
    )


def decaying(graph: Graph) -> dict[str, bool]:
    """Each trained parameter of a model, by its full name, and whether weight decay is about it."""
    decays: dict[str, bool] = {}
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        for tensor in block.parameters:
            name = layer.call.parameter_name(tensor.name, layer.index)
            # A tied parameter takes decay if any of its readers says so.
            decays[name] = decays.get(name, False) or takes_decay(block, tensor.name)
    return decays


def matrices_of(sharded: ShardedBlock, mesh: Mesh) -> Iterator[Matrix]:
    """Yields what a rank has of the matrices of each parameter of a block. mesh: that it is sharded on."""
    block, routed = sharded.block, routed_tensors(sharded.block)
    for tensor in block.parameters:
        split, home = split_of(block, tensor.name), sharded.homes[tensor.name]
        experts = tensor.name in routed
        count, rows, columns = 1, 0, 0
        if split is not None:
            sizes = [int(dim.size or 0) for dim in tensor.atoms]
            ways = [math.prod(getattr(mesh, axis) for axis in home.axes_of(dim.name)) for dim in tensor.atoms]
            many, first = split
            # max: more ranks than experts still hold one matrix, or a slice of it.
            count = math.prod(max(1, size // way) for size, way in zip(sizes[:many], ways[:many], strict=True))
            rows, columns = math.prod(sizes[many:first]), math.prod(sizes[first:])
        yield Matrix(
            name=tensor.name,
            elements=int(sharded.local_elements[tensor.name]),
            count=count,
            rows=rows,
            columns=columns,
            divided=home.dim_of("etp" if experts else "tp") is not None,
            table=is_looked_up(block, tensor.name),
            experts=experts,
        )


def projected(matrix: Matrix, low_rank: LowRank, *, repeated: bool) -> bool:
    """Whether the gradient of a matrix is projected. repeated: whether it is a layer's."""
    is_chosen = any(fnmatchcase(matrix.name, one) and (repeated or one != "*") for one in low_rank.targets)
    return matrix.orthogonalised and is_chosen


def extra_state_bytes(
    sharded: ShardedBlock,
    mesh: Mesh,
    optimizer: Optimizer,
    precision: Precision,
    *,
    experts: bool,
    without: frozenset[str],
    repeated: bool,
) -> float:
    """Bytes of states beside those of a parameter's size each, of routed experts' parameters or the others; negative
    where some parameters have less.

    Adafactor's means by rows and columns and of vectors; Muon's second moment of vectors and tables; moments of
    projected gradients in place of whole ones, and what they are projected with, in the gradients' dtype; moments of
    tables that stay in fp32. repeated: whether the block is a layer's.
    """
    chosen = [m for m in matrices_of(sharded, mesh) if m.experts == experts and m.name not in without]
    each, moments = state_width(precision), STATE_TENSORS[optimizer.kind]
    size = 0.0
    if optimizer.kind == "adafactor":
        size += each * sum(m.count * (m.rows + m.columns) if m.rows else m.elements for m in chosen)
    elif optimizer.kind == "muon":
        size += each * sum(m.elements for m in chosen if not m.orthogonalised)
    if (low := optimizer.low_rank) is not None:
        for m in chosen:
            if projected(m, low, repeated=repeated):
                # GaLore projects the shorter side: moments are (rank, long) and the projection (rank, short).
                short, long = sorted((m.rows, m.columns))
                rank = min(low.rank, short)
                state_bytes = m.count * (rank * long * moments * each + rank * short * DTYPE_BITS[precision.grad] / 8)
                if optimizer.kind == "adafactor":
                    state_bytes += m.count * (rank - short) * each  # its means are the projected gradient's
                # The whole moments are counted elsewhere, so they are taken off here.
                size += state_bytes - m.elements * moments * each
    if precision.wide_tables and each < 4:
        size += sum(m.elements for m in chosen if m.table) * moments * (4 - each)
    return size


def bytes_in_update(
    sharded: ShardedBlock,
    mesh: Mesh,
    optimizer: Optimizer,
    precision: Precision,
    *,
    without: frozenset[str] = frozenset(),
    vocabulary: int = 1,
) -> Iterator[UpdateCollective]:
    """Collectives of one block's parameters inside the update of its stage.

    without: parameters that travel with another block. vocabulary: ranks of the pipeline that divide the block, in
    place of tensor-parallel ones; they have unlike parameters besides its. Under ZeRO and tensor parallelism together a
    rank gathers the matrices that it has elements of; here, that many on average."""
    if optimizer.kind not in ("adafactor", "muon"):
        return
    for experts in (False, True):
        chosen = [m for m in matrices_of(sharded, mesh) if m.experts == experts and m.name not in without]
        shard = mesh.edp if experts else mesh.dp_shard * mesh.cp
        axes = ("edp",) if experts else ("dp_shard", "cp")
        ways = shard if optimizer.zero else 1
        # Each block is a stage of its own there, and only those with a divided matrix meet.
        by_blocks = optimizer.zero == 3 and mesh.dp_shard * mesh.cp > 1  # each block is a stage
        axis: tuple[str, ...] = ("etp",) if experts else ("tp",)
        inner = mesh.etp if experts else mesh.tp
        if vocabulary > 1:
            axis, inner = ("vocabulary",), vocabulary
        if optimizer.kind == "adafactor" and chosen:
            groups = [(axis, inner)] if inner > 1 and (not by_blocks or any(m.divided for m in chosen)) else []
            groups += [(axes, ways)] if ways > 1 else []
            # Sums of squares are added up in fp32 at least.
            width = max(4, DTYPE_BITS[precision.states] // 8)
            parts: tuple[Part, ...] = ("squares", "lengths")
            for part, (over, ranks) in product(parts, groups):
                added = [m for m in chosen if m.divided or over != ("vocabulary",)]
                count = sum(m.count * (1 + (m.rows + m.columns if part == "squares" else 0)) for m in added)
                yield UpdateCollective(part=part, kind="all_reduce", axes=over, ranks=ranks, bytes=count * width)
        if optimizer.kind == "muon":
            width, matrices = DTYPE_BITS[precision.grad] // 8, [m for m in chosen if m.orthogonalised]
            if ways > 1 and chosen and (not by_blocks or matrices):
                size = sum(m.elements for m in chosen) * width
                yield UpdateCollective(part="shards", kind="all_gather", axes=axes, ranks=ways, bytes=size)
            for matrix in matrices if inner > 1 else ():
                if matrix.divided:
                    size = -(-matrix.elements * width * inner // (ways if vocabulary == 1 else 1))
                    yield UpdateCollective(part="matrix", kind="all_gather", axes=axis, ranks=inner, bytes=size)
