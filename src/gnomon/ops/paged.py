"""`paged_attention`: queries of several sequences over keys and values that lie in blocks, which a table names.

As in vLLM (Kwon et al. 2023): a pool holds blocks of positions, and row s of the table names the blocks of sequence s
in order. Queries are the last positions of their sequence, whose keys are in the pool already; `lengths` says how many
positions of it count. It is a kind of inference: no gradient passes. Shapes: q (sequences, queries, heads, dim), keys
(blocks, kv heads, dim, positions), values (blocks, kv heads, positions, value dim), table (sequences, blocks of one),
lengths (sequences); result (sequences, queries, heads, value dim). The engine (`serve`) runs the same function on its
pages, with as many queries of a sequence as there are. Leaves out who owns which block (`serving`).
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.ops.bases import MOVES_BYTES
from gnomon.ops.op import Op, Problem, Tensors, TorchCall
from gnomon.ops.rules import as_many, bytes_of, cannot_write
from gnomon.ops.strategy import Division, Strategy
from gnomon.ops.work import Setting, Work, nbytes
from gnomon.tensors.dims import Number, numel, size_of
from gnomon.tensors.names import HEAD_DIMS


def _dims(op: Op, block: Tensors) -> Problem:
    if len(op.inputs) != 5:
        return f"paged_attention reads q, keys, values, table and lengths, not {len(op.inputs)} tensors"
    q, keys, values, table, lengths = (block.tensor(name) for name in op.inputs)
    out = block.tensor(op.outputs[0])
    ranks = [len(tensor.dims) for tensor in (q, keys, values, table, lengths, out)]
    if ranks != [4, 4, 4, 2, 1, 4] or table.is_float or lengths.is_float:
        return cannot_write(op, block)
    fits = keys.dims[:2] == values.dims[:2] and keys.dims[3] == values.dims[2] and out.dims[:3] == q.dims[:3]
    fits = fits and table.dims[0] == lengths.dims[0] == q.dims[0] and as_many(q.dims[3:], keys.dims[2:3])
    if not fits or not as_many(out.dims[3:], values.dims[3:]):
        return cannot_write(op, block)
    heads, kv_heads = q.dims[2].size, keys.dims[1].size
    if heads and kv_heads and heads % kv_heads:
        return f"{heads} query heads are not a multiple of {kv_heads} key heads"
    return None


def key_positions(op: Op, block: Tensors, setting: Setting) -> Number:
    """Positions of one sequence that the table has blocks for; the last block may be partly filled."""
    keys, table = block.tensor(op.inputs[1]), block.tensor(op.inputs[3])
    return size_of(table.dims[1], setting.sizes) * size_of(keys.dims[3], setting.sizes)


def _work(op: Op, block: Tensors, setting: Setting) -> Work:
    """q kᵀ and p v over all positions of a sequence's blocks, which are read once; not the rest of the pool."""
    q, keys, values = (block.tensor(name) for name in op.inputs[:3])
    sizes, positions = setting.sizes, key_positions(op, block, setting)
    sequences = size_of(q.dims[0], sizes)
    widths = size_of(keys.dims[2], sizes) + size_of(values.dims[3], sizes)
    pool = size_of(keys.dims[0], sizes) * size_of(keys.dims[3], sizes)
    # The pool is larger than what these sequences hold: bytes of one position, times those that the table names.
    of_a_position = (nbytes(keys, sizes, setting.dtypes) + nbytes(values, sizes, setting.dtypes)) // pool
    small = (op.inputs[0], *op.inputs[3:])
    return Work(
        matmul_flops=2 * numel(q.dims[:3], sizes) * positions * widths,
        read_bytes=bytes_of(small, block, setting) + sequences * positions * of_a_position,
        write_bytes=bytes_of(op.outputs, block, setting),
    )


def _strategies(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Heads over tp, keys with them. PlanError for queries of one sequence on several ranks: which positions they are
    follows from the sequence's end."""
    queries = setting.block.tensor(op.inputs[0]).dims[1]
    if axes := plain.inputs[0].axes_of(queries.name):
        raise PlanError(f"{op.path}: paged attention has all queries of a sequence on one rank; use {axes[0]} = 1")
    return (plain,)


PAGED_ATTENTION = replace(
    MOVES_BYTES,
    name="paged_attention",
    signature="q, keys, values, table, lengths -> attention over the table's blocks; causal, window, scale, softcap",
    dims=_dims,
    saves="nothing",
    forward=_work,
    backward="no gradient",
    gradient="none",
    price="paged",
    strategies=_strategies,
    together=HEAD_DIMS,
    does="attends blocks",
    served="apart",
    calls=(
        TorchCall(
            function="gnomon::paged_attention",
            operands=("q", "keys", "values", "table", "lengths"),
            numbers=("causal", "window", "scale", "softcap"),
            axes=(
                "batch queries heads head_dim",
                "blocks kv_heads head_dim positions",
                "blocks kv_heads positions v_dim",
                "batch blocks_of_one",
                "batch",
                "batch queries heads v_dim",
            ),
        ),
    ),
    zeros="unknown",
    torch="paged:paged_attention",
)

KINDS = (PAGED_ATTENTION,)
