"""Stretches of a graph as one call of C++ give what the same steps give in eager, call after call."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.tasks import steps  # noqa: E402
from gnomon.compiler.tune import gate  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler() or steps._library() is None, reason="needs a C++ compiler and this PyTorch"),
    pytest.mark.usefixtures("fresh"),
]


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    backend.reports.clear()
    return torch.compile(function, backend="gnomon", **options)


def runs() -> list[steps.Run]:
    made = [run for report in backend.reports for run in report.runs]
    assert all(run.trial is not None and run.trial.kept for run in made)
    return made


def same(made: Any, wanted: Any) -> None:
    torch.testing.assert_close(made, wanted, rtol=2e-4, atol=1e-5)


class Small(nn.Module):
    """Products, convolutions, norms, operations of ATen's with lists, dtypes and several results; views between."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.wide = nn.Conv2d(3, 8, 3, padding=1), nn.Conv1d(8, 6, 3, stride=2)
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = F.max_pool2d(F.pad(self.pixels(x), (1, 1, 1, 1), mode="reflect").relu(), 2)
        y = self.wide(y.flatten(2))
        y = self.norm(y.transpose(1, 2)) + torch.zeros(6)
        values, _ = torch.topk(y, 3, -1)
        left, right = torch.cat([y, y.sort(-1)[0]], 0).chunk(2)
        return self.out(left * 2.0), values.cumsum(1), right[:, ::2], y.to(torch.float64)


def test_a_model_is_one_call_and_each_call_is_eagers() -> None:
    torch.manual_seed(0)
    model = Small().eval()
    fast = compiled(model)
    with torch.no_grad():
        made = []
        for _ in range(4):
            x = torch.randn(2, 3, 9, 8)[..., 1:7]
            made.append((fast(x), model(x)))
        for one, other in made:  # what a call gave is not what a later call writes
            same(one, other)
        [run] = runs()
        assert run.count >= 10
        model.out.weight.mul_(3.0)
        same(fast(x), model(x))


def test_views_inputs_and_doubles_are_returned_as_they_are() -> None:
    def function(x: Any, y: Any) -> Any:
        z = F.softmax(x @ y, -1) * 2.0
        w = (z + 1.0).t()
        parts = z.split(2, 1)
        return z, z, w, w[1:], parts[1], x, y.t(), z.reshape(-1)

    x, y = torch.randn(4, 6), torch.randn(5, 6).t()
    fast = compiled(function)
    for _ in range(3):
        made, wanted = fast(x, y), function(x, y)
        same(made, wanted)
        assert [one.stride() for one in made] == [one.stride() for one in wanted]
        assert made[0].untyped_storage().data_ptr() == made[4].untyped_storage().data_ptr()
        made[0].zero_()  # the caller's own
        same(fast(x, y), wanted)
    assert len(runs()) == 1


def test_what_is_written_and_drawn_keeps_its_order() -> None:
    def function(x: Any, w: Any) -> Any:
        y = (x @ w).relu().cumsum(0)
        x.mul_(2.0)
        z = (x @ w).tanh().cumsum(1)
        return y + torch.rand_like(y), z.cumsum(0) @ w

    fast = compiled(function)
    w = torch.randn(5, 5)
    for seed in range(4):
        torch.manual_seed(seed)
        x, other = torch.randn(4, 5), torch.zeros(4, 5)
        other.copy_(x)
        torch.manual_seed(seed)
        made = fast(x, w)
        torch.manual_seed(seed)
        same(made, function(other, w))
        same(x, other)


def test_a_step_that_refuses_is_eagers_error() -> None:
    def function(table: Any, rows: Any, w: Any) -> Any:
        return F.softmax(F.embedding(rows, table) @ w, -1).cumsum(0) @ w

    table, w = torch.randn(7, 5), torch.randn(5, 5)
    fast = compiled(function)
    for rows in (torch.arange(6), torch.arange(6) % 3):
        for _ in range(2):
            same(fast(table, rows, w), function(table, rows, w))
    assert runs()
    with pytest.raises(IndexError):
        fast(table, torch.tensor([0, 1, 9, 2, 3, 4]), w)
    same(fast(table, rows, w), function(table, rows, w))


def test_training_steps_are_eagers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 4), nn.Softmax(-1))
    fast = compiled(model)
    for _ in range(3):
        x = torch.randn(3, 6)
        wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        same(torch.autograd.grad(fast(x).square().sum(), list(model.parameters())), wanted)
    assert len(runs()) == 2


