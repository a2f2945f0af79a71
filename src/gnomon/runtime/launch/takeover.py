"""Bamboo on processes that may be lost: one process's side.

A process trains one stage of a pipeline and has a copy of the next stage too (`redundancy`). When one is lost, the
others meet without it in the same processes; each tells how far it is, and who has a copy takes over. The step that was
cut off goes on from there and ends with the bits of an undisturbed one; the next steps go on so too. A process that
comes in the place of a lost one is given its state, and its copy, by those who have them, between two steps. Where a
state and its copy are lost, all go back to the newest checkpoint, or the beginning, once all places are taken again.
Leaves out the loop (`member`) and who is there (`control`).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.errors import PlanError, RunError
from gnomon.methods import bamboo, check_methods
from gnomon.plans import shared_parameters
from gnomon.runtime.checkpoint.load import load
from gnomon.runtime.checkpoint.pretrained import values_of
from gnomon.runtime.data.own_batches import Batches
from gnomon.runtime.launch.launcher import Scheme
from gnomon.runtime.launch.member import NONE, Member, member
from gnomon.runtime.launch.membership import Epoch, Membership, groups_soon_made, nobody_comes
from gnomon.runtime.launch.redundancy import ProcessWork, StepProgress
from gnomon.runtime.launch.redundant_rows import RankExecutor
from gnomon.runtime.launch.train import Loop, Outcome, Record, TrainingJob, identity_of
from gnomon.runtime.mesh.groups import stage_sets
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.optim.update import Update
from gnomon.runtime.parameters.parameters import Parameters, Slot
from gnomon.runtime.processes.connections import FOLDER, sockets
from gnomon.runtime.step.evaluate import forward_loss
from gnomon.runtime.watch.waiting import waited_s, waited_since
from gnomon.software import own


def check_with_copies(job: TrainingJob) -> None:
    """PlanError for a job that cannot have copies of stages."""
    plan = job.plan
    check_methods(plan, "run")
    mesh, optimizer = plan.mesh, plan.optimizer
    missing = {
        "a plan in which no rank has failed (rank = -1)": bamboo.failed_rank(plan) != bamboo.NOBODY,
        "tp, cp and ep of 1": max(mesh.tp, mesh.cp, mesh.ep) > 1,
        "equal stages": bool(plan.stages),
        "stages that share no parameter (tied = false)": bool(shared_parameters(plan, job.graph)),
        "an optimizer that looks at elements": optimizer.kind in own.WHOLE_MATRIX_OPTIMIZERS,
        "optimizer.delay = 0": bool(optimizer.delay),
        "fp32 or bf16": plan.precision.param == "fp16",
        "no other pass": len(plan.schedule.passes) > 1,
        "a model of Gnomon's own": bool(job.code),
        "no --timeline": job.measure,
        "no --memory-checkpoint-every": bool(job.memory_checkpoint_every),
        "--device cpu": job.device != "cpu",
        "a process for each rank, without placement": plan.device_of != (*range(plan.world_size),),
        "processes that it starts itself, not torchrun": "TORCHELASTIC_RUN_ID" in os.environ,
        "Linux, whose /proc says which sockets are open": not FOLDER.is_dir(),
    }
    if missing_options := [name for name, is_set in missing.items() if is_set]:
        raise PlanError(f"bamboo runs with {', and '.join(missing_options)}")


def train_with_copies(job: TrainingJob, membership: Membership) -> Outcome | None:
    """How the job went."""
    outcome: Outcome | None = member(_Process, job, membership)
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What a process tells the others when they meet; one that is new, nothing."""

    plays: tuple[int, ...] = ()
    """Ranks whose work it does."""
    copy: int = NONE
    """Rank whose state it has a copy of."""
    steps_done: int = NONE
    """Steps that are behind it."""
    ended: int = NONE
    """Steps after which all that is due was done."""
    number: int = 0
    """Step under way, or the last."""
    progress: StepProgress = field(default_factory=StepProgress)
    resumed_from: int = 0
    records: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Who does what among processes that have met."""

    places: tuple[int, ...]
    """Of the process that does each rank's work; NONE where its state is lost."""
    taken_over: Mapping[int, int]
    """Rank that is taken over now -> place."""
    keepers: Mapping[int, int]
    """Rank -> place of the process that has a copy."""


