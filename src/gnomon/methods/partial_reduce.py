"""Partial Reduce: data-parallel workers average their models in groups of those that are ready (Miao et al., SIGMOD
2021).

A worker trains a step on its own copy of the model and arrives at the `TicketController`, which groups the first
`group` workers that wait; these average their parameters and go on, while slower ones still compute. No worker waits
for the slowest one. Every microbatch of the data is given out once, as a ticket, to whoever is next. At a meeting
(before a checkpoint, and at the end) all workers average parameters and optimizer states. `replay` plays the same
controller on workers of given speeds. Another mathematics than an all-reduce of gradients, so results differ
statistically.

Two guards of the paper: workers that have met no one else lately are put together with others (`grouped`), and with
`weights = dynamic` a model that is behind counts less (the form of that weight is ours). Leaves out processes
(`runtime.launch.partial_reduce`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gnomon.errors import PlanError
from gnomon.methods.easyscale import reason as no_replicas
from gnomon.methods.method import Method, Param
from gnomon.plans import Plan

NAME = "partial_reduce"

RECENT = 8
"""Times the number of workers: the last groups that say who has met whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialReduceSettings:
    """What the plan asks for."""

    workers: int
    """Data-parallel ranks."""
    group: int
    """Workers that average at a time; all of them: an ordinary average in every step."""
    weights: str = "constant"
    """`constant`: all alike; `dynamic`: a model that is k updates behind the newest of its group counts 1 / (1 + k)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a grouping depends on."""

    waiting: tuple[int, ...]
    """Workers that are ready, in the order in which they came."""
    recent: tuple[tuple[int, ...], ...] = ()
    """Groups so far, the newest last; RECENT times the number of workers are enough."""


def grouped(settings: PartialReduceSettings, observation: Observation) -> tuple[int, ...] | None:
    """The workers that average now, in order of their numbers; None while too few wait. Depends on nothing else.

    The first that wait, unless the recent groups leave workers apart whose models no chain of averages joins: then the
    first one waits for a worker of another part.
    """
    waiting = observation.waiting
    if len(waiting) < settings.group:
        return None
    chosen = list(waiting[: settings.group])
    recent = observation.recent[-RECENT * settings.workers :]
    # Fewer groups may leave workers apart for no other reason than that they are few.
    if len(recent) == RECENT * settings.workers:
        part = components(settings.workers, recent)
        if len(set(part)) > 1 and len({part[worker] for worker in chosen}) == 1:
            other = next((worker for worker in waiting if part[worker] != part[waiting[0]]), None)
            if other is None:
                return None
            # The last of the group gives way, so that the worker that has waited longest still goes on.
            chosen[-1] = other
    return tuple(sorted(chosen))


