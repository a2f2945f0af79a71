"""Gradients of convolutions of one pixel by two matmuls an image: those of PyTorch, of special numbers too."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from torch import nn  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.kernels import pixels_backward  # noqa: E402
from gnomon.compiler.tune.gate import wrong_on_made  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("fresh"),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("sizes", "outputs"), [((1, 1, 1, 1), 1), ((3, 33, 5, 7), 17), ((2, 48, 1, 19), 65)])
def test_any_gradients_are_pytorchs(sizes: tuple[int, ...], outputs: int, both: bool, threads: int) -> None:
    g, x = torch.randn(sizes[0], outputs, *sizes[2:]), torch.randn(sizes)
    w = torch.randn(outputs, sizes[1], 1, 1)
    call, before = pixels_backward.PixelsBackward(both), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = call.run(g, x, w)
    finally:
        torch.set_num_threads(before)
    exact = call.aten(*(one.double() for one in (g, x, w)))
    for ours, wanted in zip(made, exact, strict=True):
        torch.testing.assert_close(ours, wanted.float(), rtol=1e-4, atol=1e-5)
    assert wrong_on_made(call.run, call.aten, (g, x, w), False) == ""


def test_a_model_learns_through_them() -> None:
    """One whose input has no gradient, two that are taken, and one with a step, which stays ATen's."""
    model = nn.Sequential(
        nn.Conv2d(16, 64, 1, bias=False),
        nn.ReLU(),
        nn.Conv2d(64, 64, 1, bias=False),
        nn.Conv2d(64, 64, 1, 2, bias=False),
    )
    x, fast, found = torch.randn(2, 16, 24, 24), torch.compile(model, backend=backend.gnomon), []
    for _ in range(2):
        for call in (fast, model):
            model.zero_grad()
            call(x).square().sum().backward()
            found.append([one.grad.clone() for one in model.parameters()])
    for grads in found[1:]:
        for one, other in zip(found[0], grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2)
    calls = [call for graph in backend.reports for call in graph.pixels]
    assert [call.both for call in calls] == [True, False] and all("wrong" not in call.verdict for call in calls)
