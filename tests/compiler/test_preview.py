"""Convolutions with pooling by a preview: each result is one of the four exact outputs, nearly always the largest, and
who does not ask gets exact ones."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.explain import explained, lines  # noqa: E402
from gnomon.compiler.kernels import preview  # noqa: E402
from gnomon.compiler.kernels.convolutions import Convolution  # noqa: E402
from gnomon.compiler.machine import has_features  # noqa: E402
from gnomon.errors import InputError  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not (has_compiler() and has_features(preview.NEEDS) and torch.backends.mkldnn.is_available()),
        reason="needs a C++ compiler, oneDNN and AVX-512 VNNI",
    ),
    pytest.mark.usefixtures("fresh"),
]


@pytest.mark.parametrize(
    ("image", "outputs", "kernel", "padding", "relu"),
    [((2, 16, 9, 12), 20, (3, 3), (1, 1), True), ((1, 32, 7, 7), 50, (1, 5), (0, 2), False)],
)
def test_each_result_is_one_of_the_four_exact_outputs(
    image: tuple[int, ...], outputs: int, kernel: tuple[int, int], padding: tuple[int, int], relu: bool
) -> None:
    torch.manual_seed(0)
    exact = Convolution((list(image), [1, 1], list(padding), [1, 1], 1), True, None, False, relu)
    made = preview.Preview(exact, kernel)
    x, weight, bias = torch.randn(image) - 0.2, torch.randn(outputs, image[1], *kernel), torch.randn(outputs)
    wanted = F.conv2d(x.double(), weight.double(), bias.double(), padding=padding)
    wanted = wanted.relu() if relu else wanted
    four = F.unfold(wanted.flatten(0, 1)[:, None], 2, stride=2).view(*wanted.shape[:2], 4, -1)
    got = made.run(x, weight, bias).flatten(2).double()
    top = float(wanted.abs().max())
    assert ((four - got[:, :, None]).abs().amin(2) <= 1e-6 * top).all()
    assert (four.amax(2) - got).max() <= 0.05 * top  # those that it confuses are near each other
    assert ((four.amax(2) - got) > 1e-6 * top).float().mean() < 0.05


def network() -> nn.Sequential:
    sizes, layers = [3, 16, 32, 48], list[nn.Module]()
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48 * 4, 5)).eval()


@pytest.mark.parametrize("asked", [True, False])
def test_who_asks_gets_near_results_and_nobody_else(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(preview, "GAIN", float("inf"))
    model, x = network(), torch.randn(2, 3, 16, 16)
    fast: Any = torch.compile(model, backend="gnomon", options={"preview": asked})
    with torch.no_grad():
        wanted = model(x)
        for _ in range(3):
            torch.testing.assert_close(fast(x), wanted, rtol=5e-3, atol=5e-3 if asked else 1e-5)
        model[4].weight.mul_(1.5)  # what somebody writes is seen
        torch.testing.assert_close(fast(x), model(x), rtol=5e-3, atol=5e-3 if asked else 1e-5)
    made = backend.reports[-1]
    assert [one.kept for one in made.previews] == [True, True] * asked  # three channels are too few
    assert ("by a preview in eight bits (kept)" in "\n".join(lines(explained(made), "graph"))) is asked


def test_a_preview_that_is_too_far_away_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(preview, "GAIN", float("inf"))
    monkeypatch.setattr(preview, "APART", -1.0)
    model, x = network(), torch.randn(1, 3, 16, 16)
    fast: Any = torch.compile(model, backend="gnomon", options={"preview": True})
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert not any(one.kept for one in backend.reports[-1].previews)
    assert "stays exact" in caplog.text
    with pytest.raises(InputError, match="True where results may be near"):
        backend.gnomon(torch.fx.symbolic_trace(nn.ReLU()), [], options={"preview": 1})
