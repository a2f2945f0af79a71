"""What a controller is told and what it answers: `JobProcesses`, `Decision` and `AfterLoss`.

Processes have numbers that are never given again. Leaves out how these things come to be known.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProcesses:
    """The processes of a job at one moment."""

    there: tuple[int, ...]
    """Processes that run and are to stay."""
    ready: tuple[int, ...]
    """Those of them that have loaded everything."""
    members: tuple[int, ...] = ()
    """Processes that the last decision named, in its order; none before the first."""
    asked: int = 0
    """Processes that are wanted; 0 where the plan says it."""
    ranks: tuple[int, ...] = ()
    """Rank that each process of `there` was started for; none for logical workers."""
    speeds: tuple[float, ...] = ()
    """Of each member, since the last decision; none until all are known, or where nobody asks."""
    parted: bool = False
    """Whether all members have lost touch with each other since the last decision."""
    met: bool = True
    """Whether all members train since the last decision."""
    lost: tuple[int, ...] = ()
    """Ranks whose state was in no memory at the last decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who trains from now on."""

    members: tuple[int, ...]
    """Processes, in the order of their places."""
    plan: Plan
    """Its placement gives each rank, or logical worker, a place among them."""
    lost: tuple[int, ...] = ()
    """Ranks whose state is in no memory: all wait until every place is taken, and begin from a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterLoss:
    """What the launcher does when it has lost a process."""

    goes_on: bool
    """Whether the job can go on."""
    starts: int
    """Processes that it starts now."""
    restarts: int
    """Times that a process may be replaced after this."""
    wanted: int
    """Processes that are wanted from now on; 0 where the plan says it."""
    message: str
    """What it tells of the others and of the lost one's place."""
