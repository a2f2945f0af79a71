"""Products with stored weights are those of the widened weight and of what activations are rounded to."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from gnomon.compiler import stored  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.storage.names import storage_of  # noqa: E402

pytestmark = pytest.mark.torch
FORMS = (
    ("int4-g64", "int8"), ("int4-g32-zeros", "int8"), ("int8", "int8"), ("ternary-g64", "int8"), ("bf16", "bf16"),
    ("int4-g8", "int8"), ("int4-g24", "int8"), ("int4-g64", "bf16"), ("int4-g32-zeros", "bf16"), ("nf4", "bf16"),
    ("fp32", "fp32"),
)  # fmt: skip
ROWS = (1, 2, 3, 5, 8, 11, 19)


def widened(name: str, weight: torch.Tensor) -> torch.Tensor:
    storage = storage_of(name)
    wide = torch.from_numpy(storage.widen(storage.narrow(weight.numpy()), tuple(weight.shape)))
    return wide if name != "nf4" else wide.clone()


def rounded(x: torch.Tensor, packed: stored.PackedStored) -> torch.Tensor:
    """Activations as the kernel has them, in double."""
    if packed.form.activations != "int8":
        return (x.bfloat16() if packed.form.activations == "bf16" else x).double()
    groups = x.view(len(x), -1, packed.form.group or x.shape[1])
    top = groups.abs().amax(-1, keepdim=True)
    codes = (groups * (torch.full_like(top, 127) / top)).round()
    return torch.where(top > 0, codes.double() * (top / 127).double(), 0.0).view(x.shape)


@pytest.mark.parametrize(("name", "activations"), FORMS)
def test_a_product_is_that_of_the_widened_weight(name: str, activations: stored.Activations) -> None:
    """Tails of outputs and inputs, one row and blocks of rows that are not full, bfloat16 in and out, a bias."""
    for n, k in ((48, 192), (19, {"int8": 77, "int4-g24": 120}.get(name, 128))):
        weight, bias = torch.randn(n, k), torch.randn(n)
        packed = stored.pack(weight, storage_of(name), activations)
        if packed.by != "kernel":
            pytest.skip("this machine widens weights")
        wide = widened(name, weight).double()
        near = 4e-3 if name == "nf4" else 1e-5
        for m in ROWS:
            x = torch.randn(m, k)
            x[0, :64] = 0
            got = stored.linear(x, packed, bias)
            wanted = rounded(x, packed) @ wide.t() + bias.double()
            assert float((got - wanted).abs().max() / wanted.abs().max()) < near, (n, k, m)
        x = torch.randn(2, 3, k).bfloat16()
        torch.testing.assert_close(
            stored.linear(x, packed).float(), stored.linear(x.float(), packed), rtol=8e-3, atol=1e-2
        )


def test_a_number_that_is_none_makes_its_row_none_and_no_other() -> None:
    packed = stored.pack(torch.randn(32, 128), storage_of("int4-g64"))
    x = torch.randn(3, 128)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[1, 70] = bad
        got = stored.linear(x, packed)
        assert bool(got[0].isfinite().all()) and bool(got[2].isfinite().all()) and not bool(got[1].isfinite().any())


def test_no_rows_no_outputs_and_rows_that_lie_apart() -> None:
    packed = stored.pack(torch.randn(32, 128), storage_of("int4-g64"))
    assert stored.linear(torch.empty(0, 128), packed).shape == (0, 32)
    x = torch.randn(4, 300)[:, 7:135]
    torch.testing.assert_close(stored.linear(x, packed), stored.linear(x.contiguous(), packed))
    torch.testing.assert_close(stored.linear(x.t().contiguous().t(), packed), stored.linear(x.contiguous(), packed))


def test_without_the_instructions_the_product_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(40, 192), torch.randn(5, 192)
    monkeypatch.setattr(stored, "kernel", lambda form: None)
    for name in ("int4-g64", "ternary-g64", "bf16"):
        packed = stored.pack(weight, storage_of(name), "bf16" if name == "bf16" else "int8")
        assert packed.by == "widened"
        torch.testing.assert_close(stored.linear(x, packed), x @ widened(name, weight).t())


@pytest.mark.parametrize("name", ["q4_k", "fp8", "int4-g20"])
def test_what_no_kernel_multiplies_by_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        stored.form_of(storage_of(name))
    with pytest.raises(InputError, match="columns"):
        stored.pack(torch.randn(8, 100), storage_of("int4-g64"))
    with pytest.raises(InputError, match="128"):
        stored.linear(torch.randn(2, 64), stored.pack(torch.randn(16, 128), storage_of("int4-g64")))
