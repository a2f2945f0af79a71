"""DAPPLE's planner: pipelines whose stages have other numbers of replicas than each other, placed by three policies.

Fan et al. 2021 (PPoPP, "DAPPLE: a pipelined data parallel approach for training large models"). A dynamic programme
cuts the layers, gives each stage replicas, and puts them on fresh machines first, on used ones first, or scattered. It
goes by a closed form of the step (`latency`: the pivot stage sets the pace, what surrounds it adds a ramp); messages
are stages of their own. `dapple` predicts the best plans of the programme, data parallelism among them, and returns
the fastest that fits: the simulator decides, and nothing is claimed to be the best of all. Leaves out tensor
parallelism, and shares of unequal size (every replica of a stage takes as much of a microbatch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gnomon.errors import GnomonError, PlanError
from gnomon.graph import DTYPE_BITS, Graph
from gnomon.hardware import Cluster
from gnomon.plans import Mesh, Pass, Plan, Schedule, Stack, Stage, Workload
from gnomon.plans.select import format_layers, format_ranks
from gnomon.prediction import Prediction, predict
from gnomon.prediction.layer import parameter_elements
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.prices.collectives import collective_seconds, p2p_seconds
from gnomon.prices.links import axis_link
from gnomon.search.space import has_tied

OWN = "gnomon"
"""The stack that runs such plans."""

MOST_DEVICES = 16
"""Devices of a cluster that the planner is for."""

MOST_STATES = 20_000
"""States that the dynamic programme may extend for one number of microbatches."""

Used = tuple[int, ...]
"""Devices taken on each node."""


class Step(NamedTuple):
    """A stage, or a message between two, as the closed form sees it: seconds for one microbatch."""

    forward: float
    backward: float
    reduce: float = 0.0
    """All-reduce of its gradients after the last backward."""
    message: bool = False
    """Forwards and backwards go at once: a link has two directions."""

    @property
    def pace(self) -> float:
        """Seconds that a microbatch takes of it."""
        return max(self.forward, self.backward) if self.message else self.forward + self.backward


def latency(steps: Sequence[Step], microbatches: int) -> float:
    """Seconds of an optimizer step: until the pivot begins, the pivot's microbatches, and what is left after it.

    The pivot is the stage with the fewest gaps: the one for which these add up to most, gradients' reductions aside.
    Source: DAPPLE, section 4.1.
    """
    pivot, most, before = 0, -1.0, 0.0
    for stage, step in enumerate(steps):
        before += step.forward + step.backward
        if (microbatches - 1) * step.pace + before >= most:
            pivot, most = stage, (microbatches - 1) * step.pace + before
    steady = (microbatches - 1) * steps[pivot].pace
    # a stage before the pivot ends after the backwards between them, one behind it has ended before
    end, left = 0.0, steps[pivot].backward
    for stage in range(pivot, -1, -1):
        end = max(end, steps[stage].reduce + left)
        left += steps[stage - 1].backward if stage else 0.0
    left = steps[pivot].backward
    for stage in range(pivot + 1, len(steps)):
        left -= steps[stage - 1].backward
        end = max(end, steps[stage].reduce + left)
    return sum(step.forward for step in steps[: pivot + 1]) + steady + end


def fresh_first(free: Used, size: Used, count: int) -> Used:
    """Devices on nodes of which none is taken, then on the others."""
    return _in_order(free, sorted(range(len(free)), key=lambda node: (free[node] != size[node], node)), count)


def append_first(free: Used, size: Used, count: int) -> Used:
    """Devices on nodes of which some are taken, then on fresh ones."""
    return _in_order(free, sorted(range(len(free)), key=lambda node: (free[node] == size[node], node)), count)


def scatter_first(free: Used, size: Used, count: int) -> Used:
    """Devices one by one from the node with the most free ones."""
    left, taken = list(free), [0] * len(free)
    for _ in range(count):
        node = max(range(len(left)), key=lambda n: (left[n], -n))
        left[node] -= 1
        taken[node] += 1
    return tuple(taken)


POLICIES: tuple[Callable[[Used, Used, int], Used], ...] = (fresh_first, append_first, scatter_first)
"""(free devices of each node, devices of each node, how many) -> how many on each node."""


def _in_order(free: Used, nodes: Sequence[int], count: int) -> Used:
    taken = [0] * len(free)
    for node in nodes:
        taken[node] = min(free[node], count)
        count -= taken[node]
    return tuple(taken)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stage of the programme: counted layers [first, last) on so many devices of each node."""

    first: int
    last: int
    taken: Used
    devices: tuple[int, ...]


Pieces = tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Dapple:
    """What the planner found."""

    best: Prediction | None
    """The fastest plan that fits."""
    predicted: int
    """Plans that were predicted."""
    states: int
    """States of the dynamic programme that were extended."""
    parallel: Prediction | None
    """Data parallelism alone, if it runs."""

    @property
    def gain(self) -> float:
        """Share of the step saved against data parallelism; 0 where that does not fit."""
        if self.best is None or self.parallel is None or not self.parallel.fits:
            return 0.0
        return 1 - self.best.step_s / self.parallel.step_s


