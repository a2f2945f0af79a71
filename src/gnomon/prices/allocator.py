"""What the memory allocator adds to tensors: rounding, segments kept, and memory outside of it.

Figures of PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator): blocks of 512 bytes, segments of 2 MiB for
small and 20 MiB for large blocks. Returns bytes. Leaves out the exact layout in time: fragmentation is one factor.
"""

from __future__ import annotations

from gnomon.hardware import Device
from gnomon.plans import Stack

BLOCK = 512
LARGE_SEGMENT = 20 * 2**20
CONTEXT_BYTES = 600 * 2**20
"""CUDA context, kernels' code and cuBLAS workspace of a training process: 0.4 to 0.8 GiB is usual. Unchecked."""
COMMUNICATOR_BYTES = 200 * 2**20
"""NCCL's buffers of one communicator with its channels, on large nodes. Unchecked."""


def reserved_estimate(allocated: float, largest: float, stack: Stack) -> float:
    """Bytes that the allocator holds when tensors peak at `allocated` and the largest is `largest`.

    Expandable segments keep nearly nothing beyond it; otherwise one segment of the largest size is usually unusable.
    """
    slack = 0.01 * allocated if stack.allocator == "expandable_segments" else 0.02 * allocated + min(largest, 2 * 2**30)
    return float(-(-(allocated + slack) // LARGE_SEGMENT) * LARGE_SEGMENT)


def device_overhead(device: Device, stack: Stack, communicators: int) -> int:
    """Bytes outside the allocator: context, libraries, communication buffers."""
    if device.kind != "gpu":
        return 0
    if stack.device_overhead_bytes is not None:
        return stack.device_overhead_bytes
    return CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES
