"""Messages between ranks, the order of communicators, and pools: the rules that are not about one buffer's contents.

A send and its receive are matched by (communicator, sender's stage, receiver's stage, unit), so no order is
assumed; whether the order is right for a communicator that matches by order is checked apart, as is the order of
collectives over their members: a wrong order on two streams leaves the graph of dependencies acyclic.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gnomon.program.effects import EffectTable
from gnomon.program.problems import Problem
from gnomon.program.program import Communicator, Program

Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]
_UNIT_BITS, _STAGE_BITS, _ROW_BITS = 18, 11, 23  # what from_columns allows: 2**18 units, 2**11 stages, 2**23 rows


class AddEdges(Protocol):
    """Takes edges: source rows, target rows, distance in steps."""

    def __call__(
        self, source: Longs, target: Longs, distance: int | NDArray[np.int32], *, data: bool, strict: bool = ...
    ) -> None: ...


def messages(program: Program, add: AddEdges) -> tuple[tuple[Longs, Longs], list[Problem]]:
    """Matched (sends, receives) of all communicators, and the problems met. Adds their edges through `add`."""
    all_sends, all_receives = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    problems: list[Problem] = []
    index = {comm.name: i for i, comm in enumerate(program.comms)}
    comm_of = np.array([index.get(kind.comm, -1) for kind in program.kinds], np.int64)[program.kind]
    for row, override in program.overrides.items():
        if override.comm:
            comm_of[row] = index[override.comm]
    for i, comm in enumerate(program.comms):
        mine = np.flatnonzero(comm_of == i)
        sends, receives = _side(program, mine, "send"), _side(program, mine, "recv")
        problems += _duplicates(program, *sends) + _duplicates(program, *receives)
        matched = _match(sends, receives)
        problems += _unmatched(program, comm, sends, matched[0], "send without receive")
        problems += _unmatched(program, comm, receives, matched[1], "receive without send")
        pair = sends[1][matched[0]], receives[1][matched[1]]
        if comm.semantics != "rendezvous":
            add(*pair, 0, data=True)
        if comm.ordered or comm.capacity:
            problems += _flows(program, comm, pair, add)
        all_sends.append(pair[0])
        all_receives.append(pair[1])
    return (np.concatenate(all_sends), np.concatenate(all_receives)), problems


def _side(program: Program, rows: Longs, side: str) -> tuple[Longs, Longs]:
    """(tags, rows) of those rows of a communicator that are on this side, sorted by tag."""
    on_side = np.array([kind.message == side for kind in program.kinds])
    rows = rows[on_side[program.kind[rows]]]
    hop = np.array([kind.hop if side == "send" else -kind.hop for kind in program.kinds], np.int64)
    here = program.stage[rows].astype(np.int64)
    there = here + hop[program.kind[rows]]
    for row, override in program.overrides.items():
        if override.peer is not None:
            there[rows == row] = override.peer
    np.clip(there, -1, program.num_stages, out=there)  # a hop past either end: one stage that nobody has
    # A receive looks against the hop of its kind, so both sides of a message name the same two stages.
    source, target = (here, there) if side == "send" else (there, here)
    # Source, target and unit in one integer, each one higher since -1 stands for "none"; the row below them, so that
    # one sort orders by message and then by issue. 11 + 11 + 18 + 23 bits are 63: the sign stays free.
    tag = ((source + 1) << _STAGE_BITS | (target + 1)) << _UNIT_BITS | (program.unit[rows] + 1)
    packed = np.sort(tag << _ROW_BITS | rows)
    return packed >> _ROW_BITS, packed & ((1 << _ROW_BITS) - 1)


def _duplicates(program: Program, tags: Longs, rows: Longs) -> list[Problem]:
    twice = np.flatnonzero(tags[1:] == tags[:-1]) + 1
    return [
        Problem.of(
            program,
            "duplicate message",
            int(max(rows[i], rows[i - 1])),
            f"the same message as {program.where(int(min(rows[i], rows[i - 1])))}",
        )
        for i in twice.tolist()
    ]


def _match(sends: tuple[Longs, Longs], receives: tuple[Longs, Longs]) -> tuple[Longs, Longs]:
    """Indices into the two sides whose tags agree; of duplicates the first."""
    # `return_index` gives the first of equals, so that a duplicate is reported once and its message still matches.
    tags, index = np.unique(sends[0], return_index=True) if len(sends[0]) else (sends[0], np.zeros(0, np.int64))
    first = np.ones(len(receives[0]), bool)
    np.not_equal(receives[0][1:], receives[0][:-1], out=first[1:])
    at = np.searchsorted(tags, receives[0])
    matched = np.zeros(len(receives[0]), bool)
    inside = at < len(tags)
    matched[inside] = tags[at[inside]] == receives[0][inside]
    keep = np.flatnonzero(matched & first)
    return index[at[keep]], keep


def _unmatched(
    program: Program, comm: Communicator, side: tuple[Longs, Longs], matched: Longs, what: str
) -> list[Problem]:
    tags, rows = side
    if len(matched) == len(rows):
        return []
    unmatched = ~np.isin(tags, tags[matched])
    problems = []
    for i in np.flatnonzero(unmatched).tolist():
        # Taken apart as `_side` put it together.
        pair, unit = divmod(int(tags[i]), 1 << _UNIT_BITS)
        source, target = divmod(pair, 1 << _STAGE_BITS)
        route = f"stage {source - 1} to stage {target - 1}" + (f", unit {unit - 1}" if unit else "")
        problems.append(Problem.of(program, what, int(rows[i]), f"no partner on communicator {comm.name!r} ({route})"))
    return problems


def _flows(program: Program, comm: Communicator, pair: tuple[Longs, Longs], add: AddEdges) -> list[Problem]:
    """Order and capacity of the messages between each pair of rank classes."""
    sends, receives = pair
    if not len(sends):
        return []
    # One number for each ordered pair of classes: `side="right"` counts classes from 1, so the base is one more.
    cls = np.searchsorted(program.class_ptr, sends, side="right") * np.int64(program.num_classes + 1)
    cls += np.searchsorted(program.class_ptr, receives, side="right")
    order = np.lexsort((sends, cls))
    sends, receives, cls = sends[order], receives[order], cls[order]
    problems = []
    if comm.ordered:
        # Within a flow sends are in issue order: a receive that is issued before the one of an earlier send would take
        # its message.
        for i in np.flatnonzero((cls[1:] == cls[:-1]) & (receives[1:] < receives[:-1])).tolist():
            early, late = program.token(int(receives[i + 1])), program.token(int(receives[i]))
            sent = program.token(int(sends[i]))
            why = f"{late} comes after {early}, but {sent} is sent first and {comm.name!r} matches by order"
            problems.append(Problem.of(program, "wrong order on a communicator", int(receives[i + 1]), why))
    if comm.capacity and comm.semantics == "buffered":
        starts = np.flatnonzero(np.append(True, cls[1:] != cls[:-1]))
        for begin, end in zip(starts.tolist(), np.append(starts[1:], len(cls)).tolist(), strict=True):
            flow = np.sort(receives[begin:end])
            # Send k waits for receive k - capacity; what is negative is a receive of an earlier step (floor division).
            steps, index = np.divmod(np.arange(end - begin) - comm.capacity, end - begin)
            add(flow[index], sends[begin:end], (-steps).astype(np.int32), data=False)
    return problems


def collective_orders(program: Program) -> list[Problem]:
    """Groups on one communicator must come in one order in all of its rank classes, and be complete."""
    grouped = np.flatnonzero(program.group >= 0)
    sequences: dict[str, dict[int, list[int]]] = {}
    row_of: dict[tuple[int, int], int] = {}
    for row in grouped.tolist():
        comm = program.comm_of(row)
        if comm and not program.kinds[program.kind[row]].message:
            cls, group = program.rank_class(row), int(program.group[row])
            sequences.setdefault(comm, {}).setdefault(cls, []).append(group)
            row_of.setdefault((cls, group), row)
    problems = []
    for comm, by_class in sequences.items():
        (first, first_sequence), *others = sorted(by_class.items())
        for cls, sequence in others:
            if sequence == first_sequence:
                continue
            i = next(
                (i for i, (a, b) in enumerate(zip(first_sequence, sequence, strict=False)) if a != b),
                min(len(first_sequence), len(sequence)),
            )
            row = row_of[cls, sequence[i]] if i < len(sequence) else row_of[first, first_sequence[i]]
            ours = (
                f"{program.token(row_of[first, first_sequence[i]])}#{first_sequence[i]}"
                if i < len(first_sequence)
                else "nothing"
            )
            theirs = f"{program.token(row_of[cls, sequence[i]])}#{sequence[i]}" if i < len(sequence) else "nothing"
            why = f"collective {i} on {comm!r} is {ours} on rank class {first} but {theirs} on rank class {cls}"
            problems.append(Problem.of(program, "communicator orders disagree", row, why))
    return problems


def pool_edges(program: Program, table: EffectTable, opens: Bools, release: Bools, add: AddEdges) -> None:
    """Adds the edges of a pool: of n, the k-th allocation of a rank waits for its (k - n)-th free, wrapping into the
    step before.

    opens, release: entries that allocate a buffer (growing one takes no further place) and that free one.
    """
    for pool in program.pools:
        members = [i for i, b in enumerate(program.buffers) if b.pool == pool.name]
        mine = np.isin(table.buffer_class(table.buffer), members)
        opened = np.sort(table.row[mine & opens].astype(np.int64))
        freed = np.sort(table.row[mine & release].astype(np.int64))
        for cls in range(program.num_classes):
            low, high = program.class_ptr[cls], program.class_ptr[cls + 1]
            takes, gives = (rows[(rows >= low) & (rows < high)] for rows in (opened, freed))
            place = np.arange(len(takes)) - pool.size
            never = takes[place >= len(gives)]  # nothing is freed for it: an edge to itself, which is a deadlock
            add(never, never, 0, data=False, strict=True)
            if len(gives):
                takes, place = takes[place < len(gives)], place[place < len(gives)]
                steps, index = np.divmod(place, len(gives))
                add(gives[index], takes, (-steps).astype(np.int32), data=False, strict=True)
