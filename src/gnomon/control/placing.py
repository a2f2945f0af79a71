"""Which ranks hold which experts: a controller that expands, shrinks and migrates them by predicted gain.

`place(loads, …)` makes a placement for a load that is known; `move(placement, loads, …)` changes one that is there by
the few moves that pay within `horizon` steps. Both are pure: the simulator and every rank of a run make the same of the
same counts. A move gives a slot to another expert: with an expert that has several it is FlexMoE's Shrink of that one
and Expand of the new one, and two slots that change their experts are its Migrate. Leaves out who counts rows and who
sends weights (`runtime.step.replicas`).
Source: Nie et al. 2023 (FlexMoE, SIGMOD), sections 3 and 4, and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gnomon.graph import Graph
from gnomon.plans import Plan, RouterLoad, Workload, check
from gnomon.plans.experts import routers, under
from gnomon.plans.replicas import (
    SCALE,
    Placement,
    check_placement,
    holders,
    in_order,
    on_ranks,
    rank_rows,
    shared_out,
    slots,
)

TRIGGER = 1.1
"""Busiest over mean rows under which nothing is moved."""
MOST_MOVES = 8
"""Slots of a layer that change at once."""
POLISHED = 16
"""Moves after a placement was made from the whole load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingCosts:
    """Seconds, of one layer."""

    row_s: float
    """A step's forward and backward of one row, on one rank."""
    sum_s: float
    """Adding up the gradient of an expert that several ranks hold, once a step, for each of them."""
    move_s: float
    """Sending an expert's weights and optimizer states to another rank."""

    def step_s(self, totals: Sequence[int], placement: Placement, ep: int) -> float:
        """Seconds of a step that waits for the rank with most rows, and for the one with most gradients to add up."""
        ranks_of = holders(placement, len(totals), ep)
        shared = [sum(len(ranks_of[expert]) > 1 for expert in own) for own in on_ranks(placement, ep)]
        return max(rank_rows(totals, placement, ep)) * self.row_s + max(shared) * self.sum_s


