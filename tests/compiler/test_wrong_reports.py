"""What was once computed wrong in silence: each report by its kernel, tried on harmless numbers, then others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from compiler.traced import compiled, run  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler.tune import gate  # noqa: E402

aten = torch.ops.aten
pytestmark = pytest.mark.torch
N = (6, 40)


def whole(value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(N, value, dtype=dtype)


def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(N, value, dtype=dtype)


def casts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        x.to(torch.int8).float() * 0.5,
        (x * 31 + 7).to(torch.uint8).float() / 255,
        (x * 2654435761).to(torch.int32).float() * 1e-9,
        (x.float() * 1e7).to(torch.int32) + 1,
    )


def laid(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """ATen's `elu_backward` keeps other strides than its fake tensor declares."""
    return (aten.elu_backward(g, 1.0, 1.0, 1, False, x) * w).sum(-1) + 1


def logs(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(F.logsigmoid(F.silu(x)) * m, 2, 0)


REPORTS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {
    "casts to narrow integers": (casts, (whole(0),), (whole(300),)),
    "minus of uint8": (lambda x: (-x).float() * 0.01 + 1, (whole(0, torch.uint8),), (whole(3, torch.uint8),)),
    "abs of int8": (lambda x: x.abs().float() * 0.01 + 1, (whole(-5, torch.int8),), (whole(-128, torch.int8),)),
    "bounds that bytes do not hold": (
        lambda x: (x.clamp(-5, 100) + 1, x.clamp_min(-3) + 1, x.clamp_max(-250) + 1),
        (whole(0, torch.uint8),),
        (whole(7, torch.uint8),),
    ),
    "truths less truths": (
        lambda x: (torch.add(x, x, alpha=-1) | ~x, torch.add(x, x, alpha=0) ^ x),
        (whole(0, torch.bool),),
        (whole(1, torch.bool),),
    ),
    "a sum of int8": (
        lambda x: x.sum(-1, dtype=torch.int8).float() * 0.01,
        (torch.zeros(4, 1000, dtype=torch.int8),),
        (torch.ones(4, 1000, dtype=torch.int8),),
    ),
    "explicit rounding": (
        lambda x: (x - x.to(torch.bfloat16).float()).abs().sum(-1),
        (torch.zeros(N),),
        (torch.linspace(0.1, 3, 240).view(N),),
    ),
    "rounding between steps": (lambda x: (x * 1.1) * 0.9 - x, (full(0, torch.bfloat16),), (full(1.0, torch.bfloat16),)),
    "gradient of gelu tanh": (
        lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
        (torch.ones(N), torch.zeros(N)),
        (torch.ones(N), torch.tensor([-1000.0, 1000.0, -30.0, 30.0]).repeat(60).view(N)),
    ),
    "gelu of large negatives": (lambda x: F.gelu(x) + 0.0, (torch.zeros(N),), (full(-1e4),)),
    "gelu of infinity": (lambda x: F.gelu(x) + 0.0, (torch.zeros(N),), (full(float("inf")),)),
    "declared strides": (
        laid,
        (torch.zeros(64, 33), torch.zeros(33, 64).t(), torch.zeros(64, 33)),
        (torch.randn(64, 33), torch.randn(33, 64).t(), torch.randn(64, 33)),
    ),
    "declared strides of a repeat": (
        logs,
        (torch.zeros(5, 30, 2).transpose(1, 2), torch.zeros(30) > 0),
        (torch.randn(5, 30, 2).transpose(1, 2), torch.arange(30) % 3 > 0),
    ),
    "denormal bfloat16": (
        lambda x: F.relu(x * 0.5 + 0.0),
        (full(1, torch.bfloat16),),
        (full(2.0**-127, torch.bfloat16),),
    ),
    "layer norm of 1e20": (lambda x: F.layer_norm(x, (40,)), (torch.randn(N),), (torch.randn(N) * 1e20,)),
    "std of 1e37": (lambda x: x.std(-1) * 1.0, (torch.randn(N),), (torch.randn(N) * 1e37,)),
    "std of 1e-25": (lambda x: x.std(-1) * 1.0, (torch.randn(N),), (torch.randn(N) * 1e-25,)),
    "a product less itself": (
        lambda a, b: (a * b - b * a) * 1e8,
        (torch.ones(N),) * 2,
        (torch.randn(N), torch.randn(N)),
    ),
    "a comparison with a number": (
        lambda x: (x > 0.1).float() * 2,
        (full(0, torch.bfloat16),),
        (full(0.1, torch.bfloat16),),
    ),
    "norm of one number": (
        lambda x: torch.linalg.vector_norm(x, dim=-1) * 1.0,
        (torch.zeros(240, 1),),
        (torch.full((240, 1), -1e20),),
    ),
    "norm of one number many times": (
        lambda x: torch.linalg.vector_norm(x.expand(240, 5), dim=-1) * 1.0,
        (torch.zeros(240, 1),),
        (torch.full((240, 1), -3.0),),
    ),
    "gradient of gelu tanh where its parts cancel": (
        lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
        (torch.ones(N), torch.zeros(N)),
        (torch.ones(N), torch.linspace(-5, -2, 240).view(N)),
    ),
    "gradient of a mean square of 2e38": (
        lambda g, x, y: aten.mse_loss_backward(g, x, y, 1) + 0.0,
        (torch.ones(()), torch.zeros(N), torch.zeros(N)),
        (torch.ones(()), full(2e38), full(-1e38)),
    ),
    "hardtanh's gradient of NaN": (
        lambda g, x: aten.hardtanh_backward(g, x, -1.0, 1.0) * 2,
        (torch.ones(N), torch.zeros(N)),
        (torch.ones(N), full(float("nan"))),
    ),
    "softplus' infinite gradient where its exponential is a denormal": (
        lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0) * 2,
        (torch.ones(N), torch.zeros(N)),
        (full(float("inf")), full(-89.5)),
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_later_numbers_give_what_eager_gives(name: str) -> None:
    function, first, later = REPORTS[name]
    made = compiled(function, *first)
    assert any(planned.function is not None for planned in made.program.groups), "no kernel was made"
    run(made, *first)
    wanted = function(*later)
    for got, b in zip(run(made, *later), wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        near = 1e-5 if b.dtype == torch.float32 else 0
        torch.testing.assert_close(
            got, b, rtol=near, atol=0 if b.dtype == torch.bfloat16 else 1e-6 if near else 0, equal_nan=True
        )
    assert all(made.kept(planned) for planned in made.program.groups), [t.verdict for t in made.trials.values()]


def test_a_kernel_that_is_right_on_the_users_first_numbers_alone_is_refused() -> None:
    def wrong(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.flip(0),)

    trial = gate.Trial("// flipped", wrong, lambda x: (x.clone(),), on_made_inputs=True)
    trial(torch.zeros(5, 7))
    assert trial.kept is False and "ordinary numbers" in trial.verdict["wrong"]
    lost = gate.Trial("// without NaN", lambda x: (x.nan_to_num(0.0),), lambda x: (x.clone(),), on_made_inputs=True)
    lost(torch.zeros(50, 700))
    assert lost.kept is False and "special numbers" in lost.verdict["wrong"]


def test_a_verdict_is_of_one_layout() -> None:
    x = torch.zeros(32, 64)
    keys = {gate._key("// laid", (one,)) for one in (x, x.t().contiguous().t(), x[:1].expand(32, 64))}
    assert len(keys) == 3


def test_a_kernel_is_compared_once_more_on_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trial did not see ends there, and with ATen's results."""
    made = compiled(lambda x: torch.sigmoid(x * 2 + 1), torch.zeros(N))
    run(made, torch.zeros(N))
    [number] = made.trials
    right = gate.Again.__call__

    def off(self: gate.Again, *args: Any) -> Any:
        run_, self.run = self.run, lambda *given: tuple(one + 1 for one in run_(*given))
        return right(self, *args)

    monkeypatch.setattr(gate.Again, "__call__", off)
    x = torch.randn(N)
    for _ in range(made.again):
        [got] = run(made, x)
    torch.testing.assert_close(got, torch.sigmoid(x * 2 + 1))
    assert made.trials[number].kept is False and made.trials[number].verdict["wrong"]
    torch.testing.assert_close(run(made, x)[0], torch.sigmoid(x * 2 + 1))


def test_a_group_that_is_given_back_keeps_the_layout_that_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen's gradients lie as it likes; the next kernel reads them as they were declared, in every call."""
    monkeypatch.setattr(gate.Trial, "_judged", lambda *_: {"kept": False})
    g, x, y = torch.ones(()), torch.randn(7, 64).t(), torch.randn(64, 14)[:, ::2]
    made = compiled(lambda g, x, y: aten.mse_loss_backward(g * 1.0, x, y, 1), g, x, y)
    [declared] = [node.meta["val"].stride() for node in made.program.groups[0].outputs]
    for _ in range(2):
        [got] = run(made, g, x, y)
        assert got.stride() == declared
        torch.testing.assert_close(got, aten.mse_loss_backward(g, x, y, 1))


def test_what_eager_itself_has_wrong_has_a_bound() -> None:
    """Sums that cancel leave rounding to both; more than that is a wrong kernel."""
    x = torch.randn(4, 64) * 1e6
    x = torch.cat([x, -x.flip(-1)], -1)
    aten_ = lambda x: (x.sum(-1, keepdim=True) + 0 * x,)  # noqa: E731
    wanted = aten_(x)
    rounding = (x.double().flip(-1).cumsum(-1)[:, -1:].float() + 0 * x,)
    assert gate.as_right(rounding, wanted, aten_, (x,))
    assert not gate.as_right((wanted[0] + 1e5,), wanted, aten_, (x,))
    assert not gate.as_right((wanted[0] * float("nan"),), wanted, aten_, (x,))


def test_the_ends_of_integers_may_cancel_in_a_sum_of_floats() -> None:
    """They leave what the order of a sum makes of them; a row without them, and integers, are as exact as before."""
    x = torch.arange(128).repeat(2, 1) % 7
    x[0, 3], x[0, 70] = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    total = lambda x: (x.float().sum(-1, keepdim=True),)  # noqa: E731
    wanted = total(x)
    other = (torch.stack([row.float().cumsum(-1)[-1:] for row in x.flip(-1)]),)
    assert not torch.equal(other[0][0], wanted[0][0])
    assert gate.as_right(other, wanted, total, (x,))
    assert not gate.as_right((other[0] + torch.tensor([[0.0], [1.0]]),), wanted, total, (x,))
    both = lambda x: (x * 2, *total(x))  # noqa: E731
    assert gate.as_right((x * 2, *other), both(x), both, (x,))
    assert not gate.as_right((x * 2 + (x > 1 << 40), *other), both(x), both, (x,))
    doubled = lambda x: (x * 2,)  # noqa: E731
    assert not gate.as_right((x * 2 + (x > 1 << 40),), doubled(x), doubled, (x,))


def test_an_exponent_that_float32_does_not_hold_stays_atens() -> None:
    x = torch.tensor([-2.5, 2.0, -0.5]).repeat(20)
    for exponent in (16777217.0, 1e-46, 1e39):
        made = compiled(partial(lambda e, x: x**e + 1, exponent), x)
        for _ in range(2):
            torch.testing.assert_close(run(made, x)[0], x**exponent + 1, equal_nan=True)


def test_integers_wrap_by_the_compilers_word() -> None:
    """A sum that overflows means nothing in C++, and what is compared with it may be left out."""
    x = torch.tensor([2**63 - 1, -(2**63), 5]).repeat(20)
    made = compiled(lambda x: ((x + 1) > x, x * 31 - 7), x)
    assert "-fwrapv" in made.program.groups[0].kernel.source.splitlines()[0]
    for _ in range(2):
        larger, product = run(made, x)
        assert torch.equal(larger, (x + 1) > x) and torch.equal(product, x * 31 - 7)
    assert "-fwrapv" not in compiled(lambda x: F.gelu(x) * 2, torch.randn(9)).program.groups[0].kernel.source


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_assertion_of_the_graph_is_made_in_every_call(dynamic: bool) -> None:
    torch._dynamo.reset()
    fast = torch.compile(lambda x: F.one_hot(x, 3).float() * 2, backend="gnomon", dynamic=dynamic)
    for classes in ([0, 2, 1], [1, 1, 0, 2], [2, 0, 1]):
        x = torch.tensor(classes)
        assert torch.equal(fast(x), F.one_hot(x, 3).float() * 2)
    for classes in ([0, 5, 1], [0, -1, 1]):
        with pytest.raises(RuntimeError, match="Class values must be"):
            fast(torch.tensor(classes))
