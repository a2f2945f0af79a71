"""Random graphs of operations, made by Hypothesis, against eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

torch = pytest.importorskip("torch")
from compiler.traced import compiled, run  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.torch
STEPS = (
    lambda a, b: a + b,
    lambda a, b: a * torch.sigmoid(b),
    lambda a, b: torch.where(a > b, a, -b),
    lambda a, b: F.softmax(a, -1) + b,
    lambda a, b: a - b.mean(-1, keepdim=True),
    lambda a, b: torch.maximum(a, b.amax(-1, keepdim=True)),
    lambda a, b: torch.tanh(a) * b.sum(0),
    lambda a, b: a + b.abs().sum() * 0.01,
    lambda a, b: a.transpose(-1, -2).contiguous().transpose(-1, -2) + b,
    lambda a, b: F.layer_norm(a, a.shape[-1:]) * b[..., :1],
    lambda a, b: (a.reshape(-1) + b.reshape(-1)).reshape(a.shape),
)
CHOSEN = st.lists(
    st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=7
)


IN_PLACE = (
    lambda a, b: a.clone().add_(b.to(a.dtype)),
    lambda a, b: a.clone().mul_(2).relu_() + b,
    lambda a, b: torch.zeros_like(a).copy_(b) - a,
    lambda a, b: (a + b).index_fill_(-1, torch.tensor([0]), 0.5),
)
LAYOUTS = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda a: a.repeat_interleave(2, -1)[..., ::2],
    "one row for all": lambda a: a[:1].expand(a.shape) if a.shape[0] else a,
}
ROUNDED = {torch.bfloat16: 0.06, torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference of the largest element: eager rounds every node to bfloat16, a kernel what it gives."""


def graph_of(
    steps: list[tuple[int, int, int]], kinds: Sequence[Callable[..., torch.Tensor]]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [a, b]
        for which, i, j in steps:
            made.append(kinds[which % len(kinds)](made[i % len(made)], made[j % len(made)]))
        return made[-1], made[len(made) // 2] * 1

    return function


def as_eager(function: Callable[..., tuple[torch.Tensor, ...]], inputs: Sequence[torch.Tensor]) -> None:
    """On the first call, each kernel beside ATen, and on the second, kernels alone. Where bfloat16 nodes cancel nothing
    is left but their rounding, and the backend may give the group back."""
    made = compiled(function, *inputs)
    for _ in range(2):
        for got, wanted in zip(run(made, *inputs), function(*inputs), strict=True):
            assert got.dtype == wanted.dtype and got.shape == wanted.shape and got.stride() == wanted.stride()
            top = max(1.0, float(wanted.double().abs().max())) if wanted.numel() else 1.0
            near = ROUNDED[min((x.dtype for x in (*inputs, wanted)), key=lambda dtype: torch.finfo(dtype).bits)]
            torch.testing.assert_close(got, wanted, rtol=near, atol=near * top / 10)
    if all(x.dtype != torch.bfloat16 for x in inputs):
        assert not any(trial.verdict.get("wrong") for trial in made.trials.values())


@given(steps=CHOSEN, shape=st.sampled_from([(3, 17), (2, 4, 9), (1, 5), (6, 1), (64, 40)]))
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
def test_any_graph_gives_what_eager_gives(steps: list[tuple[int, int, int]], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    as_eager(graph_of(steps, STEPS), (torch.randn(shape), torch.randn(shape)))


@given(
    steps=CHOSEN,
    shape=st.sampled_from([(3, 17), (0, 9), (2, 0, 5), (1, 1), (5, 4, 8), (33, 40)]),
    layouts=st.tuples(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS))),
    dtypes=st.tuples(st.sampled_from(sorted(ROUNDED, key=str)), st.sampled_from(sorted(ROUNDED, key=str))),
)
@settings(max_examples=10, deadline=None, derandomize=True, database=None)
def test_so_do_graphs_of_empty_strided_and_mixed_inputs_that_are_written_to(
    steps: list[tuple[int, int, int]],
    shape: tuple[int, ...],
    layouts: tuple[str, str],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    torch.manual_seed(0)
    inputs = [LAYOUTS[layout](torch.randn(shape, dtype=dtype)) for layout, dtype in zip(layouts, dtypes, strict=True)]
    as_eager(graph_of(steps, (*STEPS[:-1], *IN_PLACE)), inputs)
