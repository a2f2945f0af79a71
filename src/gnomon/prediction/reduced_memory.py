"""Memory of gradients on their way, as Gnomon's runtime holds them: when a reduction is waited for, and copies for it.

`waited_for` is the row at which a reduction is over for memory; `copies` are the gradients of several layers that are
copied next to each other for one reduce-scatter (`runtime.parameters.shards`). Leaves out how large gradients are
(`memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnomon.prediction.stage import StagePrice, width
from gnomon.prediction.step import Pricing
from gnomon.program import Program
from gnomon.sharding.parameters import local_elements, shard_ranks


class Copy(NamedTuple):
    """Bytes that come or go."""

    row: int
    """The row at which they do."""
    bytes: float
    """Negative: less."""
    at_start: bool
    """Of the row; otherwise at its end."""


def gradient_bytes(stage: StagePrice, index: int) -> tuple[int, int]:
    """The bytes of a layer's gradient on one rank: whole, and this rank's part of it. Of what several layers of the
    stage hold (tied weights) there is one part, which comes with the last layer, whose backward is first."""
    layer, whole, part = stage.order[index], 0, 0
    later = _held_later(stage, index)
    for experts in (False, True):
        whole += local_elements(layer.sharded, experts=experts)
        own = local_elements(layer.sharded, experts=experts, without=later)
        part += -(-own // shard_ranks(stage.mesh, experts=experts))
    size = width(stage.plan.precision.grad)
    return whole * size, part * size


def made_each_step(pricing: Pricing) -> bool:
    """Whether gradients come in the first backward of a step and go with its update: where the stack frees them, and
    nothing else holds room for them all (a reducer's buckets, an optimizer on the host, turns)."""
    optimizer, stage = pricing.plan.optimizer, pricing.stages[0]
    one_replica = stage.mesh.dp_replicate * stage.mesh.dp_shard * stage.mesh.cp == 1
    free = optimizer.offload is None and not optimizer.offload_parameters and pricing.turns is None
    return bool(pricing.stack.gradients.freed_each_step) and free and (one_replica or optimizer.zero == 3)


def first_backwards(program: Program) -> list[int]:
    """The first row of each rank class and stage of the Program that makes gradients of parameters."""
    makes = [i for i, kind in enumerate(program.kinds) if kind.name in ("B", "W")]
    seen: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero(np.isin(program.kind, makes)).tolist():
        cls = int(np.searchsorted(program.class_ptr, row, side="right")) - 1
        seen.setdefault((cls, int(program.stage[row])), row)
    return list(seen.values())


def step_gradients(program: Program, pricing: Pricing) -> list[Copy]:
    """Gradients that come in a step's first backwards, and go at the end of its last update."""
    if not made_each_step(pricing):
        return []
    moves, class_bytes = list[Copy](), dict[int, float]()
    for row in first_backwards(program):
        number, index = pricing.blocks[int(program.stage[row])]
        stage = pricing.stages[number]
        size = stage.static_bytes()["gradients"] if index < 0 else gradient_bytes(stage, index)[1]
        moves.append(Copy(row, float(size), True))
        if pricing.plan.overlap.optimizer and index >= 0:  # the update of the layer is over before the next backward
            moves.append(Copy(row, -float(size), False))
            continue
        cls = int(np.searchsorted(program.class_ptr, row, side="right")) - 1
        class_bytes[cls] = class_bytes.get(cls, 0.0) + size
    return moves + [Copy(int(program.class_ptr[cls + 1]) - 1, -size, False) for cls, size in class_bytes.items()]


def _held_later(stage: StagePrice, index: int) -> frozenset[str]:
    """Parameters of a layer that a later one of the stage holds too."""
    after = {
        layer.call.parameter_name(tensor.name, layer.index)
        for layer, price in zip(stage.in_order[index + 1 :], stage.order[index + 1 :], strict=True)
        for tensor in price.sharded.block.parameters
    }
    mine = stage.in_order[index]
    own = stage.order[index].sharded.block.parameters
    return frozenset(t.name for t in own if mine.call.parameter_name(t.name, mine.index) in after)


def waited_for(program: Program, pricing: Pricing) -> NDArray[np.int64]:
    """[rows] the row that waits for a reduction which begins there; the class's last one if none does. Under ZeRO 2
    that is the next backward too, unless each layer has its own rows. One rank alone waits for nobody."""
    if pricing.plan.mesh.data_ranks * pricing.plan.mesh.cp == 1:
        return np.arange(program.num_rows)
    until = {"REDUCE_GRAD", "NORM", "OPT", "D2H"}
    if pricing.plan.optimizer.zero == 2 and pricing.blocks[0][1] < 0:
        until |= {"B", "W"}
    waits = np.isin(program.kind, [i for i, kind in enumerate(program.kinds) if kind.name in until])
    waiter = np.arange(program.num_rows)
    for cls in range(program.num_classes):
        low, high = int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])
        # side="right": a row is not its own wait, the next one is.
        stops = np.append(low + np.flatnonzero(waits[low:high]), high - 1)
        waiter[low:high] = stops[np.minimum(np.searchsorted(stops, np.arange(low, high), side="right"), len(stops) - 1)]
    return waiter


def copies(program: Program, pricing: Pricing) -> Sequence[Copy]:
    """The bytes that each reduction of several layers under ZeRO copies its gradients into. Under 1 the copy is there
    until the reduction is waited for. Under 2 and 3 the gradients themselves go as soon as they are copied: only within
    the row are there both."""
    if pricing.stack.gradients.bucketed is not False or not pricing.plan.optimizer.zero:
        return ()
    waiter, moved = waited_for(program, pricing), list[Copy]()
    for row, override in program.overrides.items():
        key = program.keys[program.key[row]]
        if key.kind == "REDUCE_GRAD" and ".." in override.name:
            size = pricing.amounts(key)[0]
            ends = (int(waiter[row]), True) if pricing.plan.optimizer.zero == 1 else (row, False)
            moved += (Copy(row, size, True), Copy(ends[0], -size, ends[1]))
    return moved


def largest_bucket(pricing: Pricing, stage: int, reduced: Sequence[int]) -> int:
    """The bytes of the largest bucket of a stage whose layers have so many bytes of gradients each: of buckets of so
    many layers, or a layer's."""
    counts = pricing.plan.overlap.buckets or pricing.plan.overlap.fused
    if not counts:
        return max(reduced)
    first = sum(len(price.order) for price in pricing.stages[:stage])
    # Buckets are counted through all stages; of each, what lies in this one.
    ends = [0, *accumulate(counts)]
    return max(sum(reduced[max(a - first, 0) : max(b - first, 0)]) for a, b in pairwise(ends))
