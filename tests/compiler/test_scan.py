"""Linear recurrences over time, as in Mamba: one operation and one kernel, equal to a loop for any sizes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch._higher_order_ops.associative_scan import associative_scan  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.explain import explained, lines  # noqa: E402
from gnomon.compiler.kernels import scan  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("fresh"),
]


def recurrence(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def selective(rate: Any, step: Any, into: Any, x: Any, out: Any) -> Any:
    """Mamba's scan: rate (d, n), step and x (batch, d, time), into and out (batch, time, n)."""
    a = torch.exp(rate[None, :, None, :] * step[:, :, :, None])
    b = step[:, :, :, None] * into[:, None, :, :].float() * x[:, :, :, None]
    states = associative_scan(recurrence, (a, b), dim=2, combine_mode="generic")[1]
    return torch.matmul(states.transpose(1, 2), out.unsqueeze(-1)).squeeze(-1).transpose(1, 2)


def stepwise(rate: Any, step: Any, into: Any, x: Any, out: Any) -> Any:
    """The same, step by step."""
    state, made = torch.zeros(()), []
    for t in range(step.shape[-1]):
        a = torch.exp(rate * step[:, :, t, None])
        state = a * state + step[:, :, t, None] * into[:, t, None, :] * x[:, :, t, None]
        made.append((state * out[:, t, None, :]).sum(-1))
    return torch.stack(made, -1)


def tensors(batch: int, width: int, steps: int, n: int) -> list[Any]:
    over_time = (batch, width, steps)
    made = [-torch.rand(width, n), torch.rand(over_time), torch.randn(batch, steps, n), torch.randn(over_time)]
    return [x.requires_grad_() for x in (*made, torch.randn(batch, steps, n))]


def with_gradients(call: Any, inputs: list[Any]) -> list[Any]:
    out = call(*inputs)
    weights = torch.arange(out.numel(), dtype=torch.float32).cos().reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def assert_near(made: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * float(other.detach().abs().max()))


def scans(which: int = -1) -> list[Any]:
    return backend.reports[which].scans


def test_mambas_scan_is_one_operation_without_the_states() -> None:
    inputs = tensors(2, 5, 11, 16)
    fast = torch.compile(selective, backend=backend.gnomon, fullgraph=True)
    wanted = with_gradients(stepwise, inputs)
    for _ in range(2):  # on trial, then as chosen
        assert_near(with_gradients(fast, inputs), wanted)
    [forward], [backward] = scans(-2), scans(-1)
    assert (forward.form.rates, forward.form.drives, forward.form.dot, forward.form.exp) == (2, 3, True, True)
    assert forward.kept and backward.kept
    states = 2 * 5 * 11 * 16
    made = [node.meta.get("val") for node in backend.reports[-2].program.graph.nodes]
    assert all(one.numel() < states for one in made if isinstance(one, torch.Tensor))
    assert "scan over time: 1 by a kernel" in "\n".join(lines(explained(backend.reports[-2]), "graph 0"))


@settings(max_examples=15)
@given(
    sizes=st.tuples(st.integers(2, 5), st.integers(2, 20), st.integers(2, 24), st.integers(2, 40)), seed=st.integers()
)
def test_a_kernel_gives_what_steps_give_for_any_sizes(sizes: tuple[int, int, int, int], seed: int) -> None:
    torch.manual_seed(seed % 1000)
    torch.set_num_threads(1)
    batch, width, steps, n = sizes
    rate, step, into, x, out = tensors(batch, width, steps, n)
    time_first = [one.permute(2, 0, 1)[..., None] for one in (step, x)]
    by_time = [one.transpose(0, 1)[:, :, None] for one in (into, out)]
    rates, drives, weight = [rate[None, None], time_first[0]], [time_first[0], by_time[0], time_first[1]], by_time[1]
    form = scan.form_of(rates, drives, weight, True)
    every = [one.detach() for one in (*rates, *drives, weight)]
    made = scan.run(form, every)
    assert made is not None
    assert_near([made], [scan.plain(rates, drives, weight, True)])
    g = torch.randn_like(made)
    grads = scan.run_grad(form, g, every)
    assert grads is not None
    assert_near(grads, scan.plain_grad(g, rates, drives, weight, True))


