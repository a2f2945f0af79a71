"""ChunkFlow (ICML 2025): long sequences cut into chunks, short ones packed, and a pipeline order that knows both.

What it does to a batch and to the rows of 1F1B is `lowering.chunked`, since the number of microbatches follows from it;
here is what turns it on, where it cannot be used, and which chunk sizes and `keep` a search tries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gnomon.lowering.chunked import BUFFERS as BUFFERS
from gnomon.lowering.chunked import NAME, ChunkPass, chunk_pass
from gnomon.lowering.chunked import backward_order as backward_order
from gnomon.lowering.chunked import chunkflow as chunkflow
from gnomon.lowering.chunked import chunks as chunks
from gnomon.lowering.units import unlike_numbers
from gnomon.methods.method import Method, Param, StandIn, halves
from gnomon.orders.one_f_one_b import ORDER as ONE_F_ONE_B
from gnomon.plans import Pass, Plan, Saved

USUAL = ChunkPass()

CHUNK_SIZES = (8192, 4096, 16384, 2048, 32768)
"""Tokens of a chunk that a search tries (the paper's grid is 2K to 32K)."""


def reason(plan: Plan) -> str | None:
    """Why a plan cannot have it, and what to change; None where it can."""
    mesh = plan.mesh
    if mesh.cp > 1:
        return f"cp = {mesh.cp} divides sequences that it cuts into chunks; use cp = 1"
    if plan.schedule.name != ONE_F_ONE_B.name or plan.schedule.virtual_stages > 1:
        return (
            f"it is an order of rows like {ONE_F_ONE_B.name}, in place of {plan.schedule.name}; choose one of the two"
        )
    if plan.schedule.rounds > 1 or plan.schedule.vocabulary != "ends":
        return "its order has no rounds and no divided vocabulary; use rounds = 1 and vocabulary = 'ends'"
    if len(plan.schedule.passes) > 1:
        return "another pass changes the same rows; leave one out"
    return unlike_numbers(plan, "chunks")


def variants(plan: Plan) -> Iterator[Plan]:
    """Yields the plan with each chunk size: the usual ones, or half and twice the plan's own; and K, with a pipeline
    with more warm-up too. Where there is room, more chunks keep what they made, and fewer run twice."""
    own, plain = chunk_pass(plan.schedule), replace(plan, schedule=replace(plan.schedule, passes=()))
    if reason(plain) is not None or (plan.schedule.passes and own is None):
        return
    plan, pipeline = plain, plan.num_pipeline_ranks > 1
    sizes = CHUNK_SIZES if own is None else (own.chunk_size, 2 * own.chunk_size, max(own.chunk_size // 2, 1))
    for size in sizes:
        for keep in (1, 2, 4, 0):
            for extra in (0, 1) if pipeline else (0,):
                params = (("chunk_size", size), ("keep", keep), ("extra", extra))
                passes = (Pass(name=NAME, params=params),)
                yield replace(plan, schedule=replace(plan.schedule, passes=passes))
                if plan.saved != Saved():
                    yield replace(plan, schedule=replace(plan.schedule, passes=passes), saved=Saved())


def stand_ins(lengths: Sequence[int], devices: int) -> Iterator[StandIn]:
    """Yields, for each chunk size that some sequence exceeds, the batch's tokens as chunks, a microbatch each; a
    multiple of the devices, so that every number of data-parallel workers divides them."""
    fixed = {"cp": 1, "schedule": ONE_F_ONE_B.name, "virtual_stages": 1, "micro_batch_size": 1}
    for size in halves(max(lengths), CHUNK_SIZES):
        if size < max(lengths):
            batch = -(-sum(lengths) // (size * devices)) * devices
            passes = (Pass(name=NAME, params=(("chunk_size", size),)),)
            yield StandIn(seq_len=size, batch=batch, fixed=fixed, forbid=("zero>1",), passes=passes)


METHOD = Method(
    name=NAME,
    paper="ChunkFlow, Yuan et al., ICML 2025",
    about="long sequences cut into chunks of equal length, short ones packed, and a pipeline order that knows both",
    switch="schedule.passes",
    exactness="up to the order of sums",
    params=(
        Param(name="chunk_size", about="tokens of a chunk", default=USUAL.chunk_size),
        Param(name="keep", about="chunks of a sequence whose activations stay; 0: all", default=USUAL.keep),
        Param(name="extra", about="warm-up forwards beyond those of 1F1B", default=USUAL.extra),
    ),
    refusal=reason,
    variants=variants,
    stand_ins=stand_ins,
)
