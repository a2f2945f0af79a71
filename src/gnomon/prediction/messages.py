"""What pipeline stages send each other: bytes, and the price of a message on the link that it takes.

`Messages` answers for one plan; what depends on fitted numbers (how much longer a network takes, waits) is added by
`step`. Leaves out: when messages are sent (the Program and the clock).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.hardware import Cluster
from gnomon.plans import Plan
from gnomon.prediction.stage import StagePrice
from gnomon.prices.collectives import collective_seconds, p2p_seconds
from gnomon.prices.links import AxisLink, axis_link
from gnomon.sharding import deal
from gnomon.software import Stack


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages between the stages of one plan."""

    plan: Plan
    """The plan."""
    cluster: Cluster
    """The machines."""
    stack: Stack
    """The program, for what a message costs it."""
    stages: tuple[StagePrice, ...]
    """The stages that send and receive."""
    sent: Mapping[tuple[int, int], tuple[tuple[str, str], ...]]
    """(source, target) -> (call, tensor) that is sent."""
    _wires: dict[tuple[int, int], tuple[float, AxisLink | None]] = field(default_factory=dict, repr=False)
    _sizes: dict[tuple[float, AxisLink], float] = field(default_factory=dict, repr=False)
    _links: dict[tuple[tuple[int, ...], tuple[int, ...]], AxisLink | None] = field(default_factory=dict, repr=False)

    def wire(self, source: int, target: int) -> tuple[float, AxisLink | None]:
        """(price of a microbatch's message, what it runs over); nothing where no two ranks are on different devices.
        UnpricedError where nothing is sent."""
        if (source, target) not in self.sent:
            raise UnpricedError(
                f"stage {source} sends to stage {target}, but no tensor of the graph goes from one to the other"
            )
        if (source, target) not in self._wires:
            self._wires[source, target] = self._wire(source, target)
        return self._wires[source, target]

    def _wire(self, source: int, target: int) -> tuple[float, AxisLink | None]:
        """(price of a message, what it runs over); nothing where no two ranks are on different devices."""
        link = self._between(source, target)
        if link is None:
            return 0.0, None
        tp = self.plan.stage_mesh(source).tp
        size = self.bytes_of((source, target)) * self._spread(source, target)
        if self.stack.messages.p2p_bytes_per_s is not None:
            return size / self.stack.messages.p2p_bytes_per_s, None
        if not self.stack.messages.p2p_partitioned or tp == 1 or self.plan.layout.sequence_parallel:
            return self._p2p(size, link), link
        gathered = float(collective_seconds("all_gather", size, self.stages[target].links["tp"]))
        return self._p2p(size / tp, link) + gathered, link

    def carried(self, size: float, source: int, target: int) -> tuple[float, AxisLink | None]:
        """(price of so many bytes between ranks of two stages, what they run over)."""
        link = self._between(source, target)
        return (0.0, None) if link is None else (self._p2p(size, link), link)

    def _p2p(self, size: float, link: AxisLink) -> float:
        if (size, link) not in self._sizes:
            self._sizes[size, link] = float(p2p_seconds(size, link))
        return self._sizes[size, link]

    def _between(self, source: int, target: int) -> AxisLink | None:
        """What messages between two stages run over; None where no two ranks are on different devices. Of stages with
        other numbers of ranks, each rank of the smaller one counts with one partner."""
        one, two = self.stages[source].ranks, self.stages[target].ranks
        if (one, two) not in self._links:
            self._links[one, two] = self._link(one, two)
        return self._links[one, two]

    def _link(self, one: tuple[int, ...], two: tuple[int, ...]) -> AxisLink | None:
        count = min(len(one), len(two))
        ranks = one[:: len(one) // count][:count], two[:: len(two) // count][:count]
        ends = self.plan.places(np.array(ranks, np.int64).T)
        ends = ends[ends[:, 0] != ends[:, 1]]
        return axis_link(self.cluster, ends) if len(ends) else None

    def _spread(self, source: int, target: int) -> float:
        """The most that one rank sends or receives of a microbatch between two stages, over what the source's priced
        rank holds: above 1 where stages have other meshes or shares, so that messages of several meet at one."""
        one, two = self.plan.stage_mesh(source), self.plan.stage_mesh(target)
        orders = (
            [stage.shares for stage in (self.plan.stages[source], self.plan.stages[target])] if self.plan.stages else []
        )
        if one == two and len(set(orders)) <= 1:
            return 1.0
        dealt = [deal(1, m.data_ranks, s) for m, s in zip((one, two), orders or ((), ()), strict=True)]
        member = self.stages[source].ranks.index(self.stages[source].members[0])
        dealt_here = dealt[0][one.dense.coordinate(member, "dp")]
        # without sequence parallelism every tensor-parallel rank holds, and gets, the whole
        divided = self.plan.layout.sequence_parallel
        parts = [m.cp * (m.tp if divided else 1) for m in (one, two)]
        # A rank with the whole sends it to each of the ceil(tp of the target / tp of the source) ranks that it serves.
        sends = max(dealt[0]) / parts[0] * (1 if divided else max(1, -(-two.tp // one.tp)))
        return float(max(sends, max(dealt[1]) / parts[1]) / (dealt_here / parts[0]))

    def bytes_of(self, pair: tuple[int, int]) -> int:
        """Bytes that one rank of the source sends a rank of the target for one microbatch."""
        source = self.stages[pair[0]]
        by_label = {layer.label: price for price, layers in source.layers for layer in layers}
        total = 0
        for label, tensor in self.sent[pair]:
            maker = by_label.get(label)
            if maker is None:  # passes through: it lies as its maker made it
                maker = next(
                    price
                    for stage in self.stages
                    for price, layers in stage.layers
                    if any(layer.label == label for layer in layers)
                )
            total += int(maker.sharded.local_bytes[tensor])
        return total
