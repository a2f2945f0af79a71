"""A whole plan: the way of every layer with which each rank fits and recomputes for the least time.

`least_recompute(prediction, limit)` solves an integer programme for each pipeline rank. Its limits are rows of the
plan's Program: what a rank holds there follows from which units of which stages are under way, which the schedule
fixes, so it is linear in what layers keep. The plan that comes out is predicted; a row that turns out fuller than the
programme took it to be becomes a limit too. With `offload` layers may send tensors to the host: their copies cost what
they take longer than the forward or backward of their stage, which they are beside, or all that they take where nothing
runs beside copies; and the host's memory is a limit. Leaves out the ways of one layer (`checkpointing.layer`), and how
layers are cut into stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError, PlanError
from gnomon.graph import Layer
from gnomon.plans import Plan, Saved, SavedRule
from gnomon.plans.select import format_layers
from gnomon.prediction import Prediction, host_memory, predict
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.memory import buffer_sizes, held_moves
from gnomon.prediction.temporary_memory import temporaries
from gnomon.prediction.update import host_copy_s
from gnomon.program.memory import buffer_moves
from gnomon.search.checkpointing.layer import Way, layer_ways
from gnomon.search.checkpointing.milp import Programme

GAP = 5e-3
"""The share of the recomputation's seconds by which a rank's choice may be worse than the best."""

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""The shares of a layer's bytes that may wait on the host, where tensors may."""

FEW = 6
"""The number of layers up to which every order of their ways is looked at where tensors may wait on the host."""

ROUNDS = 8
"""The number of predictions, at most."""


@dataclass(frozen=True, kw_only=True)
class Least:
    """The least time that was found, and what it recomputes."""

    prediction: Prediction
    """The prediction of the plan that fits."""
    predicted: int
    """The number of predictions made."""


def least_recompute(prediction: Prediction, limit_bytes: int, *, offload: bool = False) -> Least | None:
    """The plan with the least recomputation with which every rank's peak is at most `limit_bytes`; None if none fits.

    prediction: of a plan with one mesh, whatever it recomputes; where it fits, the answer is never slower. offload:
    whether tensors may wait on the host where that costs less. InputError without scipy. PlanError for a plan that
    offloads tensors, or whose stages have meshes of their own.
    """
    without = _least(prediction, limit_bytes, offload=False)
    if not offload or (without is not None and without.predicted == 1):
        return without
    try:
        found = _least(prediction, limit_bytes, offload=True)
    except InputError:  # the solver's time was over before it had a choice
        return without
    if without is None or found is None:
        return without or found
    best = min((without.prediction, found.prediction), key=lambda of: of.step_s)
    return Least(prediction=best, predicted=without.predicted + found.predicted)


def _least(prediction: Prediction, limit_bytes: int, *, offload: bool) -> Least | None:
    plan = prediction.plan
    if any(rule.action == "offload" for rule in plan.saved.rules):
        raise PlanError("saved.rules that offload are not combined with a choice of what to recompute; leave them out")
    if plan.stages:
        raise PlanError("stages with meshes of their own keep their own recomputation; give one mesh")
    pricing = prediction.pricing
    # Everything is priced from the plan that recomputes nothing: ways are counted as less than that.
    base = predict(pricing.graph, pricing.cluster, replace(plan, saved=Saved()), prediction.workload, pricing.stack)
    if _peak(base) <= limit_bytes:
        return Least(prediction=base, predicted=1)
    memory = _Memory(base, offload)
    ranks = [_RankProgramme(memory, number) for number in range(len(base.memory))]

    def predicted(chosen: dict[Layer, Way]) -> Prediction:
        plan = _plan(base.plan, memory, chosen)
        return predict(pricing.graph, pricing.cluster, plan, prediction.workload, pricing.stack)

    # First the smallest memory there is: if that does not fit, nothing does; if it does, it calibrates what lies beside
    # tensors.
    best = predicted({layer: rank.smallest(layer) for rank in ranks for _, layer, _ in rank.free})
    given_fits = _peak(prediction) <= limit_bytes
    if _peak(best) > limit_bytes:
        return Least(prediction=prediction, predicted=2) if given_fits else None
    for rank in ranks:
        # over: the allocator's part of the peak. The smaller of two predictions keeps the programme from refusing too
        # much; `learn` raises it where it was too small.
        rank.over = min(rank.over, rank.untracked_bytes(best))
    if given_fits and prediction.step_s < best.step_s:
        best = prediction
    # Solve, predict, learn: each round adds the row that turned out too full.
    for count in range(3, ROUNDS + 1):
        chosen: dict[Layer, Way] = {}
        for rank in ranks:
            ways = rank.solve(limit_bytes)
            if ways is None:
                return Least(prediction=best, predicted=count - 1)
            chosen |= ways
        tried = predicted(chosen)
        if _peak(tried) <= limit_bytes:
            return Least(prediction=min(tried, best, key=lambda of: of.step_s), predicted=count)
        for rank in ranks:
            rank.learn(tried, limit_bytes)
    return Least(prediction=best, predicted=ROUNDS)


