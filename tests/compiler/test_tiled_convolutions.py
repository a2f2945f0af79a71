"""Winograd's filtering: the convolution in double, in place of oneDNN's in a graph, and not of what is not finite."""

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
from gnomon.compiler.kernels import convolutions, depthwise, taps, winograd  # noqa: E402
from gnomon.compiler.machine import SETS  # noqa: E402
from gnomon.compiler.tune.gate import Trial  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not (has_compiler() and torch.backends.mkldnn.is_available()), reason="needs a C++ compiler and oneDNN"
    ),
    pytest.mark.usefixtures("fresh"),
]
LAST = torch.channels_last


def assert_exact(call: convolutions.Tiled, x: Any, given: tuple[Any, ...]) -> None:
    """As near to a convolution in double as a sum in float32 of so many products."""
    exact = call.aten(x.double(), *(one.double() for one in given))
    made = call.run(x, *given)
    assert call.packed and not call.library.packed and made.is_contiguous(memory_format=LAST)
    assert float((made - exact).abs().max()) <= 1e-5 * float(exact.abs().max()) + 1e-6


def tensors(
    call_sizes: tuple[int, ...], outputs: int, window: tuple[int, int], out: tuple[int, int], parts: tuple[bool, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """An image, and what else a convolution is given by (bias, batch norm, what is added)."""
    images, channels, _, _ = call_sizes
    bias, norm, added = parts
    rest = [torch.randn(outputs), *(torch.rand(outputs) + 0.5 for _ in range(4))]
    other = torch.randn(images, outputs, *out).contiguous(memory_format=LAST)
    given = (*([other] if added else []), torch.randn(outputs, channels, *window))
    return torch.randn(call_sizes), (*given, *rest[: int(bias)], *(rest[1:] if norm else []))


@settings(max_examples=25)
@given(
    out=st.sampled_from(winograd.OUTS),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 13), st.integers(1, 13)),
    outputs=st.integers(1, 70),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    parts=st.tuples(*[st.booleans()] * 5),
    seed=st.integers(0, 99),
)
def test_any_convolution_by_winograd_is_that_in_double(
    out: int, sizes: tuple[int, ...], outputs: int, padding: tuple[int, int], parts: tuple[bool, ...], seed: int
) -> None:
    torch.manual_seed(seed)
    form, (relu, threads, *rest) = winograd.WinogradForm(out, padding), parts
    to = form.out_sizes(sizes)
    if min(to) < 1:
        return
    torch.set_num_threads(1 + threads)
    x, given_ = tensors(sizes, outputs, (3, 3), to, tuple(rest))
    bias, norm, added = rest
    numbers = ((list(sizes), [1, 1], list(padding), [1, 1], 1), bias, 1e-5 if norm else None, added, relu)
    assert_exact(convolutions.Tiled(form, outputs, *numbers), x, given_)


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 19), st.integers(1, 20), st.integers(1, 40)),
    outputs=st.integers(1, 70),
    window=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    steps=st.tuples(*[st.integers(1, 3)] * 4),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    parts=st.tuples(*[st.booleans()] * 6),
    seed=st.integers(0, 99),
)
def test_any_convolution_by_taps_is_that_in_double(
    sizes: tuple[int, ...], outputs: int, window: tuple[int, int], steps: tuple[int, ...], padding: tuple[int, int],
    parts: tuple[bool, ...], seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    stride, dilation, (relu, threads, last, *rest) = steps[:2], steps[2:], parts
    form = taps.form_of(sizes, window, stride, padding, dilation)
    if form is None:
        return
    torch.set_num_threads(1 + threads)
    x, given_ = tensors(sizes, outputs, window, form.out_sizes(sizes), tuple(rest))
    bias, norm, added = rest
    image = (list(sizes), list(stride), list(padding), list(dilation), 1)
    call = convolutions.Tiled(form, outputs, image, bias, 1e-5 if norm else None, added, relu)
    assert_exact(call, x.contiguous(memory_format=LAST) if last else x, given_)


class Pair(nn.Module):
    """Two convolutions of 3 x 3 with batch norms; what came in is added to the second."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, 1, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in "ab")

    def forward(self, x: Any) -> Any:
        return (self.norms[1](self.two(self.norms[0](self.one(x)).relu())) + x).relu()


def without_time(self: Any) -> Trial:
    return Trial(self.source, self._listed(self.run), self._listed(self.aten), share=1e9)


def test_a_network_takes_it_sees_written_weights_and_keeps_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions.Tiled, "trial", without_time)
    monkeypatch.setattr(convolutions, "slower", lambda made: False)
    model = nn.Sequential(nn.Conv2d(3, 17, 3, 2), nn.ReLU(), Pair(17), nn.Conv2d(17, 17, 3, groups=17)).eval()
    x = torch.randn(2, 3, 27, 31)
    fast = torch.compile(model, backend=backend.gnomon)

    def assert_right() -> None:
        torch.testing.assert_close(
            fast(x), deepcopy(model).double()(x.double()).float(), rtol=2e-4, atol=2e-5, equal_nan=True
        )

    with torch.no_grad():
        for _ in range(3):
            assert_right()
        [graph] = backend.reports[-1:]
        own = [one for one in graph.convolutions if isinstance(one, convolutions.Tiled)]
        forms = [taps.TapsForm, winograd.WinogradForm, winograd.WinogradForm, depthwise.DepthwiseForm]
        assert [type(one.form) for one in own] == forms and all(one.own_kept for one in own)
        assert any("convolution (kernel)" in run.names for run in graph.runs)
        told = explained(graph)
        first, *filtered, last = [one["how"] for one in told["convolutions"]]
        assert filtered in (["Winograd 2 x 2"] * 2, ["Winograd 4 x 4"] * 2) and (first, last) == (
            "taps",
            "each channel",
        )
        assert told["onednn"].get("convolution", 0) == sum(one.by_onednn for one in graph.convolutions) <= 1
        model[2].two.weight[3, 4, 1, 1] += 2.0
        assert_right()
        model[2].norms[0].running_mean[1] -= 1.0
        assert_right()
        for number in (float("nan"), float("inf"), float("-inf")):
            x[1, 2, 7, 8] = number
            torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=2e-5, equal_nan=True)
        x[1, 2, 7, 8] = 1e38  # what lies beside it in a tile is as near as this is large
        made, wanted = fast(x), model(x)
        assert float((made - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
        x[1, 2, 7, 8] = 0.0
        assert_right()


@pytest.mark.parametrize("number", [1.0, float("nan"), float("-inf")])
def test_what_is_not_finite_is_onednns(number: float) -> None:
    sizes = ([1, 16, 9, 9], [1, 1], [1, 1], [1, 1], 1)
    call = convolutions.Tiled(winograd.WinogradForm(4, (1, 1)), 16, sizes, False, None, False, True)
    x, w = torch.zeros(1, 16, 9, 9), torch.randn(16, 16, 3, 3)
    x[0, 3, 8, 8] = number
    torch.testing.assert_close(call.run(x, w), call.aten(x, w), equal_nan=True)
    assert bool(call.library.packed) is (number != 1.0)


def test_few_tiles_of_many_weights_take_the_form_with_fewer_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 x 7 pixels and 512 channels weights come from memory: 4 times as many take longer than their products."""
    machine = winograd.this_machine()
    monkeypatch.setattr(winograd, "this_machine", lambda: replace(machine, isa=SETS[0]))
    forms = {high: winograd.form_of((1, 512, high, high), 512, (1, 1)) for high in (7, 14, 28, 56)}
    assert {high: form and form.out for high, form in forms.items()} == {7: 2, 14: 4, 28: 4, 56: 4}
    assert winograd.form_of((1, 3, 56, 56), 64, (1, 1)) is None and winograd.form_of((1, 64, 2, 2), 64, (0, 0)) is None
