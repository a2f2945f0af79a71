"""Bodies of loops and branches are graphs of their own: equal to PyTorch's, and one step whatever the length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from torch._higher_order_ops import scan, while_loop  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, of what its scan is made of
]


def cell(state: Any, row: Any, w: Any) -> Any:
    return torch.softmax(torch.tanh(state @ w + row) * 2, -1)


def scanned(x: Any, w: Any) -> Any:
    """A recurrent cell over the rows of x (steps, batch, 8); w (8, 8)."""

    def step(state: Any, row: Any) -> Any:
        new = cell(state, row, w)
        return new, new.clone()

    return scan(step, torch.zeros_like(x[0]), x, dim=0)[1]


def unrolled(x: Any, w: Any) -> Any:
    """What `scanned` gives."""
    states = [torch.zeros_like(x[0])]
    for row in x:
        states.append(cell(states[-1], row, w))
    return torch.stack(states[1:])


def looped(x: Any, w: Any) -> Any:
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, torch.softmax(x.sin(), -1)), (torch.tensor(0), x @ w))[1]


def repeated(x: Any, w: Any) -> Any:
    """What `looped` gives."""
    x = x @ w
    for _ in range(5):
        x = torch.softmax(x.sin(), -1)
    return x


def branched(x: Any, w: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda x: torch.softmax(x.exp(), -1), lambda x: (x.cos() + 2).log(), (x @ w,))


def chosen(x: Any, w: Any) -> Any:
    """What `branched` gives."""
    return torch.softmax((x @ w).exp(), -1) if x.sum() > 0 else ((x @ w).cos() + 2).log()


def inner(made: backend.CompiledGraph) -> list[backend.CompiledGraph]:
    """Graphs of the bodies."""
    return list(made.whole())[1:]


@pytest.mark.parametrize(
    ("function", "plain", "bodies"), [(scanned, unrolled, 1), (looped, repeated, 2), (branched, chosen, 2)]
)
def test_a_body_is_compiled_once_and_gives_what_it_gave(
    function: Callable[..., Any], plain: Callable[..., Any], bodies: int
) -> None:
    torch._dynamo.reset()
    made, w = torch.compile(function, backend=backend.gnomon, fullgraph=True, dynamic=True), torch.randn(8, 8)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for steps, batch in ((4, 3), (50, 2), (9, 6)):
            x = torch.randn(steps, batch, 8)
            for given in (x, -x):  # of each branch
                torch.testing.assert_close(made(given, w), plain(given, w), rtol=1e-5, atol=1e-6)
    compiled = inner(backend.reports[-1])
    assert len(compiled) == bodies and all(len(list(one.program.graph.nodes)) < 20 for one in compiled)
    assert any(one.program.groups for one in compiled)
    assert all(one.kept(planned) for one in compiled for planned in one.program.groups)


def test_gradients_of_a_scan_are_those_of_pytorch() -> None:
    torch._dynamo.reset()
    x, w, gradients = torch.randn(4, 3, 8), torch.randn(8, 8), []
    for function in (unrolled, torch.compile(scanned, backend=backend.gnomon)):
        given = [one.clone().requires_grad_() for one in (x, w)]
        function(*given).square().sum().backward()
        gradients.append([one.grad for one in given])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_a_scan_whose_last_state_is_summed_are_eagers(reverse: bool) -> None:
    """The gradient of a sum is one number expanded: the backward begins with it, and its later steps have more."""

    def loss(x: Any, first: Any, w: Any) -> Any:
        last, out = scan(lambda c, x: ((n := torch.tanh(c * w + x)), n * 2.0), first, x, dim=0, reverse=reverse)
        return out.square().sum() + last.sum()

    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 3, 5), (3, 5), (3, 5))]
    wanted = torch.autograd.grad(loss(*inputs), inputs)
    fast = torch.compile(loss, backend="gnomon")
    for _ in range(2):
        for made, one in zip(torch.autograd.grad(fast(*inputs), inputs), wanted, strict=True):
            torch.testing.assert_close(made, one, rtol=1e-12, atol=1e-12)
