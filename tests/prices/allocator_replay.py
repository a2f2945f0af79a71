"""An oracle: PyTorch's caching allocator, played on a trace of allocations and frees by its own rules.

`replay` says what was asked for, handed out and held. The package estimates without a trace
(`gnomon.prices.allocator`); its `round_up` and `segment_bytes` are the rules that are played here. Leaves out several
streams, what is given back when the device is full, and options that change the rules.
Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (read 2026-11-21).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from gnomon.errors import InputError
from gnomon.prices.allocator import (
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    round_up,
    segment_bytes,
)
from gnomon.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Peaks of one trace, in bytes."""

    requested_bytes: Bytes
    """What was asked for."""
    allocated_bytes: Bytes
    """Blocks handed out (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: Bytes
    """Segments held (`torch.cuda.max_memory_reserved`)."""


def replay(events: Iterable[tuple[Hashable, int]], *, expandable: bool = False) -> Replay:
    """Play allocations and frees by the allocator's rules: best fit, split, merge with free neighbours, keep.

    events: (name, bytes) allocates, (name, 0) frees. expandable: one segment a pool, which grows at its end by pages
    of 2 MiB (small) or 20 MiB (large); where its last block is free it is that block that grows. InputError for a name
    that is allocated twice or freed without.
    """
    pools = {small: Pool(small=small, expandable=expandable) for small in (True, False)}
    live: dict[Hashable, tuple[Pool, _Block, int]] = {}
    requested = allocated = 0
    peaks = [0, 0, 0]
    for name, nbytes in events:
        if (name in live) == (nbytes > 0):
            raise InputError(f"{name!r} is {'allocated twice' if nbytes else 'freed, but not allocated'}")
        if nbytes:
            size = round_up(nbytes)
            pool = pools[size <= SMALL_BYTES]
            live[name] = pool, pool.take(size), nbytes
            sign = 1
        else:
            sign = -1
        pool, block, asked = live[name]
        requested, allocated = requested + sign * asked, allocated + sign * block.size
        if sign < 0:
            pool.give(block)
            del live[name]
        reserved = sum(pool.reserved for pool in pools.values())
        peaks = [max(pair) for pair in zip(peaks, (requested, allocated, reserved), strict=True)]
    return Replay(requested_bytes=peaks[0], allocated_bytes=peaks[1], reserved_bytes=peaks[2])


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment; neighbours in address order."""

    size: int
    serial: int
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True, eq=False)
class Pool:
    """Small or large blocks. `idle` holds the free ones as (size, serial, block), so that the first one large enough is
    the best fit; serials stand for addresses."""

    small: bool
    expandable: bool
    reserved: int = 0
    idle: list[tuple[int, int, _Block]] = field(default_factory=list)
    end: _Block | None = None
    made: int = 0

    def take(self, size: int) -> _Block:
        at = bisect_left(self.idle, (size,))
        if at < len(self.idle):
            block = self.idle.pop(at)[2]
        else:
            block = self._extended(size) if self.expandable else self._reserve(segment_bytes(size), after=None)
        block.free = False
        rest = block.size - size
        if rest >= BLOCK_BYTES if self.small or self.expandable else rest > SMALL_BYTES:
            self._split(block, size)
        return block

    def give(self, block: _Block) -> None:
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._drop(other)
                self._merge(block, other)
        insort(self.idle, (block.size, block.serial, block))

    def _extended(self, size: int) -> _Block:
        """The segment's last block, grown to hold `size`."""
        page = SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES
        last = self.end
        if last is None or not last.free:
            return self._reserve(-(-size // page) * page, after=last)
        self._drop(last)
        more = -(-(size - last.size) // page) * page
        last.size, self.reserved = last.size + more, self.reserved + more
        return last

    def _reserve(self, size: int, after: _Block | None) -> _Block:
        block = self._new(size)
        self.reserved += size
        if self.expandable:
            block.before, self.end = after, block
            if after is not None:
                after.after = block
        return block

    def _new(self, size: int) -> _Block:
        self.made += 1
        return _Block(size=size, serial=self.made)

    def _split(self, block: _Block, size: int) -> None:
        rest = self._new(block.size - size)
        block.size, rest.before, rest.after = size, block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        if self.end is block:
            self.end = rest
        insort(self.idle, (rest.size, rest.serial, rest))

    def _merge(self, block: _Block, other: _Block) -> None:
        """Join a free neighbour into `block`."""
        block.size += other.size
        if block.before is other:
            block.before, block.serial = other.before, other.serial
            if other.before is not None:
                other.before.after = block
        else:
            block.after = other.after
            if other.after is not None:
                other.after.before = block
        if self.end is other:
            self.end = block

    def _drop(self, block: _Block) -> None:
        del self.idle[bisect_left(self.idle, (block.size, block.serial))]
