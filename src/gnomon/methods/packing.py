"""Packing: sequences behind each other in as few microbatches as hold them, without padding and without cutting any.

Which sequences go together is `lowering.units`: longest first into the emptiest of the fewest bins of `tokens` tokens.
Attention keeps sequences apart. Here is where it cannot be used, and which sizes a search tries. Left out: rows of a
fixed length, which a kernel without variable lengths would need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gnomon.lowering.units import packing_tokens, unlike_numbers
from gnomon.methods.method import Method, Param, StandIn
from gnomon.plans import Pass, Plan
from gnomon.plans.parts import PACKING

TIMES = (1, 2, 4, 8)
"""Longest sequences that fit a microbatch, as a search begins with; a plan of the search says tokens."""

TOKENS = (0, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens of a microbatch that a search goes on to; 0 and what is less than the longest sequence: as many as that."""


def reason(plan: Plan) -> str | None:
    """Why a plan cannot have it, and what to change; None where it can."""
    if plan.schedule.vocabulary != "ends" or plan.schedule.rounds > 1:
        return "its microbatches are no rounds, and the vocabulary is not divided; use rounds = 1, vocabulary = 'ends'"
    if plan.schedule.virtual_stages > 1:
        return "its numbers of microbatches are those that fit, and virtual stages want multiples; use virtual_stages 1"
    if len(plan.schedule.passes) > 1:
        return "another pass makes microbatches too, or changes their order; leave one out"
    return unlike_numbers(plan, "microbatches")


def variants(plan: Plan) -> Iterator[Plan]:
    """Yields the plan with each size: the usual ones, or half and twice the plan's own."""
    own, plan = packing_tokens(plan), replace(plan, schedule=replace(plan.schedule, passes=()))
    if reason(plan) is not None:
        return
    for tokens in (2 * own, own // 2) if own else TOKENS:
        passes = (Pass(name=PACKING, params=(("tokens", tokens),)),)
        yield replace(plan, schedule=replace(plan.schedule, passes=passes))


def stand_ins(lengths: Sequence[int], devices: int) -> Iterator[StandIn]:
    """Sequences as long as a full microbatch, as many as the batch's tokens make; a multiple of the devices."""
    longest = max(lengths)
    for times in TIMES:
        tokens = times * longest
        # Larger than a device's share of the batch, a microbatch would leave other devices without one.
        if times == 1 or tokens <= -(-sum(lengths) // devices):
            batch = -(-sum(lengths) // (tokens * devices)) * devices
            passes = (Pass(name=PACKING, params=(("tokens", tokens),)),)
            fixed = {"micro_batch_size": 1, "virtual_stages": 1}
            yield StandIn(seq_len=tokens, batch=batch, fixed=fixed, forbid=("zero>1",), passes=passes)


METHOD = Method(
    name=PACKING,
    paper="packing without cross-contamination, Krell et al., 2021",
    about="sequences behind each other in as few microbatches as hold them, by tokens",
    switch="schedule.passes",
    exactness="up to the order of sums",
    params=(Param(name="tokens", about="tokens that a microbatch holds; 0: those of the longest sequence", default=0),),
    refusal=reason,
    variants=variants,
    stand_ins=stand_ins,
    searched=True,
)
