"""Runs that were measured, next to their predictions: what `gnomon validate` compares and `calibrate --from` fits to.

`MeasuredRun` is a run with its seconds and, if known, its peak memory. `predicted_s(run, prediction)` gives the seconds
of what was timed, also under other numbers than those on record. Leaves out reading tables and the fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Plan, Workload
from gnomon.prediction.contention import contended
from gnomon.prediction.predict import Prediction
from gnomon.prediction.step import Pricing
from gnomon.prices.fitted import FittedRates
from gnomon.program import Structure
from gnomon.simulate import period
from gnomon.software import Stack
from gnomon.units import Bytes, Seconds

Covers = Literal["step", "forward_backward"]
"""What a time is of: a whole step, or without the update."""

UPDATE_KINDS = ("OPT", "NORM")
"""Kinds of action that a time without the update does not cover."""


class TimedRun(Protocol):
    """Anything whose time covers a step or a part of one."""

    @property
    def covers(self) -> Covers: ...


class PredictableRun(TimedRun, Protocol):
    """A run that can be predicted, with its measured step: a `MeasuredRun`, or a reading of a published one."""

    @property
    def id(self) -> str: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def workload(self) -> Workload: ...
    @property
    def stack(self) -> Stack: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def step_s(self) -> Seconds: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run of a user's own."""

    id: str
    """Its name among the others."""
    graph: Graph = field(repr=False)
    """The model."""
    plan: Plan
    """Decisions."""
    workload: Workload
    """The batch."""
    stack: Stack
    """The program."""
    cluster: Cluster
    """The machines."""
    step_s: Seconds
    """Measured seconds of a step."""
    peak_bytes: Bytes | None = None
    """Measured peak memory of the fullest device, everything counted; None if not measured."""
    covers: Covers = "step"
    """What the time is of."""
    source: str = ""
    """By what and where it was measured."""
    assumed: tuple[str, ...] = ()
    """What was not said, and how it was filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRun:
    """A run that cannot be read or predicted."""

    id: str
    """Its name."""
    reason: str
    """What is missing or cannot be expressed."""


def predicted_s(
    run: TimedRun, prediction: Prediction, numbers: FittedRates | None = None, *, stack: Stack | None = None
) -> Seconds:
    """Seconds of what the run's time is of; under other fitted numbers than those on record, or with a stack that
    differs in its own numbers, if given."""
    if numbers is None and stack is None:
        pricing, seconds = prediction.pricing, prediction.step_s
    else:
        pricing = prediction.pricing.with_numbers(
            numbers, None if stack is None else replace(prediction.pricing.stack, own=stack.own)
        )
        seconds = period(prediction.structure, *contended(prediction.structure, pricing)).seconds
    return seconds - outside(run, prediction.structure, pricing)


def outside(run: TimedRun, structure: Structure, pricing: Pricing) -> Seconds:
    """Seconds of a predicted step that the run's time does not cover."""
    if run.covers != "forward_backward":
        return 0.0
    return sum(pricing.seconds(k) for k in structure.program.keys if k.kind in UPDATE_KINDS and k.stage == 0)
