"""`gnomon compile`: outputs of any nesting are trained, a user's mistake is told as one, calls are timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gnomon.cli import main  # noqa: E402
from gnomon.compiler.command import compiled  # noqa: E402
from gnomon.errors import InputError  # noqa: E402

pytestmark = pytest.mark.torch


class Norm(torch.nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.norm, self.wrap = torch.nn.LayerNorm(64), wrap

    def forward(self, x: Any) -> Any:
        return self.wrap(self.norm(x))


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: (3, [y]), lambda y: {"loss": y, "n": 1}])
def test_any_output_is_trained(wrap: Any) -> None:
    module = Norm(wrap)
    made = compiled(module, (torch.randn(32, 64),), train=True)
    assert len(made["data"]["graphs"]) == 2  # the forward's and the backward's
    assert module.norm.weight.grad is not None
    assert made["data"]["call_s"] > 0 and made["data"]["eager_s"] > 0
    assert made["summary"][0].endswith("kept") and "in 2 graphs" in made["summary"][0]
    assert made["summary"][1].startswith("a call and its backward: ")


def test_nothing_to_train_is_said() -> None:
    with pytest.raises(InputError, match="no output has a gradient.*leave out --train"):
        compiled(torch.nn.Softmax(-1), (torch.randn(4, 8),), train=True)


def test_a_mistake_of_the_model_is_not_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    path.write_text("import torch\ndef build():\n    return torch.nn.Linear(3, 4), (torch.randn(2, 5),)\n")
    assert main(["compile", f"{path}:build"]) == 2
    told = capsys.readouterr().err
    assert "fails on its inputs in eager" in told and "2x5 and 3x4" in told and "mistake in Gnomon" not in told
