"""The interpreter: one rank runs its rows of a Program in issue order, on real tensors.

`Executor.step(batch)` does one step of training and returns the loss and gradient norm; the actions are those that the
simulator plays, whatever the schedule. A row on the compute stream is done before the next; one on another stream is
started, and its first reader waits for it, across the end of the step too. Buffers have the Program's names, (name,
stage, unit). What actions do: `compute`, `messages`, `state`. Left out: clocks (`measure`), data, and what is inside a
stage (`apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.control.placing import ROWS_ALONE, PlacingCosts, with_placement
from gnomon.errors import PlanError
from gnomon.graph import Graph, Layer
from gnomon.lowering.norm import EVERYONE
from gnomon.lowering.units import units_of_lengths
from gnomon.methods import check_methods, lina, mimose, partial_reduce, teaching_of, used
from gnomon.methods.learnt import ad2, iss, nxm_admm, xtc
from gnomon.methods.learnt.trained_weights import compressed
from gnomon.plans import Plan, Unit, Workload, check, shared_parameters
from gnomon.plans import batch as batch_of
from gnomon.plans.ends import cut_ends
from gnomon.plans.expert_rows import LINA, exchange_parts, has_rows, taken_apart
from gnomon.plans.experts import under
from gnomon.plans.plan import effective_zero
from gnomon.program import Program
from gnomon.runtime.mesh.arrivals import channels, proofs
from gnomon.runtime.mesh.collectives import all_reduce
from gnomon.runtime.mesh.groups import Groups, stage_sets
from gnomon.runtime.module.apply import NO_SHARES, apply, dtypes, has_experts, holders, placements
from gnomon.runtime.module.blocks import Capacity
from gnomon.runtime.module.crossings import Shapes, hops
from gnomon.runtime.module.one_process import OneProcess
from gnomon.runtime.module.stage import Batch, Stage
from gnomon.runtime.optim.iss import Iss
from gnomon.runtime.optim.nxm_admm import NxmAdmm
from gnomon.runtime.optim.update import AdamWSettings, Update
from gnomon.runtime.optim.weight_rules import WeightRule
from gnomon.runtime.optim.xtc import Rounded
from gnomon.runtime.parameters.files import ReadAhead
from gnomon.runtime.parameters.parameters import CPU, Parameters, Values
from gnomon.runtime.processes.launch import check_place
from gnomon.runtime.step.buffers import Buffers
from gnomon.runtime.step.compute import Compute
from gnomon.runtime.step.distillation import Distillation
from gnomon.runtime.step.exchanges import Parts
from gnomon.runtime.step.feed import Feed, size_named
from gnomon.runtime.step.feed_lengths import FeedOfLengths, has_lengths
from gnomon.runtime.step.host_update import DelayedRows, HostUpdate, moved_stages
from gnomon.runtime.step.lane import Lane
from gnomon.runtime.step.messages import RankMessages
from gnomon.runtime.step.mimose import Mimose
from gnomon.runtime.step.replicas import Replicas
from gnomon.runtime.step.resident_bytes import levels
from gnomon.runtime.step.router_bias import RouterBias
from gnomon.runtime.step.rows import Action, RankRow, followed, plan_stages, rows, stages_of_row
from gnomon.runtime.step.state import State
from gnomon.runtime.step.step_load import StepLoad
from gnomon.runtime.step.vocabulary import DividedVocabulary, Heads
from gnomon.runtime.step.vocabulary_passes import Passes
from gnomon.runtime.watch.measure import Levels, Recorder, clock_of, gather, per_class
from gnomon.runtime.watch.watchdog import SILENT_S, Watchdog
from gnomon.software import own
from gnomon.timeline import ROLES, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step returns on one rank."""

    loss: Tensor
    """This rank's part of the mean loss over all tokens of the step: the sum over ranks is the loss."""
    grad_norm: Tensor
    """Global norm before clipping; NaN where the plan neither clips nor computes in fp16: nobody measured it."""


