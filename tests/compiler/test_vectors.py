"""Vectors of cpp/*.h on this machine's instruction set: rounding to bfloat16, exp at its ends, counted rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from compiler.traced import compiled, run, same  # noqa: E402

from gnomon.compiler.tiles.tiling import tiling  # noqa: E402

aten = torch.ops.aten
pytestmark = pytest.mark.torch


def test_floats_are_rounded_to_bfloat16_as_torch_does() -> None:
    torch.manual_seed(0)
    near_ties = torch.tensor([0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x18001], dtype=torch.int32)
    bits = torch.randint(0x00800000, 0x7F7F0000, (4096, 1), dtype=torch.int32) // 65536 * 65536 + near_ties
    bits = torch.cat([bits.flatten(), torch.tensor([0, 0x7F800000, 0x7FC00001], dtype=torch.int32)])
    x = bits.view(torch.float32)
    made = compiled(lambda a: (a * 1.0).abs().to(torch.bfloat16), x)
    run(made, x)
    [got], wanted = run(made, x), x.abs().to(torch.bfloat16)
    assert torch.equal(got[:-1], wanted[:-1]) and got[-1].isnan()
    assert all(made.kept(p) for p in made.program.groups)


def test_exp_reaches_zero_and_infinity() -> None:
    x = torch.tensor([-torch.inf, -1e30, -104.0, -95.0, -80.0, -1e-8, 0.0, 88.5, 89.0, 1e30, torch.inf, torch.nan] * 3)
    same(lambda a: torch.exp(a) * 1.0 + 0.0, x)
    made = compiled(lambda a: torch.exp(a) * 1.0 + 0.0, x)
    run(made, x)
    [y] = run(made, x)
    assert y[0] == y[1] == 0 and y[9] == y[10] == torch.inf
    torch.testing.assert_close(y[4], torch.exp(x[4]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(3, 5, 2, 7), (40, 6, 3, 33), (1, 1, 9, 16), (700, 2, 1, 5)])
def test_rows_of_several_axes_are_counted_as_they_lie(shape: tuple[int, ...]) -> None:
    """No two of these axes are one in all memory; tasks begin in the middle of an axis."""
    torch.manual_seed(0)
    a, b = torch.randn(shape), torch.randn(shape[1], 1, shape[3])
    c = torch.randn(shape[0], 1, shape[2], 1)
    same(lambda a, b, c: (a.transpose(0, 1).contiguous().transpose(0, 1) * b + c) * a, a, b, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("begin", [0, 1, 16, 1008])
def test_results_past_the_caches_and_scratch_anywhere_in_a_page_are_the_same(
    dtype: torch.dtype, begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays begin at several places of a page, rows on a vector's boundary and beside it."""
    torch.manual_seed(0)
    monkeypatch.setattr("gnomon.compiler.tune.tuned.tiling", lambda *given: replace(tiling(*given), past=True))
    for columns in (96, 97):
        x = torch.randn(begin + 40 * columns).to(dtype)[begin:].view(40, columns)
        wanted = torch.softmax(x, -1)
        made = compiled(lambda a: torch.softmax(a, -1), x)
        run(made, x)
        [y] = run(made, x)
        torch.testing.assert_close(y, wanted)
        assert all(made.kept(p) for p in made.program.groups)


def test_the_gradient_of_gelu_is_as_near_to_the_exact_one_as_eagers() -> None:
    ends = torch.tensor([0.0, -0.0, 1e-20, -1e-20, 12.0, -12.0, 100.0, -100.0, torch.nan])
    x = torch.cat([torch.linspace(-9, 9, 20_000), ends])
    gradient = aten.gelu_backward
    made = compiled(gradient, torch.ones_like(x), x)
    run(made, torch.ones_like(x), x)
    [y] = run(made, torch.ones_like(x), x)
    torch.testing.assert_close(y.double(), gradient(torch.ones_like(x).double(), x.double()), rtol=0, atol=5e-7,
                               equal_nan=True)  # fmt: skip
    assert all(made.kept(p) for p in made.program.groups)
