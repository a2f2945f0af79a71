"""Sets of plans over devices of several kinds, from shapes down to points: each bounds itself and divides itself.

    OfShape ─ OfBlock ─┬─ OfNode (pipelines over kinds, rank by rank) ─┬─ OfRows (arrays of points) ─ predicted
                       └─ (replicas side by side) ─────────────────────┘

Bounds are those of the space (`devices`): seconds of a step, or shares of memory (`first_fit`). Leaves out the order in
which they are looked at (`best_first`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gnomon.search.best_first import Candidate, Search
from gnomon.search.mixed.bounds import SLACK, Longs
from gnomon.search.mixed.devices import MixedDevices
from gnomon.search.mixed.pipelines import Pipe, PipelineNode
from gnomon.search.mixed.point_bounds import PointRows
from gnomon.search.mixed.results import MixedFound
from gnomon.search.mixed.space import (
    MixedBlock,
    MixedSpace,
    Shape,
    divisions,
    equal_layers,
    layers_of_stages,
    point_of,
    shares_of,
)

PLAYED = 256
"""The number of points of a block whose schedule is played at once."""

Smaller = Iterator[tuple[float, Candidate]]
"""Candidates with bounds on them."""


def roots(devices: MixedDevices) -> Smaller:
    """The shapes of a space, or their blocks, with bounds. After the budget nothing is known of a shape's plans:
    neither that they run nor how long they take."""
    for shape, blocks in devices.space.by_shape:
        whole = OfShape(devices, shape, tuple(blocks), legal=False)
        if devices.keep_going():
            yield from whole.begun()
        else:
            yield 0.0, whole


def _offered(devices: MixedDevices, bound: float, candidate: Candidate, *, whole: bool = False) -> Smaller:
    """A candidate where it belongs, unless its bound says that it is too large."""
    if devices.excludes(bound):
        devices.counts.too_large += candidate.points
    else:
        yield devices.order(bound, whole=whole), candidate


@dataclass(frozen=True, slots=True, eq=False)
class OfShape:
    """Plans of one shape: kinds, axes and form are given."""

    devices: MixedDevices
    """What is searched, and what is kept of it."""
    shape: Shape
    """The shape."""
    blocks: tuple[MixedBlock, ...]
    """Its blocks."""
    legal: bool = True
    """Whether they are known to run, and one may fit."""

    likeness = None

    @property
    def points(self) -> int:
        """Counts the points of all blocks."""
        return sum(map(self.devices.space.count, self.blocks))

    @property
    def distance(self) -> tuple[int, ...]:
        """Shapes are the farthest from a plan."""
        return (0,)

    def expand(self, search: Search[MixedFound], bound: float) -> Smaller:
        """Yields the shape's blocks."""
        return self._spread() if self.legal else self.begun()

    def begun(self) -> Smaller:
        """Yields those blocks that may run, if any may fit."""
        devices, why = self.devices, self.devices.illegal(self.shape, self.blocks)
        for block, wrong in why.items():
            if wrong:
                devices.counts.reject(wrong, devices.space.count(block))
        legal = tuple(block for block, wrong in why.items() if not wrong)
        if not legal:
            return
        able, ratio = OfShape(devices, self.shape, legal), devices.bounds.roomiest_ratio(self.shape, legal)
        if self.shape in devices.large.known_too_large or ratio > 1:
            devices.too_large(self.shape, able.points)
        elif devices.shapes_apart:
            yield from _offered(devices, ratio, able)
        else:
            yield from able._spread()

    def _spread(self) -> Smaller:
        """Yields the blocks that may fit."""
        devices = self.devices
        for block in self.blocks:
            if block in devices.large.known_too_large or devices.bounds.least_ratio(block) > 1:
                devices.too_large(block, devices.space.count(block))
            else:
                yield from _offered(devices, devices.of_block(block), OfBlock(devices, block))


