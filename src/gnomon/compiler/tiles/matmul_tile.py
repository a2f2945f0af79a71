"""Tiles of a matmul from hardware units, without a search: rows and vectors of sums that stay in registers.

`constructed(m, n, k, device)` starts with one vector of one row and grows the axis that saves most loads for the
registers it takes, until they are full; tiles on that path and near it, aligned to whole vectors and with little of
the last tile empty, are ranked by `predicted_s`. The first is used as it is. Leaves out the text (cpp/linear.cpp).
Source: Roller (OSDI 2022): aligned tiles, growth by data reuse, few candidates ranked by a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gnomon.compiler.tiles.device import DeviceDescription

SPARE = 2
"""Registers besides sums and weights: a number of x, and what a load is on its way to."""
VECTORS = (1, 2, 3, 4)
"""Of a tile."""
BROADCASTS_IN_PRODUCTS = 16
"""Lanes from which on a product reads one number for all lanes from memory by itself (AVX-512): a tile of one vector
then needs no load of x. In narrower sets it needs one a product, and takes 2 to 3 times as long (measured)."""
ADDRESSES = 12
"""Rows whose addresses stay in general registers (x86-64 has 16). Where there is one product for each row of x, every
further row loads its address anew."""
A_SUM = 4.0
"""Vector instructions that end one sum: it is written to memory, scaled, and stored."""
CROWDED = 0.1
"""Of a tile's end, for each pair of its sums: the more end together, the less of it overlaps with the next tile."""
FROM_L2 = 0.1
"""Of a vector of weights where a panel takes more than half of the first cache."""
LATENCY = 4
"""Cycles of a fused multiply-add: so many sums hide it."""
A_LOAD = 1.4
"""Vector instructions' time of a load into a register."""
A_ROW = 0.06
"""Of one number of x that becomes a vector, where its load is not what bounds a step of k."""
A_STEP = 0.05
"""Of counting k."""
A_TURN = 5.0
"""Of a vector of weights that is read and stored turned."""


@dataclass(frozen=True, slots=True, order=True)
class MatmulTile:
    rows: int
    """Rows whose sums stay in registers."""
    vectors: int
    """Vectors of columns of each of these rows."""

    @property
    def sums(self) -> int:
        return self.rows * self.vectors


def fits(tile: MatmulTile, device: DeviceDescription) -> bool:
    """Whether sums, a vector of weights for each column and what is spare stay in registers."""
    return tile.sums + tile.vectors + SPARE <= device.vectors.registers


def grown(device: DeviceDescription) -> list[MatmulTile]:
    """The way from one sum to full registers, by loads saved for registers taken (Roller's data reuse score)."""
    here, way = MatmulTile(1, 1), [MatmulTile(1, 1)]
    while True:
        next_to = [MatmulTile(here.rows + 1, here.vectors), MatmulTile(here.rows, here.vectors + 1)]
        fit = [one for one in next_to if fits(one, device) and one.vectors <= VECTORS[-1]]
        if not fit:
            return way
        here = max(fit, key=lambda one: _saved(here, one))
        way.append(here)


def _saved(before: MatmulTile, after: MatmulTile) -> float:
    """Loads that a larger tile saves for each register that it takes."""
    saved_vectors = after.sums + after.vectors - before.sums - before.vectors
    return (_loads(before) - _loads(after)) / saved_vectors


def _loads(tile: MatmulTile) -> float:
    """Loads for each product of a tile."""
    return (tile.rows + tile.vectors) / tile.sums


def candidates(m: int, device: DeviceDescription) -> list[MatmulTile]:
    """The fullest tile of each number of vectors, those of the way, and of each the rows that divide m evenly."""
    every = set(grown(device))
    for vectors in VECTORS:
        most = ADDRESSES if vectors == 1 else 31
        full = max((r for r in range(1, most + 1) if fits(MatmulTile(r, vectors), device)), default=0)
        if full:
            every.add(MatmulTile(full, vectors))
            # As many blocks as full tiles take, with rows dealt evenly: the last is then hardly empty.
            even = -(-m // -(-m // full))
            every.add(MatmulTile(max(1, even), vectors))
    if device.vectors.lanes >= BROADCASTS_IN_PRODUCTS:
        # Few sums end sooner, and with one vector no row saves a load.
        every |= {MatmulTile(rows, 1) for rows in range(LATENCY, min(m, ADDRESSES) + 1)}
    return sorted(one for one in every if one.sums >= min(LATENCY, m))


def predicted_s(tile: MatmulTile, m: int, n: int, k: int, device: DeviceDescription) -> float:
    """Seconds of a matmul (m, k) x (n, k) on one worker: each tile's sums, its loads, its end, what is empty of the
    last, and weights that are turned once."""
    lanes, rate = device.vectors.lanes, device.vectors.rate
    blocks = -(-m // tile.rows)
    panels = -(-n // (tile.vectors * lanes))
    alone = tile.vectors == 1 and lanes >= BROADCASTS_IN_PRODUCTS
    total = 0.0
    for rows, many in _dealt(m, blocks).items():
        sums = rows * tile.vectors
        loaded = 0 if alone else rows
        step = max(sums, A_LOAD * (loaded + tile.vectors), LATENCY) + A_ROW * loaded + A_STEP
        step += max(0, rows - ADDRESSES) if tile.vectors == 1 else 0
        step += FROM_L2 * tile.vectors if 4 * k * tile.vectors * lanes > device.levels[0].size / 2 else 0
        total += many * panels * (k * step + A_SUM * sums + CROWDED * sums**2)
    return (total + panels * tile.vectors * k * A_TURN) / rate


def _dealt(m: int, blocks: int) -> dict[int, int]:
    """Rows of a block -> how many blocks have so many: they are as even as they can be."""
    less = m // blocks
    larger_blocks = m - less * blocks
    return {rows: many for rows, many in ((less, blocks - larger_blocks), (less + 1, larger_blocks)) if many and rows}


@cache
def constructed(m: int, n: int, k: int, device: DeviceDescription) -> tuple[MatmulTile, ...]:
    """Tiles for a size, the one that is predicted to be fastest first."""
    tiles = candidates(m, device)
    return tuple(sorted(tiles, key=lambda one: (predicted_s(one, m, n, k, device), -one.sums)))
