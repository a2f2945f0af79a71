"""What the formula of a collective leaves of the times that were measured, by size: few numbers for one system.

`with_bends(row, kind, links, points)` returns a fitted row with its bends. Of each size of group and side of NCCL's
switch, the logs of measured over priced at the sizes that are fitted make lines between every second power of two, by
least squares with one more measurement of 0 at each (so that a system with one group keeps half of what it shows, one
with three groups three quarters). One line for all sizes of group, unless on a size of group the line of the others is
worse than none: then one for each. Uses no size that is kept out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from evidence.fits.collective_tables import Array, Points
from gnomon.prices.collectives import Bend, CollectiveKind, InsideFit, inside_cost
from gnomon.prices.links import AxisLink

OCTAVES = 2.0
"""Between knots."""

ZEROS = 1.0
"""Measurements of 0 beside those at each knot."""

WORSE = 1.05
"""How much worse than none the line of the other sizes of group must be, for each to have its own."""

MOST = 60
"""Points of a table; of more, the medians of half octaves count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left at the fitted sizes of one group, on one side of the switch."""

    octave: Array
    """log2 of sizes."""
    log: Array
    """Of measured over priced."""


def with_bends(
    row: InsideFit, kind: CollectiveKind, links: Mapping[int, AxisLink], fitted: Mapping[int, Points]
) -> InsideFit:
    """links, fitted: of each of the row's sizes of group."""
    small, large = [], []
    for ranks in row.ranks:
        cost, points = inside_cost(row, kind, links[ranks]), fitted[ranks]
        left = np.log(points.seconds / cost.seconds(points.bytes))
        low = points.bytes <= cost.small_bytes
        small.append(_thinned(np.log2(points.bytes[low]), left[low]))
        large.append(_thinned(np.log2(points.bytes[~low]), left[~low]))
    apart = _others_mislead([large, small] if row.small else [large])
    bent = replace(row, bend=_bend(large, apart))
    return replace(bent, small=replace(row.small, bend=_bend(small, apart))) if row.small else bent


def _thinned(octave: Array, log: Array) -> Left:
    if len(octave) <= MOST:
        return Left(octave=octave, log=log)
    part = np.floor(2 * octave)
    parts = [part == value for value in np.unique(part)]
    return Left(
        octave=np.array([octave[which].mean() for which in parts]),
        log=np.array([np.median(log[which]) for which in parts]),
    )


def _bend(side: Sequence[Left], apart: bool) -> Bend:
    """One side of the switch, of all sizes of group."""
    octaves = np.concatenate([left.octave for left in side])
    first, last = octaves.min(), octaves.max()
    knots = np.linspace(first, last, 1 + round((last - first) / OCTAVES)) if last > first else octaves[:1]
    lines = [_line(knots, [left]) for left in side] if apart else [_line(knots, side)]
    return Bend(
        at_bytes=tuple(float(f"{2**knot:.4g}") if knot % 1 else float(2**knot) for knot in knots),
        over=tuple(tuple(round(float(np.exp(value)), 3) for value in line) for line in lines),
    )


def _line(knots: Array, side: Sequence[Left]) -> Array:
    """What is left at the knots."""
    octaves, logs = (np.concatenate([getattr(left, name) for left in side]) for name in ("octave", "log"))
    hats = np.array([np.interp(octaves, knots, hat) for hat in np.eye(len(knots))])
    return np.asarray(np.linalg.solve(hats @ hats.T + ZEROS * np.eye(len(knots)), hats @ logs))


def _others_mislead(sides: Sequence[Sequence[Left]]) -> bool:
    """Whether the line of the other sizes of group is worse than none on the sizes of group."""
    if len(sides[0]) < 2:
        return False
    plain, bent = [], []
    for side in sides:
        for mine in side:
            others = [left for left in side if left is not mine and len(left.octave)]
            known = np.concatenate([left.octave for left in others]) if others else np.array([])
            if not len(known) or not len(mine.octave):
                continue
            knots = np.unique(known)
            line = np.interp(mine.octave, knots, _line(knots, others))
            plain.append(mine.log)
            bent.append(mine.log - line)
    return _spread(np.concatenate(bent)) > WORSE * _spread(np.concatenate(plain))


def _spread(miss: Array) -> float:
    """As `log_spread`."""
    return float(np.abs(miss).mean() + np.sqrt((miss**2).mean()))
