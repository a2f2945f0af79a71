"""Tiles of a matrix product from hardware units, without a search: rows and vectors of sums that stay in registers.

`constructed(m, n, k, device)` starts with one vector of one row and grows the axis that saves most loads for the
registers it takes, until they are full; tiles on that way and beside it, aligned to whole vectors and with little of
the last tile empty, are ranked by `foretold`. The first is used as it is. Leaves out the text (cpp/linear.cpp).
Source: Roller (OSDI 2022): aligned tiles, growth by data reuse, few candidates ranked by a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gnomon.compiler.device import DeviceDescription

SPARE = 2
"""Registers beside sums and weights: a number of x, and what a load is on its way to."""
VECTORS = (2, 3, 4)
"""Of a tile: with one, each product would wait for a load of its own (2 to 3 times slower, measured)."""
A_TILE = 40.0
"""Vector instructions to begin and end a tile, beside its sums and results."""
LATENCY = 4
"""Cycles of a fused multiply-add: so many sums hide it."""
LOADS = 1.2
"""Loads that a core does beside each product."""


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
        full = max((r for r in range(1, 32) if fits(MatmulTile(r, vectors), device)), default=0)
        if full:
            every.add(MatmulTile(full, vectors))
            # As many blocks as full tiles take, with rows dealt evenly: the last is then hardly empty.
            even = -(-m // -(-m // full))
            every.add(MatmulTile(max(1, even), vectors))
    return sorted(one for one in every if one.sums >= min(LATENCY, m))


def foretold(tile: MatmulTile, m: int, n: int, k: int, device: DeviceDescription) -> float:
    """Seconds of a product (m, k) x (n, k) on one worker: each tile's sums, its loads, its beginning and end, what is
    empty of the last, and weights that are turned once."""
    lanes, rate = device.vectors.lanes, device.vectors.rate
    blocks = -(-m // tile.rows)
    panels = -(-n // (tile.vectors * lanes))
    total = 0.0
    for rows, many in _dealt(m, blocks).items():
        sums = rows * tile.vectors
        each = max(sums, (rows + tile.vectors) / LOADS, LATENCY)
        total += many * panels * (k * each + A_TILE + 4 * sums)
    turned = panels * tile.vectors * k * 2.0
    return (total + turned) / rate


def _dealt(m: int, blocks: int) -> dict[int, int]:
    """Rows of a block -> how many blocks have so many: they are as even as they can be."""
    less = m // blocks
    larger_blocks = m - less * blocks
    return {rows: many for rows, many in ((less, blocks - larger_blocks), (less + 1, larger_blocks)) if many and rows}


@cache
def constructed(m: int, n: int, k: int, device: DeviceDescription) -> tuple[MatmulTile, ...]:
    """Tiles for a size, the one that is foretold to be fastest first."""
    tiles = candidates(m, device)
    return tuple(sorted(tiles, key=lambda one: (foretold(one, m, n, k, device), -one.sums)))
