"""Loops and branches as one call of C++ are eager's: layouts, views, swapped states, lengths that numbers decide."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from torch._higher_order_ops import scan, while_loop  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.tasks import steps  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler() or steps._library() is None, reason="needs a C++ compiler and this PyTorch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, of what its scan is made of
    pytest.mark.usefixtures("fresh"),
]


def compiled(function: Callable[..., Any]) -> Any:
    backend.reports.clear()
    return torch.compile(function, backend="gnomon")


def same(made: Any, wanted: Any) -> None:
    torch.testing.assert_close(made, wanted, rtol=2e-4, atol=1e-5)


def in_one_call() -> bool:
    """Whether the graph that is no body, the last to be made, has a run that holds its loop or branch."""
    higher = torch._ops.HigherOrderOperator
    [kept] = [
        run.trial.kept
        for run in backend.reports[-1].runs
        if any(isinstance(getattr(unit, "target", None), higher) for unit in run.units)
    ]
    return bool(kept)


def stepped(state: Any, row: Any) -> Any:
    """Two states that change places, a branch on what they are, a view of each."""
    a, b = state
    c = torch.cond(a.sum() > row.sum(), lambda a, r: (a * 0.5).sin() + r[0], lambda a, r: a - r[1], (a, row))
    return (b.clone(), c.tanh()), (c.t().clone(), b[0].clone(), row.sum(-1))


def test_a_scan_with_a_branch_over_rows_that_lie_anyhow() -> None:
    def scanned(a: Any, b: Any, rows: Any) -> Any:
        return scan(stepped, (a, b), rows)

    def walked(a: Any, b: Any, rows: Any) -> Any:
        outs = []
        for row in rows:
            c = (a * 0.5).sin() + row[0] if a.sum() > row.sum() else a - row[1]
            outs.append((c.t().clone(), b[0].clone(), row.sum(-1)))
            a, b = b, c.tanh()
        return (a, b), tuple(torch.stack(one) for one in zip(*outs, strict=True))

    fast = compiled(scanned)
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    for rows in (torch.randn(2, 4, 9).permute(2, 0, 1), torch.randn(2, 4, 9).permute(2, 0, 1) * 3):
        for _ in range(2):
            with torch.no_grad():
                same(fast(a, b, rows), walked(a, b, rows))
    assert in_one_call()


def newton(x: Any, limit: Any) -> Any:
    """Square roots, as long as they move; whether the last step was small."""

    def moves(n: Any, x: Any, step: Any) -> Any:
        return (step.abs().max() > limit) & (n < 50)

    def closer(n: Any, y: Any, _: Any) -> Any:
        new = 0.5 * (y + x / y)
        return n + 1, new, torch.cond((new > 1.0).all(), lambda a, b: a - b, lambda a, b: (a - b) * 2.0, (new, y))

    return while_loop(moves, closer, (torch.tensor(0), x.clone(), torch.ones_like(x)))


def test_a_loop_whose_length_its_numbers_decide() -> None:
    fast = compiled(newton)
    lengths = set()
    with torch.no_grad():
        for x, limit in ((2.0, 1e-3), (2.0, 1e-3), (900.0, 1e-3), (0.3, 1e-4), (5.0, 2.0)):
            given = torch.full((3, 5), x) + torch.arange(5.0) / 10, torch.tensor(limit)
            made, wanted = fast(*given), newton(*given)
            same(made, wanted)
            lengths.add(int(made[0]))
    assert 0 in lengths and len(lengths) >= 4
    assert in_one_call()


def test_a_branch_that_was_not_taken_before() -> None:
    def branched(x: Any, w: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: (x @ w).softmax(-1), lambda x: (x.cos() + 2).log(), (x,)) * 2.0

    fast = compiled(branched)
    x, w = torch.rand(4, 6), torch.randn(6, 6)
    with torch.no_grad():
        for given in (x, x, x, -x, x):
            same(fast(given, w), branched(given, w))
    assert in_one_call()


def test_a_body_that_reads_outside_a_table_is_eagers_error() -> None:
    def looked_up(rows: Any, table: Any) -> Any:
        return scan(lambda s, row: (s + table[row].tanh(), s.sum(-1)), torch.zeros(3, 4), rows)

    fast = compiled(looked_up)
    rows, table = torch.randint(0, 7, (6, 3)), torch.randn(7, 4)
    with torch.no_grad():
        for _ in range(3):
            made = fast(rows, table)
        states = [torch.zeros(3, 4)]
        for row in rows:
            states.append(states[-1] + table[row].tanh())
        same(made, (states[-1], torch.stack([one.sum(-1) for one in states[:-1]])))
        rows[3, 1] = 9
        with pytest.raises(IndexError):
            fast(rows, table)


def test_a_scan_learns_as_its_steps_do() -> None:
    def scanned(x: Any, w: Any) -> Any:
        return scan(lambda s, row: ((s @ w + row).tanh(), (s * row).sum(-1)), torch.zeros_like(x[0]), x)

    def walked(x: Any, w: Any) -> Any:
        state, outs = torch.zeros_like(x[0]), []
        for row in x:
            outs.append((state * row).sum(-1))
            state = (state @ w + row).tanh()
        return state, torch.stack(outs)

    fast = compiled(scanned)
    for _ in range(3):
        x, w = torch.randn(7, 2, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        grads = [torch.autograd.grad(sum(one.square().sum() for one in f(x, w)), [x, w]) for f in (fast, walked)]
        same(*grads)


def test_a_loop_without_an_end_can_be_interrupted() -> None:
    def ended(x: Any, last: Any) -> Any:
        return while_loop(lambda n, x: n < last, lambda n, x: (n + 1, (x + 1.0).sin()), (torch.tensor(0), x))

    def stop(*_: Any) -> None:
        raise TimeoutError

    fast = compiled(ended)
    with torch.no_grad():
        for _ in range(3):
            fast(torch.ones(3), torch.tensor(5))
        assert in_one_call()
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(TimeoutError):
                fast(torch.ones(3), torch.tensor(1 << 60))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        same(fast(torch.ones(3), torch.tensor(2)), ended(torch.ones(3), torch.tensor(2)))
