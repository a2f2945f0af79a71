"""Asynchronous tensor parallelism: matmuls next to a collective are chunked so that the collective overlaps.

This file says what the method is. Prices know what a chunked matmul and its ring of messages take; the Program at the
grain of single matmuls is `lowering.async_tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnomon.methods.method import Method
from gnomon.plans import Plan, Split


def _variants(plan: Plan) -> Iterator[Plan]:
    if plan.mesh.tp > 1 and plan.layout.sequence_parallel and not plan.overlap.splits:
        splits = (Split(op="*", dim="seq", parts=plan.mesh.tp),)
        yield replace(plan, overlap=replace(plan.overlap, splits=splits))


METHOD = Method(
    name="async_tp",
    paper="Collective matmul, Wang et al., ASPLOS 2023",
    about="TP matmuls are chunked so that their all-gathers and reduce-scatters overlap",
    switch="overlap.splits",
    exactness="up to the order of sums",
    on=lambda plan: bool(plan.overlap.splits),
    variants=_variants,
    searched=True,
)
