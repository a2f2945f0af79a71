"""Batch norm in training: a channel is a row of a group, with what follows it, its gradients and running statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from torch import nn  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("fresh"),
]


class Norms(nn.Module):
    """Two that meet in a sum and a ReLU, and one without weights."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels, momentum=0.3, eps=1e-3)
        self.three = nn.BatchNorm2d(channels, affine=False)

    def forward(self, x: Any) -> Any:
        return self.three((self.one(x) + self.two(x * x)).relu())


@pytest.mark.parametrize("shape", [(2, 5, 7, 9), (4, 3, 1, 1)])
def test_steps_are_those_of_eager(shape: tuple[int, ...]) -> None:
    model = Norms(shape[1])
    plain = copy.deepcopy(model)
    fast = torch.compile(model, backend=backend.gnomon)
    for _ in range(3):
        x = torch.randn(shape) + 2
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        weights = torch.randn(shape)
        made = []
        for one, call, module in ((inputs[0], fast, model), (inputs[1], plain, plain)):
            module.zero_grad()
            out = call(one)
            (out * weights).sum().backward()
            made.append([out.detach(), one.grad, *[p.grad for p in module.parameters()], *module.buffers()])
        for one, other in zip(*made, strict=True):
            atol = 2e-4 * max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one, other, rtol=1e-3, atol=atol)
    units = [unit for graph in backend.reports[-2:] for unit in graph.program.units]
    left = [unit for unit in units if isinstance(unit, torch.fx.Node) and "batch_norm" in str(unit.target)]
    assert bool(left) == (shape[2] == 1)  # a single number a row is left to ATen
