"""AD2: adversarial augmentation for distillation: the model also learns from embeddings that it gets most wrong.

For each microbatch, the rows that are looked up for its tokens are moved: `rounds` steps along the gradient of
KL(teacher || model), each of `step` of a row's norm, within a ball of `radius` of it. Then the model learns from the
moved rows too, by KL with what the teacher says of them (of the rows as they were, where the teacher has another
width), `weight` times. A plan with `xtc` has the same teacher for both.

Source: after "Adversarial Data Augmentation for Task-Specific Knowledge Distillation of Pre-trained Transformers"
(AAAI 2022), whose code is not public: the ball by each token's norm and the numbers are ours. Leaves out running it
(`runtime.step.distillation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.methods.learnt.costs import MethodCosts
from gnomon.methods.learnt.teacher import PARAMS, read_teaching
from gnomon.methods.learnt.teaching import Teaching
from gnomon.methods.learnt.trained_weights import divided_reason, staged_reason
from gnomon.methods.method import Method, Param
from gnomon.plans import Plan

NAME = "ad2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ad2Settings:
    """What the plan asks for."""

    rounds: int = 1
    """Steps along the gradient."""
    radius: float = 0.3
    """Of the ball, over the norm of a token's row."""
    weight: float = 1.0
    """Of the loss on moved rows beside the plain one."""


def _teaching(plan: Plan) -> Teaching:
    return read_teaching(NAME, METHOD.read_from(plan))


def settings_of(plan: Plan) -> Ad2Settings:
    """What a plan that names the method asks for. PlanError for parameters that mean nothing."""
    read = METHOD.read_from(plan)
    read_teaching(NAME, read)
    settings = Ad2Settings(rounds=int(read["rounds"]), radius=float(read["radius"]), weight=float(read["weight"]))
    if settings.rounds < 1 or not 0 < settings.radius < float("inf") or settings.weight < 0:
        raise PlanError(
            f"pass {NAME}: rounds = {settings.rounds} must be at least 1, radius = {settings.radius} above 0, and "
            f"weight = {settings.weight} at least 0"
        )
    if not isfinite(settings.weight):
        raise PlanError(f"pass {NAME}: weight = {settings.weight} must be a finite number")
    return settings


def _refusal(plan: Plan) -> str | None:
    settings_of(plan)
    if plan.precision.param == "fp16":
        return "gradients of embeddings are taken without a loss scale; use bf16 or fp32"
    return divided_reason(plan) or staged_reason(plan)


def _costs(plan: Plan, graph: Graph) -> MethodCosts:
    """A forward and an input gradient for each round; then a forward of both models and a backward."""
    rounds = settings_of(plan).rounds
    return MethodCosts(
        teacher_forwards=2.0,
        forwards=rounds + 1.0,
        input_gradients=float(rounds),
        backwards=1.0,
        logits=3.0,
    )


_DEFAULT = Ad2Settings()

METHOD = Method(
    name=NAME,
    paper="AD2, adversarial data augmentation for distillation, AAAI 2022",
    about="a model learns from its teacher also at embeddings moved to where the two differ most",
    switch="schedule.passes",
    exactness="statistical",
    missing={
        "rewritten": "rows of a Program stay as they are; a backward runs forwards and backwards of its own",
        "planned": "it changes what is learnt, so that a plan has it where its user says so",
    },
    params=(
        *PARAMS,
        Param(name="rounds", about="steps along the gradient", default=_DEFAULT.rounds),
        Param(name="radius", about="how far a row may move, over its norm", default=_DEFAULT.radius),
        Param(name="weight", about="of the loss on moved rows beside the plain one", default=_DEFAULT.weight),
    ),
    refusal=_refusal,
    resumes=False,
    teaching=_teaching,
    costs=_costs,
)
