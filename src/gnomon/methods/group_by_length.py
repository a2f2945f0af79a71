"""Sorting by length: microbatches of sequences of about the same length, the longest first.

As transformers' Trainer sorts with `group_by_length`: data-parallel workers then have about as much to do as each
other. Which sequences go together is `lowering.units`; nothing is padded here. Left out: sorting over several steps,
which changes what a step trains on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gnomon.methods.method import Method, StandIn, mean_and_longest
from gnomon.methods.padding import reason
from gnomon.plans import Pass, Plan
from gnomon.plans.parts import GROUP_BY_LENGTH


def variants(plan: Plan) -> Iterator[Plan]:
    """The plan with it."""
    if not plan.schedule.passes:
        yield replace(plan, schedule=replace(plan.schedule, passes=(Pass(name=GROUP_BY_LENGTH),)))


def stand_ins(lengths: Sequence[int], devices: int) -> Iterator[StandIn]:
    """Yields batches of as many sequences, all of the longest length or all of the mean."""
    for seq_len in mean_and_longest(lengths):
        yield StandIn(seq_len=seq_len, batch=len(lengths), passes=(Pass(name=GROUP_BY_LENGTH),))


METHOD = Method(
    name=GROUP_BY_LENGTH,
    paper="transformers, Trainer's LengthGroupedSampler, 2020",
    about="sequences sorted by length, so that those of a microbatch are about as long as each other",
    switch="schedule.passes",
    exactness="up to the order of sums",
    refusal=reason,
    variants=variants,
    stand_ins=stand_ins,
    searched=True,
)
