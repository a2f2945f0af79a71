"""Bounds of single points in memory: what a rank holds between steps and on the fullest moment of one, at least.

`held_bytes` bounds a rank's activations and workspaces from below at sampled moments of a step; `tensor_room` inverts
the model of the allocator: the most bytes of tensors with which the peak stays under a cap. In bytes; a plan that
these refuse does not fit. Leaves out time (`point_time`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gnomon.graph import DTYPE_BITS
from gnomon.plans import Plan
from gnomon.prices.allocator import place_memory
from gnomon.search.bounds.families import Pipeline, SearchJob
from gnomon.search.bounds.in_flight import Flight
from gnomon.search.bounds.layer_tables import KindTable
from gnomon.search.bounds.point_time import Sharding
from gnomon.sharding.parameters import least_state_bytes, undivided_bytes
from gnomon.software import Stack

Doubles = NDArray[np.float64]


def state_sizes(base: Plan, stack: Stack) -> tuple[tuple[float, int], ...]:
    """(bytes of an element that stay on a rank between steps, the ZeRO stage from which they are divided)."""
    precision, optimizer = base.precision, base.optimizer
    param = 0 if optimizer.offload_parameters else DTYPE_BITS[precision.param] // 8
    states = least_state_bytes(optimizer, precision)
    master = 0 if precision.master == "none" else DTYPE_BITS[precision.master] // 8
    # Offload of a share of the layers leaves some states here; as layers differ in size, none are counted (a lower
    # bound).
    stays = 1.0 if optimizer.offload is None else 0.0
    unbucketed = stack.gradients.bucketed is False
    return (
        (param, 3),
        # Gradients are not there all the step where they are allocated by the first backward (no buckets), or go to an
        # optimizer on the host as they are made.
        (0 if unbucketed or optimizer.offload is not None else DTYPE_BITS[precision.grad] // 8, 2),
        (stays * (master + states), 1),
    )


def tensor_room(job: SearchJob, cap_bytes: float, groups: int) -> float:
    """Bytes of tensors, at most, with which a rank's peak stays within `cap_bytes`.

    The peak does not fall as tensors take more, so the largest number that passes divides those that fit from those
    that do not. groups: at least how many groups the rank communicates in. Of several kinds of devices, the largest.
    """
    return max(_tensor_room(job, device_index, cap_bytes, groups) for device_index in range(len(job.devices)))


def _tensor_room(job: SearchJob, index: int, cap_bytes: float, groups: int) -> float:
    device = job.devices[index]
    cap = min(cap_bytes, device.memory_bytes)

    def fits(allocated: int) -> bool:
        return place_memory(device, job.stack, allocated, groups).peak_bytes <= cap

    low, high = 0, device.memory_bytes
    if not fits(low):  # not even an empty rank: the context and communicators alone are too large
        return -1.0
    # Bisection: the peak does not fall with more tensors (`place_memory`), so the largest number that fits is well
    # defined.
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return float(high)


def least_held(table: KindTable, pipeline: Pipeline) -> Doubles:
    """[ranks, microbatch sizes] bytes of activations during the last backward of a stage that holds one unit: less
    than any moment of a step that `held_bytes` looks at."""
    saved_bytes = pipeline.split.counts @ table.kept_bytes
    for order, stages in pipeline.distinct:
        # order[-1] is the last layer of the stage, the first to run backward: all of the stage's activations are still
        # held.
        saved_bytes[stages] += table.inside_bytes[order[-1]]
    return pipeline.most_of_rank(saved_bytes)


def held_bytes(
    table: KindTable,
    column: int,
    pipeline: Pipeline,
    flight: Flight,
    inside: Doubles,
    *,
    frees: bool = False,
    waiting: Doubles | None = None,
) -> Doubles:
    """[ranks] bytes of activations and of what comes and goes with a backward, at least, on the fullest moment.

    During a backward of stage s a rank holds the activations of every unit that is under way on each of its stages
    (counted from the order of rows) and what the backward itself needs: for the last layer of the stage all of that
    layer's, for an earlier one what it needs beyond what later layers have let go. During a forward the same without
    the backward. Any such moment is a bound; the greatest is returned. Messages and prefetched parameters only add to
    it. inside: [stages] what a backward needs itself (`inside_bytes`). frees: the stack frees between the parts of a
    backward, and what stays is not counted. waiting: [stages] gradients that stay from a stage's first weight gradients
    to the end of the step (ZeRO 2 that reduces after the last backward).
    """
    saved_bytes = pipeline.split.counts @ table.kept_bytes[:, column]
    in_flight = flight.open_units
    # [rows chosen, stages] units x [stages] bytes of one unit, summed over the stages of the row's rank.
    least = ((in_flight.open if frees else in_flight.counts) * saved_bytes[in_flight.stages]).sum(axis=1)
    least += np.where(in_flight.backward, inside[in_flight.inside], 0.0)
    if waiting is not None:
        least += (in_flight.begun * waiting[in_flight.stages]).sum(axis=1)
    # The greatest over each rank's rows; starts are where the ranks' rows begin.
    most: Doubles = np.maximum.reduceat(least, in_flight.starts)
    return most


def inside_bytes(table: KindTable, column: int, pipeline: Pipeline, extra: Doubles, *, by_layer: bool) -> Doubles:
    """[stages] what a backward needs beside activations. extra: [kinds] whole gradients (and parameters) of a layer,
    where ZeRO divides them; by_layer: it has those of one layer at a time."""
    out = np.zeros(len(pipeline.split.order))
    # order[::-1]: backward begins at the last layer.
    for order, stages in pipeline.distinct:
        out[stages] = _worst(order[::-1], table, column, extra, by_layer=by_layer)
    return out


def _worst(kinds: NDArray[np.int64], table: KindTable, column: int, extra: Doubles, *, by_layer: bool) -> float:
    """The worst of a stage's layers, the last first."""
    inside, saved_bytes = table.inside_bytes[:, column], table.kept_bytes[:, column]
    if by_layer:  # ZeRO 3: the last layer runs backward first, while every activation is still held
        last = int(kinds[0])
        return float(inside[last] + extra[last])
    # Layers behind in the order have let go of what they kept when an earlier one computes. ZeRO 2 has two buckets of
    # whole gradients: one is filled while the other is reduced.
    freed = np.concatenate([[0.0], np.cumsum(saved_bytes[kinds])[:-1]])
    return float((inside[kinds] - freed).max() + 2 * extra[kinds].max())


