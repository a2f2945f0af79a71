"""FGD: a job goes to the device where it leaves least in fragments that no other job could use.

The fragmentation of a machine for a demand is what is free on those of its devices that no placement of it uses: all of
it where the demand does not fit, else of devices with less free than it takes of one. Its mean over the demands
of all jobs that wait and run is the machine's. Of the places that a job could have, the one is taken that makes it grow
least. Jobs go first come, first served; those that do not fit are passed. Source: Weng et al., ATC 2023. Leaves out
cores and memory of machines; the demands of a cluster's past stand for its future in the paper, those of now here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gnomon.fleet.machines import PARTS
from gnomon.fleet.placement import take
from gnomon.fleet.state import Allocation, Decision, Forecasts, Policy, State

Free = tuple[int, ...]
"""Free parts of every device of a machine."""


def fragmentation(free: Free, demands: Mapping[int, float]) -> float:
    """Parts of a machine that are of no use, on average.

    demands: parts (of one device, or all of several) -> share of the jobs that ask for so many.
    """
    return sum(share * _of_one(free, demand) for demand, share in demands.items())


def _of_one(free: Free, demand: int) -> int:
    # A demand of more than one device asks for whole ones.
    each = min(demand, PARTS)
    fits = sum(have >= each for have in free) >= max(demand // PARTS, 1)
    return sum(have for have in free if not fits or have < each)


def best_place(free: Free, demand: int, demands: Mapping[int, float]) -> tuple[float, tuple[int, ...]] | None:
    """(how much fragmentation grows, devices) of the place where it grows least; None where none has room."""
    before = fragmentation(free, demands)
    if demand >= PARTS:
        whole = tuple(device for device, have in enumerate(free) if have == PARTS)[: demand // PARTS]
        if len(whole) < demand // PARTS:
            return None
        after = tuple(0 if device in whole else have for device, have in enumerate(free))
        return fragmentation(after, demands) - before, whole
    best: tuple[float, tuple[int, ...]] | None = None
    for device, have in enumerate(free):
        # Devices with as much free are alike: one of them is tried.
        if have < demand or have in free[:device]:
            continue
        after = (*free[:device], have - demand, *free[device + 1 :])
        grows = fragmentation(after, demands) - before
        # Ties go to the first device, whatever the last digits of the sums say.
        if best is None or grows < best[0] - 1e-9:
            best = (grows, (device,))
    return best


def fgd(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Places for those that wait."""
    demands_counted = Counter(active.job.devices for active in (*state.queue, *state.running))
    demands = {demand: count / demands_counted.total() for demand, count in demands_counted.items()}
    free = list(state.free)
    machines = [
        range(first, first + pool.hosted)
        for index, pool in enumerate(state.machines.pools)
        for first in state.machines.nodes_of(index)[:: max(pool.hosted, 1)]
    ]
    # Many machines look alike, so a place is computed once for each look.
    known: dict[tuple[Free, int], tuple[float, tuple[int, ...]] | None] = {}
    out = []
    for active in state.queue:
        demand = active.job.devices
        best: tuple[float, Allocation] | None = None
        for nodes in machines:
            here = tuple(free[node] for node in nodes)
            if (here, demand) not in known:
                known[here, demand] = best_place(here, demand, demands)
            found = known[here, demand]
            if found is not None and (best is None or found[0] < best[0] - 1e-9):
                best = (found[0], tuple((nodes[device], min(demand, PARTS)) for device in found[1]))
        if best is not None:
            take(free, best[1])
            out.append(Decision(active.job.id, best[1]))
    return out


FGD = Policy(
    name="fgd",
    paper="Weng et al., ATC 2023",
    about="parts of devices, where they leave least in fragments",
    decide=fgd,
    parts=True,
)
