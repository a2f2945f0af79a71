"""Lower bounds on the step time of blocks over heterogeneous devices, from the cheapest layer on each kind.

They are had before a block's points are looked at. `RoughBounds.of(block)` is below the step of every point of a block;
`rate` bounds the layers that pipeline ranks get through per second of a step.
Leaves out bounds on partial pipelines and points (`pipelines`, `point_bounds`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from gnomon.search.bounds.families import is_split
from gnomon.search.mixed.bounds import Doubles, LayerTables
from gnomon.search.mixed.space import MixedBlock, MixedSpace, equal_layers, stages_of_ranks


class RoughBounds:
    """Bounds of the blocks of one space, before their points are looked at."""

    def __init__(self, tables: LayerTables, space: MixedSpace, *, clip: bool) -> None:
        """clip: whether a step ends with a gradient norm, for which all ranks meet."""
        self.tables, self.space, self.clip = tables, space, clip
        self._rates: dict[object, Doubles] = {}
        self._leasts: dict[object, tuple[float, float]] = {}

    def of(self, block: MixedBlock) -> float:
        """Seconds that a step of any point of the block takes at least."""
        shape, workers = block.shape, self.space.workers(block.shape)
        if shape.form == "replicas":
            return self._of_replicas(block, workers)
        split = any(is_split(schedule) for _, schedule in self.space.variants(shape, block.microbatches))
        size = self.space.global_batch // block.microbatches  # sequences of a microbatch over all workers
        # The worker with most sequences sets a rank's pace: ceil(size / n) of them.
        least = [self._least(block, rank, -(-size // n)) for rank, n in enumerate(workers)]
        if not self.space.equal:
            return self.space.num_layers / self.rate(least, block.microbatches, shape.virtual, split=split)
        # ahead: with clipping, forwards of the first stages of the ranks before, which run before this one's first.
        layers, ahead, most = equal_layers(self.space.num_layers, shape.pp * shape.virtual), 0.0, 0.0
        for stages, (forward, both) in zip(stages_of_ranks(shape), least, strict=True):
            most = max(most, ahead + block.microbatches * both * sum(layers[s] for s in stages))
            ahead += layers[stages[0]] * (forward if split else both) if self.clip else 0.0
        return most

    def rate(self, least: Sequence[tuple[float, float]], microbatches: int, virtual: int, *, split: bool) -> float:
        """Layers for each second of a step that pipeline ranks get through, at most. least: (forward, forward and
        backward) seconds of the cheapest layer for one microbatch, by rank.

        Proof: a rank with n layers is busy for x = microbatches x n x seconds. With clipping it begins after the
        forwards of the first stages of the ranks before it, of n / virtual layers or more each, and ends before their
        backwards (before input gradients alone where weight gradients may wait): x is at most the step less a share of
        the x of each rank before. So the layers that the ranks from one on get through are at most linear in what is
        left of the step, and either the rank takes all of that, or none. The loop folds this from the last rank:
        rate = max(rate, 1 / (microbatches x both) + rate x (1 - share)).
        """
        rate = 0.0
        for forward, both in reversed(least):
            share = (forward if split else both) / (microbatches * both * virtual) if self.clip else 0.0
            rate = max(rate, 1 / (microbatches * both) + rate * (1 - share))
        return rate

    def _least(self, block: MixedBlock, entry: int, batch: int) -> tuple[float, float]:
        """(forward, forward and backward) seconds of the cheapest layer on an entry of the shape's kinds, for `batch`
        sequences of a worker."""
        key = block.shape.kinds[entry], block.shape.tp[entry], block.shape.cp, block.shape.ep[entry], block[2:], batch
        if key not in self._leasts:
            least = self.tables.every(block, entry).least[:, self.tables.column[batch]]
            self._leasts[key] = float(least[0]), float(least[3])  # rows of `LayerTable.least`
        return self._leasts[key]

    def _of_replicas(self, block: MixedBlock, workers: Sequence[int]) -> float:
        """The bound where every stage has workers of all kinds, which share each microbatch.

        Proof: a worker takes at least `busy` seconds for each of its sequences of a microbatch, at the microbatch size
        at which a sequence is cheapest. With uneven shares all workers are busy for the whole step at best, so the
        shares follow their rates and the step is size / sum(1 / busy); with equal ones, the slowest kind's share takes
        as long. With clipping the last pipeline rank begins after the forwards of the first stages of the others.
        """
        shape, size, layers = block.shape, self.space.global_batch // block.microbatches, self.space.num_layers
        rate, slowest = 0.0, 0.0
        for entry, count in enumerate(workers):
            key = shape.kinds[entry], shape.tp[entry], shape.cp, shape.ep[entry], block[2:]
            if key not in self._rates:
                least = self.tables.every(block, entry).least[[0, 3]] / np.array(self.tables.micro, float)
                # Seconds of one sequence, at the best of all microbatch sizes up to each.
                self._rates[key] = np.minimum.accumulate(least, axis=1)
            able = bisect_right(self.tables.micro, size if not self.space.equal else size // sum(workers)) - 1
            forward, both = self._rates[key][:, able].tolist()
            per_stage, stages = layers // (shape.pp * shape.virtual), shape.pp - 1
            busy = block.microbatches * both * max(layers / shape.pp, per_stage * shape.virtual)
            if self.clip:
                busy = max(busy, per_stage * (block.microbatches * both * shape.virtual + stages * forward))
            rate, slowest = rate + count / busy, max(slowest, busy)
        return slowest * size / sum(workers) if self.space.equal else size / rate
