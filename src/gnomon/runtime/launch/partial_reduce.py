"""Partial reduce: one worker's side.

A worker trains its ticket (its share of a step's batch) on its own copy of the model, tells the launcher's desk
(`tickets`), and does what the answer says: averages its parameters with a group, meets all others for a checkpoint, or
ends. Who is grouped with whom is decided by `methods.partial_reduce.TicketController` alone. Leaves out the loop
(`member`).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from gnomon.errors import PeerError, PlanError
from gnomon.methods.partial_reduce import Arrival, Reply
from gnomon.runtime.checkpoint.load import load
from gnomon.runtime.checkpoint.pretrained import values_of
from gnomon.runtime.checkpoint.save import Saver
from gnomon.runtime.data.own_batches import Batches
from gnomon.runtime.launch.member import Member, member
from gnomon.runtime.launch.membership import Epoch, Membership
from gnomon.runtime.launch.replica import Replica, inputs_by_name
from gnomon.runtime.launch.train import TrainingJob, identity_of
from gnomon.runtime.step.evaluate import forward_loss
from gnomon.runtime.watch.progress import peak_bytes
from gnomon.software import own


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalNote:
    """What a worker says when it arrives."""

    arrival: Arrival
    """Which worker has trained which ticket."""
    loss: float = 0.0
    """Mean over the labels of its rows."""
    grad_norm: float = 0.0
    """Norm of the gradient."""
    step_s: float = 0.0
    """That it computed."""
    average_s: float = 0.0
    """That the average before it took."""
    peak_bytes: int = 0
    """Most memory of its process so far."""
    signal: int = 0
    """That asked it to end."""
    meetings: tuple[tuple[int, float | None], ...] = ()
    """(step, loss on held-out text) of those since it arrived last."""
    resumed_from: int = 0
    """Steps behind the checkpoint that it loaded: the newest that is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How a worker went."""

    checkpoint: Path | None
    """The folder that it wrote last; None where it wrote none."""
    held_out: tuple[tuple[int, float | None], ...]
    """(step, loss on held-out text) of the last meeting."""
    resumed_from: int
    """As in `ArrivalNote`."""


def check_partial_reduce(job: TrainingJob) -> None:
    """PlanError for what workers that average their models do not do."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise PlanError("torchrun starts its own processes; run a plan with partial_reduce without it")
    refused = {
        "--timeline": job.measure,
        "--device cuda": job.device != "cpu",
        "--max-restarts": job.max_restarts > 0,
        "a model that is code": bool(job.code),
        f"optimizer.kind = {job.plan.optimizer.kind!r}": job.plan.optimizer.kind in own.WHOLE_MATRIX_OPTIMIZERS,
        "optimizer.offload": job.plan.optimizer.offload is not None,
    }
    if unsupported := [name for name, is_set in refused.items() if is_set]:
        raise PlanError(f"partial_reduce does not do {', '.join(unsupported)} yet; leave it out")


def train_partial(job: TrainingJob, membership: Membership) -> WorkerEnd | None:
    """Worker `membership.process`, from its start to its end."""
    ended: WorkerEnd | None = member(_Worker, job, membership)
    return ended


