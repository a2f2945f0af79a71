"""Products with sparse weights are those of the widened weight, by each kernel; the fastest is taken."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from gnomon.compiler.kernels import stored, stored_choice, stored_sparse  # noqa: E402
from gnomon.compiler.kernels.lanes import SETS  # noqa: E402
from gnomon.compiler.machine import Machine, this_machine  # noqa: E402
from gnomon.compiler.tiles.tile_cost import Rates  # noqa: E402
from gnomon.storage.n_of_m import NM  # noqa: E402
from gnomon.storage.names import storage_of  # noqa: E402
from gnomon.storage.sparse import Sparse  # noqa: E402

pytestmark = pytest.mark.torch
NAMES = ("2:4", "4:16-bf16", "3:8-int8", "0.9", "0.5-bf16", "0.8-int8", "block:16x16:0.7", "block:32x8:0.5-int8", "1:3")
SHAPES = ((96, 240), (19, 96), (80, 1104))


def rounded(x: torch.Tensor, value: str) -> torch.Tensor:
    """Activations as kernels have them, in double."""
    if value == "int8":
        top = x.abs().amax(-1, keepdim=True)
        return (x * (torch.full_like(top, 127) / top)).round().double() * (top / 127).double()
    return x.bfloat16().double() if value == "bf16" else x.double()


def sparse_of(name: str, shape: tuple[int, int], empty: slice) -> tuple[Sparse, dict[str, np.ndarray], torch.Tensor]:
    """(storage, arrays, what they mean) of random numbers, with outputs that keep nothing."""
    storage = storage_of(name)
    assert isinstance(storage, Sparse)
    weight = torch.randn(shape).numpy()
    if not isinstance(storage, NM):
        weight[empty] = 0
        weight[:, 32:64] = 0
    storage, mask = storage.of_zeros(np.where(storage.mask(np.abs(weight)), weight, np.float32(0)))
    arrays = storage.of_mask(weight, mask)
    return storage, arrays, torch.from_numpy(storage.widen(arrays, shape)).double()


@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_that_of_the_widened_weight(name: str) -> None:
    """Tails of outputs and inputs, rows by ones and by full blocks, parts in which nothing is kept, every kernel."""
    for shape in SHAPES:
        if storage_of(name).refused(shape):
            continue
        storage, arrays, wide = sparse_of(name, shape, slice(0, 16))
        bias = torch.randn(shape[0])
        for kind in (*stored_sparse.kinds_of(storage, shape), "dense"):
            packed = stored.as_kind(arrays, storage, shape, kind, 1 if shape[0] > 80 else 8)  # type: ignore[arg-type]
            if stored.function_of(packed) is None:
                pytest.skip("this machine widens weights")
            for rows in (1, 2, 3, 7, 9, 33):
                x = torch.randn(rows, shape[1])
                got = stored.linear(x, packed, bias)
                wanted = rounded(x, storage.value) @ wide.t() + bias.double()
                assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-5, (kind, shape, rows)
            x = torch.randn(2, 3, shape[1]).bfloat16()
            torch.testing.assert_close(
                stored.linear(x, packed).float(), stored.linear(x.float(), packed), rtol=8e-3, atol=1e-2
            )


def test_what_is_not_finite_stays_in_its_row() -> None:
    if not stored.has_sparse():
        pytest.skip("this machine multiplies sparse weights whole")
    for name in ("4:16-int8", "0.5-bf16", "0.5"):
        shape = (32, 128)
        storage, arrays, _ = sparse_of(name, shape, slice(0))
        for kind in stored_sparse.kinds_of(storage, shape):
            packed = stored.as_kind(arrays, storage, shape, kind)
            x = torch.randn(5, 128)
            x[1] = float("nan")
            got = stored.linear(x, packed)
            assert bool(got[[0, 2, 3, 4]].isfinite().all()) and not bool(got[1].isfinite().any())


def test_without_the_instructions_the_product_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_sparse, "kernel", lambda form: None)
    storage, arrays, wide = sparse_of("2:4-bf16", (40, 192), slice(0))
    packed = stored.repack(arrays, storage, (40, 192))
    x = torch.randn(5, 192)
    assert isinstance(packed, stored.PackedStored) and packed.by == "kernel", "it is laid whole"
    torch.testing.assert_close(stored.linear(x, packed).double(), rounded(x, "bf16") @ wide.t(), rtol=1e-5, atol=1e-5)


RATES = Rates(
    memory_bytes_per_s=2e10, l3_bytes_per_s=1e11, l2_bytes_per_s=2e11, instructions_per_s=5e9, addition_s=1e-9,
    peak_s=1e-9, walk_s=1e-9, task_s=1e-8, gather_s=1e-8,
)  # fmt: skip
MACHINE = Machine(
    isa=this_machine().isa, l1_bytes=32 << 10, l2_bytes=1 << 20, l3_bytes=32 << 20, line_bytes=64, cores=1, model="",
)  # fmt: skip


@pytest.fixture
def widest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions of whole matrices are counted for the set that kernels of sparse ones have, whatever runs this."""
    monkeypatch.setattr(stored_choice, "lanes_of", lambda outputs, bits: SETS[0])


