"""The interpreter: one rank runs its rows of a Program in issue order, on real tensors.

`Executor.step(batch)` does one step of training and returns the loss and gradient norm; the actions are those that the
simulator plays, whatever the schedule. A row on the compute stream is done before the next; one on another stream is
started, and its first reader waits for it, across the end of the step too. Buffers have the Program's names, (name,
stage, unit); what leaves stage s forward is X of s + 1, and what leaves it backward DY of s - 1, on this rank or not.
Left out: clocks (`measure`), data, and what is inside a stage (`apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Plan, Workload, shared_parameters, stage_layers
from gnomon.plans import batch as batch_of
from gnomon.program import NO_UNIT, Program
from gnomon.runtime.apply import apply
from gnomon.runtime.collectives import all_gather, all_reduce, reduce_scatter
from gnomon.runtime.measure import Recorder, gather
from gnomon.runtime.mesh import Groups
from gnomon.runtime.optim import AdamW, AdamWSettings, clip_scale, squares
from gnomon.runtime.parameters import Parameters
from gnomon.schedules import lower
from gnomon.timeline import Timeline

Name = tuple[str, int, int]
"""Buffer, stage, unit (NO_UNIT for those of a stage)."""


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
    y: Tensor
    """What it made, with its graph."""


@dataclass(slots=True)
class Arriving:
    """A buffer that a communication is still writing, or still reading."""

    works: tuple[Work | None, ...]
    finish: Callable[[], None] | None
    span: int


class Executor:
    """One rank of a job: its rows, stages, optimizer states and buffers."""

    def __init__(
        self,
        config: LlamaConfig,
        plan: Plan,
        workload: Workload,
        *,
        seed: int = 0,
        settings: AdamWSettings = AdamWSettings(),  # noqa: B008 (frozen)
        program: Program | None = None,
    ) -> None:
        """program: what to run in place of `lower`'s, for the same plan. `torch.distributed` must be initialised.
        PlanError for what the runtime does not run."""
        self.config, self.plan, self.workload, self.settings = config, plan, workload, settings
        self.graph: Graph = llama(config)
        self.program = lower(self.graph, plan, None, workload) if program is None else program
        tied = next(iter(shared_parameters(plan, self.graph).values()), ())
        if self.program.aliases or (tied and plan.optimizer.zero):
            raise PlanError("the runtime does not run tied weights within a V or under ZeRO yet; use tied = false")
        copies = max(1, plan.stage_mesh(0).tp // config.num_kv_heads)
        self.groups = Groups.of(plan, kv_copies=copies, tied=tied)
        blocks = [1] * plan.num_stages
        if self.program.num_stages > plan.num_stages:  # a stage of the Program is a layer
            blocks = [len(layers) for layers in stage_layers(plan, self.graph)]
        self.plan_stage = [stage for stage, count in enumerate(blocks) for _ in range(count)]
        self.tied = frozenset(shared_parameters(plan, self.graph))
        self.stages = apply(config, self.graph, plan, self.groups, seed=seed)
        self.adam = {number: AdamW.of(stage.parameters_) for number, stage in self.stages.items()}
        count, size = batch_of(plan, workload)
        mesh = self.groups.mesh
        self.rows_of_unit, self.local_rows = size, size // mesh.data_ranks
        self.tokens = count * size * workload.seq_len
        if set(workload.sequence_lengths()) != {workload.seq_len}:
            raise PlanError("the runtime wants sequences of one length; give workload.seq_len alone")
        if plan.layout.sequence_parallel and workload.seq_len % mesh.tp:
            raise PlanError(
                f"sequence parallelism wants seq_len = {workload.seq_len} to be a multiple of tp = {mesh.tp}"
            )
        self.shape = (self.local_rows, workload.seq_len, config.hidden_size)
        if plan.layout.sequence_parallel:
            self.shape = (self.local_rows, workload.seq_len // mesh.tp, config.hidden_size)
        self.buffers: dict[Name, Tensor] = {}
        self.saved: dict[tuple[int, int], Saved] = {}
        self.aside: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.arriving: dict[Name, Arriving] = {}
        self.leaving: list[tuple[Tensor, Arriving]] = []
        self.recorder: Recorder | None = None
        self.row = 0
        self.batch = self.loss = self.norm = torch.zeros(())
        self.scale: Tensor | float = 1.0
        self.rows = self._compiled()

    def _compiled(self) -> list[tuple[int, Callable[[int, int], None], int, int, bool]]:
        """(row, what does it, stage, unit, whether it is itself a communication) of this rank's class."""
        actions: dict[str, Callable[[int, int], None]] = {
            name: getattr(self, f"_{name.lower()}")
            for name in "F B I W C R SEND_F RECV_F SEND_B RECV_B LOAD AR UNSHARD RESHARD REDUCE_GRAD NORM OPT".split()
        }
        program, cls = self.program, self.groups.here.pipeline_rank
        if program.num_classes != self.plan.num_pipeline_ranks:
            raise PlanError("the runtime runs data-parallel workers that are alike; give them equal shares and devices")
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
            timed = not program.comm_of(row) or name == "NORM"
            out.append((row, actions[name], int(program.stage[row]), int(program.unit[row]), timed))
        return out

    # --- a step

    def step(self, batch: Tensor, recorder: Recorder | None = None) -> StepResult:
        """One step. batch: (global_batch_size, seq_len + 1) token ids, the same on all ranks; each reads its part.
        recorder: takes the times of the rows; none are taken without it."""
        if batch.shape != (self.workload.global_batch_size, self.workload.seq_len + 1):
            raise PlanError(
                f"a step takes ids of shape {(self.workload.global_batch_size, self.workload.seq_len + 1)}, "
                f"not {tuple(batch.shape)}"
            )
        self.batch, self.recorder, self.scale = batch, recorder, 1.0
        self.loss = torch.zeros((), dtype=torch.float64)
        self.norm = torch.full((), float("nan"), dtype=torch.float64)
        if recorder is None:
            for row, action, stage, unit, _ in self.rows:
                self.row = row
                action(stage, unit)
        else:
            recorder.begin()
            for row, action, stage, unit, timed in self.rows:
                self.row = row
                span = recorder.open(row) if timed else -1
                action(stage, unit)
                if timed:
                    recorder.close(span)
            self.synchronise()
        for _, sent in self.leaving:
            self._finish(sent)
        self.leaving.clear()
        self.recorder = None
        return StepResult(loss=self.loss, grad_norm=self.norm)

    def measured_step(self, batch: Tensor) -> tuple[StepResult, Timeline]:
        """One step and its Timeline over all ranks, which meet before and after."""
        recorder = Recorder()
        group = self.groups.by_comm["norm"]
        if group is not None:
            dist.barrier(group=group)
        result = self.step(batch, recorder)
        return result, gather(self.program, recorder, group)

    def synchronise(self) -> None:
        """Waits for everything that was started, so that parameters are those after the last update."""
        for name in list(self.arriving):
            self._wait(name)

    def total_loss(self, result: StepResult) -> float:
        """The mean loss over all tokens of the step; all ranks must ask."""
        total = result.loss.clone()
        group = self.groups.by_comm["norm"]
        if group is not None:
            all_reduce(total, group)
        return float(total)

    # --- buffers and what is under way

    def _start(self, name: Name, work: Work | None, nbytes: int, finish: Callable[[], None] | None = None) -> None:
        """Notes that `name` is being written; at once complete on the compute stream."""
        self._wait(name)
        span = -1 if self.recorder is None else self.recorder.open(self.row, nbytes)
        self.arriving[name] = Arriving((work,), finish, span)
        if self.program.streams[self.program.stream[self.row]] == "compute":
            self._wait(name)

    def _finish(self, arriving: Arriving) -> None:
        for work in arriving.works:
            if work is not None:
                work.wait()
        if arriving.finish is not None:
            arriving.finish()
        if arriving.span >= 0 and self.recorder is not None:
            self.recorder.close(arriving.span)

    def _wait(self, name: Name) -> None:
        arriving = self.arriving.pop(name, None)
        if arriving is not None:
            self._finish(arriving)

    def _take(self, buffer: str, stage: int, unit: int) -> Tensor:
        """The last read of a buffer."""
        self._wait((buffer, stage, unit))
        return self.buffers.pop((buffer, stage, unit))

    def _parameters(self, stage: int) -> Parameters:
        """The stage's parameters, once their gather has arrived."""
        self._wait(("P", stage, NO_UNIT))
        return self.stages[stage].parameters_

    # --- compute

    def _tokens_of(self, unit: int) -> tuple[Tensor, Tensor]:
        first = unit * self.rows_of_unit + self.groups.here.data * self.local_rows
        rows = self.batch[first : first + self.local_rows]
        return rows[:, :-1], rows[:, 1:]

    def _run(self, stage: int, unit: int, x: Tensor) -> Tensor:
        self._parameters(stage)
        module = self.stages[stage]
        ids, labels = self._tokens_of(unit)
        y: Tensor = module(x, ids, labels)
        return y

    def _input(self, stage: int, unit: int, *, keep: bool = False) -> Tensor:
        if self.stages[stage].first:
            return torch.zeros(())
        self._wait(("X", stage, unit))
        return self.buffers[("X", stage, unit)] if keep else self.buffers.pop(("X", stage, unit))

    def _output(self, stage: int, unit: int, y: Tensor) -> None:
        if self.stages[stage].last:
            self.loss += y.detach().double() / self.tokens / self._repeats()
        else:
            self.buffers["X", stage + 1, unit] = y.detach()

    def _repeats(self) -> int:
        """Tensor-parallel ranks all compute the same loss."""
        return self.groups.mesh.tp

    def _f(self, stage: int, unit: int) -> None:
        x = self._input(stage, unit).requires_grad_()
        y = self._run(stage, unit, x)
        self.saved[stage, unit] = Saved(x=x, y=y)
        self._output(stage, unit, y)

    def _c(self, stage: int, unit: int) -> None:
        with torch.no_grad():
            self._output(stage, unit, self._run(stage, unit, self._input(stage, unit, keep=True)))

    def _r(self, stage: int, unit: int) -> None:
        x = self._input(stage, unit).requires_grad_()
        self.saved[stage, unit] = Saved(x=x, y=self._run(stage, unit, x))

    def _b(self, stage: int, unit: int) -> None:
        self._parameters(stage)
        saved = self.saved.pop((stage, unit))
        if self.stages[stage].last:
            grad = torch.full((), 1.0 / self.tokens, dtype=saved.y.dtype)
        else:
            grad = self._take("DY", stage, unit)
        torch.autograd.backward((saved.y,), (grad,))
        if not self.stages[stage].first:
            assert saved.x.grad is not None
            self.buffers["DY", stage - 1, unit] = saved.x.grad

    def _i(self, stage: int, unit: int) -> None:
        tape = self.stages[stage].tape
        tape.aside = []
        self._b(stage, unit)
        self.aside[stage, unit], tape.aside = tape.aside, None

    def _w(self, stage: int, unit: int) -> None:
        with torch.no_grad():
            for weight_grad in self.aside.pop((stage, unit)):
                weight_grad()

    def _load(self, stage: int, unit: int) -> None:
        """Ids are in memory; a stage takes its rows when it runs."""

    # --- messages

    def _peer(self, stage: int) -> int:
        return self.plan.stage_ranks[self.plan_stage[stage]][self.groups.here.position]

    def _tag(self, name: Name) -> int:
        """Every message of a step has a tag of its own, so that messages cannot be mistaken for each other."""
        buffer, stage, unit = name
        return (unit * self.program.num_stages + stage) * 2 + (buffer == "DY")

    def _send(self, name: Name, to: int) -> None:
        tensor = self._take(*name).contiguous()
        work = dist.isend(tensor, self._peer(to), group=self.groups.by_comm["messages"], tag=self._tag(name))
        span = -1 if self.recorder is None else self.recorder.open(self.row, tensor.nbytes)
        self.leaving.append((tensor, Arriving((work,), None, span)))
        if self.program.streams[self.program.stream[self.row]] == "compute":
            self._finish(self.leaving.pop()[1])

    def _receive(self, name: Name, source: int) -> None:
        stage = self.stages[name[1]]
        tensor = torch.empty(self.shape, dtype=stage.parameters_.dtypes.param)
        self.buffers[name] = tensor
        work = dist.irecv(tensor, self._peer(source), group=self.groups.by_comm["messages"], tag=self._tag(name))
        self._start(name, work, tensor.nbytes)

    def _send_f(self, stage: int, unit: int) -> None:
        self._send(("X", stage + 1, unit), stage + 1)

    def _recv_f(self, stage: int, unit: int) -> None:
        self._receive(("X", stage, unit), stage - 1)

    def _send_b(self, stage: int, unit: int) -> None:
        self._send(("DY", stage - 1, unit), stage - 1)

    def _recv_b(self, stage: int, unit: int) -> None:
        self._receive(("DY", stage, unit), stage + 1)

    # --- parameters and gradients

    def _stages_of_row(self, stage: int) -> Iterable[int]:
        """A bucket is one row for several stages."""
        override = self.program.overrides.get(self.row)
        if override is None or override.effects is None:
            return (stage,)
        return dict.fromkeys(effect.ref.stage for effect in override.effects)

    def _grad_name(self, stage: int) -> Name:
        return ("GS" if self.stages[stage].parameters_.zero >= 2 else "G", stage, NO_UNIT)

    def _ar(self, stage: int, unit: int) -> None:
        comm = self.program.comm_of(self.row)
        group = self.groups.by_comm[comm]
        held = self.stages[stage].parameters_
        name = self._grad_name(stage)
        self._wait(name)
        if group is None:
            return
        grad = held.my_grad()
        if comm in ("dp", "dp_replicate"):
            self._start(name, all_reduce(grad, group, wait=False), grad.nbytes)
            return
        chosen = [
            slice(*range_)
            for slot, range_ in held.pieces()
            if (slot.name in self.tied if comm == "embedding" else slot.sums == comm)
        ]
        if not chosen:
            return
        packed = torch.cat([grad[part] for part in chosen])

        def unpack() -> None:
            for part, value in zip(chosen, torch.split(packed, [p.stop - p.start for p in chosen]), strict=True):
                grad[part] = value

        self._start(name, all_reduce(packed, group, wait=False), packed.nbytes, unpack)

    def _unshard(self, stage: int, unit: int) -> None:
        for each in self._stages_of_row(stage):
            held = self.stages[each].parameters_
            self._wait(("PS", each, NO_UNIT))
            shard = held.shard
            if held.zero < 3:
                shard = shard.clone()  # it lies inside what the gather writes
            else:
                held.flat = torch.empty(held.size, dtype=held.dtypes.param)
            assert held.flat is not None
            work = all_gather(held.flat, shard, self._shards(), wait=False)
            self._start(("P", each, NO_UNIT), work, held.flat.nbytes, lambda shard=shard: None)  # type: ignore[misc]

    def _reshard(self, stage: int, unit: int) -> None:
        self._parameters(stage).flat = None

    def _shards(self) -> ProcessGroup:
        group = self.groups.by_comm["dp_shard"]
        assert group is not None, "rows that shard need dp_shard > 1"
        return group

    def _reduce_grad(self, stage: int, unit: int) -> None:
        for each in self._stages_of_row(stage):
            held = self.stages[each].parameters_
            name = self._grad_name(each)
            self._wait(name)
            whole = held.grad
            assert whole is not None, "a gradient is reduced before it was computed"
            out = torch.empty(held.mine[1] - held.mine[0], dtype=whole.dtype)

            def finish(held: Parameters = held, whole: Tensor = whole, out: Tensor = out) -> None:
                if held.zero == 1:
                    whole[held.mine[0] : held.mine[1]] = out
                elif held.grad_shard is None:
                    held.grad_shard = out
                else:
                    held.grad_shard += out

            work = reduce_scatter(out, whole, self._shards(), wait=False)
            if held.zero >= 2:
                held.grad = None
            self._start(name, work, whole.nbytes, finish)

    def _norm(self, stage: int, unit: int) -> None:
        mesh = self.groups.mesh
        total = torch.zeros((), dtype=torch.float64)
        for each in self._stages_of_row(stage):
            self._wait(self._grad_name(each))
            held = self.stages[each].parameters_
            total += squares(held, mesh.dp_replicate if held.zero else mesh.data_ranks)
        group = self.groups.by_comm["norm"]
        if group is not None:
            all_reduce(total, group)
        self.norm = total.sqrt()
        self.scale = clip_scale(self.norm, self.settings.clip_norm)

    def _opt(self, stage: int, unit: int) -> None:
        self._wait(self._grad_name(stage))
        held = self.stages[stage].parameters_
        if held.zero < 3:
            self._parameters(stage)
        self.adam[stage].update(held, self.settings, scale=self.scale)
        held.drop_grad()
