"""Convolutions of inference with batch norm, sum and ReLU as one call: that of eager, also after writes to weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.explain import explained  # noqa: E402
from gnomon.compiler.kernels import convolutions  # noqa: E402
from gnomon.compiler.kernels.products import dtypes  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not (has_compiler() and torch.backends.mkldnn.is_available()), reason="needs a C++ compiler and oneDNN"
    ),
    pytest.mark.usefixtures("fresh"),
]


class Block(nn.Module):
    """Of a residual network: two ways that meet, the second through a convolution of its own or not."""

    def __init__(self, inside: int, out: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.one = nn.Conv2d(inside, out, 3, stride, 1, bias=False, groups=groups)
        self.two = nn.Conv2d(out, out, 1, bias=True)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(3 if stride > 1 else 2))
        self.past = nn.Conv2d(inside, out, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Any) -> Any:
        y = self.norms[1](self.two(self.norms[0](self.one(x)).relu()))
        return (y + (x if self.past is None else self.norms[2](self.past(x)))).relu()


def network() -> Any:
    parts = [nn.Conv2d(3, 8, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Block(8, 8, 1, 2), Block(8, 16, 2)]
    made = nn.Sequential(*parts, nn.Conv2d(16, 5, 1), nn.Softmax(1))
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                tensor.uniform_(0.5, 1.5)  # type: ignore[union-attr,operator]
    return made.eval()


def assert_same(model: Any, fast: Any, x: Any) -> None:
    with torch.no_grad():
        made, wanted = fast(x), model(x)
    torch.testing.assert_close(made, wanted, rtol=2e-4, atol=2e-5)
    assert made.stride() == wanted.stride()


def test_a_network_is_that_of_eager_after_any_of_its_tensors_was_written() -> None:
    model, x = network(), torch.randn(2, 3, 33, 31)
    fast = torch.compile(model, backend=backend.gnomon)
    for _ in range(2):  # on trial, then as chosen
        assert_same(model, fast, x)
    [graph] = backend.reports[-1:]
    assert len(graph.convolutions) == 7 and sum(one.added for one in graph.convolutions) == 2
    assert not any("batch_norm" in name for name in explained(graph)["aten"]) and not explained(graph)["groups"][1:]
    model[3].one.weight.data[0, 0, 0, 0] += 1.0
    assert_same(model, fast, x)
    model[4].norms[2].running_var[3] = 7.0
    assert_same(model, fast, x)
    model.load_state_dict(network().state_dict())
    assert_same(model, fast, x)
    assert_same(model, fast, x.contiguous(memory_format=torch.channels_last))


def test_what_is_not_a_number_stays_so_behind_a_relu() -> None:
    """oneDNN's own ReLU of NaN is 0: a network that has diverged would look as if it had not."""
    model, x = network(), torch.randn(2, 3, 33, 33)
    fast = torch.compile(model, backend=backend.gnomon)
    with torch.no_grad():
        for _ in range(2):
            fast(x)
        x[1, 2, 7, 8] = float("nan")
        made, wanted = fast(x), model(x)
    assert wanted[1].isnan().any() and not wanted[0].isnan().any()
    torch.testing.assert_close(made, wanted, rtol=2e-4, atol=2e-5, equal_nan=True)


