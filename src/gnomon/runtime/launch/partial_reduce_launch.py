"""Training with partial reduce: the launcher's side.

`run_partial_reduce(job)` starts a process for each worker and answers their arrivals, in the order in which they come,
with what `methods.partial_reduce.Controller` says. A step of the record is that many tickets as there are workers,
whoever trained them. Leaves out what workers do (`partial_reduce`), and other machines.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from torch._C._distributed_c10d import Store

from gnomon.errors import PlanError, RunError
from gnomon.methods.partial_reduce import Arrival, Controller, settings_of
from gnomon.runtime.checkpoint import newest
from gnomon.runtime.launch.exported_checkpoint import exported, keeping
from gnomon.runtime.launch.partial_reduce import Ended, Result, check_partial_reduce, read_result, train_partial
from gnomon.runtime.launch.train import WARM_UP, Job, Outcome, Record, corpus_of, preload_of
from gnomon.runtime.module.apply import check_before
from gnomon.runtime.processes.faults import ended
from gnomon.runtime.processes.local import FailedError, Processes
from gnomon.runtime.watch.progress import Progress

LOOK_S = 0.2
"""Between two looks whether a loss is no number, or all have ended; an arrival is answered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A run, with what its controller saw."""

    outcome: Outcome
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


def run_partial_reduce(job: Job, *, threads: int = 1) -> Outcome:
    """Starts the job's workers and returns how it went. PlanError for a job that cannot have the method; PeerError
    where a process is lost, with the newest checkpoint; SystemExit (130, 143) if a signal ended processes that did not
    end by themselves."""
    return exported(job, run_told(keeping(job), threads=threads).outcome)


def run_told(job: Job, *, threads: int = 1, pause_s: Sequence[float] = ()) -> Told:
    """The same, with what the controller saw. pause_s: seconds that each worker sleeps in every step, in place of a
    slower device."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise PlanError("torchrun starts its own processes; run a plan with partial_reduce without it")
    check_before(job.graph, job.plan)
    check_partial_reduce(job)
    corpus = corpus_of(job)  # text becomes tokens once, before processes wait for each other
    launched = _Launched(job, threads, tuple(pause_s))
    try:
        results: dict[int, Ended] = launched.results()
    except FailedError as failed:
        left = None if job.checkpoints is None else newest(job.checkpoints)
        raise ended(failed, job.plan.world_size, left=left, resume_with=job.resume_with) from failed
    size = {"sequences": job.workload.global_batch_size, "seq_len": job.workload.seq_len}
    book = launched.book
    for step, loss in results[0].held_out:
        book.held_out(step, loss)
    outcome = Outcome(
        records=tuple(book.records),
        resumed_from=results[0].resumed_from,
        stopped=book.signal,
        checkpoint=results[0].checkpoint,
        process_peak_bytes=book.peak_bytes,
        training_tokens=corpus.training_tokens,
        validation_tokens=corpus.validation_tokens,
        epochs=corpus.epochs(job.steps, **size),
    )
    assert launched.controller is not None  # every worker has arrived
    return book.told(outcome, launched.controller)


@dataclass(slots=True)
class _Book:
    """What workers said, step by step."""

    job: Job
    next_step: int = 1
    """That is recorded next, counted from 1."""
    results: dict[int, Result] = field(default_factory=dict)
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

    def add(self, result: Result) -> None:
        """An arrival. RunError for a loss that is no number."""
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
        first = (self.next_step - 1) * workers
        while all(ticket in self.results for ticket in range(first, first + workers)):
            of_step = [self.results.pop(ticket) for ticket in range(first, first + workers)]
            self._record(of_step, now)
            first += workers

    def _record(self, results: Sequence[Result], now: float) -> None:
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

    def told(self, outcome: Outcome, controller: Controller) -> Told:
        ordered = sorted(self.averages)
        return Told(
            outcome=outcome,
            arrivals=tuple(self.arrivals),
            groups=tuple(controller.groups),
            tickets=tuple(self.tickets),
            seconds=self.last - self.began,
            average_s=ordered[len(ordered) // 2] if ordered else 0.0,
        )


class _Launched(Processes):
    """The workers of one job, and a thread that answers them."""

    def __init__(self, job: Job, threads: int, pause_s: tuple[float, ...]) -> None:
        settings = settings_of(job.plan)
        super().__init__(
            _worker,
            settings.workers,
            (job, threads, pause_s),
            start_method="forkserver",
            grace_s=job.grace_s,
            preload=preload_of(job),
        )
        self.controller: Controller | None = None
        """Made when the first worker arrives, which says what checkpoint it goes on from."""
        self.book = _Book(job, tickets=[0] * settings.workers)
        if not job.quiet:
            tokens = job.workload.global_batch_size * job.workload.seq_len
            self.book.progress = Progress(steps=job.steps, tokens=tokens)
        self.problem: Exception | None = None
        self.workers: list[Connection] = []
        self.wake, self.over = Pipe(duplex=False)

    def _arguments(self, rank: int) -> Sequence[Any]:
        here, there = Pipe()
        self.workers.append(here)
        return (*self.args, there)

    def _wait(self) -> list[int]:
        """Until all have ended; ranks that failed. RunError where training diverged."""
        thread = threading.Thread(target=self._answer)
        thread.start()
        try:
            failed: list[int] = []
            while self._running() and self.problem is None and not failed:
                failed += self._just_failed(LOOK_S)
            if self.problem is not None:
                raise self.problem
            return failed
        finally:
            self.over.send_bytes(b"over")
            thread.join()

    def _answer(self) -> None:
        """Takes arrivals in their order, until it is told that all is over."""
        open_ = dict(enumerate(self.workers))
        try:
            while self.wake not in (ready := connection.wait([*open_.values(), self.wake])):
                for worker in [worker for worker, one in open_.items() if one in ready]:
                    try:
                        self._take(read_result(open_[worker].recv_bytes()))
                    except (EOFError, OSError):  # it ended
                        del open_[worker]
        except Exception as error:
            self.problem = error

    def _take(self, result: Result) -> None:
        """An arrival: into the book, and to the controller, whose replies are sent."""
        try:
            self.book.add(result)
        except RunError as error:
            left = None if self.book.job.checkpoints is None else newest(self.book.job.checkpoints)
            after = (
                f"the checkpoint {left} is from before it: go on from it with a lower --lr" if left else "no checkpoint"
            )
            self.problem = RunError(f"{error}, so the run ended; {after}")
            return
        if self.controller is None:
            job, done = self.book.job, result.resumed_from
            meet_every = math.gcd(job.checkpoint_every, job.validate_every)
            self.controller = Controller(settings_of(job.plan), steps=job.steps, done=done, meet_every=meet_every)
            self.book.next_step = done + 1
        for worker, reply in self.controller.arrive(result.arrival).items():
            self.workers[worker].send_bytes(json.dumps(asdict(reply)).encode())


def _worker(store: Store, number: int, world_size: int, *args: Any) -> Ended:
    """One process."""
    return train_partial(store, number, *args)
