"""Products with stored weights are those of the widened weight and of what activations are rounded to."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from gnomon.compiler import machine  # noqa: E402
from gnomon.compiler.kernels import lanes, stored  # noqa: E402
from gnomon.compiler.machine import has_features  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.storage.dense import Dense  # noqa: E402
from gnomon.storage.integers import Integers  # noqa: E402
from gnomon.storage.names import storage_of  # noqa: E402

pytestmark = pytest.mark.torch
OTHERS = {
    "avx512": ("int4-g64", "int4-g32-zeros bf16", "int8", "fp32"),
    "avx2": ("int4-g24", "int8", "nf4 bf16", "bf16"),
    "avx2_vnni": ("int4-g32-zeros",),
    "generic": ("ternary-g64", "int4-g32-zeros bf16"),
}
"""A sample of forms for each set of instructions, of all of benchmarks/lowbit/forms.py."""
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


def laid_for(one: lanes.Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has weights laid for a set of instructions. AVX-VNNI's dot products are AVX-512 VL's in another encoding, which
    more machines run."""
    if one.name == "avx2_vnni":
        one = replace(one, dots=frozenset({"avx512vl", "avx512_vnni"}), flags="-mavx512vl -mavx512vnni")
    if not has_features(one.needed(8)):
        pytest.skip(f"this machine has no {one.name}")
    monkeypatch.setattr(stored, "lanes_of", lambda outputs, bits: one)


@pytest.mark.parametrize(("set_", "form"), [(one, form) for one, forms in OTHERS.items() for form in forms])
def test_every_instruction_set_multiplies_alike(set_: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_for(next(one for one in lanes.SETS if one.name == set_), monkeypatch)
    name, _, how = form.partition(" ")
    check(name, how or stored.VALUES.get(name, "int8"))


def check(name: str, activations: stored.Activations) -> None:
    """A product is that of the widened weight: tails of outputs and inputs, one row and blocks of rows that are not
    full, bfloat16 in and out, a bias."""
    for n, k in ((48, 192), (19, {"int8": 77, "int4-g24": 120}.get(name, 128))):
        weight, bias = torch.randn(n, k), torch.randn(n)
        packed = stored.pack(weight, storage_of(name), activations)
        assert isinstance(packed, stored.PackedStored)
        if packed.by != "kernel":
            pytest.skip("this machine has no compiler")
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


@pytest.mark.parametrize("name", ["int8", "int8-g64", "int4-g8", "int4-g24", "int4-g128", "float32 scales"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pass_rounds_and_lays_as_numpy_does(name: str, dtype: torch.dtype) -> None:
    """Bit for bit: matrices one below the other, tails of panels and steps, zeros, scales that float16 has as 0."""
    storage = storage_of(name) if name != "float32 scales" else Integers(bits=8, group=0, scale="float32")
    for n, k in ((16, 384), (35, 384), *(() if storage.group else ((5, 77), (20, 36)))):
        weight = torch.randn(n, k) * torch.randn(n, 1).exp()
        weight[0], weight[3, : k // 2] = 0, weight[3, : k // 2] * 1e-9
        weight = weight.to(dtype)
        made = stored.round_parts(weight.split([n // 3, n - n // 3]), storage)
        if made is None:
            pytest.skip("this machine widens weights")
        wanted = stored.repack(storage.narrow(weight.float().numpy()), storage, (n, k))
        assert torch.equal(made.codes, wanted.codes) and torch.equal(made.scales, wanted.scales)
        assert made.scales.dtype == wanted.scales.dtype


@pytest.mark.parametrize("name", ["bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_are_laid_as_if_they_were_one(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, of any dtype, also of matrices that are turned; rows that end within a panel are left to others."""
    numbers = storage_of(name)
    assert isinstance(numbers, Dense)
    parts = [torch.randn(32, 96).to(dtype), torch.randn(96, 64).to(dtype).T]
    made = stored.lay_parts(parts, numbers)
    if made is None:
        pytest.skip("this machine widens weights")
    whole = torch.cat(parts).to(torch.bfloat16 if name == "bf16" else torch.float32)
    bits = whole.view(torch.int16 if name == "bf16" else torch.int32).numpy()
    wanted = stored.repack({"values": bits}, numbers, (96, 96), stored.VALUES[name])
    assert isinstance(wanted, stored.PackedStored) and torch.equal(made.codes, wanted.codes)
    assert made.form == wanted.form
    assert stored.lay_parts([parts[0][:7], parts[1]], numbers) is None


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


def test_a_shape_is_laid_for_the_set_that_it_fills() -> None:
    """Of a machine with both, 24 outputs fill three registers of 8 lanes, and of 16 they would fill one and a half;
    where a narrower set takes more instructions for the same lanes it is not taken."""
    if not has_features(lanes.SETS[0].needed(8)):
        pytest.skip("this machine has one set")
    assert [lanes.lanes_of(outputs, 32).side for outputs in (8, 16, 24, 4096)] == [8, 16, 8, 16]
    assert lanes.lanes_of(4096, 8).side == 16
    weight, x = torch.randn(24, 96), torch.randn(3, 96)
    packed = stored.pack(weight, storage_of("fp32"), "fp32")
    assert isinstance(packed, stored.PackedStored) and packed.codes.shape == (3, 96, 32)
    torch.testing.assert_close(stored.linear(x, packed), x @ weight.t())
    torch.testing.assert_close(stored.rows_of(packed, torch.tensor([23, 0])), weight[[23, 0]])


def test_a_set_that_is_asked_for_is_one_that_the_processor_has() -> None:
    flags = frozenset({"avx2", "fma", "f16c", "bmi2"})
    assert machine._asked_set(None, flags).name == machine._asked_set("avx2", flags).name == "avx2"
    assert machine._asked_set("generic", flags).name == "generic"
    for wrong in ("avx512", "avx9"):
        with pytest.raises(InputError, match=f"{wrong} is no instruction set that this processor has; it has avx2,"):
            machine._asked_set(wrong, flags)


@pytest.mark.parametrize("name", ["q4_k", "fp8", "int4-g20"])
def test_what_no_kernel_multiplies_by_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        stored.form_of(storage_of(name))
    with pytest.raises(InputError, match="columns"):
        stored.pack(torch.randn(8, 100), storage_of("int4-g64"))
    with pytest.raises(InputError, match="128"):
        stored.linear(torch.randn(2, 64), stored.pack(torch.randn(16, 128), storage_of("int4-g64")))
