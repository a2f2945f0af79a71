"""Ring attention: keys and values go round the context-parallel ranks while each attends with its own queries
(Liu, Zaharia, Abbeel 2023; zig-zag order as in ring-flash-attention).

`ring_attention` is the forward of one layer's attention under a causal mask as a Program: rank r holds the tokens of
unit r and attends to the keys of ranks r, r - 1, r - 2 … in turn. Keys and values are double-buffered: a rank receives
the next unit while it works on this one, and every unit goes all the way round, also where the mask makes it useless.
Left out: the backward, which sends gradients along, and merging of partial results.
"""

from __future__ import annotations

from gnomon.plans import Unit, normalised
from gnomon.program import (
    STANDARD_BUFFERS,
    BufferClass,
    Communicator,
    Kind,
    Override,
    Pool,
    Program,
    ProgramBuilder,
    effects,
    with_kinds,
)
from gnomon.sharding.context import chunks_of, ring_step_pairs

KINDS = with_kinds(
    Kind(name="QKV", effects=effects("read P, write KV")),
    Kind(name="SEND_KV", stream="send", effects=effects("read KV"), comm="ring", message="send", hop=1),
    Kind(name="RECV_KV", stream="recv", effects=effects("write KV"), comm="ring", message="recv", hop=1),
    Kind(name="DIAG", effects=effects("read KV")),
    Kind(name="ATTN", effects=effects("read KV")),
    Kind(name="DROP", effects=effects("consume KV")),
)
"""DIAG is attention to a rank's own keys, ATTN to those of another; DROP ends a step of the ring: it waits until the
keys and values have been sent on, and gives their buffer to the unit after next."""

BUFFERS = (*STANDARD_BUFFERS, BufferClass(name="KV", memory="activations", pool="kv"))
"""The standard buffers; keys and values of a unit."""


def ring_units(seq_len: int, cp: int, order: str) -> tuple[Unit, ...]:
    """Returns one unit a rank: unit r has the tokens of one sequence that rank r holds. order: contiguous or zigzag.

    seq_len: tokens; PlanError unless chunks are equal.
    """
    ring_step_pairs(seq_len, cp, order)
    length = seq_len // (cp if order == "contiguous" else 2 * cp)
    return normalised(
        tuple(
            Unit(pieces=tuple((0, chunk * length, (chunk + 1) * length) for chunk in chunks_of(rank, cp, order)))
            for rank in range(cp)
        )
    )


def ring_attention(seq_len: int, cp: int, order: str) -> Program:
    """One sequence of `seq_len` tokens over `cp` ranks, each a rank class and a stage that exchanges only keys.

    A rank without work in a step of the ring (contiguous order: keys of later tokens) has no ATTN row there. PlanError
    unless the sequence divides into equal chunks.
    """
    pairs = ring_step_pairs(seq_len, cp, order)
    builder = ProgramBuilder(num_stages=cp, units=ring_units(seq_len, cp, order), kinds=KINDS)
    for rank in range(cp):
        cls = builder.rank_class()
        builder.add(cls, "QKV", rank, rank)
        for step in range(cp):
            # The unit that a rank works on; the one that arrives meanwhile is that of the next step, (rank - step - 1)
            # mod cp.
            unit = (rank - step) % cp
            if step + 1 < cp:
                builder.add(cls, "SEND_KV", rank, unit, override=Override(peer=(rank + 1) % cp))
                builder.add(cls, "RECV_KV", rank, (unit - 1) % cp, override=Override(peer=(rank - 1) % cp))
            if pairs[step][rank]:
                builder.add(cls, "ATTN" if step else "DIAG", rank, unit)
            builder.add(cls, "DROP", rank, unit)
    return builder.build(
        buffers=BUFFERS,
        comms=(Communicator(name="ring", semantics="rendezvous"),),
        pools=(Pool(name="kv", size=2),),
        # No stage takes an input from the one before it.
        chains=tuple(range(cp)),
    )
