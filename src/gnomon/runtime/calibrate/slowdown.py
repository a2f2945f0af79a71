"""How much slower this machine is now than when it was calibrated: a few of the calibrated points, measured again.

`slowdown_now(cluster)` takes about a second and returns (ratio, sentence). In a job all processes call it together;
elsewhere it starts as many as the cluster has. The ratio is the median of the points', since a burst of other work that
hits one of them says little of the minutes that follow. A point is the mean of its repeats on all processes, and not
their median: where other work takes turns with this one on a core, most short operations run undisturbed, and a step
waits for the few that do not. Leaves out what the caller does about it.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from gnomon.errors import InputError
from gnomon.hardware import Cluster, Measured
from gnomon.prices.measured import has, table_seconds
from gnomon.runtime.calibrate.calibrate import repeated
from gnomon.runtime.calibrate.cases import build_case
from gnomon.runtime.processes.launch import launch

POINTS: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("matmul", "forward", {"m": 512, "n": 512, "k": 512}),
    ("attention", "forward", {"heads": 8, "seq": 512, "head_dim": 32}),
    ("add", "forward", {"elements": 1 << 22}),
)
"""(operation, direction, sizes) measured again, in fp32: one bound by arithmetic, a mixture, one bound by memory."""

SECONDS = 1.0
"""Seconds of measuring, all points together."""

ROUNDS = 3
"""Turns of each point, so that a burst of other work does not fall on one point alone."""

SAME = 1.15
"""Ratios up to this, and down to its inverse, count as no change: repeats on a quiet machine spread so far."""

APART = 1.3
"""Largest over smallest ratio of the points beyond which they do not agree, and the sentence says their range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """One point, when it was calibrated and now."""

    what: str
    """Its operation, dtype and sizes, as `matmul fp32 m=512 n=512 k=512`."""
    then_s: float
    """Seconds in the calibration."""
    now_s: float
    """Seconds now: the mean of the repeats on all processes."""


def slowdown_now(cluster: Cluster, *, step_s: float | None = None) -> tuple[float, str]:
    """(seconds now over seconds when calibrated, one line that says so).

    step_s: the predicted seconds of a step; the sentence then says what to expect of it now. Within a job every process
    must call it, and all get the same. InputError for a cluster that was not measured, or not in fp32.
    """
    node = cluster.groups[0].node
    measured = node.device.measured
    if measured is None:
        raise InputError(f"{cluster.name} was not measured, so nothing can be repeated; run `gnomon calibrate`")
    points = again(measured) if dist.is_initialized() else launch(again, node.count, measured)[0]
    return ratio(points), sentence(points, measured, step_s)


def ratio(points: tuple[Again, ...]) -> float:
    """Seconds now over seconds when calibrated: the median of the points' ratios, and of an even number the geometric
    mean of the middle two."""
    # Of logarithms: twice as slow and twice as fast are as far from 1.
    return math.exp(median(math.log(point.now_s / point.then_s) for point in points))


def sentence(points: tuple[Again, ...], measured: Measured, step_s: float | None = None) -> str:
    """`this machine is 3.1 times slower now than when it was calibrated (…: 1.2 ms then, 3.8 ms now)`.

    Where the points disagree, the range of their ratios, and of the step to be expected, is said beside the middle.
    """
    factor, ratios = ratio(points), [point.now_s / point.then_s for point in points]
    low, high = min(ratios), max(ratios)
    like = min(points, key=lambda point: abs(math.log(point.now_s / point.then_s / factor)))
    apart = high > APART * low
    if 1 / SAME <= factor <= SAME and not apart:
        return f"this machine is as fast now as when it was calibrated, {measured.date}"
    of_all = f"its {len(points)} operations take {low:.2g} to {high:.2g} times as long"
    if 1 / SAME <= factor <= SAME:
        summary = f"this machine is about as fast now as when it was calibrated, {measured.date}, but {of_all}"
    else:
        times = f"{factor:.1f} times slower" if factor > 1 else f"{1 / factor:.1f} times faster"
        summary = (
            f"this machine is {times} now than when it was calibrated ({like.what}: {1e3 * like.then_s:.2g} ms then, "
            f"{1e3 * like.now_s:.2g} ms now{f'; {of_all}' if apart else ''})"
        )
    if step_s is None:
        return summary
    about = f" ({low * step_s:.3g} to {high * step_s:.3g})" if apart else ""
    return f"{summary}; expected {factor * step_s:.3g} s a step{about} at this speed"


def again(measured: Measured) -> tuple[Again, ...]:
    """Measures every calibrated point of POINTS on all processes of this job at once; all must call it, and all get the
    same. InputError where none was calibrated in fp32."""
    known = [point for point in POINTS if has(measured, point[0], "fp32", point[1])]
    if not known:
        raise InputError(f"the calibration of {measured.host} has no operation in fp32; run `gnomon calibrate` again")
    ready = [build_case(what, "fp32", direction, sizes) for what, direction, sizes in known]
    repeats: list[list[float]] = [[] for _ in known]
    gc.disable()  # a collection would be counted as the machine's
    try:
        for _ in range(ROUNDS):
            for case, so_far in zip(ready, repeats, strict=True):
                _meet()
                so_far += repeated(case, SECONDS / ROUNDS / len(known), 2)  # two repeats at least
    finally:
        gc.enable()
    points = []
    for (what, direction, sizes), seconds in zip(known, repeats, strict=True):
        then = float(table_seconds(measured, what, "fp32", direction, **sizes))
        name = " ".join((what, "fp32", *(f"{axis}={size}" for axis, size in sizes.items())))
        points.append(Again(what=name, then_s=then, now_s=_of_all(sum(seconds) / len(seconds))))
    return tuple(points)


def _meet() -> None:
    """Waits for the other processes, so that all measure a point at the same time."""
    if dist.get_world_size() > 1:
        dist.barrier()


def _of_all(seconds: float) -> float:
    """The mean over all processes."""
    total = torch.tensor(seconds, dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return float(total) / dist.get_world_size()
