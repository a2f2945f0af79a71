"""Modules and inputs that are not ordinary: each is captured and marked, or refused with a name, file and line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.errors import CaptureError, FormatError, InputError  # noqa: E402
from gnomon.frontend.capture import captured  # noqa: E402
from gnomon.frontend.inputs import CodeModel  # noqa: E402
from gnomon.runtime.checks.prove import prove  # noqa: E402

pytestmark = pytest.mark.torch
HERE = r"test_not_ordinary\.py:\d+"
ROWS = (torch.ones(2, 8),)


class Broken(nn.Module):
    """Breaks torch.compile's graph twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        torch._dynamo.graph_break()
        print("rows", len(y))
        return torch.relu(y)


@pytest.mark.parametrize("compiled", [False, True])
def test_graph_breaks_and_prints_are_nothing_to_a_recording(compiled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    module: Any = torch.compile(Broken(), backend="eager") if compiled else Broken()
    found = captured(module, ROWS)
    kinds = [op.kind for block in found.graph.blocks for op in block.ops]
    assert kinds[0] == "linear" and kinds[-1] == "activation" and found.symbols == ("batch",)
    assert bool(found.notes) == compiled and capsys.readouterr().out.startswith("rows 2")
    assert prove(Broken(), ROWS).holds


class Inside(nn.Module):
    """Calls what is given it on the rows of a layer."""

    def __init__(self, function: Any, device: str = "cpu") -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8, device=device), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))  # type: ignore[no-any-return]


def through_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy() * 2)


def chosen(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def from_other_device(x: Tensor) -> Tensor:
    return x + torch.zeros(8, device="xpu")


@pytest.mark.parametrize(
    ("function", "said"), [(through_numpy, "numpy depends on values"), (chosen, "local_scalar_dense depends on values")]
)
def test_what_reads_values_is_marked_with_its_line(function: Any, said: str) -> None:
    [note] = captured(Inside(function), ROWS).notes
    assert "test_not_ordinary.py:" in note and said in note


def test_a_kernel_without_a_shape_function_is_opaque_or_named_with_its_line() -> None:
    library = torch.library.Library("not_ordinary", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    twice = torch.ops.not_ordinary.twice
    found = captured(Inside(twice), ROWS)
    assert [target for *_, target in found.opaque] == ["not_ordinary.twice.default"]
    with pytest.raises(CaptureError, match=rf"{HERE}: not_ordinary\.twice\.default has no shape function"):
        captured(Inside(twice, "meta"), ROWS)


def test_a_device_that_is_not_here() -> None:
    """Parameters on any device are captured by shapes; what a forward makes on one that is absent has a line."""
    assert captured(nn.Linear(8, 8, device="meta"), ROWS).graph.num_parameters() == 72
    halves = nn.Sequential(nn.Linear(8, 8, device="meta"), nn.Linear(8, 8))
    assert captured(halves, ROWS).graph.num_parameters() == 144
    with pytest.raises(CaptureError, match=rf"{HERE}: "):
        captured(Inside(from_other_device), ROWS)


class Packed(nn.Module):
    """Holds a quantised weight, as a buffer or as something else."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        weight = torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8)
        if buffer:
            self.register_buffer("weight", weight)
        else:
            self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.dequantize()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_modules_are_refused_by_name() -> None:
    layers = nn.Sequential(nn.Linear(8, 8))
    eight = torch.ao.quantization.quantize_dynamic(layers, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(InputError, match="0 is a quantised Linear; capture it before that"):
        captured(eight, ROWS)
    with pytest.raises(CaptureError, match="weight: a quantised tensor has no place in a graph"):
        captured(Packed(True), ROWS)
    with pytest.raises(CaptureError, match=f"{HERE}: a quantised tensor has no place in a graph"):
        captured(Packed(False), ROWS)


def test_a_compiled_layer_is_said() -> None:
    module = nn.Sequential(nn.Linear(8, 8))
    module[0].compile(backend="eager")
    assert captured(module, ROWS).notes == ("0 is compiled; it is recorded as it was before",)


@pytest.mark.parametrize(
    ("module", "example", "said"),
    [
        (nn.Bilinear(8, 8, 4), ROWS, r"forward takes \(input1, input2\), and the example has 1 .*'input2'"),
        (nn.Linear(8, 8), {"inptu": ROWS[0]}, r"forward takes \(input\), and the example has inptu: "),
        (nn.Sequential(nn.Embedding(8, 8)), ROWS, r"0 \(Embedding\): .*got torch.FloatTensor"),
        (nn.Sequential(nn.Conv2d(3, 8, 3)), ROWS, r"0 \(Conv2d\): .*got input of size: \[2, 8\]"),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(7, 8)), ROWS, r"1 \(Linear\): .*cannot be multiplied"),
        (nn.Linear(8, 8), (ROWS[0].double(),), "Linear: .*same dtype"),
        (nn.Linear(8, 8), ("rows",), "Linear: .*must be Tensor, not str"),
        (nn.Linear(8, 8), (ROWS[0].to_sparse(),), "input: a sparse_coo tensor has no place"),
    ],
)
def test_wrong_inputs_are_said_with_the_module_that_took_them(module: nn.Module, example: Any, said: str) -> None:
    with pytest.raises((InputError, CaptureError), match=said):
        captured(module, example)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ids=int46[batch,seq]", "input 'ids' has dtype 'int46'.*int64"),
        ("ids=int64[batch,seq", "cannot be read; write NAME=DTYPE"),
        ("ids=int64[batch,se q]", "dim 'se q' of input 'ids'"),
        ("ids=int64[batch,seq=many]", "dim 'seq=many' of input 'ids'"),
        ("ids=int64[batch,seq] mask=bool[batch,seq]", "inputs are divided by commas"),
    ],
)
def test_a_typing_error_in_inputs_is_pointed_at(text: str, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        CodeModel.parse(f"a:b({text})")


def test_nothing_is_imported_that_the_user_does_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config.json that asks for code of its own (`auto_map`), beside that code and a project: neither runs."""
    code = "raise SystemExit('this code was not asked for')\n"
    for name in ("modeling_x.py", "configuration_x.py", "gnomon.py", "my_project/__init__.py", "my_project/model.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code, encoding="utf-8")
    config = {
        "model_type": "llama", "architectures": ["XForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "trust_remote_code": True,
        "auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GNOMON_CACHE", "")
    path, before = list(sys.path), set(sys.modules)
    for model in ("config.json", str(tmp_path)):
        main(["predict", model, "--on", "1x2xh100-sxm", "--seq-len", "32"])
        assert "not asked for" not in capsys.readouterr().err
    assert main(["predict", "my_project", "--on", "1x2xh100-sxm"]) == 2
    assert sys.path == path
    assert not {name for name in set(sys.modules) - before if name.startswith(("my_project", "modeling", "config"))}
    with pytest.raises(SystemExit, match="was not asked for"):  # and it does run where it is named
        main(["predict", "my_project.model:build", "--inputs", "x=float32[batch,8]", "--on", "1x2xh100-sxm"])
    sys.path[:] = path
