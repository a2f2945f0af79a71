"""One step of a plan: its Program with a duration for every price key and a size for every buffer.

`Pricing` gives the seconds of every action, from which the simulator plays a `Step`. A stage's forward lasts as long as
its kernels and the collectives they wait for, or as its launches if the host is slower, or as its offloaded activations
take to travel. Where the Program's stages are whole stages, a collective of parameters or gradients that runs beside
computing is priced as what that computing leaves of it.
Leaves out: kernels beside those of layers (`around`), the optimizer's (`update`), the clock (room `simulate`), and what
a person reads (`predict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.graph import DTYPE_BITS, Graph
from gnomon.hardware import Cluster
from gnomon.plans import Plan, Stack, Workload, shared_parameters, transfers
from gnomon.prediction.around import around
from gnomon.prediction.layer_types import LayerPrice, Phase
from gnomon.prediction.messages import Messages
from gnomon.prediction.stage import GROUPS, StagePrice
from gnomon.prediction.update import host_copy_s, norm_s, on_host_s, parameters_back_s, parameters_s, update_parts
from gnomon.prediction.vocabulary import KINDS as VOCABULARY
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.fitted import Fitted, fitted, rates
from gnomon.prices.host import LAUNCH_S, check_s, host_cost
from gnomon.prices.kernels import OpPrice
from gnomon.prices.links import AxisLink, axis_link
from gnomon.program import Key, Program
from gnomon.schedules.tensor_sums import COPIES, TERMS
from gnomon.sharding import ParameterCollective
from gnomon.simulate import Durations
from gnomon.units import quantise

PHASES: Mapping[str, tuple[str, ...]] = {
    "F": ("forward",),
    "C": ("forward",),
    "R": ("forward",),
    "B": ("recompute", "input_grad", "weight_grad"),
    "I": ("recompute", "input_grad"),
    "W": ("weight_grad",),
}
"""Kind of action -> what it computes; `R` runs the forward of its whole stage once more."""

SPLIT_BACKWARD = frozenset(
    ("zero_bubble_h1", "zero_bubble_h2", "interleaved_zero_bubble", "zero_bubble_v", "v_half", "v_min", "dualpipe_v")
)
"""Schedules whose weight gradients are actions of their own: gradients are complete only in these."""

TIED = "embedding"
"""Price name of the all-reduce of tied parameters (`schedules.gradients`)."""

IN_UPDATE = frozenset((TERMS, COPIES))
"""Price names of sums over tensor-parallel ranks right before the update, in whose price they are."""

WANTED = {
    "AR": ("all_reduce", ("after_backward",)),
    "REDUCE_GRAD": ("reduce_scatter", ("after_backward",)),
    "UNSHARD": ("all_gather", ("before_forward", "after_step")),
}
"""Kind of action -> (collective, when)."""

BY_LAYER = frozenset({*PHASES, *WANTED, "OPT"})
"""Actions whose price follows from their layers alone."""

POLLS = frozenset({"RECV_F", "RECV_B", "POLL"})
"""Actions in which a host that polls sleeps until it sees the two descriptions of a tensor gone or come."""

FREE_KINDS = frozenset({*POLLS, "RECV_SKIP", "RECV_SKIP_GRAD", "RESHARD", "LOAD"})
"""Actions that only mark a moment: a receive ends when its send does."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A Program and its prices."""

    program: Program
    durations: Durations
    sizes: Mapping[str, float]
    stages: tuple[StagePrice, ...]
    blocks: tuple[tuple[int, int], ...]
    """(stage, layer in it) of each of the Program's stages when those are layers; (stage, -1) when whole stages."""


