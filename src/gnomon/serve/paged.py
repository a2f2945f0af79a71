"""The pages of an engine: the pool that one attention op of one layer has, `Pages`.

`attend(rows, q, k, v)` is the op kind `paged_attention` on rows of many sequences (`runtime.ops.paged`): new keys and
values are written where the block tables say, and each query sees its own sequence. Leaves out which block is whose
(`serving.kv_blocks`).
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnomon.runtime.ops.paged import VECTOR, PagedPool, Spans, Visibility, attend
from gnomon.serve.rows import TokenRows

MADV_NOHUGEPAGE, PAGE = 15, 4096
"""Of Linux."""


def untouched(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written to: torch's own are written as they are made. In small pages: in
    huge ones the first token of each layer's pool would take megabytes."""
    whole = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    # madvise takes whole pages: what lies before the first and behind the last stays as it is.
    begin = -(-whole.ctypes.data // PAGE) * PAGE
    if (length := (whole.ctypes.data + whole.nbytes - begin) // PAGE * PAGE) > 0 and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_NOHUGEPAGE)
    return torch.from_numpy(whole).view(dtype).view(*shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How many pages, and of what."""

    blocks: int
    """Pages."""
    size: int
    """Tokens of a block."""
    kv_heads: int
    """Key-value heads of a layer on this rank."""
    k_dim: int
    """Numbers of a head's key."""
    v_dim: int
    """Numbers of a head's value."""
    dtype: torch.dtype
    """Of keys and values as they are stored."""
    group: int = 0
    """Of `serving.kv_blocks`, whose tables are read."""


class Pages:
    """The pages of one attention op in one layer."""

    def __init__(self, room: Room, seen: Visibility) -> None:
        padded = -(-room.v_dim // VECTOR) * VECTOR
        self.group, self.seen = room.group, seen
        self.pool = PagedPool(
            keys=untouched((room.blocks, room.kv_heads, room.k_dim, room.size), room.dtype),
            values=untouched((room.blocks, room.kv_heads, room.size, padded), room.dtype),
            v_dim=room.v_dim,
        )
        self.call = self.pool.call(seen) if self.pool.fits else None

    @property
    def address(self) -> int:
        """The address of what the kernel is told of them, for kernels that have it within themselves."""
        assert self.call is not None
        return ctypes.addressof(self.call)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, used or not."""
        return self.pool.keys.nbytes + self.pool.values.nbytes

    def copy(self, source: int, target: int) -> None:
        """One block's contents to another."""
        self.pool.keys[target] = self.pool.keys[source]
        self.pool.values[target] = self.pool.values[source]

    def attend(self, rows: TokenRows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (tokens, heads, dim), k (tokens, kv heads, dim), v (tokens, kv heads, value dim) -> (tokens, heads, value
        dim)."""
        spans = Spans(begins=rows.begins, lengths=rows.lengths, table=rows.tables[self.group], threads=rows.threads)
        return attend(self.pool, self.seen, spans, q, (k, v), self.call)
