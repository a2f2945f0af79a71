"""What `gnomon plan -o` and `--try` write of a plan that was found: a `PlanFile` with what it is for.

`plan_file(...)` returns it. Leaves out writing it (`plans.save_plan_file`) and plans that the user wrote.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from datetime import date

from gnomon.late import load_late
from gnomon.plans import Plan, PlanFile, Predicted, Workload
from gnomon.prediction import Prediction
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.software import Stack


def plan_file(
    options: argparse.Namespace,
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
    plan, given = prediction.plan, options.stack or ""
    named = "" if stack is PLAIN_STACK else stack.name
    return PlanFile(
        model=options.model,
        on=options.on,
        stack=given if given.endswith(".toml") else named,
        workload=workload,
        plan=plan,
        predicted=Predicted(
            step_s=prediction.step_s,
            peak_memory_bytes=prediction.tightest.peak_bytes,
            tokens_per_s=prediction.tokens_per_s_per_device * len(set(plan.device_of)),
            made=f"gnomon {load_late('gnomon:__version__')}, {date.today().isoformat()}",
            assumptions=(*assumed, *prediction.assumptions),
        ),
        runners_up=tuple(other for other in dict.fromkeys(others) if other != plan),
        too_large=too_large,
    )
