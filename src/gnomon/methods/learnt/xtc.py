"""XTC: a small model with weights of one or two bits, fewer layers, learnt from a teacher in one stage.

The model begins as `layers` of the teacher. Each forward and backward has its matrices rounded, in groups of a row's
numbers, to -1, 0 and 1 (`ternary`: those above 0.7 of the mean size, times the mean size of these) or to -1 and 1
(`binary`: times the mean size) and the update changes the numbers behind them, by the gradient of the rounded ones (the
straight-through estimator). `none` reduces layers alone. The whole run is taught (`teacher`).

Source: Wu et al., "XTC: Extreme Compression for Pre-trained Transformers Made Simple and Efficient", NeurIPS 2022, and
the quantisers of DeepSpeed's compression (deepspeed/compression/utils.py). Activations are not rounded, which XTC does
to eight bits. Leaves out the arithmetic (`runtime.optim.xtc`, `runtime.step.distillation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gnomon.errors import PlanError
from gnomon.graph import DTYPE_BITS, Graph
from gnomon.late import load_late
from gnomon.methods.learnt.costs import MethodCosts
from gnomon.methods.learnt.teacher import PARAMS, read_teaching
from gnomon.methods.learnt.teaching import Teaching
from gnomon.methods.learnt.trained_weights import compressed, divided_reason, staged_reason
from gnomon.methods.method import Method, Param
from gnomon.plans import Plan

NAME = "xtc"
KINDS = ("ternary", "binary", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class XtcSettings:
    """What the plan asks for of weights."""

    kind: str = "ternary"
    """`ternary`, `binary` or `none`."""
    group: int = 64
    """Numbers of a row that share a scale; 0: the whole row."""


def _teaching(plan: Plan) -> Teaching:
    return read_teaching(NAME, METHOD.read_from(plan))


def settings_of(plan: Plan) -> XtcSettings:
    """What a plan that names the method asks for. PlanError for parameters that mean nothing."""
    read = METHOD.read_from(plan)
    read_teaching(NAME, read)
    settings = XtcSettings(kind=str(read["weights"]), group=int(read["group"]))
    if settings.group < 0 or 0 < settings.group < 8:
        raise PlanError(f"pass {NAME}: group = {settings.group} shares a scale; give 8 or more, or 0 for a whole row")
    return settings


def _refusal(plan: Plan) -> str | None:
    settings_of(plan)
    return divided_reason(plan) or staged_reason(plan)


def _unfit(plan: Plan, graph: Graph) -> str | None:
    group, matrices = settings_of(plan).group, compressed(graph)
    if not matrices:
        return f"{graph.name} has no matrix in a repeated layer"
    odd = ((name, columns) for name, (_, columns) in matrices.items() if group and columns % group)
    return next((f"{name} has {n:,} columns, no multiple of the {group} that share a scale" for name, n in odd), None)


def _storage(plan: Plan) -> Any:
    settings = settings_of(plan)
    if settings.kind == "none":
        return None
    name = f"ternary-g{settings.group}" if settings.group else "ternary"  # which has no 0 where weights are binary
    return load_late("gnomon.storage.names:storage_of")(name)


def _costs(plan: Plan, graph: Graph) -> MethodCosts:
    """Bytes for each weight. An update reads and writes the numbers behind the rounded ones, and rounding reads them
    for the mean size and again to compare; rounded ones are written. Without a master copy the numbers behind are a
    copy of their own, which is kept, and copied there and back."""
    settings, master = settings_of(plan), plan.precision.master
    own = DTYPE_BITS[plan.precision.param] // 8
    width = own if master == "none" else DTYPE_BITS[master] // 8
    rounds = settings.kind != "none"
    copies = 2 * own if master == "none" else 0
    return MethodCosts(
        kept_bytes=float(own) if rounds and master == "none" else 0.0,
        moved_bytes=float(6 * width + own + copies) if rounds else 0.0,
        teacher_forwards=1.0,
        logits=3.0,
    )


METHOD = Method(
    name=NAME,
    paper="XTC, Wu et al., NeurIPS 2022",
    about="weights of one or two bits and fewer layers, learnt from a teacher by a straight-through estimator",
    switch="schedule.passes",
    exactness="statistical",
    missing={
        "rewritten": "rows of a Program stay as they are; a forward runs the teacher too, an update rounds",
        "planned": "it changes what is learnt, so that a plan has it where its user says so",
    },
    params=(
        *PARAMS,
        Param(name="weights", about="ternary, binary, or none for layers alone", default="ternary", choices=KINDS),
        Param(name="group", about="numbers of a row that share a scale; 0: a whole row", default=XtcSettings().group),
        Param(name="layers", about="of the teacher, that the model's begin as, as '1,3,5'", default=""),
        Param(name="hidden", about="weight of the squares between their layers", default=0.0),
    ),
    refusal=_refusal,
    unfit=_unfit,
    resumes=False,
    teaching=_teaching,
    costs=_costs,
    storage=_storage,
)
