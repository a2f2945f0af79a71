"""NxMTransformer: weights of which n of every m are kept, learnt by the alternating direction method of multipliers.

Training minimises L(W) + rho/2 |W - Z + U|^2: each step updates W by the gradient of both terms; every `every` steps Z
becomes what the pattern keeps of W + U, and U adds up what W and Z differ by. rho grows over these steps to its value.
After `mask_at` of the run's steps the pattern of W + U is fixed: the rest of W is put to 0 and stays so, and what is
kept is trained on. With rho = 0 this is one-shot magnitude at that step, and training of what it left. Z and U are as
large as the matrices, in their dtype.

Source: Holmes et al., "NxMTransformer: Semi-Structured Sparsification for Natural Language Understanding via ADMM",
NeurIPS 2021; the growth of rho and the training after the mask are ours. Leaves out the arithmetic
(`runtime.optim.weight_rules`), and the folder that is written (`runtime.checkpoint.compress`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.errors import PlanError
from gnomon.graph import DTYPE_BITS, Graph
from gnomon.late import load_late
from gnomon.methods.learnt.costs import MethodCosts
from gnomon.methods.learnt.trained_weights import compressed, divided_reason
from gnomon.methods.method import Method, Param
from gnomon.plans import Plan

NAME = "nxm_admm"
MOST = 16
"""Of m: a place among them is stored in four bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NxmSettings:
    """What the plan asks for."""

    n: int = 2
    """Kept"""
    m: int = 4
    """of so many side by side in a row."""
    rho: float = 0.01
    """Weight of the pattern beside the loss, at the end of its growth."""
    every: int = 8
    """Steps between two updates of Z and U."""
    mask_at: float = 0.7
    """Share of the steps after which the pattern is fixed."""

    @property
    def pattern(self) -> str:
        """Writes the pattern as people do."""
        return f"{self.n}:{self.m}"


def settings_of(plan: Plan) -> NxmSettings:
    """What a plan that names the method asks for. PlanError for parameters that mean nothing."""
    read = METHOD.read_from(plan)
    pattern, rho, every, mask_at = str(read["pattern"]), float(read["rho"]), int(read["every"]), float(read["mask_at"])
    n, separates, m = pattern.partition(":")
    if not (separates and n.isdigit() and m.isdigit() and 0 < int(n) < int(m) <= MOST):
        raise PlanError(
            f"pass {NAME}: pattern = {pattern[:40]!r} does not keep n of every m numbers, 0 < n < m <= {MOST}; "
            "give one as '2:4' or '4:16'"
        )
    if rho < 0 or every < 1 or not 0 < mask_at < 1:
        raise PlanError(
            f"pass {NAME}: rho = {rho} must be at least 0, every = {every} at least 1, and mask_at = {mask_at} a share "
            f"of the steps between 0 and 1"
        )
    return NxmSettings(n=int(n), m=int(m), rho=rho, every=every, mask_at=mask_at)


def _refusal(plan: Plan) -> str | None:
    settings_of(plan)
    return divided_reason(plan)


def _unfit(plan: Plan, graph: Graph) -> str | None:
    m, matrices = settings_of(plan).m, compressed(graph)
    if not matrices:
        return f"{graph.name} has no matrix in a repeated layer"
    odd = ((name, columns) for name, (_, columns) in matrices.items() if columns % m)
    return next(
        (f"{name} has {columns:,} columns, no multiple of {m}; give another pattern" for name, columns in odd), None
    )


CHOSEN_BYTES = 96
"""Moving so many bytes takes as long as choosing the n largest of m does, a number: 8 to 12 ns on one core (torch
2.13's topk, 8 thousand to a million numbers)."""


def _costs(plan: Plan, graph: Graph) -> MethodCosts:
    """W, Z, U and the gradient are read and it is written; Z and U now and then; later a mask of a byte."""
    settings = settings_of(plan)
    width = DTYPE_BITS[plan.precision.param if plan.precision.master == "none" else plan.precision.master] // 8
    drawn = 5 * width + (CHOSEN_BYTES + 6 * width) / settings.every
    masked = 4 * width + 2
    return MethodCosts(kept_bytes=2.0 * width, moved_bytes=settings.mask_at * drawn + (1 - settings.mask_at) * masked)


_DEFAULT = NxmSettings()

METHOD = Method(
    name=NAME,
    paper="NxMTransformer, Holmes et al., NeurIPS 2021",
    about="weights are drawn to a pattern that keeps n of every m while they train, and end in it",
    switch="schedule.passes",
    exactness="statistical",
    missing={
        "rewritten": "rows of a Program stay as they are; an update does more",
        "planned": "it changes what is learnt, so that a plan has it where its user says so",
    },
    params=(
        Param(name="pattern", about="what is kept of every m side by side, as in '2:4'", default=_DEFAULT.pattern),
        Param(name="rho", about="weight of the pattern beside the loss", default=_DEFAULT.rho),
        Param(name="every", about="steps between two updates of the multipliers", default=_DEFAULT.every),
        Param(name="mask_at", about="share of the steps after which the pattern is fixed", default=_DEFAULT.mask_at),
    ),
    refusal=_refusal,
    unfit=_unfit,
    resumes=False,
    costs=_costs,
    storage=lambda plan: load_late("gnomon.storage.names:storage_of")(settings_of(plan).pattern),
)
