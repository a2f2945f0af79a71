"""One microbatch's building block of two stages a rank in a V, repeated every six cells (Qi et al. 2024, "Pipeline
parallelism with controllable memory").

F, I and W of two chunks take a cell each; idle cells are left out. How far apart neighbouring ranks are in each of the
four passes through the V fixes how long an activation lives, hence the memory (`held_units`). Leaves out blocks for
unequal times, with which more cells are idle.
"""

from __future__ import annotations

import numpy as np

from gnomon.program.rows import KIND, Longs, Rows, by_time

CELLS = 6
"""Cells between one microbatch and the next: F, I and W of two chunks."""


def v_passes(num_ranks: int, distance: tuple[int, int, int, int], turns: tuple[int, int, int]) -> Longs:
    """Cells [ranks, 4] of one microbatch's F down, F up, I down, I up.

    distance: cells from a rank to the next in each pass. turns: cells between the last of a pass and the first of the
    next, on the rank where the V turns.
    """
    rank = np.arange(num_ranks, dtype=np.int64)
    # start: the cell of a leg's first rank. From there `step` cells lie between neighbours, and the last rank of a leg
    # is the first of the next one: the V turns on it.
    out = np.empty((num_ranks, 4), np.int64)
    start = 0
    # Odd legs run from the last rank to the first: the V's way back.
    for leg, (step, turn) in enumerate(zip(distance, (*turns, 0), strict=True)):
        out[:, leg] = start + step * (rank if leg % 2 == 0 else num_ranks - 1 - rank)
        start += step * (num_ranks - 1) + turn
    return out


def fits(passes: Longs) -> bool:
    """Whether the four actions of every rank stand in different cells of the six."""
    # A block repeats every six cells, so two actions collide exactly if their cells are equal modulo six.
    cells = np.sort(passes % CELLS, axis=1)
    return bool((np.diff(cells, axis=1) > 0).all())


def weight_cells(passes: Longs) -> Longs:
    """Cells [ranks, 2] of W for chunk 1 and chunk 0: the two cells left, so assigned that activations live shortest."""
    out = np.empty((len(passes), 2), np.int64)
    for rank, (_, _, input_1, input_0) in enumerate(passes.tolist()):
        free = sorted(set(range(CELLS)) - set((passes[rank] % CELLS).tolist()))
        # Two cells are free for two Ws: either may take the first one.
        choices = [(_next(input_1, a), _next(input_0, b)) for a, b in (free, free[::-1])]
        out[rank] = min(choices, key=sum)
    return out


def _next(cell: int, residue: int) -> int:
    """The first cell after `cell` that is `residue` modulo the six."""
    return cell + 1 + (residue - cell - 1) % CELLS


def repeated_block(passes: Longs, num_microbatches: int) -> Rows:
    """All microbatches, one every six cells; a rank's order is that of the cells."""
    num_ranks = len(passes)
    assert fits(passes), "two actions of a rank stand in one cell"
    block = np.concatenate([passes, weight_cells(passes)], axis=1)
    unit, up = np.arange(num_microbatches), np.array([0, 1, 1, 0, 1, 0])
    rank = np.arange(num_ranks)[:, None]
    # Columns of the block: F of the rank's first stage, F of its second, I of the second, I of the first, W as I; `up`
    # marks the second stage.
    stage = np.where(up, 2 * num_ranks - 1 - rank, rank)
    kind = np.array([KIND[name] for name in ("F", "F", "I", "I", "W", "W")], np.int8)
    return by_time(
        time=(block[:, :, None] + CELLS * unit).reshape(num_ranks, -1),
        # All units of one column, then of the next: as `time` lies after the reshape [ranks, columns, units] -> [ranks,
        # columns * units].
        kind=np.repeat(kind, num_microbatches),
        stage=np.repeat(stage, num_microbatches, axis=1).astype(np.int16),
        unit=np.tile(unit, CELLS).astype(np.int32),
        num_stages=2 * num_ranks,
        num_units=num_microbatches,
    )


def held_units(passes: Longs, rank: int, num_microbatches: int, *, weights: bool) -> int:
    """Units of both chunks between the start of their forward and the end of their input gradient on a rank, at most.
    weights: or of their weight gradient."""
    if num_microbatches < 1:
        return 0
    # Chunk 1 goes back first, so its input gradient is the third pass.
    down, up, input_1, input_0 = passes[rank].tolist()
    ends = (input_0, input_1)
    if weights:
        after = weight_cells(passes[rank : rank + 1])[0]
        ends = (int(after[1]), int(after[0]))
    spans = ((down, ends[0]), (up, ends[1]))
    # What is held repeats once the first microbatch is through.
    count = min(num_microbatches, (max(end for _, end in spans) - min(down, up)) // CELLS + 2)
    unit = CELLS * np.arange(count)
    forwards = np.concatenate([start + unit for start, _ in spans])
    backwards = np.concatenate([end + unit for _, end in spans])
    # At each start of a forward: forwards begun so far, itself among them, less backwards that are over. The most is
    # reached at a start.
    units_open = (forwards[:, None] >= forwards).sum(axis=1) - (forwards[:, None] > backwards).sum(axis=1)
    return int(units_open.max())
