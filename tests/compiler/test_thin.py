"""Layers of few rows and convolutions of few positions, against ATen in double."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gnomon.compiler.kernels import thin  # noqa: E402

pytestmark = pytest.mark.torch


@given(
    m=st.integers(1, thin.MOST), n=st.integers(1, 40), k=st.integers(16, 70), relu=st.booleans(), biased=st.booleans(),
    apart=st.integers(0, 5), turned=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_rows(m: int, n: int, k: int, relu: bool, biased: bool, apart: int, turned: bool) -> None:
    x, w, bias = torch.randn(m, k + apart)[:, :k], torch.randn(n, k + apart)[:, :k], torch.randn(n)
    if turned:
        w = torch.randn(k, n + apart)[:, :n].t()
    made = thin.run(thin.of_rows(x, w, relu), x, w, bias if biased else None, (m, n))
    wanted = x.double() @ w.double().t() + (bias.double() if biased else 0.0)
    torch.testing.assert_close(made, (wanted.relu() if relu else wanted).float(), rtol=1e-4, atol=1e-5)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_positions(data: Any) -> None:
    dims = data.draw(st.sampled_from([1, 2]))
    size, tall, steps, pads, apart = (
        data.draw(st.lists(st.integers(low, high), min_size=dims, max_size=dims))
        for low, high in ((1, 6), (1, 4), (1, 3), (0, 3), (1, 2))
    )
    images, channels, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40))
    x, w, bias = torch.randn(images, channels, *size), torch.randn(n, channels, *tall), torch.randn(n)
    if dims == 2 and data.draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    if data.draw(st.booleans()):
        x = torch.randn(images, channels, *size[:-1], size[-1] + 3)[..., : size[-1]]
    convolution = torch.nn.functional.conv1d if dims == 1 else torch.nn.functional.conv2d
    if any(s + 2 * p < (t - 1) * a + 1 for s, p, t, a in zip(size, pads, tall, apart, strict=True)):
        assert thin.of_positions(x, w, steps, pads, apart, False) is None
        return
    wanted = convolution(x.double(), w.double(), bias.double(), steps, pads, apart).relu().float()
    call = thin.of_positions(x, w, steps, pads, apart, True)
    few = images * wanted[0, 0].numel() <= thin.MOST and w.numel() >= thin.FEWEST
    assert (call is not None) == few
    if call is not None:
        made = thin.run(call, x, w, bias, thin.shape_of(call, images, 2 + dims))
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
