"""Partial reduce: the launcher's side.

`TicketDesk` answers workers in the order in which they arrive with what `methods.partial_reduce.TicketController` says.
A step of the record is that many tickets as there are workers, whoever trained them. `run_partial_reduce(job)` is a run
with what its controller saw. Leaves out what workers do (`partial_reduce`) and starting them (`launcher`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter

from gnomon.errors import RunError
from gnomon.methods.partial_reduce import Arrival, TicketController, settings_of
from gnomon.runtime.checkpoint.record import newest
from gnomon.runtime.launch.launcher import Scheme, start
from gnomon.runtime.launch.partial_reduce import (
    ArrivalNote,
    WorkerEnd,
    check_partial_reduce,
    read_result,
    train_partial,
)
from gnomon.runtime.launch.train import WARM_UP, Outcome, Record, TrainingJob, corpus_of
from gnomon.runtime.watch.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRun:
    """A run, with what its controller saw."""

    outcome: Outcome
    """What the run came to, as of any run."""
    arrivals: tuple[Arrival, ...]
    """In their order: the controller's trace."""
    groups: tuple[tuple[int, ...], ...]
    """That averaged, without meetings."""
    tickets: tuple[int, ...]
    """Trained by each worker."""
    seconds: float
    """From the first ticket's start to the last arrival."""
    average_s: float
    """Of an average, the median."""


def run_partial_reduce(job: TrainingJob, *, threads: int = 1, pause_s: Sequence[float] = ()) -> PartialRun:
    """`launcher.run_scheme`, with what the controller saw."""
    launcher = start(job, PARTIAL_REDUCE, threads=threads, pause_s=pause_s)
    outcome = launcher.run()
    assert isinstance(launcher.desk, TicketDesk)
    return launcher.desk.partial_run(outcome)


@dataclass(slots=True)
class TicketDesk:
    """What workers said, step by step, and the controller that answers them."""

    job: TrainingJob
    next_step: int = 1
    """That is recorded next, counted from 1."""
    results: dict[int, ArrivalNote] = field(default_factory=dict)
    """By ticket, those of steps that are not whole."""
    records: list[Record] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)
    averages: list[float] = field(default_factory=list)
    began: float = 0.0
    last: float = 0.0
    signal: int = 0
    peak_bytes: int = 0
    progress: Progress | None = None
    controller: TicketController | None = None
    """Made when the first worker arrives, which says what checkpoint it goes on from."""

    @classmethod
    def of(cls, job: TrainingJob) -> TicketDesk:
        """The desk of a job that has not begun."""
        desk = cls(job, tickets=[0] * job.plan.world_size)
        if not job.quiet:
            tokens = job.workload.global_batch_size * job.workload.seq_len
            desk.progress = Progress(steps=job.steps, tokens=tokens)
        return desk

    def hear(self, message: bytes) -> Mapping[int, bytes]:
        """Takes an arrival into the record and to the controller, whose replies are sent. RunError where training
        diverged."""
        result = read_result(message)
        try:
            self.add(result)
        except RunError as error:
            last_checkpoint = None if self.job.checkpoints is None else newest(self.job.checkpoints)
            after = (
                f"the checkpoint {last_checkpoint} is from before it: go on from it with a lower --lr"
                if last_checkpoint
                else "no checkpoint"
            )
            raise RunError(f"{error}, so the run ended; {after}") from error
        if self.controller is None:
            job, done = self.job, result.resumed_from
            # Both are due at multiples of it; where one is 0 (never) it is the other.
            meet_every = math.gcd(job.checkpoint_every, job.validate_every)
            self.controller = TicketController(settings_of(job.plan), steps=job.steps, done=done, meet_every=meet_every)
            self.next_step = done + 1
        replies = self.controller.arrive(result.arrival)
        return {worker: json.dumps(asdict(reply)).encode() for worker, reply in replies.items()}

    def outcome(self, first: WorkerEnd) -> Outcome:
        """How the job went. first: what a worker returned; all returned the same."""
        job, corpus = self.job, corpus_of(self.job)
        size = {"sequences": job.workload.global_batch_size, "seq_len": job.workload.seq_len}
        for step, loss in first.held_out:
            self.held_out(step, loss)
        return Outcome(
            records=tuple(self.records),
            resumed_from=first.resumed_from,
            signal=self.signal,
            checkpoint=first.checkpoint,
            process_peak_bytes=self.peak_bytes,
            training_tokens=corpus.training_tokens,
            validation_tokens=corpus.validation_tokens,
            epochs=corpus.epochs(job.steps, **size),
        )

    def add(self, result: ArrivalNote) -> None:
        """Adds an arrival to the record. RunError for a loss that is no number."""
        workers, now = self.job.plan.world_size, perf_counter()
        self.arrivals.append(result.arrival)
        self.signal = self.signal or result.signal
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)
        if result.arrival.ticket < 0:
            self.began = self.last = now
            return
        for step, loss in result.meetings:
            self.held_out(step, loss)
        self.results[result.arrival.ticket] = result
        self.tickets[result.arrival.worker] += 1
        if result.average_s:
            self.averages.append(result.average_s)
        if not math.isfinite(result.loss):
            raise RunError(f"the loss of worker {result.arrival.worker} is {result.loss}: training diverged")
        # Steps are recorded in order: a ticket of a later step may arrive before the last one of this.
        first = (self.next_step - 1) * workers
        while all(ticket in self.results for ticket in range(first, first + workers)):
            of_step = [self.results.pop(ticket) for ticket in range(first, first + workers)]
            self._record(of_step, now)
            first += workers

    def _record(self, results: Sequence[ArrivalNote], now: float) -> None:
        loss = sum(result.loss for result in results) / len(results)
        norm = sum(result.grad_norm for result in results) / len(results)
        record = Record(step=self.next_step, loss=loss, grad_norm=norm, step_s=now - self.last)
        self.records.append(record)
        self.last, self.next_step = now, self.next_step + 1
        if self.progress is not None:
            self.progress.peak = self.peak_bytes
            self.progress.show(
                record.step,
                loss,
                record.step_s,
                warm=len(self.records) <= WARM_UP + 1,
                last=record.step == self.job.steps,
            )

    def held_out(self, step: int, loss: float | None) -> None:
        """The loss on held-out text after a step, which every worker tells."""
        for at, record in enumerate(self.records):
            if record.step == step:
                self.records[at] = replace(record, validation_loss=loss)

    def partial_run(self, outcome: Outcome) -> PartialRun:
        """The same, with what the controller saw."""
        assert self.controller is not None  # every worker has arrived
        ordered = sorted(self.averages)
        return PartialRun(
            outcome=outcome,
            arrivals=tuple(self.arrivals),
            groups=tuple(self.controller.groups),
            tickets=tuple(self.tickets),
            seconds=self.last - self.began,
            average_s=ordered[len(ordered) // 2] if ordered else 0.0,
        )


PARTIAL_REDUCE = Scheme(
    controller="same_ranks", check=check_partial_reduce, train=train_partial, exports="launcher", desk=TicketDesk.of
)
"""Partial reduce: workers average their models in groups of those that are ready."""
