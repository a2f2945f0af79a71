"""Time of kernels that a device's memory limits: elementwise, norms, softmax, copies, lookups.

`stream_seconds` is a launch floor plus bytes over the share of bandwidth that such a kernel reaches, which rises where
the data fits the last cache. Leaves out: what an op reads (`kernels`), hits on data of the kernel before (unknown).
"""

from __future__ import annotations

import numpy as np

from gnomon.hardware.types import Device
from gnomon.ops.curve import Walk
from gnomon.prices.curves import Curves, Size, Time, as_time
from gnomon.prices.measured import stream_points


def cached_efficiency(total: Size, device: Device, memory: float, cache: float) -> Size:
    """Share of the memory's peak that `total` bytes move at: `cache` for few, `memory` for many, half-way when they
    are as large as the last cache. Falls slowly enough that more bytes always take longer."""
    # Without a known cache (l2 = 0) this is `memory` for every size.
    l2 = float(device.l2_bytes or 0)
    return memory + (cache - memory) * l2 / (l2 + np.maximum(total, 1.0))


def stream_seconds(
    read_bytes: Size,
    write_bytes: Size,
    device: Device,
    curves: Curves,
    *,
    kernels: int = 1,
    kind: Walk = "plain",
    vector_flops: Size = 0,
) -> Time:
    """Seconds of `kernels` kernels that read and write these bytes in all; 0 for none.

    vector_flops: work of the vector units, in fp32; it limits where bytes do not. Never under bytes over peak bandwidth
    or FLOPs over the fp32 peak. A device that was measured has its own figures (`measured`). Source: curves, fitted to
    a bf16 -> fp8 cast and to norm, activation and loss kernels.
    """
    if kernels == 0:
        return 0.0
    if device.measured is not None:
        return stream_points(device.measured, np.asarray(read_bytes) + np.asarray(write_bytes), kernels=kernels)
    row = curves.stream_for(kind)
    total = np.asarray(read_bytes, dtype=np.float64) + np.asarray(write_bytes, dtype=np.float64)
    share = cached_efficiency(total / kernels, device, row.efficiency, row.cache_efficiency)
    moving = total / (device.memory_bytes_per_s * share)
    flops = device.dense_peak.fp32
    # The vector units may be slower than memory; the longer counts.
    if flops is not None:
        moving = np.maximum(moving, np.asarray(vector_flops, dtype=np.float64) / flops)
    return as_time(kernels * row.t0_s + moving)