class Executor:
    """One rank of a job: its rows, stages, optimizer states and buffers."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        workload: Workload,
        *,
        seed: int = 0,
        settings: AdamWSettings = AdamWSettings(),  # noqa: B008 (frozen)
        program: Program | None = None,
        device: torch.device = CPU,
        values: Values | None = None,
        states: Mapping[str, Tensor] | None = None,
        steps: int = 0,
        expert_costs: PlacingCosts = ROWS_ALONE,
        teacher: OneProcess | None = None,
    ) -> None:
        """steps: of the whole run, which methods that change weights while they train ask for; 0: nobody knows.
        teacher: that methods of the plan ask for.
        program: what to run in place of `lower`'s, for the same plan; a plan with methods that rewrite the Program
        needs it, since only a prediction has what they ask for (`Prediction.structure.program`). device: this rank's,
        where all that it holds lies; `launch` gives every process its own. values: of parameters at step 0
        (`pretrained.values_of`); None: random ones by the seed. states: buffers of a captured model by
        name. expert_costs: by which experts move. `torch.distributed` must be initialised.
        PlanError for what the runtime does not run, ProgramError for a Program that is no step of the plan."""
        if partial_reduce.METHOD.used(plan):
            raise PlanError("a plan with partial_reduce is run by gnomon run alone; leave the pass out here")
        if unsupported := [entry.name for entry in used(plan) if not entry.resumes and not steps]:
            raise PlanError(f"a plan with {unsupported[0]} is run by gnomon run alone; leave the pass out here")
        check_place(plan.device_of)
        plan = with_placement(plan, graph, workload)
        graph = under(graph, plan)
        self.graph, self.plan, self.workload, self.device = graph, plan, workload, device
        ends = cut_ends(plan, graph) if plan.schedule.vocabulary != "ends" else None
        self.inside, self.plan_inside = (graph, plan) if ends is None else (ends.inside, ends.plan)
        """What stages run, and by which plan: without an embedding and a head that all pipeline ranks divide, with
        layers of experts in parts where their exchanges are rows."""
        if has_rows(plan):
            apart = taken_apart(own.followed(plan), graph)
            self.inside, self.plan_inside = apart.graph, apart.plan
        held_by = self._held_by = holders(self.plan_inside, self.inside, effective_zero(plan))
        tied = {stage for stages in held_by.values() for stage in stages}
        # NCCL runs what is issued on a communicator in order, gloo matches messages by tag: only GPUs need rows in
        # order.
        self.in_order = device.type == "cuda"
        self.followed_units: tuple[Unit, ...] = ()
        if by_lengths := has_lengths(plan, workload):
            check(plan, graph, None, workload)
            self.followed_units = units_of_lengths(graph, plan, workload.sequence_lengths())[0]
        units = self.followed_units
        self.program = followed(graph, plan, workload, program, tied, in_order=self.in_order, units=units)
        self.groups = self._groups()
        self.divided = None if ends is None else DividedVocabulary.of(ends, plan, self.groups)
        by_layer = self.program.num_stages > plan.num_stages
        self.stages = self._stages(seed, values, states or {})
        here, dtype = self.groups.here, dtypes(plan).param
        own_stages = [stage for stage, rank in enumerate(plan.pipeline_ranks) if rank == here.pipeline_rank]
        self.feed = (
            FeedOfLengths(graph, plan, workload, self.groups, device)
            if by_lengths
            else Feed(graph, plan, workload, self.groups, own_stages, device)
        )
        self.buffers = Buffers()
        self.buffers.proofs = proofs(self.program, here.pipeline_rank)
        shared = frozenset(held_by) - self._lent()
        self.state = State(self.stages, self.groups, self.buffers, settings, plan.optimizer.kind, shared, device)
        self.state.clips = plan.optimizer.clip
        self.state.by_layer = by_layer and effective_zero(plan) < 3
        self.host = HostUpdate(self.state, self.stages, moved_stages(self.program))
        self.compute = Compute(graph, self.stages, self.state, self.buffers, self.feed, dtype)
        if has_rows(plan):
            self.compute.lane = Lane()
        self.parts = Parts(self.inside, self.compute, count) if (count := exchange_parts(plan)) > 1 else None
        if (lina_pass := next((method for method in plan.schedule.passes if method.name == LINA), None)) is not None:
            self.state.lane, self.state.reduce_parts = (
                self.compute.lane,
                int(lina.METHOD.parameters_of(lina_pass)["all_reduce"]),
            )
        counts = list[Callable[[Layer, Tensor], None]]()
        if plan.experts.bias_rate:
            self.state.biases = RouterBias(self.graph, plan.experts.bias_rate, self.groups.by_comm[EVERYONE], device)
            counts.append(self.state.biases.note)
        self.step_load = StepLoad(self.groups.by_comm["balance"]) if plan.experts.balance == "global" else None
        if self.step_load is not None:
            for module in self.stages.values():
                module.counted = self.step_load.counted
        if rows_of := placements(self.graph, plan):
            self.state.replicas = Replicas(
                self.graph,
                self.stages,
                self.state.adam,
                self.groups,
                rows_of,
                expert_costs,
                plan.experts.rebalance_every,
                device,
            )
            counts.append(self.state.replicas.note)
        self.compute.counted = tuple(counts)
        if mimose.METHOD.used(plan):
            check_methods(plan, "run")
            ((_, stage),) = self.stages.items()  # one: `check_methods` refuses pipelines
            self.compute.mimose = Mimose(mimose.settings_of(plan), graph, stage, self.resident_bytes, device)
        self.state.rules = self._rules(steps)
        if (teaching := teaching_of(plan)) is not None:
            if teacher is None:
                raise PlanError(f"a plan with a teacher ({teaching.folder}) is run by gnomon run alone")
            ((_, stage),) = self.stages.items()
            augments = ad2.settings_of(plan) if ad2.METHOD.used(plan) else None
            self.compute.distillation = Distillation(teaching, augments, self.graph, stage, teacher)
        self.messages = RankMessages(
            plan,
            self.groups,
            self.buffers,
            self.program,
            plan_stages(self.inside, self.plan_inside, self.program),
            hops(self.inside, self.plan_inside, by_layer=by_layer),
            rows=self.feed.rows_of_unit,
            shapes=Shapes(self.inside, plan.layout, self.groups.mesh, self.feed.sizes, dtype),
            sizes=self.feed.sizes_of,
            device=device,
        )
        self.heads: Heads | None = None
        if (cut := self.divided) is not None:
            kind = Heads if plan.schedule.vocabulary == "interlaced" else Passes
            self.heads = kind(cut, self.stages[cut.at], self.groups, self.compute, self.buffers, self.feed)
        actions = {**self.compute.actions(), **self.messages.actions(), **self._parameter_actions()}
        if self.heads is not None:
            actions |= self.heads.actions()
        if self.parts is not None:
            actions |= self.parts.actions()
        self.actions = actions
        self.rows = rows(self.program, here.pipeline_rank, actions)
        self.disk = self._disk()
        self.delayed: DelayedRows | None = None
        """Where updates lag: which rows a step has."""
        if plan.optimizer.delay:
            self.delayed = DelayedRows(self.rows, self._kinds())
        self._join_buckets()
        self.watchdog: Watchdog | None = None

    def _stages(self, seed: int, values: Values | None, states: Mapping[str, Tensor]) -> dict[int, Stage]:
        stages = apply(
            self.inside,
            self.plan_inside,
            self.groups,
            seed=seed,
            capacity=Capacity(
                over_mean=self.workload.router.capacity,
                padded=self.workload.router.padded,
                by_weight=self.plan.experts.drop == "probs",
            ),
            device=self.device,
            values=values,
            by_layer=self.program.num_stages > self.plan.num_stages,
            shares=NO_SHARES if self.divided is None else self.divided.shares_of_stages(self.graph),
            whole=self.graph,
        )
        for part in stages.values():
            state_names = part.state_names.difference(*(still.by_name for still in part.still))
            part.states = {name: x for name, x in states.items() if name in state_names}
        return stages

    def _rules(self, steps: int) -> tuple[WeightRule, ...]:
        """What methods of the plan do to weights around their update, begun."""
        rules: list[WeightRule] = []
        names = {entry.name for entry in used(self.plan)}
        if nxm_admm.NAME in names:
            check_methods(self.plan, "run", self.graph)
            rules.append(NxmAdmm(nxm_admm.settings_of(self.plan), compressed(self.graph), steps))
        if xtc.NAME in names and (settings := xtc.settings_of(self.plan)).kind != "none":
            check_methods(self.plan, "run", self.graph)
            rules.append(Rounded(settings, compressed(self.graph)))
        if iss.NAME in names:
            check_methods(self.plan, "run", self.graph)
            rules.append(Iss(iss.settings_of(self.plan), iss.lstms(self.graph), steps))
        for rule in rules:
            for parameters, _ in self.parameters():
                rule.begin(parameters)
        return tuple(rules)

    def _disk(self) -> ReadAhead:
        """Reads parameters in the order of the rows, where they wait in files."""
        gathers = [row for row in self.rows if self.program.kinds[self.program.kind[row.number]].name == "UNSHARD"]
        stages = [self.stages[stage] for row in gathers for stage in stages_of_row(self.program, row.number)]
        return ReadAhead(
            [parameters.file for stage in stages for parameters in stage.parts if parameters.file is not None]
        )

    def _join_buckets(self) -> None:
        """Has gradients that one all-reduce sums lie together."""
        for row in self.rows:
            stages = tuple(stages_of_row(self.program, row.number))
            if len(stages) > 1 and self.program.kinds[self.program.kind[row.number]].name == "AR":
                self.state.put_together(stages)

    def _lent(self) -> set[str]:
        """Parameters that layers of one of the plan's stages share, and no other stage holds: they are there once."""
        lent = {name for stage in self.stages.values() for name in stage.borrowed}
        # What other stages hold too is added up over ranks, and so is not merely lent.
        return lent - set(shared_parameters(self.plan_inside, self.inside))

    def _groups(self) -> Groups:
        by_lengths = has_lengths(self.plan, self.workload)
        size = self.plan.mesh.data_ranks if by_lengths else batch_of(self.plan, self.workload)[1]
        return Groups.of(
            self.plan,
            kv_heads=size_named(self.graph, "kv_heads"),
            experts=has_experts(self.graph),
            tied=tuple(shared_parameters(self.plan_inside, self.inside).values()),
            channels=channels(self.program),
            size=size,
            vocabulary=self.plan.schedule.vocabulary != "ends",
        )

    def _parameter_actions(self) -> Mapping[str, Action]:
        """Those of parameters and gradients, by kind; some rows are about several stages."""
        state = self.state

        def about() -> Sequence[int]:
            return tuple(stages_of_row(self.program, self.buffers.row))

        def reduce(stage: int) -> None:
            comm, stages = self.program.comm_of(self.buffers.row), about()
            if len(stages) > 1:
                state.all_reduce_bucket(stages, comm)
            else:
                state.all_reduce(stage, comm)

        def norm() -> None:
            self.host.added()
            state.measure_norm(about())

        return {
            **self.host.actions(about),
            "AR": lambda stage, unit: reduce(stage),
            "UNSHARD": lambda stage, unit: state.unshard(about()),
            "RESHARD": lambda stage, unit: state.reshard(stage),
            "REDUCE_GRAD": lambda stage, unit: state.reduce_grad(about()),
            "NORM": lambda stage, unit: norm(),
            "OPT": lambda stage, unit: state.update(stage),
        }

    def watch(self, *, silent_s: float = SILENT_S) -> None:
        """Has a thread look after the ranks from now on: one that is silent for so long ends the job, by a message
        that says who waits where."""
        # One rank waits for nobody.
        if self.plan.world_size > 1:
            self.watchdog = Watchdog(self.program, self.groups.here.rank, self.plan.world_size, silent_s=silent_s)

    def step(self, batch: Tensor | Batch, recorder: Recorder | None = None) -> StepResult:
        """Trains one step. batch: (global_batch_size, seq_len + 1) token ids, or the graph's inputs by name, rows
        first, with `documents` beside them where rows hold several (`packing`), or where the workload has lengths, as
        `feed_lengths` says; the same on all ranks, and each reads its part. recorder: takes the times of the rows; none
        are taken without it."""
        self.take(batch)
        self.buffers.recorder = recorder
        self.state.new_step()
        if self.state.biases is not None:
            self.state.biases.new_step()
        if self.step_load is not None:
            self.step_load.new_step()
        self.compute.new_step()
        if self.parts is not None:
            self.parts.new_step()
        if self.compute.distillation is not None:
            self.compute.distillation.new_step(max((rule.steps for _, rule in self.parameters()), default=0))
        chosen = self._rows_now()
        if recorder is None:
            for row in chosen:
                self._do(row)
        else:
            self._do_timed(chosen, recorder)
        self.buffers.wait_sent()
        if self.watchdog is not None:
            # Between steps no row is waited in.
            self.watchdog.row = -1
        if recorder is not None:
            self._hold(recorder)
        self.buffers.recorder = None
        if (replicas := self.state.replicas) is not None:
            if replicas.looks:
                self.settle()
            replicas.end_step()
        return StepResult(loss=self.compute.loss, grad_norm=self.state.norm)

    def take(self, batch: Tensor | Batch) -> None:
        """Makes a batch the step's, with the rows that its lengths make."""
        self.feed.take(batch)
        if not isinstance(self.feed, FeedOfLengths) or self.feed.units == self.followed_units:
            return
        units = self.followed_units = self.feed.units
        tied = {stage for stages in self._held_by.values() for stage in stages}
        self.program = followed(self.graph, self.plan, self.workload, None, tied, in_order=self.in_order, units=units)
        self.messages.program = self.program
        self.buffers.proofs = proofs(self.program, self.groups.here.pipeline_rank)
        self.rows = rows(self.program, self.groups.here.pipeline_rank, self.actions)
        if self.delayed is not None:
            self.delayed = DelayedRows(self.rows, self._kinds())
        if self.watchdog is not None:
            self.watchdog.program = self.program

    def _kinds(self) -> list[str]:
        return [self.program.kinds[self.program.kind[row.number]].name for row in self.rows]

    def _do(self, row: RankRow) -> None:
        self.buffers.row, self.buffers.blocks = row.number, row.blocks
        if self.watchdog is not None:
            self.watchdog.row = row.number
        # What has arrived is let go before the next row, so that it does not count as held while that runs.
        self.buffers.end_finished()
        if self.host.going:
            self.host.arrive(stages_of_row(self.program, row.number))
        row.action(row.stage, row.unit)

    def _rows_now(self) -> Sequence[RankRow]:
        """Those of this step: all of the Program's, but for what a delayed update has not, or does later."""
        if self.delayed is None:
            return self.rows
        updates = max((rule.steps for _, rule in self.parameters()), default=0)
        self.host.is_concurrent = updates >= self.plan.optimizer.delay_after
        if not self.host.is_concurrent:
            return self.delayed.usual
        # The first delayed step has no gradient to apply from the one before.
        return self.delayed.later if self.host.waits else self.delayed.first

    def settle(self) -> None:
        """Applies the gradients that a delayed update has not read yet, so that nothing waits: before a checkpoint and
        at the end. All ranks must call it."""
        self.synchronise()
        if self.delayed is not None and self.host.waits:
            self.host.is_concurrent = False
            for row in self.delayed.settling:
                self._do(row)
            self.synchronise()

    def _do_timed(self, chosen: Sequence[RankRow], recorder: Recorder) -> None:
        recorder.begin()
        self._hold(recorder)
        for row in chosen:
            span = recorder.open(row.number) if row.timed else -1
            self._do(row)
            if row.timed:
                recorder.close(span)
            self._hold(recorder)
        self.synchronise()

    def _hold(self, recorder: Recorder) -> None:
        """Notes what this rank holds after a row."""
        if recorder.memory:
            recorder.hold(self.buffers.row, self._levels())

    def _levels(self) -> Levels:
        all_parts = [part for stage in self.stages.values() for part in stage.parts]
        return levels(all_parts, self.state.nbytes, self.buffers, self.compute.microbatches(), self.stages)

    def resident_bytes(self) -> int:
        """Counts the bytes on the device between two actions: what lives on between them, the batch and tables."""
        apart = [x for part in self.stages.values() for x in part.states.values()]
        # By storage: tables that layers share lie on the device once.
        other_bytes = {x.untyped_storage().data_ptr(): x for x in (*apart, *self.compute.apart) if x is not None}
        for part in self.stages.values():  # counted as parameters
            for still in part.still:
                if still.flat is not None:
                    other_bytes.pop(still.flat.untyped_storage().data_ptr(), None)
        return sum(self._levels()) + sum(x.untyped_storage().nbytes() for x in other_bytes.values())

    def measured_step(self, batch: Tensor | Batch, *, memory: bool = False) -> tuple[StepResult, Timeline]:
        """One step and its Timeline with a worker for each rank; the ranks meet before and after.

        memory: what each rank holds over time too, by the classes of a prediction, `temporary` and after it apart.
        """
        recorder = Recorder(memory=memory, clock=clock_of(self.device))
        group = self.groups.by_comm[EVERYONE]
        if group is not None:
            dist.barrier(group=group)
        result = self.step(batch, recorder)
        return result, gather(self.program, recorder, group)

    def per_class(self, timeline: Timeline) -> Timeline:
        """A measured Timeline as predictions have them: a worker for each rank class: its first rank, or
        where ranks have other shares the one that computes longest, as predictions price it."""
        uneven = any(stage.shares for stage in self.plan.stages) or isinstance(self.feed, FeedOfLengths)
        first = [_busiest(timeline, ranks) if uneven else ranks[0] for ranks in stage_sets(self.plan)]
        return per_class(timeline, first, self.program.counts)

    @property
    def notes(self) -> tuple[str, ...]:
        """What methods that decide in the run say of it."""
        mimose, replicas = self.compute.mimose, self.state.replicas
        lines: tuple[str, ...] = () if mimose is None else (mimose.summary(),)
        lines += () if replicas is None or not replicas.every else (replicas.summary(),)
        lines += () if self.compute.distillation is None else (self.compute.distillation.note,)
        return lines + tuple(rule.note for rule in self.state.rules)

    def parameters(self) -> Iterator[tuple[Parameters, Update]]:
        """What this rank holds of the model, and the optimizer's states of it."""
        for number, stage in self.stages.items():
            yield from zip(stage.own_parameters, self.state.adam[number], strict=True)

    def synchronise(self) -> None:
        """Waits for everything that was started, so that parameters are those after the last update."""
        self.host.finish()
        self.buffers.wait_all()
        self.disk.finish()

    def leave(self) -> None:
        """Ends this job's process groups, for a process that goes on to another plan. Every rank must call it, and none
        runs a step after it."""
        self.synchronise()
        if self.watchdog is not None:
            self.watchdog.close()
        self.groups.leave()
        self.host.close()
        self.disk.close()
        if self.heads is not None:
            self.heads.close()
        if self.compute.lane is not None:
            self.compute.lane.close()
        self.delayed = None
        self.rows.clear()
        self.actions = {}  # they hold this object, and with it the groups, until garbage is collected

    def total_loss(self, result: StepResult) -> float:
        """The mean loss over all tokens of the step; all ranks must ask."""
        total = result.loss.clone()
        group = self.groups.by_comm[EVERYONE]
        if group is not None:
            all_reduce(total, group)
        return float(total)


def _busiest(timeline: Timeline, ranks: Sequence[int]) -> int:
    """Finds the one of these workers whose spans of compute take longest together."""
    spans = timeline.spans
    compute_s = np.where(spans.role == ROLES.index("compute"), spans.end_s - spans.start_s, 0.0)
    total = np.bincount(spans.worker, compute_s, minlength=len(timeline.workers))
    return max(ranks, key=lambda rank: float(total[rank]))
