"""Mixture-of-Students: a model of experts with fewer layers learns from the whole one, until a given step.

The plan's model is the student. Beside the loss of the text, which counts whole, a token has `alpha` times T^2
KL(teacher || student) at temperature T; after `until` updates that part ends and the teacher no longer runs, as
learning from it to the end hurts (DeepSpeed-MoE, section 4.2). Experts may lie on ranks of ep, whose microbatches each
go through a teacher of their own. Leaves out running it (`runtime.step.distillation`).

Source: Rajbhandari et al. 2022 (DeepSpeed-MoE, ICML), section 4.2; deepspeedai/Megatron-DeepSpeed,
megatron/utils.py calculate_mos_loss (kd_alpha_ce, kd_temp, kd_beta_ce).
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from gnomon.errors import PlanError
from gnomon.methods.learnt.costs import MethodCosts
from gnomon.methods.learnt.teacher import PARAMS, read_teaching
from gnomon.methods.learnt.teaching import Teaching
from gnomon.methods.learnt.trained_weights import staged_reason
from gnomon.methods.method import Method, Param
from gnomon.plans import Plan

NAME = "mos"


def _teaching(plan: Plan) -> Teaching:
    """PlanError for parameters that mean nothing."""
    read = METHOD.read_from(plan)
    alpha, until = float(read["alpha"]), int(read["until"])
    if not isfinite(alpha) or alpha < 0 or until < 0:
        raise PlanError(f"pass {NAME}: alpha = {alpha} and until = {until} are numbers of at least 0")
    return replace(read_teaching(NAME, {**read, "share": 0.0}), share=alpha, added=True, until=until)


def _refusal(plan: Plan) -> str | None:
    _teaching(plan)
    for axis in ("tp", "cp", "etp"):
        if any(getattr(plan.stage_mesh(stage), axis) > 1 for stage in range(plan.num_stages)):
            return f"it compares whole logits of whole sequences, which {axis} divides; use {axis} = 1"
    if plan.optimizer.zero == 3:
        return "it looks at the whole model's forward, which ZeRO 3 runs layer by layer; use zero of 2 or less"
    if plan.schedule.vocabulary != "ends":
        return "it is not made for divided vocabularies; use schedule.vocabulary = 'ends'"
    return staged_reason(plan)


METHOD = Method(
    name=NAME,
    paper="Mixture-of-Students of DeepSpeed-MoE, Rajbhandari et al., ICML 2022",
    about="a model of experts with fewer layers learns from the whole one, until a given step",
    switch="schedule.passes",
    exactness="statistical",
    missing={
        "rewritten": "rows of a Program stay as they are; a forward runs the teacher too",
        "planned": "it changes what is learnt, so that a plan has it where its user says so",
    },
    params=(
        *(param for param in PARAMS if param.name != "share"),
        Param(name="alpha", about="weight of the comparison with the teacher, beside the text's loss", default=1.0),
        Param(name="until", about="updates after which the teacher is left out; 0: none", default=0),
        Param(name="layers", about="of the teacher, that the model's begin as, as '1,3,5'", default=""),
    ),
    refusal=_refusal,
    teaching=_teaching,
    costs=lambda plan, graph: MethodCosts(teacher_forwards=1.0, logits=3.0),
)
