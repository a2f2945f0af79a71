"""`predict`: from a model, a cluster and a plan to time and memory, with what was assumed.

One call: check the plan, price every stage, lower to a Program, validate, play to the steady state, replay memory. The
result is a frozen `Prediction` with the same content as the command line shows. Nothing is measured here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

import numpy as np

from gnomon.graph import BF16, Graph, Kernels, Setting, graph_work
from gnomon.hardware import Cluster, parse_cluster
from gnomon.hardware.kinds import apart
from gnomon.late import load_late
from gnomon.lowering.lower import Messages, Outline, build, outline
from gnomon.lowering.units import worker_units
from gnomon.methods import check_methods
from gnomon.models.presets import graph_of
from gnomon.plans import Mesh, Plan, Unit, Workload, batch, check, stage_layers
from gnomon.plans.check import sample_tokens
from gnomon.plans.expert_rows import has_rows, taken_apart
from gnomon.plans.experts import under, with_one_expert
from gnomon.plans.groups import layer_groups
from gnomon.plans.replicas import busiest, load_under
from gnomon.plans.unread import without
from gnomon.prediction.band import OPAQUE, Band, band_of, memory_ratios
from gnomon.prediction.breakdown import step_parts
from gnomon.prediction.contention import contended
from gnomon.prediction.evidence import evidence, opaque_share
from gnomon.prediction.layer_types import KernelFacts
from gnomon.prediction.memory import RankMemory, rank_memory
from gnomon.prediction.rewriting import with_methods
from gnomon.prediction.software_kernels import expert_lines, kernels_of, on_cpu
from gnomon.prediction.stage import StagePrice, stage_prices, width
from gnomon.prediction.step import Pricing, local_sizes
from gnomon.prediction.timeline_memory import filled
from gnomon.prediction.turns import NOTE as TURNS_NOTE
from gnomon.prediction.turns import device_turns, shares_devices, with_switches
from gnomon.prediction.varied import NOTE, check_varied, in_styles, priced_units
from gnomon.prices.attention import Pieces
from gnomon.prices.curves import AttentionKernel, curves_with
from gnomon.prices.host import host_cost, sustained
from gnomon.program import Structure, validate
from gnomon.schema import to_mapping
from gnomon.simulate import Durations, Period, makespan, period
from gnomon.simulate import simulate as play_timeline
from gnomon.software import Stack, beyond_lines, unsupported
from gnomon.software import own as own_runtime
from gnomon.software.record import UNSTATED
from gnomon.timeline import Timeline

PLAIN_STACK = Stack(name=UNSTATED, version="")
"""A stack of which nothing is known; what is assumed in its place is listed with the prediction."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How a job will run."""

    model: str
    """Name of the graph."""
    cluster: str
    """Name of the machines."""
    plan: Plan
    """The plan as asked, with the placement of experts' replicas filled in where it named none."""
    workload: Workload
    """The batch of one step."""
    step_s: float
    """Seconds of an optimizer step in the steady state (the period)."""
    tokens_per_s_per_device: float
    """Samples, where the graph gives the tokens of one (`counted`)."""
    mfu: float
    """Model FLOPs (6N and full attention, nothing for recompute) over the dense peak of the compute dtype, as PaLM,
    torchtitan and most reports count it."""
    causal_mfu: float
    """The same with attention counted as its causal mask leaves it, half, as Megatron-LM counts it since 2025."""
    hfu: float
    """The same with what is computed twice counted."""
    model_flops: float
    """Of one step, all devices."""
    memory: tuple[RankMemory, ...]
    """By rank class, in order of stages."""
    assumptions: tuple[str, ...]
    """What was taken for granted: figures nobody checked, facts of the stack that are not known."""
    notes: tuple[str, ...]
    """What the plan implies and a reader might not expect."""
    durations: Durations = field(repr=False)
    """Seconds of each price key of the Program."""
    sizes: Mapping[str, float] = field(repr=False)
    """Bytes of each of its buffers."""
    structure: Structure = field(repr=False)
    """The Program and what follows from its rows alone."""
    pricing: Pricing = field(repr=False)
    """Seconds of every action, and the graph, cluster and stack that they are of."""

    @property
    def stages(self) -> tuple[StagePrice, ...]:
        """Prices of each stage's layers."""
        return self.pricing.stages

    @cached_property
    def makespan_s(self) -> float:
        """Seconds of one step that starts from rest."""
        return makespan(self.structure, self.durations)

    @cached_property
    def breakdown(self) -> Mapping[str, float]:
        """Part of the busiest rank's step -> seconds; they add up to the step to the bit. See `step_parts`."""
        return step_parts(self.structure, self.durations, self.pricing)

    @cached_property
    def band(self) -> Band:
        """Bounds between which the step and the peak memory lie in eight cases of ten."""
        time, memory = band_of(evidence(self.pricing, self.step_s)), memory_ratios()
        peak = self.tightest.peak_bytes
        return Band(
            low_s=self.step_s * time.low,
            high_s=self.step_s * time.high,
            low_bytes=int(peak * memory.low),
            high_bytes=int(peak * memory.high),
        )

    @property
    def counted(self) -> str:
        """What `tokens_per_s_per_device` counts: `tokens`, or `samples` of a model of images."""
        return "tokens" if sample_tokens(self.pricing.graph) is None else "samples"

    @property
    def fits(self) -> bool:
        """Whether every rank's peak is within its device's memory."""
        return all(rank.fits for rank in self.memory)

    @property
    def may_have_run(self) -> bool:
        """Whether every rank fits if the prediction leaves nothing out."""
        return all(rank.least_bytes <= rank.limit_bytes for rank in self.memory)

    @property
    def has_room(self) -> bool:
        """Whether every rank fits with what such a job usually takes: no verdict but `fits`."""
        return all(rank.verdict == "fits" for rank in self.memory)

    @property
    def tightest(self) -> RankMemory:
        """The rank class with the least room."""
        return max(self.memory, key=lambda rank: (rank.peak_bytes / rank.limit_bytes, rank.usual_bytes))

    @property
    def verdict(self) -> str:
        """Says in one line: `fits: 61.4 of 80 GiB (rank 3, backward of unit 2, logits 9.8)`. See
        `RankMemory.verdict`."""
        return self.tightest.sentence

    @property
    def unsupported(self) -> tuple[str, ...]:
        """What the plan asks that the program does not run by its record: as in `software.beyond`. What is predicted
        is of a program that did."""
        return unsupported(self.pricing.stack, self.plan)

    def timeline(self, *, steady: bool = True) -> Timeline:
        """The predicted Timeline of a step: its causes, bytes, FLOPs, and memory by the classes of `memory`.

        steady: one step of the steady state, which recurs every `step_s`; else one step from rest.
        """
        played = play_timeline(self.structure, self.durations, steady=steady, assumptions=self.assumptions)
        return filled(played, self.structure, self.pricing, self.sizes, self.memory)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": "gnomon.prediction/1",
            "model": self.model,
            "cluster": self.cluster,
            "parameters": self.pricing.graph.num_parameters() + self.pricing.graph.num_frozen(),
            "active_parameters": self.pricing.graph.num_active_parameters() + self.pricing.graph.num_frozen(),
            "devices": self.plan.num_devices,
            "plan": to_mapping(self.plan),
            "workload": to_mapping(self.workload),
            "microbatches": self.pricing.count,
            "step_s": self.step_s,
            "band": asdict(self.band),
            "makespan_s": self.makespan_s,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "mfu": self.mfu,
            "causal_mfu": self.causal_mfu,
            "hfu": self.hfu,
            "model_flops": self.model_flops,
            "breakdown_s": dict(self.breakdown),
            "fits": self.fits,
            "verdict": self.verdict,
            "beyond_stack": list(self.unsupported),
            "memory": [rank.to_mapping() for rank in self.memory],
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
        }


