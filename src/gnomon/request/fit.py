"""`gnomon fit` as a request: a plan that is to fit, and what may be filled; `answer` predicts the ladder of changes.

`fit` is the public verb in Python. Leaves out argv (`cli`), and how the ladder is shown (`report.fit`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Plan, Workload
from gnomon.prediction import Prediction
from gnomon.prediction import predict as predict_values
from gnomon.request.job_file import job_of
from gnomon.search.budget import KeepGoing, always
from gnomon.search.fit.ladder import Fitting, Rung
from gnomon.search.fit.terms import Terms
from gnomon.software import Stack


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """A job that is to fit."""

    graph: Graph
    """The model."""
    cluster: Cluster
    """The machines."""
    plan: Plan
    """The plan before any change."""
    workload: Workload
    """The batch of a step."""
    stack: Stack
    """The program that runs it."""
    memory_bytes: int | None = None
    """What may be filled of a device; None is all of it."""
    by_tensor: bool = False
    """Where recompute makes it fit, choose what is recomputed tensor by tensor (`search.checkpointing`)."""
    terms: Terms | None = None
    """The words of the file that the plan is from; what it cannot say is not looked at."""

    def __post_init__(self) -> None:
        least = min(device.memory_bytes for device in self.cluster.devices)
        if self.memory_bytes is not None and not 0 < self.memory_bytes:
            raise InputError(f"memory_bytes = {self.memory_bytes}; give what may be filled of a device's {least} bytes")

    def fitting(self, *, keep_going: KeepGoing = always, on_progress: Callable[[int], None] | None = None) -> Fitting:
        """The plan predicted, from which the ladder starts."""
        base = predict_values(self.graph, self.cluster, self.plan, self.workload, self.stack)
        return Fitting(
            base=base,
            limit_bytes=self.memory_bytes,
            keep_going=keep_going,
            on_progress=on_progress,
            by_tensor=self.by_tensor,
            terms=self.terms,
        )


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Ways to make a job fit."""

    base: Prediction
    """The plan as it is."""
    fits: bool
    """Whether it fits with room."""
    single_changes: tuple[Rung, ...]
    """Each change by itself, the smallest first."""
    combined: tuple[Rung, ...]
    """Changes that fit, together where they must be; the fewest first, then the fastest."""
    smaller: tuple[Rung, ...]
    """The job itself made smaller or less exact."""
    predictions: int
    """Made for this."""
    complete: bool
    """Whether all combinations were looked at."""

    @property
    def fastest(self) -> Rung | None:
        """The fastest of the combinations that fit; None if none does."""
        return min(self.combined, key=lambda rung: rung.step_s, default=None)


def ladder(fitting: Fitting, single_changes: tuple[Rung, ...]) -> Ladder:
    """Everything that `gnomon fit` shows. alone: each change by itself, which can be shown before the rest is known."""
    fits = fitting.has_room(fitting.base)
    return Ladder(
        base=fitting.base,
        fits=fits,
        single_changes=single_changes,
        combined=() if fits else tuple(fitting.combined()),
        smaller=() if fits else tuple(fitting.asked_less()),
        predictions=fitting.count,
        complete=not fitting.incomplete,
    )


def fit(
    model: Graph | str,
    cluster: Cluster | str | None = None,
    plan: Plan | None = None,
    workload: Workload | None = None,
    stack: Stack | str | None = None,
    *,
    memory_bytes: int | None = None,
    by_tensor: bool = False,
    keep_going: KeepGoing = always,
) -> Ladder:
    """Ways to make a plan fit: each change alone and combined, with its prediction.

    model (also a job file), cluster, stack, and errors: as for `gnomon.predict`. memory_bytes: what may be filled of a
    device; all of it otherwise. by_tensor: where recompute makes it fit, choose tensor by tensor what is recomputed;
    InputError without scipy. keep_going: a budget (`gnomon.search.budget.until`).
    """
    job = job_of(model, cluster, plan, workload, stack)
    request_made = FitRequest(
        graph=job.graph,
        cluster=job.cluster,
        plan=job.plan,
        workload=job.workload,
        stack=job.stack,
        memory_bytes=memory_bytes,
        by_tensor=by_tensor,
    )
    fitting = request_made.fitting(keep_going=keep_going)
    return ladder(fitting, tuple(fitting.single_changes()))
