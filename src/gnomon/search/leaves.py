"""Bounds of single points: what sharding and overlap add to a family's numbers, in time and memory.

`Sharding` holds, for one way of sharding and each kind of layer, the bytes that are reduced and gathered, and what a
rank holds between steps. `memory_bound` is at least one moment of every step. Leaves out what a schedule costs
(`bounds.time_bound`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gnomon.graph import DTYPE_BITS
from gnomon.plans import Mesh
from gnomon.plans.parts import Optimizer
from gnomon.prices.allocator import device_overhead, reserved_estimate, workspace_bytes
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.curves import curves_for
from gnomon.prices.links import AxisLink
from gnomon.prices.optimizer import accumulate_seconds, optimizer_seconds
from gnomon.prices.stream import stream_seconds
from gnomon.search.bounds import GRID_S, Actions, Ends, Family, Job, Pipeline, no_ends
from gnomon.search.flight import Flight
from gnomon.search.tables import KindTable, Split
from gnomon.sharding import ParameterCollective
from gnomon.sharding.parameters import STATE_TENSORS, parameter_collectives, shard_ranks

Doubles = NDArray[np.float64]


class Sharding:
    """One way of sharding: dp_replicate x dp_shard and a ZeRO stage."""

    def __init__(self, family: Family, replicas: int, shards: int, zero: int) -> None:
        self.job, self.table = family.job, family.table
        base = self.job.space.base
        self.mesh: Mesh = replace(family.mesh, pp=1, dp_replicate=replicas, dp_shard=shards)
        self.optimizer: Optimizer = replace(base.optimizer, zero=zero)  # type: ignore[arg-type]
        self.precision = base.precision
        divided = shards * family.cp > 1
        self.zero = zero if divided else 0
        """The stage that has an effect on rows."""
        self.pp = family.pp
        self.known = self.job.placed(self.mesh.world_size)

    @cached_property
    def links(self) -> Mapping[str, AxisLink]:
        """What its groups run over."""
        return self.job.links(replace(self.mesh, pp=self.pp))

    @cached_property
    def collectives(self) -> tuple[tuple[ParameterCollective, ...], ...]:
        """[kinds] of each layer's parameters and gradients."""
        return tuple(
            parameter_collectives(price.sharded, self.mesh, self.optimizer, self.precision)
            for price in self.table.prices
        )

    def sizes(self, kind: str, when: str) -> dict[str, Doubles]:
        """Group of axes -> [kinds] bytes."""
        found: dict[str, Doubles] = {}
        for i, each in enumerate(self.collectives):
            for c in each:
                if c.kind == kind and c.when == when:
                    row = found.setdefault("+".join(c.axes), np.zeros(len(self.collectives)))
                    row[i] += c.bytes
        return found

    def seconds(self, kind: str, when: str, counts: Doubles, buckets: Doubles) -> Doubles:
        """[stages] of a collective in so many buckets, nothing beside it. counts: [stages, kinds]."""
        total = np.zeros(len(counts))
        for axes, sizes in self.sizes(kind, when).items() if self.known else ():
            link = self.links[axes]
            each = np.asarray(collective_seconds(kind, counts @ sizes / buckets, link), float)
            total += np.where(counts @ sizes > 0, buckets * each * self.job.slower(link), 0.0)
        return total

    @cached_property
    def adding(self) -> Doubles:
        """[kinds] seconds of adding a layer's weight gradients to their buffer; 0 for one microbatch, which need not."""
        device, precision = self.table.device, self.precision
        elements = self.table.elements.sum(axis=1)
        result = DTYPE_BITS[precision.compute] // 8
        out = np.zeros(len(elements))
        for i, count in enumerate(elements.tolist()):
            if not count:
                continue
            if self.optimizer.zero >= 2 and self.mesh.dp_shard * self.mesh.cp > 1:
                moved = count * result, count * (DTYPE_BITS[precision.reduce] // 8)
                out[i] = float(stream_seconds(*moved, device, curves_for(device), kernels=1))
            elif precision.grad != precision.compute:
                fused = bool(self.job.stack.grad_accumulation_fused)
                tensors = int(self.table.tensors[i])
                price = accumulate_seconds(
                    count, precision, device, curves_for(device), fused=fused, tensors=tensors
                )
                out[i] = float(price.device_s)
        return out

    @cached_property
    def copying(self) -> Doubles:
        """[kinds] seconds of copying gathered parameters into place, in forward and again in backward (ZeRO 3)."""
        out = np.zeros(len(self.collectives))
        if self.optimizer.zero != 3 or not self.optimizer.reshard_after_forward:
            return out
        device = self.table.device
        for i, each in enumerate(self.collectives):
            if size := sum(c.bytes for c in each if c.when == "before_forward"):
                out[i] = float(stream_seconds(size, size, device, curves_for(device)))
        return out

    def ends(self, parts: Split, act: Actions, *, overlap: bool, split_backward: bool) -> Ends:
        """What begins and ends a step, stage by stage, [stages, 1]. Under ZeRO 3, where each layer has rows of its
        own, nothing is counted here: see `streams`."""
        counts = parts.counts
        if self.zero == 3:
            return no_ends(len(counts))
        layers = np.maximum(counts.sum(axis=1), 1.0)
        buckets = self._buckets(counts, layers) if overlap else np.ones(len(counts))
        forward, back = act.forward[:, 0], (act.weight if split_backward else act.whole)[:, 0]
        reduce = self._left("reduce_scatter", "after_backward", counts, buckets, back if overlap else None)
        if self.zero:
            back = np.maximum(back - self.seconds("reduce_scatter", "after_backward", counts, buckets), 0.0)
        both = self._left("all_reduce", "after_backward", counts, buckets, back if overlap else None)
        ahead = self._buckets(counts, layers, "all_gather", "after_step") if overlap else buckets
        gather = self._left("all_gather", "after_step", counts, ahead, forward if overlap else None)
        each = reduce if self.zero == 2 and overlap else np.zeros(len(counts))
        if not self.zero:
            gather = reduce = np.zeros(len(counts))
        found = (self._update(parts), gather, reduce + both, each)
        update, gather, reduce, each = (np.asarray(value)[:, None] for value in found)
        return Ends(update=update, gather=gather, reduce=reduce, each=each, norm=0.0)

    def _buckets(
        self, counts: Doubles, layers: Doubles, kind: str = "", when: str = "after_backward"
    ) -> Doubles:
        size = self.job.space.base.overlap.bucket_bytes
        if size is None:
            return layers
        kind = kind or ("reduce_scatter" if self.zero else "all_reduce")
        total = sum((counts @ sizes for sizes in self.sizes(kind, when).values()), np.zeros(len(counts)))
        return np.maximum(1.0, np.ceil(total / size))

    def _left(self, kind: str, when: str, counts: Doubles, buckets: Doubles, beside: Doubles | None) -> Doubles:
        whole = self.seconds(kind, when, counts, buckets)
        if beside is None:
            return np.maximum(whole - GRID_S, 0.0)
        left = np.maximum(whole / buckets, whole - beside * (buckets - 1) / buckets)
        return np.maximum(left - GRID_S, 0.0)

    def elements(self, parts: Split) -> Doubles:
        """[stages, 2] dense and routed parameter elements of a rank, shared ones once."""
        found = parts.counts @ self.table.elements
        for stage, kind, tensor in parts.repeated:
            found[stage, 0] -= int(self.table.prices[kind].sharded.local_elements[tensor])
        return found

    def _ways(self) -> tuple[int, int]:
        return shard_ranks(self.mesh, experts=False), shard_ranks(self.mesh, experts=True)

    def static_bytes(self, parts: Split) -> Doubles:
        """[stages] bytes that stay on a rank between steps."""
        precision, optimizer = self.precision, self.optimizer
        states = STATE_TENSORS[optimizer.kind] * (DTYPE_BITS[precision.states] // 8)
        master = 0 if precision.master == "none" else DTYPE_BITS[precision.master] // 8
        stays = 1.0 if optimizer.offload is None else 1.0 - optimizer.offload.fraction
        kinds = (
            (DTYPE_BITS[precision.param] // 8, 3),
            (DTYPE_BITS[precision.grad] // 8, 2),
            (stays * (master + states), 1),
        )
        total = np.zeros(len(parts.counts))
        for column, ways in enumerate(self._ways()):
            elements = self.elements(parts)[:, column]
            for size, first in kinds:
                total += (np.ceil(elements / ways) if optimizer.zero >= first else elements) * size
        return total

    def _update(self, parts: Split) -> Doubles:
        sharded = self.optimizer.zero >= 1
        elements = self.elements(parts)
        owned = sum(
            np.ceil(elements[:, column] / (ways if sharded else 1)) for column, ways in enumerate(self._ways())
        )
        tensors = parts.counts @ self.table.tensors
        done: dict[tuple[float, float], float] = {}
        for pair in zip(np.asarray(owned).tolist(), tensors.tolist(), strict=True):
            if pair not in done:
                price = optimizer_seconds(
                    max(int(pair[0]), 1),
                    self.optimizer,
                    self.precision,
                    self.table.device,
                    curves_for(self.table.device),
                    self.job.stack,
                    tensors=max(1, round(pair[1])),
                )
                done[pair] = max(float(price.device_s), price.kernels * self.table.launch_s) - GRID_S
        return np.array([done[pair] for pair in zip(np.asarray(owned).tolist(), tensors.tolist(), strict=True)])

    def streams(self, parts: Split, rank_of: NDArray[np.int64], count: int) -> float:
        """Seconds of the busiest communication stream under ZeRO 3.

        Rows of a stream run one after another, so a step takes at least their sum. A pass of a microbatch over a stage
        reads its layers one by one; a gather serves neighbouring reads of one layer, so of two passes that follow each
        other at most one layer is shared: each pass gathers all layers but one. Gradients are reduced once a
        microbatch and layer.
        """
        if self.zero != 3 or not self.known:
            return 0.0
        one = np.eye(len(self.collectives))
        alone = np.ones(len(one))
        reduced = self.seconds("reduce_scatter", "after_backward", one, alone)
        gathered = self.seconds("all_gather", "before_forward", one, alone)
        total = parts.counts @ np.maximum(reduced - GRID_S, 0.0) * count
        found = float(np.bincount(rank_of, total).max())
        if self.optimizer.reshard_after_forward:
            present = np.where(parts.counts > 0, gathered, 0.0).max(axis=1)
            passes = 2 * count * (parts.counts @ np.maximum(gathered - GRID_S, 0.0) - present)
            found = max(found, float(np.bincount(rank_of, np.maximum(passes, 0.0)).max()))
        return found


def room(job: Job, cap_bytes: float, groups: int) -> float:
    """Bytes of tensors, at most, with which a rank's peak stays within `cap_bytes`.

    The peak does not fall as tensors take more, so the largest number that passes divides those that fit from those
    that do not. groups: at least how many groups the rank communicates in. Of several kinds of devices, the largest.
    """
    return max(_room(job, device_index, cap_bytes, groups) for device_index in range(len(job.devices)))


def _room(job: Job, index: int, cap_bytes: float, groups: int) -> float:
    device = job.devices[index]
    outside = device_overhead(device, job.stack, groups)
    limit = device.memory_bytes - outside

    def fits(allocated: float) -> bool:
        return reserved_estimate(allocated, 1, job.stack, limit_bytes=limit) + outside <= min(cap_bytes, device.memory_bytes)

    low, high = 0.0, float(device.memory_bytes)
    if not fits(low):
        return -1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high


def memory_bound(
    table: KindTable,
    column: int,
    pipeline: Pipeline,
    static: Doubles,
    sharding: Sharding,
    found: Flight | None,
) -> float:
    """Bytes of tensors on the fullest rank, at least.

    During a backward of stage s a rank holds what stays between steps, the activations of every unit that is under way
    on each of its stages (counted from the order of rows; without `found` at least the unit's own), and what the
    backward itself needs: for the last layer of the stage all of that layer's, for an earlier one what it needs beyond
    what later layers have let go. During a forward the same without the backward. Any such moment is a bound; the
    greatest is returned. Messages and prefetched parameters only add to it.
    """
    kept = pipeline.split.counts @ table.kept_bytes[:, column]
    inside = _inside(table, column, pipeline.split, sharding)
    static = static + workspace_bytes(table.device)
    if found is None:
        by_rank = np.bincount(pipeline.rank_of, static)
        return float((by_rank + [(kept + inside)[pipeline.rank_of == r].max() for r in range(len(by_rank))]).max())
    most = 0.0
    for held in found.held:
        during = held.counts @ kept[held.stages] + np.where(held.backward, inside[held.stages][held.inside], 0.0)
        most = max(most, float(static[held.stages].sum() - workspace_bytes(table.device) * (len(held.stages) - 1)
                               + during.max()))  # fmt: skip
    return most


def _inside(table: KindTable, column: int, parts: Split, sharding: Sharding) -> Doubles:
    """[stages] what a backward needs beside activations."""
    done: dict[bytes, float] = {}
    out = np.zeros(len(parts.order))
    extra = _unsharded(sharding)
    for stage, order in enumerate(parts.order):
        key = order.tobytes()
        if key not in done:
            done[key] = _worst(order[::-1], table, column, extra, by_layer=sharding.zero == 3)
        out[stage] = done[key]
    return out


def _worst(kinds: NDArray[np.int64], table: KindTable, column: int, extra: Doubles, *, by_layer: bool) -> float:
    """Of the layers of a stage, the last first."""
    inside, kept = table.inside_bytes[:, column], table.kept_bytes[:, column]
    if by_layer:
        last = int(kinds[0])
        return float(inside[last] + extra[last])
    freed = np.concatenate([[0.0], np.cumsum(kept[kinds])[:-1]])
    return float((inside[kinds] - freed).max() + 2 * extra[kinds].max())


def _unsharded(sharding: Sharding) -> Doubles:
    """[kinds] whole parameters and gradients that come and go: of the layer itself under ZeRO 3, of buckets under 2."""
    out = np.zeros(len(sharding.collectives))
    if sharding.zero < 2:
        return out
    bucket = sharding.job.space.base.overlap.bucket_bytes
    for i, each in enumerate(sharding.collectives):
        if bucket is not None and sharding.zero == 2:
            out[i] = bucket
            continue
        out[i] = sum(c.bytes for c in each if c.kind == "reduce_scatter")
        if sharding.zero == 3:
            out[i] += sum(c.bytes for c in each if c.when == "before_forward")
    return out


def groups_of(sharding: Sharding, world: int, clip: bool) -> int:
    """Groups that a rank communicates in, at least: the pipeline, the norm's, one of data-parallel ranks."""
    axes: Sequence[int] = (sharding.mesh.dp_replicate * sharding.mesh.dp_shard * sharding.mesh.cp,)
    return (sharding.pp > 1) + (clip and world > 1) + sum(size > 1 for size in axes)
