"""Numbers that Python reads where a module is captured by its shapes only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from gnomon.errors import CaptureError  # noqa: E402
from gnomon.frontend.capture import captured  # noqa: E402

pytestmark = pytest.mark.torch


class Asks(nn.Module):
    """A linear layer, and a question in Python."""

    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.ask = nn.Linear(8, 8), ask

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.ask(y) * y


def clamped(y: Tensor) -> Tensor:
    return y if torch.isfinite(y).all() and not torch.isnan(y).any() else y.clamp(-1.0, 1.0)


def sized(y: Tensor) -> Tensor:
    """As levels of an image have their sizes: written one by one, also into a view, and checked."""
    sizes = torch.empty((2, 2), dtype=torch.long, device=y.device)
    sizes[0, 0], sizes[0, 1] = 3, 4
    last = sizes[1]
    last.fill_(2)
    last.mul_(2)
    if (sizes[:, 0] * sizes[:, 1]).sum() != 12 + 16:
        raise ValueError("sizes were lost")
    return torch.ones(int(sizes.sum()), device=y.device).sum()


def repeated(y: Tensor) -> Tensor:
    """As windows of an image are cut: a number of its own on the device, and a length that depends on values."""
    counts = torch.tensor([1, 3], device=y.device)
    return torch.ones(len(torch.repeat_interleave(counts).tolist()), device=y.device).sum() / sum(counts.tolist())


def ends(y: Tensor) -> Tensor:
    """As transformers looks for padding: at both ends of each row, by a list."""
    rows = torch.arange(6, device=y.device).view(2, 3)
    return y if 5 in rows[:, [-1, 0]] else y.exp()


@pytest.mark.parametrize("ask", [clamped, sized, repeated, ends])
def test_on_shapes_only_the_same_ops_are_recorded(ask: Callable[[Tensor], Tensor]) -> None:
    by_values = captured(Asks(ask), {"x": torch.randn(2, 8)})
    by_shapes = captured(Asks(ask).to("meta"), {"x": torch.empty(2, 8, device="meta")})
    kinds = [[(op.kind, op.path) for block in r.graph.blocks for op in block.ops] for r in (by_values, by_shapes)]
    assert kinds[0] == kinds[1] and not {("opaque", "clamp"), ("opaque", "exp")} & set(kinds[0])


def test_what_was_written_into_memory_from_parameters_is_not_known() -> None:
    def learned(y: Tensor) -> Tensor:
        kept = torch.zeros(2, device=y.device)
        kept[0] = y.sum()
        return y if kept[0] > 0 else -y

    with pytest.raises(CaptureError, match=r"test_numbers\.py:\d+: Python reads a number that depends on"):
        captured(Asks(learned).to("meta"), {"x": torch.empty(2, 8, device="meta")})
