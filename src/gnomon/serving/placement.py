"""Experts for inference: which devices hold which, and copies of those that are asked for most, by a recorded load.

`place_experts(rows, redundant, ep)` places the experts of one layer so that the busiest expert-parallel rank has the
fewest tokens: by trying every placement where they are few, else by the heuristic of `control.placing` (heaviest slots
first, then moves). `loads(router, …)` is the load imbalance that this leaves over the layers of a recorded router,
beside that of experts in order of their numbers. Popularity is that of the record; what changes while a
server runs is the controller's (`control.placing.move`). Leaves out how rows travel.
Source: Li et al. 2023 (Lina, ATC), section 5: replicas by popularity, the rest packed; Rajbhandari et al. 2022
(DeepSpeed-MoE), section 5: experts over devices for inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

from gnomon.control.placing import place
from gnomon.errors import InputError, PlanError
from gnomon.plans.replicas import SCALE, Placement, in_order, rank_rows, slots
from gnomon.plans.workload import RouterLoad

FEW = 20_000
"""The most placements that are tried one by one; with more, the heuristic's is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """Load imbalance: tokens of the busiest device over the mean of all, averaged over layers; 1 is even."""

    in_order: float
    """Experts dealt out as they are numbered, without copies."""
    placed: float
    """Placed by the load, with copies."""
    placements: tuple[Placement, ...]
    """Of each layer of the load."""


def place_experts(rows: Sequence[int], redundant: int, ep: int) -> Placement:
    """Places experts and their copies on devices by their load. rows: tokens that each expert gets. redundant: slots
    beyond one for each expert. PlanError where devices would have unlike numbers of slots."""
    experts, each = len(rows), slots(len(rows), redundant, ep)
    found = place(rows, redundant, ep)
    if comb(experts, each) ** ep > FEW:  # an upper bound: about ep! of them differ only in which device is which
        return found
    best = max(rank_rows(rows, found, ep))
    for placement in _all(experts, each, ep):
        busiest = max(rank_rows(rows, placement, ep))
        if busiest < best:
            best, found = busiest, placement
    return found


def _all(experts: int, each: int, ep: int) -> Iterator[Placement]:
    """Every placement, but for which device is which: devices are alike, so each set of them is made in one order only.
    A device holds an expert once, and every expert is somewhere."""
    sets = list(combinations(range(experts), each))

    def grown(first: int, chosen: tuple[tuple[int, ...], ...]) -> Iterator[Placement]:
        if len(chosen) == ep:
            if len({expert for own in chosen for expert in own}) == experts:
                yield tuple(expert for own in chosen for expert in own)
            return
        for at in range(first, len(sets)):
            yield from grown(at, (*chosen, sets[at]))

    yield from grown(0, ())


def loads(router: RouterLoad, experts: int, redundant: int, ep: int) -> ExpertLoads:
    """The imbalance without and with placement. InputError where the slots, experts and copies, do not divide over
    ep."""
    try:
        rows = [[int(share * SCALE) for share in layer] for layer in router.computed_by_layer(experts).tolist()]
        plain = in_order(experts, 0, ep)
        placements = {layer: place_experts(layer, redundant, ep) for layer in dict.fromkeys(map(tuple, rows))}
        before = [max(rank_rows(layer, plain, ep)) * ep / sum(layer) for layer in rows]
        after = [max(rank_rows(layer, placements[tuple(layer)], ep)) * ep / sum(layer) for layer in rows]
    except PlanError as error:
        raise InputError(str(error).replace("experts.replicas", "redundant experts")) from error
    return ExpertLoads(
        in_order=sum(before) / len(rows),
        placed=sum(after) / len(rows),
        placements=tuple(placements[tuple(layer)] for layer in rows),
    )
