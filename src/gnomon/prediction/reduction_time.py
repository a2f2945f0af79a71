"""Seconds of collectives of parameters and gradients: what of them compute does not hide.

Where the Program's stages are whole stages, a collective that goes bucket by bucket, overlapped with compute, is priced
as what is exposed of it; where they are layers, it is priced whole and the clock shows what overlaps. Leaves out
collectives within layers (`compute_time`) and the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from gnomon import orders
from gnomon.errors import UnpricedError
from gnomon.graph import DTYPE_BITS
from gnomon.prediction.compute_time import ComputeTime
from gnomon.prediction.priced import PricedStages
from gnomon.prediction.stage import GROUPS, StagePrice
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.host import LAUNCH_S, check_s
from gnomon.prices.links import AxisLink, axis_link
from gnomon.sharding import ParameterCollective

WANTED = {
    "AR": ("all_reduce", ("after_backward",)),
    "REDUCE_GRAD": ("reduce_scatter", ("after_backward",)),
    "UNSHARD": ("all_gather", ("before_forward", "after_step")),
}
"""Kind of action -> (collective, when)."""


Prices = dict[tuple[str, int, int], list[tuple[float, AxisLink]]]
"""(kind, the Program's stage, buckets) -> (price, link) on each group of ranks. No fitted number is in them."""


class ReductionTime:
    """Seconds of the collectives of parameters and gradients of a plan's Program: a view of its priced stages and of
    what computes alongside."""

    def __init__(self, priced: PricedStages, compute: ComputeTime, prices: Prices) -> None:
        """Takes prices, which are added to as they are asked for: `Pricing` under other numbers shares them."""
        self.priced, self.compute, self.prices = priced, compute, prices

    def wired(self, kind: str, block: int) -> list[tuple[float, AxisLink]]:
        """(price, link) of a whole collective of a stage on each group of ranks that it runs on."""
        self.reduced(kind, block, 1)
        return self.prices[kind, block, 1]

    def tied(self, stage: int) -> float:
        """All-reduce of the gradient of a parameter that other stages hold too."""
        width = DTYPE_BITS[self.priced.plan.precision.reduce] // 8
        total = 0.0
        for name, holders in self.priced.shared.items():
            if stage in holders:
                elements = self._local_elements(stage, name)
                ends = np.array([[self.priced.plan.device_of[self.priced.stages[s].ranks[0]] for s in holders]])
                if len(set(ends[0].tolist())) > 1:
                    total += float(
                        collective_seconds("all_reduce", elements * width, axis_link(self.priced.cluster, ends))
                    )
        return total

    def _local_elements(self, stage: int, name: str) -> int:
        for price, layers in self.priced.stages[stage].held_layers:
            for layer in layers:
                for tensor in price.sharded.block.parameters:
                    if layer.call.parameter_name(tensor.name, layer.index) == name:
                        return int(price.sharded.local_elements[tensor.name])
        raise UnpricedError(f"stage {stage} does not hold parameter {name!r}")

    def parameters(self, kind: str, block: int) -> float:
        """A collective of parameters or gradients: of whole stages, what the computing alongside it leaves of it."""
        buckets, last = 1, 0.0
        # at once: the clock shows what overlaps
        starts_together = self.priced.stack.gradients.bucketed is False or (
            kind == "REDUCE_GRAD" and self._whole_gradients
        )
        if overlapped_s := 0.0 if starts_together else self._overlapped_s(kind, block):
            buckets, last = self._buckets(kind, block)
        seconds = self.reduced(kind, block, buckets)
        ranks = sum(link.ranks for _, link in self.prices[kind, block, buckets])
        checks = buckets * check_s(self.priced.stack, ranks)
        if kind == "AR" and self.priced.plan.optimizer.zero:  # comes after a REDUCE_GRAD, which hides first
            overlapped_s = max(overlapped_s - self.reduced("REDUCE_GRAD", block, buckets), 0.0)
        # the first layer's gather, or the last one's reduction, has nothing alongside it
        least = seconds * max(last, 1 / buckets)
        # A bucket travels while others are computed: of n equal ones that is (n - 1)/n of the computing.
        exposed = max(least, seconds - overlapped_s * (buckets - 1) / buckets)
        if checks:  # the thread that launches the backward waits for them
            idle = (
                max(self.compute.device_s("B", block) - self.compute.host_s("B", block), 0.0) if overlapped_s else 0.0
            )
            exposed = max(exposed, checks - idle + least)
        if kind == "UNSHARD" and self.priced.stack.update.sliced_gather and self.priced.plan.optimizer.zero == 1:
            exposed += LAUNCH_S * ranks * self.priced.stages[self.priced.blocks[block][0]].num_tensors
        return exposed

    def _overlapped_s(self, kind: str, block: int) -> float:
        """Seconds of computing that run alongside a stage's collective when it goes bucket by bucket. On a measured
        machine Gnomon's own runtime runs, whose rows are whole: none."""
        if self.priced.stages[self.priced.blocks[block][0]].device.measured is not None:
            return 0.0
        overlap = self.priced.plan.overlap
        if self.priced.blocks[block][1] >= 0:  # the Program has a row for each layer: the clock shows what overlaps
            return 0.0
        if kind == "UNSHARD":
            return sum(self.compute.parts("F", block).values()) if overlap.param_gather else 0.0
        if not overlap.grad_reduce:
            return 0.0
        overlapped_s = sum(
            self.compute.parts("W" if orders.find(self.priced.plan.schedule.name).split else "B", block).values()
        )
        return overlapped_s

    def _buckets(self, kind: str, block: int) -> tuple[int, float]:
        """(how many, the share of all bytes that is in the last one, where that is more than that of the others)."""
        stage, layers = self.priced.with_parts(block)
        size = self.priced.plan.overlap.bucket_bytes
        if size is None and (size_stated := self.priced.plan.overlap.buckets or self.priced.plan.overlap.fused):
            return self._counted(self.priced.blocks[block][0], size_stated), 0.0
        if size is None:
            return sum(times for _, times in layers), 0.0
        if self.priced.stack.gradients.reducer_buckets:
            return self._filled(stage, size)
        total = sum(c.bytes * n for layer, n in layers for c in stage.collectives(layer) if c.kind == WANTED[kind][0])
        return max(1, -(-total // size)), 0.0

    def _counted(self, stage: int, buckets: Sequence[int]) -> int:
        """Those of a stage, of buckets of so many layers each."""
        counts = [len(price.order) for price in self.priced.stages]
        first = sum(counts[:stage])
        # `accumulate` gives the layers up to the end of each bucket: one counts for the stage that has its end.
        return sum(first < end <= first + counts[stage] for end in accumulate(buckets))

    def _filled(self, stage: StagePrice, size: int) -> tuple[int, float]:
        """Buckets of torch's DistributedDataParallel, filled in the order in which gradients come: a tensor that is
        larger than a bucket fills one, and what the first layer has comes last, with nothing alongside it."""
        width, counts, seen = DTYPE_BITS[self.priced.plan.precision.reduce] // 8, [0], set[str]()
        sizes = []
        for layer, price in zip(stage.in_order, stage.order, strict=True):
            for tensor in price.sharded.block.parameters:
                if (name := layer.call.parameter_name(tensor.name, layer.index)) not in seen:
                    seen.add(name)
                    sizes.append(int(price.sharded.local_elements[tensor.name]) * width)
        for one in reversed(sizes):
            if counts[-1] >= size:
                counts.append(0)
            counts[-1] += one
        return len(counts), counts[-1] / max(sum(counts), 1)

    def reduced(self, kind: str, block: int, buckets: int) -> float:
        """Seconds of a stage's collective in so many buckets, if nothing runs alongside it."""
        if (kind, block, buckets) not in self.prices:
            self.prices[kind, block, buckets] = self._reductions(kind, block, buckets)
        return sum(seconds * self.priced.slower(link) for seconds, link in self.prices[kind, block, buckets])

    def together(self, kind: str, blocks: Sequence[int]) -> float:
        """Seconds of one collective of the gradients of several layers, if nothing runs alongside it."""
        wired = self.wired_together(kind, blocks)
        seconds = sum(seconds * self.priced.slower(link) for seconds, link in wired)
        return seconds + check_s(self.priced.stack, sum(link.ranks for _, link in wired))

    def wired_together(self, kind: str, blocks: Sequence[int]) -> list[tuple[float, AxisLink]]:
        """(price, link) of one collective of several layers' gradients on each group of ranks that it runs on."""
        stage, _ = self.priced.with_parts(blocks[0])
        sizes: dict[tuple[str, ...], int] = {}
        for block in blocks:
            for axes, members in self._grouped(kind, block).items():
                sizes[axes] = sizes.get(axes, 0) + sum(c.bytes * n for c, n in members)
        links = {axes: self._link(stage, axes) for axes in sizes}
        return [(float(collective_seconds(WANTED[kind][0], sizes[axes], link)), link) for axes, link in links.items()]

    def _grouped(self, kind: str, block: int) -> dict[tuple[str, ...], list[tuple[ParameterCollective, int]]]:
        """Mesh axes -> collectives of a stage's layers over them, and how often each is there."""
        stage, layers = self.priced.with_parts(block)
        name, moments = WANTED[kind]
        groups: dict[tuple[str, ...], list[tuple[ParameterCollective, int]]] = {}
        for layer, times in layers:
            for collective in stage.collectives(layer):
                if collective.kind == name and collective.when in moments:
                    groups.setdefault(collective.axes, []).append((collective, times))
        return groups

    def _reductions(self, kind: str, block: int, buckets: int) -> list[tuple[float, AxisLink]]:
        """(price, link) of a stage's collective on each group of ranks that it runs on."""
        stage, name, groups = self.priced.with_parts(block)[0], WANTED[kind][0], self._grouped(kind, block)
        found_s = []
        for axes, members in groups.items():
            size = sum(c.bytes * n for c, n in members) / buckets
            link = self._link(stage, axes)
            how = "all_reduce" if kind == "REDUCE_GRAD" and self._whole_gradients else name
            found_s.append((buckets * float(collective_seconds(how, size, link)), link))
        return found_s

    @property
    def _whole_gradients(self) -> bool:
        """Whether gradients are summed whole, at once, though each rank updates only its part."""
        return self.priced.stack.gradients.whole_gradients is True and self.priced.plan.optimizer.zero == 1

    def _link(self, stage: StagePrice, axes: tuple[str, ...]) -> AxisLink:
        name = "+".join(axes)
        if name not in stage.links:
            raise UnpricedError(f"no link for groups over {name} of stage {stage.stage}; known are {', '.join(GROUPS)}")
        return stage.links[name]