def _peak(prediction: Prediction) -> int:
    return max(rank.peak_bytes for rank in prediction.memory)


def _during(prediction: Prediction) -> NDArray[np.float64]:
    """[rows] bytes of the Program's tensors while each row runs."""
    program, pricing = prediction.structure.program, prediction.pricing
    moved_bytes = held_moves(prediction.structure, pricing, buffer_sizes(pricing)).during(program.num_rows)
    during: NDArray[np.float64] = moved_bytes + temporaries(program, pricing)
    return during


class _Memory:
    """What each rank holds at each row of the Program, as a sum over layers."""

    def __init__(self, base: Prediction, offload: bool = False) -> None:
        """Takes the base, a prediction with nothing recomputed, and offload, whether tensors may wait on the host."""
        self.offload = offload
        self.base, self.program, self.pricing = base, base.structure.program, base.pricing
        self.during = _during(base)
        self.inside = temporaries(self.program, self.pricing)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """[rows, stages of the Program] units whose kept tensors are held while the row runs."""
        program = self.program
        # Give one unit of each stage's kept tensors ("0S", "1S", …) the size 1 and everything else 0: then the bytes in
        # flight are counts of units.
        unit = {name: 1.0 if name.endswith("S") and name[:-1].isdigit() else 0.0 for name in buffer_sizes(self.pricing)}
        moves = buffer_moves(program, self.base.structure.deps, unit)
        table = np.zeros((program.num_rows, program.num_stages))
        np.add.at(table, (moves.row, program.stage[moves.row]), moves.bytes)
        # A buffer that a row frees is still held while the row runs, so its negative move counts only after.
        ends = np.zeros_like(table)
        later = moves.bytes < 0
        np.add.at(ends, (moves.row[later], program.stage[moves.row[later]]), moves.bytes[later])
        open_bytes = np.zeros_like(table)
        for cls in range(program.num_classes):
            rows = slice(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1]))
            open_bytes[rows] = np.cumsum(table[rows], axis=0) - ends[rows]
        return open_bytes.round().astype(np.int64)

    def layers(self, block: int) -> list[tuple[Layer, LayerPrice]]:
        """The layers of one of the Program's stages, in order."""
        number, index = self.pricing.blocks[block]
        stage = self.pricing.stages[number]
        pairs = list(zip(stage.in_order, stage.order, strict=True))
        return [pairs[index]] if index >= 0 else pairs

    def hidden_copy_s(self, kind: str, block: int) -> float:
        """Seconds of a stage's forward or backward that copies of its activations may take for nothing, with nothing
        recomputed."""
        compute = self.pricing.compute
        if not compute.copies_overlap(self.pricing.blocks[block][0]):
            return 0.0
        return sum(compute.parts(kind, block).values())

    def again_s(self, block: int, way: Way) -> float:
        """Seconds that a layer of a stage recomputes for each microbatch."""
        return self.pricing.compute.phase_s(self.pricing.blocks[block][0], way.price.recompute)

    def s_per_byte(self, block: int) -> float:
        """Seconds a byte of copies to the host."""
        stage = self.pricing.stages[self.pricing.blocks[block][0]]
        # A message so long that the link's latency does not show.
        size = float(1 << 28)
        return host_copy_s(stage, self.pricing.cluster, size) / size

    @property
    def host_room(self) -> float:
        """Bytes of host memory that a rank has for activations."""
        host_use = host_memory(self.base)
        if host_use.limit_bytes is None:
            return inf
        # The room of a node is shared by its devices.
        return (host_use.limit_bytes - host_use.bytes) / max(node.count for node in self.pricing.cluster.node_kinds)

    @property
    def alive(self) -> int:
        """Microbatches whose activations are on the host at once, at most."""
        # A pipeline of S stages has at most S microbatches under way on its first rank.
        return min(self.pricing.count, self.pricing.plan.num_stages)

    def rows_of(self, cls: int) -> range:
        """Rows of a rank class."""
        return range(int(self.program.class_ptr[cls]), int(self.program.class_ptr[cls + 1]))

    def computes_backward(self, row: int) -> bool:
        """Whether recomputation and gradients of a layer are in what is alive inside the row."""
        return self.program.kinds[int(self.program.kind[row])].name in ("B", "I")

    def computes_forward(self, row: int) -> bool:
        """Whether tensors on their way to the host are in what is alive inside the row."""
        return self.program.kinds[int(self.program.kind[row])].name in ("F", "C", "R")


