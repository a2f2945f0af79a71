"""A bound on steps under ZeRO 3 with what kernels lose to the collectives beside them (`prediction.contention`).

`slowed` follows the two rounds of `contended`: what is sure to overlap with computing slows it, and slower computing
has more beside it. Leaves out actions that wait for each other's gathers (`point_time.waiting`, `alone`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.prediction.contention import SLOWED
from gnomon.search.bounds.families import Pipeline, layer_seconds
from gnomon.search.bounds.layer_tables import KindTable
from gnomon.search.bounds.point_time import Sharding, gathers

Doubles = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """What the actions of each kind of layer take, one action after another: forward, backward or its two parts."""

    busy: Doubles
    """[actions x kinds] seconds, at least."""
    top: Doubles
    """[actions x kinds] seconds, at most."""
    share: Doubles
    """[actions x kinds] share of kernels in the action, at least."""
    copied: bool
    """Whether activations are copied to the host meanwhile."""


def slowed(
    pipeline: Pipeline,
    around: Doubles,
    count: int,
    joins: NDArray[np.int64],
    shardings: Sequence[Sharding],
    work: LayerWork,
) -> Doubles:
    """[shardings] seconds of a step under ZeRO 3, at least, with what kernels lose to the collectives beside them.

    around: [ranks, shardings or 1] seconds between two meetings in which a rank computes nothing of its own
    (`families.idle_bound`). joins: as in `point_time.streams`. work: of the layers, under any of the shardings,
    whose actions last equally long. For steps that end with a norm, at which all ranks meet and before
    which all computing and all transfers of a step have ended: nothing of a step begins before the meeting that the
    step before ended with, so one step at rest, up to its meeting, lasts for no longer than the period T0 without
    losses, the step after it for the period T1 with those of the first round, and T, with all, is not less than either.

    A rank computes for b, one of its streams of transfers takes u and weighs w (the least of its links): of u at least
    u - (T0 - b) overlaps with compute. An action a that lasts for b_a and has c_a beside it loses SLOWED κ_a c_a, κ_a
    being its share of kernels, less what it waits for launches in any case, i together at most. For any λ, κ_a c_a is
    at least λ c_a - max(λ - κ_a, 0) b_a, and so the first round loses L1 ≥ A - s T0, with s = Σ SLOWED w λ and
    A = Σ SLOWED w (λ (u + b) - P) - i over the streams, P = Σ_a max(λ - κ_a, 0) b_a. In the second round computing
    takes b + L1, of which l_a in action a, and loses L2 ≥ A - s T1 + Σ SLOWED w Σ_a min(λ, κ_a) l_a. For any μ ≤ λ the
    last is at least s' (L1 - q), with s' = Σ SLOWED w μ and q what actions with κ_a < μ can have lost at most. With the
    chain T ≥ around + b + L2 and T ≥ T1, T0: T ≥ (around + b + (1 + s') A - s' q) / (1 + s + s' s). Weights of two
    streams add up as long as they, lowered where needed, do not pass 1 together. What is lost on measured
    machines and beside copies of activations to the host is left out.
    """
    first = shardings[0]
    # No bound is made for measured devices, nor next to copies to the host (see above); 0 always is one.
    if any(device.measured is not None for device in first.job.devices) or work.copied:
        return np.zeros(len(shardings))
    counts = pipeline.split.counts
    busy, top, share = work.busy, work.top, work.share
    # often: [ranks, actions x kinds] how often a step has each action of each kind.
    often = np.tile(pipeline.on_rank @ counts * count, len(busy) // counts.shape[1])
    # own: b of the docstring; spare: i, the waits for launches that contention may fill without loss.
    own, spare = (often @ busy)[:, None], (often @ (top - busy))[:, None]
    parameters_s = np.stack(
        [sharding.reduced_s * count + sharding.summed_s * sharding.weights.sums for sharding in shardings],
        axis=-1,
    )
    # [ranks, stages] @ [stages, kinds] @ [kinds, shardings]: seconds of a rank's reductions, and of its gathers.
    reduced, gathered = pipeline.on_rank @ (counts @ parameters_s), np.zeros((len(own), len(shardings)))
    if first.optimizer.reshard_after_forward:
        gathered = np.stack([gathers(pipeline, count, joins, sharding.gathered_s) for sharding in shardings], axis=-1)
    reduces, reads = np.array([(sharding.weights.reduces, sharding.weights.reads) for sharding in shardings]).T
    none = np.zeros_like(reads)
    # Four ways to share weight 1 between the two streams: reductions alone, gathers alone, and each with what the other
    # leaves. `one` belongs to reductions, `two` to gathers.
    one = SLOWED * np.stack([reduces, none, reduces, np.minimum(reduces, 1 - reads)])[:, None, None, None, :]
    two = SLOWED * np.stack([none, reads, np.minimum(reads, 1 - reduces), reads])[:, None, None, None, :]
    # arrays: [weights, λ, μ, ranks, shardings]
    # λ need only take the shares that occur: between them the bound is a ratio of linear functions, so monotone.
    level = np.unique(share[share > 0])
    # worth: λ b - P, with P = Σ max(λ - κ_a, 0) b_a at its largest (`top`).
    worth = (level[:, None] * own[:, 0] - np.maximum(level[:, None] - share, 0.0) * top @ often.T)[:, None, :, None]
    # lowest: q, what actions with κ_a < μ can have lost at most.
    lowest = (SLOWED * np.where(share < level[:, None], share * top, 0.0) @ often.T)[:, :, None]
    high, low = level[:, None, None, None], np.minimum.outer(level, level)[:, :, None, None]
    which = np.minimum.outer(np.arange(len(level)), np.arange(len(level)))
    # lost = A, slope = s, more = s' in the docstring's inequality.
    lost = one * (high * reduced + worth) + two * (high * gathered + worth) - spare
    slope, low_slope = (one + two) * high, (one + two) * low
    seconds = (around + own + (1 + low_slope) * lost - low_slope * lowest[which]) / (1 + slope + low_slope * slope)
    return np.asarray(seconds.max(axis=(0, 1, 2, 3), initial=0.0))


def layer_work(table: KindTable, copying: Doubles, adding: Doubles, column: int, *, split_backward: bool) -> LayerWork:
    """The work of layers at one microbatch size. copying: [kinds] seconds of copying gathered parameters into place.
    adding: [kinds] seconds of adding weight gradients up."""
    # Launches that may come on top, at most: four for each tensor and for two more, and the host's unit.
    host_extra = table.rates.host_unit_s + table.launch_s * 4 * (table.tensors + 2)
    seconds, names = layer_seconds(table, adding, copying, column), ["F", "I", "W"]
    hosts = [phase[:, column] + host_extra for phase in table.host_s]
    device = [phase[:, column] for phase in (table.forward_s, table.input_s, table.weight_s)]
    kernels = [phase[:, column] for phase in table.kernels_s]
    if not split_backward:
        names, hosts, device, kernels = ["F", "B"], *([f, i + w] for f, i, w in (hosts, device, kernels))
    busy = np.concatenate([np.array(seconds[name]) for name in names])
    waits = [np.maximum(host - spent, 0.0) for host, spent in zip(hosts, device, strict=True)]
    top = busy + np.concatenate(waits)
    share = np.where(top > 0, np.concatenate(kernels) / np.maximum(top, 1e-30), 0.0)
    return LayerWork(busy=busy, top=top, share=share, copied=bool(table.copied_s.any()))
