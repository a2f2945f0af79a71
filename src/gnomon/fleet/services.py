"""Inference services of a cluster: how many units a service needs over the day, and the slices that batches need.

`needs(load, play, …)` cuts a trace of requests into bins and finds, for each, the fewest units (the machines of one
engine and its replicas) with which enough of its requests meet their targets, by playing them; what is not needed can
be lent to training (Lyra), which `gnomon fleet replay --inference --demand` does. `buckets` and `slice_points` give
ElasticBatch's `cover` what it chooses among: lengths cut where padding costs least, and batches of each on every slice,
by the prices of serving. Leaves out what a queue carries from one bin into the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gnomon.errors import InputError
from gnomon.fleet.mig import PLACES, memory_share
from gnomon.fleet.policies.elastic_batch import BatchPoint
from gnomon.graph import Graph
from gnomon.hardware import Cluster, Device
from gnomon.serving.capacity import refusal
from gnomon.serving.forecast import Forecast
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.requests import Load
from gnomon.serving.scheduler import Batch, PromptPiece
from gnomon.software.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """A stretch of the trace."""

    start_s: float
    """Seconds of the trace at which it begins."""
    requests: int
    """Requests that arrive in it."""
    units: int
    """The fewest with which enough requests meet the targets; 1 where nobody comes, so that somebody answers."""
    forecast: Forecast | None
    """Of one unit's part; None where nobody comes."""


def needs(load: Load, play: Callable[[Load], Forecast], *, bin_s: float, share: float, most: int) -> Iterator[Bin]:
    """Yields the bins in order. play: what one unit makes of a load, with its goodput. share: of requests that must
    meet the targets. most: units at most. InputError for a closed loop, and for a bin that `most` units do not
    serve."""
    if load.concurrency is not None:
        raise InputError("a closed loop has no day: give a trace with times of arrival (--requests FILE)")
    if not 0 < bin_s:
        raise InputError(f"a bin of {bin_s:g} s is none")
    start, index, requests = 0.0, 0, load.requests
    while index < len(requests):
        end = index
        while end < len(requests) and requests[end].arrival_s < start + bin_s:
            end += 1
        part = requests[index:end]
        if part:
            yield _bin(
                start, Load(requests=tuple(replace(r, arrival_s=r.arrival_s - start) for r in part)), play, share, most
            )
        else:
            yield Bin(start_s=start, requests=0, units=1, forecast=None)
        start, index = start + bin_s, end


def _bin(start: float, load: Load, play: Callable[[Load], Forecast], share: float, most: int) -> Bin:
    """Finds the fewest units of a bin: doubles them until they are enough, and halves between."""
    known: dict[int, Forecast] = {}

    def enough(units: int) -> bool:
        found = known[units] = known.get(units) or play(load.share(units))
        return found.goodput is not None and found.goodput >= share

    limit = min(most, len(load.requests))
    high = 1
    while not enough(high):
        if high == limit:
            raise InputError(
                f"from {start:g} s on {len(load.requests)} requests come, of which {known[high].goodput or 0:.0%} meet "
                f"the targets on {high} units; give looser targets (--ttft, --tpot), a lower --share, or larger units "
                f"(--on)"
            )
        high = min(2 * high, limit)
    # Half of it was tried on the way up and was not enough.
    low = high // 2 + 1 if high > 1 else 1
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    enough(high)
    return Bin(start_s=start, requests=len(load.requests), units=high, forecast=known[high])


def buckets(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """Upper ends of at most `count` buckets of lengths, with the least padding of all ways to cut them: exact, by
    dynamic programming over the lengths that occur (the last bucket's end is the longest)."""
    if not lengths or min(lengths) < 1:
        raise InputError("there are no lengths to cut into buckets; give a trace with rows")
    ends = sorted(set(lengths))
    # Added up below: numbers[i] becomes the lengths that are among the first i ends.
    numbers = [0] * (len(ends) + 1)
    for length in lengths:
        numbers[bisect_left(ends, length) + 1] += 1
    for i in range(len(ends)):
        numbers[i + 1] += numbers[i]
    # cost[j]: padded tokens of lengths below index j; in a bucket of ends[i:j] all are as long as ends[j - 1].
    infinite = float("inf")
    cost: list[float] = [0.0] + [infinite] * len(ends)
    cuts: list[list[int]] = []
    for _ in range(min(count, len(ends))):
        after, at = [0.0] + [infinite] * len(ends), [0] * (len(ends) + 1)
        for j in range(1, len(ends) + 1):
            for i in range(j):
                padded = cost[i] + (numbers[j] - numbers[i]) * ends[j - 1]
                if padded < after[j]:
                    after[j], at[j] = padded, i
        cost = after
        cuts.append(at)
    out, j = [], len(ends)
    for at in reversed(cuts):
        if j:
            out.append(ends[j - 1])
            j = at[j]
    return tuple(sorted(out))


MOST_TOKENS = 2**16
"""Of a batch that is tried, at most: no slice gets faster beyond."""


def slice_of(device: Device, profile: str) -> Device:
    """A slice as a device of its own: its share of the compute slices (of 7) and of the memory slices (of 8), which
    have the bandwidth and the last cache too."""
    compute, memory = int(profile[0]) / 7, memory_share(profile)
    peaks = {
        name: None if (rate := getattr(device.dense_peak, name)) is None else rate * compute
        for name in device.dense_peak.__dataclass_fields__
    }
    return replace(
        device,
        dense_peak=replace(device.dense_peak, **peaks),
        memory_bytes=int(device.memory_bytes * memory),
        memory_bytes_per_s=device.memory_bytes_per_s * memory,
        num_sms=max(1, round(device.num_sms * compute)),
        l2_bytes=None if device.l2_bytes is None else max(1, int(device.l2_bytes * memory)),
        fabric_bytes_per_s=None,
    )


def slice_points(graph: Graph, cluster: Cluster, serving: Serving, engine: Engine, length: int) -> Iterator[BatchPoint]:
    """What every slice of the cluster's device does with batches of prompts of one bucket, padded to its length: 1, 2,
    4 … prompts, as many as its memory holds. At its full rate a batch fills while the one before is computed, so a
    prompt waits for at most twice a batch's time."""
    group = cluster.groups[0]
    for profile in PLACES:
        device = slice_of(group.node.device, profile)
        node = replace(group.node, device=device, count=1)
        one_node = replace(cluster, groups=(replace(group, node=node, count=1),))
        layout = replace(serving, tp=1, pp=1, dp=1, ep=1, replicas=1, max_model_len=length + 1)
        sizes: list[int] = []
        able = engine
        for batch in (2**power for power in range(16)):
            tried = replace(engine, max_seqs=batch, max_batched_tokens=batch * length)
            if batch * length > MOST_TOKENS or refusal(graph, one_node, layout, tried) is not None:
                break
            sizes.append(batch)
            able = tried
        if not sizes:
            continue
        price = IterationPrice(graph, one_node, layout, able)
        for batch in sizes:
            pieces = tuple(PromptPiece(key, 0, length, True) for key in range(batch))
            seconds = price.batch_ticks(Batch(pieces, 0, 0, ())) / TICKS_PER_S
            yield BatchPoint(profile=profile, batch=batch, per_s=batch / seconds, latency_s=2 * seconds)