class Inverted(nn.Module):
    """Of a mobile network: pixels to more channels, a convolution of each alone, pixels to fewer, the input added."""

    def __init__(self, channels: int, more: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.up, self.each = nn.Conv2d(channels, more, 1, bias=False), nn.Conv2d(more, more, 3, 1, 1, groups=more)
        self.down, self.norm, self.act = nn.Conv2d(more, channels, 1), nn.BatchNorm2d(more), act()

    def forward(self, x: Any) -> Any:
        return x + self.down(self.act(self.each(self.act(self.norm(self.up(x))))))


@pytest.mark.parametrize("lost", [False, True], ids=["one kernel", "apart"])
def test_work_behind_single_pixels_is_part_of_them(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in double; NaN and what GELU has an answer of its own for are ATen's; where the kernel lost, the graph is
    compiled with its work apart."""
    parts = [Inverted(5, 9, nn.SiLU), Inverted(5, 9, nn.GELU), nn.Conv2d(5, 4, 1), nn.Hardswish()]
    model, x = nn.Sequential(*parts).eval(), torch.randn(2, 5, 6, 7)
    fast = torch.compile(model, backend=backend.gnomon)
    monkeypatch.setattr(convolutions.Pixels, "lost", property(lambda self: lost and bool(self.work)))
    monkeypatch.setattr(convolutions, "slower", lambda made: False)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x).double(), deepcopy(model).double()(x.double()), rtol=1e-4, atol=1e-5)
        told = explained(backend.reports[-1])["convolutions"]
        taken = [one["operations"] for one in told]
        assert taken[0] == ["convolution", "batch norm"] + ["silu"] * (not lost)
        assert taken[-1] == ["convolution"] + ["hardswish"] * (not lost)
        x[0, 1, 2, 3], x[1, 2, 4, 4] = float("nan"), 1e38
        assert_near(fast(x), model(x))
        model[0].up.weight.mul_(2)
        assert_near(fast(x), model(x))


def assert_near(made: Any, wanted: Any) -> None:
    torch.testing.assert_close(made, wanted, rtol=2e-4, atol=2e-5, equal_nan=True)


def test_a_network_in_bfloat16_is_as_near_as_eager_to_one_in_double() -> None:
    torch.manual_seed(0)
    model, x = network().bfloat16(), torch.randn(2, 3, 33, 31).bfloat16()
    fast = torch.compile(model, backend=backend.gnomon)
    for number in (1.0, 1.0, 3.0):  # on trial, as chosen, after a weight was written
        model[3].one.weight.data[0, 0, 0, 0] = number
        with torch.no_grad():
            made, eager, exact = fast(x), model(x), deepcopy(model).double()(x.double())
        assert made.dtype == torch.bfloat16 and made.stride() == eager.stride()
        assert (made - exact).norm() <= 1.5 * (eager - exact).norm() + 1e-3
    assert len(backend.reports[-1].convolutions) == (7 if torch.bfloat16 in dtypes() else 0)


def test_a_sum_takes_the_memory_of_what_nobody_reads_again() -> None:
    parts = [nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), Block(8, 8, 1), Block(8, 8, 1)]
    model, x = nn.Sequential(*parts).eval(), torch.randn(1, 3, 12, 12)
    fast = torch.compile(model, backend=backend.gnomon)
    for _ in range(3):
        assert_same(model, fast, x)
    calls = [one for one in backend.reports[-1].convolutions if one.added]
    assert len(calls) == 2 and all(one.spends for one in calls)

    class Seen(nn.Module):
        def forward(self, x: Any) -> Any:
            first = parts[1](parts[0](x))
            return parts[2](first), first  # who called sees what would be overwritten

    seen = Seen()
    fast = torch.compile(seen, backend=backend.gnomon)
    with torch.no_grad():
        for _ in range(3):
            for one, other in zip(fast(x), seen(x), strict=True):
                torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    assert not any(one.spends for one in backend.reports[-1].convolutions)


def test_a_sum_in_place_is_that_of_eager() -> None:
    call = convolutions.Convolution(([2, 6, 5, 7], [1, 1], [1, 1], [1, 1], 1), True, None, True, True)
    x, other = (torch.randn(2, n, 5, 7).contiguous(memory_format=torch.channels_last) for n in (6, 4))
    given = (torch.randn(4, 6, 3, 3), torch.randn(4))
    with torch.no_grad():
        wanted, place = call.aten(x, other, *given), other.data_ptr()
        made = call._in_place(x, other, *given)
    torch.testing.assert_close(made, wanted, rtol=2e-4, atol=2e-5)
    assert made.data_ptr() == place


@settings(max_examples=50)
@given(
    images=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 9), st.integers(1, 9)),
    step=st.integers(1, 3),
    parts=st.tuples(*[st.booleans()] * 6),
    seed=st.integers(0, 99),
)
def test_any_convolution_of_single_pixels_is_that_of_pytorch(
    images: int, sizes: tuple[int, int, int, int], step: int, parts: tuple[bool, ...], seed: int
) -> None:
    torch.manual_seed(seed)
    (k, n, high, wide), (bias, norm, added, relu, before, last) = sizes, parts
    high = high if images == 1 else high * step  # images at even distances
    x, w = torch.randn(images, k, high, wide), torch.randn(n, k, 1, 1)
    form = ([images, k, high, wide], [step, step], [0, 0], [1, 1], 1)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    call = convolutions.Pixels(form, bias, 1e-5 if norm else None, added, relu, before=before)
    other = torch.randn(images, n, (high - 1) // step + 1, (wide - 1) // step + 1)
    other = other.contiguous(memory_format=torch.channels_last)
    rest = [torch.randn(n), *(torch.rand(n) + 0.5 for _ in range(4))]
    given_ = (x, *([other] if added else []), w, *rest[: int(bias)], *(rest[1:] if norm else []))
    wanted = call.aten(*given_)
    torch.testing.assert_close(call.run(*given_), wanted, rtol=1e-3, atol=1e-3)
    if added:
        made = call._in_place(*given_)
        torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-3)
        assert made.data_ptr() == other.data_ptr()


def test_training_packs_nothing() -> None:
    model, x = network(), torch.randn(1, 3, 32, 32)
    fast = torch.compile(model, backend=backend.gnomon)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    made = torch.autograd.grad(fast(x).square().sum(), list(model.parameters()))
    assert all(not graph.convolutions for graph in backend.reports[-2:])
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-6)


def test_a_graph_that_is_slower_with_them_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "slower", bool)
    model, x = network(), torch.randn(1, 3, 32, 32)
    fast = torch.compile(model, backend=backend.gnomon)
    for _ in range(3):
        assert_same(model, fast, x)
    assert not backend.reports[-1].convolutions and backend.reports[-1].final


def test_a_digest_is_another_for_every_number_that_is_another() -> None:
    x, y = torch.randn(333), torch.randn(70, 5000)
    before = convolutions.digest_of([x, y])
    for tensor in (x, y.view(-1)):
        for place in (0, 1, 31, tensor.numel() // 2, tensor.numel() - 1):
            kept = float(tensor[place])
            tensor[place] = kept + 1e-3
            assert convolutions.digest_of([x, y]) != before
            tensor[place] = kept
    assert convolutions.digest_of([x, y]) == before
    torch.set_num_threads(2)
    assert convolutions.digest_of([x, y]) == before
