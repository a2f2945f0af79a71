"""Memory for packed weights: zeros that overlap nowhere, begin at lines, and are let go of with the last of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gnomon.compiler.kernels import large_pages, stored  # noqa: E402
from gnomon.compiler.kernels.large_pages import LargePages  # noqa: E402
from gnomon.storage.names import storage_of  # noqa: E402

pytestmark = pytest.mark.torch


def test_tensors_lie_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "REGION", 1 << 20)
    memory = LargePages()
    shapes = [(3, 5), (1,), (1000, 7), (0, 4), (1 << 19,), (1 << 21,), (9,)]  # beyond a region's end, larger than one
    made = [memory.empty(shape, torch.float32) for shape in shapes]
    for number, one in enumerate(made):
        assert one.data_ptr() % large_pages.ALIGNED == 0 or not one.numel()
        assert not one.any()
        one.fill_(number + 1)
    assert [set(one.flatten().tolist()) for one in made] == [
        {n + 1.0} if 0 not in s else set() for n, s in enumerate(shapes)
    ]
    kept = made[-1]
    del memory, made
    assert kept.tolist() == [7.0] * 9  # a region lives as long as one of its tensors


@pytest.mark.parametrize("storage", ["int8", "int4-g32", "bf16"])
def test_a_weight_lies_there_as_it_would_elsewhere(storage: str) -> None:
    weight, memory = torch.randn(40, 64), LargePages()
    form = storage_of(storage)
    how = "bf16" if storage == "bf16" else "int8"
    arrays = form.narrow(weight.numpy())
    plain, there = (stored.repack(arrays, form, (40, 64), how, memory=one) for one in (None, memory))
    assert isinstance(plain, stored.PackedStored) and isinstance(there, stored.PackedStored)
    assert torch.equal(plain.codes, there.codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_whatever_rows_it_is_with(dtype: torch.dtype) -> None:
    """Blocks of rows are cut by how many there are, and panels are brought or found in cache: no sum changes."""
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    packed = stored.pack(torch.randn(16 * 9 + 5, 70), storage_of(name), stored.VALUES[name])
    x = torch.randn(300, 70).to(dtype)
    alone = torch.cat([stored.linear(x[at : at + 1], packed) for at in range(300)])
    for rows in (*range(2, 46), 63, 64, 251, 252, 253, 300):
        assert torch.equal(stored.linear(x[:rows], packed), alone[:rows]), rows
