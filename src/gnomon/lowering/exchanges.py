"""Exchanges of tokens between ranks of experts as rows, beside the computing of another microbatch.

`with_exchanges(program, parts)` takes a Program whose stages are layers, some of them the dispatch or the combine of a
layer of experts (`plans.expert_rows`). Those become rows on a stream of their own, DISPATCH and COMBINE; they have no
weights, so what happens to weights and gradients leaves them out. `side_by_side` takes a backward and the forward that
follows it together: each computes while the tokens of the other travel. Left out: how long they take, and cutting them
(`methods.lina`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.plans.expert_rows import COMBINE, DISPATCH, EXCHANGES, Part
from gnomon.program import Kind, Program, effects, with_kinds
from gnomon.program.rows import Rows

STREAM, COMM = "experts", "ep"
FORWARD: Mapping[Part, str] = {DISPATCH: "DISPATCH", COMBINE: "COMBINE"}
BACKWARD: Mapping[Part, str] = {DISPATCH: "DISPATCH_B", COMBINE: "COMBINE_B"}
KINDS = (
    *(
        Kind(name=name, stream=STREAM, comm=COMM, effects=effects("consume X, write S, write Y"))
        for name in FORWARD.values()
    ),
    *(
        Kind(name=name, stream=STREAM, comm=COMM, effects=effects("consume S, consume DY, write DX"))
        for name in BACKWARD.values()
    ),
)
"""An exchange reads what the layer before made and makes what the next reads, or their gradients the other way."""
COMPUTES: Mapping[str, str] = {
    **dict.fromkeys(FORWARD.values(), "F"),
    **dict.fromkeys(BACKWARD.values(), "B"),
}
"""Kind of an exchange -> the action of its part of the layer."""

TRAVEL = ("SENT", "MADE", "DMADE", "DSENT")
"""Buffers of exchanges in parts: rows on their way to experts, and their results back; gradients of results on their
way, and of rows back."""

Pair = tuple[tuple[int, int], tuple[int, int]]
"""((stage, microbatch) of a forward, that of a backward), of the plan's stages."""

_OF_WEIGHTS = frozenset({"W", "AR", "OPT"})
"""Rows that are about weights and their gradients."""

_BEFORE = frozenset({"RECV_F", "RECV_B", "LOAD"})
"""Rows that go with the action after them; others go with the one before."""


def with_exchanges(program: Program, parts: Mapping[int, Part]) -> Program:
    """The Program with the rows of exchanges. parts: which of its stages are one, and which."""
    exchanges = {stage: part for stage, part in parts.items() if part in EXCHANGES}
    listed = [[new_row for row in rows if (new_row := _row(row, exchanges)) is not None] for rows in rows_of(program)]
    return with_rows(program, listed, kinds=with_kinds(*KINDS, base=program.kinds))


def _row(row: Row, exchanges: Mapping[int, Part]) -> Row | None:
    part = exchanges.get(row.stage)
    if part is None:
        return row
    if row.kind == "F":
        return replace(row, kind=FORWARD[part])
    if row.kind in ("B", "I"):
        return replace(row, kind=BACKWARD[part])
    # An exchange has no weights: no gradient to reduce and nothing to update.
    return None if row.kind in _OF_WEIGHTS else row


def composites(rows: Rows) -> frozenset[Pair]:
    """Forward and backward of each composite action of a schedule."""
    members: dict[int, list[int]] = {}
    # Only pairs are composites that hide each other's exchanges.
    for row, group in enumerate(rows.group.tolist()):
        if group >= 0:
            members.setdefault(group, []).append(row)
    forward, found = rows.is_kind("F"), set[Pair]()
    for one, two in (pair for pair in members.values() if len(pair) == 2):
        a, b = ((int(rows.stage[row]), int(rows.unit[row])) for row in (one, two))
        found.add((a, b) if forward[one] else (b, a))
    return frozenset(found)


