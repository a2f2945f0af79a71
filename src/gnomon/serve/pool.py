"""Encoders in processes of their own, and who gets which text: `WorkerPool` in the front end, `main` in each process.

The dispatcher of room `serving` says which worker has a text and how far it is padded, by the seconds that the workers
measured when they started; a worker has one text at a time and the front end the rest, so that one that nobody waits
for is not computed. Where a worker dies, the text that it had fails, the others go elsewhere, and it is started again.
Leaves out HTTP (`server`) and what a text becomes (`encoder`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import GnomonError, RunError
from gnomon.late import load_late
from gnomon.runtime.processes.local import end_with_starter, start_fork_server
from gnomon.serve.messages import Failure, Stop
from gnomon.serve.settings import Settings
from gnomon.serving.dispatch import Dispatcher, Policy, Sent

log = logging.getLogger("gnomon.serve")
AGAIN_S = 1.0
"""After which a worker that died is started again, twice as late each time that it dies before it serves."""
LEAVE_S = 10.0
"""Seconds that a worker has to end when it is told to."""
LOADED = ("gnomon.serve.pool", "gnomon.serve.encoder")
"""Modules that the fork server loads once for all workers."""
TIMED = (8, 32, 128)
"""Tokens at which a worker times itself, beside the longest, where texts are computed at their own lengths."""
TIMINGS = 2
"""Of each, of which the faster counts: the first of all makes oneDNN's kernels."""

Wants = Literal["vector", "classes"]


@dataclass(frozen=True, slots=True)
class TextWork:
    """A text, for a worker."""

    number: int
    """The pool's name for it."""
    ids: tuple[int, ...]
    """Its tokens."""
    types: tuple[int, ...] | None
    """Of the tokens, 0 or 1, where it is a pair; None: 0."""
    tokens: int
    """That it is padded to."""
    wants: Wants
    """What is asked of it."""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What a worker made of it."""

    number: int
    """Of the text."""
    values: NDArray[np.float32]
    """Its vector, or its classes' scores."""


@dataclass(frozen=True, slots=True)
class BusyWorker:
    """The message that a worker serves, with what it timed."""

    seconds: Mapping[int, float]
    """Tokens -> of a text padded to so many."""


def seconds_of(timed: Sequence[Mapping[int, float]]) -> Callable[[int], float]:
    """Returns the seconds of a text at so many tokens: the workers' mean, on lines between what they timed, never
    falling."""
    at = sorted(timed[0])
    means = np.maximum.accumulate([sum(one[length] for one in timed) / len(timed) for length in at])
    return lambda tokens: float(np.interp(tokens, at, means))


def main(environment: Mapping[str, str], connection: Connection, settings: Settings) -> None:
    """Runs a worker: it serves until the front end goes or says so."""
    end_with_starter()
    os.environ.update(environment)  # of a fork server: it has that of when it started
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end says when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings.use_threads()
    try:
        encoder = load_late("gnomon.serve.encoder:Encoder").open(
            Path(settings.folder), settings.dtype, settings.max_model_len
        )
    except GnomonError as error:
        connection.send(Failure(-1, str(error), 500))
        return
    lengths = settings.buckets or tuple(sorted({*(one for one in TIMED if one < encoder.max_len), encoder.max_len}))
    timed: dict[int, float] = {}
    for length in lengths:
        for _ in range(TIMINGS):
            begin = time.perf_counter()
            encoder.embed([0], length) if not encoder.kind.labels else encoder.classify([0], None, length)
            took = time.perf_counter() - begin
            timed[length] = min(took, timed.get(length, took))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the front end is gone
        connection.send(BusyWorker(timed))
        while not isinstance(message := connection.recv(), Stop):
            try:
                types = None if message.types is None else list(message.types)
                if message.wants == "vector":
                    vector = encoder.embed(list(message.ids), message.tokens)
                else:
                    vector = encoder.classify(list(message.ids), types, message.tokens)
                connection.send(WorkerResult(message.number, vector.numpy()))
            except Exception as error:  # this text is lost, not the server
                connection.send(Failure(message.number, f"the encoder failed: {type(error).__name__}: {error}", 500))


