"""The price of a captured op that no kind says: its matrix products as products, the rest by bytes.

Each ATen op is a kernel; a backward takes one for each kernel of the forward, and a matmul for each operand that wants
a gradient. A custom op whose author says what it costs is priced by that: its seconds, or the longer of its FLOPs at
the device's peak and its bytes. Returns a `CapturedPrice`. What it leaves out is what only a rule of its own would say
(fusion, gathers, scans).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnomon.graph import Cost, Op, Setting, Work, captured_matmuls, costed_flops
from gnomon.hardware.types import Device
from gnomon.prices.curves import Curves, Time, as_time
from gnomon.prices.gemm import gemm_seconds, peak_of
from gnomon.prices.stream import stream_seconds
from gnomon.tensors.captured import BACKWARD
from gnomon.tensors.captured import seconds as seconds_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPrice:
    """What running a captured op costs on the device."""

    device_s: Time
    """Seconds that the device is busy."""
    kernels: int
    """Kernels launched."""


def captured_price(
    op: Op, work: Work, setting: Setting, device: Device, curves: Curves, *, backward: bool
) -> CapturedPrice:
    """Forward or backward of a captured op."""
    assert op.captured is not None, "of captured ops only"
    kernels = sum(1 for node in op.captured.nodes if not node.view)
    dtype = setting.dtypes.resolve("compute")
    costs = [node.cost for node in op.captured.nodes if node.cost is not None]
    timed = [cost for cost in costs if cost.seconds]
    moving: Time = stream_seconds(work.read_bytes, work.write_bytes, device, curves, kernels=kernels)
    if timed and op.captured.is_priced and len(timed) == len(costs):
        moving = 0.0
    flops = costed_flops(op, setting.sizes, backward=backward)
    computing = np.asarray(flops, dtype=np.float64) / peak_of(dtype, device) if costs else 0.0
    seconds: Time = as_time(np.maximum(moving, computing)) if costs and not timed else moving
    for cost in timed:
        seconds = seconds + _stated_seconds(cost, setting, backward=backward)
    for b, m, n, k, num_grads in captured_matmuls(op, setting.sizes):
        times = num_grads if backward else 1
        if times:
            seconds = seconds + times * gemm_seconds(m, n, k, b, dtype=dtype, device=device, curves=curves)
    return CapturedPrice(device_s=seconds, kernels=kernels)


def _stated_seconds(cost: Cost, setting: Setting, *, backward: bool) -> Time:
    """The seconds that the author of a custom op states."""
    if backward and not cost.backward_seconds:
        return as_time(np.asarray(BACKWARD * seconds_of(cost.seconds, setting.sizes)))
    return as_time(np.asarray(seconds_of(cost.backward_seconds if backward else cost.seconds, setting.sizes)))
