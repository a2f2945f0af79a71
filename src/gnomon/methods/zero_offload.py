"""ZeRO-Offload: optimizer states and the update in host memory, gradients down as they are made, parameters back.

This file says what the method is; lowering makes its rows (`lowering.streaming`, `lowering.offload`). Leaves out the
delayed update of the same paper, which is a method of its own, and activations and parameters on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnomon.methods.method import Method
from gnomon.plans import Offload, Plan


def _variants(plan: Plan) -> Iterator[Plan]:
    if not plan.optimizer.clip and plan.optimizer.offload is None:
        yield replace(plan, optimizer=replace(plan.optimizer, offload=Offload()))


METHOD = Method(
    name="zero_offload",
    paper="ZeRO-Offload, Ren et al., ATC 2021",
    about="optimizer states and the update in host memory, gradients sent there as they are made",
    switch="optimizer.offload",
    exactness="up to the order of sums",
    on=lambda plan: plan.optimizer.offload is not None,
    variants=_variants,
    searched=True,
)
