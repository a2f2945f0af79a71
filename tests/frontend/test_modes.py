"""Modules that stop autograd, write over a product, norm a parameter or cache a table run as they were written."""

from __future__ import annotations

from functools import lru_cache

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from gnomon.frontend.capture import captured  # noqa: E402
from gnomon.runtime.prove import prove  # noqa: E402

pytestmark = pytest.mark.torch


class Still(nn.Module):
    """A frozen front, as of an audio codec."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.front(x).relu()
        return self.back(x)


class WrittenOver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.view(-1, 8)[:, :2].mul_(0.5)
        return self.second(y.relu_())


class NormedTable(nn.Module):
    """Of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(6, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.norm(self.table.weight).T


@pytest.mark.parametrize("module", [Still(), WrittenOver(), NormedTable()], ids=lambda m: type(m).__name__)
def test_outputs_and_gradients_are_the_modules(module: nn.Module) -> None:
    assert prove(module, {"x": torch.randn(2, 3, 8)}).holds


def test_a_product_without_autograd_has_no_backward() -> None:
    graph = captured(Still(), {"x": torch.randn(2, 3, 8)}).graph
    still = {op.path for block in graph.blocks for op in block.ops if op.kind == "linear" and op.attr("no_grad", False)}
    assert still == {"front"}


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @staticmethod
    @lru_cache(maxsize=4)
    def table(length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device).float()[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table(x.shape[1], x.device))


def test_a_table_that_is_cached_is_not_one_of_the_recording() -> None:
    module, x = Tabled(), torch.randn(2, 3, 4)
    eager = module(x)
    found = captured(module, {"x": x})
    assert Tabled.table.cache_info().currsize == 0
    assert not found.trace.constants  # the table is made in the graph, at any length
    assert torch.equal(module(x), eager)