def predict(
    model: Graph | str,
    cluster: Cluster | str,
    plan: Plan,
    workload: Workload,
    stack: Stack = PLAIN_STACK,
    *,
    teacher: Graph | None = None,
) -> Prediction:
    """Time and memory of one step.

    teacher: of a plan whose methods ask for one; None: as large as the model, which is said.

    model: a Graph or the name of a preset. cluster: a Cluster or a spec such as `4x8xh100-sxm`. PlanError when the
    plan cannot run on them; UnpricedError names anything without a price.
    """
    return TimedPlan.of(model, cluster, plan, workload, stack, teacher=teacher).prediction()


@dataclass(frozen=True, kw_only=True)
class TimedPlan:
    """A plan priced, lowered and played, but for its memory: what a search asks of plans that are slow."""

    structure: Structure
    """The Program of the slowest kind of replica, with what follows from its rows alone."""
    every: tuple[tuple[Structure, Pricing], ...]
    """Of each kind of replica, or of each data-parallel worker where their units differ."""
    pricing: Pricing
    """Of the slowest."""
    durations: Durations
    """Seconds of each price key of `structure`, with what overlapping work loses to contention."""
    period: Period
    """The steady state that they lead to."""
    plan: Plan
    """That was asked for; prices may be of one device's part of it."""
    workload: Workload
    """The batch of one step."""
    kernels: Kernels
    """Which of its kernels the stack fuses: what FLOPs and kept tensors are counted by."""
    assumed: tuple[str, ...]
    """What was taken for granted of the stack, a sentence each; those of devices and links come with `prediction`."""
    notes: tuple[str, ...]
    """What the plan implies and a reader might not expect, a sentence each."""

    @staticmethod
    def of(
        model: Graph | str,
        cluster: Cluster | str,
        plan: Plan,
        workload: Workload,
        stack: Stack = PLAIN_STACK,
        *,
        by_layer: bool = False,
        teacher: Graph | None = None,
    ) -> TimedPlan:
        """Prices, lowers and plays a plan, as `predict` does. by_layer: a row for each layer, as in `lower`."""
        machines = parse_cluster(cluster) if isinstance(cluster, str) else cluster
        plan = _placed(plan, graph_of(model), workload)
        graph = under(graph_of(model), plan)
        notes = tuple(str(note) for note in check(plan, graph, machines, workload))
        check_methods(plan, graph=graph)
        kernels, assumed, stack = kernels_of(stack, cpu=on_cpu(machines))
        assumed += beyond_lines(stack, plan) + expert_lines(stack, graph, plan)
        # What is shown is the plan as it was stated; what is priced is how this runtime follows it.
        stated_plan, plan = plan, own_runtime.followed(plan) if stack.name == own_runtime.NAME else plan
        if has_rows(plan):
            cut = taken_apart(plan, graph)
            graph, plan = cut.graph, cut.plan
        count, size = batch(plan, workload)
        priced = Pricing(plan=plan, graph=graph, cluster=machines, stack=stack, stages=(), blocks=(), count=count)
        prediction_request = PredictionRequest(
            pricing=priced, workload=workload, size=size, kernels=kernels, by_layer=by_layer
        )
        if priced.costs is not None and priced.costs.teacher_forwards:
            if teacher is None:
                assumed += ("the teacher is taken to be as large as the model; gnomon predict and run read its folder",)
            prediction_request = prediction_request.taught_by(graph if teacher is None else teacher)
        if several := worker_units(graph, plan, workload):
            notes, request = (*notes, NOTE), prediction_request.of_units(several)
        elif shares_devices(plan):
            notes, request = (*notes, TURNS_NOTE), prediction_request.in_turns()
        else:
            request = prediction_request.side_by_side()
        every = tuple(request)
        if plan.optimizer.paged:  # what waits on the host follows from the peak, and its copies are part of the step
            every = tuple((rows, _paged(rows, pricing)) for rows, pricing in every)
        played = []
        for structure, pricing in every:
            durations, after = contended(structure, pricing)
            played.append((structure, pricing, durations, period(structure, durations, after)))
        # replicas meet at the end of a step only: it is as long as the slowest one's
        structure, pricing, durations, steady = max(played, key=lambda replica: replica[3].seconds)
        return TimedPlan(
            structure=structure,
            every=every,
            pricing=pricing,
            durations=durations,
            period=steady,
            plan=stated_plan,
            workload=workload,
            kernels=kernels,
            assumed=assumed,
            notes=notes,
        )

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step, as in `Prediction`."""
        return self.period.seconds

    def prediction(self) -> Prediction:
        """The whole prediction, with its memory."""
        memory, sizes = _memory(self.structure, self.pricing, self.every)
        return _prediction(self, memory, sizes)


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """What is asked, and how its plan is priced and lowered: a Program with its prices for each kind of replica."""

    pricing: Pricing
    """Plan, graph, cluster, stack and number of microbatches, without a stage."""
    workload: Workload
    """The batch of one step."""
    size: int
    """Sequences of a microbatch over all data-parallel ranks."""
    kernels: Kernels
    """Which of its kernels the stack fuses."""
    by_layer: bool
    """A row for each layer, whatever the plan."""

    def taught_by(self, teacher: Graph) -> PredictionRequest:
        """Returns the request with a teacher's forward in every microbatch, and its weights in the parameters' dtype on
        each rank."""
        plan = replace(self.pricing.plan, schedule=replace(self.pricing.plan.schedule, passes=()))
        bare = replace(self, pricing=replace(self.pricing, graph=teacher, plan=plan))
        stages = tuple(prices[0] for prices in bare.workers(plan))
        priced = replace(bare.pricing, stages=stages, blocks=tuple((stage, -1) for stage in range(len(stages))))
        seconds = sum(sum(priced.compute.parts("F", block).values()) for block in range(len(stages)))
        size = teacher.num_parameters() * width(plan.precision.param)
        return replace(self, pricing=replace(self.pricing, teacher_s=seconds, teacher_bytes=size))

    def side_by_side(self) -> Iterator[tuple[Structure, Pricing]]:
        """Replicas that run at once; those on other devices, or with other shares, play the same rows."""
        plan, stack = self.pricing.plan, self.pricing.stack
        workers = self.workers(plan)
        structure, blocks = self.lowered(
            plan, self.pricing.count, by_layer=self.by_layer or _runs_by_layer(plan, stack)
        )
        kinds = tuple(replace(self.pricing, stages=stages, blocks=blocks) for stages in _replicas(plan, workers))
        structure = with_methods(structure, kinds)
        return ((structure, pricing) for pricing in kinds)

    def in_turns(self) -> Iterator[tuple[Structure, Pricing]]:
        """Workers that take turns on devices: the rows and prices of each device."""
        sizes = local_sizes(self.workload, self.size, self.pricing.plan.world_size)
        for own, turns in device_turns(self.pricing.plan, self.pricing.count):
            structure, blocks = self.lowered(own, self.pricing.count * turns.workers, by_layer=self.by_layer)
            (kinds,) = self.workers(own, sizes=sizes)[:1]
            here = (next(price for price in kinds if turns.process in price.members),)
            yield (
                validate(with_switches(structure.program, turns)),
                replace(self.pricing, plan=own, stages=here, blocks=blocks, turns=turns),
            )

    def of_units(self, several: Sequence[tuple[Unit, ...]]) -> Iterator[tuple[Structure, Pricing]]:
        """Workers whose units are not alike: each shape is priced once."""
        priced = self.pricing
        check_varied(priced.graph, priced.plan, self.workload, self.kernels)
        # for sequences that one context-parallel rank has to itself
        one_rank = replace(priced.plan, mesh=replace(priced.plan.mesh, cp=1), placement=())
        known: dict[tuple[bool, str, int, Pieces], tuple[StagePrice, ...]] = {}

        def stages(plan: Plan, sizes: dict[str, int], pieces: Pieces) -> tuple[StagePrice, ...]:
            key = plan is one_rank, plan.layout.context, sizes["seq"], pieces
            if key not in known:
                known[key] = tuple(prices[0] for prices in self.workers(plan, sizes=sizes, pieces=pieces))
            return known[key]

        for units in dict.fromkeys(several):
            structure, blocks = self.lowered(priced.plan, len(units), by_layer=self.by_layer, units=units)
            largest, shapes = priced_units(
                priced.plan, units, in_styles(priced.plan, stages), partial(stages, one_rank)
            )
            whole = replace(priced, stages=largest, blocks=blocks, count=len(units))
            whole = replace(whole, shapes={shape: replace(whole, stages=of) for shape, of in shapes.items()})
            yield with_methods(structure, (whole,)), whole

    def lowered(
        self, plan: Plan, count: int, *, by_layer: bool, units: tuple[Unit, ...] = ()
    ) -> tuple[Structure, tuple[tuple[int, int], ...]]:
        """The Program of a plan with so many microbatches, and what its stages stand for."""
        messages: Messages = "buffered" if self.pricing.stack.messages.p2p_poll_s is None else "polled"
        return _structure(plan, self.pricing.graph, count, messages, by_layer=by_layer, units=units)

    def workers(
        self, plan: Plan, *, sizes: Mapping[str, int] | None = None, pieces: Pieces = ()
    ) -> tuple[tuple[StagePrice, ...], ...]:
        """Prices each stage's kinds of worker. sizes, pieces: of one unit, where units differ."""
        graph, cluster, stack = self.pricing.graph, self.pricing.cluster, self.pricing.stack
        experts = [dim.size for block in graph.blocks for dim in block.dims if dim.name.split(".")[-1] == "experts"]
        most, stages = max((count or 0 for count in experts), default=0), []
        seen: dict[Mesh, tuple[dict[str, int], float]] = {}
        facts = KernelFacts.of(stack, plan.layout)
        for stage in range(plan.num_stages):
            mesh = plan.stage_mesh(stage)
            if mesh not in seen:
                router = load_under(self.workload.router, plan.experts)
                load = busiest(router, plan.experts.placement, most, mesh.ep) if most else 1.0
                own = dict(sizes) if sizes is not None else local_sizes(self.workload, self.size, mesh.data_ranks)
                seen[mesh] = own, load
            local, load = seen[mesh]
            stages.append(
                stage_prices(
                    plan,
                    graph,
                    cluster,
                    stage,
                    sizes=local,
                    kernels=self.kernels,
                    facts=facts,
                    load=load,
                    pieces=pieces,
                )
            )
        return tuple(stages)


