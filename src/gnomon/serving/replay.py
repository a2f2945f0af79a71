"""A load played through an engine's scheduler on a virtual clock: when each request came, began, and ended.

An engine whose host prepares an iteration while another runs (`Engine.host_overlap`) admits to the next one only what
had come when the one before it began.

`replay(load, price, blocks)` drives `scheduler.Scheduler` with the ticks of `iteration.IterationPrice`. Between events
(a request comes that could be admitted, one finishes, blocks run out) a decode-only batch does not change, so many
iterations are taken at once; `one_by_one` takes them singly and gives the same times to the bit. Times inside are whole
ticks (TICKS_PER_S), so that sums do not depend on their order. Leaves out requests that are cancelled, and the network
to the client.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.serving.iteration import TICKS_PER_S, IterationPrice, ticks
from gnomon.serving.requests import Load
from gnomon.serving.scheduler import Arrival, Scheduler

MOST_SAMPLES = 4096
"""The most points of the curves over time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedLoad:
    """The times of a load that was played. Arrays have one entry a request, in seconds from the first arrival."""

    arrival_s: NDArray[np.float64]
    """[requests] when it reached the server."""
    begun_s: NDArray[np.float64]
    """[requests] start of the first iteration that computed some of its prompt."""
    first_s: NDArray[np.float64]
    """[requests] its first token."""
    second_s: NDArray[np.float64]
    """[requests] its second token; NaN for answers of one."""
    end_s: NDArray[np.float64]
    """[requests] its last token."""
    input_len: NDArray[np.int64]
    """[requests] tokens of its prompt."""
    output_len: NDArray[np.int64]
    """[requests] tokens of its answer."""
    itl_s: NDArray[np.float64]
    """Seconds between tokens of a request, each value once for each iteration or run of alike ones."""
    itl_count: NDArray[np.int64]
    """The number of pairs of tokens that had each of `itl_s`."""
    iterations: int
    """The number of iterations."""
    preemptions: int
    """The number of requests that lost their blocks."""
    busy_s: float
    """Seconds in which something was computed."""
    mean_running: float
    """Requests that decode, averaged over iterations in which some do, weighted by time."""
    samples: tuple[tuple[float, int, int, float], ...]
    """(time, waiting, running, share of KV blocks used) over time."""

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last token."""
        return float(self.end_s.max())


class TickColumns:
    """Times of requests in ticks, one entry a request; `begun` and `second` are -1, `first` is 0 until it is known."""

    def __init__(self, count: int) -> None:
        self.arrival = [0] * count
        self.begun = [-1] * count
        self.first = [0] * count
        self.second = [-1] * count
        self.end = [0] * count

    def played(
        self,
        load: Load,
        gap_ticks: array[float],
        gap_counts: array[int],
        *,
        iterations: int,
        preemptions: int,
        busy_s: float,
        mean_running: float,
        samples: tuple[tuple[float, int, int, float], ...],
    ) -> PlayedLoad:
        """The columns in seconds, with what the replay counted."""

        def column(values: Sequence[int]) -> NDArray[np.float64]:
            return np.array(values, dtype=np.float64) / TICKS_PER_S

        second = column(self.second)
        second[np.array(self.second) < 0] = np.nan
        return PlayedLoad(
            arrival_s=column(self.arrival),
            begun_s=column(self.begun),
            first_s=column(self.first),
            second_s=second,
            end_s=column(self.end),
            input_len=np.array([r.input_len for r in load.requests], dtype=np.int64),
            output_len=np.array([r.output_len for r in load.requests], dtype=np.int64),
            itl_s=np.frombuffer(gap_ticks, dtype=np.float64) / TICKS_PER_S if gap_ticks else np.zeros(0),
            itl_count=np.frombuffer(gap_counts, dtype=np.int64).copy() if gap_counts else np.zeros(0, dtype=np.int64),
            iterations=iterations,
            preemptions=preemptions,
            busy_s=busy_s,
            mean_running=mean_running,
            samples=samples,
        )


def replay(load: Load, price: IterationPrice, blocks: int, *, one_by_one: bool = False) -> PlayedLoad:
    """Plays a load through the engine of `price`. blocks: KV blocks that it has. InputError for a request that these
    can never hold, or that its limits on a batch never admit."""
    requests, engine = load.requests, price.engine
    count = len(requests)
    scheduler = Scheduler(engine, blocks)
    times = TickColumns(count)
    # Tokenizing and the like happen before a request can be admitted.
    wait = [ticks(engine.request_s + engine.request_token_s * r.input_len) for r in requests]
    # open: every request at its own time; closed: as many as there are clients, then one for each that ends
    closed = load.concurrency is not None
    num_open = min(load.concurrency, count) if load.concurrency is not None else count
    for key in range(num_open):
        times.arrival[key] = 0 if closed else ticks(requests[key].arrival_s)
    # Two heaps: what comes (arrivals by time) and what ends (decode steps by number). Between events the batch is
    # constant.
    due: list[tuple[int, int]] = [(times.arrival[key] + wait[key], key) for key in range(num_open)]
    heapq.heapify(due)
    following = num_open  # closed: the request that a client sends when its last one has ended
    ends: list[tuple[int, int]] = []
    """(decode step at which it has its last token, key); entries of preempted requests are skipped."""
    ends_at: dict[int, int] = {}
    gap_ticks, gap_counts = array("d"), array("q")
    fresh: dict[int, int] = {}
    """Requests whose prompts ended since the last decode -> when: their next gap begins there."""
    last_token: dict[int, int] = {}
    """Preempted requests -> when they had their last token: their gap ends with the prompt that is computed again."""
    now = last_decode = busy = 0
    weighted = weight = 0  # decoding requests x ticks, and ticks, of iterations with decodes: `mean_running`
    iterations = preemptions = done = 0
    finished: list[int] = []
    """Requests that have ended in the last iteration, which the scheduler hears of with the next."""
    samples: list[tuple[float, int, int, float]] = []
    every, since = 1, 0
    poll, looked = engine.poll_steps, engine.poll_steps
    """`looked`: iterations of decodes alone since the engine looked for arrivals, which it does every `poll` of them;
    `poll` itself: it looks before the next iteration."""
    reads = bool(price.shape.encoder)
    """Whether an encoder reads the prompt; the decoder's prompt is then one token."""
    holds = engine.group_wait_steps if price.serving.dp > 1 else 0
    """Iterations that a request waits, once, where data-parallel groups run attention apart from each other."""
    waited: set[int] = set()
    """Requests that have waited so."""
    launched = 0
    """When the last iteration began: what comes later is not in the next one where that is prepared meanwhile."""
    while done < count:
        arrivals: list[Arrival] = []
        idle = scheduler.running == len(finished)  # whatever runs has just finished
        if looked >= poll or idle:
            looked %= poll
        until = now if idle or not engine.host_overlap else launched
        while due and due[0][0] <= until and (idle or not looked):
            _, key = heapq.heappop(due)
            # Data-parallel groups wait for each other: a request that comes while they run waits some iterations once.
            if holds and key not in waited and not idle:
                waited.add(key)
                step = price.decode_ticks(len(scheduler.decoding), scheduler.kv, 1, scheduler.sources)
                heapq.heappush(due, (now + holds * step, key))
                continue
            r = requests[key]
            if reads:
                arrivals.append(Arrival(key, 1, r.output_len, 0, r.input_len))
            else:
                arrivals.append(Arrival(key, r.input_len, r.output_len, r.prefix_len if engine.prefix_cache else 0))
        jump = 0
        # Nothing comes and nothing ends: take as many decode-only iterations as are alike at once.
        if not arrivals and not finished and not one_by_one and ends:
            # The stale end of a preempted request only makes the jump shorter.
            limit = ends[0][0] - scheduler.steps
            jump = scheduler.steady(limit) if limit > 1 else 0
            # Stop at the next arrival that could be admitted, on the iteration at which the engine looks (`poll`).
            if jump > 1 and due and (poll > 1 or holds or scheduler.may_admit()):
                room = due[0][0] - now
                before_it = _until(room, jump, scheduler, price) if room > 0 else 0
                before_it += engine.host_overlap  # one more runs while that with the arrival is prepared
                # Rounded up to the next multiple of `poll` from the last look.
                jump = min(jump, -(-(looked + max(before_it, 1)) // poll) * poll - looked)
        if jump > 1:
            decodes, keys = scheduler.advance(jump)
            sources = scheduler.sources
            spent = price.decode_ticks(decodes, keys, jump, sources)
            launched = now + spent - price.decode_ticks(decodes, keys + (jump - 1) * decodes, 1, sources)
            looked += jump
            # The first of the iterations ends gaps that began elsewhere than at the last decode: it is counted apart.
            first_ticks = price.decode_ticks(decodes, keys, 1, sources) if fresh or last_decode != now else 0
            _gaps(gap_ticks, gap_counts, fresh, now, last_decode, first_ticks, decodes, times)
            # The gaps of a jump are recorded as their mean, which keeps their sum.
            if first_ticks:
                gap_ticks.append((spent - first_ticks) / max(jump - 1, 1))
                gap_counts.append((jump - 1) * decodes)
            else:
                gap_ticks.append(spent / jump)
                gap_counts.append(jump * decodes)
            fresh.clear()
            now += spent
            last_decode = now
            busy += spent
            weighted += decodes * spent
            weight += spent
            iterations += jump
        else:
            batch = scheduler.step(arrivals, finished)
            finished = []
            for key in batch.preempted:
                preemptions += 1
                ends_at.pop(key, None)
                if times.first[key]:
                    last_token.setdefault(key, fresh.pop(key, last_decode))
            if batch.is_empty:
                if not batch.preempted:
                    if not due:
                        break
                    now = max(now, due[0][0])
                continue
            spent = price.batch_ticks(batch)
            launched = now
            looked = poll if batch.pieces else looked + 1
            for piece in batch.pieces:
                if times.begun[piece.key] < 0:
                    times.begun[piece.key] = now
            if batch.decodes:
                _gaps(gap_ticks, gap_counts, fresh, now, last_decode, spent, batch.decodes, times)
                fresh.clear()
                weighted += batch.decodes * spent
                weight += spent
            now += spent
            busy += spent
            iterations += 1
            if batch.decodes:
                last_decode = now
            for piece in batch.pieces:
                if not piece.last:
                    continue
                key = piece.key
                if not times.first[key]:
                    times.first[key] = now
                else:  # it was preempted: its prompt, computed again with its answer so far, ends with its next token
                    gap_ticks.append(float(now - last_token.pop(key)))
                    gap_counts.append(1)
                    if times.second[key] < 0:
                        times.second[key] = now
                fresh[key] = now
                run = scheduler.decoding[key]
                # `most` counts the token that the prompt has just made; each other one is a decode.
                ends_at[key] = scheduler.steps + run.most - 1
                heapq.heappush(ends, (ends_at[key], key))
        while ends and ends[0][0] <= scheduler.steps:
            at, key = heapq.heappop(ends)
            # A preempted request's old end is stale: its entry does not match and is skipped.
            if ends_at.get(key) != at:
                continue
            del ends_at[key]
            # Its last token was made by its prompt (an answer of one token, or a preempted request with one left): no
            # decode of it follows.
            fresh.pop(key, None)
            times.end[key] = now
            finished.append(key)
            done += 1
            if closed and following < count:
                times.arrival[following] = now
                heapq.heappush(due, (now + wait[following], following))
                following += 1
        since += 1
        if since >= every:
            since = 0
            samples.append((now / TICKS_PER_S, len(scheduler.waiting), scheduler.running, scheduler.used / blocks))
            if len(samples) > MOST_SAMPLES:
                # Thin the samples by half whenever there are too many, so that the curve stays bounded.
                samples = samples[::2]
                every *= 2

    return times.played(
        load,
        gap_ticks,
        gap_counts,
        iterations=iterations,
        preemptions=preemptions,
        busy_s=busy / TICKS_PER_S,
        mean_running=weighted / weight if weight else 0.0,
        samples=tuple(samples),
    )


def _gaps(
    gap_ticks: array[float],
    gap_counts: array[int],
    fresh: dict[int, int],
    now: int,
    last_decode: int,
    spent: int,
    decodes: int,
    times: TickColumns,
) -> None:
    """Records the times between tokens, in ticks, that end with the iteration of `spent` ticks from `now`, in which
    `decodes` requests get a token each.

    They begin at `last_decode` for requests that decoded before, and for those of `fresh` when their prompts ended."""
    if not spent:
        return
    old = decodes - len(fresh)
    if old > 0:
        gap_ticks.append(float(now + spent - last_decode))
        gap_counts.append(old)
    for key, since in fresh.items():
        gap_ticks.append(float(now + spent - since))
        gap_counts.append(1)
        if times.second[key] < 0:
            times.second[key] = now + spent


def _until(room: int, most: int, scheduler: Scheduler, price: IterationPrice) -> int:
    """Iterations, from 1 to `most`, of which the last is the first to end `room` ticks from now or later."""
    return price.decodes_until(room, most, len(scheduler.decoding), scheduler.kv, scheduler.sources)
