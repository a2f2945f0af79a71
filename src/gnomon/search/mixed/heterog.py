"""HeteroG's search: a strategy for every layer on heterogeneous devices, by local search from the usual ones.

`options(costs)` lists what a layer may do; `seeds(costs)` the same for all layers: data parallelism with equal shares
and with shares by speed, each way of adding up, on all devices and on each kind, and one layer after the other over the
devices. `search(play)` goes on from the best, changes random runs of layers, and goes back to strategies within ALPHA
of the best. It is never slower than the seeds. Source: Yi et al. 2020 (HeteroG, CoNEXT), whose own search is a graph
network trained by reinforcement, for hours a model. Left out: replicas of a layer on one device, and the order of
operations, which is the model's here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from typing import get_args

from gnomon.search.mixed.layer_strategies import LayerChoice, LayerCosts, LayerPlay, Strategy, Sync

ALPHA = 1.05
"""The ratio to the best beyond which a strategy is not gone on from."""
BARREN = 12
"""Strategies gone on from without gain, after which the search ends."""
MOVES = 24
"""Random changes tried from each strategy."""
SWEEP = 4
"""The interval of full sweeps: from the first strategy after a gain, and from every so many without, each change of one
layer or two is tried."""


@dataclass(frozen=True, kw_only=True)
class HeteroGResult:
    """What a search found."""

    strategy: Strategy
    """The best strategy."""
    step_s: float
    """Seconds of a step; infinite where nothing fits."""
    seed: str
    """The name of the best strategy that it began at."""
    seed_s: float
    """Seconds of a step under it."""
    played: int
    """The number of strategies played."""


def options(costs: LayerCosts) -> tuple[LayerChoice, ...]:
    """Lists what a layer may do: every group of devices with equal shares and shares by speed, each way of adding up,
    and every device alone."""
    groups = [tuple(costs.kind_of), *(kind.devices for kind in costs.tables.kinds)]
    several = [
        LayerChoice(devices, shares, sync)
        for devices in dict.fromkeys(groups)
        if 1 < len(devices) <= costs.sequences
        for shares in dict.fromkeys((_equal(costs, devices), by_speed(costs, devices)))
        for sync in get_args(Sync)
    ]
    return (*several, *(LayerChoice((device,), (costs.sequences,)) for device in costs.kind_of))


def _equal(costs: LayerCosts, devices: tuple[int, ...]) -> tuple[int, ...]:
    share, remainder = divmod(costs.sequences, len(devices))
    return tuple(share + (place < remainder) for place in range(len(devices)))


def by_speed(costs: LayerCosts, devices: tuple[int, ...]) -> tuple[int, ...]:
    """Deals out whole sequences: one each, and every further one to the device that then takes least."""
    seconds = {k: costs.layers[k][0].sum(axis=0) + costs.layers[k][1].sum(axis=0) for k in range(len(costs.layers))}
    shares = [1] * len(devices)
    for _ in range(costs.sequences - len(devices)):
        after = [float(seconds[costs.kind_of[d]][n + 1]) for d, n in zip(devices, shares, strict=True)]
        shares[after.index(min(after))] += 1
    return tuple(shares)


def seeds(costs: LayerCosts) -> Iterator[tuple[str, Strategy]]:
    """Yields the usual strategies, each with its name."""
    layers = costs.tables.num_layers
    for choice in options(costs):
        who = "all" if len(choice.devices) == len(costs.kind_of) else _named(costs, choice)
        how = "equal" if choice.shares == _equal(costs, choice.devices) else "by speed"
        yield f"{who}, {how}, {choice.sync}" if len(choice.devices) > 1 else who, (choice,) * layers
    # One layer after the other: the fastest devices first, each with layers in proportion to its speed (a layer lies
    # where the middle of its share of all layers falls in the running sum of speeds).
    devices = sorted(costs.kind_of, key=lambda d: (-costs.speed(d, costs.sequences), d))
    speeds = list(accumulate(costs.speed(device, costs.sequences) for device in devices))
    places = [
        next(i for i, total in enumerate(speeds) if (number + 0.5) / layers <= total / speeds[-1])
        for number in range(layers)
    ]
    yield (
        "one layer after the other",
        whole(costs, tuple(LayerChoice((devices[i],), (costs.sequences,)) for i in places)),
    )


def _named(costs: LayerCosts, choice: LayerChoice) -> str:
    name = costs.tables.kinds[costs.kind_of[choice.devices[0]]].name
    return name if len(choice.devices) > 1 else f"device {choice.devices[0]} ({name})"


def whole(costs: LayerCosts, strategy: Strategy) -> Strategy:
    """The strategy with layers that share parameters as the first of them."""
    return tuple(strategy[first] for first in costs.tied)


def search(play: LayerPlay, tries: int = 4000, number: int = 0) -> HeteroGResult:
    """Returns the fastest strategy that is met. tries: strategies played at most, seeds not counted. number: seed of
    the random moves."""
    costs, random, listed = play.costs, Random(number), options(play.costs)
    known, frontier = dict[Strategy, float](), list[tuple[float, int, Strategy]]()

    def look(strategy: Strategy) -> None:
        known[strategy] = seconds = play.step_s(strategy)
        if seconds < float("inf"):
            heappush(frontier, (seconds, len(known), strategy))

    named = dict[str, float]()
    for name, strategy in seeds(costs):
        if strategy not in known:
            look(strategy)
        named[name] = known[strategy]
    begun, barren = len(known), 0
    first = min(named, key=named.__getitem__)
    while frontier and len(known) - begun < tries and barren < BARREN:
        seconds, _, strategy = heappop(frontier)
        # Best-first with a tolerance: the frontier is exhausted once its best is ALPHA beyond the best known.
        best = min(known.values())
        if seconds > ALPHA * best:
            break
        for _ in range(MOVES):
            other = whole(costs, _changed(strategy, listed, random))
            if other not in known:
                look(other)
        # A full sweep costs 2 x layers x options plays, so it is made only now and then when nothing is gained.
        if barren % SWEEP == 0:
            for other in _near(strategy, listed):
                if (changed := whole(costs, other)) not in known and len(known) - begun < tries:
                    look(changed)
        barren = 0 if min(known.values()) < best else barren + 1
    found = min(known, key=known.__getitem__)
    return HeteroGResult(strategy=found, step_s=known[found], seed=first, seed_s=named[first], played=len(known))


def _near(strategy: Strategy, listed: tuple[LayerChoice, ...]) -> Iterator[Strategy]:
    """Yields strategies in which one layer, or two that follow each other, do something else."""
    for size in (1, 2):
        for first in range(len(strategy) - size + 1):
            for choice in listed:
                yield (*strategy[:first], *(choice,) * size, *strategy[first + size :])


def _changed(strategy: Strategy, listed: tuple[LayerChoice, ...], random: Random) -> Strategy:
    """A strategy in which a run of layers, most often short, does something else: an option, or what a neighbour
    does."""
    size = min(len(strategy), random.choice((1, 1, 1, 2, 4, 8, len(strategy))))
    first = random.randrange(len(strategy) - size + 1)
    near = [strategy[i] for i in (first - 1, first + size) if 0 <= i < len(strategy)]
    choice = random.choice(near) if near and random.random() < 0.3 else random.choice(listed)
    return (*strategy[:first], *(choice,) * size, *strategy[first + size :])
