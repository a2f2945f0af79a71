"""Adaptive gating: tokens whose first expert is much more probable than their second go to that one alone.

`experts.threshold` T of a plan turns it on: at T = 0 every token has one expert, at T = 1 each has two. The runtime
sends and computes so many rows fewer; a prediction takes the share of such tokens from the workload (`router.alone`).
The curriculum of the paper, easy sentences before hard ones, is an order of the data and is the user's.
"""

from __future__ import annotations

from gnomon.methods.method import Method

METHOD = Method(
    name="adaptive_gating",
    paper="Adaptive gating, Li et al., EMNLP 2023",
    about="a token goes to its first of two experts alone where that is more probable by more than a threshold",
    switch="experts.threshold",
    exactness="statistical",
    missing={
        "rewritten": "rows of a Program stay as they are; experts get fewer tokens",
        "planned": "it changes what is learnt, so that a plan has it where its user says so",
    },
    on=lambda plan: plan.experts.threshold < 1.0,
)
