"""After the search, which recomputes by presets: its best plans with what each tensor's recomputation is worth.

`by_tensor(result)` takes the best plans and those that were faster but did not fit, and gives each the least
recomputation with which it fits, or tensors on the host where they cost less (`checkpointing.plan`). Leaves out plans
that the search did not come upon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gnomon.errors import InputError, PlanError
from gnomon.plans import Plan, Saved
from gnomon.search.budget import KeepGoing, always
from gnomon.search.checkpointing.plan import least_recompute
from gnomon.search.results import FoundPlan, Result
from gnomon.search.stages.recompute import unit_of
from gnomon.software import Stack

PLANS = 4
"""Of the best, and of those that did not fit, at most."""

WORTH = 1e-3
"""Share of the step by which it must be better: less is no reason for rules of tensors."""


@dataclass(frozen=True, kw_only=True)
class ByTensor:
    """What choosing tensor by tensor gains."""

    best: FoundPlan | None
    """The best plan, where it is better than the best of the search."""
    before_s: float
    """Step of the best plan with presets."""
    tried: int
    """Plans that were given the least recomputation."""
    predicted: int
    """Predictions made."""

    @property
    def gain(self) -> float:
        """Share of the step saved; 0 where nothing was."""
        return 0.0 if self.best is None else 1 - self.best.step_s / self.before_s

    def merged(self, result: Result) -> Result:
        """The search's result with this plan before the others."""
        return result.led_by(self.best)


def by_tensor(
    result: Result, *, on_progress: Callable[[int, int], None] | None = None, keep_going: KeepGoing = always
) -> ByTensor:
    """The best plan whose recomputation is chosen tensor by tensor; see the module.

    on_progress: is called with (plans begun, plans at most). keep_going: the budget, asked before each plan. InputError
    for a stack that does not run rules of tensors, and without scipy; PlanError for a base plan that says what is kept.
    """
    check_stack(result.stack)
    if result.space.base.saved != Saved() or result.space.base.stages:
        raise PlanError("the base plan says what is kept or has stages of its own; leave it out, or --sac-ilp")
    before = result.best[0].step_s
    faster = [candidate for candidate in result.near if candidate.step_s < before]
    candidates: dict[Plan, FoundPlan] = {}
    for candidate in (*result.best[:PLANS], *faster[:PLANS]):
        # Plans that differ only in what they recompute are given the same recomputation here: one of them is enough.
        candidates.setdefault(replace(candidate.plan, saved=Saved()), candidate)
    best, tried, predicted = result.best[0], 0, 0
    for candidate in candidates.values():
        if tried and not keep_going():
            break
        tried += 1
        if on_progress is not None:
            on_progress(tried, len(candidates))
        offload = all(
            group.node.device.kind != "cpu" for group in result.cluster.groups
        )  # there the host is the device
        least = least_recompute(candidate.prediction, result.limit_bytes, offload=offload)
        if least is None:
            continue
        predicted += least.predicted
        if least.prediction.step_s < best.step_s * (1 - WORTH):
            best = FoundPlan(point=candidate.point, plan=least.prediction.plan, prediction=least.prediction)
    return ByTensor(best=None if best is result.best[0] else best, before_s=before, tried=tried, predicted=predicted)


def check_stack(stack: Stack) -> None:
    """InputError for a program that does not run rules of single tensors."""
    if unit_of(stack) != "stage":
        raise InputError(
            f"--sac-ilp chooses tensor by tensor what is recomputed, which {stack.name} cannot be told; leave it out, "
            "or plan for gnomon run with --stack gnomon"
        )
