"""The throughput model of Pollux: seconds of a step by nodes, replicas and batch, fitted to the steps a job has timed.

Computing takes `start_s + example_s x local batch`; communication takes `sync_s + sync_more_s x (replicas - 2)`, with
one pair of numbers inside a node and another across nodes; the two overlap as a p-norm whose power is from 1 (one after
the other) to 10. What was not timed is taken for free until it is: so a job tries more devices. Leaves out the gradient
noise and the choice of a batch (`learned`). Source: Qiao et al., OSDI 2021, section 3.2 and 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError

Floats = NDArray[np.float64]
FREE = 1e-8
"""Seconds of what costs nothing as far as is known."""
MOST_OVERLAP = 10.0
"""Power of the p-norm at which the shorter part is hidden."""
ACROSS = 1.1
"""Communication across nodes is taken for so many times that inside one, before it was timed."""
_START, _EXAMPLE, _ACROSS, _ACROSS_MORE, _WITHIN, _WITHIN_MORE, _OVERLAP = range(7)
_TOWARDS_ONE, _TOWARDS_FLAT = 0.1, 0.01
"""Weights in the fit of an overlap above 1, and of time that grows with replicas. The first is 0.001 in Pollux's
artifact, whose search hardly leaves its beginning at 1 all the same: of 150 fits half ended below 1.02. With 0.1 what
is foretold of twice as many replicas is within 4.5% of its, on average; with 0.001 7.6%."""
_LEAST_ERROR = 1e-3
"""Error below which the fit is not weighed more."""
_ROUNDS = 60


class Point(NamedTuple):
    """A step that a job has timed."""

    nodes: int
    """Nodes that its replicas were on."""
    replicas: int
    """Data-parallel replicas, one a device."""
    local: int
    """Examples of a replica at a time."""
    step_s: float
    """With communication."""
    sync_s: float
    """Communication that is not hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Seconds of a step of one job on one kind of device."""

    start_s: float
    """Seconds of a forward and backward whatever the batch."""
    example_s: float
    """Seconds for each example of a replica's batch."""
    across_s: float
    """Seconds of communication between two replicas on different nodes."""
    across_more_s: float
    """What each replica beyond two adds to that."""
    within_s: float
    """Seconds of communication between two replicas inside one node."""
    within_more_s: float
    """What each replica beyond two adds to that."""
    overlap: float
    """Power of the norm that computing and communication add up by: 1 where nothing overlaps."""

    def compute_s(self, local: NDArray[np.int64]) -> Floats:
        """Forward and backward passes over `local` examples."""
        return np.asarray(self.start_s + self.example_s * local, dtype=np.float64)

    def step_s(self, nodes: NDArray[np.int64], replicas: NDArray[np.int64], compute_s: Floats) -> Floats:
        """A whole step, of which so much is computing."""
        extra_replicas = np.maximum(replicas - 2, 0)
        sync = np.where(
            nodes > 1,
            self.across_s + self.across_more_s * extra_replicas,
            np.where(replicas > 1, self.within_s + self.within_more_s * extra_replicas, FREE),
        )
        larger, smaller = np.maximum(compute_s, sync), np.minimum(compute_s, sync)
        # The larger is taken out, so that no power overflows or vanishes.
        return np.asarray(larger * (1 + (smaller / larger) ** self.overlap) ** (1 / self.overlap), dtype=np.float64)


@lru_cache(maxsize=65536)
def fit(points: tuple[Point, ...]) -> Throughput:
    """The model with the least relative error at these points. InputError where there are none.

    What is minimised is the sum of the root mean squared logarithmic errors of computing and of whole steps, plus two
    small terms that prefer no overlap and communication that does not grow with replicas. Found by damped Gauss-Newton
    steps on the logarithms of the times.
    """
    if not points:
        raise InputError("a throughput model needs a timed step")
    columns = np.array(points, dtype=np.float64)
    nodes, replicas, local, step = columns[:, :4].T
    compute = np.maximum(step - columns[:, 4], FREE)
    values, free = _begin(nodes, replicas, local, step, compute)
    if free:
        values = _fitted(values, np.array(free), (nodes, replicas, local), (np.log(compute), np.log(step)))
    start, example, across, across_more, within, within_more, overlap = values.tolist()
    # Not timed across nodes yet: no faster there than inside one.
    if not (nodes > 1).any():
        across, across_more = max(across, within * ACROSS), max(across_more, within_more * ACROSS)
    return Throughput(
        start_s=start, example_s=example, across_s=across, across_more_s=across_more, within_s=within,
        within_more_s=within_more, overlap=overlap,
    )  # fmt: skip


def _begin(
    nodes: Floats, replicas: Floats, local: Floats, step: Floats, compute: Floats
) -> tuple[Floats, Sequence[int]]:
    """The numbers that the search begins with, and the places of those that it may change: the ones that the points say
    something of."""
    values = np.array([FREE] * 6 + [1.0])
    free = [_EXAMPLE]
    if len(set(local.tolist())) == 1:
        values[_START] = compute.mean() / 2  # half of it, as long as nothing is known of other batches
        values[_EXAMPLE] = compute.mean() / 2 / local[0]
    else:
        slope = max(float(np.polyfit(local, compute, 1)[0]), compute.mean() / local.mean() / 100)
        values[_EXAMPLE] = min(slope, compute.mean() / local.mean())
        values[_START] = max(float((compute - values[_EXAMPLE] * local).mean()), compute.mean() / 100)
        free.append(_START)
    for own, fixed, per_extra in (
        (nodes > 1, _ACROSS, _ACROSS_MORE),
        ((nodes == 1) & (replicas > 1), _WITHIN, _WITHIN_MORE),
    ):
        if own.any():
            values[fixed] = max(float((step - compute)[own].mean()), 1e-3 * float(step[own].mean()))
            free.append(fixed)
            if (replicas > 2).any():
                values[per_extra] = values[fixed] / 100
                free.append(per_extra)
    if (replicas > 1).any():
        free.append(_OVERLAP)
    return values, sorted(free)


