"""Skrull (NeurIPS 2025): long sequences divided over context-parallel ranks, short ones whole on one of them.

Long fine-tuning mixes short and long sequences; dividing the short ones over the context-parallel ranks pays for
messages and tiny kernels. Which sequences go where is `lowering.packed`, since the number of microbatches follows from
it. `microbatch_step` is the Program of one layer over such a microbatch; played, its forward takes what they lower: on
the slowest rank the exchange of keys and values alongside the whole sequences, then the divided ones. Left out:
profiling of costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gnomon.lowering.packed import DIVIDED as DIVIDED
from gnomon.lowering.packed import NAME, SkrullPass, skrull_pass
from gnomon.lowering.packed import dacp as dacp
from gnomon.lowering.packed import gds as gds
from gnomon.lowering.units import unlike_numbers
from gnomon.methods.method import Method, Param, StandIn, halves
from gnomon.plans import Pass, Plan, Unit
from gnomon.program import (
    STANDARD_BUFFERS,
    BufferClass,
    Communicator,
    Kind,
    Program,
    ProgramBuilder,
    effects,
    with_kinds,
)

KINDS = with_kinds(
    Kind(name="QKV", effects=effects("read P, write KVL")),
    Kind(name="AG_KV", stream="cp", effects=effects("consume KVL, write KV"), comm="cp"),
    Kind(name="LOCAL", effects=effects("read P, write SL")),
    Kind(name="DIST", effects=effects("read P, read KV, write S")),
    Kind(name="DIST_B", effects=effects("read P, consume S, consume KV, write DKV, accumulate G")),
    Kind(name="RS_DKV", stream="cp", effects=effects("consume DKV, write DKVL"), comm="cp"),
    Kind(name="LOCAL_B", effects=effects("read P, consume SL, accumulate G")),
    Kind(name="QKV_B", effects=effects("read P, consume DKVL, accumulate G")),
)
"""QKV projects a rank's part of the divided sequences, AG_KV gathers the keys and values, DIST attends to them; LOCAL
is all work on whole sequences. Backward in reverse; RS_DKV reduces and scatters the gradients of keys and values."""

BUFFERS = (
    *STANDARD_BUFFERS,
    *(
        BufferClass(name=name, memory="activations" if name in ("KV", "DKV") else "not in the step's")
        for name in ("KVL", "KV", "SL", "DKV", "DKVL")
    ),
)
"""The standard buffers; keys and values of a rank's part and of all, what whole sequences save, and gradients."""


def microbatch_step(unit: Unit, cp: int) -> Program:
    """The Program of one layer's forward and backward over a unit; each context-parallel rank is a rank class.

    The exchange of keys and values runs alongside the whole sequences, forward and backward. A rank without whole
    sequences has no LOCAL; without divided ones there is no exchange. PlanError where the unit has a sequence on a rank
    of cp or more.
    """
    unit.rank_tokens(cp)  # raises for such a rank
    divided = {sequence for sequence, _, _ in unit.pieces} - {sequence for sequence, _ in unit.local}
    builder = ProgramBuilder(num_stages=1, units=(unit,), kinds=KINDS)
    for rank in range(cp):
        cls, whole = builder.rank_class(), any(where == rank for _, where in unit.local)
        # (kind, whether this rank has it, group): rows of one group start and end together on all ranks, as a
        # collective does; -1: a rank's own.
        rows = (
            ("QKV", bool(divided), -1),
            ("AG_KV", bool(divided), 0),
            ("LOCAL", whole, -1),
            ("DIST", bool(divided), -1),
            ("DIST_B", bool(divided), -1),
            ("RS_DKV", bool(divided), 1),
            ("LOCAL_B", whole, -1),
            ("QKV_B", bool(divided), -1),
        )
        for kind, present, group in rows:
            if present:
                builder.add(cls, kind, 0, 0, group=group)
        if whole or divided:
            builder.add(cls, "OPT", 0)
    return builder.build(buffers=BUFFERS, comms=(Communicator(name="cp", semantics="collective"),))


