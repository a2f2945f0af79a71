"""ZeRO-Offload's delayed parameter update: the host updates with the gradients of the step before, alongside this step.

This file says what the method is; lowering makes its rows (`lowering.delayed_update`), `runtime.step.host_update` runs
them. It changes the mathematics, so no search turns it on unless it is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnomon.methods.method import Method
from gnomon.plans import Offload, Plan


def _refusal(plan: Plan) -> str | None:
    if plan.optimizer.offload is None:
        return "the update that comes late is one on the host; set optimizer.offload too"
    if plan.optimizer.offload.fraction < 1 and plan.optimizer.clip:
        return (
            "layers that are updated on the device are updated in their own step, and the norm to clip to would be of "
            "two steps; set optimizer.offload.fraction = 1, or optimizer.clip = false"
        )
    return None


def _variants(plan: Plan) -> Iterator[Plan]:
    if not plan.optimizer.clip and plan.optimizer.delay == 0:
        offload = plan.optimizer.offload or Offload()
        yield replace(plan, optimizer=replace(plan.optimizer, offload=offload, delay=1))


METHOD = Method(
    name="delayed_update",
    paper="ZeRO-Offload's delayed parameter update, Ren et al., ATC 2021",
    about="the host's update overlaps with the next step, whose gradients are one step stale",
    switch="optimizer.delay",
    exactness="statistical",
    on=lambda plan: plan.optimizer.delay > 0,
    refusal=_refusal,
    variants=_variants,
)
