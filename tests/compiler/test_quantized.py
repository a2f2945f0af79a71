"""Layers of `quantize_dynamic`: no graph breaks at them, and their kernel gives what ATen's operation gives."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.kernels import lanes, quantized, stored  # noqa: E402
from gnomon.compiler.machine import has_features  # noqa: E402
from gnomon.compiler.saved import save  # noqa: E402
from gnomon.errors import CaptureError  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning"),
    pytest.mark.skipif(
        torch.backends.quantized.engine not in quantized.ENGINES or not has_compiler(),
        reason="no FBGEMM, or no compiler",
    ),
]
SIZES = ((48, 192), (19, 77), (5, 3), (1, 1))
"""Outputs and inputs: full panels, tails of both."""


def inputs(k: int) -> dict[str, torch.Tensor]:
    """Numbers by kind: what decides scale and zero, and how x lies."""
    x = torch.randn(7, k)
    largest = torch.finfo(torch.float32).max
    return {
        "signed": x, "positive": x.abs() + 3, "negative": -x.abs() - 3, "zero": torch.zeros(7, k),
        "-0": -torch.zeros(2, k), "huge": x * 1e37, "as large as it goes": x.clamp(-1, 1) * largest,
        "tiny": x * 1e-5, "denormal": x * 1e-40,
        "halves": (x * 8).round() / 2, "one row": x[:1], "one outlier": torch.cat([x, torch.full((1, k), 1e4)]),
        "every other row": torch.randn(8, k)[::2], "every other column": torch.randn(3, 2 * k)[:, ::2],
        "turned": torch.randn(k, 5).t(), "three dims": torch.randn(2, 3, k),
        "broadcast": torch.randn(1, k).expand(4, k),
        "nan": torch.where(x > 1, torch.nan, x), "inf": torch.where(x == x.max(), torch.inf, x),
    }  # fmt: skip


def layer(n: int, k: int, per_channel: bool, bias: bool) -> nn.Module:
    of = torch.ao.quantization
    config = of.per_channel_dynamic_qconfig if per_channel else of.default_dynamic_qconfig
    return of.quantize_dynamic(nn.Sequential(nn.Linear(k, n, bias=bias)), {nn.Linear: config})[0]


@pytest.mark.parametrize(
    ("name", "reduce_range"), [("avx512", True), ("avx512", False), ("avx2", True), ("avx2", False), ("generic", True)]
)
def test_the_kernel_gives_what_aten_gives(name: str, reduce_range: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, as sums are integers and what follows is rounded as FBGEMM rounds it; the generic set has no product
    and sum that are rounded once unless the compiler makes one."""
    one = next(one for one in lanes.SETS if one.name == name)
    if not has_features(one.needed(8)):
        pytest.skip(f"this machine has no {name}")
    monkeypatch.setattr(stored, "lanes_of", lambda outputs, bits: one)
    for number, (n, k) in enumerate(SIZES):
        torch.manual_seed(number)
        weight = layer(n, k, per_channel=bool(number % 2), bias=number != 1)._packed_params._packed_params
        packed = quantized.packed_of(weight, reduce_range)
        if packed is None:  # FBGEMM saturates there
            assert not reduce_range and name != "avx512"
            continue
        call = quantized.DynamicLinear(weight, reduce_range, *packed, True)
        for kind, x in inputs(k).items():
            got, wanted = call.run(x), call.aten(x)
            assert got.stride() == wanted.stride(), kind
            apart = 1e-6 * float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max()) if name == "generic" else 0.0
            torch.testing.assert_close(
                got, wanted, rtol=0, atol=apart, equal_nan=True, msg=lambda m, kind=kind: f"{kind}: {m}"
            )


def quantised(model: nn.Module) -> nn.Module:
    made: nn.Module = torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, dtype=torch.qint8)
    return made


class Block(nn.Module):
    """What lies between linear layers in an encoder."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def called(fast: Any, x: torch.Tensor, times: int = 3) -> torch.Tensor:
    """A result of a later call: the first ones are ATen's, beside which kernels are tried."""
    with torch.no_grad():
        return [fast(x) for _ in range(times)][-1]