@dataclass(frozen=True, slots=True, eq=False)
class OfBlock:
    """Plans that differ in shares or layers, ZeRO stage and schedule."""

    devices: MixedDevices
    """What is searched, and what is kept of it."""
    block: MixedBlock
    """The block."""

    likeness = None

    @property
    def points(self) -> int:
        """Counts all of its points."""
        return self.devices.space.count(self.block)

    @property
    def distance(self) -> tuple[int, ...]:
        """Blocks come after shapes."""
        return (-1,)

    def expand(self, search: Search[MixedFound], bound: float) -> Smaller:
        """Yields its points, or pipelines of which no rank has its layers yet."""
        return self._replicas(search) if self.block.shape.form == "replicas" else self._pipelines()

    def _replicas(self, search: Search[MixedFound]) -> Smaller:
        """Yields every way to share a microbatch: a step is as long as that of the worker that takes longest."""
        block, space = self.block, self.devices.space
        shape = block.shape
        shares = _shares_array(space.global_batch // block.microbatches, space.workers(shape), space.equal)
        layers = np.array(equal_layers(space.num_layers, shape.pp * shape.virtual))
        # All rows have the same layers: a view without a copy.
        every = np.broadcast_to(layers, (len(shares), len(layers)))
        variants = space.variants(shape, block.microbatches)
        for rows in self.devices.completed(block, variants, every, shares, search.worst()):
            yield from OfRows(self.devices, rows).offered(search)

    def _pipelines(self) -> Smaller:
        devices, block = self.devices, self.block
        pipe = Pipe(devices.rough, devices.bounds, block)
        every = devices.space.variants(block.shape, block.microbatches)
        members = devices.space.members(block.shape, block.microbatches)
        devices.counts.too_large += members * (len(every) - len(pipe.variants))
        if not pipe.variants:
            devices.large.added.add(block)
        # Split and whole backward have different bounds on what follows a rank, so they are two trees.
        for split in (False, True):
            node = PipelineNode(pipe, split, (), 0, 0.0, 0.0)
            if node.variants:
                yield from _offered(devices, float(devices.of_rest(node, 0, 0.0, 0)), OfNode(devices, node))


@dataclass(frozen=True, slots=True, eq=False)
class OfNode:
    """Pipelines over kinds whose first ranks have their layers."""

    devices: MixedDevices
    """What is searched, and what is kept of it."""
    node: PipelineNode
    """The ranks that have their layers."""

    likeness = None

    @property
    def points(self) -> int:
        """Counts the whole pipelines that begin so, in each variant."""
        return _completions(self.devices.space, self.node) * len(self.node.variants)

    @property
    def distance(self) -> tuple[int, ...]:
        """Partial pipelines come after blocks."""
        return (-2,)

    def expand(self, search: Search[MixedFound], bound: float) -> Smaller:
        """Yields one rank more, with every number of layers; at the last but one, whole pipelines."""
        devices, node = self.devices, self.node
        devices.nodes += 1
        pipe, rank = node.pipe, len(node.layers)
        shape, virtual, num_layers = pipe.shape, pipe.virtual, devices.space.num_layers
        if devices.space.equal:
            yield from self._whole(np.array([equal_layers(num_layers, shape.pp * virtual)]), search)
            return
        rest, after = num_layers - node.used, shape.pp - rank - 1
        # Every later rank needs `virtual` layers at least, one for each of its stages.
        choices = np.arange(virtual, rest - virtual * after + 1)
        # The rank before the last: whatever it takes leaves the last one the rest, so the pipelines are whole.
        if after == 1:
            columns = [np.full(len(choices), n) for n in node.layers]
            yield from self._whole(
                layers_of_stages([*columns, choices, rest - choices], virtual, shape.v_placement), search
            )
            return
        forward, back, first = devices.ranks.seconds(node, choices)
        # With clipping, what is ahead of the next rank: one forward of each first stage, and the way back through it (a
        # split backward may leave its weight gradients for later).
        step = first[0] + (0.0 if node.split else first[1]) if devices.clip else 0.0 * choices
        # Both have an entry for each choice: 0.0 * choices is a row of zeros.
        ahead, used = node.ahead + step, node.used + choices
        most = devices.of_ranks(node, node.ahead + pipe.count * (forward + back))
        # A node's bound is the larger of what its ranks take by themselves and what the rest takes behind them.
        bounds = np.maximum(most, devices.of_rest(node, used, ahead, rank + 1)) + 0.0 * choices
        able = devices.ranks.may_begin(node, choices)
        for i, layers in enumerate(choices.tolist()):
            own = float(most[i]) if np.ndim(most) else 0.0
            child = OfNode(
                devices, PipelineNode(pipe, node.split, (*node.layers, layers), int(used[i]), float(ahead[i]), own)
            )
            if able[i]:
                yield from _offered(devices, float(bounds[i]), child)
            else:
                devices.counts.too_large += child.points

    def _whole(self, layers: Longs, search: Search[MixedFound]) -> Smaller:
        """Points of whole pipelines. layers: [points, stages]."""
        none = np.zeros((len(layers), 0), np.int64)
        for rows in self.devices.completed(self.node.pipe.block, self.node.variants, layers, none, search.worst()):
            yield from OfRows(self.devices, rows).offered(search)


@dataclass(frozen=True, slots=True, eq=False)
class OfRows:
    """Complete plans of one block and variant, in order of their bounds."""

    devices: MixedDevices
    """What is searched, and what is kept of it."""
    rows: PointRows
    """The plans."""

    likeness = None

    @property
    def points(self) -> int:
        """Counts the rows, each of which is one point."""
        return len(self.rows.bounds)

    @property
    def distance(self) -> tuple[int, ...]:
        """Points are the nearest to a plan, and those that were played come after the others."""
        return (-3 - self.rows.played,)

    def offered(self, search: Search[MixedFound]) -> Smaller:
        """Yields these where they belong; those that are too slow already are counted."""
        bounds = self.rows.bounds
        # Rows are sorted by bound, so those below the worst kept plan are a prefix.
        able = int(np.searchsorted(bounds * (1 - SLACK), search.worst()))
        self.devices.counts.too_slow += len(bounds) - able
        if able:
            unplayed = OfRows(self.devices, self.rows.part(slice(0, able)))
            yield from _offered(self.devices, float(bounds[0]), unplayed, whole=True)

    def expand(self, search: Search[MixedFound], bound: float) -> Smaller:
        """The plan with the least bound is predicted, the rest comes later; before that, those with the least bounds
        are played together, which gives better ones."""
        devices, rows = self.devices, self.rows
        if rows.played:
            # rows[0] has the least bound of its set: predict it, offer the rest again under the bound of the next.
            layers, shares = tuple(rows.layers[0].tolist()), tuple(rows.shares[0].tolist())
            devices.price(point_of(rows.block, layers, shares, *rows.variant), search)
            rest = rows.part(slice(1, None))
        else:
            # Not played yet: the first PLAYED rows are played together (one array), which raises their bounds; the rest
            # wait.
            rest = rows.part(slice(PLAYED, None))
        if len(rest.bounds):
            yield from OfRows(devices, rest).offered(search)
        if not rows.played:
            yield from OfRows(devices, devices.played(rows.part(slice(0, PLAYED)))).offered(search)


def _completions(space: MixedSpace, node: PipelineNode) -> int:
    """Counts the whole pipelines that begin as a node does."""
    ranks = node.pipe.shape.pp - len(node.layers)
    if space.equal or not ranks:
        return 1
    return divisions(space.num_layers - node.used, ranks, node.pipe.virtual)


@lru_cache(maxsize=1024)
def _shares_array(size: int, workers: tuple[int, ...], equal: bool) -> Longs:
    """[choices, kinds] every way to share a microbatch."""
    return np.array(shares_of(size, workers, equal), np.int64).reshape(-1, len(workers))
