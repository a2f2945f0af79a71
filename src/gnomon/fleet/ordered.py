"""The fast way for policies that start jobs in a fixed order and never stop them, on one pool of equal nodes.

`replay_ordered` returns what the general replay would (a property test holds them together) and takes about a
hundredth of the time: jobs wait in one heap for each number of devices, nodes in one heap for each number of free ones.
Leaves out failures, elastic jobs, inference, MIG, and recording.
"""

from __future__ import annotations

import gc
from heapq import heapify, heappop, heappush

import numpy as np

from gnomon.errors import RunError
from gnomon.fleet.job import Trace
from gnomon.fleet.machines import Machines
from gnomon.fleet.result import Result
from gnomon.fleet.state import Policy

Nodes = int | tuple[tuple[int, int], ...]
"""Of a job: its node, or (node, devices) of several."""


def can_be_ordered(trace: Trace, machines: Machines, policy: Policy, *, plain: bool, known: object) -> bool:
    """Whether the fast way gives the result. plain: no rule but costs; known: forecasts that are not the curve."""
    one = len(machines.pools) == 1 and not machines.pools[0].mig and machines.pools[0].speed == 1.0
    if policy.order is None or not plain or not one or known is not None:
        return False
    return not any(job.slice for job in trace.jobs)


def replay_ordered(trace: Trace, machines: Machines, policy: Policy, *, first_start_s: float = 0.0) -> Result:
    """The Result of a policy with an `order`."""
    was = gc.isenabled()
    gc.disable()  # nothing here makes cycles, and the collector would walk all jobs again and again
    try:
        return _replay(trace, machines, policy, first_start_s)
    finally:
        if was:
            gc.enable()


def _replay(trace: Trace, machines: Machines, policy: Policy, first_start_s: float) -> Result:
    """One pass over arrivals and finishes in order of time; at each moment all that fits is started."""
    jobs = trace.jobs
    n = len(jobs)
    key = policy.order
    assert key is not None
    submit = [job.submit_s for job in jobs]
    work = [job.work_s + first_start_s for job in jobs]
    size = [job.devices for job in jobs]
    keys = [key(job) for job in jobs]
    finish, first = [0.0] * n, [0.0] * n
    levels = _levels(machines)
    per_node = machines.pools[0].per_node
    level_of = [per_node] * machines.pools[0].nodes
    free = total = machines.devices
    waiting: dict[int, list[tuple[float, int]]] = {count: [] for count in sorted(set(size))}
    queued = 0
    ends: list[tuple[float, int, Nodes]] = []
    backfill = policy.backfill
    now = idle = 0.0
    i = done = decisions = 0
    while done < n:
        # The next moment.
        if i < n and (not ends or submit[i] <= ends[0][0]):
            time = submit[i]
        elif ends:
            time = ends[0][0]
        else:
            raise RunError(f"policy {policy.name} never starts {queued:,} jobs")
        idle += free * (time - now)
        now = time
        while i < n and submit[i] == time:
            heappush(waiting[size[i]], (keys[i], i))
            queued += 1
            i += 1
        while ends and ends[0][0] == time:
            _, index, nodes = heappop(ends)
            finish[index] = time
            done += 1
            free += size[index]
            _give_back(levels, level_of, nodes, size[index])
        if not queued:
            continue
        decisions += 1
        while queued:
            best = None
            for count, heap in waiting.items():
                # Sizes ascend: no later one fits either. Without backfill the first in order waits for its devices, and
                # holds up all.
                if count > free and backfill:
                    break
                if heap and (best is None or heap[0] < best):
                    best, need = heap[0], count
            # The first in order does not fit, and nothing may pass it.
            if best is None or need > free:
                break
            heappop(waiting[need])
            queued -= 1
            index = best[1]
            first[index] = now
            heappush(ends, (now + work[index], index, _place(levels, level_of, per_node, need)))
            free -= need
    assert free == total
    used = sum(w * s for w, s in zip(work, size, strict=True))
    overhead = first_start_s * sum(size)
    started = np.array(first)
    return Result(
        policy=policy.name,
        jobs=jobs,
        machines=machines,
        finish_s=np.array(finish),
        first_s=started,
        waited_s=started - np.array(submit),
        preemptions=0,
        resizes=0,
        failures=0,
        device_s={
            "useful": used - overhead, "lost": 0.0, "overhead": overhead, "serving": 0.0, "down": 0.0, "idle": idle,
        },
        end_s=now,
        decisions=decisions,
    )  # fmt: skip


def _give_back(levels: list[list[int]], level_of: list[int], nodes: Nodes, size: int) -> None:
    """The devices of a job that ends are free again. nodes: one, or several with how many of each."""
    for node, count in ((nodes, size),) if isinstance(nodes, int) else nodes:
        free = level_of[node] + count
        level_of[node] = free
        heappush(levels[free], node)


def _place(levels: list[list[int]], level_of: list[int], per_node: int, need: int) -> Nodes:
    """Places a job by best fit: on the least free node that has room, the first of those; several where none has."""
    for level in range(need, per_node + 1):
        heap = levels[level]
        # Nodes are not taken out of a heap when their level changes; a stale entry is dropped when it comes up.
        while heap and level_of[heap[0]] != level:
            heappop(heap)
        if heap:
            node = heappop(heap)
            level_of[node] = level - need
            if level > need:
                heappush(levels[level - need], node)
            return node
    return _several(levels, level_of, per_node, need)


def _levels(machines: Machines) -> list[list[int]]:
    """Nodes by free devices; a node may be in a heap of an earlier level too, and is skipped there."""
    pool = machines.pools[0]
    levels: list[list[int]] = [[] for _ in range(pool.per_node + 1)]
    levels[pool.per_node] = list(range(pool.nodes))
    heapify(levels[pool.per_node])
    return levels


def _several(levels: list[list[int]], level_of: list[int], per_node: int, count: int) -> tuple[tuple[int, int], ...]:
    """Devices of several nodes, those with most free first."""
    out = []
    for level in range(per_node, 0, -1):
        heap = levels[level]
        while heap and count:
            node = heappop(heap)
            if level_of[node] != level:
                continue
            use = min(level, count)
            count -= use
            level_of[node] = level - use
            if level > use:
                heappush(levels[level - use], node)
            out.append((node, use))
    return tuple(out)
