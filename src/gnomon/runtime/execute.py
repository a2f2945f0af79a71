"""The interpreter: one rank runs its rows of a Program in issue order, on real tensors.

`Executor.step(batch)` does one step of training and returns the loss and gradient norm; the actions are those that the
simulator plays, whatever the schedule. A row on the compute stream is done before the next; one on another stream is
started, and its first reader waits for it, across the end of the step too. Buffers have the Program's names, (name,
stage, unit); what leaves stage s forward is X of s + 1, and what leaves it backward DY of s - 1, on this rank or not.
Left out: clocks (`measure`), data, and what is inside a stage (`apply`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.lowering import lower
from gnomon.lowering.optimizer import effective_zero
from gnomon.methods import rewrites
from gnomon.plans import Plan, Workload, shared_parameters, stage_layers
from gnomon.plans import batch as batch_of
from gnomon.program import Program
from gnomon.runtime.apply import apply, dtypes, has_experts, holders
from gnomon.runtime.arrivals import channels, out_of_order, proofs
from gnomon.runtime.buffers import Buffers, Name
from gnomon.runtime.check_program import check_program
from gnomon.runtime.collectives import all_reduce
from gnomon.runtime.held import NOTHING, Kept, kept, levels
from gnomon.runtime.measure import Recorder, clock_of, gather, per_class
from gnomon.runtime.mesh import Groups, channel_name, stage_sets
from gnomon.runtime.ops.attention import rotary_tables
from gnomon.runtime.ops.site import Axis
from gnomon.runtime.optim import AdamWSettings, Update
from gnomon.runtime.packing import DOCUMENTS, batch_of_ids
from gnomon.runtime.parameters import CPU, Aside, Parameters, Slot
from gnomon.runtime.routes import Route, Together, Waits, of_rank, routes, rows_of, started
from gnomon.runtime.stage import Batch
from gnomon.runtime.state import State
from gnomon.runtime.watchdog import SILENT_S, Watchdog
from gnomon.sharding.homes import is_sequence
from gnomon.timeline import ROLES, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step returns on one rank."""

    loss: Tensor
    """This rank's part of the mean loss over all tokens of the step: the sum over ranks is the loss."""
    grad_norm: Tensor
    """Global norm before clipping; NaN where the plan does not clip, so that nobody computed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a forward leaves for its backward."""

    x: Tensor
    """Leaf that the stage read."""
    made: GradientEdge
    """Where backward begins; what the stage made may be freed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the Program as this rank does it."""

    number: int
    """In the Program."""
    action: Callable[[int, int], None]
    """Takes stage and unit."""
    stage: int
    unit: int
    blocks: bool
    """A communication on the compute stream, which waits for its end."""
    timed: bool
    """Its span is from the call to the return; that of a communication ends when it has arrived."""


def program_of(graph: Graph, plan: Plan, workload: Workload) -> Program:
    """The Program that all ranks follow. With uneven shares the rows are those of equal ones: each rank takes its own
    part of every unit, and the weight of a sequence does not depend on who computes it."""
    if not any(stage.shares for stage in plan.stages):
        return lower(graph, plan, None, workload)
    count, _ = batch_of(plan, workload)
    schedule = replace(plan.schedule, num_microbatches=count, micro_batch_size=None)
    return lower(graph, replace(plan, stages=tuple(replace(s, shares=()) for s in plan.stages), schedule=schedule))


def size_named(graph: Graph, name: str) -> int:
    """The size of a dim, wherever the model has it; 0 for none."""
    return next((dim.size or 0 for block in graph.blocks for dim in block.dims if dim.name == name), 0)


