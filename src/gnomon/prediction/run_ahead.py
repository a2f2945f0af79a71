"""How far a host runs ahead of its device, and the memory that this holds.

c10d marks tensors of a collective for NCCL's stream (`record_stream`, PyTorch before 2.8), so the caching allocator
cannot give their memory out again before the device has run that collective. A host that waits for nothing issues
launches until the queue is full; by then many layers' tensors are held that a host in step with its device would reuse
one after the other. Reserved bytes grow by it, allocated bytes do not, and a device that is full takes it back (the
allocator waits for the device before it fails). In a pipeline a few are held even where the host is in step, the first
stage's host is ahead by its warm-up, and those of several microbatches leave gaps between them. Leaves out messages
between stages and collectives of parameters.
"""

from __future__ import annotations

from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.step import Pricing
from gnomon.prices.allocator import HELD_IN_STEP, SPLIT_SHARE

QUEUE_LAUNCHES = 1024
"""Launches that a stream takes before the next one blocks the host. Source: about 1000 measured
(forums.developer.nvidia.com 68937, 2018); not documented."""


def held_by_streams(pricing: Pricing, block: int) -> int:
    """Bytes on one rank that collectives inside the layers behind one of the Program's stages still hold when the host
    has issued a forward; 0 for a stack whose collectives hold nothing."""
    per_tensor = pricing.stack.launch.held_launches
    if per_tensor is None:
        return 0
    stage, _ = pricing.blocks[block]
    layers = pricing.stages[stage].order[slice(*pricing.span(block))]
    sizes = [size for layer in layers for size in _reduced(layer)]
    if not sizes:
        return 0
    least = HELD_IN_STEP.value if pricing.plan.num_pipeline_ranks > 1 else 0
    return round(max(min(QUEUE_LAUNCHES / per_tensor, _lead(pricing, block) * len(sizes)), least) * max(sizes))


def split_by_microbatches(pricing: Pricing, activations: int) -> int:
    """Bytes between the activations of microbatches under way that the allocator cannot use, for the same stacks."""
    pipeline = pricing.plan.num_pipeline_ranks > 1 and pricing.stack.launch.held_launches is not None
    return round(SPLIT_SHARE.value * activations) if pipeline else 0


def _reduced(layer: LayerPrice) -> list[int]:
    """Bytes of what each collective of a forward reduces: outputs that nothing else reads."""
    return [
        int(collective.bytes)
        for collective in layer.sharded.forward
        if collective.kind in ("reduce_scatter", "all_reduce") and not collective.inside
    ]


def _lead(pricing: Pricing, block: int) -> float:
    """How far the host gets ahead before it waits for the device, in forwards of a microbatch.

    A stage of a pipeline waits for the message before each forward, but for the first, which issues those of its
    warm-up at once: while its device runs one of them and waits for the next stage to take what it sends, the others
    are issued, however slow the host is, unless it sleeps until each message is taken. Without stages it waits once a
    step, and a backward launches about twice as much as a forward.
    """
    ahead = max(1 - pricing.compute.host_s("F", block) / max(pricing.compute.device_s("F", block), 1e-12), 0.0)
    pipeline = pricing.plan.num_pipeline_ranks
    if pipeline == 1:
        # In units of a forward's launches: all of the step but its last backward.
        return ahead * (3 * pricing.count - 2)
    if pricing.blocks[block][0] > 0:
        return ahead
    issued = min(pipeline - 1, pricing.count) - 1 if pricing.stack.messages.p2p_poll_s is None else 0
    return max(ahead * min(pipeline, pricing.count), issued)