def test_threads_call_at_the_same_time() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softmax(-1)).eval()
    fast = compiled(model)
    inputs = [torch.randn(8, 16) for _ in range(4)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
        for _ in range(2):
            fast(inputs[0])
        [run] = runs()
        wrong: list[int] = []

        def many(n: int) -> None:
            with torch.no_grad():
                for _ in range(100):
                    if not torch.allclose(fast(inputs[n]), wanted[n], rtol=2e-4, atol=1e-5):
                        wrong.append(n)

        threads = [threading.Thread(target=many, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert 1 <= len(run.rooms) <= 5


def test_memory_goes_with_the_graph_and_stays_the_same_meanwhile() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softmax(-1)).eval()
    fast = compiled(model)
    x = torch.randn(8, 16)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        result = weakref.ref(fast(x))
        assert result() is None
    [run] = runs()
    gone = weakref.ref(run.table)
    backend.reports.clear()
    torch._dynamo.reset()
    del run, fast
    gc.collect()
    assert gone() is None


def test_sizes_that_change_or_are_empty_stay_pythons() -> None:
    def function(x: Any, w: Any) -> Any:
        return (x @ w).cumsum(0).tanh(), torch.cat([x[:0], x[:0]])

    fast = compiled(function, dynamic=True)
    w = torch.randn(5, 5)
    for rows in (3, 7, 0, 1):
        x = torch.randn(rows, 5)
        same(fast(x, w), function(x, w))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.complex64])
def test_operations_of_aten_alone_of_any_dtype(dtype: torch.dtype) -> None:
    def function(x: Any) -> Any:
        y = torch.cat([x, x.flip(0)], 1)
        return y.cumsum(1), y.roll(1, 0).cumsum(0), y.to(torch.float16) if not dtype.is_complex else y.abs()

    x = (torch.randn(4, 5) * 8).to(dtype)
    fast = compiled(function)
    for _ in range(3):
        for made, wanted in zip(fast(x), function(x), strict=True):
            assert torch.equal(made, wanted)


def test_a_run_that_is_wrong_or_slow_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    called = steps.Run.call
    monkeypatch.setattr(steps.Run, "call", lambda self, args: [one + 1 for one in called(self, args)])
    monkeypatch.setattr(gate, "_verdicts", {})
    model = nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1), nn.Linear(6, 6)).eval()
    fast = compiled(model)
    x = torch.randn(3, 6)
    with torch.no_grad():
        for _ in range(3):
            same(fast(x), model(x))
    [run] = [run for report in backend.reports for run in report.runs]
    assert run.trial is not None and not run.trial.kept


def test_layers_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of layers differ in their nodes' names alone; another function or other sizes between are another run."""
    monkeypatch.setattr(gate, "_verdicts", {})

    def text(scale: float, width: int, twice: bool = False) -> str:
        torch._dynamo.reset()
        x = torch.randn(3, width)

        def function(x: Any) -> Any:
            y = (x.t() @ x).cumsum(0)
            return (y * scale).cumsum(0 if twice else 1).t() @ x.t()

        fast = compiled(function)
        for _ in range(2):
            same(fast(x), function(x))
        [run] = runs()
        assert run.trial is not None
        return str(run.trial.source)

    assert text(1.5, 6) == text(1.5, 6)
    assert len({text(1.5, 6), text(2.5, 6), text(1.5, 7), text(1.5, 6, twice=True)}) == 4

    torch._dynamo.reset()
    at, w = torch.randint(0, 9, (9, 2)), torch.randn(6, 6)

    def layers(x: Any) -> Any:
        for _ in range(3):
            x = (x @ w).cumsum(0).flip(1).contiguous() @ w
            x = F.embedding_bag(at, x, mode="sum")  # of no run
        return x

    fast, x = compiled(layers), torch.randn(9, 6)
    for _ in range(3):
        same(fast(x), layers(x))
    made = runs()
    assert len(made) >= 3 and len({run.trial.source for run in made if run.trial is not None}) < len(made)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_stay_pythons(mode: str) -> None:
    """Some results of bags have no memory, whatever fake tensors say: a call of C++ read through them."""
    torch._dynamo.reset()
    table, at = torch.randn(9, 5, requires_grad=True), torch.tensor([[1, 2, 4], [4, 3, 8]])

    def bags(table: Any) -> Any:
        return torch.nn.functional.embedding_bag(at, table * 1.5, mode=mode).cumsum(0).exp().flip(0)

    fast = torch.compile(bags, backend=backend.gnomon)
    for _ in range(3):
        made, wanted = fast(table), bags(table)
        torch.testing.assert_close(made, wanted)
        torch.testing.assert_close(
            torch.autograd.grad(made.sum(), table)[0], torch.autograd.grad(wanted.sum(), table)[0]
        )
