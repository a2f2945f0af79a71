"""Several ways to compute one product whose cost depends on what a call brings: each is measured once, and chosen by
prediction in every call.

`Forms.run` runs all on the first call that others can serve, compares them with the whole product, and keeps
seconds a unit of what is there (a tile of rows, a column that is not zero). Later calls take the way that is predicted
to be fastest for what is there now: a count, which costs next to nothing. A way that is wrong is never taken.
Leaves out what is counted (`ragged`, `live`).
Source: PIT's choice of a tile by its cost times the micro-tiles that are not empty (Zheng et al. 2023).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.tune.gate import different

log = logging.getLogger("gnomon.compiler")
Run = Callable[[], "Tensor | None"]
"""A way, with all that it is given; None: it cannot."""
WHOLE = "whole"
GAIN = 0.9
"""Of the whole product's predicted time that another way may take: less is noise."""
REPEATS = 3


class Forms:
    """The forms in which one matmul of a ragged batch may run, with what each has cost."""

    def __init__(self) -> None:
        self.unit_s: dict[str, float] = {}
        """Seconds a unit, by way; of the whole product, for all that there could be."""
        self.wrong: dict[str, str] = {}
        self.taken: dict[str, int] = {}
        """Calls, by way."""
        self.shares: float = 0.0
        """Of what there could be that was there, over all calls."""
        self.way = WHOLE
        """That the last call took."""
        self.last: dict[str, float] = {}
        """Predicted seconds of the last call."""

    def run(
        self, ways: Mapping[str, Run], there: int, units: int, of: int, compared: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The result by the way that is predicted to be fastest. there: what is counted; units: the same as the ways
        pay for it; of: what there could be. compared: the part of a result that must be as the whole product's."""
        if not self.unit_s:
            return self._measured(ways, max(units, 1), of, compared)
        self.last = {way: self.unit_s[way] * (of if way == WHOLE else units) for way in self.unit_s}
        best = min(self.last, key=lambda way: self.last[way])
        way = best if self.last[best] <= GAIN * self.last[WHOLE] else WHOLE
        out = ways[way]()
        if out is None:
            way, out = WHOLE, ways[WHOLE]()
        assert out is not None, "the whole product is PyTorch's"
        self.way = way
        self.taken[way] = self.taken.get(way, 0) + 1
        self.shares += there / max(of, 1)
        return out

    def _measured(self, ways: Mapping[str, Run], units: int, of: int, compared: Callable[[Tensor], Tensor]) -> Tensor:
        expected = ways[WHOLE]()
        assert expected is not None
        # Each runs once before it is timed, which also warms it up.
        for way, run in ways.items():
            result = run()
            if result is None:
                self.wrong[way] = "it does not run"
            elif wrong := different([compared(result)], [compared(expected)]):
                log.warning("a product in the form %s differs from the whole one (%s): it is not taken", way, wrong)
                self.wrong[way] = wrong
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        best = {way: float("inf") for way in ways if way not in self.wrong}
        for _ in range(REPEATS):  # in turn, so that what else the machine does befalls all
            for way in best:
                start = clock()
                ways[way]()
                best[way] = min(best[way], clock() - start)
        self.unit_s = {way: took / (of if way == WHOLE else units) for way, took in best.items()}
        return expected

    def why(self) -> dict[str, Any]:
        """Returns, for `explain`, the calls by way, the mean share that was there, and the predicted seconds of the
        last call."""
        calls = sum(self.taken.values())
        return {
            "taken": dict(self.taken),
            "share": self.shares / calls if calls else None,
            "predicted_s": dict(self.last),
            "wrong": dict(self.wrong),
        }
