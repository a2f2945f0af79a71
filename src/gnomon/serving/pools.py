"""Disaggregated serving: prompts computed by one pool of engines, answers by another, keys sent from one to the other.

`replay_pools(load, prefill, decode, …)` plays a load through engines of both pools, each with a scheduler of its own
(`scheduler.Scheduler`), on one virtual clock. A request goes to the engine with fewest requests; its keys go over the
link when its prompt is done, and its place in the prefill engine is free then. A decode engine admits it as a prompt
of which all but the first token is cached. Decodes that nobody joins and none leaves are taken at once, and cut where
keys come. Leaves out keys that are sent layer by layer while the prompt is computed,
and engines that change pools.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gnomon.errors import InputError
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice, ticks
from gnomon.serving.replay import MOST_SAMPLES, PlayedLoad, TickColumns
from gnomon.serving.requests import Load
from gnomon.serving.scheduler import Batch, Scheduler
from gnomon.software.engine import Engine as EngineRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePool:
    """A pool of equal engines."""

    price: IterationPrice
    """Seconds of an iteration of one of them."""
    blocks: int
    """KV blocks of one of them."""
    count: int
    """Engines."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"a pool of {self.count} engines serves nobody: give at least 1")


@dataclass(slots=True)
class _Engine:
    """One engine of a pool as the replay drives it."""

    scheduler: Scheduler
    price: IterationPrice
    waiting: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Requests that have come since its last step, as `Scheduler.step` takes them."""
    finished: list[int] = field(default_factory=list)
    load: int = 0
    """Requests that it has."""
    batch: Batch | None = None
    """What it computes now."""
    since: int = 0
    """When it began to."""
    until: int = 0
    """When that ends; events of other ticks are of runs that were cut."""
    run: int = 0
    """Iterations of decodes alone that it takes at once, which its scheduler is told at their end; 0: a single step."""
    ends: dict[int, int] = field(default_factory=dict)
    """Key -> decode step at which it has its last token."""
    queue: list[tuple[int, int]] = field(default_factory=list)
    """(that step, key), a heap; entries of preempted requests are skipped."""

    def due(self) -> list[int]:
        """Requests that have all their tokens."""
        found = []
        while self.queue and self.queue[0][0] <= self.scheduler.steps:
            at, key = heapq.heappop(self.queue)
            if self.ends.get(key) == at:
                del self.ends[key]
                found.append(key)
        return found


COMES, KEYS, ENDS = 0, 1, 2
"""Events: a request comes, its keys have come to a decode engine, an iteration ends."""


class _Play:
    """The state of a replay of two pools."""

    def __init__(
        self,
        load: Load,
        prefill: EnginePool,
        decode: EnginePool,
        transfer_s: Callable[[int], float],
        *,
        one_by_one: bool,
    ) -> None:
        self.load, self.transfer_s, self.one_by_one = load, transfer_s, one_by_one
        self.firsts = [_engine_of(prefill) for _ in range(prefill.count)]
        self.lasts = [_engine_of(decode) for _ in range(decode.count)]
        rules = prefill.price.engine
        self.wait = [ticks(rules.request_s + rules.request_token_s * r.input_len) for r in load.requests]
        self.times = TickColumns(len(load.requests))
        self.gaps, self.gap_counts = array("d"), array("q")
        self.events: list[tuple[int, int, int]] = []
        """(tick, kind, key of a request or number of an engine), a heap."""
        self.following = self.done = self.iterations = self.preemptions = self.busy = self.weighted = self.weight = 0
        self.lost: dict[int, int] = {}
        """Key -> when it lost its blocks."""
        self.samples: list[tuple[float, int, int, float]] = []
        self.every = max(1, len(load.requests) // MOST_SAMPLES)
        self.decode_blocks = decode.blocks * decode.count

    def run(self) -> None:
        """Plays the load to the last token."""
        requests, clients = self.load.requests, self.load.concurrency
        for key in range(len(requests) if clients is None else min(clients, len(requests))):
            self.arrive(0 if clients is not None else ticks(requests[key].arrival_s))
        engines = [*self.firsts, *self.lasts]
        while self.done < len(requests) and self.events:
            now = self.events[0][0]
            ready: set[int] = set()
            while self.events and self.events[0][0] == now:  # whoever comes at the same tick is in the same batch
                _, kind, which = heapq.heappop(self.events)
                if kind == ENDS:
                    if engines[which].batch is None or engines[which].until != now:
                        continue  # of a run that was cut
                    self.finish_iteration(engines[which], now, decodes=which >= len(self.firsts))
                    ready.add(which)
                else:
                    ready.add(self.assign(which, now, keys=kind == KEYS))
            for number in sorted(ready):
                self.start(engines[number], number, now)

    def arrive(self, now: int) -> None:
        """The next request reaches the server."""
        self.times.arrival[self.following] = now
        heapq.heappush(self.events, (now + self.wait[self.following], COMES, self.following))
        self.following += 1

    def assign(self, key: int, now: int, *, keys: bool) -> int:
        """A request goes to the engine of its pool that has fewest; returns the engine's number."""
        pool, request = self.lasts if keys else self.firsts, self.load.requests[key]
        place = min(range(len(pool)), key=lambda i: pool[i].load)
        one = pool[place]
        one.load += 1
        if keys:
            # The first token of the answer came with the prompt: here it is the prompt's last token, the only one not
            # cached.
            one.waiting.append((key, request.input_len + 1, request.output_len - 1, request.input_len))
            if one.run > 1:
                self.cut_decodes(one, len(self.firsts) + place, now)
            return len(self.firsts) + place
        cached = request.prefix_len if one.price.engine.prefix_cache else 0
        # One output token: the one that the end of the prompt makes.
        one.waiting.append((key, request.input_len, 1, cached))
        return place

    def cut_decodes(self, one: _Engine, number: int, now: int) -> None:
        """A run of decodes ends with the first iteration that is over now or later: somebody joins then."""
        batch = one.batch
        assert batch is not None
        run = one.price.decodes_until(now - one.since, one.run, batch.decodes, batch.kv_tokens)
        if run < one.run:
            one.run, one.until = run, one.since + one.price.decode_ticks(batch.decodes, batch.kv_tokens, run)
            heapq.heappush(self.events, (one.until, ENDS, number))

    def may_run(self, one: _Engine) -> int:
        """Iterations of decodes that follow alike if nobody comes."""
        if self.one_by_one or one.waiting or one.finished or not one.queue:
            return 0
        num_steps = one.queue[0][0] - one.scheduler.steps
        return one.scheduler.steady(num_steps) if num_steps > 1 else 0

    def start(self, one: _Engine, number: int, now: int) -> None:
        """The engine's next iteration, if it has anything to do and is not in one."""
        while one.batch is None:
            if (run := self.may_run(one)) > 1:
                one.batch = batch = Batch((), len(one.scheduler.decoding), one.scheduler.kv, ())
                one.run, one.since = run, now
                one.until = now + one.price.decode_ticks(batch.decodes, batch.kv_tokens, run)
                heapq.heappush(self.events, (one.until, ENDS, number))
                return
            batch = one.scheduler.step(one.waiting, one.finished)
            one.waiting, one.finished = [], []
            self.preemptions += len(batch.preempted)
            for key in batch.preempted:
                one.ends.pop(key, None)
                self.lost[key] = now
            if batch.is_empty:
                if not batch.preempted:
                    return
                continue
            spent = one.price.batch_ticks(batch)
            for piece in batch.pieces:
                if self.times.begun[piece.key] < 0:
                    self.times.begun[piece.key] = now
            self.iterations += 1
            self.busy += spent
            self.weighted += batch.decodes * spent
            self.weight += spent if batch.decodes else 0
            one.batch, one.since, one.until, one.run = batch, now, now + spent, 0
            heapq.heappush(self.events, (now + spent, ENDS, number))

    def finish_iteration(self, one: _Engine, now: int, *, decodes: bool) -> None:
        """What an iteration made."""
        batch, times = one.batch, self.times
        assert batch is not None
        one.batch = None
        if one.run:
            one.scheduler.advance(one.run)
            spent = now - one.since
            self.iterations += one.run
            self.busy += spent
            self.weighted += batch.decodes * spent
            self.weight += spent
        if batch.decodes:
            self.gaps.append((now - one.since) / max(one.run, 1))
            self.gap_counts.append(batch.decodes * max(one.run, 1))
        one.run = 0
        for piece in batch.pieces:
            if not piece.last:
                continue
            key = piece.key
            if not decodes:
                times.first[key] = now
                one.finished.append(key)
                one.load -= 1
                if self.load.requests[key].output_len == 1:
                    self.answered(key, now)
                else:
                    sent = ticks(self.transfer_s(self.load.requests[key].input_len))
                    heapq.heappush(self.events, (now + sent, KEYS, key))
                continue
            if times.second[key] < 0:  # of its prompt there only the last token was not cached: the answer's first
                times.second[key] = now
                self.gaps.append(float(now - times.first[key]))
                self.gap_counts.append(1)
            elif key in self.lost:  # a token more, of what was computed again
                self.gaps.append(float(now - self.lost.pop(key)))
                self.gap_counts.append(1)
            one.ends[key] = one.scheduler.steps + one.scheduler.decoding[key].most - 1
            heapq.heappush(one.queue, (one.ends[key], key))
        if decodes:
            for key in one.due():
                one.finished.append(key)
                one.load -= 1
                self.answered(key, now)

    def answered(self, key: int, now: int) -> None:
        """A request has all its tokens, and its client sends the next."""
        self.times.end[key] = now
        self.done += 1
        if self.load.concurrency is not None and self.following < len(self.load.requests):
            self.arrive(now)
        if self.done % self.every == 0:
            waits = sum(len(e.scheduler.waiting) + len(e.waiting) for e in (*self.firsts, *self.lasts))
            used = sum(e.scheduler.used for e in self.lasts) / self.decode_blocks
            running = sum(e.scheduler.running for e in (*self.firsts, *self.lasts))
            self.samples.append((now / TICKS_PER_S, waits, running, used))


