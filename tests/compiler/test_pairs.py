"""Products of chosen pairs of a sample's vectors: one kernel in place of `bmm`, `index` and `cat`, for any sizes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.kernels import pairs, pairs_backward  # noqa: E402

NEAR = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 6e-2},  # the sum of two rounded products, in PyTorch
}
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("fresh"),
]


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 70), st.integers(1, 40), st.integers(1, 30)),
    turned=st.tuples(st.booleans(), st.booleans()),
    before=st.integers(0, 3),
    dtype=st.sampled_from(list(NEAR)),
    seed=st.integers(0, 99),
)
def test_any_pairs_are_those_of_pytorch(
    sizes: tuple[int, int, int, int, int], turned: tuple[bool, bool], before: int, dtype: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    batch, rows, columns, depth, count = sizes
    x = torch.randn(batch, depth, rows).mT if turned[0] else torch.randn(batch, rows, depth)
    y = torch.randn(batch, columns, depth).mT if turned[1] else torch.randn(batch, depth, columns)
    i, j = (torch.randint(-n, n, (count, 2))[:, 0] for n in (rows, columns))
    first = [torch.randn(batch, 9).to(dtype)[:, :before]] if before else []
    given_ = (x.to(dtype), y.to(dtype), i, j, *first)
    call = pairs.Pairs(before > 0, True, dtype)
    torch.testing.assert_close(call.run(*given_), call.aten(*given_), **NEAR[dtype])


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 70), st.integers(1, 30)),
    same=st.booleans(),
    turned=st.booleans(),
    dtype=st.sampled_from(list(NEAR)),
    seed=st.integers(0, 99),
)
def test_any_pairs_gradient_is_that_of_pytorch(
    sizes: tuple[int, int, int, int], same: bool, turned: bool, dtype: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    batch, rows, depth, count = sizes
    shape = (2, batch, depth, rows) if turned else (2, batch, rows, depth)
    right, left = (side.mT if turned else side for side in torch.randn(shape).to(dtype))
    i, j = torch.randint(-rows, rows, (count, 2)).unbind(1)
    grad = torch.randn(batch, count + 2).to(dtype)[:, 2:]
    given_ = (grad, i, j, right, (right if same else left).mT)
    call = pairs_backward.PairsBackward(True, dtype)
    made, wanted = call.run(*given_), call.aten(*[one.double() if one.is_floating_point() else one for one in given_])
    assert made.dtype == dtype
    torch.testing.assert_close(made.double(), wanted, **NEAR[dtype])


class Interactions(torch.nn.Module):
    def __init__(self, vectors: int) -> None:
        super().__init__()
        self.register_buffer("below", torch.tril_indices(vectors, vectors, -1))

    def forward(self, x: Any, every: Any) -> Any:
        dots = every @ every.transpose(1, 2)
        return torch.cat([x, dots[:, self.below[0], self.below[1]]], -1)


@pytest.mark.parametrize("dtype", NEAR, ids=["fp32", "bf16"])
def test_interactions_are_one_call_and_learn(dtype: Any) -> None:
    model = Interactions(7)
    fast = torch.compile(model, backend=backend.gnomon)
    for batch in (5, 9):  # the second time for any batch
        x, every = (torch.randn(batch, *shape).to(dtype).requires_grad_() for shape in ((4,), (7, 6)))
        for _ in range(2):
            torch.testing.assert_close(fast(x, every), model(x, every), **NEAR[dtype])
        made, wanted = (torch.autograd.grad(f(x, every).sum(), (x, every)) for f in (fast, model))
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one, other, **NEAR[dtype])
    made = [call for graph in backend.reports for call in graph.pairs]
    assert all("wrong" not in call.verdict for call in made)
    assert [type(call) for call in made[:2]] == [pairs.Pairs, pairs_backward.PairsBackward]
    assert made[0].joined


def test_an_index_outside_is_pytorchs_error() -> None:
    def looked_up(x: Any, i: Any) -> Any:
        return (x @ x.mT)[:, i, i]

    fast, x = torch.compile(looked_up, backend=backend.gnomon), torch.randn(2, 3, 4)
    with torch.no_grad():
        for _ in range(2):
            fast(x, torch.tensor([0, 2]))
        assert backend.reports[-1].pairs
        with pytest.raises(IndexError):
            fast(x, torch.tensor([0, 3]))


class Recommender(torch.nn.Module):
    """Rows of tables by the columns of a tensor of indices, with a dense vector, multiplied by each other."""

    def __init__(self, tables: int, depth: int, narrow: bool) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(5 + n, depth) for n in range(tables))
        self.register_buffer("below", torch.tril_indices(tables + 1, tables + 1, -1))
        self.narrow = narrow

    def forward(self, dense: Any, indices: Any) -> Any:
        indices = indices.int() if self.narrow else indices
        every = torch.stack([dense, *[table(indices[:, n]) for n, table in enumerate(self.tables)]], 1)
        dots = every @ every.transpose(1, 2)
        return torch.cat([dense, dots[:, self.below[0], self.below[1]]], -1)


@pytest.mark.parametrize("dtype", NEAR, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("tables", "depth", "narrow"), [(4, 1, False), (7, 16, True), (18, 33, False)])
def test_lookups_and_their_products_are_one_kernel(tables: int, depth: int, narrow: bool, dtype: Any) -> None:
    torch.manual_seed(0)
    model = Recommender(tables, depth, narrow).to(dtype)
    fast = torch.compile(model, backend=backend.gnomon)
    with torch.no_grad():
        for batch in (1, 5, 9):  # from the second on of any size
            dense, indices = torch.randn(batch, depth).to(dtype), torch.randint(0, 5, (batch, tables + 2))
            for _ in range(3):
                torch.testing.assert_close(fast(dense, indices), model(dense, indices), **NEAR[dtype])
        [call] = backend.reports[-1].table_pairs
        assert "wrong" not in call.verdict
        for trial in call.trials.values():  # whatever they said of its speed
            trial.kept = True
        torch.testing.assert_close(fast(dense, indices), model(dense, indices), **NEAR[dtype])
        indices[-1, 0] = 5
        with pytest.raises(IndexError):
            fast(dense, indices)
