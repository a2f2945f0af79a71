"""The optimizer's update: bytes by hand, launches, and what has no price."""

from __future__ import annotations

import pytest

from gnomon.errors import UnpricedError
from gnomon.hardware import catalogue
from gnomon.plans import Optimizer, Precision
from gnomon.prices import accumulate_seconds, curves_for, optimizer_seconds, stream_seconds
from gnomon.software import Fact, Stack

H100 = catalogue.device("h100-sxm-80gb")
CURVES = curves_for(H100)
ELEMENTS = 10**9


def stack(step: str) -> Stack:
    fact = Fact(field="optimizer_step", source="test", date="2026-11-21")
    return Stack(name="test", version="0").with_values((fact,), optimizer_step=step)


def test_fused_adam_in_mixed_precision_moves_thirty_bytes_a_parameter() -> None:
    """Reads gradient 4, master 4, two moments 8; writes master 4, moments 8, bf16 parameter 2."""
    price = optimizer_seconds(ELEMENTS, Optimizer(clip=False), Precision(), H100, CURVES, stack("fused"))
    launches = 48  # of 320 x 65536 elements
    assert price.kernels == launches
    assert price.device_s == stream_seconds(16e9, 14e9, H100, CURVES, kernels=launches)


@pytest.mark.parametrize(
    ("dtype", "grad", "read", "written", "passes"),
    [
        # copy 2 + 4, norm and Adam 2 + 2 more, unscaling 4 + 4, masters read 4
        ("fp16", "fp16", 2 + 2 + 2 + 4 + 4, 4 + 4, 3),
        ("bf16", "bf16", 2 + 2 + 2 + 4, 4, 2),
        ("bf16", "fp32", 4, 0, 1),
    ],
)
def test_megatrons_update_copies_gradients_and_masters(
    dtype: str, grad: str, read: int, written: int, passes: int
) -> None:
    fact = Fact(field="update_in_passes", source="test", date="2026-11-23")
    precision = Precision(param=dtype, compute=dtype, grad=grad, reduce=grad)  # type: ignore[arg-type]
    program = stack("fused")
    apart = program.with_values((*program.facts, fact), update_in_passes=True)
    whole, parts = (optimizer_seconds(ELEMENTS, Optimizer(), precision, H100, CURVES, s) for s in (program, apart))
    more = stream_seconds(read * 1e9, written * 1e9, H100, CURVES, kernels=48 * passes)
    assert parts.device_s - whole.device_s == pytest.approx(more)
    assert parts.kernels - whole.kernels == 48 * passes


def test_clipping_reads_the_gradients_once_more() -> None:
    plain, clipped = (
        optimizer_seconds(ELEMENTS, Optimizer(clip=clip), Precision(), H100, CURVES, stack("fused"))
        for clip in (False, True)
    )
    norm = stream_seconds(4e9, 0, H100, CURVES, kernels=2)
    assert clipped.device_s == pytest.approx(plain.device_s + norm)
    assert clipped.kernels == plain.kernels + 2


def test_steps_of_their_own_take_longer_and_more_launches() -> None:
    fused, foreach = (
        optimizer_seconds(ELEMENTS, Optimizer(), Precision(), H100, CURVES, stack(step))
        for step in ("fused", "foreach")
    )
    assert 2 < foreach.device_s / fused.device_s < 6
    assert foreach.kernels > 5 * fused.kernels


def test_one_by_one_launches_for_each_tensor() -> None:
    price = optimizer_seconds(10**6, Optimizer(clip=False), Precision(), H100, CURVES, stack("single"), tensors=200)
    assert price.kernels == 200 * 9


def test_fewer_states_are_fewer_bytes() -> None:
    prices = [
        optimizer_seconds(ELEMENTS, Optimizer(kind=kind), Precision(), H100, CURVES, stack("fused")).device_s
        for kind in ("sgd", "momentum", "adamw")  # 14, 22, 30 bytes
    ]
    assert prices == sorted(prices)
    assert prices[2] / prices[0] == pytest.approx(34 / 18, rel=0.05)  # with 4 for the norm


def test_muon_needs_its_matrices() -> None:
    """15 products a matrix of 4096 x 4096: 2.06 TFLOP, at least 2.08 ms."""
    with pytest.raises(UnpricedError, match="give \\(count, rows, columns\\)"):
        optimizer_seconds(4096**2, Optimizer(kind="muon"), Precision(), H100, CURVES, stack("fused"))
    price = optimizer_seconds(
        4096**2, Optimizer(kind="muon"), Precision(), H100, CURVES, stack("fused"), matrices=[(1, 4096, 4096)]
    )
    assert 15 * 2 * 4096**3 / 989.4e12 < price.device_s < 2 * 15 * 2 * 4096**3 / 989.4e12


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(UnpricedError, match="set `optimizer_step`"):
        optimizer_seconds(1, Optimizer(), Precision(), H100, CURVES, Stack(name="bare", version="0"))


def test_adding_up_bf16_gradients_in_fp32() -> None:
    """Apart: reads 2 and 4, writes 4. In the product: reads 4 and writes 4 where it would write 2."""
    apart = accumulate_seconds(ELEMENTS, Precision(), H100, CURVES, fused=False, tensors=100)
    assert apart.kernels == 100
    assert apart.device_s == stream_seconds(6e9, 4e9, H100, CURVES, kernels=100)
    fused = accumulate_seconds(ELEMENTS, Precision(), H100, CURVES, fused=True)
    assert fused.kernels == 0
    assert 6e9 / 3.35e12 < fused.device_s < 0.65 * apart.device_s
