"""A predicted plan with its layers cut into stages otherwise, or others of them recomputed: what `predict` says of it.

`Trials(prediction)` keeps what such plans share (the Program, prices of layers, of stages with the same layers), so a
trial costs a play of the Program and little else. Its numbers are those of `predict` to the bit: where a plan would
have another Program (another stage holds what is tied, ZeRO 3), `predict` is called. Leaves out which plans to try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gnomon.graph import Layer, no_grad_inputs
from gnomon.lowering.gradients import TIED
from gnomon.plans import Plan, Saved, layer_presets, select, shared_parameters, stage_layers, transfers
from gnomon.plans.parts import Preset
from gnomon.plans.plan import effective_zero
from gnomon.prediction import Prediction, predict
from gnomon.prediction.contention import contended
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.memory import rank_memory
from gnomon.prediction.predict import stages_of
from gnomon.prediction.stage import StagePrice
from gnomon.prediction.step import Pricing
from gnomon.program import Key
from gnomon.search.stages.recut import LESS_KEPT, Presets, Recut
from gnomon.simulate import Durations, period
from gnomon.units import quantise

_OF_SEVERAL = frozenset({"SEND_F", "SEND_B", "SEND_SKIP", "SEND_SKIP_GRAD"})
"""Actions whose price depends on more than their own stage."""


class PriceKind(NamedTuple):
    """What layers of one price have in common, but for how much of them is kept."""

    block: str
    """Name of the block that they call."""
    no_grad: tuple[str, ...]
    """Inputs that need no gradient."""
    narrow: bool
    """Eight-bit products."""


class Content(NamedTuple):
    """What a stage computes: runs of (kind, preset, layers)."""

    stage: int
    """Number of the stage."""
    runs: tuple[tuple[PriceKind, Preset, int], ...]
    """Layers in order: what they cost, how they save, how many they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan that was tried."""

    plan: Plan
    """The plan."""
    step_s: float
    """Seconds of a step, as `predict` gives them."""
    peaks: tuple[int, ...]
    """Peak bytes of each rank class, as `predict` gives them."""


class Trials:
    """Plans that differ from a predicted one in layers_per_stage and in which layers are recomputed."""

    def __init__(self, prediction: Prediction) -> None:
        """prediction: of a plan with one mesh, on devices of one kind."""
        self.prediction, self.plan = prediction, prediction.plan
        pricing = prediction.pricing
        self.graph, self.cluster, self.stack = pricing.graph, pricing.cluster, pricing.stack
        self.recut = Recut(self.plan, self.graph)
        self.layers, self.counted, self.num_stages = self.recut.layers, self.recut.counted, self.recut.num_stages
        fp8 = self.plan.precision.fp8
        narrow = {layer.label for layer in select(fp8.calls, self.graph)} if fp8 else set()
        self.kinds = tuple(
            PriceKind(
                layer.call.block,
                no_grad_inputs(self.graph, layer.call),
                layer.label in narrow,
            )
            for layer in self.layers
        )
        self.numbers = {layer.label: i for i, layer in enumerate(self.layers)}
        self.predicted = 0
        """Times that `predict` was called, or the prices that it begins with."""
        self._prices: dict[tuple[int, PriceKind, Preset], LayerPrice] = {}
        self._seconds: dict[tuple[object, Key], float] = {}
        self._layer_seconds: dict[tuple[Content, str], float] = {}
        self._peaks: dict[tuple[Content, ...], int] = {}
        self._steps: dict[tuple[Content, ...], float] = {}
        self._trials: dict[Plan, Trial] = {}
        self._known_alike: dict[tuple[int, ...], bool] = {}
        self._stages: dict[tuple[int, int, int, tuple[Preset, ...]], StagePrice] = {}
        self._same = [_where(stage) for stage in pricing.stages]
        self._shape = self._shape_of(self.plan)
        self._parts = stage_layers(self.plan, self.graph)
        self._harvest(prediction.plan, pricing.stages)

    def of(self, counts: Sequence[int], presets: Presets) -> Trial:
        """Time and memory of the plan. PlanError for a stage without a layer."""
        plan = self.recut.plan_of(counts, presets)
        spans = tuple(self.recut.bounds(counts))
        if not self._alike(plan) or not self._known(spans, presets):
            if plan not in self._trials:
                prediction = self._predict(plan)
                peaks = tuple(rank.peak_bytes for rank in prediction.memory)
                self._trials[plan] = Trial(plan=plan, step_s=prediction.step_s, peaks=peaks)
            return self._trials[plan]
        contents = self._contents(spans, presets)
        pricing = self._pricing(plan, spans, presets)
        step_s = self._step(contents, pricing)
        return Trial(plan=plan, step_s=step_s, peaks=self._memory(contents, pricing))

    def step_s(self, counts: Sequence[int], presets: Presets) -> float:
        """Seconds of the plan's step alone."""
        plan = self.recut.plan_of(counts, presets)
        spans = tuple(self.recut.bounds(counts))
        if not self._alike(plan) or not self._known(spans, presets):
            return self.of(counts, presets).step_s
        return self._step(self._contents(spans, presets), self._pricing(plan, spans, presets))

    def peaks(self, counts: Sequence[int], presets: Presets) -> tuple[int, ...]:
        """Peak bytes of each rank class alone."""
        plan = self.recut.plan_of(counts, presets)
        spans = tuple(self.recut.bounds(counts))
        if not self._alike(plan) or not self._known(spans, presets):
            return self.of(counts, presets).peaks
        return self._memory(self._contents(spans, presets), self._pricing(plan, spans, presets))

    def seconds(self, stage: int, first: int, last: int, kinds: Sequence[str], *, ends: bool) -> tuple[float, ...]:
        """Seconds of each kind of action (`F`, `B` …) of a stage of the counted layers [first, last), none of them
        recomputed. ends: whether it is the last stage, with what follows them. Not under ZeRO 3."""
        places = [*self.counted, self.counted[-1] + 1]
        a, b = 0 if stage == 0 else places[first], len(self.layers) if ends else places[last]
        none: Preset = "none"
        presets = (none,) * (last - first)
        content = self._content(stage, a, b, presets)
        if any((content, kind) not in self._layer_seconds for kind in kinds):
            self._has(self._keys(stage, a, b, presets))
            pricing = self.prediction.pricing.with_stage(stage, self._stage(stage, a, b, presets))
            for kind in kinds:
                key = Key(kind=kind, stage=stage, rank_class=0, shape="", name="")
                self._layer_seconds[content, kind] = float(quantise(np.array([pricing.seconds(key)]))[0])
        return tuple(self._layer_seconds[content, kind] for kind in kinds)

    def layer_seconds(self, position: int) -> float:
        """Seconds of one layer of the graph by itself, forward and backward, without what surrounds it."""
        no_recompute: tuple[PriceKind, Preset] = self.kinds[position], "none"
        if all(at[1:] != no_recompute for at in self._prices):
            self._price("none")
        # Of the places where the layer is priced, the first.
        price = next(price for at, price in self._prices.items() if at[1:] == no_recompute)
        phases = (price.forward, price.input_grad, price.weight_grad)
        return sum(phase.compute_s + sum(phase.comm_s.values()) for phase in phases)

    def layer_prices(self, stage: int, layer: int) -> dict[Preset, LayerPrice]:
        """Preset -> price of a counted layer where a stage is."""
        kind, where = self.kinds[self.counted[layer]], self._same.index(self._same[stage])
        for preset in LESS_KEPT:
            if (where, kind, preset) not in self._prices:
                self._price(preset)
        return {preset: self._prices[where, kind, preset] for preset in LESS_KEPT}

    def _alike(self, plan: Plan) -> bool:
        """Whether the plan has the same Program."""
        cut = plan.schedule.layers_per_stage
        if cut not in self._known_alike:
            if effective_zero(plan) == 3:  # whose stages are layers
                self._known_alike[cut] = stage_layers(plan, self.graph) == self._parts
            else:
                self._known_alike[cut] = self._shape_of(plan) == self._shape
        return self._known_alike[cut]

    def _pricing(self, plan: Plan, spans: Sequence[tuple[int, int]], presets: Presets) -> Callable[[], Pricing]:
        """Makes the plan's prices, once, when they are asked for."""
        pricings: list[Pricing] = []

        def pricing() -> Pricing:
            if not pricings:
                base = self.prediction.pricing
                stages = tuple(self._stage(s, *span, p) for s, (span, p) in enumerate(zip(spans, presets, strict=True)))
                pricings.append(replace(base, plan=plan, stages=stages, shapes={}, turns=None))
            return pricings[0]

        return pricing

    def _predict(self, plan: Plan) -> Prediction:
        self.predicted += 1
        prediction = predict(self.graph, self.cluster, plan, self.prediction.workload, self.stack)
        self._harvest(plan, prediction.pricing.stages)
        return prediction

    def _price(self, preset: Preset) -> None:
        """Prices layers with one preset for all, wherever the plan has them."""
        self.predicted += 1
        plan = replace(self.plan, saved=Saved(preset=preset))
        self._harvest(plan, stages_of(self.graph, self.cluster, plan, self.prediction.workload, self.stack))

    def _harvest(self, plan: Plan, stages: Sequence[StagePrice]) -> None:
        """Takes the prices of a plan's layers over."""
        presets = layer_presets(plan, self.graph)
        for stage in stages:
            where = self._same.index(_where(stage))
            for price, layers in stage.layers:
                for layer in layers:
                    at = where, self.kinds[self.numbers[layer.label]], presets.get(layer.label, "none")
                    self._prices.setdefault(at, price)

    def _known(self, spans: Sequence[tuple[int, int]], presets: Presets) -> bool:
        """Whether every layer has a price."""
        return self._has(at for stage, span in enumerate(spans) for at in self._keys(stage, *span, presets[stage]))

    def _has(self, keys: Iterable[tuple[int, PriceKind, Preset]]) -> bool:
        """Whether these layers have prices; each preset that is missing is priced once."""
        missing = [at for at in keys if at not in self._prices]
        for preset in sorted({preset for _, _, preset in missing}):
            self._price(preset)
        return all(at in self._prices for at in missing)

    def _keys(self, stage: int, a: int, b: int, presets: tuple[Preset, ...]) -> Iterator[tuple[int, PriceKind, Preset]]:
        """Yields the keys under which each layer's price is found."""
        where, remaining_presets = self._same.index(self._same[stage]), iter(presets)
        for i in range(a, b):
            yield where, self.kinds[i], next(remaining_presets) if self._is_counted(i) else "none"

    def _is_counted(self, position: int) -> bool:
        return self.layers[position].call.first is not None or len(self.counted) == len(self.layers)

    def _contents(self, spans: Sequence[tuple[int, int]], presets: Presets) -> tuple[Content, ...]:
        return tuple(self._content(stage, a, b, presets[stage]) for stage, (a, b) in enumerate(spans))

    def _content(self, stage: int, a: int, b: int, presets: tuple[Preset, ...]) -> Content:
        runs: list[tuple[PriceKind, Preset, int]] = []
        for _, kind, preset in self._keys(stage, a, b, presets):
            if runs and runs[-1][:2] == (kind, preset):
                runs[-1] = kind, preset, runs[-1][2] + 1
            else:
                runs.append((kind, preset, 1))
        return Content(stage, tuple(runs))

    def _stage(self, stage: int, a: int, b: int, presets: tuple[Preset, ...]) -> StagePrice:
        at = stage, a, b, presets
        if at not in self._stages:
            groups: dict[int, tuple[LayerPrice, list[Layer]]] = {}
            for i, key in zip(range(a, b), self._keys(stage, a, b, presets), strict=True):
                price = self._prices[key]
                # Prices are told apart by identity: layers of the same key share one object.
                groups.setdefault(id(price), (price, []))[1].append(self.layers[i])
            layers = tuple((price, tuple(members)) for price, members in groups.values())
            self._stages[at] = replace(self.prediction.pricing.stages[stage], layers=layers)
        return self._stages[at]

    def _step(self, contents: tuple[Content, ...], pricing: Callable[[], Pricing]) -> float:
        """The steady state's step."""
        if contents not in self._steps:
            self._steps[contents] = self._played(contents, pricing)
        return self._steps[contents]

    def _played(self, contents: tuple[Content, ...], pricing: Callable[[], Pricing]) -> float:
        structure, blocks = self.prediction.structure, self.prediction.pricing.blocks
        if effective_zero(self.plan) == 3:  # whose collectives slow the kernels beside them
            return period(structure, *contended(structure, pricing())).seconds
        seconds = []
        for key in structure.program.keys:
            # A price that depends on other stages too is remembered for the contents of all.
            several = key.kind in _OF_SEVERAL or key.name == TIED
            at = (contents if several else contents[blocks[key.stage][0]]), key
            if at not in self._seconds:
                self._seconds[at] = pricing().seconds(key)
            seconds.append(self._seconds[at])
        return period(structure, Durations(busy=quantise(np.array(seconds, float)))).seconds

    def _memory(self, contents: tuple[Content, ...], pricing: Callable[[], Pricing]) -> tuple[int, ...]:
        """Peak bytes of each rank class, which depend on its own stages alone."""
        rank_contents = [tuple(contents[s] for s in stages) for stages in self.stages_of_class]
        if any(content not in self._peaks for content in rank_contents):
            for content, rank in zip(rank_contents, rank_memory(self.prediction.structure, pricing())[0], strict=True):
                self._peaks[content] = rank.peak_bytes
        return tuple(self._peaks[content] for content in rank_contents)

    @property
    def stages_of_class(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each rank class, in order."""
        ranks = self.plan.pipeline_ranks
        return tuple(tuple(s for s, r in enumerate(ranks) if r == cls) for cls in range(max(ranks) + 1))

    def _shape_of(self, plan: Plan) -> object:
        """What the Program depends on: who sends to whom, who shares parameters, which blocks a stage has."""
        parts = stage_layers(plan, self.graph)
        blocks = tuple(frozenset(layer.call.block for layer in part) for part in parts if plan.mesh.tp > 1)
        shared = frozenset(shared_parameters(plan, self.graph).values())
        return tuple((t.source, t.target) for t in transfers(plan, self.graph)), shared, blocks


def _where(stage: StagePrice) -> tuple[object, ...]:
    """What the prices of a stage's layers depend on beside the layers."""
    return stage.device.name, stage.mesh, tuple(sorted(stage.links.items(), key=lambda item: item[0]))