def stages_of(
    graph: Graph, cluster: Cluster, plan: Plan, workload: Workload, stack: Stack = PLAIN_STACK
) -> tuple[StagePrice, ...]:
    """Prices of each stage's layers on its slowest worker: what `predict` begins with, without time and memory of the
    step. PlanError when the plan cannot run."""
    check(plan, graph, cluster, workload)
    plan = _placed(plan, graph, workload)
    graph = under(graph, plan)
    kernels, _, stack = kernels_of(stack, cpu=on_cpu(cluster))
    count, size = batch(plan, workload)
    priced = Pricing(plan=plan, graph=graph, cluster=cluster, stack=stack, stages=(), blocks=(), count=count)
    request = PredictionRequest(pricing=priced, workload=workload, size=size, kernels=kernels, by_layer=False)
    return tuple(prices[0] for prices in request.workers(plan))


def _placed(plan: Plan, graph: Graph, workload: Workload) -> Plan:
    """The plan with the placement that the controller makes of experts' replicas, which few plans have."""
    if not plan.experts.replicas or plan.experts.placement:
        return plan
    found: Plan = load_late("gnomon.control.placing:with_placement")(plan, graph, workload)
    return found


def _replicas(plan: Plan, workers: tuple[tuple[StagePrice, ...], ...]) -> tuple[tuple[StagePrice, ...], ...]:
    """Prices of all stages for each kind of replica: data-parallel ranks on other devices, or with other shares.

    workers: of each stage, its kinds of worker, the slowest first. Where stages have other numbers of replicas than
    each other, microbatches pass from any replica to any, so the first is the slowest of every stage.
    """
    if all(len(kinds) == 1 for kinds in workers):
        return (tuple(kinds[0] for kinds in workers),)
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    if len({mesh.data_ranks for mesh in meshes}) > 1:
        most = max(len(kinds) for kinds in workers)
        return tuple(tuple(kinds[min(kind, len(kinds) - 1)] for kinds in workers) for kind in range(most))
    replicas: dict[tuple[int, ...], tuple[StagePrice, ...]] = {}
    of_rank = [{rank: price for price in kinds for rank in price.members} for kinds in workers]
    for worker in range(meshes[0].data_ranks):
        mine = []
        for mesh, ranks, prices in zip(meshes, plan.stage_ranks, of_rank, strict=True):
            first = next(i for i in range(len(ranks)) if mesh.dense.coordinate(i, "dp") == worker)
            if ranks[first] in prices:  # one with a share of 0 has none
                mine.append(prices[ranks[first]])
        if len(mine) == len(workers):
            # Workers of one kind share one price, so identities tell kinds of replica apart without comparing what they
            # hold.
            replicas.setdefault(tuple(map(id, mine)), tuple(mine))
    return tuple(replicas.values())