class Prices:
    """Seconds of layers on every number of replicas, for one size of microbatch."""

    def __init__(
        self, graph: Graph, cluster: Cluster, workload: Workload, base: Plan, count: int, stack: Stack
    ) -> None:
        """count: microbatches of a step. PlanError when they do not divide the batch."""
        self.graph, self.cluster, self.workload, self.stack, self.count = graph, cluster, workload, stack, count
        self.size, rest = divmod(workload.batch_size, count)
        if rest:
            raise PlanError(f"{count} microbatches do not divide a batch of {workload.batch_size} sequences")
        self.base = replace(base, schedule=Schedule(num_microbatches=count, passes=base.schedule.passes))
        self.nodes: Used = tuple(group.node.count for group in cluster.groups for _ in range(group.count))
        self.replicas = tuple(m for m in range(1, cluster.num_devices + 1) if self.size % m == 0)
        """Numbers of replicas that a stage may have."""
        self.layers = graph.layers()
        counted = [i for i, layer in enumerate(self.layers) if layer.call.first is not None]
        self.places = [0, *(counted or range(len(self.layers)))[1:], len(self.layers)]
        """Where each counted layer begins, and the end."""
        self._steps: dict[Piece, Step] = {}
        self._messages: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Step] = {}

    @cached_property
    def tables(self) -> Mapping[int, tuple[list[float], list[float], list[float], list[int]]]:
        """Replicas -> sums up to each layer of (forward s, backward s, bytes of gradients), and bytes of its output."""
        return {m: self._table(m) for m in self.replicas}

    def _table(self, replicas: int) -> tuple[list[float], list[float], list[float], list[int]]:
        found = predict(self.graph, self.cluster, self.parallel(replicas), self.workload, self.stack)
        pricing, width = found.pricing, DTYPE_BITS[self.base.precision.reduce] // 8
        order = pricing.stages[0].order
        forward = [pricing.layer_s("F", 0, price) for price in order]
        backward = [pricing.layer_s("B", 0, price) for price in order]
        sizes = [parameter_elements(price) * width for price in order]
        sums = [np.concatenate([[0.0], np.cumsum(each)]).tolist() for each in (forward, backward, sizes)]
        return sums[0], sums[1], sums[2], [price.output_bytes for price in order]

    def parallel(self, replicas: int) -> Plan:
        """Data parallelism over the first devices."""
        every = replicas == self.cluster.num_devices
        return replace(
            self.base, mesh=Mesh(dp_shard=replicas), stages=(), placement=() if every else tuple(range(replicas))
        )

    def latency(self, pieces: Pieces) -> float:
        """The closed form, messages and reductions included."""
        steps: list[Step] = []
        for i, piece in enumerate(pieces):
            if i:
                steps.append(self._message(pieces[i - 1], piece))
            steps.append(self._stage(piece))
        return latency(steps, self.count)

    def _stage(self, piece: Piece) -> Step:
        if piece not in self._steps:
            forward, backward, sizes, _ = self.tables[len(piece.devices)]
            a, b = self.places[piece.first], self.places[piece.last]
            reduce = self._reduce(piece.devices, sizes[b] - sizes[a])
            self._steps[piece] = Step(forward[b] - forward[a], backward[b] - backward[a], reduce)
        return self._steps[piece]

    def _message(self, source: Piece, target: Piece) -> Step:
        """What one replica of the smaller of two stages sends or receives of a microbatch."""
        key = source.last, source.devices, target.devices
        if key not in self._messages:
            outputs = self.tables[len(source.devices)][3]
            whole = outputs[self.places[source.last] - 1] * len(source.devices)
            link = axis_link(self.cluster, np.array([[source.devices[0], target.devices[0]]]))
            seconds = float(p2p_seconds(whole / min(len(source.devices), len(target.devices)), link))
            self._messages[key] = Step(seconds, seconds, message=True)
        return self._messages[key]

    def _reduce(self, devices: tuple[int, ...], size: float) -> float:
        if len(devices) < 2:
            return 0.0
        return float(collective_seconds("all_reduce", size, axis_link(self.cluster, np.array([devices]))))

    def place(self, used: Used, taken: Used) -> tuple[int, ...]:
        """The next free devices of each node."""
        starts = np.cumsum((0, *self.nodes)).tolist()
        return tuple(starts[n] + used[n] + i for n, count in enumerate(taken) for i in range(count))

    def plan(self, pieces: Pieces) -> Plan:
        """The pieces as a plan that lists its stages; data parallelism where there is one."""
        if len(pieces) == 1:
            return self.parallel(len(pieces[0].devices))
        stages = tuple(
            Stage(
                calls=format_layers(self.layers[self.places[p.first] : self.places[p.last]]),
                mesh=Mesh(dp_shard=len(p.devices)),
                devices=format_ranks(p.devices),
            )
            for p in pieces
        )
        return replace(self.base, mesh=Mesh(), stages=stages)


