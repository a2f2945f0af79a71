"""Kernels against eager: norms, softmax, losses, activations, lookups, with their backward, and odd layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from compiler.traced import compiled, run, same  # noqa: E402
from torch.nn import functional as F  # noqa: E402

aten = torch.ops.aten
pytestmark = pytest.mark.torch


def grads(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of a weighted sum of a function's squares, so that every element has another one."""

    def backward(*inputs: Any) -> Any:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
            out = function(*leaves) + 0.1
            loss = (out * out * torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()).sum()
            return torch.autograd.grad(loss, [x for x in leaves if x.requires_grad])

    return backward


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


STITCHED = {
    "softmax": (lambda a: F.softmax(a, -1), (x(7, 37),)),
    "log_softmax": (lambda a: F.log_softmax(a * 3, -1), (x(3, 5, 33),)),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (40,), w, b), (x(6, 7, 40), x(40), x(40))),
    "own rms": (lambda a, w: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * w, (x(2, 5, 24), x(24))),
    "add, norm, gelu": (lambda a, b, w: F.gelu(F.layer_norm(a + b, (40,), w)) * b, (x(9, 40), x(9, 40), x(40))),
    "two last dims": (lambda a: F.layer_norm(a, (6, 10)), (x(4, 6, 10),)),
    "double": (lambda a: F.softmax(a, -1), (x(5, 19, dtype=torch.float64),)),
}


@pytest.mark.parametrize("name", STITCHED)
def test_a_row_is_one_group_forward_and_backward(name: str) -> None:
    function, inputs = STITCHED[name]
    same(function, *inputs, groups=1)
    same(grads(function), *inputs)


def test_activations_and_their_gradients() -> None:
    def every(a: torch.Tensor) -> torch.Tensor:
        out = F.gelu(a) + F.gelu(a, approximate="tanh") * F.silu(a) + torch.sigmoid(a) * torch.tanh(a) + F.relu(a)
        out = out + F.leaky_relu(a, 0.1) + F.hardtanh(a) + F.hardswish(a) + F.softplus(a)
        return out + torch.exp(-a.abs()) + torch.erf(a) + torch.log1p(a * a) + torch.where(a > 0, a, a * a)

    special = torch.tensor([0.0, -0.0, 30.0, -30.0, 1e-20, 3.5, -3.5, 100.0, -100.0])
    same(every, torch.cat([x(1000) * 3, special]), groups=1)
    same(grads(every), x(999) * 2)


def test_what_is_not_a_number_stays_so() -> None:
    odd = torch.tensor([[float("nan"), 1.0, 2.0], [float("inf"), 1.0, 2.0], [-float("inf")] * 3, [1.0, 2.0, 3.0]])
    same(lambda a: (torch.exp(a), torch.log(a), F.relu(a), torch.maximum(a, -a), a > 1, a.clamp(-1, 1)), odd)
    same(lambda a: (a.amax(-1), F.softmax(a, -1), (a * 1).amin(-1)), odd)


