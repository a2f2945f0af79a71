"""Textbook policies, played by brute force: what the replay of `gnomon.fleet` is held against.

Written from the papers, and with nothing of `gnomon.fleet`: exact fractions in place of floats, counts of devices in
place of nodes, no memo and no faster way. Whatever happens, the next moment is looked for among all jobs.

- FIFO: nothing passes the head of the queue.
- SJF: of the jobs that fit, the shortest first; no preemption.
- EASY (Lifka, JSSPP 1995; Mu'alem and Feitelson, TPDS 2001): FIFO, but the first job that does not fit is promised the
  earliest moment at which enough devices will be free (shadow time); a later job may start if it fits and ends by then,
  or takes devices that the promised job will not need (extra devices). A job that starts in the same decision counts as
  a running one.
- SRTF (Schrage 1968): a ranking by remaining time. LAS (Nuyens and Wierman 2008), by attained service in
  device-seconds, in steps of ten device-minutes; one that has not run as long as its start took, or would lose all that
  it did since, keeps its devices. Tiresias (Gu et al., NSDI 2019): two queues by attained service, each in the order in
  which jobs came to it (in its simulator, and Pollux's, a list to whose end they are put).
  In the order of a ranking, jobs are given devices as long as there are some (both simulators do so too). A job that
  runs stays where it is, else takes what no later job holds, else what later jobs must give up.

Machines are pools of equal devices; a gang is in one pool, and goes to the kind that it names, then to the fastest, of
those that have memory for it. A pool that serves inference is not to be had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

GPU_HOURS_16 = 16 * 3600
TEN_MINUTES = 600


@dataclass(frozen=True)
class Pool:
    kind: str
    devices: int
    speed: Fraction = Fraction(1)
    serves: bool = False
    memory: float = math.inf


@dataclass
class Job:
    index: int
    submit: int
    work: int
    gang: int
    kind: str = ""
    memory: float = 0.0
    pool: int | None = None  # what it holds
    done: Fraction = Fraction(0)  # work
    saved: Fraction = Fraction(0)  # work in its last checkpoint
    served: Fraction = Fraction(0)  # device-seconds
    begun: Fraction = Fraction(0)  # when it got what it holds
    ready: Fraction = Fraction(0)  # no progress before
    started: Fraction | None = None
    finished: Fraction | None = None
    stops: int = 0
    moves: int = 0
    demoted: Fraction | None = None  # when it came to the second queue of Tiresias


@dataclass
class Simulator:
    pools: Sequence[Pool]
    policy: str
    tick: int  # seconds between decisions of a policy that preempts
    restart: int = 60  # seconds until a job that was stopped goes on
    move: int = 30  # seconds until a job that is moved goes on
    checkpoint: int = 1800  # seconds of running between checkpoints
    notice: bool = True  # a preempted job saves first
    now: Fraction = Fraction(0)
    active: list[Job] = field(default_factory=list)

    def play(self, jobs: Sequence[Job]) -> None:
        """Every job to its end."""
        coming = sorted(jobs, key=lambda job: (job.submit, job.index))
        decide: Callable[[], None] = {
            "fifo": self.fifo, "sjf": self.sjf, "backfill": self.easy, "srtf": self.ranked, "las": self.ranked,
            "tiresias": self.ranked,
        }[self.policy]  # fmt: skip
        while coming or self.active:
            moments = [Fraction(job.submit) for job in coming[:1]] + [self.end(job) for job in self.running()]
            if self.ranks and self.waiting():
                moments.append(Fraction(self.tick * (self.now // self.tick + 1)))
            self.advance(min(moments))
            self.active = [job for job in self.active if job.finished is None]
            while coming and coming[0].submit <= self.now:
                self.active.append(coming.pop(0))
            if not self.ranks or self.now % self.tick == 0:
                decide()

    @property
    def ranks(self) -> bool:
        return self.policy in ("srtf", "las", "tiresias")

    def running(self) -> list[Job]:
        return [job for job in self.active if job.pool is not None]

    def waiting(self) -> list[Job]:
        return [job for job in self.active if job.pool is None]

    def end(self, job: Job) -> Fraction:
        """When a running job ends, if nobody stops it."""
        assert job.pool is not None
        return max(self.now, job.ready) + (job.work - job.done) / self.pools[job.pool].speed

    def advance(self, to: Fraction) -> None:
        for job in self.running():
            assert job.pool is not None
            before = job.served
            job.served += job.gang * (to - self.now)
            if before < GPU_HOURS_16 <= job.served:
                job.demoted = self.now + (GPU_HOURS_16 - before) / job.gang
            speed = self.pools[job.pool].speed
            if self.end(job) == to:
                job.finished = to
            job.done += max(to - max(self.now, job.ready), Fraction(0)) * speed
            assert job.done <= job.work
            if to - job.ready >= self.checkpoint:
                job.saved = job.done - speed * ((to - job.ready) % self.checkpoint)
        self.now = to

    def free(self, pool: int) -> int:
        return self.pools[pool].devices - sum(job.gang for job in self.active if job.pool == pool)

    def liked(self, job: Job) -> list[int]:
        """Pools to train on, the best first."""
        some = [i for i, pool in enumerate(self.pools) if not pool.serves and pool.memory >= job.memory]
        return sorted(some, key=lambda i: (self.pools[i].kind != job.kind, -self.pools[i].speed, i))

    def start(self, job: Job, pool: int) -> None:
        job.pool, job.begun = pool, self.now
        job.ready = self.now + (0 if job.started is None else self.restart)
        job.started = self.now if job.started is None else job.started

    def stop(self, job: Job) -> None:
        job.pool = None
        job.stops += 1
        job.done = job.saved = job.done if self.notice else job.saved

    # policies that do not preempt
    def fifo(self) -> None:
        for job in self.waiting():
            pool = next((p for p in self.liked(job) if self.free(p) >= job.gang), None)
            if pool is None:
                return
            self.start(job, pool)

    def sjf(self) -> None:
        for job in sorted(self.waiting(), key=lambda job: (job.work, job.submit, job.index)):
            pool = next((p for p in self.liked(job) if self.free(p) >= job.gang), None)
            if pool is not None:
                self.start(job, pool)

    def easy(self) -> None:
        self.fifo()
        if not self.waiting():
            return
        head, *others = self.waiting()
        shadow, where = min((self.shadow(head, p), n, p) for n, p in enumerate(self.liked(head)))[::2]
        for job in others:
            for pool in self.liked(job):
                if self.free(pool) < job.gang:
                    continue
                ends = self.now + Fraction(job.work) / self.pools[pool].speed
                if pool != where or ends <= shadow or job.gang <= self.extra(head, where, shadow):
                    self.start(job, pool)
                    break

    def shadow(self, head: Job, pool: int) -> Fraction | float:
        """When a pool will have enough devices for the head, if nothing else starts; never, in one that is smaller."""
        if self.pools[pool].devices < head.gang:
            return math.inf
        moments = sorted({self.end(job) for job in self.running()} | {self.now})
        return next(at for at in moments if self.free_at(pool, at) >= head.gang)

    def free_at(self, pool: int, at: Fraction | float) -> int:
        held = sum(job.gang for job in self.running() if job.pool == pool and self.end(job) > at)
        return self.pools[pool].devices - held

    def extra(self, head: Job, pool: int, shadow: Fraction | float) -> int:
        return self.free_at(pool, shadow) - head.gang

    # policies that rank all jobs and preempt
    def key(self, job: Job) -> tuple[Fraction | int, ...]:
        if self.policy == "srtf":
            return (job.work - job.done,)
        if self.policy == "las":
            return (job.served // TEN_MINUTES,)
        return (0,) if job.demoted is None else (1, job.demoted)

    def ranked(self) -> None:
        order = sorted(self.active, key=lambda job: (*self.key(job), job.submit, job.index))
        if self.policy == "las":
            held = [job for job in order if job.pool is not None and not self.may_stop(job)]
            order = held + [job for job in order if job not in held]
        left = [0 if pool.serves else pool.devices for pool in self.pools]
        choice: dict[int, int] = {}
        for rank, job in enumerate(order):
            later = [0] * len(self.pools)  # what jobs further down hold
            for other in order[rank + 1 :]:
                if other.pool is not None:
                    later[other.pool] += other.gang
            if job.pool is not None and left[job.pool] >= job.gang:
                pool: int | None = job.pool
            else:
                pool = next((p for p in self.liked(job) if left[p] - later[p] >= job.gang), None)
                if pool is None:
                    pool = next((p for p in self.liked(job) if left[p] >= job.gang), None)
            if pool is not None:
                choice[job.index] = pool
                left[pool] -= job.gang
        for job in order:
            if job.pool is not None and job.index not in choice:
                self.stop(job)
            elif job.pool is not None and choice[job.index] != job.pool:
                job.pool, job.begun, job.ready = choice[job.index], self.now, self.now + self.move
                job.saved = job.done
                job.moves += 1
        for job in order:
            if job.pool is None and job.index in choice:
                self.start(job, choice[job.index])

    def may_stop(self, job: Job) -> bool:
        ran = self.now - job.ready
        return ran > 0 and ran >= job.ready - job.begun and (self.notice or ran >= self.checkpoint)