def plans(prices: Prices, keep: int) -> tuple[list[tuple[float, Pieces]], int]:
    """(the best by the closed form: (seconds, stages), states extended).

    The programme. A state is the number of layers in finished stages and the devices of each node that those use; the
    rest of the layers are one last stage on the rest of the devices. Of each state the finished stages with the
    shortest step are kept. Extending it cuts the last stage: so many layers more, on so many devices, by each policy.
    Exact for a closed form in which the best plan's finished stages are the best of their state, which the pivot's is
    not always. Data parallelism, where it is possible, is among the plans whatever its place.
    """
    total, nodes = len(prices.places) - 1, prices.nodes
    whole: list[tuple[float, Pieces]] = []
    states: dict[tuple[int, Used], tuple[float, Pieces]] = {(0, (0,) * len(nodes)): (0.0, ())}
    extended = 0
    for done in range(total):
        for (at, used), (_, pieces) in [item for item in states.items() if item[0][0] == done]:
            free = tuple(n - u for n, u in zip(nodes, used, strict=True))
            if sum(free) in prices.replicas:
                last = Piece(at, total, free, prices.place(used, free))
                whole.append((prices.latency((*pieces, last)), (*pieces, last)))
            if extended >= MOST_STATES:
                continue
            extended += 1
            for piece in _pieces(prices, at, used, free, total):
                left = sum(free) - len(piece.devices)
                rest = max((m for m in prices.replicas if m <= left), default=0)
                if not rest:
                    continue
                taken = tuple(u + t for u, t in zip(used, piece.taken, strict=True))
                others = tuple(n - u for n, u in zip(nodes, taken, strict=True))
                end = Piece(piece.last, total, others, prices.place(taken, others)[:rest])
                seconds = prices.latency((*pieces, piece, end))
                key = piece.last, taken
                if key not in states or seconds < states[key][0]:
                    states[key] = seconds, (*pieces, piece)
    best = sorted(whole, key=lambda each: each[0])
    return [*best[:keep], *(each for each in best[keep:] if len(each[1]) == 1)], extended


def _pieces(prices: Prices, at: int, used: Used, free: Used, total: int) -> Iterator[Piece]:
    """Stages that may come next, each placement once."""
    for count in prices.replicas:
        if count >= sum(free):
            return
        for taken in dict.fromkeys(policy(free, prices.nodes, count) for policy in POLICIES):
            devices = prices.place(used, taken)
            for last in range(at + 1, total):
                yield Piece(at, last, taken, devices)


def dapple(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    *,
    base: Plan | None = None,
    counts: Sequence[int] = (),
    stack: Stack = PLAIN_STACK,
    limit_bytes: int | None = None,
    keep: int = 6,
) -> Dapple:
    """The fastest plan with stages of any numbers of replicas that the planner finds, with either warm-up of its paper.

    base: precision, optimizer, what is recomputed. counts: numbers of microbatches to try; left out, those that give
    each device a sequence or more of a microbatch. keep: plans of each that are predicted. PlanError for more devices
    than it is for, or when no number of microbatches divides the batch.
    """
    if cluster.num_devices > MOST_DEVICES:
        raise PlanError(
            f"uneven replication is searched on up to {MOST_DEVICES} devices, but {cluster.name} has "
            f"{cluster.num_devices}; use the search over axes"
        )
    base, batch = base or Plan(), workload.batch_size
    tried = [n for n in counts or range(1, batch + 1) if batch % n == 0]
    if not counts:
        tried = [n for n in tried if batch // n >= cluster.num_devices][-4:]
    if not tried:
        raise PlanError(f"no number of microbatches among {tuple(counts)} divides a batch of {batch} sequences")
    best: Prediction | None = None
    parallel: Prediction | None = None
    predicted = states = 0
    alike = stack.name == OWN and has_tied(graph)  # what our own runtime asks of tied weights
    for count in tried:
        prices = Prices(graph, cluster, workload, base, count, stack)
        found, extended = plans(prices, keep)
        states += extended
        found = [each for each in found if not alike or len({len(piece.devices) for piece in each[1]}) == 1]
        for plan in (plan for _, pieces in found for plan in _warmed(prices.plan(pieces))):
            try:
                made = predict(graph, cluster, plan, workload, stack)
            except GnomonError:
                continue
            predicted += 1
            if plan.num_stages == 1 and (parallel is None or made.step_s < parallel.step_s):
                parallel = made
            limit = limit_bytes or min(rank.limit_bytes for rank in made.memory)
            fits = all(rank.peak_bytes <= limit for rank in made.memory)
            if fits and (best is None or made.step_s < best.step_s):
                best = made
    return Dapple(best=best, predicted=predicted, states=states, parallel=parallel)


def _warmed(plan: Plan) -> Iterator[Plan]:
    """The plan with as many forwards before the first backward as stages follow, and with twice as many, which hides
    messages."""
    yield plan
    if plan.num_stages > 1 and not plan.schedule.passes:
        twice = Pass(name="dapple_warmup", params=(("policy", "2p"),))
        yield replace(plan, schedule=replace(plan.schedule, passes=(twice,)))


def cuts_of(prediction: Prediction) -> tuple[tuple[int, int], ...]:
    """(layers, replicas) of each stage."""
    stages = prediction.pricing.stages
    return tuple((len(stage.order), stage.mesh.data_ranks) for stage in stages)
