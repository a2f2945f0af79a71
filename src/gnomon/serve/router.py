"""Replicas and who gets what: `Router` starts their processes, hands each ask to one, and brings back those that die.

An ask goes where least is to be computed before it is answered: prompt tokens that wait there, and its own that no
earlier prompt of that worker begins with. A worker is a replica: a process, or those that divide a model (`divided`),
of which the first is spoken to. Where one of its processes dies, its asks fail, the others' go on, and all of it is
started again. Runs in the front end's event loop; one thread a worker reads its pipe. Leaves out HTTP and metrics.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch._C._distributed_c10d import Store

from gnomon.errors import RunError
from gnomon.late import load_late
from gnomon.runtime.processes.local import meeting_place, start_fork_server
from gnomon.serve.messages import Ask, Cancel, Delta, Failure, Ready, Seat, Stats, Stop, Tokens
from gnomon.serve.settings import Settings

log = logging.getLogger("gnomon.serve")
KNOWN_BLOCKS = 1 << 16
"""Beginnings of prompts that are remembered of a worker."""
AGAIN_S, SOON_S = 1.0, 30.0
"""A worker that dies is started again after the first; if it lived less than the second, twice as late each time."""
LOADED = ("gnomon.serve.worker", "gnomon.serve.divided", "gnomon.serve.grammar")
"""What a fork server loads before it starts workers, once for all of them."""
LEAVE_S = 10.0
"""Seconds that a worker has to end when it is told to."""

Hear = Callable[[Delta | Failure], None]
"""Is told what becomes of an ask."""


@dataclass(slots=True)
class Open:
    """An ask that is not answered yet."""

    ask: Ask
    hear: Hear
    answers: int
    """That have not ended."""
    cost: int
    """Prompt tokens that were to be computed for it; 0 once it answers."""


@dataclass(slots=True)
class ReplicaProcess:
    """A replica: its processes and what is under way there."""

    processes: Sequence[BaseProcess]
    """By rank; the first is spoken to."""
    connection: Connection
    store: Store | None
    """Where its ranks meet, while it is held here."""
    born_s: float
    ready: Ready | None = None
    stats: Stats | None = None
    asks: dict[int, Open] = field(default_factory=dict)
    known_prefixes: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Beginnings of prompts that it had, the longest unused first."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def cost(self) -> int:
        """Prompt tokens that wait in it, and a token for each answer that is being made."""
        return sum(one.cost + one.answers for one in self.asks.values())

    def end(self) -> None:
        """Kills what is left of its processes."""
        for process in self.processes:
            process.kill()
        self.connection.close()
        self.store = None


class Router:
    """The workers of a server."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.workers: list[ReplicaProcess | None] = [None] * settings.workers
        self.deaths = 0
        self.stopping = False
        self._next = 0
        self._delay_s = [AGAIN_S] * settings.workers
        self._ready = asyncio.Event()
        self._failed = ""
        self._tasks: set[asyncio.Task[None]] = set()

    # --- workers

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
        settings, context = self.settings, get_context("forkserver")
        start_fork_server(LOADED)
        ours, theirs = context.Pipe()
        ranks, store = settings.ways.ranks, None
        seats: list[Seat | None] = [None]
        if ranks > 1:
            store, port = meeting_place()
            seats = [Seat(rank=rank, port=port) for rank in range(ranks)]
        pipes = [context.Pipe() for _ in range(ranks - 1)]
        ends = [theirs, *(end for _, end in pipes)]
        main, environment = load_late("gnomon.serve.worker:main"), dict(os.environ)
        processes = []
        for rank, (seat, end) in enumerate(zip(seats, ends, strict=True)):
            others = () if rank else tuple(pipe for pipe, _ in pipes)
            args = (environment, end, settings, seat, others)
            name = f"gnomon-worker-{index}" + (f"-rank-{rank}" if rank else "")
            processes.append(context.Process(target=main, args=args, name=name, daemon=True))
            processes[-1].start()
        # Only the processes keep these ends: held here too, a pipe would never say that the other side is gone.
        for end in (*ends, *(pipe for pipe, _ in pipes)):
            end.close()
        worker = self.workers[index] = ReplicaProcess(processes, ours, store, time.monotonic())
        threading.Thread(target=self._listen, args=(index, worker), daemon=True).start()

    def _listen(self, index: int, worker: ReplicaProcess) -> None:
        """Listens, in a thread of its own, to the messages of one worker, until it is gone, or any of its processes."""
        ends = [process.sentinel for process in worker.processes]
        with suppress(RuntimeError):  # the loop has ended
            try:
                while True:
                    ready = wait([worker.connection, *ends])
                    if worker.connection in ready:  # first what it said
                        self.loop.call_soon_threadsafe(self._heard, worker, worker.connection.recv())
                    else:
                        raise EOFError
            except (EOFError, OSError):
                self.loop.call_soon_threadsafe(self._gone, index, worker)

    def _heard(self, worker: ReplicaProcess, message: Any) -> None:
        match message:
            case Tokens(deltas=deltas):
                for one in deltas:
                    self._on_delta(worker, one)
            case Stats():
                worker.stats = message
            case Ready():
                worker.ready = message
                if all(one is not None and one.ready is not None for one in self.workers):
                    self._ready.set()
            case Failure(number=-1):
                self._failed = message.why
                self._ready.set()
            case Failure():
                if (open_ := worker.asks.pop(message.number, None)) is not None:
                    open_.hear(message)

    def _on_delta(self, worker: ReplicaProcess, delta: Delta) -> None:
        open_ = worker.asks.get(delta.number)
        if open_ is None:  # cancelled meanwhile
            return
        open_.cost = 0
        open_.answers -= delta.reason is not None
        if not open_.answers:
            del worker.asks[delta.number]
        open_.hear(delta)

    def _gone(self, index: int, worker: ReplicaProcess) -> None:
        if self.stopping or self.workers[index] is not worker:
            return
        self.deaths += 1
        lived_s = time.monotonic() - worker.born_s
        if worker.ready is None:
            self._failed = (
                self._failed or f"worker {index} ended before it served (exit code {_exitcode(worker.processes)})"
            )
            self._ready.set()
        log.warning(
            "worker %d is gone after %.0f s with %d requests; it is started again", index, lived_s, len(worker.asks)
        )
        self.workers[index] = None
        for number, open_ in worker.asks.items():
            open_.hear(Failure(number, "the process that was answering is gone; send the request again", 503))
        worker.asks.clear()
        worker.end()
        self._delay_s[index] = AGAIN_S if lived_s > SOON_S else min(60.0, 2 * self._delay_s[index])

        async def again() -> None:
            await asyncio.sleep(self._delay_s[index])
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
            self._send(worker, Stop())
        for worker in alive:
            await asyncio.to_thread(worker.processes[0].join, LEAVE_S)
            worker.end()

    # --- asks

    @property
    def is_ready(self) -> bool:
        """Whether a worker serves."""
        return not self.stopping and any(one is not None and one.ready is not None for one in self.workers)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer."""
        return min((one.ready.max_model_len for one in self.workers if one is not None and one.ready), default=0)

    @property
    def vocab_size(self) -> int:
        """Tokens that prompts may have."""
        return min((one.ready.vocab_size for one in self.workers if one is not None and one.ready), default=0)

    def stats(self) -> list[Stats]:
        """Lists the counts of the workers that are there."""
        return [one.stats for one in self.workers if one is not None and one.stats is not None]

    @property
    def waiting(self) -> int:
        """Requests of which nothing was told yet, beyond those that can run."""
        asks = [sum(one.cost > 0 for one in worker.asks.values()) for worker in self.workers if worker is not None]
        return max(0, sum(asks))

    def submit(self, make: Callable[[int], Ask], hear: Hear) -> int | None:
        """The number of an ask that went to a worker; None where there is none that serves."""
        self._next += 1
        ask = make(self._next)
        blocks = _beginnings(ask.prompt, self.settings.rules.block_tokens, f"{ask.adapter}\0{ask.salt}")
        best: tuple[int, ReplicaProcess] | None = None
        for worker in self.workers:
            if worker is None or worker.ready is None:
                continue
            # What the worker is thought to have in its pages: this side only knows which prompts went there, not which
            # pages are still kept.
            missing = len(ask.prompt) - self._found(worker, blocks) * self.settings.rules.block_tokens
            if best is None or worker.cost + missing < best[0]:
                best = worker.cost + missing, worker
        if best is None:
            return None
        total, worker = best
        worker.asks[ask.number] = Open(ask, hear, ask.count, max(1, total - worker.cost))
        for block in blocks:
            # An assignment alone would leave a key where it was: the order is that of the last use.
            worker.known_prefixes[block] = None
            worker.known_prefixes.move_to_end(block)
        while len(worker.known_prefixes) > KNOWN_BLOCKS:
            worker.known_prefixes.popitem(last=False)
        self._send(worker, ask)
        return ask.number

    @staticmethod
    def _found(worker: ReplicaProcess, blocks: Sequence[bytes]) -> int:
        # A hash stands for all tokens before it: behind the first that is unknown there is nothing to find.
        for count, block in enumerate(blocks):
            if block not in worker.known_prefixes:
                return count
        return len(blocks)

    def cancel(self, number: int) -> None:
        """Nobody waits for it any more."""
        for worker in self.workers:
            if worker is not None and worker.asks.pop(number, None) is not None:
                self._send(worker, Cancel(number))

    def _send(self, worker: ReplicaProcess, message: Any) -> None:
        with suppress(OSError, ValueError), worker.lock:  # it is gone: the thread that reads says so
            worker.connection.send(message)


def _exitcode(processes: Sequence[BaseProcess]) -> int | None:
    return next((process.exitcode for process in processes if process.exitcode is not None), None)


def _beginnings(prompt: Sequence[int], size: int, whose: str) -> list[bytes]:
    """A hash of each whole number of blocks that a prompt begins with. whose: an adapter's, and a salt's."""
    tokens, hashes = array("q", prompt), list[bytes]()
    before = hashlib.blake2b(whose.encode(), digest_size=16).digest()
    for at in range(0, len(prompt) // size * size, size):
        # Keyed with the hash before it, so that equal hashes stand for equal beginnings and not just for equal blocks.
        before = hashlib.blake2b(tokens[at : at + size].tobytes(), digest_size=16, key=before).digest()
        hashes.append(before)
    return hashes
