"""Which ranks hold which experts, from a recorded router, as an integer programme (Brainstorm's placement pass).

Each expert of each layer lies on one rank, each rank has as many. `best_placement` minimises the rows of the busiest
rank, layer by layer, plus the (token, expert) pairs whose next expert is on another rank, each by its weight. Where
tokens come home after every layer, as in Gnomon's runtime, the second weighs nothing, and layers are programmes of
their own. Leaves out experts that several ranks hold (`control.placing`).
Source: Cui et al. 2023 (Brainstorm, OSDI), expert placement; Raphael-Hao/brainstorm, placement as a boolean programme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon.control.placing import place
from gnomon.errors import PlanError
from gnomon.plans.replicas import SCALE, Placement, on_ranks, rank_rows, slots
from gnomon.plans.workload import RouterLoad
from gnomon.search.checkpointing.milp import Programme

GAP = 0.005
"""Share of the cost by which a placement of many experts may be worse than the best; of few it is the best."""
FEW = 32
"""Experts times ranks of a layer up to which it is."""
SECONDS = 20.0
"""Of HiGHS for all layers together, after which the best placement that is known is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterProfile:
    """The rows that routers sent to each expert, by layer."""

    rows: tuple[tuple[int, ...], ...]
    """(layers, experts): of each expert."""
    pairs: tuple[NDArray[np.int64], ...] = ()
    """(layers - 1) of (experts, experts): tokens that an expert of a layer and one of the next got; none where that is
    not known."""


def crossings(profile: RouterProfile, placement: Sequence[Placement], ep: int) -> int:
    """Tokens that an expert and one of the next layer on another rank got, counted for each such pair."""
    total = 0
    for pair, one, other in zip(profile.pairs, placement[:-1], placement[1:], strict=True):
        here, there = (_rank_of(row, ep) for row in (one, other))
        total += int(pair[here[:, None] != there[None, :]].sum())
    return total


def _rank_of(row: Placement, ep: int) -> NDArray[np.int64]:
    """Rank of each expert."""
    ranks = np.zeros(len(row), np.int64)
    for rank, own in enumerate(on_ranks(row, ep)):
        ranks[list(own)] = rank
    return ranks


def cost(profile: RouterProfile, placement: Sequence[Placement], ep: int, *, row: float, crossing: float) -> float:
    """Returns the seconds that `best_placement` minimises."""
    busiest = sum(max(rank_rows(rows, own, ep)) for rows, own in zip(profile.rows, placement, strict=True))
    return row * busiest + (crossing * crossings(profile, placement, ep) if crossing else 0.0)


def best_placement(
    profile: RouterProfile, ep: int, *, row: float = 1.0, crossing: float = 0.0, seconds: float = SECONDS
) -> tuple[Placement, ...]:
    """The expert of each slot, a row for each layer. row: cost of a row of a layer's busiest rank. crossing: of a token
    whose next expert is on another rank. PlanError where experts do not divide over ranks, InputError without scipy."""
    if crossing and len(profile.pairs) != len(profile.rows) - 1:
        raise PlanError("crossings between layers are of a profile that has pairs of experts; record them")
    for rows in profile.rows:
        slots(len(rows), 0, ep)
    usual = tuple(place(rows, 0, ep) for rows in profile.rows)
    if crossing:
        # Crossings tie layers together: all are one programme.
        groups = [list(range(len(profile.rows)))]
    else:
        # Without crossings each layer is a programme of its own, and layers with the same rows share one.
        known: dict[tuple[int, ...], list[int]] = {}
        for layer, rows in enumerate(profile.rows):
            known.setdefault(rows, []).append(layer)
        groups = [layers[:1] for layers in known.values()]
    # Where nothing better is found in time, the usual placement stays.
    found = dict(enumerate(usual))
    for layers in groups:
        part = RouterProfile(
            rows=tuple(profile.rows[layer] for layer in layers), pairs=profile.pairs if crossing else ()
        )
        solved = _solved(part, ep, row, crossing, seconds / len(groups))
        before = tuple(found[layer] for layer in layers)
        if solved is not None and cost(part, solved, ep, row=row, crossing=crossing) < cost(
            part, before, ep, row=row, crossing=crossing
        ):
            found.update(zip(layers, solved, strict=True))
    if not crossing:
        of_rows = {profile.rows[layers[0]]: found[layers[0]] for layers in groups}
        return tuple(of_rows[rows] for rows in profile.rows)
    return tuple(found[layer] for layer in range(len(profile.rows)))


def _solved(
    profile: RouterProfile, ep: int, row: float, crossing: float, seconds: float
) -> tuple[Placement, ...] | None:
    """Solves the placement by HiGHS; None where it found nothing in time."""
    programme, chosen = Programme(), list[list[list[int]]]()
    for rows in profile.rows:
        own = [[programme.variable(0.0) for _ in range(ep)] for _ in rows]
        total = max(1, sum(rows))
        busiest = programme.amount(row * total)  # as a share of the layer's rows, so that numbers are of one size
        for expert in own:
            programme.equals(dict.fromkeys(expert, 1.0), 1.0)
        for rank in range(ep):
            programme.equals({expert[rank]: 1.0 for expert in own}, len(rows) / ep)
            programme.at_most(
                {**{expert[rank]: n / total for expert, n in zip(own, rows, strict=True)}, busiest: -1.0}, 0.0
            )
        programme.equals({own[0][0]: 1.0}, 1.0) if not chosen else None  # ranks are alike: one of them is the first
        chosen.append(own)
    for pair, one, other in zip(profile.pairs, chosen[:-1], chosen[1:], strict=True) if crossing else ():
        for i, j in zip(*np.nonzero(pair), strict=True):
            for rank in range(ep):  # a token crosses where its first expert is here and its second is not
                # apart >= one here - other here, and its cost keeps it as small as that: 1 on one rank where they part,
                # else 0.
                apart = programme.amount(crossing * float(pair[i, j]))
                programme.at_most({one[i][rank]: 1.0, other[j][rank]: -1.0, apart: -1.0}, 0.0)
    few = all(len(rows) * ep <= FEW for rows in profile.rows)
    solution = programme.solve(gap=0.0 if few else GAP, seconds=seconds)
    if solution is None:
        return None
    return tuple(
        tuple(e for rank in range(ep) for e, expert in enumerate(own) if solution[expert[rank]]) for own in chosen
    )


@lru_cache(maxsize=64)
def for_load(router: RouterLoad, experts: tuple[int, ...], ep: int) -> tuple[Placement, ...]:
    """The placement of each layer with experts for a workload's load."""
    rows = []
    for layer, count in enumerate(experts):
        shares = router.shares(count)
        rows.append(tuple(int(share * SCALE) for share in shares[layer % len(shares)].tolist()))
    return best_placement(RouterProfile(rows=tuple(rows)), ep)
