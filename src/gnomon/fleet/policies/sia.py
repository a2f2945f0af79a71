"""Sia: each job gets the number and kind of devices of its best configuration, by goodput over its own worst.

At each round every job has configurations (pool, number of devices: powers of two of a node, then whole nodes). Its
speedup there is its forecast speed over that of its slowest one; of a change to another configuration only the share of
its age counts that restarts do not take. Chosen is what makes the sum of speedup ** POWER over all jobs least, a job
without devices counting NO_ALLOCATION, within every pool's devices: exactly as long as the table of dynamic programming
is small (LARGEST), else by marginal value for each device, which is not always optimal (the paper solves an integer
program). A job begins on its fewest devices, of any kind, and may then double them, since only what ran is known. A job
that is starting keeps its devices. Source: Jayaram Subramanya et al., SOSP 2023; its artifact
(github.com/siasosp23/artifacts) for the two numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType

import numpy as np

from gnomon.fleet.placement import decisions_for
from gnomon.fleet.state import Active, Decision, Forecasts, Policy, State, packed_on

RESTART_S = 30.0
POWER, NO_ALLOCATION = -0.5, 1.1
"""Of a speedup: how fair shares are; and what a job without devices counts, a slowest configuration counting 1."""
DIGITS = 2
"""Of speedup ** POWER that count, as in the artifact: what brings less is not worth a change."""
SLOWEST = 1e-4
"""Speedup below which none is told apart."""
LARGEST = 4_000_000
"""Entries of the table by which configurations are chosen exactly."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A number of devices of a pool, and what it is worth to a job."""

    pool: int
    """Index of the pool."""
    count: int
    """Devices of it."""
    value: float
    """What it adds to the sum that the choice makes largest: how far its speedup ** POWER lies below NO_ALLOCATION."""


def sia(
    state: State, forecasts: Forecasts, *, learns: bool = True, restart_s: Mapping[str, float] = MappingProxyType({})
) -> Sequence[Decision]:
    """Configurations of all jobs, then their places.

    learns: nothing is known of a job before it ran, so that it begins small; otherwise its speed is known everywhere.
    restart_s: of a model, what a restart is taken to cost in place of RESTART_S.
    """
    pools = [i for i, pool in enumerate(state.machines.pools) if not pool.serves]
    own = partial(_configurations, state, forecasts, pools=pools, learns=learns, restart_s=restart_s)
    # Nobody waits and nobody gains: a search would only reorder ties and restart jobs.
    if not state.queue and all(_is_best(state, active, own(active)) for active in state.running):
        return ()
    jobs = sorted((*state.queue, *state.running), key=lambda active: active.index)
    room = {i: sum(state.free[n] for n in state.machines.nodes_of(i)) for i in pools}
    for active in state.running:
        pool = state.machines.pool_of[active.allocation[0][0]]
        if pool in room:
            room[pool] += active.devices
    picks = zip(jobs, choose([own(active) for active in jobs], room), strict=True)
    return decisions_for(
        state, jobs, {active.job.id: (pick.pool, pick.count) for active, pick in picks if pick is not None}
    )


def choose(options: Sequence[Sequence[Configuration]], room: Mapping[int, int]) -> list[Configuration | None]:
    """A configuration of each job, or none: its best, where all of them have room."""
    best_options = [max(group, key=lambda option: option.value, default=None) for group in options]
    used = Counter[int]()
    for option in best_options:
        if option is not None:
            used[option.pool] += option.count
    if all(count <= room[pool] for pool, count in used.items()):
        return best_options
    size = len(options) * prod(devices + 1 for devices in room.values())
    return exact(options, room) if size <= LARGEST else _by_marginal_value(options, room)


def _is_best(state: State, active: Active, options: Sequence[Configuration]) -> bool:
    """Whether no other configuration is worth more to a running job than the one that it has, whatever is free."""
    now = (state.machines.pool_of[active.allocation[0][0]], active.devices)
    values = {(option.pool, option.count): option.value for option in options}
    return now in values and values[now] >= max(values.values())


