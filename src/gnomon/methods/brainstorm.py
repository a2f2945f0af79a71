"""Brainstorm: experts lie on ranks as a profile of the router says, and rows are sent before their number is known.

`experts.placement` of a plan is its first half: `gnomon plan --router FILE` chooses it by an integer programme
(`search.expert_placement`). `experts.speculate` is the other: a dispatch sends as many rows to each rank as the last
one of its layer did, at once with the counts, and what there is more of in a second exchange, so that a wrong guess
costs time and never a row (`runtime.ops.speculation`). Leaves out fused kernels by expected load, and serving.
"""

from __future__ import annotations

from gnomon.methods.method import Method

METHOD = Method(
    name="brainstorm",
    paper="Brainstorm, Cui et al., OSDI 2023",
    about="experts are placed by a profile of the router, and rows are sent by the routes of the step before",
    switch="experts.placement",
    exactness="up to the order of sums",
    missing={
        "rewritten": "rows of a Program stay as they are; tokens of experts go to other ranks, and earlier",
    },
    on=lambda plan: plan.experts.speculate or bool(plan.experts.placement and not plan.experts.replicas),
    searched=True,
)
