"""The price of a captured op that no rule knows: its matrix products as products, the rest by bytes.

Each ATen op is a kernel; a backward takes one for each kernel of the forward, and a product for each operand that wants
a gradient. Returns an `OpPrice`. What it leaves out is what only a rule of its own would say (fusion, gathers, scans),
so a band is wider by the share of time that such ops have.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.graph import Op, Setting, Work, captured_products
from gnomon.hardware.types import Device
from gnomon.prices.curves import Curves, Time
from gnomon.prices.gemm import gemm_seconds
from gnomon.prices.stream import stream_seconds


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
    seconds: Time = stream_seconds(work.read_bytes, work.write_bytes, device, curves, kernels=kernels)
    dtype = setting.dtypes.resolve("compute")
    for b, m, n, k, wanted in captured_products(op, setting.sizes):
        times = wanted if backward else 1
        if times:
            seconds = seconds + times * gemm_seconds(m, n, k, b, dtype=dtype, device=device, curves=curves)
    return CapturedPrice(device_s=seconds, kernels=kernels)
