"""Context parallelism under a causal mask: which tokens a rank holds, and what share of the attention work it does.

A query at position t sees t+1 keys, so ranks that hold late parts of a sequence work more. Returns exact fractions.
Leaves out windows and packed sequences (their masks are the unit's), and the ring's own waiting, which the simulator
finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.sharding.block import ShardedBlock
from gnomon.sharding.homes import routed_tensors
from gnomon.tensors.names import TOKEN_DIMS, base


def chunks_of(rank: int, cp: int, order: str) -> tuple[int, ...]:
    """Chunks of the sequence that `rank` holds: of cp chunks the rank-th (`contiguous`); of 2·cp chunks the rank-th
    from the start and the rank-th from the end (`zigzag`)."""
    if order == "contiguous":
        return (rank,)
    if order == "zigzag":
        return rank, 2 * cp - 1 - rank
    raise PlanError(f"unknown context_order {order!r}; use 'contiguous' or 'zigzag'")


def causal_shares(seq_len: int, cp: int, order: str) -> tuple[Fraction, ...]:
    """Share of the (query, key) pairs under a causal mask that each of `cp` ranks computes; they add up to 1.

    seq_len: tokens; chunks must be equal. Counts pairs exactly, the diagonal included: seq_len·(seq_len+1)/2 in all.
    zigzag gives every rank exactly 1/cp; contiguous gives the last rank nearly 2/cp.
    """
    num_chunks = cp if order == "contiguous" else 2 * cp
    if seq_len % num_chunks:
        raise PlanError(
            f"seq_len = {seq_len} does not divide into {num_chunks} chunks for cp = {cp}; use a multiple "
            f"of {num_chunks}"
        )
    length = seq_len // num_chunks
    total = seq_len * (seq_len + 1) // 2

    def pairs(chunk: int) -> int:
        # All keys of earlier chunks, and a triangle with its diagonal within its own.
        return length * chunk * length + length * (length + 1) // 2

    return tuple(Fraction(sum(pairs(chunk) for chunk in chunks_of(rank, cp, order)), total) for rank in range(cp))


def ring_step_pairs(seq_len: int, cp: int, order: str) -> tuple[tuple[int, ...], ...]:
    """Pairs that each rank computes in each step of the ring: rows are steps (step s: keys of rank r-s), columns ranks.

    A step lasts as long as its busiest rank: under `contiguous` some rank works a full square in every step, under
    `zigzag` all ranks work alike.
    """
    num_chunks = cp if order == "contiguous" else 2 * cp
    if seq_len % num_chunks:
        raise PlanError(
            f"seq_len = {seq_len} does not divide into {num_chunks} chunks for cp = {cp}; use a multiple "
            f"of {num_chunks}"
        )
    length = seq_len // num_chunks

    def pairs(query: int, key: int) -> int:
        if key > query:
            return 0
        # A whole square before the diagonal, a triangle on it, nothing after it.
        return length * length if key < query else length * (length + 1) // 2

    return tuple(
        tuple(
            sum(pairs(q, k) for q in chunks_of(rank, cp, order) for k in chunks_of((rank - step) % cp, cp, order))
            for rank in range(cp)
        )
        for step in range(cp)
    )


def uneven_positions_reason(graph: Graph, ranks: int) -> str | None:
    """Why so many ranks do not share out positions that the model itself has (patches of an image), as they do between
    layers under sequence parallelism; None where they can."""
    known = {dim.name: dim.size for block in graph.blocks for dim in block.dims if base(dim.name) in TOKEN_DIMS}
    for name, size in sorted(known.items()):
        if size is not None and size % ranks:
            return (
                f"{graph.name} has {size} {name}, which {ranks} ranks do not share out evenly under "
                f"layout.sequence_parallel; leave it out"
            )
    return None


def whole_sequence_reason(graph: Graph, sharded: Mapping[str, ShardedBlock]) -> str | None:
    """What of a model needs whole sequences, where the ranks of cp hold parts; None where nothing does. sharded: its
    blocks on a mesh with cp > 1."""
    for name, block in sharded.items():
        routed = routed_tensors(block.block)
        for op in block.block.ops:
            if op.does == "attends" and len(op.inputs) > 3:
                return f"{graph.name}: {name}/{op.path} adds a bias or sinks to scores"
        for tensor in block.block.parameters:
            if tensor.name not in routed and "cp" not in block.partial_grads.get(tensor.name, ()):
                return f"{graph.name}: {name} uses {tensor.name} on whole sequences"
    return None
