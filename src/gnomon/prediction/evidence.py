"""What a prediction rests on, as a few numbers: how its time divides, and how well stack and device are known.

`evidence(pricing, step_s)` returns an `Evidence`; a band's width (`band`) follows from it. Cheap: shares come from the
prices of one microbatch of the busiest stage, not from the clock. Leaves out what was assumed about the machines.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import log2

from gnomon import orders
from gnomon.prediction.step import Pricing
from gnomon.prices.curves import is_measured
from gnomon.prices.fitted import Known, evidence_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the width of a band depends on."""

    known: Known
    """What the stack's rates on the device rest on; of several devices, the least."""
    own_runs: int
    """Runs of the user's own that the rates were fitted to."""
    launch: float
    """Share of a microbatch's forward and backward in which kernels wait for the host."""
    communication: float
    """Share of it in which kernels wait for collectives inside layers."""
    waiting: float
    """Share of the step outside the busiest stage's forwards and backwards: bubble, messages, reductions, update."""
    crossing: bool
    """Several nodes."""
    nodes: float
    """Doublings of one node: log2 of how many there are."""
    tensor_across: bool
    """Tensor-parallel groups reach over several nodes."""
    debugged: bool
    """Collectives are checked, as when a job is debugged, and messages between stages are not known to be polled."""
    routed: bool
    """Mixtures of experts."""
    eight_bit: bool
    """Matmuls in eight bits or fewer."""
    measured: bool
    """There are kernel measurements of every device's generation."""
    opaque: float = 0.0
    """Share of a microbatch's forward and backward in kernels of ops without a rule of their own."""

    def __post_init__(self) -> None:
        for name in ("launch", "communication", "waiting", "opaque"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a share, got {getattr(self, name)!r}")
        if self.nodes < 0:
            raise ValueError(f"nodes must be at least 0 doublings, got {self.nodes!r}")


LEAST: tuple[Known, ...] = ("nothing", "device", "stack elsewhere", "stack", "own")
"""From the least that is known to the most."""


def evidence(pricing: Pricing, step_s: float) -> Evidence:
    """What a step of so many seconds under these prices rests on."""
    backward = ("I", "W") if orders.find(pricing.plan.schedule.name).split else ("B",)
    spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for block, (stage, _) in enumerate(pricing.blocks):
        for kind in ("F", *backward):
            for part, seconds in pricing.compute.parts(kind, pricing.alike[block]).items():
                spent[_rank(pricing, stage)][part] += seconds
    # Virtual stages of one rank are added up: the busiest is a rank.
    busiest = max(spent.values(), key=lambda parts: sum(parts.values()))
    whole = sum(busiest.values())
    nodes = sum(group.count for group in pricing.cluster.groups)
    devices = {stage.device.name: stage.device for stage in pricing.stages}.values()
    launch = _share(busiest["launch"], whole)
    return Evidence(
        known=min((evidence_of(pricing.stack, device, pricing.numbers) for device in devices), key=LEAST.index),
        own_runs=pricing.stack.own.runs if pricing.stack.own else 0,
        launch=launch,
        communication=_share(sum(s for part, s in busiest.items() if part in pricing.stages[0].links), whole),
        waiting=_share(step_s - whole * pricing.count, step_s),
        crossing=nodes > 1,
        nodes=log2(nodes),
        tensor_across=any("tp" in stage.links and stage.links["tp"].nodes > 1 for stage in pricing.stages),
        debugged=bool(pricing.stack.launch.checked_collectives) and pricing.stack.messages.p2p_poll_s is None,
        routed=any(dim.name.split(".")[-1] == "experts" for block in pricing.graph.blocks for dim in block.dims),
        eight_bit=pricing.plan.precision.fp8 is not None,
        measured=all(is_measured(device) for device in devices),
        # From a share of the device's seconds to one of all: waits for the host take `launch` of these.
        opaque=opaque_share(pricing) * (1 - launch),
    )


def opaque_share(pricing: Pricing) -> float:
    """Share of the busiest stage's seconds (kernels and exposed collectives) that ops without a rule of their own
    take."""
    if not any(op.is_opaque for block in pricing.graph.blocks for op in block.ops):
        return 0.0
    phases = ("forward", "input_grad", "weight_grad", "recompute")
    stages = [[stage.phase(name) for name in phases] for stage in pricing.stages]
    spent = max(stages, key=lambda stage: sum(phase.device_s for phase in stage))
    return _share(sum(phase.opaque_s for phase in spent), sum(phase.device_s for phase in spent))


def _rank(pricing: Pricing, stage: int) -> int:
    """The first rank of a stage: virtual stages share it."""
    return pricing.stages[stage].ranks[0]


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0
