"""Some types of transformers through the benchmark that does all (benchmarks/capture): captured, proved and run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers, whose models these are, is not installed")

from torch import nn  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.capture import trained  # noqa: E402
from benchmarks.capture.transformers_types import SMALL, build, flops_error, inputs, proof  # noqa: E402
from gnomon.frontend.capture import captured  # noqa: E402
from gnomon.frontend.opaque import shares  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("kind", "layers", "kept"),
    [("llama", 4, 0.001), ("mixtral", 4, 0.001), ("t5", 7, 0.05)],
)
def test_a_type_is_captured_counted_proved_and_run(kind: str, layers: int, kept: float) -> None:
    """t5: its CPU attention with a learned bias keeps other tensors than flash attention does."""
    model = build(kind, SMALL, meta=False)
    example = next(iter(inputs(model)))
    result = captured(model, example)
    assert len(result.graph.layers()) == layers
    assert flops_error(model, example, result.graph, sum(flops for _, flops in result.unread)) == 0.0
    headed = trained.Headed(model, example).eval()
    given = {**example, "answers": torch.arange(2)}
    found = captured(headed, given, training=False)
    assert abs(trained.kept_error(headed, given, found.graph)) <= kept
    headed = trained.in_float64(headed)
    found = captured(headed, given, training=False)
    wide = trained.wider(given, 2)
    want = trained.plain_losses(headed, wide)
    for plan in trained.ALONE.values():
        assert trained.on_one(headed, found, plan, wide) == pytest.approx(want, rel=trained.TOLERANCE)
    assert proof(model, example)["holds"]


class Solving(nn.Module):
    """As a delta rule: what a triangular matrix makes of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        return torch.linalg.solve_triangular(a @ a.transpose(1, 2), self.b(x), upper=False, unitriangular=True)


def test_a_triangular_solve_has_the_flops_of_its_gradients() -> None:
    model, example = Solving(), {"x": torch.randn(2, 6, 8)}
    result = captured(model, example, dims={"x": ("batch", "seq", "")})
    assert flops_error(model, example, result.graph) == 0.0
    assert "aten.linalg_solve_triangular" not in shares(result.graph)
    priced = [
        op for block in result.graph.blocks for op in block.ops if op.captured is not None and op.captured.is_priced
    ]
    assert any(node.cost is not None and node.cost.flops for op in priced for node in op.captured.nodes)
    assert proof(model, example)["holds"]


class Normed(nn.Module):
    """Two convolutions, each normed and cut at zero, and a loss."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for channels in (3, 4):
            self.layers.extend([nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=inplace)])
        self.head = nn.Linear(4, trained.CLASSES)

    def forward(self, answers: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x).mean((2, 3))), answers)


def test_a_relu_in_place_keeps_its_result_once() -> None:
    """What it keeps and what the next convolution keeps is one memory: the rectified rows."""
    example = {"answers": torch.arange(2), "x": torch.randn(2, 3, 16, 16)}
    for inplace in (False, True):
        module = Normed(inplace=inplace).eval()
        graph = captured(module, example, training=False).graph
        assert abs(trained.kept_error(module, example, graph)) < 0.001
