"""Jobs of a trace that say what they train: their rates and memory are predictions, and not the stated curve.

A job gives a plan file (`plan`), or a model and its global batch (`model, batch_size`); then the plan is the fastest
that a search finds on the devices that it asks for. `Predictions` keeps the planners, `PredictedForecasts` are
forecasts that use them and leave every other job to the forecasts behind. Leaves out learning from what a replay
measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gnomon.errors import CatalogueError, GnomonError, InputError
from gnomon.fleet.forecast import NEVER, Curve
from gnomon.fleet.job import Job
from gnomon.fleet.machines import Machines
from gnomon.fleet.planned import Forecast, Planner
from gnomon.fleet.points import MeasuredPoints
from gnomon.fleet.state import Allocation, PhaseForecasts, devices_of
from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster
from gnomon.models.presets import known_name
from gnomon.plans import Plan, Workload, load_plan_file
from gnomon.plans.check import learned_positions, sample_tokens
from gnomon.request.model import read_model
from gnomon.search import plan as search
from gnomon.software import Stack, stack

SEQ_LEN = 4096
"""Tokens of a sequence where a job does not say; fewer of a model that has learned fewer positions."""

What = tuple[str, str, int, int, int]
"""What a prediction depends on: (plan file, model, global batch, devices asked for, tokens of a sequence)."""


@dataclass(frozen=True)
class PlannedJob:
    """A job with its plan."""

    graph: Graph
    """The model."""
    plan: Plan
    """The plan, whose number of data-parallel ranks follows the devices that the job holds."""
    workload: Workload
    """The batch of a step."""
    stack: Stack
    """The program that runs it."""


@dataclass(frozen=True)
class Predictions:
    """Planners of jobs on the kinds of devices of a cluster, each made once."""

    machines: Machines
    """The cluster, whose pools name the kinds of devices."""
    reference: str = ""
    """Kind of device that durations are of; empty for that of the first pool."""
    _planned: dict[What, PlannedJob | GnomonError] = field(default_factory=dict, compare=False, repr=False)
    _planners: dict[tuple[What, str, int], Planner] = field(default_factory=dict, compare=False, repr=False)

    def knows(self, job: Job) -> bool:
        """Whether a job says enough to be predicted: a plan, or a batch of a model that is a preset."""
        if job.plan:
            return True
        if not job.model or not job.batch_size:
            return False
        try:
            known_name(job.model)
        except CatalogueError:
            return False
        return True

    def forecast(self, job: Job, kind: str, per_node: int, devices: int) -> Forecast | None:
        """A job's forecast on so many devices of a kind; None where the plan cannot use them or does not fit.
        InputError where the job has no plan at all."""
        return self._planner(job, kind, per_node).possible(devices)

    def at_reference(self, job: Job) -> Forecast:
        """A job's forecast on the devices that it asks for: of the kind that its duration is of, else of the first on
        which it fits. InputError with the reason where there is none."""
        pools = sorted(
            (pool for pool in self.machines.pools), key=lambda pool: pool.device != (job.device or self.reference)
        )
        for pool in pools:
            forecast = self.forecast(job, pool.device, pool.per_node, job.devices)
            if forecast is not None:
                return forecast
        found = self._planner(job, pools[0].device, pools[0].per_node).forecast(job.devices)
        reason = (
            f"its plan takes {found.peak_bytes / 2**30:,.1f} GiB on the fullest of {job.devices} devices"
            if isinstance(found, Forecast)
            else found.reason
        )
        raise InputError(f"job {job.id!r} cannot run on {self.machines.text}: {reason}")

    def step_s(self, job: Job) -> float:
        """Seconds of a step on the devices that it asks for."""
        return float(self.at_reference(job).step_s)

    def _planner(self, job: Job, kind: str, per_node: int) -> Planner:
        planned = self.planned_job(job)
        key = (_what(job), kind, per_node)
        if key not in self._planners:
            self._planners[key] = Planner(
                graph=planned.graph, cluster=_cluster(kind, per_node, max(job.most, per_node)), plan=planned.plan,
                workload=planned.workload, stack=planned.stack,
            )  # fmt: skip
        return self._planners[key]

    def planned_job(self, job: Job) -> PlannedJob:
        """The job with its plan. InputError with the reason where there is none."""
        what = _what(job)
        if what not in self._planned:
            try:
                self._planned[what] = _of_file(job) if job.plan else self._searched(job)
            except GnomonError as error:
                # Kept too: many jobs of a trace are alike, and a search that found nothing would be made again for
                # each.
                self._planned[what] = error
        planned = self._planned[what]
        if isinstance(planned, GnomonError):
            raise InputError(f"job {job.id!r}: {planned}")
        return planned

    def _searched(self, job: Job) -> PlannedJob:
        """The fastest plan on the first kind of device on which any fits."""
        graph = read_model(known_name(job.model))[0]
        seq_len = job.seq_len or sample_tokens(graph) or min(SEQ_LEN, learned_positions(graph) or SEQ_LEN)
        workload = Workload(global_batch_size=job.batch_size, seq_len=seq_len)
        # False sorts before True: the kind that durations are of comes first, the others in their order.
        pools = sorted((p for p in self.machines.pools), key=lambda p: p.device != (job.device or self.reference))
        first: GnomonError | None = None
        for pool in pools:
            try:
                result = search(
                    graph, _cluster(pool.device, pool.per_node, job.devices), workload, stack("gnomon"), top=1
                )
            except GnomonError as error:
                first = first or error
            else:
                return PlannedJob(graph, result.best[0].plan, workload, stack("gnomon"))
        assert first is not None
        raise first


def _of_file(job: Job) -> PlannedJob:
    file = load_plan_file(job.plan)
    return PlannedJob(read_model(file.model)[0], file.plan, file.workload, stack(file.stack or "gnomon"))


def _what(job: Job) -> What:
    return (job.plan, "", 0, 0, 0) if job.plan else ("", job.model, job.batch_size, job.devices, job.seq_len)


def _cluster(kind: str, per_node: int, devices: int) -> Cluster:
    """A cluster of as many nodes of a kind as hold so many devices, the last one whole."""
    nodes = -(-devices // per_node)
    return parse_cluster(f"{devices}x{kind}" if devices <= per_node else f"{nodes}x{per_node}x{kind}")


@dataclass(frozen=True)
class PredictedForecasts(PhaseForecasts):
    """Forecasts of predicted jobs, with others behind them: the interface `Forecasts`."""

    machines: Machines
    """The cluster."""
    predictions: Predictions
    """What the planner says of jobs with a plan."""
    behind: Curve | MeasuredPoints
    """What is taken for jobs without one."""
    _rates: dict[tuple[str, str, int, int], float] = field(default_factory=dict, compare=False, repr=False)
    _peaks: dict[str, float] = field(default_factory=dict, compare=False, repr=False)
    _known: dict[tuple[str, str, int], bool] = field(default_factory=dict, compare=False, repr=False)

    def knows(self, job: Job) -> bool:
        """Whether a job is predicted."""
        key = (job.plan, job.model, job.batch_size)
        if key not in self._known:
            self._known[key] = self.predictions.knows(job)
        return self._known[key]

    def phase(self, job: Job, done_s: float, allocation: Allocation) -> tuple[float, float]:
        """See `Forecasts`. On a number of devices that a plan cannot use it runs on the most below that it can, and the
        others stand idle; rate 0 where there are none."""
        if not self.knows(job):
            return self.behind.phase(job, done_s, allocation)
        pool = self.machines.pools[self.machines.pool_of[allocation[0][0]]]
        key = (job.id, pool.device, pool.per_node, devices_of(allocation))
        if key not in self._rates:
            self._rates[key] = self._rate(job, pool.device, pool.per_node, devices_of(allocation))
        return self._rates[key], NEVER

    def _rate(self, job: Job, kind: str, per_node: int, devices: int) -> float:
        for count in range(devices, 0, -1):
            forecast = self.predictions.forecast(job, kind, per_node, count)
            if forecast is not None:
                return float(self.predictions.at_reference(job).step_s / forecast.step_s)
        return 0.0

    def limits(self, job: Job) -> tuple[int, int]:
        """Returns the limits of the forecasts behind these."""
        return self.behind.limits(job)

    def memory_bytes(self, job: Job, devices: int) -> float:
        """Returns the memory that the trace states, or else the peak of the prediction."""
        if job.memory_bytes or not self.knows(job):
            return self.behind.memory_bytes(job, devices)
        if job.id not in self._peaks:
            self._peaks[job.id] = float(self.predictions.at_reference(job).peak_bytes)
        return self._peaks[job.id]

    def resize_s(self, job: Job, devices: int) -> float:
        """Returns the seconds of a resize of the forecasts behind these."""
        return self.behind.resize_s(job, devices)

    def speed_share(self, job: Job, other: Job) -> float:
        """Returns the share of speed of the forecasts behind these."""
        return self.behind.speed_share(job, other)

    def impossible(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Job -> why no plan of it runs on these machines."""
        out = {}
        for job in jobs:
            if self.knows(job):
                try:
                    self.predictions.at_reference(job)
                except InputError as error:
                    out[job.id] = str(error)
        return out
