"""Convolutions of each channel by itself: those in double, NaN and infinities as eager has them, and in a graph."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.explain import explained  # noqa: E402
from gnomon.compiler.kernels import convolutions, depthwise, pools  # noqa: E402
from gnomon.compiler.tune.gate import Trial  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not (has_compiler() and torch.backends.mkldnn.is_available()), reason="needs a C++ compiler and oneDNN"
    ),
    pytest.mark.usefixtures("fresh"),
]
LAST = torch.channels_last
FORMS = (((3, 3), (1, 1), (1, 1), False), ((4, 2), (2, 3), (1, 2), True))
"""Window, stride, dilation, and whether a ReLU is in front: each is a kernel."""


@settings(max_examples=40)
@given(
    form=st.sampled_from(FORMS),
    sizes=st.tuples(st.integers(1, 3), st.integers(2, 70), st.integers(1, 19), st.integers(1, 31)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    parts=st.tuples(*[st.booleans()] * 6),
    seed=st.integers(0, 99),
)
def test_any_convolution_of_each_channel_is_that_in_double(
    form: Any, sizes: tuple[int, ...], padding: tuple[int, int], parts: tuple[bool, ...], seed: int
) -> None:
    torch.manual_seed(seed)
    (window, stride, dilation, before), (relu, threads, last, bias, norm, added) = form, parts
    made = depthwise.form_of(sizes, window, stride, padding, dilation)
    if made is None:
        return
    torch.set_num_threads(1 + threads)
    channels = sizes[1]
    image = (list(sizes), list(stride), list(padding), list(dilation), channels)
    numbers = (image, bias, 1e-5 if norm else None, added, relu)
    call = convolutions.Tiled(replace(made, relus=before), channels, *numbers, before=before)
    other = torch.randn(sizes[0], channels, *made.out_sizes(sizes)).contiguous(memory_format=LAST)
    rest = [torch.randn(channels), *(torch.rand(channels) + 0.5 for _ in range(4))]
    x = torch.randn(sizes)
    x = x.contiguous(memory_format=LAST) if last else x
    others = ([other] if added else []) + [torch.randn(channels, 1, *window)]
    others += rest[: int(bias)] + (rest[1:] if norm else [])
    exact, result = call.aten(x.double(), *(one.double() for one in others)), call.run(x, *others)
    assert call.packed and not call.library.packed and result.is_contiguous(memory_format=LAST)
    assert float((result - exact).abs().max()) <= 1e-5 * float(exact.abs().max()) + 1e-6


def test_a_window_that_is_no_whole_image_and_one_of_many_columns_have_no_kernel() -> None:
    assert depthwise.form_of((1, 8, 4, 4), (5, 5), (1, 1), (0, 0), (1, 1)) is None
    assert depthwise.form_of((1, 8, 40, 40), (31, 31), (1, 1), (15, 15), (1, 1)) is None
    one_line = depthwise.form_of((1, 8, 1, 40), (1, 3), (1, 1), (0, 1), (1, 1))
    assert one_line is not None and one_line.lines == 1


@pytest.mark.parametrize("where", ["image", "weight", "bias"])
def test_what_is_not_finite_is_where_eager_has_it(where: str) -> None:
    """At borders too, where a weight that is not finite must not meet a zero that is not there."""
    torch.manual_seed(0)
    sizes, channels = (2, 19, 6, 9), 19
    made = depthwise.form_of(sizes, (3, 3), (1, 1), (1, 1), (1, 1))
    assert made is not None
    call = convolutions.Tiled(made, channels, (list(sizes), [1, 1], [1, 1], [1, 1], channels), True, None, False, True)
    x, w, b = torch.randn(sizes).contiguous(memory_format=LAST), torch.randn(channels, 1, 3, 3), torch.randn(channels)
    for n, number in enumerate((float("nan"), float("inf"), float("-inf"), -0.0, 1e-42, 3e38)):
        x_, w_, b_ = x.clone(memory_format=torch.preserve_format), w.clone(), b.clone()
        if where == "image":
            x_[n % 2, 3 * n, 0, 5], x_[0, n, 3, 8] = number, number
        elif where == "weight":
            w_[3 * n, 0, 0, 0], w_[n, 0, 1, 1] = number, number
        else:
            b_[3 * n] = number
        torch.testing.assert_close(call.run(x_, w_, b_), call.aten(x_, w_, b_), equal_nan=True)


class Separable(nn.Module):
    """ReLU in front, each channel by itself, single pixels, a batch norm."""

    def __init__(self, channels: int, out: int, window: int, stride: int) -> None:
        super().__init__()
        self.each = nn.Conv2d(channels, channels, window, stride, window // 2, groups=channels)
        self.pixels, self.norm = nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out)

    def forward(self, x: Any) -> Any:
        return self.norm(self.pixels(self.each(x.relu())))


class Mobile(nn.Module):
    """Each channel by itself with what networks have around it: ReLU6, a sum, a ReLU in front."""

    def __init__(self, channels: int = 21) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU6())
        self.each = nn.ModuleList(nn.Conv2d(channels, channels, 3, 1, 1, groups=channels) for _ in "ab")
        self.norm = nn.BatchNorm2d(channels)
        self.past = Separable(channels, 10, 3, 1)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        x = nn.functional.relu6(self.norm(self.each[0](x)))
        x = self.each[1](x) + x
        return torch.cat([self.past(x), x], 1)


def without_time(self: Any) -> Trial:
    return Trial(self.source, self._listed(self.run), self._listed(self.aten), share=1e9)


def test_a_network_takes_it_with_what_surrounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions.Tiled, "trial", without_time)
    monkeypatch.setattr(convolutions, "slower", lambda made: False)
    monkeypatch.setattr(convolutions.Pixels, "lost", False)
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model, x = Mobile().eval(), torch.randn(3, 3, 27, 35).contiguous(memory_format=LAST)
    fast = torch.compile(model, backend=backend.gnomon)

    def assert_right(x: Any) -> None:
        made, wanted = fast(x), deepcopy(model).double()(x.double()).float()
        torch.testing.assert_close(made, wanted, rtol=2e-4, atol=2e-5, equal_nan=True)
        assert made.stride() == model(x).stride()

    with torch.no_grad():
        for _ in range(3):
            assert_right(x)
        told = [one for one in explained(backend.reports[-1])["convolutions"] if one["how"] == "each channel"]
        assert all(one["kept"] for one in told)
        assert [one["operations"] for one in told] == [
            ["convolution", "batch norm", "hardtanh"],
            ["convolution", "add"],
            ["relu", "convolution"],
        ]
        model.each[1].weight[3, 0, 1, 1] += 2.0
        assert_right(x)
        for number in (float("nan"), float("inf"), float("-inf"), 1e38):
            x[-1, 1, 9, 34] = number
            torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=2e-5, equal_nan=True)


def test_work_that_lost_is_apart_and_other_work_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions.Tiled, "trial", without_time)
    monkeypatch.setattr(convolutions, "slower", lambda made: False)
    monkeypatch.setattr(
        convolutions.Convolution, "lost", property(lambda self: bool(self.work) and self.eps is not None)
    )
    model, x = Mobile().eval(), torch.randn(1, 3, 27, 35)
    fast = torch.compile(model, backend=backend.gnomon)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=2e-5)
    told = [one["operations"] for one in explained(backend.reports[-1])["convolutions"]]
    assert told[:2] == [["convolution", "hardtanh"], ["convolution", "batch norm"]]


@pytest.mark.parametrize("pool", depthwise.POOLS)
def test_a_pooling_has_the_bits_of_pytorchs(pool: str) -> None:
    window, stride, padding = [3, 2], [1, 2], [1, 0]
    args = (window, stride, padding, *(([1, 1], False) if pool == "maximum" else (False, pool != "average", None)))
    for n, sizes in enumerate(((2, 35, 6, 31), (1, 16, 1, 2), (3, 5, 9, 8))):
        form = depthwise.form_of(sizes, window, stride, padding, (1, 1))
        assert form is not None
        torch.set_num_threads(1 + n % 2)
        call = pools.Pool(replace(form, pool=pool), args)
        x = torch.randn(sizes).contiguous(memory_format=LAST)
        for number in (0.0, float("nan"), float("inf"), float("-inf"), 1e-42):
            x[-1, 2, 0, 1] = number
            torch.testing.assert_close(call.run(x), call.aten(x), rtol=0, atol=0, equal_nan=True)


def test_poolings_of_a_network_are_kernels_and_those_with_indices_are_not() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Conv2d(n, 4, 1) for n in (3, 4, 4))

        def forward(self, x: Any) -> Any:
            x = nn.functional.max_pool2d(self.parts[0](x), 3, 2, 1)
            x = nn.functional.avg_pool2d(self.parts[1](x), (3, 2), (1, 2), (1, 0), count_include_pad=False)
            return nn.functional.max_pool2d(self.parts[2](x), 2, return_indices=True)

    model, x = Pooled().eval(), torch.randn(2, 3, 17, 19)
    fast = torch.compile(model, backend=backend.gnomon)
    with torch.no_grad():
        for _ in range(3):
            for made, wanted in zip(fast(x), model(x), strict=True):
                torch.testing.assert_close(made, wanted)
    made_pools = backend.reports[-1].pools
    assert len(made_pools) == 2 and all(one.kept for one in made_pools)
