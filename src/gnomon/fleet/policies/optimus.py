"""Optimus: every job gets its fewest devices, and each further one goes where it shortens the time that is left most.

The remaining time of each job is foretold (the artifact of Pollux gives it the truth, "Optimus+Oracle"). Source: Peng
et al., EuroSys 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from gnomon.fleet.placement import emptiest, give, take
from gnomon.fleet.state import Active, Allocation, Decision, Forecasts, Policy, State


def optimus(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Devices by marginal gain; those with a new number are placed anew, the smallest first."""
    nodes = [n for i, p in enumerate(state.machines.pools) if not p.serves for n in state.machines.nodes_of(i)]
    jobs = sorted((*state.queue, *state.running), key=lambda active: active.index)
    free = sum(state.free[n] for n in nodes) + sum(active.devices for active in state.running)
    per_node = max(state.machines.capacity)
    limits = {active.job.id: forecasts.limits(active.job) for active in jobs}
    counts: dict[str, int] = {}
    heap: list[tuple[float, int, Active]] = []
    for active in jobs:
        counts[active.job.id] = 0
        fewest = limits[active.job.id][0]
        if fewest <= free:
            counts[active.job.id] = fewest
            free -= fewest
            heap.append((0.0, active.index, active))

    def gain(active: Active) -> float:
        count = counts[active.job.id]
        if count + 1 > limits[active.job.id][1]:
            return 0.0
        done = active.done_at(state.now)
        before, after = (
            forecasts.remaining_s(active.job, done, _packed(n, per_node, nodes[0])) for n in (count, count + 1)
        )
        return before - after

    # Greedy is best while each further device gains less than the one before.
    heap = [(-gain(active), index, active) for _, index, active in heap]
    heapify(heap)
    while free and heap:
        least, index, active = heappop(heap)
        # The best gain is none: more devices would only be held.
        if least >= 0:
            break
        counts[active.job.id] += 1
        free -= 1
        heappush(heap, (-gain(active), index, active))
    return _placed(state, jobs, counts, nodes)


def _packed(count: int, per_node: int, node: int) -> Allocation:
    full, rest = divmod(count, per_node)
    return tuple((node, per_node) for _ in range(full)) + (((node, rest),) if rest else ())


def _placed(state: State, jobs: Sequence[Active], counts: dict[str, int], nodes: Sequence[int]) -> Sequence[Decision]:
    free = list(state.free)
    changed = [active for active in jobs if counts[active.job.id] != active.devices]
    for active in changed:
        give(free, active.allocation)
    out = [Decision(active.job.id, ()) for active in changed if not counts[active.job.id]]
    for active in sorted(changed, key=lambda active: (counts[active.job.id], active.index)):
        count = counts[active.job.id]
        allocation = emptiest(free, nodes, count) if count else None
        if allocation:
            take(free, allocation)
            out.append(Decision(active.job.id, allocation))
    return out


OPTIMUS = Policy(
    name="optimus",
    paper="Peng et al., EuroSys 2018",
    about="each further device where it shortens the time left most",
    decide=optimus,
    needs="duration and scaling",
    interval_s=60.0,
    always=True,
    adapts=True,
)