ROWS_ALONE = PlacingCosts(row_s=1.0, sum_s=0.0, move_s=0.0)
"""Where only the balance of rows counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a controller sees of a layer."""

    placement: Placement
    """Where experts and their replicas are."""
    rows: tuple[int, ...]
    """Of each expert, since the last look."""
    steps: int
    """In which they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChange:
    """What it makes of it."""

    placement: Placement
    """Where they are to be."""
    slots: tuple[int, ...]
    """Those that have another expert now."""
    gain_s: float
    """Seconds of a step that it saves, as predicted."""


def imbalance(rows: Sequence[int], placement: Placement, ep: int) -> float:
    """Rows of the busiest rank over the mean."""
    total = sum(rows)
    return max(rank_rows(rows, placement, ep)) * ep / total if total else 1.0


def move(look: Look, ep: int, costs: PlacingCosts, *, horizon: int, most: int = MOST_MOVES) -> PlacementChange:
    """The placement after the moves that pay: a move is made while the busiest rank has more than TRIGGER times the
    mean, if it saves more within `horizon` steps than it costs."""
    placement, began = look.placement, look.placement
    # Of a step, in whole rows: every rank must come to the same numbers.
    rows = [count // look.steps for count in look.rows]
    first = now = costs.step_s(rows, placement, ep)
    for _ in range(most):
        if imbalance(rows, placement, ep) <= TRIGGER:
            break
        # Tuples: of equally fast moves the one of fewest new slots, then the smallest placement. So all ranks choose
        # the same one without a message.
        best = min(
            ((costs.step_s(rows, other, ep), changed, other) for other, changed in _moves(placement, rows, ep)),
            default=None,
        )
        if best is None or (now - best[0]) * horizon <= costs.move_s * best[1] or best[0] >= now:
            break
        now, _, placement = best
    changed = tuple(slot for slot, (one, other) in enumerate(zip(began, placement, strict=True)) if one != other)
    return PlacementChange(placement=placement, slots=changed, gain_s=first - now)


def _moves(placement: Placement, rows: Sequence[int], ep: int) -> Iterator[tuple[Placement, int]]:
    """(placement, slots that are new in it) of the moves that could relieve the busiest rank: an expert of it expands
    to a rank with little to do in place of one that other ranks hold too, or changes places with a lighter one."""
    experts, each = len(rows), len(placement) // ep
    ranks_of = holders(placement, experts, ep)
    load, of_rank = [0] * ep, [dict[int, int]() for _ in range(ep)]
    for expert, shares in enumerate(shared_out(rows, ranks_of, ep)):
        for rank, some in zip(ranks_of[expert], shares, strict=True):
            load[rank] += some
            of_rank[rank][expert] = some
    # Ties by number: every rank of a run computes the same moves by itself.
    order = sorted(range(ep), key=lambda rank: (load[rank], rank))
    # A few ranks with least and a few experts with most bound the moves that are priced, each by a whole step.
    busiest, relief = order[-1], [rank for rank in order[: max(1, ep // 2)] if rank != order[-1]]
    heavy = sorted(of_rank[busiest], key=lambda expert: (-of_rank[busiest][expert], expert))[: max(2, each // 2)]
    for rank in relief[:4]:
        for slot in range(rank * each, (rank + 1) * each):
            gone = placement[slot]
            for expert in heavy:
                if expert in of_rank[rank]:
                    continue
                # Only an expert that other ranks hold too may lose a slot.
                if len(ranks_of[gone]) > 1:
                    yield (*placement[:slot], expert, *placement[slot + 1 :]), 1
                # A swap must bring the busiest rank something lighter, and nothing that it has already.
                if gone in of_rank[busiest] or of_rank[rank][gone] >= of_rank[busiest][expert]:
                    continue
                # The busiest rank's own slot of the expert: looked for from its first slot on, as other ranks may hold
                # the expert too.
                other = placement.index(expert, busiest * each)
                swapped = list(placement)
                swapped[slot], swapped[other] = expert, gone
                yield tuple(swapped), 2


def place(rows: Sequence[int], replicas: int, ep: int, costs: PlacingCosts = ROWS_ALONE) -> Placement:
    """A placement for experts that get so many rows: more slots for those with more rows a slot, the heaviest slots
    first into the rank with least; then moves, while the step gets shorter. Never worse than `in_order`."""
    experts, usual = len(rows), in_order(len(rows), replicas, ep)
    each = slots(experts, replicas, ep)
    count = [1] * experts
    for _ in range(replicas):
        # A second slot on one rank would take no load off it.
        open_to = [expert for expert in range(experts) if count[expert] < ep]
        count[max(open_to, key=lambda expert: (rows[expert] / count[expert], -expert))] += 1
    # Longest processing time first: the heaviest piece to the rank with least.
    pieces = sorted(
        ((rows[expert] / count[expert], expert) for expert in range(experts) for _ in range(count[expert])),
        key=lambda piece: (-piece[0], piece[1]),
    )
    load, experts_of = [0.0] * ep, [list[int]() for _ in range(ep)]
    for weight, expert in pieces:
        fits = [rank for rank in range(ep) if len(experts_of[rank]) < each and expert not in experts_of[rank]]
        if not fits:  # only ranks that hold it already have room
            return _polished(usual, rows, ep, costs)
        rank = min(fits, key=lambda rank: (load[rank], rank))
        load[rank] += weight
        experts_of[rank].append(expert)
    packed = _polished(tuple(expert for own in experts_of for expert in sorted(own)), rows, ep, costs)
    return min((usual, packed), key=lambda one: costs.step_s(rows, one, ep))


def _polished(placement: Placement, rows: Sequence[int], ep: int, costs: PlacingCosts) -> Placement:
    # Nothing is there yet that would have to be sent.
    still = replace(costs, move_s=0.0)
    look = Look(placement=placement, rows=tuple(rows), steps=1)
    return move(look, ep, still, horizon=1, most=POLISHED).placement


def placements_of(plan: Plan, experts: Sequence[int], ep: int, router: RouterLoad) -> tuple[Placement, ...]:
    """The placement of each layer with experts: that of the plan, or, where it leaves it open, what `place` makes of
    the workload's load. experts: of each such layer. PlanError for a placement that is none."""
    placement, replicas = plan.experts.placement, plan.experts.replicas
    if placement:
        every = placement if len(placement) > 1 else placement * len(experts)
        for row, count in zip(every, experts, strict=True):
            check_placement(row, count, replicas, ep)
        return every
    known: dict[tuple[int, ...], Placement] = {}
    placements = []
    for layer, count in enumerate(experts):
        if router.kind == "balanced":
            placements.append(in_order(count, replicas, ep))
            continue
        shares = router.shares(count)
        # Whole numbers, so that equal loads are one key.
        rows = tuple(int(share * SCALE) for share in shares[layer % len(shares)].tolist())
        if rows not in known:
            known[rows] = place(rows, replicas, ep)
        placements.append(known[rows])
    return tuple(placements)


def with_placement(plan: Plan, graph: Graph, workload: Workload | None) -> Plan:
    """The plan with the placement of its experts' replicas, one row for each layer with experts, where it leaves that
    to the load; the same plan where no expert has a replica. PlanError where experts cannot have so many."""
    if not plan.experts.replicas or plan.experts.placement:
        return plan
    check(plan, graph, None, workload)
    ep = max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
    router = RouterLoad() if workload is None else workload.router
    experts = [router.experts for router in routers(under(graph, plan))]
    rows = placements_of(plan, experts, ep, router)
    return replace(plan, experts=replace(plan.experts, placement=rows))
