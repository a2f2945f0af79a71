"""What follows the exact search, on its best plans: uneven stages, recomputation by tensor, choices beyond its fields.

`improve(result, passes)` runs the passes that are asked for, one after the other, each on what the one before found,
and returns the best plan with what each gained. The result is never slower than the exact search's best. Passes are
heuristics: each starts from a few of the best plans, so none proves that its plan is the best of all. Where a pass left
the space of the exact search, the best plan's neighbours are searched last. Leaves out the exact search itself
(`planning.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gnomon.plans import Plan
from gnomon.search.budget import KeepGoing, always
from gnomon.search.checkpointing.improve import ByTensor, by_tensor
from gnomon.search.refinement.choices import Choice, Value, with_load
from gnomon.search.refinement.neighbours import ClimbReport, climb
from gnomon.search.refinement.refine import Effort, RefinedPlans, refine
from gnomon.search.results import FoundPlan, Result
from gnomon.search.space.points import Limit
from gnomon.search.stages.cut import Cut
from gnomon.search.stages.dapple import Dapple, dapple
from gnomon.search.stages.uneven import Uneven, uneven

OnPass = Callable[[str, int, int], None]
"""Takes the name of a pass, plans that it looked at so far, and how many it looks at, at most."""

STAGES, TENSORS, CHOICES = "plans cut into uneven stages:", "plans given the least recomputation:", "choices tried:"
"""What passes are called when they say how far they are."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes that a search makes after the exact one."""

    uneven_stages: bool = True
    """Layers cut into stages unevenly, and recomputation that differs by stage."""
    layers_per_stage: Cut | None = None
    """The one cut that every plan has; None where it is open."""
    by_tensor: bool = False
    """Recomputation tensor by tensor, by an integer programme."""
    effort: Effort | None = None
    """How much is tried of choices beyond the exact search; None for none of it."""
    choices: Sequence[Choice] = ()
    """Those that are open."""
    forbid: tuple[Limit, ...] = ()
    """Values that none of them may take."""
    fixed: Mapping[str, Value] = field(default_factory=dict)
    """Choices that every plan makes where they mean something."""
    replicas: Plan | None = None
    """The base plan of stages with other numbers of data-parallel ranks (DAPPLE's planner); None where they are not
    looked at."""


@dataclass(frozen=True, kw_only=True)
class Improved:
    """What the passes made of a search's result."""

    result: Result
    """With the best uneven stages, and the best recomputation by tensor, among its plans."""
    best: FoundPlan
    """The fastest of all."""
    stages: Uneven | None = None
    """What uneven stages gained; None where they were not looked at, or their plan could not be given."""
    tensors: ByTensor | None = None
    """What recomputation tensor by tensor gained; None where it was not asked for."""
    refined: RefinedPlans | None = None
    """What choices beyond the exact search gained; None where none was tried, or its plan could not be given."""
    climbed: ClimbReport | None = None
    """What neighbours of the best plan gained; None where it is that of the search, which had looked at them."""
    replicas: Dapple | None = None
    """DAPPLE's plan with other numbers of data-parallel ranks by stage; None where it was not asked for."""


def improve(
    result: Result,
    passes: Passes,
    *,
    accepts: Callable[[FoundPlan], bool] = lambda _: True,
    on_pass: OnPass | None = None,
    keep_going: KeepGoing = always,
) -> Improved:
    """The best plan that the passes lead to from a search's result.

    accepts: whether a plan can be given, as where a program's file must be able to say it; a pass whose plan cannot be
    is as if it had not been made. on_pass: is called as the passes go on. keep_going: the budget, asked between two
    plans. PlanError for what is fixed and no plan of the search can have.
    """

    def on_progress(name: str) -> Callable[[int, int], None] | None:
        return None if on_pass is None else lambda done, most: on_pass(name, done, most)

    searched, stages, tensors = result, None, None
    if passes.uneven_stages:
        stages = uneven(searched, cut=passes.layers_per_stage, on_progress=on_progress(STAGES), keep_going=keep_going)
        result = stages.merged(searched)
        if not accepts(result.best[0]):
            result, stages = searched, None
    if passes.by_tensor:
        tensors = by_tensor(result, on_progress=on_progress(TENSORS), keep_going=keep_going)
        result = tensors.merged(result)
    refined, best = None, result.best[0]
    if passes.effort is not None:
        refined = refine(
            result, choices=with_load(passes.choices, result.workload.router), forbid=passes.forbid,
            fixed=passes.fixed, effort=passes.effort, on_progress=on_progress(CHOICES), keep_going=keep_going,
        )  # fmt: skip
        refined = refined if accepts(refined.best) else None
        best = best if refined is None else refined.best
    climbed = None
    if passes.layers_per_stage is None and not passes.fixed and best is not searched.best[0]:
        climbed = climb(result, best, accepts=accepts)
        best = climbed.best
    replicas = None
    if passes.replicas is not None:
        replicas = dapple(
            result.graph, result.cluster, result.workload, base=passes.replicas, stack=result.stack,
            limit_bytes=result.limit_bytes,
        )  # fmt: skip
        if replicas.best is not None and replicas.best.step_s < best.step_s:
            best = replace(best, plan=replicas.best.plan, prediction=replicas.best)
    return Improved(
        result=result, best=best, stages=stages, tensors=tensors, refined=refined, climbed=climbed, replicas=replicas
    )
