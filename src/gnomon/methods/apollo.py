"""APOLLO: gradients scaled by row or column as Adam's update of a few random projections of them is.

This file says what the method is; its states and its price are those of GaLore (`methods.galore`), but that nothing is
projected back and that projections are random numbers. Leaves out its variant of one dimension (APOLLO-Mini) by name:
rank = 1 is it.
"""

from __future__ import annotations

from gnomon.methods.galore import REASON, ROWS, with_low_rank
from gnomon.methods.method import Method
from gnomon.plans import LowRank

METHOD = Method(
    name="apollo",
    paper="APOLLO, Zhu et al., MLSys 2025",
    about="gradients are scaled as Adam's update of a few random projections of them",
    switch="optimizer.low_rank",
    exactness="statistical",
    missing={"rewritten": ROWS, "run": REASON},
    on=lambda plan: plan.optimizer.low_rank is not None and plan.optimizer.low_rank.method == "apollo",
    variants=lambda plan: with_low_rank(plan, LowRank(method="apollo", projection="random")),
)
