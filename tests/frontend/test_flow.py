"""Which values of a captured module get a gradient, against what torch's own backward computes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from gnomon.frontend.capture import captured  # noqa: E402
from gnomon.graph import BF16, UNFUSED, Setting, graph_work  # noqa: E402
from gnomon.runtime.checks.prove import prove  # noqa: E402

pytestmark = pytest.mark.torch


class Indexed(nn.Module):
    """Rows are chosen by scores that are learned, and only which they are goes on (DeepSeek's indexer)."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.norm, self.up = nn.Linear(16, 24), nn.RMSNorm(24), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.norm(F.silu(self.score(x))).sum(-1).topk(4, dim=1).indices
        return self.up(x.gather(1, chosen[..., None].expand(-1, -1, x.shape[2])))


class Pieced(nn.Module):
    """Two products are written into parts of memory that was made before, and that is read as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.up = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.zeros(*x.shape[:-1], 16, dtype=x.dtype)
        before[..., :8] = self.a(x)
        before[..., 8:] = self.b(x)
        return self.up(before)


class Times(torch.autograd.Function):
    """Two products whose backward is written by hand, as YOSO's attention has them."""

    @staticmethod
    def forward(ctx, x, a, b):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, a, b)
        return x @ a @ b

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, a, b = ctx.saved_tensors
        inner, made = grad @ b.T, x @ a
        return inner @ a.T, x.T @ inner, made.T @ grad


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Times.apply(x.flatten(0, 1), self.a, self.b)  # type: ignore[no-any-return]


def test_products_of_a_backward_of_one_s_own_are_two_each() -> None:
    graph = captured(ByHand(), {"x": torch.randn(2, 6, 16)}).graph
    setting = Setting(sizes={"batch": 2}, dtypes=BF16, causal_flops="full")
    first, second = 2 * 12 * 16 * 8, 2 * 12 * 8 * 4
    assert graph_work(graph, UNFUSED, setting).total.matmul_flops == 2 * first + 3 * second


@pytest.mark.parametrize("module", [Indexed(), Pieced()], ids=["indexed", "pieced"])
def test_backward_is_as_torch_counts_it(module: nn.Module) -> None:
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    graph = captured(module, {"x": x.detach()}, dims={"x": ("batch", "seq", "")}).graph
    with FlopCounterMode(display=False) as counted:
        module(x.detach()).sum().backward()
    setting = Setting(sizes={"batch": 2, "seq": 6}, dtypes=BF16, causal_flops="full")
    assert graph_work(graph, UNFUSED, setting).total.matmul_flops == counted.get_total_flops()
    assert prove(module, {"x": x.detach()}).holds
