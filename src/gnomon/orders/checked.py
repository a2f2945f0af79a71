"""Whether the rows of an order are what the order says, on given numbers or on a few small ones.

`problems(order, ranks, microbatches, virtual)` compares rows with every fact that they show: which stages each rank
computes, each microbatch once in each direction, backwards as stated, units held, and that the rows can be computed in
their order at all. `checked` raises PlanError with the first. Leaves out messages and memory in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import numpy as np

from gnomon.errors import PlanError
from gnomon.orders.order import Order
from gnomon.program.rows import Rows

RANKS = (1, 2, 3, 4)
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12)
"""Numbers that an order is tried with when it is added."""

_Row = tuple[str, int, int, int]
"""(kind, stage, unit, group)."""


def checked(order: Order) -> Order:
    """The order, if its rows are what it says on small numbers. PlanError with the first that are not, or when there is
    nothing to try."""
    tried = 0
    least, most = order.stages
    # The fewest stages a rank and one more where there is no limit, else up to two more: an order shows its rule in
    # those.
    for ranks, virtual in product(RANKS, range(least, min(most or least + 1, least + 2) + 1)):
        for microbatches in MICROBATCHES:
            if order.legal(ranks, microbatches, virtual) is None:
                tried += 1
                for problem in problems(order, ranks, microbatches, virtual):
                    raise PlanError(
                        f"order {order.name} on {ranks} pipeline ranks, {microbatches} microbatches and {virtual} "
                        f"stages a rank: {problem}"
                    )
    if not tried:
        raise PlanError(
            f"order {order.name} has no rows for up to {RANKS[-1]} pipeline ranks and {MICROBATCHES[-1]} microbatches"
        )
    return order


def problems(order: Order, ranks: int, microbatches: int, virtual: int) -> Iterator[str]:
    """What differs between an order and its rows for legal numbers, in words."""
    try:
        rows = order.build(ranks, microbatches, virtual)
    except Exception as error:  # an order may be anybody's code
        yield f"its rows are legal, but building them fails: {type(error).__name__}: {error}"
        return
    shape = rows.num_classes, rows.num_stages, rows.num_units
    if shape != (ranks, ranks * virtual, microbatches):
        yield f"rows of (ranks, stages, microbatches) = {shape}, not {(ranks, ranks * virtual, microbatches)}"
        return
    listed = _listed(rows)
    errors = [*_placed(order, listed), *_complete(order, listed, microbatches, virtual)]
    # Units held and deadlock are counted from rows that are complete; on others they would only repeat the first fault
    # in other words.
    yield from errors
    if not errors:
        yield from _units_open(order, listed, microbatches, virtual)
        if (stuck := _stuck(listed, rows.num_stages)) is not None:
            yield stuck


def _listed(rows: Rows) -> list[list[_Row]]:
    """Rows of each rank."""
    names = [rows.kinds[kind].name for kind in rows.kind.tolist()]
    flat = list(zip(names, rows.stage.tolist(), rows.unit.tolist(), rows.group.tolist(), strict=True))
    edges = rows.class_ptr.tolist()
    return [flat[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def _placed(order: Order, listed: list[list[_Row]]) -> Iterator[str]:
    for rank, own in enumerate(listed):
        for stage in sorted({row[1] for row in own}):
            if (due := order.rank_of(stage, len(listed))) != rank:
                yield f"rank {rank} computes stage {stage}, which placement = {order.placement!r} puts on rank {due}"
                return


def _complete(order: Order, listed: list[list[_Row]], microbatches: int, virtual: int) -> Iterator[str]:
    """Checks that each rank computes each of its stages once in each direction for each microbatch, and how."""
    for rank, own in enumerate(listed):
        counts = Counter(row[:3] for row in own)
        kinds = Counter(row[0] for row in own)
        for (kind, stage, unit), times in counts.items():
            if kind not in ("F", "B", "I", "W"):
                yield f"rank {rank} has an action {kind}; an order has F, B, I and W"
            elif times > 1 or (kind == "B" and (("I", stage, unit) in counts or ("W", stage, unit) in counts)):
                yield f"rank {rank} computes the {kind} of microbatch {unit} in stage {stage} more than once"
            elif kind in ("I", "W") and ("W" if kind == "I" else "I", stage, unit) not in counts:
                yield f"rank {rank} has the {kind} of microbatch {unit} in stage {stage}, and not its other half"
        whole = microbatches * virtual
        if (kinds["F"], kinds["B"] + kinds["I"], kinds["B"] + kinds["W"]) != (whole,) * 3:
            yield f"rank {rank} computes {kinds['F']} forwards and {kinds['B'] + kinds['W']} backwards, not {whole}"
        if order.backward != "both" and kinds["B" if order.split else "I"]:
            yield f"backward = {order.backward!r} is said, and rank {rank} has {kinds['B']} B and {kinds['I']} I"
        if not order.composite and any(row[3] >= 0 for row in own):
            yield f"rank {rank} has actions in groups, and composite is not said"


def _units_open(order: Order, listed: list[list[_Row]], microbatches: int, virtual: int) -> Iterator[str]:
    for rank, own in enumerate(listed):
        numbers = rank, len(listed), microbatches, virtual
        flight, open_for_weights = (most_units(own, ends) for ends in (("B", "I"), ("B", "W")))
        if order.in_flight is not None and (stated := order.in_flight(*numbers)) != flight:
            yield f"rank {rank} has {flight} units in flight, and in_flight says {stated}"
        if (most := order.most_held(*numbers)) is not None and open_for_weights > most:
            yield f"rank {rank} holds activations of {open_for_weights} units, and {most} are said to be the most"


def most_units(own: list[_Row], ends: tuple[str, str]) -> int:
    """The most units of a rank between the start of their forward and the end of one of these kinds."""
    # In the order of rows: of a composite the forward counts before the backward, so both of its units are open at
    # once.
    steps = [(kind == "F") - (kind in ends) for kind, *_ in own]
    return int(np.cumsum(steps).max())


def _stuck(listed: list[list[_Row]], num_stages: int) -> str | None:
    """What waits for ever when every rank computes its rows in order, or None. A group starts when all of it can."""
    # A finished action is never taken back, so the order in which ranks are visited does not matter: whatever is left
    # at the end can start in no order.
    turns = [_turns(own) for own in listed]
    at, done = [0] * len(turns), set[tuple[str, int, int]]()
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(turns):
            while at[rank] < len(own) and done.issuperset(_needed(own[at[rank]], num_stages)):
                done.update((_done(kind), stage, unit) for kind, stage, unit, _ in own[at[rank]])
                at[rank], moved = at[rank] + 1, True
    for rank, own in enumerate(turns):
        if at[rank] < len(own):
            kind, stage, unit, _ = own[at[rank]][0]
            return f"rank {rank} waits for ever before the {kind} of microbatch {unit} in stage {stage}"
    return None


def _turns(own: list[_Row]) -> list[list[_Row]]:
    """Rows that start together."""
    turns: list[list[_Row]] = []
    for row in own:
        if turns and row[3] >= 0 and turns[-1][0][3] == row[3]:
            turns[-1].append(row)
        else:
            turns.append([row])
    return turns


def _done(kind: str) -> str:
    """What others wait for: a backward's input gradient, whole or split."""
    return "I" if kind == "B" else kind


def _needed(rows: list[_Row], num_stages: int) -> list[tuple[str, int, int]]:
    """What rows that start together wait for, all of it before any of them."""
    return [need for row in rows for need in _needs(row, num_stages)]


def _needs(row: _Row, num_stages: int) -> list[tuple[str, int, int]]:
    kind, stage, unit, _ = row
    if kind == "F":
        return [("F", stage - 1, unit)] if stage else []
    if kind == "W":
        return [("I", stage, unit)]
    # A backward, whole or its input gradient: it needs its own forward and the gradient from the next stage.
    after = [("I", stage + 1, unit)] if stage + 1 < num_stages else []
    return [("F", stage, unit), *after]