def rotary(a: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = a.chunk(2, -1)
    return a * cos + torch.cat((-second, first), -1) * sin


def test_parts_of_equal_size_are_joined_inside_a_group() -> None:
    same(rotary, x(2, 3, 7, 20), x(7, 20), x(7, 20), groups=1)
    same(grads(rotary), x(2, 3, 7, 20), x(7, 20), x(7, 20))
    same(lambda a, b: torch.cat((a.tanh(), b * 2, a + b), 0) + 1, x(3, 5), x(3, 5), groups=1)
    same(lambda a, b: F.softmax(torch.cat((a, b), -1) * 2, -1), x(4, 9), x(4, 9), groups=1)
    same(lambda a, b: torch.cat((a * 2, b + 1), 1).exp(), x(3, 4), x(3, 5))  # unequal: ATen's cat


def test_joined_parts_of_any_length() -> None:
    made = compiled(rotary, x(2, 3, 7, 20), x(7, 20), x(7, 20), symbolic=True)
    for b, s in ((2, 7), (5, 1), (1, 33)):
        inputs = (x(b, 3, s, 20), x(s, 20), x(s, 20))
        torch.testing.assert_close(run(made, *inputs)[0], rotary(*inputs))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_with_rows_that_do_not_count(reduction: str) -> None:
    target = torch.tensor([3, 0, -100, 10, 5])

    def function(a: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(a, t, reduction=reduction)

    same(function, x(5, 11), target, groups=1)
    same(grads(function), x(5, 11), target)


def test_columns_totals_and_rows_of_one_group() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(a) * b
        return y, y.sum(-1), y.sum(0), y.sum(), (y * y).mean(), y.amax(-1, keepdim=True)

    same(function, x(300, 45), x(300, 45), groups=1)
    same(lambda a: ((a * 2).sum(), (a + 1).amax()), x(5000))


def test_embeddings_positions_and_a_norm_are_one_group() -> None:
    def function(i: torch.Tensor, table: torch.Tensor, position: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.embedding(i, table) + position, (24,), w)

    inputs = (torch.randint(0, 50, (3, 6)), x(50, 24), x(6, 24), x(24))
    made = same(function, *inputs, groups=1)
    with pytest.raises(IndexError, match="index out of range"):
        run(made, torch.full((3, 6), 50), *inputs[1:])


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.transpose(1, 2),
        lambda a: a.permute(2, 0, 1),
        lambda a: a[:, 1:, ::2],
        lambda a: a[0],
        lambda a: a.unsqueeze(1).expand(4, 3, 6, 10),
        lambda a: a.reshape(24, 10),
        lambda a: a.select(1, 2),
        lambda a: a.chunk(2, -1)[1],
    ],
)
def test_views_before_and_after_a_group(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    a = x(4, 6, 10)
    same(lambda t: F.softmax(view(t) * 2, -1), a)
    same(lambda t: view(torch.tanh(t) * 2 + t), a)
    same(lambda t: (torch.tanh(view(t)) + 1).contiguous(), a)


def test_layouts_of_images_and_of_heads() -> None:
    image = x(2, 5, 4, 6).to(memory_format=torch.channels_last)
    statistics = (torch.rand(5), torch.rand(5), torch.rand(5), torch.rand(5) + 0.5)

    def norm(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.relu(aten._native_batch_norm_legit_no_training(a, w, b, m, v, 0.1, 1e-5)[0] + a)

    same(norm, image, *statistics, groups=1)
    same(norm, image.contiguous(), *statistics, groups=1)
    for where in (image, image[:1].contiguous()):  # vectors lie along the image, not along the numbers of its channels
        made = compiled(norm, where, *statistics)
        [planned] = made.program.groups
        nest = planned.kernel.nest
        assert nest.outputs[0].strides[nest.inner[-1]] == 1
    heads = x(2, 3, 8, 6)
    same(lambda a, b: (torch.tanh(a) * b).permute(0, 2, 1, 3).reshape(2, 8, 18), heads, heads)


def test_bfloat16_is_computed_in_float() -> None:
    made = compiled(lambda a, w: F.gelu(F.layer_norm(a, (40,), w)), x(5, 40, dtype=torch.bfloat16), x(40).bfloat16())
    for _ in range(2):
        a, w = x(5, 40), x(40)
        [got] = run(made, a.bfloat16(), w.bfloat16())
        wanted = F.gelu(F.layer_norm(a.bfloat16().float(), (40,), w.bfloat16().float()))
        torch.testing.assert_close(got.float(), wanted, rtol=1e-2, atol=1e-2)
    assert all(made.kept(p) for p in made.program.groups)


def test_sums_are_the_same_with_any_number_of_threads() -> None:
    made = compiled(lambda a: ((a * a).sum(), torch.exp(a).sum(0), F.softmax(a, -1)), x(700, 300))
    a = x(700, 300)
    run(made, a)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(made, a)
        torch.set_num_threads(2)
        two = run(made, a)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))


def test_one_compilation_serves_a_thousand_shapes() -> None:
    """Symbolic sizes: the same function of kernels for every batch and length."""

    def function(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.layer_norm(a.transpose(0, 1), (20,), w)
        return F.gelu(y), y.sum((0, 1)), y.reshape(-1, 20)

    made = compiled(function, x(5, 7, 20), x(20), symbolic=True)
    random = torch.Generator().manual_seed(1)
    for _ in range(1_000):
        b, s = (int(n) for n in torch.randint(2, 40, (2,), generator=random))
        inputs = (torch.randn(b, s, 20, generator=random), torch.randn(20, generator=random))
        for got, wanted in zip(run(made, *inputs), function(*inputs), strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
    assert all(made.kept(p) for p in made.program.groups)
