"""DisCo: gradient buckets and the fusion of what computes them, chosen together by simulated search.

This file says what the method is. Lowering makes its rows (`lowering.gradient_buckets`), `search.refinement` tries the
sizes that cut a plan's layers differently and then cuts and actions of unequal sizes (`bucket_cuts`), and the
simulator, which plays all-reduces alongside backward, judges them. Operations that are fused are layers here: one
action computes several, and their gradients are there only at its end. Left out: the fusion of kernels within a layer,
which delays no reduction, since a layer's gradients are reduced together. Source: Yi et al. 2022 (DisCo, TPDS).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnomon.methods.method import Method
from gnomon.plans import Plan

USUAL = 25 * 2**20
"""Bytes, as in torch's DistributedDataParallel."""


def _variants(plan: Plan) -> Iterator[Plan]:
    overlap = plan.overlap
    if plan.mesh.data_ranks > 1 and plan.optimizer.zero < 3 and overlap.grad_reduce and not overlap.in_buckets:
        yield replace(plan, overlap=replace(overlap, bucket_bytes=USUAL))


METHOD = Method(
    name="disco",
    paper="DisCo, Yi et al., TPDS 2022",
    about="gradient buckets, and layers that one action computes, chosen together by simulated search",
    switch="overlap.bucket_bytes",
    exactness="up to the order of sums",
    on=lambda plan: plan.overlap.in_buckets,
    variants=_variants,
    searched=True,
)
