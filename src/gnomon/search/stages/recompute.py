"""The least recomputation with which every stage fits, stage by stage.

A stage that holds more microbatches (the first of 1F1B) recomputes more layers than one that holds few, and one with
room recomputes nothing. `Least.fit(counts)` finds for every rank how many layers it takes, and returns the plan as it
is then predicted. Layers are converted in the order of what they cost for each byte that they free. Leaves out how
layers are cut into stages (`cut`), and offloading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gnomon.plans.parts import Preset
from gnomon.prediction.layer_types import LayerPrice
from gnomon.search.stages.recut import Presets
from gnomon.search.stages.repredict import Trial, Trials
from gnomon.software import Stack

Unit = Literal["stage", "block", "none"]
"""How finely a program recomputes: so many layers of each stage; as many in every stage; all layers or none."""


def unit_of(stack: Stack) -> Unit:
    """How finely a stack recomputes, as its record says (torchtitan and others: all layers alike, or as the user's code
    says). Where nobody said which program runs the plan, each stage may do as it likes."""
    return "stage" if stack.is_unstated else stack.runs.recompute_unit or "none"


class Least:
    """Finds the least recomputation of splits of one plan."""

    def __init__(self, trials: Trials, limit_bytes: int, unit: Unit) -> None:
        """limit_bytes: what a device's peak may be."""
        self.trials, self.limit = trials, limit_bytes
        saved = trials.plan.saved
        self.unit: Unit = "none" if saved.rules or saved.every > 1 else unit
        self._found: dict[tuple[int, ...], Trial | None] = {}
        self._orders: dict[tuple[str, ...], tuple[tuple[int, Preset], ...]] = {}

    def fit(self, counts: Sequence[int]) -> Trial | None:
        """The split with the least recomputation that fits; None where no recomputation does. Under the unit `none` the
        plan's own preset decides."""
        key = tuple(counts)
        if key not in self._found:
            presets = self._own(counts) if self.unit == "none" else self._least(counts)
            self._found[key] = None if presets is None else self.trials.of(counts, presets)
        return self._found[key]

    def least_s(self, counts: Sequence[int]) -> float:
        """Seconds of the split with no more recomputation than the plan's own preset asks for: with more it is not
        faster."""
        preset = self.trials.plan.saved.preset if self.unit == "none" else "none"
        return self.trials.step_s(counts, self.trials.recut.plain(counts, preset))

    def _own(self, counts: Sequence[int]) -> Presets | None:
        if self.trials.plan.saved.rules or self.trials.plan.saved.every > 1:
            return None
        presets = self.trials.recut.plain(counts, self.trials.plan.saved.preset)
        return presets if max(self.trials.peaks(counts, presets)) <= self.limit else None

    def _least(self, counts: Sequence[int]) -> Presets | None:
        """Fewest conversions of each rank, by halving between what fits and what does not, guided by straight lines."""
        steps = self._steps(counts)
        if self.unit == "block":
            return self._alike(counts, steps)
        sizes = [sum(len(steps[s]) for s in stages) for stages in self.trials.stages_of_class]
        low, high = [0] * len(sizes), list(sizes)
        at_low = self._peaks(counts, steps, low)
        if max(at_low) <= self.limit:
            return self._presets(counts, steps, low)
        at_high = self._peaks(counts, steps, high)
        if any(min(ends) > self.limit for ends in zip(at_low, at_high, strict=True)):
            return None
        # A rank that fits with nothing recomputed is settled.
        high = [0 if least <= self.limit else size for least, size in zip(at_low, sizes, strict=True)]
        for _ in range(max(sizes)):  # each round takes at least one step off every rank that is not settled
            if all(h - v <= 1 for v, h in zip(low, high, strict=True)):
                break
            # Where the straight line between the peaks at both ends meets the limit, but a step away from either end at
            # least.
            middle = [
                h if h - v <= 1 else min(max(v + -(-(p - self.limit) * (h - v) // max(p - q, 1)), v + 1), h - 1)
                for v, h, p, q in zip(low, high, at_low, at_high, strict=True)
            ]
            for i, (m, peak) in enumerate(zip(middle, self._peaks(counts, steps, middle), strict=True)):
                if peak <= self.limit and m < high[i]:
                    high[i], at_high[i] = m, peak
                elif peak > self.limit and low[i] < m < high[i]:
                    low[i], at_low[i] = m, peak
        return self._presets(counts, steps, high)

    def _alike(self, counts: Sequence[int], steps: Sequence[tuple[tuple[int, Preset], ...]]) -> Presets | None:
        """The least number of layers, the same in every stage, by halving."""

        def fits(number: int) -> bool:
            return max(self._peaks(counts, steps, [number] * len(self.trials.stages_of_class))) <= self.limit

        # -1 stands for too little and is never tried.
        low, high = -1, max(map(len, steps))
        if not fits(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return self._presets(counts, steps, [high] * len(self.trials.stages_of_class))

    def _peaks(self, counts: Sequence[int], steps: Sequence[tuple[tuple[int, Preset], ...]], recomputed: Sequence[int]
               ) -> list[int]:  # fmt: skip
        return list(self.trials.peaks(counts, self._presets(counts, steps, recomputed)))

    def _presets(
        self, counts: Sequence[int], steps: Sequence[tuple[tuple[int, Preset], ...]], recomputed: Sequence[int]
    ) -> Presets:
        """Presets when each rank class has taken so many steps, those of its first stages first: they hold more
        microbatches. Under `block` every stage has taken as many."""
        out: list[list[Preset]] = [["none"] * count for count in counts]
        for stages, recomputed_layers in zip(self.trials.stages_of_class, recomputed, strict=True):
            for stage in stages:
                for layer, preset in steps[stage][:recomputed_layers]:
                    out[stage][layer] = preset
                if self.unit != "block":
                    recomputed_layers = max(recomputed_layers - len(steps[stage]), 0)
        return tuple(tuple(stage) for stage in out)

    def _steps(self, counts: Sequence[int]) -> list[tuple[tuple[int, Preset], ...]]:
        """Lists for each stage (layer in it, preset) one after the other: the cheapest seconds for a byte first."""
        steps, done = [], 0
        for stage, count in enumerate(counts):
            prices = [self.trials.layer_prices(stage, done + i) for i in range(count)]
            if self.unit == "block":
                steps.append(tuple((i, "full") for i in range(count)))
            else:
                steps.append(_ordered(prices))
            done += count
        return steps  # type: ignore[return-value]


def _ordered(prices: Sequence[dict[Preset, LayerPrice]]) -> tuple[tuple[int, Preset], ...]:
    """Conversions of a stage's layers in the order of seconds for each byte freed; of equal ones the first layer's.

    A layer goes to `full` at once, or by way of `selective` where the way there frees a byte for less: the lower convex
    hull of its (bytes, seconds).
    """
    steps: list[tuple[float, int, Preset]] = []
    way: list[tuple[float, Preset]] = []
    for layer, price in enumerate(prices):
        before = prices[layer - 1] if layer else {}
        if any(before.get(name) is not value for name, value in price.items()):  # most layers are like the last one
            none, half, full = (_cost(price[name]) for name in ("none", "selective", "full"))
            direct = _ratio(none, full)
            first, second = _ratio(none, half), _ratio(half, full)
            way = [(first, "selective"), (second, "full")] if first < direct else [(direct, "full")]
        steps += [(ratio, layer, preset) for ratio, preset in way if ratio < float("inf")]
    return tuple((layer, preset) for _, layer, preset in sorted(steps, key=lambda step: step[:2]))


def _cost(price: LayerPrice) -> tuple[float, float]:
    """(bytes kept of a microbatch, seconds to make the rest again)."""
    again = price.recompute
    return sum(tensor.bytes for tensor in price.saved), again.compute_s + sum(again.comm_s.values())


def _ratio(less: tuple[float, float], recomputed_cost: tuple[float, float]) -> float:
    """Seconds for each byte freed; infinite where nothing is."""
    freed = less[0] - recomputed_cost[0]
    return (recomputed_cost[1] - less[1]) / freed if freed > 0 else float("inf")