def _engine_of(pool: EnginePool) -> _Engine:
    return _Engine(Scheduler(pool.price.engine, pool.blocks), pool.price)


def replay_pools(
    load: Load, prefill: EnginePool, decode: EnginePool, transfer_s: Callable[[int], float], *, one_by_one: bool = False
) -> PlayedLoad:
    """Plays a load. transfer_s: seconds that the keys of so many tokens take from one engine to another, alone.
    one_by_one: no iterations at once, which gives the same times to the bit.

    InputError for a request that an engine's memory never holds. Decode engines mix what arrives with their decodes
    whatever their record says: only one token of it is to be computed.
    """
    play = _Play(load, prefill, decode, transfer_s, one_by_one=one_by_one)
    play.run()
    return play.times.played(
        load,
        play.gaps,
        play.gap_counts,
        iterations=play.iterations,
        preemptions=play.preemptions,
        busy_s=play.busy / TICKS_PER_S,
        # The sums are over the iterations of all engines, so their quotient is the mean of one engine.
        mean_running=play.weighted / play.weight * len(play.lasts) if play.weight else 0.0,
        samples=tuple(play.samples),
    )


def decoding(engine: EngineRecord) -> EngineRecord:
    """The record of an engine that decodes only: what comes from the other pool is cached but for a token."""
    return replace(engine, mixed=True, chunked_prefill=True)
