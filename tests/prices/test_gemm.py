"""Matrix products: never under the roofline, growing with every size, and measured points."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import UnpricedError
from gnomon.hardware import Device, catalogue
from gnomon.prices import curves_for, gemm_seconds

H100, A100 = catalogue.device("h100-sxm-80gb"), catalogue.device("a100-sxm-80gb")
SIZE = st.integers(1, 40_000)
DEVICES = st.sampled_from(catalogue.device_names()).map(catalogue.device)


def seconds(m: int, n: int, k: int, batch: int = 1, device: Device = H100, dtype: str = "bf16") -> float:
    price = gemm_seconds(m, n, k, batch, dtype=dtype, device=device, curves=curves_for(device))
    assert isinstance(price, float)
    return price


def widest(device: Device) -> str:
    return next(dtype for dtype in ("bf16", "fp16", "fp32") if getattr(device.dense_peak, dtype) is not None)


@given(SIZE, SIZE, SIZE, st.integers(1, 64), DEVICES)
def test_never_under_the_roofline(m: int, n: int, k: int, batch: int, device: Device) -> None:
    dtype = widest(device)
    peak = device.flops_per_s("fp32_matrix" if dtype == "fp32" else dtype)
    width = 4 if dtype == "fp32" else 2
    moved = batch * width * (m * k + k * n + m * n)
    bound = max(2 * batch * m * n * k / peak, moved / device.memory_bytes_per_s)
    assert seconds(m, n, k, batch, device, dtype) >= bound


@pytest.mark.parametrize("name", catalogue.device_names())
def test_a_large_product_reaches_a_good_part_of_the_peak(name: str) -> None:
    device = catalogue.device(name)
    dtype = widest(device)
    peak = device.flops_per_s("fp32_matrix" if dtype == "fp32" else dtype)
    reached = 2 * 8192**3 / seconds(8192, 8192, 8192, 1, device, dtype)
    assert 0.4 * peak < reached < 0.95 * peak


@given(SIZE, SIZE, SIZE, st.integers(1, 16), st.integers(0, 500), st.integers(0, 3))
def test_grows_with_every_size(m: int, n: int, k: int, batch: int, more: int, which: int) -> None:
    shape = [m, n, k, batch]
    larger = [size + more * (i == which) for i, size in enumerate(shape)]
    assert seconds(*larger) >= seconds(*shape)


@given(SIZE, SIZE, SIZE, st.floats(1, 4), st.floats(1, 4))
def test_more_flops_or_bandwidth_never_slows(m: int, n: int, k: int, flops: float, bandwidth: float) -> None:
    curves = curves_for(H100)
    assert H100.dense_peak.bf16 is not None
    faster = replace(
        H100,
        dense_peak=replace(H100.dense_peak, bf16=H100.dense_peak.bf16 * flops),
        memory_bytes_per_s=H100.memory_bytes_per_s * bandwidth,
    )
    price = gemm_seconds(m, n, k, dtype="bf16", device=faster, curves=curves)
    assert price <= gemm_seconds(m, n, k, dtype="bf16", device=H100, curves=curves)


@given(SIZE, SIZE, SIZE)
def test_rows_and_columns_are_interchangeable(m: int, n: int, k: int) -> None:
    """The transposed product is the same work; layouts are left out."""
    assert seconds(m, n, k) == pytest.approx(seconds(n, m, k), rel=1e-12)


def test_a_large_product_takes_twice_as_long_with_twice_the_depth_or_batch() -> None:
    one = seconds(8192, 8192, 8192)
    assert seconds(8192, 8192, 16384) == pytest.approx(2 * one, rel=0.03)
    assert seconds(8192, 8192, 8192, 2) == pytest.approx(2 * one, rel=0.03)


def test_no_step_inside_a_tile_and_a_small_one_at_its_edge() -> None:
    """Rows 4033 to 4096 fill the same tiles of 64 and more rows; row 4097 begins another."""
    inside = [seconds(m, 4096, 4096) for m in range(4033, 4097)]
    steps = np.diff(inside) / inside[0]
    assert steps.max() < 0.002
    assert 0 < seconds(4097, 4096, 4096) / inside[-1] - 1 < 0.07


def test_arrays_are_many_shapes_at_once() -> None:
    m, n, k = np.array([1, 300, 4096]), np.array([512, 777, 4096]), np.array([64, 65, 14336])
    prices = gemm_seconds(m, n, k, dtype="bf16", device=H100, curves=curves_for(H100))
    assert isinstance(prices, np.ndarray)
    assert prices.tolist() == [seconds(*map(int, shape)) for shape in zip(m, n, k, strict=True)]


def test_what_has_no_price_is_refused() -> None:
    with pytest.raises(UnpricedError, match="sizes are at least 1"):
        seconds(0, 4, 4)
    with pytest.raises(UnpricedError, match="fp8"):
        seconds(64, 64, 64, 1, A100, "fp8")


MEASURED = (
    ("h100-sxm-80gb", 4096, 4096, 4096, 166.03),
    ("h100-sxm-80gb", 8192, 8192, 8192, 1541.7),
    ("h100-sxm-80gb", 256, 8192, 8192, 51.348),
    ("h100-sxm-80gb", 2048, 2048, 2048, 23.865),
    ("h200-sxm-141gb", 2048, 2048, 2048, 23.533),
    ("a100-sxm-80gb", 4096, 4096, 4096, 548.9),
    ("a100-sxm-80gb", 8192, 8192, 8192, 4280.4),
    ("a100-sxm-80gb", 8192, 8192, 1024, 562.64),
    ("a100-sxm-80gb", 256, 8192, 8192, 172.15),
)
"""bf16 products: device, m, n, k, microseconds. Source: tables of NVIDIA AIConfigurator (Apache-2.0), H100, H200 under
vLLM 0.24.0, A100 under SGLang 0.5.10; short bursts at locked clocks."""


@pytest.mark.parametrize(("name", "m", "n", "k", "measured_us"), MEASURED)
def test_measured_products_are_met_within_a_sixth(name: str, m: int, n: int, k: int, measured_us: float) -> None:
    """The fits' own 90th percentile is 13 to 14%; the same shape in another library differs by 4% in the median."""
    assert seconds(m, n, k, 1, catalogue.device(name)) * 1e6 == pytest.approx(measured_us, rel=1 / 6)