def _memory(
    structure: Structure, pricing: Pricing, every: Sequence[tuple[Structure, Pricing]]
) -> tuple[tuple[RankMemory, ...], dict[str, float]]:
    """Memory of every rank class, each kind of replica apart, and the sizes of buffers on the slowest."""
    memory, sizes = rank_memory(structure, pricing)
    ranks = {(rank.rank_class, rank.ranks): rank for rank in memory}
    for rows, other in every:
        for rank in rank_memory(rows, other)[0] if other is not pricing else ():
            known = ranks.setdefault((rank.rank_class, rank.ranks), rank)
            if rank.peak_bytes > known.peak_bytes:  # a worker with other units
                ranks[rank.rank_class, rank.ranks] = rank
    return tuple(sorted(ranks.values(), key=lambda rank: rank.rank_class)), sizes


def _paged(structure: Structure, pricing: Pricing) -> Pricing:
    """The pricing with the bytes of states that its device has no room for."""
    return replace(pricing, paged_bytes=max(rank.paged_bytes for rank in rank_memory(structure, pricing)[0]))


def _runs_by_layer(plan: Plan, stack: Stack) -> bool:
    """Whether the stack is Gnomon's runtime, which runs the plan layer by layer."""
    return stack.name == own_runtime.NAME and own_runtime.by_layer(plan) and not own_runtime.lacking(plan)


