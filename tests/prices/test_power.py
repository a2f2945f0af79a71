"""What a power limit leaves of a device's peaks, and of its products, attention and other kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.hardware import catalogue
from gnomon.prices import gemm_seconds, sustained
from gnomon.prices.curves import curves_for
from gnomon.prices.power import power_share, powered
from gnomon.prices.stream import stream_seconds
from gnomon.software import Stack

SHARES = {"gb300-nvl72": 1.0, "gb200-nvl72": 0.857, "b300-sxm-288gb": 0.873, "b200-sxm-180gb": 0.794,
          "h100-sxm-80gb": 1.0, "h100-pcie-80gb": 0.827, "a100-pcie-40gb": 1.0, "mi300x-192gb": 1.0}  # fmt: skip
B200 = catalogue.device("b200-sxm-180gb")


def test_devices_with_fewer_watts_a_flop_sustain_less_of_their_peaks() -> None:
    actual = {name: power_share(catalogue.device(name)) for name in SHARES}
    assert actual == {name: pytest.approx(share, rel=0.01) for name, share in SHARES.items()}
    assert "0.79 of its peaks" in sustained(Stack(name="any", version="1"), B200).note
    assert powered(B200).dense_peak.fp8 == pytest.approx(4500e12 * power_share(B200))
    assert powered(B200).memory_bytes_per_s == B200.memory_bytes_per_s
    unknown = replace(B200, power_w=None)
    assert powered(unknown) is unknown


@given(st.floats(1.0, 8.0), st.floats(0.5, 1.0))
def test_a_higher_peak_never_sustains_less(faster: float, power: float) -> None:
    assert B200.dense_peak.bf16 is not None and B200.power_w is not None
    one = replace(B200, power_w=B200.power_w * power)
    two = replace(one, dense_peak=replace(one.dense_peak, bf16=B200.dense_peak.bf16 * faster))
    peaks = [powered(device).dense_peak.bf16 or 0.0 for device in (one, two)]
    assert peaks[1] >= peaks[0] * (1 - 1e-12)


def test_products_slow_down_with_the_clock_and_kernels_that_wait_for_memory_do_not() -> None:
    curves, slow = curves_for(B200), powered(B200)
    large, thin = (8192, 8192, 8192), (16, 8192, 8192)
    ratios = []
    for shape in (large, thin):
        times = [gemm_seconds(*shape, 1, dtype="bf16", device=d, curves=curves) for d in (B200, slow)]
        ratios.append(float(times[1] / times[0]))
    assert ratios[0] == pytest.approx(1 / power_share(B200), rel=0.08) and ratios[1] < 1.05
    assert stream_seconds(2**30, 2**30, B200, curves) == stream_seconds(2**30, 2**30, slow, curves)
