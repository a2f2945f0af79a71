"""Forecasts of the planner: how fast a plan runs, how much memory it takes and what a resize costs, by devices.

`Planner.forecast(devices)` keeps what the plan says of tensor, pipeline and context parallelism and divides the batch
over more or fewer data-parallel ranks, which is what an elastic job does; each number is predicted as `gnomon predict`
would. Pure and memoised. Leaves out searching another plan for each number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gnomon.errors import GnomonError, InputError
from gnomon.graph import Graph
from gnomon.hardware import Cluster, NodeGroup
from gnomon.plans import Plan, Workload
from gnomon.prediction import predict
from gnomon.software import Stack
from gnomon.units import Bytes, Seconds

STATE_BYTES = 14
"""Bytes of a checkpoint for each parameter: weights in bf16, a copy in fp32, two moments of Adam in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A job on a number of devices."""

    devices: int
    """Devices that it runs on."""
    step_s: Seconds
    """Seconds of a step."""
    low_s: Seconds
    """The step lies from here to `high_s` in eight cases of ten."""
    high_s: Seconds
    """The upper end of that band."""
    samples_per_s: float
    """Rate: sequences a second."""
    peak_bytes: Bytes
    """Memory of the fullest device."""
    fits: bool
    """Whether every device's peak is within its memory."""
    resize_s: Seconds
    """To write a checkpoint, start again on so many devices, and read it."""
    plan: Plan
    """The plan with as many data-parallel ranks as the devices allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """A number of devices that the plan cannot use."""

    devices: int
    """Devices that were asked for."""
    reason: str
    """Why the plan cannot run on them, a sentence."""


@dataclass(frozen=True)
class Planner:
    """A plan and what it is for, asked for forecasts."""

    graph: Graph
    """The model."""
    cluster: Cluster
    """Gives the kind of node; how many there are is the forecast's question."""
    plan: Plan
    """The plan, whose number of data-parallel ranks the forecast changes."""
    workload: Workload
    """The batch of a step, which stays the same on any number of devices."""
    stack: Stack
    """The program that runs it."""
    restart_s: float = 60.0
    """Seconds to start the processes again."""
    storage_bytes_per_s: float = 2e9
    """Of one node to the storage of checkpoints."""
    _memo: dict[int, Forecast | Impossible] = field(default_factory=dict, compare=False, repr=False)

    def forecast(self, devices: int) -> Forecast | Impossible:
        """The plan's forecast on so many devices of the cluster's first kind of node."""
        if devices not in self._memo:
            try:
                self._memo[devices] = self._forecast(devices)
            except GnomonError as error:
                self._memo[devices] = Impossible(devices=devices, reason=str(error))
        return self._memo[devices]

    def possible(self, devices: int) -> Forecast | None:
        """The forecast on so many devices; None where the plan cannot use them or does not fit their memory."""
        forecast = self.forecast(devices)
        return forecast if isinstance(forecast, Forecast) and forecast.fits else None

    def _forecast(self, devices: int) -> Forecast:
        cluster = resized_cluster(self.cluster, devices)
        plan = resized(self.plan, devices)
        prediction = predict(self.graph, cluster, plan, self.workload, self.stack)
        state = STATE_BYTES * self.graph.num_parameters()
        # Written before the restart, read after it.
        moved = 2 * state / (cluster.num_nodes * self.storage_bytes_per_s)
        return Forecast(
            devices=devices,
            step_s=prediction.step_s,
            low_s=prediction.band.low_s,
            high_s=prediction.band.high_s,
            samples_per_s=self.workload.global_batch_size / prediction.step_s,
            peak_bytes=prediction.tightest.peak_bytes,
            fits=prediction.fits,
            resize_s=self.restart_s + moved,
            plan=plan,
        )


def resized(plan: Plan, devices: int) -> Plan:
    """The plan with as many data-parallel ranks as devices allow. InputError where they do not divide."""
    mesh = plan.mesh
    if plan.stages:
        raise InputError("the plan gives each stage its own mesh; such a plan cannot be resized by data parallelism")
    fixed = mesh.world_size // mesh.data_ranks
    if devices % fixed:
        raise InputError(f"{devices} devices are not a multiple of tp x pp x cp = {fixed} of the plan")
    data = devices // fixed
    # Groups of shards keep their size, so that a rank holds as much as before. Where it does not divide the ranks, all
    # of them are one group.
    if mesh.dp_replicate > 1 and data % mesh.dp_shard == 0:
        return replace(plan, mesh=replace(mesh, dp_replicate=data // mesh.dp_shard))
    return replace(plan, mesh=replace(mesh, dp_shard=data, dp_replicate=1))


def resized_cluster(cluster: Cluster, devices: int) -> Cluster:
    """A cluster of as many nodes of the first kind as hold so many devices. InputError for a part of a node beside
    whole ones."""
    node = cluster.groups[0].node
    if devices <= node.count:
        group = NodeGroup(node=replace(node, count=devices))
    elif devices % node.count:
        raise InputError(f"{devices} devices are not whole nodes of {node.count}")
    else:
        group = NodeGroup(node=node, count=devices // node.count)
    return replace(cluster, name=f"{devices} x {node.device.name}", groups=(group,))


def stops_paying(forecasts: Sequence[Forecast], least: float = 0.5) -> int:
    """The most devices up to which each further one still brings `least` of what one of the first did."""
    first = forecasts[0]
    share = first.samples_per_s / first.devices
    best = first.devices
    for before, after in zip(forecasts, forecasts[1:], strict=False):
        gain = (after.samples_per_s - before.samples_per_s) / (after.devices - before.devices)
        if gain < least * share:
            break
        best = after.devices
    return best
