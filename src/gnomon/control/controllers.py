"""The controllers: of logical workers, of ranks that are replaced, and of ranks that another one takes over.

`CONTROLLERS[name]` is a value of pure functions. `decide(plan, seen)` is the decision that follows, or None where all
goes on as it is; plan: the one in force, whose placement the last decision gave. `after_loss(seen, restarts)` is what
the launcher does about a lost process. Each depends on nothing else, so that a recorded `JobProcesses` gives the same
decision again. Where workers go is `methods.easyscale`'s. Leaves out acting on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gnomon.control.seen import AfterLoss, Decision, JobProcesses
from gnomon.methods.easyscale import Observation, move_workers, place_workers
from gnomon.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """Who trains when processes of a job are lost, come or are slow."""

    ranked: bool
    """Whether each process is started for one rank of the plan; else processes are alike, and any takes any workers."""
    begin: Callable[[Plan], tuple[Plan, int]]
    """The plan in force at the start, and the processes to start."""
    decide: Callable[[Plan, JobProcesses], Decision | None]
    """Who trains from now on; None where all goes on as it is."""
    after_loss: Callable[[JobProcesses, int], AfterLoss]
    """From what is seen without the lost process, and the times that one may still be replaced."""


# --- logical workers


def _begin_workers(plan: Plan) -> tuple[Plan, int]:
    """Begins with as many processes as the placement names; which workers they begin with is EasyScale's choice."""
    processes = max(plan.device_of) + 1
    return place_workers(plan, Observation(processes=processes)), processes


def logical_workers(plan: Plan, seen: JobProcesses) -> Decision | None:
    """Decides as EasyScale does. Where no process is lost, training goes on at once; a requested change waits until all
    that were started are ready. Workers move to faster processes where speeds are seen."""
    # In order of their numbers: those that have been there longest stay.
    members = seen.ready[: seen.asked]
    if not members:
        return None
    # Speeds are of the members of now, and say nothing of others.
    observed = Observation(processes=len(members), speeds=seen.speeds if members == seen.members else ())
    if members != seen.members:
        # A member is lost: nobody waits for processes that still load.
        broken = not set(seen.members) <= set(seen.there)
        if not broken and len(seen.ready) < len(seen.there):
            return None
        return Decision(members=members, plan=place_workers(plan, observed))
    if seen.parted:
        return Decision(members=members, plan=plan)
    better = move_workers(plan, observed) if seen.speeds else plan
    return None if better == plan else Decision(members=members, plan=better)


def _after_loss_of_worker(seen: JobProcesses, restarts: int) -> AfterLoss:
    """Those left go on; one fewer is wanted where no other may be started."""
    others = len(seen.there)
    who = "1 other goes" if others == 1 else f"{others} others go"
    goes_on = f"{who} on with its workers" if others else "none is left"
    if restarts:
        restarts_left = restarts - 1
        return AfterLoss(
            goes_on=True,
            starts=1,
            restarts=restarts_left,
            wanted=seen.asked,
            message=f"{goes_on}; another is started ({restarts_left} left)",
        )
    stays = f"{goes_on}; its workers stay with the others"
    # Never 0, which would mean that the plan says how many.
    return AfterLoss(goes_on=True, starts=0, restarts=0, wanted=max(1, seen.asked - 1), message=stays)


def surplus(seen: JobProcesses) -> tuple[int, ...]:
    """Processes that wait for a decision which will not name them."""
    if not seen.asked:
        return ()
    return tuple(one for one in seen.ready[seen.asked :] if one not in seen.members)


# --- a process for each rank


def _begin_ranks(plan: Plan) -> tuple[Plan, int]:
    return plan, plan.world_size


def same_ranks(plan: Plan, seen: JobProcesses) -> Decision | None:
    """Decides for checkpoints in memory: every rank trains in the newest process that was started for it, once all are
    ready."""
    # Later processes overwrite earlier ones of the same rank: the newest counts.
    holder = dict(zip(seen.ranks, seen.there, strict=True))
    if len(holder) < plan.world_size or not set(holder.values()) <= set(seen.ready):
        return None
    members = tuple(holder[rank] for rank in range(plan.world_size))
    return Decision(members=members, plan=plan) if members != seen.members or seen.parted else None