def _structure(
    plan: Plan,
    graph: Graph,
    count: int,
    messages: Messages = "buffered",
    *,
    by_layer: bool = False,
    units: tuple[Unit, ...] = (),
) -> tuple[Structure, tuple[tuple[int, int], ...]]:
    """The plan's Program, validated, and what its stages stand for: one for all plans that differ in prices alone."""
    schedule = replace(plan.schedule, num_microbatches=count, micro_batch_size=None)
    # Replicas with unequal shares or devices do the same at their own pace: one class, played for each, is enough.
    equal = tuple(replace(stage, shares=()) for stage in plan.stages)
    alike = replace(plan, schedule=schedule, stages=equal, placement=())
    # dtypes fill gradient buckets, of which there are rows layer by layer only
    read = without(alike, "saved") if by_layer else without(alike, "saved", "precision")
    return _of_rows(read, graph, messages, by_layer, units)


@lru_cache(maxsize=64)
def _of_rows(
    plan: Plan, graph: Graph, messages: Messages, by_layer: bool, units: tuple[Unit, ...]
) -> tuple[Structure, tuple[tuple[int, int], ...]]:
    outlined = outline(graph, plan, by_layer=by_layer, units=units)
    if outlined.layers:  # the Program's stages are then layers
        groups = layer_groups(plan, stage_layers(plan, graph))
        blocks = tuple(
            (stage, sum(map(len, part[:i]))) for stage, part in enumerate(groups) for i in range(outlined.layers[stage])
        )
    else:
        blocks = tuple((stage, -1) for stage in range(plan.num_stages))
    # How many ranks a class has changes no row: it is left out of what the Program is kept by, and filled in after.
    shared = _validated(replace(outlined, counts=()), messages)
    return replace(shared, program=replace(shared.program, counts=outlined.counts)), blocks


