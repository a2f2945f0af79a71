"""Gradients of embedding tables by one kernel: those of PyTorch, bit for bit, whatever is looked up."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.kernels import table_gradient  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("fresh"),
]


@settings(max_examples=60)
@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 40),
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    skipped=st.integers(-1, 5),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    of=st.sampled_from([torch.float32, torch.bfloat16]),
    strided=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_any_table_gets_pytorchs_gradient(
    rows: int, width: int, shape: list[int], skipped: int, dtype: Any, of: Any, strided: bool, threads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    grad, indices = torch.randn(*shape, width), torch.randint(0, rows, tuple(shape), dtype=dtype)
    if strided:
        grad, indices = torch.randn(*shape, 3, width)[..., 1, :], torch.stack([indices, indices], -1)[..., 0]
    grad = grad.to(of)
    call, before = table_gradient.TableGradient(rows, skipped, True, of), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = call.run(grad, indices)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made, call.aten(grad, indices))  # the same sums in the same order


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
def test_a_large_table_is_zeros_of_the_system(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradient, of a tensor like any other: it is added to and copied, and holds its own bytes alone."""
    monkeypatch.setattr(table_gradient, "MAPPED", 1 << 12)
    grad, indices = torch.randn(9, 4, 33).to(of), torch.randint(0, 700, (9, 4))
    grad[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40])
    indices[1] = indices[0]
    call = table_gradient.TableGradient(700, 3, True, of)
    made, theirs = call.run(grad, indices), call.aten(grad, indices)
    assert made.untyped_storage().nbytes() == made.nbytes and made.data_ptr() % 4096 == 0
    torch.testing.assert_close(made, theirs, rtol=0, atol=0, equal_nan=True)
    made += theirs
    torch.testing.assert_close(made.clone(), theirs + theirs, rtol=0, atol=0, equal_nan=True)


class Lookup(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Embedding(5000, 64, padding_idx=3)
        self.small = torch.nn.Embedding(10, 64)

    def forward(self, at: Any) -> Any:
        return (self.large(at) * self.small(at % 10)).square().sum()


def test_a_model_learns_its_tables() -> None:
    model = Lookup()
    fast = torch.compile(model, backend=backend.gnomon)
    for batch in (5, 5, 9):  # the last time for any batch
        at = torch.randint(0, 5000, (batch, 7))
        at[0, :2] = 3
        found = []
        for call in (fast, model):
            model.zero_grad()
            call(at).backward()
            found.append([one.grad.clone() for one in model.parameters()])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    [call] = next(graph.tables for graph in backend.reports if graph.tables)  # the small one stays ATen's
    assert call.rows == 5000 and call.trials and "wrong" not in call.verdict