def _fitted(
    values: Floats, free: NDArray[np.int64], where: tuple[Floats, Floats, Floats], logs: tuple[Floats, Floats]
) -> Floats:
    """Fits the free numbers by Levenberg-Marquardt; each root mean square is a weighted sum of squares, with weights
    from the round before."""
    damping, (cost, residuals, slopes) = 1e-3, _errors(values, where, logs)
    for _ in range(_ROUNDS):
        own = slopes[:, free]
        gradient, curvature = own.T @ residuals, own.T @ own
        scale = np.diag(np.diag(curvature) + 1e-9)
        better = False
        for _ in range(8):
            # Levenberg-Marquardt: a step of Gauss-Newton, shortened until it lowers the error.
            move = np.linalg.solve(curvature + damping * scale, -gradient)
            candidate = values.copy()
            logarithmic = free != _OVERLAP
            # Times move by factors, at most e³ a step, and so stay positive; the overlap is a plain number.
            candidate[free[logarithmic]] *= np.exp(np.clip(move[logarithmic], -3, 3))
            candidate[free[~logarithmic]] += move[~logarithmic]
            candidate[:_OVERLAP] = np.maximum(candidate[:_OVERLAP], FREE)
            candidate[_OVERLAP] = min(max(candidate[_OVERLAP], 1.0), MOST_OVERLAP)
            new = _errors(candidate, where, logs)
            if new[0] < cost:
                better, damping = True, max(damping / 4, 1e-9)
                break
            damping *= 4
        if not better:
            break
        gained = cost - new[0]
        values, (cost, residuals, slopes) = candidate, new
        if gained < 1e-7:
            break
    return values


def _errors(
    values: Floats, where: tuple[Floats, Floats, Floats], logs: tuple[Floats, Floats]
) -> tuple[float, Floats, Floats]:
    """(what is minimised, weighted residuals, their slopes by the logarithm of each number and by the overlap)."""
    nodes, replicas, local = where
    power = values[_OVERLAP]
    compute = values[_START] + values[_EXAMPLE] * local
    extra_replicas = np.maximum(replicas - 2, 0)
    across, within = nodes > 1, (nodes == 1) & (replicas > 1)
    fixed = np.where(across, values[_ACROSS], np.where(within, values[_WITHIN], FREE))
    growing = np.where(across, values[_ACROSS_MORE], np.where(within, values[_WITHIN_MORE], 0.0)) * extra_replicas
    sync = fixed + growing
    log_compute, log_sync = np.log(compute), np.log(sync)
    # The p-norm in logarithms: log((c^p + s^p)^(1/p)).
    log_step = np.logaddexp(power * log_compute, power * log_sync) / power
    share = np.exp(power * (log_compute - log_step))  # of the p-norm that is computing
    by_compute = np.zeros((len(local), 7))
    by_compute[:, _START], by_compute[:, _EXAMPLE] = values[_START] / compute, values[_EXAMPLE] * local / compute
    by_step = by_compute * share[:, None]
    for own, one, other in ((across, _ACROSS, _ACROSS_MORE), (within, _WITHIN, _WITHIN_MORE)):
        by_step[own, one] = ((1 - share) * fixed / sync)[own]
        by_step[own, other] = ((1 - share) * growing / sync)[own]
    by_step[:, _OVERLAP] = (share * log_compute + (1 - share) * log_sync - log_step) / power
    parts, slopes, cost = [], [], 0.0
    for error, slope in ((log_compute - logs[0], by_compute), (log_step - logs[1], by_step)):
        root = float(np.sqrt((error**2).mean()))
        # sqrt(mean e²) is no sum of squares; divided by its own value it is one, with weights of the round before.
        weight = np.sqrt(1 / (len(error) * max(root, _LEAST_ERROR)))
        parts.append(error * weight)
        slopes.append(slope * weight)
        # Below _LEAST_ERROR it goes on as a parabola of the same value and slope, so that the weight stays finite.
        cost += root if root > _LEAST_ERROR else (root**2 / _LEAST_ERROR + _LEAST_ERROR) / 2
    # Preferences as residuals of their own: half the square of each is what it adds.
    residuals = np.array([np.sqrt(2 * _TOWARDS_ONE) * (power - 1), 0.0, 0.0])
    by_kept = np.zeros((3, 7))
    by_kept[0, _OVERLAP] = np.sqrt(2 * _TOWARDS_ONE)
    for row, one, other in ((1, _ACROSS, _ACROSS_MORE), (2, _WITHIN, _WITHIN_MORE)):
        residuals[row] = np.sqrt(2 * _TOWARDS_FLAT) * values[other] / values[one]
        by_kept[row, one], by_kept[row, other] = -residuals[row], residuals[row]
    cost += float((residuals**2).sum()) / 2
    return cost, np.concatenate([*parts, residuals]), np.concatenate([*slopes, by_kept])
