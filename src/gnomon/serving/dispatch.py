"""Which worker an encoder's text goes to: one state machine that drives the server and the simulator alike (Arlo).

`Dispatcher(policy, seconds)` is told what arrives and what ends, and says where each text goes and to how many tokens
it is padded; `play(load, policy, seconds)` drives it on a virtual clock. A text goes to the shortest runtime that it
fits in. Where that keeps it waiting, a longer one may have it, never a shorter (demotion). Every so often workers are
dealt out anew by what came (`serving.buckets.assign`). Times are seconds, lengths tokens.
Source: Tan, Li, Yang, Li and Xu 2024 (Arlo): its request scheduler; thresholds are chosen by the replay, not the
paper's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.serving.buckets import assign
from gnomon.serving.requests import Load

Seconds = Callable[[int], float]
"""Seconds of a text that is computed at so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How texts of several lengths are served. Frozen: what happened meanwhile is the dispatcher's."""

    workers: int
    """The number of processes or devices, each with one text at a time."""
    longest: int
    """Tokens of a text, at most."""
    lengths: tuple[int, ...] = ()
    """Tokens of the runtimes, rising, the last for the longest text; (): each text is computed at its own length."""
    patience: float = 1.0
    """How long a text waits for its own runtime before a longer one may have it, in units of its own time there."""
    every: bool = False
    """Whether each worker has all runtimes (weights that all of them read), in place of one each as in the paper."""
    renews_s: float = 10.0
    """Seconds after which workers are dealt out anew."""

    WINDOW: ClassVar[int] = 256
    """The number of last texts that workers are dealt out by."""
    FEWEST: ClassVar[int] = 32
    """The number of texts in the window below which they are not."""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.longest < 1:
            raise InputError(f"{self.workers} workers for {self.longest} tokens serve nobody; give at least 1 of each")
        if list(self.lengths) != sorted(set(self.lengths)) or (self.lengths and self.lengths[0] < 1):
            raise InputError(f"lengths of runtimes rise from 1, unlike {', '.join(map(str, self.lengths))}")
        if self.lengths and self.lengths[-1] < self.longest:
            raise InputError(
                f"a text may have {self.longest} tokens, and the longest runtime {self.lengths[-1]}; add {self.longest}"
            )
        if not self.patience >= 0 or not self.renews_s > 0:
            raise InputError(f"patience {self.patience} or a period of {self.renews_s} s is none; give numbers above 0")

    @property
    def name(self) -> str:
        """The policy's name in tables."""
        if not self.lengths:
            return "own length"
        if len(self.lengths) == 1:
            return f"padded to {self.lengths[0]}"
        return " ".join(map(str, self.lengths)) + (", each worker all" if self.every else "")

    def padded(self, length: int, top: int) -> int:
        """Tokens that a text is computed at by a worker with runtimes up to `top`."""
        if not self.lengths:
            return length
        return next(own for own in self.lengths if own >= length) if self.every else top


@dataclass(slots=True)
class _DispatchWorker:
    top: int
    """Tokens of its runtime."""
    queue: deque[tuple[int, float]] = field(default_factory=deque)
    """(text, seconds) that it has, the one that it computes first."""
    ends_s: float = 0.0
    """When it is expected to have ended all of them, in seconds."""
    there: bool = True
    """Whether it serves."""

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self.ends_s - now_s)


@dataclass(frozen=True, slots=True)
class Sent:
    """The worker that a text goes to, and when."""

    worker: int
    """Number of the worker."""
    tokens: int
    """Tokens to which it is padded."""
    demoted: bool
    """Whether a longer runtime than its own has it."""


