"""Some types of transformers through the benchmark that does all (benchmarks/capture): captured, proved and run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers, whose models these are, is not installed")

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.capture import trained  # noqa: E402
from benchmarks.capture.transformers_types import SMALL, build, flops_error, inputs, proof  # noqa: E402
from gnomon.frontend.capture import captured  # noqa: E402

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
