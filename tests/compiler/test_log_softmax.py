"""Cross-entropy in training: gradients are eager's, and nothing as large as the logits is kept beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler import backend  # noqa: E402

pytestmark = pytest.mark.torch
ROWS, CLASSES = 24, 37
TARGET = torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(0))
TARGET[3] = -100


def kept_sizes() -> list[int]:
    """Elements of what the forwards compiled since give to their backwards and callers."""
    graphs = [one.program.graph for one in backend.reports]
    results = [node for node in graphs[0].output_node().all_input_nodes if node.op != "placeholder"]
    return [node.meta["val"].numel() for node in results]


def compared(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> None:
    """Value and gradients are eager's, on trial and after."""
    torch._dynamo.reset()
    backend.reports.clear()  # bounded: its length marks no place
    compiled = torch.compile(function, backend=backend.gnomon, dynamic=dynamic)
    near = 2e-5 if inputs[0].dtype == torch.float32 else 2e-2
    for _ in range(2):
        made = []
        for call in (function, compiled):
            out = call(*inputs)
            made.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
        for eager, ours in zip(*made, strict=True):
            assert eager.dtype == ours.dtype
            torch.testing.assert_close(ours, eager, rtol=near, atol=near * float(eager.detach().abs().max()))
    assert all(t.kept for one in backend.reports for t in one.trials.values())


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(ROWS, CLASSES) * 4
    x[0, 5], x[1, :30] = 80.0, -torch.inf
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loss_keeps_two_numbers_a_row(dtype: torch.dtype, dynamic: bool) -> None:
    target = TARGET.clone()
    target[1] = 33
    compared(lambda x: F.cross_entropy(x, target), logits(dtype), dynamic=dynamic)
    if not dynamic:
        assert max(kept_sizes()) == ROWS


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_weights_and_other_reductions(reduction: str) -> None:
    target, weight = TARGET.clone(), torch.rand(CLASSES)
    target[1] = 36
    compared(lambda x: F.cross_entropy(x, target, weight=weight, reduction=reduction), logits())


def test_logits_made_in_the_graph_are_kept_once() -> None:
    torch.manual_seed(0)
    a, w = (torch.randn(n, 8).requires_grad_() for n in (ROWS, CLASSES))
    compared(lambda a, w: F.cross_entropy(a @ w.T, TARGET), a, w)
    assert sum(size == ROWS * CLASSES for size in kept_sizes()) == 1


def test_a_result_that_others_read_stays_one_operation() -> None:
    def smooth(x: torch.Tensor) -> torch.Tensor:
        y = F.log_softmax(x, -1)
        return F.nll_loss(y, TARGET) - 0.1 * y.mean()

    torch.manual_seed(0)
    compared(smooth, torch.randn(ROWS, CLASSES, requires_grad=True))
    names = [str(node.target) for one in backend.reports for node in one.program.graph.nodes]
    assert "aten._log_softmax.default" in names