class Pricing:
    """Seconds of every action of a Program under one plan."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        cluster: Cluster,
        stack: Stack,
        stages: tuple[StagePrice, ...],
        blocks: tuple[tuple[int, int], ...],
        count: int,
        *,
        numbers: Fitted | None = None,
    ) -> None:
        """blocks: as in `Step`. count: microbatches. numbers: fitted to runs, in place of those on record."""
        self.plan, self.graph, self.cluster, self.stack = plan, graph, cluster, stack
        self.stages, self.blocks = stages, blocks
        sent = {(t.source, t.target): t.tensors for t in transfers(plan, graph)}
        self.messages = Messages(plan=plan, cluster=cluster, stack=stack, stages=stages, sent=sent)
        self.count = count
        self._phases: dict[tuple[str, int], Phase] = {}
        self._extras: dict[tuple[str, int], OpPrice] = {}
        self._updates: dict[int, tuple[float, int, float]] = {}
        self._wired: dict[tuple[str, int, int], list[tuple[float, AxisLink]]] = {}
        self._memo: dict[tuple[str, int, str], float] = {}
        self._use(numbers or fitted())
        like, first = _like_stages(stages), dict[tuple[int, int], int]()
        self.alike = [
            first.setdefault((like[stage], id(stages[stage].order[index]) if index >= 0 else -1), block)
            for block, (stage, index) in enumerate(blocks)
        ]
        """For each of the Program's stages, the first that costs the same: priced once."""

    @cached_property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Stages of each parameter that several hold."""
        return shared_parameters(self.plan, self.graph)

    def _use(self, numbers: Fitted) -> None:
        stack, stages = self.stack, self.stages
        self.numbers = numbers
        kinds = {id(stage.device): stage.device for stage in stages}
        reached = {at: rates(stack, device, numbers) for at, device in kinds.items()}
        launched = {at: host_cost(stack, device, numbers).per_kernel_s for at, device in kinds.items()}
        self.rates = tuple(reached[id(stage.device)] for stage in stages)
        self.launch_s = [launched[id(stage.device)] for stage in stages]
        free = {at: s for at, s in self._memo.items() if at[0] == "NORM" or at[2] == TIED}
        self._memo = free

    def with_numbers(self, numbers: Fitted | None = None, stack: Stack | None = None) -> Pricing:
        """The same plan under other fitted numbers, or with a stack that differs in its own numbers alone; what does
        not depend on them is not computed again."""
        other = copy(self)
        other.stack = stack or self.stack
        other._use(numbers or self.numbers)
        return other

    def with_stage(self, number: int, stage: StagePrice) -> Pricing:
        """The same plan with other layers on one stage, on the same devices: for what follows from that stage's layers
        alone (`BY_LAYER`), not for messages between stages."""
        other = copy(self)
        other.stages = (*self.stages[:number], stage, *self.stages[number + 1 :])
        other._phases, other._extras, other._updates, other._wired, other._memo = {}, {}, {}, {}, {}
        other.alike = list(range(len(self.blocks)))  # the stage may cost what no other does now
        return other

    def durations(self, program: Program) -> Durations:
        """Seconds of each price key, on the grid."""
        return Durations(busy=quantise(np.array([self.seconds(key) for key in program.keys], float)))

    def seconds(self, key: Key) -> float:
        """Seconds that an action holds its stream."""
        stage = self.alike[key.stage] if key.kind in BY_LAYER and not key.name else key.stage
        at = (key.kind, stage, key.name)
        if at not in self._memo:
            self._memo[at] = self._seconds(key._replace(stage=stage))
        return self._memo[at]

    def _seconds(self, key: Key) -> float:
        kind, stage = key.kind, key.stage
        if "&" in key.name:
            return sum(self.seconds(key._replace(kind=part, name="")) for part in key.name.split("&"))
        if ".." in key.name:  # one row for neighbouring blocks: `2..3.D2H`
            return sum(self.seconds(key._replace(stage=other, name="")) for other in self._bucket(key))
        if kind in FREE_KINDS:
            return 2 * (self.stack.p2p_poll_s or 0.0) if kind in POLLS else 0.0
        if kind in PHASES:
            return sum(self.parts(kind, stage).values())
        if kind in ("SEND_F", "SEND_B"):
            here = self.blocks[stage][0]
            other = here + (1 if kind == "SEND_F" else -1)
            return self._send(min(here, other), max(here, other))
        if kind in ("SEND_SKIP", "SEND_SKIP_GRAD"):
            return self._skip(self.blocks[stage][0], forward=kind == "SEND_SKIP")
        if key.name == TIED:
            return self._tied(self.blocks[stage][0])
        if key.name in IN_UPDATE:
            return 0.0
        if kind == "UNSHARD":
            return self.fetched_s(stage) + self._parameters(kind, stage)
        if kind in ("AR", "REDUCE_GRAD"):
            return self._parameters(kind, stage)
        if kind in VOCABULARY:
            return self._vocabulary(kind, stage)
        if kind == "OPT":
            return self._update(stage) + parameters_back_s(*self._layers(stage), self.cluster)
        if kind == "NORM":
            return norm_s(self.stages[self.blocks[stage][0]], self.cluster, self.stack)
        if kind in ("D2H", "H2D", "HOST_OPT"):
            return on_host_s(kind, *self._layers(stage), self.cluster)
        raise UnpricedError(f"action {key.label} has no price; add a rule for {kind} to gnomon.prediction.step")

    def fetched_s(self, block: int) -> float:
        """Seconds in which parameters that wait on the host are copied in, before they are gathered."""
        return parameters_s(*self._layers(block), self.cluster)

    def amounts(self, key: Key) -> tuple[float, float]:
        """(bytes that an action sends or reduces, FLOPs of its products) on one rank; 0 where it has none or where
        nobody counts them (the optimizer, copies to the host)."""
        kind, stage = key.kind, key.stage
        if "&" in key.name:
            each = [self.amounts(key._replace(kind=part, name="")) for part in key.name.split("&")]
            return sum(size for size, _ in each), sum(flops for _, flops in each)
        if kind in PHASES:
            return 0.0, sum(self.phase(name, stage).flops for name in PHASES[kind])
        if kind in VOCABULARY and (share := self.stages[stage].share) is not None:
            return float(sum(size for _, size in share.exchanged(kind))), sum(p.flops for p in share.phases(kind))
        if kind in ("SEND_F", "SEND_B"):
            here = self.blocks[stage][0]
            other = here + (1 if kind == "SEND_F" else -1)
            return float(self.messages.bytes_of((min(here, other), max(here, other)))), 0.0
        if kind in WANTED and key.name not in (TIED, *IN_UPDATE) and ".." not in key.name:
            name, moments = WANTED[kind]
            price, layers = self._held(stage)
            of = [(c, n) for layer, n in layers for c in price.collectives(layer)]
            return float(sum(c.bytes * n for c, n in of if c.kind == name and c.when in moments)), 0.0
        return 0.0, 0.0

    def _bucket(self, key: Key) -> list[int]:
        """The Program's stages on the row's ranks that its name spans."""
        first, last = key.name.partition(f".{key.kind}")[0].split("..")
        ranks = self.stages[self.blocks[key.stage][0]].ranks
        return [b for b in range(int(first), int(last) + 1) if self.stages[self.blocks[b][0]].ranks == ranks]

    def _layers(self, block: int) -> tuple[StagePrice, list[tuple[LayerPrice, int]]]:
        """The stage and the (price, times) of the layers behind one of the Program's stages."""
        stage, index = self.blocks[block]
        price = self.stages[stage]
        if index >= 0:
            return price, [(price.order[index], 1)]
        return price, [(layer, len(labels)) for layer, labels in price.layers]

    def _held(self, block: int) -> tuple[StagePrice, list[tuple[LayerPrice, int]]]:
        """The same, and parts of layers whose parameters the stage has too."""
        price, layers = self._layers(block)
        return price, layers if price.share is None else [(layer, len(labels)) for layer, labels in price.held]

    def phase(self, name: str, block: int) -> Phase:
        """A phase of one of the Program's stages."""
        if (name, block) not in self._phases:
            total = Phase()
            for layer, times in self._layers(block)[1]:
                total = total + getattr(layer, name) * times
            self._phases[name, block] = total
        return self._phases[name, block]

    def parts(self, kind: str, block: int) -> dict[str, float]:
        """Seconds of a computing action by what they go into: `compute`, what is computed
        again (`again`), collectives by axis (`tp`), what launches take beyond (`launch`), and what offloaded
        activations take beyond that (`offload`). They add up to its price."""
        stage = self.blocks[block][0]
        phases = [self.phase(name, block) for name in PHASES[kind]]
        if (kind, block) not in self._extras:
            self._extras[kind, block] = around(kind, *self._layers(block), self.stack, self.count)
        extra = self._extras[kind, block]
        if self.stack.composed:
            return self._one_by_one(kind, block, extra)
        spent = [self._sustained_s(stage, phase) for phase in phases]
        again = sum(s for n, s in zip(PHASES[kind], spent, strict=True) if kind == "R" or n == "recompute")
        compute = sum(spent) + float(extra.device_s) / self.rates[stage].compute
        comm: dict[str, float] = {}
        for phase in phases:
            for axis in phase.comm_s:
                comm[axis] = comm.get(axis, 0.0) + self._waited_s(stage, phase, axis)
        device = compute + sum(comm.values())
        held = max(device + self._starved_s(kind, block), self._host_s(stage, phases, extra.kernels))
        copies = self._activation_copies(kind, block)
        return {
            "compute": compute - again,
            "again": again,
            **comm,
            "launch": held - device,
            "offload": max(copies - held, 0.0),
        }

    def _one_by_one(self, kind: str, block: int, extra: OpPrice) -> dict[str, float]:
        """The same where a simulator puts layers one behind the other (`Stack.composed`)."""
        stage, layers = self._layers(block)
        at, found = self.blocks[block][0], {"compute": 0.0, "again": 0.0, "launch": 0.0, "offload": 0.0}
        repeated = {id(price) for price, alike in stage.layers if alike[0].call.first is not None}
        for layer, times in layers:
            device, launches, launch_s = 0.0, 0.0, self._launch_s(at, layer)
            for name in PHASES[kind]:
                phase: Phase = getattr(layer, name)
                spent = self._sustained_s(at, phase)
                device += spent
                launches += launch_s[name] * phase.launches
                found["again" if kind == "R" or name == "recompute" else "compute"] += times * spent
                for axis in phase.comm_s if id(layer) in repeated else ():
                    found[axis] = found.get(axis, 0.0) + times * self._waited_s(at, phase, axis)
            found["launch"] += times * max(launches - device, 0.0)
        found["compute"] += float(extra.device_s) / self.rates[at].compute
        return found

    def _launch_s(self, stage: int, layer: LayerPrice) -> dict[str, float]:
        """Host seconds of a launch in each phase of a layer, `host_kernel_s` on average over forward and backward."""
        dear = self.stack.forward_launches or 1.0
        forward, backward = layer.forward.launches, layer.input_grad.launches + layer.weight_grad.launches
        each = self.launch_s[stage] * (forward + backward) / max(dear * forward + backward, 1.0)
        return {"forward": dear * each, "recompute": dear * each, "input_grad": each, "weight_grad": each}

    def _vocabulary(self, kind: str, block: int) -> float:
        """An action of a divided embedding or head: its kernels or their launches, and what ranks exchange in it."""
        stage = self.stages[block]
        share = stage.share
        assert share is not None, f"stage {block} has no part of the vocabulary"
        wire = sum(float(collective_seconds(name, size, share.link)) for name, size in share.exchanged(kind))
        wire *= self._slower(share.link)
        phases, extra = share.phases(kind), share.passes(kind, stage.device)
        if not phases:
            return wire
        layer = share.layer(kind)
        if layer is not None and share.gathers_weights(kind):
            extra = extra + around("W", stage, [(layer, 1)], self.stack, self.count)
        device = sum(self._sustained_s(block, phase) for phase in phases)
        device += float(extra.device_s) / self.rates[block].compute + wire
        return max(device, self._host_s(block, phases, extra.kernels))

    def device_s(self, kind: str, block: int) -> float:
        """Seconds of a computing action's kernels and of the collectives that they wait for."""
        return sum(seconds for part, seconds in self.parts(kind, block).items() if part not in ("launch", "offload"))

    def host_s(self, kind: str, block: int) -> float:
        """Seconds that the host takes to issue a computing action."""
        return self._host_s(self.blocks[block][0], [self.phase(name, block) for name in PHASES[kind]], 0)

    def layer_s(self, kind: str, stage: int, layer: LayerPrice) -> float:
        """Seconds of one layer in an action of this kind: its kernels and the collectives that they wait for, or its
        launches if those take longer. No such action of a stage is shorter than its layers together."""
        own, total = self.rates[stage], 0.0
        phases = [getattr(layer, name) for name in PHASES[kind]]
        for phase in phases:
            total += self._sustained_s(stage, phase)
            total += sum(self._waited_s(stage, phase, axis) for axis in phase.comm_s)
        return max(total, self._host_s(stage, phases, 0) - own.host_unit_s)

    def _starved_s(self, kind: str, block: int) -> float:
        """Seconds that the device waits for launches where layers of one kind are launched slower than they run: what
        another kind (the head) takes longer does not make up for it, since launches of both go in order."""
        stage, layers = self._layers(block)
        if len(layers) < 2:
            return 0.0
        at, own, total = self.blocks[block][0], self.rates[self.blocks[block][0]], 0.0
        for layer, times in layers:
            phases = [getattr(layer, name) for name in PHASES[kind]]
            device = sum(self._sustained_s(at, phase) for phase in phases)
            device += sum(self._waited_s(at, phase, axis) for phase in phases for axis in phase.comm_s)
            total += times * max(self._host_s(at, phases, 0) - own.host_unit_s - device, 0.0)
        return total

    def _waited_s(self, stage: int, phase: Phase, axis: str) -> float:
        """Seconds that kernels of a phase wait for its collectives over an axis. What a network takes beyond its price
        outside layers is not in it: in layers that is the stack's own number."""
        hops = self.numbers.hops_s(axis, phase.collectives.get(axis, 0), self.stages[stage].links[axis])
        return (phase.comm_s[axis] + hops) * self.rates[stage].exposed

    def _sustained_s(self, stage: int, phase: Phase) -> float:
        """Device seconds of a phase's kernels as the stack runs them for minutes, with its own attention kernels."""
        own = self.rates[stage]
        return (phase.compute_s - phase.attention_s + phase.attention_s / own.attention) / own.compute

    def _host_s(self, stage: int, phases: Sequence[Phase], kernels: int) -> float:
        """Host seconds of an action: its launches, what its collectives take beyond one, and the loop around it."""
        own, links = self.rates[stage], self.stages[stage].links
        total = self.launch_s[stage] * (sum(phase.kernels for phase in phases) + kernels) + own.host_unit_s
        for phase in phases:
            for axis, count in phase.collectives.items():
                total += count * (own.host_collective_s + check_s(self.stack, links[axis].ranks))
        return total

    def _activation_copies(self, kind: str, block: int) -> float:
        """Seconds that offloaded activations travel over the host link, one way."""
        stage, layers = self._layers(block)
        size = sum(layer.offloaded_bytes * times for layer, times in layers)
        if not size or kind not in ("F", "B", "I"):
            return 0.0
        return host_copy_s(stage, self.cluster, size)

    def _send(self, source: int, target: int) -> float:
        """Wire time of what one stage sends another for a microbatch (its gradient takes as long)."""
        seconds, link = self.messages.wire(source, target)
        if link is None:
            return seconds
        return seconds * self._slower(link)

    def _skip(self, stage: int, *, forward: bool) -> float:
        """The longest message of a stage to (or its gradient from) one that is not its neighbour."""
        mine = [pair for pair in self.messages.sent if pair[0 if forward else 1] == stage and pair[1] != pair[0] + 1]
        return max(self._send(*pair) for pair in mine)

    def _tied(self, stage: int) -> float:
        """All-reduce of the gradient of a parameter that other stages hold too."""
        width = DTYPE_BITS[self.plan.precision.reduce] // 8
        total = 0.0
        for name, holders in self.shared.items():
            if stage in holders:
                elements = self._local_elements(stage, name)
                ends = np.array([[self.plan.device_of[self.stages[s].ranks[0]] for s in holders]])
                if len(set(ends[0].tolist())) > 1:
                    total += float(collective_seconds("all_reduce", elements * width, axis_link(self.cluster, ends)))
        return total

    def _local_elements(self, stage: int, name: str) -> int:
        for price, layers in self.stages[stage].held:
            for layer in layers:
                for tensor in price.sharded.block.parameters:
                    if layer.call.parameter_name(tensor.name, layer.index) == name:
                        return int(price.sharded.local_elements[tensor.name])
        raise UnpricedError(f"stage {stage} does not hold parameter {name!r}")

    def _parameters(self, kind: str, block: int) -> float:
        """A collective of parameters or gradients: of whole stages, what the computing beside it leaves of it."""
        buckets, last = 1, 0.0
        # at once: the clock shows what overlaps
        at_once = self.stack.bucketed is False or (kind == "REDUCE_GRAD" and self._whole_gradients)
        if beside := 0.0 if at_once else self._beside(kind, block):
            buckets, last = self._buckets(kind, block)
        seconds = self._reduced(kind, block, buckets)
        ranks = sum(link.ranks for _, link in self._wired[kind, block, buckets])
        checks = buckets * check_s(self.stack, ranks)
        if kind == "AR" and self.plan.optimizer.zero:  # comes after a REDUCE_GRAD, which hides first
            beside = max(beside - self._reduced("REDUCE_GRAD", block, buckets), 0.0)
        # the first layer's gather, or the last one's reduction, has nothing beside it
        least = seconds * max(last, 1 / buckets)
        exposed = max(least, seconds - beside * (buckets - 1) / buckets)
        if checks:  # the thread that launches the backward waits for them
            idle = max(self.device_s("B", block) - self.host_s("B", block), 0.0) if beside else 0.0
            exposed = max(exposed, checks - idle + least)
        if kind == "UNSHARD" and self.stack.sliced_gather and self.plan.optimizer.zero == 1:
            exposed += LAUNCH_S * ranks * self.stages[self.blocks[block][0]].num_tensors
        return exposed

    def _beside(self, kind: str, block: int) -> float:
        """Seconds of computing that run beside a stage's collective when it goes bucket by bucket. On a measured
        machine Gnomon's own runtime runs, whose rows are whole: none."""
        if self.stages[self.blocks[block][0]].device.measured is not None:
            return 0.0
        overlap = self.plan.overlap
        if self.blocks[block][1] >= 0:  # the Program has a row for each layer: the clock shows what overlaps
            return 0.0
        if kind == "UNSHARD":
            return sum(self.parts("F", block).values()) if overlap.param_gather else 0.0
        if not overlap.grad_reduce:
            return 0.0
        beside = sum(self.parts("W" if self.plan.schedule.name in SPLIT_BACKWARD else "B", block).values())
        return beside

    def _buckets(self, kind: str, block: int) -> tuple[int, float]:
        """(how many, the share of all bytes that is in the last one, where that is more than that of the others)."""
        stage, layers = self._held(block)
        size = self.plan.overlap.bucket_bytes
        if size is None:
            return sum(times for _, times in layers), 0.0
        if self.stack.reducer_buckets:
            return self._filled(stage, size)
        total = sum(c.bytes * n for layer, n in layers for c in stage.collectives(layer) if c.kind == WANTED[kind][0])
        return max(1, -(-total // size)), 0.0

    def _filled(self, stage: StagePrice, size: int) -> tuple[int, float]:
        """Buckets of torch's DistributedDataParallel, filled in the order in which gradients come: a tensor that is
        larger than a bucket fills one, and what the first layer has comes last, with nothing beside it."""
        width, counts, seen = DTYPE_BITS[self.plan.precision.reduce] // 8, [0], set[str]()
        sizes = []
        for layer, price in zip(stage.in_order, stage.order, strict=True):
            for tensor in price.sharded.block.parameters:
                if (name := layer.call.parameter_name(tensor.name, layer.index)) not in seen:
                    seen.add(name)
                    sizes.append(int(price.sharded.local_elements[tensor.name]) * width)
        for one in reversed(sizes):
            if counts[-1] >= size:
                counts.append(0)
            counts[-1] += one
        return len(counts), counts[-1] / max(sum(counts), 1)

    def _reduced(self, kind: str, block: int, buckets: int) -> float:
        """Seconds of a stage's collective in so many buckets, if nothing runs beside it."""
        if (kind, block, buckets) not in self._wired:
            self._wired[kind, block, buckets] = self._reductions(kind, block, buckets)
        return sum(seconds * self._slower(link) for seconds, link in self._wired[kind, block, buckets])

    def carried(self, key: Key) -> list[tuple[float, AxisLink]]:
        """(price, link) of a whole collective of parameters or gradients, or of parts of the vocabulary, on each group
        of ranks that it runs on."""
        if key.kind in VOCABULARY and (share := self.stages[key.stage].share) is not None:
            return [(self._vocabulary(key.kind, key.stage), share.link)]
        if key.kind not in WANTED or key.name in (TIED, *IN_UPDATE):
            return []
        blocks = self._bucket(key) if ".." in key.name else [self.alike[key.stage]]
        for block in blocks:
            self._reduced(key.kind, block, 1)
        return [each for block in blocks for each in self._wired[key.kind, block, 1]]

    def _reductions(self, kind: str, block: int, buckets: int) -> list[tuple[float, AxisLink]]:
        """(price, link) of a stage's collective on each group of ranks that it runs on."""
        stage, layers = self._held(block)
        name, moments = WANTED[kind]
        groups: dict[tuple[str, ...], list[tuple[ParameterCollective, int]]] = {}
        for layer, times in layers:
            for found in stage.collectives(layer):
                if found.kind == name and found.when in moments:
                    groups.setdefault(found.axes, []).append((found, times))
        found_s = []
        for axes, members in groups.items():
            size = sum(c.bytes * n for c, n in members) / buckets
            link = self._link(stage, axes)
            how = "all_reduce" if kind == "REDUCE_GRAD" and self._whole_gradients else name
            found_s.append((buckets * float(collective_seconds(how, size, link)), link))
        return found_s

    @property
    def _whole_gradients(self) -> bool:
        """Whether gradients are summed whole, at once, though each rank updates only its part."""
        return self.stack.whole_gradients is True and self.plan.optimizer.zero == 1

    def _slower(self, link: AxisLink) -> float:
        """Seconds over price of what travels over a link, as training runs show it."""
        return self.numbers.link_factor(link.across_name or link.inside_name)

    def _link(self, stage: StagePrice, axes: tuple[str, ...]) -> AxisLink:
        name = "+".join(axes)
        if name not in stage.links:
            raise UnpricedError(f"no link for groups over {name} of stage {stage.stage}; known are {', '.join(GROUPS)}")
        return stage.links[name]

    def _update(self, block: int) -> float:
        if block not in self._updates:
            whole = self.blocks[block][1] < 0
            self._updates[block] = update_parts(*self._held(block), self.stack, whole=whole)
        device_s, kernels, before = self._updates[block]
        return max(device_s, kernels * self.launch_s[self.blocks[block][0]]) + before


def _like_stages(stages: tuple[StagePrice, ...]) -> list[int]:
    """For each stage the first with the same layers on ranks of the same devices, mesh and links: what its layers cost,
    together and one by one, is the same. (What they share with other layers decides how many elements are updated.)"""
    known: dict[object, list[int]] = {}
    found = []
    for index, stage in enumerate(stages):
        layers = tuple((id(price), len(layers)) for price, layers in stage.layers)
        same = known.setdefault((id(stage.device), stage.mesh, stage.elements, layers), [])
        match = next((other for other in same if stages[other].links == stage.links), index)
        if match == index:
            same.append(index)
        found.append(match)
    return found


def local_sizes(workload: Workload, microbatch: int, data_ranks: int) -> dict[str, int]:
    """Sizes of the graph's open dims on one data-parallel rank, for sequences of one length."""
    lengths = set(workload.sequence_lengths())
    if len(lengths) > 1:
        raise UnpricedError(
            f"prediction prices batches of one sequence length, but this workload has {len(lengths)} lengths from "
            f"{min(lengths)} to {max(lengths)}; give seq_len"
        )
    return {"batch": -(-microbatch // data_ranks), "seq": lengths.pop(), **dict(workload.sizes)}
