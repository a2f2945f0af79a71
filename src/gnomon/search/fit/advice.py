"""What to change when a plan does not or may not fit: the changes of `gnomon fit`, as many as a few seconds allow.

`advice(prediction)` returns ways to fit, the fastest first, and whether all combinations were looked at: only then does
"nothing makes it fit" hold, and `gnomon fit` says the same. Leaves out trimming of what is taken further than it must
be, and jobs that are made smaller (`search.fit.ladder`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.plans import Plan
from gnomon.prediction import Prediction
from gnomon.prediction.loading import host_short
from gnomon.search.fit.ladder import Fitting, Rung
from gnomon.search.fit.options import OPTIONS
from gnomon.search.fit.terms import Terms

TRIES = 160
"""Predictions after which no further combination is looked at: with 10 ms each, two seconds. Fewer, but FEWEST, for
jobs of thousands of devices."""
FEWEST = 24
"""Predictions that are made however many devices a job has."""
MANY_DEVICES = 1024
"""Devices from which on the limit falls in proportion: a prediction takes longer there."""
MOST_STREAMED = 20_000
"""Layers times microbatches up to which an optimizer on the host is tried: gradients that are copied there have a row
of the Program for each, and a prediction of more takes ten seconds."""
STREAMED = ("optimizer_offload",)
"""Options whose gradients are copied so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change after which every rank fits with room."""

    what: str
    """The change in words, as in `micro_batch_size 4 -> 2 and recompute full`."""
    plan: Plan
    """The plan with the change."""
    step_s: float
    """Its predicted step, in seconds."""
    peak_bytes: int
    """Predicted peak of its tightest rank."""
    limit_bytes: int
    """Memory of that rank's device."""
    lines: tuple[str, ...]
    """The change in the terms of the user's own file; empty where the plan is from none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitAdvice:
    """The ways to make a plan fit."""

    ways: tuple[Advice, ...]
    """The ways found, the fastest first."""
    tried: int
    """The number of predictions made."""
    others: tuple[Advice, ...] = ()
    """Where no way was found: other jobs that fit, which train adapters beside the frozen network."""
    complete: bool
    """Whether all combinations of the changes were looked at, so that none means that there is none."""


NOTHING = FitAdvice(ways=(), tried=0, complete=True)
"""The advice for a plan that fits with room."""


def advice(prediction: Prediction, *, most: int = 4, terms: Terms | None = None) -> FitAdvice:
    """The `most` fastest changes after which every rank, and the host, fits with room; none for a plan that does.

    Single changes are tried, then pairs, then threes …, but for those that hold a smaller set that is enough, until
    TRIES predictions are made. Left out is what the program of the prediction does not run, and what the user's file,
    whose terms are given, cannot say.
    """
    if prediction.has_room and not host_short(prediction):
        return NOTHING
    tries = max(FEWEST, min(TRIES, TRIES * MANY_DEVICES // prediction.plan.world_size))
    long = len(prediction.pricing.graph.layers()) * prediction.pricing.count > MOST_STREAMED
    able = [option for option in OPTIONS if not (long and option.name in STREAMED)]
    fitting = Fitting(base=prediction, options=able, keep_going=lambda: fitting.count < tries, terms=terms)
    rungs = sorted(fitting.enough(), key=lambda rung: rung.step_s)
    ways = tuple(_advice(fitting, rung) for rung in rungs[:most])
    others = () if ways else tuple(_advice(fitting, rung) for rung in fitting.adapted() if rung.fits)
    return FitAdvice(ways=ways, tried=fitting.count, others=others, complete=not fitting.incomplete and not long)


def _advice(fitting: Fitting, rung: Rung) -> Advice:
    """What a rung that fits is to a person."""
    assert rung.prediction is not None
    tightest = rung.prediction.tightest
    return Advice(
        what=" and ".join(rung.changes),
        plan=rung.plan,
        step_s=rung.step_s,
        peak_bytes=tightest.peak_bytes,
        limit_bytes=tightest.limit_bytes,
        lines=fitting.lines(rung),
    )