def _after_loss_of_rank(seen: JobProcesses, restarts: int) -> AfterLoss:
    """Nobody can go on without a rank: another process takes its place, or the job ends."""
    restarts_left = max(0, restarts - 1)
    after = f"the others stay, and another process takes its place ({restarts_left} left)"
    return AfterLoss(goes_on=restarts > 0, starts=min(1, restarts), restarts=restarts_left, wanted=0, message=after)


def takeover(plan: Plan, seen: JobProcesses) -> Decision | None:
    """Decides as Bamboo does: the processes left go on at once, and the holder of a lost rank's copy does its work; one
    that comes in its place is given its work and its copy when the others have met."""
    # As in `same_ranks` the newest process of a rank counts, here of those that are ready.
    home = {rank: one for rank, one in zip(seen.ranks, seen.there, strict=True) if one in seen.ready}
    members = tuple(home[rank] for rank in sorted(home))
    if not members or (not seen.members and len(members) < plan.world_size):
        return None
    if seen.members:
        gone = not set(seen.members) <= set(members)
        # Newcomers wait until the others have met, or two meetings would follow each other at once; a loss waits for
        # nothing.
        if (members == seen.members and not seen.parted) or (members != seen.members and not gone and not seen.met):
            return None
    does, lost = _does(plan, seen, home)
    # Where a state is lost all begin anew in their own places, so the placement does not matter yet.
    placement = plan.placement if lost else tuple(members.index(does[rank]) for rank in range(plan.world_size))
    return Decision(members=members, plan=replace(plan, placement=placement), lost=lost)


def _does(plan: Plan, seen: JobProcesses, home: Mapping[int, int]) -> tuple[dict[int, int], tuple[int, ...]]:
    """Process that does each rank's work, and ranks whose state none has. home: the process started for each rank, of
    those that are ready."""
    ranks = range(plan.world_size)
    if not seen.members or seen.lost:  # nobody has any state
        missing = tuple(rank for rank in ranks if rank not in home)
        return dict(home), missing
    # has: the process that does each rank's work by the plan in force, which may do another rank's beside its own.
    has, before = {rank: seen.members[place] for rank, place in enumerate(plan.device_of)}, keepers(plan)
    copies = {rank: home.get(before[rank]) for rank in ranks}
    does, lost = dict[int, int](), list[int]()
    for rank in ranks:
        copy = copies[rank]
        if has[rank] in home.values():
            # Its own process, where that is there again; else who has done it so far.
            does[rank] = home.get(rank, has[rank])
        # A copy in a process that has just come is empty, and one in the lost process is lost with it.
        elif copy in seen.members and copy != has[rank] and copy is not None:
            does[rank] = home.get(rank, copy)
        else:
            lost.append(rank)
    return does, tuple(lost)


def keepers(plan: Plan) -> dict[int, int]:
    """Rank -> the one before it in its replica, which has a copy of its stage; the last has that of the first."""
    by_stage = dict(zip(plan.pipeline_ranks, plan.stage_ranks, strict=True))
    stages = [by_stage[stage] for stage in range(plan.num_pipeline_ranks)]
    return {
        rank: stages[(stage - 1) % len(stages)][position]
        for stage, ranks in enumerate(stages)
        for position, rank in enumerate(ranks)
    }


def _after_loss_of_stage(seen: JobProcesses, restarts: int) -> AfterLoss:
    """Those left go on, if they have begun; another comes if that may be."""
    restarts_left = max(0, restarts - 1)
    after = f"another process takes its place ({restarts_left} left)" if restarts else "no other one takes its place"
    return AfterLoss(
        # Before the first decision nobody has any state, so nobody can take over: then only another process helps.
        goes_on=restarts > 0 or (bool(seen.members) and bool(seen.there)),
        starts=min(1, restarts),
        restarts=restarts_left,
        wanted=0,
        message=f"the others go on without it, and {after}",
    )


CONTROLLERS: Mapping[str, Controller] = {
    "logical_workers": Controller(
        ranked=False, begin=_begin_workers, decide=logical_workers, after_loss=_after_loss_of_worker
    ),
    "same_ranks": Controller(ranked=True, begin=_begin_ranks, decide=same_ranks, after_loss=_after_loss_of_rank),
    "takeover": Controller(ranked=True, begin=_begin_ranks, decide=takeover, after_loss=_after_loss_of_stage),
}
