"""Bounds on blocks over heterogeneous devices before they are opened: from the layers that cost least on each kind.

`RoughBounds.of(block)` is below every point of a block; `rate` says how fast pipeline ranks can take layers through.
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
        """Takes clip, whether a step ends with a norm for which all ranks meet."""
        self.tables, self.space, self.clip = tables, space, clip
        self._rates: dict[object, Doubles] = {}
        self._leasts: dict[object, tuple[float, float]] = {}

    def of(self, block: MixedBlock) -> float:
        """A bound on all points of a block, from the layers that cost least."""
        shape, workers = block.shape, self.space.workers(block.shape)
        if shape.form == "replicas":
            return self._of_replicas(block, workers)
        split = any(is_split(schedule) for _, schedule in self.space.variants(shape, block.microbatches))
        size = self.space.global_batch // block.microbatches
        least = [self._least(block, rank, -(-size // n)) for rank, n in enumerate(workers)]
        if not self.space.equal:
            return self.space.num_layers / self.rate(least, block.microbatches, shape.virtual, split=split)
        layers, ahead, most = equal_layers(self.space.num_layers, shape.pp * shape.virtual), 0.0, 0.0
        for stages, (forward, both) in zip(stages_of_ranks(shape), least, strict=True):
            most = max(most, ahead + block.microbatches * both * sum(layers[s] for s in stages))
            ahead += layers[stages[0]] * (forward if split else both) if self.clip else 0.0
        return most

    def rate(self, least: Sequence[tuple[float, float]], microbatches: int, virtual: int, *, split: bool) -> float:
        """Layers by the second of a step that pipeline ranks take through, at most. least: seconds of a layer, forward
        and in all, on each rank.

        Proof: a rank with n layers is busy for x = microbatches x n x seconds. With clipping it begins after the first
        stages of the ranks before it, of n / virtual layers or more each, forward, and ends before they go back (which
        may be over earlier where weight gradients wait): x is no more than the step less a share of each x before. What
        the ranks from one on can take is then linear in what is left of the step, and a rank does best with all of it,
        or none.
        """
        rate = 0.0
        for forward, both in reversed(least):
            share = (forward if split else both) / (microbatches * both * virtual) if self.clip else 0.0
            rate = max(rate, 1 / (microbatches * both) + rate * (1 - share))
        return rate

    def _least(self, block: MixedBlock, entry: int, batch: int) -> tuple[float, float]:
        """(forward, forward and backward) seconds of the layer that takes least."""
        key = block.shape.kinds[entry], block.shape.tp[entry], block.shape.cp, block.shape.ep[entry], block[2:], batch
        if key not in self._leasts:
            least = self.tables.every(block, entry).least[:, self.tables.column[batch]]
            self._leasts[key] = float(least[0]), float(least[3])
        return self._leasts[key]

    def _of_replicas(self, block: MixedBlock, workers: Sequence[int]) -> float:
        """No worker takes its layers through faster, by the sequence, than it would a microbatch of the best size, and
        together they take all layers of all sequences through. With clipping, the last rank of each begins after the
        first stages of the others."""
        shape, size, layers = block.shape, self.space.global_batch // block.microbatches, self.space.num_layers
        rate, slowest = 0.0, 0.0
        for entry, count in enumerate(workers):
            key = shape.kinds[entry], shape.tp[entry], shape.cp, shape.ep[entry], block[2:]
            if key not in self._rates:
                least = self.tables.every(block, entry).least[[0, 3]] / np.array(self.tables.micro, float)
                self._rates[key] = np.minimum.accumulate(least, axis=1)
            able = bisect_right(self.tables.micro, size if not self.space.equal else size // sum(workers)) - 1
            forward, both = self._rates[key][:, able].tolist()
            per_stage, stages = layers // (shape.pp * shape.virtual), shape.pp - 1
            busy = block.microbatches * both * max(layers / shape.pp, per_stage * shape.virtual)
            if self.clip:
                busy = max(busy, per_stage * (block.microbatches * both * shape.virtual + stages * forward))
            rate, slowest = rate + count / busy, max(slowest, busy)
        return slowest * size / sum(workers) if self.space.equal else size / rate
