"""Where a gang of devices goes: the node that it fills best, else as few nodes as hold it.

Pure: `place` returns an allocation, or None; `take` and `give` change a list of free devices that is the caller's own.
Sources: best fit as in Kubernetes' and Slurm's packing; Gandiva (OSDI'18) for jobs that spread over nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from gnomon.fleet.job import Job
from gnomon.fleet.machines import Machines
from gnomon.fleet.state import Active, Allocation, Decision, Forecasts, State


def place(free: Sequence[int], nodes: Sequence[int], count: int, most_nodes: int = 0) -> Allocation | None:
    """Devices for a job of `count` among `nodes`.

    One node if any has room: the one with the least left over, then the first. Otherwise the nodes with most free
    devices. most_nodes: on no more than so many; 0 for any number.
    """
    best, room = -1, 0
    for node in nodes:
        have = free[node]
        if have >= count and (best < 0 or have < room):
            best, room = node, have
            # No fit is better than an exact one.
            if have == count:
                break
    if best >= 0:
        return ((best, count),)
    # Most free first gives the fewest nodes.
    order = sorted((node for node in nodes if free[node]), key=lambda node: (-free[node], node))
    out = []
    remaining = count
    for node in order:
        use = min(free[node], remaining)
        out.append((node, use))
        remaining -= use
        if not remaining:
            return None if most_nodes and len(out) > most_nodes else tuple(out)
    return None


def snug(free: Sequence[int], nodes: Sequence[int], count: int) -> Allocation | None:
    """Devices of as few nodes as hold a job, where the rest of a job on several nodes goes on the node that it fills
    best, so that whole nodes are left for others."""
    out: list[tuple[int, int]] = []
    room = {node: free[node] for node in nodes if free[node]}
    remaining = count
    while remaining:
        if not room:
            return None
        enough = [node for node, have in room.items() if have >= remaining]
        node = min(enough, key=lambda n: (room[n], n)) if enough else max(room, key=lambda n: (room[n], -n))
        use = min(room.pop(node), remaining)
        out.append((node, use))
        remaining -= use
    return tuple(out)


def fit(state: State, forecasts: Forecasts, free: Sequence[int], job: Job, count: int) -> Allocation | None:
    """Devices for a job in one of the training pools that `usable` names, the first that has room."""
    for index in usable(state, forecasts, job, count):
        allocation = within(state, free, index, count)
        if allocation is not None:
            return allocation
    return None


def within(state: State, free: Sequence[int], pool: int, count: int) -> Allocation | None:
    """Devices of one pool for a job of `count`, on no more nodes than it needs where the rules say so."""
    most = 0 if state.spread else -(-count // state.machines.pools[pool].per_node)
    return place(free, state.machines.nodes_of(pool), count, most)


def usable(state: State, forecasts: Forecasts, job: Job, count: int) -> Sequence[int]:
    """Training pools whose devices a job can use on `count` of them: enough of them, with memory for it. Of its own
    kind of device first, then the fastest."""
    return _usable(state.machines, job.device, count, forecasts.memory_bytes(job, count))


def decisions_for(state: State, jobs: Sequence[Active], picks: Mapping[str, tuple[int, int]]) -> Sequence[Decision]:
    """Decisions that give every job the number of devices of the pool that was chosen for it, and none to the others.

    Jobs that have such devices keep them; the largest of the others are placed first. picks: by id, (pool, devices),
    within what each pool has.
    """
    free, changed, out = list(state.free), [], []
    for active in jobs:
        pick = picks.get(active.job.id)
        now = (state.machines.pool_of[active.allocation[0][0]], active.devices) if active.allocation else None
        if pick == now:
            continue
        give(free, active.allocation)
        if pick is None:
            out.append(Decision(active.job.id, ()))
        else:
            changed.append((active, pick))
    # The largest first, while whole nodes are left.
    for active, (pool, count) in sorted(changed, key=lambda pair: (-pair[1][1], pair[0].index)):
        allocation = place(free, state.machines.nodes_of(pool), count)
        assert allocation is not None, "no pool was given more than it has"
        take(free, allocation)
        out.append(Decision(active.job.id, allocation))
    return out


def emptiest(free: Sequence[int], nodes: Sequence[int], count: int) -> Allocation | None:
    """Devices of the nodes with most free ones, whatever is left over, as the schedulers of Pollux's artifact do."""
    room = {node: free[node] for node in nodes if free[node]}
    out = []
    while count:
        if not room:
            return None
        node = max(room, key=lambda candidate: (room[candidate], -candidate))
        use = min(room.pop(node), count)
        out.append((node, use))
        count -= use
    return tuple(out)


@lru_cache(maxsize=65536)
def _usable(cluster: Machines, device: str, count: int, memory_bytes: float) -> tuple[int, ...]:
    pools = cluster.pools
    some = [i for i, p in enumerate(pools) if not p.serves and p.devices >= count and p.memory_bytes >= memory_bytes]
    return tuple(sorted(some, key=lambda i: (pools[i].device != device, -pools[i].speed, i)))


def take(free: list[int], allocation: Allocation) -> None:
    """Mark an allocation as used."""
    for node, count in allocation:
        free[node] -= count


def give(free: list[int], allocation: Allocation) -> None:
    """Mark an allocation as free."""
    for node, count in allocation:
        free[node] += count
