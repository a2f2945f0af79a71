"""What ring attention runs besides its kernels: partial outputs are merged, halves of tensors copied, gradients added.

`ring_seconds(…)` is for a causal mask and sequences dealt in zigzag, where of the steps after the first one half has
all queries and half of the keys, and the other half of the queries and all keys. Leaves out: the kernels of attention
and which tensors are sent (`sharding`), and merging of the softmax's statistics, which are a head size smaller.
Source: NVIDIA/TransformerEngine v1.11 transformer_engine/pytorch/attention.py AttnFuncWithCPAndKVP2P, read 2026-11-23.
"""

from __future__ import annotations

from gnomon.hardware.types import Device
from gnomon.prices.curves import Curves, Size
from gnomon.prices.kernels import OpPrice
from gnomon.prices.stream import stream_seconds

FORWARD_KERNELS, BACKWARD_KERNELS = 3, 6
"""Launches of a step after the first besides attention's own: a copied half, two merges; copied halves, gradients of
keys and values joined, sums of the gradients."""


def ring_seconds(
    query_bytes: Size, key_bytes: Size, ranks: int, device: Device, curves: Curves, *, backward: bool
) -> OpPrice:
    """Seconds of one attention over `ranks` of a ring, on each of them.

    query_bytes: of the rank's queries (as many as of its outputs). key_bytes: of its keys and values.
    """
    other_ranks = ranks - 1
    if backward:
        # queries: their gradient copied, then added, half the time to a half (2 read, 1 written); three halves copied
        # keys: copied, gradients joined and copied; then a half copied, gradients joined and added
        read = query_bytes * (1 + (1.5 + 0.75) * other_ranks) + key_bytes * (3 + (0.25 + 0.75 + 1.5) * other_ranks)
        written = query_bytes * (1 + (0.75 + 0.75) * other_ranks) + key_bytes * (3 + (0.25 + 0.75 + 0.75) * other_ranks)
        launches = 3 + BACKWARD_KERNELS * other_ranks
    else:
        # outputs begin as zeros, each step's are scaled and added (2 read, 1 written); a half of queries or keys copied
        read = query_bytes * (2 + (1.5 + 0.25) * other_ranks) + key_bytes * (1 + 0.25 * other_ranks)
        written = query_bytes * (2 + (0.75 + 0.25) * other_ranks) + key_bytes * (1 + 0.25 * other_ranks)
        launches = 3 + FORWARD_KERNELS * other_ranks
    return OpPrice(device_s=stream_seconds(read, written, device, curves, kernels=launches), kernels=launches)