class _RankProgramme:
    """One pipeline rank's programme."""

    def __init__(self, memory: _Memory, number: int) -> None:
        self.memory, self.number = memory, number
        rows = memory.rows_of(number)
        self.blocks = sorted({int(memory.program.stage[row]) for row in rows} & set(range(memory.program.num_stages)))
        self.free = [(block, layer, price) for block in self.blocks for layer, price in memory.layers(block)]
        self.ways = {layer: self._ways(layer, price) for _, layer, price in self.free}
        self.over = self.untracked_bytes(memory.base)
        """Bytes of the peak next to the Program's tensors, as far as is known."""
        self.rows = self._fullest(memory.during)

    def _ways(self, layer: Layer, price: LayerPrice) -> tuple[Way, ...]:
        """The ways of a layer: repeated layers have a choice, an embedding or a head keeps what it keeps."""
        ways = layer_ways(price.context, offload=SHARES) if self.memory.offload else layer_ways(price.context)
        return ways if layer.call.first is not None else ways[:1]

    def smallest(self, layer: Layer) -> Way:
        """The way that keeps least, and of those the one that sends least to the host."""
        return min(self.ways[layer], key=lambda way: (way.bytes, way.offload_bytes))

    def _fullest(self, during: NDArray[np.float64]) -> set[int]:
        """Finds the fullest row among each stage's backwards, and among all other rows."""
        memory, rows, fullest = self.memory, self.memory.rows_of(self.number), dict[int, int]()
        for row in rows:
            # Each stage's backward has its own peak, since different layers are inside; -1 stands for all other rows
            # together.
            place = int(memory.program.stage[row]) if memory.computes_backward(row) else -1
            if place not in fullest or during[row] > during[fullest[place]]:
                fullest[place] = row
        return set(fullest.values())

    def solve(self, limit_bytes: int) -> dict[Layer, Way] | None:
        """The way of each layer that recomputes least within the limits; None where no choice fits."""
        programme = Programme()
        again = {layer: [self.memory.again_s(block, way) for way in self.ways[layer]] for block, layer, _ in self.free}
        # Variables are 0/1: takes[layer][i] is 1 if the layer goes the i-th way. Seconds are scaled to their sum so
        # that GAP is relative.
        total = sum(map(max, again.values())) or 1.0
        takes = {layer: [programme.variable(seconds / total) for seconds in again[layer]] for layer in again}
        for at in takes.values():
            # Each layer goes exactly one way.
            programme.equals(dict.fromkeys(at, 1.0), 1)
        self._copies(programme, takes, again, total)
        # Symmetry: bytes(before) <= bytes(after) for neighbours that are alike (see `_alike`).
        for before, after in self._alike():
            factors = {at: float(way.bytes) for way, at in zip(self.ways[before], takes[before], strict=True)}
            factors |= {at: -float(way.bytes) for way, at in zip(self.ways[after], takes[after], strict=True)}
            programme.at_most({at: value / limit_bytes for at, value in factors.items()}, 0)
        # Bytes are scaled by the limit: coefficients near 1 keep the solver's tolerances meaningful.
        for row in sorted(self.rows):
            for factors, room in self._limits(row, takes, limit_bytes):
                programme.at_most({at: value / limit_bytes for at, value in factors.items()}, room / limit_bytes)
        chosen = programme.solve(gap=GAP)
        if chosen is None:
            return None
        return {
            layer: next(way for way, variable in zip(self.ways[layer], at, strict=True) if chosen[variable])
            for layer, at in takes.items()
        }

    def _copies(
        self, programme: Programme, takes: dict[Layer, list[int]], again: dict[Layer, list[float]], total: float
    ) -> None:
        """What copies to the host and back cost next to forwards and backwards, and that the host has room."""
        memory = self.memory
        copied_bytes: dict[int, float] = {}
        for block in self.blocks if memory.offload else ():
            inside = [layer for own, layer, _ in self.free if own == block]
            each = [pair for layer in inside for pair in zip(takes[layer], self.ways[layer], again[layer], strict=True)]
            moved = {
                at: way.offload_bytes * memory.s_per_byte(block) / total for at, way, _ in each if way.offload_bytes
            }
            copied_bytes |= {at: float(way.offload_bytes * memory.alive) for at, way, _ in each if way.offload_bytes}
            for kind in ("F", "B") if moved else ():
                # over >= copies - what they hide under (and never negative): the objective counts what is exposed.
                over, room = programme.amount(1.0), memory.hidden_copy_s(kind, block) / total
                factors = dict(moved)
                for at, _, seconds in each if kind == "B" and room else ():  # what is recomputed is in the backward
                    factors[at] = factors.get(at, 0.0) - seconds / total
                programme.at_most({**factors, over: -1.0}, room)
        if copied_bytes and memory.host_room < inf:
            scale = max(memory.host_room, 1.0)
            programme.at_most({at: size / scale for at, size in copied_bytes.items()}, memory.host_room / scale)

    def _alike(self) -> Iterator[tuple[Layer, Layer]]:
        """Layers one after the other with the same ways. It is enough to look at choices in which the later one, whose
        backward comes first, keeps no less: what it lets go of makes room for what the earlier ones recompute. What is
        on the host needs room twice as it moves, so that there it need not be enough: with few layers all are looked
        at."""
        if self.memory.offload and len(self.free) <= FEW:
            return
        for (_, before, one), (_, after, other) in pairwise(self.free):
            same_stage = before.call is after.call and before.index + 1 == after.index
            if same_stage and self.ways[before] is self.ways[after] and one.context == other.context:
                yield before, after

    def _limits(
        self, row: int, takes: dict[Layer, list[int]], limit_bytes: int
    ) -> Iterator[tuple[dict[int, float], float]]:
        """(variable -> bytes, room) of what is held at a row; inside a backward for each layer, whose gradients and
        recomputed tensors are alive while those after it have let go of theirs."""
        memory = self.memory
        counts = memory.counts[row]
        # Bytes relative to the first way (everything kept), times the units that are held at this row.
        saved = {
            at: float((way.bytes - self.ways[layer][0].bytes) * int(counts[block]))
            for block, layer, _ in self.free
            for way, at in zip(self.ways[layer], takes[layer], strict=True)
        }
        if not memory.computes_backward(row):
            yield saved, limit_bytes - self.over - float(memory.during[row])
            if memory.offload and memory.computes_forward(row):
                yield from self._moving(row, takes, saved, limit_bytes)
            return
        room = limit_bytes - self.over - float(memory.during[row] - memory.inside[row])
        inside = [(layer, price) for block, layer, price in self.free if block == int(memory.program.stage[row])]
        # Layers run backward from the last: when this one computes, all later ones have let go of what they kept.
        for place, (layer, price) in enumerate(inside):
            factors = dict(saved)
            for way, at in zip(self.ways[layer], takes[layer], strict=True):
                # Tensors on their way back from the host are there twice: what is read and what is coming.
                factors[at] += way.price.remade_bytes + 2 * way.offload_bytes
            for later, _ in inside[place + 1 :]:
                for way, at in zip(self.ways[later], takes[later], strict=True):
                    factors[at] -= way.bytes
            yield factors, room - price.transient_bytes

    def _moving(
        self, row: int, takes: dict[Layer, list[int]], saved: dict[int, float], limit_bytes: int
    ) -> Iterator[tuple[dict[int, float], float]]:
        """The same of each layer of a forward, as its tensors go to the host."""
        memory, block = self.memory, int(self.memory.program.stage[row])
        room = limit_bytes - self.over - float(memory.during[row] - memory.inside[row])
        for own, layer, price in self.free:
            if own == block:
                factors = dict(saved)
                for way, at in zip(self.ways[layer], takes[layer], strict=True):
                    factors[at] += 2 * way.offload_bytes
                yield factors, room - price.output_bytes

    def learn(self, prediction: Prediction, limit_bytes: int) -> None:
        """Takes over from a prediction what the programme did not know: a fuller row, or more beside the tensors."""
        self.rows |= self._fullest(_during(prediction))
        # Half of the excess: the programme's own rows may explain the rest once the fuller row is among them.
        if (peak := prediction.memory[self.number].peak_bytes) > limit_bytes:
            self.over = max(self.over + (peak - limit_bytes) / 2, self.untracked_bytes(prediction))

    def untracked_bytes(self, prediction: Prediction) -> float:
        """Bytes of a prediction's peak that are not the Program's tensors: contexts, fragments."""
        rows = self.memory.rows_of(self.number)
        return prediction.memory[self.number].peak_bytes - float(_during(prediction)[rows.start : rows.stop].max())


def _plan(base: Plan, memory: _Memory, chosen: dict[Layer, Way]) -> Plan:
    """The plan with rules that say what each layer keeps, one pair for all layers that keep the same."""
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Layer]] = {}
    for layer in memory.pricing.graph.layers():
        if not chosen[layer].everything:
            alike.setdefault((chosen[layer].saved_names, chosen[layer].away), []).append(layer)
    rules: list[SavedRule] = []
    for (saved_names, away), layers in alike.items():
        for calls in format_layers(layers):
            rules.append(SavedRule(calls=calls, action="recompute"))
            if saved_names:
                rules.append(SavedRule(calls=calls, tensors=saved_names))
            if away:
                rules.append(SavedRule(calls=calls, tensors=away, action="offload"))
    return replace(base, saved=Saved(rules=tuple(rules)))
