"""`gnomon compile`: outputs of any nesting are trained, a user's mistake is told as one, calls are timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gnomon.cli import main  # noqa: E402
from gnomon.compiler.command import compiled  # noqa: E402
from gnomon.compiler.kernels import live  # noqa: E402
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


MODELS = """
import torch
from torch import nn


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(128, 128), nn.Linear(128, 64)

    def forward(self, x, mask):
        return self.two(torch.relu(self.one(x))) * mask[..., None]


def padded():
    mask = (torch.arange(32) < torch.tensor([[32], [4], [6], [9]])).float()
    return Padded().eval(), (torch.randn(4, 32, 128), mask)


def pooled():
    layers = [layer for n in (3, 16, 16) for layer in (nn.Conv2d(n, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(*layers).eval(), (torch.randn(1, 3, 16, 16),)


def few():
    return nn.Sequential(nn.ReLU(), nn.Linear(200, 83)).eval(), (torch.randn(1, 200) - 1.5,)
"""


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("padded", ["--ragged", "mask"], ["ragged: 2 matmuls by the rows", "matmul by the rows that are there"]),
        (
            "few",
            ["--frozen", "--preview", "--ragged", "mask"],
            ["frozen: 1 matmul by the columns", "preview: no convolution before", "ragged: no matmul has the rows"],
        ),
        ("pooled", ["--preview"], ["of 2 convolutions before a pooling by a preview", "by a preview in eight bits"]),
    ],
)
def test_what_a_user_chooses_reaches_the_compiler_and_is_told(
    name: str, flags: list[str], says: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FEWEST", 1)
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    assert main(["compile", f"{path}:{name}", *flags, "--explain"]) == 0
    told = capsys.readouterr().out
    for line in says:
        assert line in told, told
    assert main(["compile", f"{path}:{name}", *flags, "--train"]) == 2
    assert "of calls without gradients; leave --train out" in capsys.readouterr().err


def test_a_mistake_of_the_model_is_not_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    path.write_text("import torch\ndef build():\n    return torch.nn.Linear(3, 4), (torch.randn(2, 5),)\n")
    assert main(["compile", f"{path}:build"]) == 2
    told = capsys.readouterr().err
    assert "fails on its inputs in eager" in told and "2x5 and 3x4" in told and "mistake in Gnomon" not in told