def components(workers: int, groups: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Returns, for each worker, the least worker that a chain of groups joins it to."""
    part = list(range(workers))
    for group in groups:
        # A part is named by its least worker. A group joins all parts that it touches, so one pass over the groups is
        # enough.
        ends = {part[worker] for worker in group}
        part = [min(ends) if end in ends else end for end in part]
    return tuple(part)


def shares(settings: PartialReduceSettings, updates: Sequence[int]) -> tuple[float, ...]:
    """The weight of each model of a group, which add up to 1. updates: behind each model."""
    if settings.weights == "constant":
        return (1 / len(updates),) * len(updates)
    counts = [1 / (1 + max(updates) - one) for one in updates]
    return tuple(count / sum(counts) for count in counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A worker that has trained its ticket, or just started (ticket -1)."""

    worker: int
    """Number of the worker."""
    updates: int = 0
    """Behind its model."""
    ticket: int = -1
    """The ticket that it trained; -1: none yet."""
    ends: bool = False
    """It was asked to end: no more tickets are given out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a worker does next."""

    group: tuple[int, ...]
    """Workers whose models it averages with, itself among them."""
    shares: tuple[float, ...]
    """Of each, its weight."""
    updates: int
    """Behind the average."""
    ticket: int
    """What it trains then; -1: nothing more."""
    meeting: int = -1
    """Steps behind all, where all workers meet; -1: this is an ordinary group."""


class TicketController:
    """Gives out tickets and groups in the order of arrivals, on which alone they depend."""

    def __init__(self, settings: PartialReduceSettings, *, steps: int, done: int = 0, meet_every: int = 0) -> None:
        """steps: of the whole job; a step is a ticket for each worker. done: those behind it. meet_every: steps between
        two meetings; 0 for none but the last."""
        self.settings, self.steps, self.meet_every = settings, steps, meet_every or steps
        self.tickets = done * settings.workers
        """Tickets so far."""
        self.until = self._next_meeting()
        self.groups: list[tuple[int, ...]] = []
        self.waiting: list[Arrival] = []
        self.ends = False

    def _next_meeting(self) -> int:
        """Tickets that are given out before it."""
        step = (self.tickets // self.settings.workers // self.meet_every + 1) * self.meet_every
        return min(self.steps, step) * self.settings.workers

    def arrive(self, arrival: Arrival) -> dict[int, Reply]:
        """Replies to the workers that need not wait any longer, by their numbers."""
        # No ticket is given out any more, so that all workers come to the meeting as they finish theirs.
        if arrival.ends:
            self.ends, self.until = True, self.tickets
        self.waiting.append(arrival)
        replies: dict[int, Reply] = {}
        if arrival.ticket < 0:
            self._begin(replies)
            return replies
        while self.tickets < self.until and (group := self._next_group()):
            self._release(group, replies)
        if len(self.waiting) == self.settings.workers:
            self._meet(replies)
        return replies

    def _begin(self, replies: dict[int, Reply]) -> None:
        """Answers all workers once all have started: there is nothing to average yet."""
        if len(self.waiting) == self.settings.workers:
            for arrival in sorted(self.waiting, key=lambda one: one.worker):
                self._release([arrival], replies)

    def _next_group(self) -> list[Arrival]:
        """Workers that go on now; the last tickets before a meeting, too few for a group, are trained without one."""
        if self.until - self.tickets < self.settings.group:
            return self.waiting[:1]
        observed = Observation(
            waiting=tuple(arrival.worker for arrival in self.waiting),
            recent=tuple(self.groups[-RECENT * self.settings.workers :]),
        )
        chosen = grouped(self.settings, observed)
        if chosen is None:
            return []
        self.groups.append(chosen)
        return sorted((one for one in self.waiting if one.worker in chosen), key=lambda one: one.worker)

    def _release(self, group: Sequence[Arrival], replies: dict[int, Reply]) -> None:
        """The group averages, and each of it has another ticket."""
        members = tuple(arrival.worker for arrival in group)
        updates = [arrival.updates for arrival in group]
        weights = shares(self.settings, updates)
        for arrival in group:
            self.waiting.remove(arrival)
            # The average counts as new as the newest model in it: the others have jumped to it.
            replies[arrival.worker] = Reply(group=members, shares=weights, updates=max(updates), ticket=self.tickets)
            self.tickets += 1

    def _meet(self, replies: dict[int, Reply]) -> None:
        """Answers all workers once all wait: they average, and go on unless it was the end."""
        # After an end that was asked for the tickets may be no multiple of the workers: a step that is cut short does
        # not count.
        step, workers = self.tickets // self.settings.workers, self.settings.workers
        over = self.ends or step == self.steps
        self.until = self.tickets if over else self._next_meeting()
        updates = max(arrival.updates for arrival in self.waiting)
        self.waiting.clear()
        for worker in range(workers):
            ticket = -1 if over else self.tickets
            self.tickets += not over
            replies[worker] = Reply(
                group=tuple(range(workers)),
                shares=(1 / workers,) * workers,
                updates=updates,
                ticket=ticket,
                meeting=step,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How workers of given speeds would have gone."""

    seconds: float
    """Until the last meeting."""
    groups: tuple[tuple[int, ...], ...]
    """The workers that averaged together, meeting by meeting."""
    tickets: tuple[int, ...]
    """Trained by each worker."""


def replay(settings: PartialReduceSettings, step_s: Sequence[float], *, steps: int, average_s: float = 0.0) -> Replay:
    """Plays the controller on workers that take `step_s[worker]` seconds for a ticket and `average_s` for an average.
    PlanError unless every worker has a time."""
    if len(step_s) != settings.workers or not all(seconds > 0 for seconds in step_s):
        raise PlanError(f"step_s must give each of {settings.workers} workers its seconds, not {tuple(step_s)}")
    controller, trained = TicketController(settings, steps=steps), [0] * settings.workers
    # Each worker has one arrival in the heap at most. So (time, worker) differ, and an Arrival, which has no order, is
    # never compared.
    arrivals = [(0.0, worker, Arrival(worker=worker)) for worker in range(settings.workers)]
    now = 0.0
    while arrivals:
        now, _, arrival = heapq.heappop(arrivals)
        for worker, reply in controller.arrive(arrival).items():
            if reply.ticket >= 0:
                trained[worker] += 1
                took = step_s[worker] + (average_s if len(reply.group) > 1 else 0.0)
                then = Arrival(worker=worker, updates=reply.updates + 1, ticket=reply.ticket)
                heapq.heappush(arrivals, (now + took, worker, then))
    return Replay(seconds=now + average_s, groups=tuple(controller.groups), tickets=tuple(trained))


def settings_of(plan: Plan) -> PartialReduceSettings:
    """What a plan that names the method asks for. PlanError for a plan that cannot have it."""
    method_used = next(one for one in plan.schedule.passes if one.name == NAME)
    read = METHOD.parameters_of(method_used)
    return PartialReduceSettings(workers=plan.world_size, group=int(read["group"]), weights=str(read["weights"]))


def _refusal(plan: Plan) -> str | None:
    if (why := no_replicas(replace(plan, schedule=replace(plan.schedule, passes=())))) is not None:
        return why
    if others := [one.name for one in plan.schedule.passes if one.name != NAME]:
        return f"{others[0]} rewrites the rows of its ranks; leave it out"
    if plan.placement:
        return "its workers have a process each; leave placement (--processes) out"
    if plan.world_size < 2:
        return "it has one worker; use dp_replicate of 2 or more"
    group = settings_of(plan).group
    if not 2 <= group <= plan.world_size:
        return f"groups of {group} are made of {plan.world_size} workers; use 2 to {plan.world_size}"
    if plan.precision.compute == "fp16":
        return "a loss scale is not averaged; use bf16 or fp32"
    return None


_UNPRICED = "the rows of a step depend on which worker is ready first; replay() plays its controller on given speeds"

METHOD = Method(
    name=NAME,
    paper="Partial Reduce, Miao et al., SIGMOD 2021",
    about="workers average their models in groups of those that are ready, so that none waits for the slowest",
    switch="schedule.passes",
    exactness="statistical",
    missing={"rewritten": _UNPRICED, "planned": _UNPRICED, "predicted": _UNPRICED},
    params=(
        Param(name="group", about="workers that average at a time", default=2),
        Param(
            name="weights",
            about="how models count: all alike, or less where they are behind",
            default="constant",
            choices=("constant", "dynamic"),
        ),
    ),
    refusal=_refusal,
)
