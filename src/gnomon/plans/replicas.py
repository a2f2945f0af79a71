"""Experts that several ranks hold: who holds which, and who computes which rows of them.

Ranks of ep have as many slots each; a *placement* names the expert of each slot, rank after rank. A rank that holds an
expert computes rows of its own tokens for it first, and the rest of its rows are shared out among all who hold it so
that the busiest rank has as few as can be. All is in whole numbers, so that every rank works out the same. Leaves out
which placement is good (`control.placing`) and how rows travel (`runtime.ops.routing`).
Source: Nie et al. 2023 (FlexMoE, SIGMOD), section 3: vExperts, and a router that prefers replicas on its own rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.plans.parts import Experts
from gnomon.plans.workload import RouterLoad

SCALE = 1 << 20
"""Rows that shares of a load are counted in."""
Placement = tuple[int, ...]
"""Expert of each slot, those of rank 0 of ep first."""

SWEEPS = 16
"""Most times that every expert's rows are shared out again, given the others': each time the loads get no less even,
and those that change at all after so many are within a row in a thousand."""


def slots(experts: int, replicas: int, ep: int) -> int:
    """Slots of a rank. PlanError where ranks would have unlike numbers of them, or more than there are experts."""
    if experts % ep:
        raise PlanError(f"{experts} experts do not divide over ep = {ep}; choose ep from the divisors of {experts}")
    if replicas % ep:
        down, up = replicas - replicas % ep, replicas + ep - replicas % ep
        raise PlanError(
            f"experts.replicas = {replicas} give ep = {ep} ranks unlike numbers of experts; the nearest are {down} and "
            f"{up}"
        )
    if (each := (experts + replicas) // ep) > experts:
        raise PlanError(
            f"experts.replicas = {replicas} give each of ep = {ep} ranks {each} experts, and there are {experts}, of "
            f"which a rank holds one copy; at most {experts * (ep - 1)}"
        )
    return each


def in_order(experts: int, replicas: int, ep: int) -> Placement:
    """Each rank has its usual experts, and then the first ones of the ranks after it."""
    each, usual = slots(experts, replicas, ep), experts // ep
    return tuple((rank * usual + slot) % experts for rank in range(ep) for slot in range(each))


def check_placement(placement: Placement, experts: int, replicas: int, ep: int) -> None:
    """PlanError where it is none of so many experts on so many ranks."""
    each = slots(experts, replicas, ep)
    if len(placement) != each * ep:
        raise PlanError(
            f"experts.placement lists {len(placement)} slots, but {experts} experts and {replicas} replicas have "
            f"{each * ep}: {each} on each of ep = {ep} ranks"
        )
    if unknown := [expert for expert in placement if not 0 <= expert < experts]:
        raise PlanError(
            f"experts.placement names expert {unknown[0]}, and a layer has {experts}, counted from 0 to {experts - 1}"
        )
    if missing := sorted(set(range(experts)) - set(placement)):
        raise PlanError(f"experts.placement has expert {missing[0]} on no rank; give each at least one slot")
    for rank, own_experts in enumerate(on_ranks(placement, ep)):
        if twice := [expert for expert in own_experts if own_experts.count(expert) > 1]:
            raise PlanError(f"experts.placement has expert {twice[0]} twice on rank {rank} of ep; once is enough")


def on_ranks(placement: Placement, ep: int) -> tuple[tuple[int, ...], ...]:
    """Experts of each rank's slots."""
    each = len(placement) // ep
    return tuple(placement[rank * each : (rank + 1) * each] for rank in range(ep))


