"""Matrix products: the roofline, growth with every size, and measured points."""

from __future__ import annotations

import pytest

from gnomon.hardware import catalogue
from gnomon.prices import curves_for, gemm_seconds


@pytest.mark.parametrize("name", catalogue.device_names())
def test_every_device_of_the_catalogue_has_a_price_above_the_roofline(name: str) -> None:
    device = catalogue.device(name)
    for dtype in ("bf16", "fp16", "fp32"):
        if getattr(device.dense_peak, dtype) is not None:
            seconds = gemm_seconds(4096, 4096, 4096, dtype=dtype, device=device, curves=curves_for(device))
            peak = device.flops_per_s("fp32_matrix" if dtype == "fp32" else dtype)
            assert 2 * 4096**3 / peak < seconds < 4 * 2 * 4096**3 / peak