def test_no_rate_counts_in_the_first_step() -> None:
    torch.set_num_threads(1)
    rate, drive = torch.rand(6, 1, 3, 20), torch.randn(6, 1, 3, 20)
    rate[0, 0, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    for exp in (False, True):
        form = scan.form_of([rate], [drive], None, exp)
        made, wanted = scan.run(form, [rate, drive]), scan.plain([rate], [drive], None, exp)
        assert made is not None and bool(wanted.isfinite().all())
        assert_near([made], [wanted])
        g = torch.randn_like(made)
        grads = scan.run_grad(form, g, [rate, drive])
        assert grads is not None
        assert_near(grads[1:], scan.plain_grad(g, [rate], [drive], None, exp)[1:])


@pytest.mark.parametrize(("shape", "dim"), [((3, 19), 1), ((2, 3, 2, 4, 3), 2)])
def test_both_results_of_any_recurrence_have_their_gradients(shape: tuple[int, ...], dim: int) -> None:
    inputs = [torch.rand(shape, requires_grad=True), torch.randn(shape, requires_grad=True)]

    def both(a: Any, b: Any) -> Any:
        return torch.cat(associative_scan(recurrence, (a.sigmoid(), b), dim=dim, combine_mode="generic"))

    def looped(a: Any, b: Any) -> Any:
        return torch.cat([a.sigmoid().cumprod(dim), states_of(a.sigmoid(), b, dim)])

    made = with_gradients(torch.compile(both, backend=backend.gnomon, fullgraph=True), inputs)
    assert_near(made, with_gradients(looped, inputs))
    assert bool(scans()) == (len(shape) <= scan.RANK)


def states_of(a: Any, b: Any, dim: int) -> Any:
    made = [b.select(dim, 0)]
    for t in range(1, b.shape[dim]):
        made.append(a.select(dim, t) * made[-1] + b.select(dim, t))
    return torch.stack(made, dim)


def test_sums_are_the_same_with_any_number_of_threads() -> None:
    inputs = [one.detach() for one in tensors(2, 64, 33, 16)]
    every = [inputs[0][None, None], *[one.permute(2, 0, 1)[..., None] for one in (inputs[1], inputs[3])]]
    form = scan.form_of(every[:2], every[2:], None, True)
    made = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = scan.run(form, every)
        assert out is not None
        made.append([out, *(scan.run_grad(form, torch.ones_like(out), every) or [])])
    assert len(made[0]) == 4
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_another_scan_and_another_backend_stay_pytorchs() -> None:
    def sums(left: Any, right: Any) -> Any:
        return left[0] + right[0], right[0] * left[1] + right[1]

    a, b = torch.rand(2, 5), torch.randn(2, 5)

    def call(a: Any, b: Any) -> Any:
        return associative_scan(sums, (a, b), dim=0, combine_mode="generic")

    wanted = [torch.stack([a[0], a[0] + a[1]]), torch.stack([b[0], a[1] * b[0] + b[1]])]
    assert_near(list(torch.compile(call, backend=backend.gnomon)(a, b)), wanted)
    assert not scans()
    seen = []

    def other(module: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    torch.compile(lambda a, b: associative_scan(recurrence, (a, b), 0, combine_mode="generic"), backend=other)(a, b)
    assert seen and not any("gnomon" in name for name in seen)


def test_states_that_somebody_reads_are_made() -> None:
    def both(rate: Any, step: Any, x: Any, out: Any, looped: bool) -> Any:
        a = torch.exp(rate[None, :, None, :] * step[:, :, :, None])
        b = a * x[..., None]
        states = states_of(a, b, 2) if looped else associative_scan(recurrence, (a, b), 2, combine_mode="generic")[1]
        return torch.matmul(states.transpose(1, 2), out.unsqueeze(-1)).sum() + states[:, :, -1]

    rate, step, _, x, out = tensors(2, 3, 6, 8)
    inputs = [rate, step, x, out]
    fast = torch.compile(both, backend=backend.gnomon, fullgraph=True)
    wanted = with_gradients(lambda *some: both(*some, True), inputs)
    assert_near(with_gradients(lambda *some: fast(*some, False), inputs), wanted)
    assert not scans(-2)[0].form.dot
