"""Random graphs of operations, made by Hypothesis, against eager."""

from __future__ import annotations

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


@given(steps=CHOSEN, shape=st.sampled_from([(3, 17), (2, 4, 9), (1, 5), (6, 1), (64, 40)]))
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
def test_any_graph_gives_what_eager_gives(steps: list[tuple[int, int, int]], shape: tuple[int, ...]) -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [a, b]
        for which, i, j in steps:
            made.append(STEPS[which](made[i % len(made)], made[j % len(made)]))
        return made[-1], made[len(made) // 2] * 1

    torch.manual_seed(0)
    inputs = (torch.randn(shape), torch.randn(shape))
    made = compiled(function, *inputs)
    for _ in range(2):
        for got, wanted in zip(run(made, *inputs), function(*inputs), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4 * max(1.0, float(wanted.abs().max())))
    assert not any(trial.verdict.get("wrong") for trial in made.trials.values())
