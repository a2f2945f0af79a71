"""The band of 80% around a prediction, from how far predictions of sources that were left out were off.

`band_of(evidence)` returns a `Ratios`: measured over predicted lies between `low` and `high` in eight cases of ten. Its
width follows from what is known: the stack, the device, and where the time goes. The numbers are in `band.toml`, fitted
by `evidence/fits/fit_band`; what ops without a rule of their own add is assumed (`OPAQUE`). Leaves out errors of the
request itself: a band is of the job that was described.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import exp, sqrt
from pathlib import Path
from typing import ClassVar

from gnomon import schema
from gnomon.errors import InputError
from gnomon.prediction.evidence import Evidence
from gnomon.prices.curves import Provenance
from gnomon.units import Bytes, Seconds

COVERAGE = 0.8
"""Share of runs that lie in a band."""

WIDEST = 3.0
"""Log of the farthest that a band reaches up: twenty times."""


OPAQUE = 2.0
"""An op without a rule of its own may take from 1 / OPAQUE to OPAQUE times its price. Assumed, not fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """The bounds between which measured over predicted lies."""

    low: float
    """At most 1: how far below the prediction."""
    high: float
    """At least 1: how far above it."""

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1 <= self.high:
            raise InputError(f"a band must hold the prediction itself, got {self.low!r} to {self.high!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The bounds between which a step and its memory lie in eight cases of ten."""

    low_s: Seconds
    """Seconds of a step, at the least."""
    high_s: Seconds
    """Seconds of a step, at the most."""
    low_bytes: Bytes
    """Peak of the rank with the least room."""
    high_bytes: Bytes
    """The same at the most; it may exceed what the device has."""
    coverage: float = COVERAGE
    """Share of cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandNumbers:
    """Widths as logs: a base for what is known, to which everything else adds."""

    SCHEMA: ClassVar[str] = "gnomon.band/1"

    own: float
    """Fitted to the user's own runs, many of them."""
    own_few: float
    """More, over the square root of their number."""
    stack: float
    """Runs of the stack on such devices are on record."""
    stack_elsewhere: float
    """Runs of the stack on other devices."""
    device: float
    """Runs of other stacks on such devices."""
    nothing: float
    """Neither."""
    launch: float
    """More, when kernels wait for the host all the time."""
    communication: float
    """More, when kernels wait for collectives all the time."""
    waiting: float
    """More, when the step is all bubble, messages and update."""
    crossing: float
    """More, over several nodes."""
    nodes: float
    """More, upwards, for each doubling of the nodes: one of them, or the network between, is slow."""
    tensor_across: float
    """More, upwards, where tensor-parallel groups reach over nodes."""
    debugged: float
    """More, upwards, where collectives are checked and messages are not known to be polled."""
    routed: float
    """More, with mixtures of experts."""
    eight_bit: float
    """More, with matmuls in eight bits."""
    unmeasured: float
    """More, on devices without kernel measurements."""
    below: float
    """Of the width, how far the band reaches down."""
    above: float
    """Of the width, how far it reaches up: what goes wrong takes longer."""
    memory_below: float
    """Log of how far the band of memory reaches down."""
    memory_above: float
    """Log of how far it reaches up."""
    provenance: Provenance
    """From which runs the widths were fitted, and when."""


@cache
def band_numbers() -> BandNumbers:
    """The numbers on record."""
    return schema.load_packaged(BandNumbers, Path(__file__).with_name("band.toml"))


def log_widths(evidence: Evidence, numbers: BandNumbers) -> tuple[float, float]:
    """Logs of how far a band reaches down and up, before `below` and `above`."""
    base = {
        # Evaluated even where there are no own runs: max() only avoids a division by 0.
        "own": numbers.own + numbers.own_few / sqrt(max(evidence.own_runs, 1)),
        "stack": numbers.stack,
        "stack elsewhere": numbers.stack_elsewhere,
        "device": numbers.device,
        "nothing": numbers.nothing,
    }[evidence.known]
    both = (
        base
        + numbers.launch * evidence.launch
        + numbers.communication * evidence.communication
        + numbers.waiting * evidence.waiting
        + numbers.crossing * evidence.crossing
        + numbers.routed * evidence.routed
        + numbers.eight_bit * evidence.eight_bit
        + numbers.unmeasured * (not evidence.measured)
    )
    up = (
        numbers.nodes * evidence.nodes
        + numbers.tensor_across * evidence.tensor_across
        + numbers.debugged * evidence.debugged
    )
    return both, both + up


def band_of(evidence: Evidence) -> Ratios:
    """Returns the bounds between which measured over predicted step time lies."""
    own = band_numbers()
    down, up = log_widths(evidence, own)
    # From a share of forwards and backwards to one of the whole step.
    opaque = evidence.opaque * (1 - evidence.waiting)
    # Widths are fitted as logs, and a width is itself a log of measured over predicted: exp is taken twice.
    low = exp(-own.below * exp(down)) * (1 - opaque * (1 - 1 / OPAQUE))
    return Ratios(low=low, high=exp(min(own.above * exp(up), WIDEST)) * (1 + opaque * (OPAQUE - 1)))


def memory_ratios() -> Ratios:
    """Returns the bounds between which measured over predicted peak memory lies."""
    own = band_numbers()
    return Ratios(low=exp(-own.memory_below), high=exp(own.memory_above))