def holders(placement: Placement, experts: int, ep: int) -> tuple[tuple[int, ...], ...]:
    """Ranks that hold each expert, in order."""
    each = len(placement) // ep
    ranks_of: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(placement):
        ranks_of[expert].append(slot // each)
    return tuple(map(tuple, ranks_of))


def shared_out(totals: Sequence[int], ranks_of: Sequence[Sequence[int]], ep: int) -> list[list[int]]:
    """Rows of each expert that each of its holders computes, in their order: the busiest rank's are as few as they can
    be, but for rounding. totals: rows of each expert. held: its ranks.

    Experts with one holder leave no choice. The others' rows are poured into their holders, least loaded first, one
    expert after the other, again and again: each pour lowers the sum of squared loads, whose least is the evenest.
    """
    load, dealt_rows = [0] * ep, [[0] * len(ranks) for ranks in ranks_of]
    several = []
    for expert, ranks in enumerate(ranks_of):
        if len(ranks) == 1:
            dealt_rows[expert][0] = totals[expert]
            load[ranks[0]] += totals[expert]
        elif totals[expert]:
            several.append(expert)
    # Large ones first: later pours can then even out what they left.
    several.sort(key=lambda expert: (-totals[expert], expert))
    for _ in range(SWEEPS):
        changed = False
        for expert in several:
            ranks, before = ranks_of[expert], dealt_rows[expert]
            for rank, rows in zip(ranks, before, strict=True):
                load[rank] -= rows
            after = _poured(totals[expert], [load[rank] for rank in ranks])
            for rank, rows in zip(ranks, after, strict=True):
                load[rank] += rows
            changed |= after != before
            dealt_rows[expert] = after
        if not changed or len(several) == 1:
            break
    return dealt_rows


def _poured(rows: int, loads: Sequence[int]) -> list[int]:
    """Rows to each of some ranks that have these loads, so that the least loaded end level."""
    order = sorted(range(len(loads)), key=lambda place: (loads[place], place))
    under, count = 0, 0
    for place in order:  # ranks that end above what they have now
        # Water filling: with the `count` least loaded at the level of the next one, `rows` would be used up already, so
        # that one gets nothing.
        if count and loads[place] * count - under >= rows:
            break
        under, count = under + loads[place], count + 1
    # The remainder goes to the least loaded first, a row each.
    level, rest = divmod(rows + under, count)
    poured = [0] * len(loads)
    for number, place in enumerate(order[:count]):
        poured[place] = level + (number < rest) - loads[place]
    return poured


def rank_rows(totals: Sequence[int], placement: Placement, ep: int) -> list[int]:
    """Rows that each rank computes of a layer whose experts get so many."""
    ranks_of = holders(placement, len(totals), ep)
    load = [0] * ep
    for ranks, rank_counts in zip(ranks_of, shared_out(totals, ranks_of, ep), strict=True):
        for rank, rows in zip(ranks, rank_counts, strict=True):
            load[rank] += rows
    return load


def sent_rows(counts: NDArray[np.int64], placement: Placement) -> NDArray[np.int64]:
    """(from rank, expert, to rank): rows that go where. counts: (ranks of ep, experts), rows of each rank's tokens.

    Of its own tokens a holder takes as many as its share has room for; what is left of ranks' rows goes to what is left
    of holders' shares, both in order.
    """
    ep, experts = counts.shape
    ranks_of = holders(placement, experts, ep)
    shares = shared_out(counts.sum(axis=0).tolist(), ranks_of, ep)
    sent = np.zeros((ep, experts, ep), np.int64)
    for expert, ranks in enumerate(ranks_of):
        if len(ranks) == 1:
            sent[:, expert, ranks[0]] = counts[:, expert]
            continue
        # left[rank]: rows of its own tokens that go nowhere yet; room[rank]: what its share still takes.
        remaining, room = counts[:, expert].tolist(), dict(zip(ranks, shares[expert], strict=True))
        for rank in ranks:
            own = min(remaining[rank], room[rank])
            sent[rank, expert, rank] = own
            remaining[rank] -= own
            room[rank] -= own
        waiting = [rank for rank in ranks if room[rank]]
        for source, rows in enumerate(remaining):
            # Ends: shares add up to the expert's rows, so there is room for what is left.
            while rows:
                target = waiting[0]
                some = min(rows, room[target])
                sent[source, expert, target] += some
                rows, room[target] = rows - some, room[target] - some
                if not room[target]:
                    waiting.pop(0)
    return sent


def load_under(router: RouterLoad, experts: Experts) -> RouterLoad:
    """The load under a plan: tokens go to one of two experts alone only under its threshold."""
    return router if experts.threshold < 1.0 or not router.alone else replace(router, alone=0.0)


def busiest(router: RouterLoad, placement: Sequence[Placement], experts: int, ep: int) -> float:
    """Rows that the busiest of `ep` ranks computes over those of balanced routing, as `RouterLoad.busiest`, where
    experts lie on ranks as placed: the mean over layers. placement: a row for each layer, or one; none for the usual
    order."""
    if not placement or ep == 1:
        return router.busiest(experts, ep)
    count = max(len(placement), len(router.layers))
    pairs = []
    for layer in range(count):
        row = placement[layer % len(placement)]
        # A load is given layer by layer or once for all; a placement likewise. Layers repeat the shorter list.
        here = max(row) + 1  # layers of a pyramid have unlike numbers of experts
        computed = router.computed_by_layer(here if here != experts and not router.layers else experts)
        shares = computed[layer % len(computed)]
        check_placement(row, len(shares), len(row) - len(shares), ep)
        # Whole rows, as the runtime counts them, so that `shared_out` gives the same division.
        pairs.append((tuple(int(share * SCALE) for share in shares.tolist()), row))
    known = {pair: max(rank_rows(*pair, ep)) * ep / SCALE for pair in dict.fromkeys(pairs)}
    return sum(known[pair] for pair in pairs) / count


def least_busiest(router: RouterLoad, plan_experts: Experts, experts: int, ep: int) -> float:
    """What `busiest` is at least, whatever the placement, where the plan leaves that to the load."""
    router = load_under(router, plan_experts)
    if plan_experts.replicas and not plan_experts.placement:
        return float(router.computed_by_layer(experts).sum(axis=1).mean())
    return busiest(router, plan_experts.placement, experts, ep)
