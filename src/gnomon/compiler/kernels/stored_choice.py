"""Which kernel multiplies by a sparse weight: what each takes is predicted, and those near each other are tried.

`predicted(storage, shape, rows)` gives seconds by kind from a machine's rates: bytes that come from memory or the last
cache, and instructions, which mostly overlap. `dense` is the kernel of the whole matrix in the same precision. Leaves
out threads: all kinds share work among them alike. Source of the instruction counts: Zen 4, where a permutation of a
register takes the place of a multiplication.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, sqrt

from gnomon.compiler.kernels.lanes import lanes_of
from gnomon.compiler.kernels.stored_sparse import BITS, SIDE, TASK, SparseForm, Taken, form_of, kinds_of
from gnomon.compiler.machine import Machine
from gnomon.compiler.tiles.tile_cost import Rates
from gnomon.errors import InputError
from gnomon.storage.blocks import Blocks
from gnomon.storage.dense import Dense
from gnomon.storage.form import Shape, Storage
from gnomon.storage.integers import Integers
from gnomon.storage.n_of_m import NM
from gnomon.storage.sparse import KeptShare, Sparse

MULTIPLIED, PERMUTED, LISTED, CELL, SEGMENT = 1.6, 2.7, 3.0, 30.0, 30.0
"""Vector instructions' times: of a multiplication of a register; with its permutation; with one of two registers; to go
to the next columns of a panel; to the next output of rows beside each other."""
BESIDE: Mapping[int, float] = {1: 1.4, 8: 2.1, 16: 3.8, 32: 6.5}
"""The same for a kept number, by rows beside each other."""
HIDDEN = 0.7
"""Of the shorter of both, memory or instructions, what the other hides."""
FULLEST = 1.77
"""Standard deviations that the fullest of 16 outputs is above the mean."""
NEAR = 1.3
"""Times of the shortest prediction up to which a kind is tried."""


def density_of(storage: Sparse) -> float:
    """Share of the numbers that are kept."""
    if isinstance(storage, NM):
        return storage.n / storage.m
    assert isinstance(storage, KeptShare)
    return storage.kept


def predicted(storage: Sparse, shape: Shape, rows: int, rates: Rates, machine: Machine) -> dict[Taken, float]:
    """Seconds of each kind, the dense one among them."""
    forms: tuple[Taken, ...] = (*kinds_of(storage, shape), "dense")
    works = {kind: _work(storage, kind, shape, rows) for kind in forms}
    return {kind: _both(moved, work, byte_s(moved, rates, machine), rates) for kind, (moved, work) in works.items()}


def storage_s(storage: Storage, shape: Shape, rows: int, stored_bytes: float, rates: Rates, machine: Machine) -> float:
    """Seconds of a product by a matrix that is stored so, among others of `stored_bytes` in all, which caches hold or
    do not. InputError where no kernel multiplies by it."""
    if isinstance(storage, Sparse):
        kinds = (*kinds_of(storage, shape), "dense")
        works = [_work(storage, kind, shape, rows) for kind in kinds]
    else:
        bits = 16 if isinstance(storage, Dense) and storage.dtype == "bf16" else 32
        if isinstance(storage, Integers):
            bits = 8
        elif not isinstance(storage, Dense):
            raise InputError(f"no time is predicted of products by {storage.name}")
        few = isinstance(storage, Integers) and storage.bits < bits
        works = [(float(storage.bytes(shape)), _whole(shape, bits, few)[1] * _tiled(rows) * MULTIPLIED)]
    return min(_both(moved, work, byte_s(stored_bytes, rates, machine), rates) for moved, work in works)


def _work(storage: Sparse, kind: str, shape: Shape, rows: int) -> tuple[float, float]:
    """Returns the bytes and the vector instructions of the matmul."""
    if kind == "dense":
        moved, instructions = _whole(shape, BITS[storage.value])
        return moved, instructions * _tiled(rows) * MULTIPLIED
    form = form_of(storage, kind, rows)  # type: ignore[arg-type]
    panels, columns, density = -(-shape[0] // SIDE), form.padded(shape[1]), density_of(storage)
    if form.kind == "n of m":
        steps = float(panels * (columns // form.block) * (16 * form.n // form.m))
        turns = columns // (form.block * form.turn[0])
        moved = 64.0 * (steps + panels * turns * form.turn[1])
        return moved, steps * _tiled(rows) * PERMUTED
    if form.kind == "blocks":
        assert isinstance(storage, Blocks)
        steps = panels * shape[1] * density / form.per
        return 64 * steps, steps * _tiled(rows) * MULTIPLIED
    if form.kind == "listed":
        cells = panels * columns // (2 * form.block)
        steps = cells * _steps(storage, form)
        instructions = steps * _tiled(rows) * LISTED + cells * CELL * -(-rows // 8)
        # A step reads a register of numbers, 64 bytes, and a byte of place for each of them.
        return (64 + 16 * form.per) * steps, instructions
    nonzeros, segments = density * shape[0] * shape[1], -(-shape[0] // TASK) * TASK * -(-shape[1] // form.wide)
    work = 0.0
    # At most 32 rows lie beside each other.
    for first in range(0, rows, 32):
        lanes = next(n for n in BESIDE if n >= min(rows - first, 32))
        work += nonzeros * BESIDE[lanes] + segments * SEGMENT
    # 4 bytes of float32 and 2 of place.
    return 6 * nonzeros, work


def _whole(shape: Shape, bits: int, few: bool = False) -> tuple[float, float]:
    """Returns the bytes of a whole matrix of so many bits as it is laid here, and a row's instructions. few: whether
    its codes have fewer bits than the activations."""
    lanes = lanes_of(shape[0], bits)
    registers = -(-shape[0] // lanes.side) * shape[1] * bits / 32
    return 4 * lanes.side * registers, registers * (lanes.few_bits if few else lanes.instructions[bits])


def _steps(storage: Sparse, form: SparseForm) -> float:
    """Returns the loop's steps in a panel's stretch of twice a register of columns, on average, as its fullest output
    needs them."""
    columns, density = 2 * form.block, density_of(storage)
    if isinstance(storage, NM):
        return float(ceil(columns * density / form.per))
    clump = storage.size[1] if isinstance(storage, Blocks) else 1
    mean = columns * density
    fullest = min(float(columns), mean + FULLEST * sqrt(mean * (1 - density) * clump))
    return min(fullest + (form.per - 1) / 2, columns) / form.per


def _tiled(rows: int) -> int:
    """Rows that tiles of 8 and fewer compute for so many."""
    many = -(-rows // 8)
    return sum(next(n for n in (1, 2, 4, 6, 8) if n >= len(range(i, rows, many))) for i in range(many))


def _both(moved: float, instructions: float, a_byte_s: float, rates: Rates) -> float:
    memory, work = moved * a_byte_s, instructions / rates.instructions_per_s
    return max(memory, work) + (1 - HIDDEN) * min(memory, work)


def byte_s(stored_bytes: float, rates: Rates, machine: Machine) -> float:
    """Seconds to read one of so many bytes that are read again and again: from the last cache, from memory, or, where
    they are about as many as the cache holds, from both. `rates` are of reading and writing."""
    cache, memory = 2 / rates.l3_bytes_per_s, 1 / (1.2 * rates.memory_bytes_per_s)
    beyond_cache = min(max((stored_bytes / machine.l3_bytes - 0.6) / 0.4, 0.0), 1.0)
    return cache + beyond_cache * max(memory - cache, 0.0)
