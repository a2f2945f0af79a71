"""What communication takes of a rank's memory besides tensors: groups, and flat buffers.

`communicators` counts the groups that a rank communicates in, whose buffers lie outside the allocator; `flat_bytes` are
buffers so large that none which was freed holds them. Leaves out what each group takes (`prices.allocator`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.prediction.stage import StagePrice, width
from gnomon.prediction.step import Pricing


def communicators(pricing: Pricing, here: Sequence[StagePrice]) -> tuple[int, int]:
    """(groups that a rank communicates in, ranks of its node that it exchanges with in all-to-all)."""
    stage = here[0]
    used: set[tuple[str, ...]] = set()
    for layer in stage.order:
        for phase in (layer.forward, layer.input_grad, layer.weight_grad):
            used |= {(axis,) for axis in phase.comm_s}
        for collective in stage.collectives(layer):
            used.add(tuple(axis for axis in collective.axes if getattr(stage.mesh, axis) > 1))
    pipeline = pricing.plan.num_pipeline_ranks > 1
    norm = pricing.plan.optimizer.clip and pricing.plan.world_size > 1
    # the embedding's group: its gradients, or its parts, are added up over stages
    tied = stage.share is not None or pipeline and _holds_tied(pricing, here)
    exchange = ["ep"] + (["cp"] if pricing.plan.layout.context == "ulysses" else [])
    peers = [stage.links[axis].ranks_per_node - 1 for axis in exchange if (axis,) in used]
    return len(used) + pipeline + norm + tied, max(peers, default=0)


def _holds_tied(pricing: Pricing, here: Sequence[StagePrice]) -> bool:
    """Whether one of these stages shares a parameter with another."""
    numbers = {number for number, stage in enumerate(pricing.stages) if any(stage is other for other in here)}
    return any(numbers & set(holders) for holders in pricing.shared.values())


def flat_bytes(pricing: Pricing, stage: StagePrice) -> int:
    """Tensors so large that no block which activations have left holds them, so that the allocator asks for more: the
    buffer that gradients are reduced through, and a partition's gradients in fp32. They are given back if need be."""
    bucket, precision = pricing.stack.gradients.reduce_bucket_elements, stage.plan.precision
    if bucket is None or pricing.plan.optimizer.zero not in (1, 2) or width(precision.grad) >= 4:
        return 0
    return bucket * width(precision.grad) + stage.updated_elements() * 4