class _Worker(Member):
    """One worker of partial reduce. There is one epoch, of all of them: none is replaced."""

    def __init__(self, job: TrainingJob, corpus: Batches, signals: list[int], membership: Membership) -> None:
        super().__init__(job, corpus, signals, membership)
        self.number, self.pause_s = membership.process, membership.pause_s
        values = None if job.weights is None else values_of(job.weights, job.graph)
        self.replica = Replica(job.graph, job.plan, job.workload, seed=job.seed, settings=job.settings, values=values)
        self.size = {"sequences": job.workload.global_batch_size, "seq_len": job.workload.seq_len}
        self.groups: dict[tuple[int, ...], Any] = {}
        self.updates = 0
        self.checkpoint: Path | None = None
        self.meetings: list[tuple[int, float | None]] = []
        self.average_s = 0.0

    def _at(self) -> str:
        return "in a step"

    def _trained(self) -> tuple[Replica, None]:
        return self.replica, None

    def _catch_up(self, epoch: Epoch) -> bool:
        """All begin with the parameters of one seed, or of the newest checkpoint."""
        job = self.job
        if job.checkpoints is not None and job.resume:
            identity = identity_of(job, self.corpus)
            self.resumed_from = load(job.checkpoints, self.replica, identity=identity, override=job.override)
        self.updates = max((update.steps for _, update in self.replica.parameters()), default=0)
        return True

    def _train(self, epoch: Epoch) -> WorkerEnd:
        """Ticket after ticket, in place of steps that all train at one time."""
        job, saver = self.job, None
        if job.checkpoints is not None:
            identity = identity_of(job, self.corpus)
            saver = Saver(job.checkpoints, self.replica, identity=identity, keep=job.keep, source=job.source)
        try:
            arrival = Arrival(worker=self.number, updates=self.updates)
            reply = self._arrive(ArrivalNote(arrival=arrival, resumed_from=self.resumed_from))
            while True:
                self._average(reply)
                if reply.meeting >= 0:
                    self._meet(reply, saver)
                if reply.ticket < 0:
                    held_out = tuple(self.meetings)
                    return WorkerEnd(checkpoint=self.checkpoint, held_out=held_out, resumed_from=self.resumed_from)
                reply = self._arrive(self._train_ticket(reply.ticket))
        finally:
            if saver is not None:
                saver.close()

    def _train_ticket(self, ticket: int) -> ArrivalNote:
        """One step on this worker's rows of a batch."""
        began = perf_counter()
        # A ticket is one worker's share of a step's batch, whoever draws it: rows are by ticket, not by worker.
        step, place = divmod(ticket, self.job.plan.world_size)
        batch = inputs_by_name(self.corpus.batch(step + 1, seed=self.job.seed, **self.size))
        result = self.replica.step(self.replica.rows_of(batch, place))
        sleep(self.pause_s)
        self.updates += 1
        note = ArrivalNote(
            arrival=Arrival(worker=self.number, updates=self.updates, ticket=ticket, ends=bool(self.signals)),
            loss=float(result.loss),
            grad_norm=float(result.grad_norm),
            step_s=perf_counter() - began,
            average_s=self.average_s,
            peak_bytes=peak_bytes(self.replica.device),
            signal=max(self.signals, default=0),
            meetings=tuple(self.meetings),
        )
        self.meetings.clear()
        return note

    def _arrive(self, result: ArrivalNote) -> Reply:
        """Says so, and waits for the answer. PeerError where the launcher is gone."""
        launcher = self.membership.launcher
        assert launcher is not None
        try:
            launcher.send_bytes(json.dumps(asdict(result)).encode())
            values = json.loads(launcher.recv_bytes())
        except (EOFError, OSError) as error:
            raise PeerError(f"worker {self.number} waited for the launcher, which is gone") from error
        # JSON has lists where a frozen value has tuples.
        return Reply(**values | {"group": tuple(values["group"]), "shares": tuple(values["shares"])})

    def _average(self, reply: Reply) -> None:
        """The parameters of a group become their weighted mean, the same bits in each of it."""
        self.average_s, began = 0.0, perf_counter()
        if len(reply.group) < 2:
            return
        self.replica.synchronise()
        group, share = self._group(reply.group), reply.shares[reply.group.index(self.number)]
        for parameters, _ in self.replica.parameters():
            # The copy that updates change: averaging what was rounded from it would lose the difference at the next
            # update.
            whole = parameters.shard if parameters.master is None else parameters.master
            _mean(whole, share, group)
            if parameters.master is not None:
                parameters.shard.copy_(parameters.master)
        self.updates = reply.updates
        self.average_s = perf_counter() - began

    def _group(self, members: tuple[int, ...]) -> Any:
        """The process group of some workers, made when it is first used, by its members alone.

        Not by `dist.new_group`, whose name for a group depends on how many groups a process has made before, which
        differs from worker to worker here.
        """
        if members not in self.groups:
            store = PrefixStore(f"average/{'-'.join(map(str, members))}", self.membership.store)
            place, size = members.index(self.number), len(members)
            self.groups[members] = dist.ProcessGroupGloo(store, place, size, dist.constants.default_pg_timeout)
        return self.groups[members]

    def _meet(self, reply: Reply, saver: Saver | None) -> None:
        """All are here, with the same parameters: so are their optimizer states afterwards; what is due is done."""
        for _, update in self.replica.parameters():
            for state in (update.first, update.second):
                if state is not None and state.numel():
                    _mean(state, 1 / len(reply.group), self._group(reply.group))
            update.steps = reply.updates
        self.meetings.append((reply.meeting, self._held_out()))
        every = self.job.checkpoint_every
        due = every and reply.meeting % every == 0
        at_end = reply.ticket < 0 and (self.job.checkpoint_at_end or reply.meeting < self.job.steps)
        if saver is not None and (due or at_end):
            saver.start(reply.meeting, copy=False)
            self.checkpoint = saver.finish()

    def _held_out(self) -> float | None:
        """The loss on held-out text; None where there is none."""
        batch = self.corpus.validation_batch(0, **self.size)
        if batch is None:
            return None
        self.replica.feed.take(self.replica.rows_of(inputs_by_name(batch), self.number))
        # Each worker's loss is the mean over its own rows, and all have equally many.
        loss = forward_loss(self.replica) / self.job.plan.world_size
        dist.all_reduce(loss)
        return float(loss)


def _mean(x: Tensor, share: float, group: Any) -> None:
    """Averages x over the group in place. share: this rank's weight in the mean."""
    x.mul_(share)
    group.allreduce([x]).wait()


def read_result(text: bytes) -> ArrivalNote:
    """Reads the result that a worker sent."""
    values = json.loads(text)
    meetings = tuple((int(step), loss) for step, loss in values["meetings"])
    return replace(ArrivalNote(**values), arrival=Arrival(**values["arrival"]), meetings=meetings)
