"""Padding: every sequence of a microbatch as long as the longest of it, in batch order.

What collators do where nothing is said. The tokens that are added count nowhere, and are computed all the same:
`lowering.units` has them as pieces that go on beyond the sequence. Here it is the peer that other ways are compared
with. Left out: padding to a length that is fixed for all microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gnomon.methods.method import Method, StandIn, mean_and_longest
from gnomon.plans import Pass, Plan
from gnomon.plans.parts import GROUP_BY_LENGTH, PADDING


def reason(plan: Plan) -> str | None:
    """Why a plan cannot have it, and what to change; None where it can."""
    if {method_used.name for method_used in plan.schedule.passes} - {PADDING, GROUP_BY_LENGTH}:
        return "another pass makes microbatches too, or changes their order; leave one out"
    return None


def variants(plan: Plan) -> Iterator[Plan]:
    """The plan with it, of sequences sorted by length, and in batch order."""
    for first in () if plan.schedule.passes else ((Pass(name=GROUP_BY_LENGTH),), ()):
        yield replace(plan, schedule=replace(plan.schedule, passes=(*first, Pass(name=PADDING))))


def stand_ins(lengths: Sequence[int], devices: int) -> Iterator[StandIn]:
    """Yields batches of as many sequences, all of the longest length or all of the mean."""
    for seq_len in mean_and_longest(lengths):
        yield StandIn(seq_len=seq_len, batch=len(lengths), passes=(Pass(name=PADDING),))


METHOD = Method(
    name=PADDING,
    paper="the usual way; transformers' data collators",
    about="every sequence of a microbatch as long as its longest, with tokens that count nowhere",
    switch="schedule.passes",
    exactness="up to the order of sums",
    refusal=reason,
    variants=variants,
    stand_ins=stand_ins,
    searched=True,
)