def unsharded(sharding: Sharding, *, split_backward: bool) -> Doubles:
    """[kinds] bytes of whole parameters and gradients that come and go with a backward: of the layer itself under
    ZeRO 3, of a bucket under ZeRO 2. Not counted, because they are not there at every moment that is looked at:
    XLA's, which has them one by one where room is short; gradients without buckets, which may be allocated only when
    the logits are gone. split_backward: input and weight gradients are rows of their own, and the former have no
    gradients of parameters."""
    out = np.zeros(len(sharding.collectives))
    if any(device.kind == "tpu" for device in sharding.job.devices):
        return out
    if sharding.zero < 2 or (sharding.zero == 2 and sharding.job.stack.gradients.bucketed is False):
        return out
    bucket = sharding.job.space.base.overlap.bucket_bytes
    for i, of_kind in enumerate(sharding.collectives):
        if not split_backward and sharding.job.stack.gradients.bucketed is not False:
            reduced = sum(c.bytes for c in of_kind if c.kind == "reduce_scatter")
            out[i] = bucket if bucket is not None and sharding.zero == 2 else reduced
        if sharding.zero == 3:
            out[i] += sum(c.bytes for c in of_kind if c.when == "before_forward")
        if sharding.away:
            out[i] += undivided_bytes(sharding.layers.prices[i].sharded, sharding.mesh, sharding.precision)
    return out