@pytest.mark.usefixtures("widest")
def test_predictions_order_forms_as_their_bytes_and_instructions_do() -> None:
    """One row waits for bytes, so fewer are faster; many rows wait for instructions, so a half that is kept is not
    worth its permutations; what is kept whole is best laid whole."""
    shape = (14336, 4096)

    def at(name: str, rows: int) -> dict[str, float]:
        storage = storage_of(name)
        assert isinstance(storage, Sparse)
        return {str(kind): took for kind, took in stored_choice.predicted(storage, shape, rows, RATES, MACHINE).items()}

    for name in ("2:4", "4:16-bf16", "4:16-int8"):
        one = at(name, 1)
        assert min(one, key=lambda kind: one[kind]) == "n of m"
    many = at("0.5-bf16", 128)
    assert min(many, key=lambda kind: many[kind]) == "dense"
    for name in ("0.05-bf16", "0.05-int8", "0.05"):
        full = at(name, 1)
        assert min(full, key=lambda kind: full[kind]) == "dense", name
    blocks = at("block:16x16:0.9", 8)
    assert min(blocks, key=lambda kind: blocks[kind]) == "blocks"
    for kept in (0.1, 0.4, 0.8):  # the more is kept the longer it takes, but for the whole matrix
        less, more = at(f"{1 - kept:g}-bf16", 8), at(f"{0.95 - kept:g}-bf16", 8)
        assert less["dense"] == more["dense"] and less["listed"] < more["listed"]


@pytest.mark.usefixtures("widest")
def test_a_matrix_among_others_is_read_from_memory() -> None:
    """What a storage takes at one row is its bytes at memory's rate, and in a cache less."""
    shape, held = (4096, 4096), 1e9
    seconds = {
        name: stored_choice.storage_s(storage_of(name), shape, 1, held, RATES, MACHINE)
        for name in ("bf16", "int8", "int4-g64", "4:16-bf16")
    }
    for name, took in seconds.items():
        bytes_s = storage_of(name).bytes(shape) / (1.2 * RATES.memory_bytes_per_s)
        assert bytes_s <= took < 1.6 * bytes_s, name
    assert seconds["bf16"] > seconds["int8"] > seconds["4:16-bf16"] > seconds["int4-g64"]
    assert stored_choice.storage_s(storage_of("int8"), shape, 1, 1e6, RATES, MACHINE) < seconds["int8"]


def test_the_choice_says_what_was_predicted_and_tried() -> None:
    storage, arrays, wide = sparse_of("0.9-int8", (128, 256), slice(0))
    packed = stored.repack(arrays, storage, (128, 256), rows=4)
    if not stored.has_sparse():
        pytest.skip("this machine multiplies sparse weights whole")
    assert packed.choice is not None and packed.choice.why.startswith(f"{packed.choice.form} for 4 rows: predicted ms ")
    assert set(packed.choice.predicted) == {"dense", "listed"}
    x = torch.randn(3, 256)
    wanted = rounded(x, "int8") @ wide.t()
    assert float((stored.linear(x, packed) - wanted).abs().max() / wanted.abs().max()) < 1e-5
