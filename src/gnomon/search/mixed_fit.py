"""Whether any plan over unlike devices fits: the search for the fastest one, in the order of memory in place of time.

`FirstFit` prices the points that hold least on their fullest rank first, and ends with the first one that fits. It has
shown that none fits when it ends without one and `left` nothing. Leaves out plans on one kind of device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gnomon.plans.parts import ScheduleName
from gnomon.search.mixed_bounds import Longs
from gnomon.search.mixed_rows import Rows
from gnomon.search.mixed_search import PLAYED, Item, MixedSearch, Node
from gnomon.search.mixed_space import MixedBlock

FIT_TRIES = 24
"""Predictions after which it gives up."""

SPARE = 0.9
"""Share of its device that the fullest rank holds, at least, up to which a point most likely fits."""

FIT_NODES = 3000
"""Partial pipelines that it looks at."""


class FirstFit(MixedSearch):
    """Bounds are shares of what devices may hold."""

    most_nodes = FIT_NODES

    def worst(self) -> float:
        """Nothing is looked at beyond the first plan that fits."""
        return -float("inf") if self.best else float("inf")

    def _push(self, bound: float, item: Item) -> None:
        if bound > 1:
            self.counts.too_large += self._points(item)
        else:  # points with room to spare before anything else: one of them will do
            super()._push(bound - 2 if isinstance(item, Rows) and bound < SPARE else bound, item)

    def _rough(self, block: MixedBlock) -> float:
        return self.rows.least_ratio(block)

    def _level(self, node: Node, used: Any, ahead: Any, ranks: int) -> Any:
        return self.rows.least_ratio(node.pipe.block)

    def _most(self, node: Node, seconds: Any) -> Any:
        return 0.0

    def _complete(
        self, block: MixedBlock, variants: Sequence[tuple[int, ScheduleName]], layers: Longs, shares: Longs
    ) -> None:
        for variant in variants:
            made = Rows(block, variant, layers, shares, np.zeros(len(layers)), False)
            self._push_sorted(made, self.rows.ratio(made))

    def _play(self, item: Rows) -> None:
        part = item.part(slice(0, PLAYED))
        if len(item.bounds) > PLAYED:
            self._push_rows(item.part(slice(PLAYED, None)))
        bounds = part.bounds
        if item.block.shape.pp > 1:
            bounds = np.maximum(bounds, self.rows.ratio(part, played=True))
        self._push_sorted(replace(part, played=True), bounds)

    def _push_sorted(self, item: Rows, ratios: Any) -> None:
        """Those that may fit, the least first."""
        fits = np.flatnonzero(ratios <= 1)
        self.counts.too_large += len(ratios) - len(fits)
        if len(fits):
            self._push_rows(item.part(fits[np.argsort(ratios[fits], kind="stable")], ratios))
