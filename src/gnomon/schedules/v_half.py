"""V-Half and V-Min: half and a third of 1F1B's activations for part of its bubble (Qi et al. 2024, "Pipeline
parallelism with controllable memory").

Both return compute rows, two stages a rank in a V. They repeat one microbatch's building block every six cells (F, I, W
of two chunks, all of one length T) and leave the idle cells out. How far apart neighbouring ranks are in each of the
four passes through the V fixes how long an activation lives, hence the memory. With enough microbatches a step from
rest takes 6mT and a bubble of about 3pT for V-Half and 4pT for V-Min, where 1F1B has 6(p - 1)T. Left out: messages, and
blocks for unequal times, with which more cells are idle.
"""

from __future__ import annotations

import numpy as np

from gnomon.program.rows import KIND, Longs, Rows, by_time, check_counts

CELLS = 6
"""Cells between one microbatch and the next: F, I and W of two chunks."""


def v_half(num_ranks: int, num_microbatches: int) -> Rows:
    """Stages r and 2p - 1 - r on rank r; at most p + 3 chunk activations on a rank, where 1F1B's rank 0 has 2p.

    Distances between ranks average 1.5 cells. The turns have the smallest bubble of all of 1..6 cells, tried for p = 2
    to 12: 3p - 4 cells for even p, 3p - 3 for odd.
    """
    check_counts("v_half", num_ranks, num_microbatches)
    turns = (1, 2, 5) if num_ranks % 2 else (4, 2, 2)
    return _repeat(v_passes(num_ranks, (1, 2, 1, 2), turns), num_microbatches)


def v_min(num_ranks: int, num_microbatches: int) -> Rows:
    """Stages r and 2p - 1 - r on rank r; at most 2p/3 + 3 chunk activations on a rank, where 1F1B's rank 0 has 2p.

    Neighbouring ranks are one cell apart. The turns have the smallest bubble of all of 1..6 cells, tried for p = 2 to
    12: 4p - 5 cells. With p a multiple of three the plain turns would put two actions into one cell.
    """
    check_counts("v_min", num_ranks, num_microbatches)
    turns = (1, 1, 1) if num_ranks % 3 else (5, 1, 3)
    return _repeat(v_passes(num_ranks, (1, 1, 1, 1), turns), num_microbatches)


def v_passes(num_ranks: int, distance: tuple[int, int, int, int], turns: tuple[int, int, int]) -> Longs:
    """Cells [ranks, 4] of one microbatch's F down, F up, I down, I up.

    distance: cells from a rank to the next in each pass. turns: cells between the last of a pass and the first of the
    next, on the rank where the V turns.
    """
    rank = np.arange(num_ranks, dtype=np.int64)
    out = np.empty((num_ranks, 4), np.int64)
    start = 0
    for leg, (step, turn) in enumerate(zip(distance, (*turns, 0), strict=True)):
        out[:, leg] = start + step * (rank if leg % 2 == 0 else num_ranks - 1 - rank)
        start += step * (num_ranks - 1) + turn
    return out


def fits(passes: Longs) -> bool:
    """Whether the four actions of every rank stand in different cells of the six."""
    cells = np.sort(passes % CELLS, axis=1)
    return bool((np.diff(cells, axis=1) > 0).all())


def weight_cells(passes: Longs) -> Longs:
    """Cells [ranks, 2] of W for chunk 1 and chunk 0: the two cells left, so assigned that activations live shortest."""
    out = np.empty((len(passes), 2), np.int64)
    for rank, (_, _, input_1, input_0) in enumerate(passes.tolist()):
        free = sorted(set(range(CELLS)) - set((passes[rank] % CELLS).tolist()))
        choices = [(_next(input_1, a), _next(input_0, b)) for a, b in (free, free[::-1])]
        out[rank] = min(choices, key=sum)
    return out


def _next(cell: int, residue: int) -> int:
    """The first cell after `cell` that is `residue` modulo the six."""
    return cell + 1 + (residue - cell - 1) % CELLS


def _repeat(passes: Longs, num_microbatches: int) -> Rows:
    """All microbatches, one every six cells; a rank's order is that of the cells."""
    num_ranks = len(passes)
    assert fits(passes), "two actions of a rank stand in one cell"
    block = np.concatenate([passes, weight_cells(passes)], axis=1)
    unit, up = np.arange(num_microbatches), np.array([0, 1, 1, 0, 1, 0])
    rank = np.arange(num_ranks)[:, None]
    stage = np.where(up, 2 * num_ranks - 1 - rank, rank)
    kind = np.array([KIND[name] for name in ("F", "F", "I", "I", "W", "W")], np.int8)
    return by_time(
        time=(block[:, :, None] + CELLS * unit).reshape(num_ranks, -1),
        kind=np.repeat(kind, num_microbatches),
        stage=np.repeat(stage, num_microbatches, axis=1).astype(np.int16),
        unit=np.tile(unit, CELLS).astype(np.int32),
        num_stages=2 * num_ranks,
        num_units=num_microbatches,
    )
