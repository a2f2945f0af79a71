"""What checkpoints in memory cost: bytes of a rank's state, sent to the next rank, and its own copy.

`memory_copies(prediction, every)` prices what `runtime.checkpoint.in_memory` does after each `every`-th step: a message
of the state from each rank to the next (the last one's to the first), and a copy of it as well. Training waits for
both. Leaves out the few bytes of random numbers and counts, and the two small messages before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from gnomon.errors import InputError
from gnomon.prediction.predict import Prediction
from gnomon.prices.collectives import p2p_seconds
from gnomon.prices.links import axis_link
from gnomon.units import show_bytes, show_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCopies:
    """Copies of each rank's state in another rank's memory, as one plan makes them."""

    every: int
    """Steps between two copies."""
    state_bytes: int
    """Parameters that it updates, master copies and optimizer states, of the rank that has most."""
    sent_bytes: int
    """That it sends: 0 where other ranks hold the same."""
    send_s: float
    """Of the message, all ranks sending at once."""
    copy_s: float
    """Of its own copy."""

    @property
    def copy_every_s(self) -> float:
        """Seconds that training waits, every `every` steps."""
        return self.send_s + self.copy_s

    @property
    def step_s(self) -> float:
        """Seconds that a step takes longer, on average."""
        return self.copy_every_s / self.every

    @property
    def held_bytes(self) -> int:
        """Memory of a rank: its own copy and two places for the rank before it."""
        return self.state_bytes + 2 * self.sent_bytes

    @property
    def sentence(self) -> str:
        """The same as a sentence for people."""
        to = f"{show_bytes(self.sent_bytes)} to the next rank" if self.sent_bytes else "nothing (others hold the same)"
        return (
            f"copies in memory every {self.every} steps: a rank sends {to}, {show_seconds(self.copy_every_s)} in which "
            f"training waits, {show_seconds(self.step_s)} a step; they take {show_bytes(self.held_bytes)} a rank "
            f"beside the peak"
        )


def memory_copies(prediction: Prediction, every: int) -> MemoryCopies:
    """Prices the copies. InputError for less than one step between copies; UnpricedError for a link without a price."""
    if every < 1:
        raise InputError(f"copies every {every} steps: give 1 or more")
    plan, cluster = prediction.plan, prediction.pricing.cluster
    mesh, zero = plan.stage_mesh(0), plan.optimizer.zero
    shards = mesh.data_ranks // mesh.dp_replicate if zero in (1, 2) else 1
    by_ranks = Counter[tuple[int, ...]]()
    for stage in prediction.pricing.stages:  # a rank may hold several
        sizes = stage.static_bytes()
        by_ranks[stage.ranks] += -(-sizes["parameters"] // shards) + sizes["master"] + sizes["states"]
    state = max(by_ranks.values())
    alike = mesh.dp_replicate > 1 or (zero == 0 and mesh.data_ranks > 1)
    devices = plan.device_of
    pairs = [(devices[r], devices[(r + 1) % len(devices)]) for r in range(plan.world_size)]
    ends = np.array([pair for pair in pairs if pair[0] != pair[1]]).reshape(-1, 2)
    sent = 0 if alike or plan.world_size == 1 else state
    send_s = float(p2p_seconds(sent, axis_link(cluster, ends))) if sent and len(ends) else 0.0
    rate = min(group.node.device.memory_bytes_per_s for group in cluster.groups)
    return MemoryCopies(every=every, state_bytes=state, sent_bytes=sent, send_s=send_s, copy_s=2 * state / rate)