def apart(rows: Rows) -> Rows:
    """The rows of a schedule without its composites: each action by itself, in the same order."""
    # -1 in every row: none is of a group.
    return replace(rows, group=rows.group * 0 - 1, overrides={})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Action:
    """A row that computes or exchanges, and the rows that go with it."""

    row: Row
    before: list[Row] = field(default_factory=list)
    after: list[Row] = field(default_factory=list)

    @property
    def exchanges(self) -> bool:
        return self.row.kind in COMPUTES


def side_by_side(program: Program, stage_of: Sequence[int], pairs: Collection[Pair] | None = None) -> Program:
    """The Program with forwards and backwards of two microbatches in turns: one goes on when the other has sent its
    tokens. stage_of: the plan's stage of each of the Program's. pairs: which; None: each backward with the forward of
    another microbatch that comes right after it."""
    return with_rows(program, [list(_turns(rows, stage_of, pairs)) for rows in rows_of(program)])


def _turns(rows: Sequence[Row], stage_of: Sequence[int], pairs: Collection[Pair] | None) -> Iterator[Row]:
    actions, first = _actions(rows)
    yield from first
    runs = _runs(actions, stage_of)
    at = 0
    while at < len(runs):
        one, two = runs[at], runs[at + 1] if at + 1 < len(runs) else None
        if two is not None and _go_together(one, two, stage_of, pairs):
            yield from _alternate(one, two)
            at += 2
        else:
            yield from (row for action in one for row in _rows(action))
            at += 1


def _actions(rows: Sequence[Row]) -> tuple[list[_Action], list[Row]]:
    """(actions in order, rows before all of them)."""
    actions, waiting, first = list[_Action](), list[Row](), list[Row]()
    for row in rows:
        if _way(row):
            actions.append(_Action(row=row, before=waiting))
            waiting = []
        elif row.kind in _BEFORE:
            waiting.append(row)
        else:  # what was received for a later action stays ahead of it
            (actions[-1].after if actions else first).append(row)
    (actions[-1].after if actions else first).extend(waiting)
    return actions, first


def _way(row: Row) -> str:
    """Says which way an action goes: `F`, `B`, or `W` for weight gradients alone; empty for other rows."""
    kind = COMPUTES.get(row.kind, row.kind)
    return {"F": "F", "B": "B", "I": "B", "W": "W"}.get(kind, "")


def _runs(actions: Sequence[_Action], stage_of: Sequence[int]) -> list[list[_Action]]:
    """Neighbouring actions of one microbatch at one of the plan's stages."""
    runs: list[list[_Action]] = []
    last = None
    for action in actions:
        now = _way(action.row), stage_of[action.row.stage], action.row.unit
        if now != last:
            runs.append([])
        runs[-1].append(action)
        last = now
    return runs


def _go_together(
    one: Sequence[_Action], two: Sequence[_Action], stage_of: Sequence[int], pairs: Collection[Pair] | None
) -> bool:
    first, then = one[0].row, two[0].row
    if pairs is not None:
        a, b = (stage_of[first.stage], first.unit), (stage_of[then.stage], then.unit)
        return (_way(first), _way(then)) == ("F", "B") and (a, b) in pairs
    # Another microbatch: a forward of its own unit would wait for nothing that the backward sends.
    return (_way(first), _way(then)) == ("B", "F") and first.unit != then.unit


def _alternate(one: Sequence[_Action], two: Sequence[_Action]) -> Iterator[Row]:
    """Both in turns, the backward first."""
    ways = [one, two] if _way(one[0].row) == "B" else [two, one]
    # Stacks, so that the next action is taken off the end.
    remaining = [list(reversed(way)) for way in ways]
    turn = 0
    while any(remaining):
        while remaining[turn]:
            action = remaining[turn].pop()
            yield from _rows(action)
            # Its tokens travel: the other computes meanwhile.
            if action.exchanges and remaining[1 - turn]:
                break
        turn = 1 - turn


def _rows(action: _Action) -> Iterator[Row]:
    yield from action.before
    yield action.row
    yield from action.after
