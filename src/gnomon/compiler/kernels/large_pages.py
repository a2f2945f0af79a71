"""Memory for packed weights, one tensor behind the other, in pages of 2 MiB where Linux gives them.

`LargePages().empty(shape, dtype)` gives zeros. A weight is read once a token from end to end: in pages of 4 KB eight
rows by a weight of bfloat16 took 16 GB/s of memory's 23, as what is asked for beforehand ends at a page's end, in
large ones 24, and one row 26 for 23 (measured on a virtual AMD EPYC of the fourth generation). Matrices of a layer are
smaller than a large page or little larger, so they lie in regions together; what of a region is not written to takes
no memory. A region is given back when none of its tensors is left. Where there are no large pages it is plain memory.
`zeros_of_system(shape, dtype)` is a region for one tensor, for gradients of which only a few rows are written.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20
REGION = 128 << 20
"""Bytes that are reserved at a time; a larger tensor has its own."""
ALIGNED = 64
"""Bytes of a line of a cache, at which each tensor begins."""


class LargePages:
    """Room that is taken from the front."""

    def __init__(self) -> None:
        """Takes nothing yet."""
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns zeros, which take no memory until they are written to."""
        nbytes = math.prod(shape) * dtype.itemsize
        taken = -(-nbytes // ALIGNED) * ALIGNED
        if taken > len(self._left):
            self._left = _region(max(taken, REGION))
        own, self._left = self._left[:nbytes], self._left[taken:]
        return own.view(dtype).view(*shape)

    def hold(self, tensor: Tensor) -> Tensor:
        """Returns a copy that lies here."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


def zeros_of_system(shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Zeros of which only the pages that are written to take memory; what is read but not written is one page of
    zeros. None where the system has no such memory to give."""
    try:
        return _region(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)
    except OSError:
        return None


def _region(nbytes: int) -> Tensor:
    """Bytes from the beginning of a large page on, all 0. The tensor holds the mapping."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(nbytes, dtype=torch.uint8)
    # private: what processes might share is given no large pages
    mapped = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel that was built without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    # The mapping has a page more than was asked for, so that it can begin at a multiple of PAGE.
    begin = -torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() % PAGE
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=begin, count=nbytes)
