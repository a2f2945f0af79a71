"""What a plan that offloads holds in a node's host memory, against what the node has.

`host_memory(prediction)` counts optimizer states, master copies and gradients of an update on the host, the updated
parameters that go back, and parameters and activations that wait there; of parameters on a disk those on their way.
Leaves out the pages of the program itself, data loading, and copies that libraries pin on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gnomon.prediction.predict import Prediction
from gnomon.prediction.stage import StagePrice, width
from gnomon.sharding.parameters import waiting_bytes

ON_THE_WAY = 3
"""Layers whose parameters are in host memory between a disk and the device: as they are updated, one under way and two
that are being written (`runtime.parameter_files`); in forward and backward fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Of the node that holds most."""

    bytes: int
    """Held, at most: activations of as many microbatches as there are stages."""
    limit_bytes: int | None
    """What the node has; None where nobody says."""

    @property
    def fits(self) -> bool:
        """Whether it is known not to be too much."""
        return self.limit_bytes is None or self.bytes <= self.limit_bytes


def host_memory(prediction: Prediction) -> HostMemory:
    """Host memory of a prediction's plan; 0 bytes where nothing is offloaded."""
    pricing = prediction.pricing
    most = max((_rank_bytes(prediction, stage) for stage in pricing.stages), default=0)
    nodes = pricing.cluster.nodes
    known = [node.host_memory_bytes for node in nodes if node.host_memory_bytes is not None]
    limit = min(known) if len(known) == len(nodes) else None
    return HostMemory(bytes=most * max(node.count for node in nodes), limit_bytes=limit)


def _rank_bytes(prediction: Prediction, stage: StagePrice) -> int:
    pricing, plan = prediction.pricing, stage.plan
    alive = min(pricing.count, plan.num_stages)
    total = alive * sum(layer.offloaded_bytes * len(labels) for layer, labels in stage.layers)
    if plan.optimizer.offload is not None:
        here = replace(plan, optimizer=replace(plan.optimizer, offload=None))
        own, whole = stage.static_bytes(), replace(stage, plan=here).static_bytes()
        total += sum(whole[name] - own[name] for name in ("master", "states"))
        updated = stage.updated_elements() * plan.optimizer.offload.fraction
        back = 0 if plan.optimizer.offload_parameters else width(plan.precision.param)
        total += int(updated * (width(plan.precision.grad) + back))
    if plan.optimizer.offload_parameters and plan.optimizer.parameter_tier == "disk":
        sizes = (waiting_bytes(layer.sharded, stage.mesh, plan.precision) for layer, _ in stage.layers)
        total += ON_THE_WAY * max(sizes)
    elif plan.optimizer.offload_parameters:
        here = replace(plan, optimizer=replace(plan.optimizer, offload_parameters=False))
        total += replace(stage, plan=here).static_bytes()["parameters"]
    return total
