"""DAPPLE's planner: pipelines whose stages have other numbers of replicas than each other, placed by three policies.

`dapple` asks the programme of `replication` for its best pipelines of a model on a cluster, with prices of single
layers (`Prices`), predicts them, data parallelism and pipelines of equal stages among them, and returns the fastest
that fits: the simulator decides, and nothing is claimed to be the best of all. Replicas that do not divide a
microbatch take whole sequences of it, some one more than others. Leaves out tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from gnomon.errors import GnomonError, PlanError
from gnomon.graph import DTYPE_BITS, Graph
from gnomon.hardware import Cluster
from gnomon.orders.one_f_one_b import DAPPLE
from gnomon.plans import Mesh, Pass, Plan, Schedule, Stage, Workload
from gnomon.plans.select import format_layers, format_ranks
from gnomon.prediction import Prediction, fits_within, predict
from gnomon.prediction.layer import parameter_elements
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.prices.collectives import collective_seconds, p2p_seconds
from gnomon.prices.links import AxisLink, axis_link
from gnomon.search.mixed.bounds import static_bytes
from gnomon.search.mixed.space import deal_out, equal_layers
from gnomon.search.space.points import divisors
from gnomon.search.stages.replication import (
    Pieces,
    PipelineStep,
    ReplicationCosts,
    StagePiece,
    Used,
    pipelines,
    place,
    taken_of,
)
from gnomon.software import Stack, own

KEPT = 6
"""The number of plans for each number of microbatches that are predicted."""

MOST_DEVICES = 128
"""The number of devices that the planner is for, at most. Up to `replication.EXACT_DEVICES` its programme drops
nothing."""


@dataclass(frozen=True, kw_only=True)
class Dapple:
    """What the planner found."""

    best: Prediction | None
    """The prediction of the fastest plan that fits."""
    predicted: int
    """The number of plans that were predicted."""
    states: int
    """The number of states of the dynamic programme that were extended."""
    parallel: Prediction | None
    """The prediction of data parallelism alone, if it runs."""

    @property
    def gain(self) -> float:
        """The share of the step that is saved against data parallelism; 0 where that does not fit."""
        if self.best is None or self.parallel is None or not self.parallel.fits:
            return 0.0
        return 1 - self.best.step_s / self.parallel.step_s


class Prices:
    """Seconds and bytes of layers on every number of replicas, for one size of microbatch: `ReplicationCosts`."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        workload: Workload,
        base: Plan,
        count: int,
        stack: Stack,
        limit_bytes: int | None = None,
    ) -> None:
        """Takes count, the microbatches of a step, and limit_bytes, what a device may hold (None for all of it).
        PlanError when the microbatches do not divide the batch."""
        self.graph, self.cluster, self.workload, self.stack, self.count = graph, cluster, workload, stack, count
        self.size, rest = divmod(workload.batch_size, count)
        if rest:
            raise PlanError(f"{count} microbatches do not divide a batch of {workload.batch_size} sequences")
        self.base = replace(base, schedule=Schedule(num_microbatches=count, passes=base.schedule.passes))
        self.limit_bytes = limit_bytes or min(group.node.device.memory_bytes for group in cluster.groups)
        self.nodes: Used = tuple(group.node.count for group in cluster.groups for _ in range(group.count))
        self.replicas = tuple(range(1, min(cluster.num_devices, self.size) + 1))
        """The numbers of replicas that a stage may have: each takes a sequence or more."""
        self.layers = graph.layers()
        counted = [i for i, layer in enumerate(self.layers) if layer.call.first is not None]
        self.places = [0, *(counted or range(len(self.layers)))[1:], len(self.layers)]
        """The index at which each counted layer begins, and the end."""
        self.num_layers = len(self.places) - 1
        self.twice = True
        self._tables: dict[int, _Table] = {}
        self._steps: dict[StagePiece, PipelineStep] = {}
        self._links: dict[tuple[int, ...], AxisLink] = {}
        self._messages: dict[tuple[int, tuple[int, ...], tuple[int, ...]], PipelineStep] = {}

    def table(self, replicas: int) -> _Table:
        """Prices of layers on so many replicas, of which each takes as much as the one with most."""
        # ceil: the replica with the most sequences sets the pace of its stage.
        most = -(-self.size // replicas)
        if most not in self._tables:
            self._tables[most] = self._table_of(replicas, most)
        return self._tables[most]

    def _table_of(self, replicas: int, most: int) -> _Table:
        # Data parallelism with this share on every replica prices all layers at once.
        work = replace(self.workload, global_batch_size=most * replicas * self.count)
        prediction = predict(self.graph, self.cluster, self._data_parallel(replicas), work, self.stack)
        pricing, width = prediction.pricing, DTYPE_BITS[self.base.precision.reduce] // 8
        (stage,) = pricing.stages
        return _Table(
            forward=_sums([pricing.compute.layer_s("F", 0, price) for price in stage.order]),
            backward=_sums([pricing.compute.layer_s("B", 0, price) for price in stage.order]),
            elements=_sums([parameter_elements(price) for price in stage.order]),
            kept_bytes=_sums(stage.kept_bytes),
            outputs=[price.output_bytes for price in stage.order],
            width=width,
        )

    def _data_parallel(self, replicas: int) -> Plan:
        """Data parallelism over the first devices, with equal shares."""
        every = replicas == self.cluster.num_devices
        return replace(
            self.base, mesh=Mesh(dp_shard=replicas), stages=(), placement=() if every else tuple(range(replicas))
        )

    def stage(self, piece: StagePiece) -> PipelineStep:
        """Prices a stage from prefix sums, in seconds for one microbatch."""
        if piece not in self._steps:
            table = self.table(len(piece.devices))
            a, b = self.places[piece.first], self.places[piece.last]
            reduce = self._reduce(piece.devices, (table.elements[b] - table.elements[a]) * table.width)
            forward, backward = table.forward[b] - table.forward[a], table.backward[b] - table.backward[a]
            self._steps[piece] = PipelineStep(forward, backward, reduce)
        return self._steps[piece]

    def message(self, source: StagePiece, target: StagePiece) -> PipelineStep:
        """What a replica of the smaller of two stages sends or receives of a microbatch, all of them at once."""
        key = source.last, source.devices, target.devices
        if key not in self._messages:
            # The smaller stage has fewer replicas, each of which carries more of the microbatch.
            most = -(-self.size // len(source.devices))
            output = self.table(len(source.devices)).outputs[self.places[source.last] - 1]
            pairs = np.array(list(zip(source.devices, target.devices, strict=False)))
            # `output` is of `most` sequences; a pair carries the microbatch over as many pairs as the smaller stage has
            # replicas.
            seconds = float(p2p_seconds(output / most * self.size / len(pairs), axis_link(self.cluster, pairs)))
            self._messages[key] = PipelineStep(seconds, seconds, message=True)
        return self._messages[key]

    def fits(self, piece: StagePiece, in_flight: int) -> bool:
        """Whether what a stage holds at least is within the limit: parameters, gradients, states and activations."""
        table, workers = self.table(len(piece.devices)), len(piece.devices)
        a, b = self.places[piece.first], self.places[piece.last]
        elements, zero = table.elements[b] - table.elements[a], self.base.optimizer.zero
        # ZeRO divides over the stage's own replicas.
        needed_bytes = static_bytes(elements, 0.0, self.base, zero, (workers, workers), self.stack)
        needed_bytes += in_flight * (table.kept_bytes[b] - table.kept_bytes[a])
        return bool(needed_bytes <= self.limit_bytes)

    def _reduce(self, devices: tuple[int, ...], size: float) -> float:
        if len(devices) < 2:
            return 0.0
        if devices not in self._links:
            self._links[devices] = axis_link(self.cluster, np.array([devices]))
        return float(collective_seconds("all_reduce", size, self._links[devices]))

    def plan(self, pieces: Pieces) -> Plan:
        """The pieces as a plan that lists its stages; data parallelism where there is one and shares are equal."""
        if len(pieces) == 1 and self.size % len(pieces[0].devices) == 0:
            return self._data_parallel(len(pieces[0].devices))
        stages = tuple(
            Stage(
                calls=format_layers(self.layers[self.places[p.first] : self.places[p.last]]),
                mesh=Mesh(dp_shard=len(p.devices)),
                devices=format_ranks(p.devices),
                shares=deal_out(self.size, len(p.devices)) if self.size % len(p.devices) else (),
            )
            for p in pieces
        )
        return replace(self.base, mesh=Mesh(), stages=stages)


def _sums(values: Sequence[float]) -> list[float]:
    """Sums of the values before each, and of all."""
    return [0.0, *accumulate(values)]


@dataclass(frozen=True, slots=True)
class _Table:
    """Prefix sums of one replica's layers, and what each layer puts out."""

    forward: list[float]
    backward: list[float]
    elements: list[float]
    kept_bytes: list[float]
    outputs: list[int]
    """Bytes of each layer's output."""
    width: int
    """Bytes of an element of a gradient."""


def dapple(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    *,
    base: Plan | None = None,
    counts: Sequence[int] = (),
    stack: Stack = PLAIN_STACK,
    limit_bytes: int | None = None,
) -> Dapple:
    """The fastest plan with stages of any numbers of replicas that the planner finds, with either warm-up of its paper.

    base: precision, optimizer, what is recomputed. counts: numbers of microbatches to try; left out, those that give
    each device a sequence or more of a microbatch. PlanError for more devices
    than it is for, or when no number of microbatches divides the batch.
    """
    if cluster.num_devices > MOST_DEVICES:
        raise PlanError(
            f"uneven replication is searched on up to {MOST_DEVICES} devices, but {cluster.name} has "
            f"{cluster.num_devices}; use the search over axes"
        )
    base, batch = base or Plan(), workload.batch_size
    tried = [n for n in counts if batch % n == 0] if counts else _counts(batch, cluster.num_devices)
    if not tried:
        raise PlanError(f"no number of microbatches among {tuple(counts)} divides a batch of {batch} sequences")
    best: Prediction | None = None
    parallel: Prediction | None = None
    predicted = states = 0
    alike = stack.name == own.NAME and own.has_tied_weights(graph)  # what our own runtime asks of tied weights
    for count in tried:
        prices = Prices(graph, cluster, workload, base, count, stack, limit_bytes)
        ranked, extended = pipelines(prices, KEPT)
        states += extended
        # What the programme found and equal pipelines, so that the answer is never worse than these.
        shapes = dict.fromkeys((*(pieces for _, pieces in ranked), *equal_splits(prices)))
        able = [shape for shape in shapes if not alike or len({len(piece.devices) for piece in shape}) == 1]
        for plan in (plan for pieces in able for plan in _warmed(prices.plan(pieces))):
            try:
                predicted_plan = predict(graph, cluster, plan, workload, stack)
            except GnomonError:
                continue
            predicted += 1
            if plan.num_stages == 1 and (parallel is None or predicted_plan.step_s < parallel.step_s):
                parallel = predicted_plan
            limit = limit_bytes or min(rank.limit_bytes for rank in predicted_plan.memory)
            if fits_within(predicted_plan, limit) and (best is None or predicted_plan.step_s < best.step_s):
                best = predicted_plan
    return Dapple(best=best, predicted=predicted, states=states, parallel=parallel)


def equal_splits(costs: ReplicationCosts) -> Iterator[Pieces]:
    """Pipelines of equal layers and as many replicas in every stage, where the devices divide so: what the answer must
    not be slower than."""
    devices = place(costs.nodes, (0,) * len(costs.nodes), costs.nodes)
    for stages in divisors(len(devices)):
        per_stage = len(devices) // stages
        if 1 < stages <= costs.num_layers and per_stage in costs.replicas:
            layers = equal_layers(costs.num_layers, stages)
            ends = list(accumulate(layers))
            ranges = [range(per_stage * stage, per_stage * (stage + 1)) for stage in range(stages)]
            yield tuple(
                StagePiece(end - n, end, taken_of(costs.nodes, some), tuple(devices[i] for i in some))
                for n, end, some in zip(layers, ends, ranges, strict=True)
            )


def _counts(batch: int, devices: int) -> list[int]:
    """Numbers of microbatches to try: the four largest that give each device a sequence or more, and up to three larger
    ones for stages of fewer replicas."""
    every = divisors(batch)
    full = [n for n in every if batch // n >= devices]
    full_counts = [n for n in every if batch // n < devices]
    return [*full[-4:], *full_counts[:: max(1, len(full_counts) // 3)][-3:]]


def _warmed(plan: Plan) -> Iterator[Plan]:
    """The plan with as many forwards before the first backward as stages follow, and with twice as many, which hides
    messages."""
    yield plan
    if plan.num_stages > 1 and not plan.schedule.passes:
        twice = Pass(name=DAPPLE, params=(("policy", "2p"),))
        yield replace(plan, schedule=replace(plan.schedule, passes=(twice,)))


def cuts_of(prediction: Prediction) -> tuple[tuple[int, int], ...]:
    """Lists (layers, replicas) of each stage."""
    stages = prediction.pricing.stages
    return tuple((len(stage.order), stage.mesh.data_ranks) for stage in stages)