def _configurations(
    state: State, forecasts: Forecasts, active: Active, *, pools: Sequence[int], learns: bool,
    restart_s: Mapping[str, float],
) -> Sequence[Configuration]:  # fmt: skip
    """What a job can have, each with its value."""
    fewest, most = forecasts.limits(active.job)
    # It at most doubles what it has held: its scaling beyond that is not known yet.
    most = min(most, max(2 * active.peak, fewest, 1)) if learns else most
    rates = {}
    for pool in pools:
        per_node = state.machines.pools[pool].per_node
        nodes = state.machines.nodes_of(pool)
        for count in _counts(fewest, most, per_node, len(nodes)):
            shape = packed_on(count, nodes[0], per_node)
            rates[pool, count] = forecasts.phase(active.job, active.done_at(state.now), shape)[0]
    # Normalised by its own slowest configuration, so that jobs of different models compare.
    base = min((rate for rate in rates.values() if rate > 0), default=0.0)
    if not base:
        return ()
    now = (state.machines.pool_of[active.allocation[0][0]], active.devices) if active.allocation else (-1, 0)
    # It is starting: a change now would throw the start away.
    candidates = [now] if active.ready_s > state.now and now in rates else list(rates)
    share = _share_kept(state, active, restart_s.get(active.job.model, RESTART_S))
    worth = {entry: rates[entry] / base * (1.0 if entry == now else share) for entry in candidates}
    if learns and active.first_s < 0:  # nothing is known of it before it ran
        worth = {entry: 1.0 for entry in worth if entry[1] == max(fewest, 1)}
    return [
        Configuration(pool, count, NO_ALLOCATION - round(max(speedup, SLOWEST) ** POWER, DIGITS))
        for (pool, count), speedup in worth.items()
        if rates[pool, count] > 0
    ]


def _share_kept(state: State, active: Active, restart_s: float) -> float:
    """Share of a speedup that is left if a job changes what it holds, for the restarts so far and the next."""
    age = state.now - active.job.submit_s
    if not active.allocation or age < restart_s:
        return 1.0
    # The paper's restart factor: (age - restarts · cost) / (age + cost).
    return max(age - restart_s * (active.preemptions + active.resizes), 0.0) / (age + restart_s)


def _counts(fewest: int, most: int, per_node: int, nodes: int) -> list[int]:
    """Powers of two within a node, then whole nodes; or just what a rigid job wants."""
    if fewest == most:
        return [fewest] if fewest <= per_node * nodes else []
    powers = [1 << i for i in range(per_node.bit_length()) if 1 << i < per_node]
    every = [*powers, *(per_node * i for i in range(1, nodes + 1)), fewest]
    return sorted({count for count in every if fewest <= count <= most})


def exact(options: Sequence[Sequence[Configuration]], room: Mapping[int, int]) -> list[Configuration | None]:
    """Picks configurations of most value by dynamic programming: best[c] is the value of the jobs so far within the
    devices c of each pool."""
    pools = list(room)
    best = np.zeros([room[pool] + 1 for pool in pools])
    picks = []
    for group in options:
        # A group is one job: `after` starts from the table without it, so that at most one of its configurations is
        # taken.
        after, pick = best.copy(), np.full(best.shape, -1, dtype=np.int16)
        for item, option in enumerate(group):
            axis = pools.index(option.pool)
            if option.count > room[option.pool]:
                continue
            to = tuple(slice(option.count, None) if i == axis else slice(None) for i in range(len(pools)))
            come = tuple(slice(None, -option.count) if i == axis else slice(None) for i in range(len(pools)))
            value = best[come] + option.value
            # Ties keep the earlier choice, so that rounding does not decide.
            better = value > after[to] + 1e-12
            after[to] = np.where(better, value, after[to])
            pick[to] = np.where(better, item, pick[to])
        best = after
        picks.append(pick)
    # Walk back from the full room to read off what was chosen.
    choice = list(best.shape)
    choice = [size - 1 for size in choice]
    chosen: list[Configuration | None] = [None] * len(options)
    for index in range(len(options) - 1, -1, -1):
        item = int(picks[index][tuple(choice)])
        if item >= 0:
            chosen[index] = options[index][item]
            choice[pools.index(options[index][item].pool)] -= options[index][item].count
    return chosen


def _by_marginal_value(
    options: Sequence[Sequence[Configuration]], room: Mapping[int, int]
) -> list[Configuration | None]:
    """The step with most value a device, again and again: a job's first configuration, or a larger one for it."""
    room_left = dict(room)
    chosen: list[Configuration | None] = [None] * len(options)
    while True:
        best, gain, index = None, 0.0, -1
        for i, group in enumerate(options):
            have = chosen[i]
            for option in group:
                spare = room_left[option.pool] + (have.count if have is not None and have.pool == option.pool else 0)
                added_value = option.value - (have.value if have is not None else 0.0)
                extra = option.count - (have.count if have is not None and have.pool == option.pool else 0)
                # A change that takes no further devices is worth twice one that takes one.
                worth = added_value / max(extra, 0.5)
                if option.count <= spare and added_value > 1e-9 and worth > gain + 1e-12:
                    best, gain, index = option, worth, i
        if best is None:
            return chosen
        old = chosen[index]
        if old is not None:
            room_left[old.pool] += old.count
        room_left[best.pool] -= best.count
        chosen[index] = best


SIA = Policy(
    name="sia",
    paper="Jayaram Subramanya et al., SOSP 2023",
    about="number and kind of devices by goodput, over pools of several kinds",
    decide=sia,
    needs="scaling",
    interval_s=60.0,
    always=True,
    adapts=True,
)