def _angles(graph: Graph, positions: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Tables of the model's rotary embeddings, which all microbatches share."""
    found: list[Tensor] = []
    for block in graph.blocks:
        for op in block.ops:
            if op.kind == "rotary":
                fraction = op.attr("fraction", 1.0)
                assert isinstance(fraction, float)
                width = int((block.tensor(op.inputs[0]).dims[-1].size or 0) * fraction)
                found += rotary_tables(op.attrs, positions, width, dtype, device)
    return tuple(found)


def _busiest(timeline: Timeline, ranks: Sequence[int]) -> int:
    """Of these workers, the one whose spans of compute take longest together."""
    spans = timeline.spans
    held = np.where(spans.role == ROLES.index("compute"), spans.end_s - spans.start_s, 0.0)
    total = np.bincount(spans.worker, held, minlength=len(timeline.workers))
    return max(ranks, key=lambda rank: float(total[rank]))


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
        values: Callable[[Slot], Tensor | None] | None = None,
        states: Mapping[str, Tensor] | None = None,
    ) -> None:
        """program: what to run in place of `lower`'s, for the same plan; a plan with methods that rewrite the Program
        needs it, since only a prediction has what they ask for (`Prediction.structure.program`). device: this rank's,
        where all that it holds lies; `launch` gives every process its own. values: of parameters at step 0
        (`pretrained.values_of`); None: random ones by the seed. states: buffers of a captured model by
        name. `torch.distributed` must be initialised.
        PlanError for what the runtime does not run, ProgramError for a Program that is no step of the plan."""
        self.graph, self.plan, self.workload, self.device = graph, plan, workload, device
        count, size = batch_of(plan, workload)
        zero = effective_zero(plan)
        held_by = holders(plan, self.graph, zero)
        if program is None and rewrites(plan):
            names = ", ".join(given.name for given in plan.schedule.passes)
            raise PlanError(f"{names} rewrites the Program by predicted seconds; give it: program = the prediction's")
        self.program = program_of(self.graph, plan, workload)
        if program is not None:
            tied_stages = {stage for stages in held_by.values() for stage in stages}
            check_program(program, self.program, zero=zero, tied=tied_stages)
            self.program = program
        tied = next(iter(shared_parameters(plan, self.graph).values()), ())
        if self.program.aliases:
            raise PlanError("the runtime does not run layers that two stages of one rank share; give each its own")
        if device.type == "cuda" and (message := out_of_order(self.program)) is not None:
            raise PlanError(f"message {message} is received out of order, which NCCL does not do; run it with gloo")
        self.groups = Groups.of(
            plan,
            kv_heads=size_named(graph, "kv_heads"),
            experts=has_experts(graph),
            tied=tied,
            channels=channels(self.program),
            size=size,
        )
        blocks = [1] * plan.num_stages
        if self.program.num_stages > plan.num_stages:  # a stage of the Program is a layer
            blocks = [len(layers) for layers in stage_layers(plan, self.graph)]
        self.plan_stage = [stage for stage, count in enumerate(blocks) for _ in range(count)]
        if workload.router.padded:
            raise PlanError("the runtime does not fill experts up to their capacity; leave out router.padded")
        self.stages = apply(
            graph, plan, self.groups, seed=seed, capacity=workload.router.capacity, device=device, values=values
        )
        for part in self.stages.values():
            part.states = states or {}
        mesh, here = self.groups.mesh, self.groups.here
        self.num_units, self.rows_of_unit = count, size
        held = [stage for stage, rank in enumerate(plan.pipeline_ranks) if rank == here.pipeline_rank]
        parts = {rows_of(plan, stage, size)[here.data] for stage in held}
        if len(parts) > 1:
            raise PlanError(
                f"stages {held} are on the same ranks, but share out microbatches otherwise; make them alike"
            )
        ((self.first_row, self.local_rows),) = parts
        self.tokens = count * size * workload.seq_len
        if set(workload.sequence_lengths()) != {workload.seq_len}:
            raise PlanError("the runtime wants sequences of one length; give workload.seq_len alone")
        self.shared_seq = Axis(ranks=mesh.cp, index=here.along["cp"], order=plan.layout.context_order)
        """How ranks of cp share sequences out."""
        ways = mesh.cp * (mesh.tp if plan.layout.sequence_parallel else 1)
        halves = 2 if mesh.cp > 1 and plan.layout.context_order == "zigzag" else 1
        if workload.seq_len % ways or workload.seq_len % (mesh.cp * halves):
            raise PlanError(
                f"ranks divide seq_len = {workload.seq_len} into {ways} parts, under cp in zig-zag order of two pieces "
                f"each; make it a multiple of {math.lcm(ways, mesh.cp * halves)}"
            )
        tokens = workload.seq_len // ways
        self.unit = 0
        """That whose forward runs, or ran last."""
        self.shape = (self.local_rows, tokens, size_named(graph, "hidden"))
        self.loss_dtype = torch.promote_types(dtypes(plan).param, torch.float32)  # that of `cross_entropy`
        self.buffers = Buffers()
        self.state = State(
            self.stages,
            self.groups,
            self.buffers,
            settings,
            plan.optimizer.kind,
            frozenset(held_by),
            device,
        )
        self.alike = not any(stage.shares for stage in plan.stages)
        self._found: dict[tuple[int, int], tuple[Route, ...]] = {}
        self.saved: dict[tuple[int, int], Saved] = {}
        self.aside: dict[tuple[int, int], list[Aside]] = {}
        self.kept: dict[int, Kept] = {}  # what a microbatch keeps at a stage from F to B; counted once it is asked for
        self.put_aside: dict[int, Kept] = {}  # from I to W
        self.rotary = _angles(graph, workload.seq_len, dtypes(plan).param, device)
        self.batch: Batch = {}
        self.counted = self.tokens
        """Labels of the step, whose mean the loss is."""
        self.loss = torch.zeros((), device=device)
        self.buffers.proofs = proofs(self.program, self.groups.here.pipeline_rank)
        self.rows = self._compiled()
        self.watchdog: Watchdog | None = None

    def watch(self, *, silent_s: float = SILENT_S) -> None:
        """Has a thread look after the ranks from now on: one that is silent for so long ends the job, by a message
        that says who waits where."""
        if self.plan.world_size > 1:
            self.watchdog = Watchdog(self.program, self.groups.here.rank, self.plan.world_size, silent_s=silent_s)

    def _compiled(self) -> list[Row]:
        """Rows of this rank's class."""
        actions: dict[str, Callable[[int, int], None]] = {
            name: getattr(self, f"_{name.lower()}")
            for name in "F B I W C R SEND_F RECV_F SEND_B RECV_B LOAD AR UNSHARD RESHARD REDUCE_GRAD NORM OPT".split()
        }
        program, cls = self.program, self.groups.here.pipeline_rank
        if program.num_classes != self.plan.num_pipeline_ranks:
            raise PlanError("the runtime wants one rank class for each pipeline rank; workers that differ share it")
        out = []
        for row in range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])):
            override = program.overrides.get(row)
            if override is not None and override.inside:
                continue
            name = program.kinds[program.kind[row]].name
            if name not in actions:
                raise PlanError(
                    f"{program.where(row)}: the runtime does not execute {name}; there are {', '.join(actions)}"
                )
            out.append(
                Row(
                    number=row,
                    action=actions[name],
                    stage=int(program.stage[row]),
                    unit=int(program.unit[row]),
                    blocks=program.streams[program.stream[row]] == "compute",
                    timed=not program.comm_of(row) or name == "NORM",
                )
            )
        return out

    # --- a step

    def step(self, batch: Tensor | Batch, recorder: Recorder | None = None) -> StepResult:
        """One step. batch: (global_batch_size, seq_len + 1) token ids, or the graph's inputs by name, rows first, with
        `documents` beside them where rows hold several (`packing`); the same on all ranks, and each reads its part.
        recorder: takes the times of the rows; none are taken without it."""
        self.take(batch)
        self.buffers.recorder = recorder
        self.state.new_step()
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if recorder is None:
            for row in self.rows:
                self._do(row)
        else:
            recorder.begin()
            self._hold(recorder)
            for row in self.rows:
                span = recorder.open(row.number) if row.timed else -1
                self._do(row)
                if row.timed:
                    recorder.close(span)
                self._hold(recorder)
            self.synchronise()
        self.buffers.wait_sent()
        if self.watchdog is not None:
            self.watchdog.row = -1
        if recorder is not None:
            self._hold(recorder)
        self.buffers.recorder = None
        return StepResult(loss=self.loss, grad_norm=self.state.norm)

    def _do(self, row: Row) -> None:
        self.buffers.row, self.buffers.blocks = row.number, row.blocks
        if self.watchdog is not None:
            self.watchdog.row = row.number
        self.buffers.end_finished()
        row.action(row.stage, row.unit)

    def _hold(self, recorder: Recorder) -> None:
        """Notes what this rank holds after a row."""
        if not recorder.memory:
            return
        held = [part for stage in self.stages.values() for part in stage.held]
        microbatches = [self.kept.get(stage, NOTHING) for stage, _ in self.saved]
        microbatches += [self.put_aside.get(stage, NOTHING) for stage, _ in self.aside]
        recorder.hold(self.buffers.row, levels(held, self.state.nbytes, self.buffers, microbatches, self.stages))

    def measured_step(self, batch: Tensor | Batch, *, memory: bool = False) -> tuple[StepResult, Timeline]:
        """One step and its Timeline with a worker for each rank; the ranks meet before and after.

        memory: what each rank holds over time too, by the classes of a prediction, `temporary` and after it apart.
        """
        recorder = Recorder(memory=memory, clock=clock_of(self.device))
        group = self.groups.by_comm["norm"]
        if group is not None:
            dist.barrier(group=group)
        result = self.step(batch, recorder)
        return result, gather(self.program, recorder, group)

    def per_class(self, timeline: Timeline) -> Timeline:
        """A measured Timeline as predictions have them: a worker for each rank class: its first rank, or
        where ranks have other shares the one that computes longest, as predictions price it."""
        first = [ranks[0] if self.alike else _busiest(timeline, ranks) for ranks in stage_sets(self.plan)]
        return per_class(timeline, first, self.program.counts)

    def synchronise(self) -> None:
        """Waits for everything that was started, so that parameters are those after the last update."""
        self.buffers.wait_all()

    def leave(self) -> None:
        """Ends this job's process groups, for a process that goes on to another plan. Every rank must call it, and none
        runs a step after it."""
        self.synchronise()
        if self.watchdog is not None:
            self.watchdog.close()
        self.groups.leave()
        self.rows.clear()  # they hold this object, and with it the groups, until garbage is collected

    def total_loss(self, result: StepResult) -> float:
        """The mean loss over all tokens of the step; all ranks must ask."""
        total = result.loss.clone()
        group = self.groups.by_comm["norm"]
        if group is not None:
            all_reduce(total, group)
        return float(total)

    # --- compute

    def take(self, batch: Tensor | Batch) -> None:
        """Makes a batch the step's. PlanError for one of another shape than the plan's, or without an input of the
        graph."""
        sequences, seq_len = self.workload.global_batch_size, self.workload.seq_len
        if isinstance(batch, Tensor):
            if batch.shape != (sequences, seq_len + 1):
                raise PlanError(f"a step takes ids of shape {(sequences, seq_len + 1)}, not {tuple(batch.shape)}")
            batch = batch_of_ids(batch)
        asked = {tensor.name for tensor in self.graph.inputs}
        if missing := sorted(asked - set(batch)):
            raise PlanError(f"{self.graph.name} reads {', '.join(missing)}, which the batch has not")
        for name, given in batch.items():
            tokens = name in ("input_ids", "labels", DOCUMENTS) and given.ndim > 1
            if given.shape[0] != sequences or (tokens and given.shape[1] != seq_len):
                raise PlanError(
                    f"{name} has shape {tuple(given.shape)}, and a step takes {sequences} rows of {seq_len} positions"
                )
        if DOCUMENTS in batch and self.groups.mesh.cp > 1:
            raise PlanError("the runtime does not pack documents into rows that ranks divide (cp > 1) yet; use cp = 1")
        self.batch = {name: given.to(self.device) for name, given in batch.items() if name in {*asked, DOCUMENTS}}
        labels = batch.get("labels")
        self.counted = self.tokens if labels is None else max(1, int((labels >= 0).sum()))

    def tokens_of(self, unit: int) -> Batch:
        """Rows of a unit on this rank."""
        first = unit * self.rows_of_unit + self.first_row
        given = {name: tensor[first : first + self.local_rows] for name, tensor in self.batch.items()}
        if self.shared_seq.ranks == 1:
            return given
        return {name: self._own_positions(name, tensor) for name, tensor in given.items()}

    def _own_positions(self, name: str, x: Tensor) -> Tensor:
        """This rank's positions of an input of the graph."""
        dims = next((tensor.dims for tensor in self.graph.inputs if tensor.name == name), ())
        for at, dim in enumerate(dims):
            if is_sequence(dim.name):
                own = self.shared_seq.positions(x.shape[at] // self.shared_seq.ranks, x.device)
                x = x.index_select(at, own)
        return x

    def parameters(self) -> Iterator[tuple[Parameters, Update]]:
        """What this rank holds of the model, and the optimizer's states of it."""
        for number, stage in self.stages.items():
            yield from zip(stage.held, self.state.adam[number], strict=True)

    def _run(self, stage: int, unit: int, x: Tensor) -> Tensor:
        self.state.gathered(stage)
        self.unit = unit
        module = self.stages[stage]
        batch = self.tokens_of(unit)
        recorder = self.buffers.recorder
        if recorder is None or not recorder.memory or stage in self.kept or not x.requires_grad:
            y: Tensor = module(x, batch)
            return y
        y, self.kept[stage] = kept(
            lambda: module(x, batch), x, vocab=self._vocab(), apart=(*self.rotary, *self.batch.values())
        )
        return y

    def _vocab(self) -> int:
        """Entries of the vocabulary on this rank."""
        return size_named(self.graph, "vocab") // self.groups.mesh.tp

    def _input(self, stage: int, unit: int, *, keep: bool = False) -> Tensor:
        if self.stages[stage].first:
            return torch.zeros((), device=self.device)
        name = ("X", stage, unit)
        self.buffers.wait(name)
        return self.buffers.tensors[name] if keep else self.buffers.take(name)

    def _output(self, stage: int, unit: int, y: Tensor) -> None:
        if self.stages[stage].last:
            self.loss += y.detach().double() / self.counted / self._repeats()
        else:
            self.buffers.tensors["X", stage + 1, unit] = y.detach()

    def _repeats(self) -> int:
        """Tensor-parallel ranks all compute the same loss."""
        return self.groups.mesh.tp

    def _f(self, stage: int, unit: int) -> None:
        x = self._input(stage, unit).requires_grad_()
        y = self._run(stage, unit, x)
        self.saved[stage, unit] = Saved(x=x, made=get_gradient_edge(y))
        self._output(stage, unit, y)

    def _c(self, stage: int, unit: int) -> None:
        with torch.no_grad():
            self._output(stage, unit, self._run(stage, unit, self._input(stage, unit, keep=True)))

    def _r(self, stage: int, unit: int) -> None:
        x = self._input(stage, unit).requires_grad_()
        self.saved[stage, unit] = Saved(x=x, made=get_gradient_edge(self._run(stage, unit, x)))

    def _b(self, stage: int, unit: int) -> None:
        self._clear(stage)
        self._backward(stage, unit)

    def _clear(self, stage: int) -> None:
        """Makes room for a stage's gradient: under ZeRO 2 it would have two whole ones while one is reduced."""
        if self.stages[stage].zero == 2:
            self.state.reduced()

    def _backward(self, stage: int, unit: int) -> None:
        """Through autograd; weight gradients go where the tape puts them."""
        self.state.gathered(stage)
        saved = self.saved.pop((stage, unit))
        if self.stages[stage].last:
            grad = torch.full((), 1.0 / self.counted, dtype=self.loss_dtype, device=self.device)
        else:
            grad = self.buffers.take(("DY", stage, unit))
        torch.autograd.backward((saved.made,), (grad,))
        if not self.stages[stage].first:
            assert saved.x.grad is not None
            self.buffers.tensors["DY", stage - 1, unit] = saved.x.grad

    def _i(self, stage: int, unit: int) -> None:
        tape = self.stages[stage].tape
        tape.aside = []
        self._backward(stage, unit)
        self.aside[stage, unit], tape.aside = tape.aside, None
        if stage in self.kept and stage not in self.put_aside:
            tensors = [tensor for each in self.aside[stage, unit] for tensor in each.reads]
            self.put_aside[stage] = Kept.of(tensors, vocab=self._vocab(), loss=False, apart=tuple(self.batch.values()))

    def _w(self, stage: int, unit: int) -> None:
        self._clear(stage)
        with torch.no_grad():
            for each in self.aside.pop((stage, unit)):
                each.weight_grad()

    def _load(self, stage: int, unit: int) -> None:
        """Ids are in memory; a stage takes its rows when it runs."""

    # --- messages

    def _home(self, stage: int) -> int:
        """The rank class that has a stage of the Program."""
        return self.plan.pipeline_ranks[self.plan_stage[stage]]

    def _routes(self, source: int, target: int) -> tuple[Route, ...]:
        """Messages of a unit between two stages of the Program that this rank sends or receives."""
        key = self.plan_stage[source], self.plan_stage[target]
        if key not in self._found:
            self._found[key] = of_rank(routes(self.plan, *key, self.rows_of_unit), self.groups.here.rank)
        return self._found[key]

    def _channel(self, source: int, destination: int, name: Name, route: Route) -> ProcessGroup | None:
        """Messages of one kind from one rank to another have a group of their own: on NCCL that is a stream on which
        nothing else can stand before them."""
        return self.groups.by_comm[channel_name((source, destination, name[0]), route)]

    def _tag(self, name: Name) -> int:
        """Every message of a step has a tag of its own, so that messages cannot be mistaken for each other."""
        buffer, stage, unit = name
        return (unit * self.program.num_stages + stage) * 2 + (buffer == "DY")

    def send(self, tensor: Tensor, name: Name, source: int, to: int) -> Waits:
        """Starts sending a buffer of stage `source` to the ranks that have stage `to`, each its rows; the tensor must
        live until it is done."""
        mine, home = self.groups.here, self._home(to)
        return Together(
            tuple(
                started(
                    dist.isend(
                        tensor[route.out : route.out + route.rows],
                        route.target,
                        group=self._channel(mine.pipeline_rank, home, name, route),
                        tag=self._tag(name),
                    )
                )
                for route in self._routes(source, to)
                if route.source == mine.rank
            )
        )

    def receive(self, name: Name, source: int) -> tuple[Tensor, Waits]:
        """Starts receiving a buffer from the ranks that have stage `source`."""
        mine, home = self.groups.here, self._home(source)
        tensor = torch.empty(self.shape, dtype=dtypes(self.plan).param, device=self.device)
        parts = tuple(
            started(
                dist.irecv(
                    tensor[route.into : route.into + route.rows],
                    route.source,
                    group=self._channel(home, mine.pipeline_rank, name, route),
                    tag=self._tag(name),
                )
            )
            for route in self._routes(source, name[1])
            if route.target == mine.rank
        )
        return tensor, Together(parts)

    def _send(self, name: Name, source: int, to: int) -> None:
        tensor = self.buffers.take(name).contiguous()
        self.buffers.leave(name, tensor, self.send(tensor, name, source, to))

    def _receive(self, name: Name, source: int) -> None:
        tensor, work = self.receive(name, source)
        self.buffers.tensors[name] = tensor
        self.buffers.start(name, work, tensor.nbytes)

    def _send_f(self, stage: int, unit: int) -> None:
        self._send(("X", stage + 1, unit), stage, stage + 1)

    def _recv_f(self, stage: int, unit: int) -> None:
        self._receive(("X", stage, unit), stage - 1)

    def _send_b(self, stage: int, unit: int) -> None:
        self._send(("DY", stage - 1, unit), stage, stage - 1)

    def _recv_b(self, stage: int, unit: int) -> None:
        self._receive(("DY", stage, unit), stage + 1)

    # --- parameters and gradients

    def _stages_of_row(self, stage: int) -> Iterable[int]:
        """A bucket is one row for several stages."""
        override = self.program.overrides.get(self.buffers.row)
        if override is None or override.effects is None:
            return (stage,)
        return dict.fromkeys(effect.ref.stage for effect in override.effects)

    def _ar(self, stage: int, unit: int) -> None:
        self.state.all_reduce(stage, self.program.comm_of(self.buffers.row))

    def _unshard(self, stage: int, unit: int) -> None:
        self.state.unshard(self._stages_of_row(stage))

    def _reshard(self, stage: int, unit: int) -> None:
        self.state.reshard(stage)

    def _reduce_grad(self, stage: int, unit: int) -> None:
        self.state.reduce_grad(self._stages_of_row(stage))

    def _norm(self, stage: int, unit: int) -> None:
        self.state.measure_norm(self._stages_of_row(stage))

    def _opt(self, stage: int, unit: int) -> None:
        self.state.update(stage)