@dataclass(slots=True)
class _Open:
    """A text that is not answered yet."""

    text: TextWork
    result: asyncio.Future[NDArray[np.float32]]
    worker: int = -1


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    timed: Mapping[int, float] | None = None
    has: int = -1
    """The text that it computes; -1 for none."""
    waiting: deque[int] = field(default_factory=deque)
    """Texts that come after it."""


class LostText(Exception):
    """A text that is not answered, and how HTTP says so."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


class WorkerPool:
    """The workers of an encoder's server."""

    def __init__(self, settings: Settings, max_len: int) -> None:
        self.settings = settings
        self.policy = Policy(
            workers=settings.workers, longest=max_len, lengths=settings.buckets, every=settings.every_bucket,
            patience=settings.patience,
        )  # fmt: skip
        self.workers: list[_Worker | None] = [None] * settings.workers
        self.open: dict[int, _Open] = {}
        self.deaths = 0
        self.record: list[tuple[float, int, Sent]] | None = None
        """Where (seconds, tokens, where it went) of each text is written to, if it is."""
        self.stopping = False
        self._next = 0
        self._delay_s = [AGAIN_S] * settings.workers
        self._ready = asyncio.Event()
        self._failed = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self.machine: Dispatcher | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a worker serves."""
        return self.machine is not None and any(one is not None and one.timed for one in self.workers)

    async def start(self) -> None:
        """Starts all and returns when all serve. RunError with what one says that cannot."""
        self.loop = asyncio.get_running_loop()
        for index in range(len(self.workers)):
            self._start(index)
        await self._ready.wait()
        if self._failed:
            await self.stop()
            raise RunError(self._failed)

    def _start(self, index: int) -> None:
        context = get_context("forkserver")
        start_fork_server(LOADED)
        ours, theirs = context.Pipe()
        process = context.Process(
            target=load_late("gnomon.serve.pool:main"), args=(dict(os.environ), theirs, self.settings),
            name=f"gnomon-encoder-{index}",
            daemon=True,
        )  # fmt: skip
        process.start()
        # While this process holds the worker's end open, `recv` would wait for ever after the worker has died, and
        # never raise EOFError.
        theirs.close()
        worker = self.workers[index] = _Worker(process, ours)
        threading.Thread(target=self._listen, args=(index, worker), daemon=True).start()

    def _listen(self, index: int, worker: _Worker) -> None:
        """Listens, in a thread of its own, to the messages of one worker, until it is gone."""
        with suppress(RuntimeError):  # the loop has ended
            try:
                while True:
                    message = worker.connection.recv()
                    # All state of the pool is changed by the loop's thread alone, and needs no lock.
                    self.loop.call_soon_threadsafe(self._heard, index, worker, message)
            except (EOFError, OSError):
                self.loop.call_soon_threadsafe(self._gone, index, worker)

    def _heard(self, index: int, worker: _Worker, message: object) -> None:
        match message:
            case BusyWorker(seconds=seconds):
                worker.timed = seconds
                self._delay_s[index] = AGAIN_S
                timed = [one.timed for one in self.workers if one is not None and one.timed is not None]
                if self.machine is not None:
                    self.machine.back(index)
                # The dispatcher begins once all have timed themselves: its seconds are their mean. A worker that comes
                # later was away and is back.
                elif len(timed) == len(self.workers):
                    self.machine = Dispatcher(self.policy, seconds_of(timed))
                    self._ready.set()
            case Failure(number=-1):
                self._failed = message.why
                self._ready.set()
            case WorkerResult() | Failure():
                assert self.machine is not None
                worker.has = -1
                self.machine.finish(index, message.number, time.monotonic())
                if (open_ := self.open.pop(message.number, None)) is not None and not open_.result.done():
                    if isinstance(message, WorkerResult):
                        open_.result.set_result(message.values)
                    else:
                        open_.result.set_exception(LostText(message.why, message.status))
                self._feed(index)

    def _gone(self, index: int, worker: _Worker) -> None:
        # News of a process that has been replaced by now is late, and says nothing of the one that is there.
        if self.stopping or self.workers[index] is not worker:
            return
        self.deaths += 1
        self.workers[index] = None
        if self.machine is None:
            why = f"encoder {index} ended before it served (exit code {worker.process.exitcode})"
            self._failed = self._failed or why
            self._ready.set()
            return
        log.warning("encoder %d is gone; it is started again", index)
        texts = self.machine.remove_worker(index) if worker.timed is not None else []
        if (failed := self.open.pop(worker.has, None)) is not None and not failed.result.done():
            failed.result.set_exception(LostText("the process that was answering is gone; send the request again", 503))
        worker.connection.close()
        for number in texts:
            if number in self.open:
                self._send(self.open[number])
        delay, self._delay_s[index] = self._delay_s[index], min(60.0, 2 * self._delay_s[index])

        async def again() -> None:
            await asyncio.sleep(delay)
            if not self.stopping:
                self._start(index)

        task = self.loop.create_task(again())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Ends the workers; those that do not are killed."""
        self.stopping = True
        alive = [worker for worker in self.workers if worker is not None]
        for worker in alive:
            with suppress(OSError, ValueError):
                worker.connection.send(Stop())
        for worker in alive:
            await asyncio.to_thread(worker.process.join, LEAVE_S)
            if worker.process.is_alive():
                worker.process.kill()

    async def compute(
        self, ids: Sequence[int], types: Sequence[int] | None = None, wants: Wants = "vector"
    ) -> NDArray[np.float32]:
        """What a worker makes of a text. Lost where none serves, or the one that had it is gone. Cancelled, the text is
        not computed, unless a worker has it already."""
        self._next += 1
        text = TextWork(self._next, tuple(ids), None if types is None else tuple(types), 0, wants)
        open_ = self.open[text.number] = _Open(text, self.loop.create_future())
        self._send(open_)
        try:
            return await open_.result
        except asyncio.CancelledError:
            self._cancel(text.number)
            raise

    def _send(self, open_: _Open) -> None:
        number, now = open_.text.number, time.monotonic()
        if not self.is_ready:
            self.open.pop(number, None)
            open_.result.set_exception(LostText("no worker serves now; ask again", 503))
            return
        assert self.machine is not None
        sent = self.machine.arrive(number, len(open_.text.ids), now)
        if self.record is not None:
            self.record.append((now, len(open_.text.ids), sent))
        open_.worker = sent.worker
        open_.text = TextWork(number, open_.text.ids, open_.text.types, sent.tokens, open_.text.wants)
        worker = self.workers[sent.worker]
        assert worker is not None, "the dispatcher knows who is there"
        worker.waiting.append(number)
        self._feed(sent.worker)

    def _feed(self, index: int) -> None:
        """The next text to a worker that has none."""
        worker = self.workers[index]
        if worker is None or worker.has >= 0:
            return
        while worker.waiting:
            number = worker.waiting.popleft()
            if number in self.open:
                worker.has = number
                with suppress(OSError, ValueError):  # it is gone: the thread that reads says so
                    worker.connection.send(self.open[number].text)
                return

    def _cancel(self, number: int) -> None:
        open_ = self.open.pop(number, None)
        if open_ is None or open_.worker < 0 or self.machine is None:
            return
        worker = self.workers[open_.worker]
        # A text that a worker computes already counts as its work until its result comes.
        if worker is not None and worker.has != number:
            self.machine.finish(open_.worker, number, time.monotonic())
