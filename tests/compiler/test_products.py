"""Products and convolutions that a trial gives to oneDNN are eager's, and a weight that somebody writes is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from gnomon.compiler import backend, gate, products  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")]


@pytest.fixture(params=[True, False], ids=["oneDNN", "ATen"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether every trial says that the kernel is the faster one."""
    seconds = (1.0, 2.0) if request.param else (2.0, 1.0)
    monkeypatch.setattr(gate, "_times", lambda run, aten, args, after: seconds)
    monkeypatch.setattr(gate, "SLOWER", 1.03)
    monkeypatch.setattr(gate, "_verdicts", {})
    monkeypatch.setattr(gate, "_read", lambda key: None)
    monkeypatch.setattr(gate, "_write", lambda key, verdict: None)
    monkeypatch.setattr(products, "FEWEST", 1)
    return bool(request.param)


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> Any:
    torch._dynamo.reset()
    backend.reports.clear()
    return torch.compile(function, backend=backend.gnomon, dynamic=dynamic)


def test_products_of_a_training_step_are_eagers(kept: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.ReLU(), torch.nn.Linear(20, 6, bias=False))
    x = torch.randn(9, 12, requires_grad=True)
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    fast = compiled(model)
    for _ in range(2):
        made = torch.autograd.grad(fast(x).square().sum(), [x, *model.parameters()])
        for a, b in zip(made, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-4)
    each = [one for report in backend.reports for one in report.products]
    assert len(each) == 6
    assert [one.kept for one in each] == [kept] * 6
    assert all(one.settled() is (one.run if kept else one.aten) for one in each)
    called = [value for report in backend.reports for value in report.function.__globals__.values()]
    assert not any(isinstance(value, products.Product) for value in called)


@pytest.mark.skipif(torch.bfloat16 not in products.dtypes(), reason="oneDNN has no bfloat16 here")
def test_products_of_bfloat16(kept: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 24).bfloat16()
    x = torch.randn(9, 40).bfloat16().requires_grad_()
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    fast = compiled(model)
    for _ in range(2):
        made = torch.autograd.grad(fast(x).square().sum(), [x, *model.parameters()])
        for a, b in zip(made, wanted, strict=True):
            assert a.dtype == torch.bfloat16 and (a - b).norm() <= 0.01 * b.norm()
    each = [one for report in backend.reports for one in report.products]
    assert [one.kept for one in each] == [kept] * 3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 0)])
def test_convolutions_are_eagers(kept: bool, bias: bool, stride: int, padding: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 8, 3, stride=stride, padding=padding, bias=bias).eval()
    x = torch.randn(1, 3, 11, 9)
    fast = compiled(model)
    with torch.no_grad():
        for layout in (torch.contiguous_format, torch.channels_last):
            torch.testing.assert_close(fast(x.to(memory_format=layout)), model(x), rtol=2e-4, atol=1e-5)
    assert [one.kept for report in backend.reports for one in report.products][0] == kept


def test_a_relu_that_alone_reads_a_product_is_part_of_it(kept: bool) -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(12, 20), torch.nn.Conv2d(2, 4, 3)

    def both(x: Any, y: Any) -> Any:
        once = second(y)
        return first(x).relu(), once.relu() + once

    x, y = torch.randn(5, 12), torch.randn(1, 2, 7, 7)
    fast = compiled(both)
    with torch.no_grad():
        for _ in range(2):
            for a, b in zip(fast(x, y), both(x, y), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-5)
    names = sorted(one.name.split()[0] for one in backend.reports[0].products)
    assert names == ["convolution", "linear+relu"]  # what others read too stays as it is


def test_a_written_weight_is_seen(kept: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 24).eval()
    x = torch.randn(5, 16)
    fast = compiled(model)
    with torch.no_grad():
        fast(x), fast(x)
        model.weight.data[3, 7] += 1.0  # past autograd's count of writes
        torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=1e-5)


def test_sizes_that_change_are_tried_each(kept: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 24).eval()
    fast = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (3, 4, 9, 3, 70):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=1e-5)
    [one] = [one for report in backend.reports for one in report.products]
    assert sorted(one.trials) == [2, 4, 7]
    assert one.settled() is None


def test_a_library_that_does_not_take_the_tensors_is_given_back(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(products, "_linear", fails)
    model = torch.nn.Linear(16, 24).eval()
    x = torch.randn(5, 16)
    fast = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
    assert not backend.reports[0].products[0].kept