def roles(everyone: Sequence[StageReport], ranks: int) -> Roles:
    """Decides who plays which rank from the reports of all processes, by place, and from nothing else: every process
    comes to the same roles."""
    # Who plays a rank goes on with it; a copy steps in only where nobody does.
    player = {rank: place for place, progress in enumerate(everyone) for rank in progress.plays}
    copy = {progress.copy: place for place, progress in enumerate(everyone) if progress.copy != NONE}
    taken_over = {rank: copy[rank] for rank in range(ranks) if rank not in player and rank in copy}
    places = tuple(player.get(rank, taken_over.get(rank, NONE)) for rank in range(ranks))
    keepers = {rank: place for rank, place in copy.items() if rank in player}
    return Roles(places=places, taken_over=taken_over, keepers=keepers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handing:
    """What processes give each other between two steps, so that newcomers have a part."""

    places: tuple[int, ...]
    """Of all ranks afterwards."""
    keepers: Mapping[int, int]
    """Afterwards."""
    sent: tuple[tuple[int, int, int], ...]
    """(rank, place that has its state, place that is given it)."""


def handing(now: Roles, born: Sequence[int], following: Mapping[int, int]) -> Handing:
    """Everyone who is there does the work of the rank that he was started for. born: rank of each place. following:
    rank -> the one after it in its replica, which it has a copy of."""
    # After a loss a newcomer is born for the lost rank, so its place is that rank's home again.
    home = {rank: place for place, rank in enumerate(born)}
    # A rank without a process of its own stays where it is done.
    places = tuple(home.get(rank, place) for rank, place in enumerate(now.places))
    sent = [(rank, now.places[rank], place) for rank, place in enumerate(places) if now.places[rank] != place]
    keepers = dict[int, int]()
    for rank, place in home.items():
        copied = following[rank]
        # It would hold a copy of what it plays itself, and one loss would take both.
        if places[copied] == place:
            continue
        keepers[copied] = place
        # It has neither the copy nor, until now, the work itself: it is sent the state.
        if now.keepers.get(copied) != place and now.places[copied] != place:
            sent.append((copied, places[copied], place))
    return Handing(places=places, keepers=keepers, sent=tuple(sent))


class _Process(Member):
    """A process with a stage, or two, and a copy."""

    def __init__(self, job: TrainingJob, corpus: Batches, signals: list[int], membership: Membership) -> None:
        super().__init__(job, corpus, signals, membership)
        self.plan = bamboo.without(job.plan)
        self.size = {"sequences": job.workload.global_batch_size, "seq_len": job.workload.seq_len}
        self.work: ProcessWork | None = None
        self.roles = Roles(places=(), taken_over={}, keepers={})
        self.born: tuple[int, ...] = ()
        """Rank that the process at each place was started for."""
        self.within = False
        """Whether the step under way was cut off, and goes on."""
        self.after_loss_s = membership.announced_s
        self.takeovers: list[str] = []
        """What is told of them at the end."""

    def _lost(self, error: Exception, epoch: Epoch) -> None:
        super()._lost(error, epoch)
        if self.work is not None:
            self.work.cut_off()

    def _at(self) -> str:
        at = None if self.work is None else self.work.at
        return "between steps" if at is None else f"at {at}"

    # --- an epoch

    def _catch_up(self, epoch: Epoch) -> bool:
        self.born, self.within = epoch.ranks, False
        everyone = self._everyone()
        self.roles = roles(everyone, self.plan.world_size)
        newest = max(progress.steps_done for progress in everyone)
        if newest != NONE and NONE not in self.roles.places:
            self.within = self._go_on(everyone, newest)
            return True
        # No state of some rank is left anywhere; only with a process at each place can all load one checkpoint.
        if len(self.born) < self.plan.world_size:
            self._wait_for_more()
            return False
        self._load(again=epoch.number > 1)
        return True

    def _everyone(self) -> list[StageReport]:
        """What each process tells, by place."""
        mine, work = StageReport(), self.work
        if work is not None and self.done != NONE:
            mine = StageReport(
                plays=tuple(part.number for part in work.plays.values()),
                copy=work.copy.number if work.keeps else NONE,
                steps_done=self.done,
                ended=self.ended,
                number=work.now.number,
                progress=work.progress(),
                resumed_from=self.resumed_from,
                records=len(self.records),
            )
        everyone = [StageReport()] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return everyone

    def _wait_for_more(self) -> None:
        """A state is lost, and only when all places are taken again can all begin anew."""
        if nobody_comes(self.membership.store):
            raise RunError("a stage is lost with the copy of it, and no process comes in its place (--max-restarts)")
        self.work, self.done = None, NONE

    def _load(self, *, again: bool) -> None:
        """Loads a checkpoint, or begins at step 0. again: there may be one of this run's own."""
        self.work = None
        self.work = self._build(blank=False)
        self.records, self.waits, self.done = [], [], 0
        if self.job.checkpoints is not None and (self.job.resume or again):
            whole: Any = _ModelParts(self.work, (self.work.own, self.work.copy))
            identity = identity_of(self.job, self.corpus)
            self.done = load(self.job.checkpoints, whole, identity=identity, override=self.job.override)
        self.ended = self.resumed_from = self.done
        home = {rank: place for place, rank in enumerate(self.born)}
        ranks = range(self.plan.world_size)
        keepers = {self._following()[rank]: home[rank] for rank in ranks}
        self.roles = Roles(places=tuple(home[rank] for rank in ranks), taken_over={}, keepers=keepers)
        if again and dist.get_rank() == 0:
            _say(f"a stage is lost with the copy of it: all go back to step {self.done}")
        self._settle()

    def _build(self, *, blank: bool) -> ProcessWork:
        """Makes this process's parts. blank: without values, since all that they hold will be sent."""
        job = self.job
        values = None if job.weights is None else values_of(job.weights, job.graph)
        if blank and not any(block.frozen for block in job.graph.blocks):
            values = _zeros

        def make(rank: int) -> RankExecutor:
            return RankExecutor(
                rank, job.graph, job.plan, job.workload, seed=job.seed, settings=job.settings, values=values
            )

        return ProcessWork(make, self.born[dist.get_rank()])

    def _following(self) -> dict[int, int]:
        """Rank -> the next one of its replica."""
        sets = stage_sets(self.plan)
        return {
            rank: sets[(stage + 1) % len(sets)][position]
            for stage, ranks in enumerate(sets)
            for position, rank in enumerate(ranks)
        }

    def _settle(self) -> None:
        """Everyone does what `roles` says, with groups of those who have the same stage."""
        assert self.work is not None
        groups = dict[int, ProcessGroup]()
        with groups_soon_made(self.job.meet_s):
            for stage, ranks in enumerate(stage_sets(self.plan)):
                members = sorted({self.roles.places[rank] for rank in ranks})
                if len(members) > 1:
                    group = dist.new_group(members)
                    if dist.get_rank() in members:
                        groups[stage] = group
        self.own_sockets = sockets() - self.before
        self.work.groups = groups
        self.work.settle(self.roles.places, self.born, self.roles.keepers)

    def _go_on(self, everyone: Sequence[StageReport], newest: int) -> bool:
        """Goes on from what there is in memory; returns whether that is within a step. newest: steps that are behind at
        least one."""
        has = next(place for place, progress in enumerate(everyone) if progress.steps_done == newest)
        # Somebody has begun the step after the newest whole one, so it may have sent what others have taken in already.
        within = any(progress.steps_done == newest and progress.number == newest + 1 for progress in everyone)
        is_new = self.work is None or self.done == NONE
        if is_new:
            self.work = self._build(blank=True)
        assert self.work is not None
        self.done = newest
        self.ended = newest if any(progress.ended == newest for progress in everyone) else newest - 1
        self.resumed_from = everyone[has].resumed_from
        self._share_records(has, everyone[has].records)
        takeovers = self.roles.taken_over
        mine = takeovers.get(self.work.copy.number) == dist.get_rank() and not is_new
        # It had not begun the step that others are in: it begins with nothing done.
        if within and self.work.now.number != newest + 1:
            self._begin_step()
        if mine:
            self.work.take_over()
        self._settle()
        if within:
            self.work.resume([t.progress if t.number == newest + 1 else StepProgress() for t in everyone], takeovers)
        for rank, place in takeovers.items():
            self.takeovers.append(f"rank {rank} in step {newest + 1}")
            if place == dist.get_rank():
                how = f"within step {newest + 1}" if within else f"after step {newest}"
                _say(f"rank {self.born[place]} takes over the stage of rank {rank} {how}")
        return within

    # --- training

    def _trained(self) -> tuple[Any, Callable[[Batch], float]]:
        assert self.work is not None
        return _ModelParts(self.work), self._evaluate

    def _outcome(self, loop: Loop) -> Outcome:
        outcome = loop.outcome()
        summary = f"taken over: {', '.join(self.takeovers)}" if self.takeovers else "nothing was lost"
        return replace(outcome, notes=(*outcome.notes, f"each stage had a copy in the rank before it; {summary}"))

    def _begin_step(self) -> None:
        assert self.work is not None
        number = self.done + 1
        self.work.begin(number, self.corpus.batch(number, seed=self.job.seed, **self.size))

    def _step(self, loop: Loop, step: int) -> None:
        """The rows of a step that are left: all of them, unless it was cut off."""
        if not self.within:
            self._hand_over()
            self._begin_step()
        self.within = False
        assert self.work is not None
        began, queued = perf_counter(), waited_s()
        self.work.run()
        loss, norm = self.work.total()
        self.records.append(Record(step=step, loss=loss, grad_norm=norm, step_s=perf_counter() - began))
        self.waits.append(waited_since(queued))

    def _hand_over(self) -> None:
        """Gives newcomers their part, between two steps."""
        work, here = self.work, dist.get_rank()
        assert work is not None
        plan = handing(self.roles, self.born, self._following())
        if plan.places == self.roles.places and plan.keepers == dict(self.roles.keepers):
            return
        for rank, source, target in plan.sent:
            # All places walk the same list, so that blocking sends and receives meet in pairs.
            mine = next((one for one in (work.own, work.copy) if one.number == rank), None)
            if here in (source, target):
                assert mine is not None
                for tensor in _state(mine):
                    dist.send(tensor, target) if here == source else dist.recv(tensor, source)
                _counted(mine, source, target)
        self.roles = Roles(places=plan.places, taken_over={}, keepers=plan.keepers)
        self._settle()

    def _evaluate(self, batch: Batch) -> float:
        """The loss of a batch without training."""
        work = self.work
        assert work is not None
        terms = torch.zeros(self.plan.world_size, dtype=torch.float64)
        for _, one in sorted(work.plays.items()):
            one.feed.take(batch)
            terms[one.number] = forward_loss(one)
        dist.all_reduce(terms)
        return math.fsum(terms.tolist())


class _ModelParts:
    """What this process has of the model, as what saves and loads checkpoints asks an executor for it."""

    notes: tuple[str, ...] = ()

    def __init__(self, work: ProcessWork, parts: Sequence[RankExecutor] = ()) -> None:
        """Takes the work and its parts; without them, those whose work it does."""
        self.work, self.parts = work, parts
        self.graph, self.plan, self.workload = work.graph, work.plan, work.workload
        self.state, self.device, self.host = work.own.state, work.own.device, work.own.host

    def parameters(self) -> Iterator[tuple[Parameters, Update]]:
        """Parameters and updates of its parts, as an executor gives them."""
        for one in self.parts or self.work.plays.values():
            yield from one.parameters()

    def settle(self) -> None:
        """Nothing waits between steps."""

    def synchronise(self) -> None:
        """Nothing is under way between steps."""


def _zeros(slot: Slot) -> Tensor:
    return torch.zeros(()).expand(slot.shape)


def _state(executor: RankExecutor) -> list[Tensor]:
    """All that lives from one step to the next, but for the number of updates."""
    tensors = []
    for parameters, rule in executor.parameters():
        tensors += [
            x for x in (parameters.flat, parameters.master, rule.first, rule.second) if x is not None and x.numel()
        ]
    return tensors


def _counted(executor: RankExecutor, source: int, target: int) -> None:
    """Sends or receives the number of updates."""
    counts = torch.tensor([rule.steps for _, rule in executor.parameters()])
    dist.send(counts, target) if dist.get_rank() == source else dist.recv(counts, source)
    for (_, rule), count in zip(executor.parameters(), counts.tolist(), strict=True):
        rule.steps = count


def _say(line: str) -> None:
    print(f"gnomon: {line}", file=sys.stderr, flush=True)


TAKEOVER = Scheme(
    controller="takeover", check=check_with_copies, train=train_with_copies, exports="launcher", desk=None
)
"""Bamboo: a lost rank's stage goes on in the rank before it."""
