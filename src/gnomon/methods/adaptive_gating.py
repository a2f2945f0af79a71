"""Adaptive gating: tokens whose first expert is much more probable than their second go to that one alone.

`experts.threshold` T of a plan turns it on: at T = 0 every token has one expert, at T = 1 each has two. The runtime
sends and computes so many rows fewer; a prediction takes the share of such tokens from the workload (`router.alone`).
The curriculum of the paper, easy sentences before hard ones, is an order of the data and is the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnomon.methods.method import Method
from gnomon.plans import Plan

USUAL = 0.1
"""The paper's threshold."""


def variants(plan: Plan) -> Iterator[Plan]:
    """Yields the plan with the paper's threshold, which is tried where it is asked for by name, as it changes what is
    learnt."""
    if plan.experts.threshold == 1.0:
        yield replace(plan, experts=replace(plan.experts, threshold=USUAL))


METHOD = Method(
    name="adaptive_gating",
    paper="Adaptive gating, Li et al., EMNLP 2023",
    about="a token goes to its first of two experts alone where that is more probable by more than a threshold",
    switch="experts.threshold",
    exactness="statistical",
    missing={"rewritten": "actions of a Program stay as they are; experts get fewer tokens in each"},
    variants=variants,
    on=lambda plan: plan.experts.threshold < 1.0,
)
