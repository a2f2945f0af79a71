"""A launcher in simulated time: it sees what happens to processes, asks the job's controller, and acts on the answer.

`SimulatedLauncher.happens` takes an incident (a process started, was lost, …), and `look` is one turn of a launcher's
loop: it has the controller decide, carries the decision out at once, and returns both. `incidents(trace)` are those
of a recorded run, and `replayed(trace)` the decisions that follow from them, which a test compares with the recorded
ones. Leaves out seconds of steps (`fleet.spot`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from gnomon.control.controllers import CONTROLLERS, surplus
from gnomon.control.seen import Decision, JobProcesses
from gnomon.control.trace import NONE, ControlTrace, Look
from gnomon.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What happens to a job."""

    what: Literal["came", "ready", "lost", "asked", "speeds", "parted", "met"]
    """`came`: a process was started. `ready`: it can take part. `lost`: it ended. `asked`: another number of
    processes is wanted. `speeds`: of members, measured anew. `parted`: members lost their connections, though all
    live. `met`: the rendezvous is over and all members train."""
    process: int = -1
    """The process of `came`, `ready` and `lost`."""
    rank: int = -1
    """The rank that a process which came was started for; -1 for logical workers."""
    number: int = 0
    """How many processes are wanted, of `asked`."""
    speeds: tuple[float, ...] = ()
    """Of each member, as `JobProcesses.speeds`."""


class SimulatedLauncher:
    """The launcher of one job."""

    def __init__(self, controller: str, plan: Plan, *, restarts: int = 0, requested: int = 0) -> None:
        """controller: of `CONTROLLERS`. restarts: processes that may be replaced. requested: processes of logical
        workers."""
        self.controller, self.plan, self.restarts = CONTROLLERS[controller], plan, restarts
        self.seen = replace(NONE, asked=requested)

    def happens(self, incident: Incident) -> None:
        """Lets something happen to the job, before the next look."""
        seen, one = self.seen, incident.process
        if incident.what == "came":
            ranks = (*seen.ranks, incident.rank) if incident.rank >= 0 else ()
            self.seen = replace(seen, there=(*seen.there, one), ranks=ranks)
        elif incident.what == "ready":
            # In the order of `there`, as the launcher lists them.
            self.seen = replace(seen, ready=tuple(p for p in seen.there if p in seen.ready or p == one))
        elif incident.what == "lost":
            # First: `after_loss` is given what is seen without the lost process.
            self._leave({one})
            # A controller that replaces processes spends a restart on it; one that shrinks lowers the number wanted.
            after = self.controller.after_loss(self.seen, self.restarts)
            self.restarts, self.seen = after.restarts, replace(self.seen, asked=after.wanted)
        elif incident.what == "asked":
            self.seen = replace(seen, asked=incident.number)
        elif incident.what == "speeds":
            self.seen = replace(seen, speeds=incident.speeds)
        elif incident.what == "parted":
            self.seen = replace(seen, parted=True)
        elif incident.what == "met":
            self.seen = replace(seen, met=True)
        else:
            assert_never(incident.what)

    def look(self) -> tuple[JobProcesses, Decision | None]:
        """What is seen, and what the controller decides of it: carried out before this returns."""
        seen = self.seen
        decision = self.controller.decide(self.plan, seen)
        self._leave(set(surplus(seen)))  # processes that came too many are ended, whatever is decided
        if decision is not None:
            self._leave(set(seen.members) - set(decision.members))
            self.plan = decision.plan
            self.seen = replace(
                self.seen, members=decision.members, lost=decision.lost, speeds=(), parted=False, met=False
            )
        return seen, decision

    def _leave(self, processes: set[int]) -> None:
        seen = self.seen
        stay = [at for at, one in enumerate(seen.there) if one not in processes]
        self.seen = replace(
            seen,
            there=tuple(seen.there[at] for at in stay),
            ranks=tuple(seen.ranks[at] for at in stay) if seen.ranks else (),
            ready=tuple(one for one in seen.ready if one not in processes),
        )


def incidents(trace: ControlTrace) -> Iterator[tuple[Look, tuple[Incident, ...]]]:
    """Each look of a trace with what had happened since the one before."""
    requested = trace.looks[0].seen.asked if trace.looks else 0
    simulated = SimulatedLauncher(trace.controller, trace.plan, restarts=trace.restarts, requested=requested)
    for look in trace.looks:
        happened = tuple(_between(simulated.seen, look.seen))
        for one in happened:
            simulated.happens(one)
        # Last: a loss may have changed the number by itself.
        if simulated.seen.asked != look.seen.asked:
            incident = Incident(what="asked", number=look.seen.asked)
            simulated.happens(incident)
            happened += (incident,)
        # Only for what follows from it: members, and processes that are ended. Whether the decision is the recorded
        # one is for who replays.
        simulated.look()
        yield look, happened


def replayed(trace: ControlTrace) -> Sequence[tuple[JobProcesses, Decision | None]]:
    """What a simulated launcher sees and decides at each look of a trace, told only what happened to the processes."""
    requested = trace.looks[0].seen.asked if trace.looks else 0
    simulated = SimulatedLauncher(trace.controller, trace.plan, restarts=trace.restarts, requested=requested)
    played = []
    for _, happened in incidents(trace):
        for one in happened:
            simulated.happens(one)
        played.append(simulated.look())
    return played


def _between(before: JobProcesses, now: JobProcesses) -> Iterator[Incident]:
    """What makes one of the other, but for the number that is asked for."""
    for one in before.there:
        if one not in now.there:
            yield Incident(what="lost", process=one)
    for at, one in enumerate(now.there):
        if one not in before.there:
            yield Incident(what="came", process=one, rank=now.ranks[at] if now.ranks else -1)
    for one in now.ready:
        if one not in before.ready:
            yield Incident(what="ready", process=one)
    # Speeds, `parted` and `met` are taken back by decisions alone, which the simulated launcher carries out itself:
    # what happens to a job only sets them.
    if now.speeds and now.speeds != before.speeds:
        yield Incident(what="speeds", speeds=now.speeds)
    if now.parted and not before.parted:
        yield Incident(what="parted")
    if now.met and not before.met:
        yield Incident(what="met")
