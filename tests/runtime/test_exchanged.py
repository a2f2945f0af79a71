"""Exchanges of experts as rows, whole and in parts, on two processes: the bits of a run without rows."""

from __future__ import annotations

from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import exchanged  # noqa: E402
from runtime.ranks import launch  # noqa: E402

pytestmark = pytest.mark.torch


@cache
def results() -> dict[int, dict[str, exchanged.Trained]]:
    return launch(exchanged.run, 2, [*exchanged.WHOLE, *exchanged.PLANS])


@pytest.mark.parametrize("name", exchanged.PLANS)
def test_gradients_are_those_of_whole_exchanges_to_the_bit(name: str) -> None:
    for mine in results().values():
        (losses, grads, ends), (want, other, last) = mine[name], mine[name.partition(",")[0]]
        assert losses == want and grads and grads.keys() == other.keys()
        assert [key for key in grads if not torch.equal(grads[key], other[key])] == []
        assert [key for key in ends if not torch.equal(ends[key], last[key])] == []
