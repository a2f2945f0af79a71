"""Fused attention: the roofline, causal halves, and points of published charts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import InputError, UnpricedError
from gnomon.hardware import Device, catalogue
from gnomon.prices import attention_seconds, curves_for
from gnomon.prices.attention import Heads, attention_model, tiled_window

H100, A100 = catalogue.device("h100-sxm-80gb"), catalogue.device("a100-sxm-80gb")
SIZES = st.sampled_from((64, 80, 128, 192, 256))


def seconds(batch: int, length: int, heads: int, head_dim: int = 128, device: Device = H100, **more: Any) -> float:
    given_: dict[str, Any] = {"causal": True, "kernel": "flash3" if device is H100 else "flash2"} | more
    kv_heads = given_.pop("kv_heads", heads)
    price = attention_seconds(
        batch, length, length, heads, kv_heads, head_dim, device=device, curves=curves_for(device), **given_
    )
    assert isinstance(price, float)
    return price


@given(st.integers(1, 16), st.integers(1, 20_000), st.integers(1, 64), SIZES, st.booleans(), st.booleans())
def test_never_under_the_roofline(
    batch: int, length: int, heads: int, head_dim: int, causal: bool, backward: bool
) -> None:
    products = 5 if backward else 2  # of length x length x head size
    flops = 2 * products * batch * heads * length**2 * head_dim / (2 if causal else 1)
    moved = 2 * batch * length * heads * head_dim * (8 if backward else 4)
    bound = max(flops / H100.flops_per_s("bf16"), moved / H100.memory_bytes_per_s)
    assert seconds(batch, length, heads, head_dim, causal=causal, backward=backward) >= bound


@given(st.integers(1, 8), st.integers(1, 16_000), st.integers(1, 64), SIZES, st.integers(0, 500), st.booleans())
def test_grows_with_batch_length_and_heads(
    batch: int, length: int, heads: int, head_dim: int, more: int, backward: bool
) -> None:
    """Also where a curve bends: forwards of 128, 192 and 256."""
    one = seconds(batch, length, heads, head_dim, backward=backward)
    assert seconds(batch + more % 5, length, heads, head_dim, backward=backward) >= one
    assert seconds(batch, length + more, heads, head_dim, backward=backward) >= one
    assert seconds(batch, length, heads + more % 7, head_dim, backward=backward) >= one


def test_a_bend_is_a_line_over_waves_of_blocks() -> None:
    """132 SMs and blocks of 128 queries: 264 heads of 128 queries are two waves, half way from one to four."""
    row = curves_for(H100).attention_for("forward", 256, "flash2")
    bent = replace(row, bend=(1.0, 1.21, 1.0, 1.0, 1.0))
    for heads, factor in ((66, 1.0), (132, 1.0), (264, 1.1), (528, 1.21), (1056, 1.1), (132 * 512, 1.0)):
        size = np.array(float(heads))
        one, keys = np.ones(()), np.full((), 128.0)
        shape = Heads(
            batch=one, q_len=keys, kv_len=keys, heads=size, kv_heads=size, pairs=keys**2 / 2, width=256, width_v=256,
            causal=True,
        )  # fmt: skip
        endless = replace(H100, memory_bytes_per_s=1e30)
        straight, actual = (attention_model(shape, 1e15, endless, entry) - row.t0_s for entry in (row, bent))
        assert actual == pytest.approx(factor * straight)
    with pytest.raises(InputError, match="a factor for each"):
        replace(row, bend=(1.0,))
    with pytest.raises(InputError, match="over the factor before"):
        replace(row, bend=(1.0, 0.7, 0.7, 0.7, 0.7))


@given(st.integers(1, 8), st.integers(1, 16_000), st.floats(1, 4), st.floats(1, 4))
def test_more_flops_or_bandwidth_never_slows(batch: int, length: int, flops: float, bandwidth: float) -> None:
    assert H100.dense_peak.bf16 is not None
    faster = replace(
        H100,
        dense_peak=replace(H100.dense_peak, bf16=H100.dense_peak.bf16 * flops),
        memory_bytes_per_s=H100.memory_bytes_per_s * bandwidth,
    )
    curves = curves_for(H100)
    sizes = (batch, length, length, 16, 16, 128)
    assert attention_seconds(*sizes, causal=True, device=faster, curves=curves) <= attention_seconds(
        *sizes, causal=True, device=H100, curves=curves
    )


def test_a_causal_mask_halves_long_attention_and_fewer_keys_save_only_bytes() -> None:
    whole = seconds(4, 16384, 16, causal=False)
    assert seconds(4, 16384, 16, causal=True) == pytest.approx(whole / 2, rel=0.03)
    assert 0.98 * whole < seconds(4, 16384, 16, causal=False, kv_heads=2) < whole


def test_without_a_mask_blocks_run_in_waves() -> None:
    """FlashAttention-3 for heads of 64 has blocks of 192 queries: 22 sequences of 6 blocks fill the 132 SMs once, and
    one more costs most of a second wave; under a mask work spreads."""
    waves = [seconds(batch, 1152, 1, 64, causal=False) for batch in (16, 22, 23, 44)]
    assert waves[1] < 1.15 * waves[0]
    assert waves[2] > 1.4 * waves[1] and waves[3] < 1.2 * waves[2]
    masked = [seconds(batch, 1152, 1, 64, causal=True) for batch in (22, 23)]
    assert masked[1] < 1.1 * masked[0]


def test_a_block_that_is_not_full_costs_a_whole_one() -> None:
    """1024 queries are 6 blocks of 192, as 1152 are: time grows with the keys alone."""
    some, full = (seconds(64, length, 16, 64, causal=False) for length in (1024, 1152))
    assert some / 1024 == pytest.approx(full / 1152, rel=0.03)


def test_pairs_replace_what_the_mask_leaves() -> None:
    """A window of 1024 keys in 16384: under an eighth of the causal pairs."""
    causal = seconds(4, 16384, 16)
    windowed = seconds(4, 16384, 16, pairs=16384 * 1024 - 1024**2 // 2)
    assert windowed < causal / 5


def test_arrays_are_many_shapes_at_once() -> None:
    length = np.array([512, 4096])
    prices = attention_seconds(4, length, length, 16, 16, 128, causal=True, device=H100, curves=curves_for(H100))
    assert isinstance(prices, np.ndarray) and prices.shape == (2,)
    assert prices[1] == seconds(4, 4096, 16, kernel="flash2")


def test_a_kernel_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(UnpricedError, match="no flash3 forward"):
        seconds(1, 1024, 16, device=A100, kernel="flash3")


CHARTS = (
    ("flash3", "fwd", False, 16, 1024, 243.3),
    ("flash3", "fwd", False, 4, 4096, 861.7),
    ("flash3", "fwd", True, 16, 1024, 162.5),
    ("flash3", "fwd", True, 4, 4096, 474.7),
    ("flash3", "bwd", False, 16, 1024, 810.4),
    ("flash3", "bwd", False, 4, 4096, 2535.8),
)
"""H100 SXM, 16 heads of 128, fp16: kernel, direction, causal, batch, length, microseconds. Source: the charts of the
FlashAttention repository (BSD-3) and of Shah et al. 2024; times from the printed TFLOP/s."""


@pytest.mark.parametrize(("kernel", "mode", "causal", "batch", "length", "measured_us"), CHARTS)
def test_charts_of_flash_attention_3(
    kernel: str, mode: str, causal: bool, batch: int, length: int, measured_us: float
) -> None:
    price = seconds(batch, length, 16, kernel=kernel, causal=causal, backward=mode == "bwd")
    assert price * 1e6 == pytest.approx(measured_us, rel=0.12)


@pytest.mark.parametrize(
    ("causal", "batch", "length", "measured_us"),
    [
        (False, 4, 4096, 9817.1),
        (False, 1, 16384, 37914.2),
        (True, 8, 2048, 3103.5),
        (True, 4, 4096, 5561.1),
        (True, 1, 16384, 20361.3),
    ],
)
def test_charts_of_flash_attention_2_on_a100(causal: bool, batch: int, length: int, measured_us: float) -> None:
    """Forward and backward together, 16 heads of 128. Source: the charts of the FlashAttention repository."""
    both = sum(seconds(batch, length, 16, device=A100, causal=causal, backward=backward) for backward in (False, True))
    assert both * 1e6 == pytest.approx(measured_us, rel=0.08)


def test_head_sizes_are_filled_up() -> None:
    """72 and 80 both run as 96: only bytes differ."""
    assert 0.97 < seconds(4, 8192, 16, 72) / seconds(4, 8192, 16, 80) < 1
    assert seconds(4, 8192, 16, 80) < seconds(4, 8192, 16, 96) < 1.03 * seconds(4, 8192, 16, 80)


def test_matrix_units_of_tpus_are_filled_up() -> None:
    """A head of 64 or 128 takes as long as one of 256 on v6e; on v5p a head of 128 half as long. Memory aside."""

    def alone(name: str, head_dim: int) -> float:
        device = replace(catalogue.device(name), memory_bytes_per_s=1e18)
        return attention_seconds(
            8, 8192, 8192, 32, 8, head_dim, causal=True, device=device, curves=curves_for(device)
        ) - attention_seconds(1, 1, 1, 1, 1, head_dim, causal=True, device=device, curves=curves_for(device))

    assert alone("tpu-v6e", 64) == pytest.approx(alone("tpu-v6e", 256))
    assert alone("tpu-v5p", 128) == pytest.approx(alone("tpu-v5p", 256) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "backward", "keys"),
    [("h100-sxm-80gb", False, 256), ("tpu-v5p", False, 1024), ("tpu-7x", False, 2048), ("tpu-7x", True, 4096)],
)
def test_a_window_of_128_costs_whole_tiles(device: str, backward: bool, keys: int) -> None:
    """A tile of 128 queries sees its own keys and the 127 before its first: two tiles of keys."""
    assert tiled_window(128, catalogue.device(device), backward=backward) == keys


@given(tiles=st.integers(1, 8), rest=st.integers(0, 127), first=st.integers(0, 63))
def test_tiles_of_a_window_counted_one_by_one(tiles: int, rest: int, first: int) -> None:
    """Of a tile of queries far from the start: tiles of keys from that of the first key any of them sees to its own."""
    window = 128 * tiles - rest
    query = 128 * (tiles + 1 + first)
    touched = (query + 127) // 128 - (query - window + 1) // 128 + 1
    assert tiled_window(window, catalogue.device("h100-sxm-80gb"), backward=False) >= 128 * touched
    assert rest or tiled_window(window, catalogue.device("h100-sxm-80gb"), backward=False) == 128 * touched


CUDNN = (
    ("gb200-nvl72", 64, 8, 128, 128, 8192, 1.397e-3, 4.127e-3),
    ("gb300-nvl72", 64, 8, 128, 128, 8192, 1.185e-3, 3.832e-3),
    ("gb200-nvl72", 128, 128, 192, 128, 4096, 0.977e-3, 3.383e-3),
    ("gb300-nvl72", 128, 128, 192, 128, 4096, 0.864e-3, 3.127e-3),
)
"""Two sequences under a causal mask: device, heads, key heads, head size, of values, length, forward, backward.
NVIDIA/cudnn-frontend 3929da2 benchmark/sdpa_benchmark_training/results, cuDNN 9.22."""


@pytest.mark.parametrize("device,heads,kv_heads,size,size_v,length,forward_s,backward_s", CUDNN)
def test_cudnn_on_blackwell(
    device: str, heads: int, kv_heads: int, size: int, size_v: int, length: int, forward_s: float, backward_s: float
) -> None:
    of = catalogue.device(device)
    both = [
        attention_seconds(
            2,
            length,
            length,
            heads,
            kv_heads,
            size,
            head_dim_v=size_v,
            causal=True,
            backward=way,
            device=of,
            curves=curves_for(of, attention="cudnn"),
        )
        for way in (False, True)
    ]
    assert both == [pytest.approx(forward_s, rel=0.1), pytest.approx(backward_s, rel=0.16)]