@pytest.mark.parametrize("dynamic", [None, True])
def test_layers_are_in_one_graph(dynamic: bool | None) -> None:
    model = quantised(nn.Sequential(Block(), Block()))
    backend.reports.clear()
    fast = torch.compile(model, backend="gnomon", fullgraph=True, dynamic=dynamic)
    for rows in (6, 9):
        x = torch.randn(2, rows, 64)
        # a norm that differs in its last bit may move a code by one
        torch.testing.assert_close(called(fast, x), called(model, x), rtol=0, atol=0.02)
    assert {len(one.quantized) for one in backend.reports} == {4}
    assert all(one.kept for report in backend.reports for one in report.quantized)
    if dynamic is None:
        assert any("linear in eight bits" in name for one in backend.reports for run in one.runs for name in run.names)


def test_what_is_no_number_is_atens_in_a_call_of_cpp() -> None:
    model = quantised(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    fast, x = torch.compile(model, backend="gnomon"), torch.randn(3, 16)
    called(fast, x)
    x[1, 2] = torch.nan
    torch.testing.assert_close(called(fast, x), called(model, x), rtol=0, atol=0, equal_nan=True)


def test_a_weight_that_is_loaded_anew_is_seen() -> None:
    one, other = (quantised(nn.Sequential(nn.Linear(16, 8))) for _ in "ab")
    fast, x = torch.compile(one, backend="gnomon"), torch.randn(3, 16)
    assert torch.equal(called(fast, x), called(one, x))
    one.load_state_dict(other.state_dict())
    assert torch.equal(called(fast, x), called(other, x))


def test_a_layer_with_relu_and_calls_by_name() -> None:
    model = nn.Sequential(torch.ao.nn.intrinsic.LinearReLU(nn.Linear(16, 8), nn.ReLU())).eval()
    torch.ao.quantization.propagate_qconfig_(model, {"": torch.ao.quantization.default_dynamic_qconfig})
    relu = torch.ao.nn.intrinsic.quantized.dynamic.LinearReLU.from_float(model[0])
    packed = relu._packed_params._packed_params

    def function(x: torch.Tensor) -> torch.Tensor:
        return relu(x) + torch.ops.quantized.linear_dynamic.default(X=x, W_prepack=packed) * 2

    fast, x = torch.compile(function, backend="gnomon", fullgraph=True), torch.randn(3, 16)
    torch.testing.assert_close(called(fast, x), function(x))


def test_other_backends_and_gradients_are_left_as_they_were() -> None:
    model, graphs = quantised(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), []
    other = torch.compile(model, backend=lambda module, _: graphs.append(module) or module.forward)
    x = torch.randn(3, 8)
    assert torch.equal(called(other, x), called(model, x))
    assert not any("gnomon" in str(node.target) for one in graphs for node in one.graph.nodes)
    fast, leaf = torch.compile(model, backend="gnomon"), x.clone().requires_grad_()
    assert torch.equal(fast(leaf), model(leaf))


def test_a_packed_weight_is_forgotten_once_it_is_gone() -> None:
    weight = layer(4, 4, per_channel=False, bias=True)._packed_params._packed_params
    number = quantized.number_of(weight)
    assert quantized.number_of(weight) == number and quantized.weight_of(number) is weight
    del weight
    gc.collect()
    assert number not in quantized._objects and all(one[1] != number for one in quantized._known.values())


def test_results_are_the_same_with_any_number_of_threads() -> None:
    weight, x = layer(96, 128, per_channel=True, bias=True)._packed_params._packed_params, torch.randn(97, 128)
    found = quantized.packed_of(weight, True)
    assert found is not None
    call, results = quantized.DynamicLinear(weight, True, *found, True), []
    assert 97 * 96 * 128 >= stored.PARALLEL
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(call.run(x))
    assert all(torch.equal(one, call.aten(x)) for one in results)


def test_one_that_is_saved_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"^'1' has a packed weight, .* torch.compile"):
        save(quantised(nn.Sequential(nn.ReLU(), nn.Linear(4, 4))), (torch.randn(2, 4),), tmp_path / "model")
