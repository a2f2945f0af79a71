"""What `gnomon plan -o` and `--try` write of a plan that was found: a `PlanFile` with what it is for.

`plan_file(...)` returns it. Leaves out writing it (`plans.save_plan_file`) and plans that the user wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from typing import NamedTuple

from gnomon.late import load_late
from gnomon.plans import Plan, PlanFile, Predicted, Workload
from gnomon.prediction import Prediction
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.software import Stack


class For(NamedTuple):
    """What a plan is for, by the names under which it was asked."""

    model: str
    """The model, as the user named it."""
    on: str
    """The machines, as the user named them."""
    stack: str | None
    """The program, as the user named it; None where none was."""


def plan_file(
    named: For,
    workload: Workload,
    stack: Stack,
    prediction: Prediction,
    assumed: Sequence[str],
    *,
    others: Iterable[Plan],
    too_large: tuple[Plan, ...] = (),
) -> PlanFile:
    """The file of a predicted plan. others: plans that come after it, of which it may be one. too_large: faster plans
    that do not fit. A stack that was read from a file is named by its path, any other by its name."""
    plan, stack_name = prediction.plan, named.stack or ""
    known = "" if stack is PLAIN_STACK else stack.name
    return PlanFile(
        model=named.model,
        on=named.on,
        stack=stack_name if stack_name.endswith(".toml") else known,
        workload=workload,
        plan=plan,
        predicted=Predicted(
            step_s=prediction.step_s,
            peak_memory_bytes=prediction.tightest.peak_bytes,
            tokens_per_s=prediction.tokens_per_s_per_device * plan.num_devices,
            made=f"gnomon {load_late('gnomon:__version__')}, {date.today().isoformat()}",
            assumptions=(*assumed, *prediction.assumptions),
        ),
        runners_up=tuple(other for other in dict.fromkeys(others) if other != plan),
        too_large=too_large,
    )
