"""Logical workers that take turns on a device (EasyScale): each device's step, priced as a plan of its own.

`device_turns(plan, count)` gives for every kind of device-sharing the plan of its processes, where a worker's turn is a
round of the schedule, and what is parked between turns. A step of a device is the turns of its workers, a SWITCH after
each but the last (its gradient is added to another worker's, in the order of `methods.easyscale`), the exchange of sums
between processes, and one update. Leaves out state that the host keeps for a worker (random numbers, place in the data)
and gradients parked in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gnomon.methods.easyscale import Node, merged, nodes_of
from gnomon.plans import Mesh, Plan
from gnomon.prediction.stage import StagePrice, width
from gnomon.prices.curves import curves_for
from gnomon.prices.optimizer import gradient_seconds
from gnomon.prices.stream import stream_seconds
from gnomon.program import Kind, Program, effects
from gnomon.program.rows import Inserted, Rows, insert

SWITCH = "SWITCH"
"""Kind of the row between two turns."""

_SWITCH = Kind(name=SWITCH, effects=effects("accumulate G"))

NOTE = (
    "ranks that share a device take turns: a step is their turns, the additions of their gradients and one exchange "
    "between processes, not overlapped"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What a process does with its workers."""

    process: int
    """Rank of the plan of processes."""
    workers: int
    """How many take turns."""
    sums: int
    """Sums of gradients that it gives to the exchange: 1 where its workers are next to each other in the tree."""
    parked: int
    """Gradients of other workers, or sums of them, that are held at most while one computes."""

    @property
    def additions(self) -> int:
        """Prices adding one worker's gradient to another's, before the exchange."""
        return self.workers - self.sums

    @property
    def exchange(self) -> float:
        """Bytes of the exchange over those of a ring all-reduce: half of that is every sum sent to where it is
        finished, half the total gathered."""
        return (1 + self.sums) / 2

    def switch_s(self, stage: StagePrice) -> float:
        """Device seconds of a switch: the additions, spread over the switches."""
        elements, precision = sum(stage.elements), stage.plan.precision
        added = gradient_seconds(elements, precision, stage.device, begins=0.0)
        if added is not None:
            return float(added.device_s) * self.additions / max(self.workers - 1, 1)
        size, curves = elements * width(precision.grad), curves_for(stage.device)
        seconds = stream_seconds(2 * size, size, stage.device, curves, kernels=stage.num_tensors)
        return float(seconds) * self.additions / max(self.workers - 1, 1)

    def parked_bytes(self, stage: StagePrice) -> int:
        """Bytes of what is parked."""
        return self.parked * sum(stage.elements) * width(stage.plan.precision.grad)


def shares_devices(plan: Plan) -> bool:
    """Whether ranks of the plan take turns on a device."""
    return plan.num_devices < plan.world_size


def device_turns(plan: Plan, count: int) -> tuple[tuple[Plan, Turns], ...]:
    """(plan of one rank a device whose rounds are the turns of this device's workers, those turns) of each device.

    count: microbatches of a worker.
    """
    devices = tuple(dict.fromkeys(plan.device_of))
    listed = []
    for process, device in enumerate(devices):
        own = [worker for worker, place in enumerate(plan.device_of) if place == device]
        turns = Turns(
            process=process,
            workers=len(own),
            sums=len(nodes_of(own, plan.world_size)),
            parked=_parked(own, plan.world_size),
        )
        schedule = replace(
            plan.schedule,
            micro_batch_size=None,
            num_microbatches=count * len(own),
            rounds=plan.schedule.rounds * len(own),
        )
        # The exchange comes after the last turn (NOTE).
        overlap = replace(plan.overlap, grad_reduce=False)
        processes = Mesh(dp_replicate=len(devices))
        listed.append(
            (
                replace(plan, mesh=processes, stages=(), schedule=schedule, overlap=overlap, placement=devices),
                turns,
            )
        )
    return tuple(listed)


def _parked(own: list[int], total: int) -> int:
    """Sums that a process holds at most besides the gradient that is being made, as it adds up what it can."""
    parked: set[Node] = set()
    most = 0
    for worker in own:
        most = max(most, len(parked))
        parked = merged(parked, worker, total)
    return max(most, len(parked) if len(parked) > 1 else 0)


def with_switches(program: Program, turns: Turns) -> Program:
    """The Program of a device with a SWITCH after each turn but the last."""
    rows = Rows.of(program)
    kinds = (*rows.kinds, _SWITCH)
    units = rows.num_units // turns.workers
    backwards = np.flatnonzero(rows.is_kind("B", "W"))
    # Rounds number their units one after another, so unit // units is the turn.
    lasts = [int(backwards[rows.unit[backwards] // units == turn].max()) for turn in range(turns.workers - 1)]
    anchor = np.array(lasts, np.int64)
    part = Inserted(
        anchor=anchor,
        kind=np.full(len(anchor), len(rows.kinds), np.int8),
        stage=rows.stage[anchor],
        unit=np.full(len(anchor), -1, np.int32),
    )
    return insert(rows, [part], kinds).like(program)
