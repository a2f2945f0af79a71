"""PyTorch's own samples of some of the operations that the compiler claims; all: `python tests/compiler/opinfo.py`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")
pytest.importorskip("expecttest", reason="OpInfo needs expecttest")

from compiler import opinfo  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

OPS = ("amax", "logsumexp", "nn.functional.gelu", "var_mean", "where")


@pytest.mark.parametrize("name", OPS)
def test_samples_give_what_eager_gives(name: str) -> None:
    for op in opinfo.operations([name]):
        counts, why = opinfo.tried(op, 2)
        assert counts["by kernels"] > 0, "no kernel was made"
        assert counts["by kernels"] == counts["samples"], (counts, why)


def test_a_kernel_reads_what_only_the_end_needs() -> None:
    """A sum of comparisons down the columns, and a tensor that is read after all rows alone."""

    def function(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        equal = a.eq(b)
        return (w / equal.sum(0, keepdim=True) * equal,)

    inputs = [torch.randn(3, 5), torch.randn(1, 5), torch.randn(1, 5)]
    inputs[0][1] = inputs[1][0]
    assert opinfo.compared(function, inputs) == ("by kernels", "")


def test_a_write_waits_for_readers_of_what_it_changes_only() -> None:
    """In place, as graphs are before they are made functional: the divisor of `div_` is not written."""

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = b * 2 + 1
        inverse = torch.ones(4, 6).div_(b)
        return scaled * inverse, torch.sigmoid(scaled) * a

    assert opinfo.compared(function, [torch.randn(4, 6), torch.rand(4, 6) + 1]) == ("by kernels", "")
