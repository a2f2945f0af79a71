"""Memory-bound kernels: the roofline, the floor of each kernel, and a measured cast."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.hardware import Device, catalogue
from gnomon.ops.curve import Walk
from gnomon.prices import curves_for, stream_seconds

H100 = catalogue.device("h100-sxm-80gb")
DEVICES = st.sampled_from(catalogue.device_names()).map(catalogue.device)
KINDS: tuple[Walk, ...] = ("plain", "reduce", "reduce_grad", "gather", "scatter")


@given(st.integers(0, 10**11), st.integers(0, 10**11), st.integers(1, 20), st.sampled_from(KINDS), DEVICES)
def test_never_under_the_roofline_nor_the_floor(
    read: int, write: int, kernels: int, kind: Walk, device: Device
) -> None:
    curves = curves_for(device)
    price = stream_seconds(read, write, device, curves, kernels=kernels, kind=kind)
    floor = kernels * curves.stream_for(kind).t0_s
    assert price >= floor + (read + write) / device.memory_bytes_per_s


@given(st.integers(0, 10**10), st.integers(1, 10**9), st.sampled_from(KINDS))
def test_more_bytes_take_longer(read: int, more: int, kind: Walk) -> None:
    curves = curves_for(H100)
    assert stream_seconds(read + more, 0, H100, curves, kind=kind) > stream_seconds(read, 0, H100, curves, kind=kind)


def test_no_kernels_cost_nothing_and_each_costs_its_floor() -> None:
    curves = curves_for(H100)
    assert stream_seconds(0, 0, H100, curves, kernels=0) == 0.0
    assert stream_seconds(0, 0, H100, curves, kernels=5) == pytest.approx(5 * curves.stream_for("plain").t0_s)


def test_vector_work_limits_where_bytes_do_not() -> None:
    """67 TFLOP of fp32 vector work take a second on H100."""
    price = stream_seconds(8, 8, H100, curves_for(H100), vector_flops=67e12)
    assert price == pytest.approx(1.0, rel=0.01)


def test_arrays_are_many_sizes_at_once() -> None:
    prices = stream_seconds(np.array([1e6, 1e9]), 0.0, H100, curves_for(H100))
    assert isinstance(prices, np.ndarray)
    assert prices[1] == stream_seconds(10**9, 0, H100, curves_for(H100))


@pytest.mark.parametrize(("m", "k", "measured_us"), [(32768, 16384, 524.43), (16384, 8192, 133.39)])
def test_a_measured_cast_from_bf16_to_fp8(m: int, k: int, measured_us: float) -> None:
    """H100 SXM, three bytes an element. Source: NVIDIA AIConfigurator's tables (Apache-2.0), vLLM 0.24.0."""
    price = stream_seconds(2 * m * k, m * k, H100, curves_for(H100))
    assert price * 1e6 == pytest.approx(measured_us, rel=0.08)