USUAL = SkrullPass()
"""The settings of a plan that only names the method."""

CAPACITIES = (16384, 8192, 32768, 4096)
"""Capacities of a context-parallel rank, in tokens, that a search tries, the usual one first."""


def reason(plan: Plan) -> str | None:
    """Why a plan cannot have Skrull, and what to change; None where it can."""
    if plan.mesh.cp < 2:
        return "it chooses what context parallelism divides, and cp = 1 divides nothing; use cp > 1"
    if plan.mesh.pp > 1 or plan.stages:
        return "it is for plans without pipeline stages; use pp = 1"
    if plan.schedule.vocabulary != "ends" or plan.schedule.rounds > 1:
        return "its microbatches are no rounds, and the vocabulary is not divided; use rounds = 1, vocabulary = 'ends'"
    if len(plan.schedule.passes) > 1:
        return "another pass changes the same microbatches; leave one out"
    return unlike_numbers(plan, "microbatches")


def variants(plan: Plan) -> Iterator[Plan]:
    """Yields the plan with each of CAPACITIES, or with settings `near` its own where it has Skrull already; nothing
    where a plan cannot have it."""
    own, plan = skrull_pass(plan.schedule), replace(plan, schedule=replace(plan.schedule, passes=()))
    if reason(plan) is not None:
        return
    for settings in (replace(USUAL, capacity=size) for size in CAPACITIES) if own is None else near(own):
        params = (("capacity", settings.capacity),)
        params += tuple((n, v) for n in ("gather_up_to", "ulysses_up_to") if (v := getattr(settings, n)))
        yield replace(plan, schedule=replace(plan.schedule, passes=(Pass(name=NAME, params=params),)))


def near(own: SkrullPass) -> Iterator[SkrullPass]:
    """Yields settings beside a plan's own: twice and half its capacity, and the lengths up to which divided sequences
    are gathered, or go by heads: none, or two, four and eight capacities."""
    yield replace(own, capacity=2 * own.capacity)
    yield replace(own, capacity=max(own.capacity // 2, 1))
    for tokens in (0, 2 * own.capacity, 4 * own.capacity, 8 * own.capacity):
        yield replace(own, gather_up_to=tokens)
        yield replace(own, ulysses_up_to=tokens)


def stand_ins(lengths: Sequence[int], devices: int) -> Iterator[StandIn]:
    """Yields workloads of equal lengths that stand for the batch: for each capacity, and each number of
    context-parallel ranks that hold the longest sequence, sequences that fill these ranks, as many as the batch's
    tokens make, rounded up to a multiple of the devices."""
    longest = max(lengths)
    for capacity in CAPACITIES if longest > min(CAPACITIES) else halves(longest, ()):
        for cp in (2, 4, 8, 16):
            if devices % cp == 0 and capacity * cp >= longest:
                batch = -(-sum(lengths) // (capacity * cp * devices)) * devices
                fixed = {"cp": cp, "pp": 1, "micro_batch_size": 1}
                passes = (Pass(name=NAME, params=(("capacity", capacity),)),)
                forbid = ("zero>1",)
                yield StandIn(seq_len=capacity * cp, batch=batch, fixed=fixed, forbid=forbid, passes=passes)


METHOD = Method(
    name=NAME,
    paper="Skrull, NeurIPS 2025",
    about="short sequences stay whole on one context-parallel rank, long ones are divided over all",
    switch="schedule.passes",
    exactness="up to the order of sums",
    params=(
        Param(name="capacity", about="tokens that a context-parallel rank holds", default=USUAL.capacity),
        Param(name="gather_up_to", about="tokens up to which divided ones are gathered", default=USUAL.gather_up_to),
        Param(name="ulysses_up_to", about="tokens up to which they go by heads", default=USUAL.ulysses_up_to),
    ),
    refusal=reason,
    variants=variants,
    stand_ins=stand_ins,
)