class Dispatcher:
    """The state of the dispatcher: what is where. Times that it is given never fall."""

    def __init__(self, policy: Policy, seconds: Seconds, rates: Mapping[int, float] | None = None) -> None:
        """Takes rates, texts a second of each length as far as they are known before; None: workers begin with the
        longest runtime."""
        self.policy, self.seconds = policy, seconds
        # Where each worker has all runtimes, the longest stands for them.
        self.tops = (policy.lengths or (policy.longest,))[-1 if policy.every else 0 :]
        self.workers = [_DispatchWorker(self.tops[-1]) for _ in range(policy.workers)]
        self.demoted = self.renewals = 0
        self._seen: deque[tuple[float, int]] = deque(maxlen=policy.WINDOW)
        self._next_s = policy.renews_s
        if rates:
            self._deal(rates)

    @property
    def runtimes(self) -> tuple[int, ...]:
        """The runtimes that the workers have."""
        return tuple(worker.top for worker in self.workers)

    def arrive(self, text: int, length: int, now_s: float) -> Sent:
        """Chooses where a text goes. text: a number of its own."""
        if not 1 <= length <= self.tops[-1]:
            raise InputError(f"a text has {length} tokens, and the longest runtime {self.tops[-1]}")
        self._seen.append((now_s, length))
        if len(self.tops) > 1 and now_s >= self._next_s:
            self._renew(now_s)
        policy, own = self.policy, [w for w in self.workers if w.top >= length and w.there]
        if not own:
            raise InputError("no worker serves now")
        first = min(worker.top for worker in own)

        def end_s(worker: _DispatchWorker) -> tuple[float, int]:
            return worker.wait_s(now_s) + self.seconds(policy.padded(length, worker.top)), worker.top

        # Shortest runtime that fits, the worker that ends first; only if its wait exceeds the patience may a longer
        # runtime have it.
        best = min((w for w in own if w.top == first), key=end_s)
        if best.wait_s(now_s) > policy.patience * self.seconds(policy.padded(length, first)):
            best = min(own, key=end_s)
        tokens = policy.padded(length, best.top)
        each = self.seconds(tokens)
        best.queue.append((text, each))
        best.ends_s = now_s + best.wait_s(now_s) + each
        self.demoted += best.top > first
        index = next(at for at, worker in enumerate(self.workers) if worker is best)
        return Sent(index, tokens, best.top > first)

    def finish(self, worker: int, text: int, now_s: float) -> None:
        """Notes that a text is answered, or that nobody waits for it any more."""
        own = self.workers[worker]
        own.queue = deque(one for one in own.queue if one[0] != text)
        # Reckoned anew at every end, so that times that were expected wrongly do not add up.
        own.ends_s = now_s + sum(each for _, each in own.queue)

    def remove_worker(self, worker: int) -> list[int]:
        """Takes a worker that is gone, and returns its texts, which go elsewhere. Another one has the longest runtime,
        if any is there."""
        gone = self.workers[worker]
        gone.there, texts = False, [text for text, _ in gone.queue]
        gone.queue.clear()
        gone.ends_s = 0.0
        others = [one for one in self.workers if one.there]
        if others:
            max(others, key=lambda one: one.top).top = self.tops[-1]
        return texts

    def back(self, worker: int) -> None:
        """Notes that a worker serves again."""
        self.workers[worker].there = True

    def _renew(self, now_s: float) -> None:
        self._next_s = now_s + self.policy.renews_s
        if len(self._seen) < self.policy.FEWEST:
            return
        span = max(now_s - self._seen[0][0], 1e-9)
        rates: dict[int, float] = {}
        for _, length in self._seen:
            rates[length] = rates.get(length, 0.0) + 1 / span
        self._deal(rates)
        self.renewals += 1

    def _deal(self, rates: Mapping[int, float]) -> None:
        """Deals workers out by level, changing as few as can be: queues stay where they are."""
        by_level = [0.0] * len(self.tops)
        # Texts a second that each runtime would get if every text went to the shortest that fits.
        for length, rate in rates.items():
            by_level[next(at for at, top in enumerate(self.tops) if top >= length)] += rate
        there = [worker for worker in self.workers if worker.there]
        counts = assign(by_level, [self.seconds(top) for top in self.tops], max(1, len(there)))
        wanted_tops = [top for top, count in zip(self.tops, counts, strict=True) for _ in range(count)]
        free = []
        for worker in there:
            if worker.top in wanted_tops:
                wanted_tops.remove(worker.top)
            else:
                free.append(worker)
        for worker, top in zip(free, wanted_tops, strict=bool(there)):
            worker.top = top


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Texts:
    """A load that was played, in order of arrival."""

    arrival_s: NDArray[np.float64]
    """[texts] when it reached the server."""
    begun_s: NDArray[np.float64]
    """[texts] when it was computed."""
    end_s: NDArray[np.float64]
    """[texts] when its answer was there."""
    length: NDArray[np.int64]
    """[texts] tokens that it has."""
    tokens: NDArray[np.int64]
    """[texts] tokens that it was computed at."""
    worker: NDArray[np.int64]
    """[texts] the worker that computed it."""
    demoted: int
    """Texts that a longer runtime than their own had."""
    busy_s: float
    """Seconds of all workers together."""
    runtimes: tuple[int, ...]
    """Runtimes of the workers at the end."""

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Returns the seconds from arrival to answer."""
        return self.end_s - self.arrival_s

    def percentile(self, p: float) -> float:
        """The least latency that p % do not exceed, in seconds."""
        ordered = np.sort(self.latency_s)
        return float(ordered[max(0, int(np.ceil(len(ordered) * p / 100)) - 1)])

    @property
    def padding(self) -> float:
        """The share of tokens that were computed for nothing."""
        return 1.0 - float(self.length.sum() / self.tokens.sum())


def play(
    load: Load,
    policy: Policy,
    seconds: Seconds,
    *,
    takes: Callable[[int, int], float] | None = None,
    known: bool = False,
) -> Texts:
    """Plays the load by the policy, on a virtual clock. takes: (index of a text, tokens) -> seconds that it really
    takes, where that differs from what the dispatcher expects. known: workers begin dealt out by the load's own lengths
    and rate."""
    requests = load.requests
    really = takes or (lambda _, tokens: seconds(tokens))
    count = len(requests)
    span = requests[-1].arrival_s - requests[0].arrival_s
    rates: dict[int, float] = {}
    if known:
        for one in requests:
            rates[one.input_len] = rates.get(one.input_len, 0.0) + (1 / span if span > 0 else 1.0)
    machine = Dispatcher(policy, seconds, rates)
    arrival, begun, end = (np.zeros(count) for _ in range(3))
    tokens, where = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    # Ends sort before arrivals of the same time: the worker is free for them.
    events: list[tuple[float, int, int]] = []  # (time, 0 an end or 1 an arrival, text)
    queues: list[deque[int]] = [deque() for _ in range(policy.workers)]
    busy = 0.0
    upcoming = iter(range(count))
    if load.concurrency is None:
        events = [(one.arrival_s, 1, index) for index, one in enumerate(requests)]
    else:
        events = [(0.0, 1, index) for _, index in zip(range(load.concurrency), upcoming, strict=False)]
    heapq.heapify(events)

    def start(worker: int, now: float) -> None:
        nonlocal busy
        text = queues[worker][0]
        lasts = really(text, int(tokens[text]))
        busy += lasts
        begun[text], end[text] = now, now + lasts
        heapq.heappush(events, (now + lasts, 0, text))

    while events:
        now, kind, text = heapq.heappop(events)
        if kind:
            arrival[text] = now
            sent = machine.arrive(text, requests[text].input_len, now)
            tokens[text], where[text] = sent.tokens, sent.worker
            queues[sent.worker].append(text)
            if len(queues[sent.worker]) == 1:
                start(sent.worker, now)
            continue
        worker = int(where[text])
        queues[worker].popleft()
        machine.finish(worker, text, now)
        if queues[worker]:
            start(worker, now)
        if load.concurrency is not None and (follower := next(upcoming, None)) is not None:
            heapq.heappush(events, (now, 1, follower))
    return Texts(
        arrival_s=arrival,
        begun_s=begun,
        end_s=end,
        length=np.array([one.input_len for one in requests], dtype=np.int64),
        tokens=tokens,
        worker=where,
        demoted=machine.demoted,
        busy_s=busy,
        runtimes=machine.runtimes,
    )