@lru_cache(maxsize=128)
def _validated(outlined: Outline, messages: Messages = "buffered") -> Structure:
    """Plans of one outline share their Program, whatever their sizes and prices and however many ranks a class has."""
    return validate(build(outlined, messages=messages))


def _replicas_beyond(pricing: Pricing, memory: Sequence[RankMemory]) -> Iterator[str]:
    """Says how many copies of experts a device has room for, where they are what does not fit."""
    replicas, tightest = pricing.plan.experts.replicas, max(memory, key=lambda rank: rank.peak_bytes - rank.limit_bytes)
    if not replicas or tightest.fits:
        return
    each = max(stage.replica_bytes() for stage in pricing.stages)  # of one slot of each layer
    ep = max(pricing.plan.stage_mesh(stage).ep for stage in range(pricing.plan.num_stages))
    replica_bytes, over = each * replicas // ep, tightest.peak_bytes - tightest.limit_bytes
    room = max(0, replicas // ep - -(-over // max(each, 1))) * ep
    fix = f"{room} fit" if room else "none fits"
    yield (
        f"experts.replicas = {replicas} take {replica_bytes / 2**30:.1f} GiB of each rank, which is "
        f"{over / 2**30:.1f} GiB "
        f"over its memory: about {fix}"
    )


def _untried(plan: Plan, stack: Stack) -> Iterator[str]:
    """What a plan rests on that no run on record has shown (docs/accuracy.md)."""
    if plan.overlap.priority:
        yield "overlap.priority: collectives run in the order of issue"
    if plan.overlap.splits and plan.mesh.tp > 1 and stack.layers.cut_hides is None:
        yield (
            "cut products (async_tp) hide all parts of a collective but one: runs that are said to cut theirs are "
            "predicted better as if they did not"
        )
    if any(rule.action == "offload" for rule in plan.saved.rules):
        yield "activations on the host: no run on record on GPUs tells what their copies cost"
    if plan.optimizer.low_rank is not None:
        yield "optimizer.low_rank: one published time of its singular vectors stands behind their price"
    if plan.optimizer.paged:
        yield "optimizer.paged: pages are taken to travel at the speed of copies, which no run on record shows"
    if plan.optimizer.offload_parameters:
        where = "a disk" if plan.optimizer.parameter_tier == "disk" else "the host"
        yield f"parameters on {where}: no run on record has them there"


def _prediction(played: TimedPlan, memory: tuple[RankMemory, ...], sizes: Mapping[str, float]) -> Prediction:
    """What a person reads of a plan that was played, and its memory."""
    structure, pricing, workload, assumed = played.structure, played.pricing, played.workload, played.assumed
    graph, cluster, plan, stack = pricing.graph, pricing.cluster, pricing.plan, pricing.stack
    steady = played.period
    lengths, load = workload.sequence_lengths(), load_under(workload.router, plan.experts).alone
    tokens = sum(lengths) if sample_tokens(graph) is None else len(lengths)
    # By length, since a batch has many sequences and few lengths.
    flops = sum(
        _model_flops(graph, played.kernels, batch, seq, workload.sizes, fraction_alone=load)
        for seq, batch in sorted(Counter(lengths).items())
    )
    causal = sum(
        _model_flops(graph, played.kernels, batch, seq, workload.sizes, "half", load)
        for seq, batch in sorted(Counter(lengths).items())
    )
    devices = cluster.count_devices(plan.placement)
    peak = sum(device.flops_per_s(plan.precision.compute) * count for device, count in devices.items())
    again = sum(s.phase("recompute").flops * len(s.ranks) for s in pricing.stages) * _microbatches(structure)
    again += _recompute_rows_flops(structure, pricing)
    kinds = {device.name: device for device in devices}
    hosts = [host_cost(stack, device) for device in kinds.values()]
    if plan.precision.fp8 is not None:
        assumed = (
            *assumed,
            "eight-bit products: not in routers and logits; MFU over the compute dtype's peak",
        )
    if opaque := opaque_share(pricing):
        assumed = (
            *assumed,
            f"ops without a rule of their own take {opaque:.0%} of the busiest stage's forward and backward: the band "
            f"allows for {1 / OPAQUE:g} to {OPAQUE:g} times their price",
        )
    # Where attention runs op by op no kernel of it is assumed; any name keeps the curves from saying one.
    steps = stack.layers.attention in ("unfused", "unfused_fp32_softmax")
    attention: AttentionKernel | None = "flash2" if steps else stack.layers.attention_kernel
    assumptions = (
        *assumed,
        *_untried(plan, pricing.stack),
        *_replicas_beyond(pricing, memory),
        *cluster.assumptions,
        *apart(kinds.values()),
        *(
            line
            for device in kinds.values()
            for line in curves_with(device, attention, stack.layers.cublas, stack.layers.cudnn).assumptions
        ),
        *(host.assumption for host in hosts if host.assumption),
        *(sustained(stack, device).note for device in kinds.values()),
    )
    return Prediction(
        model=graph.name,
        cluster=cluster.name,
        plan=played.plan,
        workload=workload,
        step_s=steady.seconds,
        tokens_per_s_per_device=tokens / steady.seconds / sum(devices.values()),
        mfu=flops / steady.seconds / peak,
        causal_mfu=causal / steady.seconds / peak,
        # What is computed again is work of the hardware, and no progress of the model: HFU counts it, MFU does not.
        hfu=(flops + again) / steady.seconds / peak,
        model_flops=flops,
        memory=memory,
        assumptions=tuple(dict.fromkeys(assumptions)),
        notes=played.notes,
        durations=played.durations,
        sizes=sizes,
        structure=structure,
        pricing=pricing,
    )


@lru_cache(maxsize=64)
def _model_flops(
    graph: Graph,
    kernels: Kernels,
    batch: int,
    seq: int,
    sizes: tuple[tuple[str, int], ...],
    causal: Literal["full", "half"] = "full",
    fraction_alone: float = 0.0,
) -> float:
    """Matrix FLOPs of a step, all devices; plans of one model and batch share them. causal: how attention under a
    causal mask is counted. fraction_alone: share of tokens that go to one of their two experts."""
    setting = Setting(sizes={"batch": batch, "seq": seq, **dict(sizes)}, dtypes=BF16, causal_flops=causal)
    whole = float(graph_work(graph, kernels, setting).total.matmul_flops)
    if not fraction_alone:
        return whole
    one = float(graph_work(with_one_expert(graph), kernels, setting).total.matmul_flops)
    return whole - fraction_alone * (whole - one)


def _recompute_rows_flops(structure: Structure, pricing: Pricing) -> float:
    """Matrix FLOPs of recomputation that has rows of its own (`R`), all devices."""
    program = structure.program
    recompute = np.isin(program.kind, [i for i, kind in enumerate(program.kinds) if kind.name == "R"])
    stages = program.stage[recompute].tolist()
    ranks = {stage: len(pricing.stages[pricing.blocks[stage][0]].ranks) for stage in set(stages)}
    return sum(pricing.compute.phase("forward", stage).flops * ranks[stage] for stage in stages)


def _microbatches(structure: Structure) -> int:
    return len(structure.program.units)
